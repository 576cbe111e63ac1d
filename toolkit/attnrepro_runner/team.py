"""The workers of one task: started when first needed, kept, replaced, recorded."""

from __future__ import annotations

import sys
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from attnrepro_runner.elapsed import elapsed_ns
from attnrepro_runner.status import Failure, Status

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from attnrepro_runner.job import Job
    from attnrepro_runner.supervise import Worker

START_SECONDS = 120.0
"""Time that a start may need at least, however little a cell may: torch is read from disk."""

STARTS_IN_A_ROW = 2
"""Failed starts after which a subject is given up for the task."""


@dataclass
class _Member:
    worker: Worker
    record: dict[str, Any]
    hello: dict[str, object] | Failure | None = None


class Team:
    """One worker a subject; different subjects may be asked by different threads."""

    def __init__(
        self,
        job: Job,
        *,
        start: Callable[[str, str], tuple[Worker, dict[str, str]]],
        learn: Callable[[Mapping[str, object]], None] | None = None,
    ) -> None:
        """Start nothing yet; `start(subject, kind)` gives a process and its recorded environment.

        `learn` is told what a worker's framework knows of its device.

        kind: check, native or cold, as the environment differs.
        """
        self._job = job
        self._start = start
        self._learn = learn
        self._members: dict[str, _Member] = {}
        self._failed_starts: dict[str, Failure] = {}
        self._failures_in_a_row: dict[str, int] = {}
        self.records: list[dict[str, Any]] = []
        self._spent: dict[str, float] = {}
        self._lock = threading.Lock()
        self._stopped = False
        self.framework: str | None = None
        self.flush: dict[str, str] = {}
        self.digests: dict[str, object] = {}

    def start_all(self, subjects: Sequence[str], kind: str, *, cores: int) -> None:
        """Start several workers: side by side on as many cores, else one after the other.

        Two that import torch on one core take 6 to 8 s together, one after the other 3.5 s.
        """
        if cores >= len(subjects):
            for subject in subjects:
                self._begin(subject, kind)
        for subject in subjects:
            if subject not in self._members:
                self._begin(subject, kind)
            self._greet(subject)

    def prime(self, subjects: Sequence[str], *, cores: int, within: float) -> None:
        """Let workers that were started load side by side what their first cell would load alone.

        Nothing where they would take turns on the cores. A worker that fails, or is not done within
        that many seconds, is ended: what asks it next starts another, and has the failure if it
        comes again.
        """
        if cores < len(subjects):
            return
        ready = [s for s in subjects if s in self._members]
        for subject in ready:
            self._members[subject].worker.send({"do": "prime"})
        end = time.monotonic() + min(within, START_SECONDS)
        for subject in ready:
            left = max(0.001, end - time.monotonic())
            answer = self._members[subject].worker.receive(left)
            if isinstance(answer, Failure):
                sys.stderr.write(
                    f"priming {subject}: {answer.status.value} ({answer.reason}); started anew\n"
                )
                self.end(subject)

    def ask(
        self, subject: str, request: Mapping[str, object], kind: str, *, within: float
    ) -> dict[str, object] | Failure:
        """Ask a subject's worker, started if there is none.

        Args:
            subject: whose worker.
            request: what to do.
            kind: of the worker, if it has to be started.
            within: seconds that are left of the run.

        """
        if (given_up := self._failed_starts.get(subject)) is not None:
            return given_up
        with self._lock:
            if self._stopped:
                return Failure(status=Status.CRASH, reason="the task was stopped", place=None)
            if subject not in self._members:
                self._begin(subject, kind)
        greeting = self._greet(subject)
        if isinstance(greeting, Failure):
            return greeting
        spent = self._spent.get(subject, 0.0)
        seconds = max(0.001, min(within, self._job.cell_seconds - spent))
        began = time.monotonic()
        if request["do"] == "check":  # what another has hashed need not be read again
            with self._lock:
                request = {**request, "digests": dict(self.digests)}
        answer = self._members[subject].worker.ask(request, seconds)
        self._spent[subject] = spent + time.monotonic() - began
        if not isinstance(answer, Failure) and isinstance(found := answer.pop("digests", {}), dict):
            with self._lock:
                self.digests.update(found)
        return answer

    def new_cell(self, subject: str | None = None) -> None:
        """Give a subject's worker, or every one, the whole of a cell's time again."""
        if subject is None:
            self._spent.clear()
        else:
            self._spent.pop(subject, None)

    def forgive(self, subject: str) -> None:
        """Let a subject start again that failed to; not one whose backend is not there."""
        failure = self._failed_starts.get(subject)
        if failure is not None and failure.status != Status.UNSUPPORTED:
            del self._failed_starts[subject]
            self._failures_in_a_row[subject] = 0

    def stop(self) -> None:
        """Kill every worker and start no other, so that each thread that asks has its answer."""
        with self._lock:
            self._stopped = True
            for member in list(self._members.values()):
                member.worker.kill()

    def end(self, subject: str) -> None:
        """End a subject's worker; the next request starts another."""
        member = self._members.pop(subject, None)
        if member is not None:
            member.record["exit"] = member.worker.end()

    def end_all(self) -> None:
        """End every worker."""
        for subject in list(self._members):
            self.end(subject)

    def _begin(self, subject: str, kind: str) -> None:
        worker, environment = self._start(subject, kind)
        restarts = sum(record["subject"] == subject for record in self.records)
        record: dict[str, Any] = {
            "subject": subject,
            "start_ns": worker.start_ns,
            "ready_ns": 0,
            "restarts": restarts,
            "exit": "running",
            "environment": environment,
            "math": {},
        }
        self.records.append(record)
        self._members[subject] = _Member(worker, record)
        worker.send(
            {
                "do": "hello",
                "subject": self._job.subjects[subject],
                "shared": self._job.shared,
            }
        )

    def _greet(self, subject: str) -> dict[str, object] | Failure:
        member = self._members[subject]
        if member.hello is not None:
            return member.hello
        member.hello = member.worker.receive(max(START_SECONDS, self._job.cell_seconds))
        member.record["ready_ns"] = elapsed_ns()
        if isinstance(member.hello, Failure):
            self._count_failed_start(subject, member.hello)
            return member.hello
        self._failures_in_a_row[subject] = 0
        self.framework = str(member.hello["framework"])
        member.record["math"] = member.hello["math"]
        member.record["environment"] |= cast("Mapping[str, str]", member.hello["facts"])
        self.flush |= cast("Mapping[str, str]", member.hello["flush"])
        if self._learn is not None:
            self._learn(cast("Mapping[str, object]", member.hello.get("device", {})))
        return member.hello

    def _count_failed_start(self, subject: str, failure: Failure) -> None:
        self.end(subject)
        self._failures_in_a_row[subject] = self._failures_in_a_row.get(subject, 0) + 1
        # A backend that is not there stays away; what crashes may have been bad luck once.
        if (
            failure.status == Status.UNSUPPORTED
            or self._failures_in_a_row[subject] >= STARTS_IN_A_ROW
        ):
            self._failed_starts[subject] = failure
