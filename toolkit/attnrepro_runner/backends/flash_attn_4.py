"""flash-attn-4, FlashAttention in CuTe DSL, compiled at the first call of each shape class.

An open side of a window is None here: -1 is read as a number, and (-1, 0) would silently be full
attention. The functions always return (out, lse). There is no dropout, no ALiBi, no append and, in
the public functions, no descale. Several argument names of FlashAttention-2 stand at other
positions, so everything goes by keyword. The distribution's release counts; `flash_attn.cute`'s own
`__version__` asks for a distribution of another name and is always 0.0.0.
"""

from __future__ import annotations

import importlib
import math
from typing import TYPE_CHECKING, cast

from attnrepro_runner.backends import packages
from attnrepro_runner.backends.base import Availability, KernelPattern, MemoryOrder, Prepared
from attnrepro_runner.backends.flash_common import (
    DENSE_FIELDS,
    FlashPrepared,
    bottom_right_band,
    capability,
    check_common,
    check_options,
    flag,
    integer,
    option_fields,
    refuse,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import torch

    from attnrepro_runner.backends.base import Tensors
    from attnrepro_runner.semantics import Workload

_DISTRIBUTION = "flash-attn-4"
_MODULE = "flash_attn.cute.interface"
_COMPILER = ("nvidia-cutlass-dsl", "quack-kernels", "apache-tvm-ffi")
_ENVIRONMENT = (
    "FLASH_ATTENTION_ARCH",
    "FLASH_ATTENTION_NUM_SMS",
    "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED",
    "CUTE_DSL_ARCH",
    "CUTE_DSL_PTXAS_PATH",
    "FA_CLC",
    "FA_DISABLE_2CTA",
)
_WIDTHS_SM100 = {(192, 128), (256, 256)}


class FlashAttention4:
    """FlashAttention-4 on Hopper and Blackwell."""

    name = "flash_attn_4"
    empty_row_lse = -math.inf
    option_names = frozenset({"deterministic", "num_splits", "pack_gqa"})

    def modules(self, options: Mapping[str, object]) -> tuple[str, ...]:
        """Name the interface (about 12 s)."""
        del options
        return (_MODULE,)

    def availability(self) -> Availability:
        """Import it (about 12 s) and say what it is."""
        version = packages.release(_DISTRIBUTION)
        if version is None:
            return Availability(available=False, reason="flash-attn-4 is not installed")
        reason = None
        altered = packages.altered_files(_DISTRIBUTION, suffixes=(".py",))
        if altered:
            # flash-attn 2.8.3 brings an old flash_attn/cute of its own.
            reason = f"{len(altered)} files are not this release's, e.g. {altered[0]}"
        else:
            try:
                importlib.import_module(_MODULE)
            except Exception as error:
                reason = f"{_MODULE} cannot be imported: {type(error).__name__}: {error}"
        flags = {f"dist:{name}": packages.release(name) or "absent" for name in _COMPILER}
        return Availability(
            available=reason is None,
            version=version,
            files=packages.kernel_files(_DISTRIBUTION, python=True),
            flags={**flags, **packages.environment_flags(_ENVIRONMENT)},
            reason=reason,
        )

    def check(self, workload: Workload, options: Mapping[str, object]) -> None:
        """Refuse what the release would not do."""
        check_common(workload, dtypes=("float16", "bfloat16"))
        check_options(options, self._honoured(workload))
        for value, what in ((workload.alibi, "ALiBi"), (workload.dropout, "dropout")):
            if value is not None:
                refuse(f"FlashAttention-4 has no {what}")
        bottom_right_band(workload)
        cache = workload.cache
        if cache is not None and cache.append and cache.append_in_call:
            refuse("FlashAttention-4 does not append to a cache")
        if max(workload.seqlens_q) == 0 or max(workload.seqlens_k) == 0:
            refuse("a call without queries or without keys launches no kernel")
        major, _ = capability() or (9, 0)
        _check_widths(workload, major)
        splits = integer(options, "num_splits")
        if splits is not None and splits != 1 and major not in (10, 11):
            refuse("num_splits other than 1 needs compute capability 10.x or 11.x")
        if options.get("pack_gqa") is True and major in (10, 11) and workload.head_dim == 256:
            refuse("pack_gqa is forced off for head_dim 256 on compute capability 10.x, 11.x")
        if cache is not None and cache.page_size is not None and major in (8, 12):
            refuse("a paged cache needs compute capability 9.x to 11.x")
        if workload.has_backward and major == 8:
            refuse("the backward needs compute capability 9.x or later")
        if flag(options, "deterministic") and major == 12:
            refuse("the deterministic backward is not there for compute capability 12.x")

    def consumed(self, workload: Workload, options: Mapping[str, object]) -> frozenset[str]:
        """Return the honoured fields."""
        fields = DENSE_FIELDS | {"softcap", "head_dim_v"}
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
        """Kernels named after the DSL's classes."""
        del options
        must = [r"FlashAttention(MLA)?Forward|BlackwellFusedMultiHeadAttentionForward"]
        if workload.has_backward:
            must.append(r"FlashAttentionBackward|FusedMultiHeadAttentionBackward")
        return KernelPattern(
            family="FlashAttention-4",
            must=tuple(must),
            must_not=(r"flash::flash_fwd", r"FlashAttnFwdSm", r"cudnn_generated", r"fmha_cutlass"),
        )

    def prepare(
        self, workload: Workload, options: Mapping[str, object], tensors: Tensors
    ) -> Prepared:
        """Bind one call; the first `step` compiles."""
        self.check(workload, options)
        module = importlib.import_module(_MODULE)
        band = bottom_right_band(workload)
        bound: dict[str, object] = {
            "softmax_scale": workload.scale_value,
            "causal": band.causal,
            "window_size": band.window(None),
            "softcap": workload.softcap or 0.0,
            "num_splits": 1 if "num_splits" not in options else integer(options, "num_splits"),
            "pack_gqa": options.get("pack_gqa"),
            "deterministic": flag(options, "deterministic"),
            "return_lse": True,
        }
        name = "flash_attn_func"
        if workload.is_packed or workload.cache is not None:
            name = "flash_attn_varlen_func"
        if workload.is_packed:
            bound |= {
                "cu_seqlens_q": tensors.cu_seqlens_q,
                "max_seqlen_q": max(workload.seqlens_q),
            }
        if workload.cache is not None:
            bound |= {"seqused_k": tensors.seqused_k, "page_table": tensors.page_table}
        elif workload.is_packed:
            bound |= {
                "cu_seqlens_k": tensors.cu_seqlens_k,
                "max_seqlen_k": max(workload.seqlens_k),
            }
        function = cast("Callable[..., tuple[torch.Tensor, torch.Tensor]]", getattr(module, name))

        def attend(
            q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
        ) -> tuple[torch.Tensor, torch.Tensor | None]:
            return function(q=q, k=k, v=v, **bound)

        return FlashPrepared(workload, tensors, attend)

    def _honoured(self, workload: Workload) -> frozenset[str]:
        if workload.cache is None:
            return self.option_names
        return self.option_names - {"deterministic"}


def _check_widths(workload: Workload, major: int) -> None:
    width, width_v = workload.head_dim, workload.head_dim_v
    if width % 8 or width_v % 8:
        refuse("head_dim and head_dim_v must be multiples of 8")
    if major not in (10, 11) and max(width, width_v) > 256:
        refuse(f"head_dim and head_dim_v are at most 256 on compute capability {major}.x")
    if major in (10, 11):
        if max(width, width_v) > 128 and (width, width_v) not in _WIDTHS_SM100:
            refuse(
                "on compute capability 10.x, 11.x widths are up to 128, or (192, 128), (256, 256)"
            )
        if width == 256 and workload.softcap is not None:
            refuse("head_dim 256 takes no softcap on compute capability 10.x, 11.x")
        if width == 256 and workload.cache is not None:
            refuse("head_dim 256 takes no seqused_k on compute capability 10.x, 11.x")
