"""What of a host's own root file system enters a `host-rootfs` base, and in which order.

Such a base is for hosts where no image can be pulled: programs and libraries of the system, the
Python environment that holds the framework, nothing else. /etc comes by a list of names, so that no
key or password does; the driver and the CUDA toolkit stay outside.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import stat
import sys
import sysconfig
import tarfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final

from attnrepro.errors import BuildFailed
from attnrepro.images.oci import Layer
from attnrepro.images.tree import CHUNK, Entry, Kind
from attnrepro.images.wheelfiles import normal

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from packaging.requirements import Requirement

SYSTEM: Final = ("bin", "lib", "lib32", "lib64", "libx32", "sbin", "usr")
ETC: Final = (
    *("alternatives", "debian_version", "group", "ld.so.cache", "ld.so.conf", "ld.so.conf.d"),
    *("localtime", "lsb-release", "nsswitch.conf", "os-release", "passwd"),
)
LEFT_OUT: Final = (
    *("usr/local/nvidia", "usr/local/cuda", "usr/lib/debug", "usr/lib/firmware", "usr/lib/modules"),
    *("usr/share/doc", "usr/share/help", "usr/share/icons", "usr/share/info", "usr/share/locale"),
    *("usr/share/man", "usr/share/fonts", "usr/src", "usr/games"),
)
"""Folders, and all whose name begins so (usr/local/cuda-13.0)."""
MOUNT_POINTS: Final = {
    "attnrepro": 0o755,
    "dev": 0o755,
    "proc": 0o555,
    "run": 0o755,
    "sys": 0o555,
    "tmp": 0o1777,
    "var": 0o755,
    "var/tmp": 0o1777,
}
EPOCH: Final = 1_700_000_000
"""Time of every file outside the Python environment, where times decide about bytecode."""


@dataclass(frozen=True, kw_only=True)
class HostPython:
    """The environment that holds the framework; the interpreter that runs this is its own."""

    executable: str
    prefixes: tuple[str, ...]
    """Folders outside /usr that it needs, without the leading slash."""
    site: str
    """site-packages, without the leading slash."""
    version: str


@dataclass(frozen=True, kw_only=True)
class Selection:
    """What goes in."""

    python: HostPython
    root: Path = Path("/")
    kept: frozenset[str] = frozenset()
    """Distributions that stay, normalised."""
    dropped_files: frozenset[str] = frozenset()
    """Paths (no leading slash) of the distributions that do not."""


def this_python() -> HostPython:
    """Describe the running interpreter's environment."""
    inside = [Path(p).resolve() for p in (sys.prefix, sys.base_prefix)]
    unresolved = [Path(sys.prefix)]
    prefixes = {str(p).lstrip("/") for p in (*inside, *unresolved)}
    outside = sorted(p for p in prefixes if p and p.split("/")[0] not in SYSTEM)
    return HostPython(
        executable=sys.executable,
        prefixes=tuple(p for p in outside if not any(p.startswith(f"{o}/") for o in outside)),
        site=sysconfig.get_paths()["purelib"].lstrip("/"),
        version=".".join(map(str, sys.version_info[:3])),
    )


def closure(
    roots: Iterable[str], installed: Mapping[str, importlib.metadata.Distribution]
) -> frozenset[str]:
    """Close a set of requirements over what installed distributions require of each other.

    Args:
        roots: Requirement lines, markers and all.
        installed: By normalised name.

    Returns the installed ones among them.
    """
    found: set[str] = set()
    todo = [wanted for line in roots if (wanted := _applicable(line, {""}))]
    while todo:
        wanted = todo.pop()
        name = normal(wanted.name)
        if name in found or name not in installed:
            continue
        found.add(name)
        lines, extras = installed[name].requires or (), {"", *wanted.extras}
        todo.extend(r for line in lines if (r := _applicable(line, extras)))
    return frozenset(found)


def _applicable(line: str, extras: set[str]) -> Requirement | None:
    """Parse a requirement; None if it is none, or its marker does not hold here for any extra."""
    from packaging.requirements import InvalidRequirement, Requirement

    try:
        wanted = Requirement(line)
    except InvalidRequirement:
        return None
    marker = wanted.marker
    holds = marker is None or any(marker.evaluate({"extra": extra}) for extra in extras)
    return wanted if holds else None


