"""A short table on a terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from attnrepro.report import wholework
from attnrepro.report.rows import HEADINGS, headline, rows

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


def summary(observations: Mapping[str, Any], *, title: str) -> str:
    """The table of an artifact, with its counts and the reasons of what did not pass."""
    found = rows(observations)
    counts = observations["summary"]
    lines = [title, headline(observations), ""]
    lines += table(HEADINGS, [row.texts() for row in found])
    reasons = [f"  {r.cell}, {r.subject}: {r.status}: {r.reason}" for r in found if r.reason]
    if reasons:
        lines += ["", *reasons]
    weak = sorted({name for cell in observations["cells"] for name in cell["uncompared"]})
    if weak:
        lines += ["", f"weak baselines: the stack also claims {', '.join(weak)}; not compared"]
    if whole := wholework.summary(observations):
        lines += ["", *(f"  {line}" for line in whole)]
    counted = [f"{counts[name]} {name}" for name in ("passed", "failed", "unsupported")]
    lines += ["", ", ".join(counted)]
    return "\n".join(lines)


def table(headings: Sequence[str], lines: Sequence[Sequence[str]]) -> list[str]:
    """Columns as wide as their longest text; a column without any text is left out."""
    kept = [i for i in range(len(headings)) if any(line[i] for line in lines)]
    shown = [[headings[i] for i in kept], *([line[i] for i in kept] for line in lines)]
    widths = [max(len(line[column]) for line in shown) for column in range(len(kept))]
    return [
        "  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip()
        for line in shown
    ]


def verdict_lines(verdicts: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """The verdicts of a rerun, each on its line, with the first difference below it."""
    width = max(len(name) for name in verdicts)
    lines = []
    for name, verdict in verdicts.items():
        word = verdict["result"].replace("_", " ")
        lines.append(
            f"{name.replace('_', '-').ljust(width)}  {word.ljust(14)}  {verdict['reason']}"
        )
        if verdict["first_difference"]:
            lines.append(f"{' ' * width}  first difference: {verdict['first_difference']}")
    return lines
