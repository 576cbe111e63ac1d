"""torch's math flags: set as the manifest says, read back as torch has them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, cast

import torch

if TYPE_CHECKING:
    from attnrepro_runner.fields import MathFlags


class _MathSdp(Protocol):
    def allow_fp16_bf16_reduction_math_sdp(self, enabled: bool) -> None: ...
    def fp16_bf16_reduction_math_sdp_allowed(self) -> bool: ...


_cuda = cast("_MathSdp", torch.backends.cuda)


def apply(flags: MathFlags) -> dict[str, str]:
    """Set the flags; return what torch says they are."""
    torch.set_float32_matmul_precision(flags.float32_matmul_precision)
    matmul = torch.backends.cuda.matmul
    matmul.allow_bf16_reduced_precision_reduction = flags.allow_reduced_precision_reduction
    matmul.allow_fp16_reduced_precision_reduction = flags.allow_reduced_precision_reduction
    torch.backends.cudnn.allow_tf32 = flags.float32_matmul_precision != "highest"
    _cuda.allow_fp16_bf16_reduction_math_sdp(flags.allow_math_sdp_reduction)
    return read_back()


def read_back() -> dict[str, str]:
    """Return torch's math flags as text."""
    matmul = torch.backends.cuda.matmul
    return {
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
        "matmul_allow_tf32": _text(matmul.allow_tf32),
        "cudnn_allow_tf32": _text(torch.backends.cudnn.allow_tf32),
        "allow_bf16_reduced_precision_reduction": _text(
            matmul.allow_bf16_reduced_precision_reduction
        ),
        "allow_fp16_reduced_precision_reduction": _text(
            matmul.allow_fp16_reduced_precision_reduction
        ),
        "allow_math_sdp_reduction": _text(_cuda.fp16_bf16_reduction_math_sdp_allowed()),
        "deterministic_algorithms": _text(torch.are_deterministic_algorithms_enabled()),
        "mkldnn": _text(torch.backends.mkldnn.enabled),
    }


def _text(value: object) -> str:
    return str(value).lower()
