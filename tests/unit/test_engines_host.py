"""The engine without a container, and the kernel's log."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path

import pytest
from test_engines_arguments import IMAGE

from attnrepro.engines import kernellog
from attnrepro.engines.base import ContainerSpec, Engine, Mount
from attnrepro.engines.gpu import GpuAccess, GpuMode
from attnrepro.engines.host import HostEngine, kill_marked, translated
from attnrepro.errors import Interrupted, Unavailable, UsageError

NAME = "attnrepro-hosttest"


def spec(folder: Path, *command: str, **change: object) -> ContainerSpec:
    (folder / "out").mkdir(exist_ok=True)
    (folder / "job.json").write_text("{}")
    fields: dict[str, object] = {
        "image": IMAGE,
        "command": command,
        "mounts": (
            Mount(source=folder / "job.json", target="/attnrepro/job.json", read_only=True),
            Mount(source=folder / "out", target="/attnrepro/out", read_only=False),
        ),
        "uid": os.getuid(),
        "gid": os.getgid(),
        "name": f"{NAME}-{os.getpid()}",
        **change,
    }
    return ContainerSpec(**fields)  # type: ignore[arg-type]


def test_it_is_an_engine_and_says_that_it_contains_nothing() -> None:
    engine: Engine = HostEngine()
    assert isinstance(engine, Engine)
    assert not engine.facts().contained
    assert engine.facts().containment({})["contained"] is False
    assert engine.ensure_image(IMAGE) == ""
    engine.remove_image(IMAGE)


def test_paths_environment_and_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_TOKEN", "x")
    code = (
        "import os, sys, tempfile; open(sys.argv[2] + '/r', 'w').write(open(sys.argv[1]).read());"
        "print(sorted(os.environ)); print(os.environ['HOME'], tempfile.gettempdir());"
        "print(sys.executable, file=sys.stderr); sys.exit(4)"
    )
    command = ("python3", "-c", code, "/attnrepro/job.json", "/attnrepro/out")
    status = HostEngine().run(spec(tmp_path, *command), log=tmp_path / "log")
    log = (tmp_path / "log").read_text()
    assert status.code == 4
    assert (tmp_path / "out" / "r").read_text() == "{}"
    assert "SECRET_TOKEN" not in log
    assert sys.executable in log
    home, temporary = next(line for line in log.split("\n") if "/attnrepro-" in line).split()
    assert home == temporary
    assert not Path(home).exists(), "the private folder is removed"


def test_a_process_sees_the_chosen_device_alone(tmp_path: Path) -> None:
    """Without a container every device of the machine is there: frameworks take the first."""
    access = GpuAccess(
        mode=GpuMode.NODES, device_id="GPU-2", visible={"CUDA_VISIBLE_DEVICES": "GPU-2"}
    )
    command = ("sh", "-c", "echo sees $CUDA_VISIBLE_DEVICES")
    HostEngine().run(spec(tmp_path, *command, gpu=access), log=tmp_path / "log")
    assert "sees GPU-2" in (tmp_path / "log").read_text()


def test_option_values_are_translated() -> None:
    mounts = (
        Mount(source=Path("/a"), target="/attnrepro", read_only=True),
        Mount(source=Path("/b"), target="/attnrepro/out", read_only=False),
    )
    assert translated("/attnrepro/out/x", mounts) == "/b/x"
    assert translated("--out=/attnrepro/out", mounts) == "--out=/b"
    assert translated("/attnrepro/outer", mounts) == "/a/outer"
    assert translated("/attnreprox", mounts) == "/attnreprox"
    assert translated("a=/attnrepro", mounts) == "a=/attnrepro"


def test_timeout_kills_children_in_sessions_of_their_own(tmp_path: Path) -> None:
    code = (
        "import subprocess, time;"
        "c = subprocess.Popen(['sleep', '60'], start_new_session=True);"
        "print(c.pid, flush=True); time.sleep(60)"
    )
    began = time.monotonic()
    status = HostEngine().run(
        spec(tmp_path, "python3", "-c", code, timeout_seconds=0.6), log=tmp_path / "log"
    )
    assert status.timed_out
    assert status.code is None
    assert time.monotonic() - began < 20
    child = int((tmp_path / "log").read_text())
    stat = Path(f"/proc/{child}/stat")
    assert not stat.exists() or stat.read_text().split()[2] == "Z"


def test_signal_and_missing_program(tmp_path: Path) -> None:
    status = HostEngine().run(spec(tmp_path, "sh", "-c", "kill -9 $$"), log=tmp_path / "log")
    assert status.code == 137
    with pytest.raises(Unavailable, match="nothere"):
        HostEngine(Path("/nothere")).run(spec(tmp_path, "python3"), log=tmp_path / "log")


def test_terminated_raises_interrupted(tmp_path: Path) -> None:
    timer = threading.Timer(0.4, os.kill, (os.getpid(), signal.SIGTERM))
    timer.start()
    with pytest.raises(Interrupted):
        HostEngine().run(spec(tmp_path, "sleep", "60"), log=tmp_path / "log")
    timer.join()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_cores_are_pinned(tmp_path: Path) -> None:
    core = max(os.sched_getaffinity(0))
    code = "import os; print(os.sched_getaffinity(0))"
    HostEngine().run(spec(tmp_path, "python3", "-c", code, cpuset=str(core)), log=tmp_path / "log")
    assert (tmp_path / "log").read_text() == f"{{{core}}}\n"


def test_log_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot write"):
        HostEngine().run(spec(tmp_path, "true"), log=tmp_path / "no" / "log")
    kill_marked(f"{NAME}-{os.getpid()}")  # finds nothing, and ends


def test_kernel_log_names_the_container(tmp_path: Path) -> None:
    log = tmp_path / "kmsg"
    log.write_text(
        "6,1,2,-;oom-kill:constraint=CONSTRAINT_MEMCG,oom_memcg=/libpod_parent/libpod-abc,task=x\n"
    )
    assert kernellog.oom_killed("abc", log)
    assert not kernellog.oom_killed("abd", log)
    assert not kernellog.oom_killed("abc", tmp_path / "absent")
