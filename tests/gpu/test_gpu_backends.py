"""Every backend that this GPU has, on every kind of cell: kernels, probes, oracle, bits.

Run as `pytest -m gpu tests/gpu`; what is not installed is skipped with its
reason, what a release refuses is not tested.
"""

from __future__ import annotations

import pytest
import torch

from attnrepro_runner import bits, kernels, oracle, probes
from attnrepro_runner.backends import registry
from attnrepro_runner.backends.base import Unsupported
from attnrepro_runner.inputs import make_inputs
from attnrepro_runner.semantics import Workload
from attnrepro_runner.subject import Subject

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU"),
    # torch's profiler and compilers of kernels warn about themselves.
    pytest.mark.filterwarnings("ignore"),
]

DEVICE = torch.device("cuda", 0)
BACKENDS = [name for name in registry.BACKENDS if "rocm" not in name and name != "eager"]
BASE: dict[str, object] = {
    "phase": "forward",
    "batch": 2,
    "seqlen_q": 200,
    "seqlen_k": 200,
    "heads_q": 4,
    "heads_kv": 4,
    "head_dim": 64,
    "dtype": "bfloat16",
}
CAUSAL = {"causal": "bottom_right"}
DECODE = {
    "phase": "decode",
    "seqlen_q": 1,
    "seqlen_k": [1000, 130],
    "heads_q": 8,
    "heads_kv": 2,
    "head_dim": 128,
    "mask": CAUSAL,
}
CELLS: dict[str, dict[str, object]] = {
    "full": {},
    "top_left": {"mask": {"causal": "top_left"}},
    "grouped": {"heads_kv": 2, "mask": CAUSAL},
    "chunk": {"seqlen_q": 77, "mask": CAUSAL},
    "empty_rows": {"seqlen_k": 77, "mask": CAUSAL},
    "window": {"mask": {"causal": "bottom_right", "window": {"left": 31, "right": 0}}},
    "band": {"mask": {"window": {"left": 17, "right": 5}}},
    "softcap": {"softcap": 5.0},
    "scale": {"scale": 0.3},
    "alibi": {"alibi": {"slopes": "geometric"}},
    "alibi_causal": {"alibi": {"slopes": "geometric"}, "mask": CAUSAL},
    "float16": {"dtype": "float16", "head_dim": 128},
    "float32": {"dtype": "float32"},
    "widths": {"head_dim": 192, "head_dim_v": 128, "mask": CAUSAL},
    "packed": {
        "batch": 4,
        "layout": "thd",
        "seqlen_q": [77, 0, 1, 200],
        "seqlen_k": [77, 0, 60, 200],
        "mask": CAUSAL,
    },
    "bhsd": {"layout": "bhsd", "mask": CAUSAL},
    "backward": {"phase": "forward_backward", "mask": CAUSAL},
    "backward_grouped": {"phase": "forward_backward", "heads_kv": 2, "head_dim": 128},
    "backward_empty_rows": {"phase": "forward_backward", "seqlen_k": 77, "mask": CAUSAL},
    "backward_packed": {
        "phase": "forward_backward",
        "batch": 3,
        "layout": "thd",
        "seqlen_q": [77, 0, 200],
        "seqlen_k": [77, 10, 200],
        "mask": CAUSAL,
    },
    "prefill_cache": {
        "phase": "prefill",
        "seqlen_q": 64,
        "seqlen_k": [200, 130],
        "head_dim": 128,
        "heads_kv": 2,
        "mask": CAUSAL,
        "cache": {"kind": "contiguous", "capacity": 256, "append": 64, "append_in_call": True},
    },
    "decode": {**DECODE, "cache": {"kind": "contiguous", "capacity": 1024, "append": 1}},
    "decode_paged_256": {
        **DECODE,
        "seqlen_q": 2,
        "cache": {"kind": "paged", "page_size": 256, "capacity": 1024, "append": 2},
    },
    "decode_paged_16": {
        **DECODE,
        "cache": {"kind": "paged", "page_size": 16, "capacity": 1024, "append": 1},
    },
    "fp8": {
        "phase": "prefill",
        "dtype": "float8_e4m3fn",
        "fp8": {"q_descale": [0.5, 2.0], "k_descale": [0.25, 1.0], "v_descale": [1.0, 3.0]},
        "heads_kv": 2,
        "head_dim": 128,
        "mask": CAUSAL,
    },
    "dropout": {"dropout": {"p": 0.25, "seed": 3}},
}


def accepted(backend: str, cell: str, options: dict[str, object]) -> tuple[Subject, Workload]:
    document = {"id": "s", "backend": backend, "options": options}
    subject = Subject(document, DEVICE, 1)
    found = subject.backend.availability()
    if not found.available:
        pytest.skip(f"{backend}: {found.reason}")
    workload = Workload.parse(BASE | CELLS[cell])
    try:
        subject.accept(workload)
        # A release's own refusal can come when the call is bound.
        subject.bind(workload, make_inputs(workload, {}, stream=0, device=DEVICE))
    except Unsupported as refusal:
        pytest.skip(f"{backend} refuses: {refusal}")
    return subject, workload


@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_named_kernels_run_and_are_right(backend: str, cell: str) -> None:
    subject, workload = accepted(backend, cell, {})
    tensors = make_inputs(workload, {"seed": 2026}, stream=0, device=DEVICE)
    prepared = subject.bind(workload, tensors)
    # As a benchmark does: the first call compiles, and its trace is the compiler's.
    prepared.step()
    seen = kernels.profile(prepared.step, on_device=True)
    execution = kernels.judge(seen, subject.patterns(workload))
    assert execution.ok, execution.reason
    assert seen.kernels
    if workload.dropout is None:
        judge = oracle.Oracle(workload, {}, tensors)
        outputs = subject.poisoned_step(workload, prepared)
        report = judge.check(outputs, empty_row_lse=subject.empty_row_lse)
        assert report.ok, report.reason()
        if workload.has_backward:
            alone = judge.check(prepared.backward_step(), empty_row_lse=subject.empty_row_lse)
            assert alone.ok, alone.reason()


@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_probes_show_the_semantics(backend: str, cell: str) -> None:
    subject, workload = accepted(backend, cell, {})
    report = probes.run_probes(subject.backend, subject.options, workload, DEVICE)
    assert report.status() == "PASS", report.reason()


@pytest.mark.parametrize("cell", ["full", "grouped", "backward", "decode"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_forwards_repeat(backend: str, cell: str) -> None:
    subject, workload = accepted(backend, cell, {})
    tensors = make_inputs(workload, {"seed": 2026}, stream=0, device=DEVICE)
    report = bits.repeat(
        lambda: subject.bind(workload, tensors), 10, claimed="bitwise", profile="native"
    )
    assert report.observed["out"] == "repeats"
    assert report.observed.get("lse", "repeats") == "repeats"


@pytest.mark.parametrize(
    "backend", ["flash_attn_2", "flash_attn_4", "torch.varlen", "cudnn_frontend"]
)
def test_deterministic_backwards_repeat(backend: str) -> None:
    subject, _ = accepted(backend, "backward", {"deterministic": True})
    workload = Workload.parse(
        BASE
        | {"phase": "forward_backward", "seqlen_q": 1024, "seqlen_k": 1024}
        | {"heads_q": 8, "heads_kv": 8, "head_dim": 128, "mask": CAUSAL}
    )
    tensors = make_inputs(workload, {"seed": 2026}, stream=0, device=DEVICE)
    report = bits.repeat(
        lambda: subject.bind(workload, tensors), 10, claimed="bitwise", profile="native"
    )
    assert set(report.observed.values()) == {"repeats"}
