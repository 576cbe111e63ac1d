"""The largest terms of the sums that attention forms: what a float32 kernel may leave of each.

A result that is small because large terms cancel keeps the rounding of those terms: with one key dQ
is 0, and what a kernel leaves of it is a unit in the last place of |dO||V||K|.

And a weight is off in proportion by what its float32 logit is off: the logit's own rounding and
that of the running sum of its head_dim products. In bfloat16 and float16 that is nothing beside
the weight's rounding; in float32 it is most of the error where logits reach tens. The `low`
computation does not show all of it, as its LSE comes from the very logits that its backward takes,
where a fused backward forms them anew and subtracts the forward's LSE: by the low computation alone
torch 2.13's CPU kernels, which are honest, were up to 8 times (sdpa.math, out) and 10,000 times
(sdpa.flash, dv) over the limit at logits of tens to hundreds.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from attnrepro_runner.blockrule import RUNNING_SUM

if TYPE_CHECKING:
    from attnrepro_runner.semantics import Workload


class Terms:
    """Collects them, one tile of query rows after the other, in float64."""

    def __init__(
        self, workload: Workload, q: torch.Tensor, k: torch.Tensor, factor: float | torch.Tensor
    ) -> None:
        """Begin.

        Args:
            workload: the semantics.
            q: (groups, heads, seqlen_q, head_dim).
            k: (groups, seqlen_k, head_dim).
            factor: of the logits, a number or (groups, 1, 1).

        """
        self.workload, self.factor = workload, factor
        self.q, self.k = q, k
        self.k_norm = _greatest(k.norm(dim=-1))
        # How many roundings of a logit of that size, and so of each weight; see the module.
        self.roundings = (
            1 + RUNNING_SUM * math.sqrt(workload.head_dim) if workload.dtype == "float32" else None
        )
        self._out: list[torch.Tensor] = []
        self._dq: list[torch.Tensor] = []
        self._dk, self._dv = k.new_zeros(k.shape[:2]), k.new_zeros(k.shape[:2])

    def logits(self, q: torch.Tensor) -> torch.Tensor:
        """Bound the magnitude of the logits of rows: (…, rows, head_dim) to (…, rows)."""
        bound: torch.Tensor = q.norm(dim=-1) * self.k_norm * self.factor
        cap = self.workload.softcap
        return bound if cap is None else bound.clamp_max_(cap)

    def skip(self, count: int) -> None:
        """Add rows that attend nothing."""
        nothing = self.q.new_zeros((*self.q.shape[:2], count))
        self._out.append(nothing)
        self._dq.append(nothing)

    def add_forward(
        self, rows: range, weights: torch.Tensor, divisor: torch.Tensor, v: torch.Tensor
    ) -> None:
        """Add the output's terms of a tile.

        Args:
            rows: of it.
            weights: (groups, heads, rows, keys), with dropout, not normalised.
            divisor: (groups, heads, rows, 1), which normalises them.
            v: (groups, keys, head_dim_v).

        """
        if self.roundings is not None:
            largest = (weights * v.abs().amax(-1)[:, None, None]).amax(-1)
            self._out.append(self._open(rows) * largest / divisor.squeeze(-1))

    def add_backward(
        self,
        rows: range,
        keys: range,
        weights: torch.Tensor,
        v: torch.Tensor,
        grad_logits: torch.Tensor,
        grad_out: torch.Tensor,
    ) -> None:
        """Add the gradients' terms of a tile.

        Args:
            rows: of it.
            keys: of it.
            weights: (groups, heads, rows, keys), normalised, with dropout.
            v: (groups, keys, head_dim_v).
            grad_logits: dS, of the weights' shape.
            grad_out: (groups, heads, rows, head_dim_v).

        """
        # dO.v and its row's mean cancel in dS, each with the rounding of its own products.
        terms = grad_out.norm(dim=-1, keepdim=True) * v.norm(dim=-1)[:, None, None] * weights
        if self.roundings is not None:
            open_ = self._open(rows)[..., None]
            terms += grad_logits.abs() * open_
            _raise(self._dv, keys, weights * grad_out.abs().amax(-1, keepdim=True) * open_)
        self._dq.append(terms.amax(-1))
        _raise(self._dk, keys, terms)

    def result(self, rows: torch.Tensor, *, backward: bool) -> dict[str, torch.Tensor]:
        """Return what GroupResult holds, of the rows that tiles were added for, in their order."""
        q = self.q if len(rows) == self.q.shape[2] else self.q[:, :, rows.to(self.q.device)]
        found = {"lse": self.logits(q)}
        if backward:
            found["dq"] = torch.cat(self._dq, dim=2) * _greatest(self.k) * self.factor
            found["dk"] = self._dk[:, None] * _greatest(self.q) * self.factor
        if self.roundings is not None:
            found["out"] = torch.cat(self._out, dim=2)
            if backward:
                found["dv"] = self._dv[:, None]
        # Heads, or the one KV head, follow each other.
        return {name: x.flatten(0, 1) for name, x in found.items()}

    def _open(self, rows: range) -> torch.Tensor:
        """Return how much larger a term counts by what its weight leaves open: (…, rows)."""
        assert self.roundings is not None
        return self.roundings * self.logits(self.q[:, :, rows.start : rows.stop])


def _raise(bounds: torch.Tensor, keys: range, terms: torch.Tensor) -> None:
    """Raise the bound of each key, (groups, seqlen_k), to its largest term of (…, rows, keys)."""
    part = bounds[:, keys.start : keys.stop]
    torch.maximum(part, terms.amax((1, 2)), out=part)


def _greatest(x: torch.Tensor) -> torch.Tensor:
    """Return the largest magnitude of each group, (groups, 1, 1)."""
    flat = x.flatten(1)
    if not flat.shape[1]:
        return x.new_zeros((len(x), 1, 1))
    return flat.abs().amax(1)[:, None, None]
