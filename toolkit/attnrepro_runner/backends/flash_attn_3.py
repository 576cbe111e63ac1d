"""FlashAttention-3: the upstream interface, or the forward-only wheel fa3-fwd.

Both are the same code with other names. What was compiled is in the generated configuration, and
what was compiled out is refused here. Not more than one of the two may be installed, so that it is
never a question which ran. FA3 pads no head_dim, has no dropout and no ALiBi, and takes
`num_splits` 1 by default, 0 (a heuristic of the multiprocessor count) with a cache.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import torch

from attnrepro_runner.backends import packages
from attnrepro_runner.backends.base import Availability, KernelPattern, MemoryOrder, Prepared
from attnrepro_runner.backends.flash_common import (
    DENSE_FIELDS,
    Attend,
    FlashPrepared,
    appended,
    bottom_right_band,
    capability,
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


@dataclass(frozen=True, kw_only=True)
class _Build:
    """One of the two names under which FA3 is installed."""

    distribution: str
    interface: str
    config: str


_BUILDS = (
    _Build(
        distribution="flash-attn-3",
        interface="flash_attn_interface",
        config="flash_attn_config",
    ),
    _Build(distribution="fa3-fwd", interface="fa3_fwd_interface", config="fa3_fwd_config"),
)
_HEAD_DIMS = (64, 96, 128, 192, 256)
_MAX_SPLITS = 256


class FlashAttention3:
    """FlashAttention-3 on Hopper."""

    name = "flash_attn_3"
    empty_row_lse = -math.inf
    option_names = frozenset({"deterministic", "num_splits", "pack_gqa"})

    def modules(self, options: Mapping[str, object]) -> tuple[str, ...]:
        """Name the interface of either build; the one that is not there is not imported."""
        del options
        return tuple(build.interface for build in _BUILDS)

    def availability(self) -> Availability:
        """Import the one build that is installed and say what it is."""
        builds = _installed()
        if len(builds) != 1:
            found = " and ".join(build.interface for build in builds) or "neither"
            wanted = " or ".join(build.interface for build in _BUILDS)
            return Availability(
                available=False, reason=f"one module of {wanted} must be installed; found {found}"
            )
        build = builds[0]
        reason = None
        try:
            importlib.import_module(build.interface)
        except Exception as error:
            reason = f"{build.interface} cannot be imported: {type(error).__name__}: {error}"
        else:
            major, minor = capability() or (0, 0)
            if major not in (8, 9):
                reason = (
                    f"it needs compute capability 8.x or 9.0, and this device has {major}.{minor}"
                )
        flags = {name: str(value) for name, value in sorted(disabled(build.config).items())}
        return Availability(
            available=reason is None,
            version=packages.release(build.distribution),
            files=packages.kernel_files(build.distribution),
            flags={"interface": build.interface, **(flags or {"build_flags": "not recorded"})},
            reason=reason,
        )

    def check(self, workload: Workload, options: Mapping[str, object]) -> None:
        """Refuse what was compiled out and what the interface would not do."""
        check_common(workload, dtypes=("float16", "bfloat16", "float8_e4m3fn"))
        check_options(options, self._honoured(workload))
        for value, what in ((workload.alibi, "ALiBi"), (workload.dropout, "dropout")):
            if value is not None:
                refuse(f"FlashAttention-3 has no {what}")
        _check_widths(workload)
        if max(workload.seqlens_q) == 0 or max(workload.seqlens_k) == 0:
            refuse("a call without queries or without keys has no kernel to launch")
        splits = integer(options, "num_splits")
        if splits is not None and splits > _MAX_SPLITS:
            refuse(f"num_splits is at most {_MAX_SPLITS}")
        if flag(options, "deterministic") and workload.head_dim > 192:
            refuse("the deterministic backward takes head_dim up to 192")
        if options.get("pack_gqa") is False:
            _check_unpacked(workload, splits)
        builds = _installed()
        if len(builds) == 1:
            _check_build(workload, options, disabled(builds[0].config))

    def consumed(self, workload: Workload, options: Mapping[str, object]) -> frozenset[str]:
        """Return the honoured fields."""
        fields = DENSE_FIELDS | {"softcap", "head_dim_v", "fp8", "dtype_out"}
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
        """Kernels of FA3's classes; in FP8 their type must be e4m3."""
        del options
        must = [r"FlashAttnFwdSm(80|90)"]
        if workload.has_backward:
            must.append(r"FlashAttnBwdSm(80|90)")
        if workload.fp8 is not None:
            must.append(r"FlashAttnFwdSm90.*e4m3|e4m3.*FlashAttnFwdSm90")
        return KernelPattern(
            family="FlashAttention-3",
            must=tuple(must),
            must_not=(r"flash::flash_fwd", r"cudnn_generated", r"fmha_cutlass"),
        )

    def prepare(
        self, workload: Workload, options: Mapping[str, object], tensors: Tensors
    ) -> Prepared:
        """Bind one call."""
        self.check(workload, options)
        (build,) = _installed()
        module = importlib.import_module(build.interface)
        band = bottom_right_band(workload)
        bound: dict[str, object] = {
            "softmax_scale": workload.scale_value,
            "causal": band.causal,
            "window_size": band.window(-1),
            "softcap": workload.softcap or 0.0,
            "pack_gqa": options.get("pack_gqa"),
            "q_descale": tensors.q_descale,
            "k_descale": tensors.k_descale,
            "v_descale": tensors.v_descale,
        }
        if "num_splits" in options:
            bound["num_splits"] = integer(options, "num_splits")
        if workload.cache is not None:
            name = "flash_attn_with_kvcache"
            keys = ("k_cache", "v_cache")
            bound |= {
                **appended(workload, tensors),
                "cache_seqlens": lengths_before_append(workload, tensors),
                "page_table": tensors.page_table,
                "return_softmax_lse": True,
            }
            if workload.is_packed:
                bound |= {
                    "cu_seqlens_q": tensors.cu_seqlens_q,
                    "max_seqlen_q": max(workload.seqlens_q),
                }
        else:
            name = "flash_attn_varlen_func" if workload.is_packed else "flash_attn_func"
            keys = ("k", "v")
            bound["deterministic"] = flag(options, "deterministic")
            if workload.is_packed:
                bound |= {
                    "cu_seqlens_q": tensors.cu_seqlens_q,
                    "cu_seqlens_k": tensors.cu_seqlens_k,
                    "max_seqlen_q": max(workload.seqlens_q),
                    "max_seqlen_k": max(workload.seqlens_k),
                }
        function = cast("Callable[..., object]", getattr(module, name))
        if "return_attn_probs" in inspect.signature(function).parameters:
            # Its second value is the LSE; release 2.8.3's interface has no such parameter.
            bound["return_attn_probs"] = True
        return FlashPrepared(workload, tensors, _attend(function, keys, bound))

    def _honoured(self, workload: Workload) -> frozenset[str]:
        if workload.cache is None:
            return self.option_names
        return self.option_names - {"deterministic"}


