"""Request models: the same model round every backend, stages, shares and Amdahl's law."""

from __future__ import annotations

from fractions import Fraction
from typing import TYPE_CHECKING

import pytest
import torch

from attnrepro_runner import ceilings, marks, models, requests, rope, shares
from attnrepro_runner.backends import registry
from attnrepro_runner.backends.base import Unsupported
from attnrepro_runner.semantics import Workload

if TYPE_CHECKING:
    from collections.abc import Iterator

CPU = torch.device("cpu")
INPUTS = {"seed": 5, "distribution": "normal"}
SMALL = {"heads_q": 4, "heads_kv": 2, "head_dim": 64, "dtype": "float32"}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Small products are slower on many threads, above all beside other tests."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def workload(phase: str, **changes: object) -> Workload:
    document = {"phase": phase, "batch": 2, "seqlen_q": 12, "seqlen_k": 12, **SMALL}
    return Workload.parse(document | {"mask": {"causal": "bottom_right"}} | changes)


def cached(seqlen_q: int, seqlen_k: int, kind: str = "contiguous", **more: object) -> dict:
    cache = {"kind": kind, "append": seqlen_q, "capacity": 32, **more}
    if kind == "paged":
        cache["page_size"] = 8
    phase = "decode" if seqlen_q == 1 else "prefill"
    return {"phase": phase, "seqlen_q": seqlen_q, "seqlen_k": seqlen_k, "cache": cache}


def request(
    name: str, w: Workload, backend: str = "eager", layers: int | None = None
) -> requests.Request:
    model = models.find(name, layers)
    return requests.Request(model, registry.load(backend), w, {}, INPUTS, CPU)


@pytest.mark.parametrize("backend", ["sdpa.math", "sdpa.flash"])
@pytest.mark.parametrize("kind", ["training_step", "prefill", "decode_step"])
def test_a_swapped_backend_changes_nothing_else(backend: str, kind: str) -> None:
    w = {
        "training_step": workload("forward_backward"),
        "prefill": workload("prefill"),
        "decode_step": workload(**cached(1, 20)),
    }[kind]
    found = {}
    for name in ("eager", backend):
        one = request(f"small_{kind}", w, name)
        before = {key: value.detach().clone() for key, value in one.weights.items()}
        found[name] = (one.step(), before, {k: v.detach() for k, v in one.weights.items()})
    (a, before_a, after_a), (b, before_b, after_b) = found["eager"], found[backend]
    torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)
    for name, value in before_a.items():
        assert torch.equal(value, before_b[name])
        torch.testing.assert_close(after_a[name], after_b[name], atol=1e-5, rtol=1e-4)
        assert torch.equal(value, after_a[name]) is (kind != "training_step")


def test_layouts_are_one_model() -> None:
    outs = [
        request("small_prefill", workload("prefill", layout=layout)).step()
        for layout in ("bshd", "bhsd", "thd")
    ]
    for other in outs[1:]:
        torch.testing.assert_close(outs[0], other, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", ["contiguous", "paged"])
@pytest.mark.parametrize("in_call", [False, True])
def test_prefill_through_a_cache_is_prefill(kind: str, in_call: bool) -> None:
    plain = request("small_prefill", workload("prefill")).step()
    w = workload(**cached(12, 12, kind, append_in_call=in_call))
    torch.testing.assert_close(request("small_prefill", w).step(), plain, atol=1e-5, rtol=1e-5)


def test_a_decode_step_continues_the_prefill() -> None:
    """Twelve tokens at once, or eleven and then one against their cache."""
    whole = request("small_prefill", workload("prefill", batch=1))
    first = request("small_prefill", workload(**cached(11, 11), batch=1))
    first._tokens = whole._tokens[:11]
    first.step()
    then = request("small_decode_step", workload(**cached(1, 12), batch=1))
    then._tokens = whole._tokens[11:]
    for mine, theirs in zip(then.tensors, first.tensors, strict=True):
        mine.k.copy_(theirs.k)
        mine.v.copy_(theirs.v)
    torch.testing.assert_close(then.step(), whole.step(), atol=1e-5, rtol=1e-5)


def test_training_moves_towards_its_targets() -> None:
    one = request("small_training_step", workload("forward_backward"))
    losses = [float(one.step()) for _ in range(3)]
    assert losses[0] > losses[1] > losses[2]
    assert all(w.grad is None for w in one.weights.values())


@pytest.mark.parametrize(
    ("kind", "w", "wanted"),
    [
        (
            "training_step",
            workload("forward_backward"),
            {"attention", "attention_backward", "backward", "loss", "update", "mlp", "rotary"},
        ),
        ("decode_step", workload(**cached(1, 20)), {"attention", "cache_append", "head"}),
    ],
)
def test_stages_cover_the_request(kind: str, w: Workload, wanted: set[str]) -> None:
    one = request(f"small_{kind}", w)
    one.step()
    timed = marks.TimedMarks(CPU)
    one.step(timed)
    totals = timed.totals_ns()
    assert wanted <= set(totals)
    assert all(value > 0 for value in totals.values())
    assert 0 < shares.attention_share(totals) < 1


def test_the_description_holds_integers_and_names() -> None:
    found = requests.describe(request("small_prefill", workload("prefill")), CPU, repeats=3)
    stages = found["stages_ns"]
    assert isinstance(stages, dict)
    assert found["total_ns"] == sum(stages.values())
    assert found["attention_ns"] == stages["attention"]
    assert found["largest_remaining"] in stages
    assert (found["model"], found["layers"], found["repeats"]) == ("small_prefill", 2, 3)


def test_stages_sum_what_repeats(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0, 10, 25, 26, 40])
    monkeypatch.setattr(marks.time, "perf_counter_ns", lambda: next(clock))
    timed = marks.TimedMarks(CPU)
    for stage in ("norm", "attention", "norm", "mlp"):
        timed.begin(stage)
    timed.end()
    assert timed.totals_ns() == {"norm": 11, "attention": 15, "mlp": 14}


