"""When a series of samples is long enough; which of them count.

The rule looks at a series only when its usable length is the fewest samples times a power of two:
looking after every block would stop at lucky moments, and the interval would cover far less than it
says. The budget ends a series that has its fewest samples; one of long calls gets them within four
budgets and half the cell's limit, since fewer would be worth nothing.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypedDict

from attnrepro_runner import orderstats

if TYPE_CHECKING:
    from collections.abc import Sequence

BUDGETS_FOR_FEWEST = 4
"""Budgets after which a series ends that has not even its fewest samples."""
SHARE_OF_LIMIT = 0.5
"""Part of a cell's whole time after which it ends likewise: inputs and oracle need the rest."""

SWITCH_REASON = "first after a switch of process"


@dataclass(frozen=True, kw_only=True)
class StopRule:
    """The manifest's rule."""

    fewest: int
    most: int
    budget_ns: int
    """Of measured time, for what is more than the fewest samples."""
    last_ns: int
    """Of measured time, for the fewest samples."""
    half_width: float
    """Relative half width of the median's interval that is enough."""
    confidence: float

    def next_look(self, usable: int) -> int:
        """Return the usable length at which the rule looks next."""
        look = self.fewest
        while look <= usable:
            look *= 2
        return min(look, self.most)

    def verdict(self, samples: Sequence[int], spent_ns: int) -> str | None:
        """Return why sampling ends now: median_ci, max_samples, budget; or None."""
        n = len(samples)
        if n >= self.most:
            return "max_samples"
        if self._is_look(n) and self._narrow(samples):
            return "median_ci"
        if spent_ns >= (self.budget_ns if n >= self.fewest else self.last_ns):
            return "budget"
        return None

    def _is_look(self, n: int) -> bool:
        return n >= self.fewest and n % self.fewest == 0 and (n // self.fewest).bit_count() == 1

    def _narrow(self, samples: Sequence[int]) -> bool:
        ranks = orderstats.binomial_interval(len(samples), "1/2", self.confidence)
        if ranks is None:
            return False
        ordered = sorted(samples)
        median = ordered[orderstats.median_rank(len(samples)) - 1]
        width = ordered[ranks[1] - 1] - ordered[ranks[0] - 1]
        return width <= 2 * self.half_width * median


class Discard(TypedDict):
    """Samples that do not count, and why."""

    first: int
    count: int
    reason: str


@dataclass
class Series:
    """Samples of one clock in time order, those that do not count included."""

    samples: list[int] = field(default_factory=list)
    discards: list[Discard] = field(default_factory=list)
    usable: list[int] = field(default_factory=list)
    stop: str | None = None
    repeated: int = 0
    """Calls that were made again because the clock could not use the first."""

    def add(self, block: Sequence[int], discarded: int) -> None:
        """Add a block whose first `discarded` samples do not count."""
        if discarded:
            self.discards.append(
                {"first": len(self.samples), "count": discarded, "reason": SWITCH_REASON}
            )
        self.samples.extend(block)
        self.usable.extend(block[discarded:])

    def reject(self, block: Sequence[int], reason: str) -> None:
        """Add a block of which no sample counts."""
        if block:
            first, count = len(self.samples), len(block)
            self.discards.append({"first": first, "count": count, "reason": reason})
            self.samples.extend(block)

    def void(self, reason: str) -> None:
        """Let no sample count, and say why of those that did."""
        taken = {n for d in self.discards for n in range(d["first"], d["first"] + d["count"])}
        left = [n for n in range(len(self.samples)) if n not in taken]
        for _, run in itertools.groupby(enumerate(left), lambda pair: pair[1] - pair[0]):
            places = [place for _, place in run]
            self.discards.append({"first": places[0], "count": len(places), "reason": reason})
        self.discards.sort(key=lambda d: d["first"])
        self.usable.clear()
        self.stop = "failed"
