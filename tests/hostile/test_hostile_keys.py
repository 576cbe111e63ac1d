"""Keys and signatures: carried by somebody else, of small order, in a second spelling."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from cryptography.hazmat.primitives.asymmetric.utils import (
    decode_dss_signature,
    encode_dss_signature,
)

from attnrepro import jsonio
from attnrepro.artifact import bundle, container, sign
from attnrepro.artifact.keys import Signer, generate
from attnrepro.artifact.public_key import P256_ORDER, Algorithm
from attnrepro.artifact.trust import TrustStore
from attnrepro.artifact.verify import verify
from attnrepro.errors import Rejected
from support import example

if TYPE_CHECKING:
    from collections.abc import Callable


@pytest.fixture(scope="module")
def honest() -> bytes:
    return example.artifact()


def rule_of(data: bytes) -> str:
    with pytest.raises(Rejected) as caught:
        verify(data, trust=TrustStore())
    assert caught.value.rule is not None
    return caught.value.rule


def _outer_with(honest: bytes, **changes: bytes) -> bytes:
    members = {**example.outer(honest)}
    members.update({name.replace("_", "."): value for name, value in changes.items()})
    return container.write(members)


def test_missing_key(honest: bytes) -> None:
    members = example.outer(honest)
    del members["signer.pub"]
    assert rule_of(container.write(members)) == "outer.members"


def test_carried_key_of_somebody_else(honest: bytes) -> None:
    assert rule_of(_outer_with(honest, signer_pub=example.signer(9).public.pem)) == "key.hint"


def test_trusted_key_carried_by_a_stranger(honest: bytes) -> None:
    """Hint and carried key are the trusted one; the signature is the stranger's."""
    trusted, stranger = example.signer(), example.signer(9)
    payload = jsonio.canonical(example.payload(honest))
    forged = bundle.Bundle(
        payload=payload,
        signature=stranger.sign(bundle.pae(payload)),
        hint=bundle.hint_of(trusted.public.der),
    )
    assert rule_of(example.with_bundle(honest, forged.to_bytes())) == "signature.invalid"


@pytest.mark.parametrize(
    ("pem", "rule"),
    [
        (lambda pem: pem.replace(b"\n", b"\r\n"), "key.encoding"),
        (lambda pem: pem + b"\n", "key.encoding"),
        (lambda pem: b"comment\n" + pem, "key.format"),
        (lambda pem: pem + pem, "key.encoding"),
        (lambda _: b"", "key.format"),
        (lambda _: b"-----BEGIN PUBLIC KEY-----\n", "key.format"),
    ],
)
def test_key_spelling(honest: bytes, pem: Callable[[bytes], bytes], rule: str) -> None:
    assert rule_of(_outer_with(honest, signer_pub=pem(example.signer().public.pem))) == rule


SMALL_ORDER = [
    bytes(32),
    (1).to_bytes(32, "little"),
    (2**255 - 20).to_bytes(32, "little"),  # y = -1, order 2
    bytes.fromhex("c7176a703d4dd84fba3c0b760d10670f2a2053fa2c39ccc64ec7fd7792ac037a"),
    bytes.fromhex("c7176a703d4dd84fba3c0b760d10670f2a2053fa2c39ccc64ec7fd7792ac03fa"),
    bytes.fromhex("26e8958fc2b227b045c3f489f2ef98f0d5dfac05d3c63339b13802886d53fc05"),
    bytes.fromhex("26e8958fc2b227b045c3f489f2ef98f0d5dfac05d3c63339b13802886d53fc85"),
    (2**255 - 19).to_bytes(32, "little"),  # y = p: zero spelt differently
    (2**255 - 18).to_bytes(32, "little"),  # y = p + 1: one spelt differently
    b"\xff" * 32,
]


