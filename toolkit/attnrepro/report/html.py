"""A report as one HTML file: no script, nothing loaded from anywhere, every text escaped.

The content security policy in the file forbids scripts and requests, should an escape be forgotten.
"""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING, Final

from attnrepro.report.rows import duration

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from attnrepro.report.sections import Article
    from attnrepro.report.table import Section, Strip, Table

_STYLE: Final = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 78rem; margin: 2rem auto; padding: 0 1rem;
       color: #1b1b1f; background: #fff; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.1rem; margin-top: 2rem; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
.wide { overflow-x: auto; }
th, td { text-align: left; padding: .25rem .7rem; border-bottom: 1px solid #ddd;
         vertical-align: top; }
th { font-weight: 600; } td { overflow-wrap: anywhere; }
svg { display: block; margin: .6rem 0; max-width: 100%; }
svg text { font: 12px system-ui, sans-serif; fill: currentColor; }
.axis { stroke: #999; } .mark { fill: #2457b3; fill-opacity: .6; } .middle { stroke: #1b1b1f; }
@media (prefers-color-scheme: dark) {
  body { color: #e6e6ea; background: #16161a; } th, td { border-color: #3a3a42; }
  .mark { fill: #7aa7ff; } .middle { stroke: #e6e6ea; }
}
"""
_WIDTH: Final = 760
_LEFT: Final = 170
_RIGHT: Final = 90
_ROW: Final = 26


def render(articles: Sequence[Article]) -> str:
    """The whole report."""
    title = escape(articles[0].title if len(articles) == 1 else f"{len(articles)} artifacts")
    parts = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8">',
        '<meta http-equiv="Content-Security-Policy" '
        "content=\"default-src 'none'; style-src 'unsafe-inline'\">",
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{title}</title><style>{_STYLE}</style></head><body>",
    ]
    for one in articles:
        parts.append(f"<h1>{escape(one.title)}</h1>")
        for section in one.sections:
            parts += _section(section)
    return "\n".join([*parts, "</body></html>"]) + "\n"


def _section(section: Section) -> Iterator[str]:
    yield f"<h2>{escape(section.heading)}</h2>"
    yield from (f"<p>{escape(text)}</p>" for text in section.texts)
    for table in section.tables:
        yield from _table(table)
    for strip in section.strips:
        yield from _strip(strip)


def _table(table: Table) -> Iterator[str]:
    yield '<div class="wide"><table>'
    if any(table.headings):
        yield "<tr>" + "".join(f"<th>{escape(text)}</th>" for text in table.headings) + "</tr>"
    for line in table.lines:
        yield "<tr>" + "".join(f"<td>{escape(text)}</td>" for text in line) + "</tr>"
    yield "</table></div>"


def _strip(strip: Strip) -> Iterator[str]:
    """Launch medians on a linear axis from zero, so that a length is a time."""
    longest = max(value for _, values in strip.points_ns for value in values)
    height = 24 + _ROW * len(strip.points_ns)
    scale = (_WIDTH - _LEFT - _RIGHT) / longest
    yield f'<svg viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" role="img">'
    yield f"<title>{escape(strip.title)}</title>"
    yield f'<text x="0" y="14">{escape(strip.title)}</text>'
    for index, (subject, values) in enumerate(strip.points_ns):
        middle = 24 + _ROW * index + _ROW // 2
        yield f'<text x="0" y="{middle + 4}">{escape(subject)}</text>'
        yield (
            f'<line class="axis" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{middle}" y2="{middle}"/>'
        )
        for value in values:
            yield f'<circle class="mark" cx="{_LEFT + value * scale:.1f}" cy="{middle}" r="5"/>'
        if values:
            median = sorted(values)[(len(values) - 1) // 2]
            x = f"{_LEFT + median * scale:.1f}"
            yield (
                f'<line class="middle" x1="{x}" x2="{x}" y1="{middle - 9}" y2="{middle + 9}"/>'
                f'<text x="{_WIDTH - _RIGHT + 8}" y="{middle + 4}">{duration(median)}</text>'
            )
    yield "</svg>"
