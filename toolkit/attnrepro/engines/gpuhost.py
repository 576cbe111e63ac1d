"""Read what GPUs, drivers and CDI specs this machine has. Nothing is changed or opened for use.

Paths are read below a `root`, so that recorded layouts can be tested.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Final

from attnrepro.engines import cdi
from attnrepro.engines.gpu import CONTROL_NODES, GpuHost, NvidiaDevice

if TYPE_CHECKING:
    from collections.abc import Iterator

DRIVER_FOLDERS: Final = ("/usr/local/nvidia",)
"""Folders in which some hosts keep the whole driver (lib64/, bin/)."""
LIBRARY_FOLDERS: Final = (
    "/usr/lib/x86_64-linux-gnu",
    "/usr/lib64",
    "/usr/lib/x86_64-linux-gnu/nvidia/current",
)
DRIVER_LIBRARIES: Final = (
    "libcuda.so.1",
    "libcudadebugger.so.1",
    "libnvidia-ml.so.1",
    "libnvidia-nvvm.so.4",
    "libnvidia-ptxjitcompiler.so.1",
    "libnvidia-gpucomp.so",
)

_MINOR: Final = re.compile(r"^Device Minor:\s*(\d+)", re.MULTILINE)
_UUID: Final = re.compile(r"^GPU UUID:\s*(GPU-[0-9a-f-]+)", re.MULTILINE)
_KERNEL_VERSION: Final = re.compile(r"Kernel Module(?: for \S+)?\s+(\d+\.\d+(?:\.\d+)?)")


def read(root: Path = Path("/")) -> GpuHost:
    """Devices, driver version and files, CDI specs with what is stale in them."""
    version = driver_version(root)
    specs, problems = cdi.load_specs(root)
    for spec in specs:
        if found := cdi.check_spec(spec, driver_version=version, root=root):
            problems[spec.path] = found
    folder = _driver_folder(root)
    kfd = "/dev/kfd" if _at(root, "/dev/kfd").exists() else None
    render = _numbered(root, "/dev/dri", "renderD") if kfd else ()
    return GpuHost(
        nvidia=nvidia_devices(root),
        control_nodes=tuple(n for n in CONTROL_NODES if _at(root, n).exists()),
        driver_version=version,
        driver_folder=folder,
        libraries=() if folder else tuple(_libraries(root)),
        cdi=specs,
        cdi_problems=problems,
        render_nodes=render,
        kfd=kfd,
        node_groups={n: _at(root, n).stat().st_gid for n in (*render, *((kfd,) if kfd else ()))},
    )


def driver_version(root: Path = Path("/")) -> str | None:
    """Version of the loaded NVIDIA kernel module; None where there is none."""
    try:
        text = _at(root, "/proc/driver/nvidia/version").read_text(encoding="utf-8")
    except OSError:
        return _version_by_file(root)
    match = _KERNEL_VERSION.search(text)
    return match[1] if match else None


def nvidia_devices(root: Path = Path("/")) -> tuple[NvidiaDevice, ...]:
    """List the GPUs in PCI order, which is nvidia-smi's."""
    nodes = _numbered(root, "/dev", "nvidia")
    folder = _at(root, "/proc/driver/nvidia/gpus")
    by_node: dict[str, str | None] = {}
    for entry in sorted(folder.iterdir()) if folder.is_dir() else ():
        try:
            text = (entry / "information").read_text(encoding="utf-8")
        except OSError:
            continue
        minor, uuid = _MINOR.search(text), _UUID.search(text)
        if minor and f"/dev/nvidia{minor[1]}" in nodes:
            by_node[f"/dev/nvidia{minor[1]}"] = uuid[1] if uuid else None
    # Some sandboxes show the nodes without the driver's /proc: then the order is the nodes' own.
    by_node = by_node or dict.fromkeys(nodes)
    return tuple(
        NvidiaDevice(index=index, node=node, uuid=uuid)
        for index, (node, uuid) in enumerate(by_node.items())
    )


def _version_by_file(root: Path) -> str | None:
    if not _numbered(root, "/dev", "nvidia"):
        return None
    for folder in (*(f"{d}/lib64" for d in DRIVER_FOLDERS), *LIBRARY_FOLDERS):
        for path in sorted(_at(root, folder).glob("libcuda.so.*.*")):
            return path.name.removeprefix("libcuda.so.")
    return None


def _driver_folder(root: Path) -> str | None:
    for folder in DRIVER_FOLDERS:
        if _at(root, f"{folder}/lib64/libcuda.so.1").exists():
            return folder
    return None


def _libraries(root: Path) -> Iterator[tuple[str, str]]:
    for name in DRIVER_LIBRARIES:
        for folder in LIBRARY_FOLDERS:
            found = sorted(_at(root, folder).glob(f"{name}*")) if name.endswith(".so") else ()
            path = found[0] if found else _at(root, f"{folder}/{name}")
            if path.exists():
                yield path.name, "/" + str(path.resolve().relative_to(root.resolve()))
                break


def _numbered(root: Path, folder: str, prefix: str) -> tuple[str, ...]:
    place = _at(root, folder)
    if not place.is_dir():
        return ()
    names = [p.name for p in place.iterdir() if re.fullmatch(rf"{prefix}\d+", p.name)]
    return tuple(f"{folder}/{n}" for n in sorted(names, key=lambda n: int(n[len(prefix) :])))


def _at(root: Path, path: str) -> Path:
    return root / path.lstrip("/")
