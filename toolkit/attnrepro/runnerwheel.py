"""The installed runner package as one deterministic wheel.

It is mounted read-only into the container, put on PYTHONPATH (Python imports from a zip), and
travels in the artifact's recipe, so that a rerun next year uses the code that ran.
"""

from __future__ import annotations

import base64
import hashlib
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from attnrepro.artifact import container
from attnrepro.errors import AttnreproError

PACKAGE: Final = "attnrepro_runner"


@dataclass(frozen=True, kw_only=True)
class RunnerWheel:
    """The runner as bytes."""

    name: str
    """File name as PEP 427 has it."""
    version: str
    data: bytes
    """A canonical ZIP of stored members: the same source files give the same bytes anywhere."""
    sha256: str
    """Lower-case hex digest of `data`."""


@cache
def installed() -> RunnerWheel:
    """The runner of this installation. It is found, not imported.

    Raises AttnreproError (exit 70) where the package is missing from the installation.
    """
    spec = find_spec(PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        message = f"the package {PACKAGE} is not installed beside attnrepro"
        raise AttnreproError(message, hint="install attnrepro again: pip install --force-reinstall")
    return pack(Path(next(iter(spec.submodule_search_locations))))


def pack(folder: Path) -> RunnerWheel:
    """Pack a runner package's folder; bytecode and caches stay out."""
    files = {
        f"{PACKAGE}/{path.relative_to(folder).as_posix()}": path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.suffix != ".pyc" and "__pycache__" not in path.parts
    }
    version = _version(files[f"{PACKAGE}/__init__.py"].decode())
    info = f"{PACKAGE}-{version}.dist-info"
    files[f"{info}/METADATA"] = (
        f"Metadata-Version: 2.1\nName: attnrepro-runner\nVersion: {version}\n"
    ).encode()
    files[f"{info}/WHEEL"] = (
        b"Wheel-Version: 1.0\nGenerator: attnrepro\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    )
    files[f"{info}/RECORD"] = _record(files, f"{info}/RECORD")
    data = container.write(files)
    return RunnerWheel(
        name=f"{PACKAGE}-{version}-py3-none-any.whl",
        version=version,
        data=data,
        sha256=hashlib.sha256(data).hexdigest(),
    )


def _version(source: str) -> str:
    for line in source.splitlines():
        if line.startswith("__version__"):
            return line.partition("=")[2].strip().strip("\"'")
    message = f"{PACKAGE} names no version"
    raise AttnreproError(message)


def _record(files: dict[str, bytes], own_name: str) -> bytes:
    lines = []
    for name, data in sorted(files.items()):
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        lines.append(f"{name},sha256={digest},{len(data)}")
    return ("\n".join([*lines, f"{own_name},,"]) + "\n").encode()
