"""A GPU of NVIDIA as NVML shows it, in the neutral record.

NVML is reached through nvidia-ml-py (module `pynvml`), imported when a device is opened.
"""

from __future__ import annotations

import importlib
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol, cast

from attnrepro_runner.accelerator import (
    AcceleratorRecord,
    AcceleratorSample,
    AcceleratorUnavailable,
    Reader,
    count_others,
    in_process_namespace,
    keyed_identity,
)

if TYPE_CHECKING:
    from collections.abc import Callable

THROTTLE_REASONS = {
    0x1: "idle",
    0x2: "application_clocks",
    0x4: "software_power_cap",
    0x8: "hardware_slowdown",
    0x10: "sync_boost",
    0x20: "software_thermal",
    0x40: "hardware_thermal",
    0x80: "hardware_power_brake",
    0x100: "display_clocks",
}
"""Bits of nvmlDeviceGetCurrentClocksEventReasons."""


class _Nvml(Protocol):
    """The part of `pynvml` that is used; functions are looked up by name, constants by value."""

    NVMLError: type[Exception]

    def nvmlInit(self) -> None: ...
    def nvmlShutdown(self) -> None: ...


_SM, _MEM = 1, 2
_TEMPERATURE_GPU = 0
_FIELD_MEMORY_TEMPERATURE = 82
_GONE = ("GPU is lost", "Uninitialized", "GPU requires restart")


class NvmlDevice:
    """One GPU opened through NVML."""

    def __init__(self, library: _Nvml, handle: object) -> None:
        self._library = library
        self._handle = handle
        self._namespaced = in_process_namespace()

    def _call(self, name: str, *arguments: object) -> object:
        function = cast("Callable[..., object] | None", getattr(self._library, name, None))
        if function is None:
            msg = f"this NVML binding has no {name}"
            raise AttributeError(msg)
        return function(*arguments)

    def _get(self, name: str, *arguments: object) -> Callable[[], object]:
        return lambda: self._call(name, self._handle, *arguments)

    def _reader(self) -> Reader:
        return Reader((self._library.NVMLError, AttributeError))

    def record(self) -> AcceleratorRecord:
        """Read what the device is."""
        read = self._reader()

        def architecture() -> str:
            major, minor = cast(
                "tuple[int, int]", self._get("nvmlDeviceGetCudaComputeCapability")()
            )
            return f"sm_{major}{minor}"

        def partition() -> str:
            current, _ = cast("tuple[int, int]", self._get("nvmlDeviceGetMigMode")())
            return "mig" if current else "whole"

        def runtime() -> str:
            version = cast("int", self._call("nvmlSystemGetCudaDriverVersion_v2"))
            return f"CUDA {version // 1000}.{version % 1000 // 10}"

        constraints = cast(
            "tuple[int, int] | None",
            read("power_limits", self._get("nvmlDeviceGetPowerManagementLimitConstraints")),
        )
        persistence = read.integer("persistence", self._get("nvmlDeviceGetPersistenceMode"))
        ecc = read("ecc", self._get("nvmlDeviceGetEccMode"))
        binding = read.text("library", lambda: self._call("nvmlSystemGetNVMLVersion"))
        return AcceleratorRecord(
            vendor="nvidia",
            model=read.text("model", self._get("nvmlDeviceGetName")),
            architecture=read.text("architecture", architecture),
            compute_units=None,
            memory_bytes=self._memory(read, "total"),
            ecc=bool(cast("tuple[int, int]", ecc)[0]) if ecc is not None else None,
            partition=read.text("partition", partition),
            vbios=read.text("vbios", self._get("nvmlDeviceGetVbiosVersion")),
            driver=read.text("driver", lambda: self._call("nvmlSystemGetDriverVersion")),
            library=f"NVML {binding}" if binding else None,
            runtime=read.text("runtime", runtime),
            pci_generation=read.integer(
                "pci_generation", self._get("nvmlDeviceGetMaxPcieLinkGeneration")
            ),
            pci_width=read.integer("pci_width", self._get("nvmlDeviceGetMaxPcieLinkWidth")),
            persistence=bool(persistence) if persistence is not None else None,
            power_limit_mw=read.integer(
                "power_limit_mw", self._get("nvmlDeviceGetEnforcedPowerLimit")
            ),
            power_default_limit_mw=read.integer(
                "power_default_limit_mw", self._get("nvmlDeviceGetPowerManagementDefaultLimit")
            ),
            power_min_limit_mw=constraints[0] if constraints else None,
            power_max_limit_mw=constraints[1] if constraints else None,
            sm_clock_default_mhz=read.integer(
                "sm_clock_default_mhz", self._get("nvmlDeviceGetDefaultApplicationsClock", _SM)
            ),
            sm_clock_max_mhz=read.integer(
                "sm_clock_max_mhz", self._get("nvmlDeviceGetMaxClockInfo", _SM)
            ),
            memory_clock_max_mhz=read.integer(
                "memory_clock_max_mhz", self._get("nvmlDeviceGetMaxClockInfo", _MEM)
            ),
            # NVML can lock clocks but does not tell whether they are locked.
            clocks_locked=None,
            memory_bus_bits=read.integer(
                "memory_bus_bits", self._get("nvmlDeviceGetMemoryBusWidth")
            ),
            absent=dict(read.absent),
        )

    def sample(self, *, whole: bool = True) -> AcceleratorSample:
        """Read its state now; see `Accelerator.sample`."""
        read = self._reader()
        now = time.monotonic_ns()
        clock = read.integer("sm_clock", self._get("nvmlDeviceGetClockInfo", _SM))
        gone = next((t for t in read.absent.values() if any(word in t for word in _GONE)), None)
        if gone is not None:
            raise AcceleratorUnavailable(gone)
        bits = read.integer("throttle", self._event_reasons)
        found = AcceleratorSample(
            time_ns=now,
            sm_clock_mhz=clock,
            temperature_c=read.integer(
                "temperature", self._get("nvmlDeviceGetTemperature", _TEMPERATURE_GPU)
            ),
            throttle=None if bits is None else throttle_names(bits),
            throttle_raw=bits,
        )
        if not whole:
            return found
        usage = read("utilization", self._get("nvmlDeviceGetUtilizationRates"))
        return replace(
            found,
            power_mw=read.integer("power", self._get("nvmlDeviceGetPowerUsage")),
            memory_clock_mhz=read.integer("mem_clock", self._get("nvmlDeviceGetClockInfo", _MEM)),
            memory_temperature_c=read.integer("memory_temperature", self._memory_temperature),
            utilization_percent=cast("int | None", getattr(usage, "gpu", None)),
            memory_used_bytes=self._memory(read, "used"),
        )

    def energy_mj(self) -> int | None:
        """Read the energy counter."""
        return self._reader().integer("energy", self._get("nvmlDeviceGetTotalEnergyConsumption"))

    def other_processes(self) -> int | None:
        """Count processes on the device that are not of this process tree."""
        read = self._reader()
        running = read("processes", self._get("nvmlDeviceGetComputeRunningProcesses"))
        if running is None:
            return None
        pids = [
            cast("int", getattr(process, "pid", -1)) for process in cast("list[object]", running)
        ]
        return count_others(pids, namespaced=self._namespaced)

    def identity(self, key: bytes) -> str | None:
        """Return the keyed digest of UUID and serial."""
        read = self._reader()
        return keyed_identity(
            key,
            uuid=read.text("uuid", self._get("nvmlDeviceGetUUID")),
            serial=read.text("serial", self._get("nvmlDeviceGetSerial")),
        )

    def close(self) -> None:
        """Release NVML (it counts its users)."""
        self._library.nvmlShutdown()

    def _memory(self, read: Reader, part: str) -> int | None:
        memory = read("memory", self._get("nvmlDeviceGetMemoryInfo"))
        return cast("int | None", getattr(memory, part, None))

    def _event_reasons(self) -> object:
        if hasattr(self._library, "nvmlDeviceGetCurrentClocksEventReasons"):
            return self._call("nvmlDeviceGetCurrentClocksEventReasons", self._handle)
        return self._call("nvmlDeviceGetCurrentClocksThrottleReasons", self._handle)

    def _memory_temperature(self) -> object:
        values = cast(
            "list[object]",
            self._call("nvmlDeviceGetFieldValues", self._handle, [_FIELD_MEMORY_TEMPERATURE]),
        )
        value = values[0]
        if getattr(value, "nvmlReturn", 1) != 0:
            return None
        return getattr(getattr(value, "value", None), "uiVal", None)


