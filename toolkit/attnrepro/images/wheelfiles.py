"""Wheels without pip: their RECORD, their files checked against it, unpacked where pip puts them.

A wheel's RECORD names every file with its SHA-256, so two installations can be compared file by
file, and an installed package with the public wheel that it claims to come from.
"""

from __future__ import annotations

import base64
import compileall
import csv
import hashlib
import io
import py_compile
import zipfile
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Final

from attnrepro.errors import BuildFailed

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

_SCHEMES: Final = ("purelib", "platlib")


@dataclass(frozen=True, kw_only=True)
class WheelInfo:
    """What a wheel is, and the digest of every file it installs."""

    file: str
    sha256: str
    """Hex, of the wheel itself."""
    name: str
    """Normalised (PEP 503)."""
    version: str
    requires: tuple[str, ...]
    """Requires-Dist lines, markers and all."""
    files: Mapping[str, str]
    """Path below site-packages to hex SHA-256; RECORD itself has none."""


@dataclass(frozen=True, kw_only=True)
class PublicCheck:
    """An installed package held against a public wheel's RECORD."""

    name: str
    wheel: str
    wheel_sha256: str
    equal: int
    differing: tuple[str, ...]
    missing: tuple[str, ...]

    @property
    def identical(self) -> bool:
        """Whether every file of the public wheel is there with the same bytes."""
        return not self.differing and not self.missing

    def document(self) -> dict[str, object]:
        """Give the check as JSON; at most 50 names of each kind."""
        return {
            "name": self.name,
            "wheel": self.wheel,
            "wheel_sha256": self.wheel_sha256,
            "identical": self.identical,
            "equal": self.equal,
            "differing": list(self.differing[:50]),
            "missing": list(self.missing[:50]),
        }


def normal(name: str) -> str:
    """Normalise a distribution's name (PEP 503)."""
    return "-".join(
        part for part in name.lower().replace("_", "-").replace(".", "-").split("-") if part
    )


PROGRAMS: Final = "bin"
"""Folder below site-packages of the programs that wheels install beside it."""


def read_wheel(path: Path) -> WheelInfo:
    """Read a wheel's metadata and RECORD. Raises BuildFailed where it is no whole wheel."""
    try:
        with path.open("rb") as file, zipfile.ZipFile(file) as archive:
            names = archive.namelist()
            info = next(
                n.partition("/")[0]
                for n in names
                if n.endswith(".dist-info/RECORD") and n.count("/") == 1
            )
            metadata = archive.read(f"{info}/METADATA").decode("utf-8", "replace")
            record = archive.read(f"{info}/RECORD").decode("utf-8", "replace")
            file.seek(0)
            digest = hashlib.file_digest(file, "sha256").hexdigest()
    except (OSError, zipfile.BadZipFile, StopIteration, KeyError) as error:
        message = f"{path} is not a whole wheel: {str(error) or 'no RECORD'}"
        raise BuildFailed(message, hint="fetch it again") from None
    head = metadata.partition("\n\n")[0].splitlines()
    fields = [line.partition(": ") for line in head if ": " in line]
    name = next(value for key, _, value in fields if key == "Name")
    version = next(value for key, _, value in fields if key == "Version")
    return WheelInfo(
        file=path.name,
        sha256=digest,
        name=normal(name),
        version=version,
        requires=tuple(value for key, _, value in fields if key == "Requires-Dist"),
        files=parse_record(record),
    )


def parse_record(text: str) -> dict[str, str]:
    """Parse a RECORD: path to hex SHA-256; files without one (RECORD itself, .pyc) are left out."""
    found: dict[str, str] = {}
    for row in csv.reader(io.StringIO(text)):
        if len(row) < 2 or not row[1].startswith("sha256="):
            continue
        padded = row[1].removeprefix("sha256=")
        padded += "=" * (-len(padded) % 4)
        found[row[0]] = base64.urlsafe_b64decode(padded).hex()
    return found


