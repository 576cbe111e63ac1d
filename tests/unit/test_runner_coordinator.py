from __future__ import annotations

import json
import os
import signal
import struct
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from attnrepro.schema import validate
from attnrepro_runner import coordinator, interleave, job
from attnrepro_runner.resultfolder import ResultFolder, atomic_write
from attnrepro_runner.status import Failure, Status
from attnrepro_runner.stoprule import StopRule
from attnrepro_runner.team import Team

if TYPE_CHECKING:
    from collections.abc import Mapping

TOOLKIT = Path(coordinator.__file__).parents[1]
RULE = StopRule(fewest=10, most=40, budget_ns=10**9, half_width=0.001, confidence=0.95)


def cell(number: int, subjects: list[str], **workload: Any) -> dict[str, Any]:
    return {
        "id": f"c{number:03d}",
        "label": f"cell {number}",
        "workload": {
            "batch": 1,
            "seqlen_q": 24,
            "seqlen_k": 24,
            "heads_q": 2,
            "heads_kv": 1,
            "head_dim": 16,
            "dtype": "float32",
            **workload,
        },
        "inputs": {"seed": 2026, "distribution": "normal"},
        "request": None,
        "subjects": subjects,
    }


PHASES: list[dict[str, Any]] = [
    {"phase": "forward", "mask": {"causal": "top_left"}},
    {"phase": "forward_backward", "dtype": "bfloat16"},
    {
        "phase": "prefill",
        "mask": {"causal": "bottom_right"},
        "seqlen_q": 8,
        "cache": {"kind": "contiguous"},
    },
    {
        "phase": "decode",
        "mask": {"causal": "bottom_right"},
        "seqlen_q": 1,
        "cache": {"kind": "paged", "page_size": 8, "append": 1, "append_in_call": True},
    },
]


def document(
    cells: list[dict[str, Any]],
    subjects: Mapping[str, str],
    stages: list[str],
    *,
    adapter: str | None = None,
    **changes: Any,
) -> dict[str, Any]:
    names = list(subjects)
    return {
        "schema": "attnrepro.job/1",
        "run": "0123456789abcdef",
        "tasks": [
            {
                "id": stage,
                "stage": stage.partition("-")[0],
                "launch": int(stage.partition("-")[2]) if "-" in stage else None,
                "subjects": names,
            }
            for stage in stages
        ],
        "cells": cells,
        "subjects": [
            {
                "id": name,
                "backend": backend,
                "role": "candidate",
                "options": {},
                "adapter": adapter,
            }
            for name, backend in subjects.items()
        ],
        "unsupported": [],
        "accuracy": {},
        "bits": {"profile": "portable", "repeats": 3, "claim": "bitwise"},
        "timing": {
            "warmup_seconds": [0.01, 0.05],
            "samples": [20, 40],
            "block": 5,
            "median_ci": 0.05,
            "cell_seconds": 5,
        },
        "device": {"vendor": "cpu", "threads": 1},
        "limits": {"cell_seconds": 60, "total_seconds": 600},
        **changes,
    }


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
    scripted = Scripted({"a": 300_000_000})
    run = launch(scripted)
    entry = run.measured["a"].entry
    assert entry["status"] == "INCONCLUSIVE"
    assert entry["reason"] == "the budget ended after 4 of 10 samples (host)"
    assert run.measured["a"].series["host"].stop == "budget"


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


def test_workers_import_side_by_side() -> None:
    order: list[str] = []

    class Greeting(FakeWorker):
        def __init__(self, name: str) -> None:
            super().__init__([{}])
            self.name = name

        def send(self, request: Mapping[str, object]) -> None:
            super().send(request)
            order.append(f"{self.name} begins")

        def receive(self, seconds: float) -> dict[str, object] | Failure:
            order.append(f"{self.name} awaited")
            return super().receive(seconds)

    found = document([cell(0, ["x", "y"])], {"x": "eager", "y": "eager"}, ["launch-0"])
    team = Team(_load(found), start=lambda subject, _kind: (Greeting(subject), {}))
    team.start_all(["x", "y"], "native")
    assert order == ["x begins", "y begins", "x awaited", "y awaited"]


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


# Whole runs.

