"""The environment of a worker: what pins a CPU's arithmetic, and nothing that is there by chance.

`native` pins the instruction set that torch and oneDNN choose by themselves, and the thread count;
times are taken under it. `portable` pins what every x86-64-v3 CPU computes alike (as far as is
known); bits may be hashed under it. Variables that change kernels or results and come from outside
are dropped, and listed.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

_CHANGES_RESULTS: Final = (
    "ATEN_",
    "CUBLAS_",
    "CUDA_LAUNCH_",
    "CUDNN_",
    "CUTE_DSL_",
    "DNNL_",
    "FA_",
    "FLASHINFER_",
    "FLASH_ATTENTION_",
    "GOMP_",
    "KMP_",
    "LD_PRELOAD",
    "MALLOC_",
    "MKL_",
    "NVIDIA_TF32_OVERRIDE",
    "OMP_",
    "ONEDNN_",
    "PYTHON",
    "PYTORCH_",
    "QUACK_",
    "TORCH_",
    "TORCHINDUCTOR_",
    "TRITON_",
)
"""Prefixes of variables that a worker does not inherit."""

_KEPT: Final = frozenset(
    {
        "PYTHONPATH",
        "TRITON_CACHE_DIR",
        "TORCHINDUCTOR_CACHE_DIR",
        # An image whose flash-attn has only Triton kernels sets it; the backend's flags record it.
        "FLASH_ATTENTION_TRITON_AMD_ENABLE",
    }
)
_SECRET: Final = ("TOKEN", "SECRET", "PASSWORD", "CREDENTIAL", "API_KEY")

_HEAP: Final = {"MALLOC_MMAP_THRESHOLD_": "33554432", "MALLOC_TRIM_THRESHOLD_": "268435456"}
"""glibc gives freed memory back by a rule that depends on the process's past. Of 14 equal processes
with 2 MB temporaries, 5 paid 1,504 page faults in every call and took 2.8 ms instead of 1.2; with
these thresholds none of 14 did (torch 2.13.0, glibc 2.36)."""

# What torch and oneDNN call an instruction set, best first, with the flags that it takes.
_ISA: Final = (
    ("avx512", "AVX512_CORE_AMX", {"avx512f", "avx512bw", "avx512_bf16", "amx_bf16", "amx_tile"}),
    ("avx512", "AVX512_CORE_BF16", {"avx512f", "avx512bw", "avx512_bf16"}),
    ("avx512", "AVX512_CORE_VNNI", {"avx512f", "avx512bw", "avx512_vnni"}),
    ("avx512", "AVX512_CORE", {"avx512f", "avx512bw", "avx512vl", "avx512dq"}),
    ("avx2", "AVX2_VNNI", {"avx2", "fma", "avx_vnni"}),
    ("avx2", "AVX2", {"avx2", "fma"}),
)


def cpu_flags(proc: Path = Path("/proc")) -> frozenset[str]:
    """Return the feature flags of the first CPU in /proc/cpuinfo; empty where there are none."""
    try:
        with (proc / "cpuinfo").open(encoding="utf-8", errors="replace") as file:
            for line in file:
                if line.startswith(("flags", "Features")):
                    return frozenset(line.partition(":")[2].split())
    except OSError:
        pass
    return frozenset()


def pins(profile: str, threads: int, flags: frozenset[str]) -> dict[str, str]:
    """Return the variables that a CPU profile sets.

    Args:
        profile: native or portable.
        threads: of the framework.
        flags: the CPU's feature flags.

    """
    count = str(threads)
    common = {
        "OMP_NUM_THREADS": count,
        "MKL_NUM_THREADS": count,
        "OMP_DYNAMIC": "FALSE",
        "MKL_DYNAMIC": "FALSE",
        "ONEDNN_DEFAULT_FPMATH_MODE": "STRICT",
        **_HEAP,
    }
    if profile == "portable":
        return common | {
            "ATEN_CPU_CAPABILITY": "avx2",
            "ONEDNN_MAX_CPU_ISA": "AVX2",
            # The only branch that MKL honours on every vendor; AVX2 is silently AUTO on AMD.
            "MKL_CBWR": "COMPATIBLE",
        }
    for aten, onednn, needed in _ISA:
        if needed <= flags:
            return common | {"ATEN_CPU_CAPABILITY": aten, "ONEDNN_MAX_CPU_ISA": onednn}
    return common | {"ATEN_CPU_CAPABILITY": "default"}


def worker_environment(
    outer: Mapping[str, str], *, profile: str, threads: int, device: str, flags: frozenset[str]
) -> tuple[dict[str, str], dict[str, str]]:
    """Compose a worker's environment.

    Args:
        outer: the coordinator's environment.
        profile: native or portable.
        threads: of the framework.
        device: cpu or cuda, told to the worker as ATTNREPRO_DEVICE.
        flags: the CPU's feature flags.

    Returns:
        The environment, and the part of it that is recorded: what was set here, and under
        "dropped" the names that were not inherited.

    """
    kept, dropped = {}, []
    for name, value in outer.items():
        if name not in _KEPT and name.startswith(_CHANGES_RESULTS):
            dropped.append(name)
        elif not any(word in name.upper() for word in _SECRET):
            kept[name] = value
    root = str(Path(__file__).parent.parent)
    path = [root, *(p for p in outer.get("PYTHONPATH", "").split(os.pathsep) if p and p != root)]
    ours = {
        **pins(profile, threads, flags),
        "ATTNREPRO_DEVICE": device,
        "ATTNREPRO_PROFILE": profile,
        # A JIT of the host's driver would run code that is in no image.
        "CUDA_DISABLE_PTX_JIT": "1",
        "PYTHONHASHSEED": "0",
        "PYTHONNOUSERSITE": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    recorded = ours | ({"dropped": " ".join(sorted(dropped))} if dropped else {})
    return kept | ours | {"PYTHONPATH": os.pathsep.join(path)}, recorded
