"""Bundles and statements that say something else than they seem; validly signed where possible."""

from __future__ import annotations

import base64
import hashlib
import json
from typing import TYPE_CHECKING, Any

import pytest

from attnrepro import jsonio
from attnrepro.artifact import bundle
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


# Changes of the parsed bundle, written canonically again.


def _both(envelope: dict[str, Any]) -> None:
    envelope["messageSignature"] = {"messageDigest": {"algorithm": "SHA2_256"}, "signature": ""}


def _certificate(envelope: dict[str, Any]) -> None:
    envelope["verificationMaterial"]["certificate"] = {"rawBytes": "MIIB"}


def _chain(envelope: dict[str, Any]) -> None:
    envelope["verificationMaterial"] = {"x509CertificateChain": {"certificates": []}}


def _tlog(envelope: dict[str, Any]) -> None:
    envelope["verificationMaterial"]["tlogEntries"] = []


def _twice(envelope: dict[str, Any]) -> None:
    envelope["dsseEnvelope"]["signatures"] *= 2


def _second(envelope: dict[str, Any]) -> None:
    envelope["dsseEnvelope"]["signatures"].insert(0, {"sig": base64.b64encode(bytes(64)).decode()})


def _aliases(envelope: dict[str, Any]) -> None:
    envelope["verificationMaterial"] = {"public_key": envelope["verificationMaterial"]["publicKey"]}


def _alias_besides(envelope: dict[str, Any]) -> None:
    envelope["dsse_envelope"] = envelope["dsseEnvelope"]


def _payload(change: Callable[[str], str]) -> Callable[[dict[str, Any]], None]:
    def apply(envelope: dict[str, Any]) -> None:
        envelope["dsseEnvelope"]["payload"] = change(envelope["dsseEnvelope"]["payload"])

    return apply


def _signature(change: Callable[[str], Any]) -> Callable[[dict[str, Any]], None]:
    def apply(envelope: dict[str, Any]) -> None:
        entry = envelope["dsseEnvelope"]["signatures"][0]
        entry["sig"] = change(entry["sig"])

    return apply


def _set(*path: str, value: Any) -> Callable[[dict[str, Any]], None]:
    def apply(envelope: dict[str, Any]) -> None:
        for name in path[:-1]:
            envelope = envelope[name]
        if value is ...:
            del envelope[path[-1]]
        else:
            envelope[path[-1]] = value

    return apply


V02 = "application/vnd.dev.sigstore.bundle+json;version=0.2"
CHANGES: dict[str, tuple[Callable[[dict[str, Any]], None], str]] = {
    "certificate": (_certificate, "bundle.certificate"),
    "certificate chain": (_chain, "bundle.certificate"),
    "transparency log": (_tlog, "bundle.material"),
    "no material": (_set("verificationMaterial", value=...), "bundle.material"),
    "no hint": (_set("verificationMaterial", "publicKey", value={}), "bundle.base64"),
    "hint of another key": (
        _set(
            "verificationMaterial",
            "publicKey",
            "hint",
            value=bundle.hint_of(example.signer(9).public.der),
        ),
        "key.hint",
    ),
    "no envelope": (_set("dsseEnvelope", value=...), "bundle.envelope"),
    "no signature": (_set("dsseEnvelope", "signatures", value=[]), "bundle.signatures"),
    "signatures is null": (_set("dsseEnvelope", "signatures", value=None), "bundle.signatures"),
    "the signature twice": (_twice, "bundle.signatures"),
    "two signatures": (_second, "bundle.signatures"),
    "empty signature": (_signature(lambda _: ""), "bundle.base64"),
    "zero signature": (
        _signature(lambda _: base64.b64encode(bytes(64)).decode()),
        "signature.invalid",
    ),
    "short signature": (
        _signature(lambda _: base64.b64encode(bytes(63)).decode()),
        "signature.invalid",
    ),
    "signature is a number": (_signature(lambda _: 7), "bundle.base64"),
    "payload type": (
        _set("dsseEnvelope", "payloadType", value="application/json"),
        "bundle.payload_type",
    ),
    "payload type in capitals": (
        _set("dsseEnvelope", "payloadType", value="application/vnd.in-toto+JSON"),
        "bundle.payload_type",
    ),
    "message signature besides": (_both, "bundle.message_signature"),
    "media type": (_set("mediaType", value=V02), "bundle.media_type"),
    "no media type": (_set("mediaType", value=...), "bundle.media_type"),
    "snake case": (_aliases, "bundle.material"),
    "snake case besides": (_alias_besides, "bundle.canonical"),
    "unknown field": (_set("extra", value=1), "bundle.canonical"),
    "field in the envelope": (_set("dsseEnvelope", "extra", value=1), "bundle.canonical"),
    "rekor key": (
        _set("verificationMaterial", "publicKey", "rawBytes", value="x"),
        "bundle.canonical",
    ),
    "newline in base64": (_payload(lambda text: text[:76] + "\n" + text[76:]), "bundle.base64"),
    "trailing newline in base64": (_payload(lambda text: text + "\n"), "bundle.base64"),
    "space in base64": (_payload(lambda text: " " + text), "bundle.base64"),
    "no padding": (_signature(lambda sig: sig.rstrip("=")), "bundle.base64"),
    "base64 bits after the end": (_signature(lambda sig: sig[:-3] + "B=="), "bundle.base64"),
    "base64url": (
        _payload(lambda text: text.replace("+", "-").replace("/", "_") + "--__"),
        "bundle.base64",
    ),
}


