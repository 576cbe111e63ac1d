"""Published statistics recomputed from the raw samples: equal to the last nanosecond, or rejected.

The functions that made the numbers make them again here, from the samples members and from the
confidence and tails that the manifest asks for. Statistics that the manifest did not ask for, a
tail left out, a verdict word that the launches do not carry: all differ, and are rejected.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NoReturn

from attnrepro import results
from attnrepro.compare import published, statistics
from attnrepro.errors import Rejected

if TYPE_CHECKING:
    from collections.abc import Mapping

FOLDER: Final = "samples/"
_LARGEST: Final = 2**53 - 1


def check(
    members: Mapping[str, bytes], manifest: Mapping[str, Any], observations: Mapping[str, Any]
) -> None:
    """Recompute every statistic and comparison of `observations`.

    Raises Rejected: `samples.format`, `.member`, `.statistic`, `.comparison`.
    """
    asked = manifest["timing"]
    used: set[str] = set()
    for cell in observations["cells"]:
        for subject in cell["subjects"]:
            for clock, timing in subject["timing"].items():
                where = f"cell {cell['id']}, {subject['subject']}, clock {clock[:40]!r}"
                if clock.removeprefix("backward_").removeprefix("append_") not in asked["clocks"]:
                    _refuse("member", f"{where}: the manifest does not ask for this clock")
                _check_clock(where, timing, members, used, asked)
        for subject in cell["subjects"]:
            _check_comparisons(cell, subject, asked["confidence"])
    for name in sorted(set(members) - used):
        if name.startswith(FOLDER):
            _refuse("member", f"{name} belongs to no launch")


def _check_clock(
    where: str,
    timing: Mapping[str, Any],
    members: Mapping[str, bytes],
    used: set[str],
    asked: Mapping[str, Any],
) -> None:
    tails, confidence = asked["tails"], asked["confidence"]
    if len(timing["launches"]) > asked["launches"]:
        _refuse("member", f"{where}: more launches than the manifest asks for")
    seen: set[int] = set()
    for launch in timing["launches"]:
        number, name = launch["launch"], launch["member"]
        if number in seen:
            _refuse("member", f"{where}: launch {number} stands twice")
        if not name.startswith(FOLDER) or name not in members or name in used:
            _refuse("member", f"{where}: {name[:80]!r} is missing or belongs to another launch")
        seen.add(number)
        used.add(name)
        try:
            values = _decode(members[name], name)
            expected = published.launch_timing(
                launch, values, launch=number, tails=tails, confidence=confidence
            )
        except ValueError as error:
            _refuse("statistic", f"{where}, launch {number}: {error}")
        _same(f"{where}, launch {number}", launch, expected)
    again = published.clock_timing(timing["launches"], tails=tails, confidence=confidence)
    _same(f"{where}, over launches", timing, again)


def _decode(data: bytes, name: str) -> list[int]:
    values = published.decode_samples(data)
    if values and not 0 < min(values) <= max(values) <= _LARGEST:
        _refuse("format", f"{name} holds a sample that is not positive or beyond 2^53 - 1 ns")
    return values


def _check_comparisons(
    cell: Mapping[str, Any], subject: Mapping[str, Any], confidence: float
) -> None:
    """Every candidate against every baseline, none left out and none added."""
    where = f"cell {cell['id']}, {subject['subject']}"
    expected = []
    for baseline in cell["subjects"]:
        pair = (subject, baseline)
        if (subject["role"], baseline["role"]) != ("candidate", "baseline") or any(
            side["status"] not in results.COMPARABLE for side in pair
        ):
            continue
        for clock in sorted(set(subject["timing"]) & set(baseline["timing"])):
            medians = [published.launch_medians(side["timing"][clock]) for side in pair]
            found = statistics.compare(*medians, confidence=published.decimal_text(confidence))
            if found.ratio is not None:
                expected.append(found.document(clock=clock, baseline=baseline["subject"]))
    if subject["comparisons"] != expected:
        _refuse("comparison", f"{where}: the comparisons are not what the launches give")


def _same(where: str, claim: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    for name, value in expected.items():
        if claim[name] != value:
            _refuse("statistic", f"{where}: {name} is not what the samples give")


def _refuse(rule: str, message: str) -> NoReturn:
    raise Rejected(message, rule=f"samples.{rule}")
