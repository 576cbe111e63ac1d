"""The clocks' device through torch's one API for CUDA and HIP."""

from __future__ import annotations

from bisect import bisect_left
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final, Protocol, cast

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from attnrepro_runner import trace

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from contextlib import AbstractContextManager

    from attnrepro_runner.clocks import Event, Trace

_MARK: Final = "attnrepro.call"
_SLEEP: Final = "spin_kernel"
"""Kernel of torch.cuda._sleep, on CUDA and on HIP."""


class _Event(Protocol):
    """The part of torch's event that is used."""

    def record(self) -> None: ...
    def query(self) -> bool: ...
    def elapsed_time(self, end: _Event) -> float: ...


def _sleep(cycles: int) -> None:
    torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]


class TorchEvent:
    """A torch event with timing, on the current stream."""

    def __init__(self) -> None:
        """Make the event."""
        self._event = cast("_Event", torch.cuda.Event(enable_timing=True))  # type: ignore[no-untyped-call]

    def record(self) -> None:
        """Enqueue it."""
        self._event.record()

    def query(self) -> bool:
        """Say whether it is passed."""
        return bool(self._event.query())

    def elapsed_ns(self, end: Event) -> int:
        """Return the time to a later event; the runtime resolves about 0.5 us."""
        assert isinstance(end, TorchEvent)
        return round(self._event.elapsed_time(end._event) * 1e6)


class TorchTrace:
    """Kernels of marked calls, from kineto's events."""

    def __init__(self, profiler: profile) -> None:
        """Read a profiler that is ended later."""
        self._profiler = profiler

    def call(self) -> AbstractContextManager[object]:
        """Mark one call on the host's timeline, which kineto aligns with the device's."""
        return record_function(_MARK)

    def spans_ns(self) -> Sequence[tuple[int, int, int] | None]:
        """Return begin and end of each call's kernels and their number, by its mark's window.

        The device is idle at both ends of a window, so a kernel in it is the call's, whichever
        stream it ran on.
        """
        return spans(*self._seen())

    def busy_ns(self) -> Sequence[int | None]:
        """Return how long the kernels of each call ran, but for the sleep before them."""
        return busy(*self._seen())

    def _seen(self) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
        windows, kernels = [], []
        for event in trace.events(self._profiler):
            if event.name == _MARK:
                # Kineto shows a mark on the device's timeline too.
                if not event.on_device:
                    windows.append((event.start_ns, event.end_ns))
            elif event.on_device and event.end_ns > event.start_ns and _SLEEP not in event.name:
                kernels.append((event.start_ns, event.end_ns))
        return sorted(windows), sorted(kernels)


def spans(
    windows: Sequence[tuple[int, int]], kernels: Sequence[tuple[int, int]]
) -> list[tuple[int, int, int] | None]:
    """Return span and number of the kernels that begin in each window; both lists are sorted."""
    begins = [begin for begin, _ in kernels]
    found: list[tuple[int, int, int] | None] = []
    for first, last in windows:
        inside = kernels[bisect_left(begins, first) : bisect_left(begins, last)]
        last_end = max((end for _, end in inside), default=0)
        found.append((inside[0][0], last_end, len(inside)) if inside else None)
    return found


def busy(
    windows: Sequence[tuple[int, int]], kernels: Sequence[tuple[int, int]]
) -> list[int | None]:
    """Return how long a kernel ran of those that begin within each window; both are sorted."""
    begins = [begin for begin, _ in kernels]
    found: list[int | None] = []
    for first, last in windows:
        inside = kernels[bisect_left(begins, first) : bisect_left(begins, last)]
        total, reached = 0, first
        for begin, end in inside:
            total += max(0, end - max(begin, reached))
            reached = max(reached, end)
        found.append(total if inside else None)
    return found


class TorchDevice:
    """The current CUDA or HIP device."""

    def __init__(self) -> None:
        """Learn how many cycles of the device's sleep kernel a millisecond has."""
        self._cycles_per_ns = 1.0
        for _ in range(2):  # the first loads the kernel
            start, end = TorchEvent(), TorchEvent()
            start.record()
            _sleep(10_000_000)
            end.record()
            torch.cuda.synchronize()
            self._cycles_per_ns = 10_000_000 / max(1, start.elapsed_ns(end))

    def synchronize(self) -> None:
        """Wait for all streams."""
        torch.cuda.synchronize()

    def event(self) -> TorchEvent:
        """Make an event."""
        return TorchEvent()

    def sleep_ns(self, duration: int) -> None:
        """Enqueue the sleep kernel on the current stream."""
        _sleep(max(1, round(duration * self._cycles_per_ns)))

    @contextmanager
    def trace(self) -> Iterator[Trace]:
        """Record kernels and marks; readable after the block."""
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
            yield TorchTrace(profiler)
