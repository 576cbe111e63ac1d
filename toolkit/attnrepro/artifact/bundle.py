"""DSSE envelope in a Sigstore bundle: the one form that we write, and the only one we read.

DSSE 1.0 signs `PAE(payloadType, payload)`, lengths in bytes, over the raw payload. The bundle is
RFC 8785 JSON, so aliases, base64url, whitespace, extra fields and second signatures are refused in
one stroke: the bundle made from the parsed parts must equal the bytes read. The checks before that
give the usual ones a rule of their own.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
from dataclasses import dataclass
from typing import Any, Final, NoReturn

from attnrepro import jsonio
from attnrepro.errors import InvalidDocument, Rejected

MEDIA_TYPE: Final = "application/vnd.dev.sigstore.bundle.v0.3+json"
PAYLOAD_TYPE: Final = "application/vnd.in-toto+json"


@dataclass(frozen=True, kw_only=True)
class Bundle:
    """The parts of a bundle; nothing in them is verified yet."""

    payload: bytes
    signature: bytes
    hint: str
    """base64 of the SHA-256 of the signer's DER."""

    def to_bytes(self) -> bytes:
        """The canonical bundle."""
        envelope = {
            "payload": _encode(self.payload),
            "payloadType": PAYLOAD_TYPE,
            # No keyid: cosign and securesystemslib disagree about what it must hold.
            "signatures": [{"sig": _encode(self.signature)}],
        }
        return jsonio.canonical(
            {
                "mediaType": MEDIA_TYPE,
                "verificationMaterial": {"publicKey": {"hint": self.hint}},
                "dsseEnvelope": envelope,
            }
        )


def pae(payload: bytes) -> bytes:
    """Pre-authentication encoding: what is signed."""
    kind = PAYLOAD_TYPE.encode()
    return b"DSSEv1 %d %s %d %s" % (len(kind), kind, len(payload), payload)


def hint_of(der: bytes) -> str:
    """The bundle's hint for a key, given its DER."""
    return _encode(hashlib.sha256(der).digest())


def parse(data: bytes) -> Bundle:
    """Read a bundle.

    Raises Rejected: `bundle.json`, `bundle.media_type`, `bundle.certificate`,
    `bundle.material`, `bundle.message_signature`, `bundle.payload_type`, `bundle.signatures`,
    `bundle.base64`, `bundle.canonical`.
    """
    try:
        value = jsonio.loads(data, what="bundle.sigstore.json")
    except InvalidDocument as error:
        raise Rejected(error.message, rule="bundle.json") from None
    root = _object(value, "the bundle", "json")
    if root.get("mediaType") != MEDIA_TYPE:
        _refuse("media_type", f"the bundle's mediaType is not {MEDIA_TYPE}")
    if "messageSignature" in root:
        _refuse("message_signature", "the bundle signs a message digest, not a statement")
    material = _object(root.get("verificationMaterial"), "verificationMaterial", "material")
    if any("ertificate" in key for key in material):
        _refuse("certificate", "the bundle carries a certificate; it would override the key")
    if set(material) != {"publicKey"}:
        _refuse("material", "verificationMaterial holds something other than publicKey")
    hint = _object(material["publicKey"], "publicKey", "material").get("hint")
    envelope = _object(root.get("dsseEnvelope"), "dsseEnvelope", "envelope")
    if envelope.get("payloadType") != PAYLOAD_TYPE:
        _refuse("payload_type", f"the envelope's payloadType is not {PAYLOAD_TYPE}")
    signatures = envelope.get("signatures")
    if not isinstance(signatures, list) or len(signatures) != 1:
        _refuse("signatures", "the envelope must hold exactly one signature")
    signature = _object(signatures[0], "the signature", "signatures").get("sig")
    bundle = Bundle(
        payload=_decode(envelope.get("payload"), "payload"),
        signature=_decode(signature, "sig"),
        hint=_encode(_decode(hint, "hint")),
    )
    if bundle.to_bytes() != data:
        _refuse("canonical", "the bundle is not in canonical form (fields, spelling or order)")
    return bundle


def _object(value: Any, name: str, rule: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        _refuse(rule, f"{name} is missing or no object")
    return value


def _encode(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


def _decode(text: object, name: str) -> bytes:
    try:
        if isinstance(text, str) and text:
            data = base64.b64decode(text.encode("ascii"), validate=True)
            if _encode(data) == text:
                return data
    except (binascii.Error, ValueError):
        pass
    message = f"{name} is not standard base64 in its one spelling"
    raise Rejected(message, rule="bundle.base64")


def _refuse(rule: str, message: str) -> NoReturn:
    raise Rejected(message, rule=f"bundle.{rule}")
