"""A backend bound to a probe's tensors, whose contents are rewritten before each call.

Preparing once matters: a compiled backend compiles once, and what is probed is the call that a
benchmark repeats.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from attnrepro_runner import inputs, views

if TYPE_CHECKING:
    from collections.abc import Mapping

    from attnrepro_runner.backends.base import Backend, Outputs
    from attnrepro_runner.semantics import Workload


class ProbeBench:
    """Probe tensors of one workload and one backend."""

    def __init__(
        self,
        backend: Backend,
        options: Mapping[str, object],
        workload: Workload,
        device: torch.device,
    ) -> None:
        """Allocate zeros and bind the backend to them."""
        self.workload, self.device = workload, device
        dtype = views.DTYPES[workload.dtype]
        out_dtype = views.DTYPES[workload.dtype_out]
        self.tokens_q, self.tokens_k = sum(workload.seqlens_q), sum(workload.seqlens_k)
        self.packed = {
            name: torch.zeros((tokens, heads, width), dtype=kind, device=device)
            for name, tokens, heads, width, kind in (
                ("q", self.tokens_q, workload.heads_q, workload.head_dim, dtype),
                ("k", self.tokens_k, workload.heads_kv, workload.head_dim, dtype),
                ("v", self.tokens_k, workload.heads_kv, workload.head_dim_v, dtype),
                ("grad_out", self.tokens_q, workload.heads_q, workload.head_dim_v, out_dtype),
            )
        }
        descales = {
            f"{name}_descale": torch.ones((workload.batch, workload.heads_kv), device=device)
            for name in ("q", "k", "v")
        }
        self.tensors = inputs.assemble(workload, self.packed, device, descales)
        self.prepared = backend.prepare(workload, options, self.tensors)

    def call(
        self,
        *,
        q: torch.Tensor | None = None,
        k: torch.Tensor | None = None,
        v: torch.Tensor | None = None,
        grad_out: torch.Tensor | None = None,
    ) -> Outputs:
        """Write packed (tokens, heads, width) values and call once; None keeps what is there."""
        changed = {"q": q, "k": k, "v": v, "grad_out": grad_out}
        for name, values in changed.items():
            if values is not None:
                self.packed[name] = values.to(self.packed[name].dtype)
        inputs.rewrite(self.workload, self.tensors, self.packed)
        cache = self.workload.cache
        if cache is not None and cache.append and not cache.append_in_call:
            self.prepared.append_step()
        outputs = self.prepared.step()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return outputs

    def key_index(self) -> torch.Tensor:
        """Return the index of each packed key in its sequence, int64 (tokens_k)."""
        parts = [torch.arange(n, device=self.device) for n in self.workload.seqlens_k]
        return torch.cat(parts)

    def source_ids(self) -> torch.Tensor:
        """Return the number b * heads_kv + g of each packed key's (sequence, KV head)."""
        workload = self.workload
        lengths = torch.tensor(workload.seqlens_k, device=self.device)
        sequence = torch.arange(workload.batch, device=self.device).repeat_interleave(lengths)
        heads = torch.arange(workload.heads_kv, device=self.device)
        return sequence[:, None] * workload.heads_kv + heads[None, :]

    def one_hot_values(self, block: int, amount: torch.Tensor) -> torch.Tensor:
        """Return V whose key j of the block is `amount` (tokens_k, heads_kv) in channel j - first.

        Keys outside the block of head_dim_v keys are 0.
        """
        width = self.workload.head_dim_v
        channel = self.key_index() - block * width
        inside = (channel >= 0) & (channel < width)
        values = torch.zeros((self.tokens_k, self.workload.heads_kv, width), device=self.device)
        where = inside.nonzero().view(-1)
        values[where, :, channel[where]] = amount[where].to(values.dtype)
        return values

    def key_blocks(self) -> range:
        """Blocks of head_dim_v keys that cover the longest sequence."""
        return range(-(-max(*self.workload.seqlens_k, 1) // self.workload.head_dim_v))

    def weights(
        self,
        amount: torch.Tensor,
        *,
        q: torch.Tensor | None = None,
        k: torch.Tensor | None = None,
    ) -> tuple[dict[tuple[int, int], torch.Tensor], Outputs]:
        """Read every weight: V = I in blocks of keys.

        Args:
            amount: what each key holds in its channel, (tokens_k, heads_kv).
            q: packed queries, or None.
            k: packed keys, or None.

        Returns:
            float64 (seqlen_q, seqlen_k) on the CPU for each (sequence, query head): weight times
            amount of the key that was read; and the outputs of the last call.

        """
        workload = self.workload
        pairs = [(b, h) for b in range(workload.batch) for h in range(workload.heads_q)]
        parts: dict[tuple[int, int], list[torch.Tensor]] = {pair: [] for pair in pairs}
        for block in self.key_blocks():
            outputs = self.call(q=q, k=k, v=self.one_hot_values(block, amount))
            out = outputs.out.to("cpu", torch.float64)
            for b, h in pairs:
                parts[b, h].append(views.query_rows(out, workload, b, h))
        found = {
            (b, h): torch.cat(part, dim=1)[:, : workload.seqlens_k[b]]
            for (b, h), part in parts.items()
        }
        return found, outputs
