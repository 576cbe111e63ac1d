"""The check of all cells: side by side on a GPU, once more alone, ended at once."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import pytest

from attnrepro_runner import checking
from attnrepro_runner.status import Failure, Status
from attnrepro_runner.team import Team

if TYPE_CHECKING:
    from collections.abc import Mapping

CELLS = {"x": [{"id": "c000"}, {"id": "c001"}], "y": [{"id": "c000"}]}


class Ended:
    """A team that keeps what was done to it."""

    def __init__(self) -> None:
        self.ended: list[str] = []
        self.forgiven: list[str] = []
        self.stopped = False

    def end(self, subject: str) -> None:
        self.ended.append(subject)

    def stop(self) -> None:
        self.stopped = True

    def forgive(self, subject: str) -> None:
        self.forgiven.append(subject)


def entry(subject: str, cell: Mapping[str, Any], status: Status = Status.PASS) -> dict[str, Any]:
    return {"subject": subject, "cell": cell["id"], "status": status.value}


def test_subjects_are_checked_side_by_side() -> None:
    together = threading.Barrier(2, timeout=10)
    team: Any = Ended()

    def ask(subject: str, cell: Mapping[str, Any]) -> dict[str, Any]:
        if cell["id"] == "c000":
            together.wait()
        return entry(subject, cell)

    found = checking.check(CELLS, team, ask, at_once=2)
    assert [(e["subject"], e["cell"]) for e in found] == [
        ("x", "c000"),
        ("x", "c001"),
        ("y", "c000"),
    ]
    assert {"x", "y"} == set(team.ended)


@pytest.mark.parametrize("status", [Status.OUT_OF_MEMORY, Status.TIMEOUT])
@pytest.mark.parametrize("at_once", [1, 2])
def test_what_sharing_could_cause_is_tried_once_more_alone(status: Status, at_once: int) -> None:
    asked: list[tuple[str, str]] = []
    alive: set[str] = set()
    team: Any = Ended()
    lock = threading.Lock()

    def ask(subject: str, cell: Mapping[str, Any]) -> dict[str, Any]:
        with lock:
            first = (subject, cell["id"]) not in asked
            asked.append((subject, cell["id"]))
            if not first:
                alive.update({"x", "y"} - set(team.ended))
        return entry(subject, cell, status if subject == "x" and first else Status.PASS)

    found = checking.check(CELLS, team, ask, at_once=at_once)
    shared = at_once > 1
    assert [e["status"] for e in found] == ["PASS" if shared else status.value] * 2 + ["PASS"]
    assert asked.count(("x", "c000")) == (2 if shared else 1)
    assert asked.count(("y", "c000")) == 1
    assert not alive


@pytest.mark.parametrize("status", [Status.INCORRECT, Status.CRASH])
def test_what_sharing_cannot_cause_stands_without_a_second_try(status: Status) -> None:
    asked: list[str] = []

    def ask(subject: str, cell: Mapping[str, Any]) -> dict[str, Any]:
        asked.append(subject)
        return entry(subject, cell, status)

    team: Any = Ended()
    found = checking.check(CELLS, team, ask, at_once=2)
    assert {e["status"] for e in found} == {status.value}
    assert len(asked) == 3


def test_a_subject_that_hangs_alone_too_is_not_tried_cell_by_cell() -> None:
    asked: list[tuple[str, str]] = []

    def ask(subject: str, cell: Mapping[str, Any]) -> dict[str, Any]:
        asked.append((subject, cell["id"]))
        found = entry(subject, cell, Status.TIMEOUT if subject == "x" else Status.PASS)
        return {**found, "reason": f"try {asked.count((subject, cell['id']))}"}

    team: Any = Ended()
    found = checking.check(CELLS, team, ask, at_once=2)
    assert asked.count(("x", "c000")) == 2
    assert asked.count(("x", "c001")) == 1
    # The first ending is told: the second may only have met the end of the run.
    assert [e["reason"] for e in found] == ["try 1"] * 3


def test_every_cell_that_found_no_memory_beside_others_is_tried_alone(
    capsys: pytest.CaptureFixture[str],
) -> None:
    asked: list[tuple[str, str]] = []

    def ask(subject: str, cell: Mapping[str, Any]) -> dict[str, Any]:
        asked.append((subject, cell["id"]))
        never = cell["id"] == "c000"  # it does not fit alone either
        full = subject == "x" and (never or asked.count((subject, cell["id"])) == 1)
        return entry(subject, cell, Status.OUT_OF_MEMORY if full else Status.PASS)

    team: Any = Ended()
    found = checking.check(CELLS, team, ask, at_once=2)
    assert [e["status"] for e in found] == ["OUT_OF_MEMORY", "PASS", "PASS"]
    # The log, which travels in the artifact, tells what a PASS alone had been beside others.
    assert "cell c001, x: OUT_OF_MEMORY beside others (None), PASS alone" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "vendor", "cpus", "wanted"),
    [
        ({}, "nvidia", 16, 3),
        ({}, "nvidia", 2, 2),
        ({}, "cpu", 16, 1),
        ({"options": {"compile_mode": "max-autotune-no-cudagraphs"}}, "nvidia", 16, 1),
        ({"adapter": {"module": "mine"}}, "amd", 16, 1),
    ],
)
def test_nobody_is_beside_a_compiler_that_times(
    change: dict[str, Any], vendor: str, cpus: int, wanted: int
) -> None:
    subjects = [{"id": n, "options": {}, "adapter": None} for n in "abc"]
    subjects[1] |= change
    assert checking.together(subjects, vendor=vendor, cpus=cpus) == wanted
    many = [{"id": str(n), "options": {}} for n in range(13)]
    assert checking.together(many, vendor="nvidia", cpus=32) == checking.AT_ONCE


def test_one_that_raises_stops_all() -> None:
    team: Any = Ended()
    waiting = threading.Event()

    class Lost(Exception):
        pass

    def ask(subject: str, cell: Mapping[str, Any]) -> dict[str, Any]:
        if subject == "x":
            assert waiting.wait(10)
            raise Lost
        waiting.set()
        return entry(subject, cell)

    with pytest.raises(Lost):
        checking.check(CELLS, team, ask, at_once=2)
    assert team.stopped


def test_one_that_raises_is_heard_before_an_earlier_one_has_ended() -> None:
    killed = threading.Event()

    class Lost(Exception):
        pass

    class Killing(Ended):
        def stop(self) -> None:
            killed.set()

    def ask(subject: str, cell: Mapping[str, Any]) -> dict[str, Any]:
        if subject == "y":
            raise Lost
        assert killed.wait(10)  # as a worker does that is killed
        return entry(subject, cell, Status.CRASH)

    team: Any = Killing()
    with pytest.raises(Lost):
        checking.check(CELLS, team, ask, at_once=2)


def test_a_signal_while_subjects_are_handed_out_stops_all(monkeypatch: pytest.MonkeyPatch) -> None:
    class Stopped(BaseException):
        pass

    class Pool(checking.ThreadPoolExecutor):
        def submit(self, *arguments: Any, **more: Any) -> Any:
            if arguments[1] == "y":
                raise Stopped
            return super().submit(*arguments, **more)

    monkeypatch.setattr(checking, "ThreadPoolExecutor", Pool)
    team: Any = Ended()
    with pytest.raises(Stopped):
        checking.check(CELLS, team, entry, at_once=2)
    assert team.stopped


class Blocked:
    """A worker that answers once it is killed."""

    def __init__(self) -> None:
        self.pid, self.start_ns = 1, 5
        self.killed = threading.Event()
        self.asked = threading.Event()
        self.greeted = False

    def send(self, request: Mapping[str, object]) -> None:
        self.sent = request

    def receive(self, seconds: float) -> dict[str, object] | Failure:
        if self.sent["do"] == "hello":
            return {"framework": "torch 9", "math": {}, "flush": {}, "facts": {}}
        self.asked.set()
        assert self.killed.wait(10)
        return Failure(status=Status.CRASH, reason="killed", place="x")

    def ask(self, request: Mapping[str, object], seconds: float) -> dict[str, object] | Failure:
        self.send(request)
        return self.receive(seconds)

    def kill(self) -> None:
        self.killed.set()

    def end(self) -> str:
        return "signal SIGKILL"


def test_a_stopped_team_answers_and_starts_nothing_more() -> None:
    started: list[Blocked] = []

    def start(_subject: str, _kind: str) -> tuple[Blocked, dict[str, str]]:
        started.append(Blocked())
        return started[-1], {}

    job: Any = type("Job", (), {"subjects": {"x": {}}, "shared": {}, "cell_seconds": 60.0})()
    team = Team(job, start=start)
    answers: list[object] = []

    def ask_twice() -> None:
        answers.append(team.ask("x", {"do": "check"}, "check", within=10))
        team.end("x")
        answers.append(team.ask("x", {"do": "check"}, "check", within=10))

    asking = threading.Thread(target=ask_twice)
    asking.start()
    while not started:
        pass
    assert started[0].asked.wait(10)
    team.stop()
    asking.join(10)
    assert not asking.is_alive()
    assert [a.reason for a in answers if isinstance(a, Failure)] == [
        "killed",
        "the task was stopped",
    ]
    assert len(started) == 1


def test_a_start_that_failed_beside_others_is_tried_again_when_forgiven() -> None:
    gone = Failure(status=Status.UNSUPPORTED, reason="no module", place="import")
    full = Failure(status=Status.OUT_OF_MEMORY, reason="the device is full", place="import")

    class Starting(Blocked):
        def receive(self, seconds: float) -> dict[str, object] | Failure:
            return answers.pop(0)

    job: Any = type("Job", (), {"subjects": {"x": {}}, "shared": {}, "cell_seconds": 60.0})()
    hello: dict[str, object] = {"framework": "torch 9", "math": {}, "flush": {}, "facts": {}}
    for failure, again in ((full, True), (gone, False)):
        answers: list[Any] = [failure, failure, hello, {"status": "PASS"}]
        team = Team(job, start=lambda _s, _k: (Starting(), {}))
        for _ in range(3):
            assert isinstance(team.ask("x", {"do": "check"}, "check", within=10), Failure)
        team.forgive("x")
        answer = team.ask("x", {"do": "check"}, "check", within=10)
        assert (answer == {"status": "PASS"}) is again


def test_each_subjects_cell_has_its_own_time() -> None:
    job: Any = type("Job", (), {"subjects": {}, "shared": {}, "cell_seconds": 60.0})()
    team = Team(job, start=lambda _s, _k: (Blocked(), {}))
    team._spent = {"x": 5.0, "y": 6.0}
    team.new_cell("x")
    assert team._spent == {"y": 6.0}
    team.new_cell()
    assert not team._spent
