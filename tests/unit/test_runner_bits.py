from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING, Any

import jsonschema
import pytest
import torch
from numerics_fakes import ReferenceBackend, fresh_tensors, workload_of

from attnrepro.resources import schema_dir
from attnrepro_runner import bits, guards, inputs
from attnrepro_runner.backends import registry

if TYPE_CHECKING:
    from attnrepro_runner.backends.base import Outputs, Prepared, Tensors
    from attnrepro_runner.semantics import Workload


def prepared(workload: Workload, **faults: Any) -> Prepared:
    return ReferenceBackend(**faults).prepare(workload, {}, fresh_tensors(workload))


def test_repeating_bits() -> None:
    workload = workload_of(phase="forward_backward")
    report = bits.repeat(lambda: prepared(workload), 3, profile="portable")
    assert report.status() == "PASS"
    assert report.reason() is None
    assert report.observed == dict.fromkeys(("out", "lse", "dq", "dk", "dv"), "repeats")
    again = prepared(workload).step()
    assert report.digests == {name: inputs.digest(getattr(again, name)) for name in report.digests}
    schema = json.loads((schema_dir() / "result.schema.json").read_text())
    jsonschema.validate(report.to_json(), {"$ref": "#/$defs/bits", "$defs": schema["$defs"]})


@pytest.mark.parametrize(("claimed", "status"), [("bitwise", "NONDETERMINISTIC"), ("none", "PASS")])
def test_one_bit_in_one_call_is_seen(claimed: str, status: str) -> None:
    calls = 0

    def flip(outputs: Outputs) -> Outputs:
        nonlocal calls
        calls += 1
        assert outputs.dq is not None
        if calls == 5:
            guards.as_integers(outputs.dq)[1, 3, 2, 7] ^= 1
        return outputs

    workload = workload_of(phase="forward_backward")
    report = bits.repeat(lambda: prepared(workload, outputs=flip), 6, claimed=claimed)
    assert report.observed["dq"] == "differs"
    assert set(report.observed.values()) == {"repeats", "differs"}
    assert report.status() == status
    assert (report.reason() or "dq").startswith("dq")


@pytest.mark.parametrize(("a", "b"), [(0.0, -0.0), (1.0, float("nan")), (1.0, None)])
def test_bits_are_compared_not_values(a: float, b: float | None) -> None:
    values = iter([a, b, a])

    def put(outputs: Outputs) -> Outputs:
        value = next(values)
        if value is None:
            return dataclasses.replace(outputs, out=outputs.out[..., :-1])
        outputs.out[0, 0, 0, 0] = value
        return outputs

    assert bits.repeat(lambda: prepared(workload_of(), outputs=put), 3).observed["out"] == "differs"


def test_memory_that_is_returned_again_is_compared_with_what_it_held() -> None:
    held: list[torch.Tensor] = []

    def reuse(outputs: Outputs) -> Outputs:
        if not held:
            held.append(outputs.out)
            return outputs
        held[0] += 1
        return dataclasses.replace(outputs, out=held[0])

    assert (
        bits.repeat(lambda: prepared(workload_of(), outputs=reuse), 2).observed["out"] == "differs"
    )


def test_dropout_differs_between_calls_and_that_is_said() -> None:
    workload = workload_of(dropout={"p": 0.5, "seed": 1})
    assert bits.repeat(lambda: prepared(workload), 2).observed["out"] == "differs"


def test_something_is_done_between_and_two_calls_are_needed() -> None:
    done = []
    bits.repeat(lambda: prepared(workload_of()), 4, between=lambda: done.append(1))
    assert len(done) == 4
    with pytest.raises(ValueError, match="cannot show"):
        bits.repeat(lambda: prepared(workload_of()), 1)


def test_batch_invariance() -> None:
    workload = workload_of(layout="thd", seqlen_q=[20, 7], seqlen_k=[30, 9])

    def of(backend: Any, w: Workload = workload) -> bool | None:
        return bits.batch_invariance(backend, {}, w, {}, stream=0, device="cpu")

    assert of(registry.load("eager")) is True
    assert of(ReferenceBackend()) is True
    paged = workload_of(
        phase="decode",
        seqlen_q=1,
        cache={"kind": "paged", "page_size": 16, "pool_pages": 20, "append": 1},
    )
    assert of(registry.load("eager"), paged) is True
    assert of(ReferenceBackend(), workload_of(batch=1)) is None
    tensor = workload_of(dtype="float8_e4m3fn", fp8={"granularity": "tensor"})
    assert of(ReferenceBackend(), tensor) is None

    def by_batch(t: Tensors) -> Tensors:
        assert t.cu_seqlens_q is not None
        many = len(t.cu_seqlens_q) > 2
        return dataclasses.replace(t, q=t.q * (1.0 + 2**-6 * many))

    assert of(ReferenceBackend(tensors=by_batch)) is False


def test_allocator_poison_fills_several_blocks_of_each_size(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    filled: list[torch.Tensor] = []
    honest = guards.poison

    def record(tensor: torch.Tensor) -> None:
        honest(tensor)
        filled.append(tensor)

    monkeypatch.setattr(guards, "poison", record)
    guards.poison_allocator([(64, 8), (3,)], [torch.bfloat16, torch.float32], torch.device("cpu"))
    assert [tuple(t.shape) for t in filled] == [(64, 8)] * 4 + [(3,)] * 4
    assert len({t.data_ptr() for t in filled}) == 8
    assert all(bool(t.isnan().all()) and bool(guards.is_poison(t).all()) for t in filled)
