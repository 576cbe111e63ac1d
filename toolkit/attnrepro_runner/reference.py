"""Textbook attention and its gradients, in tiles of query rows, at a chosen precision.

One algorithm serves twice: in float64 it is the reference, and in float32 with weights rounded to
the tested dtype it is the `low` computation, whose error says what rounding alone may cost. A tile
holds all keys of its rows, so that the softmax needs one pass; rows a tile are chosen by memory.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from attnrepro_runner import views

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from attnrepro_runner.backends.base import Tensors
    from attnrepro_runner.semantics import Workload

    KeepMask = Callable[[int, int], torch.Tensor]
    """(sequence, query head) to bool (seqlen_q, seqlen_k): which weights dropout kept."""

# Scores of a tile; about five tensors of this size are alive at once.
_TILE_CPU = 1 << 22
_TILE_GPU = 1 << 27


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
class GroupInputs:
    """What the query heads of one KV head of one sequence read."""

    q: torch.Tensor
    """(heads, seqlen_q, head_dim)."""
    k: torch.Tensor
    """(seqlen_k, head_dim)."""
    v: torch.Tensor
    grad_out: torch.Tensor | None = None
    logit_factor: float = 1.0
    """Descales of q and k."""
    value_factor: float = 1.0


@dataclass(frozen=True, kw_only=True)
class GroupResult:
    """Attention of one KV head's query heads; `rows` of each."""

    rows: torch.Tensor
    """int64: the query of each row of out, lse and dq."""
    out: torch.Tensor
    """(heads, rows, head_dim_v); 0 where the row attends nothing."""
    lse: torch.Tensor
    """(heads, rows); -inf where the row attends nothing."""
    dq: torch.Tensor | None
    dk: torch.Tensor | None
    """(seqlen_k, head_dim), summed over the heads."""
    dv: torch.Tensor | None
    terms: dict[str, torch.Tensor]
    """Largest term of the sums of lse and dq (heads, rows) and dk (1, seqlen_k): what a result that
    cancels keeps the rounding of. In float64 only."""


def from_tensors(workload: Workload, tensors: Tensors, b: int, heads: Sequence[int]) -> GroupInputs:
    """Read the inputs of query heads that share one KV head."""
    g = workload.kv_head(heads[0])
    stack = [views.query_rows(tensors.q, workload, b, h) for h in heads]
    grads = tensors.grad_out
    factors = {
        name: 1.0 if descale is None else float(descale[b, g])
        for name, descale in (
            ("q", tensors.q_descale),
            ("k", tensors.k_descale),
            ("v", tensors.v_descale),
        )
    }
    return GroupInputs(
        q=torch.stack(stack),
        k=views.logical_keys(tensors, "k", workload, b, g),
        v=views.logical_keys(tensors, "v", workload, b, g),
        grad_out=None
        if grads is None
        else torch.stack([views.query_rows(grads, workload, b, h) for h in heads]),
        logit_factor=factors["q"] * factors["k"],
        value_factor=factors["v"],
    )


def from_packed(
    workload: Workload, packed: Mapping[str, torch.Tensor], b: int, heads: Sequence[int]
) -> GroupInputs:
    """Read the inputs as drawn, before quantisation: (tokens, heads, width)."""
    g = workload.kv_head(heads[0])
    start_q, start_k = views.starts(workload.seqlens_q), views.starts(workload.seqlens_k)
    q = packed["q"][start_q[b] : start_q[b + 1]]
    keys = slice(start_k[b], start_k[b + 1])
    return GroupInputs(
        q=torch.stack([q[:, h] for h in heads]), k=packed["k"][keys, g], v=packed["v"][keys, g]
    )


def attend(
    workload: Workload,
    inputs: GroupInputs,
    b: int,
    heads: Sequence[int],
    precision: Precision,
    *,
    blocks: Sequence[range] | None = None,
    keep: KeepMask | None = None,
) -> GroupResult:
    """Compute attention, and its gradients where `inputs.grad_out` is given.

    Args:
        workload: the semantics.
        inputs: of these heads.
        b: sequence.
        heads: query heads of one KV head.
        precision: HIGH, or `low_precision`.
        blocks: rows to compute, as ascending ranges; None is all. Needs all for gradients.
        keep: the weights that dropout kept; None keeps all.

    """
    with exact_float32_products():
        return _Group(workload, inputs, b, heads, precision, keep).run(blocks)


