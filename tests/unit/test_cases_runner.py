"""Reported cases: masks, and rows and keys without any."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING

import pytest
import torch
from case_probes import BR, INF, TORCH, attended, judged, probed, step, value_set
from numerics_fakes import ReferenceBackend, fresh_tensors, workload_of
from test_runner_probes import lse_of, masked, nan_rows, shifted

from attnrepro_runner import fields
from attnrepro_runner.backends import registry
from attnrepro_runner.backends.base import Unsupported

if TYPE_CHECKING:
    from attnrepro_runner.backends.base import Backend


# Masks.


@pytest.mark.parametrize(("q", "k"), [(1, 4), (2, 5), (7, 8)])
def test_pytorch_108108_top_left_in_place_of_bottom_right_is_seen(q: int, k: int) -> None:
    workload = workload_of(seqlen_q=q, seqlen_k=k, mask=BR)
    for name in TORCH:
        assert value_set(registry.load(name), workload).equal, name
    wrong = value_set(ReferenceBackend(workload=masked(causal="top_left")), workload)
    assert not wrong.equal
    assert "query 0, key 1: read nothing" in str(wrong.first_difference)


OTHERS = {
    "alignment": lambda w: masked(causal="top_left" if w.mask.causal != "top_left" else "none")(w),
    "no mask": masked(causal="none"),
    "one key less": masked(
        window=fields.Window(left=0, right=0, alignment="top_left"), causal="none"
    ),
}


@pytest.mark.parametrize("other", OTHERS)
@pytest.mark.parametrize(
    ("causal", "rows"),
    [("top_left", ["10000", "11000"]), ("bottom_right", ["11110", "11111"])],
)
def test_flash_attention_517_another_mask_is_another_hash(
    causal: str, rows: list[str], other: str
) -> None:
    workload = workload_of(seqlen_q=2, seqlen_k=5, mask={"causal": causal})
    assert attended(workload) == rows
    before = value_set(ReferenceBackend(), workload)
    assert before.equal
    upgraded = ReferenceBackend(workload=OTHERS[other])
    after = value_set(upgraded, workload)
    assert after.expected == before.expected
    assert after.observed != before.observed
    assert probed(upgraded, workload).status() == "INCORRECT"


@pytest.mark.parametrize("step_off", [(1, 0), (-1, 0), (0, 1)])
@pytest.mark.parametrize(("tokens", "length"), [(3, 6), (5, 40)])
def test_transformers_39408_the_probe_decides_a_windows_width(
    tokens: int, length: int, step_off: tuple[int, int]
) -> None:
    window = {"left": tokens - 1, "right": 0}
    workload = workload_of(seqlen_q=length, seqlen_k=length, mask={"window": window})
    assert attended(workload)[-1] == "0" * (length - tokens) + "1" * tokens
    for name in TORCH:
        assert value_set(registry.load(name), workload).equal, name
    assert not value_set(ReferenceBackend(workload=shifted(*step_off)), workload).equal


# Rows and keys that attend or are attended by nothing.


@pytest.mark.parametrize("name", TORCH)
@pytest.mark.parametrize(("q", "k"), [(5, 2), (9, 1), (70, 3)])
def test_flash_attention_1778_rows_without_keys_are_zero(name: str, q: int, k: int) -> None:
    workload = workload_of(
        phase="forward_backward", seqlen_q=q, seqlen_k=k, mask=BR, dtype="float32"
    )
    backend = registry.load(name)
    judge, outputs = step(backend, workload, fresh_tensors(workload))
    report = judge.check(outputs, empty_row_lse=backend.empty_row_lse)
    assert report.ok, report.reason()
    for part in ("out", "dq"):
        tensor = getattr(outputs, part)
        assert not tensor[:, : q - k].any()
        wrong = tensor.clone()
        wrong[1, 0, 0, 0] = 1e-30
        changed = dataclasses.replace(outputs, **{part: wrong})
        bad = judge.check(changed, empty_row_lse=backend.empty_row_lse)
        assert [n for n, t in bad.tensors.items() if not t.ok] == [part]


CONVENTIONS = {
    "flash_attn_2": INF,
    "flash_attn_3": -INF,
    "flash_attn_4": -INF,
    "flex": -INF,
    "eager": -INF,
    "sdpa.flash": 0.0,
}
NO_KEYS = {"layout": "thd", "seqlen_q": [2, 1], "seqlen_k": [0, 4]}


@pytest.mark.parametrize("name", CONVENTIONS)
def test_flash_attention_pr978_an_lse_without_keys_follows_the_convention(name: str) -> None:
    convention = CONVENTIONS[name]
    assert registry.load(name).empty_row_lse == convention
    workload = workload_of(**NO_KEYS)
    tensors = fresh_tensors(workload)
    for value in (INF, -INF, 0.0, 3.5, math.nan):
        backend = ReferenceBackend(outputs=lse_of(value))
        backend.empty_row_lse = convention
        judge, outputs = step(backend, workload, tensors)
        assert not outputs.out[:2].any()
        report = judge.check(outputs, empty_row_lse=convention)
        assert report.ok == (value == convention), value
        assert probed(backend, workload).sets["lse_count"].equal == (value == convention), value


@pytest.mark.parametrize("name", TORCH)
def test_flash_attention_pr978_an_output_without_keys_is_zero(name: str) -> None:
    workload = workload_of(**NO_KEYS)
    judge, outputs = step(registry.load(name), workload, fresh_tensors(workload))
    assert not outputs.out[:2].any()
    for garbage in (1e-30, math.nan):
        wrong = outputs.out.clone()
        wrong[1, 0, 0] = garbage
        changed = dataclasses.replace(outputs, out=wrong, lse=None)
        assert not judge.check(changed, empty_row_lse=0.0).ok


@pytest.mark.parametrize("backend", [*map(registry.load, TORCH), ReferenceBackend()])
@pytest.mark.parametrize(("q", "k"), [([0, 4], [4, 4]), ([3, 0, 0], [2, 5, 66])])
def test_flash_attention_pr2421_gradients_of_unattended_keys_are_exactly_zero(
    backend: Backend, q: list[int], k: list[int]
) -> None:
    workload = workload_of(
        phase="forward_backward", layout="thd", batch=len(q), seqlen_q=q, seqlen_k=k
    )
    judge, outputs = step(backend, workload, fresh_tensors(workload))
    assert judge.check(outputs, empty_row_lse=backend.empty_row_lse).ok
    unattended = torch.cat([torch.full((n,), not m) for m, n in zip(q, k, strict=True)])
    for part in ("dk", "dv"):
        gradient = getattr(outputs, part)
        assert not gradient[unattended].any()
        for garbage in (math.nan, 1e-30):
            wrong = gradient.clone()
            wrong[unattended.nonzero()[-1], 0, 0] = garbage
            changed = dataclasses.replace(outputs, **{part: wrong})
            report = judge.check(changed, empty_row_lse=backend.empty_row_lse)
            assert [n for n, t in report.tensors.items() if not t.ok] == [part]


@pytest.mark.parametrize("policy", ["zero", "nan"])
@pytest.mark.parametrize(("q", "k"), [(2, 1), (9, 4)])
def test_pytorch_81077_a_fully_masked_row_is_as_declared(q: int, k: int, policy: str) -> None:
    workload = workload_of(seqlen_q=q, seqlen_k=k, mask={**BR, "masked_rows": policy})
    assert attended(workload)[0] == "0" * k
    for gives in ("zero", "nan"):
        backend = ReferenceBackend(**({"outputs": nan_rows} if gives == "nan" else {}))
        assert value_set(backend, workload).equal == (gives == policy)
        assert judged(backend, workload).ok == (gives == policy)
    if policy == "nan":
        for name in TORCH:
            with pytest.raises(Unsupported, match="not NaN"):
                registry.load(name).check(workload, {})
