"""A GPU of AMD as amdsmi shows it, in the neutral record.

The package is a thin wrapper of libamd_smi.so, and both must be of one release; importing it
without the library prints to stdout and raises KeyError, so its import is guarded. Values that an
ASIC does not have come back as "N/A". On MI300 and later the violation status says why clocks are
low; on older devices and Radeon it is absent and the metrics say it, in bits of one meaning for all
devices where there are such.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Final, cast

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

VIOLATIONS = {
    "active_prochot_thrm": "hardware_thermal",
    "active_ppt_pwr": "software_power_cap",
    "active_socket_thrm": "software_thermal",
    "active_vr_thrm": "regulator_thermal",
    "active_hbm_thrm": "memory_thermal",
    "active_gfx_clk_below_host_limit": "clock_below_limit",
}
"""Keys of amdsmi_get_violation_status to neutral names (MI300 and later)."""


THROTTLERS: Final = (
    (range(8), "software_power_cap"),
    (range(16, 24), "current_limit"),
    ((34,), "memory_thermal"),
    ((38, 39, 40, 41, 44, 45), "regulator_thermal"),
    ((32, 33, 35, 36, 37, 42, 43), "software_thermal"),
    ((46, 47), "hardware_thermal"),
)
"""Bits of the metrics' indep_throttle_status to neutral names (SMU_THROTTLER_* of the kernel's
amdgpu driver)."""

SILENCES: Final = 3
"""Samples in a row without any value after which a device that had some is gone."""


class AmdsmiDevice:
    """One GPU opened through amdsmi."""

    def __init__(self, library: object, handle: object) -> None:
        self._library = library
        self._handle = handle
        self._namespaced = in_process_namespace()
        self._error = cast("type[Exception]", getattr(library, "AmdSmiException", RuntimeError))
        self._answered = False
        self._silences = 0

    def _call(self, name: str, *arguments: object) -> object:
        return cast("Callable[..., object]", getattr(self._library, name))(*arguments)

    def _get(self, name: str, *arguments: object) -> object:
        return self._call(name, self._handle, *arguments)

    def _table(self, name: str, *arguments: object) -> Mapping[str, object]:
        return cast("Mapping[str, object]", self._get(name, *arguments))

    def _enum(self, kind: str, member: str) -> object:
        return getattr(getattr(self._library, kind), member)

    def _reader(self) -> Reader:
        return Reader((self._error, AttributeError, KeyError, TypeError))

    def record(self) -> AcceleratorRecord:
        """Read what the device is."""
        read = self._reader()

        def asic(key: str) -> Callable[[], object]:
            return lambda: self._table("amdsmi_get_gpu_asic_info")[key]

        def cap(key: str) -> int | None:
            # Microwatts; older releases gave watts, which no limit in microwatts can be as low as.
            value = read.integer(
                f"power_{key}", lambda: self._table("amdsmi_get_power_cap_info")[key]
            )
            if value is None:
                return None
            return value // 1000 if value >= 10**6 else value * 1000

        def partition() -> str:
            compute = self._get("amdsmi_get_gpu_compute_partition")
            memory = self._get("amdsmi_get_gpu_memory_partition")
            return f"{compute}/{memory}"

        def library() -> str:
            version = cast("Mapping[str, object]", self._call("amdsmi_get_lib_version"))
            return f"amdsmi {version['major']}.{version['minor']}.{version['release']}"

        def pci(key: str) -> Callable[[], object]:
            return lambda: cast(
                "Mapping[str, object]", self._table("amdsmi_get_pcie_info")["pcie_static"]
            )[key]

        vram = read.integer(
            "memory_bytes", lambda: self._table("amdsmi_get_gpu_vram_info")["vram_size"]
        )
        ecc = read.integer("ecc", lambda: self._get("amdsmi_get_gpu_ecc_enabled"))
        locked = read("clocks_locked", lambda: self._clock("GFX")["clk_locked"])
        return AcceleratorRecord(
            vendor="amd",
            model=read.text("model", asic("market_name")),
            architecture=read.text("architecture", asic("target_graphics_version")),
            compute_units=read.integer("compute_units", asic("num_compute_units")),
            memory_bytes=None if vram is None else vram * 1024 * 1024,
            ecc=None if ecc is None else ecc != 0,
            partition=read.text("partition", partition),
            vbios=read.text("vbios", lambda: self._table("amdsmi_get_gpu_vbios_info")["version"]),
            driver=read.text(
                "driver", lambda: self._table("amdsmi_get_gpu_driver_info")["driver_version"]
            ),
            library=read.text("library", library),
            runtime=None,
            pci_generation=read.integer("pci_generation", pci("pcie_interface_version")),
            pci_width=read.integer("pci_width", pci("max_pcie_width")),
            persistence=None,
            power_limit_mw=cap("power_cap"),
            power_default_limit_mw=cap("default_power_cap"),
            power_min_limit_mw=cap("min_power_cap"),
            power_max_limit_mw=cap("max_power_cap"),
            sm_clock_default_mhz=None,
            sm_clock_max_mhz=read.integer(
                "sm_clock_max_mhz", lambda: self._clock("GFX")["max_clk"]
            ),
            memory_clock_max_mhz=read.integer(
                "memory_clock_max_mhz", lambda: self._clock("MEM")["max_clk"]
            ),
            clocks_locked=locked if isinstance(locked, bool) else None,
            absent=dict(read.absent),
        )

    def sample(self, *, whole: bool = True) -> AcceleratorSample:
        """Read its state now; see `Accelerator.sample`.

        Raises:
            AcceleratorUnavailable: none of its values has been read for some samples, after some
                were; amdsmi has no error of its own for a device that vanished.

        """
        read = self._reader()
        now = time.monotonic_ns()
        throttle, raw = self._throttle(read)
        sample = AcceleratorSample(
            time_ns=now,
            sm_clock_mhz=read.integer("sm_clock", lambda: self._clock("GFX")["clk"]),
            temperature_c=read.integer("temperature", lambda: self._temperature("HOTSPOT")),
            throttle=throttle,
            throttle_raw=raw,
        )
        values = (value for name, value in sample.to_dict().items() if name != "time_ns")
        answers = any(value is not None for value in values)
        power = self._power(read) if whole or not answers else None
        if answers or power is not None:
            self._answered, self._silences = True, 0
        elif self._answered:
            self._silences += 1
            if self._silences >= SILENCES:
                raise AcceleratorUnavailable(next(iter(read.absent.values())))
        if whole:
            sample = replace(
                sample,
                power_mw=power,
                memory_clock_mhz=read.integer("mem_clock", lambda: self._clock("MEM")["clk"]),
                memory_temperature_c=read.integer(
                    "mem_temperature", lambda: self._temperature("VRAM")
                ),
                utilization_percent=read.integer(
                    "utilization", lambda: self._table("amdsmi_get_gpu_activity")["gfx_activity"]
                ),
                memory_used_bytes=_mebibytes(
                    read.integer(
                        "memory_used",
                        lambda: self._table("amdsmi_get_gpu_vram_usage")["vram_used"],
                    )
                ),
            )
        return sample

    def energy_mj(self) -> int | None:
        """Read the energy counter."""
        return _millijoules(self._reader()("energy", lambda: self._get("amdsmi_get_energy_count")))

    def other_processes(self) -> int | None:
        """Count processes on the device that are not of this process tree."""
        read = self._reader()
        running = read("processes", lambda: self._get("amdsmi_get_gpu_process_list"))
        if running is None:
            return None
        pids = [cast("int", entry["pid"]) for entry in cast("list[Mapping[str, object]]", running)]
        return count_others(pids, namespaced=self._namespaced)

    def identity(self, key: bytes) -> str | None:
        """Return the keyed digest of UUID and serial."""
        read = self._reader()
        return keyed_identity(
            key,
            uuid=read.text("uuid", lambda: self._get("amdsmi_get_gpu_device_uuid")),
            serial=read.text(
                "serial", lambda: self._table("amdsmi_get_gpu_asic_info")["asic_serial"]
            ),
        )

    def close(self) -> None:
        """Release amdsmi."""
        self._call("amdsmi_shut_down")

    def _clock(self, domain: str) -> Mapping[str, object]:
        return self._table("amdsmi_get_clock_info", self._enum("AmdSmiClkType", domain))

    def _temperature(self, sensor: str) -> object:
        return self._get(
            "amdsmi_get_temp_metric",
            self._enum("AmdSmiTemperatureType", sensor),
            self._enum("AmdSmiTemperatureMetric", "CURRENT"),
        )

    def _power(self, read: Reader) -> int | None:
        table = read("power", lambda: self._table("amdsmi_get_power_info"))
        for key in ("current_socket_power", "socket_power", "average_socket_power"):
            value = cast("Mapping[str, object]", table or {}).get(key)
            if isinstance(value, int) and value:
                return value * 1000
        return None

    def _throttle(self, read: Reader) -> tuple[tuple[str, ...] | None, int | None]:
        status = read("violations", lambda: self._table("amdsmi_get_violation_status"))
        flags = {
            name: cast("Mapping[str, object]", status or {}).get(key)
            for key, name in VIOLATIONS.items()
        }
        if any(isinstance(value, bool) for value in flags.values()):
            return tuple(name for name, value in flags.items() if value is True), None
        metrics = read("metrics", lambda: self._table("amdsmi_get_gpu_metrics_info"))
        table = cast("Mapping[str, object]", metrics or {})
        named = table.get("indep_throttle_status")
        # All ones is a field that the device does not fill.
        if isinstance(named, int) and not isinstance(named, bool) and named != 2**64 - 1:
            return throttler_names(named), named
        raw = table.get("throttle_status")
        if not isinstance(raw, bool | int):
            return None, None
        bits = None if isinstance(raw, bool) else raw
        return (("throttled",) if raw else ()), bits


def throttler_names(bits: int) -> tuple[str, ...]:
    """Return the neutral names of indep_throttle_status; `throttled` for bits without one."""
    places = {place for place in range(bits.bit_length()) if bits >> place & 1}
    known = tuple(name for group, name in THROTTLERS if places & set(group))
    rest = places - {place for group, _ in THROTTLERS for place in group}
    return (*known, *(["throttled"] if rest else []))


def _mebibytes(value: int | None) -> int | None:
    return None if value is None else value * 1024 * 1024


def _millijoules(energy: object) -> int | None:
    """Counter times its resolution (microjoules a count)."""
    if not isinstance(energy, Mapping):
        return None
    count, resolution = energy.get("energy_accumulator"), energy.get("counter_resolution")
    if not isinstance(count, int) or not isinstance(resolution, int | float):
        return None
    return int(count * resolution / 1000)


def open_amdsmi(*, pci: str | None = None, index: int = 0) -> AmdsmiDevice:
    """Open the device at a PCI address (dddd:bb:dd, of any function), else of an index.

    The index is amdsmi's, which HIP_VISIBLE_DEVICES does not renumber. Partitions of one device
    share an address, and the first of them is opened.

    Raises:
        AcceleratorUnavailable: no package, no library, no driver or no such device.

    """
    said = io.StringIO()
    try:
        with contextlib.redirect_stdout(said):
            library = importlib.import_module("amdsmi")
    except (ImportError, KeyError, OSError, ValueError, AttributeError) as error:
        said_line = said.getvalue().strip().splitlines()
        msg = f"amdsmi cannot be imported ({type(error).__name__}: {error}" + (
            f"; {said_line[-1]})" if said_line else ")"
        )
        raise AcceleratorUnavailable(msg) from error
    error_type = cast("type[Exception]", getattr(library, "AmdSmiException", RuntimeError))
    try:
        library.amdsmi_init()
        handles = cast("list[object]", library.amdsmi_get_processor_handles())
        if pci is not None:
            found = [str(library.amdsmi_get_gpu_device_bdf(handle)).lower() for handle in handles]
            index = next((n for n, at in enumerate(found) if at.startswith(pci)), len(handles))
    except error_type as error:
        msg = f"amdsmi: {error}"
        raise AcceleratorUnavailable(msg) from error
    if index >= len(handles):
        wanted = f"index {index}" if pci is None else "the framework's PCI address"
        msg = f"amdsmi sees {len(handles)} devices, none of {wanted}"
        raise AcceleratorUnavailable(msg)
    return AmdsmiDevice(library, handles[index])
