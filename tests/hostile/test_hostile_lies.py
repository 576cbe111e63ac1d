"""Validly signed by a real key, and the numbers or statuses do not add up."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import pytest
from test_hostile_tamper import competent, rejected

from attnrepro import jsonio
from attnrepro.artifact import sign
from attnrepro.artifact.content import section_digests
from attnrepro.artifact.statement import parse
from attnrepro.errors import InvalidDocument
from support import example

if TYPE_CHECKING:
    from collections.abc import Callable


def _faster(seen: dict[str, Any]) -> None:
    timing = seen["cells"][0]["subjects"][0]["timing"]["host"]
    timing["median"]["value_ns"] //= 2


def _launch_faster(seen: dict[str, Any]) -> None:
    timing = seen["cells"][0]["subjects"][0]["timing"]["host"]
    timing["launches"][0]["median"]["value_ns"] -= 1


def _better_rank(seen: dict[str, Any]) -> None:
    timing = seen["cells"][0]["subjects"][0]["timing"]["host"]
    timing["launches"][0]["median"]["rank"] = 1


def _narrow_interval(seen: dict[str, Any]) -> None:
    interval = seen["cells"][0]["subjects"][0]["timing"]["host"]["interval"]
    interval["upper_ns"] = interval["lower_ns"]


def _higher_confidence(seen: dict[str, Any]) -> None:
    timing = seen["cells"][0]["subjects"][0]["timing"]["host"]
    timing["launches"][0]["interval"]["confidence"] = "0.99"


def _no_tail(seen: dict[str, Any]) -> None:
    seen["cells"][0]["subjects"][0]["timing"]["host"]["launches"][0]["tails"] = []


def _slow_launch_dropped(seen: dict[str, Any]) -> None:
    del seen["cells"][0]["subjects"][0]["timing"]["host"]["launches"][-1]


def _same_launch_again(seen: dict[str, Any]) -> None:
    launches = seen["cells"][0]["subjects"][0]["timing"]["host"]["launches"]
    launches[-1] = copy.deepcopy(launches[0])


def _discard_more(seen: dict[str, Any]) -> None:
    launch = seen["cells"][0]["subjects"][0]["timing"]["host"]["launches"][0]
    launch["discards"].append({"first": 30, "count": 10, "reason": "slow"})


def _discard_beyond(seen: dict[str, Any]) -> None:
    launch = seen["cells"][0]["subjects"][0]["timing"]["host"]["launches"][0]
    launch["discards"] = [{"first": 0, "count": 2**52, "reason": "slow"}]


def _steadier(seen: dict[str, Any]) -> None:
    launch = seen["cells"][0]["subjects"][0]["timing"]["host"]["launches"][0]
    launch["autocorrelation_lag1"] = (0.0).hex()


def _verdict(seen: dict[str, Any]) -> None:
    seen["cells"][0]["subjects"][0]["comparisons"][0]["ratio"] = (2.0).hex()


def _no_comparison(seen: dict[str, Any]) -> None:
    seen["cells"][0]["subjects"][0]["comparisons"] = []


def _other_samples(seen: dict[str, Any]) -> None:
    flash, eager = seen["cells"][0]["subjects"]
    flash["timing"]["host"] = copy.deepcopy(eager["timing"]["host"])


def _outside_samples(seen: dict[str, Any]) -> None:
    launch = seen["cells"][0]["subjects"][0]["timing"]["host"]["launches"][0]
    launch["member"] = "logs/flash-0.txt"


def _counted_twice(seen: dict[str, Any]) -> None:
    seen["summary"]["passed"] = 3


def _bad_cell_dropped(seen: dict[str, Any]) -> None:
    seen["cells"] = []
    seen["summary"]["passed"] = 0


def _better_label(seen: dict[str, Any]) -> None:
    seen["cells"][0]["label"] = "seqlen_k=131072"


def _baseline_dropped(seen: dict[str, Any]) -> None:
    del seen["cells"][0]["subjects"][1]
    seen["cells"][0]["subjects"][0]["comparisons"] = []
    seen["summary"]["passed"] = 1


def _another_clock(seen: dict[str, Any]) -> None:
    timing = seen["cells"][0]["subjects"][0]["timing"]
    timing["kernel"] = timing.pop("host")


def _cell_twice(seen: dict[str, Any]) -> None:
    seen["cells"] *= 2
    seen["summary"]["passed"] = 4


def _subject_unknown(seen: dict[str, Any]) -> None:
    seen["cells"][0]["subjects"][0]["backend"] = "flash_attn_4"


def _kernel(seen: dict[str, Any]) -> None:
    seen["cells"][0]["subjects"][0]["execution"]["operators"] = {"aten::mine": 1}


def _fallback_passes(seen: dict[str, Any]) -> None:
    seen["cells"][0]["subjects"][0]["execution"]["verdict"] = "fallback"


def _wrong_passes(seen: dict[str, Any]) -> None:
    error = seen["cells"][0]["subjects"][0]["oracle"][1]["oracle"]["tensors"]["out"]
    error["ok"] = False


def _nan_passes(seen: dict[str, Any]) -> None:
    error = seen["cells"][0]["subjects"][0]["oracle"][1]["oracle"]["tensors"]["out"]
    error["nan"] = True


def _untested_passes(seen: dict[str, Any]) -> None:
    del seen["cells"][0]["subjects"][0]["oracle"]


def _probe(seen: dict[str, Any]) -> None:
    probe = seen["cells"][0]["subjects"][0]["probes"]["set"]["v"]
    probe["equal"] = False


def _level(seen: dict[str, Any]) -> None:
    seen["cells"][0]["subjects"][0]["probes"]["levels"][0]["verdict"] = "other"


def _probe_hash(seen: dict[str, Any]) -> None:
    seen["cells"][0]["subjects"][0]["probes"]["set"]["v"]["observed"] = "0" * 64


def _bits(seen: dict[str, Any]) -> None:
    seen["cells"][0]["subjects"][0]["bits"]["observed"]["out"] = "differs"


def _no_claim(seen: dict[str, Any]) -> None:
    seen["cells"][0]["subjects"][0]["bits"]["claimed"] = "none"


def _no_reason(seen: dict[str, Any]) -> None:
    subject = seen["cells"][0]["subjects"][0]
    subject |= {"status": "CRASH", "timing": {}, "comparisons": []}
    seen["summary"] |= {"passed": 1, "failed": 1}


def _unsupported_with_times(seen: dict[str, Any]) -> None:
    subject = seen["cells"][0]["subjects"][0]
    subject |= {"status": "UNSUPPORTED", "reason": "not claimed", "comparisons": []}
    seen["summary"] |= {"passed": 1, "unsupported": 1}


LIES: dict[str, tuple[Callable[[dict[str, Any]], None], str]] = {
    "median over launches": (_faster, "samples.statistic"),
    "median of a launch": (_launch_faster, "samples.statistic"),
    "rank": (_better_rank, "samples.statistic"),
    "interval": (_narrow_interval, "samples.statistic"),
    "confidence": (_higher_confidence, "samples.statistic"),
    "a tail left out": (_no_tail, "samples.statistic"),
    "a launch left out": (_slow_launch_dropped, "samples.statistic"),
    "a launch shown twice": (_same_launch_again, "samples.member"),
    "more discards than used": (_discard_more, "samples.statistic"),
    "discards beyond the end": (_discard_beyond, "samples.statistic"),
    "autocorrelation": (_steadier, "samples.statistic"),
    "ratio": (_verdict, "samples.comparison"),
    "comparison left out": (_no_comparison, "samples.comparison"),
    "another subject's samples": (_other_samples, "samples.member"),
    "samples elsewhere": (_outside_samples, "samples.member"),
    "summary": (_counted_twice, "crosscheck.summary"),
    "a bad cell left out": (_bad_cell_dropped, "crosscheck.cells"),
    "a larger label": (_better_label, "crosscheck.cells"),
    "the baseline left out": (_baseline_dropped, "crosscheck.cells"),
    "another clock": (_another_clock, "samples.member"),
    "a cell twice": (_cell_twice, "crosscheck.cells"),
    "another backend": (_subject_unknown, "crosscheck.cells"),
    "another kernel": (_kernel, "crosscheck.execution"),
    "fallback passes": (_fallback_passes, "crosscheck.status"),
    "wrong output passes": (_wrong_passes, "crosscheck.status"),
    "NaN passes": (_nan_passes, "crosscheck.status"),
    "untested passes": (_untested_passes, "crosscheck.status"),
    "set probe differs": (_probe, "crosscheck.status"),
    "level probe differs": (_level, "crosscheck.status"),
    "probe hash": (_probe_hash, "crosscheck.semantics"),
    "bits that differ": (_bits, "crosscheck.outputs"),
    "bits without a claim": (_no_claim, "crosscheck.outputs"),
    "failure without a reason": (_no_reason, "crosscheck.status"),
    "times of what is not supported": (_unsupported_with_times, "crosscheck.status"),
}


@pytest.mark.parametrize("case", LIES)
def test_validly_signed_lie(case: str) -> None:
    change, rule = LIES[case]
    payload, content = competent(change)
    assert rejected(sign.sign_payload(payload, content, example.signer())) == rule


@pytest.mark.parametrize("case", LIES)
def test_our_signer_refuses_the_lie(case: str) -> None:
    """What verify rejects is never handed out in the first place."""
    change, rule = LIES[case]
    seen = example.observations()
    change(seen)
    with pytest.raises(InvalidDocument) as caught:
        example.artifact(observations=seen)
    assert caught.value.rule == rule


def test_recomputing_changes_nothing() -> None:
    """Without a lie the competent forger's file is the honest one."""
    payload, content = competent(lambda _: None)
    assert sign.sign_payload(payload, content, example.signer()) == example.artifact()


