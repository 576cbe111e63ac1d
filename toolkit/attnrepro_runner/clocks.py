"""The clocks of one call, behind one Protocol: host, op, kernel.

`host` is the synchronised wall clock round the call. `op` is the span between two device events
with the launch hidden: the device sleeps while the host enqueues, so that the span holds no Python.
`kernel` is the span from the first to the last device kernel of the call in the profiler's trace.
None replaces another: a clock that a device or a call does not allow is missing, with the reason.

The timer is bound here, at import, before any library under test is loaded.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager

now = time.perf_counter_ns
"""Nanoseconds of a monotonic clock."""


class ClockUnavailable(Exception):
    """This clock cannot time this call here; the message is the reason."""

    def __init__(self, message: str, taken: Sequence[int] = ()) -> None:
        """Say why, and hand over what was timed before; no sample is lost in silence."""
        super().__init__(message)
        self.taken = list(taken)
        """Samples of the same block, in ns, in time order."""


class Event(Protocol):
    """A mark in the device's queue."""

    def record(self) -> None:
        """Enqueue the mark."""
        ...

    def query(self) -> bool:
        """Say whether the device has passed the mark."""
        ...

    def elapsed_ns(self, end: Event) -> int:
        """Return the time from this mark to a later one; both are passed."""
        ...


class Trace(Protocol):
    """A profiler's trace of some calls, readable after it ended."""

    def call(self) -> AbstractContextManager[object]:
        """Mark one call; the device is idle when it is entered and left."""
        ...

    def spans_ns(self) -> Sequence[tuple[int, int, int] | None]:
        """Return first begin, last end and number of each call's kernels; None for no kernel."""
        ...

    def busy_ns(self) -> Sequence[int | None]:
        """Return how long kernels of each call ran, on any stream; None for no kernel.

        Time in which several ran counts once, and `DeviceApi.sleep_ns` is no kernel of a call.
        """
        ...


class DeviceApi(Protocol):
    """What the clocks need of a device's runtime."""

    def synchronize(self) -> None:
        """Wait until the device is idle."""
        ...

    def event(self) -> Event:
        """Make an event with timing."""
        ...

    def sleep_ns(self, duration: int) -> None:
        """Enqueue a kernel that keeps the device busy for about this long."""
        ...

    def trace(self) -> AbstractContextManager[Trace]:
        """Record kernels."""
        ...


class Clock(Protocol):
    """Times calls one by one."""

    name: str

    def take(self, count: int, following: Callable[[], Callable[[], object]]) -> list[int]:
        """Return `count` samples in ns, in time order.

        Args:
            count: how many.
            following: called before each sample, outside of its span: flushes the caches, takes
                the next inputs, and returns the call to be timed.

        Raises:
            ClockUnavailable: these calls cannot be timed so; it has the samples that were taken.

        """
        ...


class HostClock:
    """Synchronised wall clock."""

    def __init__(self, device: DeviceApi | None, name: str = "host") -> None:
        """Time a CPU's calls, or a device's with a wait on both sides."""
        self.name = name
        self._device = device

    def take(self, count: int, following: Callable[[], Callable[[], object]]) -> list[int]:
        """Time each call from an idle device to an idle device."""
        samples = []
        device = self._device
        for _ in range(count):
            work = following()
            if device is None:
                begin = now()
                kept = work()
                samples.append(now() - begin)
            else:
                device.synchronize()
                begin = now()
                kept = work()
                device.synchronize()
                samples.append(now() - begin)
            # Outputs are freed after the span, as a caller that uses them would.
            del kept
        return samples


class OpClock:
    """Device events round one call whose launch is hidden behind a sleeping device."""

    MARGIN: Final = 3
    """The device sleeps this many times as long as the host has needed to enqueue."""
    LEAST_NS: Final = 50_000
    MOST_NS: Final = 200_000_000
    ATTEMPTS: Final = 8

    def __init__(self, device: DeviceApi, name: str = "op") -> None:
        """Time on a device; how long enqueueing takes is learnt from the calls."""
        self.name = name
        self._device = device
        self.sleep_ns = self.LEAST_NS
        """How long the device sleeps while a call is enqueued."""
        self.repeated = 0
        """Calls whose launch was not hidden and that were made again."""

    def take(self, count: int, following: Callable[[], Callable[[], object]]) -> list[int]:
        """Time each call between two events."""
        samples: list[int] = []
        for _ in range(count):
            try:
                samples.append(self._one(following))
            except ClockUnavailable as error:
                raise ClockUnavailable(str(error), samples) from error
        return samples

    def _one(self, following: Callable[[], Callable[[], object]]) -> int:
        device = self._device
        for _ in range(self.ATTEMPTS):
            work = following()
            start, end = device.event(), device.event()
            device.synchronize()
            begin = now()
            device.sleep_ns(self.sleep_ns)
            start.record()
            kept = work()
            end.record()
            enqueue_ns = now() - begin
            # The device slept through the whole of the enqueueing, or the span holds Python.
            hidden = not start.query()
            device.synchronize()
            del kept
            wanted = max(self.LEAST_NS, self.MARGIN * enqueue_ns)
            if hidden:
                return start.elapsed_ns(end)
            self.repeated += 1
            # A call that waits for the device itself took the whole sleep to enqueue.
            self.sleep_ns = min(self.MOST_NS, max(2 * self.sleep_ns, wanted))
        message = (
            f"the call's launch cannot be hidden: it is not enqueued within "
            f"{self.sleep_ns / 1e6:.0f} ms, so it waits for the device itself"
        )
        raise ClockUnavailable(message)


