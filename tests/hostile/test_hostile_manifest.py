"""Foreign manifests inside a validly signed artifact: none of them gets past verify."""

from __future__ import annotations

import copy
import hashlib
from typing import TYPE_CHECKING, Any

import pytest

from attnrepro import jsonio
from attnrepro.artifact import container, sign
from attnrepro.artifact.trust import TrustStore
from attnrepro.artifact.verify import verify
from attnrepro.distribute import oci
from attnrepro.errors import Rejected
from support import example

if TYPE_CHECKING:
    from collections.abc import Callable


@pytest.fixture(scope="module")
def honest() -> bytes:
    return example.artifact()


def _with_manifest(honest: bytes, manifest: bytes) -> bytes:
    """The artifact with this manifest; digests and signature fit."""
    members = example.members(honest)
    members["manifest.json"] = manifest
    content = container.write(members)
    digest = hashlib.sha256(content).hexdigest()
    statement = example.payload(honest)
    statement["subject"][0]["digest"]["sha256"] = digest
    statement["subject"][1]["digest"]["sha256"] = oci.manifest_sha256(digest, len(content))
    statement["predicate"]["manifest_sha256"] = hashlib.sha256(manifest).hexdigest()
    return sign.sign_payload(jsonio.canonical(statement), content, example.signer())


def _set(pointer: str, value: Any) -> Callable[[dict[str, Any]], None]:
    *path, last = pointer.split("/")[1:]

    def apply(manifest: dict[str, Any]) -> None:
        place: Any = manifest
        for name in path:
            place = place[int(name) if isinstance(place, list) else name]
        place[int(last) if isinstance(place, list) else last] = value

    return apply


CASES: dict[str, Callable[[dict[str, Any]], None]] = {
    "image by tag": _set("/image", {"stack": "debian:latest", "revision": None, "digest": None}),
    "image by name": _set("/image", "debian:12"),
    "image digest of another kind": _set("/image/digest", "sha1:" + "0" * 40),
    "stack that begins with -": _set("/image/stack", "--privileged"),
    "stack outside": _set("/image/stack", "../../etc"),
    "name that begins with -": _set("/name", "-rf"),
    "name with a path": _set("/name", "../../home/x"),
    "title that begins with -": _set("/title", "--output=/etc/passwd"),
    "title with escapes": _set("/title", "\x1b[2J"),
    "mounts": _set("/mounts", ["/:/host"]),
    "privileged": _set("/image/privileged", True),
    "environment": _set("/environment", {"LD_PRELOAD": "/tmp/x.so"}),
    "environment of a subject": _set("/subjects/0/env", {"LD_PRELOAD": "x"}),
    "option that is none": _set("/subjects/0/options/LD_PRELOAD", "x"),
    "dockerfile": _set("/image/dockerfile", "# syntax=evil/frontend"),
    "remote add": _set("/image/add", "https://example.org/x.tar"),
    "output path": _set("/output", "/etc/cron.d/x"),
    "pickle": _set("/inputs/pickle", "gASV"),
    "generator of another name": _set("/inputs/generator", "file:///etc/passwd"),
    "skip checks": _set("/skip_checks", True),
    "oracle off": _set("/accuracy/rule", "none"),
    "multiplier without a bound": _set("/accuracy/output", {"multiplier": 10**6}),
    "10^12 repetitions": _set("/bits/repeats", 10**12),
    "10^12 launches": _set("/timing/launches", 10**12),
    "shapes that overflow": _set("/workload/seqlen_k", 2**53 - 1),
    "product that overflows": _set("/workload/batch", 65535 * 65535),
    "zero": _set("/workload/head_dim", 0),
    "negative": _set("/workload/batch", -1),
    "heads that do not divide": _set("/workload/heads_kv", 3),
    "bare causal": lambda manifest: manifest["workload"].update(
        seqlen_k=128, mask={**manifest["workload"]["mask"], "causal": True}
    ),
    "backend with a path": _set("/subjects/0/backend", "../x"),
    "subject twice": _set("/subjects/1/id", "flash"),
    "huge sweep": _set("/sweep", {"/workload/batch": list(range(1, 100_000))}),
    "sweep of the image": _set("/sweep", {"/image/stack": ["a", "b"]}),
    "older schema": _set("/schema", "attnrepro.manifest/0"),
    "a default left out": lambda manifest: manifest.pop("limits"),
}


@pytest.mark.parametrize("case", CASES)
def test_signed_hostile_manifest(case: str, honest: bytes) -> None:
    manifest = copy.deepcopy(example.manifest())
    CASES[case](manifest)
    with pytest.raises(Rejected) as caught:
        verify(_with_manifest(honest, jsonio.canonical(manifest)), trust=TrustStore())
    expected = {"schema.manifest", "manifest.invalid"}
    if case == "a default left out":
        expected = {"manifest.canonical"}
    assert caught.value.rule in expected


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        (lambda data: b"[" * 5000 + data, "content.json"),
        (lambda data: data.replace(b'"batch":1', b'"batch":1,"batch":1'), "content.json"),
        (lambda data: data.replace(b'"batch":1', b'"batch":NaN'), "content.json"),
        (lambda data: data.replace(b'"batch":1', b'"batch":1e400'), "content.json"),
        (lambda data: data.replace(b'"batch":1', b'"batch":1.0'), "content.canonical"),
        (lambda data: data.replace(b'"batch":1', b'"batch":1e0'), "content.canonical"),
        (lambda data: data.replace(b'"batch":1', b'"batch": 1'), "content.canonical"),
        (lambda data: b"\xef\xbb\xbf" + data, "content.json"),
        (lambda data: b"\x80\x04K\x01.", "content.json"),
    ],
)
def test_other_spellings(honest: bytes, change: Callable[[bytes], bytes], rule: str) -> None:
    forged = change(jsonio.canonical(example.manifest()))
    with pytest.raises(Rejected) as caught:
        verify(_with_manifest(honest, forged), trust=TrustStore())
    assert caught.value.rule == rule


def test_another_valid_manifest_does_not_fit(honest: bytes) -> None:
    other = example.manifest(subjects=example.written()["subjects"][:1])
    with pytest.raises(Rejected) as caught:
        verify(_with_manifest(honest, jsonio.canonical(other)), trust=TrustStore())
    assert caught.value.rule in {"crosscheck.ro_crate", "crosscheck.cells"}
