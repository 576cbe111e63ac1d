"""Cases from public reports, as far as a manifest alone decides them: the kind, and the input."""

from __future__ import annotations

from typing import Any

import pytest
from manifest_fakes import cell, decode, document, loaded, refused, subject

from attnrepro import resources, schema
from attnrepro.manifest.capability import Capability, Device, Unsupported, decide, read_release
from attnrepro.manifest.semantics import facts

HOPPER = Device(vendor="nvidia", architectures=("sm_90",))


def _release(name: str) -> Capability:
    claims = list(read_release(resources.images_dir() / "claims" / f"{name}.json"))
    whole = schema.with_defaults("claims", {"schema": "attnrepro.claims/1", "claims": claims})
    return Capability(stack=name, claims=tuple(whole["claims"]))


@pytest.mark.parametrize(("q", "k"), [(1, 4), (2, 5), (4, 1), (7, 8)])
def test_pytorch_108108_bare_causal_needs_equal_lengths(q: int, k: int) -> None:
    lengths = {"phase": "forward", "seqlen_q": q, "seqlen_k": k}
    problem = refused(document(workload={**lengths, "mask": {"causal": True}}))[
        "/workload/mask/causal"
    ]
    assert "bottom_right" in problem.fix
    assert "top_left" in problem.fix
    for alignment in ("top_left", "bottom_right"):
        assert cell(**lengths, mask={"causal": alignment})


def test_flash_attention_1778_rows_without_keys_are_told_beforehand() -> None:
    value = document(
        workload={
            "phase": "forward",
            "seqlen_q": 5,
            "seqlen_k": 2,
            "mask": {"causal": "bottom_right"},
        }
    )
    manifest = loaded(value)
    workload = manifest.cells[0].parsed
    assert [workload.is_empty_row(0, i) for i in range(5)] == [True, True, True, False, False]
    assert any("attend nothing" in note.text for note in manifest.notes)


def test_flash_attention_2463_pairs_are_counted_exactly() -> None:
    one = cell(phase="forward", batch=1, seqlen_q=128, seqlen_k=64, mask={"causal": "bottom_right"})
    assert facts(one.parsed).work.pairs == 2080


@pytest.mark.parametrize(("tokens", "length"), [(3, 6), (1, 4), (256, 300)])
def test_transformers_39408_a_window_of_w_tokens_is_w_minus_1_to_the_left(
    tokens: int, length: int
) -> None:
    window = {"left": tokens - 1, "right": 0}
    workload = cell(seqlen_q=length, seqlen_k=length, mask={"window": window}).parsed
    low, high = workload.key_range(0, length - 1)
    assert high - low == tokens


@pytest.mark.parametrize(
    ("q", "k"), [([2, 1], [0, 4]), ([0, 4], [4, 4]), ([2, 0, 3], [0, 0, 3]), ([4, 2], [4, 0])]
)
def test_flash_attention_pr978_and_2421_empty_sequences_have_a_meaning_when_packed(
    q: list[int], k: list[int]
) -> None:
    change = {"phase": "forward", "batch": len(q), "seqlen_q": q, "seqlen_k": k}
    assert cell(**change, layout="thd")
    padded = refused(document(workload=change))
    assert {"/workload/seqlen_q", "/workload/seqlen_k"} & set(padded)


def test_flash_attention_1661_the_total_is_the_sum_of_the_lengths() -> None:
    workload = cell(phase="forward", layout="thd", batch=2, seqlen_q=[2, 2], seqlen_k=[2, 2]).parsed
    assert workload.shape("q")[0] == 4
    assert "/workload/seqlen_q" in refused(
        document(workload={"layout": "thd", "batch": 3, "seqlen_q": [2, 2], "seqlen_k": [2, 2]})
    )


@pytest.mark.parametrize("policy", ["zero", "nan"])
def test_pytorch_81077_a_fully_masked_row_has_a_declared_value(policy: str) -> None:
    mask = {"window": {"left": 0, "right": None, "alignment": "top_left"}, "masked_rows": policy}
    one = cell(phase="forward", seqlen_q=4, seqlen_k=2, mask=mask)
    assert one.workload["mask"]["masked_rows"] == policy
    assert facts(one.parsed).has_empty_rows
    assert "/workload/mask/masked_rows" in refused(
        document(workload={"mask": {**mask, "masked_rows": "either"}})
    )


@pytest.mark.parametrize("length", [64.5, "64", True, 2**40])
def test_flashinfer_1654_lengths_are_integers_before_anything_starts(length: Any) -> None:
    assert "/workload/seqlen_k" in refused(decode(seqlen_k=length))


