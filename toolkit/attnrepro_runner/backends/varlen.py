"""`torch.varlen`: torch.nn.attention.varlen.varlen_attn, packed sequences on torch's flash kernels.

The release decides the rest: parameters came one by one (scale and window with 2.11, grouped heads,
caches and num_splits with 2.12; the call is made with those that the function has), and from torch
2.14 it runs cuDNN by itself, with a log line alone, where the mask is full and cuDNN can. Causal is
`window_size=(-1, 0)`; the LSE is (heads, total). `implementation` swaps torch's own
FlashAttention-2 kernels for FA3 or FA4, process-wide.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import math
from typing import TYPE_CHECKING, Protocol, TypeVar, cast

import torch

from attnrepro_runner import libraries
from attnrepro_runner.backends import packages
from attnrepro_runner.backends.base import Availability, KernelPattern, MemoryOrder, Prepared
from attnrepro_runner.backends.flash_common import (
    DENSE_FIELDS,
    FlashPrepared,
    bottom_right_band,
    capability,
    check_common,
    check_options,
    check_packed_view,
    flag,
    integer,
    offsets,
    option_fields,
    refuse,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from attnrepro_runner.backends.base import Outputs, Tensors
    from attnrepro_runner.semantics import Workload


class _FreshMemory(Protocol):
    fill_uninitialized_memory: bool


_MODULE = "torch.nn.attention.varlen"
_PATTERNS = {
    "fa2": r"pytorch_flash::flash_",
    "fa3": r"FlashAttn(Fwd|Bwd)Sm(80|90)",
    "fa4": r"FlashAttention(Forward|Backward)Sm|flash_fwd_sm|flash_bwd_sm",
}
_EMPTY_ROW_LSE = {"fa2": math.inf, "fa3": -math.inf, "fa4": -math.inf}
_LIBRARIES = {"fa2": (), "fa3": ("flash_attn_interface",), "fa4": ("flash_attn.cute.interface",)}
_T = TypeVar("_T")
_CUDNN_SINCE = (2, 14)
_MAX_SPLITS = 128
_FOUR_VALUES_SINCE = (4, 0, 0, 19)
"""flash-attn-4 from which `_flash_attn_fwd` returns more than the two values torch unpacks."""


class TorchVarlen:
    """torch's variable-length attention."""

    name = "torch.varlen"
    empty_row_lse = _EMPTY_ROW_LSE["fa2"]
    option_names = frozenset({"deterministic", "num_splits", "implementation"})

    def empty_row_lse_of(self, options: Mapping[str, object]) -> float:
        """Return the LSE of a row that attends nothing: torch hands on what the kernels give."""
        return _EMPTY_ROW_LSE[str(options.get("implementation", "fa2"))]

    def modules(self, options: Mapping[str, object]) -> tuple[str, ...]:
        """Name the module within torch, and the library whose kernels it is to swap in."""
        return (_MODULE, *_LIBRARIES[str(options.get("implementation", "fa2"))])

    def availability(self) -> Availability:
        """Say which torch this is, and which parameters its function has."""
        base = libraries.torch_availability()
        try:
            function = _function()
        except (ImportError, AttributeError) as error:
            reason = f"this torch has no varlen_attn ({error})"
        else:
            flags = {**base.flags, "varlen_parameters": " ".join(_parameters(function))}
            return Availability(
                available=base.available,
                version=base.version,
                files=base.files,
                flags=flags,
                reason=base.reason,
            )
        return Availability(
            available=False,
            version=base.version,
            files=base.files,
            flags=base.flags,
            reason=reason,
        )

    def check(self, workload: Workload, options: Mapping[str, object]) -> None:
        """Refuse what this release has no parameter for, and where it would run cuDNN."""
        check_common(workload, dtypes=("float16", "bfloat16"))
        parameters = _parameters(_function())
        check_options(options, self.option_names)
        bottom_right_band(workload)
        for value, what in (
            (workload.softcap, "softcap"),
            (workload.alibi, "ALiBi"),
            (workload.dropout, "dropout"),
        ):
            if value is not None:
                refuse(f"varlen_attn has no {what}")
        if workload.head_dim_v != workload.head_dim or workload.head_dim > 256:
            refuse("head_dim_v must equal head_dim, at most 256")
        if workload.head_dim % 8:
            refuse("head_dim must be a multiple of 8")
        if max(workload.seqlens_q) == 0 or max(workload.seqlens_k) == 0:
            refuse("a call without queries or without keys has no kernel to launch")
        if not workload.is_packed:
            check_packed_view(workload)
        for needed, parameter in (
            (True, "scale"),
            (True, "window_size"),
            (workload.cache is not None, "seqused_k"),
            (workload.cache is not None and workload.cache.page_size is not None, "block_table"),
            ("num_splits" in options, "num_splits"),
            (workload.heads_q != workload.heads_kv, "enable_gqa"),
        ):
            if needed and parameter not in parameters:
                refuse(f"varlen_attn of torch {torch.__version__} has no parameter {parameter}")
        if workload.cache is not None and workload.cache.page_size is not None:
            implementation = options.get("implementation", "fa2")
            if implementation == "fa2" and workload.cache.page_size % 256:
                refuse("page_size must be a multiple of 256")
        if workload.cache is not None and workload.cache.append_in_call:
            refuse("varlen_attn does not append to a cache")
        check_implementation(options)
        splits = integer(options, "num_splits")
        if splits is not None and splits > _MAX_SPLITS:
            refuse(f"num_splits is at most {_MAX_SPLITS}")
        if picks_cudnn(workload, options):
            refuse(
                f"torch {torch.__version__} runs cuDNN here, not flash; num_splits: 1 keeps flash"
            )

    def consumed(self, workload: Workload, options: Mapping[str, object]) -> frozenset[str]:
        """Return the honoured fields."""
        fields = DENSE_FIELDS | {"layout", "seqlen_q", "seqlen_k"}
        if workload.cache is not None:
            fields |= {"cache", "cache.append", "cache.page_size"}
        return fields | option_fields(options, self.option_names)

    def memory_order(self, workload: Workload, options: Mapping[str, object]) -> MemoryOrder:
        """Nothing of the size of the scores is made."""
        del workload, options
        return MemoryOrder.LINEAR

    def patterns(self, workload: Workload, options: Mapping[str, object]) -> KernelPattern:
        """Flash kernels of the implementation, and cuDNN's never."""
        kind = str(options.get("implementation", "fa2"))
        must = [r"_varlen_attn|_flash_attention_forward", _PATTERNS[kind]]
        if workload.has_backward:
            must.append(r"_varlen_attn_backward|_flash_attention_backward")
        return KernelPattern(
            family=f"torch varlen, {kind}",
            must=tuple(must),
            must_not=(
                r"cudnn_generated|_cudnn_attention_forward",
                *(pattern for name, pattern in _PATTERNS.items() if name != kind),
            ),
        )

    def prepare(
        self, workload: Workload, options: Mapping[str, object], tensors: Tensors
    ) -> Prepared:
        """Bind one call."""
        self.check(workload, options)
        module = importlib.import_module(_MODULE)
        function = _function()
        parameters = _parameters(function)
        band = bottom_right_band(workload)
        # Right side 0 is spelled out: the function calls (-1, 0), and no other pair, causal.
        window = (-1 if band.left is None else band.left, -1 if band.right is None else band.right)
        device = tensors.q.device
        dense = not workload.is_packed
        packs_keys = dense if workload.cache is None else workload.cache.page_size is None
        bound: dict[str, object] = {
            "cu_seq_q": offsets(workload.seqlens_q, device) if dense else tensors.cu_seqlens_q,
            "cu_seq_k": offsets(workload.seqlens_k, device) if dense else tensors.cu_seqlens_k,
            "max_q": max(workload.seqlens_q),
            "max_k": max(workload.seqlens_k),
            "scale": workload.scale_value,
            "window_size": window,
            "return_aux": module.AuxRequest(lse=True),
        }
        cache = workload.cache
        if cache is not None:
            bound["seqused_k"] = tensors.seqused_k
            if cache.page_size is None:
                bound["cu_seq_k"] = offsets((cache.capacity,) * workload.batch, device)
            else:
                bound |= {"cu_seq_k": None, "block_table": tensors.page_table}
        if "enable_gqa" in parameters:
            bound["enable_gqa"] = workload.heads_q != workload.heads_kv
        if "num_splits" in options:
            bound["num_splits"] = integer(options, "num_splits")
        activate(options)

        def attend(
            q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
        ) -> tuple[torch.Tensor, torch.Tensor | None]:
            if dense:
                q = q.view(-1, *q.shape[2:])
            if packs_keys:
                k, v = k.view(-1, *k.shape[2:]), v.view(-1, *v.shape[2:])
            out, lse = cast(
                "tuple[torch.Tensor, torch.Tensor]", function(query=q, key=k, value=v, **bound)
            )
            if not dense:
                return out, lse
            heads = lse.view(lse.shape[0], workload.batch, -1).transpose(0, 1)
            return out.view(workload.batch, -1, *out.shape[1:]), heads

        prepared = FlashPrepared(workload, tensors, attend)
        return DeterministicPrepared(prepared) if flag(options, "deterministic") else prepared


