from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import pytest
from numerics_fakes import ReferenceBackend, workload_of

from attnrepro_runner import levels, probes
from attnrepro_runner.fields import Alibi

if TYPE_CHECKING:
    from attnrepro_runner.backends.base import Tensors
    from attnrepro_runner.levels import Level
    from attnrepro_runner.semantics import Workload


def run(given: Workload, **faults: Any) -> dict[str, Level]:
    report = probes.run_probes(ReferenceBackend(**faults), {}, given, "cpu")
    return {level.name: level for level in report.levels}


def scaled(factor: float) -> Any:
    return lambda w: dataclasses.replace(w, scale=w.scale_value * factor)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize(
    ("factor", "chosen"),
    [
        (1.0, "scale"),
        (1.01, "scale * 1.01"),
        (1 / 1.01, "scale / 1.01"),
        (32**-0.5, "1/head_dim"),
        (32**0.5, "1"),
        (2.0, "scale * 2"),
        (1.4426950408889634, "scale * log2(e)"),
    ],
)
def test_scale_is_told_apart(dtype: str, factor: float, chosen: str) -> None:
    found = run(workload_of(dtype=dtype, batch=1), workload=scaled(factor))["scale"]
    assert found.verdict == ("match" if factor == 1.0 else "other")
    if dtype == "float16" and chosen == "1":
        # e^-22 is 0 in float16: surely wrong, and by how much is not seen.
        assert (found.chosen, found.effective) == (None, float("inf"))
    else:
        assert found.chosen == chosen
        assert found.margin > 0.004


def test_effective_differences_seen_on_a_cpu() -> None:
    # measurement.md: 4.000 right, 4.043 for x 1.01 in bfloat16, 3.908 under softcap 15.
    workload = workload_of(head_dim=64, batch=1)
    assert run(workload)["scale"].effective == pytest.approx(4.0, abs=0.01)
    assert run(workload, workload=scaled(1.01))["scale"].effective == pytest.approx(4.04, abs=0.01)
    capped = dataclasses.replace(workload, softcap=15.0)
    assert run(capped)["scale"].effective == pytest.approx(3.908, abs=0.01)


@pytest.mark.parametrize("declared", [0.02, 0.5, 1.0])
def test_declared_scales_match(declared: float) -> None:
    found = run(workload_of(scale=declared, batch=1))["scale"]
    assert (found.chosen, found.verdict) == ("scale", "match")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("cap", [1.5, 3.0, 30.0])
def test_a_low_cap_hides_no_scale_and_accuses_nobody(cap: float, dtype: str) -> None:
    # An honest eager at softcap 1.5 read as "scale / 1.01": its logits were far above the cap.
    workload = workload_of(softcap=cap, batch=1, dtype=dtype)
    assert run(workload)["scale"].verdict == "match"
    doubled = run(workload, workload=scaled(2.0))["scale"]
    assert (doubled.verdict, doubled.chosen) == ("other", "scale * 2")


@pytest.mark.parametrize("cap", [2.0, 15.0, 50.0])
def test_softcap_is_told_apart(cap: float) -> None:
    workload = workload_of(softcap=cap, batch=1)
    assert run(workload)["softcap"].verdict == "match"

    def capped(value: float | None) -> Any:
        return lambda w: dataclasses.replace(w, softcap=value)

    assert run(workload, workload=capped(None))["softcap"].chosen == "off"
    assert run(workload, workload=capped(2 * cap))["softcap"].chosen == "softcap * 2"


@pytest.mark.parametrize(
    ("change", "chosen"),
    [
        (lambda s: s, "slopes"),
        (lambda s: (0.0,) * len(s), "off"),
        (lambda s: (*s[1:], s[0]), "next head's"),
        (lambda s: tuple(x * 1.4426950408889634 for x in s), "slopes * log2(e)"),
        (lambda s: tuple(-x for x in s), "negated"),
    ],
)
def test_alibi_is_told_apart(change: Any, chosen: str) -> None:
    workload = workload_of(alibi={"slopes": "geometric"}, seqlen_q=30, batch=1)

    def wrong(w: Workload) -> Workload:
        return dataclasses.replace(w, alibi=Alibi(slopes=change(w.alibi_slopes())))

    found = run(workload, workload=wrong)["alibi"]
    assert found.chosen == chosen
    assert found.verdict == ("match" if chosen == "slopes" else "other")


@pytest.mark.parametrize("name", ["q_descale", "k_descale", "v_descale"])
def test_descales_are_told_apart(name: str) -> None:
    workload = workload_of(dtype="float8_e4m3fn", fp8={}, batch=1)
    honest = run(workload)
    assert honest[name].verdict == "match"
    assert honest["scale"].verdict == "match"

    def ignored(t: Tensors) -> Tensors:
        return dataclasses.replace(t, **{name: None})

    def first(t: Tensors) -> Tensors:
        descale = getattr(t, name)
        return dataclasses.replace(t, **{name: descale[:, :1].expand_as(descale)})

    assert run(workload, tensors=ignored)[name].chosen == "ignored"
    assert run(workload, tensors=first)[name].chosen == "first head's"
    assert run(workload, tensors=ignored)[name].verdict == "other"


def test_classification() -> None:
    hypotheses = {"right": 4.0, "wrong": 4.04, "same": 4.0}
    assert levels.classify("x", "right", 4.001, hypotheses).verdict == "match"
    assert levels.classify("x", "right", 4.039, hypotheses).chosen == "wrong"
    between = levels.classify("x", "right", 4.02, hypotheses)
    assert (between.verdict, between.chosen) == ("inconclusive", None)
    assert levels.classify("x", "right", 9.0, hypotheses).verdict == "other"
    assert levels.classify("x", "right", float("nan"), hypotheses).verdict == "inconclusive"
    assert levels.classify("x", "only", 1.0, {"only": 1.0}).verdict == "match"
