"""One cell of a launch inside a worker: opened, sampled in blocks, closed."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from attnrepro_runner import (
    clocks,
    flush,
    inputs,
    kernels,
    oracle,
    orderstats,
    requested,
    stages,
    timing,
)
from attnrepro_runner.checking import PAIRS_AGAIN, SCORES_AGAIN
from attnrepro_runner.status import STOPS_MEASURING, Status
from attnrepro_runner.subject import appends_apart

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from attnrepro_runner.backends.base import Prepared, Tensors
    from attnrepro_runner.clocks import Clock
    from attnrepro_runner.flush import Flush
    from attnrepro_runner.report import Report
    from attnrepro_runner.subject import Cell, Subject

STREAMS_A_LAUNCH: Final = 1000
"""Each launch draws fresh data: stream 1000 (n + 1) and on; the check has stream 0."""

SEEN_LEAST: Final = (4, 5)
"""Least share of its kernels' time that an op clock has seen, if nothing ran beside its stream.

Events resolve half a microsecond, tracing lengthens a kernel by about as much, and the device's
clock may differ by some per cent between samples and trace; a stream of its own is worth while only
for a larger share of the call than that."""
CALLS_TRACED: Final = 5
"""The one with the least kernel time counts."""


@dataclass(frozen=True, kw_only=True)
class Block:
    """Some samples of each clock."""

    samples: Mapping[str, list[int]]
    lost: Mapping[str, str]
    """Clock that failed in this block to the reason."""
    partial: Mapping[str, list[int]]
    """Clock that failed in this block to the samples before it did."""
    repeated: Mapping[str, int]
    """Clock to calls that were made again, since their launch could not be hidden."""


class MeasuredCell:
    """A cell that is open in this worker."""

    def __init__(
        self,
        subject: Subject,
        cell: Cell,
        shared: Mapping[str, Any],
        *,
        launch: int,
        device: clocks.DeviceApi | None,
        empty: Flush,
    ) -> None:
        """Bind nothing yet."""
        self._subject = subject
        self._cell = cell
        self._shared = shared
        self._stream = STREAMS_A_LAUNCH * (launch + 1)
        self._device = device
        self._flush = empty
        self._clocks: dict[str, Clock] = {}
        self._samplers: dict[str, timing.Sampler] = {}
        self._repeated: dict[str, int] = {}
        self._taken: dict[str, list[int]] = {}
        self._warmup: dict[str, object] = {}
        self._judged: dict[int, set[str]] = {}

    def open(self, report: Report) -> dict[str, int]:
        """Check, warm up; return the clocks that can be read, with the calls of one sample.

        Raises:
            Unsupported: the call cannot be made.

        """
        workload, subject = self._cell.workload, self._subject
        timing_plan = self._shared["timing"]
        report.at("inputs")
        distribution = str(self._cell.inputs.get("distribution", "normal"))
        if distribution in inputs.LOW_ENTROPY:
            reason = f"inputs of distribution {distribution} run faster than data do: not timed"
            report.demand(Status.INVALID, reason)
            return {}
        subject.accept(workload)
        sets = max(1, int(timing_plan.get("rotate_inputs", 2)))
        self._tensors = [
            inputs.make_inputs(
                workload, self._cell.inputs, stream=self._stream + n, device=subject.device
            )
            for n in range(sets)
        ]
        report.at("preparation")
        self._prepared = self._prepare(report)
        report.at("oracle_before")
        if not self._judge_all(report, "oracle_before", self._stream):
            return {}
        report.at("execution")
        self._check_execution(report)
        if report.status in STOPS_MEASURING:
            return {}
        report.at("warm-up")
        sampler = timing.Sampler(
            [
                timing.Target(prepared=p, reads=flush.read_by(t, p))
                for p, t in zip(self._prepared, self._tensors, strict=True)
            ],
            self._flush,
        )
        wanted = list(timing_plan.get("clocks", ["host"]))
        self._make_clocks(report, [name for name in wanted if name != "request"], sampler)
        if "request" in wanted and self._cell.request is not None:
            self._make_request(report, self._cell.request)
        report.at("warm-up")
        for name in list(self._clocks):
            self._try(report, name)
        self._repeats(list(self._clocks))  # what warming up repeated is no sample's
        return dict.fromkeys(self._clocks, 1)

    def warm_again(self) -> None:
        """Before the first block, warm up once more for the least time; later, do nothing."""
        if "again" in self._warmup:
            return
        name = next(iter(self._clocks))
        self._warmup["again"] = {"duration_ns": 0, "iterations": 0}
        with suppress(clocks.ClockUnavailable):  # the block that follows says so
            self._warmup["again"] = timing.warm_again(
                lambda n: self._take(name, n), seconds=self._warmup_seconds()[0]
            )
        self._repeats(list(self._clocks))

    def block(self, names: Sequence[str], count: int) -> Block:
        """Take a block of samples of each clock, in ns; a clock that fails loses no other's."""
        samples: dict[str, list[int]] = {}
        lost: dict[str, str] = {}
        partial: dict[str, list[int]] = {}
        for name in names:
            try:
                samples[name] = self._take(name, count)
                self._taken.setdefault(name, []).extend(samples[name])
            except clocks.ClockUnavailable as error:
                lost[name], partial[name] = str(error), error.taken
        repeated = self._repeats(names)
        return Block(samples=samples, lost=lost, partial=partial, repeated=repeated)

    def close(self, report: Report) -> None:
        """Look for work that the op clock missed; check the timed binding on data new to it."""
        report.parts["warmup"] = self._warmup
        report.at("streams")
        for name, clock in self._clocks.items():
            if isinstance(clock, clocks.OpClock) and self._taken.get(name):
                self._check_span(report, name, clock)
        report.at("oracle_after")
        self._judge_backwards(report)
        stream = self._stream + STREAMS_A_LAUNCH // 2
        for n, (tensors, prepared) in enumerate(zip(self._tensors, self._prepared, strict=True)):
            fresh = inputs.make_inputs(
                self._cell.workload,
                self._cell.inputs,
                stream=stream + n,
                device=self._subject.device,
            )
            stages.copy_into(tensors, fresh)
            del fresh  # before the next set is drawn
            if appends_apart(self._cell.workload):
                prepared.append_step()
        self._judge_all(report, "oracle_after", stream)

    def _judge_all(self, report: Report, part: str, stream: int) -> bool:
        """Judge every binding that is timed; the first one's verdict is kept as a part."""
        workload, subject = self._cell.workload, self._subject
        for n, (tensors, prepared) in enumerate(zip(self._tensors, self._prepared, strict=True)):
            judge = self._oracle(tensors, stream + n, PAIRS_AGAIN[n > 0])
            called = stages.first_again(subject, workload, tensors, prepared)
            outputs = subject.poisoned_step(workload, called)
            found = judge.check(outputs, empty_row_lse=subject.empty_row_lse)
            if n == 0:
                report.judge(part, found)
            elif not found.ok:
                report.demand(Status(found.status()), f"inputs {stream + n}: {found.reason()}")
            # An LSE need not be there; one that this binding gave is part of what is timed.
            if missing := self._judged.get(n, set()) - found.tensors.keys():
                reason = f"inputs {stream + n}: {', '.join(sorted(missing))} no longer returned"
                report.demand(Status.INCORRECT, reason)
            self._judged[n] = set(found.tensors)
            if part == "oracle_before":  # later, the forward that is kept is of other inputs
                stages.judge_backward(subject, workload, tensors, prepared, outputs, judge, report)
            if report.status in STOPS_MEASURING:
                return False
        return True

    def _judge_backwards(self, report: Report) -> None:
        """Judge each binding's backward as it was timed, of the forward that is kept."""
        workload = self._cell.workload
        if not workload.has_backward or workload.dropout is not None:
            return  # nobody knows any more which mask the kept forward drew
        for n, (tensors, prepared) in enumerate(zip(self._tensors, self._prepared, strict=True)):
            judge = self._oracle(tensors, self._stream + n, PAIRS_AGAIN[1])
            stages.judge_backward(self._subject, workload, tensors, prepared, None, judge, report)

    def _oracle(self, tensors: Tensors, stream: int, most: int) -> oracle.Oracle:
        workload, subject = self._cell.workload, self._subject
        kind = subject.device.type
        chosen = stages.selection(workload, kind, scores=SCORES_AGAIN[kind], most=most, seed=stream)
        return oracle.Oracle(
            workload,
            self._shared["accuracy"],
            tensors,
            chosen,
            keep=stages.kept_weights(subject, workload, chosen),
            seed=stages.seed_text(self._cell, stream),
        )

    def _check_execution(self, report: Report) -> None:
        """See again, in the process that is timed, which code each binding runs."""
        pattern = self._subject.patterns(self._cell.workload)
        for prepared in self._prepared:
            execution = kernels.judge(
                kernels.profile(prepared.step, on_device=self._device is not None), pattern
            )
            if not execution.ok:
                report.demand(Status.FALLBACK, execution.reason)
                return

    def _check_span(self, report: Report, name: str, clock: clocks.OpClock) -> None:
        """Hold an op clock, which sees one stream, against all kernels of the call."""
        assert self._device is not None
        tracer = clocks.BusyClock(self._device, clock)
        try:
            busy = min(self._take(name, CALLS_TRACED, tracer))
        except clocks.ClockUnavailable as error:
            report.demand(Status.INCONCLUSIVE, f"clock {name} cannot be held to kernels: {error}")
            return
        taken = sorted(self._taken[name])
        median = taken[orderstats.median_rank(len(taken)) - 1]
        if SEEN_LEAST[1] * median < SEEN_LEAST[0] * busy:
            reason = (
                f"clock {name} saw {median} of {busy} ns of the call's kernels: work ran on "
                "another stream"
            )
            report.demand(Status.INVALID, reason)

    def _prepare(self, report: Report) -> list[Prepared]:
        """Bind every set of inputs; what that costs is a figure of its own."""
        prepared, times = [], []
        for tensors in self._tensors:
            one, spent = self._timed_bind(tensors)
            prepared.append(one)
            times.append(spent)
        report.parts["preparation"] = {"prepare_ns": times}
        return prepared

    def _timed_bind(self, tensors: Tensors) -> tuple[Prepared, int]:
        subject, workload = self._subject, self._cell.workload
        subject.synchronize()
        begin = clocks.now()
        prepared = subject.backend.prepare(workload, subject.options, tensors)
        subject.synchronize()
        spent = clocks.now() - begin
        if appends_apart(workload):
            prepared.append_step()
        return prepared, spent

    def _make_clocks(self, report: Report, wanted: Sequence[str], sampler: timing.Sampler) -> None:
        prefixes = [""]
        if self._cell.workload.has_backward:
            prefixes.append("backward_")
        if appends_apart(self._cell.workload):
            prefixes.append("append_")
        for name in wanted:
            for prefix in prefixes:
                try:
                    clock = clocks.make(name, self._device, prefix)
                except clocks.ClockUnavailable as error:
                    report.demand(Status.INCONCLUSIVE, f"clock {name}: {error}")
                    continue
                self._clocks[clock.name] = clock
                self._samplers[clock.name] = sampler

    def _make_request(self, report: Report, wanted: Mapping[str, Any]) -> None:
        """Build the request model round this subject, and see where its time goes."""
        report.at("request")
        try:
            found = requested.build(self._subject, self._cell, wanted, self._device, self._flush)
        except requested.WrongOutput as error:
            report.demand(Status.INCORRECT, f"request: {error}")
            return
        except requested.NoRequest as error:
            report.demand(Status.INCONCLUSIVE, f"clock request: {error}")
            return
        report.parts["request"] = found.description
        self._clocks["request"] = clocks.HostClock(self._device, "request")
        target = timing.Target(prepared=found.steps, reads=found.reads)
        self._samplers["request"] = timing.Sampler([target], self._flush)

    def _warm(self, report: Report, name: str) -> None:
        """Warm up by the first clock that can time the call; then only touch the others."""
        if self._warmup:
            self._take(name, timing.WINDOW_CALLS)
            return
        least, most = self._warmup_seconds()
        warmed = timing.warm_up(lambda n: self._take(name, n), least_s=least, most_s=most)
        self._warmup = report.parts["warmup"] = warmed.to_json()

    def _warmup_seconds(self) -> tuple[float, float]:
        least, most = self._shared["timing"].get("warmup_seconds", [0.1, 5])
        return float(least), float(most)

    def _try(self, report: Report, name: str) -> None:
        try:
            self._warm(report, name)
        except clocks.ClockUnavailable as error:
            del self._clocks[name]
            report.demand(Status.INCONCLUSIVE, f"clock {name}: {error}")

    def _take(self, name: str, count: int, clock: Clock | None = None) -> list[int]:
        part = next((p for p in ("backward", "append") if name.startswith(f"{p}_")), None)
        return self._samplers[name].take(
            clock or self._clocks[name], count, "step" if part is None else f"{part}_step"
        )

    def _repeats(self, names: Sequence[str]) -> dict[str, int]:
        """Return how many calls each clock has made again since this was last asked."""
        found = {}
        for name in names:
            clock = self._clocks[name]
            if isinstance(clock, clocks.OpClock):
                found[name] = clock.repeated - self._repeated.get(name, 0)
                self._repeated[name] = clock.repeated
        return found