def check_public(public: WheelInfo, installed: Mapping[str, str]) -> PublicCheck:
    """Compare a public wheel with what is installed; paths on both sides below site-packages."""
    present = {path: digest for path, digest in public.files.items() if _installs(path)}
    return PublicCheck(
        name=public.name,
        wheel=public.file,
        wheel_sha256=public.sha256,
        equal=sum(installed.get(path) == digest for path, digest in present.items()),
        differing=tuple(
            sorted(p for p, d in present.items() if p in installed and installed[p] != d)
        ),
        missing=tuple(sorted(p for p in present if p not in installed)),
    )


def _installs(path: str) -> bool:
    # Scripts and data go elsewhere; installers rewrite or add INSTALLER, REQUESTED, RECORD.
    first, _, rest = path.partition("/")
    return not first.endswith(".data") and ".." not in path and rest not in ("RECORD", "INSTALLER")


def unpack(wheels: Iterable[Path], target: Path) -> list[WheelInfo]:
    """Unpack wheels into one site-packages folder, every file checked against its RECORD.

    Python's scripts, headers and data files outside site-packages are left out: a benchmark
    imports. Programs among the scripts (ninja's wheel has no other) come into `PROGRAMS`.

    Raises BuildFailed: a file that differs from RECORD, one that RECORD lacks, a path that leaves
    the folder, or two wheels with one file.
    """
    found = [(path, read_wheel(path)) for path in wheels]
    reject_clashes(info for _, info in found)
    for path, info in found:
        with zipfile.ZipFile(path) as archive:
            for member in archive.infolist():
                place = _place(member.filename)
                if member.is_dir() or place is None:
                    continue
                data = archive.read(member)
                _check_member(info, member.filename, data)
                if place.startswith(f"{PROGRAMS}/") and data.startswith(b"#!python"):
                    continue
                destination = target / place
                destination.parent.mkdir(parents=True, exist_ok=True)
                destination.write_bytes(data)
                # A compiler's programs (0o744 in CUDA's wheels: who may run them is not theirs to
                # say); a library needs no such bit.
                runs = member.external_attr >> 16 & 0o100 and "bin" in Path(place).parts
                destination.chmod(0o755 if runs else 0o644)
    return [info for _, info in found]


def reject_clashes(wheels: Iterable[WheelInfo]) -> None:
    """Refuse wheels of which two would write one file, as flash-attn 2 and flash-attn-4 do.

    Raises BuildFailed: naming the first such file and both wheels.
    """
    owners: dict[str, str] = {}
    for info in wheels:
        for name in info.files:
            place = _place(name)
            if place is not None and owners.setdefault(place, info.file) != info.file:
                message = f"{place} is in both {owners[place]} and {info.file}"
                hint = "leave one of them out, and make another image or bundle with it"
                raise BuildFailed(message, hint=hint)


def _place(name: str) -> str | None:
    """Where a member goes below site-packages; None if it does not go there."""
    parts = PurePosixPath(name).parts
    if name.startswith("/") or ".." in parts or "\\" in name:
        message = f"the wheel holds the path {name!r}"
        raise BuildFailed(message)
    if not parts[0].endswith(".data"):
        return name
    if len(parts) > 2 and parts[1] in _SCHEMES:
        return "/".join(parts[2:])
    if len(parts) > 2 and parts[1] == "scripts":
        return "/".join((PROGRAMS, *parts[2:]))
    return None


def _check_member(info: WheelInfo, name: str, data: bytes) -> None:
    if name.endswith(".dist-info/RECORD"):
        return
    if info.files.get(name) != hashlib.sha256(data).hexdigest():
        message = f"{name} in {info.file} is not what its RECORD says"
        raise BuildFailed(message, hint="fetch the wheel again")


def compile_folder(folder: Path, shown_as: str) -> None:
    """Compile Python files, on all cores, to bytecode that is never checked against its source.

    The image is read-only and its times are fixed: bytecode that is checked by time would be
    compiled anew at every start.

    Args:
        folder: where the files lie now.
        shown_as: where they will lie, for tracebacks.
    """
    compileall.compile_dir(
        str(folder),
        quiet=2,  # some packages ship templates that do not compile
        workers=0,
        stripdir=str(folder),
        prependdir=shown_as,
        invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH,
    )
