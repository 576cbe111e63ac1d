"""doctor's checks of GPUs: driver against CUDA, CDI, NVML, other processes, ROCm nodes."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal

from attnrepro.engines import cdi, gpuhost

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from attnrepro.engines.gpu import EngineDoors, GpuHost

CUDA_DRIVERS: Final = (
    ("12.0", (525, 60, 13)),
    ("12.1", (530, 30, 2)),
    ("12.2", (535, 54, 3)),
    ("12.3", (545, 23, 6)),
    ("12.4", (550, 54, 14)),
    ("12.5", (555, 42, 2)),
    ("12.6", (560, 28, 3)),
    ("12.8", (570, 26)),
    ("12.9", (575, 51, 3)),
    ("13.0", (580, 65, 6)),
    ("13.1", (590, 44, 1)),
)
"""CUDA release, and the first Linux driver that carries it whole.

https://docs.nvidia.com/cuda/cuda-toolkit-release-notes/ "CUDA Toolkit and Corresponding Driver
Versions". An older driver of the same CUDA major still runs it by minor-version compatibility: from
525 on for 12.x, from 580 on for 13.x; without new driver functions, and code that only carries PTX
of the newer release does not start.
"""

_FIRST_OF_MAJOR: Final = {"12": (525, 60, 13), "13": (580, 65, 6)}


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One finding, with a level of `checks.Level`."""

    id: str
    level: Literal["ok", "note", "warn", "missing"]
    found: str
    fix: str | None = None


def version_of(text: str) -> tuple[int, ...]:
    """Parse a driver version: "580.95.05" is (580, 95, 5)."""
    return tuple(int(part) for part in text.split(".") if part.isdecimal())


def cuda_of(driver: str) -> str | None:
    """Name the newest CUDA release that a driver carries whole; None before 12.0."""
    version = version_of(driver)
    carried = [cuda for cuda, least in CUDA_DRIVERS if version >= least]
    return carried[-1] if carried else None


def runs_cuda(driver: str, cuda: str) -> str:
    """Tell how a driver runs a CUDA release: `whole`, `minor` (compatibility), or `no`."""
    version, major = version_of(driver), cuda.split(".")[0]
    for name, least in CUDA_DRIVERS:
        if name == cuda and version >= least:
            return "whole"
    carried = cuda_of(driver)
    if carried is not None and version_of(carried) >= version_of(cuda):
        return "whole"
    first = _FIRST_OF_MAJOR.get(major)
    return "minor" if first is not None and version >= first else "no"


def findings(root: Path, doors: Sequence[EngineDoors]) -> Iterator[Finding]:
    """Look at the machine's GPUs; `doors` is what its engines offer."""
    host = gpuhost.read(root)
    if not host.nvidia and host.kfd is None:
        yield Finding(id="gpu", level="note", found="none; CPU manifests run")
        return
    if host.nvidia:
        yield from nvidia(host, doors)
        if str(root) == "/":
            yield from nvml()
    if host.kfd is not None:
        yield from rocm(host, set(os.getgroups()) | {os.getgid()}, os.getuid())


def nvidia(host: GpuHost, doors: Sequence[EngineDoors]) -> Iterator[Finding]:
    """Devices, driver, and the door by which they would enter a container."""
    names = ", ".join(f"nvidia:{d.index} {d.uuid or d.node}" for d in host.nvidia)
    yield Finding(id="gpu.devices", level="ok", found=names)
    if host.driver_version is None:
        fix = "load the driver: modprobe nvidia, as root"
        yield Finding(id="gpu.driver", level="missing", found="version unknown", fix=fix)
    else:
        yield driver(host.driver_version)
    if len(host.control_nodes) < 2:
        fix = "nvidia-modprobe -u -c 0, as root"
        found = f"only {', '.join(host.control_nodes) or 'none'} of the control nodes"
        yield Finding(id="gpu.nodes", level="missing", found=found, fix=fix)
    yield from cdi_findings(host, doors)


def driver(version: str) -> Finding:
    """Judge a driver version against the CUDA releases of the stacks."""
    carried = cuda_of(version)
    how13 = runs_cuda(version, "13.0")
    found = f"{version}: CUDA {carried or 'older than 12.0'} whole"
    if how13 == "no":
        fix = (
            "install driver ≥ 580.65.06 for the CUDA 13.0 stacks; CUDA 12.8 stacks need ≥ 525.60.13"
        )
        level: Literal["warn", "missing"] = "missing" if carried is None else "warn"
        return Finding(id="gpu.driver", level=level, found=f"{found}, 13.x not", fix=fix)
    return Finding(
        id="gpu.driver", level="ok", found=f"{found}, newer 13.x by minor-version compatibility"
    )


