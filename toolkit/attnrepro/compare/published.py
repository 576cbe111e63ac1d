"""The statistics that an artifact publishes, each an order statistic of its raw samples.

Every value is an element of the sorted samples, named by its 1-based rank, in integer ns. The
same functions make the numbers and check them (`artifact.verify`), with the standard library alone.
"""

from __future__ import annotations

import struct
from decimal import Decimal
from fractions import Fraction
from typing import TYPE_CHECKING, Any, Final

from attnrepro_runner import orderstats

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from attnrepro.jsonio import JsonObject

CLOCKS: Final = ("kernel", "op", "host", "request")
"""Order in which a clock is taken for the one time that a row shows."""


def decode_samples(data: bytes) -> list[int]:
    """Samples of a member: little-endian int64 ns, in time order, discards included.

    Raises ValueError where the length is no multiple of 8.
    """
    if len(data) % 8:
        message = f"{len(data)} bytes are no whole number of 8-byte samples"
        raise ValueError(message)
    return list(struct.unpack(f"<{len(data) // 8}q", data))


def used_samples(values: Sequence[int], discards: Sequence[Mapping[str, Any]]) -> list[int]:
    """The samples that count, in time order.

    Raises ValueError where a discard lies outside the samples or two overlap.
    """
    kept = [True] * len(values)
    for discard in discards:
        first, end = discard["first"], discard["first"] + discard["count"]
        if end > len(values) or not all(kept[first:end]):
            message = f"discard {first}..{end} lies outside the samples or overlaps another"
            raise ValueError(message)
        kept[first:end] = [False] * (end - first)
    return [value for value, keep in zip(values, kept, strict=True) if keep]


def launch_timing(
    entry: Mapping[str, Any],
    values: Sequence[int],
    *,
    launch: int,
    tails: Sequence[float | str],
    confidence: float | str,
) -> JsonObject:
    """What one launch says about one clock (`launch_timing` of the observations' schema).

    Args:
        entry: the runner's record of the samples (`samples` of the result's schema).
        values: all samples of the member, ns, in time order.
        launch: number of the launch.
        tails: quantiles above one half.
        confidence: of the within-launch interval and of each tail's upper limit.
    """
    used = used_samples(values, entry["discards"])
    ordered = sorted(used)
    autocorrelation = orderstats.lag1_autocorrelation(used)
    return {
        "launch": launch,
        "member": entry["member"],
        "n": len(values),
        "used": len(used),
        "discards": sorted((dict(d) for d in entry["discards"]), key=lambda d: d["first"]),
        "stop": entry["stop"],
        "flushed": entry["flushed"],
        "calls_per_sample": entry["calls_per_sample"],
        **({"repeated": entry["repeated"]} if "repeated" in entry else {}),
        "median": median(ordered),
        "interval": interval(ordered, confidence),
        "tails": [statistic for q in tails for statistic in tail(ordered, q, confidence)],
        "autocorrelation_lag1": None if autocorrelation is None else autocorrelation.hex(),
    }


def clock_timing(
    launches: Sequence[Mapping[str, Any]],
    *,
    tails: Sequence[float | str],
    confidence: float | str,
) -> JsonObject:
    """What all launches say about one clock (`clock_timing` of the observations' schema).

    Launches without a usable sample are listed and take no part.
    """
    medians = launch_medians({"launches": launches})
    per_tail = []
    for q in map(decimal_text, tails):
        values = [
            statistic["value_ns"]
            for launch in launches
            for statistic in launch["tails"]
            if statistic["quantile"] == q
            and statistic["statistic"] == "quantile"
            and statistic["value_ns"] is not None
        ]
        per_tail.append(_median_of_quantiles(sorted(values), q, len(launches)))
    return {
        "launches": [dict(launch) for launch in launches],
        "median": median(sorted(medians)),
        "interval": widest_interval(sorted(medians), confidence),
        "tails": per_tail,
    }


def headline_clock(timing: Mapping[str, Any]) -> str | None:
    """The clock of which a row shows the time; the others are in `show --csv`."""
    return next((clock for clock in CLOCKS if clock in timing), None)


def launch_medians(timing: Mapping[str, Any]) -> list[int]:
    """Medians of the launches that have one, in launch order, ns."""
    return [
        launch["median"]["value_ns"]
        for launch in timing["launches"]
        if launch["median"]["value_ns"] is not None
    ]


def median(ordered: Sequence[int]) -> JsonObject:
    """x[ceil(n / 2)]; no value without samples."""
    if not ordered:
        return _statistic("median", "0.5", n=0, reason="no usable sample")
    rank = orderstats.median_rank(len(ordered))
    return _statistic("median", "0.5", n=len(ordered), rank=rank, value_ns=ordered[rank - 1])


