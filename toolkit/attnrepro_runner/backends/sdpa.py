"""`sdpa.*`: torch.nn.functional.scaled_dot_product_attention, one backend each, never another.

`F.scaled_dot_product_attention` picks a backend by itself and falls to MATH without a word. Here
exactly one is enabled, torch is asked which one it would take, and the profile is checked after
(`patterns`). `is_causal` means top_left; bottom_right has `causal_lower_right` where a GPU's flash
kernels run; every other mask is a tensor of seqlen_q x seqlen_k that the caller makes, which is why
the declared memory order is S2_mask then. The function returns no
LSE; `FlashEntry` is the labelled second entry of torch's CPU flash operator that does.
"""

from __future__ import annotations

import re
import warnings
from typing import TYPE_CHECKING, ClassVar, Protocol, cast

import torch
from torch.nn.attention import SDPBackend

from attnrepro_runner import libraries
from attnrepro_runner.backends import torchcalls
from attnrepro_runner.backends.base import (
    Availability,
    KernelPattern,
    MemoryOrder,
    Outputs,
    Prepared,
    Tensors,
    Unsupported,
)
from attnrepro_runner.outofmemory import raise_out_of_memory

if TYPE_CHECKING:
    from collections.abc import Mapping

    from attnrepro_runner.backends.torchcalls import Group
    from attnrepro_runner.semantics import Workload

_FUSED = r"_scaled_dot_product_(flash|efficient|cudnn|fused)"


class _Switches(Protocol):
    """The switches of torch.backends.cuda, which rule the CPU's choice too."""

    def enable_flash_sdp(self, enabled: bool) -> None: ...
    def enable_math_sdp(self, enabled: bool) -> None: ...
    def enable_mem_efficient_sdp(self, enabled: bool) -> None: ...
    def enable_cudnn_sdp(self, enabled: bool) -> None: ...
    def flash_sdp_enabled(self) -> bool: ...
    def math_sdp_enabled(self) -> bool: ...
    def mem_efficient_sdp_enabled(self) -> bool: ...
    def cudnn_sdp_enabled(self) -> bool: ...


_switches = cast("_Switches", torch.backends.cuda)


def select(backend: SDPBackend) -> None:
    """Enable one backend and disable the others, for this process.

    It is what `sdpa_kernel` does on entry, without its 20 microseconds at every call.
    """
    _switches.enable_flash_sdp(backend == SDPBackend.FLASH_ATTENTION)
    _switches.enable_math_sdp(backend == SDPBackend.MATH)
    _switches.enable_mem_efficient_sdp(backend == SDPBackend.EFFICIENT_ATTENTION)
    _switches.enable_cudnn_sdp(backend == SDPBackend.CUDNN_ATTENTION)


def is_selected(backend: SDPBackend) -> bool:
    """Say whether exactly this backend is enabled."""
    return (
        _switches.flash_sdp_enabled() == (backend == SDPBackend.FLASH_ATTENTION)
        and _switches.math_sdp_enabled() == (backend == SDPBackend.MATH)
        and _switches.mem_efficient_sdp_enabled() == (backend == SDPBackend.EFFICIENT_ATTENTION)
        and _switches.cudnn_sdp_enabled() == (backend == SDPBackend.CUDNN_ATTENTION)
    )


