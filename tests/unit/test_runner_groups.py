"""Many groups at once are each group: against plain attention of one (sequence, head) at a time."""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from attnrepro_runner import groups, inputs, oracle, reference, views
from attnrepro_runner.backends import registry
from attnrepro_runner.oracle import Oracle, Selection
from attnrepro_runner.semantics import Workload, WorkloadError

if TYPE_CHECKING:
    from attnrepro_runner.backends.base import Outputs, Tensors
    from attnrepro_runner.groups import Group

CPU = torch.device("cpu")
LENGTHS = st.sampled_from([1, 5, 20])  # often equal
CLOSE: dict[str, Any] = {"rtol": 1e-11, "atol": 1e-11}


@st.composite
def workloads(draw: st.DrawFn) -> Workload:
    phase = draw(st.sampled_from(["forward", "forward_backward", "prefill", "decode"]))
    layout = draw(st.sampled_from(["bshd", "bhsd", "thd"]))
    cached = phase in ("prefill", "decode") and draw(st.booleans())
    batch, heads_kv = draw(st.integers(1, 4)), draw(st.sampled_from([1, 2, 3]))
    dtype = draw(st.sampled_from(["float32", "bfloat16", "float8_e4m3fn"]))
    lengths = LENGTHS
    if layout == "thd" and phase != "decode" and dtype != "float8_e4m3fn":
        lengths |= st.just(0)
    several = st.lists(lengths, min_size=batch, max_size=batch)
    document: dict[str, Any] = {
        "phase": phase,
        "batch": batch,
        "seqlen_q": draw(several if layout == "thd" else lengths),
        "seqlen_k": draw(several if layout == "thd" or cached else lengths),
        "heads_q": heads_kv * draw(st.sampled_from([1, 2, 3])),
        "heads_kv": heads_kv,
        "head_dim": 8,
        "head_dim_v": draw(st.sampled_from([8, 16])),
        "dtype": dtype,
        "layout": layout,
        "mask": {
            "causal": draw(st.sampled_from(["none", "top_left", "bottom_right"])),
            "window": draw(
                st.none()
                | st.fixed_dictionaries(
                    {
                        "left": st.none() | st.integers(0, 8),
                        "right": st.none() | st.integers(0, 8),
                        "alignment": st.sampled_from(["top_left", "bottom_right"]),
                    }
                )
            ),
        },
        "scale": draw(st.sampled_from(["rsqrt_head_dim", 0.7])),
        "softcap": draw(st.sampled_from([None, 1.5])),
        "alibi": draw(st.sampled_from([None, {"slopes": "geometric"}])),
    }
    if phase == "forward_backward":
        document["dtype"] = "float32"
        document["dropout"] = draw(st.sampled_from([None, {"p": 0.25, "seed": 1}]))
    if document["dtype"] == "float8_e4m3fn":
        several = st.lists(st.sampled_from([0.5, 1.0, 3.0]), min_size=heads_kv, max_size=heads_kv)
        document["fp8"] = {f"{name}_descale": draw(several) for name in "qkv"}
    if cached:
        kind = draw(st.sampled_from(["contiguous", "paged"]))
        document["cache"] = {
            "kind": kind,
            "append": draw(st.integers(0, 1)),
            "capacity": 30,
            "page_size": 8 if kind == "paged" else None,
            "permutation_seed": 3 if kind == "paged" else None,
        }
    return Workload.parse(document)


def kept(workload: Workload, b: int, h: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * b + h)
    shape = (workload.seqlens_q[b], workload.seqlens_k[b])
    return torch.rand(shape, generator=generator) > 0.25


def doubles(x: torch.Tensor) -> torch.Tensor:
    return x.float().double().detach().clone().requires_grad_()