def distributions(site: Path) -> dict[str, importlib.metadata.Distribution]:
    """Distributions installed in one folder, by normalised name."""
    found = importlib.metadata.distributions(path=[str(site)])
    return {normal(d.metadata["Name"]): d for d in found if d.metadata["Name"]}


def files_of(
    names: Iterable[str],
    installed: Mapping[str, importlib.metadata.Distribution],
    root: Path = Path("/"),
) -> set[str]:
    """List the paths, below `root` and without the leading slash, that distributions own."""
    owned: set[str] = set()
    for name in names:
        for file in installed[name].files or ():
            path = os.path.normpath(str(installed[name].locate_file(file)))
            owned.add(os.path.relpath(path, root))
    return owned


def select(
    python: HostPython, *, roots: Iterable[str], replaced: Iterable[str], root: Path = Path("/")
) -> Selection:
    """Choose: the closure of `roots` stays, the rest of the environment's packages does not.

    Args:
        python: The environment.
        roots: Requirement lines of what must work.
        replaced: Distributions that the kernels' layer brings itself.
        root: Of the file system.

    Raises BuildFailed where the environment lacks torch.
    """
    installed = distributions(root / python.site)
    if "torch" not in installed:
        message = f"/{python.site} holds no torch"
        hint = "run the installer with the Python that imports torch (--python)"
        raise BuildFailed(message, hint=hint)
    kept = closure(roots, installed) - {normal(name) for name in replaced}
    others = frozenset(installed) - kept
    stays, goes = files_of(kept, installed, root), files_of(others, installed, root)
    return Selection(python=python, root=root, kept=kept, dropped_files=frozenset(goes - stays))


def paths(selection: Selection) -> Iterator[tuple[str, Path]]:
    """Walk what goes in: (path in the image, path here), folders before what they hold, sorted."""
    root, python = selection.root, selection.python
    wanted = {*SYSTEM, "etc", *MOUNT_POINTS, *python.prefixes, "var/lib/dpkg"}
    parents = {str(p) for w in wanted for p in Path(w).parents} - {"."}
    for path in sorted(wanted | parents, key=_sort_key):
        place = root / path
        if path in MOUNT_POINTS or path in parents:
            yield path, place
        elif path == "var/lib/dpkg":
            yield path, place
            if (place / "status").is_file():
                yield f"{path}/status", place / "status"
        elif path == "etc":
            yield path, place
            for name in ETC:
                yield from _walk(f"{path}/{name}", place / name, selection)
        else:
            yield from _walk(path, place, selection)


def _walk(path: str, place: Path, selection: Selection) -> Iterator[tuple[str, Path]]:
    if not os.path.lexists(place) or _is_left_out(path, selection):
        return
    if place.is_symlink() or not place.is_dir():
        yield path, place
        return
    with os.scandir(place) as found:
        names = sorted(entry.name for entry in found)
    inside = (item for name in names for item in _walk(f"{path}/{name}", place / name, selection))
    first = next(inside, None)
    if names and first is None:
        return  # all that it held stays outside
    yield path, place
    if first is not None:
        yield first
    yield from inside


def _is_left_out(path: str, selection: Selection) -> bool:
    if any(path == p or path.startswith((f"{p}/", f"{p}-")) for p in LEFT_OUT):
        return True
    if path in selection.dropped_files:
        return True
    # Bytecode that no RECORD names goes with its source.
    if path.endswith(".pyc") and "/__pycache__/" in path:
        folder, _, name = path.rpartition("/__pycache__/")
        return f"{folder}/{name.split('.')[0]}.py" in selection.dropped_files
    return False


def _sort_key(path: str) -> tuple[str, ...]:
    return tuple(path.split("/"))


