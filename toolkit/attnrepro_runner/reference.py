"""Textbook attention and its gradients, in tiles of query rows, at a chosen precision.

One algorithm serves twice: in float64 it is the reference, and in float32 with weights rounded to
the tested dtype it is the `low` computation, whose error says what rounding alone may cost. A tile
holds all keys of its rows in every group of a batch, so that the softmax needs one pass; rows a
tile are chosen by memory.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from attnrepro_runner import views
from attnrepro_runner.groups import query_pairs, shape_of
from attnrepro_runner.terms import Terms

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from attnrepro_runner.groups import Group, GroupInputs
    from attnrepro_runner.semantics import Workload

    KeepMask = Callable[[int, int], torch.Tensor]
    """(sequence, query head) to bool (seqlen_q, seqlen_k): which weights dropout kept."""

# Scores of a tile. Six tensors of this size are alive at once in a backward; the reference of a
# float32 workload has up to 17 of half the size.
_TILE_CPU = 1 << 22
_TILE_GPU = 1 << 27
# Blocks of rows that do not adjoin share a tile while it has at most so many times their scores: a
# GPU's launches cost more than scores that no row needs (a causal mask's are half of them), on a
# CPU nothing does.
_WASTE = {"cpu": 1.0, "cuda": 2.5}


@dataclass(frozen=True, kw_only=True)
class Precision:
    """How numbers are held."""

    compute: torch.dtype
    weights: torch.dtype | None
    """Rounding of the softmax weights, and of the logits' gradients, before their products."""
    out: torch.dtype | None
    """Rounding of the output; None is none."""
    gradients: torch.dtype | None
    fast_exponential: bool
    """Keep 18 bits of each exponential: fused kernels compute few more (torch's CPU kernels promise
    20 units in the last place of float32, ex2.approx a relative 2^-22)."""


HIGH = Precision(
    compute=torch.float64, weights=None, out=None, gradients=None, fast_exponential=False
)


def low_precision(workload: Workload) -> Precision:
    """Return the tested dtype's own textbook computation: float32 sums, rounded once."""
    dtype = views.DTYPES[workload.dtype]
    return Precision(
        compute=torch.float32,
        weights=None if dtype is torch.float32 else dtype,
        out=views.DTYPES[workload.dtype_out],
        gradients=dtype,
        fast_exponential=True,
    )


@dataclass(frozen=True, kw_only=True)
class GroupResult:
    """Attention of a batch of groups; `rows` of each head."""

    rows: torch.Tensor
    """int64 (rows), on the CPU: the query of each row of out, lse and dq."""
    out: torch.Tensor
    """(groups, heads, rows, head_dim_v); 0 where the row attends nothing."""
    lse: torch.Tensor
    """(groups, heads, rows); -inf where the row attends nothing."""
    dq: torch.Tensor | None
    dk: torch.Tensor | None
    """(groups, seqlen_k, head_dim), summed over a group's heads."""
    dv: torch.Tensor | None
    terms: dict[str, torch.Tensor]
    """Magnitude of what float32 sums add, of lse, dq and out (groups * heads, rows), of dk and dv
    (groups, seqlen_k); out and dv are of float32 workloads alone. See terms.py. In float64 only."""


def attend(
    workload: Workload,
    inputs: GroupInputs,
    groups: Sequence[Group],
    precision: Precision,
    *,
    blocks: Sequence[range] | None = None,
    keep: KeepMask | None = None,
) -> GroupResult:
    """Compute attention, and its gradients where `inputs.grad_out` is given.

    Args:
        workload: the semantics.
        inputs: of these groups.
        groups: of equal lengths and as many heads.
        precision: HIGH, or `low_precision`.
        blocks: rows to compute, as ascending ranges; None is all. Needs all for gradients.
        keep: the weights that dropout kept; None keeps all.

    Raises:
        ValueError: the groups are not of one shape, or gradients are asked for of some rows.

    """
    if len({shape_of(workload, group) for group in groups}) != 1:
        msg = "a batch holds groups of equal lengths and as many heads"
        raise ValueError(msg)
    with exact_float32_products():
        return _Batch(workload, inputs, groups, precision, keep, blocks).run()


