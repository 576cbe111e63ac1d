"""What every engine gives a closed container alike: environment, /tmp, labels, log, preflight."""

from __future__ import annotations

import os
import resource
import secrets
import signal
import sys
import threading
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, BinaryIO, Final

from attnrepro.engines.base import ContainerSpec, ExitStatus, Mount
from attnrepro.errors import ImageDiffers, Interrupted, Unavailable, UsageError
from attnrepro.signals import handled

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable, Iterable, Iterator
    from types import FrameType

    from attnrepro.engines.base import Engine, ImageIdentity

POLL_SECONDS: Final = 0.2
"""How often `stop` and the time limit are looked at; the host does nothing else meanwhile."""
LOG_LIMIT: Final = 64 << 20
"""Bytes kept of a container's output; the rest is read and dropped, so that no disk fills."""
SHM_BYTES: Final = 256 << 20

_TMP: Final = "/tmp"
_CACHES: Final = {
    "HOME": _TMP,
    "TMPDIR": _TMP,
    "XDG_CACHE_HOME": f"{_TMP}/cache",
    "TRITON_CACHE_DIR": f"{_TMP}/triton",
    "TORCHINDUCTOR_CACHE_DIR": f"{_TMP}/inductor",
    "CUDA_CACHE_PATH": f"{_TMP}/cuda",
    # A uid without a passwd entry: getpass.getuser(), which Inductor calls, needs a name.
    "USER": "attnrepro",
    "LOGNAME": "attnrepro",
}

PREFLIGHT: Final = r"""
fail() { echo "failed: $1"; exit 9; }
printf '#!/bin/sh\nexit 7\n' >/tmp/attnrepro-preflight || fail "/tmp is not writable"
chmod 755 /tmp/attnrepro-preflight
/tmp/attnrepro-preflight
[ $? = 7 ] || fail "/tmp does not execute"
rm /tmp/attnrepro-preflight
if ( : >/attnrepro-preflight ) 2>/dev/null; then fail "the root file system is writable"; fi
while read -r key value; do
    case $key in CapEff:|CapBnd:|NoNewPrivs:|Seccomp:) echo "${key%:}=$value" ;; esac
done </proc/self/status
interfaces=
for path in /sys/class/net/*; do interfaces="$interfaces${interfaces:+,}${path##*/}"; done
echo "interfaces=$interfaces"
if ( : >/dev/shm/attnrepro-preflight ) 2>/dev/null; then echo shm=writable; else echo shm=closed; fi
echo ok=yes
"""
"""Shell lines that prove, inside the container, what was asked for outside."""


def container_name() -> str:
    """Make a fresh container name."""
    return f"attnrepro-{secrets.token_hex(6)}"


def environment(spec: ContainerSpec) -> dict[str, str]:
    """Compose a container's whole environment: the spec's, caches inside /tmp, the driver."""
    result = {**spec.environment, **_CACHES}
    if spec.gpu and spec.gpu.library_path:
        result["LD_LIBRARY_PATH"] = ":".join(spec.gpu.library_path)
    return dict(sorted(result.items()))


def mounts(spec: ContainerSpec) -> tuple[Mount, ...]:
    """List the spec's mounts, then the device's driver files, read-only."""
    driver = spec.gpu.mounts if spec.gpu else ()
    return (
        *spec.mounts,
        *(Mount(source=Path(host), target=inside, read_only=True) for host, inside in driver),
    )


def tmpfs_options(spec: ContainerSpec) -> str:
    """Give /tmp's mount options. `exec`, or Inductor, Triton and CuTe DSL die obscurely."""
    return f"rw,exec,nosuid,nodev,mode=1777,size={spec.tmpfs_bytes}"


def nofile(spec: ContainerSpec) -> int:
    """Clamp the limit of open files to this process's own hard limit.

    A runtime that lacks CAP_SYS_RESOURCE, as in a sandbox, cannot raise it and fails to start.
    """
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    return spec.nofile if hard == resource.RLIM_INFINITY else min(spec.nofile, hard)


