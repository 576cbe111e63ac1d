"""The run folder: everything of a run that is not yet in an artifact, so that it can be resumed.

    ROOT/NAME-KEY/
        run.json            what is run (its key), since when, how often it was started
        runner.whl          the runner as mounted
        SEGMENT/job.json    what the runner was given
        SEGMENT/out/        the one folder that the container writes: tasks/, samples/, telemetry/
        SEGMENT/logs/       output of each start

KEY is a digest of manifest, images, runner, engine and plan: only the very same run is resumed.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import shutil
import stat
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, Final

from attnrepro import files, jsonio, schema
from attnrepro.errors import AttnreproError, InvalidDocument, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

DEFAULT_ROOT: Final = "attnrepro-runs"
_STATE: Final = "run.json"
_LARGEST_RESULT: Final = 64 << 20
_LARGEST_FILE: Final = 64 << 20


@dataclass(frozen=True, kw_only=True)
class State:
    """What run.json says."""

    key: str
    run_id: str
    started_utc: str
    elapsed_ns: int
    starts: int

    @property
    def resumed(self) -> bool:
        """Whether this is not the first start."""
        return self.starts > 1


class RunFolder:
    """One run folder, held by this process (see `engines.lock.run_lock`)."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def wheel(self) -> Path:
        """The runner as mounted."""
        return self.path / "runner.whl"

    def job(self, segment: str) -> Path:
        """Job file of a segment."""
        return self.path / segment / "job.json"

    def out(self, segment: str) -> Path:
        """Folder that a segment's container writes."""
        return self.path / segment / "out"

    def next_log(self, segment: str) -> Path:
        """A log file that no earlier start has used."""
        folder = self.path / segment / "logs"
        folder.mkdir(parents=True, exist_ok=True)
        return folder / f"start-{len(list(folder.iterdir()))}.log"

    def start(self, key: str) -> State:
        """Go on with the same run, or begin anew where the folder holds another or a broken one.

        Raises UsageError where the folder cannot be written.
        """
        before = self._state()
        if before is not None and before.key == key:
            state = State(
                key=key,
                run_id=before.run_id,
                started_utc=before.started_utc,
                elapsed_ns=before.elapsed_ns,
                starts=before.starts + 1,
            )
        else:
            self.clear()
            now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
            state = State(
                key=key, run_id=secrets.token_hex(8), started_utc=now, elapsed_ns=0, starts=1
            )
        self.save(state)
        return state

    def save(self, state: State) -> None:
        """Write run.json."""
        document = {
            "key": state.key,
            "run": state.run_id,
            "started_utc": state.started_utc,
            "elapsed_ns": state.elapsed_ns,
            "starts": state.starts,
        }
        files.atomic_write(self.path / _STATE, json.dumps(document).encode())

    def clear(self) -> None:
        """Remove everything but the lock, which this process holds."""
        for entry in self.path.iterdir():
            if entry.name == ".lock":
                continue
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry)
            else:
                entry.unlink()

    def remove(self) -> None:
        """Remove the folder, after its contents have become an artifact."""
        shutil.rmtree(self.path, ignore_errors=True)
        try:
            self.path.parent.rmdir()
        except OSError:
            return  # other runs are still in it

    def _state(self) -> State | None:
        try:
            document = jsonio.loads((self.path / _STATE).read_bytes(), what=_STATE)
            return State(
                key=str(document["key"]),
                run_id=str(document["run"]),
                started_utc=str(document["started_utc"]),
                elapsed_ns=int(document["elapsed_ns"]),
                starts=int(document["starts"]),
            )
        except (OSError, InvalidDocument, KeyError, TypeError, ValueError):
            return None

    # What the container wrote. It is read as a stranger's: no link is followed, sizes are limited.

    def results(self, segment: str, run_id: str) -> Iterator[dict[str, Any]]:
        """Valid results of a segment's finished tasks, by name.

        A file that is broken, or of another run, is removed so that its task runs again.
        """
        for path in self._result_files(segment):
            try:
                document = self._result(path)
            except (OSError, AttnreproError):
                path.unlink()
                continue
            if document["run"] == run_id:
                yield document
            else:
                path.unlink()

    def check_results(self, segment: str) -> None:
        """Hold what the runner has just written against the schema.

        Raises AttnreproError naming the first problem: a result that is not valid is a mistake of
        the runner, and is not taken for one that is missing.
        """
        for path in self._result_files(segment):
            try:
                self._result(path)
            except OSError as error:
                message = f"the runner's result {path.name} cannot be read: {error}"
                raise AttnreproError(message) from error

    def _result_files(self, segment: str) -> list[Path]:
        folder = self.out(segment) / "tasks"
        return sorted(folder.glob("*.json")) if folder.is_dir() else []

    def _result(self, path: Path) -> dict[str, Any]:
        """Raises OSError, AttnreproError."""
        document = jsonio.loads(_read(path, _LARGEST_RESULT), what=path.name)
        if problems := schema.validate("result", document):
            message = f"the runner's result {path.name} is not valid: {problems[0].line()}"
            raise AttnreproError(message, problems=problems[1:])
        found: dict[str, Any] = document
        return found

    def worker_logs(self, segment: str) -> bytes:
        """What the workers of a segment printed, one after the other, each under its name."""
        parts = []
        for path in sorted((self.out(segment) / "logs").glob("*.log")):
            try:
                data = _read(path, _LARGEST_FILE)
            except OSError:
                continue  # no plain file, or larger than anybody reads
            if data:
                parts += [f"== {path.name}\n".encode(), data, b"\n"]
        return b"".join(parts)

    def read(self, segment: str, name: str) -> bytes:
        """A file that the container wrote, by its path below the segment's out folder.

        Raises OSError where it is not there or no plain file inside that folder.
        """
        parts = PurePosixPath(name).parts
        if not parts or ".." in parts or name.startswith("/"):
            message = f"{name!r} leaves the folder"
            raise OSError(message)
        folder = self.out(segment).resolve()
        path = folder.joinpath(*parts)
        if path.parent.resolve() != path.parent:
            message = f"{name!r} leads through a link"
            raise OSError(message)
        return _read(path, _LARGEST_FILE)


def open_folder(root: Path, name: str, key: str) -> RunFolder:
    """Make the folder of a run if it is not there. Raises UsageError where it cannot be made."""
    path = (root / f"{name}-{key[:12]}").absolute()
    try:
        path.mkdir(parents=True, exist_ok=True)
        probe = path / f".probe-{os.getpid()}"
        probe.write_bytes(b"x")
        probe.unlink()
    except OSError as error:
        message = f"cannot write the run folder {path}: {error.strerror}"
        raise UsageError(message, hint="choose another with --runs FOLDER") from None
    return RunFolder(path)


def key_of(parts: Mapping[str, Any]) -> str:
    """Digest of everything that makes two runs the same."""
    return hashlib.sha256(jsonio.canonical(dict(parts))).hexdigest()


def _read(path: Path, limit: int) -> bytes:
    """A plain file, not followed through a link, at most `limit` bytes."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    with open(descriptor, "rb") as file:  # noqa: PTH123 - it wraps a descriptor
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            message = f"{path.name} is no plain file"
            raise OSError(message)
        data = file.read(limit + 1)
    if len(data) > limit:
        message = f"{path.name} is larger than {limit} bytes"
        raise OSError(message)
    return data
