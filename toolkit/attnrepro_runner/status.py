"""How a cell can end, and which ending wins."""

from __future__ import annotations

import signal
from dataclasses import dataclass
from enum import StrEnum
from typing import Final


class Status(StrEnum):
    """Status of one subject in one cell, worst first."""

    CRASH = "CRASH"
    """The worker ended by itself, or the subject raised."""
    OUT_OF_MEMORY = "OUT_OF_MEMORY"
    TIMEOUT = "TIMEOUT"
    UNSUPPORTED = "UNSUPPORTED"
    """The release does not do it; nothing was launched."""
    FALLBACK = "FALLBACK"
    """Another backend ran than the one named, or nothing was seen to run."""
    INCORRECT = "INCORRECT"
    """Oracle, probe or guard band says so."""
    NONDETERMINISTIC = "NONDETERMINISTIC"
    """Claimed bitwise, observed otherwise."""
    INVALID = "INVALID"
    """The measurement cannot be true, or measures nothing."""
    THROTTLED = "THROTTLED"
    INCONCLUSIVE = "INCONCLUSIVE"
    """Too few usable samples, or a probe's margin too small."""
    PASS = "PASS"


STOPS_MEASURING: Final = frozenset(
    {
        Status.CRASH,
        Status.OUT_OF_MEMORY,
        Status.TIMEOUT,
        Status.UNSUPPORTED,
        Status.FALLBACK,
        Status.INCORRECT,
    }
)
"""After one of these in the check, the subject is not measured in that cell."""

NEEDS_RESTART: Final = frozenset({Status.CRASH, Status.OUT_OF_MEMORY, Status.TIMEOUT})
"""After one of these the process cannot be trusted with the next cell."""

_TEXT_LIMIT: Final = 2000


@dataclass(frozen=True, kw_only=True)
class Failure:
    """Why a request to a worker has no result."""

    status: Status
    reason: str
    place: str | None
    """What the worker last said that it was doing."""

    def entry(self) -> dict[str, object]:
        """Return the fields of a result entry."""
        return {"status": self.status.value, "reason": clip(self.reason), "place": self.place}


def clip(text: str) -> str:
    """Keep the beginning and the end of a long text; a reason must fit its field."""
    if len(text) <= _TEXT_LIMIT:
        return text
    half = _TEXT_LIMIT // 2 - 3
    return f"{text[:half]} ... {text[-half:]}"


def worst(*statuses: Status) -> Status:
    """Return the status that wins."""
    order = list(Status)
    return min(statuses, key=order.index)


def describe_exit(code: int) -> str:
    """Say in words how a process ended; a negative code is a signal, as subprocess has it."""
    if code >= 0:
        return f"exit status {code}"
    try:
        return f"signal {signal.Signals(-code).name}"
    except ValueError:
        return f"signal {-code}"