def pinned(command: list[str], cpuset: str) -> list[str]:
    """Wrap a command so that it, and all it starts, runs on the given cores only."""
    cores = sorted(cores_of(cpuset))
    code = (
        "import os, sys; os.sched_setaffinity(0, map(int, sys.argv[1].split(',')));"
        "os.execvp(sys.argv[2], sys.argv[2:])"
    )
    return [sys.executable, "-I", "-S", "-c", code, ",".join(map(str, cores)), *command]


def cores_of(cpuset: str) -> set[int]:
    """Expand the kernel's list form: "0-2,8" is {0, 1, 2, 8}."""
    cores: set[int] = set()
    for part in cpuset.split(","):
        first, _, last = part.partition("-")
        cores.update(range(int(first), int(last or first) + 1))
    return cores


def gpu_facts(spec: ContainerSpec) -> dict[str, str]:
    """Tell how the device entered."""
    return dict(spec.gpu.facts) if spec.gpu else {}


def owner() -> str:
    """Label value that names this process: boot, pid namespace, pid, start time."""
    return f"{_machine()}:{os.getpid()}:{_started(os.getpid())}"


def orphaned(label: str) -> bool:
    """Tell whether a labelled container's owner was a process of this machine that is gone.

    Owners on other machines, or in other pid namespaces, cannot be judged: False.
    """
    machine, _, process = label.rpartition(":")[0].rpartition(":")
    started = label.rpartition(":")[2]
    if machine != _machine() or not process.isdecimal():
        return False
    return _started(int(process)) != started


def _machine() -> str:
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return f"{boot}:{Path('/proc/self/ns/pid').stat().st_ino}"


def _started(pid: int) -> str:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    return stat.rpartition(")")[2].split()[19]


class _Terminated(KeyboardInterrupt):
    """Raised by the handler: a BaseException, so that no library on the way swallows it."""


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """Let SIGTERM and SIGHUP unwind the stack, so that the container is removed, then Interrupted.

    Only the main thread can set handlers; elsewhere this does nothing.
    """

    def handler(number: int, _frame: FrameType | None) -> None:
        raise _Terminated(signal.Signals(number).name)

    try:
        with handled((signal.SIGTERM, signal.SIGHUP), handler):
            yield
    except _Terminated as error:
        message = f"stopped by {error}; the container was removed"
        raise Interrupted(message) from None


class LogCopy(threading.Thread):
    """Copies a container's output into a file until it ends; keeps the first `LOG_LIMIT` bytes."""

    def __init__(self, chunks: Iterable[bytes], log: Path) -> None:
        super().__init__(name="attnrepro-log", daemon=True)
        self._chunks = chunks
        self._log = log
        self._file = open_log(log)
        self._lost: OSError | None = None

    def run(self) -> None:
        """Copy; a failed write does not stop the reading, or the container would block."""
        kept = 0
        # Whatever the transport raises when the engine goes away: the waiting thread tells it.
        with self._file as file, suppress(Exception):
            for chunk in self._chunks:
                if self._lost is None and kept < LOG_LIMIT:
                    kept += len(chunk)
                    self._write(file, chunk, full=kept >= LOG_LIMIT)

    def _write(self, file: BinaryIO, chunk: bytes, *, full: bool) -> None:
        try:
            file.write(chunk)
            if full:
                file.write(f"\n[attnrepro: output beyond {LOG_LIMIT} bytes dropped]\n".encode())
            file.flush()
        except OSError as error:
            self._lost = error

    def finish(self) -> None:
        """Wait for the last bytes. Raises UsageError where the log could not be written."""
        self.join(timeout=10)
        if self._lost is not None:
            message = f"cannot write {self._log}: {self._lost.strerror}"
            raise UsageError(message, hint="free some space there, or use another --out")


