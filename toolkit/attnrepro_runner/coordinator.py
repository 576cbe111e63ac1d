"""Runs a job's tasks: starts workers, feeds them, restarts them, writes what they found.

The standard library alone: what runs here cannot be brought down by a kernel under test. A task
whose result is there is skipped, so a second start goes on where the first ended.
"""

from __future__ import annotations

import functools
import os
import platform
import shutil
import signal
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NoReturn, cast

from attnrepro_runner import (
    __version__,
    caches,
    checking,
    counters,
    energy,
    finish,
    interleave,
    limits,
    profiles,
)
from attnrepro_runner.device import Device
from attnrepro_runner.elapsed import elapsed_ns
from attnrepro_runner.job import BadJob, Job, Task, load
from attnrepro_runner.resultfolder import ResultFolder
from attnrepro_runner.status import NEEDS_RESTART, STOPS_MEASURING, Failure, Status
from attnrepro_runner.supervise import MemoryWatch, WorkerProcess
from attnrepro_runner.team import Team
from attnrepro_runner.telemetry import Recorder

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from types import FrameType

    from attnrepro_runner.supervise import Worker

OK: Final = 0
BAD_JOB: Final = 3
DEVICE_LOST: Final = 9
INTERRUPTED: Final = 10
INTERNAL: Final = 70

COUNTED: Final = (sys.executable, "-P", "-m", "attnrepro_runner", "count")

_SETTLED: Final = {status.value for status in STOPS_MEASURING}


class _Stopped(BaseException):
    """A signal asked for the end."""


class DeviceLost(Exception):
    """The device is gone; the message is what its library said."""


def main(job_path: Path, out: Path) -> int:
    """Run a job file into a folder; return the exit status."""
    try:
        job = load(job_path)
        folder = ResultFolder(out, job.run)
    except BadJob as error:
        sys.stderr.write(f"{error}\n")
        return BAD_JOB
    except OSError as error:
        sys.stderr.write(f"the folder {out} cannot be written: {error}\n")
        return BAD_JOB
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, _stop)
    try:
        with Coordinator(job, folder) as coordinator:
            coordinator.run()
    except _Stopped as stopped:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        sys.stderr.write(f"interrupted by {stopped}; finished tasks stay\n")
        return INTERRUPTED
    except DeviceLost as lost:
        sys.stderr.write(f"the device vanished: {lost}; finished tasks stay\n")
        return DEVICE_LOST
    except OSError as error:
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        return INTERNAL
    return OK


def _stop(number: int, _frame: FrameType | None) -> NoReturn:
    # Once: what follows ends the workers and must not be interrupted itself.
    signal.signal(number, signal.SIG_IGN)
    raise _Stopped(signal.Signals(number).name)


