"""The commands of docs/verify-without-us.md, run as they stand."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from shutil import which

import pytest

from attnrepro.artifact import explain
from attnrepro.artifact.statement import Kind
from attnrepro.distribute import oci
from support import debs, example

PAGE = Path(__file__).parents[2] / "docs" / "verify-without-us.md"
BLOCK = re.compile(r"^```sh ?(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def _run(folder: Path, data: bytes, path: str, *tags: str) -> str:
    (folder / "x y.attnrepro").write_bytes(data)
    blocks = [text for tag, text in BLOCK.findall(PAGE.read_text()) if tag in ("", *tags)]
    assert len(blocks) == 6 + len(tags)
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", "\n".join(blocks)],
        cwd=folder,
        env={"PATH": path, "ARTIFACT": "x y.attnrepro", "HOME": str(folder)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    return f"{done.returncode}\n{done.stdout}{done.stderr}"


needs = pytest.mark.skipif(
    not all(which(name) for name in ("bash", "unzip", "xz", "openssl", "python3", "sha256sum")),
    reason="needs bash, unzip, xz, openssl, python3 and sha256sum",
)


@needs
@pytest.mark.parametrize("unsqueeze", ["xz", "lzma"])
def test_without_cosign(tmp_path: Path, unsqueeze: str) -> None:
    told = _run(tmp_path, example.artifact(), os.environ["PATH"], unsqueeze)
    assert told.startswith("0\n"), told
    assert told.count(example.signer().public.fingerprint) == 2
    assert "Signature Verified Successfully" in told
    assert "content.zip is what was signed" in told
    assert "10 launches agree with their samples" in told


@needs
def test_altered_is_noticed(tmp_path: Path) -> None:
    data = example.artifact()
    envelope = example.outer(data)["bundle.sigstore.json"]
    at = envelope.index(b'"sig":"') + 12
    other = b"A" if envelope[at : at + 1] != b"A" else b"B"
    altered = example.with_bundle(data, envelope[:at] + other + envelope[at + 1 :])
    told = _run(tmp_path, altered, os.environ["PATH"], "xz")
    assert not told.startswith("0\n")
    assert "Verification Failure" in told


@needs
@pytest.mark.slow
@pytest.mark.parametrize("suite", ["trixie", "sid"])
def test_with_cosign_and_oras(tmp_path: Path, suite: str) -> None:
    tools = (debs.program(suite, "cosign"), debs.program("trixie", "oras"))
    path = ":".join([*(str(tool.parent) for tool in tools), os.environ["PATH"]])
    data = example.artifact()
    told = _run(tmp_path, data, path, "xz", "cosign", "oras")
    assert told.startswith("0\n"), told
    assert "Verified OK" in told
    assert f"Digest: sha256:{example.payload(data)['subject'][1]['digest']['sha256']}" in told


def test_the_page_shows_the_printed_lines() -> None:
    text = PAGE.read_text()
    assert explain.UNSQUEEZE in text
    assert explain.cosign_line(Kind.RUN) in text
    assert explain.TRUSTED_ROOT in text
    for constant in (oci.ARTIFACT_TYPE, oci.CONTENT_TYPE, oci.CREATED, Kind.RERUN.predicate_type):
        assert constant in text
