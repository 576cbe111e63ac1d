"""Ranks of order statistics, exactly: quantiles, their confidence intervals, one-sided limits.

Every published statistic is an element of the sorted samples, named by its 1-based rank, so that a
reader recomputes it with the standard library and gets the same integer. Intervals come from the
exact binomial distribution: for a continuous distribution the number of samples below its
q-quantile is Binomial(n, q), so rank pairs have a coverage that needs no further assumption.
(Samples of a correlated series cover less; see `lag1_autocorrelation`.)
"""

from __future__ import annotations

from fractions import Fraction
from functools import lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

Probability = Fraction | str | int | float
"""A probability as written: "0.99", Fraction(99, 100), or the float 0.99, which means 99/100."""

# Width of the fixed point in which binomial terms are bounded. Bounds that do not decide a
# comparison are replaced by exact integers, so the width bears on speed and never on a result.
_FIXED_BITS = 256


def as_fraction(value: Probability) -> Fraction:
    """Return the number as written; a float is read by its shortest decimal form.

    Raises:
        ValueError: not a number in [0, 1].

    """
    fraction = Fraction(repr(value)) if isinstance(value, float) else Fraction(value)
    if not 0 <= fraction <= 1:
        msg = f"{value!r} is not a probability"
        raise ValueError(msg)
    return fraction


def quantile_rank(n: int, q: Probability) -> int:
    """Rank of the q-quantile of n samples: ceil(q n), at least 1."""
    _check_count(n)
    return max(1, _ceil(as_fraction(q) * n))


def median_rank(n: int) -> int:
    """Rank of the median of n samples: ceil(n / 2)."""
    _check_count(n)
    return (n + 1) // 2


def binomial_interval(n: int, q: Probability, confidence: Probability) -> tuple[int, int] | None:
    """Two-sided, equal-tailed ranks (lo, hi): x[lo] <= q-quantile <= x[hi] with the confidence.

    lo is the largest rank with P(B < lo) <= alpha / 2, hi the smallest with
    P(B >= hi) <= alpha / 2, B ~ Binomial(n, q). None where n is too small for either.
    """
    _check_count(n)
    quantile, level = _open(q, "q"), _open(confidence, "confidence")
    tail = (1 - level) / 2
    lo = _largest_rank_below(n, quantile, tail)
    # P(B >= hi) <= tail is P(n - B <= n - hi) <= tail, and n - B ~ Binomial(n, 1 - q).
    mirrored = _largest_rank_below(n, 1 - quantile, tail)
    if lo == 0 or mirrored == 0:
        return None
    return lo, n - mirrored + 1


def upper_limit_rank(n: int, q: Probability, confidence: Probability) -> int | None:
    """One-sided rank r: q-quantile <= x[r] with the confidence; None where n is too small.

    r is the smallest rank with P(B < r) >= confidence, B ~ Binomial(n, q).
    """
    _check_count(n)
    quantile, level = _open(q, "q"), _open(confidence, "confidence")
    mirrored = _largest_rank_below(n, 1 - quantile, 1 - level)
    return None if mirrored == 0 else n - mirrored + 1


def samples_needed(q: Probability, confidence: Probability) -> int:
    """Fewest samples for which `upper_limit_rank` exists: 1 - q^n >= confidence."""
    quantile, level = _open(q, "q"), _open(confidence, "confidence")
    low, high = 0, 1
    while upper_limit_rank(high, quantile, level) is None:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        if upper_limit_rank(middle, quantile, level) is None:
            low = middle
        else:
            high = middle
    return high


def lag1_autocorrelation(samples: Sequence[int]) -> float | None:
    """Lag-1 autocorrelation of samples in time order, computed in integers and rounded once.

    None for fewer than 3 samples or no variation.
    """
    n = len(samples)
    if n < 3:
        return None
    total = sum(samples)
    deviations = [n * x - total for x in samples]
    variation = sum(d * d for d in deviations)
    if variation == 0:
        return None
    covariation = sum(a * b for a, b in pairwise(deviations))
    return float(Fraction(covariation, variation))


