"""The neutral record of a GPU and of its state, which NVML and amdsmi both fill.

Null means that the device, its driver or its library does not expose the value; it never means
zero. A device's UUID and serial number never leave this module: whoever needs to tell two devices
apart asks for `Accelerator.identity`, a keyed digest.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping


CONTEXT_NODES: Final = frozenset({"/dev/nvidia-uvm", "/dev/kfd"})
"""Opened by each process that computes on a device of NVIDIA or AMD, whichever device it is."""


class AcceleratorUnavailable(Exception):
    """The device's library, its driver or the device is not there; the message is the reason."""


@dataclass(frozen=True, kw_only=True)
class AcceleratorRecord:
    """What a device is; constant through a run, except where a person changes its settings."""

    vendor: str
    """nvidia or amd."""
    model: str | None
    architecture: str | None
    """sm_90, gfx942 …"""
    compute_units: int | None
    """Multiprocessors or compute units; null where only the framework knows it."""
    memory_bytes: int | None
    ecc: bool | None
    partition: str | None
    """MIG mode, or compute and memory partition."""
    vbios: str | None
    driver: str | None
    library: str | None
    """Name and version of the library that answered."""
    runtime: str | None
    """Highest CUDA or HIP version that the driver serves."""
    pci_generation: int | None
    """Of the link at its best, as the device allows; likewise pci_width in lanes."""
    pci_width: int | None
    persistence: bool | None
    power_limit_mw: int | None
    power_default_limit_mw: int | None
    power_min_limit_mw: int | None
    power_max_limit_mw: int | None
    sm_clock_default_mhz: int | None
    """Application clock, where the device has one."""
    sm_clock_max_mhz: int | None
    memory_clock_max_mhz: int | None
    clocks_locked: bool | None
    memory_bus_bits: int | None = None
    last_level_cache_bytes: int | None = None
    """Of the framework, where the library has none; likewise compute_units."""
    absent: Mapping[str, str] = field(default_factory=dict)
    """Field to the reason why it is null."""

    def to_dict(self) -> dict[str, object]:
        """Return the record as plain JSON values."""
        return asdict(self)


@dataclass(frozen=True, kw_only=True)
class AcceleratorSample:
    """The device's state at one instant."""

    time_ns: int
    """Monotonic clock, as the samples of the timings."""
    sm_clock_mhz: int | None
    temperature_c: int | None
    throttle: tuple[str, ...] | None
    """Neutral names of the reasons that lower the clocks now; empty is none."""
    throttle_raw: int | None
    """The library's own bits, where it has bits."""
    power_mw: int | None = None
    memory_clock_mhz: int | None = None
    memory_temperature_c: int | None = None
    utilization_percent: int | None = None
    memory_used_bytes: int | None = None

    def to_dict(self) -> dict[str, object]:
        """Return the sample as plain JSON values."""
        return asdict(self)


class Accelerator(Protocol):
    """One opened device; it only reads, and never changes a clock, a limit or a mode."""

    def record(self) -> AcceleratorRecord:
        """Read what the device is."""
        ...

    def sample(self, *, whole: bool = True) -> AcceleratorSample:
        """Read its state now; a value that fails is null.

        Args:
            whole: with the values that no rule needs; else clock, temperature, throttling.

        Raises:
            AcceleratorUnavailable: the device itself is gone.

        """
        ...

    def energy_mj(self) -> int | None:
        """Read the energy counter, in mJ since the driver was loaded.

        Apart from `sample`, since reading it costs milliseconds (3.5 on an H200).
        """
        ...

    def other_processes(self) -> int | None:
        """Count processes on the device that are not of this process tree.

        None where the driver's list cannot be trusted to show them (see `count_others`).
        """
        ...

    def identity(self, key: bytes) -> str | None:
        """Return the keyed digest of the device, or None where it has neither UUID nor serial."""
        ...

    def close(self) -> None:
        """Release the library."""
        ...


def keyed_identity(key: bytes, *, uuid: str | None, serial: str | None) -> str | None:
    """Return HMAC-SHA256(key, UUID || serial) in hexadecimal.

    Raises:
        ValueError: the key is shorter than 32 bytes, so that a digest could be guessed back.

    """
    if len(key) < 32:
        msg = f"an identity key needs 32 bytes, got {len(key)}"
        raise ValueError(msg)
    if not uuid and not serial:
        return None
    parts = [(uuid or "").encode(), (serial or "").encode()]
    message = b"".join(len(part).to_bytes(4, "big") + part for part in parts)
    return hmac.new(key, message, hashlib.sha256).hexdigest()


