from __future__ import annotations

import json
import os
import struct
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from run_fakes import cell, document

from attnrepro_runner import coordinator, interleave, job
from attnrepro_runner.resultfolder import ResultFolder, atomic_write
from attnrepro_runner.status import Failure, Status
from attnrepro_runner.stoprule import StopRule
from attnrepro_runner.team import Team

if TYPE_CHECKING:
    from collections.abc import Mapping

RULE = StopRule(
    fewest=10, most=40, budget_ns=10**9, last_ns=4 * 10**9, half_width=0.001, confidence=0.95
)


# One launch with workers that are not there.


class Scripted:
    """Answers as workers do, and keeps what was asked."""

    def __init__(self, times: Mapping[str, int]) -> None:
        self.times = times
        self.log: list[tuple[str, str, int, int]] = []
        self.failures: dict[tuple[str, str], Failure] = {}
        self.opened: dict[str, dict[str, Any]] = {}

    def ask(self, name: str, request: Mapping[str, Any]) -> dict[str, Any] | Failure:
        do = str(request["do"])
        self.log.append((do, name, request.get("count", 0), request.get("discard", 0)))
        if (do, name) in self.failures:
            return self.failures[do, name]
        if do == "open":
            entry = {"status": "PASS", "reason": None, "place": None}
            default = {"entry": entry, "clocks": {"host": 1}, "flushed": True}
            return {**default, **self.opened.get(name, {})}
        if do == "block":
            n = request["count"] + request["discard"]
            samples = {clock: [self.times[name]] * n for clock in request["clocks"]}
            return {"samples": samples, "spent_ns": n * self.times[name]}
        return {"entry": {"status": "PASS", "reason": None, "place": None, "after": True}}


def launch(scripted: Scripted, seed: str = "s") -> interleave.CellLaunch:
    run = interleave.CellLaunch(
        cell(0, []),
        list(scripted.times),
        rule=RULE,
        block=4,
        seed=seed,
        ask=scripted.ask,
    )
    run.run()
    return run


def test_blocks_of_all_subjects_take_turns() -> None:
    scripted = Scripted({"a": 100, "b": 300, "c": 200})
    run = launch(scripted)
    blocks = [entry for entry in scripted.log if entry[0] == "block"]
    rounds = [{name for _, name, _, _ in blocks[n : n + 3]} for n in range(0, len(blocks), 3)]
    assert all(members == {"a", "b", "c"} for members in rounds)
    # Blocks end where the rule looks: 4 + 4 + 2 = 10, and identical samples stop there.
    assert [count for _, name, count, _ in blocks if name == "a"] == [4, 4, 2]
    for measured in run.measured.values():
        series = measured.series["host"]
        assert len(series.usable) == 10
        assert series.stop == "median_ci"
        assert len(series.samples) == 10 + sum(d["count"] for d in series.discards)  # type: ignore[misc]
        assert measured.entry["after"] is True


def test_only_the_first_samples_after_a_switch_are_discarded() -> None:
    alone = Scripted({"a": 100})
    run = launch(alone)
    assert [d for do, _, _, d in alone.log if do == "block"] == [0, 0, 0]
    assert run.measured["a"].series["host"].discards == []
    two = Scripted({"a": 100, "b": 100})
    launch(two)
    previous = None
    for do, name, _, discard in two.log:
        if do == "block":
            assert discard == (interleave.SWITCH_DISCARDS if name != previous else 0)
        previous = name


def test_the_order_is_the_seeds() -> None:
    def order(seed: str) -> list[tuple[str, str]]:
        scripted = Scripted(dict.fromkeys("abcdef", 100))
        launch(scripted, seed)
        return [(do, name) for do, name, _, _ in scripted.log]

    assert order("0/launch-00/c000") == order("0/launch-00/c000")
    assert order("0/launch-00/c000") != order("1/launch-00/c000")
    assert interleave.shuffled(["c0", "c1", "c2", "c3"], 7, "x") == interleave.shuffled(
        ["c0", "c1", "c2", "c3"], 7, "x"
    )