def binomial_cdf(n: int, q: Probability, k: int) -> Fraction:
    """P(B <= k) exactly, B ~ Binomial(n, q); meant for checking, its integers have n digits."""
    quantile = as_fraction(q)
    if k < 0:
        return Fraction(0)
    a, b = quantile.numerator, quantile.denominator
    weights = _exact_prefix(n, a, b, min(k, n))
    return Fraction(weights, b**n)


@lru_cache(maxsize=1024)
def _largest_rank_below(n: int, q: Fraction, tail: Fraction) -> int:
    """Largest r in 0..n with P(B <= r - 1) <= tail (0 where even P(B = 0) is above it)."""
    low, high = _bounded_rank(n, q, tail)
    if low == high:
        return low
    rank = low
    while rank < high and binomial_cdf(n, q, rank) <= tail:
        rank += 1
    return rank


def _bounded_rank(n: int, q: Fraction, tail: Fraction) -> tuple[int, int]:
    """Ranks that surely and possibly satisfy `_largest_rank_below`, by fixed-point bounds."""
    first, terms = _bounded_terms(n, q)
    last = first + len(terms) - 1
    total_lower = sum(lower for lower, _ in terms)
    # One unit bounds each term that was not computed.
    total_upper = sum(upper for _, upper in terms) + first + (n - last)
    lower, upper = 0, first
    sure = first if upper * tail.denominator <= tail.numerator * total_lower else 0
    possible = first
    for rank, (term_lower, term_upper) in enumerate(terms, start=first + 1):
        lower += term_lower
        upper += term_upper
        if upper * tail.denominator <= tail.numerator * total_lower:
            sure = possible = rank
        elif lower * tail.denominator <= tail.numerator * total_upper:
            possible = rank
        else:
            return sure, possible
    return sure, n


def _bounded_terms(n: int, q: Fraction) -> tuple[int, list[tuple[int, int]]]:
    """First k and bounds (lower, upper) of the binomial terms of k, k + 1, …, relative to the mode.

    Bounds are integers in units of 2^-_FIXED_BITS of the term at the mode. Terms left out at either
    end are at most one unit each.
    """
    a, c = q.numerator, q.denominator - q.numerator
    mode = min(n, (n + 1) * a // (a + c))
    one = 1 << _FIXED_BITS
    below: list[tuple[int, int]] = []
    lower = upper = one
    for k in range(mode, 0, -1):
        numerator, denominator = k * c, (n - k + 1) * a
        lower, upper = lower * numerator // denominator, -(-upper * numerator // denominator)
        if upper <= 1:
            break
        below.append((lower, upper))
    above: list[tuple[int, int]] = []
    lower = upper = one
    for k in range(mode, n):
        numerator, denominator = (n - k) * a, (k + 1) * c
        lower, upper = lower * numerator // denominator, -(-upper * numerator // denominator)
        if upper <= 1:
            break
        above.append((lower, upper))
    return mode - len(below), [*reversed(below), (one, one), *above]


def _exact_prefix(n: int, a: int, b: int, k: int) -> int:
    """Sum of C(n, j) a^j (b - a)^(n - j) for j = 0..k."""
    c = b - a
    if c == 0:
        return int(b**n) if k >= n else 0
    term = total = c**n
    for j in range(k):
        term = term * (n - j) * a // ((j + 1) * c)
        total += term
    return int(total)


def _ceil(value: Fraction) -> int:
    return -(-value.numerator // value.denominator)


def _check_count(n: int) -> None:
    if n < 1:
        msg = f"{n} samples have no order statistic"
        raise ValueError(msg)


def _open(value: Probability, name: str) -> Fraction:
    fraction = as_fraction(value)
    if not 0 < fraction < 1:
        msg = f"{name} must lie strictly between 0 and 1, not {value!r}"
        raise ValueError(msg)
    return fraction