@pytest.mark.parametrize("case", CHANGES)
def test_changed_bundle(case: str, honest: bytes) -> None:
    change, rule = CHANGES[case]
    envelope = example.envelope(honest)
    change(envelope)
    assert rule_of(example.with_bundle(honest, jsonio.canonical(envelope))) == rule


def test_keyid(honest: bytes) -> None:
    envelope = example.envelope(honest)
    envelope["dsseEnvelope"]["signatures"][0]["keyid"] = ""
    assert rule_of(example.with_bundle(honest, jsonio.canonical(envelope))) == "bundle.canonical"


RAW: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "pretty-printed": (lambda data: json.dumps(json.loads(data), indent=1).encode(), "canonical"),
    "trailing newline": (lambda data: data + b"\n", "canonical"),
    "trailing data": (lambda data: data + b"{}", "json"),
    "byte-order mark": (lambda data: b"\xef\xbb\xbf" + data, "json"),
    "utf-16": (lambda data: data.decode().encode("utf-16"), "json"),
    "bad utf-8": (lambda data: data.replace(b'"hint"', b'"h\xffnt"'), "json"),
    "overlong utf-8": (lambda data: data.replace(b'"hint"', b'"h\xc0\xafnt"'), "json"),
    "lone surrogate": (lambda data: data.replace(b'"hint"', b'"h\\ud800nt"'), "json"),
    "escaped key": (lambda data: data.replace(b'"hint"', b'"h\\u0069nt"'), "canonical"),
    "key twice": (lambda data: data.replace(b'{"hint"', b'{"hint":"","hint"'), "json"),
    "key twice, once escaped": (
        lambda data: data.replace(b'{"hint"', b'{"h\\u0069nt":"","hint"'),
        "json",
    ),
    "NaN": (lambda data: data[:-1] + b',"x":NaN}', "json"),
    "1e400": (lambda data: data[:-1] + b',"x":1e400}', "json"),
    "beyond 2^53": (lambda data: data[:-1] + b',"x":9007199254740993}', "json"),
    "long integer": (lambda data: data[:-1] + b',"x":' + b"9" * 100_000 + b"}", "json"),
    "deep": (lambda data: data[:-1] + b',"x":' + b"[" * 90_000 + b"]" * 90_000 + b"}", "json"),
    "comment": (lambda data: data + b"//x", "json"),
    "an array": (lambda data: b"[" + data + b"]", "json"),
    "empty": (lambda data: b"", "json"),
    "fields reversed": (
        lambda data: json.dumps(
            dict(reversed(json.loads(data).items())), separators=(",", ":")
        ).encode(),
        "canonical",
    ),
}


@pytest.mark.parametrize("case", RAW)
def test_raw_bundle(case: str, honest: bytes) -> None:
    change, rule = RAW[case]
    forged = change(example.outer(honest)["bundle.sigstore.json"])
    assert rule_of(example.with_bundle(honest, forged)) == f"bundle.{rule}"