def plain(workload: Workload, tensors: Tensors, b: int, h: int) -> dict[str, torch.Tensor]:
    """One pair in float64, with its mask written out and its gradients by autograd."""
    g, rows, columns = workload.kv_head(h), workload.seqlens_q[b], workload.seqlens_k[b]
    q = doubles(views.query_rows(tensors.q, workload, b, h))
    k, v = (doubles(views.logical_keys(tensors, name, workload, b, g)) for name in "kv")
    descales = [
        1.0 if x is None else float(x[b, g])
        for x in (tensors.q_descale, tensors.k_descale, tensors.v_descale)
    ]
    logits = q @ k.T * (workload.scale_value * descales[0] * descales[1])
    if workload.softcap is not None:
        logits = workload.softcap * torch.tanh(logits / workload.softcap)
    slopes = workload.alibi_slopes()
    if slopes is not None:
        at = torch.arange(rows)[:, None] + columns - rows
        logits = logits - slopes[h] * (at - torch.arange(columns)).abs().double()
    attended = torch.zeros((rows, columns), dtype=torch.bool)
    for i in range(rows):
        lo, hi = workload.key_range(b, i)
        attended[i, lo:hi] = True
    filled = attended.any(-1)
    logits = logits.masked_fill(~attended, -math.inf)[filled]
    weights = torch.softmax(logits, -1)
    if workload.dropout is not None:
        weights = weights * kept(workload, b, h)[filled] / (1 - workload.dropout.p)
    where = filled.nonzero()[:, 0]
    out = q.new_zeros((rows, workload.head_dim_v)).index_add(0, where, weights @ v * descales[2])
    lse = torch.full((rows,), -math.inf, dtype=torch.float64)
    lse[filled] = torch.logsumexp(logits, -1).detach()
    found = {"out": out.detach(), "lse": lse}
    if tensors.grad_out is not None:
        grad_out = views.query_rows(tensors.grad_out, workload, b, h).double()
        grads = torch.autograd.grad(
            out, (q, k, v), grad_out, allow_unused=True, materialize_grads=True
        )
        found |= dict(zip(("dq", "dk", "dv"), grads, strict=True))
    return found


QUIETLY = [HealthCheck.filter_too_much, HealthCheck.too_slow]


def test_a_batch_is_its_pairs() -> None:
    @settings(max_examples=12, deadline=None, suppress_health_check=QUIETLY)
    @given(data=st.data())
    def run(data: st.DataObject) -> None:
        compare(data)

    run()


@pytest.mark.slow
@settings(max_examples=300, deadline=None, suppress_health_check=QUIETLY)
@given(data=st.data())
def test_many_batches_are_their_pairs(data: st.DataObject) -> None:
    compare(data)


def compare(data: st.DataObject) -> None:
    scores = data.draw(st.sampled_from([1, 900, 1 << 20]))
    tile = data.draw(st.sampled_from([50, 5000]))
    try:
        workload = data.draw(workloads())
    except WorkloadError:
        return
    tensors = inputs.make_inputs(workload, {}, stream=0, device=CPU)
    shared = workload.heads_q // workload.heads_kv
    every: list[Group] = [
        (b, tuple(range(g * shared, (g + 1) * shared)))
        for b, g in itertools.product(range(workload.batch), range(workload.heads_kv))
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(groups._SCORES, "cpu", scores)
        patch.setattr(reference, "_TILE_CPU", tile)
        batches = groups.batches(workload, every, "cpu")
        assert sorted(itertools.chain.from_iterable(batches)) == every
        for batch in batches:
            found = reference.attend(
                workload,
                groups.from_tensors(workload, tensors, batch),
                batch,
                reference.HIGH,
                keep=None if workload.dropout is None else lambda b, h: kept(workload, b, h),
            )
            for n, (b, heads) in enumerate(batch):
                pairs = [plain(workload, tensors, b, h) for h in heads]
                for name in pairs[0]:
                    parts = [pair[name] for pair in pairs]
                    expected = sum(parts) if name in ("dk", "dv") else torch.stack(parts)
                    torch.testing.assert_close(getattr(found, name)[n], expected, **CLOSE)


def test_inputs_as_drawn_are_read_by_pair() -> None:
    workload = make(layout="thd", seqlen_q=[9, 4, 9], seqlen_k=[5, 3, 5])
    packed = {
        "q": torch.randn(22, 4, 8),
        "k": torch.randn(13, 2, 8),
        "v": torch.randn(13, 2, 8),
    }
    found = groups.from_packed(workload, packed, [(0, (2, 3)), (2, (0, 1))])
    assert torch.equal(found.q[0, 1], packed["q"][:9, 3])
    assert torch.equal(found.q[1, 0], packed["q"][13:, 0])
    assert torch.equal(found.k[1], packed["k"][8:, 0])
    assert torch.equal(found.v[0], packed["v"][:5, 1])


def test_only_groups_of_one_shape_make_a_batch() -> None:
    workload = make(layout="thd", seqlen_q=[5, 5, 8], seqlen_k=[7, 7, 7])
    chosen: list[Group] = [(0, (0,)), (0, (2, 3)), (1, (1,)), (1, (3,)), (2, (0,))]
    assert groups.batches(workload, chosen, "cpu") == [
        ((0, (0,)), (1, (1,)), (1, (3,))),
        ((0, (2, 3)),),
        ((2, (0,)),),
    ]
    tensors = inputs.make_inputs(workload, {}, stream=0, device=CPU)
    given_ = groups.from_tensors(workload, tensors, [(0, (0,)), (1, (0,))])
    with pytest.raises(ValueError, match="equal lengths"):
        reference.attend(workload, given_, [(0, (0,)), (2, (0,))], reference.HIGH)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("phase", ["forward", "forward_backward"])
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(64, 64), (1, 4096), (1000, 300), (2, 65536)])
def test_memory_bounds_a_batch(device: str, phase: str, seqlen_q: int, seqlen_k: int) -> None:
    workload = make(
        phase=phase, batch=400, heads_q=16, seqlen_q=seqlen_q, seqlen_k=seqlen_k, head_dim=128
    )
    every: list[Group] = [(b, tuple(range(8 * g, 8 * g + 8))) for b in range(400) for g in (0, 1)]
    (first, *_), bound = groups.batches(workload, every, device), 2.0**28 * 1.01
    read = (8 * seqlen_q + seqlen_k) * 256 * (2 if phase == "forward_backward" else 1)
    # Float64, of all groups; the whole of the GPU's test with 64k keys stays within 4 GiB.
    assert 8 * read * len(first) < bound
    assert 8 * 8 * seqlen_q * seqlen_k * len(first) < bound
    assert len(first) > 1 or read * 2 > groups._ELEMENTS[device]


