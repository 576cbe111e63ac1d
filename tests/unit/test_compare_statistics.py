from __future__ import annotations

import random
from fractions import Fraction
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attnrepro.compare.statistics import Verdict, compare, rank_test, ratio_interval

TIMES = st.lists(st.integers(1, 50), min_size=4, max_size=6)


def brute_force_p(first: list[int], second: list[int]) -> Fraction:
    pooled = [*first, *second]
    ranks = [
        sum(2 for x in pooled if x < value) + 1 + sum(1 for x in pooled if x == value)
        for value in pooled
    ]
    observed = sum(ranks[: len(first)])
    sums = [sum(ranks[i] for i in c) for c in combinations(range(len(pooled)), len(first))]
    below = sum(value <= observed for value in sums)
    above = sum(value >= observed for value in sums)
    return min(Fraction(1), Fraction(2 * min(below, above), len(sums)))


@given(TIMES, TIMES)
def test_p_is_that_of_all_splits(first: list[int], second: list[int]) -> None:
    assert rank_test(first, second) == brute_force_p(first, second)


@pytest.mark.parametrize(
    ("size", "smallest"), [(3, Fraction(1, 10)), (4, Fraction(1, 35)), (5, Fraction(1, 126))]
)
def test_smallest_p(size: int, smallest: Fraction) -> None:
    assert rank_test(range(1, 1 + size), range(100, 100 + size)) == smallest


def test_p_is_exact_for_many_launches() -> None:
    assert rank_test(range(1, 31), range(100, 130)) == Fraction(2, 118264581564861424)


@given(st.lists(st.integers(1, 10**6), min_size=10, max_size=10, unique=True))
def test_interval_excludes_one_exactly_when_the_test_rejects(values: list[int]) -> None:
    subject, baseline = values[:5], values[5:]
    interval = ratio_interval(subject, baseline, Fraction(5, 100))
    assert interval is not None
    rejected = rank_test(subject, baseline) <= Fraction(5, 100)
    assert rejected == (not interval[0] <= 1 <= interval[1])


@given(TIMES, TIMES)
def test_exchanging_the_sides_inverts_the_verdict(first: list[int], second: list[int]) -> None:
    there, back = compare(first, second), compare(second, first)
    inverse = {Verdict.FASTER: Verdict.SLOWER, Verdict.SLOWER: Verdict.FASTER}
    assert back.verdict == inverse.get(there.verdict, there.verdict)
    assert there.ratio is not None
    assert back.ratio == 1 / there.ratio


def test_clear_difference_is_told() -> None:
    slow, fast = [1300, 1310, 1290, 1305, 1299], [1000, 1010, 990, 1005, 1001]
    assert compare(fast, slow).verdict is Verdict.FASTER
    assert compare(slow, fast).verdict is Verdict.SLOWER
    assert float(compare(fast, slow).ratio or 0) == pytest.approx(1.3, rel=0.01)


def test_equal_code_is_the_same() -> None:
    result = compare([1000, 1001, 1002, 1003, 1004], [1001, 1000, 1003, 1002, 1005])
    assert result.verdict is Verdict.SAME
    assert "margin of 2 %" in result.reason


def test_real_difference_within_the_margin_is_the_same() -> None:
    assert compare([1000, 1001, 1002, 1003], [1011, 1012, 1010, 1013]).verdict is Verdict.SAME


def test_scatter_is_ambiguous() -> None:
    assert compare([1000, 1300, 900, 1200, 1100], [1050, 950, 1250, 1150, 1000]).verdict is (
        Verdict.AMBIGUOUS
    )


@pytest.mark.parametrize(("size", "word"), [(1, "one launch"), (3, "3 launches")])
def test_few_launches_give_numbers_and_no_word(size: int, word: str) -> None:
    result = compare([1000] * size, [2000] * 5)
    assert result.verdict is Verdict.INCONCLUSIVE
    assert word in result.reason
    assert result.ratio == 2
    assert result.p_value is None


def test_nothing_measured_is_inconclusive() -> None:
    assert compare([], [1000] * 5).verdict is Verdict.INCONCLUSIVE


def test_false_verdicts_are_as_rare_as_the_level_says() -> None:
    source = random.Random(20260101)
    wrong = 0
    for _ in range(2000):
        launches = [source.lognormvariate(14, 0.2) for _ in range(10)]
        times = [round(x) for x in launches]
        wrong += compare(times[:5], times[5:]).verdict in (Verdict.FASTER, Verdict.SLOWER)
    assert wrong / 2000 <= 0.05


def test_margin_and_level_are_the_callers() -> None:
    slow, fast = [1100, 1101, 1102, 1103], [1000, 1001, 1002, 1003]
    assert compare(fast, slow, margin=Fraction(2, 10)).verdict is Verdict.SAME
    assert compare(fast, slow, confidence="0.99").verdict is Verdict.AMBIGUOUS