class DeterministicPrepared:
    """Runs each call under torch's deterministic switch, which is process-wide.

    The filling of fresh memory, which the switch brings along, is off: it would add kernels.
    """

    def __init__(self, prepared: FlashPrepared) -> None:
        self._prepared = prepared

    def step(self) -> Outputs:
        """Do the phase's work once."""
        return _deterministic(self._prepared.step)

    def backward_step(self) -> Outputs:
        """Do the backward alone."""
        return _deterministic(self._prepared.backward_step)

    def append_step(self) -> None:
        """Write the new keys and values into the cache."""
        self._prepared.append_step()

    def call(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Attention of other tensors; a backward later must run under the switch too."""
        return _deterministic(lambda: self._prepared.call(q, k, v))


def picks_cudnn(workload: Workload, options: Mapping[str, object]) -> bool:
    """Tell whether this torch's varlen_attn would run cuDNN for the workload.

    The rule of torch 2.14: cuDNN 9.18 or later on compute capability 9.x or 10.x, more than 128
    queries, widths that are multiples of 8, no window, no grouped heads, no num_splits.
    """
    if packages.release_key(torch.__version__)[:2] < _CUDNN_SINCE:
        return False
    major, _ = capability() or (0, 0)
    cudnn = _cudnn_version()
    band = bottom_right_band(workload)
    return (
        major in (9, 10)
        and cudnn >= 91800
        and max(workload.seqlens_q) > 128
        and band.left is None
        and band.right is None
        and workload.heads_q == workload.heads_kv
        and workload.cache is None
        and "num_splits" not in options
        and options.get("implementation", "fa2") == "fa2"
    )


def check_implementation(options: Mapping[str, object]) -> None:
    """Refuse an implementation that torch cannot activate, or would call wrongly."""
    kind = options.get("implementation", "fa2")
    if kind == "fa2":
        return
    major, _ = capability() or (0, 0)
    if kind == "fa3":
        if major != 9:
            refuse("torch activates FA3 on compute capability 9.0 only")
        if importlib.util.find_spec("flash_attn_interface") is None:
            refuse("torch's FA3 needs the module flash_attn_interface, which is not installed")
        return
    if major not in (9, 10):
        refuse("torch activates FA4 on compute capability 9.x and 10.x only")
    release = packages.release("flash-attn-4")
    if release is None:
        refuse("torch's FA4 needs flash-attn-4, which is not installed")
    elif (
        packages.release_key(torch.__version__)[:2] < _CUDNN_SINCE
        and packages.release_key(release) >= _FOUR_VALUES_SINCE
    ):
        refuse(
            f"torch {torch.__version__} unpacks two values and flash-attn-4 {release} returns more"
        )


def activate(options: Mapping[str, object]) -> None:
    """Swap torch's flash kernels for the implementation of the options, or back."""
    attention = importlib.import_module("torch.nn.attention")
    kind = str(options.get("implementation", "fa2")).upper()
    if not hasattr(attention, "activate_flash_attention_impl"):
        if kind != "FA2":
            refuse(f"torch {torch.__version__} cannot activate {kind}")
        return
    if kind == "FA2":
        if attention.current_flash_attention_impl() is not None:
            attention.restore_flash_attention_impl()
    elif attention.current_flash_attention_impl() != kind:
        attention.activate_flash_attention_impl(kind)


def _deterministic(work: Callable[[], _T]) -> _T:
    was = torch.are_deterministic_algorithms_enabled()
    # Typed by hand: the flag is a property that torch's stubs do not show.
    memory = cast("_FreshMemory", importlib.import_module("torch.utils.deterministic"))
    fill = memory.fill_uninitialized_memory
    memory.fill_uninitialized_memory = False
    torch.use_deterministic_algorithms(True)
    try:
        return work()
    finally:
        torch.use_deterministic_algorithms(was)
        memory.fill_uninitialized_memory = fill


def _cudnn_version() -> int:
    version = cast("Callable[[], int | None]", torch.backends.cudnn.version)
    return version() or 0


def _function() -> Callable[..., object]:
    return cast("Callable[..., object]", importlib.import_module(_MODULE).varlen_attn)


def _parameters(function: Callable[..., object]) -> tuple[str, ...]:
    return tuple(inspect.signature(function).parameters)
