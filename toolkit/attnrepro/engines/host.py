"""The bare host: no container. For machines without an engine, and never called contained.

The same specs run here: paths under a mount's target are replaced by the mount's source, caches
and HOME lie in a private folder that is removed afterwards.
"""

from __future__ import annotations

import os
import platform
import signal
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

from attnrepro.engines import closed
from attnrepro.engines.base import EngineFacts
from attnrepro.engines.gpu import EngineDoors
from attnrepro.errors import Unavailable
from attnrepro.signals import signals_held

if TYPE_CHECKING:
    from collections.abc import Callable

    from attnrepro.engines.base import ContainerSpec, ExitStatus, ImageIdentity, Mount

_MARKER: Final = "ATTNREPRO_CONTAINER"
_PYTHONS: Final = ("python3", "python")


class HostEngine:
    """Runs a spec's command as a plain process group of this user."""

    name = "host"

    def __init__(self, python: Path | None = None) -> None:
        """Use `python` where a command begins with `python3`; default: this interpreter."""
        self._python = python or Path(sys.executable)

    def facts(self) -> EngineFacts:
        """See `Engine.facts`."""
        return EngineFacts(
            name="host",
            version=platform.release(),
            store="none",
            runtime="none",
            cgroup_version="none",
            rootless=os.getuid() != 0,
            contained=False,
            detail={"python": platform.python_version()},
        )

    def doors(self) -> EngineDoors:
        """Answer for GPUs: every device is simply there."""
        return EngineDoors(cdi=False, cdi_reason="there is no container", nvidia_runtime=False)

    def ensure_image(self, identity: ImageIdentity) -> str:  # noqa: ARG002 - the Protocol's
        """See `Engine.ensure_image`: there is no image, and the empty id says so."""
        return ""

    def remove_image(self, identity: ImageIdentity) -> None:
        """See `Engine.remove_image`: there is none."""

    def run(
        self, spec: ContainerSpec, *, log: Path, stop: Callable[[], bool] | None = None
    ) -> ExitStatus:
        """See `Engine.run`. Memory, processes and network are not limited; the facts say so."""
        closed.check_sources(spec)
        with (
            tempfile.TemporaryDirectory(prefix="attnrepro-", ignore_cleanup_errors=True) as private,
            closed.ended_by_signals(),
        ):
            command = [translated(part, spec.mounts) for part in spec.command]
            if spec.command[0] in _PYTHONS:
                command[0] = str(self._python)
            if spec.cpuset is not None:
                command = closed.pinned(command, spec.cpuset)
            return self._run(spec, command, Path(private), log, stop)

    def _run(
        self,
        spec: ContainerSpec,
        command: list[str],
        private: Path,
        log: Path,
        stop: Callable[[], bool] | None,
    ) -> ExitStatus:
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                cwd=private,
                env=host_environment(spec, private),
            )
        except OSError as error:
            message = f"cannot start {command[0]}: {error.strerror}"
            raise Unavailable(message, hint="name another interpreter with --python") from None
        with process:
            try:
                assert process.stdout is not None
                copy = closed.LogCopy(closed.chunks(process.stdout), log)
                copy.start()
                done = threading.Event()
                threading.Thread(target=closed.wait_for, args=(process, done), daemon=True).start()
                began = time.monotonic_ns()
                limit = spec.timeout_seconds
                ending = closed.watch(
                    done,
                    deadline_ns=None if limit is None else began + int(limit * 1e9),
                    stop=stop,
                )
            finally:
                with signals_held():
                    kill_marked(spec.name)
            process.wait()
            duration = time.monotonic_ns() - began
            copy.finish()
        code = process.returncode
        unlimited = "not enforced: no container"
        return closed.status_of(
            ending,
            128 - code if code < 0 else code,
            oom_killed=False,
            duration_ns=duration,
            facts={"limit_memory_bytes": unlimited, "limit_pids_limit": unlimited},
        )


def kill_marked(name: str) -> None:
    """Kill every process that was started for a run, in whatever session or group it is.

    Workers have sessions of their own, so a group is not enough; they inherit the marker.
    """
    marker = f"{_MARKER}={name}".encode()
    while True:
        found = [pid for pid in _pids() if marker in _environment_of(pid)]
        if not found:
            return
        for pid in found:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)


def _pids() -> list[int]:
    return [int(p.name) for p in Path("/proc").iterdir() if p.name.isdecimal()]


def _environment_of(pid: int) -> list[bytes]:
    # Empty for a zombie, for another user's process and for one that is gone.
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return []


def translated(text: str, mounts: tuple[Mount, ...]) -> str:
    """Replace a path under a mount's target by the path under its source, also after `--x=`."""
    option, equals, value = text.partition("=") if text.startswith("-") else ("", "", text)
    for mount in sorted(mounts, key=lambda m: len(m.target), reverse=True):
        if value == mount.target or value.startswith(f"{mount.target}/"):
            return f"{option}{equals}{mount.source}{value[len(mount.target) :]}"
    return text


def host_environment(spec: ContainerSpec, private: Path) -> dict[str, str]:
    """Compose the process's whole environment: nothing of the user's own but PATH.

    Libraries of a GPU driver are found as the host finds them, so LD_LIBRARY_PATH is kept too.
    """
    kept = {n: os.environ[n] for n in ("PATH", "LD_LIBRARY_PATH") if n in os.environ}
    inside = {
        name: value.replace("/tmp", str(private), 1) if value.startswith("/tmp") else value
        for name, value in closed.environment(spec).items()
        if name != "LD_LIBRARY_PATH"
    }
    if "PYTHONPATH" in inside:
        entries = inside["PYTHONPATH"].split(":")
        inside["PYTHONPATH"] = ":".join(translated(entry, spec.mounts) for entry in entries)
    visible = dict(spec.gpu.visible) if spec.gpu else {}
    return kept | inside | visible | {_MARKER: spec.name}
