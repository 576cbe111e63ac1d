from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from host_fakes import DEVICE, check_entry, job, manifest, sample_bytes, tasks
from test_results_merge import CONTEXT

from attnrepro.cli.compare import text as compare_text
from attnrepro.compare import diff, scope
from attnrepro.compare.diff import Section
from attnrepro.compare.explain import Stage, compare
from attnrepro.compare.statistics import Verdict
from attnrepro.compare.verdicts import Side
from attnrepro.results import merge


def side(
    results: list[dict[str, Any]] | None = None,
    *,
    image: str = "sha256:aa",
    slower: float = 1,
) -> Side:
    def read(member: str) -> bytes:
        import struct

        values = struct.unpack("<12q", sample_bytes(member))
        return struct.pack("<12q", *(round(v * slower) for v in values))

    merged = merge(manifest(), [job()], results or tasks(), read, CONTEXT)
    return Side(
        repeatable=merged.repeatable,
        observations=merged.observations,
        device_class=scope.device_class(merged.observations["device"]),
        images={"cpu-r1": image},
    )


def test_same_code_is_the_same_and_has_no_cause() -> None:
    report = compare(side(), side(), confidence="0.95")
    assert [c.comparison.verdict for c in report.cells if c.comparison] == [Verdict.SAME] * 2
    assert report.causes == ()
    assert [c.outputs_equal for c in report.cells] == [True, True]


def test_slower_second_is_slower() -> None:
    report = compare(side(), side(slower=1.3), confidence="0.95")
    verdicts = {c.subject: c.comparison for c in report.cells}
    fast = verdicts["fast"]
    assert fast is not None
    assert fast.verdict is Verdict.SLOWER
    assert float(fast.ratio or 0) == pytest.approx(1 / 1.3, rel=0.01)
    assert [cause.stage for cause in report.causes] == [Stage.TIMES]
    assert "2 comparisons at 95 %" in report.chance


def test_causes_stand_in_causal_order() -> None:
    changed = tasks()
    for result in changed:
        result["device"] = DEVICE | {"kernel": "6.1", "governor": "powersave", "model": 2}
        for entry in result["entries"]:
            if "execution" in entry:
                entry["inputs"] = {"q": "11" * 32}
                entry["bits"]["digests"]["out"] = "99" * 32
                entry["execution"]["operators"] = {"aten::other": 1}
                entry["execution"]["plan"] = {"splits": "4"}
                entry["execution"]["libraries"] = {}
    report = compare(side(), side(changed, image="sha256:bb", slower=2), confidence="0.95")
    assert [cause.stage for cause in report.causes] == [
        Stage.IMAGE,
        Stage.DRIVER,
        Stage.DEVICE,
        Stage.CLOCKS,
        Stage.LIBRARIES,
        Stage.KERNELS,
        Stage.PLAN,
        Stage.INPUTS,
        Stage.OUTPUTS,
        Stage.TIMES,
    ]
    assert str(report.causes[0].difference) == "cpu-r1: sha256:aa, and sha256:bb in the other"


def clocked(found: Side, **clocks: str) -> Side:
    """The same run, its times under other clocks' names: new name to the old one."""
    seen = copy.deepcopy(dict(found.observations))
    for subject in seen["cells"][0]["subjects"]:
        subject["timing"] = {new: subject["timing"][old] for new, old in clocks.items()}
    return replace(found, observations=seen)


def test_the_first_clock_that_both_have_is_compared_and_the_request_besides() -> None:
    one, both = clocked(side(), op="host"), clocked(side(), kernel="host", op="host")
    for first, second in ((one, both), (both, one)):
        report = compare(first, second, confidence="0.95")
        assert [c.clock for c in report.cells] == ["op", "op"]
        assert all(c.comparison is not None for c in report.cells)
    requests = clocked(side(), op="host", request="host")
    report = compare(requests, requests, confidence="0.95")
    assert [c.clock for c in report.cells] == ["op", "request"] * 2
    report = compare(clocked(side(), kernel="host"), one, confidence="0.95")
    assert [c.reason for c in report.cells] == ["not timed by the same clock in both"] * 2


def test_failed_cell_is_not_compared() -> None:
    failed = tasks()
    failed[0]["entries"][0] |= {"status": "INCORRECT", "reason": "a tile was dropped"}
    cell = next(c for c in compare(side(), side(failed), confidence="0.95").cells)
    assert cell.comparison is None
    assert cell.reason == "INCORRECT in one of the two: check: a tile was dropped"


