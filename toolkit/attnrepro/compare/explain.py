"""Two artifacts against each other: a verdict a cell, and why they differ, in causal order.

The order is image → driver → device → power cap → clocks → libraries → flags → kernels → plan →
inputs → outputs → times: the first difference is the one to look at, the later ones may follow from
it.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final

from attnrepro import jsonio
from attnrepro.compare import diff, published, statistics
from attnrepro.compare.diff import Difference, Section
from attnrepro.results import COMPARABLE

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from collections.abc import Set as AbstractSet

    from attnrepro.compare.statistics import Comparison
    from attnrepro.compare.verdicts import Side


class Stage(StrEnum):
    """Where in the causal chain two runs part."""

    IMAGE = "image"
    DRIVER = "driver"
    DEVICE = "device"
    POWER_CAP = "power cap"
    CLOCKS = "clocks"
    LIBRARIES = "libraries"
    FLAGS = "flags"
    KERNELS = "kernels"
    PLAN = "plan"
    INPUTS = "inputs"
    OUTPUTS = "outputs"
    TIMES = "times"


_DEVICE_FIELDS: Final[dict[Stage, tuple[str, ...]]] = {
    Stage.DRIVER: ("driver", "runtime", "kernel", "microcode"),
    Stage.DEVICE: (
        *("kind", "vendor", "name", "family", "model", "stepping", "architecture", "isa"),
        *("compute_units", "threads", "memory_bytes", "partition", "ecc", "hypervisor"),
    ),
    Stage.POWER_CAP: ("power_limit_mw", "power_default_limit_mw"),
    Stage.CLOCKS: (
        "clocks_locked",
        "sm_clock_default_mhz",
        "sm_clock_max_mhz",
        "memory_clock_max_mhz",
        "governor",
        "frequency_max_khz",
        "boost",
    ),
}


@dataclass(frozen=True, kw_only=True)
class Cause:
    """One difference and its place in the chain."""

    stage: Stage
    difference: Difference


@dataclass(frozen=True, kw_only=True)
class CellVerdict:
    """One subject in one cell of both artifacts."""

    cell: str
    """Its label."""
    subject: str
    clock: str
    comparison: Comparison | None
    """The second artifact against the first: a ratio above 1 says that the second is faster.
    None where times may not be compared."""
    reason: str
    medians_ns: tuple[int | None, int | None]
    outputs_equal: bool | None
    """Of the tensors whose bits repeated in both runs, claimed or not; None where there is none."""
    unrepeatable: tuple[str, ...] = ()
    """Tensors whose bits differed from call to call in one of the two: nothing is said of them."""
    cycles: Comparison | None = None
    """Likewise in cycles of the clock seen; None where one of the two exposes no clock."""


@dataclass(frozen=True, kw_only=True)
class Report:
    """What `attnrepro compare` says."""

    cells: tuple[CellVerdict, ...]
    causes: tuple[Cause, ...]
    """The first difference of each stage that differs, in causal order."""
    only_first: tuple[str, ...]
    """Rows that only the first artifact has."""
    only_second: tuple[str, ...]
    chance: str
    """How many of these verdicts chance alone would give."""


def compare(first: Side, second: Side, *, confidence: str) -> Report:
    """Compare two verified artifacts; the first is the baseline."""
    rows, others = _rows(first), _rows(second)
    _align(rows, others, first, second)
    cells = tuple(
        _cell(key, rows[key], others[key], first, second, confidence, clock)
        for key in rows
        if key in others
        for clock in _clocks(rows[key][1], others[key][1])
    )
    causes = list(_causes(first, second, rows, others))
    changed = [c for c in cells if c.comparison and c.comparison.verdict in _CHANGED]
    if changed:
        cell = changed[0]
        assert cell.comparison is not None
        before, after = (f"{value} ns" for value in cell.medians_ns)
        place = f"{cell.cell} {cell.subject} {cell.clock}"
        causes.append(
            Cause(
                stage=Stage.TIMES,
                difference=Difference(place=place, first=before, second=after),
            )
        )
    judged = sum(c.comparison is not None and c.comparison.p_value is not None for c in cells)
    return Report(
        cells=cells,
        causes=tuple(causes),
        only_first=tuple(" ".join(key) for key in rows if key not in others),
        only_second=tuple(" ".join(key) for key in others if key not in rows),
        chance=_chance(judged, confidence),
    )


_CHANGED: Final = (statistics.Verdict.FASTER, statistics.Verdict.SLOWER)

Key = tuple[str, str]
"""Label of a cell and id of a subject."""

Row = tuple[str, "Mapping[str, Any]"]
"""Id of the cell in its own artifact, and the subject's record."""


def _rows(side: Side) -> dict[Key, Row]:
    return {
        (cell["label"], subject["subject"]): (cell["id"], subject)
        for cell in side.observations["cells"]
        for subject in cell["subjects"]
    }


