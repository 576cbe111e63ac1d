"""What verify says: one JSON document, and the same in words."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Any, Final

from attnrepro.artifact.statement import Kind
from attnrepro.artifact.trust import SELF
from attnrepro.artifact.verify import CONTENT

if TYPE_CHECKING:
    from collections.abc import Mapping

    from attnrepro.artifact.verify import Support, Verified

TRUSTED_ROOT: Final = '{"mediaType":"application/vnd.dev.sigstore.trustedroot+json;version=0.1"}'
"""A trusted root without authorities: cosign then asks no server and trusts the given key only."""

UNSQUEEZE: Final = f"xz -dkf {CONTENT}"
"""Makes content.zip, in place of one that an earlier artifact left there."""


def document(
    verified: Verified, *, file: str, known: Mapping[str, str], support: Support
) -> dict[str, Any]:
    """Everything that verify found.

    Args:
        verified: the result.
        file: the path as given.
        known: shipped keys, fingerprint → name.
        support: who else stands behind the content.
    """
    return {
        "file": file,
        "verdict": "trusted" if verified.trusted else "unknown_signer",
        "exit_code": 0 if verified.trusted else 3,
        "rule": None if verified.trusted else "signer.unknown",
        "kind": verified.kind.value,
        "signer": {
            "fingerprint": verified.signer.fingerprint,
            "algorithm": verified.signer.algorithm.value,
            "trusted": verified.trusted,
            "owner": verified.owner,
            "known_as": known.get(verified.signer.fingerprint),
        },
        "content_sha256": verified.statement.content_sha256,
        "oci_manifest_digest": f"sha256:{verified.statement.oci_manifest_sha256}",
        "original_content_sha256": verified.statement.original_sha256,
        "predicate": verified.predicate,
        "checks": list(verified.checks),
        "support": {
            "owners": list(support.owners),
            "independent_reruns": list(support.independent),
            "not_counted": list(support.ignored),
        },
        "without_attnrepro": commands(verified, file),
    }


def commands(verified: Verified, file: str) -> list[str]:
    """Shell lines that check the signature with unzip, xz and stock cosign, offline."""
    return [
        f"unzip -o -d check {shlex.quote(file)} && cd check",
        UNSQUEEZE,
        f"echo '{TRUSTED_ROOT}' > root.json",
        cosign_line(verified.kind),
    ]


def cosign_line(kind: Kind) -> str:
    """The cosign command, to be run where the artifact was unpacked."""
    return (
        "cosign verify-blob-attestation --trusted-root root.json --key signer.pub "
        f"--type {kind.predicate_type} --insecure-ignore-tlog "
        "--bundle bundle.sigstore.json content.zip"
    )


def text(found: Mapping[str, Any]) -> str:
    """`document` in words."""
    signer, predicate = found["signer"], found["predicate"]
    lines = [f"intact: {found['kind']} statement, content sha256:{found['content_sha256']}"]
    lines += _who(signer)
    lines += _what(predicate)
    if predicate["kind"] == Kind.RERUN.value:
        lines.append(f"  repeats     sha256:{found['original_content_sha256']}")
    lines += verdict_lines(predicate)
    support = found["support"]
    if support["independent_reruns"]:
        lines.append(f"  seconded by {', '.join(support['independent_reruns'])}")
    lines += [f"  not counted: {reason}" for reason in support["not_counted"]]
    lines.append(f"  checked     {', '.join(found['checks'])}")
    lines += ["", "the signature without attnrepro:"]
    lines += [f"  {line}" for line in found["without_attnrepro"]]
    return "\n".join(lines)


def verdict_lines(predicate: Mapping[str, Any]) -> list[str]:
    """The verdicts of a rerun, one line each; none for a run."""
    return [
        f"  {name.replace('_', '-'):<24}{_verdict(verdict)}"
        for name, verdict in predicate.get("verdicts", {}).items()
    ]


def signer_line(verified: Verified) -> str:
    """Who signed, in one line."""
    key = f"{verified.signer.algorithm.value} sha256:{verified.signer.fingerprint}"
    if not verified.trusted:
        return f"signer unknown: anyone can make such a file ({key})"
    return f"signed by {'yourself' if verified.owner == SELF else verified.owner} ({key})"


def unknown_signer(found: Mapping[str, Any]) -> tuple[str, str]:
    """Message and hint for a key that the trust file does not hold."""
    fingerprint = found["signer"]["fingerprint"]
    message = f"intact, but the signer is unknown: anyone can make such a file ({fingerprint})"
    hint = (
        "if you have the fingerprint from its owner by another way, then: "
        f"attnrepro trust add {shlex.quote(found['file'])} --owner NAME"
    )
    return message, hint


def _who(signer: Mapping[str, Any]) -> list[str]:
    if signer["owner"] == SELF:
        lines = ["trusted: signed by yourself"]
    elif signer["trusted"]:
        lines = [f"trusted: signed by {signer['owner']}"]
    else:
        lines = ["not trusted: the key is not in your trust file"]
        if signer["known_as"]:
            lines.append(f"  known as    {signer['known_as']} (ships with attnrepro; not trusted)")
    return [*lines, f"  key         {signer['algorithm']} sha256:{signer['fingerprint']}"]


def _what(predicate: Mapping[str, Any]) -> list[str]:
    summary, containment = predicate["summary"], predicate["containment"]
    lines = [
        f"  cells       {summary['passed']} passed, {summary['failed']} failed, "
        f"{summary['unsupported']} unsupported",
        f"  tool        {predicate['tool']['name']} {predicate['tool']['version']}, "
        f"runner sha256:{predicate['runner']['sha256'][:16]}…",
    ]
    if containment["contained"]:
        lines.append(f"  contained   by {containment['engine']}")
    else:
        lines.append("  contained   NO: it ran without a container")
    lines += [
        f"  image       {image['stack']}/{image['revision']} {image['manifest_digest']}"
        for image in predicate["images"]
    ]
    device = ", ".join(f"{key} {value}" for key, value in predicate["device_class"].items())
    return [*lines, f"  device      {device}"]


def _verdict(verdict: Mapping[str, Any]) -> str:
    words = {"yes": "yes", "no": "NO", "not_comparable": "not comparable"}[verdict["result"]]
    scope = "" if verdict["required"] or verdict["result"] != "no" else " (outside the scope)"
    difference = f"; first difference: {verdict['first_difference']}"
    shown = difference if verdict["first_difference"] else ""
    return f"{words}{scope}: {verdict['reason']}{shown}"
