"""A report as Markdown. Everything foreign stands in code spans, where nothing is interpreted."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attnrepro.report.attach import code
from attnrepro.report.rows import duration

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from attnrepro.report.sections import Article
    from attnrepro.report.table import Section, Strip, Table


def render(articles: Sequence[Article]) -> str:
    """The whole report."""
    lines: list[str] = []
    for one in articles:
        lines += [f"# {code(one.title)}", ""]
        for section in one.sections:
            lines += _section(section)
    return "\n".join(lines).rstrip("\n") + "\n"


def _section(section: Section) -> Iterator[str]:
    yield f"## {section.heading}"
    yield ""
    if len(section.texts) == 1:
        yield from (code(section.texts[0]), "")
    elif section.texts:
        yield from (f"- {code(text)}" for text in section.texts)
        yield ""
    for table in section.tables:
        yield from _table(table)
        yield ""
    for strip in section.strips:
        yield from _strip(strip)
    if section.strips:
        yield ""


def _table(table: Table) -> Iterator[str]:
    yield "| " + " | ".join(table.headings) + " |"
    yield "|" + " --- |" * len(table.headings)
    for line in table.lines:
        yield "| " + " | ".join(code(text) for text in line) + " |"


def _strip(strip: Strip) -> Iterator[str]:
    for subject, values in strip.points_ns:
        shown = ", ".join(duration(value) for value in values)
        yield f"- {code(f'{strip.title}, {subject}: {shown}')}"
