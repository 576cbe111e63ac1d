"""`flashinfer`: ragged prefill, paged prefill and paged decode of flashinfer-python.

Kernels are compiled at the first call of each class, with the host's nvcc. The library plans on the
host (`plan`), which is done in `prepare`: a serving step plans once and runs each layer. Its kernel
family is always spelled (`fa2`, or `fa3` on Hopper), since `auto` chooses. It returns no LSE here:
its own is to the base 2 and would cost a kernel.
"""

from __future__ import annotations

import importlib
import math
from typing import TYPE_CHECKING, cast

import torch

from attnrepro_runner.backends import packages
from attnrepro_runner.backends.base import Availability, KernelPattern, MemoryOrder, Prepared
from attnrepro_runner.backends.flash_common import (
    DENSE_FIELDS,
    TORCH_DTYPES,
    FlashPrepared,
    bottom_right_band,
    capability,
    check_common,
    check_options,
    check_packed_view,
    offsets,
    option_fields,
    refuse,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from attnrepro_runner.backends.base import Tensors
    from attnrepro_runner.backends.flash_common import Attend
    from attnrepro_runner.semantics import Workload

_DISTRIBUTION = "flashinfer-python"
_WORKSPACE_BYTES = 128 << 20
_WIDTHS = (64, 128, 256)
_ENVIRONMENT = ("FLASHINFER_CUDA_ARCH_LIST", "FLASHINFER_USE_CUDA_NORM")
_TENSOR_CORES_FROM = 4
"""Query heads a key head from which decode uses tensor cores, as the library advises."""
_CUDA_CORES = "CUDA cores"
_PATTERNS = {
    "fa2": r"BatchPrefillWith(Ragged|Paged)KVCacheKernel",
    "fa3": r"(?<![A-Za-z])PrefillWithKVCacheKernel",
    _CUDA_CORES: r"BatchDecodeWithPagedKVCacheKernel",
}
"""Kernels by the family that `_chosen` names; the Hopper family's are named without a batch."""


class Flashinfer:
    """The serving library's attention: no gradients."""

    name = "flashinfer"
    empty_row_lse = -math.inf
    workspace_bytes = _WORKSPACE_BYTES
    """Of the buffer that each wrapper plans in; the memory's allowance counts it."""
    option_names = frozenset({"implementation"})

    def modules(self, options: Mapping[str, object]) -> tuple[str, ...]:
        """Name the package."""
        del options
        return ("flashinfer",)

    def availability(self) -> Availability:
        """Import flashinfer and say what it is."""
        version = packages.release(_DISTRIBUTION)
        if version is None:
            return Availability(available=False, reason="flashinfer-python is not installed")
        reason = None
        try:
            importlib.import_module("flashinfer")
        except Exception as error:
            reason = f"flashinfer cannot be imported: {type(error).__name__}: {error}"
        flags = {
            f"dist:{name}": packages.release(name) or "absent"
            for name in ("flashinfer-cubin", "flashinfer-jit-cache")
        }
        return Availability(
            available=reason is None,
            version=version,
            files=packages.kernel_files(_DISTRIBUTION, python=True),
            flags={**flags, **packages.environment_flags(_ENVIRONMENT)},
            reason=reason,
        )

    def check(self, workload: Workload, options: Mapping[str, object]) -> None:
        """Refuse what the wrappers have no argument for."""
        check_common(workload, dtypes=("float16", "bfloat16"))
        check_options(options, self.option_names)
        if workload.phase in ("forward", "forward_backward"):
            refuse("flashinfer keeps nothing for a backward; use prefill or decode")
        for value, what in (
            (workload.alibi, "ALiBi of these slopes"),
            (workload.dropout, "dropout"),
        ):
            if value is not None:
                refuse(f"flashinfer has no {what}")
        if workload.head_dim_v != workload.head_dim or workload.head_dim not in _WIDTHS:
            refuse(f"head_dim must equal head_dim_v, one of {', '.join(map(str, _WIDTHS))}")
        band = bottom_right_band(workload)
        if band.right not in (None, 0):
            refuse("a window has no right side, except that a causal mask closes it")
        if band.left is not None and not band.causal:
            refuse("a window needs a causal mask")
        cache = workload.cache
        if cache is not None and cache.page_size is None:
            refuse("a cache must be paged")
        if cache is not None and cache.append_in_call and cache.append:
            refuse("flashinfer's attention does not append to the cache")
        if not workload.is_packed:
            check_packed_view(workload)
        kind = options.get("implementation")
        if kind == "fa4":
            refuse("implementation must be fa2 or fa3")
        if kind == "fa3" and (capability() or (9, 0))[0] != 9:
            refuse("implementation fa3 needs compute capability 9.0")
        if kind is not None and _chosen(workload, options) == _CUDA_CORES:
            refuse(
                f"decode with fewer than {_TENSOR_CORES_FROM} query heads a key head runs on CUDA "
                "cores, whatever implementation says"
            )

    def consumed(self, workload: Workload, options: Mapping[str, object]) -> frozenset[str]:
        """Return the honoured fields."""
        fields = DENSE_FIELDS | {"softcap", "layout", "seqlen_q", "seqlen_k"}
        if workload.cache is not None:
            fields |= {"cache", "cache.append", "cache.page_size"}
        return fields | option_fields(options, self.option_names)

    def memory_order(self, workload: Workload, options: Mapping[str, object]) -> MemoryOrder:
        """Nothing of the size of the scores is made."""
        del workload, options
        return MemoryOrder.LINEAR

    def patterns(self, workload: Workload, options: Mapping[str, object]) -> KernelPattern:
        """Kernels of the one family that the call takes, and of no other."""
        family = _chosen(workload, options)
        others = [pattern for name, pattern in _PATTERNS.items() if name != family]
        return KernelPattern(
            family=f"flashinfer, {family}",
            must=(_PATTERNS[family],),
            must_not=(*others, r"pytorch_flash::", r"cudnn_generated", r"fmha_cutlass"),
        )

    def prepare(
        self, workload: Workload, options: Mapping[str, object], tensors: Tensors
    ) -> Prepared:
        """Plan."""
        self.check(workload, options)
        module = importlib.import_module("flashinfer")
        band = bottom_right_band(workload)
        dtype = TORCH_DTYPES[workload.dtype]
        shared: dict[str, object] = {
            "num_qo_heads": workload.heads_q,
            "num_kv_heads": workload.heads_kv,
            "sm_scale": workload.scale_value,
            "window_left": -1 if band.left is None else band.left,
            "logits_soft_cap": workload.softcap or 0.0,
            "pos_encoding_mode": "NONE",
            "q_data_type": dtype,
            "kv_data_type": dtype,
        }
        device = tensors.q.device
        workspace = torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        family = _chosen(workload, options)
        if workload.cache is None:
            wrapper = module.BatchPrefillWithRaggedKVCacheWrapper(
                float_workspace_buffer=workspace, kv_layout="NHD", backend=family
            )
            wrapper.plan(
                qo_indptr=offsets(workload.seqlens_q, device),
                kv_indptr=offsets(workload.seqlens_k, device),
                head_dim_qk=workload.head_dim,
                causal=band.causal,
                **shared,
            )
            return FlashPrepared(workload, tensors, _ragged(wrapper.run, workload))
        size = workload.cache.page_size
        assert size is not None
        pages = _pages(workload, tensors, size)
        if _is_decode(workload):
            on_cuda_cores = family == _CUDA_CORES
            wrapper = module.BatchDecodeWithPagedKVCacheWrapper(
                float_workspace_buffer=workspace,
                kv_layout="NHD",
                use_tensor_cores=not on_cuda_cores,
                backend="fa2" if on_cuda_cores else family,
            )
            wrapper.plan(
                indptr=pages["indptr"],
                indices=pages["indices"],
                last_page_len=pages["last_page_len"],
                head_dim=workload.head_dim,
                page_size=size,
                **shared,
            )
        else:
            wrapper = module.BatchPrefillWithPagedKVCacheWrapper(
                float_workspace_buffer=workspace, kv_layout="NHD", backend=family
            )
            wrapper.plan(
                qo_indptr=offsets(workload.seqlens_q, device),
                paged_kv_indptr=pages["indptr"],
                paged_kv_indices=pages["indices"],
                paged_kv_last_page_len=pages["last_page_len"],
                head_dim_qk=workload.head_dim,
                page_size=size,
                causal=band.causal,
                **shared,
            )
        return FlashPrepared(workload, tensors, _paged(wrapper.run, workload))


def _is_decode(workload: Workload) -> bool:
    """Say whether the call goes to the decode wrapper: one query a sequence, paged keys."""
    return workload.cache is not None and max(workload.seqlens_q) == 1


def _chosen(workload: Workload, options: Mapping[str, object]) -> str:
    """Name the family of kernels that the call takes: fa2, fa3 or CUDA cores."""
    decode = _is_decode(workload)
    if decode and workload.heads_q // workload.heads_kv < _TENSOR_CORES_FROM:
        return _CUDA_CORES
    hopper = (capability() or (0, 0))[0] == 9
    return str(options.get("implementation") or ("fa3" if hopper and not decode else "fa2"))


def _ragged(run: Callable[..., object], workload: Workload) -> Attend:
    def attend(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        packed = (q, k, v) if workload.is_packed else (t.view(-1, *t.shape[2:]) for t in (q, k, v))
        q_flat, k_flat, v_flat = packed
        out = cast("torch.Tensor", run(q=q_flat, k=k_flat, v=v_flat))
        return out.view(*q.shape[:-1], -1), None

    return attend


def _paged(run: Callable[..., object], workload: Workload) -> Attend:
    def attend(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        q_flat = q if workload.is_packed else q.view(-1, *q.shape[2:])
        out = cast("torch.Tensor", run(q=q_flat, paged_kv_cache=(k, v)))
        return out.view(*q.shape[:-1], -1), None

    return attend


def _pages(workload: Workload, tensors: Tensors, size: int) -> dict[str, torch.Tensor]:
    """Return the page table as the library has it: only pages that hold keys, in one list."""
    if tensors.page_table is None:
        msg = "a paged cache needs its page table"
        raise ValueError(msg)
    device = tensors.q.device
    counts = tuple(-(-length // size) for length in workload.seqlens_k)
    used = [tensors.page_table[b, :count] for b, count in enumerate(counts)]
    last = [
        length - (count - 1) * size
        for length, count in zip(workload.seqlens_k, counts, strict=True)
    ]
    return {
        "indptr": offsets(counts, device),
        "indices": torch.cat(used).to(torch.int32),
        "last_page_len": torch.tensor(last, dtype=torch.int32, device=device),
    }
