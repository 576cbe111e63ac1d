"""The in-toto statement: what is signed about a content, and its strict reading.

Statement v1 with a predicate of our own. Two kinds: a run, about its own content; a rerun, about
the original's content as well, so that a result collects statements from independent people.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final, NoReturn

from attnrepro import jsonio, schema
from attnrepro.artifact.content import find_real
from attnrepro.errors import InvalidDocument, Rejected

STATEMENT_TYPE: Final = "https://in-toto.io/Statement/v1"
SCHEMA: Final = "attnrepro.statement/1"

CONTENT_SUBJECT: Final = "content.zip"
OCI_SUBJECT: Final = "oci-manifest"
ORIGINAL_SUBJECT: Final = "original-content.zip"


class Kind(StrEnum):
    """Kinds of statement."""

    RUN = "run"
    RERUN = "rerun"

    @property
    def predicate_type(self) -> str:
        """URI of the predicate; it needs no domain."""
        return _PREDICATE_TYPES[self]


_PREDICATE_TYPES: Final = {
    Kind.RUN: "urn:attnrepro:predicate:result:1",
    Kind.RERUN: "urn:attnrepro:predicate:rerun:1",
}


@dataclass(frozen=True, kw_only=True)
class Statement:
    """A statement; `check_predicate` says whether its predicate is valid."""

    kind: Kind
    predicate: dict[str, Any]
    content_sha256: str
    oci_manifest_sha256: str
    original_sha256: str | None = None
    """Content digest of the run that a rerun repeats; None for a run."""

    def document(self) -> dict[str, Any]:
        """The JSON object that is signed."""
        digests = [(CONTENT_SUBJECT, self.content_sha256), (OCI_SUBJECT, self.oci_manifest_sha256)]
        if self.original_sha256 is not None:
            digests.insert(0, (ORIGINAL_SUBJECT, self.original_sha256))
        return {
            "_type": STATEMENT_TYPE,
            "subject": [{"name": name, "digest": {"sha256": value}} for name, value in digests],
            "predicateType": self.kind.predicate_type,
            "predicate": self.predicate,
        }

    def to_bytes(self) -> bytes:
        """RFC 8785 bytes: the DSSE payload."""
        return jsonio.canonical(self.document())


def parse(payload: bytes) -> Statement:
    """Read a payload whose signature has been checked.

    Raises Rejected: `statement.json`, `.type`, `.predicate_type`, `.subject`, `.schema`, `.kind`,
    `.canonical`.
    """
    try:
        document = jsonio.loads(payload, what="the statement")
    except InvalidDocument as error:
        raise Rejected(error.message, rule="statement.json") from None
    if not isinstance(document, dict) or document.get("_type") != STATEMENT_TYPE:
        _refuse("type", "the payload is no in-toto Statement v1")
    kinds = {kind.predicate_type: kind for kind in Kind}
    kind = kinds.get(str(document.get("predicateType")))
    if kind is None:
        _refuse("predicate_type", "the predicate type is none that this release knows")
    names = [CONTENT_SUBJECT, OCI_SUBJECT]
    if kind is Kind.RERUN:
        names.insert(0, ORIGINAL_SUBJECT)
    digests = _subjects(document.get("subject"), names)
    predicate = document.get("predicate")
    if not isinstance(predicate, dict) or predicate.get("schema") != SCHEMA:
        _refuse("schema", f"the predicate's schema is not {SCHEMA}")
    if predicate.get("kind") != kind.value:
        _refuse("kind", "the predicate's kind is not the one that its type names")
    statement = Statement(
        kind=kind,
        predicate=predicate,
        content_sha256=digests[CONTENT_SUBJECT],
        oci_manifest_sha256=digests[OCI_SUBJECT],
        original_sha256=digests.get(ORIGINAL_SUBJECT),
    )
    if statement.to_bytes() != payload:
        _refuse("canonical", "the statement is not in canonical form, or has further fields")
    return statement


def check_predicate(statement: Statement) -> None:
    """Hold the predicate against its schema. Raises Rejected (`statement.real`, `.schema`)."""
    if pointer := find_real(statement.predicate):
        _refuse("real", f"the predicate holds a real number at {pointer}")
    if problems := schema.validate("statement", statement.predicate):
        message = f"the predicate is not valid: {problems[0].line()}"
        raise Rejected(message, rule="statement.schema", problems=problems)


def _subjects(value: object, names: list[str]) -> dict[str, str]:
    if not isinstance(value, list) or len(value) != len(names):
        _refuse("subject", f"the statement must have {len(names)} subjects")
    digests = {}
    for item, name in zip(value, names, strict=True):
        digest = item.get("digest") if isinstance(item, dict) else None
        if not isinstance(digest, dict) or item.get("name") != name or set(digest) != {"sha256"}:
            _refuse("subject", f"expected the subject {name} with a sha256 digest only")
        text = digest["sha256"]
        if not isinstance(text, str) or len(text) != 64 or set(text) - set("0123456789abcdef"):
            _refuse("subject", f"the digest of {name} is not lower-case hex of 64 digits")
        digests[name] = text
    return digests


def _refuse(rule: str, message: str) -> NoReturn:
    raise Rejected(message, rule=f"statement.{rule}")
