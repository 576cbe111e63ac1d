"""Is this file what a key that I trust signed, whole and consistent?

Order: size → outer container → bundle → signature over the raw bytes → only then the payload →
content.zip unpacked, and its digest → inner container → schemas → cross-checks. Nothing is written
to disk and nothing is executed. Works on any system with Python, `cryptography`, `rfc8785` and
`jsonschema`.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final, NoReturn

from attnrepro import jsonio, schema
from attnrepro.artifact import bundle, container, content, crosscheck, rocrate, squeeze
from attnrepro.artifact.budget import Budget, read_once
from attnrepro.artifact.public_key import PublicKey, parse_signer_pub
from attnrepro.artifact.statement import SCHEMA, Kind, Statement, check_predicate, parse
from attnrepro.artifact.trust import Standing, TrustStore, independent_owners
from attnrepro.distribute import oci
from attnrepro.errors import InvalidDocument, Rejected
from attnrepro.manifest import load as load_manifest

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from attnrepro.manifest import Manifest

BUNDLE: Final = "bundle.sigstore.json"
CONTENT: Final = "content.zip" + squeeze.SUFFIX
SIGNER: Final = "signer.pub"

_DOCUMENTS: Final = {
    SCHEMA: {
        content.MANIFEST: "manifest",
        content.REPEATABLE: "repeatable",
        content.OBSERVATIONS: "observations",
    },
}
"""Which schemas belong to which version of the statement, so that no part can be an older one."""


@dataclass(frozen=True, kw_only=True)
class Verified:
    """An artifact that passed every check; whether its signer is trusted is said apart."""

    statement: Statement
    members: Mapping[str, bytes]
    """Members of content.zip."""
    documents: Mapping[str, Any]
    """Parsed `manifest.json`, `repeatable.json`, `observations.json`."""
    outer: Mapping[str, bytes]
    """Members of the file itself."""
    signer: PublicKey
    trusted: bool
    owner: str | None
    """Owner of the key in the verifier's trust file; None where it is unknown."""
    checks: tuple[str, ...]
    """What was checked, in order."""

    @property
    def kind(self) -> Kind:
        """Run or rerun."""
        return self.statement.kind

    @property
    def predicate(self) -> dict[str, Any]:
        """The signed predicate."""
        return self.statement.predicate

    @property
    def manifest(self) -> dict[str, Any]:
        """The manifest as run."""
        return self._document(content.MANIFEST)

    @property
    def repeatable(self) -> dict[str, Any]:
        """What must repeat."""
        return self._document(content.REPEATABLE)

    @property
    def observations(self) -> dict[str, Any]:
        """What was seen."""
        return self._document(content.OBSERVATIONS)

    def _document(self, name: str) -> dict[str, Any]:
        document = self.documents[name]
        assert isinstance(document, dict)
        return document


def verify(
    source: Path | bytes,
    *,
    trust: TrustStore,
    budget: Budget | None = None,
    now: datetime | None = None,
) -> Verified:
    """Verify one artifact.

    Args:
        source: the file, or its bytes. A file is read once, through one descriptor.
        trust: the verifier's own trust file.
        budget: size limits; 128 MiB of content by default.
        now: time at which keys must be valid; the clock's by default.

    Returns:
        The verified parts. A key that the trust file does not hold gives `trusted=False`.

    Raises:
        Rejected: with the id of the first rule that fails.
        UsageError: the path cannot be opened.
    """
    budget = budget or Budget()
    data = source if isinstance(source, bytes) else read_once(source, budget)
    if len(data) > budget.file:
        _refuse("input.too_large", "the file is larger than the budget")
    checks = ["size"]

    outer = container.read(data, budget=budget)
    if set(outer) != {BUNDLE, CONTENT, SIGNER}:
        _refuse("outer.members", f"the file must hold exactly {BUNDLE}, {CONTENT} and {SIGNER}")
    if len(outer[BUNDLE]) > budget.bundle:
        _refuse("outer.size", "the bundle is larger than the budget")
    checks.append("outer container")

    signed = bundle.parse(outer[BUNDLE])
    key = parse_signer_pub(outer[SIGNER])
    if signed.hint != bundle.hint_of(key.der):
        _refuse("key.hint", "the carried key is not the one that the bundle names")
    key.verify(signed.signature, bundle.pae(signed.payload))
    checks += ["bundle", "signature"]
    owner = _owner(key, trust, now or datetime.now(UTC))

    claim = parse(signed.payload)
    content_zip = squeeze.unsqueeze(outer[CONTENT], what="content.zip", limit=budget.content)
    digest = hashlib.sha256(content_zip).hexdigest()
    if claim.content_sha256 != digest:
        _refuse("subject.content", "the statement is about another content.zip")
    if claim.oci_manifest_sha256 != oci.manifest_sha256(digest, len(content_zip)):
        _refuse("subject.oci", "the statement's OCI digest is not the one of this content")
    checks += ["statement", "content digest"]

    members = container.read(content_zip, budget=budget)
    checks.append("content container")
    documents = _documents(members, claim, budget)
    manifest = _manifest(members[content.MANIFEST])
    checks.append("schemas")
    crosscheck.check(members, documents, manifest, claim)
    checks.append("cross-checks")
    return Verified(
        statement=claim,
        members=members,
        documents=documents,
        outer=outer,
        signer=key,
        trusted=owner is not None,
        owner=owner,
        checks=tuple(checks),
    )


