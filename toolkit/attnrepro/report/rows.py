"""One row a cell and subject: what every view of an artifact shows, already in words."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from attnrepro.compare import published
from attnrepro_runner import bitclaims

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

HEADINGS: Final = (
    "cell",
    "subject",
    "status",
    "clock",
    "median",
    "interval",
    "tails",
    "against",
    "error",
    "bits",
)

_UNITS: Final = ((1_000_000_000, "s"), (1_000_000, "ms"), (1_000, "µs"))


@dataclass(frozen=True, kw_only=True)
class Row:
    """Texts of one row, in the order of `HEADINGS`; an empty text is a thing that was not taken."""

    cell: str
    subject: str
    status: str
    clock: str
    median: str
    """Median of launch medians."""
    interval: str
    """Over launch medians, with the confidence that they reach."""
    tails: str
    """Median over launches of each launch's quantile."""
    against: str
    """Ratio to each baseline with its interval and verdict; above 1 is faster."""
    error: str
    """Worst error of any compared block as a share of what the rule allows."""
    bits: str
    reason: str
    """Why the status is not PASS."""

    def texts(self) -> tuple[str, ...]:
        """The columns."""
        return (
            self.cell,
            self.subject,
            self.status,
            self.clock,
            self.median,
            self.interval,
            self.tails,
            self.against,
            self.error,
            self.bits,
        )


def rows(observations: Mapping[str, Any]) -> list[Row]:
    """Rows of an artifact's observations, in the manifest's order."""
    return [_row(cell, subject) for cell in observations["cells"] for subject in cell["subjects"]]


def duration(ns: int | None) -> str:
    """A time with four significant digits and its unit: 1.234 ms."""
    if ns is None:
        return ""
    for scale, unit in _UNITS:
        if ns >= scale:
            return f"{_significant(ns / scale)} {unit}"
    return f"{ns} ns"


def ratio(text: str | None) -> str:
    """A hex-float ratio as 1.31."""
    return "" if text is None else f"{float.fromhex(text):.3g}"


def headline(observations: Mapping[str, Any]) -> str:
    """What ran where, in one line."""
    containment, run = observations["containment"], observations["run"]
    where = f"{containment['engine']} {containment['version']}"
    closed = "in a container" if containment["contained"] else "NOT in a container"
    resumed = " since it was last resumed" if run["resumed"] else ""
    seconds = run["duration_ns"] / 1e9
    return (
        f"{closed} ({where}), on {device_text(observations)}, "
        f"{run['started_utc']}, {seconds:.0f} s{resumed}"
    )


def device_text(observations: Mapping[str, Any]) -> str:
    """Name of the device, and how many threads were used on a CPU."""
    device = observations["device"]
    name = str(device.get("name") or "an unnamed device")
    threads = device.get("threads")
    if device.get("kind") != "cpu" or threads is None:
        return name
    return f"{name}, {threads} thread{'s' if threads != 1 else ''}"


def _row(cell: Mapping[str, Any], subject: Mapping[str, Any]) -> Row:
    timing = subject["timing"]
    clock = published.headline_clock(timing)
    taken: Mapping[str, Any] = timing[clock] if clock else {}
    median = taken["median"]["value_ns"] if clock else None
    return Row(
        cell=f"{cell['id']} {cell['label']}",
        subject=subject["subject"],
        status=subject["status"],
        clock=clock or "",
        median=duration(median),
        interval=_interval(taken["interval"]) if clock else "",
        tails=_tails(taken["tails"]) if clock else "",
        against="; ".join(_against(c) for c in subject["comparisons"] if c["clock"] == clock),
        error=_error(subject.get("oracle", ())),
        bits=_bits(subject.get("bits")),
        reason=subject["reason"] or "",
    )


def _interval(interval: Mapping[str, Any]) -> str:
    if interval["lower_ns"] is None:
        return ""
    lower, upper = duration(interval["lower_ns"]), duration(interval["upper_ns"])
    if lower.split()[1] == upper.split()[1]:
        lower = lower.split()[0]
    # Few launches reach less confidence than was asked for: it stands beside the limits.
    return f"{lower}–{upper} ({float(interval['confidence']) * 100:.3g} %)"


def _tails(tails: Sequence[Mapping[str, Any]]) -> str:
    return ", ".join(
        f"p{_percent(tail['quantile'])} {duration(tail['value_ns'])}"
        for tail in tails
        if tail["value_ns"] is not None
    )


def _percent(quantile: str) -> str:
    """Quantile 0.999 as 99.9."""
    digits = quantile.partition(".")[2].ljust(2, "0")
    rest = digits[2:].rstrip("0")
    return f"{int(digits[:2])}{'.' if rest else ''}{rest}"


def _against(comparison: Mapping[str, Any]) -> str:
    limits = ""
    if comparison["lower"] is not None:
        limits = f" ({ratio(comparison['lower'])}–{ratio(comparison['upper'])})"
    return (
        f"{ratio(comparison['ratio'])}×{limits} {comparison['baseline']}: {comparison['verdict']}"
    )


def _error(oracle: Sequence[Mapping[str, Any]]) -> str:
    worst: tuple[float, str] | None = None
    for comparison in oracle:
        for name, tensor in comparison["oracle"]["tensors"].items():
            if tensor["nan"]:
                return f"NaN ({name})"
            value = float.fromhex(tensor["worst_ratio"])
            if worst is None or value > worst[0]:
                worst = (value, name)
    return f"{worst[0]:.2f} of bound ({worst[1]})" if worst else ""


def _bits(bits: Mapping[str, Any] | None) -> str:
    if bits is None:
        return ""
    differ = {name for name, seen in bits["observed"].items() if seen == "differs"}
    broken = set(bitclaims.broken(bits["claimed"], bits["observed"]))
    said = [", ".join(sorted(broken))] if broken else []
    if others := differ - broken:
        said.append(f"{', '.join(sorted(others))}, not claimed")
    if said:
        return f"differ: {'; '.join(said)}"
    return f"equal in {bits['repeats']} runs"


def _significant(value: float) -> str:
    """Four significant digits, no exponent."""
    whole = len(str(int(value)))
    return f"{value:.{max(0, 4 - whole)}f}"
