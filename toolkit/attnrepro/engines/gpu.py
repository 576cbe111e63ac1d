"""How a GPU gets into a closed container, decided from what is there and what the engine offers.

NVIDIA: CDI first (one declared list of nodes and files), the nvidia runtime second, explicit device
nodes with the driver's files third. ROCm: the kernel's compute and render nodes with their groups.
All functions here are pure; `engines.gpuhost` reads the machine.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Final

from attnrepro.errors import Unavailable, UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from attnrepro.engines.cdi import CdiSpec

LIBRARY_TARGET: Final = "/usr/local/nvidia/lib64"
"""Where the driver's libraries stand in a container when we mount them one by one."""

CONTROL_NODES: Final = ("/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia-uvm-tools")


class GpuVendor(StrEnum):
    """Whose device."""

    NVIDIA = "nvidia"
    ROCM = "rocm"


class GpuMode(StrEnum):
    """By which door the device enters."""

    CDI = "cdi"
    RUNTIME = "nvidia-runtime"
    NODES = "nodes"
    ROCM = "rocm-nodes"


@dataclass(frozen=True, kw_only=True)
class GpuAccess:
    """What an engine must add to a container for one device, and nothing else."""

    mode: GpuMode
    device_id: str
    """Names the device on this machine (UUID where known): key of its lock."""
    cdi_names: tuple[str, ...] = ()
    """Fully qualified CDI devices, as `nvidia.com/gpu=0`."""
    runtime_ids: tuple[str, ...] = ()
    """Device ids of a Docker DeviceRequest to the nvidia driver."""
    nodes: tuple[str, ...] = ()
    """Device nodes, the same path inside and outside."""
    mounts: tuple[tuple[str, str], ...] = ()
    """Read-only (host path, container path) pairs: the driver's files."""
    groups: tuple[int, ...] = ()
    """Supplementary groups that may open the nodes."""
    library_path: tuple[str, ...] = ()
    """Folders for LD_LIBRARY_PATH inside the container."""
    visible: Mapping[str, str] = field(default_factory=dict)
    """Without a container: variables by which a framework sees this device alone."""
    facts: Mapping[str, str] = field(default_factory=dict)
    """Driver version, spec file, and why an earlier door was not taken."""


@dataclass(frozen=True, kw_only=True)
class DeviceChoice:
    """`--device`, parsed: `nvidia`, `nvidia:1`, `nvidia:GPU-…`, `rocm:0`."""

    vendor: GpuVendor
    which: str
    """Index or UUID."""


@dataclass(frozen=True, kw_only=True)
class NvidiaDevice:
    """One NVIDIA GPU of this machine, in PCI order."""

    index: int
    node: str
    """`/dev/nvidia` and the minor number, which is not always the index."""
    uuid: str | None


