"""Writing files so that a killed process leaves the old file or the new one, never half."""

from __future__ import annotations

import hashlib
import os
import secrets
from contextlib import suppress
from pathlib import Path


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
