"""The keyed digest of a device: its owner's alone."""

from __future__ import annotations

import stat
import sys
from typing import TYPE_CHECKING

import pytest

from attnrepro import deviceidentity, files
from attnrepro.errors import UsageError

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(files, "state_dir", lambda: tmp_path / "state")
    return tmp_path / "state"


def test_the_secret_is_made_once_and_readable_by_its_owner_alone(state: Path) -> None:
    key = deviceidentity.load_or_create_key()
    assert len(key) == deviceidentity.KEY_BYTES
    assert deviceidentity.load_or_create_key() == key
    assert stat.S_IMODE((state / "device-identity.key").stat().st_mode) == 0o600


def test_a_damaged_secret_is_refused(state: Path) -> None:
    state.mkdir()
    (state / "device-identity.key").write_bytes(b"short")
    with pytest.raises(UsageError, match="holds 5 bytes"):
        deviceidentity.load_or_create_key()


def test_a_cpu_or_a_device_that_does_not_answer_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    assert deviceidentity.identify("cpu", "cpu") is None
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert deviceidentity.identify("nvidia", "/dev/nvidia1") is None