@dataclass(frozen=True, kw_only=True)
class GpuHost:
    """What the machine has; `engines.gpuhost.read` fills it."""

    nvidia: tuple[NvidiaDevice, ...] = ()
    control_nodes: tuple[str, ...] = ()
    driver_version: str | None = None
    driver_folder: str | None = None
    """A folder that holds the whole driver (lib64/, bin/), mounted as one."""
    libraries: tuple[tuple[str, str], ...] = ()
    """(name that programs ask for, real file) of each library, where there is no such folder."""
    cdi: tuple[CdiSpec, ...] = ()
    cdi_problems: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Per spec file: what is stale or missing in it."""
    render_nodes: tuple[str, ...] = ()
    """`/dev/dri/renderD*`, in order."""
    kfd: str | None = None
    node_groups: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class EngineDoors:
    """What an engine offers for devices."""

    cdi: bool
    cdi_reason: str = ""
    """Why not, where not."""
    nvidia_runtime: bool


def parse_device(text: str) -> DeviceChoice | None:
    """Parse `--device`; None means the CPU. Raises UsageError."""
    vendor, _, which = text.partition(":")
    if vendor == "cpu" and not which:
        return None
    which = which or "0"
    if vendor in tuple(GpuVendor) and (
        which.isdecimal() or (which.startswith("GPU-") and which.replace("-", "").isalnum())
    ):
        return DeviceChoice(vendor=GpuVendor(vendor), which=which)
    message = f"{text!r} is not a device"
    raise UsageError(message, hint="use cpu, nvidia, nvidia:1, nvidia:GPU-<uuid>, rocm or rocm:1")


def resolve(choice: DeviceChoice, host: GpuHost, doors: EngineDoors) -> GpuAccess:
    """Decide how the chosen device enters a container. Raises Unavailable with what is missing."""
    if choice.vendor is GpuVendor.ROCM:
        return _rocm(choice, host)
    device = _nvidia_device(choice, host)
    reasons: dict[str, str] = {}
    access = _cdi(device, host, doors, reasons)
    if access is None and doors.nvidia_runtime:
        access = GpuAccess(
            mode=GpuMode.RUNTIME,
            device_id=device.uuid or device.node,
            runtime_ids=(device.uuid or str(device.index),),
        )
    elif access is None:
        reasons["nvidia-runtime"] = "the engine has no nvidia runtime"
        access = _nodes(device, host, reasons)
    facts = {"gpu_mode": access.mode.value, **access.facts}
    if host.driver_version:
        facts["driver"] = host.driver_version
    facts |= {f"not_{door}": reason for door, reason in reasons.items()}
    visible = {
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "CUDA_VISIBLE_DEVICES": device.uuid or str(device.index),
    }
    return replace(access, visible=visible, facts=facts)


def _nvidia_device(choice: DeviceChoice, host: GpuHost) -> NvidiaDevice:
    for device in host.nvidia:
        if choice.which in (str(device.index), device.uuid):
            return device
    there = ", ".join(f"nvidia:{d.index}" for d in host.nvidia) or "no NVIDIA device"
    message = f"there is no device nvidia:{choice.which}; this machine has {there}"
    raise Unavailable(message, hint="attnrepro doctor shows the devices and what they lack")


def _cdi(
    device: NvidiaDevice, host: GpuHost, doors: EngineDoors, reasons: dict[str, str]
) -> GpuAccess | None:
    if not doors.cdi:
        reasons["cdi"] = doors.cdi_reason or "the engine has no CDI"
        return None
    specs = [spec for spec in host.cdi if spec.kind == "nvidia.com/gpu"]
    reasons["cdi"] = "no CDI spec of kind nvidia.com/gpu in /etc/cdi or /var/run/cdi"
    for spec in specs:
        problems = host.cdi_problems.get(spec.path, ())
        if problems:
            reasons["cdi"] = f"{spec.path}: {problems[0]}"
            continue
        name = spec.device_for(node=device.node, names=(device.uuid, str(device.index)))
        if name is None:
            reasons["cdi"] = f"{spec.path} has no device for {device.node}"
            continue
        del reasons["cdi"]
        return GpuAccess(
            mode=GpuMode.CDI,
            device_id=device.uuid or device.node,
            cdi_names=(f"{spec.kind}={name}",),
            library_path=spec.library_path,
            # A UUID names one device of the world; an artifact has its keyed digest alone.
            facts={"cdi_spec": spec.path, "cdi_device": "by UUID" if name == device.uuid else name},
        )
    return None


def _nodes(device: NvidiaDevice, host: GpuHost, reasons: Mapping[str, str]) -> GpuAccess:
    if host.driver_folder:
        mounts: tuple[tuple[str, str], ...] = ((host.driver_folder, host.driver_folder),)
        library_path = (f"{host.driver_folder}/lib64",)
    elif host.libraries:
        mounts = tuple((path, f"{LIBRARY_TARGET}/{name}") for name, path in host.libraries)
        library_path = (LIBRARY_TARGET,)
    else:
        message = f"{device.node} is there, but libcuda.so.1 was not found on this machine"
        hint = "install the NVIDIA driver's libraries, or write a CDI spec; " + "; ".join(
            reasons.values()
        )
        raise Unavailable(message, hint=hint)
    missing = [node for node in CONTROL_NODES[:2] if node not in host.control_nodes]
    if missing:
        message = f"the device node {missing[0]} is missing"
        raise Unavailable(message, hint="run nvidia-modprobe -u -c 0 as root")
    return GpuAccess(
        mode=GpuMode.NODES,
        device_id=device.uuid or device.node,
        nodes=(device.node, *host.control_nodes),
        mounts=mounts,
        library_path=library_path,
    )


def _rocm(choice: DeviceChoice, host: GpuHost) -> GpuAccess:
    if host.kfd is None:
        message = "there is no ROCm device: /dev/kfd is missing"
        raise Unavailable(message, hint="load the amdgpu kernel driver")
    if not choice.which.isdecimal() or int(choice.which) >= len(host.render_nodes):
        message = f"there is no device rocm:{choice.which}; render nodes: {len(host.render_nodes)}"
        raise Unavailable(message, hint="attnrepro doctor shows the devices")
    node = host.render_nodes[int(choice.which)]
    nodes = (host.kfd, node)
    groups = tuple(sorted({host.node_groups[n] for n in nodes if host.node_groups.get(n)}))
    return GpuAccess(
        mode=GpuMode.ROCM,
        device_id=node,
        nodes=nodes,
        groups=groups,
        visible={"ROCR_VISIBLE_DEVICES": choice.which},
        facts={"gpu_mode": GpuMode.ROCM.value},
    )
