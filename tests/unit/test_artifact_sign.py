from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from attnrepro import jsonio, schema
from attnrepro.artifact import rocrate
from attnrepro.artifact.content import find_real, section_digests
from attnrepro.artifact.sign import Original
from attnrepro.artifact.statement import Kind
from attnrepro.artifact.trust import TrustStore
from attnrepro.artifact.verify import verify
from attnrepro.distribute import oci
from attnrepro.errors import InvalidDocument
from support import example


def test_same_content_same_bytes() -> None:
    assert example.artifact() == example.artifact()


def test_order_of_members_and_keys_does_not_matter() -> None:
    shuffled = dict(reversed(example.files().items()))
    seen = dict(reversed(example.observations().items()))
    assert example.artifact(files=shuffled, observations=seen) == example.artifact()


def test_everything_is_there_again() -> None:
    verified = verify(example.artifact(), trust=TrustStore())
    assert verified.kind is Kind.RUN
    assert verified.manifest == example.manifest()
    assert verified.repeatable == example.repeatable()
    assert verified.observations == example.observations()
    for name, data in example.files().items():
        assert verified.members[name] == data
    assert verified.predicate["repeatable"] == section_digests(example.repeatable())
    assert verified.predicate["summary"] == example.observations()["summary"]


def test_rerun_names_its_original() -> None:
    original = verify(example.artifact(), trust=TrustStore())
    rerun = verify(example.rerun(Original.of(original)), trust=TrustStore())
    assert rerun.kind is Kind.RERUN
    assert rerun.statement.original_sha256 == original.statement.content_sha256
    assert rerun.predicate["original"]["signer"] == original.signer.fingerprint
    assert json.loads(rerun.members["verdicts.json"]) == example.verdicts()


@pytest.mark.parametrize(
    ("files", "rule"),
    [
        ({"setup.py": b""}, "content.member"),
        ({"manifest.json": b"{}"}, "content.member"),
        ({"ro-crate-metadata.json": b"{}"}, "content.member"),
        ({"recipe/my kernel.py": b""}, "container.name"),
        ({"recipe/aux.py": b""}, "container.device_name"),
        ({"recipe/a": b"", "recipe/A": b""}, "container.case_collision"),
        ({f"logs/{n}": b"" for n in range(1000)}, "container.members"),
        ({"sbom.spdx.json": b"{"}, "content.json"),
    ],
)
def test_what_cannot_be_packed(files: dict[str, bytes], rule: str) -> None:
    with pytest.raises(InvalidDocument) as caught:
        example.artifact(files={**example.files(), **files})
    assert caught.value.rule == rule


def test_reals_are_hex_strings() -> None:
    seen = example.observations()
    seen["device"]["clock"] = 1.5
    with pytest.raises(InvalidDocument, match="/device/clock") as caught:
        example.artifact(observations=seen)
    assert caught.value.rule == "content.real"
    assert find_real({"a": [1, {"b/c": 2.0}]}) == "/a/1/b~1c"
    assert find_real({"a": [1, "2.0", None, True]}) is None


def test_manifest_must_be_canonical() -> None:
    from dataclasses import replace

    from attnrepro.artifact import sign

    packed = example.content()
    spaced = replace(packed, manifest=json.dumps(example.manifest(), indent=1).encode())
    with pytest.raises(InvalidDocument) as caught:
        sign.make_artifact(spaced, predicate=example.predicate(), signer=example.signer())
    assert caught.value.rule == "content.canonical"


def test_runner_must_travel() -> None:
    files = {k: v for k, v in example.files().items() if not k.endswith(".whl")}
    with pytest.raises(InvalidDocument) as caught:
        example.artifact(files=files)
    assert caught.value.rule == "crosscheck.runner"


def test_statement_schema_ties_containment_to_images() -> None:
    statement = example.payload(example.artifact())["predicate"]
    assert schema.validate("statement", statement) == []
    assert schema.validate("statement", {**statement, "images": []})
    uncontained = {"engine": "host", "contained": False, "options": []}
    assert not schema.validate("statement", {**statement, "images": [], "containment": uncontained})
    assert schema.validate("statement", {**statement, "verdicts": example.verdicts()})
    assert schema.validate("statement", {**statement, "kind": "rerun"})
    assert schema.validate("statement", {**statement, "manifest_sha256": "A" * 64})


def test_crate_lists_every_file() -> None:
    verified = verify(example.artifact(), trust=TrustStore())
    crate: Any = json.loads(verified.members[rocrate.NAME])
    by_id = {item["@id"]: item for item in crate["@graph"]}
    root = by_id["./"]
    assert {part["@id"] for part in root["hasPart"]} == set(verified.members) - {rocrate.NAME}
    for required in ("name", "description", "datePublished", "license"):  # RO-Crate 1.1, 5.3
        assert root[required]
    assert by_id[rocrate.NAME]["about"] == {"@id": "./"}
    manifest = by_id["manifest.json"]
    assert manifest["sha256"] == hashlib.sha256(verified.members["manifest.json"]).hexdigest()
    assert jsonio.canonical(crate) == verified.members[rocrate.NAME]


def test_oci_manifest_names_the_content() -> None:
    document = json.loads(oci.manifest("0" * 64, 7))
    assert document["layers"][0] == {
        "mediaType": "application/vnd.attnrepro.content.v1+zip",
        "digest": "sha256:" + "0" * 64,
        "size": 7,
        "annotations": {"org.opencontainers.image.title": "content.zip"},
    }
    config = document["config"]
    assert config["digest"] == "sha256:" + hashlib.sha256(b"{}").hexdigest()
    assert oci.manifest_sha256("0" * 64, 7) == hashlib.sha256(oci.manifest("0" * 64, 7)).hexdigest()


BLOCKED = ["torch", "numpy", "docker", "typer", "rich", "pynvml"]
BLOCKED += ["fcntl", "pwd", "grp", "resource", "termios"]


def test_verify_needs_no_engine_no_torch_and_no_posix(tmp_path: Path) -> None:
    """It runs on a laptop with Windows: nothing of this list may be imported."""
    path = tmp_path / "x.attnrepro"
    path.write_bytes(example.artifact())
    toolkit = Path(__file__).parents[2] / "toolkit"
    program = (
        "import sys\nsys.path.insert(0, sys.argv[2])\n"
        f"for name in {BLOCKED!r}: sys.modules[name] = None\n"
        "from pathlib import Path\n"
        "from attnrepro.artifact.trust import TrustStore\n"
        "from attnrepro.artifact.verify import verify\n"
        "print(verify(Path(sys.argv[1]), trust=TrustStore()).trusted)\n"
    )
    done = subprocess.run(
        [sys.executable, "-I", "-c", program, str(path), str(toolkit)],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout == "False\n", done.stderr


def test_verify_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = example.artifact()
    monkeypatch.chdir(tmp_path)
    verify(data, trust=TrustStore())
    assert list(tmp_path.iterdir()) == []