class Coordinator:
    """One run of a job; a context manager that ends its workers and removes its caches."""

    def __init__(self, job: Job, folder: ResultFolder) -> None:
        """Look at the machine; nothing is started yet."""
        self._job = job
        self._folder = folder
        self._deadline = time.monotonic() + job.total_seconds
        self._flags = profiles.cpu_flags()
        self._threads = int(job.shared["device"].get("threads") or _usable_cpus())
        self._watch = MemoryWatch(
            limits.memory_limit(job.shared["limits"].get("memory_bytes")), set()
        )
        self._digests: dict[str, object] = {}
        self._settled: dict[tuple[str, str], dict[str, Any]] = {}
        self._flush: dict[str, str] = {}
        self._ceilings: dict[str, object] | None = None
        self._recorder: Recorder | None = None

    def __enter__(self) -> Coordinator:
        """Make the folder of compile caches, open the device."""
        self._exit = ExitStack()
        self._caches = caches.make_root()
        self._exit.callback(shutil.rmtree, self._caches, ignore_errors=True)
        self._device = Device(self._job.vendor, self._threads)
        self._exit.callback(self._device.close)
        return self

    def __exit__(self, *_: object) -> None:
        """Close the device, remove the caches."""
        self._exit.close()

    def run(self) -> None:
        """Run every task that has no result yet."""
        for task in self._job.tasks:
            document: dict[str, Any] | None = self._folder.result(task.id)
            if document is None:
                document = self._run_task(task)
                self._folder.write_result(document)
            if task.stage == "check":
                self._learn(document)
            self._ceilings = document.get("ceilings") or self._ceilings

    def _learn(self, document: Mapping[str, Any]) -> None:
        for entry in document["entries"]:
            if entry["status"] in _SETTLED:
                self._settled[entry["cell"], entry["subject"]] = entry

    def _run_task(self, task: Task) -> dict[str, Any]:
        started = elapsed_ns()
        sys.stderr.write(f"task {task.id}: {', '.join(task.subjects)}\n")
        team = Team(
            self._job,
            start=lambda subject, kind: self._start(task, subject, kind),
            learn=self._device.learn,
        )
        team.digests = self._digests
        entries: list[dict[str, Any]] = []
        had = self._ceilings
        # Nothing is timed under a profiler, which wants a device's counters to itself.
        sources = () if task.stage == "counters" else self._device.sources
        with Recorder(sources) as recorder:
            self._recorder = recorder
            try:
                if task.stage == "launch":
                    self._launch(task, team, entries, recorder)
                elif task.stage == "cold":
                    self._cold(task, team, entries)
                elif task.stage == "counters":
                    self._count(task, entries)
                elif task.stage == "check":
                    entries += self._check(task, team)
                else:
                    self._memory(task, team, entries)
            finally:
                team.end_all()
        self._flush |= team.flush
        member = self._folder.write_telemetry(task.id, recorder.document())
        return {
            "schema": "attnrepro.result/1",
            "run": self._job.run,
            "task": task.id,
            "stage": task.stage,
            "launch": task.launch,
            "started_ns": started,
            "ended_ns": elapsed_ns(),
            "runner": {
                "version": __version__,
                "python": platform.python_version(),
                "framework": team.framework or "unknown: no worker came up",
            },
            **({} if self._ceilings is had else {"ceilings": self._ceilings}),
            "device": self._device.record,
            "environment": self._environment(),
            "workers": team.records,
            "telemetry": [member],
            "entries": sorted(entries, key=lambda e: (int(e["cell"][1:]), e["subject"])),
        }

    def _environment(self) -> dict[str, object]:
        return {
            "threads": self._threads,
            "memory_limit_bytes": self._watch.limit,
            "order_rule": interleave.ORDER_RULE,
            "order_seed": self._job.order_seed,
            "flush": dict(sorted(self._flush.items())),
            "libc": " ".join(platform.libc_ver()),
        }

    # Stages.

    def _check(self, task: Task, team: Team) -> list[dict[str, Any]]:
        """Check: all cells of every subject, the accuracy reference's too."""
        cells = {s: self._cells(task, s, []) for s in task.subjects}
        cells = {s: todo for s, todo in cells.items() if todo}
        documents = [self._job.subjects[subject] for subject in cells]
        at_once = checking.together(documents, vendor=self._job.vendor, cpus=_usable_cpus())
        if self._job.vendor != "cpu":
            team.start_all(list(cells), "check", cores=_usable_cpus())

        def ask(subject: str, cell: Mapping[str, Any]) -> dict[str, Any]:
            team.new_cell(subject)
            answer = self._ask(team, subject, {"do": "check", "cell": cell}, "check")
            return _entry(cell["id"], subject, answer)

        return checking.check(cells, team, ask, at_once=at_once)

    def _memory(self, task: Task, team: Team, entries: list[dict[str, Any]]) -> None:
        """Memory and energy: one worker after the other, all cells of each."""
        for subject in self._measured_subjects(task):
            for cell in self._cells(task, subject, entries):
                team.new_cell()
                answer = self._ask(team, subject, {"do": "memory", "cell": cell}, "native")
                entry = _entry(cell["id"], subject, answer)
                if entry["status"] == Status.PASS:
                    spent = energy.measure(
                        cell,
                        read=self._device.energy_mj,
                        ask=lambda request, s=subject: self._ask(team, s, request, "native"),  # type: ignore[misc]
                    )
                    entry |= {} if spent is None else {"energy": spent}
                entries.append(entry)
            team.end(subject)

    def _count(self, task: Task, entries: list[dict[str, Any]]) -> None:
        """Counters: a process under ncu for every cell and subject."""
        environment, _ = self._worker_environment("native", self._caches / "counters")
        # ncu puts kernels of its own round the counted one, and may bring them as PTX.
        environment.pop("CUDA_DISABLE_PTX_JIT", None)
        for subject in self._measured_subjects(task):
            for cell in self._cells(task, subject, entries):
                left = self._left()
                found = counters.count(
                    [*COUNTED, str(self._job.path), str(cell["id"]), subject],
                    environment,
                    self._caches / "counters.csv",
                    seconds=max(1.0, min(left, self._job.cell_seconds)),
                    vendor=self._job.vendor,
                )
                answer = {"status": Status.PASS.value, "counters": found.to_json()}
                entries.append(_entry(cell["id"], subject, answer))

    def _cold(self, task: Task, team: Team, entries: list[dict[str, Any]]) -> None:
        """Cold: a process and compile caches of its own for every cell and subject."""
        for subject in self._measured_subjects(task):
            for cell in self._cells(task, subject, entries):
                team.new_cell()
                answer = self._ask(team, subject, {"do": "cold", "cell": cell}, "cold")
                entries.append(_entry(cell["id"], subject, answer))
                team.end(subject)

    def _launch(
        self, task: Task, team: Team, entries: list[dict[str, Any]], recorder: Recorder
    ) -> None:
        """Launch: all subjects alive, cells in seeded order, blocks interleaved."""
        subjects = self._measured_subjects(task)
        todo = {s: {c["id"] for c in self._cells(task, s, entries)} for s in subjects}
        started = [s for s in subjects if todo[s]]
        team.start_all(started, "native", cores=_usable_cpus())
        if self._job.vendor != "cpu":
            team.prime(started, cores=_usable_cpus(), within=self._left())
        if self._ceilings is None:
            self._measure_ceilings(team, started)
        cells = {cell["id"]: cell for cell in self._job.cells}
        seed = f"{self._job.order_seed}/{task.id}"
        for name in interleave.shuffled(list(cells), seed):
            taking = [s for s in subjects if name in todo[s]]
            team.new_cell()
            launch = interleave.CellLaunch(
                cells[name],
                taking,
                rule=self._job.stop_rule(),
                block=int(self._job.shared["timing"].get("block", 10)),
                seed=f"{seed}/{name}",
                ask=lambda s, request: self._ask(
                    team, s, {**request, "launch": task.launch or 0}, "native"
                ),
            )
            launch.run()
            spans = [m.span for m in launch.measured.values() if m.span is not None]
            for subject, measured in launch.measured.items():
                if spans and measured.span is not None:
                    finish.judge(
                        measured,
                        cells[name],
                        recorder.conditions(min(s[0] for s in spans), max(s[1] for s in spans)),
                        device=self._device.record,
                        policy=self._job.clock_policy,
                        ceilings=self._measured_ceilings(),
                    )
                entry = _entry(name, subject, measured.entry)
                if measured.series:
                    write = functools.partial(self._folder.write_samples, task.id, name, subject)
                    entry["samples"] = finish.records(measured, write)
                entries.append(entry)

    def _measure_ceilings(self, team: Team, subjects: Sequence[str]) -> None:
        """Measure what this device reaches, once a run, in the first worker that answers."""
        dtypes = sorted({str(cell["workload"]["dtype"]) for cell in self._job.cells})
        reason = "no subject is measured"
        for subject in subjects:
            answer = self._ask(team, subject, {"do": "ceilings", "dtypes": dtypes}, "native")
            if not isinstance(answer, Failure):
                self._ceilings = {"measured": answer["ceilings"], "reason": None}
                return
            reason = answer.reason
        self._ceilings = {"measured": [], "reason": reason}

    def _measured_ceilings(self) -> list[dict[str, Any]]:
        return cast("list[dict[str, Any]]", (self._ceilings or {}).get("measured", []))

    def _measured_subjects(self, task: Task) -> list[str]:
        return [
            s for s in task.subjects if self._job.subjects[s].get("role") != "accuracy_reference"
        ]

    def _cells(
        self, task: Task, subject: str, entries: list[dict[str, Any]]
    ) -> list[Mapping[str, Any]]:
        """Cells to do; those that the check settled get its verdict as their entry."""
        todo = []
        for cell in self._job.cells_of(subject):
            settled = self._settled.get((cell["id"], subject))
            if task.stage == "check" or settled is None:
                todo.append(cell)
                continue
            entries.append(
                {
                    "cell": cell["id"],
                    "subject": subject,
                    "status": settled["status"],
                    "reason": f"not run: the check says {settled['reason']}"[:2000],
                    "place": settled["place"],
                }
            )
        return todo

    # Workers.

    def _left(self) -> float:
        """Return the seconds that the run's limit leaves; not positive once it is spent."""
        return self._deadline - time.monotonic()

    def _ask(
        self, team: Team, subject: str, request: Mapping[str, object], kind: str
    ) -> dict[str, object] | Failure:
        if self._recorder is not None and self._recorder.lost is not None:
            raise DeviceLost(self._recorder.lost)
        left = self._left()
        if left <= 0:
            reason = f"the run's limit of {self._job.total_seconds:.0f} s is spent"
            return Failure(status=Status.TIMEOUT, reason=reason, place="before the cell")
        answer = team.ask(subject, request, kind, within=left)
        if _status(answer) in NEEDS_RESTART:
            team.end(subject)
        return answer

    def _start(self, task: Task, subject: str, kind: str) -> tuple[Worker, dict[str, str]]:
        profile = "native"
        if kind == "check" and self._job.vendor == "cpu":
            profile = str(self._job.shared["bits"].get("profile", "native"))
        folder = self._caches / "subjects" / subject
        if kind == "cold":
            folder = Path(tempfile.mkdtemp(prefix="cold-", dir=self._caches))
        environment, recorded = self._worker_environment(profile, folder)
        worker = WorkerProcess(
            environment=environment,
            log=self._folder.log(task.id, subject),
            watch=self._watch,
            limit_data=self._job.vendor == "cpu",
        )
        return worker, {"profile": profile, "caches": kind, **recorded}

    def _worker_environment(
        self, profile: str, folder: Path
    ) -> tuple[dict[str, str], dict[str, str]]:
        environment, recorded = profiles.worker_environment(
            os.environ,
            profile=profile,
            threads=self._threads,
            device="cpu" if self._job.vendor == "cpu" else "cuda",
            flags=self._flags,
        )
        environment |= caches.environment(folder)
        return environment, {**recorded, **caches.SWITCHES}


def _entry(cell: str, subject: str, answer: Mapping[str, object] | Failure) -> dict[str, Any]:
    found = answer.entry() if isinstance(answer, Failure) else dict(answer)
    return {"reason": None, "place": None, **found, "cell": cell, "subject": subject}


def _status(answer: Mapping[str, Any] | Failure) -> str:
    if isinstance(answer, Failure):
        return answer.status.value
    return str(answer.get("entry", answer).get("status"))


def _usable_cpus() -> int:
    return len(os.sched_getaffinity(0))
