"""What several verbs ask of the machine and of the user alike."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from attnrepro.errors import Unavailable, UsageError

if TYPE_CHECKING:
    from attnrepro.engines.base import Engine


def engine(name: str | None, python: Path | None) -> Engine:
    """The engine that `--engine` and `--python` mean. Raises UsageError, Unavailable."""
    from attnrepro.engines import select
    from attnrepro.engines.host import HostEngine

    if name == "host":
        interpreter = python.absolute() if python else Path(sys.executable)
        check_framework(interpreter)
        return HostEngine(interpreter)
    if python is not None:
        message = "--python is for --engine host: an image brings its own interpreter"
        raise UsageError(message, hint="leave it out, or add --engine host")
    return select.choose(name)


def check_framework(python: Path) -> None:
    """Refuse an interpreter of the bare host that has no torch. Raises Unavailable."""
    import subprocess

    code = "import importlib.util, sys; sys.exit(importlib.util.find_spec('torch') is None)"
    try:
        lacks = subprocess.run([python, "-I", "-c", code], check=False, timeout=60).returncode
    except (OSError, subprocess.TimeoutExpired) as error:
        message = f"cannot run the interpreter {python}: {error}"
        raise UsageError(message, hint="--python names one that has torch") from None
    if lacks:
        message = f"{python} has no torch, which --engine host runs with"
        raise Unavailable(message, hint="pip install 'attnrepro[runner]', or name it by --python")


def passphrase() -> str:
    """Ask for the passphrase of the signing key. Raises UsageError without a terminal."""
    if not sys.stdin.isatty():
        message = "the signing key has a passphrase and there is no terminal to ask for it"
        raise UsageError(message, hint="set $ATTNREPRO_KEY_PASSPHRASE")
    from getpass import getpass

    return getpass("passphrase of the signing key: ")
