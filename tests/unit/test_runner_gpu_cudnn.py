"""cuDNN's graphs against a stand-in that reads memory by the declared strides."""

from __future__ import annotations

import sys

import cudnn_fake
import pytest
import torch
from gpu_fakes import workload

from attnrepro_runner import models, oracle, requests
from attnrepro_runner.backends import registry
from attnrepro_runner.backends.base import Unsupported
from attnrepro_runner.inputs import make_inputs
from attnrepro_runner.semantics import Workload

CPU = torch.device("cpu")
CAUSAL = {"causal": "bottom_right"}


@pytest.fixture
def cudnn(monkeypatch: pytest.MonkeyPatch) -> cudnn_fake.Cudnn:
    fake = cudnn_fake.Cudnn()
    monkeypatch.setitem(sys.modules, "cudnn", fake)
    return fake


def judge(w: Workload, options: dict[str, object] | None = None) -> None:
    backend = registry.load("cudnn_frontend")
    tensors = make_inputs(w, {"seed": 3}, stream=0, device=CPU)
    assert w.active_fields() <= backend.consumed(w, options or {})
    prepared = backend.prepare(w, options or {}, tensors)
    checks = oracle.Oracle(w, {}, tensors)
    prepared.append_step()
    calls = [prepared.step, prepared.backward_step] if w.has_backward else [prepared.step]
    for call in calls:
        report = checks.check(call(), empty_row_lse=backend.empty_row_lse)
        assert report.ok, report.reason()


@pytest.mark.parametrize(
    "mask",
    [
        {},
        CAUSAL,
        {"causal": "top_left"},
        {"causal": "bottom_right", "window": {"left": 2, "right": 0}},
        {"window": {"left": 2, "right": 1, "alignment": "top_left"}},
        {"window": {"left": 0, "right": None}},
    ],
    ids=str,
)
@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_masks_and_layouts(cudnn: cudnn_fake.Cudnn, mask: dict[str, object], layout: str) -> None:
    judge(workload(mask=mask, layout=layout, scale=0.4))


def test_unequal_widths_and_strides(cudnn: cudnn_fake.Cudnn) -> None:
    judge(workload(head_dim_v=8, strides={"v": [2 * 7 * 16, 16, 8, 1]}))


@pytest.mark.parametrize(
    "cache",
    [
        {"kind": "contiguous", "capacity": 40, "append": 2},
        {"kind": "paged", "page_size": 16, "capacity": 40, "append": 2, "pool_pages": 7},
    ],
    ids=["contiguous", "paged"],
)
def test_caches(cudnn: cudnn_fake.Cudnn, cache: dict[str, object]) -> None:
    judge(workload(phase="decode", seqlen_q=2, seqlen_k=[33, 9], mask=CAUSAL, cache=cache))


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_gradients(cudnn: cudnn_fake.Cudnn, layout: str) -> None:
    judge(workload(phase="forward_backward", mask=CAUSAL, layout=layout))
    assert "use_deterministic_algorithm" not in cudnn.calls[-1]


def test_the_deterministic_option_reaches_the_backward(cudnn: cudnn_fake.Cudnn) -> None:
    judge(workload(phase="forward_backward", seqlen_k=5), {"deterministic": True})
    assert cudnn.calls[-1]["use_deterministic_algorithm"] is True


def test_refusals_of_cudnn_are_unsupported(
    cudnn: cudnn_fake.Cudnn, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(graph: cudnn_fake.Graph) -> None:
        raise cudnn_fake.cudnnGraphNotSupportedError("no plan")

    monkeypatch.setattr(cudnn_fake.Graph, "check_support", refuse)
    w = workload()
    tensors = make_inputs(w, {}, stream=0, device=CPU)
    with pytest.raises(Unsupported, match="cuDNN 91900: no plan"):
        registry.load("cudnn_frontend").prepare(w, {}, tensors)


def test_an_engine_of_the_frontends_own_is_refused(
    cudnn: cudnn_fake.Cudnn, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = type("Engine", (), {"name": "sdpa_fwd_prefill_sm90"})
    monkeypatch.setattr(cudnn_fake.Graph, "selected_engine", engine)
    w = workload()
    with pytest.raises(Unsupported, match="sdpa_fwd_prefill_sm90"):
        registry.load("cudnn_frontend").prepare(w, {}, make_inputs(w, {}, stream=0, device=CPU))


@pytest.mark.parametrize("kind", ["prefill", "training_step"])
def test_a_models_tensors_have_other_strides(cudnn: cudnn_fake.Cudnn, kind: str) -> None:
    """V of a model is a view of the packed projection."""
    phase = {"prefill": "prefill", "training_step": "forward_backward"}[kind]
    w = Workload.parse(
        {"phase": phase, "batch": 2, "seqlen_q": 6, "seqlen_k": 6, "heads_q": 4, "heads_kv": 2}
        | {"head_dim": 64, "dtype": "bfloat16", "mask": CAUSAL}
    )
    model = models.find(f"small_{kind}", 1)
    values = []
    for name in ("eager", "cudnn_frontend"):
        request = requests.Request(model, registry.load(name), w, {}, {"seed": 1}, CPU)
        request.step()
        values.append(request.step().float())
    torch.testing.assert_close(values[0], values[1], atol=0.05, rtol=0.05)