# Statements, signed with a real key over exactly these bytes.


def _statement(**changes: Any) -> Callable[[dict[str, Any]], bytes]:
    def apply(statement: dict[str, Any]) -> bytes:
        for name, value in changes.items():
            if value is ...:
                del statement[name]
            else:
                statement[name] = value
        return jsonio.canonical(statement)

    return apply


def _subject(change: Callable[[list[dict[str, Any]]], Any]) -> Callable[[dict[str, Any]], bytes]:
    def apply(statement: dict[str, Any]) -> bytes:
        subjects = statement["subject"]
        replaced = change(subjects)
        statement["subject"] = subjects if replaced is None else replaced
        return jsonio.canonical(statement)

    return apply


def _predicate(**changes: Any) -> Callable[[dict[str, Any]], bytes]:
    def apply(statement: dict[str, Any]) -> bytes:
        statement["predicate"].update(changes)
        return jsonio.canonical(statement)

    return apply


def _raw(change: Callable[[bytes], bytes]) -> Callable[[dict[str, Any]], bytes]:
    return lambda statement: change(jsonio.canonical(statement))


def _sha1(subjects: list[dict[str, Any]]) -> None:
    subjects[0]["digest"] = {"sha1": hashlib.sha1(b"x", usedforsecurity=False).hexdigest()}


def _sha1_besides(subjects: list[dict[str, Any]]) -> None:
    subjects[0]["digest"]["sha1"] = "0" * 40


def _capitals(subjects: list[dict[str, Any]]) -> None:
    subjects[0]["digest"]["sha256"] = subjects[0]["digest"]["sha256"].upper()


def _newline(subjects: list[dict[str, Any]]) -> None:
    subjects[0]["digest"]["sha256"] += "\n"


def _traversal(subjects: list[dict[str, Any]]) -> None:
    subjects[0]["name"] = "../content.zip"


def _other_content(subjects: list[dict[str, Any]]) -> None:
    subjects[0]["digest"]["sha256"] = "0" * 64


def _other_oci(subjects: list[dict[str, Any]]) -> None:
    subjects[1]["digest"]["sha256"] = "0" * 64


def _annotated(subjects: list[dict[str, Any]]) -> None:
    subjects[0]["uri"] = "https://example.org/"