ADAPTERS = """
import ctypes, os, time
import torch
from attnrepro_runner.backends.base import MemoryOrder, Outputs
from attnrepro_runner.backends.eager import EagerBackend
from attnrepro_runner.backends.sdpa import SdpaMath

class Wrapped:
    def __init__(self, prepared, act):
        self.prepared, self.act = prepared, act
    def step(self):
        return self.act(self.prepared)
    def backward_step(self):
        return self.prepared.backward_step()
    def append_step(self):
        self.prepared.append_step()

class Toy(EagerBackend):
    name = "NAME"
    def prepare(self, workload, options, tensors):
        prepared = super().prepare(workload, options, tensors)
        self.calls = 0
        def act(p):
            self.calls += 1
            if workload.seqlens_q[0] != 25:
                return p.step()
            BODY
        return Wrapped(prepared, act)

BACKEND = Toy()
"""

HOSTILE = {
    "exits": ("os._exit(3)", "CRASH", "exit status 3"),
    "segfaults": ("ctypes.string_at(0)", "CRASH", "signal SIGSEGV"),
    "raises": ("raise KeyError('lost')", "CRASH", "KeyError: 'lost'"),
    "hangs": ("time.sleep(600)", "TIMEOUT", "no answer within"),
    "eats": ("return [bytearray(1 << 30) for _ in range(64)]", "OUT_OF_MEMORY", ""),
    "nan": (
        "o = p.step(); return Outputs(out=o.out * float('nan'), lse=o.lse)",
        "INCORRECT",
        "NaN",
    ),
    "guards": (
        "t = p.tensors.v; w = torch.empty(0, dtype=t.dtype).set_(t.untyped_storage()); "
        "w[t.storage_offset() + t.numel()] = 0; return p.step()",
        "INCORRECT",
        "memory round them",
    ),
}


def adapter(name: str, body: str) -> str:
    return ADAPTERS.replace("NAME", name).replace("BODY", body)


def run(found: dict[str, Any], folder: Path, *, modules: Path | None = None) -> int:
    folder.mkdir(exist_ok=True)
    path = folder / "job.json"
    path.write_text(json.dumps(found))
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(TOOLKIT), *([str(modules)] if modules else [])]),
    }
    return subprocess.run(
        [sys.executable, "-m", "attnrepro_runner", str(path), str(folder / "out")],
        env=environment,
        check=False,
        capture_output=True,
        timeout=280,
    ).returncode


def results(folder: Path) -> dict[str, dict[str, Any]]:
    found = {}
    for path in sorted((folder / "out/tasks").glob("*.json")):
        found[path.stem] = json.loads(path.read_text())
        assert validate("result", found[path.stem]) == []
    return found


def test_one_tiny_cell_runs_through_a_launch(tmp_path: Path) -> None:
    found = document([cell(0, ["flash"], **PHASES[0])], {"flash": "sdpa.flash"}, ["launch-0"])
    assert validate("job", found) == []
    assert run(found, tmp_path) == 0
    (entry,) = results(tmp_path)["launch-0"]["entries"]
    assert entry["status"] == "PASS", entry["reason"]
    (record,) = entry["samples"]
    data = (tmp_path / "out" / record["member"]).read_bytes()
    assert len(data) == 8 * record["n"]
    assert record["n"] >= 20
    assert min(struct.unpack(f"<{record['n']}q", data)) > 0
    assert entry["oracle_before"]["seed"] != entry["oracle_after"]["seed"]


def test_a_request_and_an_append_have_clocks_of_their_own(tmp_path: Path) -> None:
    workload = {
        **{"phase": "decode", "seqlen_q": 1, "mask": {"causal": "bottom_right"}},
        **{"heads_q": 4, "heads_kv": 2, "head_dim": 64},
        "cache": {"kind": "contiguous", "append": 1, "append_in_call": False},
    }
    one = cell(0, ["flash"], **workload) | {"request": {"model": "small_decode_step", "layers": 1}}
    found = document([one], {"flash": "sdpa.flash"}, ["launch-0", "counters"])
    found["timing"]["clocks"] = ["host", "request"]
    assert run(found, tmp_path) == 0
    done = results(tmp_path)
    (entry,) = done["launch-0"]["entries"]
    assert entry["status"] == "PASS", entry["reason"]
    assert [record["clock"] for record in entry["samples"]] == ["append_host", "host", "request"]
    assert entry["request"]["model"] == "small_decode_step"
    assert entry["request"]["stages_ns"]["cache_append"] > 0
    assert len(entry["preparation"]["prepare_ns"]) == 2
    assert entry["conditions"]["rows"] >= 1
    kinds = {c["kind"] for c in done["launch-0"]["ceilings"]["measured"]}
    assert kinds == {"matmul", "copy", "read"}
    (counted,) = done["counters"]["entries"]
    assert counted["counters"]["bound"] == "undetermined"


