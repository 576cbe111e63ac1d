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
    lines += counted_lines(observations)
    if whole := wholework.summary(observations):
        lines += ["", *(f"  {line}" for line in whole)]
    counted = [f"{counts[name]} {name}" for name in ("passed", "failed", "unsupported")]
    lines += ["", ", ".join(counted)]
    return "\n".join(lines)


def counted_lines(observations: Mapping[str, Any]) -> list[str]:
    """What a pass with hardware counters said of each call, and of how many it said nothing."""
    counted = [
        (f"{cell['id']} {cell['label']}, {subject['subject']}", subject["counters"])
        for cell in observations["cells"]
        for subject in cell["subjects"]
        if subject.get("counters") is not None
    ]
    if not counted:
        return []
    bounded = [(name, found) for name, found in counted if found["bound"] != "undetermined"]
    lines = ["", f"counters of {counted[0][1]['tool'] or 'no tool'}: what bounds a call"]
    lines += [f"  {name}: {found['bound']} ({found['evidence']})" for name, found in bounded]
    silent: dict[str, int] = {}
    for _, found in counted:
        if found["bound"] == "undetermined":
            silent[found["evidence"]] = silent.get(found["evidence"], 0) + 1
    return [*lines, *(f"  undetermined for {n} calls: {why}" for why, n in silent.items())]


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
