"""Verdicts between two subjects: an exact rank test and an exact interval over launch medians.

The launch is the unit of repetition: two runs of identical code differ by far more than their
within-launch intervals say. So the numbers that are compared are launch medians, at least four a
side, and the test is the two-sided Mann-Whitney test by its exact permutation distribution (ties by
midranks). The interval of the ratio is made of the ordered pairwise ratios, at the ranks which the
same distribution gives (Hodges and Lehmann 1963, on a scale instead of a shift), so that test and
interval agree. All of it is integer and rational arithmetic from the standard library.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from fractions import Fraction
from functools import lru_cache
from math import comb
from typing import TYPE_CHECKING, Final

from attnrepro_runner import orderstats

if TYPE_CHECKING:
    from collections.abc import Sequence

    from attnrepro.jsonio import JsonObject

LEAST_LAUNCHES: Final = 4
"""A side; with 3 the smallest two-sided p is 0.10."""

MARGIN: Final = Fraction(2, 100)
"""Equivalence margin: ratios between 1/1.02 and 1.02 count as the same.

A smaller difference is of little use to a reader, and on shared machines it cannot be told from
placement (`doctor --aa` prints what a machine can tell). Stated in every verdict."""


class Verdict(StrEnum):
    """What may be said of two sets of launches."""

    SAME = "SAME"
    """The whole interval of the ratio lies within the margin."""
    FASTER = "FASTER"
    """p <= 1 - confidence, and the ratio is beyond the margin."""
    SLOWER = "SLOWER"
    AMBIGUOUS = "AMBIGUOUS"
    """Neither a difference nor its absence is shown."""
    INCONCLUSIVE = "INCONCLUSIVE"
    """Too few launches for any word."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """A subject against a baseline, or one artifact against another."""

    ratio: Fraction | None
    """Baseline's median of launch medians over the subject's: above 1 is faster."""
    lower: Fraction | None
    upper: Fraction | None
    p_value: Fraction | None
    launches: tuple[int, int]
    """Of the subject, of the baseline."""
    verdict: Verdict
    reason: str

    def document(self, *, clock: str, baseline: str) -> JsonObject:
        """As `comparison` of the observations' schema; reals as hex strings."""
        return {
            "clock": clock,
            "baseline": baseline,
            "ratio": _hex(self.ratio),
            "lower": _hex(self.lower),
            "upper": _hex(self.upper),
            "p_value": _hex(self.p_value),
            "launches": list(self.launches),
            "verdict": self.verdict.value,
            "reason": self.reason,
        }


def compare(
    subject: Sequence[int],
    baseline: Sequence[int],
    *,
    confidence: float | str = "0.95",
    margin: Fraction = MARGIN,
) -> Comparison:
    """Compare launch medians (ns, positive) of a subject with those of a baseline."""
    sizes = (len(subject), len(baseline))
    if not all(sizes):
        return _undecided(None, sizes, "no time was taken on one side")
    if min(*subject, *baseline) <= 0:
        return _undecided(None, sizes, "a launch's median is no time: it is not above zero")
    ratio = Fraction(_median(baseline), _median(subject))
    if min(sizes) < LEAST_LAUNCHES:
        few = "one launch" if min(sizes) == 1 else f"{min(sizes)} launches"
        return _undecided(ratio, sizes, f"{few}; a verdict needs {LEAST_LAUNCHES} a side")
    alpha = 1 - orderstats.as_fraction(confidence)
    p_value = rank_test(subject, baseline)
    interval = ratio_interval(subject, baseline, alpha)
    verdict, reason = _judge(ratio, interval, p_value, alpha, margin)
    lower, upper = interval or (None, None)
    return Comparison(
        ratio=ratio,
        lower=lower,
        upper=upper,
        p_value=p_value,
        launches=sizes,
        verdict=verdict,
        reason=reason,
    )


def _undecided(ratio: Fraction | None, launches: tuple[int, int], reason: str) -> Comparison:
    return Comparison(
        ratio=ratio,
        lower=None,
        upper=None,
        p_value=None,
        launches=launches,
        verdict=Verdict.INCONCLUSIVE,
        reason=reason,
    )


