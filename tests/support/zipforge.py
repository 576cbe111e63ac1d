"""Any ZIP one likes, field by field, right or wrong."""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass, field

DATE = 1 << 5 | 1


@dataclass(kw_only=True)
class Entry:
    """One member; what is None follows from the rest."""

    name: bytes
    data: bytes = b"x"
    local_name: bytes | None = None
    crc: int | None = None
    size: int | None = None
    method: int = 0
    flags: int = 0
    local_flags: int | None = None
    made_by: int = 3 << 8 | 30
    needed: int = 10
    date: int = DATE
    attributes: int = 0o100644 << 16
    extra: bytes = b""
    local_extra: bytes = b""
    comment: bytes = b""
    offset: int | None = None
    stored: bytes = field(init=False)

    def __post_init__(self) -> None:
        self.stored = self.data
        if self.method == 8:
            packer = zlib.compressobj(9, zlib.DEFLATED, -15)
            self.stored = packer.compress(self.data) + packer.flush()

    def fixed(self, flags: int) -> tuple[int, ...]:
        crc = zlib.crc32(self.data) if self.crc is None else self.crc
        size = len(self.data) if self.size is None else self.size
        return (self.needed, flags, self.method, 0, self.date, crc, len(self.stored), size)

    def local(self) -> bytes:
        name = self.name if self.local_name is None else self.local_name
        flags = self.flags if self.local_flags is None else self.local_flags
        head = struct.pack(
            "<4s5H3I2H", b"PK\x03\x04", *self.fixed(flags), len(name), len(self.local_extra)
        )
        return head + name + self.local_extra + self.stored

    def central(self, offset: int) -> bytes:
        head = struct.pack(
            "<4s6H3I5H2I",
            b"PK\x01\x02",
            self.made_by,
            *self.fixed(self.flags),
            len(self.name),
            len(self.extra),
            len(self.comment),
            0,
            0,
            self.attributes,
            offset if self.offset is None else self.offset,
        )
        return head + self.name + self.extra + self.comment


def entries(members: dict[str, bytes]) -> list[Entry]:
    """Honest entries in canonical order."""
    return [Entry(name=name.encode(), data=members[name]) for name in sorted(members)]


def build(
    items: list[Entry],
    *,
    prefix: bytes = b"",
    gap: bytes = b"",
    comment: bytes = b"",
    shift: bool = True,
    count: int | None = None,
) -> bytes:
    """The archive: prefix, members, gap, directory, end record.

    `shift` makes the offsets count the prefix, as self-extracting archives do.
    """
    body, offsets = b"", []
    base = len(prefix) if shift else 0
    for item in items:
        offsets.append(base + len(body))
        body += item.local()
    listing = b"".join(item.central(at) for item, at in zip(items, offsets, strict=True))
    total = len(items) if count is None else count
    start = base + len(body) + len(gap)
    end = struct.pack(
        "<4s4H2IH",
        b"PK\x05\x06",
        0,
        0,
        total & 0xFFFF,
        total & 0xFFFF,
        len(listing),
        start,
        len(comment),
    )
    return prefix + body + gap + listing + end + comment
