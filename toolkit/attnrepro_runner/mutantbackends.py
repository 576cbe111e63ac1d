"""Wrong backends: real ones, each with one mistake that real kernels have made.

A mutant wraps an adapter and changes what it is told, what it reads or what it returns. Mistakes of
long rows stay away from short ones, as in the field: the probes' small shapes cannot see them.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import TYPE_CHECKING

import torch

from attnrepro_runner import inputs, views
from attnrepro_runner.backends import registry, torchcalls
from attnrepro_runner.backends.base import (
    Availability,
    Backend,
    KernelPattern,
    MemoryOrder,
    Outputs,
    Prepared,
    Tensors,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from attnrepro_runner.backends.torchcalls import Group
    from attnrepro_runner.semantics import Workload

    Options = Mapping[str, object]
    Prepare = Callable[[Backend, Workload, Options, Tensors], Prepared]

TILE = 64
LONG = 1024
"""Keys from which the mistakes of long rows are made."""


class Mutant(Backend):
    """A real backend with another way to prepare."""

    def __init__(self, inner: Backend, prepare: Prepare) -> None:
        """Wrap."""
        self.inner, self._prepare = inner, prepare
        self.name, self.empty_row_lse = inner.name, inner.empty_row_lse
        self.option_names = inner.option_names

    def availability(self) -> Availability:
        """As the real one."""
        return self.inner.availability()

    def check(self, workload: Workload, options: Options) -> None:
        """As the real one."""
        self.inner.check(workload, options)

    def consumed(self, workload: Workload, options: Options) -> frozenset[str]:
        """As the real one."""
        return self.inner.consumed(workload, options)

    def memory_order(self, workload: Workload, options: Options) -> MemoryOrder:
        """As the real one."""
        return self.inner.memory_order(workload, options)

    def patterns(self, workload: Workload, options: Options) -> KernelPattern:
        """As the real one."""
        return self.inner.patterns(workload, options)

    def prepare(self, workload: Workload, options: Options, tensors: Tensors) -> Prepared:
        """Make the mistake."""
        return self._prepare(self.inner, workload, options, tensors)


class Patched(Prepared):
    """A prepared call with something done before and after it."""

    def __init__(
        self,
        inner: Prepared,
        *,
        before: Callable[[], None] = lambda: None,
        after: Callable[[Outputs], Outputs] = lambda outputs: outputs,
    ) -> None:
        """Wrap."""
        self.inner, self.before, self.after = inner, before, after

    def step(self) -> Outputs:
        """Call between the two."""
        self.before()
        return self.after(self.inner.step())

    def backward_step(self) -> Outputs:
        """Call between the two."""
        self.before()
        return self.after(self.inner.backward_step())

    def append_step(self) -> None:
        """As the real one."""
        self.inner.append_step()


def told(change: Callable[[Workload], Workload]) -> Prepare:
    """Tell the backend other semantics."""

    def prepare(inner: Backend, workload: Workload, options: Options, tensors: Tensors) -> Prepared:
        return inner.prepare(change(workload), options, tensors)

    return prepare


def answered(change: Callable[[Workload, Outputs], Outputs]) -> Prepare:
    """Change what the backend returns."""

    def prepare(inner: Backend, workload: Workload, options: Options, tensors: Tensors) -> Prepared:
        return Patched(
            inner.prepare(workload, options, tensors),
            after=lambda outputs: change(workload, outputs),
        )

    return prepare


def tile_dropped(*, rows: Callable[[int], int], tile: Callable[[int], int]) -> Prepare:
    """Leave one tile of keys out for all rows from one on, in long rows.

    The rows are computed by the same backend over the remaining keys, whose bottom right is the
    same diagonal. For masks that end there, bshd, one length.

    Args:
        rows: seqlen_q to the first row that loses it.
        tile: seqlen_k to the first key of the tile.

    """

    def prepare(inner: Backend, workload: Workload, options: Options, tensors: Tensors) -> Prepared:
        whole = inner.prepare(workload, options, tensors)
        seqlen_q, seqlen_k = workload.seqlens_q[0], workload.seqlens_k[0]
        if seqlen_k < LONG:
            return whole
        first, start = rows(seqlen_q), tile(seqlen_k)
        partial = dataclasses.replace(
            workload,
            phase="forward",
            seqlens_q=(seqlen_q - first,) * workload.batch,
            seqlens_k=(seqlen_k - TILE,) * workload.batch,
        )
        less = Tensors(
            q=tensors.q[:, first:],
            k=_without(tensors.k, start),
            v=_without(tensors.v, start),
        )
        wrong = inner.prepare(partial, options, less)

        def refresh() -> None:
            less.k.copy_(_without(tensors.k, start))
            less.v.copy_(_without(tensors.v, start))

        def merge(outputs: Outputs) -> Outputs:
            out = outputs.out.clone()
            other = wrong.step()
            out[:, first:] = other.out
            lse = outputs.lse
            if lse is not None and other.lse is not None:
                lse = lse.clone()
                lse[:, :, first:] = other.lse
            return dataclasses.replace(outputs, out=out, lse=lse)

        return Patched(whole, before=refresh, after=merge)

    return prepare


def tf32_products(
    inner: Backend, workload: Workload, options: Options, tensors: Tensors
) -> Prepared:
    """Read float32 operands as tensor cores do in TF32: 10 bits of significand, ties away."""
    rounded = dataclasses.replace(
        tensors, q=tensors.q.clone(), k=tensors.k.clone(), v=tensors.v.clone()
    )

    def refresh() -> None:
        for name in ("q", "k", "v"):
            bits = getattr(tensors, name).contiguous().view(torch.int32)
            coarse = bits.add(1 << 12).bitwise_and_(-(1 << 13)).view(torch.float32)
            getattr(rounded, name).copy_(coarse)

    return Patched(inner.prepare(workload, options, rounded), before=refresh)


def k_heads_interleaved(
    inner: Backend, workload: Workload, options: Options, tensors: Tensors
) -> Prepared:
    """Read K head h % heads_kv and V head h // group: right V, wrong K. For bshd."""
    k_map = [h % workload.heads_kv for h in range(workload.heads_q)]
    v_map = [workload.kv_head(h) for h in range(workload.heads_q)]
    expanded = dataclasses.replace(tensors, k=tensors.k[:, :, k_map], v=tensors.v[:, :, v_map])

    def refresh() -> None:
        expanded.k.copy_(tensors.k[:, :, k_map])
        expanded.v.copy_(tensors.v[:, :, v_map])

    spread = dataclasses.replace(workload, heads_kv=workload.heads_q, strides=(None, None, None))
    return Patched(inner.prepare(spread, options, expanded), before=refresh)


