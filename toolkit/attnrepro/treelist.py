"""The listing of an image's tree, small enough to travel: a rebuild that differs can say where.

Advisory: an image's identity is its digest, and what is packed here only names the first
difference. So content digests are shortened, and the whole is compressed.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Final

from attnrepro.artifact.squeeze import squeeze, unsqueeze
from attnrepro.errors import BuildFailed, Rejected
from attnrepro.images import tree
from attnrepro.images.tree import path_order

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

SUFFIX: Final = ".tree.xz"
_DIGITS: Final = 6
"""Hex digits kept of a file's digest: 60,000 files take 0.66 MB (12 digits: 0.84), and one changed
file in 16 million escapes."""
_LARGEST: Final = 64 << 20
"""Bytes of an unpacked listing; a compressed one from a stranger may be a bomb."""


def pack(listings: Mapping[str, bytes]) -> dict[str, bytes]:
    """Listings (`images.tree.listing`) of a run's images in short, by name as they came.

    Images of one host share its root: three lists of 0.7 MB made an artifact of 2.5 MB. So the
    first is whole, and another one is the lines in which it differs where those are the minority.
    """
    packed: dict[str, bytes] = {}
    first: tuple[str, list[bytes]] | None = None
    for name, listing in listings.items():
        lines = list(_short(listing))
        text = lines
        if first is None:
            first = (name, lines)
        else:
            own, shared = set(lines), set(first[1])
            added = [line for line in lines if line not in shared]
            gone = [json.loads(line)[0] for line in first[1] if line not in own]
            if len(added) + len(gone) < len(lines) // 2:
                text = [json.dumps({"like": first[0], "without": gone}).encode(), *added]
        packed[name] = squeeze(b"\n".join(text))
    return packed


def unpack(packed: Mapping[str, bytes], name: str) -> bytes | None:
    """One listing out of what `pack` made; None where there is none, or it is damaged."""
    try:
        head, *added = _lines(packed[name])
        if not head.startswith(b"{"):
            return b"\n".join([head, *added])
        like = json.loads(head)
        gone = set(like["without"])
        kept = [line for line in _lines(packed[like["like"]]) if json.loads(line)[0] not in gone]
        lines = sorted([*kept, *added], key=lambda line: path_order(json.loads(line)[0]))
        return b"\n".join(lines)
    except (Rejected, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return None


def same(theirs: bytes, listing: bytes) -> bool:
    """Whether an unpacked listing and another name the same paths with the same contents.

    False too where the unpacked one is damaged.
    """
    try:
        return list(_short(theirs)) == list(_short(listing))
    except (ValueError, LookupError, TypeError, RecursionError):
        return False


def first_difference(theirs: bytes, listing: bytes) -> str | None:
    """The first path at which an unpacked listing and another differ, in words.

    None where they are equal, or where the unpacked one is damaged.
    """
    try:
        tree.parse_listing(theirs)
        # Older listings kept more digits.
        short = (tree.parse_listing(b"\n".join(_short(each))) for each in (theirs, listing))
        return tree.first_difference(*short)
    except (BuildFailed, RecursionError):
        return None


def _lines(packed: bytes) -> list[bytes]:
    return unsqueeze(packed, what="the listing", limit=_LARGEST).splitlines()


def _short(listing: bytes) -> Iterator[bytes]:
    for line in listing.splitlines():
        entry = json.loads(line)
        if entry[1] == "file":
            entry[-1] = entry[-1][:_DIGITS]
        yield json.dumps(entry, separators=(",", ":"), ensure_ascii=True).encode()