@contextlib.contextmanager
def exact_float32_products() -> Iterator[None]:
    """Keep TF32 and bfloat16 out of float32 products, whatever the workload's flags are."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


class _Group:
    def __init__(
        self,
        workload: Workload,
        inputs: GroupInputs,
        b: int,
        heads: Sequence[int],
        precision: Precision,
        keep: KeepMask | None,
    ) -> None:
        compute = precision.compute
        self.workload, self.b, self.heads, self.precision = workload, b, tuple(heads), precision
        self.q, self.k, self.v = (_to(x, compute) for x in (inputs.q, inputs.k, inputs.v))
        self.grad_out = None if inputs.grad_out is None else _to(inputs.grad_out, compute)
        self.factor = workload.scale_value * inputs.logit_factor
        self.value_factor = inputs.value_factor
        self.device = self.q.device
        slopes = workload.alibi_slopes()
        self.slopes = (
            None
            if slopes is None
            else torch.tensor([slopes[h] for h in heads], dtype=compute, device=self.device)
        )
        self.keep = None if keep is None else torch.stack([keep(b, h) for h in heads])
        self.kept_factor = 1 / (1 - workload.dropout.p) if workload.dropout is not None else 1.0
        self.dk = self.dv = None
        if self.grad_out is not None:
            self.dk, self.dv = torch.zeros_like(self.k), torch.zeros_like(self.v)
        self.terms_dq: list[torch.Tensor] = []
        self.terms_dk = self.k.new_zeros((1, len(self.k)))

    def run(self, blocks: Sequence[range] | None) -> GroupResult:
        parts = [self.tile(rows) for whole in self.ranges(blocks) for rows in self.split(whole)]
        empty = self.q.new_zeros((len(self.heads), 0, self.v.shape[-1]))
        index = [torch.arange(rows.start, rows.stop) for rows, *_ in parts]
        rounded = self.precision.gradients
        return GroupResult(
            rows=torch.cat(index) if index else torch.arange(0),
            out=torch.cat([part[1] for part in parts], dim=1) if parts else empty,
            lse=torch.cat([part[2] for part in parts], dim=1) if parts else empty[:, :, 0],
            dq=None
            if self.grad_out is None
            else _round(torch.cat([part[3] for part in parts], dim=1), rounded)
            if parts
            else torch.zeros_like(self.q),
            dk=None if self.dk is None else _round(self.dk, rounded),
            dv=None if self.dv is None else _round(self.dv, rounded),
            terms=self.terms(index) if self.precision is HIGH and parts else {},
        )

    def terms(self, index: list[torch.Tensor]) -> dict[str, torch.Tensor]:
        q = self.q[:, torch.cat(index).to(self.device)]
        terms = {"lse": self.factor * q.norm(dim=-1) * _greatest(self.k.norm(dim=-1))}
        if self.grad_out is not None:
            terms["dq"] = self.factor * torch.cat(self.terms_dq, dim=1) * _greatest(self.k)
            terms["dk"] = self.factor * self.terms_dk * _greatest(self.q)
        return terms

    def ranges(self, blocks: Sequence[range] | None) -> Sequence[range]:
        if blocks is None:
            return [range(self.workload.seqlens_q[self.b])]
        if self.grad_out is not None:
            msg = "gradients of keys need every row"
            raise ValueError(msg)
        return blocks

    def split(self, rows: range) -> Iterator[range]:
        """Cut rows into tiles whose scores fit the budget."""
        budget = _TILE_GPU if self.device.type == "cuda" else _TILE_CPU
        start = rows.start
        while start < rows.stop:
            size = rows.stop - start
            while size > 1:
                keys = self.keys_of(range(start, start + size))
                if len(self.heads) * size * len(keys) <= budget:
                    break
                size = -(-size // 2)
            yield range(start, start + size)
            start += size

    def keys_of(self, rows: range) -> range:
        """Keys that some row of a tile attends."""
        attending = self.workload.attending_rows(self.b)
        first, last = max(rows.start, attending.start), min(rows.stop, attending.stop) - 1
        if first > last:
            return range(0)
        return range(
            self.workload.key_range(self.b, first)[0], self.workload.key_range(self.b, last)[1]
        )

    def tile(self, rows: range) -> tuple[range, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return (rows, out, lse, dq) of a tile and add to dk and dv."""
        keys = self.keys_of(rows)
        heads, width_v = len(self.heads), self.v.shape[-1]
        q = self.q[:, rows.start : rows.stop]
        k, v = self.k[keys.start : keys.stop], self.v[keys.start : keys.stop]
        if not keys:
            out = q.new_zeros((heads, len(rows), width_v))
            lse = q.new_full((heads, len(rows)), -torch.inf)
            self.terms_dq.append(torch.zeros_like(lse))
            return rows, out, lse, torch.zeros_like(q)
        scores = (q.reshape(-1, q.shape[-1]) @ k.T).view(heads, len(rows), len(keys))
        scores *= self.factor
        cap = self.workload.softcap
        ratio = None
        if cap is not None:
            ratio = scores.div_(cap).tanh_()
            scores = ratio * cap
        if self.slopes is not None:
            scores -= self.slopes[:, None, None] * self.distance(rows, keys)
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
        out = (used.view(-1, len(keys)) @ v).view(heads, len(rows), width_v)
        out = _round(out.div_(divisor).mul_(self.value_factor), self.precision.out)
        if self.grad_out is None:
            return rows, out, lse, q
        grad_out = self.grad_out[:, rows.start : rows.stop]
        # As every fused backward: weights come anew from the logits and the LSE.
        shift = lse.masked_fill(lse == -torch.inf, 0.0)[:, :, None]
        weights = self.exponential(scores.sub_(shift))
        dq = self.backward(q, k, v, keys, weights, kept, ratio, out, grad_out)
        return rows, out, lse, dq

    def backward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        keys: range,
        weights: torch.Tensor,
        kept: torch.Tensor | None,
        ratio: torch.Tensor | None,
        out: torch.Tensor,
        grad_out: torch.Tensor,
    ) -> torch.Tensor:
        """Return dq of a tile; add to dk and dv. `weights` are normalised, and are overwritten."""
        assert self.dk is not None
        assert self.dv is not None
        flat = grad_out.reshape(-1, grad_out.shape[-1])
        used = _round(weights if kept is None else weights * kept, self.precision.weights)
        self.dv[keys.start : keys.stop] += used.view(-1, len(keys)).T @ flat
        grad = (flat @ v.T).view(weights.shape)
        if kept is not None:
            grad *= kept
        if self.precision is HIGH:
            terms = (grad * weights).abs_()
            self.terms_dq.append(terms.amax(-1))
            part = self.terms_dk[:, keys.start : keys.stop]
            torch.maximum(part, terms.amax((0, 1)), out=part)
        grad -= (grad_out * out).sum(-1, keepdim=True)
        grad *= weights
        if ratio is not None:
            grad *= 1 - ratio.square()
        grad = _round(grad, self.precision.weights).view(-1, len(keys))
        self.dk[keys.start : keys.stop] += (grad.T @ q.reshape(-1, q.shape[-1])).mul_(self.factor)
        return (grad @ k).mul_(self.factor).view(q.shape)

    def excluded(self, rows: range, keys: range) -> torch.Tensor | None:
        """Where a tile's mask excludes; None where it excludes nothing."""
        low, high = self.workload.diagonals(self.b)
        if (low is None or keys.start - (rows.stop - 1) >= low) and (
            high is None or keys.stop - 1 - rows.start <= high
        ):
            return None
        distance = self.arange(keys)[None, :] - self.arange(rows)[:, None]
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
        position = self.arange(rows) + self.workload.offset(self.b)
        return (position[:, None] - self.arange(keys)[None, :]).abs().to(self.q.dtype)

    def kept(self, rows: range, keys: range) -> torch.Tensor | None:
        if self.keep is None:
            return None
        part = self.keep[:, rows.start : rows.stop, keys.start : keys.stop]
        return part.to(self.q.dtype) * self.kept_factor

    def arange(self, values: range) -> torch.Tensor:
        return torch.arange(values.start, values.stop, device=self.device)


def _greatest(x: torch.Tensor) -> torch.Tensor:
    return x.abs().amax() if x.numel() else x.new_zeros(())


def _to(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    # float8 converts by way of float32, exactly.
    return (x.to(torch.float32) if x.dtype.itemsize == 1 else x).to(dtype)


def _round(x: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    return x if dtype is None or dtype == x.dtype else x.to(dtype).to(x.dtype)
