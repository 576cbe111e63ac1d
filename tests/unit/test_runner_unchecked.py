"""Work that is timed and was never looked at: other bindings, a backward alone, an append."""

from __future__ import annotations

import dataclasses
import re
import sys
from typing import TYPE_CHECKING, Any

import cudnn_fake
import pytest
import torch
from case_fakes import (
    TINY,
    checked,
    own_process,  # noqa: F401 - an autouse fixture
    subject_of,
)
from gpu_fakes import workload as gpu_workload
from numerics_fakes import workload_of

from attnrepro_runner import flush, inputs, measured, stages
from attnrepro_runner.backends import cudnn_frontend, registry
from attnrepro_runner.backends.base import Unsupported
from attnrepro_runner.mutantbackends import Mutant, Patched
from attnrepro_runner.report import Report
from attnrepro_runner.status import Status
from attnrepro_runner.subject import Cell

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from attnrepro_runner.backends.base import Backend, Outputs, Prepared, Tensors
    from attnrepro_runner.semantics import Workload

    Prepare = Callable[[Backend, Workload, Mapping[str, object], Tensors], Prepared]


def timed(prepare: Prepare, **workload: Any) -> Report:
    """Measure a cell in this process, with two sets of inputs."""
    report = Report(lambda place: None)
    plan = {"clocks": ["host"], "warmup_seconds": [0.0, 0.01], "rotate_inputs": 2}
    found = measured.MeasuredCell(
        subject_of(Mutant(registry.load("eager"), prepare)),
        Cell(id="c000", label="", workload=workload_of(**TINY | workload), inputs={}),
        {"accuracy": {}, "timing": plan},
        launch=0,
        device=None,
        empty=flush.Warm(),
    )
    clocks = list(found.open(report))
    if clocks:
        found.block(clocks, 4)
        found.close(report)
    return report


class Kept(Patched):
    """Gives its first answer for ever."""

    kept: Outputs | None = None

    def step(self) -> Outputs:
        self.kept = self.kept or self.inner.step()
        return self.kept


class Stale(Patched):
    """Hands out the whole call's gradients as those of the backward alone."""

    kept: Outputs | None = None

    def step(self) -> Outputs:
        self.kept = self.inner.step()
        return self.kept

    def backward_step(self) -> Outputs:
        assert self.kept is not None
        return self.kept


class Halved(Patched):
    """Its backward alone leaves dq out; from some call on, where `after` says so."""

    honest = 0

    def backward_step(self) -> Outputs:
        found = self.inner.backward_step()
        if self.honest > 0:
            self.honest -= 1
            return found
        assert found.dq is not None
        return dataclasses.replace(found, dq=torch.zeros_like(found.dq))


def test_an_honest_call_passes() -> None:
    for phase in ("prefill", "forward_backward"):
        report = timed(lambda i, w, o, t: i.prepare(w, o, t), phase=phase)
        assert report.status is Status.PASS, report.reason


def test_every_set_of_inputs_is_judged() -> None:
    made: list[Tensors] = []

    def second_is_kept(i: Backend, w: Workload, o: Mapping[str, object], t: Tensors) -> Prepared:
        made.append(t)
        return Kept(i.prepare(w, o, t)) if len(made) % 2 == 0 else i.prepare(w, o, t)

    report = timed(second_is_kept, phase="prefill")
    assert report.status in (Status.FALLBACK, Status.INCORRECT)
    made.clear()

    def all_read_the_first(
        i: Backend, w: Workload, o: Mapping[str, object], t: Tensors
    ) -> Prepared:
        made.append(t)
        return i.prepare(w, o, made[0])

    report = timed(all_read_the_first, phase="prefill")
    assert report.status is Status.INCORRECT
    assert "inputs" in str(report.reason)


@pytest.mark.parametrize("kind", [Stale, Halved])
def test_the_backward_alone_is_judged(kind: type[Patched]) -> None:
    def prepare(i: Backend, w: Workload, o: Mapping[str, object], t: Tensors) -> Prepared:
        return kind(i.prepare(w, o, t))

    for report in (
        timed(prepare, phase="forward_backward"),
        checked(Mutant(registry.load("eager"), prepare), phase="forward_backward"),
    ):
        assert report.status is Status.INCORRECT
        assert re.match(r"the backward alone, inputs \S+: dq", str(report.reason))


def test_a_backward_that_ends_its_work_while_it_is_timed_is_found() -> None:
    def prepare(i: Backend, w: Workload, o: Mapping[str, object], t: Tensors) -> Prepared:
        found = Halved(i.prepare(w, o, t))
        found.honest = 3
        return found

    report = timed(prepare, phase="forward_backward")
    assert report.status is Status.INCORRECT
    assert re.match(r"the backward alone, inputs \S+: dq", str(report.reason))


@pytest.mark.parametrize("seqlen", [4096, 65536])
def test_another_set_of_inputs_costs_no_more_than_its_limit(seqlen: int) -> None:
    workload = workload_of(**TINY | {"phase": "prefill", "seqlen_q": seqlen, "seqlen_k": seqlen})
    limit = 1 << 20
    chosen = stages.selection(workload, "cpu", scores=limit, most=1)
    assert chosen is not None
    assert len(chosen.pairs) == 1
    assert chosen.blocks is not None
    assert len(chosen.blocks) * 64 * seqlen <= max(limit, 2 * 64 * seqlen)


@pytest.mark.parametrize("pages", [None, 8])
def test_an_append_that_never_reaches_the_cache_is_incorrect(pages: int | None) -> None:
    def private(i: Backend, w: Workload, o: Mapping[str, object], t: Tensors) -> Prepared:
        mine = dataclasses.replace(t, k=t.k.clone(), v=t.v.clone())

        def refresh() -> None:
            mine.k.copy_(t.k)
            mine.v.copy_(t.v)

        return Patched(i.prepare(w, o, mine), before=refresh)

    cache: dict[str, Any] = {"kind": "contiguous", "append": 2, "append_in_call": True}
    if pages is not None:
        cache |= {"kind": "paged", "page_size": pages}
    decode: dict[str, Any] = {"phase": "decode", "seqlen_q": 2, "seqlen_k": 40, "cache": cache}
    report = checked(Mutant(registry.load("eager"), private), **decode)
    assert report.status is Status.INCORRECT
    assert "does not hold the new keys" in str(report.reason)
    honest = checked(registry.load("eager"), **decode)
    assert honest.status is Status.PASS


def test_memory_that_is_not_there_is_no_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    def starved(*_: object, **__: object) -> None:
        message = "CUDA out of memory. Tried to allocate 2 GiB"
        raise torch.OutOfMemoryError(message)

    monkeypatch.setitem(sys.modules, "cudnn", cudnn_fake.Cudnn())
    monkeypatch.setattr(cudnn_frontend, "_CudnnPrepared", starved)
    workload = gpu_workload(seqlen_q=24, seqlen_k=24)
    tensors = inputs.make_inputs(workload, {}, stream=0, device="cpu")
    with pytest.raises(torch.OutOfMemoryError):
        cudnn_frontend.CudnnFrontend().prepare(workload, {}, tensors)
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", starved)
    small = workload_of(**TINY)
    backend = registry.load("sdpa.flash")
    with pytest.raises(torch.OutOfMemoryError):
        backend.prepare(small, {}, inputs.make_inputs(small, {}, stream=0, device="cpu"))
    with pytest.raises(Unsupported):
        backend.check(workload_of(**TINY | {"softcap": 5.0}), {})
