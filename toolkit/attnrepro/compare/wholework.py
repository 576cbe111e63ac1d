"""What a backend is worth inside the request that it serves, from an artifact's observations.

Where the time of a request goes comes from passes with marks; the request's own time from a pass
without. Stages are medians over launches, each an element of what was measured; shares and
predictions are exact.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Any, Final

from attnrepro.compare import published
from attnrepro_runner import orderstats, shares

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

LAUNCH_BOUND: Final = Fraction(12, 10)
"""A request whose synchronised time is this many times the device's own waits for the host."""


@dataclass(frozen=True, kw_only=True)
class RequestTime:
    """One subject's request in one cell."""

    cell: str
    """Id and label."""
    subject: str
    model: str
    layers: int
    total_ns: int
    """Median of launch medians of the clock `request`."""
    stages_ns: Mapping[str, int]
    device_ns: int | None
    uncompared: int
    """Launches of them all whose output could not be held against textbook attention's."""
    launches: int
    share: Fraction
    """Attention's, of the stages."""
    largest_remaining: str
    bound: str
    """launch, device or undetermined."""
    evidence: str


@dataclass(frozen=True, kw_only=True)
class RequestGain:
    """A candidate against a baseline inside the same request."""

    cell: str
    subject: str
    baseline: str
    compared: shares.Comparison
    verdict: str
    """Of the whole request, over launches."""
    noise: Fraction
    """Relative half width of the baseline's interval over launches."""
    least_share: Fraction | None
    """Share of attention below which this gain cannot be told from that noise."""


def requests(observations: Mapping[str, Any]) -> list[RequestTime]:
    """Requests that were timed, in the artifact's order."""
    return [
        found
        for cell in observations["cells"]
        for subject in cell["subjects"]
        if (found := _request(cell, subject)) is not None
    ]


def gains(observations: Mapping[str, Any]) -> list[RequestGain]:
    """Every candidate against every baseline, where both were timed in a request."""
    return list(_gains(observations))


def relative_noise(timing: Mapping[str, Any]) -> Fraction | None:
    """Relative half width of a clock's interval over launches; None with one launch."""
    interval, median = timing["interval"], timing["median"]["value_ns"]
    if interval["lower_ns"] is None or not median:
        return None
    return Fraction(interval["upper_ns"] - interval["lower_ns"], 2 * median)


def _request(cell: Mapping[str, Any], subject: Mapping[str, Any]) -> RequestTime | None:
    timing, described = subject["timing"].get("request"), subject.get("requests", ())
    if timing is None or timing["median"]["value_ns"] is None or not described:
        return None
    passes = [launch["request"] for launch in described]
    stages = {
        name: _median([p["stages_ns"].get(name, 0) for p in passes]) for name in _names(passes)
    }
    times = [p["device_ns"] for p in passes if p["device_ns"] is not None]
    device = _median(times) if times else None
    total = timing["median"]["value_ns"]
    bound, evidence = _bound(total, device)
    return RequestTime(
        cell=f"{cell['id']} {cell['label']}",
        subject=subject["subject"],
        model=passes[0]["model"],
        layers=passes[0]["layers"],
        total_ns=total,
        stages_ns=stages,
        device_ns=device,
        uncompared=sum("agreement" in p and p["agreement"]["error"] is None for p in passes),
        launches=len(passes),
        share=shares.attention_share(stages) if sum(stages.values()) else Fraction(0),
        largest_remaining=shares.largest_remaining(stages),
        bound=bound,
        evidence=evidence,
    )


def _bound(total: int, device: int | None) -> tuple[str, str]:
    if device is None:
        return "undetermined", "a CPU, or a request that waits for its device: no second clock"
    ratio = Fraction(total, max(1, device))
    text = f"{float(ratio):.2f}× the device's own time with its launches hidden"
    return ("launch" if ratio >= LAUNCH_BOUND else "device"), text


def _gains(observations: Mapping[str, Any]) -> Iterator[RequestGain]:
    for cell in observations["cells"]:
        timed = {s["subject"]: _request(cell, s) for s in cell["subjects"]}
        for subject in cell["subjects"]:
            for claim in subject["comparisons"]:
                candidate, baseline = timed[subject["subject"]], timed[claim["baseline"]]
                if claim["clock"] != "request" or candidate is None or baseline is None:
                    continue
                compared = shares.compare(
                    baseline.stages_ns,
                    candidate.stages_ns,
                    baseline_total_ns=baseline.total_ns,
                    candidate_total_ns=candidate.total_ns,
                )
                other = next(s for s in cell["subjects"] if s["subject"] == claim["baseline"])
                noise = relative_noise(other["timing"]["request"]) or Fraction(0)
                yield RequestGain(
                    cell=candidate.cell,
                    subject=candidate.subject,
                    baseline=baseline.subject,
                    compared=compared,
                    verdict=claim["verdict"],
                    noise=noise,
                    least_share=shares.least_share(compared.attention_ratio, noise),
                )


def _names(passes: Sequence[Mapping[str, Any]]) -> list[str]:
    return list(dict.fromkeys(name for p in passes for name in p["stages_ns"]))


def _median(values: Sequence[int]) -> int:
    return sorted(values)[orderstats.median_rank(len(values)) - 1]


def attention_clock(timing: Mapping[str, Any]) -> str | None:
    """The clock that tells attention alone: kernel, op or host."""
    return next((c for c in published.CLOCKS if c in timing and c != "request"), None)
