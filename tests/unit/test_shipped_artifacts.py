"""Every artifact that ships is accepted by this release, and is small enough to be cloned."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from attnrepro import files, resources
from attnrepro.artifact.budget import MIB
from attnrepro.artifact.trust import TrustStore, known_keys
from attnrepro.artifact.verify import verify
from attnrepro.cli import main
from attnrepro.manifest.load import load

ARTIFACTS = sorted(resources.manifests_dir().glob("*/reference.attnrepro"))
STACKS = {
    "quickstart": None,
    "hopper-headline": "host-torch",
    "hopper-grid": "host-torch",
    "hopper-semantics": (
        "host-torch",
        "fa2=host-torch-fa2",
        "fa2-deterministic=host-torch-fa2",
        "flashinfer=host-torch-flashinfer",
    ),
    "hopper-flash-attn-2": "host-torch-fa2",
    "hopper-decode": "host-torch",
    "hopper-prefill": "host-torch",
    "hopper-fp8": "host-torch",
    "hopper-requests": "host-torch",
    "hopper-counters": "host-torch",
}
"""The shipped references; each with the stack that took the place of its manifest's, if any."""
KEYS = {"attnrepro-reference", "attnrepro-reference-2"}
SECOND_HOST = resources.manifests_dir() / "hopper-headline/second-host.rerun.attnrepro"
ONE_LAUNCH = resources.manifests_dir() / "hopper-paged-decode/one-launch.attnrepro"


def test_they_are_all_there() -> None:
    assert {path.parent.name for path in ARTIFACTS} == set(STACKS)


def test_they_are_small() -> None:
    sizes = {path: path.stat().st_size for path in (*ARTIFACTS, SECOND_HOST, ONE_LAUNCH)}
    assert max(sizes.values()) <= 2 * MIB, sizes
    assert sum(sizes.values()) <= 16 * MIB, sizes


@pytest.mark.parametrize("path", ARTIFACTS, ids=lambda path: path.parent.name)
def test_it_verifies_under_the_known_key_and_is_of_its_manifest(path: Path) -> None:
    verified = verify(path, trust=TrustStore())
    assert not verified.trusted
    assert known_keys()[verified.signer.fingerprint] in KEYS
    # The manifest as run is the shipped one, byte for byte, in all but the image.
    shipped = load(path.with_name("manifest.json"), stack=STACKS[path.parent.name])
    assert verified.members["manifest.json"] == shipped.canonical


def test_the_paged_decode_is_a_part_of_its_manifest() -> None:
    """One launch of three cells and three subjects: the rest was stopped."""
    verified = verify(ONE_LAUNCH, trust=TrustStore())
    assert known_keys()[verified.signer.fingerprint] in KEYS
    shipped = load(
        ONE_LAUNCH.with_name("manifest.json"),
        stack=("host-torch", "flashinfer=host-torch-flashinfer"),
    )
    ran, whole = json.loads(verified.members["manifest.json"]), json.loads(shipped.canonical)
    assert ran["workload"] == whole["workload"]
    for part in ("variants", "subjects"):
        assert [each for each in ran[part] if each not in whole[part]] == []
    assert verified.predicate["summary"] == {"failed": 0, "passed": 9, "unsupported": 0}


def test_the_headline_was_rerun_on_a_second_host() -> None:
    original = verify(SECOND_HOST.with_name("reference.attnrepro"), trust=TrustStore())
    rerun = verify(SECOND_HOST, trust=TrustStore())
    assert known_keys()[rerun.signer.fingerprint] in KEYS
    assert rerun.statement.original_sha256 == original.statement.content_sha256
    # Another machine by its image, which is of that host's root; the same model of device.
    assert rerun.predicate["device_class"] == original.predicate["device_class"]
    images = [found.predicate["images"][0] for found in (original, rerun)]
    assert images[0]["manifest_digest"] != images[1]["manifest_digest"]
    assert images[0]["tree_sha256"] == images[1]["tree_sha256"]
    verdicts = {name: found["result"] for name, found in rerun.predicate["verdicts"].items()}
    assert verdicts["outputs_identical"] == verdicts["performance_consistent"] == "yes"


def test_a_report_never_replaces_what_it_reads(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    artifact = tmp_path / "a.attnrepro"
    artifact.write_bytes(ARTIFACTS[0].read_bytes())
    assert main.run(["report", str(artifact), "-o", str(artifact), "--force"]) == 2
    assert artifact.read_bytes() == ARTIFACTS[0].read_bytes()
    taken = tmp_path / "taken.md"
    taken.write_text("mine")
    assert main.run(["report", str(artifact), "-o", str(taken)]) == 2
    assert taken.read_text() == "mine"
    assert main.run(["report", str(artifact), "-o", str(taken), "--force"]) == 0
    assert main.run(["report", str(artifact), "-o", str(tmp_path / "no" / "r.md")]) == 2
    assert "cannot write" in capsys.readouterr().err


def test_a_device_is_not_read_as_a_file() -> None:
    with pytest.raises(OSError, match="not a regular file"):
        files.read_regular(Path("/dev/zero"), limit=10)
