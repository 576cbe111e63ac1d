"""Probes at the edges: where a level, a slope or a dropout mask can hardly be told, or not at all.

An honest backend is never INCORRECT there, and PASS wherever it can be told; a wrong one never
PASS.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import pytest
import torch
from case_probes import CPU
from numerics_fakes import ReferenceBackend, workload_of

from attnrepro_runner import alibiprobe, dropout, levels, probes, probeshape
from attnrepro_runner.backends import registry
from attnrepro_runner.backends.base import Backend, Unsupported
from attnrepro_runner.bench import ProbeBench
from attnrepro_runner.fields import Alibi
from attnrepro_runner.mutantbackends import Mutant, told
from attnrepro_runner.probes import ProbeReport

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from attnrepro_runner.backends.base import Tensors
    from attnrepro_runner.dropout import DropoutProbe
    from attnrepro_runner.levels import Level
    from attnrepro_runner.semantics import Workload

BR = {"causal": "bottom_right"}
EAGER = registry.load("eager")
FP8: dict[str, Any] = {"dtype": "float8_e4m3fn", "fp8": {}, "phase": "prefill"}
DESCALES = ("q_descale", "k_descale", "v_descale")


def bench(backend: Backend, workload: Workload) -> ProbeBench:
    return ProbeBench(backend, {}, workload, CPU)


# Descales.


def descales(workload: Workload, **faults: Any) -> dict[str, Level]:
    found = levels.probe_descales(bench(ReferenceBackend(**faults), workload))
    return {level.name: level for level in found}


@pytest.mark.parametrize("changes", [{"heads_kv": 1}, {"softcap": 1.0}, {"softcap": 20.0}])
def test_descales_are_told_for_one_kv_head_and_under_a_cap(changes: dict[str, Any]) -> None:
    workload = workload_of(**FP8 | {"batch": 1, "heads_kv": 2} | changes)
    assert {level.verdict for level in descales(workload).values()} == {"match"}
    for name in DESCALES:

        def ignored(t: Tensors, name: str = name) -> Tensors:
            return dataclasses.replace(t, **{name: torch.ones_like(getattr(t, name))})

        found = descales(workload, tensors=ignored)
        assert (found[name].chosen, found[name].verdict) == ("ignored", "other")
        assert all(found[other].verdict == "match" for other in DESCALES if other != name)


def test_an_empty_sequence_hides_no_descale() -> None:
    workload = workload_of(**FP8, layout="thd", seqlen_q=[0, 20], seqlen_k=[0, 20])
    assert {level.verdict for level in descales(workload).values()} == {"match"}


# Scale and softcap.


@pytest.mark.parametrize("backend", ["eager", "sdpa.math", "sdpa.flash"])
@pytest.mark.parametrize("widths", [{"head_dim_v": 1}, {"head_dim": 1}])
def test_one_channel_shows_the_scale(backend: str, widths: dict[str, int]) -> None:
    inner = registry.load(backend)
    workload = workload_of(phase="prefill", batch=1, **widths)
    try:
        inner.check(workload, {})
    except Unsupported:
        pytest.skip(f"{backend} does not claim {widths}")
    assert probes.run_probes(inner, {}, workload, CPU).status() == "PASS"

    def times(factor: float) -> Backend:
        return Mutant(inner, told(lambda w: dataclasses.replace(w, scale=w.scale_value * factor)))

    for factor, chosen in ((1.01, "scale * 1.01"), (1 / 1.01, "scale / 1.01"), (2, "scale * 2")):
        found = levels.probe_scale(bench(times(factor), workload))
        assert (found.verdict, found.chosen) == ("other", chosen)


def test_a_hypothesis_within_roundings_accuses_nobody() -> None:
    # 1/sqrt(128) is 0.4 % from 1/sqrt(127), and 0.016 of 4: two roundings of bfloat16.
    workload = workload_of(phase="prefill", batch=1, head_dim=127)
    assert levels.probe_scale(bench(EAGER, workload)).verdict == "match"
    near = {"right": 4.0, "near": 4.02}
    assert levels.classify("x", "right", 4.008, near).verdict == "inconclusive"
    alone = levels.classify("x", "right", 4.008, near, rounding=2.0**-7)
    assert (alone.verdict, alone.chosen) == ("inconclusive", None)
    assert "no other value can be told" in alone.declared
    third = levels.classify("x", "right", 4.008, near | {"far": 5.0}, rounding=2.0**-7)
    assert (third.verdict, third.chosen) == ("match", "right")


@pytest.mark.parametrize(
    ("cap", "dtype"),
    [(0.05, "bfloat16"), (1.0, "float16"), (3.0, "bfloat16"), (1e5, "bfloat16"), (1e5, "float16")],
)
def test_very_low_and_very_high_caps_are_told(cap: float, dtype: str) -> None:
    workload = workload_of(phase="prefill", batch=1, softcap=cap, dtype=dtype)
    assert levels.probe_softcap(bench(EAGER, workload)).verdict == "match"
    for wrong in (None, cap / 2, cap * 2):

        def mistaken(w: Workload, wrong: float | None = wrong) -> Workload:
            return dataclasses.replace(w, softcap=wrong)

        found = levels.probe_softcap(bench(Mutant(EAGER, told(mistaken)), workload))
        assert found.verdict == "other"


def test_a_cap_of_fp8_is_told() -> None:
    # Two keys near 100 are one number in e4m3, whose values are 8 apart there.
    workload = workload_of(**FP8, batch=1, softcap=100.0)
    assert levels.probe_softcap(bench(ReferenceBackend(), workload)).verdict == "match"
    off = ReferenceBackend(workload=lambda w: dataclasses.replace(w, softcap=None))
    assert levels.probe_softcap(bench(off, workload)).verdict == "other"


# ALiBi.


def sloped(backend: Backend, **changes: Any) -> Level:
    given = workload_of(**{"phase": "prefill", "batch": 1, "heads_q": 2} | changes)
    return alibiprobe.probe_alibi(bench(backend, probeshape.small_workload(given, alibi=True)))


def with_slopes(change: Callable[[float], float]) -> Backend:
    def wrong(w: Workload) -> Workload:
        return dataclasses.replace(
            w, alibi=Alibi(slopes=tuple(map(change, w.alibi_slopes() or ())))
        )

    return ReferenceBackend(workload=wrong)


WRONG: dict[str, Callable[[float], float]] = {
    "off": lambda s: 0.0,
    "half": lambda s: s / 2,
    "0.75": lambda s: 0.75 * s,
    "double": lambda s: 2 * s,
}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("slopes", [[7.0, 7.0], [16.0, 8.0], [1000.0, 1000.0], [5.0, 0.001]])
@pytest.mark.parametrize(
    "shape", [{"mask": BR}, {"seqlen_q": 1}, {"seqlen_q": 1, "seqlen_k": 39}, {"softcap": 30.0}]
)
def test_steep_slopes_are_told(slopes: list[float], dtype: str, shape: dict[str, Any]) -> None:
    changes: dict[str, Any] = {"alibi": {"slopes": slopes}, "dtype": dtype} | shape
    if max(slopes) > shape.get("softcap", 1e9):
        # No capped logit lifts a key so high: nothing is visible, and nothing is decided.
        found = sloped(EAGER, **changes)
        assert (found.verdict, found.chosen) == ("inconclusive", None)
        return
    assert sloped(EAGER, **changes).verdict == "match"
    for name, change in WRONG.items():
        assert sloped(with_slopes(change), **changes).verdict == "other", name


def test_small_slopes_are_told_at_a_length_that_shows_them_or_not_at_all() -> None:
    # Keys that are 40 apart differ by 4e-4 at slope 1e-5, a tenth of bfloat16's rounding.
    short: dict[str, Any] = {"alibi": {"slopes": [1e-5, 1e-5]}}
    for backend in (EAGER, with_slopes(WRONG["off"])):
        found = sloped(backend, **short)
        assert (found.verdict, found.chosen) == ("inconclusive", None)
        assert "no other value can be told" in found.declared
    assert sloped(EAGER, **short, dtype="float32").verdict == "match"
    assert sloped(with_slopes(WRONG["half"]), **short, dtype="float32").verdict == "other"
    long: dict[str, Any] = {"alibi": {"slopes": [4e-4, 4e-4]}, "seqlen_q": 1, "seqlen_k": 4096}
    assert sloped(EAGER, **long).verdict == "match"
    for change in (WRONG["off"], WRONG["half"]):
        assert sloped(with_slopes(change), **long).verdict == "other"
    plain = workload_of(phase="prefill", seqlen_k=4096, alibi={"slopes": "geometric"})
    assert max(probeshape.small_workload(plain, alibi=True).seqlens_k) == 200


def test_slopes_of_zero_are_none_and_no_others() -> None:
    zero: dict[str, Any] = {"alibi": {"slopes": [0.0, 0.0]}}
    assert sloped(EAGER, **zero).verdict == "match"
    for slope in (0.25, 0.01):
        assert sloped(with_slopes(lambda s, x=slope: x), **zero).verdict == "other"  # type: ignore[misc]


# Dropout.


def dropped(backend: Backend, p: float, **changes: Any) -> DropoutProbe:
    given: dict[str, Any] = {"batch": 1, "heads_q": 1, "heads_kv": 1, "seed": 3, "offset": 64}
    given |= changes
    drop = {"p": p, "seed": given.pop("seed"), "offset": given.pop("offset")}
    return dropout.probe_dropout(backend, {}, workload_of(dropout=drop, **given), CPU)


def status(found: DropoutProbe) -> str:
    return ProbeReport(sets={}, levels=(), dropout=found, shape="").status()


def told_dropout(**changes: Any) -> Backend:
    def wrong(w: Workload) -> Workload:
        assert w.dropout is not None
        return dataclasses.replace(w, dropout=dataclasses.replace(w.dropout, **changes))

    return Mutant(EAGER, told(wrong))


@pytest.mark.parametrize("phase", ["forward", "forward_backward"])
@pytest.mark.parametrize(
    ("changes", "rule"),
    [({"seed": 99}, "other_seed_differs"), ({"offset": 0}, "other_offset_differs")],
)
def test_a_seed_or_an_offset_that_is_not_honoured_is_incorrect(
    changes: dict[str, int], rule: str, phase: str
) -> None:
    found = dropped(told_dropout(**changes), 0.2, phase=phase)
    assert found.broken == (rule,)
    assert found.to_json()[rule] is False
    assert status(found) == "INCORRECT"
    honest = dropped(EAGER, 0.2, phase=phase)
    assert (honest.other_seed_differs, honest.other_offset_differs) == (True, True)
    assert status(honest) == "PASS"


def test_the_largest_seed_and_offset_have_others_too() -> None:
    most = (1 << 64) - 1
    assert status(dropped(EAGER, 0.2, seed=most, offset=most)) == "PASS"
    assert dropout._other(most, 1) == most - 1
    assert dropout._other(most, 64) == most - 64


def test_a_backend_that_refuses_another_offset_is_told_none() -> None:
    class Fixed(ReferenceBackend):
        def check(self, workload: Workload, options: Mapping[str, object]) -> None:
            if workload.dropout is not None and workload.dropout.offset != 64:
                message = "one offset alone"
                raise Unsupported(message)

    found = dropped(Fixed(), 0.2)
    assert found.other_offset_differs is None
    assert "other_offset_differs" not in found.to_json()
    assert (found.other_seed_differs, status(found)) == (True, "PASS")
    # flash_attn_2 takes multiples of 4 alone, and the other offset is one where the given one is.
    assert dropout._OTHER_OFFSET % 4 == 0


def test_two_weights_take_more_calls() -> None:
    # Two masks of two weights at p = 1/2 agree once in four: 5 honest seeds of 20 were INCORRECT.
    for seed in range(8):
        found = dropped(EAGER, 0.5, seqlen_q=1, seqlen_k=2, seed=seed)
        assert status(found) == "PASS", found
    assert found.calls == 16
    wrong = [ReferenceBackend(stuck=True), ReferenceBackend(unseeded=True)]
    for backend in (*wrong, told_dropout(seed=99), told_dropout(offset=0)):
        assert status(dropped(backend, 0.5, seqlen_q=1, seqlen_k=2)) == "INCORRECT"
    both = dropped(EAGER, 0.5, seqlen_q=1, seqlen_k=2, phase="forward_backward")
    assert (both.undecided, status(both)) == (("backward_same",), "INCONCLUSIVE")


def test_few_drops_take_more_calls_or_decide_nothing() -> None:
    small: dict[str, Any] = {"seqlen_q": 64, "seqlen_k": 64}
    for seed in range(4):
        found = dropped(EAGER, 1e-3, seed=seed, **small)
        assert status(found) == "PASS", found
        assert found.calls == 11
    assert status(dropped(ReferenceBackend(stuck=True), 1e-3, **small)) == "INCORRECT"
    rare = dropped(EAGER, 1e-7, **small)
    assert status(rare) == "INCONCLUSIVE"
    assert {"next_call_differs", "seed_repeats", "other_seed_differs"} <= set(rare.undecided)
    report = ProbeReport(sets={}, levels=(), dropout=rare, shape="")
    assert "too few at this p to decide" in str(report.reason())


def test_the_rate_is_judged_by_its_own_tail() -> None:
    # 1.7 drops are expected of 16,900 weights at 1e-4: ten are no proof, six sigmas were 9.5.
    assert dropout._is_rate(10, 16_900, 1e-4)
    assert not dropout._is_rate(30, 16_900, 1e-4)
    assert not dropout._is_rate(0, 16_900, 0.01)
    assert dropout._is_rate(1_690 + 230, 16_900, 0.1)
    assert not dropout._is_rate(1_690 + 270, 16_900, 0.1)
    assert not dropout._is_rate(1_690 - 270, 16_900, 0.1)
    assert dropout._is_rate(0, 0, 0.5)
    # flash-attn 2 drops 26 of 256 for 0.1: seen, unless its adapter says that it rounds.
    assert not dropout._is_rate(10_156_250, 10**8, 0.1)
    assert dropout._is_rate(10_156_250, 10**8, 0.1, resolution=1 / 256)
    assert not dropout._is_rate(11_000_000, 10**8, 0.1, resolution=1 / 256)
    assert not dropout._is_rate(0, 10**8, 0.01, resolution=1 / 256)


def test_a_window_that_leaves_the_first_keys_to_nobody_accuses_nobody() -> None:
    window = BR | {"window": {"left": 20, "right": 0}}
    shape: dict[str, Any] = {"seqlen_q": 10, "seqlen_k": 150, "mask": window}
    assert status(dropped(EAGER, 0.2, **shape)) == "PASS"
    assert status(dropped(ReferenceBackend(stuck=True), 0.2, **shape)) == "INCORRECT"


def test_a_probes_narrower_window_makes_no_row_empty_that_was_not() -> None:
    window = {"left": 40, "right": None, "alignment": "top_left"}
    mask = {"window": window, "masked_rows": "nan"}
    workload = workload_of(phase="forward", seqlen_q=90, seqlen_k=50, mask=mask)
    backend = registry.load("eager")
    backend.check(workload, {})
    assert probes.run_probes(backend, {}, workload, "cpu").status() == "PASS"
    wide = {"window": {**window, "left": 600}, "masked_rows": "nan"}
    workload = workload_of(phase="forward", seqlen_q=1024, seqlen_k=512, mask=wide)
    assert probes.run_probes(backend, {}, workload, "cpu").status() == "PASS"


def test_dropout_of_no_weights_is_nothing_to_probe() -> None:
    workload = workload_of(
        layout="thd", batch=1, seqlen_q=[0], seqlen_k=[0], dropout={"p": 0.1, "seed": 7}
    )
    found = probes.run_probes(registry.load("eager"), {}, workload, "cpu")
    assert (found.status(), found.dropout) == ("PASS", None)