@dataclass(kw_only=True)
class LayerStream:
    """A layer's tar as it is made: iterate once, then ask what it was."""

    name: str
    paths: Iterable[tuple[str, Path]]
    keep_times: tuple[str, ...] = ()
    """Path prefixes whose files keep their whole seconds."""
    progress: Callable[[str], None] | None = None
    entries: list[Entry] = field(default_factory=list)
    _size: int = 0
    _sha256: str = ""

    @property
    def layer(self) -> Layer:
        """Digest and size of what was streamed."""
        return Layer(name=self.name, digest=f"sha256:{self._sha256}", size=self._size)

    def __iter__(self) -> Iterator[bytes]:
        """Give the tar in pieces of about a mebibyte, hashing them and every file."""
        digest = hashlib.sha256()
        pending = bytearray()
        told = 0
        for piece in self._pieces():
            pending += piece
            if len(pending) >= CHUNK:
                data = bytes(pending)
                pending.clear()
                digest.update(data)
                self._size += len(data)
                yield data
                if self.progress and self._size >= told + (1 << 30):
                    told = self._size
                    self.progress(f"  {told / 1e9:.1f} GB")
        pending += b"\0" * (2 * tarfile.BLOCKSIZE)
        digest.update(pending)
        self._size += len(pending)
        self._sha256 = digest.hexdigest()
        yield bytes(pending)

    def _pieces(self) -> Iterator[bytes]:
        for path, place in self.paths:
            if path in MOUNT_POINTS:
                yield self._header(
                    Entry(path=path, kind=Kind.FOLDER, mode=MOUNT_POINTS[path]), EPOCH
                )
                continue
            status = place.lstat()
            mode, owner = stat.S_IMODE(status.st_mode), (status.st_uid, status.st_gid)
            time = int(status.st_mtime) if path.startswith(self.keep_times or "\0") else EPOCH
            if stat.S_ISDIR(status.st_mode):
                yield self._header(_entry(path, Kind.FOLDER, mode, owner), time)
            elif stat.S_ISLNK(status.st_mode):
                target = str(place.readlink())
                yield self._header(_entry(path, Kind.LINK, 0o777, owner, target=target), time)
            elif stat.S_ISREG(status.st_mode):
                yield from self._file(path, place, status, time)

    def _file(self, path: str, place: Path, status: os.stat_result, time: int) -> Iterator[bytes]:
        content = hashlib.sha256()
        owner = (status.st_uid, status.st_gid)
        entry = _entry(path, Kind.FILE, stat.S_IMODE(status.st_mode), owner, size=status.st_size)
        yield _tar_header(entry, time)
        left = status.st_size
        with place.open("rb", buffering=0) as file:
            while left and (piece := file.read(min(CHUNK, left))):
                content.update(piece)
                left -= len(piece)
                yield piece
        if left:
            message = f"/{path} became shorter while it was read"
            raise BuildFailed(message, hint="stop what writes there, then start again")
        yield b"\0" * (-status.st_size % tarfile.BLOCKSIZE)
        self.entries.append(
            Entry(
                path=path,
                kind=Kind.FILE,
                mode=entry.mode,
                uid=entry.uid,
                gid=entry.gid,
                size=entry.size,
                sha256=content.hexdigest(),
            )
        )

    def _header(self, entry: Entry, time: int) -> bytes:
        self.entries.append(entry)
        return _tar_header(entry, time)


def _entry(
    path: str, kind: Kind, mode: int, owner: tuple[int, int], *, size: int = 0, target: str = ""
) -> Entry:
    return Entry(
        path=path, kind=kind, mode=mode, uid=owner[0], gid=owner[1], size=size, target=target
    )


def _tar_header(entry: Entry, time: int) -> bytes:
    kinds = {Kind.FOLDER: tarfile.DIRTYPE, Kind.FILE: tarfile.REGTYPE, Kind.LINK: tarfile.SYMTYPE}
    info = tarfile.TarInfo(entry.path + ("/" if entry.kind is Kind.FOLDER else ""))
    info.type, info.mode, info.mtime = kinds[entry.kind], entry.mode, time
    info.uid, info.gid, info.linkname = entry.uid, entry.gid, entry.target
    info.size = entry.size if entry.kind is Kind.FILE else 0
    return info.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape")