@contextlib.contextmanager
def exact_float32_products() -> Iterator[None]:
    """Keep TF32 and bfloat16 out of float32 products, whatever the workload's flags are."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


class _Batch:
    def __init__(
        self,
        workload: Workload,
        inputs: GroupInputs,
        groups: Sequence[Group],
        precision: Precision,
        keep: KeepMask | None,
        blocks: Sequence[range] | None,
    ) -> None:
        compute = precision.compute
        self.workload, self.precision = workload, precision
        # A mask follows from lengths, and these are everybody's.
        self.b, (self.groups, self.heads) = groups[0][0], inputs.q.shape[:2]
        self.device = inputs.q.device
        self.blocks = [range(workload.seqlens_q[self.b])] if blocks is None else blocks
        self.rows = _rows(self.blocks)
        self.queries = self.rows.to(self.device)
        given = inputs.q
        if blocks is not None:
            if inputs.grad_out is not None:
                msg = "gradients of keys need every row"
                raise ValueError(msg)
            given = given[:, :, self.queries]
        self.q, self.k, self.v = (_to(x, compute) for x in (given, inputs.k, inputs.v))
        self.grad_out = None if inputs.grad_out is None else _to(inputs.grad_out, compute)
        self.factor: float | torch.Tensor = workload.scale_value
        if inputs.logit_factor is not None:
            self.factor = (inputs.logit_factor * self.factor).to(compute)[:, None, None]
        self.value_factor = (
            None if inputs.value_factor is None else inputs.value_factor.to(compute)[:, None, None]
        )
        pairs = query_pairs(groups)
        slopes = workload.alibi_slopes()
        self.slopes = (
            None
            if slopes is None
            else torch.tensor(
                [slopes[h] for _, h in pairs], dtype=compute, device=self.device
            ).view(self.groups, self.heads, 1, 1)
        )
        self.keep = (
            None
            if keep is None
            else torch.stack([keep(b, h)[self.queries] for b, h in pairs]).view(
                *self.q.shape[:3], self.k.shape[1]
            )
        )
        self.kept_factor = 1 / (1 - workload.dropout.p) if workload.dropout is not None else 1.0
        self.dk = self.dv = None
        if self.grad_out is not None:
            self.dk, self.dv = torch.zeros_like(self.k), torch.zeros_like(self.v)
        self.terms = (
            Terms(workload, self.q, self.k, self.v, self.factor) if precision is HIGH else None
        )

    def run(self) -> GroupResult:
        parts = [self.tile(rows) for rows in self.split()]
        empty = self.q.new_zeros((self.groups, self.heads, 0, self.v.shape[-1]))
        rounded = self.precision.gradients
        dq = None
        if self.grad_out is not None:
            dq = (
                torch.cat([part[2] for part in parts], dim=2) if parts else torch.zeros_like(self.q)
            )
        return GroupResult(
            rows=self.rows,
            out=torch.cat([part[0] for part in parts], dim=2) if parts else empty,
            lse=torch.cat([part[1] for part in parts], dim=2) if parts else empty[..., 0],
            dq=None if dq is None else _round(dq, rounded),
            dk=None if self.dk is None else _round(self.dk, rounded),
            dv=None if self.dv is None else _round(self.dv, rounded),
            terms=self.terms.result(dq, self.dk, self.dv)
            if self.terms is not None and parts
            else {},
        )

    def split(self) -> Iterator[range]:
        """Cut the places in `rows` into tiles whose scores fit the budget."""
        budget = _TILE_GPU if self.device.type == "cuda" else _TILE_CPU
        if self.terms is not None and self.terms.counts_logits:
            budget //= 2
        tile, needed, stop = range(0), 0, 0
        for block in self.blocks:
            start, stop = stop, stop + len(block)
            alone = self.scores(range(start, stop))
            if tile and self.scores(range(tile.start, stop)) <= min(
                budget, _WASTE[self.device.type] * (needed + alone)
            ):
                tile, needed = range(tile.start, stop), needed + alone
                continue
            yield from self.halves(tile, budget)
            tile, needed = range(start, stop), alone
        yield from self.halves(tile, budget)

    def halves(self, rows: range, budget: int) -> Iterator[range]:
        """Cut a tile that does not fit."""
        start = rows.start
        while start < rows.stop:
            size = rows.stop - start
            while size > 1 and self.scores(range(start, start + size)) > budget:
                size = -(-size // 2)
            yield range(start, start + size)
            start += size

    def scores(self, rows: range) -> int:
        """Count what a tile computes."""
        return self.groups * self.heads * len(rows) * len(self.keys_of(rows)) if rows else 0

    def ends(self, rows: range) -> tuple[int, int]:
        """Return the first and the last query of a tile."""
        return int(self.rows[rows.start]), int(self.rows[rows.stop - 1])

    def keys_of(self, rows: range) -> range:
        """Keys that some row of a tile attends."""
        attending = self.workload.attending_rows(self.b)
        first, last = self.ends(rows)
        first, last = max(first, attending.start), min(last, attending.stop - 1)
        if first > last:
            return range(0)
        return range(
            self.workload.key_range(self.b, first)[0], self.workload.key_range(self.b, last)[1]
        )

    def tile(self, rows: range) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return (out, lse, dq) of a tile, places in `rows`, and add to dk and dv."""
        keys = self.keys_of(rows)
        shape = (self.groups, self.heads, len(rows))
        q = self.q[:, :, rows.start : rows.stop]
        if not keys:
            out = q.new_zeros((*shape, self.v.shape[-1]))
            lse = q.new_full(shape, -torch.inf)
            if self.terms is not None:
                self.terms.skip(len(rows))
            return out, lse, torch.zeros_like(q)
        # Products take the rows of all heads of a group at once.
        q = q.flatten(1, 2)
        k, v = self.k[:, keys.start : keys.stop], self.v[:, keys.start : keys.stop]
        scores = (q @ k.mT).mul_(self.factor).view(*shape, len(keys))
        cap = self.workload.softcap
        ratio = None
        if cap is not None:
            ratio = scores.div_(cap).tanh_()
            scores = ratio * cap
        if self.slopes is not None:
            scores -= self.slopes * self.distance(rows, keys)
        excluded = self.excluded(rows, keys)
        if excluded is not None:
            scores.masked_fill_(excluded, -torch.inf)
        top = scores.amax(-1, keepdim=True)
        # A row that attends nothing: any finite shift gives weights 0.
        top.masked_fill_(top == -torch.inf, 0.0)
        weights = self.exponential(scores - top)
        total = weights.sum(-1, keepdim=True)
        lse = (top + total.log()).squeeze(-1)
        divisor = total.masked_fill(total == 0, 1.0)
        kept = self.kept(rows, keys)
        used = weights if kept is None else weights * kept
        used = _round(used, self.precision.weights)
        out = (used.flatten(1, 2) @ v).div_(divisor.flatten(1, 2))
        opened = None
        if self.terms is not None and self.terms.counts_logits:
            opened = self.terms.opened(rows, keys, scores, ratio, weights / divisor)
            self.terms.add_forward(keys, opened, used / divisor, out.view(*shape, -1))
        if self.value_factor is not None:
            out *= self.value_factor
        out = _round(out, self.precision.out)
        if self.grad_out is None:
            return out.view(*shape, -1), lse, q
        grad_out = self.grad_out[:, :, rows.start : rows.stop].flatten(1, 2)
        # As every fused backward: weights come anew from the logits and the LSE.
        shift = lse.masked_fill(lse == -torch.inf, 0.0)[..., None]
        weights = self.exponential(scores.sub_(shift))
        dq = self.backward(q, k, v, rows, keys, weights, kept, ratio, out, grad_out, opened)
        return out.view(*shape, -1), lse, dq.view(*shape, -1)

    def backward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        rows: range,
        keys: range,
        weights: torch.Tensor,
        kept: torch.Tensor | None,
        ratio: torch.Tensor | None,
        out: torch.Tensor,
        grad_out: torch.Tensor,
        opened: torch.Tensor | None,
    ) -> torch.Tensor:
        """Return dq of a tile; add to dk and dv.

        Of q, out and grad_out a group's heads follow each other: (groups, heads * rows, width).
        `weights` (groups, heads, rows, keys) are normalised.
        """
        assert self.dk is not None
        assert self.dv is not None
        used = _round(weights if kept is None else weights * kept, self.precision.weights)
        self.dv[:, keys.start : keys.stop] += used.flatten(1, 2).mT @ grad_out
        grad = (grad_out @ v.mT).view(weights.shape)
        if kept is not None:
            grad *= kept
        grad -= (grad_out * out).sum(-1).view(*weights.shape[:3], 1)
        grad *= weights
        if self.terms is not None:
            each = (x.view(*weights.shape[:3], -1) for x in (out, grad_out))
            self.terms.add_backward(rows, keys, opened, weights, used, grad, ratio, *each)
        if ratio is not None:
            grad *= 1 - ratio.square()
        grad = _round(grad, self.precision.weights).flatten(1, 2)
        self.dk[:, keys.start : keys.stop] += (grad.mT @ q).mul_(self.factor)
        return (grad @ k).mul_(self.factor)

    def excluded(self, rows: range, keys: range) -> torch.Tensor | None:
        """Where a tile's mask excludes; None where it excludes nothing."""
        low, high = self.workload.diagonals(self.b)
        first, last = self.ends(rows)
        if (low is None or keys.start - last >= low) and (
            high is None or keys.stop - 1 - first <= high
        ):
            return None
        distance = self.arange(keys)[None, :] - self.queries[rows.start : rows.stop, None]
        result = torch.zeros(distance.shape, dtype=torch.bool, device=self.device)
        if low is not None:
            result |= distance < low
        if high is not None:
            result |= distance > high
        return result

    def exponential(self, x: torch.Tensor) -> torch.Tensor:
        x.exp_()
        if self.precision.fast_exponential:
            # Round the last six bits of the significand away.
            x.view(torch.int32).add_(32).bitwise_and_(-64)
        return x

    def distance(self, rows: range, keys: range) -> torch.Tensor:
        position = self.queries[rows.start : rows.stop] + self.workload.offset(self.b)
        return (position[:, None] - self.arange(keys)[None, :]).abs().to(self.q.dtype)

    def kept(self, rows: range, keys: range) -> torch.Tensor | None:
        if self.keep is None:
            return None
        part = self.keep[:, :, rows.start : rows.stop, keys.start : keys.stop]
        return part.to(self.q.dtype) * self.kept_factor

    def arange(self, values: range) -> torch.Tensor:
        return torch.arange(values.start, values.stop, device=self.device)


def _rows(blocks: Sequence[range]) -> torch.Tensor:
    """Return the queries that are computed, on the CPU: int64 (rows), ascending."""
    each = [torch.arange(rows.start, rows.stop) for rows in blocks]
    return torch.cat(each) if each else torch.arange(0)


def _to(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    # float8 converts by way of float32, exactly.
    return (x.to(torch.float32) if x.dtype.itemsize == 1 else x).to(dtype)


def _round(x: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    return x if dtype is None or dtype == x.dtype else x.to(dtype).to(x.dtype)
