"""A backend made of the reference itself, honest or wrong in one named way."""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import TYPE_CHECKING, Any

import torch

from attnrepro_runner import generator, groups, inputs, reference, views
from attnrepro_runner.backends.base import (
    Availability,
    Backend,
    KernelPattern,
    MemoryOrder,
    Outputs,
    Prepared,
    Tensors,
)
from attnrepro_runner.backends.flash_common import CacheAppend
from attnrepro_runner.semantics import Workload

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


def workload_of(**changes: Any) -> Workload:
    document: dict[str, Any] = {
        "phase": "forward",
        "batch": 2,
        "seqlen_q": 40,
        "seqlen_k": 40,
        "heads_q": 4,
        "heads_kv": 2,
        "head_dim": 32,
        "dtype": "bfloat16",
    }
    return Workload.parse(document | changes)


@dataclasses.dataclass
class Faults:
    """What a wrong backend does; nothing by default."""

    workload: Callable[[Workload], Workload] = lambda w: w
    """The semantics that it computes instead."""
    tensors: Callable[[Tensors], Tensors] = lambda t: t
    """What it reads instead."""
    k_head: Callable[[Workload, int], int] = lambda w, h: w.kv_head(h)
    v_head: Callable[[Workload, int], int] = lambda w, h: w.kv_head(h)
    outputs: Callable[[Outputs], Outputs] = lambda o: o
    unseeded: bool = False
    stuck: bool = False
    """Dropout's generator does not advance."""
    other_backward_mask: bool = False
    rate: float | None = None
    unscaled: bool = False


class ReferenceBackend(Backend):
    name = "fake.reference"
    empty_row_lse = -math.inf
    option_names: frozenset[str] = frozenset()

    def __init__(self, **faults: Any) -> None:
        self.faults = Faults(**faults)
        self.entropy = itertools.count(1000)

    def availability(self) -> Availability:
        return Availability(available=True, version="0")

    def check(self, workload: Workload, options: Mapping[str, object]) -> None:
        pass

    def consumed(self, workload: Workload, options: Mapping[str, object]) -> frozenset[str]:
        return workload.active_fields()

    def memory_order(self, workload: Workload, options: Mapping[str, object]) -> MemoryOrder:
        return MemoryOrder.LINEAR

    def patterns(self, workload: Workload, options: Mapping[str, object]) -> KernelPattern:
        return KernelPattern(family="fake", must=(".",))

    def prepare(
        self, workload: Workload, options: Mapping[str, object], tensors: Tensors
    ) -> Prepared:
        return ReferencePrepared(self, workload, tensors)


class ReferencePrepared(Prepared):
    def __init__(self, backend: ReferenceBackend, workload: Workload, tensors: Tensors) -> None:
        self.backend, self.workload, self.tensors = backend, workload, tensors
        self.calls = 0

    def append_step(self) -> None:
        cache = self.workload.cache
        if cache is not None and cache.append:
            CacheAppend(self.workload, self.tensors)()

    def backward_step(self) -> Outputs:
        return self.step()

    def step(self) -> Outputs:
        faults, given = self.backend.faults, self.workload
        if given.cache is not None and given.cache.append_in_call:
            self.append_step()
        tensors = faults.tensors(self.tensors)
        workload = faults.workload(given)
        out = torch.zeros(given.shape("out"), dtype=views.DTYPES[given.dtype_out])
        lse = torch.zeros(given.shape("lse"))
        grads: dict[str, torch.Tensor] = {}
        if given.has_backward:
            dtype = views.DTYPES[given.dtype]
            grads = {f"d{n}": torch.zeros(given.shape(n), dtype=dtype) for n in ("q", "k", "v")}
        precision = reference.low_precision(given)
        for b in range(given.batch):
            for h in range(given.heads_q):
                group = [(b, (h,))]
                read = groups.from_tensors(given, tensors, group)
                read = dataclasses.replace(
                    read,
                    k=views.logical_keys(tensors, "k", given, b, faults.k_head(given, h))[None],
                    v=views.logical_keys(tensors, "v", given, b, faults.v_head(given, h))[None],
                )
                keep = self.keep(backward=False)
                found = reference.attend(workload, read, group, precision, keep=keep)
                if faults.unscaled and given.dropout is not None:
                    found = dataclasses.replace(found, out=found.out * (1 - given.dropout.p))
                views.query_rows(out, given, b, h).copy_(found.out[0, 0])
                views.lse_row(lse, given, b, h).copy_(found.lse[0, 0])
                if given.has_backward:
                    if faults.other_backward_mask:
                        keep = self.keep(backward=True)
                        found = reference.attend(workload, read, group, precision, keep=keep)
                    assert found.dq is not None
                    assert found.dk is not None
                    assert found.dv is not None
                    views.query_rows(grads["dq"], given, b, h).copy_(found.dq[0, 0])
                    g = given.kv_head(h)
                    views.key_rows(grads["dk"], given, b, g).add_(found.dk[0])
                    views.key_rows(grads["dv"], given, b, g).add_(found.dv[0])
        self.calls += 1
        return faults.outputs(Outputs(out=out, lse=lse, **grads))

    def keep(self, *, backward: bool) -> reference.KeepMask | None:
        dropout, faults = self.workload.dropout, self.backend.faults
        if dropout is None:
            return None
        seed = next(self.backend.entropy) if faults.unseeded else dropout.seed
        call = dropout.offset + (0 if faults.stuck else self.calls) + 500 * backward
        p = faults.rate if faults.rate is not None else dropout.p

        def kept(b: int, h: int) -> torch.Tensor:
            shape = (self.workload.seqlens_q[b], self.workload.seqlens_k[b])
            block = torch.arange(shape[0] * shape[1]).view(shape)
            word = generator.philox_words(block, call, b * 1000 + h, seed)[0]
            return word >= int(p * 2**32)

        return kept


def fresh_tensors(workload: Workload, stream: int = 0) -> Tensors:
    return inputs.make_inputs(workload, {}, stream=stream, device="cpu")
