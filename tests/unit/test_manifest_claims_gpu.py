"""What the claims of GPU releases say, and what their adapters accept, is the same.

Adapters are asked without their libraries: stand-ins have their place, and the compute capability
is named. Those of `sdpa` ask torch itself with a small call, which needs the GPU.
"""

from __future__ import annotations

import importlib
import itertools
import re
import sys
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import pytest

from attnrepro import resources
from attnrepro.manifest.capability import Capability, Device, Supported, decide, read_release
from attnrepro_runner.semantics import Workload, WorkloadError

pytest.importorskip("torch", reason="adapters need torch")

import gpu_fakes
import torch
from manifest_fakes import subject

from attnrepro.manifest.model import Cell
from attnrepro_runner.backends import registry, varlen
from attnrepro_runner.backends.base import Unsupported

if TYPE_CHECKING:
    from pathlib import Path

BASE: dict[str, Any] = {
    **{"phase": "prefill", "batch": 2, "seqlen_q": 16, "seqlen_k": 16, "heads_q": 4},
    **{"heads_kv": 4, "head_dim": 64, "dtype": "bfloat16"},
}
CHANGES: dict[str, list[Any]] = {
    "phase": ["forward", "forward_backward", "decode"],
    "dtype": ["float32", "float16", "float8_e4m3fn"],
    "head_dim": [128, 192, 256, 200, 80, 72, 24, 20, 512],
    "head_dim_v": [32, 128, 512, 256],
    "layout": ["bhsd", "thd"],
    "mask": [
        {"causal": "top_left"},
        {"causal": "bottom_right"},
        {"window": {"left": 3, "right": 2}},
        {"window": {"left": 3, "right": None}},
        {"causal": "bottom_right", "window": {"left": 3, "right": None}},
        {"window": {"left": None, "right": 0}},
        {"window": {"left": None, "right": 3}},
        {"causal": "bottom_right", "masked_rows": "nan"},
    ],
    "seqlen_k": [24, 8, 1, [16, 24], [16, 0], 0],
    "seqlen_q": [1, [16, 0], 24, [1, 1]],
    "softcap": [20],
    "alibi": [{"slopes": "geometric"}],
    "dropout": [{"p": 0.1, "seed": 1}, {"p": 0.1, "seed": 1, "offset": 3}],
    "dtype_out": ["float32"],
    "scale": [0.3],
    "heads_kv": [2, 1],
    "cache": [
        {"kind": "contiguous"},
        {"kind": "paged", "page_size": 16},
        {"kind": "paged", "page_size": 256},
        {"kind": "contiguous", "append": 1, "append_in_call": True},
        {"kind": "contiguous", "append": 1},
        {"kind": "paged", "page_size": 256, "append": 1, "append_in_call": True},
    ],
    "strides": [{"v": [2 * 2048, 1, 2048, 16]}, {"q": [8192, 512, 64, 1]}],
}
OPTIONS: dict[str, list[object]] = {
    "deterministic": [True, False],
    "num_splits": [0, 1, 4, 200],
    "pack_gqa": [True, False],
    "implementation": ["fa2", "fa3", "fa4"],
}


@dataclass(frozen=True, kw_only=True)
class Target:
    backend: str
    release: str
    vendor: str = "nvidia"
    architecture: str = "sm_90"
    known: tuple[str, ...] = ()
    """Reasons, as regular expressions, of differences that stay; each must occur."""
    compiled_out: tuple[str, ...] = ()
    torch_release: str = ""

    def __str__(self) -> str:
        return f"{self.backend} {self.release} {self.architecture}"

    @property
    def capability(self) -> tuple[int, int] | None:
        if self.vendor == "amd":
            return None
        digits = self.architecture.removeprefix("sm_")
        return int(digits[:-1]), int(digits[-1])


