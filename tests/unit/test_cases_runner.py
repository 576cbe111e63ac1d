"""Cases from public reports, as a run decides them: what a call reads, returns and leaves alone.

Each has its report's smallest input, on the product's adapters where they can do it and on a
backend with the report's own mistake.
"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any

import pytest
import torch
from numerics_fakes import ReferenceBackend, fresh_tensors, workload_of
from test_runner_probes import lse_of, masked, mixed_strides, nan_rows, shifted

from attnrepro_runner import dropout, fields, guards, inputs, probes, setprobes
from attnrepro_runner.backends import registry
from attnrepro_runner.backends.base import Unsupported
from attnrepro_runner.bench import ProbeBench
from attnrepro_runner.mutantbackends import Mutant, told
from attnrepro_runner.oracle import Oracle
from attnrepro_runner.probes import ProbeReport
from attnrepro_runner.subject import Cell, Subject

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from attnrepro_runner.backends.base import Backend, Outputs, Tensors
    from attnrepro_runner.dropout import DropoutProbe
    from attnrepro_runner.oracle import OracleReport
    from attnrepro_runner.semantics import Workload
    from attnrepro_runner.setprobes import SetProbe

CPU = torch.device("cpu")
INF = math.inf
TORCH = ("eager", "sdpa.math", "sdpa.flash")
BR = {"causal": "bottom_right"}


def value_set(backend: Backend, workload: Workload) -> SetProbe:
    """Read out who attends what, at the very size of the report."""
    return setprobes.probe_values(ProbeBench(backend, {}, workload, CPU), 1)[0]


def probed(backend: Backend, workload: Workload) -> ProbeReport:
    return probes.run_probes(backend, {}, workload, CPU)


def step(
    backend: Backend, workload: Workload, tensors: Tensors, *, append: bool = False
) -> tuple[Oracle, Outputs]:
    """Call once; the oracle is bound before."""
    judge = Oracle(workload, {}, tensors)
    prepared = backend.prepare(workload, {}, tensors)
    if append:
        prepared.append_step()
    return judge, prepared.step()


def judged(backend: Backend, workload: Workload, *, append: bool = False) -> OracleReport:
    judge, outputs = step(backend, workload, fresh_tensors(workload), append=append)
    return judge.check(outputs, empty_row_lse=backend.empty_row_lse)


def attended(workload: Workload) -> list[str]:
    """Return the mask of the first sequence, a row a string."""
    ranges = [workload.key_range(0, i) for i in range(workload.seqlens_q[0])]
    keys = range(workload.seqlens_k[0])
    return ["".join("01"[lo <= j < hi] for j in keys) for lo, hi in ranges]


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
