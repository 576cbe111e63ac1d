"""Reported cases: lengths, caches, heads, strides, descales, dropout."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import pytest
import torch
from case_probes import BR, CPU, INF, TORCH, judged, probed, step, value_set
from numerics_fakes import ReferenceBackend, fresh_tensors, workload_of
from test_runner_probes import masked, mixed_strides

from attnrepro_runner import dropout, guards, inputs, setprobes
from attnrepro_runner.backends import registry
from attnrepro_runner.backends.base import Unsupported
from attnrepro_runner.bench import ProbeBench
from attnrepro_runner.mutantbackends import Mutant, told
from attnrepro_runner.probes import ProbeReport
from attnrepro_runner.subject import Cell, Subject

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from attnrepro_runner.backends.base import Backend, Outputs, Tensors
    from attnrepro_runner.dropout import DropoutProbe
    from attnrepro_runner.semantics import Workload


# Lengths, caches.


@pytest.mark.parametrize("lengths", [[2, 2], [1, 0, 7], [64]])
@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_flash_attention_1661_behind_the_total_is_poison_and_stays(
    lengths: list[int], name: str
) -> None:
    workload = workload_of(
        layout="thd", batch=len(lengths), seqlen_q=lengths, seqlen_k=lengths, dtype="float32"
    )
    tensors = fresh_tensors(workload)
    tensor: torch.Tensor = getattr(tensors, name)
    assert tensors.cu_seqlens_q is not None
    assert int(tensors.cu_seqlens_q[-1]) == sum(lengths) == tensor.shape[0]
    two_more = (tensor.shape[0] + 2, *tensor.shape[1:])
    longer = tensor.as_strided(two_more, tensor.stride(), tensor.storage_offset())
    assert bool(longer[-2:].isnan().all())
    judge, outputs = step(registry.load("eager"), workload, tensors)
    assert judge.check(outputs, empty_row_lse=-INF).ok
    longer[-1, 0, 0] = 0
    assert not judge.check(outputs, empty_row_lse=-INF).guards_intact


LENGTH_TENSORS: dict[str, dict[str, Any]] = {
    "packed": {"layout": "thd", "seqlen_q": [3, 5], "seqlen_k": [3, 5]},
    "contiguous": {"phase": "decode", "seqlen_q": 1, "cache": {"kind": "contiguous"}},
    "paged": {"phase": "decode", "seqlen_q": 1, "cache": {"kind": "paged", "page_size": 8}},
}


@pytest.mark.parametrize("kind", LENGTH_TENSORS)
def test_flashinfer_1654_lengths_are_int32_and_a_lost_sequence_is_seen(kind: str) -> None:
    workload = workload_of(**LENGTH_TENSORS[kind])
    tensors = fresh_tensors(workload)
    names = ("cu_seqlens_q", "cu_seqlens_k", "seqused_k", "page_table")
    given = [t for t in (getattr(tensors, name) for name in names) if t is not None]
    assert given
    assert {t.dtype for t in given} == {torch.int32}

    def second_sequence_zero(outputs: Outputs) -> Outputs:
        outputs.out[workload.seqlens_q[0] if workload.is_packed else 1 :] = 0
        return outputs

    assert judged(ReferenceBackend(), workload).ok
    report = judged(ReferenceBackend(outputs=second_sequence_zero), workload)
    assert report.tensors["out"].worst_block[0] == 1
    assert report.status() == "INCORRECT"


@pytest.mark.parametrize("in_call", [False, True])
@pytest.mark.parametrize("kind", ["contiguous", "paged"])
@pytest.mark.parametrize(("new", "before"), [(2, 3), (5, 30)])
def test_flash_attention_1402_new_keys_are_appended_then_masked_bottom_right(
    kind: str, in_call: bool, new: int, before: int
) -> None:
    cache: dict[str, Any] = {"kind": kind, "append": new, "append_in_call": in_call}
    if kind == "paged":
        cache["page_size"] = 4
    workload = workload_of(
        phase="decode", seqlen_q=new, seqlen_k=before + new, mask=BR, cache=cache
    )
    for name in TORCH:
        report = judged(registry.load(name), workload, append=not in_call)
        assert report.ok, (name, report.reason())
        assert value_set(registry.load(name), workload).equal, name
    if not in_call:
        # What is not appended is not there: neither zeros nor the keys of a call before.
        assert not judged(registry.load("eager"), workload).ok
    misread = Mutant(registry.load("eager"), told(masked(causal="top_left")))
    assert not judged(misread, workload, append=not in_call).ok
    assert not value_set(misread, workload).equal


@pytest.mark.parametrize("name", TORCH)
@pytest.mark.parametrize(("length", "capacity"), [(100, 128), (1, 2)])
def test_gpt_fast_233_the_whole_buffer_is_not_the_length(
    name: str, length: int, capacity: int
) -> None:
    cache = {"kind": "contiguous", "capacity": capacity}
    workload = workload_of(phase="decode", seqlen_q=1, seqlen_k=length, cache=cache)
    tensors = fresh_tensors(workload)
    assert bool((tensors.k[:, length:] == inputs.TAIL).all())
    assert bool((tensors.v[:, length:] == inputs.TAIL).all())
    assert judged(registry.load(name), workload).ok

    def whole(w: Workload) -> Workload:
        assert w.cache is not None
        assert w.cache.capacity is not None
        return dataclasses.replace(w, seqlens_k=(w.cache.capacity,) * w.batch)

    careless = Mutant(registry.load(name), told(whole))
    assert not judged(careless, workload).ok
    assert not value_set(careless, workload).equal


# Heads, strides, descales.


@pytest.mark.parametrize(("q", "kv"), [(3, 2), (8, 3), (2, 4)])
def test_flash_linear_attention_1029_heads_that_do_not_divide_reach_no_kernel(
    q: int, kv: int
) -> None:
    workload = {
        **{"phase": "forward", "batch": 1, "seqlen_q": 8, "seqlen_k": 8, "head_dim": 16},
        **{"heads_q": q, "heads_kv": kv, "dtype": "float32"},
    }
    with pytest.raises(Unsupported, match="heads_kv"):
        Cell.read({"id": "c000", "label": "", "workload": workload, "inputs": {}})


@pytest.mark.parametrize("written", [[0, 1], [1, 2], []])
def test_flash_linear_attention_1029_heads_left_unwritten_are_poison(
    monkeypatch: pytest.MonkeyPatch, written: Sequence[int]
) -> None:
    """An allocator that hands a freed block out again must not give the last call's output."""
    workload = workload_of(heads_q=3, heads_kv=1, dtype="float32")
    tensors = fresh_tensors(workload)
    judge, right = step(registry.load("eager"), workload, tensors)
    freed = [right.out.clone()]
    honest = guards.poison

    def remembered(tensor: torch.Tensor) -> None:
        honest(tensor)
        freed.append(tensor)

    monkeypatch.setattr(guards, "poison", remembered)

    def lazy(_: Outputs) -> Outputs:
        block = next(t for t in reversed(freed) if t.shape == right.out.shape)
        block[:, :, written] = right.out[:, :, written]
        return dataclasses.replace(right, out=block)

    document = {"id": "s", "backend": "eager", "options": {}}
    prepared = ReferenceBackend(outputs=lazy).prepare(workload, {}, tensors)
    outputs = Subject(document, CPU, 1).poisoned_step(workload, prepared)
    report = judge.check(outputs, empty_row_lse=-INF)
    assert report.tensors["out"].nan
    assert report.status() == "INCORRECT"