def throttle_names(bits: int) -> tuple[str, ...]:
    """Return the neutral names of NVML's reason bits, unknown bits as hexadecimal."""
    known = [name for bit, name in THROTTLE_REASONS.items() if bits & bit]
    rest = bits & ~sum(THROTTLE_REASONS)
    return (*known, *([f"unknown_{rest:#x}"] if rest else []))


def open_nvml(*, uuid: str | None = None, index: int = 0) -> NvmlDevice:
    """Open the device of a UUID (as torch spells it, without prefix), else of an index.

    The index is NVML's, which CUDA_VISIBLE_DEVICES does not renumber; pass the UUID of the
    framework's device where it is known.

    Raises:
        AcceleratorUnavailable: no binding, no driver or no such device.

    """
    try:
        library = cast("_Nvml", importlib.import_module("pynvml"))
    except ImportError as error:
        msg = f"nvidia-ml-py is not installed ({error})"
        raise AcceleratorUnavailable(msg) from error
    try:
        library.nvmlInit()
        if uuid is None:
            handle = cast("Callable[[int], object]", library.nvmlDeviceGetHandleByIndex)(index)  # type: ignore[attr-defined]
        else:
            full = uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}"
            handle = cast("Callable[[str], object]", library.nvmlDeviceGetHandleByUUID)(full)  # type: ignore[attr-defined]
    except library.NVMLError as error:
        # The message of a failed look-up by UUID holds no UUID; NVML's errors are fixed strings.
        msg = f"NVML: {error}"
        raise AcceleratorUnavailable(msg) from error
    return NvmlDevice(library, handle)
