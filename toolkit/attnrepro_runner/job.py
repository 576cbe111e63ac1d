"""The job file, read without a schema library: what the coordinator itself needs of it.

The host validated it; here only what would lead astray is checked again.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from attnrepro_runner.stoprule import BUDGETS_FOR_FEWEST, SHARE_OF_LIMIT, StopRule

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

STAGES = ("cold", "check", "memory", "launch", "counters")


class BadJob(Exception):
    """The job file cannot be run; the message says why."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """One stage with some subjects, all cells."""

    id: str
    stage: str
    launch: int | None
    subjects: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Job:
    """What a run of the runner is to do."""

    run: str
    tasks: tuple[Task, ...]
    cells: tuple[Mapping[str, Any], ...]
    subjects: Mapping[str, Mapping[str, Any]]
    unsupported: frozenset[tuple[str, str]]
    """(cell, subject) that the host knows to be unsupported; no entry is made."""
    shared: Mapping[str, Any]
    """accuracy, bits, timing, device, limits as given: a worker gets them."""
    path: Path | None = None
    """File that it was read from."""

    @property
    def vendor(self) -> str:
        """cpu, nvidia or amd."""
        return str(self.shared["device"].get("vendor", "cpu"))

    @property
    def cell_seconds(self) -> float:
        """Time that a worker may need for one cell."""
        return float(self.shared["limits"].get("cell_seconds", 300))

    @property
    def total_seconds(self) -> float:
        """Time that all tasks may need."""
        return float(self.shared["limits"].get("total_seconds", 7200))

    @property
    def clock_policy(self) -> Mapping[str, Any]:
        """What the manifest wants of the device's clocks."""
        found: Mapping[str, Any] = self.shared["device"].get("clocks") or {}
        return found

    @property
    def order_seed(self) -> str:
        """Seed of every order."""
        return str(self.shared["timing"].get("order_seed", 0))

    def cells_of(self, subject: str) -> list[Mapping[str, Any]]:
        """Return the cells that a subject takes part in and supports."""
        return [
            cell
            for cell in self.cells
            if subject in cell["subjects"] and (cell["id"], subject) not in self.unsupported
        ]

    def stop_rule(self) -> StopRule:
        """Return the manifest's stop rule."""
        timing = self.shared["timing"]
        fewest, most = timing.get("samples", [100, 1600])
        budget = float(timing.get("cell_seconds", 10))
        last = min(budget * BUDGETS_FOR_FEWEST, self.cell_seconds * SHARE_OF_LIMIT)
        return StopRule(
            fewest=fewest,
            most=max(fewest, most),
            budget_ns=round(budget * 1e9),
            last_ns=round(max(budget, last) * 1e9),
            half_width=float(timing.get("median_ci", 0.005)),
            confidence=float(timing.get("confidence", 0.95)),
        )


def load(path: Path) -> Job:
    """Read a job file.

    Raises:
        BadJob: unreadable, not JSON, of another version, or naming what it does not define.

    """
    try:
        document = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        message = f"the job {path.name} cannot be read: {error}"
        raise BadJob(message) from error
    try:
        if document["schema"] != "attnrepro.job/1":
            message = f"the job is of schema {document['schema']!r}, not attnrepro.job/1"
            raise BadJob(message)
        tasks = tuple(
            Task(
                id=task["id"],
                stage=task["stage"],
                launch=task["launch"],
                subjects=tuple(task["subjects"]),
            )
            for task in document["tasks"]
        )
        job = Job(
            run=document["run"],
            tasks=tasks,
            cells=tuple(document["cells"]),
            subjects={subject["id"]: subject for subject in document["subjects"]},
            unsupported=frozenset((u["cell"], u["subject"]) for u in document["unsupported"]),
            path=path,
            shared={
                name: document[name] for name in ("accuracy", "bits", "timing", "device", "limits")
            },
        )
        unknown = {s for task in tasks for s in task.subjects} - set(job.subjects)
        stages = {task.stage for task in tasks} - set(STAGES)
    except (KeyError, TypeError, AttributeError) as error:
        message = f"the job lacks a part: {type(error).__name__}: {error}"
        raise BadJob(message) from error
    if unknown or stages:
        message = f"the job names what it does not define: {', '.join(sorted(unknown | stages))}"
        raise BadJob(message)
    return job
