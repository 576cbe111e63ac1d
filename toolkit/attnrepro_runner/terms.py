"""What a kernel's float32 sums may leave of their terms, besides what rounding to the dtype costs.

A result that is small because large terms cancel keeps the rounding of those terms: with one key dQ
is 0, and what a kernel leaves of it is a unit in the last place of |dO||V||K|. This is of every
dtype; the rest is of float32 alone, since a narrower dtype rounds weights and results by far more.

A weight is off in proportion by what its float32 logit is off: the rounding of the running sum of
its head_dim products, of the logit itself, and of the LSE, which has its logits' errors. The `low`
computation shows little of it, as its LSE comes from the very logits that its backward takes, where
a fused backward forms them anew. By the low computation alone torch 2.13's CPU kernels, which are
honest, were up to 8 times (sdpa.math, out) and 10,000 times (sdpa.flash, dv) over the limit at
logits of tens to hundreds. Errors of different weights are independent, so that a sum has the root
of the sum of their squares; what all terms of a row share (its LSE, and the mean of dO.V that is
subtracted from each) counts in full. And a running sum of n terms is off by RUNNING_SUM sqrt(n) of
its roundings, where torch's products add in blocks.

Everything is in the unit of blockrule.TERM_ULPS float32 ulps, 2 to 4 roundings (2^-24) of a number.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

import torch

from attnrepro_runner.blockrule import RUNNING_SUM, TERM_ULPS

if TYPE_CHECKING:
    from attnrepro_runner.semantics import Workload

_SEEN: Final = 0.25
"""Part of 1 + RUNNING_SUM sqrt(head_dim) roundings of a logit that one unit allows. With it torch's
honest CPU kernels stay below 0.75 of the limit in outputs and gradients, and 0.9 in the LSE."""
_FORWARD: Final = 0.3
"""Part of that in a forward, which forms a logit once: the low computation shows the rest."""
_ALIKE: Final = 2
"""A sum of like terms, which grows with each, is off by more than one of terms that cancel."""
_UNITS: Final = 1.5 * TERM_ULPS
"""Roundings (2^-24) that TERM_ULPS units in the last place are, between 1 and 2 each."""


def logit_roundings(workload: Workload) -> float:
    """Return what a float32 logit may be off, in units of |q||k| scale; 0 in other dtypes."""
    if workload.dtype != "float32":
        return 0.0
    return _SEEN * (1 + RUNNING_SUM * math.sqrt(workload.head_dim))


class Terms:
    """Collects them, one tile of query rows after the other, in float64."""

    def __init__(
        self,
        workload: Workload,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        factor: float | torch.Tensor,
    ) -> None:
        """Begin.

        Args:
            workload: the semantics.
            q: (groups, heads, rows, head_dim), of the rows that tiles are made of.
            k: (groups, seqlen_k, head_dim).
            v: (groups, seqlen_k, head_dim_v).
            factor: of the logits, a number or (groups, 1, 1).

        """
        self.q, self.k, self.factor = q, k, factor
        self.cap = workload.softcap
        self.k_norms, self.v_largest = k.norm(dim=-1), v.abs().amax(-1)
        self.v_norms = v.norm(dim=-1)
        self.counts_logits = workload.dtype == "float32"
        """Whether what a logit leaves of its weight counts: `opened` and `add_forward`."""
        self.of_logit = logit_roundings(workload)
        self.has_bias = workload.alibi is not None
        self.over_keys, self.over_rows = (
            RUNNING_SUM * math.sqrt(n) / _UNITS for n in (k.shape[1], q.shape[1] * q.shape[2])
        )
        # Of tiles, in order: (groups, heads, rows). What a row's LSE is off is in proportion.
        self._lse: list[torch.Tensor] = []
        self._out: list[torch.Tensor] = []
        self._dq: list[torch.Tensor] = []
        # Of each key: in float32 sums of squares, else maxima.
        self._dk, self._dv = k.new_zeros(k.shape[:2]), k.new_zeros(k.shape[:2])

    def skip(self, count: int) -> None:
        """Add rows that attend nothing."""
        nothing = self.q.new_zeros((*self.q.shape[:2], count))
        self._lse.append(nothing)
        self._out.append(nothing)
        self._dq.append(nothing)

    def opened(
        self,
        rows: range,
        keys: range,
        scores: torch.Tensor,
        ratio: torch.Tensor | None,
        weights: torch.Tensor,
    ) -> torch.Tensor:
        """Return the relative error of each weight of a tile.

        In units, (groups, heads, rows, keys). What all weights of a row share is kept as well.

        Args:
            rows: of it.
            keys: of it.
            scores: its logits (groups, heads, rows, keys), -inf where masked.
            ratio: tanh of the logits over their cap; None without one.
            weights: normalised, without dropout.

        """
        size = self._products(rows, keys) * self.of_logit
        if ratio is not None:
            size *= 1 - ratio.square()
            if self.cap is not None and self.has_bias:  # its logit and bias may cancel
                size += ratio.abs() * (_SEEN * self.cap)
        size += scores.abs().masked_fill_(scores == -torch.inf, 0.0).mul_(_SEEN)
        # The LSE has its logits' errors, and that of the sum of the weights.
        shared = (weights * size).sum(-1) + _ALIKE * self.over_keys
        self._lse.append(shared)
        return size.add_(shared[..., None])

    def add_forward(
        self, keys: range, opened: torch.Tensor, weights: torch.Tensor, out: torch.Tensor
    ) -> None:
        """Add the output's terms of a tile.

        Args:
            keys: of it.
            opened: of `opened`.
            weights: (groups, heads, rows, keys), normalised, with dropout.
            out: (groups, heads, rows, head_dim_v).

        """
        largest = weights * self.v_largest[:, None, None, keys.start : keys.stop]
        found = _root(largest * (_FORWARD * opened + self.over_keys), -1)
        self._out.append(found + _ALIKE * self.over_keys * out.abs().amax(-1))

    def add_backward(
        self,
        rows: range,
        keys: range,
        opened: torch.Tensor | None,
        weights: torch.Tensor,
        used: torch.Tensor,
        grad: torch.Tensor,
        ratio: torch.Tensor | None,
        out: torch.Tensor,
        grad_out: torch.Tensor,
    ) -> None:
        """Add the gradients' terms of a tile.

        Args:
            rows: of it.
            keys: of it.
            opened: of `opened`; None where it does not count.
            weights: (groups, heads, rows, keys), normalised.
            used: the same with dropout.
            grad: the gradient of the capped logits, of the same shape.
            ratio: as of `opened`.
            out: (groups, heads, rows, head_dim_v).
            grad_out: of the same shape.

        """
        # dO.v and its row's mean cancel in dS, each with the rounding of its own products.
        norms = grad_out.norm(dim=-1, keepdim=True)
        terms = norms * self.v_norms[:, None, None, keys.start : keys.stop] * used
        if opened is None:
            self._dq.append(terms.amax(-1))
            part = self._dk[:, keys.start : keys.stop]
            torch.maximum(part, terms.amax((1, 2)), out=part)
            return
        size = grad.abs()
        off = size * opened
        # The row's mean is dO.O, and off as O is.
        mean = _ALIKE * self.over_keys * norms * out.norm(dim=-1, keepdim=True)
        shared = (mean + _root(off, -1)[..., None]) * weights
        terms += off
        if ratio is not None:
            # 1 - tanh^2, by which all is multiplied, is off by its logit's error and its rounding.
            assert self.cap is not None
            inner = self._products(rows, keys).mul_(2 * self.of_logit / self.cap)
            slope = 1 - ratio.square()
            terms += inner.mul_(size).mul_(ratio.abs())
            terms.mul_(slope).add_(size)
            shared *= slope
            size *= slope
        self._dq.append(_root(terms + self.over_keys * size, -1) + shared.sum(-1))
        terms += shared.add_(size, alpha=self.over_rows)
        self._dk[:, keys.start : keys.stop] += terms.square_().sum((1, 2))
        largest = used * grad_out.abs().amax(-1, keepdim=True) * (opened + self.over_rows)
        self._dv[:, keys.start : keys.stop] += largest.square_().sum((1, 2))

    def result(
        self,
        dq: torch.Tensor | None,
        dk: torch.Tensor | None,
        dv: torch.Tensor | None,
    ) -> dict[str, torch.Tensor]:
        """Return what GroupResult holds, once tiles of all rows were added, in their order."""
        found = {"lse": self.q.norm(dim=-1) * _greatest(self.k_norms) * self.factor}
        if self.cap is not None:
            found["lse"].clamp_max_(self.cap)
        if self.counts_logits:
            found["out"] = torch.cat(self._out, dim=2)
        if dq is not None and dk is not None and dv is not None:
            of_keys = self._dk.sqrt() if self.counts_logits else self._dk
            found["dq"] = torch.cat(self._dq, dim=2) * _greatest(self.k) * self.factor
            found["dk"] = of_keys[:, None] * _greatest(self.q) * self.factor
            if self.counts_logits:
                of_dq = torch.cat(self._lse, dim=2) + _ALIKE * self.over_keys
                found["dq"] += of_dq * dq.abs().amax(-1)
                of_dk, of_dv = (_ALIKE * self.over_rows * x.abs().amax(-1) for x in (dk, dv))
                found["dk"] += of_dk[:, None]
                found["dv"] = (self._dv.sqrt() + of_dv)[:, None]
        # Heads, or the one KV head, follow each other.
        return {name: x.flatten(0, 1) for name, x in found.items()}

    def _products(self, rows: range, keys: range) -> torch.Tensor:
        """Bound each logit before its cap: (groups, heads, rows, keys)."""
        q = (self.q[:, :, rows.start : rows.stop].norm(dim=-1) * self.factor)[..., None]
        bound: torch.Tensor = q * self.k_norms[:, None, None, keys.start : keys.stop]
        return bound


def _root(x: torch.Tensor, dim: int) -> torch.Tensor:
    """Return the root of the sum of squares."""
    found: torch.Tensor = torch.linalg.vector_norm(x, dim=dim)
    return found


def _greatest(x: torch.Tensor) -> torch.Tensor:
    """Return the largest magnitude of each group, (groups, 1, 1)."""
    flat = x.flatten(1)
    if not flat.shape[1]:
        return x.new_zeros((len(x), 1, 1))
    return flat.abs().amax(1)[:, None, None]
