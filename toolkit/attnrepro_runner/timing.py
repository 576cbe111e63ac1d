"""Warming up and taking blocks of samples of one bound workload."""

from __future__ import annotations

import gc
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol, cast

from attnrepro_runner import clocks, orderstats

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from attnrepro_runner.clocks import Clock
    from attnrepro_runner.flush import Flush

WINDOWS: Final = 3
WINDOW_CALLS: Final = 5
STATIONARY: Final = 0.03
"""Greatest relative distance between the medians of the last windows."""


class Steps(Protocol):
    """Something with a step that can be timed: a prepared call, or a request."""

    def step(self) -> object:
        """Do the work once."""
        ...


@dataclass(frozen=True, kw_only=True)
class Target:
    """One of the input sets that are taken in turn."""

    prepared: Steps
    reads: Sequence[torch.Tensor]
    """What a flush must reach."""


class Sampler:
    """Times the calls of one workload on rotating inputs with emptied caches."""

    def __init__(self, targets: Sequence[Target], flush: Flush) -> None:
        """Take the targets in turn, from the first.

        What is garbage now is collected, and what lives is no longer looked at: a collection over
        all that torch has imported takes a tenth of a second.
        """
        gc.collect()
        gc.freeze()
        self._targets = tuple(targets)
        self._flush = flush
        self._next = 0

    def take(self, clock: Clock, count: int, part: str = "step") -> list[int]:
        """Return samples in ns; Python's garbage collector rests meanwhile.

        Args:
            clock: what times.
            count: how many samples.
            part: step, backward_step or append_step of the prepared call.

        Raises:
            ClockUnavailable: as the clock does.

        """

        def following() -> Callable[[], object]:
            return cast("Callable[[], object]", getattr(self._turn(), part))

        gc.disable()
        try:
            return clock.take(count, following)
        finally:
            gc.enable()

    def _turn(self) -> Steps:
        target = self._targets[self._next]
        self._next = (self._next + 1) % len(self._targets)
        self._flush(target.reads)
        return target.prepared


@dataclass(frozen=True, kw_only=True)
class WarmUp:
    """What was done before the first sample that counts."""

    duration_ns: int
    iterations: int
    stationary: bool
    rule: str

    def to_json(self) -> dict[str, object]:
        """Return the `warmup` object of a result."""
        return {
            "duration_ns": self.duration_ns,
            "iterations": self.iterations,
            "stationary": self.stationary,
            "rule": self.rule,
        }


def warm_up(
    take: Callable[[int], list[int]],
    *,
    least_s: float,
    most_s: float,
    now: Callable[[], int] = clocks.now,
) -> WarmUp:
    """Call until the latency is stationary, or the time is spent.

    Args:
        take: takes that many samples, in ns.
        least_s: time that is spent in any case.
        most_s: time after which it ends, stationary or not.
        now: a monotonic clock in ns.

    """
    begin = now()
    window_ns = round(least_s * 1e9 / WINDOWS)
    rule = (
        f"medians of the last {WINDOWS} windows (at least {WINDOW_CALLS} calls and "
        f"{window_ns / 1e6:.0f} ms each) within {STATIONARY:.0%} of each other"
    )
    medians: list[int] = []
    iterations = 0
    while True:
        window: list[int] = []
        opened = now()
        while len(window) < WINDOW_CALLS or now() - opened < window_ns:
            window += take(WINDOW_CALLS)
            if now() - begin >= most_s * 1e9:
                break
        iterations += len(window)
        medians.append(sorted(window)[orderstats.median_rank(len(window)) - 1])
        last = medians[-WINDOWS:]
        spent = now() - begin
        stationary = len(last) == WINDOWS and max(last) - min(last) <= STATIONARY * min(last)
        if (stationary and spent >= least_s * 1e9) or spent >= most_s * 1e9:
            return WarmUp(
                duration_ns=spent, iterations=iterations, stationary=stationary, rule=rule
            )


def warm_again(
    take: Callable[[int], list[int]], *, seconds: float, now: Callable[[], int] = clocks.now
) -> dict[str, int]:
    """Call for some time; return `warmup.again` of a result.

    Between a subject's warm-up and its first block the others open the cell: they compile and are
    held to the oracle, and the device cools. This brings its clocks back.

    Args:
        take: takes that many samples, in ns.
        seconds: time after which no further call is begun; there is one in any case.
        now: a monotonic clock in ns.

    """
    begin = now()
    iterations = 0
    while iterations == 0 or now() - begin < seconds * 1e9:
        iterations += len(take(1))
    return {"duration_ns": now() - begin, "iterations": iterations}
