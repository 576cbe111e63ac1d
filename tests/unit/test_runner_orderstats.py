from __future__ import annotations

import math
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attnrepro_runner import orderstats

QUANTILES = st.sampled_from(["0.5", "0.9", "0.95", "0.99", "0.999", "1/3", "0.25"]).map(Fraction)
LEVELS = st.sampled_from(["0.5", "0.8", "0.95", "0.99", "0.9999"]).map(Fraction)


def exact_cdf(n: int, q: Fraction, k: int) -> Fraction:
    return sum(
        (math.comb(n, j) * q**j * (1 - q) ** (n - j) for j in range(min(k, n) + 1)), Fraction(0)
    )


@pytest.mark.parametrize(
    ("q", "at95", "at99"),
    [("0.9", 29, 44), ("0.95", 59, 90), ("0.99", 299, 459), ("0.999", 2995, 4603)],
)
def test_samples_needed_for_upper_limits(q: str, at95: int, at99: int) -> None:
    for confidence, needed in (("0.95", at95), ("0.99", at99)):
        assert orderstats.samples_needed(q, confidence) == needed
        assert orderstats.upper_limit_rank(needed, q, confidence) == needed
        assert orderstats.upper_limit_rank(needed - 1, q, confidence) is None


def test_quantile_ranks_are_exact_where_floats_are_not() -> None:
    # 0.07 * 100 and 0.55 * 100 round above 7 and 55 in binary floating point.
    assert [orderstats.quantile_rank(100, q) for q in (0.07, 0.55, 0.9, 0.99)] == [7, 55, 90, 99]
    assert orderstats.quantile_rank(5, "0") == 1
    assert [orderstats.median_rank(n) for n in (1, 2, 3, 4, 100, 101)] == [1, 1, 2, 2, 50, 51]


def test_known_median_intervals() -> None:
    # Conover, Practical Nonparametric Statistics: sign-test intervals for the median.
    assert orderstats.binomial_interval(10, "0.5", "0.95") == (2, 9)
    assert orderstats.binomial_interval(20, "0.5", "0.95") == (6, 15)
    assert orderstats.binomial_interval(100, "0.5", "0.95") == (40, 61)
    assert orderstats.binomial_interval(5, "0.5", "0.95") is None


@given(n=st.integers(1, 60), q=QUANTILES, level=LEVELS)
def test_interval_is_the_definition(n: int, q: Fraction, level: Fraction) -> None:
    tail = (1 - level) / 2
    below = [r for r in range(1, n + 1) if exact_cdf(n, q, r - 1) <= tail]
    above = [r for r in range(1, n + 1) if 1 - exact_cdf(n, q, r - 1) <= tail]
    expected = (max(below), min(above)) if below and above else None
    assert orderstats.binomial_interval(n, q, level) == expected
    if expected is not None:
        lo, hi = expected
        assert exact_cdf(n, q, hi - 1) - exact_cdf(n, q, lo - 1) >= level


@given(n=st.integers(1, 60), q=QUANTILES, level=LEVELS)
def test_upper_limit_is_the_definition(n: int, q: Fraction, level: Fraction) -> None:
    ranks = [r for r in range(1, n + 1) if exact_cdf(n, q, r - 1) >= level]
    assert orderstats.upper_limit_rank(n, q, level) == (min(ranks) if ranks else None)


@given(n=st.integers(1, 400), q=QUANTILES, k=st.integers(-1, 400))
def test_cdf(n: int, q: Fraction, k: int) -> None:
    assert orderstats.binomial_cdf(n, q, k) == (exact_cdf(n, q, k) if k >= 0 else 0)


def test_a_tie_with_the_level_is_decided_exactly() -> None:
    # P(B >= 5) of Binomial(5, 1/2) is exactly 1/32: fixed point bounds cannot decide it.
    assert orderstats.upper_limit_rank(5, "0.5", 1 - Fraction(1, 32)) == 5
    assert orderstats.upper_limit_rank(5, "0.5", 1 - Fraction(1, 33)) is None


@pytest.mark.timeout(60)
def test_a_million_samples_end_soon_and_near_the_normal_limit() -> None:
    interval = orderstats.binomial_interval(1_000_000, "0.5", "0.95")
    assert interval is not None
    assert interval == pytest.approx((500_000 - 980, 500_000 + 981), abs=2)


def test_lag1_autocorrelation() -> None:
    assert orderstats.lag1_autocorrelation([1, 2]) is None
    assert orderstats.lag1_autocorrelation([7, 7, 7, 7]) is None
    assert orderstats.lag1_autocorrelation([1, 2, 3]) == 0.0
    assert orderstats.lag1_autocorrelation([1, -1, 1, -1]) == -0.75
    assert orderstats.lag1_autocorrelation([10**15 + x for x in (0, 0, 1, 1)]) == 0.25


def test_refusals() -> None:
    with pytest.raises(ValueError, match="no order statistic"):
        orderstats.median_rank(0)
    with pytest.raises(ValueError, match="strictly between"):
        orderstats.binomial_interval(10, "1", "0.95")
    with pytest.raises(ValueError, match="not a probability"):
        orderstats.quantile_rank(10, "1.5")