@pytest.mark.slow
def test_all_phases_and_stages_give_valid_results_and_resume(tmp_path: Path) -> None:
    subjects = {"eager": "eager", "flash": "sdpa.flash"}
    cells = [cell(n, list(subjects), **phase) for n, phase in enumerate(PHASES)]
    stages = ["check", "cold", "memory", "launch-0", "launch-1"]
    found = document(cells, subjects, stages)
    assert validate("job", found) == []
    assert run(found, tmp_path) == 0
    tasks = results(tmp_path)
    assert set(tasks) == set(stages)
    for name, task in tasks.items():
        assert len(task["entries"]) == 8
        assert {(e["status"], e["reason"]) for e in task["entries"]} == {("PASS", None)}, name
        for member in task["telemetry"]:
            assert (tmp_path / "out" / member).stat().st_size > 0
        assert all(w["ready_ns"] > w["start_ns"] for w in task["workers"])
    check = {(e["cell"], e["subject"]): e for e in tasks["check"]["entries"]}
    for entry in check.values():
        assert entry["execution"]["verdict"] == "as_named"
        assert set(entry["bits"]["observed"].values()) == {"repeats"}
        assert entry["bits"]["profile"] == "portable"
        assert all(probe["equal"] for probe in entry["probes"]["set"].values())
    assert check["c000", "eager"]["inputs"] == check["c000", "flash"]["inputs"]
    assert set(check["c001", "flash"]["oracle_before"]["tensors"]) >= {"out", "dq", "dk", "dv"}
    assert "lse" in check["c000", "flash"]["oracle_before"]["tensors"]
    profiles = {w["environment"]["profile"] for w in tasks["check"]["workers"]}
    assert profiles == {"portable"}
    assert tasks["check"]["workers"][0]["environment"]["torch_cpu_capability"] == "AVX2"
    clocks = {s["clock"] for e in tasks["launch-0"]["entries"] for s in e["samples"]}
    assert clocks == {"host", "backward_host"}
    assert any(s["discards"] for e in tasks["launch-0"]["entries"] for s in e["samples"])
    assert {len([w for w in tasks["cold"]["workers"] if w["subject"] == s]) for s in subjects} == {
        4
    }
    # A second start makes what is missing and leaves what is there.
    kept = (tmp_path / "out/tasks/check.json").stat().st_mtime_ns
    (tmp_path / "out/tasks/launch-1.json").unlink()
    assert run(found, tmp_path) == 0
    assert (tmp_path / "out/tasks/check.json").stat().st_mtime_ns == kept
    assert len(results(tmp_path)["launch-1"]["entries"]) == 8


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["check", "launch-0"])
@pytest.mark.parametrize("name", list(HOSTILE))
def test_a_bad_subject_is_a_result_and_the_others_keep_theirs(
    tmp_path: Path, name: str, stage: str
) -> None:
    body, status, words = HOSTILE[name]
    (tmp_path / "bad_adapter.py").write_text(adapter("bad", body))
    subjects = {"bad": "bad", "flash": "sdpa.flash"}
    # The subject is bad in the second cell alone; sizes of the probes are others.
    cells = [
        cell(0, list(subjects), phase="prefill"),
        cell(1, list(subjects), phase="prefill", seqlen_q=25, seqlen_k=25),
        cell(2, list(subjects), phase="prefill", seqlen_q=26, seqlen_k=26),
    ]
    seconds = 20 if status == "TIMEOUT" else 60
    limits = {"cell_seconds": seconds, "total_seconds": 280, "memory_bytes": 3 << 30}
    found = document(cells, subjects, [stage], adapter="bad_adapter", limits=limits)
    assert run(found, tmp_path, modules=tmp_path) == 0
    entries = {(e["cell"], e["subject"]): e for e in results(tmp_path)[stage]["entries"]}
    assert len(entries) == 6
    bad = entries.pop(("c001", "bad"))
    assert bad["status"] == status, bad["reason"]
    assert words in bad["reason"]
    assert bad["place"]
    assert {(e["status"], e["reason"]) for e in entries.values()} == {("PASS", None)}
    restarts = [w["restarts"] for w in results(tmp_path)[stage]["workers"] if w["subject"] == "bad"]
    assert (len(restarts) == 1) == (status == "INCORRECT")


