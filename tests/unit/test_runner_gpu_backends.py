"""Adapters of GPU libraries against stand-ins with the libraries' signatures and meanings."""

from __future__ import annotations

import gpu_fakes
import pytest
import torch
from gpu_checks import FLASH, INPUTS, check_step, expected
from gpu_fakes import workload

from attnrepro_runner.backends import flash_common, registry
from attnrepro_runner.backends.base import Unsupported
from attnrepro_runner.inputs import make_inputs

MASKS = [
    {},
    {"causal": "bottom_right"},
    {"causal": "bottom_right", "window": {"left": 2, "right": 0}},
    {"window": {"left": 2, "right": 1}},
    {"window": {"left": None, "right": 1}},
    {"window": {"left": 1, "right": None}},
    {"window": {"left": None, "right": 0}},
]


@pytest.mark.parametrize("name", FLASH)
@pytest.mark.parametrize("mask", MASKS, ids=str)
@pytest.mark.parametrize("lengths", [(5, 7), (7, 5), (6, 6)])
def test_masks_keep_their_meaning(
    calls: list[dict[str, object]], name: str, mask: dict[str, object], lengths: tuple[int, int]
) -> None:
    check_step(name, workload(mask=mask, seqlen_q=lengths[0], seqlen_k=lengths[1]))


@pytest.mark.parametrize("name", FLASH)
def test_square_top_left_is_bottom_right(calls: list[dict[str, object]], name: str) -> None:
    check_step(name, workload(mask={"causal": "top_left"}, seqlen_q=6, seqlen_k=6))


@pytest.mark.parametrize("name", [*FLASH, "flashinfer"])
def test_top_left_with_other_lengths_is_refused(calls: list[dict[str, object]], name: str) -> None:
    w = workload(phase="prefill", head_dim=64, mask={"causal": "top_left"})
    with pytest.raises(Unsupported, match="bottom right"):
        registry.load(name).check(w, {})


@pytest.mark.parametrize("name", ["flash_attn_2", "flash_attn_3", "flash_attn_4"])
def test_bhsd_is_the_same_values(calls: list[dict[str, object]], name: str) -> None:
    check_step(name, workload(layout="bhsd", mask={"causal": "bottom_right"}))


@pytest.mark.parametrize("name", [*FLASH, "flashinfer"])
def test_packed_sequences_with_empty_ones(calls: list[dict[str, object]], name: str) -> None:
    w = workload(
        phase="prefill",
        batch=3,
        layout="thd",
        seqlen_q=[2, 0, 4],
        seqlen_k=[3, 0, 6],
        head_dim=64,
        mask={"causal": "bottom_right"},
    )
    check_step(name, w)


@pytest.mark.parametrize("name", ["flash_attn_2", "flash_attn_3", "flash_attn_4"])
def test_softcap_and_scale(calls: list[dict[str, object]], name: str) -> None:
    check_step(name, workload(softcap=1.5, scale=0.7))


def test_alibi_of_flash_attn_2(calls: list[dict[str, object]]) -> None:
    check_step("flash_attn_2", workload(alibi={"slopes": "geometric"}))
    slopes = calls[-1]["alibi_slopes"]
    assert isinstance(slopes, torch.Tensor)
    assert slopes.dtype == torch.float32


@pytest.mark.parametrize("cache", [None, {"kind": "contiguous"}])
def test_a_causal_alibi_of_flash_attn_2_has_no_lse(
    calls: list[dict[str, object]], cache: dict[str, object] | None
) -> None:
    """Its kernels add a bias that differs by a constant of the row."""
    for causal, has_lse in (("bottom_right", False), ("none", True)):
        w = workload(
            phase="prefill",
            seqlen_k=9,
            alibi={"slopes": "geometric"},
            mask={"causal": causal},
            cache=cache,
        )
        tensors = make_inputs(w, INPUTS, stream=0, device="cpu")
        outputs = registry.load("flash_attn_2").prepare(w, {}, tensors).step()
        assert (outputs.lse is not None) is has_lse


@pytest.mark.parametrize("name", ["flash_attn_3", "flash_attn_4", "torch.varlen", "flashinfer"])
def test_alibi_is_refused_elsewhere(calls: list[dict[str, object]], name: str) -> None:
    w = workload(phase="prefill", head_dim=64, alibi={"slopes": "geometric"})
    with pytest.raises(Unsupported, match="ALiBi"):
        registry.load(name).check(w, {})