def k_pages_swapped(
    inner: Backend, workload: Workload, options: Options, tensors: Tensors
) -> Prepared:
    """Read the first two K pages of the last sequence in each other's place; V right."""
    one, two = views.page_rows(workload)[-1][:2]
    order = list(range(workload.pool_pages))
    order[one], order[two] = two, one
    pool = tensors.k.clone()
    bound = inner.prepare(workload, options, dataclasses.replace(tensors, k=pool))

    def refresh() -> None:
        pool.copy_(tensors.k[order])

    return _AppendedFirst(bound, refresh)


def pages_of_another(
    inner: Backend, workload: Workload, options: Options, tensors: Tensors
) -> Prepared:
    """Read K and V of the first sequence's first page in the last sequence's place."""
    assert tensors.page_table is not None
    table = tensors.page_table.clone()
    table[-1, 0] = table[0, 0]
    return inner.prepare(workload, options, dataclasses.replace(tensors, page_table=table))


class _AppendedFirst(Patched):
    """The append goes to the derived tensors, so it is made after they are refreshed."""

    def __init__(self, inner: Prepared, refresh: Callable[[], None]) -> None:
        super().__init__(inner)
        self.refresh = refresh

    def append_step(self) -> None:
        self.refresh()
        self.inner.append_step()


def stale(inner: Backend, workload: Workload, options: Options, tensors: Tensors) -> Prepared:
    """Return the first call's output for ever."""
    kept: list[Outputs] = []

    def after(outputs: Outputs) -> Outputs:
        kept.append(dataclasses.replace(outputs, out=outputs.out.clone()))
        return kept[0]

    return Patched(inner.prepare(workload, options, tensors), after=after)


class SeededDropout(Backend):
    """torch's math attention with its own dropout, seeded for each call: honest, or not."""

    name = "sdpa.math"
    empty_row_lse = 0.0
    option_names: frozenset[str] = frozenset()

    def __init__(self, *, seeded: bool) -> None:
        """Choose honesty."""
        self.seeded = seeded
        self.inner = registry.load("sdpa.math")

    def availability(self) -> Availability:
        """As torch."""
        return self.inner.availability()

    def check(self, workload: Workload, options: Options) -> None:
        """As `sdpa.math` without dropout."""
        self.inner.check(dataclasses.replace(workload, dropout=None), options)

    def consumed(self, workload: Workload, options: Options) -> frozenset[str]:
        """As `sdpa.math`, and dropout."""
        return self.inner.consumed(workload, options) | {"dropout"}

    def memory_order(self, workload: Workload, options: Options) -> MemoryOrder:
        """All scores are in memory."""
        return self.inner.memory_order(workload, options)

    def patterns(self, workload: Workload, options: Options) -> KernelPattern:
        """As `sdpa.math`."""
        return self.inner.patterns(workload, options)

    def prepare(self, workload: Workload, options: Options, tensors: Tensors) -> Prepared:
        """Bind, with a counter of calls."""
        self.check(workload, options)
        dropout = workload.dropout
        calls = itertools.count(0 if dropout is None else dropout.offset)
        seed = 0 if dropout is None else dropout.seed

        def attend(
            q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, group: Group
        ) -> tuple[torch.Tensor, None]:
            if self.seeded:
                torch.manual_seed((seed << 20) + next(calls) & (1 << 63) - 1)
            mask = torchcalls.boolean_mask(workload, group, q.device)
            with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
                out = torch.nn.functional.scaled_dot_product_attention(
                    q,
                    k,
                    v,
                    attn_mask=mask,
                    dropout_p=0.0 if dropout is None else dropout.p,
                    scale=workload.scale_value,
                    enable_gqa=workload.heads_q != workload.heads_kv,
                )
            return out, None

        return torchcalls.TorchPrepared(workload, tensors, attend)


def refill(workload: Workload, tensors: Tensors, stream: int) -> None:
    """Draw fresh data into bound tensors."""
    packed = inputs.draw(workload, {}, stream=stream, device=tensors.q.device)
    inputs.rewrite(workload, tensors, packed)


def _without(keys: torch.Tensor, start: int) -> torch.Tensor:
    return torch.cat((keys[:, :start], keys[:, start + TILE :]), dim=1)
