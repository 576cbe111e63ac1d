"""What the device did while samples were taken, and what follows from it.

From the telemetry's rows between two times; the standard library alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from attnrepro_runner import orderstats
from attnrepro_runner.status import Status

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

SLOWDOWNS: Final = frozenset(
    {
        "hardware_slowdown",
        "hardware_thermal",
        "hardware_power_brake",
        "software_thermal",
        "regulator_thermal",
        "memory_thermal",
        "throttled",
    }
)
"""Throttle reasons under which times are not the device's; `throttled` names none, and may be any.
Sitting at the power or current limit is not one: it is what long attention kernels do."""

CLOCK_TOLERANCE: Final = 15
"""Per mille that a required clock may be off: steps of a clock are 15 MHz."""

DRIFT: Final = 50
"""Per mille between lowest and highest clock beyond which it is said."""


@dataclass(frozen=True, kw_only=True)
class Conditions:
    """One subject's or cell's stretch of time."""

    rows: int
    """Readings in it."""
    clock_khz: tuple[int, int, int] | None
    """Lowest, median, highest; None where the machine exposes no clock."""
    throttle: tuple[str, ...]
    """Every reason that was seen."""
    other_processes: int | None
    """Most processes of others on the device; None where they cannot be counted."""
    has_device: bool = True
    """Whether there is a device whose processes could be counted; a CPU is none."""

    def to_json(self) -> dict[str, object]:
        """Return the `conditions` object of a result."""
        return {
            "rows": self.rows,
            "clock_khz": None if self.clock_khz is None else list(self.clock_khz),
            "throttle": list(self.throttle),
            "other_processes": self.other_processes,
        }


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """What the conditions mean for the samples."""

    status: Status
    reason: str | None
    flags: tuple[str, ...]


def between(
    columns: Sequence[str], rows: Sequence[Sequence[object]], began_ns: int, ended_ns: int
) -> Conditions:
    """Read the rows whose first value lies between two times."""
    inside = [r for r in rows if isinstance(r[0], int) and began_ns <= r[0] <= ended_ns]

    def numbers(column: str) -> list[int]:
        if column not in columns:
            return []
        place = columns.index(column)
        return [value for row in inside if isinstance(value := row[place], int)]

    clocks = sorted([1000 * mhz for mhz in numbers("sm_clock_mhz")] or numbers("frequency_khz"))
    others = numbers("other_processes")
    reasons: set[str] = set()
    if "throttle" in columns:
        place = columns.index("throttle")
        reasons = {word for row in inside for word in str(row[place] or "").split()}
    return Conditions(
        rows=len(inside),
        clock_khz=(clocks[0], clocks[orderstats.median_rank(len(clocks)) - 1], clocks[-1])
        if clocks
        else None,
        throttle=tuple(sorted(reasons)),
        other_processes=max(others, default=None),
        has_device="other_processes" in columns,
    )


def judge(found: Conditions, policy: Mapping[str, Any]) -> Judgement:
    """Say what conditions mean under the manifest's policy for clocks.

    Args:
        found: while the samples were taken.
        policy: `device.clocks`: policy (observe, require, lock) and sm_mhz.

    """
    strict = policy.get("policy", "observe") != "observe"
    slowed = sorted(set(found.throttle) & SLOWDOWNS)
    if slowed:
        reason = f"the device slowed itself down: {', '.join(slowed)}"
        return Judgement(status=Status.THROTTLED, reason=reason, flags=())
    wanted = policy.get("sm_mhz")
    if strict and wanted is not None:
        if found.clock_khz is None:
            reason = f"the manifest requires {wanted} MHz, and no clock was seen"
            return Judgement(status=Status.INCONCLUSIVE, reason=reason, flags=())
        lowest, _, highest = found.clock_khz
        if max(abs(1000 * wanted - khz) for khz in (lowest, highest)) > CLOCK_TOLERANCE * wanted:
            reason = (
                f"the clock was {_mhz(lowest)} to {_mhz(highest)} MHz; the manifest requires "
                f"{wanted}"
            )
            return Judgement(status=Status.THROTTLED, reason=reason, flags=())
    flags = []
    others = _others(found)
    if others is not None:
        if strict:
            return Judgement(status=Status.INCONCLUSIVE, reason=others, flags=())
        flags.append(others)
    if not found.rows:
        flags.append("the telemetry has no reading of the time in which it was sampled")
    if found.clock_khz is not None:
        lowest, _, highest = found.clock_khz
        if 1000 * (highest - lowest) > DRIFT * highest:
            flags.append(f"the clock drifted from {_mhz(lowest)} to {_mhz(highest)} MHz")
    return Judgement(status=Status.PASS, reason=None, flags=tuple(flags))


def _others(found: Conditions) -> str | None:
    """Say that others used the device, or that nobody can tell; None where it was ours alone."""
    if found.other_processes is None:
        known = not found.has_device
        return None if known else "whether other processes used the device cannot be seen from here"
    if not found.other_processes:
        return None
    return f"{found.other_processes} other processes used the device"


def _mhz(khz: int) -> str:
    return f"{khz / 1000:.0f}"
