"""`attnrepro compare`: two artifacts, cell by cell, and why they differ."""

from __future__ import annotations

import dataclasses
from pathlib import Path  # noqa: TC003 - typer reads it at run time
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from attnrepro.cli.output import emit, progress

if TYPE_CHECKING:
    from attnrepro.compare.explain import Report

_LISTED: Final = 8
"""Rows of one side alone that are shown."""


def compare(
    first: Annotated[Path, typer.Argument(help="The baseline.")],
    second: Annotated[Path, typer.Argument(help="What is compared with it.")],
    trust_file: Annotated[
        Path | None, typer.Option("--trust", help="Another trust file than your own.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document.")] = False,
) -> None:
    """Compare two artifacts: SAME, FASTER, SLOWER or AMBIGUOUS a cell, and the first difference.

    A ratio above 1 says that the second is faster. Both files are verified first (exit 1).
    """
    from attnrepro.artifact import trust
    from attnrepro.artifact.verify import verify
    from attnrepro.compare import explain
    from attnrepro.compare.verdicts import Side

    store = trust.load(trust_file)
    verified = [verify(path, trust=store) for path in (first, second)]
    for path, one in zip((first, second), verified, strict=True):
        if not one.trusted:
            progress(f"note: {path} is intact, and its signer is not in your trust file")
    same = verified[0].statement.content_sha256 == verified[1].statement.content_sha256
    if same:
        progress("note: both files hold the same run, so that nothing can differ")
    confidence = min(str(one.manifest["timing"]["confidence"]) for one in verified)
    report = explain.compare(*map(Side.of, verified), confidence=confidence)
    if same:
        report = dataclasses.replace(report, chance="")
    emit(
        document(report, first, second),
        as_json=as_json,
        text=lambda: text(report, first, second),
    )


def document(report: Report, first: Path, second: Path) -> dict[str, Any]:
    """What `--json` prints."""
    return {
        "first": str(first),
        "second": str(second),
        "cells": [
            {
                "cell": cell.cell,
                "subject": cell.subject,
                "clock": cell.clock,
                "medians_ns": list(cell.medians_ns),
                "verdict": cell.comparison.verdict.value if cell.comparison else None,
                "ratio": _real(cell.comparison.ratio) if cell.comparison else None,
                "lower": _real(cell.comparison.lower) if cell.comparison else None,
                "upper": _real(cell.comparison.upper) if cell.comparison else None,
                "p_value": _real(cell.comparison.p_value) if cell.comparison else None,
                "reason": cell.reason,
                "outputs_equal": cell.outputs_equal,
                "unrepeatable": list(cell.unrepeatable),
                "cycles": {
                    "verdict": cell.cycles.verdict.value,
                    "ratio": _real(cell.cycles.ratio),
                    "p_value": _real(cell.cycles.p_value),
                }
                if cell.cycles
                else None,
            }
            for cell in report.cells
        ],
        "causes": [
            {
                "stage": cause.stage.value,
                "place": cause.difference.place,
                "first": cause.difference.first,
                "second": cause.difference.second,
            }
            for cause in report.causes
        ],
        "only_first": list(report.only_first),
        "only_second": list(report.only_second),
        "chance": report.chance,
    }


def text(report: Report, first: Path, second: Path) -> str:
    """A table of cells, and the causes in their order."""
    from attnrepro.report import terminal
    from attnrepro.report.rows import duration

    rows = []
    for cell in report.cells:
        before, after = (duration(value) for value in cell.medians_ns)
        verdict, ratio = "not comparable", ""
        if cell.comparison is not None:
            verdict = cell.comparison.verdict.value
            ratio = f"{float(cell.comparison.ratio or 0):.3g}×"
            if cell.comparison.lower is not None and cell.comparison.upper is not None:
                limits = f"{float(cell.comparison.lower):.3g}–{float(cell.comparison.upper):.3g}"
                ratio += f" ({limits})"
        bits = {True: "equal", False: "differ", None: ""}[cell.outputs_equal]
        if bits and cell.unrepeatable:
            bits += f"; {', '.join(cell.unrepeatable)} not repeatable"
        in_cycles = ""
        if cell.cycles is not None:
            in_cycles = f"{float(cell.cycles.ratio or 0):.3g}× {cell.cycles.verdict.value}"
        rows.append(
            (
                *(cell.cell, cell.subject, cell.clock, before, after),
                *(ratio, verdict, in_cycles, bits, cell.reason),
            )
        )
    headings = (
        *("cell", "subject", "clock", "first", "second"),
        *("ratio", "verdict", "in cycles", "bits", "why"),
    )
    lines = [f"{second} against {first}", "", *terminal.table(headings, rows)]
    for place, alone in ((first, report.only_first), (second, report.only_second)):
        lines += [f"only in {place}: {row}" for row in alone[:_LISTED]]
        if len(alone) > _LISTED:
            lines.append(f"only in {place}: {len(alone) - _LISTED} rows more (--json lists them)")
    if report.chance:
        lines += ["", report.chance]
    if report.causes:
        lines += ["", "differences in causal order, the first one first:"]
        lines += [f"  {cause.stage.value}: {cause.difference}" for cause in report.causes]
    elif report.cells:
        lines += ["", "no difference was found"]
    else:
        lines += ["", "nothing was compared: no cell is in both"]
    return "\n".join(lines)


def _real(value: Any) -> float | None:
    return None if value is None else float(value)