def test_changed_samples() -> None:
    files = example.files()
    name = example.sample_member("flash", 3)
    files[name] = files[name][:-8] + (1).to_bytes(8, "little")
    with pytest.raises(InvalidDocument) as caught:
        example.artifact(files=files)
    assert caught.value.rule == "samples.statistic"


@pytest.mark.parametrize(
    "last", [b"\xff" * 8, bytes(8), b"\x00" * 7 + b"\x7f"], ids=["negative", "zero", "huge"]
)
def test_impossible_sample(last: bytes) -> None:
    files = example.files()
    name = example.sample_member("flash", 3)
    files[name] = files[name][:-8] + last
    with pytest.raises(InvalidDocument) as caught:
        example.artifact(files=files)
    assert caught.value.rule == "samples.format"


def test_samples_that_nobody_cites() -> None:
    files = {**example.files(), "samples/more.i64": bytes(8)}
    with pytest.raises(InvalidDocument) as caught:
        example.artifact(files=files)
    assert caught.value.rule == "samples.member"


def test_repeatable_of_another_run() -> None:
    other = example.repeatable()
    other["outputs"]["digests"][example.CELL]["flash"]["out"] = "0" * 64
    with pytest.raises(InvalidDocument) as caught:
        example.artifact(repeatable=other)
    assert caught.value.rule == "crosscheck.outputs"


def test_statement_follows_repeatable() -> None:
    predicate = parse(jsonio.canonical(example.payload(example.artifact()))).predicate
    assert predicate["repeatable"] == section_digests(example.repeatable())
