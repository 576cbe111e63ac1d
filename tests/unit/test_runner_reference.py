from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attnrepro_runner import groups, inputs, reference, views
from attnrepro_runner.semantics import Workload

CPU = torch.device("cpu")


def make(**changes: Any) -> Workload:
    document: dict[str, Any] = {
        "phase": "forward_backward",
        "batch": 1,
        "seqlen_q": 6,
        "seqlen_k": 9,
        "heads_q": 4,
        "heads_kv": 2,
        "head_dim": 8,
        "head_dim_v": 4,
        "dtype": "float32",
    }
    return Workload.parse(document | changes)


def by_definition(
    workload: Workload, b: int, h: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """One row and one key at a time, straight from the semantics module."""
    rows, lses = [], []
    slopes = workload.alibi_slopes()
    for i in range(workload.seqlens_q[b]):
        lo, hi = workload.key_range(b, i)
        logits = []
        for j in range(lo, hi):
            s = (q[i] * k[j]).sum() * workload.scale_value
            if workload.softcap is not None:
                s = workload.softcap * torch.tanh(s / workload.softcap)
            if slopes is not None:
                s = s - slopes[h] * abs(i + workload.offset(b) - j)
            logits.append(s)
        if not logits:
            rows.append(v.new_zeros(workload.head_dim_v) + 0 * q[i].sum())
            lses.append(torch.tensor(-math.inf, dtype=torch.float64))
            continue
        stacked = torch.stack(logits)
        lses.append(torch.logsumexp(stacked, 0))
        rows.append(torch.softmax(stacked, 0) @ v[lo:hi])
    return torch.stack(rows), torch.stack(lses)


MASKS = st.fixed_dictionaries(
    {
        "causal": st.sampled_from(["none", "top_left", "bottom_right"]),
        "window": st.none()
        | st.fixed_dictionaries(
            {
                "left": st.none() | st.integers(0, 8),
                "right": st.none() | st.integers(0, 8),
            }
        ),
    }
)


@settings(deadline=None, max_examples=40)
@given(
    seqlen_q=st.integers(1, 7),
    seqlen_k=st.integers(0, 7),
    mask=MASKS,
    softcap=st.none() | st.just(1.5),
    alibi=st.none() | st.just({"slopes": [0.5, 0.25, 1.0, 0.0]}),
    scale=st.sampled_from(["rsqrt_head_dim", 0.7]),
    tile=st.sampled_from([1, 16, 1 << 20]),
)
def test_output_lse_and_gradients_by_definition(
    seqlen_q: int,
    seqlen_k: int,
    mask: dict[str, Any],
    softcap: float | None,
    alibi: dict[str, Any] | None,
    scale: Any,
    tile: int,
) -> None:
    workload = make(
        seqlen_q=seqlen_q, seqlen_k=seqlen_k, mask=mask, softcap=softcap, alibi=alibi, scale=scale
    )
    tensors = inputs.make_inputs(workload, {}, stream=0, device=CPU)
    heads = (2, 3)
    given_ = groups.from_tensors(workload, tensors, [(0, heads)])
    before = reference._TILE_CPU
    reference._TILE_CPU = tile
    try:
        found = reference.attend(workload, given_, [(0, heads)], reference.HIGH)
    finally:
        reference._TILE_CPU = before
    q = given_.q.double().requires_grad_()
    k, v = given_.k.double().requires_grad_(), given_.v.double().requires_grad_()
    parts = [by_definition(workload, 0, h, q[0, n], k[0], v[0]) for n, h in enumerate(heads)]
    out = torch.stack([part[0] for part in parts])[None]
    lse = torch.stack([part[1] for part in parts])[None]
    close: dict[str, Any] = {"rtol": 1e-12, "atol": 1e-12}
    torch.testing.assert_close(found.out, out, **close)
    torch.testing.assert_close(found.lse, lse, **close)
    assert given_.grad_out is not None
    grads = torch.autograd.grad(
        out, (q, k, v), given_.grad_out.double(), allow_unused=True, materialize_grads=True
    )
    for name, expected in zip(("dq", "dk", "dv"), grads, strict=True):
        torch.testing.assert_close(getattr(found, name), expected, **close)


def test_dropout_with_a_given_mask() -> None:
    workload = make(dropout={"p": 0.25, "seed": 1}, heads_q=1, heads_kv=1, mask={})
    tensors = inputs.make_inputs(workload, {}, stream=0, device=CPU)
    kept = torch.arange(6 * 9).view(6, 9) % 4 != 1
    one = [(0, (0,))]
    given_ = groups.from_tensors(workload, tensors, one)
    found = reference.attend(workload, given_, one, reference.HIGH, keep=lambda b, h: kept)
    q, k, v = (x.double().requires_grad_() for x in (given_.q, given_.k, given_.v))
    weights = torch.softmax(q @ k.mT * workload.scale_value, -1) * kept / 0.75
    torch.testing.assert_close(found.out, weights @ v, rtol=1e-12, atol=1e-12)
    assert given_.grad_out is not None
    grads = torch.autograd.grad(weights @ v, (q, k, v), given_.grad_out.double())
    torch.testing.assert_close((found.dq, found.dk, found.dv), grads, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    "mask",
    [
        {"causal": "top_left"},
        {"causal": "bottom_right"},
        {"window": {"left": 20, "right": 0, "alignment": "top_left"}},
        {"window": {"left": 20, "right": None, "alignment": "top_left"}},
        {},
    ],
)
@pytest.mark.parametrize("tile", [1 << 22, 400])
@pytest.mark.parametrize("waste", [1.0, 9.0])
def test_blocks_of_rows_are_those_rows(
    monkeypatch: pytest.MonkeyPatch, mask: dict[str, object], tile: int, waste: float
) -> None:
    monkeypatch.setattr(reference, "_TILE_CPU", tile)
    more: dict[str, object] = {"softcap": 2.0, "alibi": {"slopes": "geometric"}}
    dropped: dict[str, object] = {"dropout": {"p": 0.25, "seed": 1}}
    kept = torch.rand(50, 70, generator=torch.Generator().manual_seed(1)) > 0.25
    # However much a merged tile computes for nothing: as on a GPU, and as on a CPU.
    monkeypatch.setitem(reference._WASTE, "cpu", waste)
    for extra in ({"dtype": "bfloat16"}, more, dropped):
        workload = make(phase="forward", seqlen_q=50, seqlen_k=70, mask=mask, **extra)
        tensors = inputs.make_inputs(workload, {}, stream=0, device=CPU)
        one = [(0, (0, 1))]
        given_ = groups.from_tensors(workload, tensors, one)
        keep = (lambda b, h: kept.roll(h)) if workload.dropout is not None else None
        whole = reference.attend(workload, given_, one, reference.HIGH, keep=keep)
        part = reference.attend(
            workload, given_, one, reference.HIGH, blocks=[range(16, 32), range(48, 50)], keep=keep
        )
        assert part.rows.tolist() == [*range(16, 32), 48, 49]
        close = {"rtol": 1e-13, "atol": 1e-13}
        torch.testing.assert_close(part.out, whole.out[:, :, part.rows], **close)
        torch.testing.assert_close(part.lse, whole.lse[:, :, part.rows], **close)
        for name, terms in part.terms.items():
            torch.testing.assert_close(terms, whole.terms[name][:, part.rows], **close)


@pytest.mark.parametrize(
    ("mask", "waste", "tiles"),
    [
        ({}, 1.0, 1),  # no score of a merged tile is for nothing
        ({"causal": "top_left"}, 2.5, 1),
        ({"causal": "top_left"}, 1.0, 8),
        ({"window": {"left": 60, "right": 0, "alignment": "top_left"}}, 2.5, 4),
    ],
)
def test_some_rows_take_few_tiles_where_that_costs_few_scores(
    monkeypatch: pytest.MonkeyPatch, mask: dict[str, object], waste: float, tiles: int
) -> None:
    workload = make(phase="forward", seqlen_q=1024, seqlen_k=1024, mask=mask)
    tensors = inputs.make_inputs(workload, {}, stream=0, device=CPU)
    one = [(0, (0,))]
    given_ = groups.from_tensors(workload, tensors, one)
    every_other = [range(i, i + 64) for i in range(0, 1024, 128)]
    monkeypatch.setitem(reference._WASTE, "cpu", waste)
    batch = reference._Batch(workload, given_, one, reference.HIGH, None, every_other)
    found = list(batch.split())
    assert len(found) == tiles
    assert [place for tile in found for place in tile] == list(range(512))
    scores = sum(batch.scores(tile) for tile in found)
    alone = sum(batch.scores(range(i, i + 64)) for i in range(0, 512, 64))
    assert alone <= scores <= waste * alone


def test_gradients_need_every_row() -> None:
    training, one = make(), [(0, (0,))]
    tensors = inputs.make_inputs(training, {}, stream=0, device=CPU)
    with pytest.raises(ValueError, match="every row"):
        reference.attend(
            training,
            groups.from_tensors(training, tensors, one),
            one,
            reference.HIGH,
            blocks=[range(2)],
        )


def test_low_rounds_once_and_ignores_the_process_precision() -> None:
    workload = make(phase="forward", dtype="bfloat16", seqlen_q=64, seqlen_k=64, head_dim=64)
    tensors = inputs.make_inputs(workload, {}, stream=0, device=CPU)
    batch = [(0, (0, 1)), (0, (2, 3))]
    given_ = groups.from_tensors(workload, tensors, batch)
    high = reference.attend(workload, given_, batch, reference.HIGH)
    low = reference.attend(workload, given_, batch, reference.low_precision(workload))
    assert torch.equal(low.out, low.out.bfloat16().float())
    error = (low.out.double() - high.out).abs().max()
    assert 0 < float(error) < float(high.out.abs().max()) * 2**-7
    try:
        torch.set_float32_matmul_precision("medium")
        again = reference.attend(workload, given_, batch, reference.low_precision(workload))
        assert torch.equal(again.lse, low.lse)
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision("highest")


def test_descales_enter_logits_and_values() -> None:
    workload = make(
        phase="forward",
        dtype="float8_e4m3fn",
        head_dim_v=8,
        fp8={"q_descale": [0.5], "k_descale": [0.25, 2.0], "v_descale": [4.0, 1.0]},
    )
    tensors = inputs.make_inputs(workload, {}, stream=0, device=CPU)
    for g, (k_scale, v_scale) in enumerate(((0.25, 4.0), (2.0, 1.0))):
        one = [(0, (2 * g, 2 * g + 1))]
        given_ = groups.from_tensors(workload, tensors, one)
        found = reference.attend(workload, given_, one, reference.HIGH)
        q = views.query_rows(tensors.q, workload, 0, 2 * g).double() * 0.5
        k = views.key_rows(tensors.k, workload, 0, g).double() * k_scale
        v = views.key_rows(tensors.v, workload, 0, g).double() * v_scale
        expected = torch.softmax(q @ k.T / math.sqrt(8), -1) @ v
        torch.testing.assert_close(found.out[0, 0], expected, rtol=1e-12, atol=1e-12)
