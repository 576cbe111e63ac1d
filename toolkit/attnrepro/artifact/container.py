"""The canonical ZIP: one set of members has exactly one sequence of bytes.

Stored members only, byte-sorted, no gaps, every header field fixed. The reader walks the three
places where a ZIP states things (local headers, central directory, end record), refuses what is
not fixed with a rule id of its own, and then requires that writing the members again gives the
bytes that were read. That last rule makes the earlier ones a matter of good messages: whatever they
forget cannot survive it.

Format: PKWARE APPNOTE 6.3.10, sections 4.3.7 (local), 4.3.12 (central), 4.3.16 (end).
"""

from __future__ import annotations

import re
import struct
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NoReturn

from attnrepro.errors import Rejected

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from attnrepro.artifact.budget import Budget

MAX_MEMBERS: Final = 1000
MAX_NAME: Final = 240
MAX_LEVELS: Final = 8

_LOCAL: Final = struct.Struct("<4s5H3I2H")
_CENTRAL: Final = struct.Struct("<4s6H3I5H2I")
_END: Final = struct.Struct("<4s4H2IH")
_LOCAL_MAGIC: Final = b"PK\x03\x04"
_CENTRAL_MAGIC: Final = b"PK\x01\x02"
_END_MAGIC: Final = b"PK\x05\x06"

_MADE_BY: Final = 3 << 8 | 30  # Unix, so that the mode below is read; 3.0
_NEEDED: Final = 10  # 1.0: stored files
_TIME: Final = 0
_DATE: Final = 1 << 5 | 1  # 1980-01-01
_ATTRIBUTES: Final = 0o100644 << 16
_LIMIT: Final = 2**32 - 1  # no Zip64

_PART: Final = re.compile(rb"[A-Za-z0-9_][A-Za-z0-9._-]*")
_DEVICES: Final = frozenset(
    ["con", "prn", "aux", "nul", "conin$", "conout$"]
    + [f"{kind}{number}" for kind in ("com", "lpt") for number in range(10)]
)


@dataclass(frozen=True, kw_only=True)
class _Entry:
    name: bytes
    crc: int
    size: int
    offset: int


def write(members: Mapping[str, bytes]) -> bytes:
    """The bytes of the one container that holds these members.

    Raises Rejected (`container.*`) for names or sizes that the format does not allow.
    """
    return b"".join(_pieces(members))


def read(data: bytes, *, budget: Budget) -> dict[str, bytes]:
    """Parse strictly; the result satisfies `write(result) == data`.

    Args:
        data: the whole container.
        budget: limits, checked before anything of that size is made.

    Raises:
        Rejected: with a `container.*` rule.
    """
    if len(data) > budget.file:
        _refuse("size", "the container is larger than the budget")
    view = memoryview(data)
    entries, directory = _central(view, budget)
    _check_names([entry.name for entry in entries])
    members: dict[str, bytes] = {}
    position = 0
    for entry in entries:
        if entry.offset != position:
            _refuse("layout", "members overlap, leave a gap, or follow foreign bytes")
        position = _check_local(view, entry, directory)
        content = bytes(view[position - entry.size : position])
        if zlib.crc32(content) != entry.crc:
            _refuse("crc", f"the checksum of {_shown(entry.name)} is wrong")
        members[entry.name.decode("ascii")] = content
    if position != directory:
        _refuse("layout", "bytes stand between the last member and the directory")
    position = 0
    for piece in _pieces(members):
        if view[position : position + len(piece)] != piece:
            _refuse("canonical", f"not in canonical form at byte {position}")
        position += len(piece)
    if position != len(data):
        _refuse("canonical", "not in canonical form at its end")
    return members


def check_names(names: list[str]) -> None:
    """Refuse names that could mean two things on any system; they come in the order given.

    Raises Rejected with `container.name`, `.device_name`, `.duplicate`, `.case_collision`,
    `.file_and_folder`, `.order` or `.members`.
    """
    encoded = [name.encode("utf-8", "surrogatepass") for name in names]
    _check_names(encoded)


def _pieces(members: Mapping[str, bytes]) -> Iterator[bytes]:
    names = sorted(members, key=lambda name: name.encode("utf-8", "surrogatepass"))
    check_names(names)
    directory = []
    offset = 0
    for name in names:
        content, encoded = members[name], name.encode("ascii")
        fixed = (_NEEDED, 0, 0, _TIME, _DATE, zlib.crc32(content), len(content), len(content))
        if offset + len(content) > _LIMIT - _LOCAL.size - MAX_NAME:
            _refuse("size", "more than 4 GiB cannot be stored")
        yield _LOCAL.pack(_LOCAL_MAGIC, *fixed, len(encoded), 0) + encoded
        yield content
        directory.append(
            _CENTRAL.pack(
                _CENTRAL_MAGIC, _MADE_BY, *fixed, len(encoded), 0, 0, 0, 0, _ATTRIBUTES, offset
            )
            + encoded
        )
        offset += _LOCAL.size + len(encoded) + len(content)
    listing = b"".join(directory)
    yield listing
    yield _END.pack(_END_MAGIC, 0, 0, len(names), len(names), len(listing), offset, 0)


