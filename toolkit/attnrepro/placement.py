"""Where on this machine a run takes place: which cores or which GPU, and whose lock."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol, runtime_checkable

from attnrepro.errors import Unavailable, UsageError
from attnrepro.execute import Placement

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from attnrepro.engines.base import Engine
    from attnrepro.engines.gpu import EngineDoors

_LEVELS: Final = ("x86_64_v4", "x86_64_v3", "x86_64_v2")
_TOPOLOGY: Final = "/sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"


@runtime_checkable
class HasDoors(Protocol):
    """An engine that says how a GPU may enter its containers."""

    def doors(self) -> EngineDoors:
        """What it offers."""
        ...


def place(
    manifest: Mapping[str, Any],
    engine: Engine,
    *,
    device: str | None,
    lock_clocks: bool = False,
) -> Placement:
    """Choose the device that a manifest asks for.

    Args:
        manifest: canonical.
        engine: through which it enters.
        device: `--device`: which one of several (`nvidia:1`); None is the first.
        lock_clocks: `--lock-clocks`: whether the user allows the device's clock to be set.

    Raises UsageError where flag and manifest disagree on the clock, Unavailable where this machine
    lacks the device.
    """
    wanted, memory = manifest["device"], manifest["limits"]["memory_bytes"]
    _check_ability(wanted, lock_clocks=lock_clocks)
    check_architecture(wanted["architectures"], here(wanted["vendor"], wanted["threads"]))
    if wanted["vendor"] == "cpu":
        if device not in (None, "cpu"):
            message = f"the manifest is for the CPU, and --device names {device}"
            raise UsageError(message, hint="leave --device out, or change device.vendor")
        threads = wanted["threads"]
        cores = sorted(os.sched_getaffinity(0))
        if threads is not None and threads > len(cores):
            message = f"the manifest asks for {threads} threads; this process may use {len(cores)}"
            raise Unavailable(message, hint="run it on a larger machine, or change device.threads")
        chosen = cores if threads is None else spread(cores, threads)
        return Placement(device_id="cpu", cpuset=list_form(chosen), memory_bytes=memory, gpu=None)
    from attnrepro.engines import gpu, gpuhost

    vendor = "rocm" if wanted["vendor"] == "amd" else "nvidia"
    choice = gpu.parse_device(device or vendor)
    if choice is None or choice.vendor.value != vendor:
        message = f"the manifest asks for a device of {wanted['vendor']}, not {device}"
        raise Unavailable(message, hint=f"--device {vendor}:0")
    if not isinstance(engine, HasDoors):
        message = f"the engine {engine.name} cannot give a GPU to a container"
        raise Unavailable(message, hint="use docker or podman")
    access = gpu.resolve(choice, gpuhost.read(), engine.doors())
    return Placement(device_id=access.device_id, cpuset=None, memory_bytes=memory, gpu=access)


def _check_ability(wanted: Mapping[str, Any], *, lock_clocks: bool) -> None:
    """Refuse what a run here does not do, rather than do something else."""
    policy = wanted["clocks"]["policy"]
    if policy == "lock" and not lock_clocks:
        message = "the manifest wants the device's clock locked, and --lock-clocks is not given"
        raise UsageError(
            message, hint='give it (as root), or set device.clocks.policy to "require"'
        )
    if lock_clocks and policy != "lock":
        message = f"--lock-clocks with the clock policy {policy}"
        raise UsageError(message, hint='set device.clocks.policy to "lock", with sm_mhz')
    if policy == "lock" and wanted["vendor"] != "nvidia":
        message = f"the clock of a device of {wanted['vendor']} is not set from here"
        raise Unavailable(message, hint='set device.clocks.policy to "observe"')
    if wanted["count"] != 1:
        message = f"the manifest asks for {wanted['count']} devices; a run takes one"
        raise Unavailable(message, hint="set device.count to 1")


def here(vendor: str, threads: int | None) -> Mapping[str, object]:
    """The record of this machine's device, as the runner makes it for so many threads."""
    from attnrepro_runner.device import Device

    device = Device(vendor, threads or len(os.sched_getaffinity(0)))
    try:
        return device.record
    finally:
        device.close()


def check_architecture(accepted: Sequence[str], device: Mapping[str, object]) -> None:
    """Refuse a device of an architecture that the manifest does not accept. Raises Unavailable.

    A CPU of a higher x86-64 level is one of each lower level too.
    """
    found = str(device.get("architecture") or device.get("isa") or "unknown")
    also = _LEVELS[_LEVELS.index(found) :] if found in _LEVELS else (found,)
    if accepted and not set(also) & set(accepted):
        reason = device.get("reason") or f"this device is {found}"
        message = f"the manifest is for {', '.join(accepted)}: {reason}"
        raise Unavailable(message, hint="run it on such a device, or change device.architectures")


def spread(cores: list[int], count: int, *, siblings: Mapping[int, int] | None = None) -> list[int]:
    """`count` logical cores, one of each physical core before a second of any.

    Args:
        cores: logical cores that may be used, ascending.
        count: at most their number.
        siblings: logical core to its physical core's first; read from /sys by default.
    """
    first = siblings if siblings is not None else {core: _first_sibling(core) for core in cores}
    seen: dict[int, int] = {}
    ranked = []
    for core in cores:
        turn = seen.get(first.get(core, core), 0)
        seen[first.get(core, core)] = turn + 1
        ranked.append((turn, core))
    return sorted(core for _, core in sorted(ranked)[:count])


def list_form(cores: Iterable[int]) -> str:
    """The kernel's list form of ascending cores: 0-2,8."""
    runs: list[list[int]] = []
    for core in cores:
        if runs and core == runs[-1][1] + 1:
            runs[-1][1] = core
        else:
            runs.append([core, core])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def _first_sibling(core: int) -> int:
    try:
        text = Path(_TOPOLOGY.format(core)).read_text(encoding="ascii")
        return int(text.replace(",", "-").split("-")[0])
    except (OSError, ValueError):
        return core
