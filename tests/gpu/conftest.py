"""GPU tests run on the GPU; nothing else in the session does."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from attnrepro_runner import caches


def pytest_configure(config: pytest.Config) -> None:
    """Let all of xdist's workers share what they compile: kernels would else be compiled n times.

    Only in a session of GPU tests alone: other tests need caches of their own.
    """
    if config.getoption("markexpr") == "gpu":
        shared = Path(tempfile.gettempdir()) / f"attnrepro-gpu-tests-{os.getuid()}"
        for name, value in caches.environment(shared).items():
            os.environ.setdefault(name, value)


@pytest.fixture(autouse=True)
def cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTNREPRO_DEVICE", os.environ.get("ATTNREPRO_DEVICE", "cuda"))