def open_log(log: Path) -> BinaryIO:
    """Open a log file for writing. Raises UsageError (not writable, disk full)."""
    try:
        return log.open("wb")
    except OSError as error:
        message = f"cannot write {log}: {error.strerror}"
        raise UsageError(message, hint="choose a folder that you may write") from None


def check_sources(spec: ContainerSpec) -> None:
    """Check that every mount's source exists, before an engine makes a folder of it.

    Raises UsageError.
    """
    for mount in mounts(spec):
        if not mount.source.exists():
            message = f"{mount.source} does not exist, but {mount.target} is to be mounted from it"
            raise UsageError(message)
        if not mount.read_only and not os.access(mount.source, os.W_OK):
            message = f"{mount.source} is not writable"
            raise UsageError(message, hint="choose another --out")


def differs(identity: ImageIdentity, want: str, found: str, engine: str) -> ImageDiffers:
    """Make the error for an image that is not the one asked for."""
    return ImageDiffers(
        f"{engine} holds {identity.name} as {found}, not as {want}",
        hint="attnrepro build makes the image anew",
    )


def chunks(stream: IO[bytes]) -> Iterator[bytes]:
    """Read a pipe as it fills, not by whole buffers."""
    while chunk := os.read(stream.fileno(), 1 << 16):
        yield chunk


def wait_for(process: subprocess.Popen[bytes], done: threading.Event) -> None:
    """Body of the thread that blocks until a process ends."""
    process.wait()
    done.set()


def watch(
    done: threading.Event, *, deadline_ns: int | None, stop: Callable[[], bool] | None
) -> str:
    """Wait until the container is done, its time (on the monotonic clock) is up, or `stop` says so.

    Returns `done`, `timeout` or `stop`.
    """
    while not done.wait(POLL_SECONDS):
        if deadline_ns is not None and time.monotonic_ns() >= deadline_ns:
            return "timeout"
        if stop is not None and stop():
            return "stop"
    return "done"


def preflight(engine: Engine, spec: ContainerSpec, *, log: Path) -> dict[str, str]:
    """Run the closed container once with shell lines that prove it is closed, and that /tmp works.

    The bare host has nothing to prove: {}. Returns what the container saw (`CapEff`, `NoNewPrivs`,
    `Seccomp`, `interfaces`, `shm`).

    Raises Unavailable naming what is open or does not work.
    """
    if not engine.facts().contained:
        return {}
    status = engine.run(_with_command(spec, ("/bin/sh", "-c", PREFLIGHT)), log=log)
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    facts = dict(line.split("=", 1) for line in lines if "=" in line and " " not in line)
    problems = [line for line in lines if line.startswith("failed: ")]
    if facts.get("CapEff", "").strip("0"):
        problems.append(f"failed: the container holds capabilities {facts['CapEff']}")
    if facts.get("NoNewPrivs") not in ("1", None):
        problems.append("failed: the container may gain privileges")
    if others := set(facts.get("interfaces", "").split(",")) - {"lo", "*", ""}:
        problems.append(f"failed: the container sees network interfaces {sorted(others)}")
    if status.code != 0 or facts.pop("ok", None) != "yes" or problems:
        told = "; ".join(problems or lines[-3:]) or f"exit code {status.code}"
        message = f"the container is not as it must be: {told}"
        raise Unavailable(message, hint="attnrepro doctor checks the engine")
    return {f"preflight_{k}": v for k, v in sorted(facts.items())}


def _with_command(spec: ContainerSpec, command: tuple[str, ...]) -> ContainerSpec:
    from dataclasses import replace

    return replace(spec, command=command, name=container_name(), timeout_seconds=60)


def status_of(
    ending: str, code: int, *, oom_killed: bool, duration_ns: int, facts: dict[str, str]
) -> ExitStatus:
    """Put an ending together."""
    return ExitStatus(
        code=code if ending == "done" else None,
        timed_out=ending == "timeout",
        oom_killed=oom_killed,
        stopped=ending == "stop",
        duration_ns=duration_ns,
        engine_facts=facts,
    )
