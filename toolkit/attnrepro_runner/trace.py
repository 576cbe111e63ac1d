"""Events of torch's profiler as plain values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from torch.profiler import profile


@dataclass(frozen=True, slots=True)
class TraceEvent:
    """One event; times are of one clock for host and device."""

    name: str
    on_device: bool
    start_ns: int
    end_ns: int
    bytes: int
    """Change of allocated bytes, of a "[memory]" event."""


def events(profiler: profile) -> list[TraceEvent]:
    """Return all events of a profiler that has ended, in no order."""
    results = cast("Any", profiler).profiler.kineto_results
    return [
        TraceEvent(
            name=event.name(),
            on_device=event.device_type().name != "CPU",
            start_ns=event.start_ns(),
            end_ns=event.end_ns(),
            bytes=event.nbytes(),
        )
        for event in results.events()
    ]
