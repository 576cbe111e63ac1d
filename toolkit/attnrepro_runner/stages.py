"""What a worker does with one cell outside of the launches: check, cold, memory."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any, Final

import torch

from attnrepro_runner import (
    checking,
    clocks,
    dropout,
    inputs,
    kernels,
    mathflags,
    memory,
    oracle,
    toolchain,
)
from attnrepro_runner.backends.base import Outputs, Unsupported
from attnrepro_runner.semantics import Workload
from attnrepro_runner.status import STOPS_MEASURING, Status

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from attnrepro_runner.backends.base import Prepared, Tensors
    from attnrepro_runner.oracle import Oracle, Selection
    from attnrepro_runner.report import Report
    from attnrepro_runner.subject import Cell, Subject

CHECK_STREAM: Final = 0
STEADY_CALLS: Final = 5
REPEATED_CALLS: Final = 10
SCORES_CHECKED: Final = {"cpu": 1 << 31, "cuda": 1 << 36}
"""Scores that the oracle computes at most; a larger cell is checked in part, and says so."""


def prime(device: torch.device) -> None:
    """Draw, judge and profile once, so that a device's first kernels and its profiler are loaded.

    Of the launch of the papers' grid on an H200 (five subjects) about 20 s went into that, one
    worker after the other.
    """
    shape = {"batch": 1, "seqlen_q": 64, "seqlen_k": 64, "heads_q": 1, "head_dim": 64}
    workload = Workload.parse({"phase": "forward_backward", "dtype": "bfloat16", **shape})
    tensors = inputs.make_inputs(workload, {}, stream=CHECK_STREAM, device=device)
    judge = oracle.Oracle(workload, {}, tensors)
    nothing = Outputs(out=tensors.q, dq=tensors.q, dk=tensors.k, dv=tensors.v)
    kernels.profile(
        lambda: judge.check(nothing, empty_row_lse=-math.inf), on_device=device.type == "cuda"
    )


def check(
    subject: Subject, cell: Cell, report: Report, shared: Mapping[str, Any], *, profile: str
) -> None:
    """Find out what a subject does with a cell: which code, semantics, error and bits.

    Raises:
        Unsupported: it cannot. Whatever else the subject raises passes too.

    """
    from attnrepro_runner import bits, probes

    workload = cell.workload
    report.at("availability")
    found = subject.backend.availability()
    report.parts["availability"] = {
        "available": found.available,
        "version": found.version,
        "files": dict(found.files),
        "flags": dict(found.flags),
        "reason": found.reason,
    }
    if not found.available:
        report.demand(Status.UNSUPPORTED, found.reason)
        return
    report.at("capability")
    subject.accept(workload)
    report.at("inputs")
    tensors = inputs.make_inputs(workload, cell.inputs, stream=CHECK_STREAM, device=subject.device)
    report.parts["inputs"] = inputs.digests(tensors)
    report.at("probes")
    kind = probes.shape_class(workload)
    if kind not in subject.probed:
        subject.probed[kind] = probes.run_probes(
            subject.backend, subject.options, workload, subject.device
        )
    report.judge("probes", subject.probed[kind])
    report.at("execution")
    prepared = subject.bind(workload, tensors)
    prepared.step()
    seen = kernels.profile(prepared.step, on_device=subject.device.type == "cuda")
    named, lse, plan = _second_entry(subject, workload, tensors, prepared.step())
    execution = kernels.judge(
        seen,
        subject.patterns(workload),
        toolchain=mathflags.read_back() | toolchain.versions(),
        plan=plan,
        cubins=toolchain.code_digests(),
    )
    report.parts["execution"] = execution.to_json()
    if not execution.ok:
        report.demand(Status.FALLBACK, execution.reason)
    report.at("oracle_before")
    chosen = selection(workload, subject.device.type)
    judge = oracle.Oracle(
        workload,
        shared["accuracy"],
        tensors,
        chosen,
        unquantised=_before_quantisation(subject, cell),
        keep=kept_weights(subject, workload, chosen),
        seed=seed_text(cell, CHECK_STREAM),
    )
    outputs = subject.poisoned_step(workload, first_again(subject, workload, tensors, prepared))
    if named:
        outputs = dataclasses.replace(outputs, lse=lse)
    report.judge("oracle_before", judge.check(outputs, empty_row_lse=subject.empty_row_lse))
    judge_backward(subject, workload, tensors, prepared, outputs, judge, report)
    if report.status in STOPS_MEASURING:
        return
    report.at("bits")
    contract = shared["bits"]
    report.judge(
        "bits",
        bits.repeat(
            lambda: first_again(subject, workload, tensors, prepared),
            int(contract.get("repeats", 10)),
            profile=profile,
            claimed=str(contract.get("claim", "bitwise")),
            rebind=workload.dropout is not None,
            batch_invariant=_batch_invariant(subject, cell),
        ),
    )


def judge_backward(
    subject: Subject,
    workload: Workload,
    tensors: Tensors,
    prepared: Prepared,
    outputs: Outputs | None,
    judge: Oracle,
    report: Report,
) -> None:
    """Hold the backward that is timed alone to the same oracle as the whole call.

    The gradients of `outputs`, which have been judged, are overwritten first: a backward that hands
    them out again has done nothing.
    """
    if not workload.has_backward:
        return
    subject.poison(workload, ("q", "k", "v"))
    for gradient in () if outputs is None else (outputs.dq, outputs.dk, outputs.dv):
        if gradient is not None and all(gradient.stride()):  # one that is expanded has no places
            gradient.detach().fill_(math.nan)
    alone = first_again(subject, workload, tensors, prepared).backward_step()
    subject.synchronize()
    found = judge.check(alone, empty_row_lse=subject.empty_row_lse)
    if not found.ok:
        reason = f"the backward alone, inputs {judge.seed}: {found.reason()}"
        report.demand(Status(found.status()), reason)


def kept_weights(
    subject: Subject, workload: Workload, chosen: Selection | None
) -> Callable[[int, int], torch.Tensor] | None:
    """Read out which weights dropout keeps in the first call of a binding; None without dropout."""
    if workload.dropout is None:
        return None
    return dropout.read_mask(
        subject.backend,
        subject.options,
        workload,
        subject.device,
        pairs=oracle.pairs(workload, chosen),
    )


def first_again(
    subject: Subject, workload: Workload, tensors: Tensors, prepared: Prepared
) -> Prepared:
    """Give what makes the call of which `kept_weights` speaks.

    Each call of a binding draws the next dropout mask, so with dropout that is a new binding of the
    same tensors; else the same one.
    """
    return prepared if workload.dropout is None else subject.bind(workload, tensors)


def _before_quantisation(subject: Subject, cell: Cell) -> dict[str, torch.Tensor] | None:
    """Draw q, k, v as they were before their rounding to float8; None for other dtypes."""
    if cell.workload.fp8 is None:
        return None
    return inputs.draw(cell.workload, cell.inputs, stream=CHECK_STREAM, device=subject.device)


def _second_entry(
    subject: Subject, workload: Workload, tensors: Tensors, outputs: Outputs
) -> tuple[bool, torch.Tensor | None, dict[str, str]]:
    """Fetch the LSE by another entry point, where the timed call returns none.

    Returns:
        Whether there is such an LSE, the LSE, and what the record says of it. It counts only where
        the other call's output has the same bits as the timed one's.

    """
    enter = getattr(subject.backend, "second_entry", None)
    if outputs.lse is not None or enter is None:
        return False, None, {}
    label, entry = enter(workload, subject.options, tensors)
    if entry is None:
        return False, None, {"lse": f"none: {label}"}
    other = entry.step()
    if not torch.equal(other.out, outputs.out):
        return False, None, {"lse": f"none: {label} gives other bits than the timed call"}
    return True, other.lse, {"lse": f"from {label}, whose output has the timed call's bits"}


def _batch_invariant(subject: Subject, cell: Cell) -> bool | None:
    from attnrepro_runner import bits

    try:
        return bits.batch_invariance(
            subject.backend,
            subject.options,
            cell.workload,
            cell.inputs,
            stream=CHECK_STREAM,
            device=subject.device,
        )
    except Unsupported:
        return None  # the backend does not take the single sequence


def cold(subject: Subject, cell: Cell, report: Report, *, import_ns: int) -> None:
    """Time what a fresh process pays: import, preparation with the first call, the second, a later.

    Raises:
        Unsupported: the call cannot be made.

    """
    report.at("inputs")
    subject.accept(cell.workload)
    tensors = inputs.make_inputs(
        cell.workload, cell.inputs, stream=CHECK_STREAM, device=subject.device
    )
    subject.synchronize()
    report.at("first call")
    begin = clocks.now()
    prepared = subject.bind(cell.workload, tensors)
    prepared.step()
    subject.synchronize()
    first = clocks.now() - begin
    report.at("later calls")
    later = clocks.HostClock(clocks_device(subject)).take(1 + STEADY_CALLS, lambda: prepared.step)
    report.parts["cold"] = {
        "import_ns": import_ns,
        "first_call_ns": first,
        "second_call_ns": later[0],
        "steady_call_ns": sorted(later[1:])[STEADY_CALLS // 2],
        "compile_cache": "empty" if toolchain.compiled() else "none",
    }


def measure_memory(subject: Subject, cell: Cell, report: Report) -> None:
    """Count what preparation and one call allocate.

    Raises:
        Unsupported: the call cannot be made.

    """
    workload = cell.workload
    report.at("inputs")
    subject.accept(workload)
    tensors = inputs.make_inputs(workload, cell.inputs, stream=CHECK_STREAM, device=subject.device)
    # What is allocated once in a process (code, thread pools, compiled graphs) is not the call's.
    subject.bind(workload, tensors).step()
    report.at("memory")

    def work() -> object:
        prepared = subject.bind(workload, tensors)
        return prepared, prepared.step()

    used = memory.measure(
        work,
        workload,
        tensors,
        subject.backend.memory_order(workload, subject.options),
        threads=subject.threads,
        workspace=getattr(subject.backend, "workspace_bytes", 0),
    )
    report.parts["memory"] = used.to_json()
    if used.alarm:
        reason = (
            f"the call took {used.extra_bytes} bytes beyond its inputs; memory order "
            f"{used.declared_order.value}, which its adapter declares, allows {used.declared_bytes}"
        )
        report.demand(Status.FALLBACK, reason)


def repeater(subject: Subject, cell: Cell, report: Report) -> Callable[[float], tuple[int, int]]:
    """Bind a cell and return what repeats its call for some seconds: calls and ns.

    Calls follow each other without flushing, and the host waits for the device now and then alone.

    Raises:
        Unsupported: the call cannot be made.

    """
    report.at("inputs")
    subject.accept(cell.workload)
    tensors = inputs.make_inputs(
        cell.workload, cell.inputs, stream=CHECK_STREAM, device=subject.device
    )
    step = subject.bind(cell.workload, tensors).step
    step()
    subject.synchronize()

    def repeat(seconds: float) -> tuple[int, int]:
        calls, begin = 0, clocks.now()
        while (spent := clocks.now() - begin) < seconds * 1e9:
            for _ in range(REPEATED_CALLS):
                step()
            calls += REPEATED_CALLS
            subject.synchronize()
        return calls, spent

    return repeat


def selection(
    workload: Workload,
    device: str,
    *,
    scores: int | None = None,
    most: int | None = None,
    seed: int = 0,
) -> Selection | None:
    """Return the part of a cell that the oracle checks; None is all of it.

    Args:
        workload: the cell's.
        device: cpu or cuda; decides how many scores are affordable.
        scores: how many instead.
        most: (sequence, query head) pairs at most; None is as many as the scores allow.
        seed: of the draw.

    """
    limit = SCORES_CHECKED[device] if scores is None else scores
    part = checking.affordable(workload, limit, most)
    if part is None:
        return None
    pairs, blocks = part
    return oracle.sample(workload, pairs=pairs, blocks=blocks, seed=seed)


def seed_text(cell: Cell, stream: int) -> str:
    """Name the inputs of a check."""
    return f"{cell.inputs.get('seed', 2026)}/{stream}"


def clocks_device(subject: Subject) -> clocks.DeviceApi | None:
    """Return the device that the clocks need; None on a CPU."""
    if subject.device.type == "cpu":
        return None
    from attnrepro_runner.torchdevice import TorchDevice

    return TorchDevice()


def copy_into(target: object, source: object) -> None:
    """Write the values of one set of tensors into the memory of another of the same shapes."""
    for part in dataclasses.fields(target):  # type: ignore[arg-type]
        into, values = getattr(target, part.name), getattr(source, part.name)
        if into is not None:
            into.copy_(values)
