"""Where a candidate wins, ties, loses or cannot run, and what bringing it in costs.

One view over all cells of an artifact: the cells by verdict, the value of each axis between which
the verdict turns, and the image, compile and start-up costs of the subject beside the baseline's.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from attnrepro.compare.wholework import attention_clock
from attnrepro.manifest.cells import expand

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from attnrepro.jsonio import JsonObject
    from attnrepro.manifest.model import Cell

WORDS: Final = {"FASTER": "wins", "SAME": "ties", "SLOWER": "loses"}
"""Verdict of a comparison to the place of its cell; any other leaves the cell open."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """A candidate against a baseline in one cell."""

    cell: str
    """Id and label."""
    place: str
    """wins, ties, loses, open, or UNSUPPORTED and the other statuses."""
    ratio: float | None
    reason: str


@dataclass(frozen=True, kw_only=True)
class Crossover:
    """Two neighbours on an axis between which the verdict turns, all else being equal."""

    axis: str
    """Pointer of the field."""
    rest: str
    """The other axes' values."""
    before: tuple[object, str, float]
    """Value, place, ratio."""
    after: tuple[object, str, float]


@dataclass(frozen=True, kw_only=True)
class Boundary:
    """A candidate against a baseline over all cells."""

    subject: str
    baseline: str
    places: tuple[Place, ...]
    crossovers: tuple[Crossover, ...]

    def cells(self, place: str) -> list[Place]:
        """Cells of one place."""
        return [p for p in self.places if p.place == place]


@dataclass(frozen=True, kw_only=True)
class Cost:
    """What a subject costs before its first steady call."""

    subject: str
    image: str
    image_bytes: int | None
    build_ms: int | None
    import_ns: int | None
    """Median over cells; likewise the others."""
    first_call_ns: int | None
    compile_ns: int | None
    """First call less the second."""
    prepare_ns: int | None
    """Binding one set of inputs in a launch."""
    unsupported: int
    cells: int


def boundaries(manifest: Mapping[str, Any], observations: Mapping[str, Any]) -> list[Boundary]:
    """Every candidate against every baseline.

    Args:
        manifest: canonical.
        observations: valid.
    """
    cells = {cell.id: cell for cell in expand(dict(manifest))[0]}
    roles = {s["id"]: s["role"] for s in manifest["subjects"]}
    found = []
    for candidate in (name for name, role in roles.items() if role == "candidate"):
        for baseline in (name for name, role in roles.items() if role == "baseline"):
            places = {
                cell["id"]: place
                for cell in observations["cells"]
                if (place := _place(cell, candidate, baseline)) is not None
            }
            if places:
                found.append(
                    Boundary(
                        subject=candidate,
                        baseline=baseline,
                        places=tuple(places.values()),
                        crossovers=tuple(_crossovers(manifest, cells, places)),
                    )
                )
    return found


def costs(manifest: Mapping[str, Any], observations: Mapping[str, Any]) -> list[Cost]:
    """What each subject costs to bring in."""
    images = {image["stack"]: image for image in observations.get("images", ())}
    found = []
    for declared in manifest["subjects"]:
        stack = (declared["image"] or manifest["image"])["stack"]
        seen = [
            s
            for cell in observations["cells"]
            for s in cell["subjects"]
            if s["subject"] == declared["id"]
        ]
        cold = [s["cold"] for s in seen if "cold" in s]
        prepared = [
            launch["preparation"]["prepare_ns"][-1]
            for s in seen
            for launch in s.get("preparations", ())
        ]
        image: JsonObject = images.get(stack, {})
        found.append(
            Cost(
                subject=declared["id"],
                image=stack,
                image_bytes=image.get("size"),
                build_ms=image.get("build_ms"),
                import_ns=_median([c["import_ns"] for c in cold]),
                first_call_ns=_median([c["first_call_ns"] for c in cold]),
                compile_ns=_median(
                    [max(0, c["first_call_ns"] - c["second_call_ns"]) for c in cold]
                ),
                prepare_ns=_median(prepared),
                unsupported=sum(s["status"] == "UNSUPPORTED" for s in seen),
                cells=len(seen),
            )
        )
    return found


def _place(cell: Mapping[str, Any], candidate: str, baseline: str) -> Place | None:
    subjects = {s["subject"]: s for s in cell["subjects"]}
    if candidate not in subjects or baseline not in subjects:
        return None
    name = f"{cell['id']} {cell['label']}"
    subject = subjects[candidate]
    clock = attention_clock(subject["timing"])
    for claim in subject["comparisons"]:
        if claim["clock"] == clock and claim["baseline"] == baseline:
            ratio = float.fromhex(claim["ratio"])
            place = WORDS.get(claim["verdict"], "open")
            return Place(cell=name, place=place, ratio=ratio, reason=claim["reason"])
    for one in (subject, subjects[baseline]):
        if one["status"] != "PASS":
            who = "" if one is subject else f"{baseline}: "
            place = one["status"] if one is subject else "open"
            return Place(cell=name, place=place, ratio=None, reason=f"{who}{one['reason']}")
    return Place(cell=name, place="open", ratio=None, reason="not compared")


def _crossovers(
    manifest: Mapping[str, Any], cells: Mapping[str, Cell], places: Mapping[str, Place]
) -> Iterator[Crossover]:
    axes = sorted(manifest["sweep"])
    for axis in axes:
        rows: dict[str, list[tuple[object, Place]]] = {}
        for name, place in places.items():
            cell = cells[name]
            rest = [
                f"{other.rpartition('/')[2]}={_value(cell, other)}"
                for other in axes
                if other != axis
            ]
            key = ", ".join([*([cell.variant] if cell.variant else []), *rest])
            rows.setdefault(key, []).append((_value(cell, axis), place))
        for rest_text, row in rows.items():
            yield from _turns(axis, rest_text, row)


def _turns(axis: str, rest: str, row: Sequence[tuple[object, Place]]) -> Iterator[Crossover]:
    """Neighbours that were judged on different sides; what was not judged lies between them."""
    judged = [(value, p) for value, p in row if p.place in WORDS.values() and p.ratio is not None]
    if all(isinstance(value, int | float) for value, _ in judged):
        judged.sort(key=lambda pair: float(pair[0]))  # type: ignore[arg-type]
    for (value, place), (following, after) in itertools.pairwise(judged):
        if place.place != after.place:
            assert place.ratio is not None
            assert after.ratio is not None
            yield Crossover(
                axis=axis,
                rest=rest,
                before=(value, place.place, place.ratio),
                after=(following, after.place, after.ratio),
            )


def _value(cell: Cell, pointer: str) -> object:
    found: Any = {"workload": cell.workload, "inputs": cell.inputs, "request": cell.request}
    for part in pointer.split("/")[1:]:
        found = found.get(part) if isinstance(found, dict) else None
    return found


def _median(values: Sequence[int]) -> int | None:
    return sorted(values)[(len(values) - 1) // 2] if values else None
