"""The stream round content.zip: not signed itself, so anyone can put another in its place."""

from __future__ import annotations

import gzip
import lzma
import tracemalloc
import zlib
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from attnrepro.artifact import bundle
from attnrepro.artifact.budget import MIB, Budget
from attnrepro.artifact.trust import TrustStore
from attnrepro.artifact.verify import verify
from attnrepro.errors import Rejected
from support import example

if TYPE_CHECKING:
    from collections.abc import Callable


@pytest.fixture(scope="module")
def honest() -> bytes:
    return example.artifact()


@pytest.fixture(scope="module")
def bomb() -> bytes:
    """200 MiB of zeros in 30 kB."""
    packer = lzma.LZMACompressor(preset=0)
    return b"".join(packer.compress(bytes(MIB)) for _ in range(200)) + packer.flush()


def rule_of(data: bytes, budget: Budget | None = None) -> str | None:
    with pytest.raises(Rejected) as caught:
        verify(data, trust=TrustStore(), budget=budget)
    return caught.value.rule


def _greedy(content: bytes) -> bytes:
    """A whole stream whose block asks for a dictionary of 512 MiB (xz file format 1.1.0, 3.1)."""
    stream = bytearray(lzma.compress(content, preset=0))
    header = stream[12:24]
    assert header[:4] == b"\x02\x00\x21\x01"  # 12 bytes, one filter: LZMA2, one byte of properties
    header[4] = 34  # 2 << (34 / 2 + 11) bytes
    header[8:] = zlib.crc32(header[:8]).to_bytes(4, "little")
    stream[12:24] = header
    return bytes(stream)


def _two_streams(content: bytes) -> bytes:
    half = len(content) // 2
    return lzma.compress(content[:half]) + lzma.compress(content[half:])


LENIENT: dict[str, Callable[[bytes], bytes]] = {
    "lzma alone": lambda content: lzma.compress(content, format=lzma.FORMAT_ALONE),
    "two streams": _two_streams,
    "an empty stream behind": lambda content: lzma.compress(content) + lzma.compress(b""),
    "a script behind": lambda content: lzma.compress(content) + b"#!/bin/sh\nexit 0\n",
    "a dictionary of 512 MiB": _greedy,
}
"""Streams that Python's `lzma.decompress` opens: the content in them is the honest one."""


def _with_another_checksum(stream: bytes) -> bytes:
    """The CRC-64 of the block changed: it stands before the index, whose size the footer tells."""
    index = (int.from_bytes(stream[-8:-4], "little") + 1) * 4
    at = len(stream) - 12 - index - 1
    return stream[:at] + bytes([stream[at] ^ 1]) + stream[at + 1 :]


OTHERS: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda _: b"",
    "the bare content.zip": lambda content: content,
    "zeros": lambda _: bytes(1000),
    "gzip": gzip.compress,
    "a byte before": lambda content: b"\n" + lzma.compress(content),
    "padding behind": lambda content: lzma.compress(content) + bytes(4),
    "a byte behind": lambda content: lzma.compress(content) + b"\n",
    "its first 1000 bytes": lambda content: lzma.compress(content)[:1000],
    "without its last byte": lambda content: lzma.compress(content)[:-1],
    "another checksum": lambda content: _with_another_checksum(lzma.compress(content)),
}


@pytest.mark.parametrize("case", [*LENIENT, *OTHERS])
def test_not_one_whole_stream(case: str, honest: bytes) -> None:
    stream = {**LENIENT, **OTHERS}[case](example.content_zip(honest))
    assert rule_of(example.with_stream(honest, stream)) == "outer.xz"


@pytest.mark.parametrize("case", LENIENT)
def test_others_accept_what_is_refused(case: str, honest: bytes) -> None:
    content = example.content_zip(honest)
    assert lzma.decompress(LENIENT[case](content)) == content


def test_cut_short_behind_the_content(honest: bytes) -> None:
    """Every byte of the content comes out of what is refused as cut short."""
    content = example.content_zip(honest)
    stream = OTHERS["without its last byte"](content)
    assert lzma.LZMADecompressor().decompress(stream) == content


def test_bomb(honest: bytes, bomb: bytes) -> None:
    forged = example.with_stream(honest, bomb)
    tracemalloc.start()
    try:
        assert rule_of(forged, Budget(content=MIB)) == "outer.size"
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 8 * MIB


def test_nothing_is_unpacked_before_the_signature(honest: bytes, bomb: bytes) -> None:
    signed = bundle.parse(example.outer(honest)["bundle.sigstore.json"])
    unsigned = replace(signed, signature=bytes(64)).to_bytes()
    forged = example.with_bundle(example.with_stream(honest, bomb), unsigned)
    assert rule_of(forged, Budget(content=MIB)) == "signature.invalid"


def test_the_budget_is_exact(honest: bytes) -> None:
    size = len(example.content_zip(honest))
    verify(honest, trust=TrustStore(), budget=Budget(content=size))
    assert rule_of(honest, Budget(content=size - 1)) == "outer.size"


@pytest.mark.parametrize(
    ("preset", "check"),
    [(0, lzma.CHECK_CRC64), (6, lzma.CHECK_NONE), (8, lzma.CHECK_SHA256)],
)
def test_packed_anew(honest: bytes, preset: int, check: int) -> None:
    """What is signed is content.zip: another stream with the same bytes in it changes nothing."""
    stream = lzma.compress(example.content_zip(honest), preset=preset, check=check)
    again = example.with_stream(honest, stream)
    assert again != honest
    verified = [verify(data, trust=TrustStore()) for data in (honest, again)]
    assert verified[0].statement == verified[1].statement
    assert verified[0].members == verified[1].members


def test_another_content(honest: bytes) -> None:
    other = example.content_zip(example.small_artifact())
    assert rule_of(example.with_content(honest, other)) == "subject.content"
