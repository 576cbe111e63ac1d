"""Times of a request's stages, from marks that it sets as it goes.

On a GPU a mark is a device event, so that nothing waits; on a CPU it is the clock. The pass with
marks is a pass of its own: the request's time comes from one without.
"""

from __future__ import annotations

import itertools
import time
from typing import TYPE_CHECKING, Protocol, cast

import torch

if TYPE_CHECKING:
    from collections.abc import Callable


class Marks(Protocol):
    """Where a request says which of its stages begins."""

    def begin(self, stage: str) -> None:
        """End the stage in hand and begin another."""
        ...

    def end(self) -> None:
        """End the last stage."""
        ...

    def between_gradients(
        self, inside: str, after: str, out: torch.Tensor, inputs: tuple[torch.Tensor, ...]
    ) -> None:
        """Mark a stage of the backward: from out's gradient to the last of its inputs'."""
        ...


class NoMarks:
    """Marks nothing."""

    def begin(self, stage: str) -> None:
        """Do nothing."""

    def end(self) -> None:
        """Do nothing."""

    def between_gradients(
        self, inside: str, after: str, out: torch.Tensor, inputs: tuple[torch.Tensor, ...]
    ) -> None:
        """Do nothing."""


class TimedMarks:
    """Collects one time a mark."""

    def __init__(self, device: torch.device) -> None:
        """Time by device events, or on a CPU by its clock."""
        self._on_device = device.type == "cuda"
        self._marks: list[tuple[str | None, int | torch.cuda.Event]] = []

    def begin(self, stage: str) -> None:
        """End the stage in hand and begin another."""
        self._marks.append((stage, self._now()))

    def end(self) -> None:
        """End the last stage."""
        self._marks.append((None, self._now()))

    def between_gradients(
        self, inside: str, after: str, out: torch.Tensor, inputs: tuple[torch.Tensor, ...]
    ) -> None:
        """Mark a stage of the backward by hooks on gradients."""
        waiting = len(inputs)

        def started(_: torch.Tensor) -> None:
            self.begin(inside)

        def arrived(_: torch.Tensor) -> None:
            nonlocal waiting
            waiting -= 1
            if not waiting:
                self.begin(after)

        _hook(out, started)
        for tensor in inputs:
            _hook(tensor, arrived)

    def totals_ns(self) -> dict[str, int]:
        """Return the sum of each stage's times, in the order of first appearance."""
        if self._on_device:
            torch.cuda.synchronize()
        totals: dict[str, int] = {}
        for (stage, mark), (_, following) in itertools.pairwise(self._marks):
            if stage is not None:
                totals[stage] = totals.get(stage, 0) + _between(mark, following)
        return totals

    def _now(self) -> int | torch.cuda.Event:
        if not self._on_device:
            return time.perf_counter_ns()
        event = cast("Callable[..., torch.cuda.Event]", torch.cuda.Event)(enable_timing=True)
        event.record()
        return event


def _between(first: int | torch.cuda.Event, second: int | torch.cuda.Event) -> int:
    if isinstance(first, int) and isinstance(second, int):
        return second - first
    assert isinstance(first, torch.cuda.Event)
    assert isinstance(second, torch.cuda.Event)
    return round(float(first.elapsed_time(second)) * 1e6)


def _hook(tensor: torch.Tensor, hook: Callable[[torch.Tensor], None]) -> None:
    cast("Callable[[Callable[[torch.Tensor], None]], object]", tensor.register_hook)(hook)