class SdpaBackend:
    """What the four have in common."""

    name: str
    kind: ClassVar[SDPBackend]
    empty_row_lse = 0.0
    option_names: frozenset[str] = frozenset()

    def modules(self, options: Mapping[str, object]) -> tuple[str, ...]:
        """Name none: torch is imported before."""
        del options
        return ()

    def availability(self) -> Availability:
        """Say which torch this is."""
        return libraries.torch_availability()

    def check(self, workload: Workload, options: Mapping[str, object]) -> None:
        """Refuse by what the function has no argument for, then ask torch with a small call."""
        torchcalls.check_shared(workload, options)
        for value, what in ((workload.softcap, "softcap"), (workload.alibi, "ALiBi")):
            if value is not None:
                message = f"F.scaled_dot_product_attention has no {what} argument"
                raise Unsupported(message)
        if workload.dropout is not None:
            message = (
                "F.scaled_dot_product_attention takes its dropout from the global generator and "
                "returns no mask, so that it can be neither seeded by offset nor checked"
            )
            raise Unsupported(message)
        self._ask_torch(workload)

    def consumed(self, workload: Workload, options: Mapping[str, object]) -> frozenset[str]:
        """Lengths, heads, strides, masks, scale, cache; unequal head widths where torch can."""
        del workload, options
        return torchcalls.SHARED_FIELDS | {"head_dim_v"}

    def memory_order(self, workload: Workload, options: Mapping[str, object]) -> MemoryOrder:
        """Linear, unless a mask has to be made."""
        del options
        if all(
            _needs_no_tensor(workload, g) or _is_lower_right(self.kind, workload, g)
            for g in torchcalls.groups(workload)
        ):
            return MemoryOrder.LINEAR
        return MemoryOrder.MASK

    def patterns(self, workload: Workload, options: Mapping[str, object]) -> KernelPattern:
        """Name the operator of this backend alone."""
        raise NotImplementedError

    def prepare(
        self, workload: Workload, options: Mapping[str, object], tensors: Tensors
    ) -> Prepared:
        """Make the masks, enable the one backend."""
        self.check(workload, options)
        return SdpaPrepared(self.kind, workload, tensors)

    def _ask_torch(self, workload: Workload) -> None:
        """Make a small call of the same class; torch's warnings are the reason if it refuses."""
        device = libraries.torch_device()
        dtype = torchcalls.DTYPES[workload.dtype]
        for group in torchcalls.groups(workload)[:4]:
            seqlen_q, seqlen_k = _small(group)
            q, k, v = (
                torch.zeros(1, seqlen, heads, width, dtype=dtype, device=device).transpose(1, 2)
                for seqlen, heads, width in (
                    (seqlen_q, workload.heads_q, workload.head_dim),
                    (seqlen_k, workload.heads_kv, workload.head_dim),
                    (seqlen_k, workload.heads_kv, workload.head_dim_v),
                )
            )
            mask: torch.Tensor | None = None
            if _is_lower_right(self.kind, workload, group):
                mask = _lower_right(seqlen_q, seqlen_k)
            elif not _needs_no_tensor(workload, group):
                mask = torch.zeros(seqlen_q, seqlen_k, dtype=dtype, device=device)
            causal = mask is None and torchcalls.is_top_left_causal(workload, group.first)
            if workload.phase in ("forward", "forward_backward"):
                q, k, v = (x.requires_grad_() for x in (q, k, v))
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                select(self.kind)
                try:
                    torch.nn.functional.scaled_dot_product_attention(
                        q,
                        k,
                        v,
                        attn_mask=mask,
                        is_causal=causal,
                        enable_gqa=workload.heads_q != workload.heads_kv,
                    )
                except RuntimeError as error:
                    raise_out_of_memory(error)
                    raise Unsupported(_reason(error, caught)) from error