class Reader:
    """Reads optional values and remembers why one is missing."""

    def __init__(self, errors: tuple[type[BaseException], ...]) -> None:
        self._errors = errors
        self.absent: dict[str, str] = {}

    def __call__(self, name: str, read: Callable[[], object]) -> object:
        """Return read(), or None with its error noted under the name."""
        try:
            value = read()
        except self._errors as error:
            self.absent[name] = f"{type(error).__name__}: {error}"[:200]
            return None
        if value is None:
            self.absent[name] = "the library has no value"
        return value

    def integer(self, name: str, read: Callable[[], object]) -> int | None:
        """Return read() as an integer; "N/A" and its kin are absence."""
        value = self(name, read)
        if isinstance(value, bool) or not isinstance(value, int | float):
            if value is not None:
                self.absent[name] = f"not a number: {value!r}"[:200]
            return None
        return int(value)

    def text(self, name: str, read: Callable[[], object]) -> str | None:
        """Return read() as text; bytes are decoded, "N/A" is absence."""
        value = self(name, read)
        if isinstance(value, bytes):
            value = value.decode("utf-8", "replace")
        if value is None or value in ("", "N/A"):
            self.absent.setdefault(name, "the library has no value")
            return None
        return str(value)


def process_tree(root: int | None = None, proc: Path = Path("/proc")) -> frozenset[int]:
    """Return the ids of a process and all its descendants (Linux; else the process alone)."""
    top = os.getpid() if root is None else root
    children: dict[int, list[int]] = {}
    for entry in proc.glob("[0-9]*"):
        pid = int(entry.name)
        parent = _parent(pid, proc)
        if parent is not None:
            children.setdefault(parent, []).append(pid)
    found, pending = {top}, [top]
    while pending:
        for child in children.get(pending.pop(), []):
            if child not in found:
                found.add(child)
                pending.append(child)
    return frozenset(found)


def count_others(
    on_device: Iterable[int],
    *,
    namespaced: bool,
    root: int | None = None,
    proc: Path = Path("/proc"),
) -> int | None:
    """Count processes on the device that are not our own; None where that cannot be known.

    In a process-id namespace of its own (a container) the driver's ids are those of the host, and
    only their number can be compared with that of our processes that use the device: a list that
    shows fewer is not the whole. Ids that are ours have been translated into this namespace, and
    such a list may leave out what runs beyond it: of none it proves nothing.

    Args:
        on_device: ids that the driver's library lists.
        namespaced: whether this process has other ids outside.
        root: the first of our processes; this one by default.
        proc: where processes show their parents and open files.

    """
    pids = set(on_device)
    top = os.getpid() if root is None else root
    if not namespaced:
        # Up from the few on the device: to read every process of a host (185 on an H200's) took
        # 5 ms, half of what telemetry cost there.
        return sum(not _descends(pid, top, proc) for pid in pids)
    own = process_tree(top, proc)
    if pids & own:
        return len(pids - own) or None
    ours = contexts(own, proc)
    return len(pids) - ours if 0 < ours <= len(pids) else None


def _parent(pid: int, proc: Path) -> int | None:
    """Return the id of a process's parent; None where the process is gone."""
    try:
        return int((proc / str(pid) / "stat").read_text().rpartition(")")[2].split()[1])
    except (OSError, IndexError, ValueError):
        return None


def _descends(pid: int, top: int, proc: Path) -> bool:
    """Tell whether a process is `top` or descends from it."""
    seen: set[int] = set()  # a parent's id can be used again while we look
    at: int | None = pid
    while at is not None and at not in seen:
        if at == top:
            return True
        seen.add(at)
        at = _parent(at, proc)
    return False


def contexts(pids: Iterable[int], proc: Path = Path("/proc")) -> int:
    """Count the processes that have opened the node over which a driver makes compute contexts.

    Reading a device's state opens other nodes.
    """
    found = 0
    for pid in pids:
        with contextlib.suppress(OSError):
            # Lazily: a framework opens the node early, and may have hundreds of files after it.
            found += any(_is_context(file) for file in (proc / str(pid) / "fd").iterdir())
    return found


def _is_context(file: Path) -> bool:
    try:
        return str(file.readlink()) in CONTEXT_NODES
    except OSError:  # closed since it was listed
        return False


def in_process_namespace(proc: Path = Path("/proc")) -> bool:
    """Tell whether this process has other ids outside its namespace."""
    try:
        status = (proc / "self/status").read_text()
        init = (proc / "1/comm").read_text().strip()
    except OSError:
        return True
    nested = next(
        (line.split()[1:] for line in status.splitlines() if line.startswith("NSpid:")), []
    )
    return len(nested) > 1 or init not in ("systemd", "init")