def disabled(config: str) -> dict[str, bool]:
    """Return the build flags by their short name, e.g. BACKWARD: true is compiled out."""
    try:
        module = importlib.import_module(config)
    except ImportError:
        return {}
    flags = cast("Mapping[str, Mapping[str, bool]]", module.CONFIG)["build_flags"]
    return {
        name.partition("_DISABLE_")[2]: bool(value)
        for name, value in flags.items()
        if "_DISABLE_" in name
    }


def _installed() -> list[_Build]:
    return [build for build in _BUILDS if importlib.util.find_spec(build.interface) is not None]


def _attend(
    function: Callable[..., object], keys: tuple[str, str], bound: Mapping[str, object]
) -> Attend:
    def attend(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        result = function(**{"q": q, keys[0]: k, keys[1]: v}, **bound)
        if isinstance(result, torch.Tensor):
            return result, None
        out, lse, *_ = cast("tuple[torch.Tensor, torch.Tensor]", result)
        return out, lse

    return attend


def _check_widths(workload: Workload) -> None:
    width, width_v = workload.head_dim, workload.head_dim_v
    multiple = 16 if workload.fp8 is not None else 8
    if width > 256:
        refuse("head_dim is at most 256")
    if width % multiple or width_v % multiple:
        refuse(f"head_dim and head_dim_v must be multiples of {multiple}; nothing is padded")
    if width_v != width:
        mla = 128 < width <= 192 and 96 < width_v <= 128
        wide = width <= 64 and width_v <= 512
        if not (mla or wide):
            refuse(f"head_dim {width} with head_dim_v {width_v} has no kernel")
        if workload.has_backward:
            refuse("the backward takes equal widths")


def _check_unpacked(workload: Workload, splits: int | None) -> None:
    """Refuse `pack_gqa: false` where the library packs all the same."""
    if workload.cache is not None or splits not in (None, 1):
        refuse(
            "pack_gqa is forced on for paged and split calls, so false is not honoured with a "
            "cache or with num_splits other than 1"
        )
    major, _ = capability() or (9, 0)
    if major == 8:
        refuse("pack_gqa is forced on for compute capability 8.x, so false is not honoured")


def _check_build(
    workload: Workload, options: Mapping[str, object], compiled_out: Mapping[str, bool]
) -> None:
    band = bottom_right_band(workload)
    window = band.left is not None or band.right not in (None, 0)
    cache = workload.cache
    paged = cache is not None and cache.page_size is not None
    splits = integer(options, "num_splits")
    rounded = next((d for d in _HEAD_DIMS if workload.head_dim <= d), 256)
    unequal = workload.head_dim_v != workload.head_dim
    used = {
        "BACKWARD": workload.has_backward,
        "FP16": workload.dtype == "float16",
        "FP8": workload.fp8 is not None,
        "LOCAL": window,
        "SOFTCAP": workload.softcap is not None,
        "PAGEDKV": paged,
        "APPENDKV": cache is not None and cache.append > 0 and cache.append_in_call,
        "VARLEN": workload.is_packed or cache is not None,
        "SPLIT": splits is not None and splits > 1,
        "PACKGQA": options.get("pack_gqa") is True,
        f"HDIM{rounded}": True,
        "HDIMDIFF64": unequal and workload.head_dim <= 64,
        "HDIMDIFF192": unequal and workload.head_dim > 128,
    }
    for name, is_used in used.items():
        if is_used and compiled_out.get(name, False):
            refuse(f"this build was compiled without {name}")
