"""One cell of a launch inside a worker: opened, sampled in blocks, closed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from attnrepro_runner import clocks, flush, inputs, kernels, oracle, stages, timing
from attnrepro_runner.status import STOPS_MEASURING, Status

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from attnrepro_runner.clocks import Clock
    from attnrepro_runner.flush import Flush
    from attnrepro_runner.report import Report
    from attnrepro_runner.subject import Cell, Subject

STREAMS_A_LAUNCH: Final = 1000
"""Each launch draws fresh data: stream 1000 (n + 1) and on; the check has stream 0."""

SCORES_CHECKED: Final = {"cpu": 1 << 24, "cuda": 1 << 32}
"""Of the oracle before and after timing; the check's own oracle sees all it can afford."""


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
        self._prepared = [subject.bind(workload, tensors) for tensors in self._tensors]
        report.at("oracle_before")
        if not self._judge(report, "oracle_before", self._stream):
            return {}
        report.at("execution")
        self._check_execution(report)
        if report.status in STOPS_MEASURING:
            return {}
        report.at("warm-up")
        self._sampler = timing.Sampler(
            [
                timing.Target(prepared=p, reads=flush.read_by(t, p))
                for p, t in zip(self._prepared, self._tensors, strict=True)
            ],
            self._flush,
        )
        self._make_clocks(report, timing_plan.get("clocks", ["host"]))
        if not self._clocks:
            return {}
        primary = next(iter(self._clocks))
        least, most = timing_plan.get("warmup_seconds", [0.1, 5])
        warmed = timing.warm_up(
            lambda n: self._take(primary, n), least_s=float(least), most_s=float(most)
        )
        report.parts["warmup"] = warmed.to_json()
        for name in list(self._clocks)[1:]:
            self._try(report, name, timing.WINDOW_CALLS)
        return dict.fromkeys(self._clocks, 1)

    def block(self, names: Sequence[str], count: int) -> dict[str, list[int]]:
        """Take a block of samples of each clock, in ns."""
        return {name: self._take(name, count) for name in names}

    def close(self, report: Report) -> None:
        """Check the timed binding again, on data that it has not seen."""
        report.at("oracle_after")
        stream = self._stream + STREAMS_A_LAUNCH // 2
        fresh = inputs.make_inputs(
            self._cell.workload, self._cell.inputs, stream=stream, device=self._subject.device
        )
        stages.copy_into(self._tensors[0], fresh)
        cache = self._cell.workload.cache
        if cache is not None and cache.append and not cache.append_in_call:
            self._prepared[0].append_step()
        self._judge(report, "oracle_after", stream)

    def _judge(self, report: Report, part: str, stream: int) -> bool:
        workload, subject = self._cell.workload, self._subject
        limit = SCORES_CHECKED[subject.device.type]
        judge = oracle.Oracle(
            workload,
            self._shared["accuracy"],
            self._tensors[0],
            stages.selection(workload, subject.device.type, scores=limit),
            seed=stages.seed_text(self._cell, stream),
        )
        outputs = subject.poisoned_step(workload, self._prepared[0])
        return report.judge(part, judge.check(outputs, empty_row_lse=subject.backend.empty_row_lse))

    def _check_execution(self, report: Report) -> None:
        """See again, in the process that is timed, which code runs."""
        pattern = self._subject.patterns(self._cell.workload)
        step = self._prepared[0].step
        execution = kernels.judge(
            kernels.profile(step, on_device=self._device is not None), pattern
        )
        if not execution.ok:
            report.demand(Status.FALLBACK, execution.reason)

    def _make_clocks(self, report: Report, wanted: Sequence[str]) -> None:
        prefixes = ("", "backward_") if self._cell.workload.has_backward else ("",)
        for name in wanted:
            for prefix in prefixes:
                try:
                    clock = clocks.make(name, self._device, prefix)
                except clocks.ClockUnavailable as error:
                    report.demand(Status.INCONCLUSIVE, f"clock {name}: {error}")
                    continue
                self._clocks[clock.name] = clock

    def _try(self, report: Report, name: str, count: int) -> None:
        try:
            self._take(name, count)
        except clocks.ClockUnavailable as error:
            del self._clocks[name]
            report.demand(Status.INCONCLUSIVE, f"clock {name}: {error}")

    def _take(self, name: str, count: int) -> list[int]:
        backward = name.startswith("backward_")
        return self._sampler.take(self._clocks[name], count, backward=backward)
