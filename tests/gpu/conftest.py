"""GPU tests run on the GPU; nothing else in the session does."""

from __future__ import annotations

import os

import pytest


@pytest.fixture(autouse=True)
def cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTNREPRO_DEVICE", os.environ.get("ATTNREPRO_DEVICE", "cuda"))
