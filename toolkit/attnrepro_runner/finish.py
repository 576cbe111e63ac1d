"""From samples and conditions to an entry: what a launch's figures are worth.

The standard library alone; runs in the coordinator once a cell has been sampled.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from attnrepro_runner import conditions, orderstats, plausible
from attnrepro_runner.semantics import Workload
from attnrepro_runner.status import Status
from attnrepro_runner.work import work_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from attnrepro_runner.conditions import Conditions
    from attnrepro_runner.interleave import Measured


def judge(
    measured: Measured,
    cell: Mapping[str, Any],
    found: Conditions,
    *,
    device: Mapping[str, Any],
    policy: Mapping[str, Any],
    ceilings: Iterable[Mapping[str, Any]],
) -> None:
    """Add conditions and flags to a sampled subject's entry, and take the status they mean.

    Args:
        measured: the subject, sampled and closed.
        cell: of the job.
        found: what the device did while it was sampled.
        device: neutral record.
        policy: the manifest's `device.clocks`.
        ceilings: measured in this run.

    """
    measured.entry["conditions"] = found.to_json()
    measured.entry["handling_ns"] = measured.handling_ns
    judgement = conditions.judge(found, policy)
    flags = list(judgement.flags)
    if judgement.status != Status.PASS:
        measured.demand(judgement.status, str(judgement.reason))
    warmup = measured.entry.get("warmup")
    if isinstance(warmup, dict) and not warmup["stationary"]:
        seconds = warmup["duration_ns"] / 1e9
        flags.append(f"not stationary after {seconds:.1f} s of warming up")
    workload = Workload.parse(cell["workload"])
    work = work_of(workload)
    highest = None if found.clock_khz is None else found.clock_khz[2]
    known = plausible.limits(
        device,
        ceilings,
        dtype=workload.dtype,
        clock_khz=highest,
        precision=workload.math.float32_matmul_precision,
    )
    for clock, series in sorted(measured.series.items()):
        if series.usable and min(series.usable) <= 0:
            reason = f"{clock}: a call took {min(series.usable)} ns: the clock cannot be believed"
            measured.demand(Status.INVALID, reason)
            continue
        amount = plausible.work_of_clock(clock, work)
        if amount is None or not series.usable:
            continue
        median = sorted(series.usable)[orderstats.median_rank(len(series.usable)) - 1]
        finding = plausible.judge(
            clock,
            median,
            amount,
            touched=plausible.footprint(workload, work),
            flushed=measured.flushed,
            known=known,
        )
        flags += finding.flags
        if finding.invalid is not None:
            measured.demand(Status.INVALID, finding.invalid)
    if flags:
        measured.entry["flags"] = flags


def records(
    measured: Measured, write: Callable[[str, Sequence[int]], str]
) -> list[dict[str, object]]:
    """Write every series, those that do not count included, and describe them.

    Args:
        measured: the subject.
        write: writes the samples of a clock and returns their member's name.

    """
    return [
        {
            "clock": clock,
            "member": write(clock, series.samples),
            "n": len(series.samples),
            "discards": series.discards,
            "stop": series.stop,
            "flushed": measured.flushed,
            "calls_per_sample": measured.calls[clock],
            "repeated": series.repeated,
        }
        for clock, series in sorted(measured.series.items())
    ]
