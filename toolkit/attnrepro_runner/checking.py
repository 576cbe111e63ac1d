"""The check of all cells: one subject after the other, or on a GPU several side by side.

Nothing that is kept is timed in a check, and on a GPU most of it is the host's work (compiling,
drawing, hashing): of the 290 s that the 72 cells of the papers' grid took one after the other on an
H200, 66 were the oracle's; side by side it took 145 s. On a CPU the cores are the device, so that
nothing is side by side there; nor is a compiler that times its candidates.
"""

from __future__ import annotations

import math
import sys
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING, Any, Final

from attnrepro_runner.status import Status

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from attnrepro_runner.semantics import Workload
    from attnrepro_runner.team import Team

SCORES_AGAIN: Final = {"cpu": 1 << 24, "cuda": 1 << 26}
"""Of the oracle before and after timing. With 2^30 on an H200 it was 187 of the 392 s that a launch
of the papers' grid took (72 cells, five subjects), with 2^28 147 of 331."""
PAIRS_AGAIN: Final = (64, 1)
"""(sequence, query head) pairs of it, others each time: of the first set of inputs, and of each
other one. The check's own oracle sees all it can afford."""

BLOCK: Final = 64
"""Query rows of a block, where an oracle judges some of them."""

AT_ONCE: Final = 4
"""Subjects side by side on a GPU, each with its inputs and its oracle."""

SHARED: Final = frozenset({Status.OUT_OF_MEMORY.value, Status.TIMEOUT.value})
"""Endings that sharing a device can cause. A crash is a crash: processes are apart."""

Entry = dict[str, Any]


def together(subjects: Iterable[Mapping[str, Any]], *, vendor: str, cpus: int) -> int:
    """Return how many of these subjects (documents of a job) are checked side by side.

    One where a compiler may time its candidates: what it chooses beside others is what the launches
    would run. flex does under `max-autotune`, and nobody knows what an adapter of the user's does.
    """
    asked = list(subjects)
    tunes = any(
        s.get("adapter") is not None or "autotune" in str(s.get("options", "")) for s in asked
    )
    return 1 if vendor == "cpu" or tunes else max(1, min(len(asked), cpus, AT_ONCE))


def affordable(
    workload: Workload, scores: int, most: int | None = None
) -> tuple[int, int | None] | None:
    """Return how much of a cell an oracle judges within so many scores; None is all of it.

    Args:
        workload: the cell's.
        scores: that it may compute; two pairs (with a backward, of all their rows) are least.
        most: pairs at most; None is as many as the scores allow.

    Returns:
        (sequence, query head) pairs to draw, with a backward each for all query heads that read its
        KV head, and blocks of BLOCK query rows of each pair, None for all.

    """
    each = max(q * k for q, k in zip(workload.seqlens_q, workload.seqlens_k, strict=True))
    count = workload.batch * workload.heads_q
    most = count if most is None else most
    if each * count <= scores and count <= most:
        return None
    shared = workload.heads_q // workload.heads_kv if workload.has_backward else 1
    pairs = min(most, count, max(2, scores // max(1, each * shared)))
    blocks = None
    if pairs <= 2 and not workload.has_backward:
        rows = max(workload.seqlens_q)
        fits = math.ceil(rows / BLOCK * scores / (pairs * each))
        blocks = max(2, min(fits, math.ceil(rows / BLOCK)))
    return pairs, blocks


def check(
    cells: Mapping[str, Sequence[Mapping[str, Any]]],
    team: Team,
    ask: Callable[[str, Mapping[str, Any]], Entry],
    *,
    at_once: int,
) -> list[Entry]:
    """Check every subject's cells; return the entries, a subject's together.

    What ended beside others for want of memory or time is tried once more with nobody beside it;
    for want of time only until a cell of that subject ends so alone too, since a hang costs its
    whole limit.

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
        try:
            asked = {subject: pool.submit(all_of, subject) for subject in cells}
            wait(asked.values(), return_when=FIRST_EXCEPTION)
            done = [future for future in asked.values() if future.done()]
            for future in done:  # one that raised comes before those that are still at it
                future.result()
            found = {subject: future.result() for subject, future in asked.items()}
        except BaseException:
            team.stop()
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    entries = []
    for subject, mine in found.items():
        trying = SHARED if at_once > 1 else frozenset()
        if trying:
            team.forgive(subject)
        for cell, entry in zip(cells[subject], mine, strict=True):
            if entry["status"] not in trying:
                entries.append(entry)
                continue
            again = ask(subject, cell)
            sys.stderr.write(
                f"cell {cell['id']}, {subject}: {entry['status']} beside others "
                f"({entry.get('reason')}), {again['status']} alone\n"
            )
            if again["status"] == Status.TIMEOUT:
                trying = trying - {Status.TIMEOUT.value}
            # It stays the first one's ending where the second is none of its own.
            entries.append(entry if again["status"] in SHARED else again)
        team.end(subject)
    return entries
