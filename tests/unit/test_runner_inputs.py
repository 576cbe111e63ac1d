from __future__ import annotations

import hashlib
import itertools
import math
import random
import struct
from typing import Any

import pytest
import torch

from attnrepro_runner import generator, guards, inputs, views
from attnrepro_runner.normaltable import normal_table
from attnrepro_runner.philox import philox4x32
from attnrepro_runner.semantics import Workload

CPU = torch.device("cpu")
EXPECTED = {
    "float32.q": "0c05522a074e5a21",
    "float32.k": "96ebf1a4ae406ff5",
    "float32.v": "fc518d547e38f112",
    "float32.grad_out": "bbeb4fd48db57b73",
    "bfloat16.q": "9af3af518c11a3e4",
    "bfloat16.k": "a4ae1a4f3a9025e6",
    "bfloat16.v": "0707a083b8765efb",
    "bfloat16.grad_out": "8db68905de102ef2",
    "float16.q": "df7ccf2e87058887",
    "float16.k": "ac3e9f76b1e86254",
    "float16.v": "7cf69d9c05361ee7",
    "float16.grad_out": "01ad65e74ed838e4",
    "outliers.q": "dbbd280d617c903f",
    "outliers.k": "37fa75213e2b9d90",
    "outliers.v": "58f395af5a356c72",
    "fp8.q": "b9fcf706225942fe",
    "fp8.k": "35420d9c95cb76e6",
    "fp8.v": "b8f00e15cf1ef377",
    "fp8.q_descale": "87112fabbce14cc3",
    "fp8.k_descale": "124552fca5436754",
    "fp8.v_descale": "c5dd916860bc0abe",
}
"""First 16 hex digits of the SHA-256; equal on AVX2, AVX512 and an H200."""


def make(**changes: Any) -> Workload:
    document: dict[str, Any] = {
        "phase": "forward",
        "batch": 2,
        "seqlen_q": 5,
        "seqlen_k": 7,
        "heads_q": 4,
        "heads_kv": 2,
        "head_dim": 16,
        "dtype": "bfloat16",
    }
    return Workload.parse(document | changes)


def digests(workload: Workload, stream: int = 0, **spec: Any) -> dict[str, str]:
    return inputs.digests(inputs.make_inputs(workload, spec, stream=stream, device=CPU))


def test_digests_are_the_same_everywhere() -> None:
    found = {
        dtype: digests(make(dtype=dtype, seqlen_q=300, phase="forward_backward"))
        for dtype in ("float32", "bfloat16", "float16")
    }
    outliers = digests(make(seqlen_q=3000), distribution="normal_outliers", seed=2**64 - 1)
    fp8 = digests(make(dtype="float8_e4m3fn", fp8={}, seqlen_q=300), stream=7)
    short = {
        **{
            f"{dtype}.{name}": value[:16] for dtype, d in found.items() for name, value in d.items()
        },
        **{f"outliers.{name}": value[:16] for name, value in outliers.items()},
        **{f"fp8.{name}": value[:16] for name, value in fp8.items()},
    }
    assert short == EXPECTED


