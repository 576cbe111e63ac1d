"""Fixtures that several modules of unit tests use."""

from __future__ import annotations

import gpu_fakes
import pytest


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, object]]:
    """Put the stand-ins where the adapters look."""
    return gpu_fakes.install(monkeypatch)