def test_other_semantics_are_not_compared() -> None:
    other = tasks()
    other[0]["entries"][0]["probes"]["set"]["v"]["observed"] = "11" * 32
    cell = next(c for c in compare(side(), side(other), confidence="0.95").cells)
    assert cell.comparison is None
    assert "other semantics" in cell.reason


def test_rows_of_one_side_are_listed() -> None:
    alone = side()
    fewer = copy.deepcopy(dict(alone.observations))
    fewer["cells"][0]["subjects"].pop()
    report = compare(alone, replace(alone, observations=fewer), confidence="0.95")
    assert report.only_first == ("forward slow",)
    assert report.only_second == ()


def moved(found: Side, name: str, place: str) -> Side:
    """The same run under a manifest that calls its one cell otherwise and has another first."""
    seen = copy.deepcopy(dict(found.observations))
    seen["cells"][0] |= {"id": place, "label": name}
    repeatable = copy.deepcopy(dict(found.repeatable))
    for table in (
        *(repeatable[part] for part in ("execution", "inputs")),
        *(repeatable["semantics"][part] for part in ("probes", "work")),
        repeatable["outputs"]["digests"],
    ):
        table[place] = table.pop("c000")
    return replace(found, observations=seen, repeatable=repeatable)


def test_one_work_under_two_labels_is_compared() -> None:
    report = compare(side(), moved(side(slower=1.3), "d128-s16384", "c007"), confidence="0.95")
    assert {c.cell for c in report.cells} == {"forward = d128-s16384"}
    verdicts = {c.subject: c.comparison for c in report.cells}
    assert verdicts["fast"] is not None
    assert verdicts["fast"].verdict is Verdict.SLOWER
    assert [cause.stage for cause in report.causes] == [Stage.TIMES]
    assert [c.outputs_equal for c in report.cells] == [True, True]
    assert (report.only_first, report.only_second) == ((), ())


def test_a_tensor_that_does_not_repeat_is_named() -> None:
    found = side()
    seen = copy.deepcopy(dict(found.observations))
    seen["cells"][0]["subjects"][0]["bits"]["observed"]["dq"] = "differs"
    report = compare(found, replace(found, observations=seen), confidence="0.95")
    assert [c.unrepeatable for c in report.cells] == [("dq",), ()]
    text = compare_text(report, Path("a"), Path("b"))
    assert "equal; dq not repeatable" in text
    nothing = compare(found, replace(found, observations={**seen, "cells": []}), confidence="0.95")
    assert "nothing was compared" in compare_text(nothing, Path("a"), Path("b"))


def test_other_inputs_under_another_label_are_another_cell() -> None:
    changed = tasks()
    for result in changed:
        for entry in result["entries"]:
            if "inputs" in entry:
                entry["inputs"] = {"q": "11" * 32}
    report = compare(side(), moved(side(changed), "d128-s16384", "c007"), confidence="0.95")
    assert report.cells == ()
    assert len(report.only_first) == len(report.only_second) == 2


def test_claimed_output_that_is_missing_is_a_difference() -> None:
    one, other = tasks(), tasks()
    other[0]["entries"][0] = check_entry("fast")
    other[0]["entries"][0]["bits"]["observed"]["out"] = "differs"
    a, b = side(one).repeatable, side(other).repeatable
    there = diff.first_difference(Section.OUTPUTS, a, b)
    assert there is not None
    assert (there.place, there.second) == ("c000 fast out", "nothing")
    assert diff.first_difference(Section.OUTPUTS, b, a) is None


@pytest.mark.parametrize(
    ("bits", "change", "inside"),
    [
        ({"scope": "same_device_model", "profile": "native"}, {}, True),
        ({"scope": "same_device_model", "profile": "native"}, {"model": 2}, False),
        ({"scope": "same_isa", "profile": "native"}, {"model": 2}, True),
        ({"scope": "same_isa", "profile": "native"}, {"isa": "x86_64_v4"}, False),
        ({"scope": "same_isa", "profile": "portable"}, {"isa": "x86_64_v4"}, True),
        ({"scope": "same_isa", "profile": "portable"}, {"isa": "x86_64_v2"}, False),
        ({"scope": "same_isa", "profile": "portable"}, {"threads": 2}, False),
        ({"scope": "same_isa", "profile": "portable"}, {"vendor": "Other"}, False),
        ({"scope": "any", "profile": "portable"}, {"vendor": "Other", "threads": 2}, True),
        ({"scope": "same_device_model", "profile": "native"}, {"compute_units": 114}, False),
    ],
)
def test_scope(bits: dict[str, str], change: dict[str, Any], inside: bool) -> None:
    reason = scope.outside(bits, DEVICE, DEVICE | change)
    assert (reason is None) == inside
    if reason:
        assert next(iter(change)) in reason