MAPS: dict[str, Callable[[Workload, int], int]] = {
    "interleaved": lambda w, h: h % w.heads_kv,
    "first": lambda w, h: 0,
    "reversed": lambda w, h: w.heads_kv - 1 - w.kv_head(h),
}


@pytest.mark.parametrize("kind", MAPS)
@pytest.mark.parametrize(("q", "kv"), [(4, 2), (6, 3), (8, 4)])
def test_flash_attention_648_the_probe_reads_out_the_map_of_heads(
    kind: str, q: int, kv: int
) -> None:
    workload = workload_of(batch=1, heads_q=q, heads_kv=kv, seqlen_q=6, seqlen_k=6)
    wrong = MAPS[kind]
    for name in TORCH:
        assert value_set(registry.load(name), workload).equal, name
    h = next(h for h in range(q) if wrong(workload, h) != workload.kv_head(h))
    values = value_set(ReferenceBackend(v_head=wrong), workload)
    place = f"head {h}, query 0, key 0: read {wrong(workload, h)}, not {workload.kv_head(h)}"
    assert place in str(values.first_difference)
    bench = ProbeBench(ReferenceBackend(k_head=wrong), {}, workload, CPU)
    assert setprobes.probe_values(bench, 1)[0].equal
    keys = setprobes.probe_keys(bench)
    assert not keys.equal
    assert f"head {h}," in str(keys.first_difference)


