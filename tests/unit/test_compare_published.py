from __future__ import annotations

import struct
from typing import Any

import pytest

from attnrepro.compare import published


def test_samples_are_little_endian() -> None:
    assert published.decode_samples(struct.pack("<2q", 1, -2)) == [1, -2]
    with pytest.raises(ValueError, match="whole number"):
        published.decode_samples(b"123")


@pytest.mark.parametrize(
    "discards",
    [
        [{"first": 3, "count": 3}],
        [{"first": 0, "count": 2}, {"first": 1, "count": 1}],
    ],
)
def test_senseless_discards_are_refused(discards: list[dict[str, Any]]) -> None:
    with pytest.raises(ValueError, match="outside the samples or overlaps"):
        published.used_samples([1, 2, 3, 4], discards)


def test_tail_is_withheld_until_its_limit_exists() -> None:
    value, limit = published.tail(list(range(28)), 0.9, 0.95)
    assert value["value_ns"] is None
    assert "needs 29" in value["reason"]
    value, limit = published.tail(list(range(29)), 0.9, 0.95)
    assert (value["rank"], value["value_ns"]) == (27, 26)
    assert (limit["rank"], limit["value_ns"]) == (29, 28)


@pytest.mark.parametrize(("n", "confidence"), [(2, "0.5"), (5, "0.9375"), (6, "0.95")])
def test_interval_over_few_launches_has_the_confidence_it_has(n: int, confidence: str) -> None:
    interval = published.widest_interval(list(range(n)), 0.95)
    assert interval["confidence"] == confidence
    assert (interval["lower_rank"], interval["upper_rank"]) == (1, n)


def test_one_launch_has_no_interval() -> None:
    interval = published.widest_interval([5], 0.95)
    assert interval["lower_ns"] is None
    assert interval["reason"]


def test_even_count_takes_the_lower_median() -> None:
    assert published.median([1, 2, 3, 4])["value_ns"] == 2


def test_probability_is_written_as_meant() -> None:
    assert published.decimal_text(0.95) == "0.95"
    assert published.decimal_text(1e-05) == "0.00001"