class SdpaPrepared(torchcalls.TorchPrepared):
    """The function bound to tensors, with one backend enabled."""

    def __init__(self, kind: SDPBackend, workload: Workload, tensors: Tensors) -> None:
        """Make one mask a group, in the inputs' dtype, as the kernels want it."""
        self._kind = kind
        self._gqa = workload.heads_q != workload.heads_kv
        self.masks: dict[Group, torch.Tensor] = {}
        self.causal: dict[Group, bool] = {}
        for group in torchcalls.groups(workload):
            if _is_lower_right(kind, workload, group):
                self.causal[group] = False
                self.masks[group] = _lower_right(group.seqlen_q, group.seqlen_k)
                continue
            tensor_free = _needs_no_tensor(workload, group)
            self.causal[group] = tensor_free and not torchcalls.attends_everything(
                workload, group.first
            )
            if not tensor_free:
                allowed = torchcalls.boolean_mask(workload, group, tensors.q.device)
                self.masks[group] = torch.zeros(
                    allowed.shape, dtype=tensors.q.dtype, device=tensors.q.device
                ).masked_fill_(~allowed, float("-inf"))
        super().__init__(workload, tensors, self._call)
        select(kind)

    def step(self) -> Outputs:
        """Do the phase's work once, under the one backend."""
        if not is_selected(self._kind):
            select(self._kind)
        return super().step()

    def backward_step(self) -> Outputs:
        """Do the backward alone, of a forward under the one backend."""
        if not is_selected(self._kind):
            select(self._kind)
        return super().backward_step()

    def _call(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, group: Group
    ) -> tuple[torch.Tensor, None]:
        out = torch.nn.functional.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=self.masks.get(group),
            is_causal=self.causal[group],
            scale=self._workload.scale_value,
            enable_gqa=self._gqa,
        )
        return out, None


class SdpaMath(SdpaBackend):
    """The unfused computation."""

    name = "sdpa.math"
    kind = SDPBackend.MATH

    def memory_order(self, workload: Workload, options: Mapping[str, object]) -> MemoryOrder:
        """All scores are in memory."""
        del workload, options
        return MemoryOrder.SCORES

    def patterns(self, workload: Workload, options: Mapping[str, object]) -> KernelPattern:
        """The MATH operator."""
        del workload, options
        return KernelPattern(
            family="sdpa_math",
            must=(r"^aten::_scaled_dot_product_attention_math$",),
            must_not=(_FUSED,),
        )


class SdpaFlash(SdpaBackend):
    """torch's own flash kernels: on a CPU an operator of its own, on a GPU FlashAttention-2."""

    name = "sdpa.flash"
    kind = SDPBackend.FLASH_ATTENTION

    def patterns(self, workload: Workload, options: Mapping[str, object]) -> KernelPattern:
        """The flash operator, and on a GPU its kernels."""
        del options
        if libraries.torch_device().type == "cpu":
            operator = r"^aten::_scaled_dot_product_flash_attention_for_cpu"
            must: tuple[str, ...] = (operator + "$",)
            if workload.has_backward:
                must = (*must, operator + "_backward$")
            family = "sdpa_flash_cpu"
        else:
            must = (
                r"^aten::_scaled_dot_product_flash_attention$",
                r"pytorch_flash::flash_fwd|attn_fwd|ck_tile::.*Fmha|fmha_fwd",
            )
            family = "sdpa_flash"
        return KernelPattern(
            family=family,
            must=must,
            must_not=(r"_scaled_dot_product_(attention_math|efficient|cudnn)", r"^aten::_softmax$"),
        )

    def second_entry(
        self, workload: Workload, options: Mapping[str, object], tensors: Tensors
    ) -> tuple[str, Prepared | None]:
        """Return the name and the binding of an entry that returns the LSE, or why there is none.

        On a GPU the operator called by name means another mask (is_causal is bottom_right). On a
        CPU its float32 LSE is a byproduct in bfloat16 and float16, off by up to 112 ulps, since
        exponentials are taken to the accuracy that the output needs.
        """
        del options
        if tensors.q.device.type != "cpu":
            return "on a GPU the operator called by name means another mask", None
        if workload.dtype != "float32":
            return f"{FlashEntry.label} rounds its LSE as {workload.dtype} needs it", None
        return FlashEntry.label, FlashEntry(workload, tensors)


class SdpaEfficient(SdpaBackend):
    """The memory-efficient kernels; GPU only."""

    name = "sdpa.efficient"
    kind = SDPBackend.EFFICIENT_ATTENTION

    def patterns(self, workload: Workload, options: Mapping[str, object]) -> KernelPattern:
        """The efficient operator and the CUTLASS fmha kernels."""
        del workload, options
        return KernelPattern(
            family="sdpa_efficient",
            must=(
                r"^aten::_scaled_dot_product_efficient_attention$",
                r"fmha_cutlassF_|attn_fwd|fmha_fwd",
            ),
            must_not=(r"_scaled_dot_product_(attention_math|flash|cudnn)", r"pytorch_flash::"),
        )