class BusyClock:
    """Time in which kernels of a call ran, on any stream: what an op clock must have seen.

    From the profiler's trace, launched behind a sleeping device as by the op clock, so that kernels
    that overlap there overlap here, and the gaps of a slow launch count in neither.
    """

    def __init__(self, device: DeviceApi, beside: OpClock) -> None:
        """Trace calls that an op clock has timed."""
        self.name = f"busy_{beside.name}"
        self._device = device
        self._beside = beside

    def take(self, count: int, following: Callable[[], Callable[[], object]]) -> list[int]:
        """Trace each call behind a sleeping device."""
        trace = _traced(self._device, count, following, self._beside.sleep_ns)
        found = [busy for busy in trace.busy_ns() if busy is not None]
        if not found:
            message = "the trace shows no kernel of any call"
            raise ClockUnavailable(message)
        return found


class KernelClock:
    """Span of the call's device kernels in the profiler's trace.

    The device sleeps while a call is enqueued, as for the op clock: between two kernels of a call
    it would else wait for the host, and a traced launch is slow. (On an H200 cuDNN's forward, of
    two kernels, spanned 182 us without that and 153 us of kernels.)
    """

    LEARNT: Final = 2
    """Calls that tell how long enqueueing takes; they are no samples."""
    MOST_NS: Final = 10_000_000

    def __init__(self, device: DeviceApi, name: str = "kernel") -> None:
        """Time on a device; its first calls tell how long enqueueing takes."""
        self.name = name
        self._device = device
        self._sleep_ns: int | None = None

    def take(self, count: int, following: Callable[[], Callable[[], object]]) -> list[int]:
        """Trace a block of calls, each from an idle device to an idle device."""
        if self._sleep_ns is None:
            self._sleep_ns = self._learn(following)
        trace = _traced(self._device, count, following, self._sleep_ns)
        spans = trace.spans_ns()
        samples = [span[1] - span[0] for span in spans if span is not None]
        if len(spans) != count:
            message = f"the trace shows {len(spans)} of {count} calls"
            raise ClockUnavailable(message, samples)
        if len(samples) != count:
            message = "the trace shows a call without a kernel"
            raise ClockUnavailable(message, samples)
        counts = {span[2] for span in spans if span is not None}
        if len(counts) > 1:
            # A lost record would make a call look shorter than it was.
            message = f"the trace shows {min(counts)} to {max(counts)} kernels in equal calls"
            raise ClockUnavailable(message, samples)
        return samples

    def _learn(self, following: Callable[[], Callable[[], object]]) -> int:
        # On an idle device: a call that waits for it itself must not wait for a sleep, and takes
        # long for no launch's sake, so that the sleep has a limit.
        enqueued = []
        for _ in range(self.LEARNT):
            work = following()
            self._device.synchronize()
            begin = now()
            kept = work()
            enqueued.append(now() - begin)
            self._device.synchronize()
            del kept
        return min(self.MOST_NS, max(OpClock.LEAST_NS, OpClock.MARGIN * min(enqueued)))


def _traced(
    device: DeviceApi, count: int, following: Callable[[], Callable[[], object]], sleep_ns: int
) -> Trace:
    """Trace calls, each launched while the device sleeps twice as long: tracing slows a launch."""
    with device.trace() as trace:
        for _ in range(count):
            work = following()
            device.synchronize()
            with trace.call():
                device.sleep_ns(2 * sleep_ns)
                kept = work()
                device.synchronize()
            del kept
    return trace


def make(name: str, device: DeviceApi | None, prefix: str = "") -> Clock:
    """Return a clock by the manifest's name: host, op or kernel.

    Args:
        name: as in `timing.clocks`.
        device: None on a CPU.
        prefix: of the name under which its samples are kept, e.g. "backward_".

    Raises:
        ClockUnavailable: this device has no such clock.

    """
    if name == "host":
        return HostClock(device, prefix + name)
    if name in ("op", "kernel") and device is None:
        message = f"the clock {name} needs a device with a queue; a CPU has none"
        raise ClockUnavailable(message)
    if device is not None and name == "op":
        return OpClock(device, prefix + name)
    if device is not None and name == "kernel":
        return KernelClock(device, prefix + name)
    message = f"this runner has no clock {name} for a single call"
    raise ClockUnavailable(message)
