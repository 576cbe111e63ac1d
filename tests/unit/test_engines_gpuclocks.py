"""A device's clock: locked by a guardian, given back however the run ends. With a fake NVML."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from attnrepro.engines import gpuclocks
from attnrepro.errors import Unavailable

if TYPE_CHECKING:
    from collections.abc import Callable

UUID = "GPU-11111111-2222-3333-4444-555555555555"

FAKE = """
import os
LOG = os.environ["FAKE_NVML_LOG"]
class NVMLError(Exception):
    pass
def _log(text):
    with open(LOG, "a") as file:
        file.write(text + "\\n")
def nvmlInit(): pass
def nvmlDeviceGetHandleByUUID(uuid): return uuid
def nvmlDeviceGetMigMode(handle): raise NVMLError("Not Supported")
def nvmlDeviceGetComputeRunningProcesses(handle):
    return ["other"] * int(os.environ.get("FAKE_NVML_OTHERS", "0"))
def nvmlDeviceGetMaxClockInfo(handle, domain): return 1980
def nvmlDeviceSetGpuLockedClocks(handle, low, high): _log(f"lock {low} {high}")
def nvmlDeviceResetGpuLockedClocks(handle): _log("reset")
"""


class Nvml:
    """A device in this process."""

    class NVMLError(Exception):
        """As pynvml's."""

    def __init__(self, *, mig: int = 0, others: int = 0, fails: str = "") -> None:
        self.mig, self.others, self.fails = mig, others, fails
        self.log: list[str] = []

    def _call(self, name: str) -> None:
        self.log.append(name)
        if name == self.fails:
            raise self.NVMLError("Insufficient Permissions")

    def nvmlInit(self) -> None:
        pass

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> object:
        return uuid

    def nvmlDeviceGetMigMode(self, handle: object) -> tuple[int, int]:
        return self.mig, 0

    def nvmlDeviceGetComputeRunningProcesses(self, handle: object) -> list[object]:
        return [object()] * self.others

    def nvmlDeviceGetMaxClockInfo(self, handle: object, domain: int) -> int:
        return 1980

    def nvmlDeviceSetGpuLockedClocks(self, handle: object, low: int, high: int) -> None:
        assert low == high
        self._call("lock")

    def nvmlDeviceResetGpuLockedClocks(self, handle: object) -> None:
        self._call("reset")


def test_the_clock_is_locked_and_given_back() -> None:
    nvml, said = Nvml(), io.StringIO()
    assert gpuclocks.hold(nvml, UUID, 1500, lambda: nvml.log.append("run"), said) == 0
    assert nvml.log == ["lock", "run", "reset"]
    assert said.getvalue() == "locked\n"


@pytest.mark.parametrize(
    ("nvml", "mhz", "word"),
    [
        (Nvml(others=1), 1500, "1 processes use the device"),
        (Nvml(mig=1), 1500, "divided"),
        (Nvml(), 2500, "above the device's 1980"),
    ],
)
def test_what_is_not_ones_own_is_not_locked(nvml: Nvml, mhz: int, word: str) -> None:
    said = io.StringIO()
    assert gpuclocks.hold(nvml, UUID, mhz, lambda: None, said) == 1
    assert nvml.log == []
    assert word in said.getvalue()


def test_a_lock_that_failed_is_reset_all_the_same() -> None:
    nvml, said = Nvml(fails="lock"), io.StringIO()
    assert gpuclocks.hold(nvml, UUID, 1500, lambda: None, said) == 1
    assert nvml.log == ["lock", "reset"]
    assert "Insufficient Permissions" in said.getvalue()


def test_a_reset_that_fails_is_told() -> None:
    nvml, said = Nvml(fails="reset"), io.StringIO()
    assert gpuclocks.hold(nvml, UUID, 1500, lambda: None, said) == 1
    assert "the reset failed" in said.getvalue()


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A fake pynvml for guardians, which write what they do to this file."""
    (tmp_path / "pynvml.py").write_text(FAKE)
    toolkit = Path(gpuclocks.__file__).parents[2]
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{toolkit}")
    monkeypatch.setenv("FAKE_NVML_LOG", str(tmp_path / "log"))
    return tmp_path / "log"


def test_a_guardian_holds_the_clock_for_the_block(log: Path) -> None:
    with gpuclocks.locked(UUID, 1500):
        assert log.read_text() == "lock 1500 1500\n"
    assert log.read_text() == "lock 1500 1500\nreset\n"


def test_an_error_in_the_block_gives_the_clock_back(log: Path) -> None:
    with pytest.raises(KeyError), gpuclocks.locked(UUID, 1500):
        raise KeyError
    assert log.read_text().endswith("reset\n")


def test_a_shared_device_is_refused(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_NVML_OTHERS", "2")
    with pytest.raises(Unavailable, match="2 processes use the device"), gpuclocks.locked(UUID, 9):
        raise AssertionError
    assert not log.exists()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_killed_run_gives_the_clock_back(log: Path, number: signal.Signals) -> None:
    body = f"""
        from attnrepro.engines import gpuclocks
        import time
        with gpuclocks.locked({UUID!r}, 1500):
            print("held", flush=True)
            time.sleep(60)
    """
    run = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(body)], stdout=subprocess.PIPE, text=True
    )
    assert run.stdout is not None
    with run:
        assert run.stdout.readline() == "held\n"
        run.send_signal(number)
        run.wait(10)
    _until(lambda: log.read_text().endswith("reset\n"))


def _until(met: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not met():
        assert time.monotonic() < deadline
        time.sleep(0.02)
