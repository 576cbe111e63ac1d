"""Running the segments of a plan in closed containers, one after the other, resumably."""

from __future__ import annotations

import json
import os
import shutil
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from attnrepro import files
from attnrepro.engines import closed
from attnrepro.engines.base import ContainerSpec, ImageIdentity, Mount
from attnrepro.errors import AttnreproError, Interrupted, Unavailable, UsageError
from attnrepro_runner.status import STOPS_MEASURING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from attnrepro.engines.base import Engine, ExitStatus
    from attnrepro.engines.gpu import GpuAccess
    from attnrepro.jsonio import JsonObject
    from attnrepro.runfolder import RunFolder, State
    from attnrepro.runnerwheel import RunnerWheel

RUNNER_TARGET: Final = "/attnrepro/runner.whl"
JOB_TARGET: Final = "/attnrepro/job.json"
OUT_TARGET: Final = "/attnrepro/out"

NO_IMAGE: Final = ImageIdentity(
    archive=Path(os.devnull),
    name="none",
    manifest_digest="sha256:" + "0" * 64,
    config_digest="sha256:" + "0" * 64,
)
"""Stands where a spec needs an image and the engine is the bare host, which loads none."""

GRACE_SECONDS: Final = 60
"""The runner keeps the time limit itself and says which cells it hit; the container is killed only
where the runner has not ended so much later."""

DEVICE_LOST: Final = 9
"""Exit code by which the runner says that its device is gone."""

_FREE_BYTES: Final = 16 << 20


@dataclass(frozen=True, kw_only=True)
class Segment:
    """Tasks that run in one image."""

    id: str
    image: ImageIdentity
    python: str
    """Interpreter inside the image."""
    job: JsonObject
    """Valid against the job schema."""


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Where on this machine the containers run."""

    device_id: str
    """Names the device's lock."""
    cpuset: str | None
    memory_bytes: int | None
    gpu: GpuAccess | None


@dataclass(frozen=True, kw_only=True)
class Executed:
    """What the containers left."""

    results: Mapping[str, Sequence[JsonObject]]
    """Segment to the results of its finished tasks."""
    facts: Mapping[str, str]
    """How the containers were closed, and what the engine did otherwise than asked."""
    missing: tuple[str, str] | None
    """Status and reason of everything that has no result, where the whole container was ended."""
    state: State


def execute(
    segments: Sequence[Segment],
    *,
    engine: Engine,
    folder: RunFolder,
    state: State,
    runner: RunnerWheel,
    placement: Placement,
    total_seconds: float,
    progress: Callable[[str], None],
) -> Executed:
    """Run what has no result yet. The caller holds the run's and the device's lock.

    Raises:
        Interrupted: by Ctrl-C or a signal; what was finished stays.
        Unavailable: the engine vanished; likewise.
        UsageError: the disk is full; likewise.
        AttnreproError: the runner failed otherwise.
    """
    files.atomic_write(folder.wheel, runner.data)
    facts: dict[str, str] = {}
    missing: tuple[str, str] | None = None
    began = time.monotonic_ns()
    settled: set[tuple[str, str]] = set()
    teller = _Teller([task["id"] for s in segments for task in s.job["tasks"]], folder, progress)
    try:
        for planned in segments:
            segment = replace(planned, job=_without(planned.job, settled))
            spec = _prepare(segment, folder, placement)
            if _done(segment, folder, state.run_id) == len(segment.job["tasks"]):
                settled |= _settled(segment, folder, state.run_id)
                continue
            if not any(name.startswith("preflight_") for name in facts):
                log = folder.next_log(segment.id)
                facts |= closed.preflight(engine, spec, log=log)
            spent = (state.elapsed_ns + time.monotonic_ns() - began) / 1e9
            status = _run(
                replace(spec, timeout_seconds=max(0.0, total_seconds - spent) + GRACE_SECONDS),
                segment,
                engine=engine,
                folder=folder,
                run_id=state.run_id,
                stop=teller.look,
            )
            folder.check_results(segment.id)
            facts |= {str(key): str(value) for key, value in status.engine_facts.items()}
            missing = _ending(status, segment, folder, state.run_id, total_seconds) or missing
            settled |= _settled(segment, folder, state.run_id)
    finally:
        state = replace(state, elapsed_ns=state.elapsed_ns + time.monotonic_ns() - began)
        folder.save(state)
    return Executed(
        results={s.id: list(folder.results(s.id, state.run_id)) for s in segments},
        facts=facts,
        missing=missing,
        state=state,
    )


def _settled(segment: Segment, folder: RunFolder, run_id: str) -> set[tuple[str, str]]:
    """Cells and subjects that a segment's check found unfit to be measured."""
    return {
        (entry["cell"], entry["subject"])
        for result in folder.results(segment.id, run_id)
        if result["stage"] == "check"
        for entry in result["entries"]
        if entry["status"] in STOPS_MEASURING
    }


