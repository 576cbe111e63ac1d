"""The import smoke test, on this machine's own libraries."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING

from attnrepro_runner import smoke
from attnrepro_runner.__main__ import main

if TYPE_CHECKING:
    import pytest


def test_a_backends_library_is_described(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["smoke", "flex"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["available"] is True
    assert found["version"].startswith("2.")
    name = "torch.nn.attention.flex_attention.flex_attention"
    assert found["symbols"][name][:3] == ["query", "key", "value"]
    assert all(len(digest) == 64 for digest in found["files"].values())


def test_a_library_that_is_not_here_is_an_answer(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["smoke", "flash_attn_4"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["available"], found["symbols"]) == (False, {})
    assert "flash-attn-4 is not installed" in found["reason"]


def test_a_dying_import_is_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = subprocess.CompletedProcess([], -11, stdout="", stderr="loading\nIllegal instruction\n")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: ended)
    found = smoke._apart("flashinfer")
    assert found["available"] is False
    assert found["reason"] == "the process ended with -11: Illegal instruction"


def test_the_whole_answer(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(smoke, "_apart", lambda name: {"available": False})
    assert main(["smoke"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert set(found["backends"]) == set(smoke.BACKENDS)
    assert found["python"] == sys.version.split()[0]
    assert found["distributions"]["torch"] == found["torch"]["version"]
    assert any("libtorch_cpu" in name for name in found["torch"]["loaded"])