CACHES = [
    {"kind": "contiguous", "capacity": 520, "append": 1},
    {"kind": "paged", "page_size": 256, "capacity": 512, "append": 1, "pool_pages": 9},
]


@pytest.mark.parametrize("name", [*FLASH, "flashinfer"])
@pytest.mark.parametrize("cache", CACHES, ids=["contiguous", "paged"])
@pytest.mark.parametrize("seqlen_q", [1, 3])
def test_caches(
    calls: list[dict[str, object]], name: str, cache: dict[str, object], seqlen_q: int
) -> None:
    w = workload(
        phase="decode",
        seqlen_q=seqlen_q,
        seqlen_k=[300, 41],
        head_dim=64,
        mask={"causal": "bottom_right"},
        cache=cache,
    )
    if name == "flashinfer" and cache["kind"] == "contiguous":
        with pytest.raises(Unsupported, match="paged"):
            registry.load(name).check(w, {})
        return
    check_step(name, w)


@pytest.mark.parametrize("cache", CACHES, ids=["contiguous", "paged"])
@pytest.mark.parametrize("name", ["flash_attn_2", "flash_attn_3"])
def test_append_in_the_call(
    calls: list[dict[str, object]], name: str, cache: dict[str, object]
) -> None:
    w = workload(
        phase="decode",
        seqlen_q=2,
        seqlen_k=[300, 41],
        mask={"causal": "bottom_right"},
        cache=cache | {"append": 2, "append_in_call": True},
    )
    backend = registry.load(name)
    tensors = make_inputs(w, INPUTS, stream=0, device="cpu")
    prepared = backend.prepare(w, {}, tensors)
    first, second = prepared.step(), prepared.step()
    reference, _ = expected(w, tensors)
    for outputs in (first, second):
        torch.testing.assert_close(
            outputs.out.flatten(0, 1).double(), reference, atol=2e-2, rtol=2e-2
        )
    assert calls[-1]["cache_seqlens"].tolist() == [298, 39]  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", ["flash_attn_4", "torch.varlen", "flashinfer", "cudnn_frontend"])
def test_append_in_the_call_is_refused_elsewhere(calls: list[dict[str, object]], name: str) -> None:
    w = workload(
        phase="decode",
        seqlen_q=1,
        seqlen_k=300,
        head_dim=64,
        cache=CACHES[1] | {"append_in_call": True},
    )
    with pytest.raises(Unsupported, match="append"):
        registry.load(name).check(w, {})


@pytest.mark.parametrize("name", FLASH)
@pytest.mark.parametrize("layout", ["bshd", "thd"])
def test_gradients_are_returned_and_not_accumulated(
    calls: list[dict[str, object]], name: str, layout: str
) -> None:
    w = workload(
        phase="forward_backward",
        seqlen_q=6,
        seqlen_k=6,
        layout=layout,
        mask={"causal": "bottom_right"},
    )
    tensors = make_inputs(w, INPUTS, stream=0, device="cpu")
    prepared = registry.load(name).prepare(w, {}, tensors)
    first, second, alone = prepared.step(), prepared.step(), prepared.backward_step()
    for other in (second, alone):
        for grad in ("dq", "dk", "dv"):
            assert torch.equal(getattr(first, grad), getattr(other, grad))
    assert first.dk is not None
    assert first.dk.shape == w.shape("k")
    assert tensors.q.grad is None
    assert float(first.dk.abs().max()) > 0


def test_window_sides_are_spelled_for_each_library(calls: list[dict[str, object]]) -> None:
    w = workload(mask={"window": {"left": 2, "right": None}}, phase="prefill", seqlen_k=5)
    tensors = make_inputs(w, INPUTS, stream=0, device="cpu")
    spelled = {}
    for name in FLASH:
        registry.load(name).prepare(w, {}, tensors).step()
        spelled[name] = calls[-1]["window_size"]
    assert spelled == {
        "flash_attn_2": (2, -1),
        "flash_attn_3": (2, -1),
        "flash_attn_4": (2, None),
        "torch.varlen": (2, -1),
    }


def test_a_minus_one_for_flash_attn_4_would_be_another_mask() -> None:
    """Why None is spelled: the stand-in, as the release, reads -1 as a number."""
    assert gpu_fakes.none_is_open(False, (-1, 0)) == (-1, 0)
    assert gpu_fakes.none_is_open(False, (None, 0)) == (None, 0)
    assert flash_common.Band(left=None, right=1).window(None) == (None, 1)
