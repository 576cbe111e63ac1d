from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from host_artifacts import MANIFEST
from host_fakes import DEVICE, FakeEngine

from attnrepro import placement
from attnrepro.cli import choices, main
from attnrepro.errors import Unavailable, UsageError


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, folder in (("HOME", "home"), ("STORE", "store"), ("LOCKS", "locks")):
        monkeypatch.setenv(f"ATTNREPRO_{name}", str(tmp_path / folder))
    (tmp_path / "locks").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(placement, "here", lambda vendor, threads: DEVICE)
    (tmp_path / "m.json").write_text(json.dumps(MANIFEST))
    return tmp_path


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch):  # type: ignore[no-untyped-def]
    def set_up(**more: Any) -> None:
        monkeypatch.setattr(choices, "engine", lambda name, python: FakeEngine(**more))

    return set_up


def wrong(result: dict[str, Any]) -> None:
    if result["stage"] == "check":
        result["entries"][0] |= {"status": "INCORRECT", "reason": "a tile was dropped"}


def test_run_prints_a_table_and_the_file(use, capsys: pytest.CaptureFixture[str]) -> None:
    use()
    assert main.run(["run", "m.json"]) == 0
    captured = capsys.readouterr()
    assert "slow: FASTER" in captured.out
    assert "wrote tiny.attnrepro, signed by sha256:" in captured.out
    assert "made a signing key" in captured.err
    assert Path("tiny.attnrepro").exists()


def test_run_as_json_is_one_document(use, capsys: pytest.CaptureFixture[str]) -> None:
    use()
    assert main.run(["run", "m.json", "-o", "x.attnrepro", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["file"] == "x.attnrepro"
    assert found["contained"] is False
    assert found["summary"] == {"passed": 2, "failed": 0, "unsupported": 0}
    assert [row["status"] for row in found["rows"]] == ["PASS", "PASS"]


@pytest.mark.parametrize("flags", [[], ["--json"]])
def test_failed_cells_are_4_and_the_artifact_is_there(
    flags: list[str], use, capsys: pytest.CaptureFixture[str]
) -> None:
    use(change=wrong)
    assert main.run(["run", "m.json", *flags]) == 4
    assert "a tile was dropped" in capsys.readouterr().out
    assert main.run(["verify", "tiny.attnrepro"]) == 0


def test_cell_that_is_not_required_fails_nothing(use, place: Path) -> None:
    optional = json.loads(json.dumps(MANIFEST))
    optional["subjects"][0]["required"] = False
    (place / "m.json").write_text(json.dumps(optional))
    use(change=wrong)
    assert main.run(["run", "m.json"]) == 0


@pytest.mark.parametrize(
    ("roles", "flag", "code"),
    [
        (("candidate", "baseline"), "slower", 0),
        (("candidate", "baseline"), "not-faster", 0),
        (("baseline", "candidate"), "slower", 7),
        (("baseline", "candidate"), "not-faster", 7),
    ],
)
def test_fail_on(
    roles: tuple[str, str],
    flag: str,
    code: int,
    use,
    place: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    swapped = json.loads(json.dumps(MANIFEST))
    for subject, role in zip(swapped["subjects"], roles, strict=True):
        subject["role"] = role
    (place / "m.json").write_text(json.dumps(swapped))
    use()
    assert main.run(["run", "m.json", "--fail-on", flag]) == code
    assert ("--fail-on" in capsys.readouterr().err) == (code == 7)


def test_interrupted_run_is_10_and_goes_on(use, capsys: pytest.CaptureFixture[str]) -> None:
    use(stop_after=2, ending=KeyboardInterrupt())
    assert main.run(["run", "m.json"]) == 10
    assert "the same command goes on from there" in capsys.readouterr().err
    assert not Path("tiny.attnrepro").exists()
    use()
    assert main.run(["run", "m.json", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["resumed"] is True


def test_missing_image_names_the_command_that_builds_it(
    use, capsys: pytest.CaptureFixture[str]
) -> None:
    use(contained=True)
    assert main.run(["run", "m.json"]) == 8
    assert "attnrepro build cpu-torch2.13@r1, or add --build" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("{", "not valid JSON"),
        ('{"schema": 1, "schema": 2}', "twice"),
        ('{"schema": NaN}', "NaN"),
        ('{"schema": "attnrepro.manifest/1", "privileged": true}', "/privileged"),
    ],
)
def test_bad_manifest_is_2_and_runs_nothing(
    text: str, word: str, use, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (place / "m.json").write_text(text)
    use(ending=AssertionError())
    assert main.run(["run", "m.json"]) == 2
    assert word in capsys.readouterr().err


def test_rerun_prints_five_verdicts(use, capsys: pytest.CaptureFixture[str]) -> None:
    use()
    assert main.run(["run", "m.json"]) == 0
    capsys.readouterr()
    assert main.run(["rerun", "tiny.attnrepro"]) == 0
    shown = capsys.readouterr().out
    assert "outputs-identical       yes             4 outputs have the same bits" in shown
    assert "image-identical         not comparable" in shown
    assert "no independent confirmation" in shown
    assert Path("tiny.rerun.attnrepro").exists()


def test_rerun_with_other_bits_is_5(use, capsys: pytest.CaptureFixture[str]) -> None:
    def change(result: dict[str, Any]) -> None:
        for entry in result["entries"]:
            if "bits" in entry:
                entry["bits"]["digests"]["out"] = "99" * 32

    use()
    main.run(["run", "m.json"])
    use(change=change)
    capsys.readouterr()
    assert main.run(["rerun", "tiny.attnrepro", "--json"]) == 5
    found = json.loads(capsys.readouterr().out)
    assert found["exit_code"] == 5
    assert found["verdicts"]["outputs_identical"]["result"] == "no"


def test_python_is_for_the_bare_host() -> None:
    with pytest.raises(UsageError, match="--python is for --engine host"):
        choices.engine("podman", Path("/usr/bin/python3"))


def test_bare_host_needs_torch(tmp_path: Path) -> None:
    shim = tmp_path / "python"
    shim.write_text("#!/bin/sh\nexit 1\n")
    shim.chmod(0o755)
    with pytest.raises(Unavailable, match="has no torch"):
        choices.engine("host", shim)
    with pytest.raises(UsageError, match="cannot run the interpreter"):
        choices.engine("host", tmp_path / "missing")
    shim.write_text("#!/bin/sh\nexit 0\n")
    assert choices.engine("host", shim).name == "host"


def test_passphrase_needs_a_terminal() -> None:
    with pytest.raises(UsageError, match="no terminal"):
        choices.passphrase()
