"""Which files a backend's library is: release, digests of kernel-bearing files, build flags.

The release is the distribution's, from its metadata: attributes such as
`flash_attn.cute.__version__` are constants of some other name and say nothing.
"""

from __future__ import annotations

import base64
import hashlib
import importlib.metadata
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

from attnrepro_runner.libraries import file_digest

if TYPE_CHECKING:
    from collections.abc import Iterable


def release(distribution: str) -> str | None:
    """Return the installed release of a distribution, or None."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def release_key(text: str) -> tuple[int, ...]:
    """Return a release as numbers that compare: 2.13.0+cu130 is (2, 13, 0), 4.0.0b36 (4, 0, 0, 36).

    A pre-release number is the fourth; a final release has none there and compares as (4, 0, 0).
    Only releases of one kind are compared here.
    """
    match = re.match(r"(\d+)\.(\d+)(?:\.(\d+))?(?:\.?(?:a|b|rc|post)(\d+))?", text)
    if match is None:
        msg = f"{text!r} is not a release"
        raise ValueError(msg)
    return tuple(int(part) for part in match.groups() if part is not None)


def kernel_files(distribution: str, *, python: bool = False) -> dict[str, str]:
    """Digest the shared objects of a distribution, by path below site-packages.

    Args:
        distribution: its name.
        python: also digest its Python files as one, named `<distribution>/*.py`: they are the
            kernels of a library that compiles at run time.

    """
    try:
        files = importlib.metadata.files(distribution)
    except importlib.metadata.PackageNotFoundError:
        return {}
    found: dict[str, str] = {}
    sources = hashlib.sha256()
    count = 0
    for entry in sorted(files or [], key=str):
        path = _located(entry)
        name = entry.as_posix()
        if ".so" in entry.suffixes or name.endswith((".cubin", ".fatbin", ".hsaco")):
            if path.exists():
                found[name] = file_digest(path)
        elif python and entry.suffix == ".py" and path.exists():
            sources.update(f"{name} {file_digest(path)}\n".encode())
            count += 1
    if count:
        found[f"{distribution}/{count} python files"] = sources.hexdigest()
    return found


def altered_files(distribution: str, suffixes: tuple[str, ...] = (".py", ".so")) -> list[str]:
    """Return the distribution's files that are missing or are not those of its RECORD.

    Two distributions can own one path (flash-attn 2.8.3 and flash-attn-4 both bring
    `flash_attn/cute`): the later install wins, and only this shows it.
    """
    try:
        files = importlib.metadata.files(distribution)
    except importlib.metadata.PackageNotFoundError:
        return []
    altered = []
    for entry in files or []:
        if entry.hash is None or entry.hash.mode != "sha256" or entry.suffix not in suffixes:
            continue
        path = _located(entry)
        if not path.exists():
            altered.append(entry.as_posix())
            continue
        digest = bytes.fromhex(file_digest(path))
        if base64.urlsafe_b64encode(digest).rstrip(b"=").decode() != entry.hash.value:
            altered.append(entry.as_posix())
    return altered


def environment_flags(names: Iterable[str]) -> dict[str, str]:
    """Return those environment variables that are set, as `env:NAME`."""
    return {f"env:{name}": os.environ[name] for name in names if name in os.environ}


def _located(entry: importlib.metadata.PackagePath) -> Path:
    return Path(str(entry.locate()))
