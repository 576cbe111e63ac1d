"""What the adapters of torch's own attention share: views, caches, gradients.

torch takes (batch, heads, seqlen, width) and knows neither packed sequences nor caches. Here they
are spelled as a user of torch must: a call per sequence for packed or ragged lengths, a gather of
the pages for a paged cache. All of it is inside `step`, since each new call of a model needs it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

from attnrepro_runner.backends.base import Outputs, Unsupported

if TYPE_CHECKING:
    from collections.abc import Mapping

    from attnrepro_runner.backends.base import Tensors
    from attnrepro_runner.semantics import Workload

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}

SHARED_FIELDS = frozenset(
    {
        "seqlen_q",
        "seqlen_k",
        "heads_kv",
        "layout",
        "strides.q",
        "strides.k",
        "strides.v",
        "mask.causal",
        "mask.window",
        "mask.masked_rows",
        "scale",
        "cache",
        "cache.append",
        "cache.page_size",
    }
)
"""Fields that `TorchPrepared` and a mask honour for every adapter here."""


@dataclass(frozen=True)
class Group:
    """Sequences of equal lengths that one call takes: all, or one."""

    sequences: tuple[int, ...]
    seqlen_q: int
    seqlen_k: int

    @property
    def first(self) -> int:
        """The sequence whose mask all of the group have."""
        return self.sequences[0]


class Attend(Protocol):
    """One dense attention call of a library."""

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, group: Group
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return out (batch, heads_q, seqlen_q, head_dim_v) and lse, or None for no lse.

        q is (batch, heads_q, seqlen_q, head_dim); k, v are (batch, heads_kv, seqlen_k, width).
        """
        ...


def groups(workload: Workload) -> tuple[Group, ...]:
    """Split a workload into the calls that torch can take."""
    lengths = tuple(zip(workload.seqlens_q, workload.seqlens_k, strict=True))
    if not workload.is_packed and len(set(lengths)) == 1:
        return (Group(tuple(range(workload.batch)), *lengths[0]),)
    return tuple(Group((b,), *pair) for b, pair in enumerate(lengths))


def check_shared(workload: Workload, options: Mapping[str, object]) -> None:
    """Raise Unsupported for what no call of torch's dense attention can express."""
    if workload.dtype not in DTYPES:
        message = f"torch's attention takes no {workload.dtype} tensors with descales"
        raise Unsupported(message)
    if workload.dtype_out != workload.dtype:
        message = f"torch returns the inputs' dtype, {workload.dtype}, not {workload.dtype_out}"
        raise Unsupported(message)
    if workload.accumulate != "float32":
        message = f"torch accumulates {workload.dtype} in float32, not {workload.accumulate}"
        raise Unsupported(message)
    if workload.mask.masked_rows != "zero" and workload.has_empty_rows:
        message = "torch's attention gives zeros for a row that attends nothing, not NaN"
        raise Unsupported(message)
    if options.get("deterministic") is True:
        message = "torch's attention has no argument that asks for deterministic kernels"
        raise Unsupported(message)


def attends_everything(workload: Workload, b: int) -> bool:
    """Say whether every query of sequence b attends every key: no mask is needed then."""
    low, high = workload.diagonals(b)
    return (low is None or low <= 1 - workload.seqlens_q[b]) and (
        high is None or high >= workload.seqlens_k[b] - 1
    )


def is_top_left_causal(workload: Workload, b: int) -> bool:
    """Say whether the mask of sequence b is what `is_causal=True` means: key j <= query i."""
    low, high = workload.diagonals(b)
    return high == 0 and (low is None or low <= 1 - workload.seqlens_q[b])


def boolean_mask(workload: Workload, group: Group, device: torch.device) -> torch.Tensor:
    """Materialise the mask of a group, bool (seqlen_q, seqlen_k); true is attended."""
    low, high = workload.diagonals(group.first)
    i = torch.arange(group.seqlen_q, device=device)[:, None]
    j = torch.arange(group.seqlen_k, device=device)[None, :]
    mask = torch.ones(group.seqlen_q, group.seqlen_k, dtype=torch.bool, device=device)
    if low is not None:
        mask &= j - i >= low
    if high is not None:
        mask &= j - i <= high
    return mask


