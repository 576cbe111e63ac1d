"""How verbs speak: results on stdout (text, or one JSON document), progress on stderr."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


def emit(document: Mapping[str, Any], *, as_json: bool, text: Callable[[], str]) -> None:
    """Print a result once: as one JSON document, or as the text that `text` makes."""
    if as_json:
        sys.stdout.write(json.dumps(document, indent=2, ensure_ascii=True, allow_nan=False) + "\n")
    else:
        sys.stdout.write(printable(text()).rstrip("\n") + "\n")
    sys.stdout.flush()


def progress(line: str) -> None:
    """One line of progress on stderr, at once."""
    sys.stderr.write(printable(line) + "\n")
    sys.stderr.flush()


def printable(text: str) -> str:
    """The text with control characters and bidirectional overrides made visible.

    Fields of a foreign artifact reach the terminal through this, so that no escape sequence does.
    """
    return "".join(
        c if c in "\n\t" or (c.isprintable() and not "\u202a" <= c <= "\u202e") else ascii(c)[1:-1]
        for c in text
    )
