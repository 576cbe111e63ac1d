"""Reported cases: which code ran, and whether its bits repeat."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from case_fakes import (
    checked,
    open_cell,
    own_process,  # noqa: F401 - an autouse fixture
    subject_of,
)
from host_fakes import tasks
from numerics_fakes import fresh_tensors, workload_of
from test_results_merge import merged
from test_results_merge import subject as merged_subject

from attnrepro_runner import (
    bits,
    guards,
    kernels,
)
from attnrepro_runner.backends import registry
from attnrepro_runner.backends.base import Outputs, Unsupported
from attnrepro_runner.backends.sdpa import SdpaEfficient, SdpaFlash, SdpaMath
from attnrepro_runner.status import Status

if TYPE_CHECKING:
    from collections.abc import Sequence

    from attnrepro_runner.semantics import Workload


# Which code ran.


@pytest.mark.parametrize(
    ("name", "operator"),
    [
        ("eager", "aten::bmm"),
        ("sdpa.math", "aten::_scaled_dot_product_attention_math"),
        ("sdpa.flash", "aten::_scaled_dot_product_flash_attention_for_cpu"),
    ],
)
@pytest.mark.parametrize("phase", ["forward", "prefill"])
def test_pytorch_99878_what_ran_is_always_recorded(name: str, operator: str, phase: str) -> None:
    report = checked(registry.load(name), phase=phase)
    assert report.status is Status.PASS, report.reason
    execution: Any = report.parts["execution"]
    assert execution["operators"][operator] >= 1
    assert any(name.endswith("libtorch_cpu.so") for name in execution["libraries"])
    results = tasks()
    results[0]["entries"][0]["execution"] = execution
    kept = merged_subject(merged(results), "fast")["execution"]
    assert kept["operators"] == execution["operators"]


class TakesMath(SdpaFlash):
    """Names the flash kernel and takes the unfused computation, as the dispatcher may."""

    kind = SdpaMath.kind


@pytest.mark.parametrize(
    "workload",
    [
        {"heads_q": 24, "heads_kv": 12, "head_dim": 64, "dtype": "float32"},
        {"heads_q": 4, "heads_kv": 2, "dtype": "bfloat16"},
    ],
)
def test_pytorch_pr181528_math_under_another_name_is_a_fallback(workload: dict[str, Any]) -> None:
    report = checked(TakesMath(), **workload)
    assert report.status is Status.FALLBACK
    assert "it looks like torch math" in str(report.reason)
    assert report.parts["execution"]["operators"]  # type: ignore[index]
    _, launched, readable = open_cell(TakesMath())
    assert launched.status is Status.FALLBACK
    assert readable == {}


def test_pytorch_pr181528_the_efficient_kernel_is_asked_for_on_a_gpu() -> None:
    pattern = SdpaEfficient().patterns(workload_of(dtype="float32"), {})
    fused = kernels.Seen(
        operators={"aten::_scaled_dot_product_efficient_attention": 1},
        kernels={"fmha_cutlassF_f32_aligned_64x64_rf_sm80": (1, 9)},
        on_device=True,
    )
    assert kernels.judge(fused, pattern).ok
    unfused = kernels.Seen(
        operators={"aten::_scaled_dot_product_attention_math": 1},
        kernels={"sm80_xmma_gemm_f32f32_f32f32_f32": (2, 9)},
        on_device=True,
    )
    found = kernels.judge(unfused, pattern)
    assert found.verdict == "fallback"
    assert "_scaled_dot_product_attention_math ran" in str(found.reason)


@pytest.mark.parametrize(
    ("arithmetic", "verdict"),
    [
        ("cutlass::float_e4m3_t", "as_named"),
        ("cutlass::bfloat16_t", "fallback"),
        ("cutlass::half_t", "fallback"),
    ],
)
def test_flash_attention_1848_float8_must_show_in_the_kernel(arithmetic: str, verdict: str) -> None:
    shape: dict[str, Any] = {"seqlen_q": 1024, "seqlen_k": 1024, "head_dim": 128}
    symbol = (
        f"void cutlass::device_kernel<flash::enable_sm90<flash::FlashAttnFwdSm90<"
        f"flash::CollectiveMainloopFwdSm90<2, {arithmetic}, float, cutlass::arch::Sm90>>>>"
    )
    seen = kernels.Seen(kernels={symbol: (1, 9)}, on_device=True)
    backend = registry.load("flash_attn_3")
    fp8 = workload_of(phase="prefill", dtype="float8_e4m3fn", fp8={}, **shape)
    assert kernels.judge(seen, backend.patterns(fp8, {})).verdict == verdict
    plain = workload_of(phase="prefill", dtype="bfloat16", **shape)
    assert kernels.judge(seen, backend.patterns(plain, {})).ok


def test_flash_attention_1848_whoever_takes_float8_asks_for_its_kernel() -> None:
    fp8 = workload_of(phase="prefill", dtype="float8_e4m3fn", fp8={}, head_dim=64)
    taking = [n for n in registry.BACKENDS if "fp8" in registry.load(n).consumed(fp8, {})]
    assert "flash_attn_3" in taking
    for name in taking:
        assert any("e4m3" in p for p in registry.load(name).patterns(fp8, {}).must), name


# Bits.


class Replayed:
    """Gives kept tensors again; one tensor's last bit depends on the call."""

    def __init__(self, workload: Workload, changing: str | None, calls: Sequence[int]) -> None:
        self.workload, self.changing, self.calls = workload, changing, set(calls)
        tensors = fresh_tensors(workload)
        assert tensors.grad_out is not None
        self.given = {"out": tensors.grad_out, "dq": tensors.q, "dk": tensors.k, "dv": tensors.v}
        self.call = 0

    def step(self) -> Outputs:
        given = dict(self.given)
        self.call += 1
        if self.changing is not None and self.call in self.calls:
            given[self.changing] = given[self.changing].clone()
            guards.as_integers(given[self.changing])[-1, -1, -1, -1] ^= 1
        return Outputs(**given)

    backward_step = step

    def append_step(self) -> None:
        raise AssertionError


