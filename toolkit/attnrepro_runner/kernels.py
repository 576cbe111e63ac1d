"""Which code ran: operators and kernels of one profiled call, and the verdict on the name.

On a CPU the operators tell; on a GPU the kernels do. A backend's `KernelPattern` decides; the
families below put a name to what ran instead.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from attnrepro_runner import libraries, trace

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from attnrepro_runner.backends.base import KernelPattern

FAMILIES: Final = (
    ("torch flash on a CPU", r"_scaled_dot_product_flash_attention_for_cpu"),
    ("torch flash", r"pytorch_flash::flash_(fwd|bwd)\w*_kernel"),
    ("flash-attn 2", r"(?<!pytorch_)flash::flash_(fwd|bwd)_|^void flash_(fwd|bwd)\w*_kernel<"),
    ("torch memory-efficient", r"fmha_cutlass[FB]_(f16|bf16|f32)_(not)?aligned_\d+x\d+"),
    ("cuDNN", r"cudnn_generated_(fort_native|oss)_.*sdpa"),
    ("flash-attn 3", r"FlashAttn(Fwd|Bwd)Sm(80|90)|FlashAttnFwdCombine"),
    ("flash-attn 4", r"FlashAttention(Forward|Backward)\w*|FlashAttentionMLAForward"),
    ("ROCm Composable Kernel", r"ck_tile::(FmhaFwd\w*Kernel|FmhaBwd)|fmha_(fwd|bwd)"),
    ("ROCm Triton or AOTriton", r"attn_fwd|bwd_kernel_fused|_bwd_preprocess|_fwd_kernel_splitK"),
    ("flex", r"triton_tem_fused_\w*flex|## Call CompiledFxGraph"),
    ("torch math", r"_scaled_dot_product_attention_math"),
    ("unfused products", r"^aten::bmm$|nvjet_|sm\d+_xmma|cutlass.*gemm"),
)
"""Family to the pattern of its operators or kernels; the first that matches names what ran."""

_NOISE: Final = re.compile(r"^(cuda|hip)[A-Z]|^Memcpy|^Memset|^Torch|Profiler|^\[memory\]$")


@dataclass(frozen=True, kw_only=True)
class Seen:
    """What one call ran."""

    operators: Mapping[str, int] = field(default_factory=dict)
    """Operator to number of calls."""
    kernels: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """Device kernel to number of launches and total ns."""
    on_device: bool = False
    """Whether kernels of a device were looked for."""


@dataclass(frozen=True, kw_only=True)
class Execution:
    """What ran, and whether it is what the name promises."""

    seen: Seen
    expected: str
    verdict: str
    """as_named, fallback or none_seen."""
    reason: str | None
    toolchain: Mapping[str, str]
    plan: Mapping[str, str]
    cubins: tuple[str, ...] = ()
    """SHA-256 of the code that was compiled at run time, for this subject so far."""

    @property
    def ok(self) -> bool:
        """Whether the named backend ran."""
        return self.verdict == "as_named"

    def to_json(self) -> dict[str, object]:
        """Return the `execution` object of a result, with the loaded libraries' digests."""
        return {
            "operators": dict(self.seen.operators),
            "kernels": [
                {"name": name[:2000], "count": count, "total_ns": total}
                for name, (count, total) in sorted(self.seen.kernels.items())
            ],
            "libraries": libraries.kernel_libraries(),
            "toolchain": dict(self.toolchain),
            "cubins": list(self.cubins),
            "plan": dict(self.plan),
            "expected": self.expected,
            "verdict": self.verdict,
            "reason": self.reason,
        }


def profile(work: Callable[[], object], *, on_device: bool) -> Seen:
    """Run a call once under torch's profiler.

    On a CPU without kineto, whose first start costs a second and adds nothing there.
    """
    return _with_kernels(work) if on_device else _operators_alone(work)


def _operators_alone(work: Callable[[], object]) -> Seen:
    import torch

    with torch.autograd.profiler.profile(use_kineto=False) as profiler:
        work()
    operators: dict[str, int] = {}
    for event in profiler.function_events or ():
        if not _NOISE.search(event.name):
            operators[event.name] = operators.get(event.name, 0) + 1
    return Seen(operators=operators)


def _with_kernels(work: Callable[[], object]) -> Seen:
    import torch
    from torch.profiler import ProfilerActivity

    activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profiler:
        kept = work()
        torch.cuda.synchronize()
        del kept
    operators: dict[str, int] = {}
    kernels: dict[str, tuple[int, int]] = {}
    for event in trace.events(profiler):
        name = event.name
        if _NOISE.search(name):
            continue
        if event.on_device:
            count, total = kernels.get(name, (0, 0))
            kernels[name] = count + 1, total + event.end_ns - event.start_ns
        else:
            operators[name] = operators.get(name, 0) + 1
    return Seen(operators=operators, kernels=kernels, on_device=True)


def judge(
    seen: Seen,
    pattern: KernelPattern,
    *,
    toolchain: Mapping[str, str] | None = None,
    plan: Mapping[str, str] | None = None,
    cubins: tuple[str, ...] = (),
) -> Execution:
    """Compare what ran with what the backend's name promises."""
    names = [*seen.operators, *seen.kernels]
    missing = [p for p in pattern.must if not _any(p, names)]
    forbidden = [n for p in pattern.must_not for n in names if re.search(p, n)]
    verdict, reason = "as_named", None
    if not names:
        verdict, reason = "none_seen", "the profile shows no operator and no kernel"
    elif seen.on_device and not seen.kernels:
        # Operators are the host's: they do not show that the device did anything.
        verdict, reason = "none_seen", "the profile shows no kernel of the device"
    elif missing or forbidden:
        verdict = "fallback"
        ran = family(names)
        parts = [f"no operator or kernel matches {p}" for p in missing]
        parts += [f"{name} ran" for name in dict.fromkeys(forbidden)]
        reason = "; ".join(parts) + (f"; it looks like {ran}" if ran else "")
    must_not = f", none of {' | '.join(pattern.must_not)}" if pattern.must_not else ""
    return Execution(
        seen=seen,
        expected=f"{pattern.family}: {' & '.join(pattern.must)}{must_not}"[:4000],
        verdict=verdict,
        reason=None if reason is None else reason[:2000],
        toolchain=toolchain or {},
        plan=plan or {},
        cubins=cubins,
    )


def family(names: Iterable[str]) -> str | None:
    """Name the family that ran."""
    names = list(names)
    return next((name for name, pattern in FAMILIES if _any(pattern, names)), None)


def _any(pattern: str, names: Iterable[str]) -> bool:
    return any(re.search(pattern, name) for name in names)