class TorchPrepared:
    """A dense attention call bound to a workload's tensors, whatever their layout."""

    def __init__(self, workload: Workload, tensors: Tensors, attend: Attend) -> None:
        """Bind; leaves share the storage of the inputs, so that rewritten inputs are seen."""
        self._attend = attend
        self._groups = groups(workload)
        self._workload = workload
        self._append_in_call = workload.cache is not None and workload.cache.append_in_call
        self._training = workload.phase in ("forward", "forward_backward")
        self.tensors = tensors
        self.q, self.k, self.v = (
            x.detach().requires_grad_(self._training) for x in (tensors.q, tensors.k, tensors.v)
        )
        self.pages: list[torch.Tensor] | None = None
        """Rows of the page table as int64 indices, those that hold keys."""
        if tensors.page_table is not None and workload.cache is not None:
            size = workload.cache.page_size or 1
            self.pages = [
                tensors.page_table[b, : -(-n // size)].long()
                for b, n in enumerate(workload.seqlens_k)
            ]
        self._kept: torch.Tensor | None = None
        if workload.cache is not None and workload.cache.append:
            self._bind_append(workload.cache.append)

    def step(self) -> Outputs:
        """Do the phase's work once."""
        if self._append_in_call:
            self.append_step()
        if not self._training:
            with torch.no_grad():
                out, lse = self._forward()
            return Outputs(out=out, lse=lse)
        with torch.enable_grad():
            out, lse = self._forward()
        if not self._workload.has_backward:
            return Outputs(out=out.detach(), lse=lse)
        dq, dk, dv = torch.autograd.grad(out, (self.q, self.k, self.v), self._grad_out())
        return Outputs(out=out.detach(), lse=lse, dq=dq, dk=dk, dv=dv)

    def backward_step(self) -> Outputs:
        """Do the backward alone; the first call runs the forward that is kept."""
        if self._kept is None:
            with torch.enable_grad():
                self._kept, _ = self._forward()
        dq, dk, dv = torch.autograd.grad(
            self._kept, (self.q, self.k, self.v), self._grad_out(), retain_graph=True
        )
        return Outputs(out=self._kept.detach(), dq=dq, dk=dk, dv=dv)

    def append_step(self) -> None:
        """Write k_new and v_new behind the keys that the cache holds."""
        assert self.tensors.k_new is not None
        assert self.tensors.v_new is not None
        with torch.no_grad():
            self.tensors.k[self._append_at] = self.tensors.k_new
            self.tensors.v[self._append_at] = self.tensors.v_new

    def call(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Attention of other tensors of the bound shapes; differentiable in training phases."""
        bound = self.q, self.k, self.v
        self.q, self.k, self.v = q, k, v
        try:
            if self._append_in_call:
                self.append_step()
            with torch.set_grad_enabled(self._training):
                return self._forward()[0]
        finally:
            self.q, self.k, self.v = bound

    def _bind_append(self, count: int) -> None:
        device = self.tensors.k.device
        last = torch.tensor(self._workload.seqlens_k, device=device)[:, None]
        position = last - count + torch.arange(count, device=device)[None, :]
        row = torch.arange(self._workload.batch, device=device)[:, None].expand_as(position)
        table, cache = self.tensors.page_table, self._workload.cache
        if table is None or cache is None or cache.page_size is None:
            self._append_at = (row, position)
        else:
            page = table.long()[row, position // cache.page_size]
            self._append_at = (page, position % cache.page_size)

    def _grad_out(self) -> torch.Tensor:
        assert self.tensors.grad_out is not None
        return self.tensors.grad_out

    def _forward(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        layout = self._workload.layout
        outs: list[torch.Tensor] = []
        lses: list[torch.Tensor] = []
        first_q = first_k = 0
        for group in self._groups:
            q, k, v = self._views(group, first_q, first_k)
            out, lse = self._attend(q, k, v, group)
            if layout == "thd":
                outs.append(out[0].transpose(0, 1))
            else:
                outs.append(out if layout == "bhsd" else out.transpose(1, 2))
            if lse is not None:
                lses.append(lse[0] if layout == "thd" else lse)
            first_q, first_k = first_q + group.seqlen_q, first_k + group.seqlen_k
        if len(self._groups) == 1:
            return outs[0], lses[0] if lses else None
        joined = torch.cat(outs, dim=0)
        return joined, torch.cat(lses, dim=1 if layout == "thd" else 0) if lses else None

    def _views(
        self, group: Group, first_q: int, first_k: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        layout = self._workload.layout
        whole = len(group.sequences) == self._workload.batch
        if layout == "thd":
            q = self.q[None, first_q : first_q + group.seqlen_q].transpose(1, 2)
        else:
            q = self.q if whole else self.q[group.first : group.first + 1]
            q = q if layout == "bhsd" else q.transpose(1, 2)
        k = self._keys(self.k, group, first_k, whole=whole)
        return q, k, self._keys(self.v, group, first_k, whole=whole)

    def _keys(self, x: torch.Tensor, group: Group, first: int, *, whole: bool) -> torch.Tensor:
        n = group.seqlen_k
        if self.pages is not None:
            gathered = torch.stack([x[self.pages[b]].flatten(0, 1) for b in group.sequences])
            return gathered[:, :n].transpose(1, 2)
        if self._workload.cache is not None:
            rows = x if whole else x[group.first : group.first + 1]
            return rows[:, :n].transpose(1, 2)
        if self._workload.layout == "thd":
            return x[None, first : first + n].transpose(1, 2)
        return x if self._workload.layout == "bhsd" else x.transpose(1, 2)
