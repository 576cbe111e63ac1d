"""The canonical form: what is left out, or spelt in two ways, made explicit in one way."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from attnrepro import jsonio, resources, schema

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from attnrepro.jsonio import JsonObject

KIND: Final = "manifest"
_SEEDS: Final = frozenset({"seed", "offset", "permutation_seed", "order_seed"})
_FOLLOWS: Final = (("heads_kv", "heads_q"), ("head_dim_v", "head_dim"), ("dtype_out", "dtype"))


def shipped_revision(stack: str) -> str | None:
    """The newest revision folder of a stack that this release ships; None if it ships none."""
    folders = (resources.images_dir() / stack).glob("r*/image.json")
    numbers = [n for p in folders if (n := p.parent.name[1:]).isdigit()]
    return f"r{max(map(int, numbers))}" if numbers else None


def plain(value: Any) -> Any:
    """A copy in which every whole number is an integer: 128.0 and 128 are one number in JSON."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [plain(item) for item in value]
    if isinstance(value, float) and value.is_integer() and abs(value) <= jsonio.MAX_INTEGER:
        return int(value)
    return value


def explicit(document: JsonObject) -> JsonObject:
    """A schema-valid manifest with every default of the schema, in variants and axes too."""
    filled = schema.with_defaults(KIND, document)
    filled["sweep"] = {
        pointer: [_fill(pointer, value) for value in values]
        for pointer, values in sorted(filled["sweep"].items())
    }
    for variant in filled["variants"]:
        variant["set"] = {
            pointer: _fill(pointer, value) for pointer, value in sorted(variant["set"].items())
        }
    return filled


def canonical(document: JsonObject, newest: Callable[[str], str | None]) -> JsonObject:
    """The canonical document of an explicit manifest whose cells have been checked.

    `newest` gives the revision that null means. What null takes from another field (heads_kv from
    heads_q and so on) is resolved unless a variant or an axis changes that other field.
    """
    changed = {pointer for pointer, _ in overrides(document)}
    for image in images(document):
        if image["revision"] is None:
            image["revision"] = newest(image["stack"])
    if document["device"]["threads"] is None and document["device"]["vendor"] != "cpu":
        document["device"]["threads"] = 1
    workload = document["workload"]
    for field, source in _FOLLOWS:
        if f"/workload/{source}" in changed:
            continue
        value = follow(field, workload)
        if workload[field] is None:
            workload[field] = value
        _replace_null(document, f"/workload/{field}", value)
    spelt: JsonObject = _spell(document)
    spelt["sweep"] = {
        pointer: [_spell_at(pointer, value) for value in values]
        for pointer, values in spelt["sweep"].items()
    }
    for variant in spelt["variants"]:
        variant["set"] = {p: _spell_at(p, value) for p, value in variant["set"].items()}
    return spelt


def resolve_workload(workload: JsonObject) -> JsonObject:
    """A cell's workload with what null takes from another field filled in."""
    result = dict(workload)
    for field, _ in _FOLLOWS:
        if result[field] is None:
            result[field] = follow(field, result)
    return result


def follow(field: str, workload: JsonObject) -> Any:
    """What null means for heads_kv, head_dim_v or dtype_out."""
    value = workload[dict(_FOLLOWS)[field]]
    return "bfloat16" if value == "float8_e4m3fn" else value


def images(document: JsonObject) -> Iterator[JsonObject]:
    """The manifest's image and those of its subjects."""
    yield document["image"]
    for subject in document["subjects"]:
        if subject["image"] is not None:
            yield subject["image"]


def overrides(document: JsonObject) -> Iterator[tuple[str, str]]:
    """(pointer of a changed field, pointer of the change) of every variant and axis."""
    for pointer in document["sweep"]:
        yield pointer, "/sweep/" + pointer.replace("~", "~0").replace("/", "~1")
    for index, variant in enumerate(document["variants"]):
        for pointer in variant["set"]:
            escaped = pointer.replace("~", "~0").replace("/", "~1")
            yield pointer, f"/variants/{index}/set/{escaped}"


def _fill(pointer: str, value: Any) -> Any:
    part = schema.part(KIND, pointer)
    return value if part is None else schema.fill(part, value, kind=KIND)


def _replace_null(document: JsonObject, pointer: str, value: Any) -> None:
    values = document["sweep"].get(pointer, [])
    values[:] = [value if v is None else v for v in values]
    for variant in document["variants"]:
        if pointer in variant["set"] and variant["set"][pointer] is None:
            variant["set"][pointer] = value


def _spell(value: Any) -> Any:
    """One spelling for seeds (a number where it fits) and for causal (never true or false)."""
    if isinstance(value, dict):
        return {key: _spell_field(key, item) for key, item in value.items()}
    if isinstance(value, list):
        return [_spell(item) for item in value]
    return value


def _spell_at(pointer: str, value: Any) -> Any:
    return _spell_field(pointer.rsplit("/", 1)[-1], value)


def _spell_field(key: str, value: Any) -> Any:
    if key in _SEEDS and isinstance(value, str) and int(value) <= jsonio.MAX_INTEGER:
        return int(value)
    if key == "causal" and isinstance(value, bool):
        return "top_left" if value else "none"
    return _spell(value)
