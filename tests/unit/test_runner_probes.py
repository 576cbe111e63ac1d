from __future__ import annotations

import dataclasses
import json
import math
from typing import TYPE_CHECKING, Any

import jsonschema
import pytest
import torch
from numerics_fakes import ReferenceBackend, workload_of

from attnrepro.resources import schema_dir
from attnrepro_runner import fields, probes, probeshape
from attnrepro_runner.backends import registry

if TYPE_CHECKING:
    from attnrepro_runner.backends.base import Backend, Outputs, Tensors
    from attnrepro_runner.probes import ProbeReport
    from attnrepro_runner.semantics import Workload

INF = math.inf

SHAPES: dict[str, dict[str, Any]] = {
    "square": {"mask": {"causal": "top_left"}},
    "wide": {"seqlen_q": 20, "mask": {"causal": "bottom_right"}},
    "tall": {"seqlen_k": 20, "mask": {"causal": "bottom_right"}},
    "window": {"mask": {"window": {"left": 5, "right": 2}}},
    "bhsd": {"layout": "bhsd", "dtype": "float16"},
    "packed": {"layout": "thd", "seqlen_q": [2, 33], "seqlen_k": [0, 40]},
    "decode": {"phase": "decode", "seqlen_q": 1, "cache": {"kind": "contiguous", "append": 1}},
    "paged": {
        "phase": "decode",
        "seqlen_q": 3,
        "seqlen_k": [17, 40],
        "mask": {"causal": "bottom_right"},
        "cache": {"kind": "paged", "page_size": 8, "capacity": 44, "append": 2},
    },
    "softcap": {"softcap": 15.0, "dtype": "float32"},
    "alibi": {"alibi": {"slopes": "geometric"}, "seqlen_q": 30},
    "strided": {"strides": {"v": [4096, 1, 1280, 40]}},
    "widths": {"head_dim_v": 8},
}


def run(backend: Backend, workload: Workload) -> ProbeReport:
    return probes.run_probes(backend, {}, workload, "cpu")


@pytest.mark.parametrize("shape", SHAPES)
def test_an_honest_backend_passes(shape: str) -> None:
    report = run(registry.load("eager"), workload_of(**SHAPES[shape]))
    assert report.status() == "PASS", report.reason()
    assert report.reason() is None
    assert set(report.sets) == {"v", "k", "lse_count"}


@pytest.mark.parametrize("phase", ["forward", "forward_backward"])
def test_the_fake_is_honest_about_fp8_and_dropout(phase: str) -> None:
    fp8 = workload_of(dtype="float8_e4m3fn", fp8={})
    assert run(ReferenceBackend(), fp8).reason() is None
    dropout = workload_of(phase=phase, dropout={"p": 0.2, "seed": 3}, batch=1, heads_q=2)
    report = run(ReferenceBackend(), dropout)
    assert report.reason() is None
    assert report.dropout is not None
    assert abs(report.dropout.rate - 0.2) < 0.03
    assert report.dropout.backward_same == (True if phase == "forward_backward" else None)


def test_json_is_the_schema() -> None:
    schema = json.loads((schema_dir() / "result.schema.json").read_text())
    schema = {"$ref": "#/$defs/probes", "$defs": schema["$defs"]}
    for changes in (SHAPES["alibi"], SHAPES["softcap"], {"dropout": {"p": 0.5, "seed": 1}}):
        document = run(ReferenceBackend(), workload_of(batch=1, **changes)).to_json()
        jsonschema.validate(document, schema)


def test_hashes_depend_on_the_semantics_alone() -> None:
    workload = workload_of(**SHAPES["window"])
    reports = [run(backend, workload) for backend in (ReferenceBackend(), registry.load("eager"))]
    assert reports[0].sets["v"].observed == reports[1].sets["v"].observed
    other = run(ReferenceBackend(), workload_of(mask={"window": {"left": 5, "right": 1}}))
    assert other.sets["v"].expected != reports[0].sets["v"].expected


