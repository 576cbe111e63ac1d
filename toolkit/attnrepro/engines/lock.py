"""One benchmark at a time: a lock per device and per run folder, held by the kernel.

flock is released when its holder dies, however it dies; what stands in the file only tells who
holds it. Device locks lie in one folder for all users of the machine.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Self

from attnrepro.errors import Unavailable, UsageError

if TYPE_CHECKING:
    from types import TracebackType


class FileLock:
    """An exclusive lock on a file, as a context manager."""

    def __init__(self, path: Path, *, what: str, wait_seconds: float = 0) -> None:
        """Lock `path` on entering; `what` names it in errors ("the device nvidia:0")."""
        self._path = path
        self._what = what
        self._wait_seconds = wait_seconds
        self._descriptor: int | None = None

    def __enter__(self) -> Self:
        """Take the lock. Raises Unavailable with the holder's pid, UsageError if it cannot be."""
        try:
            descriptor = _open(self._path)
        except OSError as error:
            message = f"cannot open the lock {self._path}: {error.strerror}"
            raise UsageError(message, hint="choose a folder that you may write") from None
        try:
            self._take(descriptor)
            _write_holder(descriptor)
        except BaseException:
            os.close(descriptor)
            raise
        self._descriptor = descriptor
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Release. The file stays: removing it would let two holders have two files."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _take(self, descriptor: int) -> None:
        deadline = time.monotonic() + self._wait_seconds
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    message = f"{self._what} is in use by {_holder(descriptor)}"
                    hint = "wait until it ends, or stop it: one benchmark at a time"
                    raise Unavailable(message, hint=hint) from None
                time.sleep(0.1)
            else:
                return


def device_lock(device_id: str, *, wait_seconds: float = 0) -> FileLock:
    """Lock a device for all users of this machine: a GPU's UUID or node, or `cpu`."""
    plain = re.sub(r"[^A-Za-z0-9_.-]", "_", device_id)[:80]
    short = hashlib.sha256(device_id.encode()).hexdigest()[:12]
    path = locks_dir() / f"attnrepro-{plain}-{short}.lock"
    return FileLock(path, what=f"the device {device_id}", wait_seconds=wait_seconds)


def run_lock(folder: Path) -> FileLock:
    """Lock a run folder, so that two processes never resume it at once."""
    return FileLock(folder / ".lock", what=f"the run folder {folder}")


def locks_dir() -> Path:
    """Folder that all users share: `$ATTNREPRO_LOCKS`, else /run/lock, else the temporary one."""
    if chosen := os.environ.get("ATTNREPRO_LOCKS"):
        return Path(chosen)
    shared = Path("/run/lock")
    return shared if os.access(shared, os.W_OK) else Path(tempfile.gettempdir())


def _open(path: Path) -> int:
    # Without O_CREAT first: the kernel (fs.protected_regular) refuses O_CREAT on another user's
    # file in a sticky folder. Writing is only for telling who holds it.
    for flags in (os.O_RDWR, os.O_RDWR | os.O_CREAT | os.O_EXCL, os.O_RDWR, os.O_RDONLY):
        try:
            descriptor = os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
        except (FileNotFoundError, FileExistsError, PermissionError) as error:
            last = error
            continue
        if flags & os.O_CREAT:
            os.fchmod(descriptor, 0o666)
        return descriptor
    raise last


def _write_holder(descriptor: int) -> None:
    if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
        return
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, json.dumps({"pid": os.getpid(), "since": int(time.time())}).encode(), 0)


def _holder(descriptor: int) -> str:
    try:
        told = json.loads(os.pread(descriptor, 4096, 0))
        since = time.strftime("%H:%M:%S", time.localtime(told["since"]))
        return f"process {int(told['pid'])}, since {since}"
    except (ValueError, KeyError, TypeError, OSError):
        return "another process"
