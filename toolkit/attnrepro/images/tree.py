"""A root file system as a sorted list of entries, read from the tar that an engine exported.

What an engine leaves behind (its /etc/hosts, device nodes, times) is normalised here, so that the
same build gives the same list under Docker, podman and any version of either. Hard links become
files of their own and extended attributes are dropped: the list is a function of contents alone.
"""

from __future__ import annotations

import hashlib
import json
import tarfile
from dataclasses import dataclass, replace
from enum import StrEnum
from fnmatch import fnmatchcase
from typing import IO, TYPE_CHECKING, Final

from attnrepro.errors import BuildFailed

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

CHUNK: Final = 1 << 20


class Kind(StrEnum):
    """What an entry is."""

    FOLDER = "folder"
    FILE = "file"
    LINK = "link"


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """One path of a root file system."""

    path: str
    """Relative to the root, without a leading slash."""
    kind: Kind
    mode: int
    """Permission bits, set-id and sticky included."""
    uid: int = 0
    gid: int = 0
    size: int = 0
    """Bytes of a file."""
    target: str = ""
    """Where a symbolic link points."""
    offset: int = -1
    """Where the bytes of a file begin in the source tar; -1 is an empty file of ours."""
    sha256: str = ""
    """Hex digest of a file's bytes, once they were read."""

    def line(self) -> bytes:
        """The entry in the tree's listing: one JSON array, everything that identifies it."""
        what = self.sha256 if self.kind is Kind.FILE else self.target
        fields = [self.path, self.kind, f"{self.mode:04o}", self.uid, self.gid, self.size, what]
        return json.dumps(fields, ensure_ascii=True, separators=(",", ":")).encode() + b"\n"


_EMPTIED: Final = ("dev", "proc", "sys", "run", "tmp", "var/tmp")
"""Mount points: what stands in them belongs to the engine or to the build."""

_FIXED: Final = {
    "dev": Entry(path="dev", kind=Kind.FOLDER, mode=0o755),
    "proc": Entry(path="proc", kind=Kind.FOLDER, mode=0o555),
    "sys": Entry(path="sys", kind=Kind.FOLDER, mode=0o555),
    "run": Entry(path="run", kind=Kind.FOLDER, mode=0o755),
    "tmp": Entry(path="tmp", kind=Kind.FOLDER, mode=0o1777),
    "var/tmp": Entry(path="var/tmp", kind=Kind.FOLDER, mode=0o1777),
    "etc": Entry(path="etc", kind=Kind.FOLDER, mode=0o755),
    "var": Entry(path="var", kind=Kind.FOLDER, mode=0o755),
    # Engines mount these at run time; an empty file is there for a read-only root.
    "etc/hostname": Entry(path="etc/hostname", kind=Kind.FILE, mode=0o644),
    "etc/hosts": Entry(path="etc/hosts", kind=Kind.FILE, mode=0o644),
    "etc/resolv.conf": Entry(path="etc/resolv.conf", kind=Kind.FILE, mode=0o644),
    "etc/machine-id": Entry(path="etc/machine-id", kind=Kind.FILE, mode=0o444),
    "etc/mtab": Entry(path="etc/mtab", kind=Kind.LINK, mode=0o777, target="/proc/mounts"),
}

_DROPPED: Final = (
    ".dockerenv",
    "etc/.pwd.lock",
    "etc/*-",  # shadow-, group-: the copies that tools keep
    "etc/apt/sources.list",
    "etc/apt/apt.conf.d/99mmdebstrap",
    "etc/dpkg/dpkg.cfg.d/99mmdebstrap",
    "root/.cache*",
    "var/cache/apt/*",
    "var/cache/debconf/*-old",
    "var/cache/ldconfig/*",
    "var/lib/apt/*",
    "var/lib/dpkg/*-old",
    "var/lib/dpkg/lock*",
    "var/log/*",
)


def path_order(path: str) -> bytes:
    """Sort key of paths: their bytes, whatever the locale; a name need not be UTF-8."""
    return path.encode("utf-8", "surrogateescape")


def _normal(path: str) -> str:
    parts = [part for part in path.split("/") if part not in ("", ".")]
    if ".." in parts:
        message = f"the root file system holds the path {path!r}"
        raise BuildFailed(message)
    return "/".join(parts)


def _kept(path: str, drop: Sequence[str]) -> bool:
    if path in _FIXED or any(path.startswith(f"{folder}/") for folder in _EMPTIED):
        return False
    return not any(fnmatchcase(path, pattern) for pattern in (*_DROPPED, *drop))


