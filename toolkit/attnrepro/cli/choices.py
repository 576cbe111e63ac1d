"""What several verbs ask of the machine and of the user alike."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from attnrepro.errors import UsageError

if TYPE_CHECKING:
    from pathlib import Path

    from attnrepro.engines.base import Engine


def engine(name: str | None, python: Path | None) -> Engine:
    """The engine that `--engine` and `--python` mean. Raises UsageError, Unavailable."""
    from attnrepro.engines import select
    from attnrepro.engines.host import HostEngine

    if python is None:
        return select.choose(name)
    if name != "host":
        message = "--python is for --engine host: an image brings its own interpreter"
        raise UsageError(message, hint="leave it out, or add --engine host")
    return HostEngine(python.absolute())


def passphrase() -> str:
    """Ask for the passphrase of the signing key. Raises UsageError without a terminal."""
    if not sys.stdin.isatty():
        message = "the signing key has a passphrase and there is no terminal to ask for it"
        raise UsageError(message, hint="set $ATTNREPRO_KEY_PASSPHRASE")
    from getpass import getpass

    return getpass("passphrase of the signing key: ")