def _without(job: JsonObject, settled: set[tuple[str, str]]) -> JsonObject:
    """The job without what an earlier segment settled: a wrong kernel is not timed.

    The runner does so itself within one job; between containers it cannot know.
    """
    cells = [
        {**cell, "subjects": [s for s in cell["subjects"] if (cell["id"], s) not in settled]}
        for cell in job["cells"]
    ]
    return {**job, "cells": cells}


def _prepare(segment: Segment, folder: RunFolder, placement: Placement) -> ContainerSpec:
    job, out = folder.job(segment.id), folder.out(segment.id)
    out.mkdir(parents=True, exist_ok=True)
    files.atomic_write(job, json.dumps(segment.job, sort_keys=True).encode())
    return ContainerSpec(
        image=segment.image,
        command=(segment.python, "-m", "attnrepro_runner", JOB_TARGET, OUT_TARGET),
        mounts=(
            Mount(source=folder.wheel, target=RUNNER_TARGET, read_only=True),
            Mount(source=job, target=JOB_TARGET, read_only=True),
            Mount(source=out, target=OUT_TARGET, read_only=False),
        ),
        environment={"PYTHONPATH": RUNNER_TARGET},
        uid=os.getuid(),
        gid=os.getgid(),
        memory_bytes=placement.memory_bytes,
        cpuset=placement.cpuset,
        gpu=placement.gpu,
        name=closed.container_name(),
    )


def _run(
    spec: ContainerSpec,
    segment: Segment,
    *,
    engine: Engine,
    folder: RunFolder,
    run_id: str,
    stop: Callable[[], bool],
) -> ExitStatus:
    try:
        return engine.run(spec, log=folder.next_log(segment.id), stop=stop)
    except (KeyboardInterrupt, Interrupted) as error:
        done, total = _done(segment, folder, run_id), len(segment.job["tasks"])
        message = f"interrupted after {done} of {total} tasks"
        hint = "the same command goes on from there"
        raise Interrupted(message, hint=hint) from error
    except Unavailable as error:
        hint = f"{error.hint or 'mend the engine'}; then the same command goes on from here"
        raise Unavailable(error.message, hint=hint, rule=error.rule) from error


class _Teller:
    """Tells how many tasks of the whole run are done; never asks for a stop."""

    def __init__(
        self, names: Sequence[str], folder: RunFolder, progress: Callable[[str], None]
    ) -> None:
        self._names = names
        self._folder = folder
        self._progress = progress
        self._began = time.monotonic()
        self._count = -1

    def look(self) -> bool:
        found = {path.stem for path in self._folder.path.glob("*/out/tasks/*.json")}
        done = found & set(self._names)
        if len(done) != self._count:
            self._count = len(done)
            following = next((name for name in self._names if name not in done), None)
            if following is not None:
                seconds = time.monotonic() - self._began
                total = len(self._names)
                self._progress(
                    f"  [{seconds:4.0f} s] {len(done)} of {total} tasks done; {following}"
                )
        return False


def _done(segment: Segment, folder: RunFolder, run_id: str) -> int:
    names = {task["id"] for task in segment.job["tasks"]}
    return len({result["task"] for result in folder.results(segment.id, run_id)} & names)


def _ending(
    status: ExitStatus, segment: Segment, folder: RunFolder, run_id: str, total_seconds: float
) -> tuple[str, str] | None:
    """What the end of a container means for tasks without a result; None where all is well."""
    if status.code == 0:
        return None
    if status.timed_out:
        return "TIMEOUT", f"the run's limit of {total_seconds:g} s was reached"
    if _done(segment, folder, run_id) == len(segment.job["tasks"]):
        return None
    if status.oom_killed:
        return "OUT_OF_MEMORY", "the container's memory limit was reached and the kernel ended it"
    tail = _log_tail(folder, segment)
    if shutil.disk_usage(folder.path).free < _FREE_BYTES or "No space left on device" in tail:
        message = f"no space left on the disk of {folder.path}"
        raise UsageError(message, hint="free some space; then the same command goes on from here")
    code = status.code
    if code == DEVICE_LOST:
        message = f"the device vanished: {tail or 'its library does not answer'}"
        raise Unavailable(message, hint="once it is back, the same command goes on from here")
    if code is not None and code > 128:
        message = f"the container was ended from outside (signal {code - 128}) before it was done"
        raise Unavailable(message, hint="the same command goes on from here")
    message = f"the runner failed (exit code {code}): {tail or 'it said nothing'}"
    raise AttnreproError(message, hint=f"its output is in {folder.path / segment.id / 'logs'}")


def _log_tail(folder: RunFolder, segment: Segment) -> str:
    logs = sorted(
        (folder.path / segment.id / "logs").iterdir(), key=lambda path: path.stat().st_mtime_ns
    )
    text = logs[-1].read_text(encoding="utf-8", errors="replace") if logs else ""
    lines: list[Any] = [line.strip() for line in text.splitlines() if line.strip()]
    return " | ".join(lines[-3:])[-600:]
