"""Checking documents against the JSON Schemas in schema/, and filling their defaults.

Validation never touches the network, reports every problem of a document at once as `Problem`s,
and is bounded in time for hostile documents: big arrays are not walked once they are too long, a
branch of `anyOf` is read only as far as it helps, and the number of problems is capped.
"""

from __future__ import annotations

import copy
import json
import re
from functools import cache
from itertools import islice
from typing import TYPE_CHECKING, Any, Final, cast

from attnrepro import jsonio, resources, schema_words
from attnrepro.errors import Problem

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from jsonschema.protocols import Validator

    from attnrepro.jsonio import JsonObject

MAX_PROBLEMS: Final = 50
"""Problems told of one document; more would not be read."""
MAX_NODES: Final = {"manifest": 200_000}
"""Values of a document of this kind; other kinds: `MAX_NODES_OTHER`."""
MAX_NODES_OTHER: Final = 3_000_000
_BRANCH_ERRORS: Final = 8


@cache
def kinds() -> tuple[str, ...]:
    """Document kinds that have a schema, sorted."""
    suffix = ".schema.json"
    return tuple(
        sorted(p.name.removesuffix(suffix) for p in resources.schema_dir().glob(f"*{suffix}"))
    )


@cache
def schema_of(kind: str) -> JsonObject:
    """The schema document of `kind`; not to be changed. Raises KeyError for an unknown kind."""
    if kind not in kinds():
        raise KeyError(kind)
    path = resources.schema_dir() / f"{kind}.schema.json"
    document: JsonObject = jsonio.loads(path.read_bytes(), what=path.name)
    return document


def validate(kind: str, document: object) -> list[Problem]:
    """All problems of `document`, in the order of their pointers; empty if it is valid.

    At most `MAX_PROBLEMS`; the last one then says that there are more.
    """
    return validate_value(schema_of(kind), document, kind=kind, pointer="")


def validate_value(schema: JsonObject, value: object, *, kind: str, pointer: str) -> list[Problem]:
    """Like `validate`, for a value at `pointer` that a part of the schema of `kind` describes."""
    limit = MAX_NODES.get(kind, MAX_NODES_OTHER)
    if _count(value, limit) >= limit:
        return [
            Problem(
                pointer=pointer,
                found=f"more than {limit} values",
                allowed=f"at most {limit} values",
                fix="make it smaller",
            )
        ]
    root = schema_of(kind)
    validator = _validator(kind) if schema is root else _validator(kind).evolve(schema=schema)
    errors = islice(validator.iter_errors(cast("Any", value)), MAX_PROBLEMS + 1)
    problems = list(
        dict.fromkeys(p for error in errors for p in schema_words.problems(error, root, pointer))
    )
    if len(problems) > MAX_PROBLEMS:
        problems[MAX_PROBLEMS:] = [
            Problem(
                pointer=pointer,
                found=f"more than {MAX_PROBLEMS} problems",
                allowed="none",
                fix="mend those above first",
            )
        ]
    return problems


def with_defaults(kind: str, document: JsonObject) -> JsonObject:
    """A copy of a valid document in which every field that has a default is explicit."""
    filled: JsonObject = fill(schema_of(kind), document, kind=kind)
    return filled


def fill(schema: JsonObject, value: Any, *, kind: str) -> Any:
    """Like `with_defaults`, for a value that a part of the schema of `kind` describes."""
    root = schema_of(kind)
    schema = schema_words.resolve(schema, root)
    if not isinstance(value, dict | list):
        return value
    for keyword in schema_words.CHOICES:
        for branch in schema.get(keyword, ()):
            if _validator(kind).evolve(schema=branch).is_valid(value):
                return fill(branch, value, kind=kind)
    if isinstance(value, list):
        items = schema.get("items", {})
        return [fill(items, item, kind=kind) for item in value]
    properties = schema.get("properties", {})
    others = schema.get("additionalProperties", {})
    result = {
        key: fill(properties.get(key, others) or {}, item, kind=kind) for key, item in value.items()
    }
    for key, part in properties.items():
        resolved = schema_words.resolve(part, root)
        if key not in result and "default" in resolved:
            result[key] = fill(resolved, copy.deepcopy(resolved["default"]), kind=kind)
    return result


def part(kind: str, pointer: str) -> JsonObject | None:
    """The part of a schema that describes the object field at `pointer`; None if there is none.

    Follows `properties` and the branches of `anyOf`; array items have no fixed pointer.
    """
    root = schema_of(kind)
    parts = [schema_words.resolve(root, root)]
    for name in pointer.split("/")[1:]:
        branches = [b for p in parts for b in schema_words.branches(p, root)]
        parts = [
            schema_words.resolve(b["properties"][name], root)
            for b in branches
            if name in b.get("properties", {})
        ]
    return parts[0] if parts else None