def read(source: Path, *, drop: Sequence[str] = (), fixed: bool = True) -> list[Entry]:
    """Entries of a root tar, normalised, in path order; digests are filled in by the writer.

    Args:
        source: An uncompressed tar.
        drop: Further patterns (`*` crosses slashes) of paths to leave out.
        fixed: Add the mount points and files that every root has, and folders left out.

    Raises:
        BuildFailed: no tar, or it holds what no image of ours may hold.
    """
    found: dict[str, Entry] = {}
    links: dict[str, str] = {}
    try:
        with tarfile.open(source, "r:") as archive:
            for member in archive:
                path = _normal(member.name)
                if not path or not _kept(path, drop):
                    continue
                if member.islnk():
                    links[path] = _normal(member.linkname)
                    continue
                found[path] = _entry(path, member)
    except (tarfile.TarError, EOFError) as error:
        message = f"the engine's root file system is no whole tar: {error}"
        raise BuildFailed(message, hint="run the build again; check free disk space") from None
    for path, target in sorted(links.items()):
        if (original := found.get(target)) is None:
            message = f"the hard link {path} points to {target}, which is not there"
            raise BuildFailed(message)
        found[path] = replace(original, path=path)
    if fixed:
        found |= _FIXED
        for path in list(found):
            while (path := path.rpartition("/")[0]) and path not in found:
                found[path] = Entry(path=path, kind=Kind.FOLDER, mode=0o755)
    return sorted(found.values(), key=lambda entry: path_order(entry.path))


def _entry(path: str, member: tarfile.TarInfo) -> Entry:
    mode, uid, gid = member.mode & 0o7777, member.uid, member.gid
    if member.isdir():
        return Entry(path=path, kind=Kind.FOLDER, mode=mode, uid=uid, gid=gid)
    if member.issym():
        # Permission bits of a symbolic link mean nothing, and engines disagree on them.
        return Entry(
            path=path, kind=Kind.LINK, mode=0o777, uid=uid, gid=gid, target=member.linkname
        )
    if member.isreg() and not member.sparse:
        return Entry(
            path=path,
            kind=Kind.FILE,
            mode=mode,
            uid=uid,
            gid=gid,
            size=member.size,
            offset=member.offset_data,
        )
    message = f"the root file system holds {path}, which is no file, folder or symbolic link"
    raise BuildFailed(message)


def chunks(file: IO[bytes], entry: Entry) -> Iterator[bytes]:
    """The bytes of a file entry, in pieces."""
    if entry.offset < 0:
        return
    file.seek(entry.offset)
    left = entry.size
    while left:
        piece = file.read(min(CHUNK, left))
        if not piece:
            message = f"the root tar ends within {entry.path}"
            raise BuildFailed(message)
        left -= len(piece)
        yield piece


def listing(entries: Iterable[Entry]) -> bytes:
    """The tree as bytes, one entry a line; its SHA-256 is the tree's digest."""
    return b"".join(entry.line() for entry in entries)


def parse_listing(data: bytes) -> dict[str, Entry]:
    """Entries of a listing by path. Raises BuildFailed if it is damaged."""
    result = {}
    try:
        for line in data.splitlines():
            path, kind, mode, uid, gid, size, what = json.loads(line)
            is_file = kind == Kind.FILE
            result[path] = Entry(
                path=path,
                kind=Kind(kind),
                mode=int(mode, 8),
                uid=uid,
                gid=gid,
                size=size,
                sha256=what if is_file else "",
                target="" if is_file else what,
            )
    except (ValueError, TypeError):
        message = "a tree listing in the store is damaged"
        raise BuildFailed(message, hint="remove the image with `attnrepro store gc`") from None
    return result


def tree_sha256(entries: Iterable[Entry]) -> str:
    """Hex digest of the listing."""
    return hashlib.sha256(listing(entries)).hexdigest()


def first_difference(left: Mapping[str, Entry], right: Mapping[str, Entry]) -> str | None:
    """The first path, in order, at which two trees differ, and how; None if they are equal."""
    for path in sorted(left.keys() | right.keys(), key=path_order):
        one, two = left.get(path), right.get(path)
        if one is None or two is None:
            return f"/{path}: only in the {'second' if one is None else 'first'}"
        if one.line() != two.line():
            names = ("kind", "mode", "uid", "gid", "size", "target", "sha256")
            parts = [
                f"{name} {_show(name, left_value)} against {_show(name, right_value)}"
                for name in names
                if (left_value := getattr(one, name)) != (right_value := getattr(two, name))
            ]
            return f"/{path}: {', '.join(parts)}"
    return None


def _show(name: str, value: object) -> str:
    return f"{value:04o}" if name == "mode" and isinstance(value, int) else str(value)
