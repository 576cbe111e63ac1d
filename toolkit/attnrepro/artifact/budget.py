"""How much a verifier is ready to hold, fixed before anything is allocated."""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from attnrepro.errors import Rejected, UsageError
from attnrepro.files import shortened

if TYPE_CHECKING:
    from pathlib import Path

MIB: Final = 1024 * 1024
_ENVELOPE: Final = 4 * MIB


@dataclass(frozen=True, kw_only=True)
class Budget:
    """Upper limits for one artifact, in bytes unless named otherwise."""

    content: int = 128 * MIB
    """Bytes of content.zip."""
    members: int = 1000
    """Members of one container; the format itself allows no more."""
    json: int = 32 * MIB
    """Bytes of one JSON member."""
    bundle: int = 1 * MIB
    """Bytes of bundle.sigstore.json."""

    @property
    def file(self) -> int:
        """Bytes of the whole file: the content and a little for what stands around it."""
        return self.content + _ENVELOPE


def read_once(path: Path, budget: Budget) -> bytes:
    """Read a regular file whole, through one descriptor, so that nobody can swap it meanwhile.

    Raises:
        Rejected: it is a FIFO, a device or a folder, or is larger than the budget. A FIFO without a
            writer does not block, and `/dev/zero` is never read.
        UsageError: it is not there or cannot be opened.
    """
    flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOCTTY", 0)
    flags |= getattr(os, "O_BINARY", 0)
    try:
        descriptor = os.open(path, flags)
    except OSError as error:
        if path.is_dir():  # Windows does not open folders
            raise _not_regular(path) from None
        message = f"cannot open {path}: {error.strerror}"
        raise UsageError(message, hint="give the path of a .attnrepro file") from None
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise _not_regular(path)
        if status.st_size > budget.file:
            raise _too_large(budget)
        data = bytearray()
        while piece := os.read(descriptor, min(MIB, budget.file + 1 - len(data))):
            data += piece
            if len(data) > budget.file:
                raise _too_large(budget)
    finally:
        os.close(descriptor)
    return bytes(data)


def _not_regular(path: Path) -> Rejected:
    message = f'"{shortened(path)}" is not a regular file'
    return Rejected(message, rule="input.not_regular")


def _too_large(budget: Budget) -> Rejected:
    message = f"the file is larger than the budget of {budget.file // MIB} MiB"
    hint = "if you trust its origin, raise the budget with --max-mib"
    return Rejected(message, rule="input.too_large", hint=hint)
