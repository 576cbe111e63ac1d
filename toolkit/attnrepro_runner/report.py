"""A result entry as it grows: what is known so far survives what comes after."""

from __future__ import annotations

import time
import traceback
from collections import Counter
from typing import TYPE_CHECKING, Protocol

from attnrepro_runner.backends.base import Unsupported
from attnrepro_runner.outofmemory import is_out_of_memory
from attnrepro_runner.status import Status, clip, worst

if TYPE_CHECKING:
    from collections.abc import Callable


class Verdict(Protocol):
    """What oracle, probes and bits give."""

    def to_json(self) -> dict[str, object]:
        """Return its part of the result."""
        ...

    def status(self) -> str:
        """Return the status that it demands."""
        ...

    def reason(self) -> str | None:
        """Say why it is not PASS."""
        ...


class Report:
    """One entry: status, reason, place, and parts by name."""

    def __init__(self, note: Callable[[str], None]) -> None:
        """Begin; `note` tells the coordinator what is being done."""
        self._note = note
        self._place: str | None = None
        self.status = Status.PASS
        self.reason: str | None = None
        self.place: str | None = None
        self.parts: dict[str, object] = {}
        self._spent: Counter[str] = Counter()
        self._since = time.monotonic_ns()

    def at(self, place: str) -> None:
        """Say what is done next."""
        self._count()
        self._place = place
        self._note(place)

    def _count(self) -> None:
        now = time.monotonic_ns()
        if self._place is not None:
            self._spent[self._place] += now - self._since
        self._since = now

    def demand(self, status: Status, reason: str | None) -> None:
        """Take a status if it is worse than the one so far."""
        if worst(status, self.status) != self.status:
            self.status, self.place = status, self._place
            self.reason = None if reason is None else clip(reason)

    def judge(self, part: str, verdict: Verdict) -> bool:
        """Keep a verdict and take its status; say whether it is PASS."""
        self.parts[part] = verdict.to_json()
        status = Status(verdict.status())
        if status != Status.PASS:
            self.demand(status, verdict.reason())
        return status == Status.PASS

    def failed(self, error: Exception) -> None:
        """Take the status that an exception means."""
        if isinstance(error, Unsupported):
            self.demand(Status.UNSUPPORTED, str(error))
        elif is_out_of_memory(error):
            self.demand(Status.OUT_OF_MEMORY, str(error).partition("\n")[0] or "MemoryError")
        else:
            frame = traceback.extract_tb(error.__traceback__)[-1]
            where = f"{frame.filename.rpartition('/')[2]}:{frame.lineno}"
            text = f"{type(error).__name__}: {error}".strip()
            self.demand(Status.CRASH, f"{text} (raised at {where})")

    def entry(self) -> dict[str, object]:
        """Return the entry without cell and subject."""
        self._count()
        if self._spent:
            self.parts["spent"] = dict(self._spent)
        return {
            "status": self.status.value,
            "reason": self.reason,
            "place": self.place,
            **self.parts,
        }
