"""Writing files so that a killed process leaves the old file or the new one, never half."""

from __future__ import annotations

import errno
import hashlib
import os
import secrets
import stat
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from attnrepro.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence


def atomic_write(path: Path, data: bytes, *, mode: int = 0o644) -> None:
    """Write `data` under a temporary name beside `path`, sync it, and rename it into place.

    Raises OSError (disk full, folder not writable); nothing is left behind then.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(6)}.tmp")
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        with open(descriptor, "wb") as file:  # noqa: PTH123 - it wraps a descriptor
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make a rename durable. Folders cannot be opened on Windows, where this does nothing."""
    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def read_regular(path: Path, *, limit: int) -> bytes:
    """Read a regular file of at most `limit` bytes; a FIFO or a device would never end.

    Raises OSError.
    """
    if not stat.S_ISREG(path.stat().st_mode):
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    with path.open("rb") as file:
        data = file.read(limit + 1)
    if len(data) > limit:
        raise OSError(errno.EFBIG, f"longer than {limit} bytes", str(path))
    return data


def sha256_file(path: Path) -> str:
    """Lower-case hex SHA-256 of a file, read in pieces."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def state_dir() -> Path:
    """Keys and trust: `$ATTNREPRO_HOME`, else `attnrepro` in the configuration folder (XDG)."""
    if home := os.environ.get("ATTNREPRO_HOME"):
        return Path(home)
    base = os.environ.get("XDG_CONFIG_HOME")
    return (Path(base) if base else Path.home() / ".config") / "attnrepro"


def store_dir() -> Path:
    """Content-addressed store: `$ATTNREPRO_STORE`, else `attnrepro` in the user's cache (XDG)."""
    if store := os.environ.get("ATTNREPRO_STORE"):
        return Path(store)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "attnrepro"


def shortened(path: Path | str) -> str:
    """A path as a message shows it: a hostile one may have megabytes."""
    text = str(path)
    return text if len(text) <= 200 else f"{text[:200]}…"


def check_target(path: Path) -> None:
    """Refuse to write over what is no regular file. Raises UsageError."""
    try:
        kind = path.lstat().st_mode
    except FileNotFoundError:
        return
    except OSError as error:
        message = f"{shortened(path)}: {error.strerror}"
        raise UsageError(message, hint="--output names a file in another folder") from None
    if not stat.S_ISREG(kind):
        message = f"{path} is there and is no regular file"
        raise UsageError(message, hint="name another file")


def write_output(path: Path, data: bytes, *, inputs: Sequence[Path], force: bool) -> None:
    """Write a file that the user named. Raises UsageError, before anything is lost.

    An input is never replaced, nor what is no regular file (a device, a link, a folder); another
    file only with `force`.
    """
    check_target(path)
    if any(path.exists() and other.exists() and path.samefile(other) for other in inputs):
        message = f"{path} is an input of this command"
        raise UsageError(message, hint="--output names another file")
    if path.exists() and not force:
        message = f"{path} is there already"
        raise UsageError(message, hint="--force replaces it; --output names another file")
    try:
        atomic_write(path, data)
    except OSError as error:
        message = f"cannot write {path}: {error.strerror}"
        raise UsageError(message, hint="--output names a file in another folder") from None
