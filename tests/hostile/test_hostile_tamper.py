"""Tampering at three levels: raw bits; members rebuilt with right checksums; everything recomputed.

Raw flips alone would test only the ZIP's checksums.
"""

from __future__ import annotations

import copy
import hashlib
from typing import TYPE_CHECKING, Any

import pytest

from attnrepro import jsonio
from attnrepro.artifact import bundle, container, sign
from attnrepro.artifact.budget import Budget
from attnrepro.artifact.content import Content, section_digests
from attnrepro.artifact.statement import parse
from attnrepro.artifact.trust import TrustStore
from attnrepro.artifact.verify import verify
from attnrepro.distribute import oci
from attnrepro.errors import InvalidDocument, Rejected
from support import example

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@pytest.fixture(scope="module")
def honest() -> bytes:
    return example.artifact()


def _flipped(data: bytes, bit: int) -> bytes:
    changed = bytearray(data)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


def _rejected(data: bytes) -> str:
    with pytest.raises(Rejected) as caught:
        verify(data, trust=TrustStore())
    assert caught.value.rule is not None
    return caught.value.rule


def _raw_flips(data: bytes, step: int) -> int:
    bits = range(0, 8 * len(data), step)
    for bit in bits:
        _rejected(_flipped(data, bit))
    return len(bits)


def _members(data: bytes) -> Iterator[tuple[str, bytes, Callable[[bytes], bytes]]]:
    """Every member of both containers, and how to rebuild the file around a changed one."""
    outer = example.outer(data)
    inner = container.read(outer["content.zip"], budget=Budget())

    def of_content(name: str) -> Callable[[bytes], bytes]:
        def rebuild(changed: bytes) -> bytes:
            content = container.write({**inner, name: changed})
            return container.write({**outer, "content.zip": content})

        return rebuild

    def of_file(name: str) -> Callable[[bytes], bytes]:
        return lambda changed: container.write({**outer, name: changed})

    yield from ((name, value, of_file(name)) for name, value in outer.items())
    yield from ((name, value, of_content(name)) for name, value in inner.items())


def _member_flips(data: bytes, step: int) -> set[str]:
    rules = set()
    for name, value, rebuild in _members(data):
        for bit in range(0, 8 * len(value), step if len(value) > 64 else 7):
            rule = _rejected(rebuild(_flipped(value, bit)))
            # The checksums are right, so what rejects is not the ZIP's.
            assert rule != "container.crc", name
            rules.add(rule)
    return rules


def test_raw_bits(honest: bytes) -> None:
    assert _raw_flips(honest, 1009) > 200


def test_raw_truncation(honest: bytes) -> None:
    for length in range(0, len(honest), 997):
        _rejected(honest[:length])


def test_member_bits(honest: bytes) -> None:
    rules = _member_flips(honest, 1009)
    assert {"subject.content", "signature.invalid"} <= rules


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_raw_bit() -> None:
    small = example.small_artifact()
    assert _raw_flips(small, 1) == 8 * len(small)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_bit_of_every_member() -> None:
    _member_flips(example.small_artifact(), 1)


# Level three: the forger is competent. Every digest and the statement fit the changed content.


def _competent(change: Callable[[dict[str, Any]], None]) -> tuple[bytes, bytes]:
    """Payload and content.zip of a changed run; everything fits, but the signature."""
    seen = example.observations()
    change(seen)
    packed = Content(
        manifest=jsonio.canonical(example.manifest()),
        repeatable=example.repeatable(),
        observations=seen,
        files=example.files(),
    )
    data = packed.to_zip()
    digest = hashlib.sha256(data).hexdigest()
    statement = example.payload(example.artifact())
    for subject, value in zip(
        statement["subject"], (digest, oci.manifest_sha256(digest, len(data))), strict=True
    ):
        subject["digest"]["sha256"] = value
    statement["predicate"]["summary"] = seen["summary"]
    return jsonio.canonical(statement), data


def _later(seen: dict[str, Any]) -> None:
    seen["run"]["started_utc"] = "2027-01-01T00:00:00Z"


def _forged(signature: bytes, payload: bytes, content: bytes) -> bytes:
    key = example.signer()
    made = bundle.Bundle(payload=payload, signature=signature, hint=bundle.hint_of(key.public.der))
    return container.write(
        {
            "bundle.sigstore.json": made.to_bytes(),
            "content.zip": content,
            "signer.pub": key.public.pem,
        }
    )


def test_recomputed_under_the_old_signature(honest: bytes) -> None:
    old = bundle.parse(example.outer(honest)["bundle.sigstore.json"]).signature
    assert _rejected(_forged(old, *_competent(_later))) == "signature.invalid"


def test_recomputed_under_a_zero_signature() -> None:
    assert _rejected(_forged(bytes(64), *_competent(_later))) == "signature.invalid"


def test_recomputed_under_a_foreign_signature() -> None:
    payload, content = _competent(_later)
    foreign = example.signer(9).sign(bundle.pae(payload))
    assert _rejected(_forged(foreign, payload, content)) == "signature.invalid"


def test_recomputed_and_signed_by_a_foreign_key() -> None:
    payload, content = _competent(_later)
    verified = verify(sign.sign_payload(payload, content, example.signer(9)), trust=TrustStore())
    assert not verified.trusted


# And the competent forger with a key of their own, whose numbers do not add up.


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
    payload, content = _competent(change)
    assert _rejected(sign.sign_payload(payload, content, example.signer())) == rule


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
    payload, content = _competent(lambda _: None)
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


def test_statement_follows_repeatable(honest: bytes) -> None:
    predicate = parse(jsonio.canonical(example.payload(honest))).predicate
    assert predicate["repeatable"] == section_digests(example.repeatable())
