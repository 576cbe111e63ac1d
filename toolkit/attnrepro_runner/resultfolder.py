"""The one folder that the runner writes: tasks/, samples/, telemetry/, logs/.

A task's result is renamed into place after its samples and telemetry, so that a task whose file is
there is complete, whatever killed the runner later.
"""

from __future__ import annotations

import json
import os
import secrets
import struct
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path


class ResultFolder:
    """Names and writes the files of one run."""

    def __init__(self, path: Path, run: str) -> None:
        """Use a folder; only results of the run with this id count as done."""
        self.path = path
        self.run = run
        for name in ("tasks", "samples", "telemetry", "logs"):
            (path / name).mkdir(parents=True, exist_ok=True)

    def result(self, task: str) -> dict[str, object] | None:
        """Return a finished task's result, or None."""
        try:
            document = json.loads((self.path / "tasks" / f"{task}.json").read_bytes())
        except (OSError, ValueError):
            return None
        if not isinstance(document, dict) or document.get("run") != self.run:
            return None
        return document

    def log(self, task: str, subject: str) -> Path:
        """Return the file that a worker's output is appended to."""
        return self.path / "logs" / f"{task}-{subject}.log"

    def write_result(self, document: Mapping[str, object]) -> None:
        """Write a task's result; it is finished then."""
        data = json.dumps(document, sort_keys=True, allow_nan=False).encode() + b"\n"
        atomic_write(self.path / "tasks" / f"{document['task']}.json", data)

    def write_samples(
        self, task: str, cell: str, subject: str, clock: str, samples: Sequence[int]
    ) -> str:
        """Write samples in time order as little-endian int64 ns; return the member's name."""
        member = f"samples/{task}/{cell}-{subject}-{clock}.i64"
        target = self.path / member
        target.parent.mkdir(exist_ok=True)
        atomic_write(target, struct.pack(f"<{len(samples)}q", *samples))
        return member

    def write_telemetry(self, task: str, document: Mapping[str, object]) -> str:
        """Write a task's telemetry; return the member's name."""
        member = f"telemetry/{task}.json"
        data = json.dumps(document, separators=(",", ":"), sort_keys=True).encode() + b"\n"
        atomic_write(self.path / member, data)
        return member


def atomic_write(path: Path, data: bytes) -> None:
    """Write under a temporary name, sync, rename; a failure leaves nothing behind.

    Raises:
        OSError: the disk is full, or the folder is not writable.

    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(6)}.tmp")
    try:
        with temporary.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise
    descriptor = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