def masked(**changes: Any) -> Any:
    return lambda w: dataclasses.replace(w, mask=dataclasses.replace(w.mask, **changes))


def shifted(left: int, right: int) -> Any:
    def change(w: Workload) -> Workload:
        window = w.mask.window
        assert window is not None
        assert window.left is not None
        assert window.right is not None
        wrong = dataclasses.replace(window, left=window.left + left, right=window.right + right)
        return dataclasses.replace(w, mask=dataclasses.replace(w.mask, window=wrong))

    return change


def swap_pages(name: str) -> Any:
    def change(t: Tensors) -> Tensors:
        assert t.page_table is not None
        one, two = (int(page) for page in t.page_table[1, :2])
        pool = getattr(t, name).clone()
        pool[[one, two]] = pool[[two, one]]
        return dataclasses.replace(t, **{name: pool})

    return change


def first_head_of_v(t: Tensors) -> Tensors:
    return dataclasses.replace(t, v=t.v[:, :, :1].expand_as(t.v))


def mixed_strides(t: Tensors) -> Tensors:
    # V read as if it were contiguous.
    flat = t.v.as_strided(t.v.shape, torch.empty(t.v.shape).stride())
    return dataclasses.replace(t, v=flat)


def lse_of(value: float) -> Any:
    def change(o: Outputs) -> Outputs:
        assert o.lse is not None
        return dataclasses.replace(o, lse=o.lse.masked_fill(o.lse == -INF, value))

    return change


def add_to_lse(o: Outputs) -> Outputs:
    assert o.lse is not None
    return dataclasses.replace(o, lse=o.lse + 0.1)


def nan_rows(o: Outputs) -> Outputs:
    assert o.lse is not None
    return dataclasses.replace(
        o, out=o.out.masked_fill((o.lse == -INF).transpose(1, 2)[..., None], math.nan)
    )


@pytest.mark.parametrize(
    ("shape", "faults", "killed_by"),
    [
        ("wide", {"workload": masked(causal="top_left")}, {"v", "k", "lse_count"}),
        ("tall", {"workload": masked(causal="top_left")}, {"v", "lse_count"}),
        ("square", {"workload": masked(causal="none")}, {"v", "k", "lse_count"}),
        ("window", {"workload": shifted(1, 0)}, {"v", "lse_count"}),
        ("window", {"workload": shifted(-1, 0)}, {"v", "lse_count"}),
        ("window", {"workload": shifted(0, 1)}, {"v", "lse_count"}),
        ("window", {"workload": shifted(-1, 1)}, {"v"}),
        ("window", {"workload": masked(window=None)}, {"v", "lse_count"}),
        ("square", {"k_head": lambda w, h: h % w.heads_kv}, {"k"}),
        ("square", {"v_head": lambda w, h: h % w.heads_kv}, {"v"}),
        ("decode", {"k_head": lambda w, h: h % w.heads_kv}, {"k"}),
        ("paged", {"tensors": swap_pages("k")}, {"k"}),
        ("paged", {"tensors": swap_pages("v")}, {"k"}),
        ("square", {"tensors": first_head_of_v}, {"v"}),
        ("strided", {"tensors": mixed_strides}, {"v"}),
        ("tall", {"outputs": lse_of(0.0)}, {"lse_count"}),
        ("tall", {"outputs": lse_of(math.nan)}, {"lse_count"}),
        ("square", {"outputs": add_to_lse}, {"lse_count"}),
        ("tall", {"outputs": nan_rows}, {"v"}),
    ],
)
def test_set_probes_catch(shape: str, faults: dict[str, Any], killed_by: set[str]) -> None:
    report = run(ReferenceBackend(**faults), workload_of(**SHAPES[shape]))
    different = {name for name, probe in report.sets.items() if not probe.equal}
    assert killed_by <= different
    assert report.status() == "INCORRECT"
    assert "query" in str(report.reason())