def _central(view: memoryview, budget: Budget) -> tuple[list[_Entry], int]:
    """Entries of the central directory, and where it begins."""
    if len(view) < _END.size:
        _refuse("truncated", "too short for a container")
    end = len(view) - _END.size
    magic, disk, start_disk, here, total, size, offset, comment = _END.unpack_from(view, end)
    if magic != _END_MAGIC:
        _refuse("end", "no end record at the very end: a comment, trailing data, or not a ZIP")
    if comment or disk or start_disk or here != total:
        _refuse("end", "the end record names a comment or several disks")
    if total > min(MAX_MEMBERS, budget.members):
        _refuse("members", f"{total} members; at most {min(MAX_MEMBERS, budget.members)}")
    if offset + size != end:
        _refuse("layout", "bytes stand before the first member or around the directory")
    entries = []
    position = offset
    for _ in range(total):
        if position + _CENTRAL.size > end:
            _refuse("truncated", "the directory is cut short")
        entry, position = _central_entry(view, position, end)
        entries.append(entry)
    if position != end:
        _refuse("layout", "bytes stand between the directory and the end record")
    return entries, offset


def _central_entry(view: memoryview, position: int, end: int) -> tuple[_Entry, int]:
    (
        magic,
        made_by,
        needed,
        flags,
        method,
        time,
        date,
        crc,
        packed,
        size,
        name_length,
        extra,
        comment,
        disk,
        internal,
        attributes,
        offset,
    ) = _CENTRAL.unpack_from(view, position)
    position += _CENTRAL.size
    if magic != _CENTRAL_MAGIC:
        _refuse("truncated", "the directory is damaged")
    if position + name_length + extra + comment > end:
        _refuse("truncated", "the directory is cut short")
    name = bytes(view[position : position + name_length])
    _check_fields(name, flags=flags, method=method, extra=extra, sizes=(packed, size))
    if comment:
        _refuse("comment", f"{_shown(name)} carries a comment")
    if attributes != _ATTRIBUTES:
        _refuse("mode", f"{_shown(name)} is not a plain file of mode 0644")
    if (made_by, needed, time, date, disk, internal) != (_MADE_BY, _NEEDED, _TIME, _DATE, 0, 0):
        _refuse("header", f"a fixed header field of {_shown(name)} differs")
    return _Entry(name=name, crc=crc, size=size, offset=offset), position + name_length


def _check_local(view: memoryview, entry: _Entry, directory: int) -> int:
    """Compare a local header with its directory entry; where the member's data end."""
    start = entry.offset + _LOCAL.size
    if start > directory or start + len(entry.name) + entry.size > directory:
        _refuse("layout", f"{_shown(entry.name)} reaches beyond the members")
    (magic, needed, flags, method, time, date, crc, packed, size, name_length, extra) = (
        _LOCAL.unpack_from(view, entry.offset)
    )
    if magic != _LOCAL_MAGIC:
        _refuse("layout", f"{_shown(entry.name)} has no local header where it should begin")
    _check_fields(entry.name, flags=flags, method=method, extra=extra, sizes=(packed, size))
    found = (needed, time, date, crc, size, name_length)
    if found != (_NEEDED, _TIME, _DATE, entry.crc, entry.size, len(entry.name)):
        _refuse("local", f"local header and directory disagree about {_shown(entry.name)}")
    if view[start : start + name_length] != entry.name:
        _refuse("local", f"local header and directory name {_shown(entry.name)} differently")
    return start + len(entry.name) + entry.size


def _check_fields(
    name: bytes, *, flags: int, method: int, extra: int, sizes: tuple[int, int]
) -> None:
    if flags:
        _refuse("flags", f"{_shown(name)} has flags 0x{flags:04x} (encryption, descriptor, UTF-8)")
    if method or sizes[0] != sizes[1]:
        _refuse("method", f"{_shown(name)} is compressed; only stored members have stable bytes")
    if extra:
        _refuse("extra", f"{_shown(name)} has an extra field")


def _check_names(names: list[bytes]) -> None:
    if len(names) > MAX_MEMBERS:
        _refuse("members", f"{len(names)} members; at most {MAX_MEMBERS}")
    for name in names:
        parts = name.split(b"/")
        if len(name) > MAX_NAME or len(parts) > MAX_LEVELS:
            _refuse("name", f"the name {_shown(name)} is too long or too deep")
        if not all(_PART.fullmatch(part) for part in parts):
            _refuse("name", f"the name {_shown(name)} is not allowed")
        for part in parts:
            if part.endswith(b"."):  # Windows drops a trailing dot, so two names would be one
                _refuse("name", f"the name {_shown(name)} ends with a dot")
            if part.split(b".")[0].decode("ascii").lower() in _DEVICES:
                _refuse("device_name", f"{_shown(name)} is a device on Windows")
    folded = [name.lower() for name in names]
    if len(set(names)) != len(names):
        _refuse("duplicate", "a name stands twice")
    if len(set(folded)) != len(folded):
        _refuse("case_collision", "two names differ in case only")
    files = set(folded)
    folders: dict[bytes, bytes] = {}
    for name in names:
        parts = name.split(b"/")
        for depth in range(1, len(parts)):
            folder = b"/".join(parts[:depth])
            if folder.lower() in files:
                _refuse("file_and_folder", f"{_shown(name)} lies under a name that is a file")
            if folders.setdefault(folder.lower(), folder) != folder:
                _refuse("case_collision", "two folders differ in case only")
    if names != sorted(names):
        _refuse("order", "the members are not sorted by name")


def _shown(name: bytes) -> str:
    return ascii(name[:80].decode("latin-1"))


def _refuse(rule: str, message: str) -> NoReturn:
    raise Rejected(message, rule=f"container.{rule}")
