"""The check of all cells: one subject after the other, or on a GPU several side by side.

Nothing is timed in a check, and on a GPU most of it is the host's work (compiling, drawing,
hashing): of the 290 s that the 72 cells of the papers' grid took one after the other on an H200, 66
were the oracle's. On a CPU the cores are the device, so that nothing is side by side there.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Final

from attnrepro_runner.status import NEEDS_RESTART

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from attnrepro_runner.team import Team

AT_ONCE: Final = 4
"""Subjects side by side on a GPU, each with its inputs and its oracle."""

Entry = dict[str, Any]


def check(
    cells: Mapping[str, Sequence[Mapping[str, Any]]],
    team: Team,
    ask: Callable[[str, Mapping[str, Any]], Entry],
    *,
    at_once: int,
) -> list[Entry]:
    """Check every subject's cells; return the entries, a subject's together.

    What failed beside others in a way that sharing could cause (memory, time, a crash) is tried
    once more with nobody beside it, and that is the entry.

    Args:
        cells: subject to the cells to check.
        team: the workers; each subject's is ended.
        ask: checks one cell of one subject; called by several threads.
        at_once: subjects side by side.

    Raises:
        BaseException: whatever `ask` raised, or a signal's handler; all workers are killed first.

    """

    def all_of(subject: str) -> list[Entry]:
        found = [ask(subject, cell) for cell in cells[subject]]
        # In the thread that started it, if any did: a worker ends with the thread that is its
        # parent (prctl(2), PR_SET_PDEATHSIG).
        team.end(subject)
        return found

    with ThreadPoolExecutor(at_once) as pool:
        asked = {subject: pool.submit(all_of, subject) for subject in cells}
        try:
            found = {subject: future.result() for subject, future in asked.items()}
        except BaseException:
            team.stop()
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    entries = []
    for subject, mine in found.items():
        for cell, entry in zip(cells[subject], mine, strict=True):
            again = at_once > 1 and entry["status"] in NEEDS_RESTART
            entries.append(ask(subject, cell) if again else entry)
        team.end(subject)
    return entries