def interval(ordered: Sequence[int], confidence: float | str) -> JsonObject:
    """Two-sided interval of the median: a rank pair from the exact binomial."""
    n, level = len(ordered), decimal_text(confidence)
    ranks = orderstats.binomial_interval(n, "0.5", level) if n else None
    if ranks is None:
        reason = f"{n} samples are too few for a {_percent(level)} interval"
        return _statistic("interval", "0.5", n=n, confidence=level, reason=reason)
    return _ranked_interval(ordered, ranks, level, None)


def widest_interval(ordered: Sequence[int], confidence: float | str) -> JsonObject:
    """Interval of the median over launches; with few launches, smallest to largest.

    Five launches cannot give 95 %: their range covers the median with 1 - 2^(1-5) = 93.75 %. That
    is printed with the confidence it has, never with the one that was asked for.
    """
    wanted = interval(ordered, confidence)
    n = len(ordered)
    if wanted["lower_rank"] is not None or n < 2:
        return wanted
    reached = decimal_text(str(_round_down(1 - Fraction(1, 2 ** (n - 1)))))
    reason = f"{n} launches cannot give {_percent(decimal_text(confidence))}"
    return _ranked_interval(ordered, (1, n), reached, reason)


def tail(
    ordered: Sequence[int], quantile: float | str, confidence: float | str
) -> tuple[JsonObject, JsonObject]:
    """A tail and its one-sided upper limit; neither where the samples cannot give the limit."""
    n, q, level = len(ordered), decimal_text(quantile), decimal_text(confidence)
    upper = orderstats.upper_limit_rank(n, q, level) if n else None
    if upper is None:
        needed = orderstats.samples_needed(q, level)
        reason = f"{n} samples; its {_percent(level)} upper limit needs {needed}"
        return (
            _statistic("quantile", q, n=n, reason=reason),
            _statistic("upper_limit", q, n=n, confidence=level, reason=reason),
        )
    rank = orderstats.quantile_rank(n, q)
    return (
        _statistic("quantile", q, n=n, rank=rank, value_ns=ordered[rank - 1]),
        _statistic(
            "upper_limit", q, n=n, confidence=level, rank=upper, value_ns=ordered[upper - 1]
        ),
    )


def decimal_text(value: float | str) -> str:
    """A probability as a plain decimal: 0.95 as "0.95"."""
    return format(Decimal(repr(value) if isinstance(value, float) else value), "f")


def _median_of_quantiles(
    ordered: Sequence[int], quantile: float | str, launches: int
) -> JsonObject:
    q = decimal_text(quantile)
    if not ordered:
        return _statistic("quantile", q, n=0, reason="no launch has samples enough for this tail")
    rank = orderstats.median_rank(len(ordered))
    few = len(ordered) < launches
    reason = f"{len(ordered)} of {launches} launches have samples enough" if few else None
    return _statistic(
        "quantile", q, n=len(ordered), rank=rank, value_ns=ordered[rank - 1], reason=reason
    )


def _ranked_interval(
    ordered: Sequence[int], ranks: tuple[int, int], confidence: str, reason: str | None
) -> JsonObject:
    lower, upper = ranks
    return _statistic(
        "interval",
        "0.5",
        n=len(ordered),
        confidence=confidence,
        lower_rank=lower,
        upper_rank=upper,
        lower_ns=ordered[lower - 1],
        upper_ns=ordered[upper - 1],
        reason=reason,
    )


def _statistic(
    statistic: str,
    quantile: str,
    *,
    n: int,
    confidence: str | None = None,
    rank: int | None = None,
    value_ns: int | None = None,
    lower_rank: int | None = None,
    upper_rank: int | None = None,
    lower_ns: int | None = None,
    upper_ns: int | None = None,
    reason: str | None = None,
) -> JsonObject:
    return {
        "statistic": statistic,
        "quantile": quantile,
        "confidence": confidence,
        "n": n,
        "rank": rank,
        "value_ns": value_ns,
        "lower_rank": lower_rank,
        "upper_rank": upper_rank,
        "lower_ns": lower_ns,
        "upper_ns": upper_ns,
        "reason": reason,
    }


def _round_down(value: Fraction) -> Decimal:
    """Six decimals, never above the value."""
    return (Decimal(value.numerator * 10**6 // value.denominator) / 10**6).normalize()


def _percent(level: str) -> str:
    return f"{(Decimal(level) * 100).normalize():f} %"
