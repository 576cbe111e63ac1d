from __future__ import annotations

import errno
import json
import os
from typing import TYPE_CHECKING, Any

import pytest
from host_artifacts import MANIFEST, FakeImages, make
from host_fakes import FakeEngine

from attnrepro import files, run, runnerwheel
from attnrepro.artifact import trust
from attnrepro.artifact.verify import verify
from attnrepro.engines.lock import device_lock
from attnrepro.errors import Interrupted, Unavailable, UsageError
from attnrepro.packing import Redactor
from support import example

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(autouse=True)
def own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, folder in (("HOME", "home"), ("STORE", "store"), ("LOCKS", "locks")):
        monkeypatch.setenv(f"ATTNREPRO_{name}", str(tmp_path / folder))
    (tmp_path / "locks").mkdir()
    monkeypatch.delenv("ATTNREPRO_KEY", raising=False)


def test_run_ends_with_an_artifact_that_verifies(tmp_path: Path) -> None:
    told: list[str] = []
    outcome = make(tmp_path, told=told)
    verified = verify(outcome.path, trust=trust.load())
    assert (verified.trusted, verified.owner) == (True, "self")
    assert verified.signer.fingerprint == outcome.fingerprint
    assert outcome.merged.failed_required() == []
    assert told[0].startswith("made a signing key: ")
    assert any("1 cells" in line for line in told)


def test_artifact_holds_everything_that_a_rerun_needs(tmp_path: Path) -> None:
    members = verify(make(tmp_path).path, trust=trust.load()).members
    wheel = runnerwheel.installed()
    assert members[f"recipe/runner/{wheel.name}"] == wheel.data
    assert {"manifest.json", "repeatable.json", "observations.json"} <= set(members)
    assert any(name.startswith("logs/all/start-") for name in members)
    assert len([name for name in members if name.startswith("samples/")]) == 10


def test_contained_run_carries_image_recipe_and_sbom(tmp_path: Path) -> None:
    images, engine = FakeImages(), FakeEngine(contained=True)
    verified = verify(make(tmp_path, images=images, engine=engine).path, trust=trust.load())
    assert verified.predicate["containment"]["contained"] is True
    assert "preflight_NoNewPrivs=1" in verified.predicate["containment"]["options"]
    (image,) = verified.predicate["images"]
    assert image["manifest_digest"] == images.digest
    recipe = "recipe/images/cpu-torch2.13-r1"
    assert verified.members[f"{recipe}/Dockerfile"] == b"FROM scratch\n"
    assert "sbom.spdx.json" in verified.members
    assert engine.specs[0].command[0] == "/opt/stack/bin/python3"
    assert engine.specs[0].image.manifest_digest == images.digest


def test_bare_host_is_never_called_contained(tmp_path: Path) -> None:
    images = FakeImages()
    verified = verify(make(tmp_path, images=images).path, trust=trust.load())
    assert verified.predicate["containment"]["contained"] is False
    assert verified.predicate["images"] == []
    assert images.asked == []


def test_run_folder_is_gone_once_the_artifact_is_there(tmp_path: Path) -> None:
    make(tmp_path)
    assert not (tmp_path / "runs").exists()


DEVICE = "GPU-21063f48-5201-76d2-a581-000000000000"


def test_names_of_folder_user_host_and_device_stay_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    engine = FakeEngine(
        change=lambda result: result["entries"][0].update(
            status="CRASH", reason=f"cannot load {tmp_path}/x.so on {DEVICE}"
        )
    )
    words = ("attnrepro", "run", f"{tmp_path}/m.json", "--device", f"nvidia:{DEVICE}")
    outcome = make(tmp_path, engine=engine, invocation=words)
    verified = verify(outcome.path, trust=trust.load())
    assert verified.predicate["invocation"] == [
        *("attnrepro", "run", "m.json", "--device", "nvidia:UUID")
    ]
    assert verified.predicate["redactions"] == ["device UUID", "folder", "working folder"]
    data = outcome.path.read_bytes()
    content = example.content_zip(data)
    assert str(tmp_path).encode() not in content
    assert str(tmp_path) not in json.dumps(example.payload(data))
    assert DEVICE.encode() not in content
    assert DEVICE not in json.dumps(example.payload(data))
    assert b"cannot load ./x.so on UUID" in content


@pytest.mark.parametrize(
    ("said", "left"),
    [
        (f"lost {DEVICE}.", "lost UUID."),
        ("uuid=21063f48-5201-76d2-a581-000000000000)", "uuid=UUID)"),
        ("GPU-73fa5dd2a7b4ae2b is gone", "UUID is gone"),
        ("MIG-21063f48-5201-76d2-a581-000000000000", "UUID"),
        ("flash_attn-2.8.3-cp312-cp312 sm_90", "flash_attn-2.8.3-cp312-cp312 sm_90"),
    ],
)
def test_a_device_is_redacted_however_a_library_spells_it(said: str, left: str) -> None:
    redactor = Redactor()
    assert redactor.text(said) == left
    document = {"flags": [said], "containment": {"facts": {"cdi": said}}, "status": said}
    found = redactor.reasons(document)
    assert found["flags"] == [left]
    assert found["containment"]["facts"] == {"cdi": left}
    assert found["status"] == said