@dataclass(frozen=True, kw_only=True)
class Support:
    """Who else stands behind a content."""

    owners: tuple[str, ...]
    """Distinct trusted owners, the original's among them if it is trusted."""
    independent: tuple[str, ...]
    """Those of reruns with identical outputs, without the original's owner."""
    ignored: tuple[str, ...]
    """Why a given rerun was not counted, one line each."""


def support(
    original: Verified,
    reruns: Sequence[Verified],
    *,
    trust: TrustStore,
    now: datetime | None = None,
) -> Support:
    """Count the distinct trusted owners behind a content.

    A rerun counts if it is about this content, its outputs are identical, and its key is trusted.
    Reruns by the owner of the original are not independent.
    """
    now = now or datetime.now(UTC)
    counted, ignored = [], []
    for number, rerun in enumerate(reruns, 1):
        if rerun.kind is not Kind.RERUN:
            ignored.append(f"rerun {number} is the statement of a run, not of a rerun")
        elif rerun.statement.original_sha256 != original.statement.content_sha256:
            ignored.append(f"rerun {number} is about another content")
        elif rerun.predicate["verdicts"]["outputs_identical"]["result"] != "yes":
            ignored.append(f"rerun {number} does not say that the outputs are identical")
        elif not rerun.trusted:
            ignored.append(f"rerun {number} is by an unknown key")
        elif rerun.signer == original.signer or _same(rerun.owner, original.owner):
            ignored.append(f"rerun {number} is by the original's owner")
        else:
            counted.append(rerun.signer)
    independent = independent_owners(trust, counted, now)
    owners = independent_owners(trust, [*counted, original.signer], now)
    return Support(owners=tuple(owners), independent=tuple(independent), ignored=tuple(ignored))


def check_threshold(backing: Support, store: TrustStore) -> None:
    """Raises Rejected (`trust.threshold`) where fewer owners stand behind it than asked for."""
    if len(backing.owners) < store.threshold:
        _refuse(
            "trust.threshold",
            f"your trust file asks for {store.threshold} distinct owners; "
            f"{len(backing.owners)} signed about this content (give more with --rerun)",
        )


def _same(first: str | None, second: str | None) -> bool:
    return first is not None and second is not None and first.casefold() == second.casefold()


def _owner(key: PublicKey, trust: TrustStore, now: datetime) -> str | None:
    """Owner of a trusted key, None of an unknown one. Raises Rejected for the rest (`trust.*`)."""
    entry = trust.find(key.fingerprint)
    if entry is None:
        return None
    standing = entry.standing(now)
    if standing is Standing.TRUSTED:
        return entry.owner
    if standing is Standing.REVOKED:
        _refuse("trust.revoked", f"the key of {entry.owner} was revoked: {entry.revoked_reason}")
    limit = entry.not_after if standing is Standing.EXPIRED else entry.not_before
    message = f"the key of {entry.owner} is outside its validity ({standing.value}: {limit})"
    raise Rejected(message, rule=f"trust.{standing.value}")


def _documents(members: Mapping[str, bytes], claim: Statement, budget: Budget) -> dict[str, Any]:
    """Parse and validate the predicate and the JSON members.

    Raises Rejected (`statement.*`, `content.*`, `schema.*`).
    """
    check_predicate(claim)
    expected = set(content.REQUIRED)
    if claim.kind is Kind.RERUN:
        expected.add(content.VERDICTS)
    if missing := sorted(expected - set(members)):
        _refuse("content.missing", f"the content lacks {', '.join(missing)}")
    foreign = [name for name in members if not content.is_member_name(name)]
    if claim.kind is Kind.RUN and content.VERDICTS in members:
        foreign.append(content.VERDICTS)
    if foreign:
        _refuse("content.member", f"the content holds {foreign[0]}, which is no member of it")
    kinds = _DOCUMENTS[claim.predicate["schema"]]
    documents = {name: _parse(name, members[name], budget) for name in sorted(expected)}
    if content.SBOM in members:
        _parse(content.SBOM, members[content.SBOM], budget, canonical=False)
    for name, kind in kinds.items():
        document = documents[name]
        if name != content.MANIFEST and (pointer := content.find_real(document)):
            _refuse("content.real", f"{name} holds a real number at {pointer}")
        if problems := schema.validate(kind, document):
            message = f"{name} is not valid: {problems[0].line()}"
            raise Rejected(message, rule=f"schema.{kind}", problems=problems)
    if set(documents[content.REPEATABLE]) != {"schema", *content.SECTIONS}:
        _refuse("schema.repeatable", "repeatable.json has other sections than those signed")
    documents.pop(rocrate.NAME)
    return documents


def _manifest(data: bytes) -> Manifest:
    """The manifest by its own rules, in its one form. Raises Rejected (`manifest.*`)."""
    try:
        loaded = load_manifest(data)
    except InvalidDocument as error:
        problems, found = error.problems, error.message
        if problems:
            found = f"{found}: {problems[0].line()}"
        raise Rejected(found, rule="manifest.invalid", problems=problems) from None
    if loaded.canonical != data:
        _refuse("manifest.canonical", "the manifest does not spell out every default")
    return loaded


def _parse(name: str, data: bytes, budget: Budget, *, canonical: bool = True) -> Any:
    if len(data) > budget.json:
        _refuse("content.size", f"{name} is larger than the budget for JSON")
    try:
        value = jsonio.loads(data, what=name)
    except InvalidDocument as error:
        raise Rejected(error.message, rule="content.json") from None
    if canonical and jsonio.canonical(value) != data:
        _refuse("content.canonical", f"{name} is not in canonical form (RFC 8785)")
    return value


def _refuse(rule: str, message: str) -> NoReturn:
    raise Rejected(message, rule=rule)
