"""A series of the machine's state through a task, read 20 times a second: frequency, stolen time.

It is read in the coordinator, which waits while a worker measures. A source is anything with
columns; a GPU's is another one.
"""

from __future__ import annotations

import threading
import time
from bisect import bisect_left, bisect_right
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol, cast

from attnrepro_runner.accelerator import AcceleratorUnavailable
from attnrepro_runner.conditions import between
from attnrepro_runner.elapsed import elapsed_ns

if TYPE_CHECKING:
    from collections.abc import Sequence

    from attnrepro_runner.conditions import Conditions

PERIOD_S: Final = 0.048
ROWS_LIMIT: Final = 500_000
"""Rows kept of a task: 6.6 hours, 170 MB of a GPU's. Readings go on as fast however long the
task is; beyond the limit every second row of the older half is dropped, so that at least the
last 3.3 hours, and with them every cell's own time, are whole. Each row has its time, and the
number of rows that were dropped is in the document."""

Value = int | str | None


class Source(Protocol):
    """Something that can be read many times a second."""

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of what `read` returns."""
        ...

    def read(self) -> Sequence[Value]:
        """Return one value a column; null where there is none."""
        ...


class CpuSource:
    """All CPUs together."""

    columns = (
        "cpu_busy_ticks",
        "cpu_idle_ticks",
        "cpu_steal_ticks",
        "load1_hundredths",
        "runnable",
        "frequency_khz",
    )

    def __init__(self, root: Path = Path("/"), *, every: int = 1) -> None:
        """Read below a root.

        Args:
            root: of the machine.
            every: ticks, load and threads are read in one of so many readings, null in between:
                the ticks are counters, so that nothing is lost, and on a host of many CPUs the
                kernel needs long to write them all.

        """
        self._every, self._reads = every, 0
        self._stat = root / "proc/stat"
        self._load = root / "proc/loadavg"
        self._frequency = root / "sys/devices/system/cpu/cpu0/cpufreq/scaling_cur_freq"
        self._has_frequency = self._frequency.exists()

    def read(self) -> tuple[Value, ...]:
        """Return ticks since boot (busy, idle, stolen), load, runnable threads, frequency."""
        due = self._reads % self._every == 0
        self._reads += 1
        slow = (*self._ticks(), *self._loads()) if due else (None,) * 5
        return (*slow, self._khz())

    def _ticks(self) -> tuple[int | None, int | None, int | None]:
        try:
            with self._stat.open("rb") as file:
                fields = [int(x) for x in file.readline().split()[1:9]]
            user, nice, system, idle, iowait, irq, softirq, steal = fields
        except (OSError, ValueError):
            return None, None, None
        return user + nice + system + irq + softirq, idle + iowait, steal

    def _loads(self) -> tuple[int | None, int | None]:
        try:
            load, _, _, running, _ = self._load.read_text().split()
            whole, _, part = load.partition(".")
            return int(whole) * 100 + int(part), int(running.partition("/")[0])
        except (OSError, ValueError):
            return None, None

    def _khz(self) -> int | None:
        if not self._has_frequency:
            return None
        try:
            return int(self._frequency.read_text())
        except (OSError, ValueError):
            return None


class Recorder:
    """A thread that reads sources until it is left; a context manager."""

    def __init__(self, sources: Sequence[Source], *, period_s: float = PERIOD_S) -> None:
        """Read every source every period."""
        self._sources = tuple(sources)
        self._period_ns = round(period_s * 1e9)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="telemetry", daemon=True)
        self._rows: list[list[Value]] = []
        self._errors: list[str] = []
        self._dropped = 0
        self.busy_ns = self.cpu_ns = 0
        self.lost: str | None = None
        """Why the device is gone; None while it answers."""

    def __enter__(self) -> Recorder:
        """Start reading."""
        self._began = elapsed_ns()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Stop after the reading in hand."""
        self._stop.set()
        self._thread.join()
        self._ended = elapsed_ns()

    def document(self) -> dict[str, object]:
        """Return the series: columns, rows in time order, what reading cost.

        `busy_ns` is the time in which a reading was under way, `cpu_ns` the reading thread's own
        processor time since it began: a driver's query may mostly wait for the device.
        """
        return {
            "schema": "attnrepro.telemetry/1",
            "began_ns": self._began,
            "ended_ns": self._ended,
            "period_ns": self._period_ns,
            "busy_ns": self.busy_ns,
            "cpu_ns": self.cpu_ns,
            "columns": ["elapsed_ns", *(c for s in self._sources for c in s.columns)],
            "rows": self._rows,
            "dropped": self._dropped,
            "errors": self._errors,
        }

    def conditions(self, began_ns: int, ended_ns: int) -> Conditions:
        """Return what was seen between two times of `elapsed_ns`, and one period round them."""
        period = self._period_ns
        columns = ["elapsed_ns", *(c for s in self._sources for c in s.columns)]
        rows = list(self._rows)  # at once: the thread goes on
        first = bisect_left(rows, began_ns - period, key=_time)
        last = bisect_right(rows, ended_ns + period, key=_time)
        return between(columns, rows[first:last], began_ns - period, ended_ns + period)

    def _keep(self, row: list[Value]) -> None:
        if self._rows:  # most values are those of before: one object serves all rows
            pairs = zip(self._rows[-1], row, strict=True)
            row = [old if old == new else new for old, new in pairs]
        self._rows.append(row)
        if len(self._rows) >= ROWS_LIMIT:
            before = len(self._rows)
            del self._rows[1 : ROWS_LIMIT // 2 : 2]
            self._dropped += before - len(self._rows)

    def _run(self) -> None:
        due = elapsed_ns()
        while not self._stop.is_set():
            began = elapsed_ns()
            row: list[Value] = [began]
            for source in self._sources:
                try:
                    row.extend(source.read())
                except Exception as error:  # a source that fails must not end the others
                    if isinstance(error, AcceleratorUnavailable):
                        self.lost = str(error)
                    row.extend([None] * len(source.columns))
                    if len(self._errors) < 10:
                        self._errors.append(f"{type(error).__name__}: {error}"[:200])
            self._keep(row)
            ended = elapsed_ns()
            self.busy_ns += ended - began
            self.cpu_ns = time.thread_time_ns()
            due = max(due + self._period_ns, ended)
            self._stop.wait((due - ended) / 1e9)


def _time(row: Sequence[Value]) -> int:
    return cast("int", row[0])
