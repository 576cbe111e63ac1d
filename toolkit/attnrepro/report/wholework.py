"""Sections of a report beyond single calls: requests, bounds, the boundary, the cost, the flags."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from attnrepro.compare import boundary, bounds, wholework
from attnrepro.report.rows import duration
from attnrepro.report.table import Section, Table, kept, size

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from fractions import Fraction

_MANY = 12
"""Cells of one place that are named; the others are counted."""


def sections(manifest: Mapping[str, Any], observations: Mapping[str, Any]) -> Iterator[Section]:
    """Every section that this artifact gives anything for."""
    yield from _requests(observations)
    yield from _bounds(manifest, observations)
    yield from _boundary(manifest, observations)
    yield from _costs(manifest, observations)
    yield from _energy(observations)
    yield from _flags(observations)


def summary(observations: Mapping[str, Any]) -> list[str]:
    """Lines for a terminal: what each request is worth."""
    lines = [
        f"{one.cell}, {one.subject}: {one.model} takes {duration(one.total_ns)}, attention "
        f"{_percent(one.share)} of it, largest other stage {one.largest_remaining}"
        + (f"; bound by {one.bound}: {one.evidence}" if one.device_ns is not None else "")
        + _uncompared(one)
        for one in wholework.requests(observations)
    ]
    lines += [
        f"{one.cell}, {one.subject}: whole request {_times(one.compared.end_to_end_ratio)} of "
        f"{one.baseline} ({one.verdict}); attention {_times(one.compared.attention_ratio)}, "
        f"Amdahl predicts {_times(one.compared.predicted_ratio)}"
        for one in wholework.gains(observations)
    ]
    return lines


def _uncompared(one: wholework.RequestTime) -> str:
    if not one.uncompared:
        return ""
    return (
        f"; its output not compared with textbook attention's in {one.uncompared} of "
        f"{one.launches} launches"
    )


def _requests(observations: Mapping[str, Any]) -> Iterator[Section]:
    found = wholework.requests(observations)
    if not found:
        return
    names = ["cell", "subject", "model", "layers", "request", "attention", "largest other stage"]
    names += ["bound", "evidence"]
    times = kept(
        names,
        [
            (
                one.cell,
                one.subject,
                one.model,
                str(one.layers),
                duration(one.total_ns),
                _percent(one.share),
                one.largest_remaining,
                one.bound,
                one.evidence,
            )
            for one in found
        ],
    )
    stages = list(dict.fromkeys(name for one in found for name in one.stages_ns))
    where = kept(
        ["cell", "subject", *stages],
        [
            (one.cell, one.subject, *(duration(one.stages_ns.get(name)) for name in stages))
            for one in found
        ],
    )
    tables = [times, where]
    if gains := wholework.gains(observations):
        names = ["cell", "subject", "baseline", "end to end", "verdict", "attention"]
        names += ["Amdahl predicts", "free attention gives", "noise", "share below which it drowns"]
        tables.append(
            kept(
                names,
                [
                    (
                        one.cell,
                        one.subject,
                        one.baseline,
                        _times(one.compared.end_to_end_ratio),
                        one.verdict,
                        _times(one.compared.attention_ratio),
                        _times(one.compared.predicted_ratio),
                        _times(one.compared.ceiling_ratio),
                        _percent(one.noise),
                        "any" if one.least_share is None else _percent(one.least_share),
                    )
                    for one in gains
                ],
            )
        )
    text = (
        "A request model with each subject swapped in and nothing else changed. Stages come from "
        "passes with marks, the request's own time from a pass without."
    )
    yield Section(heading="The whole request", texts=(text,), tables=tuple(tables))


def _bounds(manifest: Mapping[str, Any], observations: Mapping[str, Any]) -> Iterator[Section]:
    found = bounds.bounds(manifest, observations)
    if not found:
        return
    ceilings = [
        (
            f"{ceiling['kind']} {ceiling['dtype']} {ceiling['shape']}",
            _rate(ceiling["per_second"], ceiling["unit"]),
        )
        for measured in observations.get("ceilings", {}).values()
        for ceiling in measured["measured"]
    ]
    names = ["cell", "subject", "clock", "FLOP/s", "bytes/s", "FLOP/byte"]
    names += ["of compute", "of memory", "bound", "evidence"]
    lines = [
        (
            one.cell,
            one.subject,
            one.clock,
            _rate(one.flops_per_second, "flop"),
            _rate(one.bytes_per_second, "byte"),
            f"{float(one.intensity):.3g}",
            "" if one.compute is None else _percent(one.compute),
            "" if one.memory is None else _percent(one.memory),
            one.bound,
            one.evidence,
        )
        for one in found
    ]
    tables = [kept(names, lines)]
    if ceilings:
        tables.insert(0, kept(["ceiling measured in this run", "rate"], ceilings))
    yield Section(heading="What bounds it", tables=tuple(tables))


def _boundary(manifest: Mapping[str, Any], observations: Mapping[str, Any]) -> Iterator[Section]:
    for one in boundary.boundaries(manifest, observations):
        lines = []
        for place in dict.fromkeys(p.place for p in one.places):
            cells = one.cells(place)
            named = [p.cell + (f" ({p.ratio:.3g}×)" if p.ratio else "") for p in cells[:_MANY]]
            more = f" and {len(cells) - _MANY} more" if len(cells) > _MANY else ""
            lines.append((place, str(len(cells)), "; ".join(named) + more))
        tables = [Table(headings=("", "cells", "which"), lines=tuple(lines))]
        turns = [
            (
                turn.axis,
                turn.rest,
                *(f"{v}: {w} ({r:.3g}×)" for v, w, r in (turn.before, turn.after)),
            )
            for turn in one.crossovers
        ]
        if turns:
            tables.append(kept(["axis", "at", "turns after", "and before"], turns))
        yield Section(
            heading=f"Where {one.subject} wins and loses against {one.baseline}",
            tables=tuple(tables),
        )


def _costs(manifest: Mapping[str, Any], observations: Mapping[str, Any]) -> Iterator[Section]:
    found = boundary.costs(manifest, observations)
    names = ["subject", "image", "size", "build", "import", "first call", "of it compiling"]
    names += ["preparing a call", "unsupported cells"]
    lines = [
        (
            one.subject,
            one.image,
            "" if one.image_bytes is None else size(one.image_bytes),
            "" if one.build_ms is None else f"{one.build_ms / 1000:.0f} s",
            duration(one.import_ns),
            duration(one.first_call_ns),
            duration(one.compile_ns),
            duration(one.prepare_ns),
            f"{one.unsupported} of {one.cells}",
        )
        for one in found
    ]
    yield Section(heading="What bringing it in costs", tables=(kept(names, lines),))


def _energy(observations: Mapping[str, Any]) -> Iterator[Section]:
    lines = [
        (
            f"{cell['id']} {cell['label']}",
            subject["subject"],
            f"{subject['energy']['energy_mj'] / max(1, subject['energy']['calls']):.3g} mJ",
            str(subject["energy"]["calls"]),
        )
        for cell in observations["cells"]
        for subject in cell["subjects"]
        if "energy" in subject
    ]
    if lines:
        names = ["cell", "subject", "energy of one call", "calls"]
        yield Section(heading="Energy", tables=(kept(names, lines),))


def _flags(observations: Mapping[str, Any]) -> Iterator[Section]:
    lines = [
        (f"{cell['id']} {cell['label']}", subject["subject"], flag)
        for cell in observations["cells"]
        for subject in cell["subjects"]
        for flag in subject.get("flags", ())
    ]
    if lines:
        yield Section(heading="Remarkable", tables=(kept(["cell", "subject", "what"], lines),))


def _percent(value: Fraction) -> str:
    return f"{float(value) * 100:.3g} %"


def _times(value: Fraction) -> str:
    return f"{float(value):.3g}×"


def _rate(per_second: int, unit: str) -> str:
    scale, name = (1e12, "T") if per_second >= 10**12 else (1e9, "G")
    return f"{per_second / scale:.3g} {name}{'FLOP' if unit == 'flop' else 'B'}/s"
