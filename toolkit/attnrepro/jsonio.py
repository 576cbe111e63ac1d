"""Strict JSON in, canonical JSON (RFC 8785) out.

Reading refuses what parsers disagree on: duplicate keys, NaN and Infinity, integers beyond
2^53 - 1, numbers that overflow, lone surrogates, a byte-order mark, deep nesting.
"""

from __future__ import annotations

import json
import math
import re
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from attnrepro.errors import InvalidDocument, Problem

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

Json: TypeAlias = "bool | int | float | str | list[Json] | dict[str, Json] | None"
JsonObject: TypeAlias = "dict[str, Any]"

MAX_INTEGER: Final = 2**53 - 1
MAX_DEPTH: Final = 64
_MOST_PROBLEMS: Final = 50


_SMALLER: Final = "write a smaller number (a seed may also be a decimal string)"
_ANY_DOCUMENT: Final = "one JSON document (RFC 8259), UTF-8, every key once, finite numbers"


class _Refused(ValueError):
    def __init__(self, found: str, *, allowed: str, fix: str) -> None:
        super().__init__(found)
        self.allowed = allowed
        self.fix = fix


def _pairs(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in pairs:
        if key in result:
            raise _twice(key)
        result[key] = value
    return result


def _twice(key: str) -> _Refused:
    message = f"the key {key[:80]!r} stands twice in one object"
    return _Refused(message, allowed="every key once", fix="keep one of the two")


def _integer(text: str) -> int:
    if len(text) > 17 or abs(value := int(text)) > MAX_INTEGER:
        shown = text if len(text) <= 40 else f"{text[:40]}… ({len(text)} digits)"
        message = f"the integer {shown} is beyond 2^53 - 1"
        allowed = f"-{MAX_INTEGER} to {MAX_INTEGER}, which every JSON reader agrees on"
        raise _Refused(message, allowed=allowed, fix=_SMALLER)
    return value


def _real(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        message = f"the number {text[:40]} overflows"
        raise _Refused(message, allowed="finite float64 numbers", fix="write a smaller number")
    if value == 0 and text.startswith("-"):
        message = "negative zero, which has no canonical form"
        raise _Refused(message, allowed="0", fix="drop the sign")
    return value


def _constant(text: str) -> float:
    message = f"{text}, which is not JSON"
    raise _Refused(
        message, allowed="finite numbers", fix="write a number, or null where it is allowed"
    )


def _check_tree(value: object, depth: int) -> None:
    if depth > MAX_DEPTH:
        raise _too_deep()
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError:
            raise _surrogate() from None
    elif isinstance(value, list):
        for item in value:
            _check_tree(item, depth + 1)
    elif isinstance(value, dict):
        for key, item in value.items():
            _check_tree(key, depth + 1)
            _check_tree(item, depth + 1)


def _too_deep() -> _Refused:
    message = f"nesting deeper than {MAX_DEPTH} levels"
    return _Refused(message, allowed=f"{MAX_DEPTH} levels", fix="flatten the document")


def _surrogate() -> _Refused:
    message = "a string with a lone surrogate"
    return _Refused(message, allowed="Unicode scalar values", fix="write the character itself")


def loads(data: bytes, *, what: str) -> Any:
    """Parse strict JSON.

    Raises InvalidDocument (exit 2) naming `what`, with line, column and, where the text is JSON but
    refused, the pointer of the place.
    """
    text = ""
    try:
        text = data.decode("utf-8")
        if text.startswith("\ufeff"):
            message = "a byte-order mark at its beginning"
            raise _Refused(message, allowed=_ANY_DOCUMENT, fix="save it as UTF-8 without one")
        value = json.loads(
            text,
            object_pairs_hook=_pairs,
            parse_int=_integer,
            parse_float=_real,
            parse_constant=_constant,
        )
        _check_tree(value, 0)
    except (ValueError, RecursionError) as error:
        raise _invalid(error, text, what) from None
    return value


def _invalid(error: ValueError | RecursionError, text: str, what: str) -> InvalidDocument:
    refused = _too_deep() if isinstance(error, RecursionError) else error
    if isinstance(refused, _Refused):
        problems = _problems(text) or [_problem(refused, "")]
    else:  # json and the decoder name the place themselves, and cannot read on
        problems = [
            Problem(
                pointer="",
                found=str(error),
                allowed=_ANY_DOCUMENT,
                fix="mend the file at that place",
            )
        ]
    return InvalidDocument(f"{what} is not valid JSON: {problems[0].found}", problems=problems)


def _problem(refused: _Refused, pointer: str, place: str = "") -> Problem:
    return Problem(
        pointer=pointer, found=f"{refused}{place}", allowed=refused.allowed, fix=refused.fix
    )


_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|[{}\[\]:,]|[^\s{}\[\]:,"]+', re.DOTALL)


def _problems(text: str) -> list[Problem]:
    """Every token that `loads` refuses, with pointer and place; run only after a refusal."""
    found: list[Problem] = []
    for path, position, refused in _refusals(text):
        line = text.count("\n", 0, position) + 1
        column = position - text.rfind("\n", 0, position)
        pointer = "".join(f"/{str(p).replace('~', '~0').replace('/', '~1')}" for p in path)
        found.append(_problem(refused, pointer, f": line {line} column {column}"))
        if len(found) == _MOST_PROBLEMS:
            break
    return found


def _refusals(text: str) -> Iterator[tuple[list[str | int], int, _Refused]]:
    """Path, offset and reason of each refused token; ends at the first too deep bracket."""
    path: list[str | int] = []
    keys: list[set[str]] = []  # of the open objects; an array's stays empty
    key_next = False
    for match in _TOKEN.finditer(text):
        token, position = match.group(), match.start()
        if token in "{[":
            if len(path) >= MAX_DEPTH:
                yield path, position, _too_deep()
                return
            path.append("" if token == "{" else 0)
            keys.append(set())
            key_next = token == "{"
        elif token in "}]":
            if not path:
                return
            path.pop()
            keys.pop()
        elif token == ",":
            if path and isinstance(path[-1], int):
                path[-1] += 1
            key_next = bool(path) and isinstance(path[-1], str)
        elif token == ":":
            key_next = False
        elif key_next and path and token.startswith('"'):
            path[-1] = key = str(json.loads(token))
            refused = _twice(key) if key in keys[-1] else _refusal(token)
            if refused is not None:
                yield path, position, refused
            keys[-1].add(key)
        elif (refused := _refusal(token)) is not None:
            yield path, position, refused


def _refusal(token: str) -> _Refused | None:
    try:
        value = json.loads(token, parse_int=_integer, parse_float=_real, parse_constant=_constant)
        _check_tree(value, 0)
    except _Refused as refused:
        return refused
    except ValueError:
        return None  # no JSON at all, which the parser would have said before
    return None


def canonical(value: Json | JsonObject | list[Any]) -> bytes:
    """RFC 8785 bytes of a JSON value."""
    import rfc8785  # 8 ms, so not at import

    return rfc8785.dumps(value)
