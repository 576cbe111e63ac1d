"""What a report is made of, before it becomes Markdown or HTML: texts and tables only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, kw_only=True)
class Table:
    """Texts in rows of one length."""

    headings: tuple[str, ...]
    lines: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, kw_only=True)
class Strip:
    """Launch medians of the subjects of one cell, to be drawn on one axis."""

    title: str
    points_ns: tuple[tuple[str, tuple[int, ...]], ...]
    """(subject, its launch medians)."""


@dataclass(frozen=True, kw_only=True)
class Section:
    """A heading with what stands below it."""

    heading: str
    texts: tuple[str, ...] = ()
    tables: tuple[Table, ...] = ()
    strips: tuple[Strip, ...] = ()


def kept(headings: Sequence[str], lines: Sequence[Sequence[str]]) -> Table:
    """The table without columns that hold no text."""
    kept = [i for i in range(len(headings)) if any(line[i] for line in lines)]
    return Table(
        headings=tuple(headings[i] for i in kept),
        lines=tuple(tuple(line[i] for i in kept) for line in lines),
    )


def size(count: int) -> str:
    """Bytes as people say them."""
    for scale, unit in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if count >= scale:
            return f"{count / scale:.1f} {unit}"
    return f"{count} B"
