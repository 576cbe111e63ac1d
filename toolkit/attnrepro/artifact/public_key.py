"""Public keys: which are taken, their one encoding, and checking a signature.

Ed25519 (deterministic, verified by every tool we know) and ECDSA P-256 with SHA-256 and low S.
Everything else is refused: other curves and RSA add parameters that verifiers disagree on.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Final

from attnrepro.artifact.edwards import is_sound_key
from attnrepro.errors import Rejected

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.types import PublicKeyTypes

P256_ORDER: Final = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551


class Algorithm(StrEnum):
    """Signature algorithms that are made and taken."""

    ED25519 = "ed25519"
    P256 = "ecdsa-p256-sha256"


@dataclass(frozen=True, kw_only=True)
class PublicKey:
    """A public key that passed every rule; make it with `parse_public_key`."""

    algorithm: Algorithm
    der: bytes
    """SubjectPublicKeyInfo, in the only encoding taken."""

    @property
    def fingerprint(self) -> str:
        """Lower-case hex SHA-256 of the DER."""
        return hashlib.sha256(self.der).hexdigest()

    @property
    def pem(self) -> bytes:
        """The PEM form, as `signer.pub` holds it."""
        from cryptography.hazmat.primitives import serialization

        return serialization.load_der_public_key(self.der).public_bytes(
            serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
        )

    def verify(self, signature: bytes, message: bytes) -> None:
        """Check a signature over the raw message.

        Raises Rejected: `signature.encoding` for a second spelling of a signature (high S, raw or
        loose DER), `signature.invalid` otherwise.
        """
        from cryptography.exceptions import InvalidSignature
        from cryptography.hazmat.primitives import hashes, serialization
        from cryptography.hazmat.primitives.asymmetric import ec, ed25519

        key = serialization.load_der_public_key(self.der)
        try:
            if isinstance(key, ed25519.Ed25519PublicKey):
                key.verify(signature, message)
            elif isinstance(key, ec.EllipticCurvePublicKey):
                _check_low_s(signature)
                key.verify(signature, message, ec.ECDSA(hashes.SHA256()))
            else:  # a PublicKey holds nothing else
                raise AssertionError(self.algorithm)
        except InvalidSignature:
            text = (
                "the signature does not match: the content of the statement or the key was changed"
            )
            raise Rejected(text, rule="signature.invalid") from None


def low_s(signature: bytes) -> bytes:
    """The same ECDSA P-256 signature with S in the lower half (DER in, DER out)."""
    from cryptography.hazmat.primitives.asymmetric.utils import (
        decode_dss_signature,
        encode_dss_signature,
    )

    r, s = decode_dss_signature(signature)
    return encode_dss_signature(r, min(s, P256_ORDER - s))


def parse_public_key(data: bytes) -> PublicKey:
    """A key from PEM (SubjectPublicKeyInfo), DER, or an OpenSSH public line.

    Raises Rejected: `key.format`, `key.algorithm`, `key.small_order`.
    """
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives import serialization

    if len(data) > 16384:
        text = "a public key of this size is not taken"
        raise Rejected(text, rule="key.format")
    try:
        key: PublicKeyTypes
        if data.startswith((b"ssh-", b"ecdsa-", b"sk-")):
            # Certificates make load_ssh_public_key answer with another type, refused below.
            key = serialization.load_ssh_public_key(data)
        elif data.lstrip().startswith(b"-----BEGIN PUBLIC KEY-----"):
            key = serialization.load_pem_public_key(data)
        else:
            key = serialization.load_der_public_key(data)
    except UnsupportedAlgorithm:
        raise _algorithm() from None
    except (ValueError, TypeError):
        text = "not a public key in PEM, DER or OpenSSH form"
        raise Rejected(text, rule="key.format") from None
    return checked(key)


def parse_signer_pub(data: bytes) -> PublicKey:
    """The key of an artifact's `signer.pub`: PEM in exactly the form that we write.

    Raises Rejected as `parse_public_key`, and `key.encoding` for any other spelling.
    """
    key = parse_public_key(data)
    if key.pem != data:
        text = "signer.pub is not in its one PEM form"
        raise Rejected(text, rule="key.encoding")
    return key


def checked(key: object) -> PublicKey:
    """A key of the cryptography library, if our rules take it. Raises Rejected (`key.*`)."""
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec, ed25519

    if isinstance(key, ed25519.Ed25519PublicKey):
        algorithm = Algorithm.ED25519
        if not is_sound_key(key.public_bytes_raw()):
            text = "this Ed25519 key is a point of small or mixed order; anyone can sign for it"
            raise Rejected(text, rule="key.small_order")
    elif isinstance(key, ec.EllipticCurvePublicKey) and isinstance(key.curve, ec.SECP256R1):
        algorithm = Algorithm.P256
    else:
        raise _algorithm()
    der = key.public_bytes(
        serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    return PublicKey(algorithm=algorithm, der=der)


def _check_low_s(signature: bytes) -> None:
    from cryptography.hazmat.primitives.asymmetric.utils import (
        decode_dss_signature,
        encode_dss_signature,
    )

    try:
        r, s = decode_dss_signature(signature)
        one_form = encode_dss_signature(r, s) == signature
    except ValueError:
        one_form, r, s = False, 0, 0
    if not one_form or not 0 < r < P256_ORDER or not 0 < s <= P256_ORDER // 2:
        text = "an ECDSA signature must be DER with S in the lower half"
        raise Rejected(text, rule="signature.encoding")


def _algorithm() -> Rejected:
    return Rejected("only Ed25519 and ECDSA P-256 keys are taken", rule="key.algorithm")
