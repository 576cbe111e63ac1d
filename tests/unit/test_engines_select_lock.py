"""Choosing an engine, and one benchmark at a time."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from test_engines_arguments import FACTS, FakeEngine

from attnrepro.engines import lock, select
from attnrepro.errors import Unavailable, UsageError

if TYPE_CHECKING:
    from pathlib import Path

    from attnrepro.engines.base import EngineFacts


class Answers(FakeEngine):
    def __init__(self) -> None:
        super().__init__("")


class Silent(FakeEngine):
    def __init__(self) -> None:
        super().__init__("")

    def facts(self) -> EngineFacts:
        message = "does not answer"
        raise Unavailable(message)


class Podman(Answers):
    name = "podman"


def test_docker_first_then_podman_never_the_host() -> None:
    assert select.choose(None, makers={"docker": Answers, "podman": Podman}).name == "fake"
    assert select.choose(None, makers={"docker": Silent, "podman": Podman}).name == "podman"
    with pytest.raises(Unavailable, match="docker: does not answer; podman: does") as caught:
        select.choose(None, makers={"docker": Silent, "podman": Silent, "host": Answers})
    assert "podman" in (caught.value.hint or "")
    assert "--engine host" in (caught.value.hint or "")


def test_a_named_engine_or_none() -> None:
    with pytest.raises(Unavailable):
        select.choose("docker", makers={"docker": Silent, "podman": Podman})
    assert not select.choose("host").facts().contained
    with pytest.raises(UsageError, match="apptainer"):
        select.choose("apptainer")
    assert FACTS.contained


HOLD = """
import sys, time
from pathlib import Path
from attnrepro.engines import lock
with lock.device_lock("GPU-1/x"):
    print("held", flush=True)
    time.sleep(60)
"""


def test_device_lock_tells_its_holder_and_dies_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ATTNREPRO_LOCKS", str(tmp_path))
    with subprocess.Popen(
        [sys.executable, "-c", HOLD],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        with (
            pytest.raises(Unavailable, match=f"GPU-1/x is in use by process {holder.pid}"),
            lock.device_lock("GPU-1/x"),
        ):
            pass
        with lock.device_lock("GPU-2"):
            pass
        holder.kill()
        holder.wait()
    with lock.device_lock("GPU-1/x", wait_seconds=5):
        pass


def test_device_ids_that_look_alike_have_locks_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ATTNREPRO_LOCKS", str(tmp_path))
    with lock.device_lock("a/b"), lock.device_lock("a_b"), lock.device_lock("../../etc/x"):
        assert len(list(tmp_path.iterdir())) == 3


def test_run_folder_twice(tmp_path: Path) -> None:
    with (
        lock.run_lock(tmp_path),
        pytest.raises(Unavailable, match="run folder"),
        lock.run_lock(tmp_path),
    ):
        pass
    with lock.run_lock(tmp_path):
        pass


def test_lock_in_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot open the lock"), lock.run_lock(tmp_path / "no"):
        pass


def test_lock_never_follows_a_link(tmp_path: Path) -> None:
    (tmp_path / ".lock").symlink_to("/etc/passwd")
    with pytest.raises(UsageError), lock.run_lock(tmp_path):
        pass
