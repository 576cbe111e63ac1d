"""Making an artifact: content → statement → signature → one file."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from attnrepro import __version__, jsonio
from attnrepro.artifact import bundle, container, content, statement, verify
from attnrepro.artifact.budget import Budget
from attnrepro.artifact.squeeze import squeeze
from attnrepro.artifact.trust import TrustStore
from attnrepro.distribute import oci
from attnrepro.errors import InvalidDocument, Rejected

if TYPE_CHECKING:
    from attnrepro.artifact.keys import Signer
    from attnrepro.artifact.public_key import PublicKey

BUNDLE: Final = verify.BUNDLE
CONTENT: Final = verify.CONTENT
SIGNER: Final = verify.SIGNER


@dataclass(frozen=True, kw_only=True)
class Original:
    """The run that a rerun repeats, as its verification showed it."""

    content_sha256: str
    manifest_sha256: str
    signer: str
    """Fingerprint of its signer."""

    @classmethod
    def of(cls, verified: verify.Verified) -> Original:
        """The original of a rerun, from a verified artifact."""
        return cls(
            content_sha256=verified.statement.content_sha256,
            manifest_sha256=verified.predicate["manifest_sha256"],
            signer=verified.signer.fingerprint,
        )


def make_artifact(content_: content.Content, *, predicate: dict[str, Any], signer: Signer) -> bytes:
    """Sign a run; the bytes of NAME.attnrepro.

    Args:
        content_: what the run left behind.
        predicate: `images`, `runner`, `invocation`, `device_class`, `containment`, `redactions`.
            `schema`, `kind`, `tool`, `manifest_sha256`, `repeatable` and `summary` follow from the
            content and are filled in.
        signer: the user's key.

    Raises InvalidDocument where the result would not verify: nothing that our own verifier rejects
    is ever handed out.
    """
    return _make(content_, predicate, statement.Kind.RUN, signer, original=None)


def make_rerun(
    content_: content.Content,
    *,
    predicate: dict[str, Any],
    original: Original,
    verdicts: dict[str, Any],
    signer: Signer,
) -> bytes:
    """Sign a rerun; the bytes of NAME.rerun.attnrepro, whose first subject is the original.

    Args:
        content_: the rerun's own manifest, repeatable, observations and samples.
        predicate: as for `make_artifact`.
        original: what was rerun.
        verdicts: `authentic`, `image_identical`, `kernels_identical`, `outputs_identical`,
            `performance_consistent`; each `result` (yes, no, not_comparable), `required`, `reason`,
            `first_difference`.
        signer: the key of who reran it.

    Raises InvalidDocument as `make_artifact`.
    """
    files = {**content_.files, content.VERDICTS: jsonio.canonical(verdicts)}
    predicate = {
        **predicate,
        "verdicts": verdicts,
        "original": {
            "content_sha256": original.content_sha256,
            "manifest_sha256": original.manifest_sha256,
            "signer": original.signer,
        },
    }
    kind = statement.Kind.RERUN
    packed = replace(content_, files=files)
    return _make(packed, predicate, kind, signer, original=original.content_sha256)


def sign_payload(payload: bytes, content_zip: bytes, signer: Signer) -> bytes:
    """The file for a payload and a content, whatever they say."""
    key: PublicKey = signer.public
    signed = bundle.Bundle(
        payload=payload,
        signature=signer.sign(bundle.pae(payload)),
        hint=bundle.hint_of(key.der),
    )
    members = {BUNDLE: signed.to_bytes(), CONTENT: squeeze(content_zip), SIGNER: key.pem}
    return container.write(members)


def _make(
    packed: content.Content,
    predicate: dict[str, Any],
    kind: statement.Kind,
    signer: Signer,
    *,
    original: str | None,
) -> bytes:
    content_zip = packed.to_zip()
    digest = hashlib.sha256(content_zip).hexdigest()
    made = statement.Statement(
        kind=kind,
        predicate={
            **predicate,
            "schema": statement.SCHEMA,
            "kind": kind.value,
            "tool": {"name": "attnrepro", "version": __version__},
            "manifest_sha256": hashlib.sha256(packed.manifest).hexdigest(),
            "repeatable": content.section_digests(packed.repeatable),
            "summary": packed.observations["summary"],
        },
        content_sha256=digest,
        oci_manifest_sha256=oci.manifest_sha256(digest, len(content_zip)),
        original_sha256=original,
    )
    data = sign_payload(made.to_bytes(), content_zip, signer)
    try:
        verify.verify(data, trust=TrustStore(), budget=Budget(content=len(content_zip)))
    except Rejected as error:
        message = f"the artifact would not verify: {error.message}"
        raise InvalidDocument(message, rule=error.rule, problems=error.problems) from None
    return data