RUN_TYPE = "urn:attnrepro:predicate:result:1"
RERUN_TYPE = "urn:attnrepro:predicate:rerun:1"
STATEMENTS: dict[str, tuple[Callable[[dict[str, Any]], bytes], str]] = {
    "_type v0.1": (_statement(_type="https://in-toto.io/Statement/v0.1"), "statement.type"),
    "no _type": (_statement(_type=...), "statement.type"),
    "predicate type": (
        _statement(predicateType="https://slsa.dev/provenance/v1"),
        "statement.predicate_type",
    ),
    "type of an older format": (
        _statement(predicateType="urn:attnrepro:predicate:result:0"),
        "statement.predicate_type",
    ),
    "type of a rerun": (_statement(predicateType=RERUN_TYPE), "statement.subject"),
    "no predicate": (_statement(predicate=...), "statement.schema"),
    "empty predicate": (_statement(predicate={}), "statement.schema"),
    "predicate is a list": (_statement(predicate=[]), "statement.schema"),
    "older schema": (_predicate(schema="attnrepro.statement/0"), "statement.schema"),
    "kind rerun": (_predicate(kind="rerun"), "statement.kind"),
    "unknown field": (_predicate(note="trust me"), "statement.schema"),
    "checks switched off": (_predicate(skip_checks=True), "statement.schema"),
    "a real number": (_predicate(device_class={"ratio": 1.5}), "statement.real"),
    "host engine contained": (
        _predicate(containment={"engine": "host", "contained": True, "options": []}),
        "statement.schema",
    ),
    "another manifest": (_predicate(manifest_sha256="0" * 64), "crosscheck.manifest"),
    "another section": (
        _predicate(
            repeatable=dict.fromkeys(("inputs", "semantics", "outputs", "execution"), "0" * 64)
        ),
        "crosscheck.repeatable",
    ),
    "better summary": (
        _predicate(summary={"passed": 3, "failed": 0, "unsupported": 0}),
        "crosscheck.summary",
    ),
    "contained after all": (
        _predicate(containment={"engine": "docker", "contained": True, "options": []}),
        "crosscheck.containment",
    ),
    "another runner": (
        _predicate(runner={"version": "0.1.0", "sha256": "0" * 64}),
        "crosscheck.runner",
    ),
    "no subject": (_statement(subject=[]), "statement.subject"),
    "one subject": (_subject(lambda s: s[:1]), "statement.subject"),
    "the subject twice": (_subject(lambda s: [s[0], s[0]]), "statement.subject"),
    "a third subject": (_subject(lambda s: [*s, s[0]]), "statement.subject"),
    "subjects swapped": (_subject(lambda s: s[::-1]), "statement.subject"),
    "subject is no list": (_subject(lambda s: {"0": s[0]}), "statement.subject"),
    "sha1 only": (_subject(_sha1), "statement.subject"),
    "sha1 besides": (_subject(_sha1_besides), "statement.subject"),
    "capital hex": (_subject(_capitals), "statement.subject"),
    "newline after hex": (_subject(_newline), "statement.subject"),
    "../ in the name": (_subject(_traversal), "statement.subject"),
    "field in the subject": (_subject(_annotated), "statement.canonical"),
    "other content": (_subject(_other_content), "subject.content"),
    "other OCI digest": (_subject(_other_oci), "subject.oci"),
    "field in the statement": (_statement(extra=1), "statement.canonical"),
    "pretty-printed": (
        lambda statement: json.dumps(statement, indent=2).encode(),
        "statement.canonical",
    ),
    "byte-order mark": (_raw(lambda data: b"\xef\xbb\xbf" + data), "statement.json"),
    "bad utf-8": (
        _raw(lambda data: data.replace(b"manifest", b"manif\xffst", 1)),
        "statement.json",
    ),
    "lone surrogate": (
        _raw(lambda data: data.replace(b'"A CPU"', b'"\\ud800"')),
        "statement.json",
    ),
    "NaN": (_raw(lambda data: data.replace(b'"threads":2', b'"threads":NaN')), "statement.json"),
    "1e400": (
        _raw(lambda data: data.replace(b'"threads":2', b'"threads":1e400')),
        "statement.json",
    ),
    "2.0 for 2": (
        _raw(lambda data: data.replace(b'"threads":2', b'"threads":2.0')),
        "statement.canonical",
    ),
    "beyond 2^53": (
        _raw(lambda data: data.replace(b'"threads":2', b'"threads":9007199254740992')),
        "statement.json",
    ),
    "deep": (
        _raw(lambda data: data.replace(b'"A CPU"', b"[" * 5000 + b"]" * 5000)),
        "statement.json",
    ),
    "key twice": (
        _raw(lambda data: data.replace(b'"kind":"run"', b'"kind":"rerun","kind":"run"')),
        "statement.json",
    ),
    "trailing data": (_raw(lambda data: data + b" "), "statement.canonical"),
    "second document": (_raw(lambda data: data + data), "statement.json"),
    "not JSON": (lambda _: b"\x80\x04K\x01.", "statement.json"),
    "null": (lambda _: b"null", "statement.type"),
}


@pytest.mark.parametrize("case", STATEMENTS)
def test_signed_statement(case: str, honest: bytes) -> None:
    change, rule = STATEMENTS[case]
    forged = change(example.payload(honest))
    assert rule_of(example.resigned(honest, forged)) == rule


def test_signing_again_changes_nothing(honest: bytes) -> None:
    """The helper of the cases above is honest where the statement is: Ed25519 is deterministic."""
    assert example.resigned(honest, jsonio.canonical(example.payload(honest))) == honest


def test_bundle_of_another_artifact(honest: bytes) -> None:
    files = {**example.files(), "logs/flash-0.txt": b"another run\n"}
    other = example.artifact(files=files)
    assert (
        rule_of(example.with_bundle(honest, example.outer(other)["bundle.sigstore.json"]))
        == "subject.content"
    )
