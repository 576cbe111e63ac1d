"""One launch: all subjects' workers alive, one at work at a time, blocks in seeded order."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, cast

from attnrepro_runner.elapsed import elapsed_ns
from attnrepro_runner.status import Failure, Status, worst
from attnrepro_runner.stoprule import Series, StopRule

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

ORDER_RULE: Final = (
    "random.Random('order_seed/task').shuffle of the cells, "
    "random.Random('order_seed/task/cell').shuffle of the subjects before each round of blocks"
)
SWITCH_DISCARDS: Final = 2


def shuffled(items: Sequence[str], *seed: object) -> list[str]:
    """Return the items in the order that a seed gives."""
    order = list(items)
    random.Random("/".join(map(str, seed))).shuffle(order)
    return order


@dataclass
class Measured:
    """One subject of a cell while it is measured."""

    entry: dict[str, object]
    series: dict[str, Series] = field(default_factory=dict)
    spent_ns: int = 0
    calls: dict[str, int] = field(default_factory=dict)
    flushed: bool = False
    failed: bool = False
    handling_ns: int = 0
    """Of opening and closing the cell."""
    span: tuple[int, int] | None = None
    """Time of the first block's begin and the last one's end (`elapsed_ns`)."""

    @property
    def sampling(self) -> bool:
        """Whether more blocks are wanted."""
        return not self.failed and any(s.stop is None for s in self.series.values())

    def fail(self, failure: Failure) -> None:
        """Keep what is known; samples taken so far stay, and none of them counts."""
        self.entry.update(failure.entry())
        self.failed = True
        self.series = {clock: s for clock, s in self.series.items() if s.samples}
        for series in self.series.values():
            series.void(f"the subject ended as {failure.status.value} in this launch")

    def demand(self, status: Status, reason: str) -> None:
        """Take a status if it is worse than the one so far."""
        if worst(status, Status(str(self.entry["status"]))).value != self.entry["status"]:
            self.entry |= {"status": status.value, "reason": reason, "place": "sampling"}


class CellLaunch:
    """Measures one cell with all its subjects."""

    def __init__(
        self,
        cell: Mapping[str, object],
        subjects: Sequence[str],
        *,
        rule: StopRule,
        block: int,
        seed: str,
        ask: Callable[[str, Mapping[str, object]], dict[str, object] | Failure],
    ) -> None:
        """Prepare; nothing is asked yet."""
        self._cell = cell
        self._rule = rule
        self._block = block
        self._ask = ask
        self._order = random.Random(seed)
        self._last: str | None = None
        self.measured = {
            name: Measured({"cell": cell["id"], "subject": name, "status": Status.PASS.value})
            for name in subjects
        }

    def run(self) -> None:
        """Open the cell in every worker, take blocks in turn, close it."""
        for name in self._shuffle(list(self.measured)):
            self._open(name)
        while sampling := [name for name, m in self.measured.items() if m.sampling]:
            for name in self._shuffle(sampling):
                if self.measured[name].sampling:
                    self._take(name)
        opened = [n for n, m in self.measured.items() if m.series and not m.failed]
        for name in self._shuffle(opened):
            self._close(name)

    def _shuffle(self, names: list[str]) -> list[str]:
        self._order.shuffle(names)
        return names

    def _open(self, name: str) -> None:
        measured = self.measured[name]
        answer = self._request(name, {"do": "open", "cell": self._cell})
        if answer is None:
            return
        measured.entry.update(cast("Mapping[str, object]", answer["entry"]))
        if measured.entry["status"] in {Status.PASS.value, Status.INCONCLUSIVE.value}:
            clocks = cast("Mapping[str, int]", answer["clocks"])
            measured.calls = dict(clocks)
            measured.series = {clock: Series() for clock in clocks}
            measured.flushed = bool(answer["flushed"])

    def _take(self, name: str) -> None:
        measured = self.measured[name]
        usable = min(len(s.usable) for s in measured.series.values() if s.stop is None)
        count = min(self._block, self._rule.next_look(usable) - usable)
        discard = SWITCH_DISCARDS if name != self._last else 0
        count = self._fitting(measured, usable, count, discard)
        wanted = [clock for clock, s in measured.series.items() if s.stop is None]
        request = {"do": "block", "clocks": wanted, "count": count, "discard": discard}
        began = elapsed_ns()
        answer = self._request(name, request)
        measured.span = (measured.span[0] if measured.span else began, elapsed_ns())
        if answer is None:
            return
        measured.spent_ns += cast("int", answer["spent_ns"])
        samples = cast("Mapping[str, list[int]]", answer["samples"])
        lost = cast("Mapping[str, str]", answer.get("lost", {}))
        partial = cast("Mapping[str, list[int]]", answer.get("partial", {}))
        repeated = cast("Mapping[str, int]", answer.get("repeated", {}))
        for clock in wanted:
            series = measured.series[clock]
            series.repeated += repeated.get(clock, 0)
            if clock in lost:
                series.reject(partial.get(clock, []), f"in a block that failed: {lost[clock]}")
                series.stop = "failed"
                measured.demand(Status.INCONCLUSIVE, f"clock {clock}: {lost[clock]}")
                continue
            series.add(samples[clock], discard)
            series.stop = self._rule.verdict(series.usable, measured.spent_ns)

    def _fitting(self, measured: Measured, usable: int, count: int, discard: int) -> int:
        """Shorten a block of long calls that would run far beyond the time for the fewest samples.

        Such a block may end the worker by its limit, and with it every sample.
        """
        taken = max(len(series.samples) for series in measured.series.values())
        if usable >= self._rule.fewest or not taken:
            return count
        each = measured.spent_ns / taken
        room = self._rule.last_ns - measured.spent_ns
        return max(1, min(count, int(room / max(1.0, each)) - discard + 1))

    def _close(self, name: str) -> None:
        measured = self.measured[name]
        answer = self._request(name, {"do": "close", "cell": self._cell})
        if answer is None:
            return
        after = cast("dict[str, object]", answer["entry"])
        if measured.entry["status"] != Status.PASS.value:
            found = worst(Status(str(measured.entry["status"])), Status(str(after["status"])))
            if found.value == measured.entry["status"]:
                after = {k: v for k, v in after.items() if k not in ("status", "reason", "place")}
        spent = Counter({"sampling": measured.spent_ns})
        for entry in (measured.entry, after):
            spent.update(cast("Mapping[str, int]", entry.get("spent", {})))
        measured.entry.update(after, spent=dict(spent))
        short = [c for c, s in measured.series.items() if len(s.usable) < self._rule.fewest]
        if short and measured.entry["status"] == Status.PASS.value:
            n = min(len(measured.series[clock].usable) for clock in short)
            measured.demand(
                Status.INCONCLUSIVE,
                f"the budget ended after {n} of {self._rule.fewest} samples ({', '.join(short)})",
            )

    def _request(self, name: str, request: Mapping[str, object]) -> dict[str, object] | None:
        if request["do"] != "close":
            self._last = name
        began = elapsed_ns()
        answer = self._ask(name, request)
        if request["do"] != "block":
            self.measured[name].handling_ns += elapsed_ns() - began
        if isinstance(answer, Failure):
            self.measured[name].fail(answer)
            return None
        return answer