def test_long_sequences_come_one_by_one() -> None:
    workload = make(phase="prefill", batch=1, seqlen_q=65536, seqlen_k=65536)
    every: list[Group] = [(0, (0, 1)), (0, (2, 3))]
    assert [len(batch) for batch in groups.batches(workload, every, "cuda")] == [1, 1]
    assert len(groups.batches(workload, every, "cuda", rows=64)) == 1
    dropped = make(
        phase="forward", batch=1, seqlen_q=65536, seqlen_k=4096, dropout={"p": 0.5, "seed": 1}
    )
    # Its masks are whole, whatever rows are computed.
    assert len(groups.batches(dropped, every, "cuda", rows=64)) == 2


def make(**changes: Any) -> Workload:
    document: dict[str, Any] = {
        "phase": "forward",
        "batch": 3,
        "seqlen_q": 9,
        "seqlen_k": 5,
        "heads_q": 4,
        "heads_kv": 2,
        "head_dim": 8,
        "dtype": "float32",
    }
    return Workload.parse(document | changes)


TRAINING: dict[str, Any] = {
    "phase": "forward_backward",
    "seqlen_q": 100,
    "seqlen_k": 100,
    "head_dim": 8,
    "dtype": "bfloat16",
    "mask": {"causal": "top_left"},
}
RAGGED = TRAINING | {"layout": "thd", "seqlen_q": [100, 70, 100], "seqlen_k": [100, 100, 100]}


def call(workload: Workload) -> tuple[Tensors, Outputs]:
    tensors = inputs.make_inputs(workload, {}, stream=0, device=CPU)
    return tensors, registry.load("eager").prepare(workload, {}, tensors).step()


def with_error(
    outputs: Outputs, workload: Workload, name: str, place: tuple[int, int, int], error: float
) -> Outputs:
    """Spoil one element of one (sequence, head, row)."""
    b, h, row = place
    tensor = getattr(outputs, name).clone()
    if name == "lse":
        views.lse_row(tensor, workload, b, h)[row] += error
    elif name in ("dk", "dv"):
        views.key_rows(tensor, workload, b, workload.kv_head(h))[row, 3] += error
    else:
        views.query_rows(tensor, workload, b, h)[row, 3] += error
    return dataclasses.replace(outputs, **{name: tensor})