def cdi_findings(host: GpuHost, doors: Sequence[EngineDoors]) -> Iterator[Finding]:
    """Judge every CDI spec, and whether an engine would use it."""
    write = "attnrepro doctor --write-cdi /etc/cdi/nvidia.json, as root"
    for path, problems in host.cdi_problems.items():
        found = f"{path} is stale: {'; '.join(problems[:3])}"
        fix = f"nvidia-ctk cdi generate --output={path}, or remove it and {write}"
        yield Finding(id="gpu.cdi", level="warn", found=found, fix=fix)
    good = [
        s.path for s in host.cdi if s.kind == "nvidia.com/gpu" and s.path not in host.cdi_problems
    ]
    if good:
        yield Finding(id="gpu.cdi", level="ok", found=f"{', '.join(good)} names existing paths")
    elif not host.cdi_problems:
        folders = " and ".join(cdi.CDI_FOLDERS)
        level: Literal["note", "warn"] = "note" if any(d.nvidia_runtime for d in doors) else "warn"
        found = f"no spec for nvidia.com/gpu in {folders}"
        yield Finding(id="gpu.cdi", level=level, found=found, fix=write)
    for door in doors:
        if not door.cdi:
            yield Finding(
                id="gpu.cdi.engine",
                level="warn",
                found=door.cdi_reason,
                fix="set it and restart the engine; else the nvidia runtime or bare nodes are used",
            )


def nvml() -> Iterator[Finding]:
    """Ask NVML for clocks, mode and other processes, read-only."""
    import pynvml  # type: ignore[import-untyped]

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        fix = "install the driver's libnvidia-ml.so.1 where the loader finds it (LD_LIBRARY_PATH)"
        yield Finding(id="gpu.nvml", level="warn", found=f"NVML does not answer: {error}", fix=fix)
        return
    try:
        for index in range(pynvml.nvmlDeviceGetCount()):
            yield from _nvml_device(pynvml.nvmlDeviceGetHandleByIndex(index), index)
    finally:
        pynvml.nvmlShutdown()


def _nvml_device(handle: object, index: int) -> Iterator[Finding]:
    import pynvml

    name = f"gpu.{index}"
    try:
        clock = pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM)
        most = pynvml.nvmlDeviceGetMaxClockInfo(handle, pynvml.NVML_CLOCK_SM)
        found = f"SM clock {clock} of {most} MHz"
        yield Finding(id=f"{name}.clocks", level="note", found=found)
        others = pynvml.nvmlDeviceGetComputeRunningProcesses(handle)
    except pynvml.NVMLError as error:
        yield Finding(id=f"{name}.nvml", level="note", found=f"not exposed: {error}")
        return
    if others:
        pids = ", ".join(str(process.pid) for process in others[:8])
        fix = "wait until they end; a run records them, and a clock lock is refused beside them"
        found = f"processes on the device: {pids}"
        yield Finding(id=f"{name}.processes", level="warn", found=found, fix=fix)
    else:
        yield Finding(id=f"{name}.processes", level="ok", found="no other process")


def rocm(host: GpuHost, groups: set[int], uid: int) -> Iterator[Finding]:
    """Check ROCm nodes, and whether this user may open them."""
    if not host.render_nodes:
        fix = "load amdgpu with its display nodes: modprobe amdgpu, as root"
        yield Finding(id="gpu.rocm", level="missing", found="/dev/kfd without /dev/dri", fix=fix)
        return
    nodes = (host.kfd or "", *host.render_nodes)
    lacking = {g for n in nodes if (g := host.node_groups.get(n, 0)) not in groups}
    if lacking and uid != 0:
        gids = ", ".join(map(str, sorted(lacking)))
        fix = "usermod -aG render,video $USER, as root, and log in again"
        found = f"{', '.join(nodes)} belong to groups {gids}, which you lack"
        yield Finding(id="gpu.rocm", level="missing", found=found, fix=fix)
        return
    yield Finding(id="gpu.rocm", level="ok", found=", ".join(nodes))
