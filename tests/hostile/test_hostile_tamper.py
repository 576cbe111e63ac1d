"""Tampering at three levels: raw bits; members rebuilt with right checksums; everything recomputed.

Raw flips alone would test only the ZIP's checksums.
"""

from __future__ import annotations

import hashlib
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

from attnrepro import jsonio
from attnrepro.artifact import bundle, container, sign
from attnrepro.artifact.content import Content
from attnrepro.artifact.squeeze import squeeze
from attnrepro.artifact.trust import TrustStore
from attnrepro.artifact.verify import verify
from attnrepro.distribute import oci
from attnrepro.errors import Rejected
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


def rejected(data: bytes) -> str:
    with pytest.raises(Rejected) as caught:
        verify(data, trust=TrustStore())
    assert caught.value.rule is not None
    return caught.value.rule


def _raw_flips(data: bytes, step: int) -> int:
    bits = range(0, 8 * len(data), step)
    for bit in bits:
        rejected(_flipped(data, bit))
    return len(bits)


def _members(data: bytes) -> Iterator[tuple[str, bytes, Callable[[bytes], bytes]]]:
    """Members of both containers and content.zip itself; how to rebuild the file round each."""
    outer = example.outer(data)
    inner = example.members(data)

    def of_content(name: str) -> Callable[[bytes], bytes]:
        return lambda changed: example.with_content(data, container.write({**inner, name: changed}))

    def of_file(name: str) -> Callable[[bytes], bytes]:
        return lambda changed: container.write({**outer, name: changed})

    yield from ((name, value, of_file(name)) for name, value in outer.items())
    yield "content.zip", example.content_zip(data), partial(example.with_content, data)
    yield from ((name, value, of_content(name)) for name, value in inner.items())


def _member_flips(data: bytes, step: int) -> set[str]:
    rules = set()
    for name, value, rebuild in _members(data):
        # Most of content.zip is its members, whose bits have their turn too; the rest is headers.
        every = 7 if len(value) <= 64 else 5 * step if name == "content.zip" else step
        for bit in range(0, 8 * len(value), every):
            rule = rejected(rebuild(_flipped(value, bit)))
            # The checksums are right, so what rejects is not the ZIP's.
            assert rule != "container.crc", name
            rules.add(rule)
    return rules


def test_raw_bits(honest: bytes) -> None:
    assert _raw_flips(honest, 251) > 200


def test_raw_truncation(honest: bytes) -> None:
    for length in range(0, len(honest), 97):
        rejected(honest[:length])


def test_member_bits(honest: bytes) -> None:
    rules = _member_flips(honest, 1009)
    assert {"subject.content", "signature.invalid", "outer.xz"} <= rules


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


def competent(change: Callable[[dict[str, Any]], None]) -> tuple[bytes, bytes]:
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
            "content.zip.xz": squeeze(content),
            "signer.pub": key.public.pem,
        }
    )


def test_recomputed_under_the_old_signature(honest: bytes) -> None:
    old = bundle.parse(example.outer(honest)["bundle.sigstore.json"]).signature
    assert rejected(_forged(old, *competent(_later))) == "signature.invalid"


def test_recomputed_under_a_zero_signature() -> None:
    assert rejected(_forged(bytes(64), *competent(_later))) == "signature.invalid"


def test_recomputed_under_a_foreign_signature() -> None:
    payload, content = competent(_later)
    foreign = example.signer(9).sign(bundle.pae(payload))
    assert rejected(_forged(foreign, payload, content)) == "signature.invalid"


def test_recomputed_and_signed_by_a_foreign_key() -> None:
    payload, content = competent(_later)
    verified = verify(sign.sign_payload(payload, content, example.signer(9)), trust=TrustStore())
    assert not verified.trusted