def test_a_workload_that_is_not_the_models_is_refused() -> None:
    for changes, word in (
        ({"heads_q": 8}, "heads_q"),
        ({"head_dim": 128}, "head_dim"),
        ({"cache": {"kind": "contiguous", "append": 3}}, "append"),
    ):
        with pytest.raises(ValueError, match=word):
            request("small_prefill", workload("prefill", **changes))
    with pytest.raises(ValueError, match="phase"):
        request("small_decode_step", workload("prefill"))
    with pytest.raises(ValueError, match="no request model"):
        models.find("large_prefill", None)


def test_layers_can_be_set() -> None:
    assert models.find("llama3_8b_prefill", None).layers == 32
    assert models.find("llama3_8b_decode_step", 3).layers == 3
    one = request("small_prefill", workload("prefill"), layers=1)
    assert "1.qkv" not in one.weights


def test_an_adapter_without_a_call_is_unsupported(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = registry.load("eager")
    monkeypatch.setattr(backend, "prepare", lambda *_: object())
    with pytest.raises(Unsupported, match="takes no tensors"):
        requests.Request(
            models.find("small_prefill", None), backend, workload("prefill"), {}, INPUTS, CPU
        )


def test_rotation_depends_on_distance_alone() -> None:
    q, k = torch.randn(1, 1, 64), torch.randn(1, 1, 64)

    def product(i: int, j: int) -> float:
        rotated = [
            rope.rotate(x, *rope.tables([p], 64, 1e4, torch.float32, CPU))
            for x, p in ((q, i), (k, j))
        ]
        return float((rotated[0] * rotated[1]).sum())

    assert product(9, 4) == pytest.approx(product(105, 100), abs=1e-4)
    assert product(9, 4) != pytest.approx(product(9, 5), abs=1e-4)


def test_amdahl() -> None:
    assert shares.amdahl(Fraction(1, 2), Fraction(2)) == Fraction(4, 3)
    assert shares.amdahl(Fraction(0), Fraction(9)) == 1
    assert shares.amdahl(Fraction(1), Fraction(9)) == 9
    with pytest.raises(ValueError, match="share"):
        shares.amdahl(Fraction(3, 2), Fraction(1))


def test_comparison_of_two_requests() -> None:
    found = shares.compare(
        {"attention": 30, "attention_backward": 20, "mlp": 40, "norm": 10},
        {"attention": 15, "attention_backward": 10, "mlp": 39, "norm": 11},
        baseline_total_ns=1000,
        candidate_total_ns=760,
    )
    assert found.attention_share == Fraction(1, 2)
    assert found.attention_ratio == 2
    assert found.predicted_ratio == Fraction(4, 3)
    assert found.end_to_end_ratio == Fraction(1000, 760)
    assert found.ceiling_ratio == 2
    assert found.largest_remaining == "mlp"


def test_ceilings_of_a_cpu() -> None:
    product = ceilings.measure_matmul("float32", CPU, size=64, repeats=5)
    assert (product.work, product.unit, product.repeats) == (2 * 64**3, "flop", 5)
    assert product.per_second == product.work * 10**9 // product.median_ns
    copy = ceilings.measure_copy(CPU, size_bytes=1 << 16, repeats=3)
    assert (copy.work, copy.unit) == (2 << 16, "byte")
    read = ceilings.measure_read(CPU, size_bytes=1 << 16, repeats=3)
    assert (read.work, read.unit, read.kind) == (1 << 16, "byte", "read")
    assert set(copy.to_dict()) == {
        "kind",
        "dtype",
        "work",
        "unit",
        "median_ns",
        "fastest_ns",
        "repeats",
        "shape",
        "per_second",
    }