def test_flash_attention_1402_an_append_is_spelt_out() -> None:
    one = loaded(decode(seqlen_q=2, seqlen_k=5, cache={"kind": "contiguous", "append": 2})).cells[0]
    assert [one.parsed.key_range(0, i) for i in range(2)] == [(0, 4), (0, 5)]
    too_much = decode(seqlen_q=2, seqlen_k=5, cache={"kind": "contiguous", "append": 3})
    assert "/workload/cache/append" in refused(too_much)


def test_gpt_fast_233_length_and_capacity_are_two_numbers() -> None:
    one = loaded(decode(seqlen_k=100, cache={"kind": "contiguous", "capacity": 128})).cells[0]
    assert one.parsed.shape("k")[1] == 128
    assert one.parsed.key_range(0, 0) == (0, 100)
    assert "/workload/cache/capacity" in refused(
        decode(seqlen_k=129, cache={"kind": "contiguous", "capacity": 128})
    )


def test_pytorch_pr181528_grouped_heads_in_float32_are_not_claimed_for_the_fused_kernel() -> None:
    capability = _release("torch-2.13.0-cuda13.0")
    change = {"dtype": "float32", "heads_q": 24, "heads_kv": 12}
    decision = decide(cell(**change), subject("sdpa.efficient"), capability, HOPPER)
    assert isinstance(decision, Unsupported)
    assert "gqa" in decision.reason
    change["heads_kv"] = 24
    whole = decide(cell(**change), subject("sdpa.efficient"), capability, HOPPER)
    assert not isinstance(whole, Unsupported)


def test_flash_attention_1596_what_is_claimed_of_determinism_is_data() -> None:
    for path in (resources.images_dir() / "claims").glob("*.json"):
        for claim in read_release(path):
            assert set(claim["determinism"]) == {"forward", "backward"}
            trains = "forward_backward" in claim["phases"]
            assert (claim["determinism"]["backward"] == "none") is not trains, claim["backend"]


def test_flash_attention_314_seed_and_offset_of_dropout_are_in_the_manifest() -> None:
    dropout = {"p": 0.1, "seed": 5, "offset": 1000}
    assert cell(phase="forward", dropout=dropout).workload["dropout"] == dropout
    assert "/workload/dropout/seed" in refused(
        document(workload={"phase": "forward", "dropout": {"p": 0.1}})
    )


@pytest.mark.parametrize("length", [62, 64])
def test_pytorch_112577_strides_are_in_the_manifest(length: int) -> None:
    # V as a transposed view: the last dimension is the slowest within a head.
    view = [2 * 64 * length, 1, 64 * length, length]
    one = cell(seqlen_q=length, seqlen_k=length, strides={"v": view})
    assert one.parsed.stride("v") == tuple(view)
    capability = Capability.load(resources.images_dir() / "cpu-torch2.13" / "r1")
    cpu = Device(vendor="cpu")
    assert isinstance(decide(one, subject("sdpa.flash"), capability, cpu), Unsupported)
    assert not isinstance(decide(one, subject("sdpa.math"), capability, cpu), Unsupported)


@pytest.mark.parametrize("step", [-1, 0, 1])
def test_flash_attention_407_the_largest_offset_is_known_up_front(step: int) -> None:
    last = 2**31 + step
    one = cell(strides={"k": [last - 15 * 128 - 64 - 63, 128, 64, 1]})
    assert facts(one.parsed).largest_offset == last
    assert facts(one.parsed).offset_beyond_int32 is (step >= 0)


@pytest.mark.parametrize(("q", "kv"), [(3, 2), (8, 3), (2, 4)])
def test_flash_linear_attention_1029_heads_must_divide(q: int, kv: int) -> None:
    assert "/workload/heads_kv" in refused(document(workload={"heads_q": q, "heads_kv": kv}))


def test_vllm_pr51363_descales_differ_by_head() -> None:
    fp8 = {"k_descale": [0.5, 2], "v_descale": [2, 0.5]}
    one = cell(dtype="float8_e4m3fn", fp8=fp8)
    assert one.parsed.fp8 is not None
    assert one.parsed.fp8.k_descale == (0.5, 2.0)
    assert "/workload/fp8/k_descale" in refused(
        document(workload={"dtype": "float8_e4m3fn", "fp8": {"k_descale": [1, 2, 3]}})
    )


def test_triton_404_a_warm_cache_is_named() -> None:
    notes = {n.pointer: n.text for n in loaded(document(timing={"flush_cache": False})).notes}
    assert "warm" in notes["/timing/flush_cache"]


@pytest.mark.parametrize("distribution", ["one_hot", "large_negative"])
def test_cutlass_2004_easy_inputs_are_not_timed(distribution: str) -> None:
    assert "/inputs/distribution" in refused(document(inputs={"distribution": distribution}))