def _align(rows: dict[Key, Row], others: dict[Key, Row], first: Side, second: Side) -> None:
    """Give rows of `others` that do one row's work on the same inputs that row's key.

    Manifests name their cells as they like: the headline's `forward causal=none` is a cell of the
    grid under another label. Work that stands twice on a side is left alone.
    """
    wanted = _by_work({key: row for key, row in rows.items() if key not in others}, first)
    there = _by_work({key: row for key, row in others.items() if key not in rows}, second)
    for work, keys in wanted.items():
        matching = there.get(work, [])
        if len(keys) == len(matching) == 1:
            label = f"{keys[0][0]} = {matching[0][0]}"
            key = (label, keys[0][1])
            rows[key] = rows.pop(keys[0])
            others[key] = others.pop(matching[0])


def _by_work(rows: Mapping[Key, Row], side: Side) -> dict[tuple[str, str, bytes], list[Key]]:
    """Rows by subject, backend, and counted work with the inputs' bits."""
    found: dict[tuple[str, str, bytes], list[Key]] = {}
    for key, (cell, subject) in rows.items():
        inputs = side.repeatable["inputs"].get(cell)
        work = side.repeatable["semantics"]["work"].get(cell)
        if inputs and work:
            name = (key[1], subject["backend"], jsonio.canonical([work, inputs]))
            found.setdefault(name, []).append(key)
    return found


