from __future__ import annotations

import math
import sys
import textwrap
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.nn.attention.bias import CausalBias

from attnrepro_runner.backends import registry, sdpa, torchcalls
from attnrepro_runner.backends.base import MemoryOrder, Tensors, Unsupported
from attnrepro_runner.semantics import Workload

if TYPE_CHECKING:
    from pathlib import Path

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
TOLERANCE = {"float32": 2e-5, "bfloat16": 3e-2, "float16": 4e-3}
BR = {"causal": "bottom_right"}
TL = {"causal": "top_left"}


def workload(**changes: Any) -> Workload:
    document = {
        "phase": "forward",
        "batch": 2,
        "seqlen_q": 9,
        "seqlen_k": 9,
        "heads_q": 4,
        "heads_kv": 2,
        "head_dim": 16,
        "dtype": "float32",
    }
    return Workload.parse({**document, **changes})


def random(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(dtype)


def tensors(w: Workload) -> Tensors:
    dtype = DTYPES[w.dtype]
    parts = {name: random(w.shape(name), dtype, n) for n, name in enumerate(("q", "k", "v"))}
    more: dict[str, torch.Tensor] = {}
    if w.has_backward:
        more["grad_out"] = random(w.shape("out"), dtype, 7)
    if w.cache is not None:
        table = w.page_table()
        more["seqused_k"] = torch.tensor(w.seqlens_k, dtype=torch.int32)
        if table is not None:
            more["page_table"] = torch.tensor(table, dtype=torch.int32)
        if w.cache.append:
            more["k_new"] = random(w.shape("k_new"), dtype, 11)
            more["v_new"] = random(w.shape("v_new"), dtype, 12)
    slopes = w.alibi_slopes()
    if slopes is not None:
        more["alibi_slopes"] = torch.tensor(slopes)
    return Tensors(**parts, **more)


def rows(x: torch.Tensor, w: Workload, b: int, lengths: tuple[int, ...]) -> torch.Tensor:
    """(heads, seqlen, width) of sequence b in float64."""
    if w.layout == "thd":
        start = sum(lengths[:b])
        return x[start : start + lengths[b]].transpose(0, 1).double()
    return (x[b] if w.layout == "bhsd" else x[b].transpose(0, 1)).double()


def keys(x: torch.Tensor, new: torch.Tensor | None, w: Workload, b: int) -> torch.Tensor:
    n = w.seqlens_k[b]
    if w.cache is None:
        return rows(x, w, b, w.seqlens_k)
    table = w.page_table()
    flat = x[b] if table is None else torch.cat([x[page] for page in table[b]])
    flat = flat[:n].clone()
    if new is not None:
        flat[n - w.cache.append :] = new[b]
    return flat.transpose(0, 1).double()


def reference(w: Workload, t: Tensors) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Row by row from `key_range`, float64: outputs (heads, seqlen_q, width) and LSE."""
    outs, lses = [], []
    for b in range(w.batch):
        q = rows(t.q, w, b, w.seqlens_q)
        k, v = keys(t.k, t.k_new, w, b), keys(t.v, t.v_new, w, b)
        out = torch.zeros(w.heads_q, w.seqlens_q[b], w.head_dim_v, dtype=torch.float64)
        lse = torch.full((w.heads_q, w.seqlens_q[b]), -math.inf, dtype=torch.float64)
        slopes = w.alibi_slopes()
        for h in range(w.heads_q):
            for i in range(w.seqlens_q[b]):
                lo, hi = w.key_range(b, i)
                if lo >= hi:
                    continue
                s = k[w.kv_head(h), lo:hi] @ q[h, i] * w.scale_value
                if w.softcap is not None:
                    s = w.softcap * torch.tanh(s / w.softcap)
                if slopes is not None:
                    s = s - slopes[h] * (torch.arange(lo, hi) - i - w.offset(b)).abs()
                lse[h, i] = torch.logsumexp(s, 0)
                out[h, i] = torch.softmax(s, 0) @ v[w.kv_head(h), lo:hi]
        outs.append(out)
        lses.append(lse)
    return outs, lses


def run(name: str, w: Workload, t: Tensors) -> Any:
    prepared = registry.load(name).prepare(w, {}, t)
    if w.cache is not None and w.cache.append and not w.cache.append_in_call:
        prepared.append_step()
    return prepared.step()


CACHE = {"kind": "contiguous", "capacity": 24, "append": 2}
PAGED = {"kind": "paged", "capacity": 24, "append": 2, "page_size": 4, "pool_pages": 15}
DECODE = {"phase": "decode", "seqlen_q": 2, "seqlen_k": [17, 11], "mask": BR}
CASES: list[dict[str, Any]] = [
    {},
    {"dtype": "bfloat16", "mask": TL},
    {"dtype": "float16", "mask": BR, "layout": "bhsd"},
    {"mask": TL, "seqlen_q": 4, "seqlen_k": 11},
    {"mask": BR, "seqlen_q": 4, "seqlen_k": 11},
    {"mask": BR, "seqlen_q": 11, "seqlen_k": 4},
    {"mask": {"causal": "none", "window": {"left": 2, "right": 1}}},
    {"mask": {"causal": "bottom_right", "window": {"left": 2, "right": None}}, "heads_kv": 1},
    {"mask": {"window": {"left": 1, "right": 1, "alignment": "top_left"}}, "seqlen_k": 13},
    {"scale": 0.3, "heads_kv": 4},
    {"layout": "thd", "seqlen_q": [3, 6], "seqlen_k": [7, 5], "mask": BR},
    {**DECODE, "cache": CACHE},
    {**DECODE, "cache": {**CACHE, "append_in_call": True}, "seqlen_k": 17},
    {**DECODE, "cache": PAGED},
    {**DECODE, "cache": {**PAGED, "append_in_call": True}, "seqlen_k": 17, "dtype": "bfloat16"},
    {
        "phase": "prefill",
        "seqlen_q": 5,
        "seqlen_k": 12,
        "mask": BR,
        "cache": {"kind": "contiguous"},
    },
]


def check(name: str, w: Workload) -> None:
    t = tensors(w)
    outs, lses = reference(w, t)
    got = run(name, w, t)
    assert got.out.shape == w.shape("out")
    assert got.out.dtype == DTYPES[w.dtype]
    for b in range(w.batch):
        torch.testing.assert_close(
            rows(got.out, w, b, w.seqlens_q), outs[b], atol=TOLERANCE[w.dtype], rtol=0
        )
    if got.lse is not None:
        assert got.lse.shape == w.shape("lse")
        start = 0
        for b in range(w.batch):
            stop = start + w.seqlens_q[b]
            part = got.lse[:, start:stop] if w.is_packed else got.lse[b]
            torch.testing.assert_close(part.double(), lses[b], atol=TOLERANCE[w.dtype], rtol=1e-6)
            start = stop


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)) or "plain")
@pytest.mark.parametrize("name", ["eager", "sdpa.math", "sdpa.flash"])
def test_matches_a_reference_by_rows(name: str, case: dict[str, Any]) -> None:
    check(name, workload(**case))


@pytest.mark.parametrize(
    "case",
    [
        {"softcap": 0.7},
        {"alibi": {"slopes": "geometric"}, "mask": BR, "seqlen_k": 14},
        {"head_dim_v": 24, "seqlen_q": 0},
        {"head_dim_v": 24},
    ],
)
def test_eager_honours_what_fused_kernels_do_not(case: dict[str, Any]) -> None:
    check("eager", workload(**case))


def gradients(name: str, w: Workload, *, alone: bool = False) -> list[torch.Tensor]:
    prepared = registry.load(name).prepare(w, {}, tensors(w))
    if alone:
        prepared.backward_step()
    got = prepared.backward_step() if alone else prepared.step()
    assert got.dq is not None
    assert got.dk is not None
    assert got.dv is not None
    return [got.dq, got.dk, got.dv]


@pytest.mark.parametrize(
    "case",
    [
        {},
        {"mask": TL},
        {"mask": BR, "seqlen_q": 11, "seqlen_k": 4},
        {"layout": "thd", "seqlen_q": [3, 6], "seqlen_k": [7, 5], "mask": BR},
    ],
)
def test_gradients_agree_and_the_backward_alone_gives_the_same_bits(case: dict[str, Any]) -> None:
    w = workload(phase="forward_backward", **case)
    expected = gradients("eager", w)
    for name in ("sdpa.math", "sdpa.flash"):
        for got, want in zip(gradients(name, w), expected, strict=True):
            torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)
    alone, whole = gradients("sdpa.flash", w, alone=True), gradients("sdpa.flash", w)
    for got, want in zip(alone, whole, strict=True):
        assert torch.equal(got, want)


def test_no_gradient_is_accumulated() -> None:
    w = workload(phase="forward_backward")
    t = tensors(w)
    t.q.requires_grad_()
    prepared = registry.load("sdpa.flash").prepare(w, {}, t)
    first = prepared.step()
    second = prepared.step()
    assert t.q.grad is None
    assert first.dq is not None
    assert second.dq is not None
    assert torch.equal(first.dq, second.dq)


def test_a_rewritten_input_is_seen() -> None:
    w = workload(phase="prefill")
    t = tensors(w)
    prepared = registry.load("sdpa.flash").prepare(w, {}, t)
    before = prepared.step().out.clone()
    t.v.mul_(2)
    assert torch.allclose(prepared.step().out, 2 * before, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "case", "reason"),
    [
        ("sdpa.flash", {"head_dim_v": 24}, "same last dimension"),
        ("sdpa.flash", {"softcap": 5.0}, "no softcap argument"),
        ("sdpa.math", {"alibi": {"slopes": "geometric"}}, "no ALiBi argument"),
        ("sdpa.flash", {"dropout": {"p": 0.5, "seed": 1}}, "global generator"),
        ("sdpa.efficient", {}, "No viable backend"),
        ("sdpa.cudnn", {}, "No viable backend"),
        ("eager", {"dtype_out": "float32", "dtype": "bfloat16"}, "returns the inputs' dtype"),
        ("eager", {"accumulate": "float64"}, "accumulates"),
        (
            "eager",
            {"mask": {"causal": "bottom_right", "masked_rows": "nan"}, "seqlen_k": 3},
            "attends nothing",
        ),
        ("flex", {"phase": "forward"}, "on CPU"),
        ("flex", {"phase": "forward_backward"}, "on CPU"),
        ("flex", {"phase": "prefill", "layout": "thd"}, "one graph a workload"),
    ],
)
def test_what_it_cannot_honour_is_unsupported_with_the_reason(
    name: str, case: dict[str, Any], reason: str
) -> None:
    with pytest.raises(Unsupported, match=reason):
        registry.load(name).check(workload(**case), {})


def test_the_declared_memory_order_follows_the_mask() -> None:
    flash = registry.load("sdpa.flash")
    orders = [
        flash.memory_order(workload(**case), {})
        for case in (
            {},
            {"mask": TL, "seqlen_k": 20},
            {"mask": BR},
            {"mask": BR, "seqlen_k": 20},
            {"phase": "decode", "seqlen_q": 1, "seqlen_k": 20, "mask": BR},
            {"mask": {"window": {"left": 2, "right": None}}},
        )
    ]
    assert orders == [
        MemoryOrder.LINEAR,
        MemoryOrder.LINEAR,
        MemoryOrder.LINEAR,
        MemoryOrder.MASK,
        MemoryOrder.LINEAR,
        MemoryOrder.MASK,
    ]
    assert registry.load("eager").memory_order(workload(), {}) == MemoryOrder.SCORES


def test_two_prepared_backends_do_not_change_each_other() -> None:
    w = workload(phase="prefill")
    t = tensors(w)
    flash = registry.load("sdpa.flash").prepare(w, {}, t)
    registry.load("sdpa.math").prepare(w, {}, t)
    assert sdpa.is_selected(sdpa.SDPBackend.MATH)
    flash.step()
    assert sdpa.is_selected(sdpa.SDPBackend.FLASH_ATTENTION)


def test_the_second_entry_has_the_same_bits_and_an_lse() -> None:
    w = workload(phase="prefill", mask=BR, seqlen_q=4, seqlen_k=11, dtype="bfloat16")
    t = tensors(w)
    entry = sdpa.FlashEntry(w, t).step()
    assert torch.equal(entry.out, registry.load("sdpa.flash").prepare(w, {}, t).step().out)
    assert entry.lse is not None
    expected = torch.stack(reference(w, t)[1])
    torch.testing.assert_close(entry.lse.double(), expected, atol=1e-5, rtol=1e-5)


def test_masks_are_those_of_the_semantics() -> None:
    for case in CASES:
        w = workload(**case)
        for group in torchcalls.groups(w):
            b = group.first
            mask = torchcalls.boolean_mask(w, group, torch.device("cpu"))
            for i in range(group.seqlen_q):
                lo, hi = w.key_range(b, i)
                assert mask[i].nonzero().flatten().tolist() == list(range(lo, hi))
            assert torchcalls.attends_everything(w, b) == bool(mask.all())
            lower = torch.ones_like(mask).tril()
            if torchcalls.is_top_left_causal(w, b):
                assert torch.equal(mask, lower)


def test_an_adapter_of_the_subjects_image(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "toy_adapter.py").write_text(
        textwrap.dedent("""
        from attnrepro_runner.backends.eager import EagerBackend
        class Toy(EagerBackend):
            name = "toy"
        BACKEND = Toy()
        """)
    )
    (tmp_path / "half_adapter.py").write_text("class B: name = 'toy'\nBACKEND = B()\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert registry.load("toy", "toy_adapter").name == "toy"
    with pytest.raises(Unsupported, match="lacks availability, check"):
        registry.load("toy", "half_adapter")
    with pytest.raises(Unsupported, match="is named 'toy', the manifest asks for 'other'"):
        registry.load("other", "toy_adapter")
    with pytest.raises(Unsupported, match="cannot be imported"):
        registry.load("toy", "no_such_adapter")
    with pytest.raises(Unsupported, match="no backend 'fa9'"):
        registry.load("fa9")
    sys.modules.pop("toy_adapter", None)


@pytest.mark.parametrize(
    "case",
    [
        {"seqlen_q": 4, "seqlen_k": 11, "mask": BR, "dtype": "bfloat16"},
        {"seqlen_q": 5, "seqlen_k": 9, "mask": BR, "heads_kv": 1, "layout": "bhsd"},
        {"layout": "thd", "seqlen_q": [3, 6], "seqlen_k": [7, 6], "mask": BR},
    ],
)
def test_bottom_right_needs_no_mask_tensor_on_a_gpu(
    case: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sdpa, "_on_gpu", lambda: True)
    w = workload(**case)
    check("sdpa.flash", w)
    prepared = registry.load("sdpa.flash").prepare(w, {}, tensors(w))
    assert {type(mask) for mask in prepared.masks.values()} == {CausalBias}
    assert registry.load("sdpa.flash").memory_order(w, {}) is MemoryOrder.LINEAR
    for other in (
        {"seqlen_q": 11, "seqlen_k": 4, "mask": BR},
        {"mask": {"window": {"left": 1, "right": 1}}},
    ):
        masked = workload(**other)
        assert registry.load("sdpa.flash").memory_order(masked, {}) is MemoryOrder.MASK


@pytest.mark.parametrize("name", ["eager", "sdpa.math"])
@pytest.mark.parametrize("lengths", [([0], [0]), ([3], [0]), ([0, 2], [4, 0])])
def test_gradients_of_nothing_are_zeros(name: str, lengths: tuple[list[int], list[int]]) -> None:
    q, k = lengths
    w = workload(phase="forward_backward", batch=len(q), layout="thd", seqlen_q=q, seqlen_k=k)
    try:
        got = run(name, w, tensors(w))
    except Unsupported:
        assert name != "eager"
        return
    for grad, source in ((got.dq, "q"), (got.dk, "k"), (got.dv, "v")):
        assert grad.shape == w.shape(source)
        assert not grad.any()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
@pytest.mark.parametrize(
    "case",
    [
        {"phase": "prefill", "mask": BR, "seqlen_k": 40, "dtype": "bfloat16"},
        {"phase": "prefill", "softcap": 0.7, "mask": {"window": {"left": 3, "right": 2}}},
        {
            "phase": "decode",
            "seqlen_q": 1,
            "seqlen_k": 17,
            "mask": BR,
            "cache": CACHE | {"append": 1},
            "alibi": {"slopes": "geometric"},
        },
    ],
)
def test_flex_matches_the_reference(case: dict[str, Any]) -> None:
    check("flex", workload(**case))


def test_flex_without_a_kernel_is_unsupported_and_with_a_bug_crashes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from torch._inductor.exc import InductorError

    given = workload(phase="prefill")
    prepared = registry.load("flex").prepare(given, {}, tensors(given))
    for said, kind in (
        ("NoValidChoicesError: No choices to select.", Unsupported),
        ("LoweringException: IndexError", InductorError),
    ):

        def compiled(*_a: object, said: str = said, **_k: object) -> None:
            raise InductorError(RuntimeError(said), None)

        monkeypatch.setattr(prepared._graph, "compiled", compiled)  # type: ignore[attr-defined]
        with pytest.raises(kind):
            prepared.step()
