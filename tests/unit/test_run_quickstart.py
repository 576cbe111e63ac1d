from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from host_artifacts import FakeImages
from host_fakes import DEVICE, FakeEngine

from attnrepro import placement, quickstart
from attnrepro.cli import main
from attnrepro.engines import install, select
from attnrepro.errors import Unavailable

if TYPE_CHECKING:
    from pathlib import Path


class Engines:
    """Answers only once an engine has been installed."""

    def __init__(self, *, there: bool) -> None:
        self.there = there
        self.installed = 0

    def choose(self, name: str | None) -> FakeEngine:
        if not self.there:
            message = "no container engine answers"
            raise Unavailable(message, hint="install one")
        return FakeEngine(contained=True)

    def install(self, progress: Any) -> list[str]:
        self.there = True
        self.installed += 1
        return ["podman"]


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):  # type: ignore[no-untyped-def]
    for name, folder in (("HOME", "home"), ("STORE", "store"), ("LOCKS", "locks")):
        monkeypatch.setenv(f"ATTNREPRO_{name}", str(tmp_path / folder))
    (tmp_path / "locks").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(placement, "here", lambda vendor, threads: DEVICE)
    monkeypatch.setattr(quickstart, "StoreImages", lambda store, **more: FakeImages())

    def set_up(*, there: bool) -> Engines:
        engines = Engines(there=there)
        monkeypatch.setattr(install, "install_engine", engines.install)
        monkeypatch.setattr(select, "choose", engines.choose)
        monkeypatch.setitem(quickstart.quickstart.__kwdefaults__, "engines", engines.choose)
        return engines

    return set_up


def test_quickstart_ends_with_a_verified_artifact(
    machine, capsys: pytest.CaptureFixture[str]
) -> None:
    machine(there=True)
    assert main.run(["quickstart"]) == 0
    captured = capsys.readouterr()
    assert "signed by yourself, which you trust" in captured.out
    assert "attnrepro rerun attnrepro-quickstart/quickstart.attnrepro" in captured.out
    assert main.run(["verify", "attnrepro-quickstart/quickstart.attnrepro"]) == 0


def test_quickstart_runs_again_over_its_own_artifact(machine) -> None:
    machine(there=True)
    assert main.run(["quickstart"]) == 0
    assert main.run(["quickstart"]) == 0


def test_engine_is_installed_only_when_asked(machine, capsys: pytest.CaptureFixture[str]) -> None:
    engines = machine(there=False)
    assert main.run(["quickstart"]) == 8
    assert "quickstart --install-engine installs podman" in capsys.readouterr().err
    assert engines.installed == 0
    assert main.run(["quickstart", "--install-engine", "--json"]) == 0
    assert engines.installed == 1
    found = json.loads(capsys.readouterr().out)
    assert found["installed"] == ["podman"]
    assert found["verified"] == {"trusted": True, "owner": "self"}


def test_engine_that_is_there_is_not_installed_again(machine) -> None:
    engines = machine(there=True)
    assert main.run(["quickstart", "--install-engine"]) == 0
    assert engines.installed == 0