VIEW = "adapter refuses: the strides of q are no view"
"""Claims know strides by the last dimension alone."""
NARROW = "claims refuse: .*does not claim"
"""The adapter leaves to the library what the claims, read from its documentation, leave out."""
TARGETS = (
    Target(backend="eager", release="torch-2.8.0-cuda12.8", architecture="sm_80"),
    Target(backend="eager", release="torch-2.11.0-cuda13.0"),
    Target(backend="eager", release="torch-2.13.0-cuda13.0", architecture="sm_100"),
    Target(backend="eager", release="torch-2.10.0-rocm7.2", vendor="amd", architecture="gfx942"),
    Target(backend="flash_attn_2", release="flash-attn-2.8.3-cuda"),
    Target(
        backend="flash_attn_2.rocm_ck",
        release="flash-attn-2.8.3-rocm-ck",
        vendor="amd",
        architecture="gfx942",
    ),
    Target(
        backend="flash_attn_2.rocm_triton",
        release="flash-attn-2.8.3-rocm-triton",
        vendor="amd",
        architecture="gfx942",
    ),
    Target(
        backend="flash_attn_3",
        release="flash-attn-3-main-0251105a",
        # FP8 is claimed for serving alone, and for equal widths.
        known=(NARROW + " (phase forward|head_dim_v|a mask aligned top_left)",),
    ),
    Target(
        backend="flash_attn_3",
        release="flash-attn-3-main-0251105a",
        architecture="sm_80",
        # FP8 and unequal widths are kernels of sm_90; the adapter's device decides at run time.
        known=("claims refuse: .*(has kernels for|does not claim)",),
    ),
    Target(
        backend="flash_attn_3",
        release="fa3-fwd-0.0.3",
        compiled_out=("BACKWARD", "PAGEDKV", "LOCAL", "FP16"),
        known=(NARROW + " (phase forward|head_dim_v|a mask aligned top_left)",),
    ),
    *(
        Target(
            backend="flash_attn_4",
            release="flash-attn-4-4.0.0b36",
            architecture=architecture,
        )
        for architecture in ("sm_80", "sm_90", "sm_100", "sm_120")
    ),
    Target(
        backend="cudnn_frontend",
        release="cudnn-frontend-1.x",
        # The graph's own support check decides at run time.
        known=(NARROW + " head_dim",),
    ),
    Target(
        backend="flashinfer",
        release="flashinfer-python",
        known=(VIEW, NARROW + " empty lengths"),
    ),
    Target(
        backend="flashinfer",
        release="flashinfer-python",
        architecture="sm_80",
        known=(VIEW, NARROW + " empty lengths"),
    ),
    Target(
        backend="torch.varlen",
        release="torch-2.11.0-cuda13.0",
        torch_release="2.11.0",
        known=(VIEW,),
    ),
    Target(
        backend="torch.varlen",
        release="torch-2.13.0-cuda13.0",
        torch_release="2.13.0",
        # Pages of 256 are asked for by torch's own kernels alone.
        known=(VIEW, NARROW + " page_size"),
    ),
)


@cache
def cells() -> tuple[tuple[Cell, bool], ...]:
    """The neutral call, each change alone (true), and all two changes together."""
    singles = [{name: value} for name, values in CHANGES.items() for value in values]
    pairs = [{**a, **b} for a, b in itertools.combinations(singles, 2) if not a.keys() & b.keys()]
    found = []
    for change in [{}, *singles, *pairs]:
        document = BASE | change
        if document["dtype"] == "float8_e4m3fn":
            document["fp8"] = {}
        one = Cell(
            **{"id": "c000", "label": "", "variant": None, "workload": document},
            **{"inputs": {}, "request": None, "subjects": ()},
        )
        try:
            assert one.parsed
        except WorkloadError:
            continue
        found.append((one, len(change) < 2))
    return tuple(found)