@pytest.mark.parametrize("most", [1, 40_000, 1 << 20], ids=["groups", "some", "all"])
@pytest.mark.parametrize("changes", [TRAINING, RAGGED], ids=["equal", "ragged"])
def test_one_wrong_element_is_found_wherever_its_group_stands(
    changes: dict[str, Any], most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(groups._SCORES, "cpu", most)
    workload = make(**changes)
    tensors, outputs = call(workload)
    judge = Oracle(workload, {}, tensors)
    assert judge.check(outputs, empty_row_lse=-math.inf).ok
    names = itertools.cycle(("out", "lse", "dq", "dk", "dv"))
    places = ((0, 0, 0), (0, 3, 69), (1, 1, 66), (1, 2, 3), (2, 0, 99), (2, 3, 64))
    for (b, h, row), name in zip(places * 2, names, strict=False):
        wrong = with_error(outputs, workload, name, (b, h, row), 0.5)
        report = judge.check(wrong, empty_row_lse=-math.inf)
        assert [n for n, tally in report.tensors.items() if not tally.ok] == [name]
        head = h // 2 * 2 if name in ("dk", "dv") else h
        assert report.tensors[name].worst_block == (b, head, row // 64)
        assert f"batch {b}, head {head}, block {row // 64} of 64" in str(report.reason())


def test_of_equally_wrong_elements_the_first_is_told_in_any_order_of_batches() -> None:
    # Sequences 0 and 2 are one batch, judged before sequence 1.
    workload = make(**RAGGED)
    tensors, outputs = call(workload)
    judge = Oracle(workload, {}, tensors)
    for error in (math.nan, math.inf):
        wrong = with_error(outputs, workload, "out", (2, 1, 3), error)
        wrong = with_error(wrong, workload, "out", (1, 3, 65), error)
        wrong = with_error(wrong, workload, "out", (1, 2, 66), error)
        tally = judge.check(wrong, empty_row_lse=-math.inf).tensors["out"]
        assert tally.worst_block == (1, 2, 1)
        assert tally.worst_ratio == math.inf


def test_a_wrong_element_of_a_selection_is_found() -> None:
    workload = make(seqlen_q=600, seqlen_k=600, dtype="bfloat16", mask={"causal": "top_left"})
    tensors, outputs = call(workload)
    pairs = ((0, 1), (1, 0), (1, 1), (2, 2))
    judge = Oracle(workload, {}, tensors, Selection(pairs=pairs, blocks=(0, 4, 9)))
    assert judge.check(outputs, empty_row_lse=-math.inf).ok
    for (b, h), row in itertools.product(pairs, (5, 300, 599)):
        wrong = with_error(outputs, workload, "out", (b, h, row), 0.5)
        tally = judge.check(wrong, empty_row_lse=-math.inf).tensors["out"]
        assert not tally.ok
        assert tally.worst_block == (b, h, row // 64)
    unseen = with_error(outputs, workload, "out", (1, 0, 100), 0.5)
    assert judge.check(unseen, empty_row_lse=-math.inf).ok


def test_references_are_computed_once_unless_memory_forbids(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    workload = make(**RAGGED)
    tensors, outputs = call(workload)
    made = []

    def attend(*args: Any, **given_: Any) -> reference.GroupResult:
        made.append(args[2])
        return real(*args, **given_)

    real = reference.attend
    monkeypatch.setattr(reference, "attend", attend)
    for limit, later in ((1 << 30, 0), (0, 4)):
        monkeypatch.setattr(oracle, "_KEPT_BYTES", limit)
        judge = Oracle(workload, {}, tensors)
        assert judge.check(outputs, empty_row_lse=-math.inf).ok
        assert len(made) == 4  # in float64 and in bfloat16, of two batches
        made.clear()
        assert judge.check(outputs, empty_row_lse=-math.inf).ok
        assert len(made) == later
        made.clear()


class Calls(TorchDispatchMode):
    """Counts operations; `reads` are those that wait for the device."""

    def __init__(self) -> None:
        super().__init__()
        self.count = self.reads = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        self.count += 1
        self.reads += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


def test_a_batch_costs_the_calls_of_one_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(groups._ELEMENTS, "cpu", 1 << 22)
    seen = []
    for batch in (1, 32):
        workload = make(phase="forward_backward", batch=batch)
        tensors, outputs = call(workload)
        judge = Oracle(workload, {}, tensors)
        for n in (0, 1):
            with Calls() as calls:
                assert judge.check(outputs, empty_row_lse=-math.inf).ok
            seen.append((n, calls.count, calls.reads))
    assert seen[:2] == seen[2:]
