from __future__ import annotations

import random
from typing import Any

import pytest

from attnrepro import aa
from attnrepro.errors import AttnreproError, InvalidDocument
from attnrepro.manifest.load import load


def timing(medians: list[int], half: int = 1) -> dict[str, Any]:
    return {
        "launches": [
            {
                "launch": number,
                "median": {"value_ns": value},
                "interval": {"lower_ns": value - half, "upper_ns": value + half},
            }
            for number, value in enumerate(medians)
        ]
    }


def test_quiet_machine_detects_little_differences() -> None:
    source = random.Random(1)
    a, b = ([1_000_000 + source.randrange(1000) for _ in range(10)] for _ in range(2))
    found = aa.judge(timing(a), timing(b), where="here")
    assert found.comparisons == 252
    assert found.false_verdicts == 0
    assert found.smallest_detectable == 1.03
    assert found.scatter < 1.002


def test_noisy_machine_says_so() -> None:
    source = random.Random(2)
    a, b = ([round(1e6 * source.lognormvariate(0, 0.2)) for _ in range(10)] for _ in range(2))
    found = aa.judge(timing(a), timing(b), where="here")
    assert found.smallest_detectable is not None
    assert found.smallest_detectable > 1.2
    assert found.disjoint[0] > 100
    assert found.disjoint[1] == 190
    assert "identical code" in found.text()
    assert found.document()["false_verdict_rate"] == found.false_verdicts / 252


def test_unequal_sides_are_seen_as_false_verdicts() -> None:
    a, b = [1000 + n for n in range(10)], [1300 + n for n in range(10)]
    assert aa.judge(timing(a), timing(b), where="here").false_verdicts == 252


def test_hopeless_machine_detects_nothing() -> None:
    a = [10**3, 10**6] * 5
    found = aa.judge(timing(a), timing(a), where="here")
    assert found.smallest_detectable is None
    assert "no difference up to 4×" in found.text()


def test_own_manifest_is_valid() -> None:
    import json

    loaded = load(json.dumps(aa._MANIFEST).encode())
    assert {s.backend for s in loaded.subjects} == {"sdpa.flash"}
    assert loaded.document["timing"]["launches"] == aa.MADE


def kept(launches: int) -> dict[str, Any]:
    """Samples of identical code, as the runner's fidelity keeps them."""
    return {
        "schema": "attnrepro.aa/1",
        "device": "Some CPU",
        "series": [
            {
                "task": f"launch-{launch:02d}",
                "launch": launch,
                "cell": "c000",
                "subject": subject,
                "clock": "host",
                "discards": [{"first": 0, "count": 1, "reason": "switch"}],
                "stop": "max_samples",
                "flushed": True,
                "samples": [9_000_000, *(1_000_000 + 1000 * launch + n for n in range(9))],
            }
            for launch in range(launches)
            for subject in ("a", "b")
        ],
    }


def test_kept_samples_are_judged_without_running_anything() -> None:
    (found,) = aa.from_samples(kept(6))
    assert (found.launches, found.taken, found.comparisons) == (6, 5, 6)
    assert found.false_verdicts == 0
    assert found.where == "Some CPU, c000, host"
    assert found.scatter == pytest.approx(1.005, abs=1e-4)


def test_a_launch_without_a_usable_sample_is_named_and_paired_with_nothing() -> None:
    document = kept(7)
    gone = next(s for s in document["series"] if (s["launch"], s["subject"]) == (2, "b"))
    gone["discards"] = [{"first": 0, "count": 10, "reason": "the device slowed down"}]
    document["series"] = [s for s in document["series"] if (s["launch"], s["subject"]) != (5, "a")]
    (found,) = aa.from_samples(document)
    assert found.launches == 5
    assert found.left_out == ("2: no usable sample of b", "5: no usable sample of a")
    assert "left out         launch 2: no usable sample of b" in found.text()
    assert found.document()["left_out"] == list(found.left_out)


@pytest.mark.parametrize(
    ("change", "pointer"),
    [
        ({"samples": [1.5]}, "/series/0/samples/0"),
        ({"samples": [0] * 12}, "/series/0/samples/0"),
        ({"samples": [-3]}, "/series/0/samples/0"),
        ({"discards": [{"first": 9, "count": 3, "reason": "x"}]}, "/series/0/discards"),
        ({"launch": 1}, "/series/2/launch"),
        ({"subject": "c"}, "/series/0/subject"),
    ],
)
def test_damaged_samples_are_named_by_their_pointer(change: dict[str, Any], pointer: str) -> None:
    document = kept(6)
    document["series"][0] |= change
    with pytest.raises(InvalidDocument) as caught:
        aa.from_samples(document)
    assert caught.value.problems[0].pointer == pointer
    for damaged in ({"schema": "attnrepro.aa/1"}, {**document, "series": 5}):
        with pytest.raises(InvalidDocument):
            aa.from_samples(damaged)


def test_too_few_launches_or_another_document_is_an_error() -> None:
    with pytest.raises(AttnreproError, match="4 launches: A/A needs 5"):
        aa.from_samples(kept(4))
    with pytest.raises(AttnreproError, match="holds no samples"):
        aa.from_samples({"schema": "attnrepro.result/1"})
