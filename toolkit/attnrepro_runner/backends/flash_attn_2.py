"""flash-attn 2.x: three backends of one distribution, since what each drops in silence differs.

`flash_attn_2` is the CUDA build, `flash_attn_2.rocm_ck` Composable Kernel and
`flash_attn_2.rocm_triton` the Triton kernels. The forward uses the split-KV heuristic by itself (by
batch, heads, blocks and multiprocessors), so that the order of reduction is the device's; only the
cache call takes `num_splits`. head_dim is padded to a multiple of 8 inside the call. Window -1 is
open.
"""

from __future__ import annotations

import importlib
import math
import os
from typing import TYPE_CHECKING, cast

import torch

from attnrepro_runner.backends import packages
from attnrepro_runner.backends.base import (
    Availability,
    KernelPattern,
    MemoryOrder,
    Prepared,
)
from attnrepro_runner.backends.flash_common import (
    DENSE_FIELDS,
    Attend,
    FlashPrepared,
    appended,
    bottom_right_band,
    check_common,
    check_options,
    flag,
    integer,
    lengths_before_append,
    option_fields,
    refuse,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from attnrepro_runner.backends.base import Tensors
    from attnrepro_runner.semantics import Workload

_DISTRIBUTION = "flash-attn"
_MODULE = "flash_attn.flash_attn_interface"
_TRITON = "FLASH_ATTENTION_TRITON_AMD_ENABLE"
_ENVIRONMENT = (
    _TRITON,
    "FLASH_ATTENTION_TRITON_AMD_AUTOTUNE",
    "FLASH_ATTENTION_FWD_TRITON_AMD_CONFIG_JSON",
    "BWD_MODE",
)
_MAX_SPLITS = 128
_OFFSET_MULTIPLE = 4
"""Philox gives four numbers at a time, and torch's generators take whole groups of them alone."""


class FlashAttention2:
    """The CUDA build: kernels of compute capability 8.0, on Hopper and later too."""

    name = "flash_attn_2"
    empty_row_lse = math.inf
    option_names = frozenset({"deterministic", "num_splits"})

    page_multiple = 256
    max_head_dim = 256
    dropout_resolution = 1 / 256
    """It keeps a weight where a random byte is at most floor((1 - p) 255): 0.1 drops 0.1016."""

    def modules(self, options: Mapping[str, object]) -> tuple[str, ...]:
        """Name the interface, which imports the kernels."""
        del options
        return (_MODULE,)

    def availability(self) -> Availability:
        """Import flash_attn and say what it is."""
        reason = self._reason()
        return Availability(
            available=reason is None,
            version=packages.release(_DISTRIBUTION),
            files=packages.kernel_files(_DISTRIBUTION, python=self._is_triton()),
            flags={**packages.environment_flags(_ENVIRONMENT), **self._flags()},
            reason=reason,
        )

    def check(self, workload: Workload, options: Mapping[str, object]) -> None:
        """Refuse what the release would not do."""
        check_common(workload, dtypes=("float16", "bfloat16"))
        check_options(options, self._honoured(workload))
        bottom_right_band(workload)
        if workload.head_dim_v != workload.head_dim:
            refuse("head_dim_v must equal head_dim")
        if workload.head_dim > self.max_head_dim:
            refuse(f"head_dim is at most {self.max_head_dim}")
        if max(workload.seqlens_q) == 0 or max(workload.seqlens_k) == 0:
            refuse("a call without queries or without keys fails: CUDA error, invalid argument")
        if not workload.is_packed and (0 in workload.seqlens_q or 0 in workload.seqlens_k):
            refuse("empty sequences need layout thd")
        if workload.dropout is not None and workload.softcap is not None:
            refuse("softcap and dropout exclude each other")
        if workload.dropout is not None and workload.dropout.offset % _OFFSET_MULTIPLE:
            refuse(
                f"the offset of dropout must be a multiple of {_OFFSET_MULTIPLE}: the generator of "
                "a GPU takes no other"
            )
        splits = integer(options, "num_splits")
        if splits is not None and splits > _MAX_SPLITS:
            refuse(f"num_splits is at most {_MAX_SPLITS}")
        cache = workload.cache
        if cache is not None:
            if workload.is_packed:
                refuse("the cache call takes no packed queries")
            if cache.page_size is not None and cache.page_size % self.page_multiple:
                refuse(f"page_size must be a multiple of {self.page_multiple}")

    def consumed(self, workload: Workload, options: Mapping[str, object]) -> frozenset[str]:
        """Return the honoured fields."""
        fields = DENSE_FIELDS | {"softcap", "alibi", "dropout"}
        if workload.is_packed:
            fields |= {"layout", "seqlen_q", "seqlen_k"}
        if workload.cache is not None:
            fields |= {"seqlen_k", "cache", "cache.append", "cache.page_size"}
        return fields | option_fields(options, self._honoured(workload))

    def memory_order(self, workload: Workload, options: Mapping[str, object]) -> MemoryOrder:
        """Nothing of the size of the scores is made."""
        del workload, options
        return MemoryOrder.LINEAR

    def patterns(self, workload: Workload, options: Mapping[str, object]) -> KernelPattern:
        """Kernels of namespace flash, never those of torch's own copy."""
        del options
        must = [r"(?<!pytorch_)flash::flash_fwd|\bflash_fwd_(splitkv_)?kernel"]
        if workload.has_backward:
            must.append(r"(?<!pytorch_)flash::flash_bwd|\bflash_bwd_\w*kernel")
        return KernelPattern(
            family="flash-attn 2",
            must=tuple(must),
            must_not=(r"pytorch_flash::", r"fmha_cutlass", r"cudnn_generated", r"FlashAttnFwdSm"),
        )

    def prepare(
        self, workload: Workload, options: Mapping[str, object], tensors: Tensors
    ) -> Prepared:
        """Bind one call."""
        self.check(workload, options)
        module = importlib.import_module(_MODULE)
        band = bottom_right_band(workload)
        bound: dict[str, object] = {
            "softmax_scale": workload.scale_value,
            "causal": band.causal,
            "window_size": band.window(-1),
            "softcap": workload.softcap or 0.0,
            "alibi_slopes": tensors.alibi_slopes,
        }
        if workload.cache is not None:
            return FlashPrepared(
                workload, tensors, self._cached(module, workload, options, tensors, bound)
            )
        dropout = workload.dropout
        bound |= {
            "dropout_p": dropout.p if dropout else 0.0,
            "deterministic": flag(options, "deterministic"),
            # The LSE comes without a further kernel; with dropout the flag would also ask for the
            # matrix of probabilities.
            "return_attn_probs": dropout is None,
        }
        name = "flash_attn_func"
        if workload.is_packed:
            name = "flash_attn_varlen_func"
            bound |= {
                "cu_seqlens_q": tensors.cu_seqlens_q,
                "cu_seqlens_k": tensors.cu_seqlens_k,
                "max_seqlen_q": max(workload.seqlens_q),
                "max_seqlen_k": max(workload.seqlens_k),
            }
        if dropout is not None:
            _seed(tensors.q.device, dropout.seed, dropout.offset)
        function = cast("Callable[..., object]", getattr(module, name))
        shifted = _lse_is_shifted(workload)

        def attend(
            q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
        ) -> tuple[torch.Tensor, torch.Tensor | None]:
            result = function(q=q, k=k, v=v, **bound)
            if isinstance(result, torch.Tensor):
                return result, None
            out, lse, *_ = cast("tuple[torch.Tensor, torch.Tensor]", result)
            return out, None if shifted else lse

        return FlashPrepared(workload, tensors, attend)

    def _cached(
        self,
        module: object,
        workload: Workload,
        options: Mapping[str, object],
        tensors: Tensors,
        bound: Mapping[str, object],
    ) -> Attend:
        function = cast("Callable[..., object]", module.flash_attn_with_kvcache)  # type: ignore[attr-defined]
        cached = {
            **bound,
            **appended(workload, tensors),
            "cache_seqlens": lengths_before_append(workload, tensors),
            "block_table": tensors.page_table,
            "num_splits": integer(options, "num_splits") or 0,
            "return_softmax_lse": True,
        }
        shifted = _lse_is_shifted(workload)

        def attend(
            q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
        ) -> tuple[torch.Tensor, torch.Tensor | None]:
            out, lse = cast(
                "tuple[torch.Tensor, torch.Tensor]",
                function(q=q, k_cache=k, v_cache=v, **cached),
            )
            return out, None if shifted else lse

        return attend

    def _honoured(self, workload: Workload) -> frozenset[str]:
        return frozenset({"num_splits"} if workload.cache is not None else {"deterministic"})

    def _is_triton(self) -> bool:
        return False

    def _reason(self) -> str | None:
        if packages.release(_DISTRIBUTION) is None:
            return "flash-attn is not installed"
        if torch.version.hip is not None:
            return "torch is a ROCm build; the backend is flash_attn_2.rocm_ck or .rocm_triton"
        return _import_reason()

    def _flags(self) -> dict[str, str]:
        altered = packages.altered_files(_DISTRIBUTION, suffixes=(".so",))
        return {"altered_files": ", ".join(altered)} if altered else {}


class FlashAttention2RocmCk(FlashAttention2):
    """Composable Kernel: every entry takes softcap and none uses it."""

    name = "flash_attn_2.rocm_ck"
    page_multiple = 128

    def check(self, workload: Workload, options: Mapping[str, object]) -> None:
        """Refuse what the release would not do, or would drop in silence."""
        super().check(workload, options)
        if workload.softcap is not None:
            refuse("Composable Kernel ignores softcap without a word")

    def consumed(self, workload: Workload, options: Mapping[str, object]) -> frozenset[str]:
        """Return the honoured fields; softcap is none."""
        return super().consumed(workload, options) - {"softcap"}

    def patterns(self, workload: Workload, options: Mapping[str, object]) -> KernelPattern:
        """Kernels of ck_tile."""
        del options
        must = [r"ck_tile::.*Fmha\w*Fwd|fmha_fwd"]
        if workload.has_backward:
            must.append(r"ck_tile::.*FmhaBwd|fmha_bwd")
        return KernelPattern(
            family="flash-attn 2, Composable Kernel",
            must=tuple(must),
            must_not=(r"\battn_fwd\b", r"\b_fwd_kernel_splitK\b"),
        )

    def _reason(self) -> str | None:
        if packages.release(_DISTRIBUTION) is None:
            return "flash-attn is not installed"
        if torch.version.hip is None:
            return "torch is not a ROCm build"
        if os.environ.get(_TRITON, "FALSE") == "TRUE":
            return f"{_TRITON}=TRUE selects the Triton kernels"
        try:
            # Later releases fall back to Triton with a warning where this module is missing.
            importlib.import_module("flash_attn_2_cuda")
        except ImportError as error:
            return f"the compiled module is missing, and another backend would run ({error})"
        return _import_reason()


class FlashAttention2RocmTriton(FlashAttention2):
    """Triton kernels: release 2.8.3 takes arguments that it does not use.

    They are softcap, window_size and deterministic, and dropout's generator: its masks come from
    one seed and one offset written in the source.
    """

    name = "flash_attn_2.rocm_triton"
    option_names = frozenset({"deterministic"})
    page_multiple = 1
    dropout_resolution = 0.0

    def check(self, workload: Workload, options: Mapping[str, object]) -> None:
        """Refuse what the release would not do, or would drop in silence."""
        if "deterministic" in options:
            refuse("the Triton kernels ignore deterministic without a word")
        super().check(workload, options)
        band = bottom_right_band(workload)
        if workload.softcap is not None:
            refuse("the Triton kernels ignore softcap without a word")
        if workload.dropout is not None:
            refuse(
                "the Triton kernels draw dropout from a seed and an offset of their own and ignore "
                "the generator without a word"
            )
        if band.left is not None or band.right not in (None, 0):
            refuse("the Triton kernels ignore window_size without a word")
        if workload.cache is not None and workload.cache.page_size is not None:
            refuse("the Triton kernels of release 2.8.3 read no page table")

    def consumed(self, workload: Workload, options: Mapping[str, object]) -> frozenset[str]:
        """Return the honoured fields; a window that is more than causal is none."""
        band = bottom_right_band(workload)
        dropped = {"softcap", "dropout", "cache.page_size"}
        if band.left is not None or band.right not in (None, 0):
            dropped.add("mask.window")
        return super().consumed(workload, options) - dropped

    def patterns(self, workload: Workload, options: Mapping[str, object]) -> KernelPattern:
        """Kernels named by Triton."""
        del options
        must = [r"\battn_fwd\b|\b_fwd_kernel_splitK\b"]
        if workload.has_backward:
            must.append(r"\bbwd_kernel|\b_bwd_")
        return KernelPattern(
            family="flash-attn 2, Triton", must=tuple(must), must_not=(r"ck_tile::",)
        )

    def _honoured(self, workload: Workload) -> frozenset[str]:
        del workload
        return frozenset()

    def _is_triton(self) -> bool:
        return True

    def _reason(self) -> str | None:
        if packages.release(_DISTRIBUTION) is None:
            return "flash-attn is not installed"
        if torch.version.hip is None:
            return "torch is not a ROCm build"
        if os.environ.get(_TRITON, "FALSE") != "TRUE":
            return f"{_TRITON}=TRUE is not set, so Composable Kernel would run"
        return _import_reason()


def _lse_is_shifted(workload: Workload) -> bool:
    """Tell whether the returned LSE is not that of the documented logits.

    Under a causal mask the kernels add slope * j instead of -slope * |i - j|. Each row's weights
    are the same, its LSE is greater by a constant of the row.
    """
    return workload.alibi is not None and bottom_right_band(workload).causal


def _import_reason() -> str | None:
    try:
        importlib.import_module(_MODULE)
    except Exception as error:
        return f"{_MODULE} cannot be imported: {type(error).__name__}: {error}"
    return None


def _seed(device: torch.device, seed: int, offset: int) -> None:
    """Set the generator that the library draws dropout from; each call advances it."""
    if device.type != "cuda":
        torch.manual_seed(seed)
        return
    index = torch.cuda.current_device() if device.index is None else device.index
    generator = torch.cuda.default_generators[index]
    generator.manual_seed(seed)
    generator.set_offset(offset)
