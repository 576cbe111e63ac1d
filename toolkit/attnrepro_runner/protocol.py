"""How coordinator and worker talk: one JSON document a line, over two pipes of their own.

Standard output belongs to the libraries under test, and goes to a log. Requests are
{"do": NAME, …}. A worker answers {"done": {…}} or {"failed": {status, reason, place}}, and says
before each step of its work {"note": STEP}, so that the place of a crash is known.
"""

from __future__ import annotations

import json
import os
import select
import time
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

LINE_LIMIT: Final = 256 << 20
"""Bytes of the longest line that is read: a million samples are a tenth of it."""

_CHUNK: Final = 1 << 16


class Closed(Exception):
    """The other side is gone."""


class BadMessage(Exception):
    """The other side wrote what is no message; the text says what."""


def write(descriptor: int, message: Mapping[str, object]) -> None:
    """Write one message.

    Raises:
        Closed: nobody reads.

    """
    data = memoryview(json.dumps(message, separators=(",", ":"), allow_nan=False).encode() + b"\n")
    try:
        while data:
            data = data[os.write(descriptor, data) :]
    except BrokenPipeError as error:
        raise Closed from error


class Inbox:
    """Messages that arrive on a pipe."""

    def __init__(self, descriptor: int) -> None:
        """Read from a descriptor that the caller keeps open."""
        self._descriptor = descriptor
        self._buffer = bytearray()
        self._searched = 0

    def read(
        self,
        *,
        deadline: float | None = None,
        tick: float = 0.05,
        watch: Callable[[], None] | None = None,
    ) -> dict[str, object]:
        """Wait for the next message.

        Args:
            deadline: on the monotonic clock, in seconds; None waits for ever.
            tick: seconds between two calls of `watch`.
            watch: called while waiting; what it raises ends the wait.

        Raises:
            Closed: the other side is gone.
            TimeoutError: the deadline passed.
            BadMessage: a line that is not a JSON object, or a line without end.

        """
        while True:
            end = self._buffer.find(b"\n", self._searched)
            if end >= 0:
                line = bytes(self._buffer[:end])
                del self._buffer[: end + 1]
                self._searched = 0
                return _parse(line)
            self._searched = len(self._buffer)
            if self._searched > LINE_LIMIT:
                message = f"a line of more than {LINE_LIMIT} bytes"
                raise BadMessage(message)
            self._wait(deadline, tick, watch)
            data = os.read(self._descriptor, _CHUNK)
            if not data:
                raise Closed
            self._buffer += data

    def _wait(self, deadline: float | None, tick: float, watch: Callable[[], None] | None) -> None:
        while True:
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                raise TimeoutError
            wait = left
            if watch is not None:
                wait = tick if left is None else min(tick, left)
            if select.select([self._descriptor], [], [], wait)[0]:
                return
            if watch is not None:
                watch()


def _parse(line: bytes) -> dict[str, object]:
    try:
        message = json.loads(line)
    except ValueError as error:
        text = f"not JSON: {line[:80]!r}"
        raise BadMessage(text) from error
    if not isinstance(message, dict):
        text = f"not an object: {line[:80]!r}"
        raise BadMessage(text)
    return message