@pytest.mark.parametrize("point", SMALL_ORDER, ids=lambda point: point.hex()[:8])
def test_small_order_key_that_anyone_can_sign_for(honest: bytes, point: bytes) -> None:
    """OpenSSL takes such keys; with A of order 1, (R = B·s, s) verifies for every message."""
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    key = Ed25519PublicKey.from_public_bytes(point)
    der = key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    pem = key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    payload = jsonio.canonical(example.payload(honest))
    forged = bundle.Bundle(
        payload=payload,
        signature=(1).to_bytes(32, "little") + bytes(32),
        hint=bundle.hint_of(der),
    )
    data = container.write(
        {**example.outer(honest), "bundle.sigstore.json": forged.to_bytes(), "signer.pub": pem}
    )
    assert rule_of(data) == "key.small_order"


def test_mixed_order_key(honest: bytes) -> None:
    """An honest key plus a point of order 2 lies on the curve, outside the prime subgroup."""
    from attnrepro.artifact import edwards

    honest_point = edwards._decode(example.signer().public.der[-32:])
    assert honest_point is not None
    mixed = edwards._add(honest_point, (0, edwards._P - 1, 1, 0))
    inverse = pow(mixed[2], -1, edwards._P)
    x, y = mixed[0] * inverse % edwards._P, mixed[1] * inverse % edwards._P
    encoded = (y | (x & 1) << 255).to_bytes(32, "little")
    assert edwards._decode(encoded) is not None
    assert not edwards.is_sound_key(encoded)
    assert edwards.is_sound_key(example.signer().public.der[-32:])


def _p256(change: Callable[[bytes], bytes]) -> bytes:
    key = generate(Algorithm.P256)
    honest = example.artifact(key)
    parsed = bundle.parse(example.outer(honest)["bundle.sigstore.json"])
    forged = bundle.Bundle(
        payload=parsed.payload, signature=change(parsed.signature), hint=parsed.hint
    )
    return example.with_bundle(honest, forged.to_bytes())


def _high_s(signature: bytes) -> bytes:
    r, s = decode_dss_signature(signature)
    return encode_dss_signature(r, P256_ORDER - s)


def _raw_form(signature: bytes) -> bytes:
    r, s = decode_dss_signature(signature)
    return r.to_bytes(32, "big") + s.to_bytes(32, "big")


def _long_length(signature: bytes) -> bytes:
    return b"\x30\x81" + signature[1:]


@pytest.mark.parametrize(
    "change",
    [
        _high_s,
        _raw_form,
        _long_length,
        lambda signature: signature + b"\x00",
        lambda _: encode_dss_signature(0, 1),
        lambda _: encode_dss_signature(1, 0),
    ],
)
def test_p256_has_one_spelling(change: Callable[[bytes], bytes]) -> None:
    assert rule_of(_p256(change)) == "signature.encoding"


def test_p256_is_taken() -> None:
    assert not verify(_p256(lambda signature: signature), trust=TrustStore()).trusted


def _other_key(kind: str) -> Any:
    from cryptography.hazmat.primitives.asymmetric import ec, rsa

    if kind == "rsa":
        return rsa.generate_private_key(65537, 2048)
    return ec.generate_private_key({"p384": ec.SECP384R1(), "k1": ec.SECP256K1()}[kind])


@pytest.mark.parametrize("kind", ["rsa", "p384", "k1"])
def test_other_algorithms(honest: bytes, kind: str) -> None:
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    pem = (
        _other_key(kind).public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    )
    assert rule_of(_outer_with(honest, signer_pub=pem)) == "key.algorithm"


def test_an_unknown_key_is_exactly_unknown(honest: bytes) -> None:
    """A stranger who copies every name that the predicate has is still only unknown."""
    stranger: Signer = example.signer(9)
    payload = jsonio.canonical(example.payload(honest))
    data = sign.sign_payload(payload, example.content_zip(honest), stranger)
    verified = verify(data, trust=TrustStore())
    assert (verified.trusted, verified.owner) == (False, None)
