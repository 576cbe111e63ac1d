"""The two lock files of a stack: debs.lock and requirements.lock.

debs.lock has one package a line: name, version, architecture, SHA-256, size, pool path.
requirements.lock is pip's own format with hashes; a comment beside each hash names the file and its
size, so that the store can be asked before any index is.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from attnrepro.errors import InvalidDocument, Problem

if TYPE_CHECKING:
    from collections.abc import Iterable

_DEB: Final = re.compile(
    r"(?P<name>[a-z0-9][a-z0-9+.-]+) (?P<version>[A-Za-z0-9.+:~-]+) (?P<arch>amd64|all)"
    r" (?P<sha256>[0-9a-f]{64}) (?P<size>[1-9][0-9]{0,10})"
    r" (?P<path>pool(?:/[A-Za-z0-9_][A-Za-z0-9+._~%-]*)+\.deb)"
)
_WHEEL: Final = re.compile(
    r"(?P<name>[a-z0-9][a-z0-9-]*)==(?P<version>[A-Za-z0-9.+!_-]+)"
    r" --hash=sha256:(?P<sha256>[0-9a-f]{64})"
    r"  # (?P<file>[A-Za-z0-9_][A-Za-z0-9._+!-]*\.(?:whl|tar\.gz)) (?P<size>[1-9][0-9]{0,10})"
)


@dataclass(frozen=True, kw_only=True)
class Deb:
    """One locked Debian package."""

    name: str
    version: str
    arch: str
    sha256: str
    size: int
    """Bytes of the .deb."""
    path: str
    """Pool path below a mirror's root."""

    @property
    def file(self) -> str:
        """Name of the .deb."""
        return self.path.rpartition("/")[2]

    def line(self) -> str:
        """The package's line in debs.lock."""
        return f"{self.name} {self.version} {self.arch} {self.sha256} {self.size} {self.path}"


@dataclass(frozen=True, kw_only=True)
class Wheel:
    """One locked distribution file."""

    name: str
    version: str
    sha256: str
    file: str
    size: int

    def line(self) -> str:
        """The file's line in requirements.lock."""
        return f"{self.name}=={self.version} --hash=sha256:{self.sha256}  # {self.file} {self.size}"


def _lines(data: bytes, pattern: re.Pattern[str], what: str, allowed: str) -> list[dict[str, str]]:
    problems, rows = [], []
    for number, line in enumerate(data.decode("utf-8", "replace").split("\n"), 1):
        if not line or line.startswith("#"):
            continue
        if match := pattern.fullmatch(line):
            rows.append(match.groupdict())
        else:
            problems.append(
                Problem(
                    pointer=f"/{what}:{number}",
                    found=line[:120],
                    allowed=allowed,
                    fix="write the lock with `python -m attnrepro.images.lock FOLDER`",
                )
            )
    names = [row["name"] for row in rows]
    problems += [
        Problem(pointer=f"/{what}", found=f"{name} twice", allowed="once", fix="remove one")
        for name in sorted({name for name in names if names.count(name) > 1})
    ]
    if not rows and not problems:
        problems.append(
            Problem(pointer=f"/{what}", found="nothing", allowed=allowed, fix="write the lock")
        )
    if problems:
        message = f"{what} is not a lock"
        raise InvalidDocument(message, problems=problems)
    return rows


def parse_debs(data: bytes, *, what: str = "debs.lock") -> list[Deb]:
    """Packages of a debs.lock. Raises InvalidDocument naming every bad line."""
    rows = _lines(data, _DEB, what, "NAME VERSION ARCH SHA256 SIZE pool/…")
    return [Deb(**{**row, "size": int(row["size"])}) for row in rows]  # type: ignore[arg-type]


def parse_wheels(data: bytes, *, what: str = "requirements.lock") -> list[Wheel]:
    """Distributions of a requirements.lock. Raises InvalidDocument naming every bad line."""
    rows = _lines(data, _WHEEL, what, "NAME==VERSION --hash=sha256:HEX  # FILE SIZE")
    return [Wheel(**{**row, "size": int(row["size"])}) for row in rows]  # type: ignore[arg-type]


def render(items: Iterable[Deb | Wheel], comment: Iterable[str]) -> bytes:
    """A lock file: comment lines, then the items by name."""
    lines = [f"# {line}" for line in comment]
    lines += [item.line() for item in sorted(items, key=lambda item: item.name)]
    return ("\n".join(lines) + "\n").encode()