@pytest.mark.parametrize("length", [62, 64])
@pytest.mark.parametrize("name", ["eager", "sdpa.math"])
def test_pytorch_112577_strided_is_contiguous(name: str, length: int) -> None:
    view = [2 * 64 * length, 1, 64 * length, length]
    shape = {"seqlen_q": length, "seqlen_k": length, "head_dim": 64, "dtype": "float32", "batch": 1}
    strided, plain = workload_of(**shape, strides={"v": view}), workload_of(**shape)
    tensors, same = fresh_tensors(strided), fresh_tensors(plain)
    assert tensors.v.stride() == tuple(view)
    assert inputs.digests(tensors) == inputs.digests(same)
    backend = registry.load(name)
    judge, outputs = step(backend, strided, tensors)
    assert judge.check(outputs, empty_row_lse=backend.empty_row_lse).ok
    torch.testing.assert_close(outputs.out, step(backend, plain, same)[1].out)
    careless = ReferenceBackend(tensors=mixed_strides)
    assert not judged(careless, strided).ok
    assert not value_set(careless, strided).equal
    assert judged(careless, plain).ok


@pytest.mark.parametrize("beyond", [-1, 0, 1])
def test_flash_attention_407_offsets_on_both_sides_of_int32(
    monkeypatch: pytest.MonkeyPatch, beyond: int
) -> None:
    def untouched(
        shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        # Without a fill, pages between the elements are never there.
        extent = 1 + sum((n - 1) * s for n, s in zip(shape, stride, strict=True))
        return torch.empty(extent, dtype=dtype, device=device).as_strided(shape, stride)

    monkeypatch.setattr(guards, "allocate", untouched)
    monkeypatch.setattr(inputs, "guards_intact", lambda tensors: True)
    last = 2**31 + beyond
    # Two sequences of 16 keys, 2 heads, 64 channels; the last element is at `last`.
    far = last - 15 * 128 - 64 - 63
    workload = workload_of(seqlen_q=16, seqlen_k=16, head_dim=64, strides={"k": [far, 128, 64, 1]})
    assert (
        sum((n - 1) * s for n, s in zip(workload.shape("k"), workload.stride("k"), strict=True))
        == last
    )
    for name in ("eager", "sdpa.math"):
        assert judged(registry.load(name), workload).ok, name

    def in_32_bits(tensors: Tensors) -> Tensors:
        place = torch.arange(16)[:, None, None] * 128 + torch.arange(2)[:, None] * 64
        place = (far + place + torch.arange(64)).to(torch.int32)  # wraps, as a kernel's does
        flat = tensors.k.as_strided((last + 1,), (1,))
        k = tensors.k.contiguous()
        k[1] = torch.where(place < 0, 0, flat[place.long().clamp_min(0)])
        return dataclasses.replace(tensors, k=k)

    assert judged(ReferenceBackend(tensors=in_32_bits), workload).ok == (beyond < 0)


@pytest.mark.parametrize("name", ["q_descale", "k_descale", "v_descale"])
def test_vllm_pr51363_a_dropped_descale_is_incorrect(name: str) -> None:
    def dropped(tensors: Tensors) -> Tensors:
        return dataclasses.replace(tensors, **{name: torch.ones_like(getattr(tensors, name))})

    fp8 = {"q_descale": [2, 0.5], "k_descale": [0.5, 2], "v_descale": [2, 0.5]}
    workload = workload_of(dtype="float8_e4m3fn", fp8=fp8)
    honest = probed(ReferenceBackend(), workload)
    assert honest.status() == "PASS", honest.reason()
    report = probed(ReferenceBackend(tensors=dropped), workload)
    assert report.status() == "INCORRECT"
    (level,) = [one for one in report.levels if one.name == name]
    assert (level.chosen, level.verdict) == ("ignored", "other")
    assert judged(ReferenceBackend(), workload).ok
    assert not judged(ReferenceBackend(tensors=dropped), workload).ok


# Dropout.


FAULTS = {
    "stuck": "next_call_differs",
    "other_backward_mask": "backward_same",
    "unseeded": "seed_repeats",
}


def dropped_out(backend: Backend, p: float) -> DropoutProbe:
    workload = workload_of(
        phase="forward_backward", dropout={"p": p, "seed": 5}, batch=1, heads_q=2
    )
    return dropout.probe_dropout(backend, {}, workload, CPU)


@pytest.mark.parametrize("backend", [registry.load("eager"), ReferenceBackend()])
@pytest.mark.parametrize("p", [0.1, 0.5])
def test_flash_attention_314_calls_differ_and_the_backward_keeps_the_mask(
    backend: Backend, p: float
) -> None:
    found = dropped_out(backend, p)
    assert found.ok
    assert (found.next_call_differs, found.seed_repeats, found.backward_same) == (True,) * 3


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("p", [0.1, 0.5])
def test_flash_attention_314_a_generator_that_stays_is_incorrect(fault: str, p: float) -> None:
    found = dropped_out(ReferenceBackend(**{fault: True}), p)
    assert found.to_json()[FAULTS[fault]] is False
    assert not found.ok
    report = ProbeReport(sets={}, levels=(), dropout=found, shape="")
    assert report.status() == "INCORRECT"
    assert FAULTS[fault] in str(report.reason())
