"""Variants and axes become cells."""

from __future__ import annotations

import itertools
import json
import math
from typing import TYPE_CHECKING, Any, Final

from attnrepro import schema, schema_words
from attnrepro.errors import Problem
from attnrepro.manifest import defaults
from attnrepro.manifest.model import Cell

if TYPE_CHECKING:
    from attnrepro.jsonio import JsonObject

MAX_CELLS: Final = 4096
_LONGEST_VALUE: Final = 40
_LONGEST_LABEL: Final = 300


def check_changes(document: JsonObject) -> list[Problem]:
    """What is wrong with the variants and axes of a schema-valid manifest.

    Their pointers must name fields, their values must be what the schema allows there, no two of
    them may set the same field, and there may not be too many cells.
    """
    problems: list[Problem] = []
    sweep, variants = document.get("sweep", {}), document.get("variants", [])
    changes = [
        (pointer, f"/sweep/{schema_words.escape(pointer)}/{index}", value)
        for pointer, values in sweep.items()
        for index, value in enumerate(values)
    ] + [
        (pointer, f"/variants/{number}/set/{schema_words.escape(pointer)}", value)
        for number, variant in enumerate(variants)
        for pointer, value in variant["set"].items()
    ]
    unknown: set[str] = set()
    for pointer, place, value in changes:
        part = schema.part(defaults.KIND, pointer)
        if part is None or pointer.startswith("/inputs/expected"):
            if pointer not in unknown:
                unknown.add(pointer)
                problems.append(_no_field(pointer, place))
        else:
            problems += schema.validate_value(part, value, kind=defaults.KIND, pointer=place)
    for number, variant in enumerate(variants):
        pointers = [*sweep, *variant["set"]]
        problems += _overlaps(pointers, f"/variants/{number}/set")
    if not variants:
        problems += _overlaps(list(sweep), "/sweep")
    if (count := count_cells(document)) > MAX_CELLS:
        problems.append(
            Problem(
                pointer="/sweep",
                found=f"{count} cells",
                allowed=f"at most {MAX_CELLS} cells",
                fix="take values out, or write several manifests",
            )
        )
    return problems


def count_cells(document: JsonObject) -> int:
    """Number of cells, without making them."""
    axes = math.prod(len(values) for values in document.get("sweep", {}).values())
    return axes * (len(document.get("variants", [])) or 1)


def expand(document: JsonObject) -> tuple[list[Cell], list[Problem]]:
    """The cells of an explicit manifest whose changes have been checked."""
    cells: list[Cell] = []
    problems: list[Problem] = []
    everyone = [subject["id"] for subject in document["subjects"]]
    axes = sorted(document["sweep"].items())
    names = _axis_names([pointer for pointer, _ in axes])
    variants = list(enumerate(document["variants"])) or [(0, None)]
    choices = [list(enumerate(values)) for _, values in axes]
    for (number, variant), point in itertools.product(variants, itertools.product(*choices)):
        changes = [
            (pointer, value, f"/variants/{number}/set/{schema_words.escape(pointer)}")
            for pointer, value in (variant["set"].items() if variant else ())
        ] + [
            (pointer, value, f"/sweep/{schema_words.escape(pointer)}/{index}")
            for (pointer, _), (index, value) in zip(axes, point, strict=True)
        ]
        label = [variant["id"]] if variant else []
        label += [
            f"{name}={_value_text(value, index)}"
            for name, (index, value) in zip(names, point, strict=True)
        ]
        parts = {key: _copy(document[key]) for key in ("workload", "inputs", "request")}
        parts["inputs"].pop("expected")
        problems += [p for change in changes if (p := _apply(parts, *change)) is not None]
        cells.append(
            Cell(
                id=f"c{len(cells):03d}",
                label=_label(label or [parts["workload"]["phase"]], len(cells)),
                variant=variant["id"] if variant else None,
                workload=defaults.resolve_workload(parts["workload"]),
                inputs=parts["inputs"],
                request=parts["request"],
                subjects=tuple((variant or {}).get("subjects") or everyone),
                sources={pointer: place for pointer, _, place in changes},
            )
        )
    return cells, list(dict.fromkeys(problems))


def check_duplicates(cells: list[Cell]) -> list[Problem]:
    """Cells that ask for the same twice."""
    seen: dict[str, Cell] = {}
    problems = []
    for cell in cells:
        key = json.dumps([cell.workload, cell.inputs, cell.request], sort_keys=True)
        first = seen.setdefault(key, cell)
        if first is not cell and set(first.subjects) & set(cell.subjects):
            problems.append(
                Problem(
                    pointer=next(iter(cell.sources.values()), "/workload"),
                    found=f"cell {cell.label!r} equal to cell {first.label!r}",
                    allowed="every cell once for each subject",
                    fix="take one of the two out",
                )
            )
    return problems


def _apply(parts: JsonObject, pointer: str, value: Any, place: str) -> Problem | None:
    """Set a field; its parent must be there (a window cannot be changed where there is none)."""
    *parents, name = pointer.split("/")[1:]
    target: Any = parts
    for parent in parents:
        target = target.get(parent) if isinstance(target, dict) else None
    if not isinstance(target, dict):
        whole = "/" + "/".join(parents)
        return Problem(
            pointer=place,
            found=f"{pointer}, while {whole} is null",
            allowed="a field of an object that is there",
            fix=f"give {whole} in the workload, or change it as a whole",
        )
    target[name] = _copy(value)
    return None


def _copy(value: Any) -> Any:
    """A copy of a JSON value: `deepcopy` takes three times as long, and cells are many."""
    if isinstance(value, dict):
        return {key: _copy(item) for key, item in value.items()}
    return [_copy(item) for item in value] if isinstance(value, list) else value


def _no_field(pointer: str, place: str) -> Problem:
    parent, _, name = pointer.rpartition("/")
    part = schema.part(defaults.KIND, parent) or {}
    root = schema.schema_of(defaults.KIND)
    known = [k for b in schema_words.branches(part, root) for k in b.get("properties", {})]
    meant = schema_words.did_you_mean(name, known)
    return Problem(
        pointer=place,
        found=f"{pointer}, which is no field",
        allowed="a pointer to a field of the workload, inputs or request",
        fix=f'did you mean "{parent}/{meant}"?'
        if meant
        else "see the manifest guide for its fields",
    )


def _overlaps(pointers: list[str], place: str) -> list[Problem]:
    problems = []
    for first, second in itertools.combinations(sorted(pointers), 2):
        if second == first or second.startswith(first + "/"):
            problems.append(
                Problem(
                    pointer=place,
                    found=f"{first} and {second}, which set the same field",
                    allowed="each field set once in a cell",
                    fix="take one of the two out",
                )
            )
    return problems


def _axis_names(pointers: list[str]) -> list[str]:
    """Last components, or longer ones where two axes would have one name."""
    short = [pointer.rsplit("/", 1)[-1] for pointer in pointers]
    return [
        name if short.count(name) == 1 else ".".join(pointer.split("/")[2:])
        for name, pointer in zip(short, pointers, strict=True)
    ]


def _label(words: list[str], index: int) -> str:
    label = " ".join(words)
    return label if len(label) <= _LONGEST_LABEL else f"{label[: _LONGEST_LABEL - 8]}… #{index}"


def _value_text(value: Any, index: int) -> str:
    if isinstance(value, str):
        return value
    text = json.dumps(value, separators=(",", ":"), sort_keys=True)
    return text if len(text) <= _LONGEST_VALUE else f"#{index}"
