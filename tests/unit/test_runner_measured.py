"""A cell of a launch inside its worker, on a fake device with a queue."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import pytest
from case_fakes import (
    open_cell,
    own_process,  # noqa: F401 - an autouse fixture
)
from device_fakes import FakeDevice, FakeTime, FakeTrace
from host_fakes import tasks
from numerics_fakes import ReferenceBackend
from test_results_merge import merged

from attnrepro import schema
from attnrepro_runner import clocks, measured, worker
from attnrepro_runner.report import Report
from attnrepro_runner.status import Status

if TYPE_CHECKING:
    from attnrepro_runner.backends.base import Outputs, Prepared, Tensors
    from attnrepro_runner.semantics import Workload


class Queued(ReferenceBackend):
    """Launches work on a fake device, and may wait for it."""

    def __init__(
        self, device: FakeDevice, *, wait: bool = False, aside: int = 0, joined: bool = False
    ) -> None:
        super().__init__()
        self.queue = device
        self.wait = wait
        self.aside = aside
        self.joined = joined
        self.keeps_lse = True

    def prepare(self, workload: Workload, options: Any, tensors: Tensors) -> Prepared:
        return OnDevice(super().prepare(workload, options, tensors), self)


class OnDevice:
    """A kernel of 10 us whose launch takes the host 0.3 ms."""

    def __init__(self, prepared: Prepared, backend: Queued) -> None:
        self.prepared = prepared
        self.backend = backend

    def step(self) -> Outputs:
        device = self.backend.queue
        device.host.ns += 300_000
        device.launch(10_000)
        if self.backend.aside:
            device.launch_aside(self.backend.aside, joined=self.backend.joined)
        if self.backend.wait:
            device.synchronize()
        found = self.prepared.step()
        return found if self.backend.keeps_lse else dataclasses.replace(found, lse=None)

    backward_step = step

    def append_step(self) -> None:
        raise AssertionError


@pytest.fixture
def queue(monkeypatch: pytest.MonkeyPatch) -> FakeDevice:
    host = FakeTime()
    monkeypatch.setattr(clocks, "now", host.now)
    monkeypatch.setattr(measured.MeasuredCell, "_check_execution", lambda self, report: None)
    return FakeDevice(host)


def test_calls_that_warming_up_repeated_are_no_samples(queue: FakeDevice) -> None:
    cell, report, readable = open_cell(Queued(queue), ["op"], queue)
    assert (report.status, readable) == (Status.PASS, {"op": 1}), report.reason
    clock = cell._clocks["op"]
    assert isinstance(clock, clocks.OpClock)
    assert clock.repeated > 0
    clock.sleep_ns = clock.LEAST_NS  # so that warming again repeats calls too
    before = clock.repeated
    cell.warm_again()
    assert clock.repeated > before
    block = cell.block(["op"], 4)
    assert block.samples == {"op": [10_000] * 4}
    assert block.repeated == {"op": 0}


def test_a_subject_is_warmed_again_before_its_first_block_alone(queue: FakeDevice) -> None:
    cell, report, _ = open_cell(Queued(queue), ["op"], queue)
    warmed = dict(report.parts["warmup"])  # type: ignore[call-overload]
    assert "again" not in warmed
    one = worker.Service.__new__(worker.Service)
    one._open = cell
    one._note = lambda place: None  # type: ignore[method-assign]
    launched = len(queue.kernels)
    answers = [one.do_block({"clocks": ["op"], "count": 3, "discard": 1}) for _ in range(2)]
    assert [answer["samples"] for answer in answers] == [{"op": [10_000] * 4}] * 2
    report = Report(lambda place: None)
    cell.close(report)
    again = report.parts["warmup"].pop("again")  # type: ignore[attr-defined]
    assert report.parts["warmup"] == warmed
    assert again["iterations"] == 1  # the least time is nothing here
    assert len(queue.kernels) >= launched + 8 + 1
    results = tasks()
    results[1]["entries"][0]["warmup"] |= {"again": again}
    assert schema.validate("result", results[1]) == []
    found = merged(results).observations
    assert schema.validate("observations", found) == []
    assert found["cells"][0]["subjects"][0]["warmups"][0]["warmup"]["again"] == again


def test_a_first_clock_that_cannot_time_the_call_leaves_the_next(queue: FakeDevice) -> None:
    _, report, readable = open_cell(Queued(queue, wait=True), ["op", "host"], queue)
    assert (report.status, readable) == (Status.INCONCLUSIVE, {"host": 1})
    assert str(report.reason).startswith("clock op: the call's launch cannot be hidden")
    assert report.parts["warmup"]["iterations"] > 0  # type: ignore[index]


@pytest.mark.parametrize(
    ("aside", "joined", "status"),
    [
        (0, False, Status.PASS),
        (40_000, True, Status.PASS),
        (40_000, False, Status.INVALID),
        (2_000, False, Status.PASS),  # a fifth at most is within the tolerance
    ],
)
def test_work_beside_the_op_clocks_stream_is_invalid(
    queue: FakeDevice, aside: int, joined: bool, status: Status
) -> None:
    cell, _, readable = open_cell(Queued(queue, aside=aside, joined=joined), ["op"], queue)
    assert readable == {"op": 1}
    seen = 10_000 + (aside if joined else 0)
    assert cell.block(["op"], 4).samples == {"op": [seen] * 4}
    report = Report(lambda place: None)
    cell.close(report)
    assert report.status is status, report.reason
    assert report.parts["oracle_after"]
    if status is Status.INVALID:
        assert report.place == "streams"
        assert report.reason == (
            "clock op saw 10000 of 50000 ns of the call's kernels: work ran on another stream"
        )


def test_an_lse_that_vanishes_after_the_check_is_incorrect(queue: FakeDevice) -> None:
    backend = Queued(queue)
    cell, report, _ = open_cell(backend, ["op"], queue)
    assert report.status is Status.PASS
    assert "lse" in report.parts["oracle_before"]["tensors"]  # type: ignore[index]
    backend.keeps_lse = False
    report = Report(lambda place: None)
    cell.close(report)
    assert report.status is Status.INCORRECT
    assert str(report.reason).endswith("lse no longer returned")


def test_an_op_clock_whose_kernels_cannot_be_seen_is_inconclusive(
    queue: FakeDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    cell, _, _ = open_cell(Queued(queue), ["op"], queue)
    cell.block(["op"], 4)
    monkeypatch.setattr(FakeTrace, "busy_ns", lambda self: [None] * len(self.windows))
    report = Report(lambda place: None)
    cell.close(report)
    assert report.status is Status.INCONCLUSIVE
    assert "no kernel of any call" in str(report.reason)
