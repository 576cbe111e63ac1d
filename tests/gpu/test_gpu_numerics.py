"""Inputs and oracle on the GPU at hand: the CPU's bytes, the CPU's verdicts, within memory."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from attnrepro_runner import generator, groups, inputs, oracle, reference, views
from attnrepro_runner.backends.base import Outputs
from attnrepro_runner.oracle import Oracle
from attnrepro_runner.semantics import Workload

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU"),
    pytest.mark.filterwarnings("ignore"),
]

BASE: dict[str, Any] = {
    "phase": "forward_backward",
    "batch": 2,
    "seqlen_q": 300,
    "seqlen_k": 333,
    "heads_q": 4,
    "heads_kv": 2,
    "head_dim": 64,
    "dtype": "bfloat16",
    "mask": {"causal": "bottom_right"},
}


def make(**changes: Any) -> Workload:
    return Workload.parse(BASE | changes)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float8_e4m3fn"])
@pytest.mark.parametrize("distribution", ["normal", "normal_outliers", "large_negative", "one_hot"])
def test_inputs_have_the_same_bytes_as_on_the_cpu(dtype: str, distribution: str) -> None:
    changes: dict[str, Any] = {"dtype": dtype}
    if dtype == "float8_e4m3fn":
        changes |= {"fp8": {}, "phase": "forward"}
    workload, spec = make(**changes), {"distribution": distribution, "seed": 2**64 - 1}
    made = [inputs.make_inputs(workload, spec, stream=5, device=d) for d in ("cpu", "cuda")]
    assert inputs.digests(made[0]) == inputs.digests(made[1])
    assert inputs.guards_intact(made[1])


def test_paged_caches_have_the_same_bytes() -> None:
    cache = {"kind": "paged", "page_size": 16, "append": 3, "capacity": 350, "pool_pages": 50}
    workload = make(phase="decode", seqlen_q=3, cache=cache)
    made = [inputs.make_inputs(workload, {}, stream=5, device=d) for d in ("cpu", "cuda")]
    assert inputs.digests(made[0]) == inputs.digests(made[1])


def test_64m_values_take_milliseconds() -> None:
    options: dict[str, Any] = {
        "dtype": torch.bfloat16,
        "device": torch.device("cuda"),
        "seed": 1,
        "stream": 0,
        "tag": 0,
    }
    generator.normal(1 << 20, **options)
    torch.cuda.synchronize()
    start = time.perf_counter()
    generator.normal(1 << 26, **options)
    torch.cuda.synchronize()
    elapsed = time.perf_counter() - start
    print(f"64M values: {elapsed * 1e3:.1f} ms")
    assert elapsed < 0.2


@pytest.mark.parametrize(
    ("seqlen", "heads", "phase"),
    [(4096, 16, "forward"), (4096, 16, "forward_backward"), (65536, 2, "forward")],
)
def test_oracle_judges_on_the_gpu_within_memory(seqlen: int, heads: int, phase: str) -> None:
    workload = make(
        phase=phase,
        batch=1,
        seqlen_q=seqlen,
        seqlen_k=seqlen,
        heads_q=heads,
        heads_kv=heads,
        head_dim=128,
    )
    tensors = inputs.make_inputs(workload, {}, stream=0, device="cuda")
    q, k, v = (
        x.detach().transpose(1, 2).requires_grad_() for x in (tensors.q, tensors.k, tensors.v)
    )
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.FLASH_ATTENTION):
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    grads = {}
    if tensors.grad_out is not None:
        found = torch.autograd.grad(out, (q, k, v), tensors.grad_out.transpose(1, 2))
        grads = {n: g.transpose(1, 2) for n, g in zip(("dq", "dk", "dv"), found, strict=True)}
    outputs = Outputs(out=out.detach().transpose(1, 2), **grads)
    judge = Oracle(workload, {}, tensors)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    report = judge.check(outputs, empty_row_lse=0.0)
    peak = torch.cuda.max_memory_allocated() - before
    ratios = {name: round(tally.worst_ratio, 2) for name, tally in report.tensors.items()}
    print(f"{phase} {seqlen}: {report.duration_ns / 1e9:.2f} s, {peak / 2**30:.2f} GiB, {ratios}")
    assert report.ok, report.reason()
    assert peak < 4 * 2**30
    outputs.out[0, seqlen - 1, heads - 1, 0] += 0.05
    assert not judge.check(outputs, empty_row_lse=0.0).ok


def test_reference_is_the_cpus() -> None:
    workload = make(alibi={"slopes": "geometric"}, softcap=20.0)
    found = []
    for device in ("cpu", "cuda"):
        tensors = inputs.make_inputs(workload, {}, stream=0, device=device)
        batch = [(0, (0, 1)), (1, (2, 3))]
        given = groups.from_tensors(workload, tensors, batch)
        found.append(reference.attend(workload, given, batch, reference.HIGH))
    for name in ("out", "lse", "dq", "dk", "dv"):
        on_cpu, on_gpu = (getattr(result, name) for result in found)
        torch.testing.assert_close(on_gpu.cpu(), on_cpu, rtol=1e-11, atol=1e-11)


def test_selection_keeps_long_sequences_cheap() -> None:
    workload = make(phase="prefill", batch=4, seqlen_q=16384, seqlen_k=16384, heads_q=32)
    tensors = inputs.make_inputs(workload, {}, stream=0, device="cuda")
    select = oracle.sample(workload, pairs=8, blocks=8)
    out = torch.zeros(workload.shape("out"), dtype=torch.bfloat16, device="cuda")
    for b, h in select.pairs:
        given = groups.from_tensors(workload, tensors, [(b, (h,))])
        low = reference.attend(workload, given, [(b, (h,))], reference.low_precision(workload))
        views.query_rows(out, workload, b, h).copy_(low.out[0, 0])
    report = Oracle(workload, {}, tensors, select).check(Outputs(out=out), empty_row_lse=0.0)
    assert report.ok, report.reason()
    print(f"8 pairs, 8 blocks of 16k: {report.duration_ns / 1e9:.3f} s")