@pytest.mark.parametrize("step", ["open", "block", "close"])
def test_a_subject_that_fails_loses_its_cell_and_no_other(step: str) -> None:
    scripted = Scripted({"a": 100, "b": 100})
    scripted.failures[step, "a"] = Failure(
        status=Status.CRASH, reason="the worker ended with signal SIGSEGV", place="sampling"
    )
    run = launch(scripted)
    assert run.measured["a"].entry["status"] == "CRASH"
    for series in run.measured["a"].series.values():  # kept, and none of them counts
        assert series.usable == []
        assert series.stop == "failed"
        assert sum(d["count"] for d in series.discards) == len(series.samples) > 0
        assert series.discards[-1]["reason"] == "the subject ended as CRASH in this launch"
    assert bool(run.measured["a"].series) == (step == "close")
    assert run.measured["b"].entry["status"] == "PASS"
    assert len(run.measured["b"].series["host"].usable) == 10
    after = scripted.log[
        scripted.log.index(next(e for e in scripted.log if e[:2] == (step, "a"))) :
    ]
    assert [e for e in after if e[1] == "a"] == after[:1]


def test_an_incorrect_subject_is_never_timed() -> None:
    scripted = Scripted({"a": 100})
    entry = {"status": "INCORRECT", "reason": "out: 9 times", "place": "oracle_before"}
    scripted.opened["a"] = {"entry": entry, "clocks": {}}
    run = launch(scripted)
    assert [do for do, *_ in scripted.log] == ["open"]
    assert run.measured["a"].entry["status"] == "INCORRECT"


def test_too_few_samples_within_the_budget_are_inconclusive() -> None:
    scripted = Scripted({"a": 1_200_000_000})
    run = launch(scripted)
    entry = run.measured["a"].entry
    assert entry["status"] == "INCONCLUSIVE"
    assert entry["reason"] == "the budget ended after 4 of 10 samples (host)"
    assert run.measured["a"].series["host"].stop == "budget"


def test_long_calls_get_the_fewest_samples_beyond_the_budget() -> None:
    run = launch(Scripted({"a": 300_000_000}))
    assert run.measured["a"].entry["status"] == "PASS"
    assert len(run.measured["a"].series["host"].usable) == 10


def test_no_block_runs_far_beyond_the_time_for_the_fewest() -> None:
    # 0.7 s a call, 4 s for the fewest: a whole block more would take 2.8 s, and end far beyond.
    scripted = Scripted({"a": 700_000_000})
    run = launch(scripted)
    measured = run.measured["a"]
    assert measured.entry["status"] == "INCONCLUSIVE"
    assert measured.spent_ns <= RULE.last_ns + 2 * 700_000_000
    assert measured.series["host"].stop == "budget"


def test_a_missing_clock_stays_the_reason_when_the_cell_is_closed() -> None:
    scripted = Scripted({"a": 100})
    entry = {"status": "INCONCLUSIVE", "reason": "clock op: a CPU has none", "place": "warm-up"}
    scripted.opened["a"] = {"entry": entry}
    run = launch(scripted)
    assert run.measured["a"].entry["status"] == "INCONCLUSIVE"
    assert run.measured["a"].entry["reason"] == "clock op: a CPU has none"
    assert run.measured["a"].entry["after"] is True
    assert len(run.measured["a"].series["host"].usable) == 10


# A team whose workers are not there.


class FakeWorker:
    def __init__(self, answers: list[dict[str, object] | Failure]) -> None:
        self.pid, self.start_ns = 1, 5
        self.answers = answers
        self.asked: list[tuple[str, float]] = []

    def send(self, request: Mapping[str, object]) -> None:
        self.sent = str(request["do"])

    def receive(self, seconds: float) -> dict[str, object] | Failure:
        self.asked.append((self.sent, seconds))
        if self.sent == "hello" and not isinstance(self.answers[0], Failure):
            return {"framework": "torch 9", "math": {}, "flush": {}, "facts": {}}
        return self.answers.pop(0)

    def ask(self, request: Mapping[str, object], seconds: float) -> dict[str, object] | Failure:
        self.send(request)
        return self.receive(seconds)

    def end(self) -> str:
        return "exit status 0"


