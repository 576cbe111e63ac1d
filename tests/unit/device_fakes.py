"""A device with a queue and the clock of its host, on which time passes only by work."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from attnrepro_runner import clocks, torchdevice

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence


class FakeTime:
    def __init__(self) -> None:
        self.ns = 0

    def now(self) -> int:
        return self.ns

    def take(self, latency: Callable[[int], int]) -> Callable[[int], list[int]]:
        def take(count: int) -> list[int]:
            samples = []
            for _ in range(count):
                samples.append(latency(self.ns))
                self.ns += samples[-1]
            return samples

        return take


class FakeEvent:
    def __init__(self, device: FakeDevice) -> None:
        self.device = device
        self.at = -1

    def record(self) -> None:
        self.at = max(self.device.busy_until, self.device.host.ns)

    def query(self) -> bool:
        return self.at <= self.device.host.ns

    def elapsed_ns(self, end: clocks.Event) -> int:
        assert isinstance(end, FakeEvent)
        return end.at - self.at


class FakeTrace:
    def __init__(self, device: FakeDevice) -> None:
        self.device = device
        self.windows: list[tuple[int, int]] = []

    @contextmanager
    def call(self) -> Iterator[None]:
        begin = self.device.host.ns
        yield
        self.windows.append((begin, self.device.host.ns))

    def spans_ns(self) -> Sequence[tuple[int, int, int] | None]:
        return torchdevice.spans(self.windows, sorted(self.device.kernels))

    def busy_ns(self) -> Sequence[int | None]:
        return torchdevice.busy(self.windows, sorted(self.device.kernels))


class FakeDevice:
    """A queue with a stream and a second beside it; kernels and the host have one time."""

    def __init__(self, host: FakeTime) -> None:
        self.host = host
        self.busy_until = 0
        self.aside_until = 0
        self.kernels: list[tuple[int, int]] = []
        self.slept: list[int] = []

    def synchronize(self) -> None:
        self.host.ns = max(self.host.ns, self.busy_until, self.aside_until)

    def event(self) -> FakeEvent:
        return FakeEvent(self)

    def sleep_ns(self, duration: int) -> None:
        self.slept.append(duration)
        self.busy_until = max(self.busy_until, self.host.ns) + duration

    def launch(self, duration: int) -> None:
        begin = max(self.busy_until, self.host.ns)
        self.busy_until = begin + duration
        self.kernels.append((begin, self.busy_until))

    def launch_aside(self, duration: int, *, joined: bool) -> None:
        """Launch on the second stream; joined, it follows the first, which waits for it."""
        begin = max(self.aside_until, self.host.ns, self.busy_until if joined else 0)
        self.aside_until = begin + duration
        self.kernels.append((begin, self.aside_until))
        if joined:
            self.busy_until = self.aside_until

    @contextmanager
    def trace(self) -> Iterator[clocks.Trace]:
        yield FakeTrace(self)
