"""Random workloads: what a backend accepts, it must do as the semantics say."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numerics_fakes import ReferenceBackend

from attnrepro_runner import inputs, probes
from attnrepro_runner.backends import registry
from attnrepro_runner.backends.base import Backend, Unsupported
from attnrepro_runner.oracle import Oracle
from attnrepro_runner.semantics import Workload, WorkloadError

BACKENDS = ["eager", "sdpa.math", "sdpa.flash", "fake"]


@st.composite
def workloads(draw: st.DrawFn) -> Workload:
    phase = draw(st.sampled_from(["forward", "forward_backward", "prefill", "decode"]))
    layout = draw(st.sampled_from(["bshd", "bhsd", "thd"]))
    batch = draw(st.integers(1, 3))
    heads_kv = draw(st.sampled_from([1, 2, 3]))
    lengths = st.integers(0 if layout == "thd" else 1, 90)
    ragged = layout == "thd"
    seqlen_q: Any = draw(st.lists(lengths, min_size=batch, max_size=batch) if ragged else lengths)
    seqlen_k: Any = draw(st.lists(lengths, min_size=batch, max_size=batch) if ragged else lengths)
    side = st.none() | st.integers(0, 40)
    alignment = st.sampled_from([None, "top_left", "bottom_right"])
    document: dict[str, Any] = {
        "phase": phase,
        "batch": batch,
        "seqlen_q": seqlen_q,
        "seqlen_k": seqlen_k,
        "heads_q": heads_kv * draw(st.sampled_from([1, 2])),
        "heads_kv": heads_kv,
        "head_dim": draw(st.sampled_from([8, 24, 64])),
        "head_dim_v": draw(st.sampled_from([None, None, 16])),
        "dtype": draw(st.sampled_from(["float32", "bfloat16", "float16"])),
        "layout": layout,
        "mask": {
            "causal": draw(st.sampled_from(["none", "top_left", "bottom_right"])),
            "window": draw(
                st.none()
                | st.fixed_dictionaries({"left": side, "right": side, "alignment": alignment})
            ),
        },
        "scale": draw(st.sampled_from(["rsqrt_head_dim", 0.2])),
        "softcap": draw(st.sampled_from([None, None, 12.0])),
        "alibi": draw(st.sampled_from([None, None, {"slopes": "geometric"}])),
    }
    if phase in ("prefill", "decode"):
        kind = draw(st.sampled_from([None, "contiguous", "paged"]))
        if kind is not None:
            append = draw(st.integers(0, 2))
            document["cache"] = {
                "kind": kind,
                "append": append,
                "append_in_call": append > 0 and draw(st.booleans()),
                "capacity": draw(st.sampled_from([None, 100])),
                "page_size": draw(st.sampled_from([8, 32])) if kind == "paged" else None,
            }
    return Workload.parse(document)


def backend_of(name: str) -> Backend:
    return ReferenceBackend() if name == "fake" else registry.load(name)


def judge(name: str, workload: Workload) -> None:
    backend = backend_of(name)
    tensors = inputs.make_inputs(workload, {}, stream=3, device="cpu")
    try:
        backend.check(workload, {})
        if workload.active_fields() - backend.consumed(workload, {}):
            return
        prepared = backend.prepare(workload, {}, tensors)
        seen = probes.run_probes(backend, {}, workload, "cpu")
    except Unsupported:
        return
    oracle = Oracle(workload, {}, tensors)
    if workload.cache is not None and workload.cache.append:
        prepared.append_step()
    report = oracle.check(prepared.step(), empty_row_lse=backend.empty_row_lse)
    assert report.ok, report.reason()
    assert seen.status() in ("PASS", "INCONCLUSIVE"), seen.reason()


QUIETLY = [HealthCheck.filter_too_much, HealthCheck.too_slow, HealthCheck.data_too_large]


@pytest.mark.parametrize("name", BACKENDS)
def test_a_few_random_workloads(name: str) -> None:
    @settings(max_examples=8, deadline=None, suppress_health_check=QUIETLY)
    @given(data=st.data())
    def run(data: st.DataObject) -> None:
        try:
            workload = data.draw(workloads())
        except WorkloadError:
            return
        judge(name, workload)

    run()


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", BACKENDS)
def test_many_random_workloads(name: str) -> None:
    @settings(max_examples=40, deadline=None, suppress_health_check=QUIETLY)
    @given(data=st.data())
    def run(data: st.DataObject) -> None:
        try:
            workload = data.draw(workloads())
        except WorkloadError:
            return
        judge(name, workload)

    run()