@pytest.mark.slow
def test_another_backend_under_the_name_is_a_fallback_and_not_timed(tmp_path: Path) -> None:
    (tmp_path / "masked_adapter.py").write_text(
        textwrap.dedent("""
        from attnrepro_runner.backends.sdpa import SdpaFlash, SdpaMath
        class Masked(SdpaFlash):
            name = "masked"
            kind = SdpaMath.kind
        BACKEND = Masked()
        """)
    )
    subjects = {"masked": "masked"}
    cells = [cell(0, ["masked"], phase="prefill")]
    found = document(cells, subjects, ["check", "launch-0"], adapter="masked_adapter")
    assert run(found, tmp_path, modules=tmp_path) == 0
    tasks = results(tmp_path)
    (check,) = tasks["check"]["entries"]
    assert check["status"] == "FALLBACK"
    assert check["execution"]["verdict"] == "fallback"
    assert "torch math" in check["reason"]
    (launched,) = tasks["launch-0"]["entries"]
    assert launched["status"] == "FALLBACK"
    assert "samples" not in launched
    assert tasks["launch-0"]["workers"] == []


@pytest.mark.slow
def test_what_cannot_be_honoured_is_unsupported(tmp_path: Path) -> None:
    subjects = {"flash": "sdpa.flash", "gone": "no_such.backend"}
    cells = [
        cell(0, list(subjects), phase="prefill", softcap=5.0),
        cell(1, list(subjects), phase="prefill"),
    ]
    found = document(cells, subjects, ["check", "memory"])
    assert run(found, tmp_path) == 0
    entries = {
        (e["cell"], e["subject"]): (e["status"], e["reason"])
        for e in results(tmp_path)["check"]["entries"]
    }
    assert entries["c000", "flash"] == (
        "UNSUPPORTED",
        "F.scaled_dot_product_attention has no softcap argument",
    )
    assert entries["c001", "flash"] == ("PASS", None)
    assert entries["c000", "gone"][0] == entries["c001", "gone"][0] == "UNSUPPORTED"


@pytest.mark.slow
def test_a_signal_ends_the_workers_and_leaves_finished_tasks(tmp_path: Path) -> None:
    found = document(
        [cell(n, ["flash"], **PHASES[0]) for n in range(40)],
        {"flash": "sdpa.flash"},
        ["memory", "launch-0"],
    )
    found["timing"]["warmup_seconds"] = [1, 2]
    path = tmp_path / "job.json"
    path.write_text(json.dumps(found))
    process = subprocess.Popen(
        [sys.executable, "-m", "attnrepro_runner", str(path), str(tmp_path / "out")],
        env={**os.environ, "PYTHONPATH": str(TOOLKIT)},
        stderr=subprocess.PIPE,
    )
    deadline = time.monotonic() + 200
    log = tmp_path / "out/logs/launch-0-flash.log"
    while not log.exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    time.sleep(3)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    assert children
    process.send_signal(signal.SIGTERM)
    _, error = process.communicate(timeout=30)
    assert process.returncode == coordinator.INTERRUPTED
    assert b"interrupted by SIGTERM" in error
    assert [p.name for p in (tmp_path / "out/tasks").iterdir()] == ["memory.json"]
    assert not any(Path(f"/proc/{child}").exists() for child in children)


def test_the_coordinator_needs_the_standard_library_alone() -> None:
    code = (
        "import sys, attnrepro_runner.coordinator, attnrepro_runner.nvml;"
        "import attnrepro_runner.preflight;"
        "print([m for m in ('torch', 'numpy', 'attnrepro') if m in sys.modules])"
    )
    found = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(TOOLKIT)},
        check=True,
        capture_output=True,
        text=True,
    )
    assert found.stdout == "[]\n"
