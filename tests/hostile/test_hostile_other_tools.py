"""Stock tools agree: cosign of two Debian suites, oras, openssl, unzip, xz. All offline."""

from __future__ import annotations

import base64
import os
import shlex
import subprocess
from pathlib import Path  # noqa: TC003 - fixtures are annotated with it
from shutil import which
from typing import TYPE_CHECKING, Any

import pytest

from attnrepro import jsonio
from attnrepro.artifact import bundle, explain, sign
from attnrepro.artifact.statement import Kind
from attnrepro.artifact.trust import TrustStore
from attnrepro.artifact.verify import verify
from attnrepro.distribute import oci
from support import debs, example

if TYPE_CHECKING:
    from collections.abc import Callable


def _unpack(data: bytes, folder: Path) -> None:
    """The members as the printed lines leave them; they run in this folder."""
    for name, content in example.outer(data).items():
        (folder / name).write_bytes(content)
    (folder / "content.zip").write_bytes(example.content_zip(data))
    (folder / "root.json").write_text(explain.TRUSTED_ROOT)


@pytest.fixture(params=["trixie", "sid"])
def cosign(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[..., bool]:
    """Runs the printed line in `tmp_path`; the network is a closed door."""
    binary = debs.program(request.param, "cosign")
    nowhere = dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"), "http://127.0.0.1:9")
    environment = {"PATH": os.environ["PATH"], "HOME": str(tmp_path / "home"), **nowhere}

    def accepts(kind: Kind = Kind.RUN, *more: str) -> bool:
        words = shlex.split(explain.cosign_line(kind))
        assert words[0] == "cosign"
        done = subprocess.run(
            [str(binary), *words[1:], *more],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert ("Verified OK" in done.stderr + done.stdout) == (done.returncode == 0)
        return done.returncode == 0

    return accepts


@pytest.mark.slow
def test_cosign_accepts_what_we_sign(cosign: Callable[..., bool], tmp_path: Path) -> None:
    data = example.artifact()
    _unpack(data, tmp_path)
    assert cosign()
    assert cosign(Kind.RUN, "--new-bundle-format")
    _unpack(example.rerun(sign.Original.of(verify(data, trust=TrustStore()))), tmp_path)
    assert cosign(Kind.RERUN)
    # The first subject of a rerun is the original's content.
    (tmp_path / "content.zip").write_bytes(example.content_zip(data))
    assert cosign(Kind.RERUN)


@pytest.mark.slow
def test_cosign_accepts_p256(cosign: Callable[..., bool], tmp_path: Path) -> None:
    _unpack(example.artifact(example.p256_signer()), tmp_path)
    assert cosign()


def _bundle(change: Callable[[dict[str, Any]], None]) -> Callable[[bytes, Path], None]:
    def apply(data: bytes, folder: Path) -> None:
        envelope = example.envelope(data)
        change(envelope["dsseEnvelope"])
        (folder / "bundle.sigstore.json").write_bytes(jsonio.canonical(envelope))

    return apply


def _signature_bit(envelope: dict[str, Any]) -> None:
    raw = bytearray(base64.b64decode(envelope["signatures"][0]["sig"]))
    raw[5] ^= 1
    envelope["signatures"][0]["sig"] = base64.b64encode(raw).decode()


def _payload_bit(envelope: dict[str, Any]) -> None:
    raw = base64.b64decode(envelope["payload"]).replace(b'"passed":2', b'"passed":3')
    envelope["payload"] = base64.b64encode(raw).decode()


def _payload_type(envelope: dict[str, Any]) -> None:
    envelope["payloadType"] = "application/json"


def _no_signature(envelope: dict[str, Any]) -> None:
    envelope["signatures"] = []


def _content_bit(data: bytes, folder: Path) -> None:
    content = bytearray(example.content_zip(data))
    content[len(content) // 2] ^= 1
    (folder / "content.zip").write_bytes(content)


def _other_key(data: bytes, folder: Path) -> None:
    (folder / "signer.pub").write_bytes(example.signer(9).public.pem)


def _foreign_signature(data: bytes, folder: Path) -> None:
    parsed = bundle.parse(example.outer(data)["bundle.sigstore.json"])
    foreign = example.signer(9).sign(bundle.pae(parsed.payload))
    made = bundle.Bundle(payload=parsed.payload, signature=foreign, hint=parsed.hint)
    (folder / "bundle.sigstore.json").write_bytes(made.to_bytes())


@pytest.mark.slow
@pytest.mark.parametrize(
    "alter",
    [
        _bundle(_signature_bit),
        _bundle(_payload_bit),
        _bundle(_payload_type),
        _bundle(_no_signature),
        _content_bit,
        _other_key,
        _foreign_signature,
    ],
)
def test_cosign_rejects_what_is_altered(
    cosign: Callable[..., bool], tmp_path: Path, alter: Callable[[bytes, Path], None]
) -> None:
    data = example.artifact()
    _unpack(data, tmp_path)
    assert cosign()
    alter(data, tmp_path)
    assert not cosign()


@pytest.mark.slow
def test_oras_arrives_at_the_signed_digest(tmp_path: Path) -> None:
    binary = debs.program("trixie", "oras")
    data = example.artifact()
    _unpack(data, tmp_path)
    command = [str(binary), "push", "--oci-layout", "layout:v1"]
    command += ["--artifact-type", oci.ARTIFACT_TYPE]
    command += ["--annotation", f"org.opencontainers.image.created={oci.CREATED}"]
    command += [f"content.zip:{oci.CONTENT_TYPE}"]
    done = subprocess.run(
        command, cwd=tmp_path, check=True, capture_output=True, text=True, timeout=60
    )
    signed = verify(data, trust=TrustStore()).statement.oci_manifest_sha256
    assert f"sha256:{signed}" in done.stdout
    stored = (tmp_path / "layout" / "blobs" / "sha256" / signed).read_bytes()
    content = example.content_zip(data)
    digest = verify(data, trust=TrustStore()).statement.content_sha256
    assert stored == oci.manifest(digest, len(content))


@pytest.mark.skipif(which("openssl") is None, reason="openssl is not installed")
@pytest.mark.parametrize("p256", [False, True])
def test_openssl_agrees(tmp_path: Path, p256: bool) -> None:
    data = example.artifact(example.p256_signer() if p256 else None)
    _unpack(data, tmp_path)
    parsed = bundle.parse((tmp_path / "bundle.sigstore.json").read_bytes())
    (tmp_path / "signed").write_bytes(bundle.pae(parsed.payload))
    (tmp_path / "signature").write_bytes(parsed.signature)
    if p256:
        command = "openssl dgst -sha256 -verify signer.pub -signature signature signed"
    else:
        command = (
            "openssl pkeyutl -verify -pubin -inkey signer.pub -rawin -in signed -sigfile signature"
        )

    def holds() -> bool:
        return (
            subprocess.run(
                shlex.split(command), cwd=tmp_path, capture_output=True, timeout=20
            ).returncode
            == 0
        )

    assert holds()
    (tmp_path / "signed").write_bytes(bundle.pae(parsed.payload + b" "))
    assert not holds()


unpacks = pytest.mark.skipif(
    not all(which(name) for name in ("bash", "unzip", "xz")), reason="needs bash, unzip and xz"
)


@unpacks
def test_unzip_and_xz_agree(tmp_path: Path) -> None:
    (tmp_path / "x.attnrepro").write_bytes(example.artifact())
    for command in ("unzip -q -o x.attnrepro", explain.UNSQUEEZE, "unzip -q -o content.zip"):
        words = shlex.split(command)
        subprocess.run(words, cwd=tmp_path, check=True, capture_output=True, timeout=20)
    assert (tmp_path / "samples").is_dir()
    assert (tmp_path / "manifest.json").read_bytes() == jsonio.canonical(example.manifest())


@unpacks
def test_printed_lines_leave_what_cosign_reads(tmp_path: Path) -> None:
    """The lines run as printed, twice over another artifact's leavings; cosign is a stand-in."""
    name = "it's x.attnrepro"
    for data in (example.artifact(), example.small_artifact()):
        (tmp_path / name).write_bytes(data)
        verified = verify(data, trust=TrustStore())
        lines = ["cosign() { sha256sum content.zip; }", *explain.commands(verified, name)]
        done = subprocess.run(
            ["bash", "-euc", "\n".join(lines)],
            cwd=tmp_path,
            check=True,
            capture_output=True,
            text=True,
            timeout=20,
        )
        assert f"{verified.statement.content_sha256}  content.zip\n" in done.stdout
        assert (tmp_path / "check" / "root.json").read_text() == explain.TRUSTED_ROOT + "\n"
