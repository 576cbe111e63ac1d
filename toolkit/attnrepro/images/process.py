"""Running other programs: argument lists, output kept for the error, no orphans."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from attnrepro.errors import BuildFailed, Unavailable
from attnrepro.signals import signals_held

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

_TAIL_LINES = 40


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a program ended."""

    code: int
    tail: str
    """Its last lines, both streams."""


def stream(
    command: Sequence[str],
    *,
    progress: Callable[[str], None],
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    every_line: bool = False,
) -> Outcome:
    """Run a program to its end; its own process group is ended if we are interrupted.

    Args:
        command: Program and arguments.
        progress: Told the command, and every line of output if `every_line`.
        env: Whole environment; ours if None.
        cwd: Working folder.
        every_line: Whether output is worth telling while it comes.

    Raises:
        Unavailable: the program is not installed.
    """
    progress("+ " + shlex.join(command))
    tail: deque[str] = deque(maxlen=_TAIL_LINES)
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=env,
            cwd=cwd,
            text=True,
            errors="replace",
            start_new_session=True,
        )
    except FileNotFoundError:
        message = f"{command[0]} is not installed"
        raise Unavailable(message) from None
    assert process.stdout is not None
    try:
        for line in process.stdout:
            tail.append(line.rstrip())
            if every_line and line.strip():
                progress("  " + line.rstrip())
        code = process.wait()
    except BaseException:
        with signals_held():  # a second Ctrl-C must not orphan what the first one ends
            _end(process)
        raise
    finally:
        process.stdout.close()
    return Outcome(code=code, tail="\n".join(tail))


def _end(process: subprocess.Popen[str]) -> None:
    """Ask the whole group to stop as a Ctrl-C would, then make it; returns when it is gone."""
    for sign, seconds in ((signal.SIGINT, 10.0), (signal.SIGTERM, 5.0), (signal.SIGKILL, 5.0)):
        deadline = time.monotonic() + seconds
        try:
            os.killpg(process.pid, sign)
            while time.monotonic() < deadline:
                process.poll()  # reaps the leader, without which the group never ends
                os.killpg(process.pid, 0)
                if sign is signal.SIGINT and process.returncode is not None:
                    break  # what a shell left in the background ignores the first signal
                time.sleep(0.02)
        except ProcessLookupError:
            return


def run(
    command: Sequence[str],
    *,
    progress: Callable[[str], None],
    doing: str,
    hint: str | None = None,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    every_line: bool = False,
) -> str:
    """`stream`, and a BuildFailed that ends with the program's last lines if it failed."""
    outcome = stream(command, progress=progress, env=env, cwd=cwd, every_line=every_line)
    if outcome.code:
        message = f"{doing} failed ({command[0]} gave {outcome.code}):\n{outcome.tail}"
        raise BuildFailed(message, hint=hint)
    return outcome.tail


def output(command: Sequence[str], *, seconds: float = 20) -> str | None:
    """Standard output of a short question to a program; None if it cannot be asked."""
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=seconds,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None
