"""One worker process seen from outside: started, asked, watched, ended.

A worker leads a session of its own, so that ending it ends what it started; its address space is
not limited (a GPU's library reserves terabytes) but its data is on a CPU, and the resident memory
of all workers is watched while one works.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol

from attnrepro_runner import limits, protocol
from attnrepro_runner.elapsed import elapsed_ns
from attnrepro_runner.status import Failure, Status, describe_exit

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

COMMAND: Final = (sys.executable, "-P", "-m", "attnrepro_runner", "worker")

_GRACE_S: Final = 2.0
"""Between asking a worker to end and ending it."""

_IDLE: Final = "idle"
_TAIL_BYTES: Final = 2000


class Worker(Protocol):
    """What the coordinator needs of a worker; a test's fake is another one."""

    pid: int
    start_ns: int

    def send(self, request: Mapping[str, object]) -> None:
        """Send a request without waiting."""
        ...

    def receive(self, seconds: float) -> dict[str, object] | Failure:
        """Wait for the answer to a request that was sent."""
        ...

    def ask(self, request: Mapping[str, object], seconds: float) -> dict[str, object] | Failure:
        """Send a request and wait for its answer."""
        ...

    def kill(self) -> None:
        """Kill the process and leave the rest to whoever waits for its answer."""
        ...

    def end(self) -> str:
        """End the process if it is not ended; say how it ended."""
        ...


class MemoryLimitReached(Exception):
    """All workers together hold more than they may."""


@dataclass
class MemoryWatch:
    """Counts the resident memory of the live workers."""

    limit: int
    pids: set[int]

    def look(self) -> None:
        """Raise MemoryLimitReached where the limit is passed."""
        held = limits.resident(self.pids.copy())  # another thread may start or end a worker
        if held > self.limit:
            message = f"the workers hold {held} bytes; {self.limit} are allowed"
            raise MemoryLimitReached(message)


class WorkerProcess:
    """A worker of this machine."""

    def __init__(
        self,
        *,
        environment: Mapping[str, str],
        log: Path,
        watch: MemoryWatch,
        limit_data: bool,
        command: Sequence[str] = COMMAND,
    ) -> None:
        """Start the process; it answers nothing before the first request.

        The command is given the descriptors of requests and answers as two more arguments.
        """
        request_read, request_write = os.pipe()
        answer_read, answer_write = os.pipe()
        self._watch = watch
        self._place: str | None = "start"
        self._log = log
        self._kills = limits.kernel_kills()
        self.start_ns = elapsed_ns()
        with log.open("ab") as output:
            self._log_start = output.tell()
            try:
                self._process = subprocess.Popen(
                    [*command, str(request_read), str(answer_write)],
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    env=dict(environment),
                    pass_fds=(request_read, answer_write),
                    start_new_session=True,
                )
            except BaseException:
                for descriptor in (request_write, answer_read):
                    os.close(descriptor)
                raise
            finally:
                os.close(request_read)
                os.close(answer_write)
        self.pid = self._process.pid
        if limit_data:
            with contextlib.suppress(ProcessLookupError):
                resource.prlimit(self.pid, resource.RLIMIT_DATA, (watch.limit, watch.limit))
        self._requests, self._answers = request_write, answer_read
        self._inbox = protocol.Inbox(answer_read)
        self._ended: str | None = None
        watch.pids.add(self.pid)

    def send(self, request: Mapping[str, object]) -> None:
        """Send a request without waiting."""
        with contextlib.suppress(protocol.Closed):  # the next `receive` sees how it ended
            protocol.write(self._requests, request)

    def receive(self, seconds: float) -> dict[str, object] | Failure:
        """Wait for the answer to a request that was sent.

        A worker that ends, needs too long or takes too much memory is ended, and the failure says
        what it was doing.
        """
        deadline = time.monotonic() + seconds
        try:
            while True:
                message = self._inbox.read(deadline=deadline, watch=self._watch.look)
                if "note" in message:
                    self._place = str(message["note"])
                elif isinstance(done := message.get("done"), dict):
                    self._place = _IDLE
                    return done
                elif isinstance(failed := message.get("failed"), dict):
                    return Failure(
                        status=Status(str(failed["status"])),
                        reason=str(failed["reason"]),
                        place=self._place,
                    )
                else:
                    text = f"unknown message {str(message)[:80]}"
                    raise protocol.BadMessage(text)
        except protocol.Closed:
            return self._crashed()
        except TimeoutError:
            self.end()
            reason = f"no answer within {seconds:.0f} s; the worker was ended"
            return Failure(status=Status.TIMEOUT, reason=reason, place=self._place)
        except MemoryLimitReached as error:
            self.end()
            return Failure(
                status=Status.OUT_OF_MEMORY,
                reason=f"{error}; the worker was ended",
                place=self._place,
            )
        except (protocol.BadMessage, KeyError, ValueError) as error:
            self.end()
            reason = f"the worker's answer cannot be read: {error}"
            return Failure(status=Status.CRASH, reason=reason, place=self._place)

    def ask(self, request: Mapping[str, object], seconds: float) -> dict[str, object] | Failure:
        """Send a request and wait for its answer."""
        self.send(request)
        return self.receive(seconds)

    def kill(self) -> None:
        """Kill the process and leave the rest to whoever waits for its answer."""
        self._signal(signal.SIGKILL)

    def end(self) -> str:
        """End the process and all it started; say how it ended."""
        if self._ended is not None:
            return self._ended
        os.close(self._requests)
        try:
            code = self._process.wait(_GRACE_S if self._place == _IDLE else 0)
        except subprocess.TimeoutExpired:
            self._signal(signal.SIGKILL)
            code = self._process.wait()
        # What the worker started may outlive it.
        self._signal(signal.SIGKILL)
        os.close(self._answers)
        self._watch.pids.discard(self.pid)
        self._ended = describe_exit(code)
        return self._ended

    def _crashed(self) -> Failure:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_GRACE_S)
        how = self.end()
        reason = f"the worker ended with {how}"
        status = Status.CRASH
        if how == "signal SIGKILL":
            before, after = self._kills, limits.kernel_kills()
            if before is not None and after is not None and after > before:
                status, reason = Status.OUT_OF_MEMORY, "the kernel ended it for want of memory"
        if tail := self._tail():
            reason = f"{reason}; it said: {tail}"
        return Failure(status=status, reason=reason, place=self._place)

    def _tail(self) -> str:
        with contextlib.suppress(OSError):
            with self._log.open("rb") as file:
                file.seek(max(self._log_start, self._log.stat().st_size - _TAIL_BYTES))
                lines = file.read().decode("utf-8", "replace").splitlines()
            return " | ".join(line.strip() for line in lines[-3:] if line.strip())[-500:]
        return ""

    def _signal(self, number: signal.Signals) -> None:
        # The session has the id of its leader; with the leader waited for, only its group is left.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, number)
