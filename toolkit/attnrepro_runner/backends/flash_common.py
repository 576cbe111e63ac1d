"""What the adapters of the flash-attention family share: masks, layouts, gradients, cache append.

All of them take (batch, seqlen, heads, width) or packed (total, heads, width), align causal masks
and windows to the bottom right, and give rows without keys the output 0.
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

TORCH_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float8_e4m3fn": torch.float8_e4m3fn,
}
DENSE_FIELDS = frozenset(
    {
        "heads_kv",
        "mask.causal",
        "mask.window",
        "mask.masked_rows",
        "scale",
        "strides.q",
        "strides.k",
        "strides.v",
    }
)
"""Fields that every adapter of this family honours."""


@dataclass(frozen=True, kw_only=True)
class Band:
    """Keys attended round the diagonal of the bottom right, inclusive; None is open."""

    left: int | None
    right: int | None

    @property
    def causal(self) -> bool:
        """Whether no later key is attended."""
        return self.right == 0

    def window(self, open_side: int | None) -> tuple[int | None, int | None]:
        """Return (left, right) with the library's own spelling of an open side.

        Under `causal` the right side is given as open or 0 alike; 0 is what it means.
        """
        return (
            open_side if self.left is None else self.left,
            open_side if self.right is None or (self.causal and self.left is None) else self.right,
        )


def bottom_right_band(workload: Workload) -> Band:
    """Return the mask as one band of the bottom right.

    Raises:
        Unsupported: it follows the top left where that is another diagonal.

    """
    mask = workload.mask
    square = workload.seqlens_q == workload.seqlens_k
    alignments = {mask.causal} - {"none"}
    if mask.window is not None:
        alignments.add(mask.window.alignment)
    if "top_left" in alignments and not square:
        refuse("the mask is aligned to the bottom right only, and seqlen_q is not seqlen_k")
    left = None if mask.window is None else mask.window.left
    right = None if mask.window is None else mask.window.right
    if mask.causal != "none":
        right = 0
    return Band(left=left, right=right)


def refuse(reason: str) -> None:
    """Raise Unsupported."""
    raise Unsupported(reason)


def check_common(workload: Workload, *, dtypes: tuple[str, ...]) -> None:
    """Refuse what no library of this family offers."""
    if workload.dtype not in dtypes:
        refuse(f"dtype {workload.dtype} is not one of {', '.join(dtypes)}")
    natural = "bfloat16" if workload.fp8 is not None else workload.dtype
    if workload.dtype_out != natural:
        refuse(f"the output is {natural}, not {workload.dtype_out}")
    if workload.accumulate != "float32":
        refuse("accumulation is float32")
    if workload.has_empty_rows and workload.mask.masked_rows != "zero":
        refuse("rows that attend nothing give 0, not NaN")
    if workload.has_backward and workload.fp8 is not None:
        refuse("FP8 has no backward")
    for name, shape, stride in (
        (name, workload.shape(name), workload.stride(name)) for name in ("q", "k", "v")
    ):
        if shape[-1] > 1 and stride[-1] != 1:
            refuse(
                f"the last dimension of {name} must be contiguous, else it is copied in the call"
            )


def check_options(options: Mapping[str, object], honoured: frozenset[str]) -> None:
    """Refuse options that this very call has no parameter for."""
    for name in sorted(set(options) - honoured):
        refuse(f"option {name} has no effect on this call")


def option_fields(options: Mapping[str, object], honoured: frozenset[str]) -> frozenset[str]:
    """Return the options that the call honours."""
    return frozenset(options) & honoured


def flag(options: Mapping[str, object], name: str) -> bool:
    """Return a boolean option, False where it is not given."""
    return bool(options.get(name, False))


def integer(options: Mapping[str, object], name: str) -> int | None:
    """Return an integer option, None where it is not given."""
    value = options.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def head_first(tensor: torch.Tensor, workload: Workload) -> torch.Tensor:
    """View a bhsd tensor as bshd, or back; others as they are."""
    return tensor.transpose(1, 2) if workload.layout == "bhsd" else tensor


class Attend(Protocol):
    """A library's function with everything but q, k and v bound; layout bshd or thd."""

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the output and the LSE, or None."""
        ...


class FlashPrepared:
    """A call bound to one set of tensors (see `base.Prepared`)."""

    def __init__(self, workload: Workload, tensors: Tensors, attend: Attend) -> None:
        self._workload = workload
        self._attend = attend
        self._append = None
        cache = workload.cache
        if cache is not None and cache.append and not cache.append_in_call:
            self._append = CacheAppend(workload, tensors)
        self._grad_out = tensors.grad_out
        inputs = (tensors.q, tensors.k, tensors.v)
        self._leaves = tuple(t.detach() for t in inputs)
        if workload.phase in ("forward", "forward_backward"):
            for leaf in self._leaves:
                leaf.requires_grad_(leaf.is_floating_point() and workload.fp8 is None)
        self._kept: torch.Tensor | None = None

    def step(self) -> Outputs:
        """Do the phase's work once."""
        out, lse = self._forward(*self._leaves)
        return self._backward(out, lse) if self._workload.has_backward else _outputs(out, lse)

    def backward_step(self) -> Outputs:
        """Do the backward alone, of a forward kept from the first call."""
        if self._kept is None:
            self._kept, _ = self._forward(*self._leaves)
        return self._backward(self._kept, None, keep=True)

    def append_step(self) -> None:
        """Write the new keys and values into the cache."""
        if self._append is not None:
            self._append()

    def call(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Attention of other tensors of the same shapes; differentiable in training phases."""
        return self._forward(q, k, v)[0]

    def _forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        training = self._workload.phase in ("forward", "forward_backward")
        with torch.set_grad_enabled(training):
            k_view, v_view = k, v
            if self._workload.cache is None:
                k_view, v_view = head_first(k, self._workload), head_first(v, self._workload)
            out, lse = self._attend(head_first(q, self._workload), k_view, v_view)
            return head_first(out, self._workload), lse

    def _backward(
        self, out: torch.Tensor, lse: torch.Tensor | None, *, keep: bool = False
    ) -> Outputs:
        dq, dk, dv = torch.autograd.grad(out, self._leaves, self._grad_out, retain_graph=keep)
        return Outputs(
            out=out.detach(), lse=None if lse is None else lse.detach(), dq=dq, dk=dk, dv=dv
        )


class CacheAppend:
    """Writes new keys and values behind the old ones; idempotent, so it can be timed again."""

    def __init__(self, workload: Workload, tensors: Tensors) -> None:
        cache = workload.cache
        if cache is None or tensors.k_new is None or tensors.v_new is None:
            msg = "an append needs a cache and the new keys and values"
            raise ValueError(msg)
        device = tensors.k.device
        ends = torch.tensor(workload.seqlens_k, device=device).unsqueeze(1)
        positions = ends - cache.append + torch.arange(cache.append, device=device)
        batches = torch.arange(workload.batch, device=device).unsqueeze(1)
        if cache.page_size is None:
            self._index = (batches.expand_as(positions), positions)
        else:
            if tensors.page_table is None:
                msg = "a paged cache needs its page table"
                raise ValueError(msg)
            pages = tensors.page_table.long().gather(1, positions // cache.page_size)
            self._index = (pages, positions % cache.page_size)
        pairs = ((tensors.k, tensors.k_new), (tensors.v, tensors.v_new))
        # As bytes where they are float8, which has no index_put.
        self._pairs = tuple(
            (cached.view(torch.uint8), new.view(torch.uint8))
            if cached.element_size() == 1
            else (cached, new)
            for cached, new in pairs
        )

    def __call__(self) -> None:
        """Write."""
        for cached, new in self._pairs:
            cached[self._index] = new


def lengths_before_append(workload: Workload, tensors: Tensors) -> torch.Tensor:
    """Return int32 key counts as a call that appends by itself wants them: without the new."""
    if tensors.seqused_k is None:
        msg = "a cache needs seqused_k"
        raise ValueError(msg)
    cache = workload.cache
    if cache is not None and cache.append and cache.append_in_call:
        return tensors.seqused_k - cache.append
    return tensors.seqused_k


def appended(workload: Workload, tensors: Tensors) -> dict[str, torch.Tensor]:
    """Return the new keys and values as `k` and `v`, where the call itself appends them."""
    cache = workload.cache
    if cache is None or not cache.append or not cache.append_in_call:
        return {}
    if tensors.k_new is None or tensors.v_new is None:
        msg = "an append needs the new keys and values"
        raise ValueError(msg)
    return {"k": tensors.k_new, "v": tensors.v_new}


def offsets(lengths: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """Return cumulative lengths, int32 (sequences + 1), from 0."""
    total = [0]
    for length in lengths:
        total.append(total[-1] + length)
    return torch.tensor(total, dtype=torch.int32, device=device)


def check_packed_view(workload: Workload) -> None:
    """Refuse tensors that are no packed view: each would be copied in the call."""
    if workload.layout == "bhsd":
        refuse("layout bhsd is no view of packed sequences")
    if workload.cache is not None and len(set(workload.seqlens_q)) > 1:
        refuse("queries of several lengths need layout thd")
    for name in ("q", "k", "v"):
        if name != "q" and workload.cache is not None:
            continue
        shape, stride = workload.shape(name), workload.stride(name)
        if workload.batch > 1 and stride[0] != shape[1] * stride[1]:
            refuse(f"the strides of {name} are no view of packed sequences")


def capability() -> tuple[int, int] | None:
    """Return the compute capability of the current device, or None without one."""
    if not torch.cuda.is_available() or torch.version.hip is not None:
        return None
    return torch.cuda.get_device_capability()


def _outputs(out: torch.Tensor, lse: torch.Tensor | None) -> Outputs:
    return Outputs(out=out.detach(), lse=None if lse is None else lse.detach())
