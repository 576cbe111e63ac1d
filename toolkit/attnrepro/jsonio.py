"""Strict JSON in, canonical JSON (RFC 8785) out.

Reading refuses what parsers disagree on: duplicate keys, NaN and Infinity, integers beyond
2^53 - 1, numbers that overflow, lone surrogates, a byte-order mark, deep nesting.
"""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from attnrepro.errors import InvalidDocument, Problem

if TYPE_CHECKING:
    from collections.abc import Sequence

Json: TypeAlias = "bool | int | float | str | list[Json] | dict[str, Json] | None"
JsonObject: TypeAlias = "dict[str, Any]"

MAX_INTEGER: Final = 2**53 - 1
MAX_DEPTH: Final = 64


class _Refused(ValueError):
    pass


def _pairs(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in pairs:
        if key in result:
            message = f"the key {key!r} stands twice in one object"
            raise _Refused(message)
        result[key] = value
    return result


def _integer(text: str) -> int:
    if len(text) > 17 or abs(value := int(text)) > MAX_INTEGER:
        message = f"the integer {text[:40]} is beyond 2^53 - 1; write it as a string"
        raise _Refused(message)
    return value


def _real(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        message = f"the number {text[:40]} overflows"
        raise _Refused(message)
    if value == 0 and text.startswith("-"):
        message = "negative zero has no canonical form"
        raise _Refused(message)
    return value


def _constant(text: str) -> float:
    message = f"{text} is not JSON"
    raise _Refused(message)


def _check_tree(value: object, depth: int) -> None:
    if depth > MAX_DEPTH:
        message = f"nested deeper than {MAX_DEPTH} levels"
        raise _Refused(message)
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError:
            message = "a string holds a lone surrogate"
            raise _Refused(message) from None
    elif isinstance(value, list):
        for item in value:
            _check_tree(item, depth + 1)
    elif isinstance(value, dict):
        for key, item in value.items():
            _check_tree(key, depth + 1)
            _check_tree(item, depth + 1)


def loads(data: bytes, *, what: str) -> Any:
    """Parse strict JSON.

    Raises InvalidDocument (exit 2) naming `what`, with the line and column where there is one.
    """
    try:
        text = data.decode("utf-8")
        if text.startswith("\ufeff"):
            message = "it begins with a byte-order mark"
            raise _Refused(message)
        value = json.loads(
            text,
            object_pairs_hook=_pairs,
            parse_int=_integer,
            parse_float=_real,
            parse_constant=_constant,
        )
        _check_tree(value, 0)
    except (ValueError, RecursionError) as error:
        found = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        message = f"{what} is not valid JSON: {found}"
        raise InvalidDocument(
            message,
            problems=[
                Problem(
                    pointer="",
                    found=found,
                    allowed="one JSON document (RFC 8259), UTF-8, every key once, finite numbers",
                    fix="mend the file where it says",
                )
            ],
        ) from None
    return value


def canonical(value: Json | JsonObject | list[Any]) -> bytes:
    """RFC 8785 bytes of a JSON value."""
    import rfc8785  # 8 ms, so not at import

    return rfc8785.dumps(value)