def test_interrupted_run_is_resumed_and_says_so(tmp_path: Path) -> None:
    with pytest.raises(Interrupted):
        make(tmp_path, engine=FakeEngine(stop_after=3, ending=KeyboardInterrupt()))
    assert not (tmp_path / "tiny.attnrepro").exists()
    told: list[str] = []
    engine = FakeEngine()
    outcome = make(tmp_path, engine=engine, told=told)
    assert len(engine.written) == 5
    assert any(line.startswith("resumed: ") for line in told)
    assert outcome.merged.observations["run"]["resumed"] is True


def test_other_manifest_is_not_resumed(tmp_path: Path) -> None:
    with pytest.raises(Interrupted):
        make(tmp_path, engine=FakeEngine(stop_after=3, ending=KeyboardInterrupt()))
    other = MANIFEST | {"inputs": {"seed": 7}}
    engine = FakeEngine()
    outcome = make(tmp_path, engine=engine, manifest=other)
    assert len(engine.written) == 8
    assert outcome.merged.observations["run"]["resumed"] is False


def test_other_image_is_not_resumed(tmp_path: Path) -> None:
    with pytest.raises(Interrupted):
        make(tmp_path, engine=FakeEngine(contained=True, stop_after=3, ending=KeyboardInterrupt()))
    engine = FakeEngine(contained=True)
    make(tmp_path, engine=engine, images=FakeImages("2"))
    assert len(engine.written) == 8


def test_full_disk_at_the_end_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = files.atomic_write

    def full(path: Path, data: bytes, **more: Any) -> None:
        if path.suffix == ".attnrepro":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        real(path, data, **more)

    with monkeypatch.context() as patched:
        patched.setattr(run.files, "atomic_write", full)
        with pytest.raises(UsageError, match=r"cannot write .*No space left") as caught:
            make(tmp_path)
    assert "nothing is lost" in (caught.value.hint or "")
    engine = FakeEngine()
    make(tmp_path, engine=engine)
    assert engine.written == []


def test_existing_output_is_refused_before_the_run(tmp_path: Path) -> None:
    (tmp_path / "tiny.attnrepro").write_bytes(b"precious")
    engine = FakeEngine()
    with pytest.raises(UsageError, match="is there already"):
        make(tmp_path, engine=engine)
    assert engine.specs == []
    assert (tmp_path / "tiny.attnrepro").read_bytes() == b"precious"
    make(tmp_path, engine=engine, replace=True)
    assert (tmp_path / "tiny.attnrepro").read_bytes() != b"precious"


def test_output_that_cannot_be_written_is_refused_before_the_run(tmp_path: Path) -> None:
    engine = FakeEngine()
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    for output in ("no/such/x.attnrepro", "file/x", "folder", "x" * 245, "x" * 5000):
        with pytest.raises(UsageError):
            make(tmp_path, engine=engine, output=tmp_path / output, replace=True)
    assert engine.specs == []


def test_key_that_cannot_be_read_is_refused_before_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = tmp_path / "key.pem"
    key.write_bytes(b"no key at all")
    key.chmod(0o600)
    monkeypatch.setenv("ATTNREPRO_KEY", str(key))
    engine = FakeEngine()
    with pytest.raises(UsageError, match="cannot read the key"):
        make(tmp_path, engine=engine)
    assert engine.specs == []


def test_two_runs_at_once_on_one_device(tmp_path: Path) -> None:
    engine = FakeEngine()
    with device_lock("cpu"), pytest.raises(Unavailable, match="in use by process"):
        make(tmp_path, engine=engine)
    assert engine.specs == []


def test_run_that_would_not_fit_an_artifact_is_refused_before_it_starts(tmp_path: Path) -> None:
    engine = FakeEngine()
    large = MANIFEST | {"sweep": {"/workload/seqlen_q": list(range(65, 265))}}
    large["workload"] = MANIFEST["workload"] | {"seqlen_k": 512}
    with pytest.raises(UsageError, match="series of samples"):
        make(tmp_path, engine=engine, manifest=large)
    assert engine.specs == []


def test_cells_that_fail_are_in_the_artifact(tmp_path: Path) -> None:
    def wrong(result: dict[str, Any]) -> None:
        if result["stage"] == "check":
            result["entries"][0] |= {"status": "INCORRECT", "reason": "a tile was dropped"}

    outcome = make(tmp_path, engine=FakeEngine(change=wrong))
    verified = verify(outcome.path, trust=trust.load())
    assert verified.observations["summary"] == {"passed": 1, "failed": 1, "unsupported": 0}
    assert outcome.merged.failed_required() == ["c000 fast: INCORRECT (check: a tile was dropped)"]
