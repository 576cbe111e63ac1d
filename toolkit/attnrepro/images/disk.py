"""Errors of the file system, in words."""

from __future__ import annotations

import errno
from contextlib import contextmanager
from typing import TYPE_CHECKING

from attnrepro.errors import BuildFailed

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def disk_errors(doing: str) -> Iterator[None]:
    """Say plainly when a disk is full, a quota is reached or the store is not writable."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            message = f"the disk is full ({doing})"
            hint = "free some space, or run `attnrepro store gc`; nothing half-written is left"
        elif error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            message = f"{error.filename or 'the store'} is not writable ({doing})"
            hint = "set ATTNREPRO_STORE to a folder of your own"
        else:
            raise
        raise BuildFailed(message, hint=hint) from error
