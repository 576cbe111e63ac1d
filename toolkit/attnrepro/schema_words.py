"""Words for schema errors: what was found, what is allowed, what to do."""

from __future__ import annotations

import difflib
import json
from typing import TYPE_CHECKING, Any, Final, cast

from attnrepro.errors import Problem

if TYPE_CHECKING:
    from collections.abc import Iterable

    from jsonschema import ValidationError

    from attnrepro.jsonio import JsonObject

_MAX_WORDS: Final = 80
_MAX_PATTERN: Final = 60
CHOICES: Final = ("anyOf", "oneOf")
"""Keywords whose branches are alternatives; the schemas here use oneOf for disjoint ones only."""
_ARTICLES: Final = {
    "object": "an object",
    "array": "a list",
    "string": "a text",
    "integer": "an integer",
    "number": "a number",
    "boolean": "true or false",
    "null": "null",
}


def shorten(value: object, limit: int = _MAX_WORDS) -> str:
    """A value on one line, cut to `limit` characters; big lists and objects by their size."""
    if isinstance(value, dict) and len(value) > 8:
        return f"an object of {len(value)} fields"
    if isinstance(value, list) and len(value) > 16:
        return f"a list of {len(value)} items"
    if isinstance(value, str):
        value = value[: limit + 8]
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= limit else text[: limit - 1] + "…"


def escape(name: str) -> str:
    """One component of a JSON pointer."""
    return name.replace("~", "~0").replace("/", "~1")


def join(names: Iterable[str | int]) -> str:
    """JSON pointer of a path."""
    return "".join("/" + escape(str(name)) for name in names)


def did_you_mean(name: str, known: Iterable[str]) -> str | None:
    """The known name that `name` was probably meant to be."""
    matches = difflib.get_close_matches(name[:100], list(known), n=1, cutoff=0.6)
    return matches[0] if matches else None


def resolve(schema: Any, root: JsonObject) -> JsonObject:
    """The schema with a local `$ref` replaced by its target; fields beside `$ref` win."""
    result: JsonObject = schema if isinstance(schema, dict) else {}
    while str(result.get("$ref", "")).startswith("#/$defs/"):
        target = root["$defs"][result["$ref"].removeprefix("#/$defs/")]
        result = {**target, **{k: v for k, v in result.items() if k != "$ref"}}
    return result


def branches(schema: JsonObject, root: JsonObject) -> list[JsonObject]:
    """The schema itself, or its `anyOf` or `oneOf` branches resolved."""
    for keyword in CHOICES:
        if keyword in schema:
            return [b for part in schema[keyword] for b in branches(resolve(part, root), root)]
    return [schema]


def describe(schema: Any, root: JsonObject) -> str:
    """What a schema allows, in words."""
    schema = resolve(schema, root)
    for keyword in CHOICES:
        if keyword in schema:
            return " or ".join(dict.fromkeys(describe(part, root) for part in schema[keyword]))
    if "const" in schema:
        return json.dumps(schema["const"])
    if "enum" in schema:
        return "one of " + ", ".join(json.dumps(v) for v in schema["enum"])
    types = schema.get("type", [])
    types = [types] if isinstance(types, str) else types
    words = " or ".join(_ARTICLES[t] for t in types) or "a value"
    if detail := _limits(schema):
        words += " " + detail
    if "items" in schema and "array" in types:
        words += ", each " + describe(schema["items"], root)
    return words


def _limits(schema: JsonObject) -> str:
    words = []
    if "minimum" in schema and "maximum" in schema:
        words.append(f"from {schema['minimum']} to {schema['maximum']}")
    else:
        words += [f"of at least {schema['minimum']}"] if "minimum" in schema else []
        words += [f"of at most {schema['maximum']}"] if "maximum" in schema else []
    words += [f"above {schema['exclusiveMinimum']}"] if "exclusiveMinimum" in schema else []
    words += [f"below {schema['exclusiveMaximum']}"] if "exclusiveMaximum" in schema else []
    if "minItems" in schema or "maxItems" in schema:
        low, high = schema.get("minItems", 0), schema.get("maxItems")
        words.append(f"of {low} items" if low == high else f"of {low} to {high or 'any'} items")
    if "maxLength" in schema:
        words.append(f"of at most {schema['maxLength']} characters")
    if "pattern" in schema:
        short = len(schema["pattern"]) <= _MAX_PATTERN
        words.append(f"like {schema['pattern']}" if short else "of the form that is described")
    return " ".join(words)