def repeated(changing: str | None, calls: Sequence[int], claimed: str, **shape: Any) -> Any:
    workload = workload_of(phase="forward_backward", heads_q=8, heads_kv=8, head_dim=64, **shape)
    call = Replayed(workload, changing, calls)
    return bits.repeat(lambda: call, 30, claimed=claimed)


@pytest.mark.parametrize("changing", ["out", "dq", "dk", "dv"])
@pytest.mark.parametrize("calls", [[30], [2, 17, 29]])
@pytest.mark.parametrize("length", [33, pytest.param(512, marks=pytest.mark.slow)])
def test_flash_attention_349_thirty_repeats_are_hashed(
    changing: str, calls: list[int], length: int
) -> None:
    report = repeated(changing, calls, "bitwise", batch=2, seqlen_q=length, seqlen_k=length)
    assert (report.repeats, report.status()) == (30, "NONDETERMINISTIC")
    assert {n for n, seen in report.observed.items() if seen == "differs"} == {changing}
    assert report.reason() == f"{changing} differed within 30 calls on the same inputs"


@pytest.mark.parametrize("claimed", ["bitwise", "forward", "none"])
@pytest.mark.parametrize("changing", ["out", "dq", None])
def test_flash_attention_1596_claimed_and_observed_are_two_fields(
    claimed: str, changing: str | None
) -> None:
    report = repeated(changing, [3], claimed, batch=1, seqlen_q=64, seqlen_k=64)
    claimed_names = {"bitwise": ["out", "dq", "dk", "dv"], "forward": ["out"], "none": []}[claimed]
    broken = changing in claimed_names
    assert report.status() == ("NONDETERMINISTIC" if broken else "PASS")
    results = tasks()
    results[0]["entries"][0] |= {"bits": report.to_json(), "status": report.status()}
    found = merged(results)
    kept = merged_subject(found, "fast")["bits"]
    assert kept["claimed"] == claimed
    assert {n for n, seen in kept["observed"].items() if seen == "differs"} == {changing} - {None}
    # Only what is both is asked of a rerun.
    asked = found.repeatable["outputs"]["digests"].get("c000", {}).get("fast", {})
    assert set(asked) == set(claimed_names) - {changing}


@pytest.mark.parametrize("name", ["eager", "sdpa.math", "sdpa.flash"])
def test_flash_attention_1596_a_deterministic_flag_without_effect_is_refused(name: str) -> None:
    workload = workload_of(phase="decode", seqlen_q=1, cache={"kind": "paged", "page_size": 256})
    one = subject_of(registry.load(name), deterministic=True)
    with pytest.raises(Unsupported, match="deterministic"):
        one.accept(workload)
