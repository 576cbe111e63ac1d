from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

import jsonschema
import pytest
import torch

from attnrepro.resources import schema_dir
from attnrepro_runner import groups, inputs, oracle, reference, stages, views
from attnrepro_runner.backends import registry
from attnrepro_runner.backends.base import Outputs, Tensors
from attnrepro_runner.blockrule import hex_float, ulp
from attnrepro_runner.oracle import Oracle, Selection
from attnrepro_runner.semantics import Workload

CPU = torch.device("cpu")
INF = math.inf


def make(**changes: Any) -> Workload:
    document: dict[str, Any] = {
        "phase": "forward",
        "batch": 2,
        "seqlen_q": 130,
        "seqlen_k": 130,
        "heads_q": 4,
        "heads_kv": 2,
        "head_dim": 32,
        "dtype": "bfloat16",
        "mask": {"causal": "top_left"},
    }
    return Workload.parse(document | changes)


def call(workload: Workload, backend: str = "eager", **spec: Any) -> tuple[Tensors, Outputs]:
    tensors = inputs.make_inputs(workload, spec, stream=0, device=CPU)
    return tensors, registry.load(backend).prepare(workload, {}, tensors).step()


def low(workload: Workload, tensors: Tensors) -> Outputs:
    """The low computation itself as an honest backend, for what no CPU backend offers."""
    dtype = views.DTYPES[workload.dtype_out]
    out = torch.zeros(workload.shape("out"), dtype=dtype)
    lse = torch.zeros(workload.shape("lse"))
    for b in range(workload.batch):
        for h in range(workload.heads_q):
            given = groups.from_tensors(workload, tensors, [(b, (h,))])
            found = reference.attend(
                workload, given, [(b, (h,))], reference.low_precision(workload)
            )
            views.query_rows(out, workload, b, h).copy_(found.out[0, 0])
            views.lse_row(lse, workload, b, h).copy_(found.lse[0, 0])
    return Outputs(out=out, lse=lse)


