from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest

from attnrepro_runner import limits, profiles, protocol
from attnrepro_runner.status import Failure, Status, clip, describe_exit, worst
from attnrepro_runner.supervise import MemoryWatch, WorkerProcess

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

FAKE = """
import json, os, signal, sys, time
requests, answers = open(int(sys.argv[1])), int(sys.argv[2])
def say(message): os.write(answers, (json.dumps(message) + "\\n").encode())
for line in requests:
    request = json.loads(line)
    say({"note": "at " + request["do"]})
    BODY
"""


@pytest.fixture
def watch() -> MemoryWatch:
    return MemoryWatch(1 << 40, set())


@pytest.fixture
def start(tmp_path: Path, watch: MemoryWatch) -> Iterator[Any]:
    started: list[WorkerProcess] = []

    def start(body: str, **changes: Any) -> WorkerProcess:
        code = FAKE.replace("BODY", textwrap.indent(textwrap.dedent(body), "    ").strip())
        worker = WorkerProcess(
            environment={"PATH": os.environ["PATH"]},
            log=tmp_path / "log",
            watch=watch,
            command=(sys.executable, "-I", "-S", "-c", code),
            **{"limit_data": False, **changes},
        )
        started.append(worker)
        return worker

    yield start
    for worker in started:
        worker.end()


def test_answers_come_back_and_the_process_ends_by_itself(start: Any, watch: MemoryWatch) -> None:
    worker = start('say({"done": {"heard": request["x"]}})')
    assert worker.ask({"do": "a", "x": [1, 2]}, 10) == {"heard": [1, 2]}
    assert worker.ask({"do": "b", "x": None}, 10) == {"heard": None}
    assert watch.pids == {worker.pid}
    assert worker.end() == "exit status 0"
    assert worker.end() == "exit status 0"
    assert watch.pids == set()


@pytest.mark.parametrize(
    ("body", "status", "reason"),
    [
        ("os._exit(3)", Status.CRASH, "ended with exit status 3"),
        ("os.kill(os.getpid(), signal.SIGSEGV)", Status.CRASH, "signal SIGSEGV"),
        ("sys.exit('bad luck')", Status.CRASH, "it said: bad luck"),
        ("os.write(answers, b'no json\\n')", Status.CRASH, "not JSON"),
        ('say({"half": 1})', Status.CRASH, "unknown message"),
        ('say({"failed": {"reason": "r"}})', Status.CRASH, "cannot be read"),
        (
            'say({"failed": {"status": "UNSUPPORTED", "reason": "no such backend"}})',
            Status.UNSUPPORTED,
            "no such backend",
        ),
    ],
)
def test_every_end_is_a_result_with_its_place(
    start: Any, body: str, status: Status, reason: str
) -> None:
    answer = start(body).ask({"do": "open"}, 10)
    assert isinstance(answer, Failure)
    assert answer.status == status
    assert reason in answer.reason
    assert answer.place == "at open"


def test_a_hanging_worker_is_ended_with_all_it_started(start: Any, tmp_path: Path) -> None:
    child = tmp_path / "child"
    worker = start(f"""
        if os.fork() == 0:
            open({str(child)!r}, "w").write(str(os.getpid()))
        time.sleep(60)
    """)
    began = time.monotonic()
    answer = worker.ask({"do": "block"}, 0.5)
    assert isinstance(answer, Failure)
    assert answer.status == Status.TIMEOUT
    assert "no answer within" in answer.reason
    assert time.monotonic() - began < 10
    deadline = time.monotonic() + 5
    while _is_running(int(child.read_text())) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not _is_running(int(child.read_text()))


