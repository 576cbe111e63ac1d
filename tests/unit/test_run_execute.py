from __future__ import annotations

import shutil
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from host_fakes import FakeEngine, job

from attnrepro import execute as module
from attnrepro.errors import AttnreproError, Interrupted, Unavailable, UsageError
from attnrepro.execute import NO_IMAGE, Executed, Placement, Segment, execute
from attnrepro.runfolder import RunFolder, key_of, open_folder
from attnrepro.runnerwheel import RunnerWheel

if TYPE_CHECKING:
    from pathlib import Path

WHEEL = RunnerWheel(name="r.whl", version="0.1.0", data=b"wheel", sha256="00" * 32)
KEY = key_of({"a": 1})
PLACEMENT = Placement(device_id="cpu", cpuset="0", memory_bytes=None, gpu=None)


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return open_folder(tmp_path / "runs", "tiny", KEY)


def go(engine: FakeEngine, folder: RunFolder, told: list[str] | None = None) -> Executed:
    state = folder.start(KEY)
    return execute(
        [Segment(id="s0", image=NO_IMAGE, python="python3", job=job(run=state.run_id))],
        engine=engine,
        folder=folder,
        state=state,
        runner=WHEEL,
        placement=PLACEMENT,
        total_seconds=60,
        progress=(told if told is not None else []).append,
    )


def test_all_tasks_run_in_one_container(folder: RunFolder) -> None:
    told: list[str] = []
    done = go(FakeEngine(), folder, told)
    assert len(done.results["s0"]) == 6
    assert done.missing is None
    assert done.facts["limit_memory_bytes"] == "not enforced"
    assert any("1 of 6 tasks done; launch-0" in line for line in told)


def test_container_gets_exactly_runner_job_and_out(folder: RunFolder) -> None:
    engine = FakeEngine()
    go(engine, folder)
    (spec,) = engine.specs
    assert {(m.target, m.read_only) for m in spec.mounts} == {
        ("/attnrepro/runner.whl", True),
        ("/attnrepro/job.json", True),
        ("/attnrepro/out", False),
    }
    assert spec.environment == {"PYTHONPATH": "/attnrepro/runner.whl"}
    assert folder.wheel.read_bytes() == b"wheel"


@pytest.mark.parametrize("ending", [KeyboardInterrupt(), Interrupted("stopped by SIGTERM")])
def test_interrupted_run_goes_on_where_it_stopped(folder: RunFolder, ending: BaseException) -> None:
    with pytest.raises(Interrupted, match="after 2 of 6 tasks") as caught:
        go(FakeEngine(stop_after=2, ending=ending), folder)
    assert caught.value.hint == "the same command goes on from there"
    engine = FakeEngine()
    done = go(engine, folder)
    assert engine.written == ["launch-1", "launch-2", "launch-3", "launch-4"]
    assert done.state.resumed
    assert len(done.results["s0"]) == 6


def test_finished_run_needs_no_container(folder: RunFolder) -> None:
    go(FakeEngine(), folder)
    engine = FakeEngine()
    done = go(engine, folder)
    assert engine.specs == []
    assert len(done.results["s0"]) == 6
    assert done.state.resumed


def test_vanished_engine_can_be_resumed(folder: RunFolder) -> None:
    gone = Unavailable("docker does not answer any more", hint="start it")
    with pytest.raises(Unavailable, match="does not answer") as caught:
        go(FakeEngine(stop_after=3, ending=gone), folder)
    assert caught.value.hint == "start it; then the same command goes on from here"
    engine = FakeEngine()
    go(engine, folder)
    assert len(engine.written) == 3


def test_container_killed_from_outside_can_be_resumed(folder: RunFolder) -> None:
    with pytest.raises(Unavailable, match="signal 9"):
        go(FakeEngine(stop_after=1, code=137), folder)


def test_time_limit_leaves_what_was_done(folder: RunFolder) -> None:
    done = go(FakeEngine(stop_after=4, code=None, timed_out=True), folder)
    assert done.missing is not None
    assert done.missing[0] == "TIMEOUT"
    assert "60 s" in done.missing[1]
    assert len(done.results["s0"]) == 4


def test_memory_limit_of_the_container(folder: RunFolder) -> None:
    done = go(FakeEngine(stop_after=4, code=137, oom_killed=True), folder)
    assert done.missing is not None
    assert done.missing[0] == "OUT_OF_MEMORY"


def test_worker_out_of_memory_is_the_runners_own_matter(folder: RunFolder) -> None:
    assert go(FakeEngine(code=0, oom_killed=True), folder).missing is None


def test_runner_that_fails_is_told_with_its_last_words(folder: RunFolder) -> None:
    with pytest.raises(AttnreproError, match=r"exit code 70.*last line of the runner") as caught:
        go(FakeEngine(stop_after=0, code=70), folder)
    assert "logs" in (caught.value.hint or "")


def test_full_disk_is_told_as_such(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(folder.path)
    monkeypatch.setattr(module.shutil, "disk_usage", lambda path: usage._replace(free=4096))
    with pytest.raises(UsageError, match="no space left"):
        go(FakeEngine(stop_after=1, code=70), folder)


def test_time_spent_counts_over_all_starts(folder: RunFolder) -> None:
    with pytest.raises(Interrupted):
        go(FakeEngine(stop_after=1, ending=KeyboardInterrupt()), folder)
    state = folder.start(KEY)
    assert state.elapsed_ns > 0
    folder.save(replace(state, elapsed_ns=59 * 10**9))
    engine = FakeEngine()
    go(engine, folder)
    assert engine.specs[0].timeout_seconds is not None
    assert engine.specs[0].timeout_seconds <= 1.0 + module.GRACE_SECONDS


def test_a_vanished_device_is_unavailable_and_the_run_goes_on_later(folder: RunFolder) -> None:
    with pytest.raises(Unavailable, match=r"the device vanished: .*last line of the runner"):
        go(FakeEngine(stop_after=2, code=module.DEVICE_LOST), folder)
    again = FakeEngine()
    assert len(go(again, folder).results["s0"]) == 6
    assert len(again.written) == 4
