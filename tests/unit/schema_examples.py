"""Smallest valid documents, and invalid ones next to them, made from the schemas themselves."""

from __future__ import annotations

import copy
import re
from typing import TYPE_CHECKING, Any

from attnrepro import schema_words

if TYPE_CHECKING:
    from collections.abc import Iterator

ALIEN = {"no such field": [None, {"at": "all"}]}
"""Allowed nowhere."""
_TEXTS = (
    "",
    "a",
    "aa",
    "A",
    "aaa",
    "0",
    "0.5",
    "1" * 16,
    "0" * 16,
    "0123456789abcdef" * 4,
    "sha256:" + "0123456789abcdef" * 4,
    "0123456789abcdef0123456789abcdef01234567",
    "c000",
    "r1",
    "1:1",
    "0x1.0p+0",
    "2026-11-29",
    "2026-11-29T10:00:00Z",
    "/a",
    "/workload/batch",
    "3.11",
    "a.whl",
    "samples/a.i64",
    "telemetry/a",
    "localhost/attnrepro/a:r1-0123456789ab",
    "QUJD",
)


def example(part: Any, root: dict[str, Any]) -> Any:
    """A smallest value that a part of a schema allows (conditions between fields left out)."""
    part = schema_words.resolve(part, root)
    for keyword in schema_words.CHOICES:
        if keyword in part:
            return example(part[keyword][-1], root)
    if "const" in part:
        return part["const"]
    if "enum" in part:
        return part["enum"][0]
    kinds = part.get("type", "object")
    kind = kinds if isinstance(kinds, str) else next(k for k in kinds if k != "null")
    if kind == "object":
        needed = part.get("required", [])
        others = part.get("additionalProperties")
        known = part.get("properties", {})
        value = {name: example(known.get(name, others), root) for name in needed}
        names = iter(_matching({"type": "string", **part.get("propertyNames", {})}))
        while len(value) < part.get("minProperties", 0) and isinstance(others, dict):
            value[next(names)] = example(others, root)
        return value
    if kind == "array":
        return [example(part["items"], root) for _ in range(part.get("minItems", 0))]
    if kind == "string":
        return _matching(part)[0]
    if kind == "boolean":
        return True
    low = part.get("minimum", part.get("exclusiveMinimum", 0))
    return low if "exclusiveMinimum" not in part else (low + part.get("exclusiveMaximum", 2)) / 2


def _matching(part: dict[str, Any]) -> list[str]:
    if "enum" in part:
        return list(part["enum"])
    least, pattern = part.get("minLength", 0), part.get("pattern", "")
    return [t for t in _TEXTS if len(t) >= least and re.search(pattern, t)]


def _takes_any_object(part: dict[str, Any], root: dict[str, Any]) -> bool:
    return any(
        "object" in (b.get("type") or "object") and b.get("additionalProperties") is not False
        for b in schema_words.branches(part, root)
        if "const" not in b and "enum" not in b
    )


def spoilt(value: Any, part: Any, root: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """(pointer, copy of a valid value with one thing wrong), for all that the schema fixes."""
    part = schema_words.resolve(part, root)
    if "properties" not in part and any(k in part for k in schema_words.CHOICES):
        if not _takes_any_object(part, root):
            yield "", ALIEN
        return
    if not isinstance(value, dict | list):
        if not _takes_any_object(part, root):
            yield "", ALIEN
        if isinstance(value, str) and "pattern" in part and part["pattern"].endswith("]$"):
            yield "", value + "\n"
        return
    if isinstance(value, dict):
        if part.get("additionalProperties") is False:
            yield "/privileged", {**value, "privileged": True}
        for name in part.get("required", ()):
            yield f"/{name}", {k: v for k, v in value.items() if k != name}
        parts = {name: part.get("properties", {}).get(name) for name in value}
    else:
        if "maxItems" in part:
            filler = value[0] if value else example(part["items"], root)
            yield "", [filler] * (part["maxItems"] + 1)
        parts = {index: part.get("items") for index in range(len(value))}
    for name, inner in parts.items():
        if inner is None:
            continue
        for pointer, wrong in spoilt(value[name], inner, root):
            bad = copy.copy(value)
            bad[name] = wrong
            yield f"/{name}{pointer}", bad