def _clocks(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[str]:
    """The attention's first clock that both have, then the request's; one name where none is.

    A request holds more than the attention, so that neither time stands for the other.
    """
    both = {name: True for name in a["timing"] if name in b["timing"]}
    headline = published.headline_clock(both)
    found = [headline or published.headline_clock(a["timing"]) or ""]
    return [*found, "request"] if "request" in both and headline != "request" else found


def _cell(
    key: Key, before: Row, after: Row, first: Side, second: Side, confidence: str, clock: str
) -> CellVerdict:
    (id_a, a), (id_b, b) = before, after
    timings = [row["timing"].get(clock) for row in (a, b)]
    medians = tuple(t["median"]["value_ns"] if t else None for t in timings)
    comparison, reason = None, ""
    if problem := _not_comparable(id_a, a, id_b, b, first, second):
        reason = problem
    elif not all(timings):
        reason = "not timed by the same clock in both"
    else:
        comparison = statistics.compare(
            published.launch_medians(timings[1]),
            published.launch_medians(timings[0]),
            confidence=confidence,
        )
        reason = comparison.reason
    # Bits are told once a subject, in the row of its attention.
    is_attention = clock != "request" or published.headline_clock(a["timing"]) == clock
    digests = _repeated(a, b) if is_attention else ({}, {})
    return CellVerdict(
        cell=key[0],
        subject=key[1],
        clock=clock,
        comparison=comparison,
        reason=reason,
        medians_ns=(medians[0], medians[1]),
        outputs_equal=digests[0] == digests[1] if digests[0] else None,
        unrepeatable=tuple(
            sorted(
                {
                    name
                    for row in (a, b)
                    for name, seen in row.get("bits", {}).get("observed", {}).items()
                    if seen != "repeats"
                }
            )
        ),
        cycles=None
        if comparison is None
        else _in_cycles((a, b), (first, second), clock, confidence),
    )


def _in_cycles(
    rows: tuple[Mapping[str, Any], Mapping[str, Any]],
    sides: tuple[Side, Side],
    clock: str,
    confidence: str,
) -> Comparison | None:
    """Compare launch medians as cycles of each launch's median clock."""
    before, after = (
        cycles(row, side.observations, clock) for row, side in zip(rows, sides, strict=True)
    )
    if not before or not after:
        return None
    return statistics.compare(after, before, confidence=confidence)


def cycles(
    subject: Mapping[str, Any], observations: Mapping[str, Any], clock: str
) -> list[int] | None:
    """Launch medians in cycles; None where a launch of them has no clock.

    Args:
        subject: its record in one cell.
        observations: the artifact's.
        clock: whose times are taken.
    """
    tasks = {task["task"]: task["launch"] for task in observations["tasks"]}
    seen = {
        tasks.get(one["task"]): one["conditions"]["clock_khz"]
        for one in subject.get("conditions", ())
    }
    found = []
    for launch in subject["timing"][clock]["launches"]:
        median, khz = launch["median"]["value_ns"], seen.get(launch["launch"])
        if median is None:
            continue
        if khz is None:
            return None
        found.append(max(1, median * khz[1] // 1_000_000))
    return found or None


def _not_comparable(
    id_a: str,
    a: Mapping[str, Any],
    id_b: str,
    b: Mapping[str, Any],
    first: Side,
    second: Side,
) -> str | None:
    for row in (a, b):
        if row["status"] not in COMPARABLE:
            return f"{row['status']} in one of the two: {row['reason']}"
    work = [
        side.repeatable["semantics"]["work"][cell] for side, cell in ((first, id_a), (second, id_b))
    ]
    if work[0] != work[1]:
        return "the two do not do the same work"
    probes = [
        side.repeatable["semantics"]["probes"].get(cell, {}).get(row["subject"])
        for side, cell, row in ((first, id_a, a), (second, id_b, b))
    ]
    if probes[0] != probes[1]:
        return "the probes show other semantics in one of the two"
    return None


def _causes(
    first: Side, second: Side, rows: Mapping[Key, Row], others: Mapping[Key, Row]
) -> Iterator[Cause]:
    for key in sorted(set(first.images) | set(second.images)):
        a, b = first.images.get(key, "no such image"), second.images.get(key, "no such image")
        if a != b:
            yield _cause(Stage.IMAGE, key, a, b)
            break
    devices = first.observations["device"], second.observations["device"]
    for stage, names in _DEVICE_FIELDS.items():
        for name in names:
            values = [
                side.device_class.get(name, device.get(name))
                for side, device in zip((first, second), devices, strict=True)
            ]
            if values[0] != values[1]:
                yield _cause(stage, name, *map(str, values))
                break
    ids = {rows[key][0]: others[key][0] for key in rows if key in others}
    joined = {(rows[key][0], key[1]) for key in rows if key in others}
    a_found = _cells_of(first.repeatable, {cell: cell for cell in ids}, joined)
    b_found = _cells_of(second.repeatable, {there: cell for cell, there in ids.items()}, joined)
    releases = _stated(rows, others, ("availability", "version"))
    digests = diff.kernel_libraries(a_found, b_found)
    yield from _first_of(Stage.LIBRARIES, itertools.chain(releases, digests))
    flags = _stated(rows, others, ("availability", "flags"), ("execution", "toolchain"))
    yield from _first_of(Stage.FLAGS, flags)
    execution = list(diff.differences(Section.EXECUTION, a_found, b_found))
    for stage, parts in ((Stage.KERNELS, ("operators", "kernels")), (Stage.PLAN, ("plan",))):
        yield from _first_of(
            stage, (d for d in execution if set(d.place.split()[2:3]) <= set(parts))
        )
    yield from _first_of(Stage.INPUTS, diff.differences(Section.INPUTS, a_found, b_found))
    outputs = (
        difference
        for key, row in rows.items()
        if key in others
        for difference in diff.between(*_repeated(row[1], others[key][1]), " ".join(key))
    )
    yield from _first_of(Stage.OUTPUTS, outputs)


def _repeated(
    a: Mapping[str, Any], b: Mapping[str, Any]
) -> tuple[Mapping[str, str], Mapping[str, str]]:
    """Digests of the tensors whose bits repeated in both runs under one profile.

    What either manifest claims of them does not matter: a claim is kept or broken by a rerun.
    """
    one, other = (row.get("bits", {"observed": {}, "digests": {}}) for row in (a, b))
    names = [
        name
        for name in one["digests"]
        if name in other["digests"] and one["profile"] == other["profile"]
        if one["observed"].get(name) == other["observed"].get(name) == "repeats"
    ]
    return {n: one["digests"][n] for n in names}, {n: other["digests"][n] for n in names}


def _cells_of(
    repeatable: Mapping[str, Any], names: Mapping[str, str], joined: AbstractSet[tuple[str, str]]
) -> dict[str, Any]:
    """What the sections say of some cells, each under its id in the first artifact.

    Of what ran, the subjects that both have in that cell.
    """

    def chosen(table: Mapping[str, Any]) -> dict[str, Any]:
        return {names[cell]: found for cell, found in table.items() if cell in names}

    ran = chosen(repeatable["execution"])
    return {
        Section.EXECUTION.value: {
            cell: {s: found for s, found in subjects.items() if (cell, s) in joined}
            for cell, subjects in ran.items()
        },
        Section.INPUTS.value: chosen(repeatable["inputs"]),
    }


def _stated(
    rows: Mapping[Key, Row], others: Mapping[Key, Row], *parts: tuple[str, str]
) -> Iterator[Difference]:
    """Differences of what was recorded of the same subject in both, part by part."""
    for key in (key for key in rows if key in others):
        (_, a), (_, b) = rows[key], others[key]
        for part, name in parts:
            if part in a and part in b:
                yield from diff.between(a[part][name], b[part][name], " ".join((*key, name)))


def _first_of(stage: Stage, found: Iterator[Difference]) -> Iterator[Cause]:
    difference = next(found, None)
    if difference is not None:
        yield Cause(stage=stage, difference=difference)


def _cause(stage: Stage, place: str, first: str, second: str) -> Cause:
    return Cause(stage=stage, difference=Difference(place=place, first=first, second=second))


def _chance(judged: int, confidence: str) -> str:
    if not judged:
        return ""
    expected = judged * (1 - float(confidence))
    return (
        f"{judged} comparisons at {float(confidence) * 100:g} %: if nothing had changed, at most "
        f"{expected:.2g} of them would still differ by chance"
    )