def rank_test(first: Sequence[int], second: Sequence[int]) -> Fraction:
    """Exact two-sided p of the Mann-Whitney test: twice the smaller tail, at most 1.

    Under the hypothesis every split of the pooled values is equally likely; ties share midranks.
    """
    doubled = _doubled_midranks([*first, *second])
    observed = sum(doubled[: len(first)])
    counts = _sum_counts(tuple(sorted(doubled)), len(first))
    total = sum(counts.values())
    below = sum(count for value, count in counts.items() if value <= observed)
    above = sum(count for value, count in counts.items() if value >= observed)
    return min(Fraction(1), Fraction(2 * min(below, above), total))


def ratio_interval(
    subject: Sequence[int], baseline: Sequence[int], alpha: Fraction
) -> tuple[Fraction, Fraction] | None:
    """Interval of the ratio baseline / subject with confidence 1 - alpha, or None.

    Ranks k and mn + 1 - k of the mn pairwise ratios, k the largest with P(U < k) <= alpha / 2.
    """
    pairs = sorted(Fraction(b, s) for b in baseline for s in subject)
    rank = _interval_rank(len(subject), len(baseline), alpha)
    return (pairs[rank - 1], pairs[-rank]) if rank else None


@lru_cache(maxsize=256)
def _interval_rank(m: int, n: int, alpha: Fraction) -> int:
    """Largest k with P(U <= k - 1) <= alpha / 2 for the untied U of sizes m and n; 0 if none."""
    counts = _sum_counts(tuple(range(2, 2 * (m + n) + 1, 2)), m)
    total = sum(counts.values())
    lowest = m * (m + 1)  # doubled rank sum of the smallest split
    cumulated, rank = 0, 0
    for u in range(m * n + 1):
        cumulated += counts.get(lowest + 2 * u, 0)
        if Fraction(cumulated, total) > alpha / 2:
            break
        rank = u + 1
    return rank


@lru_cache(maxsize=256)
def _sum_counts(values: tuple[int, ...], size: int) -> dict[int, int]:
    """For each sum, how many subsets of `size` of these values have it.

    Polynomials in x^sum, one for each size of subset, each kept in one integer with a field of
    whole bytes for every coefficient: a hundred launches a side take a second.
    """
    width = (comb(len(values), size).bit_length() + 7) // 8
    polynomials = [1] + [0] * size
    for seen, value in enumerate(values, start=1):
        for taken in range(min(size, seen), 0, -1):
            polynomials[taken] += polynomials[taken - 1] << (8 * width * value)
    fields = sum(values) + 1
    data = polynomials[size].to_bytes(width * fields, "little")
    counts = (int.from_bytes(data[width * f : width * (f + 1)], "little") for f in range(fields))
    return {total: count for total, count in enumerate(counts) if count}


def _judge(
    ratio: Fraction,
    interval: tuple[Fraction, Fraction] | None,
    p_value: Fraction,
    alpha: Fraction,
    margin: Fraction,
) -> tuple[Verdict, str]:
    percent = f"{float(margin) * 100:g} %"
    high, low = 1 + margin, 1 / (1 + margin)
    if interval and low <= interval[0] and interval[1] <= high:
        return Verdict.SAME, f"the whole interval is within the margin of {percent}"
    shown = f"p = {float(p_value):.3g}"
    if p_value <= alpha:
        if ratio > high:
            return Verdict.FASTER, f"{shown}, beyond the margin of {percent}"
        if ratio < low:
            return Verdict.SLOWER, f"{shown}, beyond the margin of {percent}"
        return Verdict.AMBIGUOUS, f"{shown}, but the ratio is within the margin of {percent}"
    return Verdict.AMBIGUOUS, f"{shown}: neither a difference nor its absence is shown"


def _median(values: Sequence[int]) -> int:
    return sorted(values)[orderstats.median_rank(len(values)) - 1]


def _doubled_midranks(values: Sequence[int]) -> list[int]:
    """Twice the midrank of each value, an integer even for ties."""
    ordered = sorted(values)
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for position, value in enumerate(ordered, start=1):
        first.setdefault(value, position)
        last[value] = position
    return [first[value] + last[value] for value in values]


def _hex(value: Fraction | None) -> str | None:
    return None if value is None else float(value).hex()