class Telling(FakeWorker):
    """Writes down what it is sent, and when it is awaited."""

    def __init__(self, name: str, order: list[str]) -> None:
        super().__init__([{}])
        self.name, self.order = name, order

    def send(self, request: Mapping[str, object]) -> None:
        super().send(request)
        self.order.append(f"{self.name} {self.sent}")

    def receive(self, seconds: float) -> dict[str, object] | Failure:
        self.order.append(f"{self.name} awaited")
        return super().receive(seconds)


CRASH = Failure(status=Status.CRASH, reason="no", place="import")


def team_of(workers: list[FakeWorker]) -> Team:
    path = document([cell(0, ["x"])], {"x": "eager"}, ["check"])
    left = iter(workers)
    return Team(_load(path), start=lambda _subject, _kind: (next(left), {}))


def _load(found: dict[str, Any], folder: Path | None = None) -> job.Job:
    path = (folder or Path(os.environ.get("TMPDIR", "/tmp"))) / f"job-{os.getpid()}.json"
    path.write_text(json.dumps(found))
    try:
        return job.load(path)
    finally:
        path.unlink()


def test_a_subject_whose_start_fails_twice_is_given_up() -> None:
    team = team_of([FakeWorker([CRASH]), FakeWorker([CRASH])])
    for _ in range(4):
        answer = team.ask("x", {"do": "check"}, "check", within=10)
        assert isinstance(answer, Failure)
        assert answer.status == Status.CRASH
    assert [record["restarts"] for record in team.records] == [0, 1]


@pytest.mark.parametrize(
    ("cores", "wanted"),
    [
        (2, ["x hello", "y hello", "x awaited", "y awaited"]),
        (1, ["x hello", "x awaited", "y hello", "y awaited"]),
    ],
)
def test_workers_import_side_by_side_where_there_are_cores(cores: int, wanted: list[str]) -> None:
    order: list[str] = []
    found = document([cell(0, ["x", "y"])], {"x": "eager", "y": "eager"}, ["launch-0"])
    team = Team(_load(found), start=lambda subject, _kind: (Telling(subject, order), {}))
    team.start_all(["x", "y"], "native", cores=cores)
    assert order == wanted


@pytest.mark.parametrize("cores", [3, 1])
def test_workers_load_what_a_first_cell_loads_side_by_side(
    cores: int, capsys: pytest.CaptureFixture[str]
) -> None:
    order: list[str] = []

    class Priming(Telling):
        def receive(self, seconds: float) -> dict[str, object] | Failure:
            found = super().receive(seconds)
            return CRASH if self.sent == "prime" and self.name == "y" else found

    names = ["x", "gone", "y"]
    workers = {name: Priming(name, order) for name in names}
    workers["gone"].answers = [CRASH]
    found = document([cell(0, names)], dict.fromkeys(names, "eager"), ["launch-0"])
    team = Team(_load(found), start=lambda subject, _kind: (workers[subject], {}))
    team.start_all(names, "native", cores=3)
    del order[:]
    team.prime(names, cores=cores, within=50)
    asked = [seconds for w in workers.values() for do, seconds in w.asked if do == "prime"]
    assert len(asked) == (2 if cores > 1 else 0)
    assert all(seconds <= 50 for seconds in asked)
    assert order == (["x prime", "y prime", "x awaited", "y awaited"] if cores > 1 else [])
    # What failed is ended, so that the next request starts another.
    assert [record["exit"] for record in team.records] == [
        "running",
        "exit status 0",  # its start failed
        "exit status 0" if cores > 1 else "running",
    ]
    assert ("priming y: CRASH (no)" in capsys.readouterr().err) == (cores > 1)


