"""What travels as one xz stream: content.zip round the bytes that are signed, an image's listing.

What has a digest is never compressed, since no two compressors give the same bytes: the statement
names content.zip itself, and only its wrapping is squeezed (the 72-cell Hopper grid: 6.5 MB stored,
1.1 MB as xz). The stream is opened after the signature, with a fixed limit of memory and output.
"""

from __future__ import annotations

import lzma
from typing import Final

from attnrepro.errors import Rejected

SUFFIX: Final = ".xz"
_PRESET: Final = 6
_PIECE: Final = 1 << 20
_MEMORY: Final = 80 << 20
"""Bytes that a decompressor may take: preset 9 takes 65 MiB, ours 9."""


def squeeze(data: bytes) -> bytes:
    """Return `data` as one xz stream."""
    return lzma.compress(data, format=lzma.FORMAT_XZ, preset=_PRESET)


def unsqueeze(data: bytes, *, what: str, limit: int) -> bytes:
    """Return what one xz stream holds.

    Args:
        data: the stream, nothing before or behind it.
        what: name of the contents, for messages.
        limit: most bytes of the result; decompression ends there.

    Raises:
        Rejected: `outer.xz` for anything but one whole stream, `outer.size` beyond the limit.

    """
    found = bytearray()
    try:
        unpacker = lzma.LZMADecompressor(format=lzma.FORMAT_XZ, memlimit=_MEMORY)
        # Piece by piece: asked for all at once, it keeps pieces of its own and then joins them.
        found += unpacker.decompress(data, max_length=_PIECE)
        while not unpacker.eof and not unpacker.needs_input and len(found) <= limit:
            found += unpacker.decompress(b"", max_length=_PIECE)
    except (lzma.LZMAError, EOFError, MemoryError) as error:
        message = f"{what} is no xz stream: {error}"
        raise Rejected(message, rule="outer.xz") from None
    if len(found) > limit:
        message = f"{what} is larger than the budget"
        hint = "if you trust its origin, raise the budget with --max-mib"
        raise Rejected(message, rule="outer.size", hint=hint)
    if not unpacker.eof or unpacker.unused_data:
        message = f"{what} is cut short, or something follows its xz stream"
        raise Rejected(message, rule="outer.xz")
    return bytes(found)
