"""The listing of an image's tree, small enough to travel: a rebuild that differs can say where.

Advisory: an image's identity is its digest, and what is packed here only names the first
difference. So content digests are shortened, and the whole is compressed.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Final

from attnrepro.artifact.squeeze import squeeze, unsqueeze
from attnrepro.errors import BuildFailed, Rejected

if TYPE_CHECKING:
    from collections.abc import Iterator

SUFFIX: Final = ".tree.xz"
_DIGITS: Final = 6
"""Hex digits kept of a file's digest: 60,000 files take 0.66 MB (12 digits: 0.84), and one changed
file in 16 million escapes."""
_LARGEST: Final = 64 << 20
"""Bytes of an unpacked listing; a compressed one from a stranger may be a bomb."""


def pack(listing: bytes) -> bytes:
    """A listing (`images.tree.listing`) in short."""
    return squeeze(b"\n".join(_short(listing)))


def same(packed: bytes, listing: bytes) -> bool:
    """Whether a packed listing and another listing name the same paths with the same contents.

    False too where the packed one is damaged.
    """
    try:
        theirs = unsqueeze(packed, what="the listing", limit=_LARGEST)
        return list(_short(theirs)) == list(_short(listing))
    except (Rejected, ValueError, LookupError, TypeError, RecursionError):
        return False


def first_difference(packed: bytes, listing: bytes) -> str | None:
    """The first path at which a packed listing and another listing differ, in words.

    None where they are equal, or where the packed one is damaged.
    """
    from attnrepro.images import tree

    try:
        theirs = unsqueeze(packed, what="the listing", limit=_LARGEST)
        tree.parse_listing(theirs)
        # Older listings kept more digits.
        short = (tree.parse_listing(b"\n".join(_short(each))) for each in (theirs, listing))
        return tree.first_difference(*short)
    except (Rejected, BuildFailed, RecursionError):
        return None


def _short(listing: bytes) -> Iterator[bytes]:
    for line in listing.splitlines():
        entry = json.loads(line)
        if entry[1] == "file":
            entry[-1] = entry[-1][:_DIGITS]
        yield json.dumps(entry, separators=(",", ":"), ensure_ascii=True).encode()