def problems(error: ValidationError, root: JsonObject, prefix: str) -> list[Problem]:
    """One schema error in words: several, where it stands for those of the branch that was meant.

    `prefix` is the pointer of the value that was validated.
    """
    if error.validator in CHOICES and (meant := _meant_branch(error)):
        return [p for inner in meant for p in problems(inner, root, prefix)]
    return [_problem(error, root, prefix)]


def _problem(error: ValidationError, root: JsonObject, prefix: str) -> Problem:
    path = prefix + join(error.absolute_path)
    schema: JsonObject = error.schema if isinstance(error.schema, dict) else {}
    instance: Any = error.instance
    found = shorten(instance)
    match error.validator:
        case "required":
            name = error.message
            return Problem(
                pointer=f"{path}/{escape(name)}",
                found="nothing",
                allowed=describe(schema.get("properties", {}).get(name, {}), root),
                fix=f'add the field "{name}"',
            )
        case "additionalProperties":
            return _unknown_key(error, schema, path)
        case "propertyNames":
            return Problem(
                pointer=f"{path}/{escape(error.message[:_MAX_WORDS])}",
                found=f"the key {shorten(error.message)}",
                allowed="a key that is " + describe(schema["propertyNames"], root),
                fix="rename it or take it out",
            )
        case "uniqueItems":
            return Problem(
                pointer=path,
                found=f"{error.message} twice",
                allowed="each item once",
                fix="take the second out",
            )
        case "maxItems" | "minItems":
            found = f"a list of {len(instance)} items"
        case "maxProperties" | "minProperties":
            found = f"an object of {len(instance)} fields"
            return Problem(
                pointer=path,
                found=found,
                allowed=f"{schema.get('minProperties', 0)} to {schema.get('maxProperties', 'any')}",
                fix="add or take out fields",
            )
        case _:
            pass
    return Problem(pointer=path, found=found, allowed=describe(schema, root), fix=_fix(error))


def _unknown_key(error: ValidationError, schema: JsonObject, path: str) -> Problem:
    name, instance = error.message, cast("JsonObject", error.instance)
    known = list(schema.get("properties", {}))
    meant = did_you_mean(name, known)
    return Problem(
        pointer=f"{path}/{escape(name[:_MAX_WORDS])}",
        found=f"an unknown field with {shorten(instance[name], 40)}",
        allowed="only the fields " + ", ".join(known),
        fix=f'did you mean "{meant}"?' if meant else "take it out",
    )


def _fix(error: ValidationError) -> str:
    value, schema = error.instance, error.schema if isinstance(error.schema, dict) else {}
    if error.validator == "enum" and isinstance(value, str):
        meant = did_you_mean(value, [v for v in schema["enum"] if isinstance(v, str)])
        return f'did you mean "{meant}"?' if meant else "choose one of them"
    if error.validator == "type":
        if isinstance(value, str) and value.lstrip("-").replace(".", "", 1).isdigit():
            return "write the number without quotes"
        return "write a value of that type"
    if error.validator in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"):
        return "choose a value within these limits"
    return "write an allowed value"


def _meant_branch(error: ValidationError) -> list[ValidationError]:
    """The errors of the one branch of a choice that was meant; empty if none stands out.

    A branch whose kind (type, const, enum at the value itself) already fails was not meant.
    """
    by_branch: dict[Any, list[ValidationError]] = {}
    for inner in error.context or ():
        by_branch.setdefault(inner.relative_schema_path[0], []).append(inner)
    meant = [errors for errors in by_branch.values() if not any(map(_is_kind, errors))]
    return meant[0] if len(meant) == 1 else []


def _is_kind(error: ValidationError) -> bool:
    return not error.relative_path and error.validator in ("type", "const", "enum")
