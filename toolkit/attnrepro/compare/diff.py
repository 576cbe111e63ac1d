"""Differences between two repeatables, section by section, the first one in words."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping


class Section(StrEnum):
    """Sections of repeatable.json, in causal order."""

    EXECUTION = "execution"
    INPUTS = "inputs"
    SEMANTICS = "semantics"
    OUTPUTS = "outputs"


@dataclass(frozen=True, kw_only=True)
class Difference:
    """One place where two documents differ."""

    place: str
    """Where, as `c000 fa4 out`."""
    first: str
    second: str

    def __str__(self) -> str:
        return f"{self.place}: {self.first}, and {self.second} in the other"


def first_difference(
    section: Section, first: Mapping[str, Any], second: Mapping[str, Any]
) -> Difference | None:
    """The first difference of a section between two repeatables; None where it is equal.

    Of `outputs`, every digest that the first one claims must stand in the second: a tensor that
    was seen to repeat there and not here is no difference, since nothing was claimed of it.
    """
    return next(differences(section, first, second), None)


def differences(
    section: Section, first: Mapping[str, Any], second: Mapping[str, Any]
) -> Iterator[Difference]:
    """All differences of a section, in order of cell, subject and name."""
    a, b = first[section.value], second[section.value]
    if section is Section.OUTPUTS:
        yield from _walk(a["digests"], b["digests"], "", both_ways=False)
    else:
        yield from _walk(a, b, "", both_ways=True)


def kernel_libraries(first: Mapping[str, Any], second: Mapping[str, Any]) -> Iterator[Difference]:
    """Differences of the kernel-bearing libraries only."""
    a, b = first[Section.EXECUTION.value], second[Section.EXECUTION.value]
    for cell in sorted(set(a) & set(b)):
        for subject in sorted(set(a[cell]) & set(b[cell])):
            yield from _walk(
                a[cell][subject]["libraries"],
                b[cell][subject]["libraries"],
                f"{cell} {subject}",
                both_ways=True,
            )


def between(first: Any, second: Any, place: str) -> Iterator[Difference]:
    """All differences between two values, each under the place that it has in them."""
    return _walk(first, second, place, both_ways=True)


def _walk(first: Any, second: Any, place: str, *, both_ways: bool) -> Iterator[Difference]:
    if isinstance(first, dict) and isinstance(second, dict):
        for name in sorted(set(first) | set(second) if both_ways else first):
            where = f"{place} {name}".strip()
            if name not in first or name not in second:
                yield Difference(place=where, first=_at(first, name), second=_at(second, name))
            else:
                yield from _walk(first[name], second[name], where, both_ways=both_ways)
    elif first != second:
        yield Difference(place=place, first=_short(first), second=_short(second))


def _at(table: Mapping[str, Any], name: str) -> str:
    return _short(table[name]) if name in table else "nothing"


def _short(value: Any) -> str:
    if isinstance(value, dict | list):
        return f"{len(value)} entries"
    text = str(value)
    return text if len(text) <= 80 else f"{text[:77]}…"