def _is_running(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:  # noqa: PTH123
            return file.read().rpartition(")")[2].split()[0] not in ("Z", "X")
    except OSError:
        return False


def test_memory_beyond_the_limit_ends_the_worker(start: Any, watch: MemoryWatch) -> None:
    watch.limit = 200 << 20
    answer = start("x = bytearray(b'1') * (300 << 20); time.sleep(60)").ask({"do": "eat"}, 30)
    assert isinstance(answer, Failure)
    assert answer.status == Status.OUT_OF_MEMORY
    assert "209715200 are allowed" in answer.reason


def test_data_beyond_the_limit_cannot_be_had(start: Any, watch: MemoryWatch) -> None:
    watch.limit = 300 << 20
    worker = start(
        """
        time.sleep(0.2)
        try:
            bytearray(400 << 20)
            say({"done": {"got": True}})
        except MemoryError:
            say({"done": {"got": False}})
        """,
        limit_data=True,
    )
    assert worker.ask({"do": "eat"}, 10) == {"got": False}


def test_a_message_may_be_larger_than_a_pipe_and_come_in_pieces() -> None:
    read, write = os.pipe()
    inbox = protocol.Inbox(read)

    def talk() -> None:
        protocol.write(write, {"done": {"samples": list(range(100_000))}})
        protocol.write(write, {"done": {}})
        os.close(write)

    talker = threading.Thread(target=talk)
    talker.start()
    assert inbox.read(deadline=time.monotonic() + 10) == {"done": {"samples": list(range(100_000))}}
    assert inbox.read(deadline=time.monotonic() + 10) == {"done": {}}
    with pytest.raises(protocol.Closed):
        inbox.read(deadline=time.monotonic() + 10)
    talker.join()
    os.close(read)


def test_waiting_watches_and_ends_at_the_deadline() -> None:
    read, write = os.pipe()
    looks: list[float] = []
    with pytest.raises(TimeoutError):
        protocol.Inbox(read).read(
            deadline=time.monotonic() + 0.1,
            tick=0.01,
            watch=lambda: looks.append(time.monotonic()),
        )
    assert len(looks) >= 3
    os.close(read)
    with pytest.raises(protocol.Closed):
        protocol.write(write, {"do": "x"})
    os.close(write)


def test_statuses_keep_the_worst() -> None:
    assert worst(Status.PASS, Status.INCORRECT, Status.FALLBACK) == Status.FALLBACK
    assert worst(Status.TIMEOUT, Status.CRASH) == Status.CRASH
    assert describe_exit(-11) == "signal SIGSEGV"
    assert describe_exit(-250) == "signal 250"
    assert len(clip("x" * 9000)) <= 2000


def test_profiles_pin_what_they_name() -> None:
    flags = frozenset({"avx2", "fma", "avx512f", "avx512bw", "avx512vl", "avx512dq"})
    portable = profiles.pins("portable", 2, flags)
    assert portable["ATEN_CPU_CAPABILITY"] == "avx2"
    assert portable["ONEDNN_MAX_CPU_ISA"] == "AVX2"
    assert portable["MKL_CBWR"] == "COMPATIBLE"
    assert portable["OMP_NUM_THREADS"] == portable["MKL_NUM_THREADS"] == "2"
    assert portable == profiles.pins("portable", 2, frozenset())
    # 32 MiB is the most that every glibc takes for it.
    assert int(portable["MALLOC_MMAP_THRESHOLD_"]) == 32 << 20
    native = profiles.pins("native", 2, flags)
    assert native["ATEN_CPU_CAPABILITY"] == "avx512"
    assert native["ONEDNN_MAX_CPU_ISA"] == "AVX512_CORE"
    assert "MKL_CBWR" not in native
    assert profiles.pins("native", 1, frozenset({"sse2"}))["ATEN_CPU_CAPABILITY"] == "default"


def test_a_worker_inherits_nothing_that_changes_results() -> None:
    outer = {
        "PATH": "/bin",
        "HOME": "/tmp",
        "OMP_NUM_THREADS": "77",
        "LD_PRELOAD": "/evil.so",
        "PYTORCH_CUDA_ALLOC_CONF": "x",
        "PYTHONPATH": "/extra",
        "GITHUB_TOKEN": "t0ken",
        "CUTE_DSL_ARCH": "sm_80",
        "FA_CLC": "1",
        "FLASHINFER_CUDA_ARCH_LIST": "8.0",
        "CUDA_VISIBLE_DEVICES": "0",
    }
    environment, recorded = profiles.worker_environment(
        outer, profile="native", threads=1, device="cpu", flags=frozenset()
    )
    assert environment["OMP_NUM_THREADS"] == "1"
    assert environment["PATH"] == "/bin"
    assert environment["CUDA_VISIBLE_DEVICES"] == "0"
    assert environment["PYTHONPATH"].endswith(":/extra")
    assert not {"LD_PRELOAD", "PYTORCH_CUDA_ALLOC_CONF", "GITHUB_TOKEN"} & set(environment)
    assert recorded["dropped"] == (
        "CUTE_DSL_ARCH FA_CLC FLASHINFER_CUDA_ARCH_LIST"
        " LD_PRELOAD OMP_NUM_THREADS PYTORCH_CUDA_ALLOC_CONF"
    )
    assert "t0ken" not in str(recorded)
    assert recorded["ATTNREPRO_DEVICE"] == "cpu"


@pytest.mark.slow
def test_no_process_faults_its_temporaries_in_at_every_call() -> None:
    # Without the heap's thresholds about one process in three has 1,500 faults a call.
    code = """
import resource, torch
torch.set_num_threads(1)
q, k, v = (torch.randn(1, 8, 256, 64) for _ in range(3))
def step():
    w = torch.exp(q @ k.mT)
    return (w / w.sum(-1, keepdim=True)) @ v
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(20):
    step()
before = faults()
for _ in range(20):
    step()
print((faults() - before) // 20)
"""
    environment, _ = profiles.worker_environment(
        os.environ, profile="native", threads=1, device="cpu", flags=profiles.cpu_flags()
    )
    found = [
        int(
            subprocess.run(
                [sys.executable, "-c", code],
                env=environment,
                check=True,
                capture_output=True,
                text=True,
                timeout=120,
            ).stdout
        )
        for _ in range(8)
    ]
    assert max(found) < 200, found


def test_memory_limits_come_from_the_least_bound(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal: 9 kB\nMemAvailable:    1000000 kB\n")
    assert limits.memory_limit(None, tmp_path) == 921_600_000
    group = tmp_path / "sys/fs/cgroup"
    group.mkdir(parents=True)
    (group / "memory.max").write_text("500000000\n")
    assert limits.memory_limit(None, tmp_path) == 450_000_000
    assert limits.memory_limit(1000, tmp_path) == 1000
    (group / "memory.max").write_text("max\n")
    assert limits.memory_limit(None, tmp_path) == 921_600_000
    (group / "memory").mkdir()
    (group / "memory/memory.limit_in_bytes").write_text("9223372036854771712\n")
    assert limits.group_limit(tmp_path) is None
    (group / "memory/memory.limit_in_bytes").write_text("123\n")
    assert limits.group_limit(tmp_path) == 123


def test_kernel_kills_are_counted_in_both_versions(tmp_path: Path) -> None:
    assert limits.kernel_kills(tmp_path) is None
    group = tmp_path / "sys/fs/cgroup"
    (group / "memory").mkdir(parents=True)
    (group / "memory/memory.oom_control").write_text("under_oom 0\noom_kill 2\n")
    assert limits.kernel_kills(tmp_path) == 2
    (group / "memory.events").write_text("oom 9\noom_kill 3\n")
    assert limits.kernel_kills(tmp_path) == 3


def test_resident_counts_this_process_and_ignores_ghosts() -> None:
    assert limits.resident([os.getpid()]) > 5 << 20
    assert limits.resident([2**22 + 1]) == 0


def test_priming_judges_and_profiles_without_a_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    from attnrepro_runner import kernels, oracle, stages

    done: list[str] = []
    check = oracle.Oracle.check

    def counted(self: oracle.Oracle, *given: Any, **named: Any) -> oracle.OracleReport:
        done.append("check")
        return check(self, *given, **named)

    monkeypatch.setattr(oracle.Oracle, "check", counted)
    profile = kernels.profile

    def seen(work: Any, *, on_device: bool) -> kernels.Seen:
        done.append(f"profile, on a device: {on_device}")
        return profile(work, on_device=False)

    monkeypatch.setattr(kernels, "profile", seen)
    stages.prime(torch.device("cpu"))
    assert done == ["profile, on a device: False", "check"]