def test_a_cache_read_beyond_its_length_is_caught() -> None:
    def whole_buffer(t: Tensors) -> Tensors:
        # The tail is NaN, and one of its keys takes the place of the last.
        k, v = t.k.clone(), t.v.clone()
        k[:, 38:39], v[:, 38:39] = t.k[:, 40:41], t.v[:, 40:41]
        return dataclasses.replace(t, k=k, v=v)

    workload = workload_of(
        phase="decode", seqlen_q=1, cache={"kind": "contiguous", "append": 1, "capacity": 64}
    )
    assert run(ReferenceBackend(), workload).status() == "PASS"
    assert run(ReferenceBackend(tensors=whole_buffer), workload).status() == "INCORRECT"


@pytest.mark.parametrize(
    ("faults", "rule"),
    [
        ({"unseeded": True}, "seed_repeats"),
        ({"stuck": True}, "next_call_differs"),
        ({"other_backward_mask": True}, "backward_same"),
        ({"rate": 0.3}, "rate_ok"),
        ({"unscaled": True}, "kept_value_ok"),
        ({"rate": 0.0}, "rate_ok"),
    ],
)
def test_dropout_rules_catch(faults: dict[str, Any], rule: str) -> None:
    workload = workload_of(
        phase="forward_backward", dropout={"p": 0.2, "seed": 3}, batch=1, heads_q=2
    )
    report = run(ReferenceBackend(**faults), workload)
    assert report.dropout is not None
    assert report.dropout.to_json()[rule] is False
    assert report.status() == "INCORRECT"


def test_small_workload_keeps_the_shape_class() -> None:
    big = workload_of(
        phase="decode",
        batch=64,
        seqlen_q=1,
        seqlen_k=65536,
        heads_q=64,
        heads_kv=8,
        head_dim=128,
        mask={"window": {"left": 4095, "right": 0}},
        cache={"kind": "paged", "page_size": 256, "capacity": 70000},
        softcap=30.0,
    )
    small = probeshape.small_workload(big)
    assert small.heads_q // small.heads_kv == 8
    assert small.seqlens_k == (529, 529)
    assert small.cache is not None
    assert small.cache.page_size == 256
    assert small.pages_per_sequence == 3
    assert small.mask.window == fields.Window(left=37, right=0, alignment="bottom_right")
    assert (small.head_dim, small.softcap, small.phase) == (128, 30.0, "decode")
    ragged = workload_of(
        batch=5, layout="thd", seqlen_q=[0, 9, 500, 3, 8000], seqlen_k=[5, 0, 800, 3, 100]
    )
    small = probeshape.small_workload(ragged)
    assert 0 in small.seqlens_q
    assert 0 in small.seqlens_k
    assert max(small.seqlens_q + small.seqlens_k) <= 200
    # A second description of the same thing must be a workload as well.
    assert small.active_fields() <= ragged.active_fields() | {"mask.masked_rows"}


def test_a_call_of_many_queries_is_probed_with_many() -> None:
    # torch's flex has another kernel below 128 queries: the probe must not show that one.
    for rows, probed in ((777, (130, 200)), (128, (128, 200)), (127, (67, 200)), (1, (1, 200))):
        small = probeshape.small_workload(
            workload_of(seqlen_q=rows, seqlen_k=1024, mask={"causal": "bottom_right"})
        )
        assert (small.seqlens_q[0], small.seqlens_k[0]) == probed


def test_strides_keep_their_order_and_gaps() -> None:
    assert probeshape.like_strides((2, 9, 4, 8), (288, 32, 8, 1), (2, 3, 2, 8)) == (48, 16, 8, 1)
    transposed = probeshape.like_strides((2, 9, 4, 8), (288, 1, 72, 9), (2, 3, 2, 8))
    assert transposed == (48, 1, 24, 3)
    gap = probeshape.like_strides((2, 9, 4, 8), (1000, 64, 8, 1), (2, 3, 2, 8))
    assert gap == (112, 32, 8, 1)
