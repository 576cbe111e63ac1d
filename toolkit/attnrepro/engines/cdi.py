"""Container Device Interface specs: read, check for staleness, and write one where none is.

Format: https://github.com/cncf-tags/container-device-interface/blob/main/SPEC.md
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, Final

from attnrepro.engines.gpu import LIBRARY_TARGET
from attnrepro.errors import InvalidDocument, Unavailable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from attnrepro.engines.gpu import GpuHost
    from attnrepro.jsonio import JsonObject

CDI_FOLDERS: Final = ("/etc/cdi", "/var/run/cdi")
DRIVER_VARIABLE: Final = "ATTNREPRO_CDI_DRIVER"
"""Set by specs that we write: the driver version that they were written for."""

# 0.5.0 is the first version whose device names may begin with a digit, and podman 4.3 reads it.
_CDI_VERSION: Final = "0.5.0"
_LIBRARY_VERSION: Final = re.compile(r"/libcuda\.so\.(\d+\.\d+(?:\.\d+)?)$")


@dataclass(frozen=True, kw_only=True)
class CdiDevice:
    """One device of a spec."""

    name: str
    nodes: tuple[str, ...]
    """Host paths of its device nodes."""


@dataclass(frozen=True, kw_only=True)
class CdiSpec:
    """One spec file, as far as it matters to us."""

    path: str
    kind: str
    devices: tuple[CdiDevice, ...]
    host_paths: tuple[str, ...]
    """Every device node and mount source it names."""
    mounts: tuple[tuple[str, str], ...]
    """(host path, container path)."""
    environment: tuple[str, ...]

    def device_for(self, *, node: str, names: Sequence[str | None]) -> str | None:
        """Name of the device that is exactly this node, preferring the given names."""
        own = [d.name for d in self.devices if _gpu_nodes(d.nodes) == {node}]
        return next((n for n in names if n in own), own[0] if own else None)

    @property
    def library_path(self) -> tuple[str, ...]:
        """Folders of LD_LIBRARY_PATH that the spec itself sets."""
        for entry in self.environment:
            name, _, value = entry.partition("=")
            if name == "LD_LIBRARY_PATH":
                return tuple(value.split(":"))
        return ()

    @property
    def driver_version(self) -> str | None:
        """The driver version the spec was written for, where it tells."""
        for entry in self.environment:
            name, _, value = entry.partition("=")
            if name == DRIVER_VARIABLE:
                return value
        for path in self.host_paths:
            if match := _LIBRARY_VERSION.search(path):
                return match[1]
        return None


def load_specs(root: Path = Path("/")) -> tuple[tuple[CdiSpec, ...], dict[str, tuple[str, ...]]]:
    """Read every spec of the standard folders below `root`.

    Returns the readable specs, and per unreadable file what is wrong with it.
    """
    specs: list[CdiSpec] = []
    problems: dict[str, tuple[str, ...]] = {}
    for folder in CDI_FOLDERS:
        place = root / folder.lstrip("/")
        for path in sorted(place.iterdir()) if place.is_dir() else ():
            if path.suffix not in (".json", ".yaml", ".yml"):
                continue
            shown = "/" + str(path.relative_to(root))
            try:
                specs.append(parse_spec(path.read_text(encoding="utf-8"), shown))
            except (InvalidDocument, OSError, UnicodeDecodeError) as error:
                problems[shown] = (f"cannot be read: {error}",)
    return tuple(specs), problems


def parse_spec(text: str, path: str) -> CdiSpec:
    """Parse a spec, JSON or YAML by its file name. Raises InvalidDocument."""
    try:
        if path.endswith(".json"):
            document = json.loads(text)
        else:
            import yaml  # only GPU hosts with nvidia-ctk's YAML specs need it

            document = yaml.safe_load(text)
        return _spec(document, path)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        message = f"{path} is not a CDI spec: {error!r}"
        raise InvalidDocument(message) from None
    except Exception as error:
        if type(error).__module__.startswith("yaml"):
            message = f"{path} is not YAML: {error}"
            raise InvalidDocument(message) from None
        raise


def _spec(document: Any, path: str) -> CdiSpec:
    edits = [document.get("containerEdits") or {}]
    devices = []
    for entry in document["devices"]:
        own = entry.get("containerEdits") or {}
        edits.append(own)
        nodes = tuple(n.get("hostPath") or n["path"] for n in own.get("deviceNodes") or ())
        devices.append(CdiDevice(name=str(entry["name"]), nodes=nodes))
    mounts = tuple(
        (m["hostPath"], m["containerPath"]) for e in edits for m in e.get("mounts") or ()
    )
    nodes_all = [n.get("hostPath") or n["path"] for e in edits for n in e.get("deviceNodes") or ()]
    return CdiSpec(
        path=path,
        kind=str(document["kind"]),
        devices=tuple(devices),
        host_paths=tuple(dict.fromkeys([*nodes_all, *(host for host, _ in mounts)])),
        mounts=mounts,
        environment=tuple(str(v) for e in edits for v in e.get("env") or ()),
    )


def check_spec(
    spec: CdiSpec, *, driver_version: str | None, root: Path = Path("/")
) -> tuple[str, ...]:
    """List what is stale in a spec: paths that are gone, another driver. Empty is good."""
    problems = [
        f"{path} is named by the spec and does not exist"
        for path in spec.host_paths
        if not (root / path.lstrip("/")).exists()
    ]
    stated = spec.driver_version
    if stated and driver_version and stated != driver_version:
        problems.append(f"written for driver {stated}, but {driver_version} is loaded")
    return tuple(problems)


def make_spec(host: GpuHost) -> JsonObject:
    """Describe every NVIDIA device of this machine, each alone and together as `all`.

    The driver's folder is mounted where there is one, else its libraries one by one, always
    read-only. Raises Unavailable where there is nothing to describe.
    """
    if not host.nvidia:
        message = "no NVIDIA device node (/dev/nvidia0) on this machine"
        raise Unavailable(
            message, hint="load the driver first; attnrepro doctor says what is there"
        )
    options = ["ro", "nosuid", "nodev", "bind"]
    if host.driver_folder:
        mounts = [
            {
                "hostPath": host.driver_folder,
                "containerPath": host.driver_folder,
                "options": [*options, "rbind"],
            }
        ]
        library_path = f"{host.driver_folder}/lib64"
    elif host.libraries:
        mounts = [
            {"hostPath": path, "containerPath": f"{LIBRARY_TARGET}/{name}", "options": options}
            for name, path in host.libraries
        ]
        library_path = LIBRARY_TARGET
    else:
        message = "the driver's libraries (libcuda.so.1) were not found on this machine"
        raise Unavailable(message, hint="install the NVIDIA driver's user-space libraries")
    environment = [f"LD_LIBRARY_PATH={library_path}"]
    if host.driver_version:
        environment.append(f"{DRIVER_VARIABLE}={host.driver_version}")
    devices = []
    for device in host.nvidia:
        edits = {"deviceNodes": [{"path": device.node}]}
        devices.append({"name": str(device.index), "containerEdits": edits})
        if device.uuid:
            devices.append({"name": device.uuid, "containerEdits": edits})
    everything = {"deviceNodes": [{"path": device.node} for device in host.nvidia]}
    devices.append({"name": "all", "containerEdits": everything})
    return {
        "cdiVersion": _CDI_VERSION,
        "kind": "nvidia.com/gpu",
        "devices": devices,
        "containerEdits": {
            "deviceNodes": [{"path": node} for node in host.control_nodes],
            "mounts": mounts,
            "env": environment,
        },
    }


def write_spec(host: GpuHost, path: Path) -> JsonObject:
    """Write `make_spec` to a file, atomically; returns it. Raises Unavailable."""
    from attnrepro.files import atomic_write

    document = make_spec(host)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        atomic_write(path, (json.dumps(document, indent=2, sort_keys=True) + "\n").encode())
    except OSError as error:
        message = f"cannot write {path}: {error.strerror}"
        raise Unavailable(
            message, hint=f"run it as root: sudo attnrepro doctor --write-cdi {path}"
        ) from None
    return document


def _gpu_nodes(nodes: Sequence[str]) -> set[str]:
    return {n for n in nodes if re.fullmatch(r"nvidia\d+", PurePosixPath(n).name)}