def _count(value: object, limit: int) -> int:
    """Number of values in a tree, counted no further than `limit`."""
    count = 0
    stack = [value]
    while stack and count < limit:
        count += 1
        item = stack.pop()
        if isinstance(item, dict):
            stack.extend(item.values())
            count += len(item)
        elif isinstance(item, list):
            if len(item) > limit:
                return limit
            stack.extend(item)
    return count


@cache
def _validator(kind: str) -> Validator:
    # Imported here: jsonschema costs 0.1 s, and `attnrepro --help` imports this module's users.
    from jsonschema import Draft202012Validator
    from jsonschema.validators import extend
    from referencing import Registry
    from referencing.jsonschema import DRAFT202012

    registry: Registry[Any] = Registry().with_resources(
        (schema_of(name)["$id"], DRAFT202012.create_resource(_anonymous(name))) for name in kinds()
    )
    bounded = extend(  # type: ignore[no-untyped-call]
        Draft202012Validator,
        {
            "anyOf": _any_of,
            "oneOf": _any_of,
            "items": _items,
            "uniqueItems": _unique_items,
            "pattern": _pattern,
            "required": _required,
            "additionalProperties": _additional,
            "propertyNames": _property_names,
        },
    )
    validator: Validator = bounded(_anonymous(kind), registry=registry)
    return validator


def _anonymous(kind: str) -> JsonObject:
    # With "$schema" in it, jsonschema would go on with its own class and forget our keywords.
    return {key: value for key, value in schema_of(kind).items() if key != "$schema"}


# Keywords of our own: the same verdicts as jsonschema's, but bounded, one error a key, and `$` in a
# pattern is the end of the text (Python's `$` also matches before a last line break).


def _error(text: str, **more: Any) -> Any:
    from jsonschema import ValidationError

    return ValidationError(text, **more)


def _any_of(
    validator: Any, branches: Sequence[Any], instance: object, _schema: object
) -> Iterator[Any]:
    context = []
    for index, branch in enumerate(branches):
        errors = list(
            islice(validator.descend(instance, branch, schema_path=index), _BRANCH_ERRORS)
        )
        if not errors:
            return
        context.extend(errors)
    yield _error("no branch fits", context=context)


def _items(validator: Any, items: Any, instance: object, schema: JsonObject) -> Iterator[Any]:
    if not isinstance(instance, list) or len(instance) > schema.get("maxItems", len(instance)):
        return
    for index, item in enumerate(instance):
        yield from validator.descend(item, items, path=index)


def _unique_items(
    _validator: Any, unique: bool, instance: object, schema: JsonObject
) -> Iterator[Any]:
    if not unique or not isinstance(instance, list):
        return
    if len(instance) > schema.get("maxItems", len(instance)):
        return
    seen: set[str] = set()
    for item in instance:
        whole = isinstance(item, float) and item.is_integer()
        key = json.dumps(int(item) if whole else item, sort_keys=True)
        if key in seen:
            yield _error(schema_words.shorten(item))
            return
        seen.add(key)


def _pattern(_validator: Any, pattern: str, instance: object, _schema: object) -> Iterator[Any]:
    if isinstance(instance, str) and not _compiled(pattern).search(instance):
        yield _error("pattern")


@cache
def _compiled(pattern: str) -> re.Pattern[str]:
    ends = pattern.endswith("$") and not pattern.endswith("\\$")
    return re.compile(pattern[:-1] + r"\Z" if ends else pattern)


def _required(
    _validator: Any, names: Sequence[str], instance: object, _schema: object
) -> Iterator[Any]:
    if isinstance(instance, dict):
        for name in names:
            if name not in instance:
                yield _error(name)


def _additional(
    validator: Any, allowed: Any, instance: object, schema: JsonObject
) -> Iterator[Any]:
    if not isinstance(instance, dict) or len(instance) > schema.get("maxProperties", len(instance)):
        return
    known = schema.get("properties", {})
    patterns = [_compiled(p) for p in schema.get("patternProperties", {})]
    for key, item in instance.items():
        if key in known or any(p.search(key) for p in patterns):
            continue
        if allowed is False:
            yield _error(key)
        elif allowed is not True:
            yield from validator.descend(item, allowed, path=key)


def _property_names(validator: Any, names: Any, instance: object, _schema: object) -> Iterator[Any]:
    if isinstance(instance, dict):
        for key in instance:
            if not validator.evolve(schema=names).is_valid(key):
                yield _error(key)
