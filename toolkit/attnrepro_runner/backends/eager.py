"""`eager`: textbook attention in torch, with an explicit mask and every score in memory.

The baseline of meaning, not of speed: matrix products, masking and softmax in float32, the output
rounded once. It honours every mask, softcap, ALiBi and dropout, and returns its LSE.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from attnrepro_runner import libraries
from attnrepro_runner.backends import torchcalls
from attnrepro_runner.backends.base import (
    Availability,
    KernelPattern,
    MemoryOrder,
    Prepared,
    Tensors,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from attnrepro_runner.backends.torchcalls import Group
    from attnrepro_runner.fields import Dropout
    from attnrepro_runner.semantics import Workload


class EagerBackend:
    """Textbook attention."""

    name = "eager"
    empty_row_lse = -math.inf
    option_names: frozenset[str] = frozenset()

    def modules(self, options: Mapping[str, object]) -> tuple[str, ...]:
        """Name none: torch is imported before."""
        del options
        return ()

    def availability(self) -> Availability:
        """Say which torch this is."""
        return libraries.torch_availability()

    def check(self, workload: Workload, options: Mapping[str, object]) -> None:
        """Refuse what `torchcalls` refuses."""
        torchcalls.check_shared(workload, options)

    def consumed(self, workload: Workload, options: Mapping[str, object]) -> frozenset[str]:
        """Everything but fp8 and other dtypes."""
        del workload, options
        return torchcalls.SHARED_FIELDS | {"head_dim_v", "softcap", "alibi", "dropout"}

    def memory_order(self, workload: Workload, options: Mapping[str, object]) -> MemoryOrder:
        """All scores are in memory."""
        del workload, options
        return MemoryOrder.SCORES

    def patterns(self, workload: Workload, options: Mapping[str, object]) -> KernelPattern:
        """Two products and an exponential; no fused attention."""
        del workload, options
        return KernelPattern(
            family="eager",
            must=(r"^aten::(matmul|bmm|mm)$", r"^aten::exp$"),
            must_not=(r"scaled_dot_product", r"flash", r"fmha", r"flex_attention"),
        )

    def prepare(
        self, workload: Workload, options: Mapping[str, object], tensors: Tensors
    ) -> Prepared:
        """Build the masks and biases of every sequence."""
        self.check(workload, options)
        return _EagerPrepared(workload, tensors)


class _EagerPrepared(torchcalls.TorchPrepared):
    def __init__(self, workload: Workload, tensors: Tensors) -> None:
        device = tensors.q.device
        self.excluded: dict[Group, torch.Tensor | None] = {}
        self.bias: dict[Group, torch.Tensor] = {}
        for group in torchcalls.groups(workload):
            everything = torchcalls.attends_everything(workload, group.first)
            self.excluded[group] = (
                None if everything else ~torchcalls.boolean_mask(workload, group, device)
            )
            if tensors.alibi_slopes is not None and workload.alibi is not None:
                offset = workload.offset(group.first)
                i = torch.arange(group.seqlen_q, device=device)[:, None] + offset
                distance = (i - torch.arange(group.seqlen_k, device=device)[None, :]).abs()
                self.bias[group] = -tensors.alibi_slopes[:, None, None] * distance
        self._shared_heads = workload.heads_q // workload.heads_kv
        self._generator = _generator(workload.dropout, device)
        super().__init__(workload, tensors, self._call)

    def _call(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, group: Group
    ) -> tuple[torch.Tensor, torch.Tensor]:
        k, v = (x.float().repeat_interleave(self._shared_heads, dim=1) for x in (k, v))
        scores = torch.matmul(q.float(), k.transpose(-2, -1)) * self._workload.scale_value
        if self._workload.softcap is not None:
            scores = self._workload.softcap * torch.tanh(scores / self._workload.softcap)
        if group in self.bias:
            scores = scores + self.bias[group]
        excluded = self.excluded[group]
        if excluded is not None:
            scores = scores.masked_fill(excluded, -math.inf)
        if not group.seqlen_k:
            # Gradients of all three are zeros, not missing.
            nothing = 0 * (q.sum() + k.sum() + v.sum())
            empty = q.new_zeros((*q.shape[:3], v.shape[3])) + nothing.to(q.dtype)
            return empty, torch.full(q.shape[:3], -math.inf, device=q.device)
        # A row that attends nothing has maximum -inf; shifting by a finite number keeps it out of
        # inf - inf, and its sum is 0.
        maximum = scores.detach().amax(-1, keepdim=True).clamp_min(torch.finfo(scores.dtype).min)
        weights = torch.exp(scores - maximum)
        total = weights.sum(-1, keepdim=True)
        weights = weights / total.masked_fill(total == 0, 1.0)
        if self._generator is not None and self._workload.dropout is not None:
            kept = 1 - self._workload.dropout.p
            drawn = torch.rand(weights.shape, generator=self._generator, device=weights.device)
            weights = weights * ((drawn < kept) / kept)
        out = torch.matmul(weights, v)
        lse = (maximum + torch.log(total)).detach().squeeze(-1)
        return out.to(q.dtype), lse


def _generator(dropout: Dropout | None, device: torch.device) -> torch.Generator | None:
    """Give each seed and offset a stream of its own; every call goes on in it."""
    if dropout is None:
        return None
    generator = torch.Generator(device)
    # An odd multiplier keeps distinct offsets distinct; a CPU generator has no offset to set.
    generator.manual_seed((dropout.seed + dropout.offset * 0x9E3779B97F4A7C15) % (1 << 63))
    return generator