def test_elements_by_their_definition() -> None:
    seed, stream, count = 0x123456789ABCDEF, 3, 40
    table = normal_table()
    expected = []
    for e in range(count):
        counter = (e // 8, 0, stream, 2)
        word = philox4x32(counter, (seed & 0xFFFFFFFF, seed >> 32))[e % 8 // 2]
        expected.append(table[word >> 16 if e % 2 else word & 0xFFFF] * 2.0**-40)
    options: dict[str, Any] = {"device": CPU, "seed": seed, "stream": stream, "tag": 2}
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        found = generator.normal(count, dtype=dtype, **options)
        assert torch.equal(found, torch.tensor(expected).to(dtype))


def test_threads_and_chunks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    threads = torch.get_num_threads()
    workload = make(seqlen_q=700)
    expected = digests(workload, distribution="normal_outliers")
    try:
        torch.set_num_threads(1)
        monkeypatch.setattr(generator, "_CHUNK_CPU", 37)
        assert digests(workload, distribution="normal_outliers") == expected
    finally:
        torch.set_num_threads(threads)


def test_streams_seeds_and_tensors_differ() -> None:
    square = make(heads_kv=4, seqlen_k=5)
    every = [
        digests(square),
        digests(square, stream=1),
        digests(square, seed=1),
        digests(square, seed="1", distribution="normal_outliers"),
    ]
    values = [d[name] for d in every for name in ("q", "k", "v")]
    # 560 elements hold an outlier with probability 0.27; these draws hold none in q.
    assert len(set(values)) >= 9


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_normal_moments(dtype: torch.dtype) -> None:
    x = generator.normal(1 << 18, dtype=dtype, device=CPU, seed=1, stream=0, tag=0).double()
    assert abs(float(x.mean())) < 0.01
    assert abs(float(x.var()) - 1) < 0.01
    assert abs(float((x**4).mean()) - 3) < 0.06
    assert abs(float((x[:-1] * x[1:]).mean())) < 0.01


def test_outliers_are_one_in_a_thousand_and_wide() -> None:
    options: dict[str, Any] = {
        "dtype": torch.float32,
        "device": CPU,
        "seed": 1,
        "stream": 0,
        "tag": 2,
    }
    plain = generator.normal(1 << 19, **options)
    mixed = generator.normal_outliers(1 << 19, **options)
    changed = mixed[plain != mixed].double() - plain[plain != mixed].double()
    assert abs(len(changed) / (1 << 19) - 0.001) < 0.0002
    assert abs(float(changed.std()) - 10) < 1


def test_layouts_hold_the_same_numbers() -> None:
    bshd = inputs.make_inputs(make(), {}, stream=0, device=CPU)
    bhsd = inputs.make_inputs(make(layout="bhsd"), {}, stream=0, device=CPU)
    thd = inputs.make_inputs(make(layout="thd"), {}, stream=0, device=CPU)
    strided = make(strides={"v": [4096, 1, 128, 8]})
    across = inputs.make_inputs(strided, {}, stream=0, device=CPU)
    assert across.v.stride() == (4096, 1, 128, 8)
    assert inputs.digest(across.v) == inputs.digest(bshd.v)
    assert torch.equal(bhsd.q.transpose(1, 2), bshd.q)
    assert torch.equal(thd.k.view(2, 7, 2, 16), bshd.k)
    assert thd.cu_seqlens_q is not None
    assert thd.cu_seqlens_q.dtype == torch.int32
    assert thd.cu_seqlens_q.tolist() == [0, 5, 10]


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn"])
@pytest.mark.parametrize("page_size", [None, 4])
def test_caches_hold_the_keys_a_finite_tail_and_nan_elsewhere(
    dtype: str, page_size: int | None
) -> None:
    cache: dict[str, Any] = {"kind": "contiguous", "capacity": 12, "append": 2}
    if page_size:
        cache |= {"kind": "paged", "page_size": page_size, "pool_pages": 11}
    fp8 = {"fp8": {}} if dtype == "float8_e4m3fn" else {}
    workload = make(phase="decode", seqlen_q=2, seqlen_k=[5, 12], cache=cache, dtype=dtype, **fp8)
    tensors = inputs.make_inputs(workload, {}, stream=0, device=CPU)
    packed = make(batch=2, layout="thd", seqlen_q=[2, 2], seqlen_k=[5, 12], dtype=dtype, **fp8)
    plain = inputs.make_inputs(packed, {}, stream=0, device=CPU)
    for b, seqlen in enumerate((5, 12)):
        for h in range(2):
            logical = views.logical_keys(tensors, "v", workload, b, h)
            expected = views.key_rows(plain.v, packed, b, h)
            assert torch.equal(logical.float(), expected.float())
            assert logical.shape == (seqlen, 16)
    if page_size:
        assert tensors.page_table is not None
        behind = tensors.k[int(tensors.page_table[0, 1]), 1:]
    else:
        behind = tensors.k[0, 5:]
    tail = behind.shape[0]
    assert tail == (3 if page_size else 7)
    assert bool((behind.float() == inputs.TAIL).all())
    values = int((~tensors.k.float().isnan()).sum())
    assert values == (3 + 10 + tail) * 2 * 16
    assert tensors.seqused_k is not None
    assert tensors.seqused_k.tolist() == [5, 12]
    if page_size:
        assert tensors.page_table is not None
        assert tensors.page_table.dtype == torch.int32
        assert tensors.page_table.tolist() != [[0, 1, 2], [3, 4, 5]]


def test_fp8_descales() -> None:
    workload = make(dtype="float8_e4m3fn", fp8={"k_descale": [0.5, 2.0], "v_descale": [0.01]})
    tensors = inputs.make_inputs(workload, {}, stream=0, device=CPU)
    drawn = inputs.draw(workload, {}, stream=0, device=CPU)
    assert tensors.q_descale is not None
    assert tensors.k_descale is not None
    assert tensors.v_descale is not None
    assert tensors.k_descale.tolist() == [[0.5, 2.0]] * 2
    assert tensors.v_descale.tolist() == [[0.009999999776482582] * 2] * 2
    group = drawn["q"].view(2, 5, 2, 2 * 16)
    assert torch.equal(tensors.q_descale, (group.abs().amax(dim=(1, 3)).double() / 448).float())
    back = tensors.q.double().view(2, 5, 2, 32) * tensors.q_descale.double()[:, None, :, None]
    assert float((back - group.double()).abs().max()) <= 448 / 448 * 4.2 * 2**-4
    assert tensors.q.float().abs().amax() == 448
    per_tensor = make(dtype="float8_e4m3fn", fp8={"granularity": "tensor"})
    whole = inputs.make_inputs(per_tensor, {}, stream=0, device=CPU)
    assert whole.q_descale is not None
    assert len(set(whole.q_descale.view(-1).tolist())) == 1


def test_large_negative_and_one_hot() -> None:
    workload = make(head_dim=64)
    tensors = inputs.make_inputs(workload, {"distribution": "large_negative"}, stream=0, device=CPU)
    q, k = views.query_rows(tensors.q, workload, 0, 0), views.key_rows(tensors.k, workload, 0, 0)
    assert float((q.double() @ k.double().T).max()) / 8 < -15
    sparse = inputs.make_inputs(workload, {"distribution": "one_hot"}, stream=0, device=CPU)
    assert set(sparse.q.unique().tolist()) == {0.0, 8.0}
    assert bool(((sparse.q != 0).sum(-1) == 1).all())
    assert len((sparse.q != 0).float().argmax(-1).unique()) > 20
    with pytest.raises(ValueError, match="unknown distribution"):
        inputs.make_inputs(workload, {"distribution": "zeros"}, stream=0, device=CPU)
    with pytest.raises(ValueError, match="is not philox"):
        inputs.make_inputs(workload, {"generator": "mt19937"}, stream=0, device=CPU)
    with pytest.raises(ValueError, match="32-bit"):
        inputs.make_inputs(workload, {}, stream=1 << 32, device=CPU)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float8_e4m3fn"])
def test_guards_find_writes_outside_and_between(dtype: str) -> None:
    fp8 = {"fp8": {}} if dtype == "float8_e4m3fn" else {}
    workload = make(dtype=dtype, strides={"v": [512, 64, 32, 2]}, **fp8)
    for place in ("before", "after", "between", "nowhere"):
        tensors = inputs.make_inputs(workload, {}, stream=0, device=CPU)
        tensors.v.view(guards.as_integers(tensors.v).dtype).zero_()
        assert inputs.guards_intact(tensors)
        offset = {"before": -1, "after": 512 + 6 * 64 + 32 + 30 + 1, "between": 1, "nowhere": 0}
        memory = torch.empty(0, dtype=tensors.v.dtype).set_(tensors.v.untyped_storage())
        guards.as_integers(memory)[tensors.v.storage_offset() + offset[place]] = 0
        assert inputs.guards_intact(tensors) == (place == "nowhere")


def test_digest_is_of_logical_elements() -> None:
    x = torch.arange(12, dtype=torch.int32).view(3, 4)
    assert inputs.digest(x.T) == inputs.digest(x.T.contiguous()) != inputs.digest(x)
    assert inputs.digest(torch.empty(0)) == inputs.digest(torch.empty(3, 0))
    assert inputs.digest(torch.tensor([1.0])) == hashlib.sha256(struct.pack("<f", 1.0)).hexdigest()


def test_empty_sequences() -> None:
    workload = make(layout="thd", seqlen_q=[0, 4], seqlen_k=[4, 0])
    tensors = inputs.make_inputs(workload, {}, stream=0, device=CPU)
    assert tensors.q.shape == (4, 4, 16)
    nothing = make(seqlen_k=0)
    assert inputs.make_inputs(nothing, {}, stream=0, device=CPU).k.shape == (2, 0, 2, 16)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn"])
@pytest.mark.parametrize("shape", [(37, 5, 16), (37, 5, 15)])  # whole words of 4 bytes, and not
@pytest.mark.parametrize("offset", [0, 1])
def test_one_changed_bit_changes_the_fingerprint(
    dtype: str, shape: tuple[int, ...], offset: int
) -> None:
    storage = torch.randn(offset + math.prod(shape), generator=torch.Generator().manual_seed(1)).to(
        views.DTYPES[dtype]
    )
    tensor = storage[offset:].view(shape)
    mark = inputs.fingerprint(tensor)
    assert inputs.fingerprint(tensor.clone()) == mark
    assert inputs.fingerprint(tensor.transpose(0, 1).contiguous().transpose(0, 1)) == mark
    for place in ((0, 0, 0), (36, 4, -1), (20, 2, 7)):
        for bit in (0, 3, 7):
            changed = tensor.clone()
            guards.as_integers(changed)[place] ^= 1 << bit
            assert inputs.fingerprint(changed) != mark
    # Changes that many words share, signs above all, do not cancel.
    for change in (
        lambda x: x[..., -1].neg_(),
        lambda x: x[..., 3].neg_(),
        lambda x: x[::2].neg_(),
        lambda x: x.neg_(),
        lambda x: x.copy_(x.abs()),
    ):
        changed = tensor.to(torch.float32)
        change(changed)
        assert inputs.fingerprint(changed.to(tensor.dtype)) != mark
    draw = random.Random(1)
    for _ in range(50):
        changed = tensor.clone()
        for place in draw.sample([*itertools.product(range(37), range(5), range(15))], 2):
            bits = guards.as_integers(changed)
            bits[place] ^= torch.tensor(1 << 8 * bits.itemsize - 1).to(bits.dtype)
        assert inputs.fingerprint(changed) != mark
    swapped = tensor.clone()
    swapped[[3, 4]] = tensor[[4, 3]]
    assert inputs.fingerprint(swapped) != mark


def test_a_fingerprint_is_taken_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = torch.randn(64, 100, generator=torch.Generator().manual_seed(2))
    whole = inputs.fingerprint(tensor)
    monkeypatch.setattr(inputs, "_MARK_CHUNK", 800)
    assert inputs.fingerprint(tensor) == whole
    assert inputs.fingerprint(tensor[:0]) == (0, 0)


@pytest.mark.parametrize("granularity", ["tensor", "head_kv"])
def test_float8_inputs_without_tokens(granularity: str) -> None:
    workload = Workload.parse(
        {
            **{"phase": "prefill", "batch": 2, "seqlen_q": [0, 0], "seqlen_k": [0, 0]},
            **{"heads_q": 2, "heads_kv": 1, "head_dim": 16, "layout": "thd"},
            **{"dtype": "float8_e4m3fn", "fp8": {"granularity": granularity}},
        }
    )
    made = inputs.make_inputs(workload, {}, stream=0, device=CPU)
    assert made.k.shape == workload.shape("k")
    assert made.k_descale is not None
    assert torch.isfinite(made.k_descale).all()