@pytest.fixture
def target(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Target:
    """Let the adapters see the target's device and libraries."""
    one: Target = request.param
    gpu_fakes.install(monkeypatch)
    flags = {f"FLASHATTENTION_DISABLE_{name}": True for name in one.compiled_out}
    monkeypatch.setattr(sys.modules["fa3_fwd_config"], "CONFIG", {"build_flags": flags})
    for name in ("flash_attn_3", "flash_attn_4", "flashinfer", "varlen"):
        module = importlib.import_module(f"attnrepro_runner.backends.{name}")
        monkeypatch.setattr(module, "capability", lambda: one.capability)
    if one.torch_release:
        fake = gpu_fakes.varlen_attn([], release=one.torch_release)
        monkeypatch.setattr(importlib.import_module(varlen._MODULE), "varlen_attn", fake)
        monkeypatch.setattr(torch, "__version__", one.torch_release)
        # Whether another library is installed beside torch is no claim of torch's.
        monkeypatch.setattr(varlen.importlib.util, "find_spec", lambda name: object())
        monkeypatch.setattr(varlen.packages, "release", lambda name: "4.0.0b36")
    return one


def adapters_reason(adapter: Any, workload: Workload, options: dict[str, object]) -> str | None:
    """Why the adapter refuses, None if it does not."""
    try:
        adapter.check(workload, options)
    except Unsupported as refused:
        return str(refused)
    left = (workload.active_fields() | set(options)) - adapter.consumed(workload, options)
    return f"not consumed: {', '.join(sorted(left))}" if left else None


@pytest.mark.parametrize("target", TARGETS, indirect=True, ids=str)
def test_claims_and_gpu_adapters_agree(target: Target) -> None:
    claims = read_release(resources.images_dir() / "claims" / f"{target.release}.json")
    capability = Capability(stack=target.release, claims=claims)
    device = Device(vendor=target.vendor, architectures=(target.architecture,))
    adapter = registry.load(target.backend)
    chosen: list[dict[str, object]] = [{}]
    chosen += [{n: v} for n in sorted(adapter.option_names) for v in OPTIONS.get(n, [])]
    if "pack_gqa" in adapter.option_names:
        chosen += [{"pack_gqa": False, "num_splits": n} for n in (0, 1, 4)]
    differences: dict[str, tuple[Workload, dict[str, object]]] = {}
    counts = {True: 0, False: 0}
    for options in chosen:
        for cell, is_single in cells():
            if options and not is_single:
                continue
            decision = decide(cell, subject(target.backend, **options), capability, device)
            reason = adapters_reason(adapter, cell.parsed, options)
            claimed = isinstance(decision, Supported)
            counts[claimed] += 1
            if claimed == (reason is None):
                continue
            text = f"adapter refuses: {reason}" if claimed else f"claims refuse: {decision.reason}"
            differences.setdefault(text, (cell.parsed, options))
    assert min(counts.values()) > 20
    unknown = {
        text: example
        for text, example in differences.items()
        if not any(re.match(pattern, text) for pattern in target.known)
    }
    assert not unknown
    for pattern in target.known:
        assert any(re.match(pattern, text) for text in differences), f"no more: {pattern}"


@pytest.mark.parametrize(
    "folder", sorted(resources.images_dir().glob("*/r1")), ids=lambda folder: folder.parent.name
)
def test_every_stack_claims_a_baseline_of_torchs(folder: Path) -> None:
    assert {"eager", "sdpa.math", "sdpa.flash"} <= set(Capability.load(folder).backends)


def decided(backend: str, stack: str, architecture: str, **workload: object) -> bool:
    one = Cell(
        **{"id": "c000", "label": "", "variant": None, "workload": BASE | workload},
        **{"inputs": {}, "request": None, "subjects": ()},
    )
    vendor = "amd" if architecture.startswith("gfx") else "nvidia"
    device = Device(vendor=vendor, architectures=(architecture,))
    capability = Capability.load(resources.images_dir() / stack / "r1")
    return isinstance(decide(one, subject(backend), capability, device), Supported)


@pytest.mark.parametrize("stack", ["cuda13.0-torch2.11-fa4", "cuda13.0-torch2.13-fa4"])
@pytest.mark.parametrize(
    ("architecture", "workload", "claimed"),
    [
        ("sm_90", {"dtype": "bfloat16"}, True),
        ("sm_75", {"dtype": "bfloat16"}, False),
        ("sm_75", {"dtype": "float16"}, True),
        ("sm_90", {"dtype": "float32", "head_dim": 20}, True),
        ("sm_75", {"dtype": "float32", "head_dim": 20}, False),
        ("sm_90", {"heads_kv": 2}, False),
    ],
)
def test_the_efficient_kernels_are_claimed_where_they_are(
    stack: str, architecture: str, workload: dict[str, object], claimed: bool
) -> None:
    assert decided("sdpa.efficient", stack, architecture, **workload) is claimed


def test_what_came_later_is_not_claimed_of_earlier_releases() -> None:
    later, earlier = "cuda13.0-torch2.13-fa4", "cuda13.0-torch2.11-fa4"
    for change in ({"heads_kv": 2}, {"cache": {"kind": "contiguous"}}):
        assert decided("torch.varlen", later, "sm_90", **change)
        assert not decided("torch.varlen", earlier, "sm_90", **change)
    assert not decided("torch.varlen", "cuda12.8-torch2.8-fa3", "sm_90")
    grouped = {"heads_kv": 2}
    assert decided("sdpa.flash", "cuda12.8-torch2.8-fa3", "sm_90", **grouped)
    assert not decided("sdpa.flash", "rocm7.2-torch2.10-fa2.8.3-ck", "gfx942", **grouped)
    assert decided("sdpa.flash", "rocm7.2-torch2.10-fa2.8.3-ck", "gfx942")