@pytest.mark.parametrize("backend", ["eager", "sdpa.math", "sdpa.flash"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize(
    "changes",
    [
        {"phase": "forward_backward"},
        {"phase": "forward_backward", "seqlen_q": 150, "mask": {"causal": "bottom_right"}},
        {"phase": "forward_backward", "layout": "thd", "seqlen_q": [70, 0], "seqlen_k": [9, 66]},
        {
            "phase": "decode",
            "seqlen_q": 1,
            "mask": {},
            "cache": {"kind": "contiguous", "append": 1},
        },
        {"layout": "bhsd", "mask": {"window": {"left": 20, "right": 3}}},
    ],
)
def test_honest_backends_pass(backend: str, dtype: str, changes: dict[str, Any]) -> None:
    workload = make(dtype=dtype, **changes)
    tensors = inputs.make_inputs(workload, {}, stream=0, device=CPU)
    adapter = registry.load(backend)
    judge = Oracle(workload, {}, tensors)
    prepared = adapter.prepare(workload, {}, tensors)
    if workload.cache is not None:
        prepared.append_step()
    report = judge.check(prepared.step(), empty_row_lse=adapter.empty_row_lse)
    assert report.ok, report.reason()
    assert set(report.tensors) >= {"out"} | ({"dq", "dk", "dv"} if workload.has_backward else set())


@pytest.mark.parametrize("distribution", ["normal_outliers", "large_negative", "one_hot"])
def test_honest_backends_pass_on_extreme_inputs(distribution: str) -> None:
    workload = make(phase="forward_backward")
    tensors, outputs = call(workload, "sdpa.flash", distribution=distribution)
    report = Oracle(workload, {}, tensors).check(outputs, empty_row_lse=0.0)
    assert report.ok, report.reason()


def test_json_is_the_schema() -> None:
    schema = json.loads((schema_dir() / "result.schema.json").read_text())
    schema = {"$ref": "#/$defs/oracle", "$defs": schema["$defs"]}
    workload = make(phase="forward_backward")
    tensors, outputs = call(workload)
    outputs.out[0, 0, 0, 0] = math.nan
    report = Oracle(workload, {}, tensors, seed="2026/0").check(outputs, empty_row_lse=-INF)
    document = report.to_json()
    jsonschema.validate(document, schema)
    assert json.loads(json.dumps(document)) == document
    assert document["coverage"] == "8 of 8 (batch, head) pairs, all rows"


def test_a_wrong_element_is_found_with_its_block() -> None:
    workload = make(phase="forward_backward")
    for name in ("out", "lse", "dq", "dk", "dv"):
        tensors, outputs = call(workload)
        tensor = getattr(outputs, name).clone()
        place = (1, 3, 100) if name == "lse" else (1, 100, 1, 5)
        tensor[place] += 0.5
        wrong = dataclasses.replace(outputs, **{name: tensor})
        report = Oracle(workload, {}, tensors).check(wrong, empty_row_lse=-INF)
        assert [n for n, t in report.tensors.items() if not t.ok] == [name]
        head = 3 if name == "lse" else 1 if name == "dq" or name == "out" else 2
        assert report.tensors[name].worst_block == (1, head, 1)
        assert report.status() == "INCORRECT"
        assert f"{name}: " in str(report.reason())


@pytest.mark.parametrize("value", [math.nan, INF, -INF])
def test_nan_and_infinity_never_pass(value: float) -> None:
    workload = make()
    tensors, outputs = call(workload)
    outputs.out[1, 129, 3, 31] = value
    report = Oracle(workload, {}, tensors).check(outputs, empty_row_lse=-INF)
    assert not report.ok
    assert report.tensors["out"].nan == math.isnan(value)
    assert report.tensors["out"].worst_block == (1, 3, 2)


def test_missing_or_misshapen_outputs_fail() -> None:
    workload = make(phase="forward_backward")
    tensors, outputs = call(workload)
    assert outputs.dv is not None
    judge = Oracle(workload, {}, tensors)
    for wrong in (
        dataclasses.replace(outputs, dq=None),
        dataclasses.replace(outputs, out=outputs.out.float()),
        dataclasses.replace(outputs, dv=outputs.dv[:, :-1]),
    ):
        assert judge.check(wrong, empty_row_lse=-INF).status() == "INCORRECT"
    assert judge.check(outputs, empty_row_lse=-INF).ok


def test_empty_rows() -> None:
    workload = make(seqlen_q=80, seqlen_k=10, mask={"causal": "bottom_right"})
    tensors, outputs = call(workload)
    judge = Oracle(workload, {}, tensors)
    assert judge.check(outputs, empty_row_lse=-INF).ok
    assert outputs.lse is not None
    for convention in (INF, 0.0):
        # The same LSE is wrong for a backend that says otherwise.
        assert not judge.check(outputs, empty_row_lse=convention).tensors["lse"].ok
        other = outputs.lse.masked_fill(outputs.lse == -INF, convention)
        translated = dataclasses.replace(outputs, lse=other)
        assert judge.check(translated, empty_row_lse=convention).ok
        assert not judge.check(translated, empty_row_lse=-INF).ok
    for garbage in (math.nan, 3.5):
        wrong = dataclasses.replace(
            outputs, lse=outputs.lse.masked_fill(outputs.lse == -INF, garbage)
        )
        assert not judge.check(wrong, empty_row_lse=-INF).ok
    tiny = outputs.out.clone()
    tiny[0, 3, 0, 0] = 1e-30
    assert not judge.check(dataclasses.replace(outputs, out=tiny), empty_row_lse=-INF).ok


def test_masked_rows_nan() -> None:
    workload = make(seqlen_q=80, seqlen_k=10, mask={"causal": "bottom_right", "masked_rows": "nan"})
    tensors = inputs.make_inputs(workload, {}, stream=0, device=CPU)
    outputs = low(workload, tensors)
    judge = Oracle(workload, {}, tensors)
    assert not judge.check(outputs, empty_row_lse=-INF).ok
    outputs.out[:, :70] = math.nan
    assert judge.check(outputs, empty_row_lse=-INF).ok
    outputs.out[0, 70, 0, 0] = math.nan
    assert not judge.check(outputs, empty_row_lse=-INF).ok


def test_gradients_of_unattended_keys_are_exactly_zero() -> None:
    workload = make(phase="forward_backward", seqlen_q=20, seqlen_k=100)
    tensors, outputs = call(workload)
    judge = Oracle(workload, {}, tensors)
    assert judge.check(outputs, empty_row_lse=-INF).ok
    assert outputs.dv is not None
    dv = outputs.dv.clone()
    dv[0, 50, 0, 0] = 1e-30
    report = judge.check(dataclasses.replace(outputs, dv=dv), empty_row_lse=-INF)
    assert not report.tensors["dv"].ok


def test_one_block_of_a_long_row_counts() -> None:
    # 64 of 16k keys dropped in the last block: small against the first rows, not in its block.
    n = 16384
    workload = make(batch=1, seqlen_q=n, seqlen_k=n, heads_q=1, heads_kv=1)
    tensors = inputs.make_inputs(workload, {}, stream=0, device=CPU)
    q, k, v = (x[0, :, 0].float() for x in (tensors.q, tensors.k, tensors.v))
    judge = Oracle(workload, {}, tensors, Selection(pairs=((0, 0),), blocks=(0, n // 64 - 1)))
    tallies = []
    for dropped in (slice(0, 0), slice(512, 576)):
        out = torch.zeros(workload.shape("out"), dtype=torch.bfloat16)
        for rows in (slice(0, 64), slice(n - 64, n)):
            keys = torch.arange(n)[None, :] <= torch.arange(n)[rows, None]
            if rows.start:
                keys[:, dropped] = False
            scores = (q[rows] @ k.T * workload.scale_value).masked_fill_(~keys, -INF)
            out[0, rows, 0] = (torch.softmax(scores, -1) @ v).bfloat16()
        tallies.append(judge.check(Outputs(out=out), empty_row_lse=0.0).tensors["out"])
    good, bad = tallies
    assert good.ok
    assert not bad.ok
    # The rule with global maxima is blind to it.
    size = torch.tensor(float(v[:64].abs().max()), dtype=torch.float64)
    assert bad.max_abs <= 2 * bad.max_abs_low + 2 * float(ulp(size, torch.bfloat16))


@pytest.mark.parametrize("page_size", [None, 16])
def test_writes_outside_and_changed_inputs_are_found(page_size: int | None) -> None:
    cache: dict[str, Any] = {"kind": "contiguous", "append": 2, "capacity": 140}
    if page_size:
        cache |= {"kind": "paged", "page_size": page_size}
    workload = make(phase="decode", seqlen_q=2, cache=cache, mask={"causal": "bottom_right"})
    for what in ("nothing", "guard", "q", "tail"):
        tensors = inputs.make_inputs(workload, {}, stream=0, device=CPU)
        judge = Oracle(workload, {}, tensors)
        prepared = registry.load("eager").prepare(workload, {}, tensors)
        prepared.append_step()
        outputs = prepared.step()
        if what == "guard":
            memory = torch.empty(0, dtype=torch.bfloat16).set_(tensors.k.untyped_storage())
            memory[-1] = 0
        elif what == "q":
            tensors.q[0, 0, 0, 0] += 1
        elif what == "tail":
            tensors.v[(tensors.v == inputs.TAIL).nonzero()[-1].unbind()] = 1
        report = judge.check(outputs, empty_row_lse=-INF)
        assert report.guards_intact == (what == "nothing")
        assert report.ok == (what == "nothing")
        assert (what == "nothing") == (report.reason() is None)


def test_selection() -> None:
    workload = make(seqlen_q=640, seqlen_k=640, batch=4)
    select = oracle.sample(workload, pairs=3, blocks=4, seed=5)
    assert len(select.pairs) == 3
    assert {(0, 0), (3, 3)} <= set(select.pairs)
    assert select.blocks is not None
    assert {0, 9} <= set(select.blocks)
    assert len(select.blocks) == 4
    assert oracle.sample(workload, pairs=99).pairs == tuple(
        (b, h) for b in range(4) for h in range(4)
    )
    assert len(oracle.sample(workload, pairs=1).pairs) == 1
    tensors, outputs = call(workload, "sdpa.flash")
    judge = Oracle(workload, {}, tensors, Selection(pairs=((2, 1),), blocks=(0, 9)))
    report = judge.check(outputs, empty_row_lse=0.0)
    assert report.ok
    assert report.coverage == "1 of 16 (batch, head) pairs, row blocks 0, 9"
    outputs.out[2, 639, 1, 0] += 1
    assert not judge.check(outputs, empty_row_lse=0.0).ok
    outputs.out[2, 639, 1, 0] -= 1
    outputs.out[2, 300, 1, 0] += 1
    assert judge.check(outputs, empty_row_lse=0.0).ok


def test_a_head_that_is_not_sampled_must_be_written() -> None:
    workload = make(batch=4)
    tensors, outputs = call(workload, "sdpa.flash")
    judge = Oracle(workload, {}, tensors, Selection(pairs=((0, 0),)))
    assert judge.check(outputs, empty_row_lse=0.0).ok
    outputs.out[3, :, 1] = math.nan
    report = judge.check(outputs, empty_row_lse=0.0)
    assert not report.ok
    assert "NaN or infinite" in str(report.reason())


def test_the_pairs_of_a_check_are_bounded_and_drawn_by_seed() -> None:
    workload = make(batch=40, seqlen_q=1, seqlen_k=1)
    assert stages.selection(workload, "cpu") is None
    first, other = (stages.selection(workload, "cpu", most=16, seed=seed) for seed in (1, 2))
    assert first is not None
    assert other is not None
    assert len(first.pairs) == len(other.pairs) == 16
    assert first.pairs != other.pairs
    assert {(0, 0), (39, 3)} <= set(first.pairs) & set(other.pairs)


def test_a_backward_is_checked_in_whole_groups() -> None:
    workload = make(phase="forward_backward")
    tensors, outputs = call(workload)
    judge = Oracle(workload, {}, tensors, oracle.sample(workload, pairs=1, blocks=1))
    assert judge.check(outputs, empty_row_lse=-INF).coverage == (
        "2 of 8 (batch, head) pairs, all rows"
    )


def test_fp8_has_two_errors_and_a_rule_for_the_mean() -> None:
    plain: dict[str, Any] = {"dtype": "float8_e4m3fn", "fp8": {}}
    for changes in (
        plain,
        plain
        | {
            "phase": "decode",
            "seqlen_q": 1,
            "mask": {},
            "cache": {"kind": "paged", "page_size": 16},
        },
    ):
        workload = make(**changes)
        tensors = inputs.make_inputs(workload, {}, stream=0, device=CPU)
        drawn = inputs.draw(workload, {}, stream=0, device=CPU)
        judge = Oracle(workload, {}, tensors, unquantised=drawn)
        outputs = low(workload, tensors)
        report = judge.check(outputs, empty_row_lse=-INF)
        assert report.ok, report.reason()
        tally = report.tensors["out"]
        assert tally.total_max_abs is not None
        assert tally.total_max_abs > 0.01
        assert tally.rule.multiplier == (4 if workload.cache else 2)
        tripled = dataclasses.replace(outputs, out=outputs.out * 1.2)
        assert not judge.check(tripled, empty_row_lse=-INF).ok


@pytest.mark.parametrize(
    ("keys", "seen"), [(4096, 1.4e-6), (32768, 2.6e-6), (65536, 2.6e-6), (131072, 6.5e-6)]
)
def test_an_lse_of_many_keys_may_err_as_a_running_sum_does(keys: int, seen: float) -> None:
    # Seen on an H200: flash-attn-4's decode, which adds one tile after the other.
    workload = make(batch=1, heads_q=2, seqlen_q=1, seqlen_k=keys, mask={})
    tensors, outputs = call(workload, "sdpa.math")
    judge = Oracle(workload, {}, tensors)
    exact = low(workload, tensors).lse
    assert exact is not None
    # A kernel that misses one key of average weight is told by its LSE alone, up to 64k keys.
    missed = [(1 / keys, False)] if keys <= 65536 else []
    for error, ok in ((seen, True), (-seen, True), (1e-4, False), *missed):
        found = dataclasses.replace(outputs, lse=exact + error)
        assert judge.check(found, empty_row_lse=-INF).ok is ok


def test_an_lse_of_float8_errs_as_products_of_14_bits_do() -> None:
    workload = make(dtype="float8_e4m3fn", fp8={}, head_dim=128)
    tensors = inputs.make_inputs(workload, {}, stream=0, device=CPU)
    judge = Oracle(workload, {}, tensors)
    outputs = low(workload, tensors)
    assert outputs.lse is not None
    # In rows of few keys, the worst that FlashAttention-3 showed on an H200; then eight times that.
    for share, ok in ((2.0**-12.1, True), (2.0**-9, False)):
        found = dataclasses.replace(outputs, lse=outputs.lse * (1 + share))
        assert judge.check(found, empty_row_lse=-INF).tensors["lse"].ok is ok


def test_ulps() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for x in (1.0, 1.5, 2.0, 3e-5, 0.0):
            value = torch.tensor(x, dtype=dtype)
            beyond = torch.nextafter(value.float(), torch.tensor(INF)).to(dtype)
            if dtype == torch.float32:
                assert float(ulp(value.double(), dtype)) == float(beyond.double() - value.double())
        one = ulp(torch.tensor([1.0, 1.99, 2.0], dtype=torch.float64), dtype)
        assert one.tolist() == [
            torch.finfo(dtype).eps,
            torch.finfo(dtype).eps,
            2 * torch.finfo(dtype).eps,
        ]
        least = float(ulp(torch.tensor(0.0, dtype=torch.float64), dtype))
        assert least == torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    assert [hex_float(x) for x in (0.0, 0.1, INF, math.nan)] == [
        "0x0.0p+0",
        "0x1.999999999999ap-4",
        "inf",
        "inf",
    ]


@pytest.mark.parametrize("seed", range(6))
def test_one_key_leaves_an_ulp_of_its_products(seed: int) -> None:
    # dQ and dK of a single key are 0 but for rounding; honest torch flash was called wrong.
    workload = make(
        phase="forward_backward",
        dtype="float32",
        batch=1,
        seqlen_q=1,
        seqlen_k=1,
        head_dim=64,
        mask={"causal": "none"},
    )
    tensors, outputs = call(workload, "sdpa.flash", seed=seed)
    report = Oracle(workload, {}, tensors).check(outputs, empty_row_lse=-INF)
    assert report.ok, report.reason()
    assert outputs.dq is not None
    wrong = dataclasses.replace(outputs, dq=outputs.dq + 1e-4)
    assert not Oracle(workload, {}, tensors).check(wrong, empty_row_lse=-INF).ok


def test_an_lse_may_err_as_the_hardwares_tanh() -> None:
    # An H200: flash-attn 3 and 4 at softcap 30 are 1.45e-5 off in a row of few keys.
    workload = make(softcap=30.0, head_dim=128)
    tensors = inputs.make_inputs(workload, {}, stream=0, device=CPU)
    outputs = low(workload, tensors)
    assert outputs.lse is not None
    judge = Oracle(workload, {}, tensors)
    for error, ok in ((1.45e-5, True), (0.02, False)):
        found = judge.check(
            dataclasses.replace(outputs, lse=outputs.lse + error), empty_row_lse=-INF
        )
        assert found.ok is ok, found.reason()
    plain = make(head_dim=128)
    tensors = inputs.make_inputs(plain, {}, stream=0, device=CPU)
    outputs = low(plain, tensors)
    assert outputs.lse is not None
    off = dataclasses.replace(outputs, lse=outputs.lse + 1e-3)
    assert not Oracle(plain, {}, tensors).check(off, empty_row_lse=-INF).ok