@pytest.mark.parametrize(("vendor", "primes"), [("nvidia", True), ("cpu", False)])
def test_a_launch_primes_before_anything_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, vendor: str, primes: bool
) -> None:
    order: list[str] = []

    class Refusing(Telling):
        def receive(self, seconds: float) -> dict[str, object] | Failure:
            if self.sent in ("hello", "prime"):
                return super().receive(seconds)
            return Failure(status=Status.UNSUPPORTED, reason="no", place="open")

    found = document([cell(0, ["x", "y"])], {"x": "eager", "y": "eager"}, ["launch-0"])
    found["device"]["vendor"] = vendor
    monkeypatch.setattr(coordinator, "_usable_cpus", lambda: 2)
    monkeypatch.setattr(
        coordinator.Coordinator, "_start", lambda *_: (Refusing("w", order), {"profile": "native"})
    )
    loaded = _load(found, tmp_path)
    with coordinator.Coordinator(loaded, ResultFolder(tmp_path / "out", loaded.run)) as running:
        running.run()
    sent = [word for word in (entry.split()[1] for entry in order) if word != "awaited"]
    assert sent[:4] == ["hello", "hello", *(["prime", "prime"] if primes else ["ceilings"] * 2)]
    assert sent.count("prime") == 2 * primes


def test_a_backend_that_is_not_there_is_given_up_at_once() -> None:
    gone = Failure(status=Status.UNSUPPORTED, reason="no module", place="import")
    team = team_of([FakeWorker([gone])])
    for _ in range(3):
        answer = team.ask("x", {"do": "check"}, "check", within=10)
        assert isinstance(answer, Failure)
        assert answer.status == Status.UNSUPPORTED
    assert len(team.records) == 1


def test_a_cells_time_is_shared_by_its_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("attnrepro_runner.team.time.monotonic", lambda: now[0])
    worker = FakeWorker([{}, {}, {}])

    def slow(request: Mapping[str, object], seconds: float) -> dict[str, object] | Failure:
        answer = FakeWorker.ask(worker, request, seconds)
        now[0] += 25
        return answer

    worker.ask = slow  # type: ignore[method-assign]
    team = team_of([worker])
    for _ in range(2):
        team.ask("x", {"do": "block"}, "native", within=1000)
    team.new_cell()
    team.ask("x", {"do": "block"}, "native", within=1000)
    assert [seconds for do, seconds in worker.asked if do == "block"] == [60, 35, 60]


# Files.


def test_a_result_is_whole_or_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "x.json"
    atomic_write(target, b"old")

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        atomic_write(target, b"new")
    assert target.read_bytes() == b"old"
    assert [p.name for p in tmp_path.iterdir()] == ["x.json"]


def test_only_whole_results_of_this_run_count(tmp_path: Path) -> None:
    folder = ResultFolder(tmp_path, "run1")
    assert folder.result("check") is None
    folder.write_result({"task": "check", "run": "run1"})
    assert folder.result("check") == {"task": "check", "run": "run1"}
    assert ResultFolder(tmp_path, "run2").result("check") is None
    (tmp_path / "tasks/check.json").write_text('{"task": "che')
    assert folder.result("check") is None
    member = folder.write_samples("launch-00", "c000", "a", "host", [1, 2**40])
    assert (tmp_path / member).read_bytes() == struct.pack("<2q", 1, 2**40)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"schema": "attnrepro.job/9"}, "schema 'attnrepro.job/9'"),
        ({"tasks": [{"id": "x", "stage": "check", "launch": None, "subjects": ["y"]}]}, "y"),
        ({"tasks": [{"id": "x", "stage": "dance", "launch": None, "subjects": ["a"]}]}, "dance"),
        ({"cells": None}, "lacks a part"),
    ],
)
def test_a_bad_job_is_refused(
    tmp_path: Path, change: dict[str, Any], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "job.json"
    path.write_text(json.dumps({**document([cell(0, ["a"])], {"a": "eager"}, []), **change}))
    assert coordinator.main(path, tmp_path / "out") == coordinator.BAD_JOB
    assert words in capsys.readouterr().err


def test_an_unreadable_job_and_an_unwritable_folder_are_refused(tmp_path: Path) -> None:
    assert coordinator.main(tmp_path / "none.json", tmp_path / "out") == coordinator.BAD_JOB
    path = tmp_path / "job.json"
    path.write_text(json.dumps(document([cell(0, ["a"])], {"a": "eager"}, [])))
    (tmp_path / "file").write_text("")
    assert coordinator.main(path, tmp_path / "file" / "out") == coordinator.BAD_JOB
