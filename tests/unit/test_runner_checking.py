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
        self.stopped = False

    def end(self, subject: str) -> None:
        self.ended.append(subject)

    def stop(self) -> None:
        self.stopped = True


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


@pytest.mark.parametrize("status", [Status.OUT_OF_MEMORY, Status.TIMEOUT, Status.CRASH])
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


def test_a_wrong_result_stands_without_a_second_try() -> None:
    asked: list[str] = []

    def ask(subject: str, cell: Mapping[str, Any]) -> dict[str, Any]:
        asked.append(subject)
        return entry(subject, cell, Status.INCORRECT)

    team: Any = Ended()
    found = checking.check(CELLS, team, ask, at_once=2)
    assert {e["status"] for e in found} == {"INCORRECT"}
    assert len(asked) == 3


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


def test_each_subjects_cell_has_its_own_time() -> None:
    job: Any = type("Job", (), {"subjects": {}, "shared": {}, "cell_seconds": 60.0})()
    team = Team(job, start=lambda _s, _k: (Blocked(), {}))
    team._spent = {"x": 5.0, "y": 6.0}
    team.new_cell("x")
    assert team._spent == {"y": 6.0}
    team.new_cell()
    assert not team._spent
