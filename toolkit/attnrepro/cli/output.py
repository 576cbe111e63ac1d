"""How verbs speak: results on stdout (text, or one JSON document), progress on stderr."""

from __future__ import annotations

import io
import json
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attnrepro.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import TextIO


def emit(document: Mapping[str, Any], *, as_json: bool, text: Callable[[], str]) -> None:
    """Print a result once: as one JSON document, or as the text that `text` makes."""
    if as_json:
        say(json.dumps(document, indent=2, ensure_ascii=True, allow_nan=False) + "\n")
    else:
        say(printable(text()).rstrip("\n") + "\n")


def progress(line: str) -> None:
    """One line of progress on stderr, at once."""
    murmur(printable(line) + "\n")


def say(text: str | bytes) -> None:
    """Write to stdout, at once; a reader that has gone changes no exit code.

    Raises UsageError where the output cannot be written (a full disk).
    """
    stream = sys.stdout
    try:
        if isinstance(text, bytes):
            stream.flush()
            stream.buffer.write(text)
        else:
            stream.write(text)
        stream.flush()
    except BrokenPipeError:
        silence(stream)
    except OSError as error:
        silence(stream)
        message = f"cannot write the output: {error.strerror}"
        raise UsageError(message, hint="send it to a file on a disk with room") from None


def murmur(text: str) -> None:
    """Write to stderr, at once, if it can be written."""
    try:
        sys.stderr.write(text)
        sys.stderr.flush()
    except OSError:
        silence(sys.stderr)


def steady_streams() -> None:
    """Let no character and no closed stream of the caller's end the command.

    A closed stream is None in Python; a terminal of another encoding gets escapes.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            nowhere = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115 - for good
            setattr(sys, name, nowhere)
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def silence(stream: TextIO) -> None:
    """Send the rest to nowhere, so that the interpreter does not complain when it flushes."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def printable(text: str) -> str:
    """The text with control characters and bidirectional overrides made visible.

    Fields of a foreign artifact reach the terminal through this, so that no escape sequence does.
    """
    return "".join(
        c if c in "\n\t" or (c.isprintable() and not "\u202a" <= c <= "\u202e") else ascii(c)[1:-1]
        for c in text
    )