class SdpaCudnn(SdpaBackend):
    """cuDNN's attention; NVIDIA only."""

    name = "sdpa.cudnn"
    kind = SDPBackend.CUDNN_ATTENTION

    def patterns(self, workload: Workload, options: Mapping[str, object]) -> KernelPattern:
        """The cuDNN operator and its generated kernels."""
        del workload, options
        return KernelPattern(
            family="sdpa_cudnn",
            must=(
                r"^aten::_scaled_dot_product_cudnn_attention$",
                r"cudnn_generated_(fort_native|oss)_.*sdpa|cudnn.*sdpa",
            ),
            must_not=(
                r"_scaled_dot_product_(attention_math|flash|efficient)",
                r"pytorch_flash::|fmha_cutlass",
            ),
        )


class FlashEntry(torchcalls.TorchPrepared):
    """The second entry: torch's CPU flash operator called by name, which returns the LSE.

    Its LSE may stand for `sdpa.flash` only where its output has the same bits.
    """

    label = "aten::_scaled_dot_product_flash_attention_for_cpu"

    def __init__(self, workload: Workload, tensors: Tensors) -> None:
        """Bind the same masks as `SdpaPrepared`."""
        self._same = SdpaPrepared(SDPBackend.FLASH_ATTENTION, workload, tensors)
        super().__init__(workload, tensors, self._call)

    def _call(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, group: Group
    ) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q,
            k,
            v,
            0.0,
            self._same.causal[group],
            attn_mask=self._same.masks.get(group),
            scale=self._workload.scale_value,
        )
        return out, lse


def _needs_no_tensor(workload: Workload, group: Group) -> bool:
    return torchcalls.attends_everything(workload, group.first) or torchcalls.is_top_left_causal(
        workload, group.first
    )


def _lower_right(seqlen_q: int, seqlen_k: int) -> torch.Tensor:
    from torch.nn.attention import bias  # it imports the compiler: 3 s that few calls need

    return bias.causal_lower_right(seqlen_q, seqlen_k)


def _on_gpu() -> bool:
    return libraries.torch_device().type == "cuda"


def _is_lower_right(kind: SDPBackend, workload: Workload, group: Group) -> bool:
    """Say whether `causal_lower_right` expresses this mask for a GPU's flash kernels.

    Under it torch calls FlashAttention-2, whose causal is bottom_right, without a tensor. More
    queries than keys are left out: torch warns that it gives NaN for the rows without keys.
    """
    if kind != SDPBackend.FLASH_ATTENTION or not _on_gpu():
        return False
    low, high = workload.diagonals(group.first)
    everything_before = low is None or low <= 1 - group.seqlen_q
    return (
        high == group.seqlen_k - group.seqlen_q
        and everything_before
        and 0 < group.seqlen_q < group.seqlen_k
        and not _needs_no_tensor(workload, group)
    )


def _small(group: Group) -> tuple[int, int]:
    """Lengths of a small call that is square, wide or tall as the group's is."""
    seqlen_q = min(group.seqlen_q, 16)
    if group.seqlen_q == group.seqlen_k:
        return seqlen_q, seqlen_q
    return seqlen_q, min(group.seqlen_k, 32 if group.seqlen_k > group.seqlen_q else 8)


def _reason(error: RuntimeError, caught: list[warnings.WarningMessage]) -> str:
    texts = [re.sub(r" ?\(Triggered internally.*", "", str(w.message), flags=re.S) for w in caught]
    reasons = [text for text in texts if text and not text.endswith("because:")]
    return "torch: " + " ".join([str(error).strip(), *reasons])
