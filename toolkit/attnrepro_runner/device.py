"""The device of a run, as one neutral record, whoever made it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from attnrepro_runner import cpu
from attnrepro_runner.accelerator import AcceleratorUnavailable

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from attnrepro_runner.accelerator import Accelerator
    from attnrepro_runner.telemetry import Source, Value


_SLOW_EVERY: Final = 10
"""Readings to one that has the slow values too."""


class Device:
    """What a run's tasks record of the machine, and what they sample."""

    def __init__(self, vendor: str, threads: int, index: int = 0) -> None:
        """Look at the CPU and, for another vendor, open its accelerator.

        A device that cannot be opened is recorded with the reason; the workers say what follows.
        """
        from attnrepro_runner.telemetry import CpuSource

        self.record: dict[str, object] = {**cpu.describe(), "threads": threads}
        # Beside an accelerator the host's ticks and load are no condition of what is measured.
        self.sources: list[Source] = [CpuSource(every=1 if vendor == "cpu" else _SLOW_EVERY)]
        self._accelerator: Accelerator | None = None
        self._is_bound = False
        if vendor == "cpu":
            return
        host = {"kind": "host", **{k: v for k, v in self.record.items() if k != "kind"}}
        try:
            self._accelerator = _open(vendor, index)
            found = self._accelerator.record().to_dict()
        except AcceleratorUnavailable as error:
            self.record = {"kind": vendor, "name": "unavailable", "reason": str(error)}
        else:
            self.record = {"kind": vendor, "name": found["model"], **found}
            self._source = AcceleratorSource(self._accelerator)
            self.sources.append(self._source)
        self.record["host"] = host

    def learn(self, facts: Mapping[str, object]) -> None:
        """Take over what the framework knows; open the very device that it uses.

        A container or an environment variable may have renumbered the devices, so that the first
        of the library is another one than the framework's.
        """
        if self._accelerator is not None and not self._is_bound and facts:
            self._rebind(facts)
        for name in ("compute_units", "last_level_cache_bytes"):
            if self.record.get(name) is None and facts.get(name) is not None:
                self.record[name] = facts[name]
        self._is_bound = True

    def energy_mj(self) -> int | None:
        """Read the energy counter, in mJ; None where there is none."""
        return None if self._accelerator is None else self._accelerator.energy_mj()

    def close(self) -> None:
        """Release the accelerator's library."""
        if self._accelerator is not None:
            self._accelerator.close()

    def _rebind(self, facts: Mapping[str, object]) -> None:
        try:
            found = _open_as(str(self.record["kind"]), facts)
        except AcceleratorUnavailable as error:
            self.record["reason"] = f"the library's first device, since {error}"
            return
        # A recorder holds the source, and goes on with another device under it.
        self._source.device = found
        self.close()
        self._accelerator = found
        described = found.record().to_dict()
        self.record |= {"name": described["model"], **described}


class AcceleratorSource:
    """A GPU's state as columns."""

    columns = (
        "sm_clock_mhz",
        "memory_clock_mhz",
        "power_mw",
        "energy_mj",
        "temperature_c",
        "memory_temperature_c",
        "utilization_percent",
        "memory_used_bytes",
        "throttle",
        "throttle_raw",
        "other_processes",
    )

    _COUNT_EVERY = 20
    _ENERGY_EVERY = 100

    def __init__(self, device: Accelerator) -> None:
        """Read an opened device."""
        self.device = device
        self._reads = 0
        self._others: int | None = None

    def read(self) -> Sequence[Value]:
        """Return the sample's fields; throttle reasons joined by a space.

        Null in between are the energy counter, read every five seconds since that costs
        milliseconds, and what no rule needs, read twice a second: power (the driver's is a mean
        over a second), the memory's clock, temperature and use, utilization. In a container on an
        H200's host this takes 0.5 % of a thread; 1.5 to 2.1 % with power 25 times, the rest five
        times and energy once a second.
        """
        energy = None
        if self._reads % self._COUNT_EVERY == 0:
            self._others = self.device.other_processes()
        if self._reads % self._ENERGY_EVERY == 0:
            energy = self.device.energy_mj()
        sample = self.device.sample(whole=self._reads % _SLOW_EVERY == 0)
        self._reads += 1
        throttle = None if sample.throttle is None else " ".join(sample.throttle)
        return (
            sample.sm_clock_mhz,
            sample.memory_clock_mhz,
            sample.power_mw,
            energy,
            sample.temperature_c,
            sample.memory_temperature_c,
            sample.utilization_percent,
            sample.memory_used_bytes,
            throttle,
            sample.throttle_raw,
            self._others,
        )


def _open(vendor: str, index: int) -> Accelerator:
    if vendor == "nvidia":
        from attnrepro_runner import nvml

        return nvml.open_nvml(index=index)
    if vendor == "amd":
        from attnrepro_runner import amdsmi

        return amdsmi.open_amdsmi(index=index)
    message = f"no library for devices of {vendor}"
    raise AcceleratorUnavailable(message)


def _open_as(vendor: str, facts: Mapping[str, object]) -> Accelerator:
    """Open the device that a framework describes."""
    uuid, pci = facts.get("uuid"), facts.get("pci")
    if vendor == "nvidia" and isinstance(uuid, str):
        from attnrepro_runner import nvml

        return nvml.open_nvml(uuid=uuid)
    if vendor == "amd" and isinstance(pci, str):
        from attnrepro_runner import amdsmi

        return amdsmi.open_amdsmi(pci=pci)
    message = "the framework does not tell which device it uses"
    raise AcceleratorUnavailable(message)
