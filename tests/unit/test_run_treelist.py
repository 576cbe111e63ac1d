from __future__ import annotations

import lzma

from attnrepro import treelist

LISTING = b"".join(
    b'["usr/f%d","file","0644",0,0,3,"%s"]\n' % (n, b"%02d" % n * 32) for n in range(50)
)


def test_equal_listings_have_no_difference() -> None:
    assert treelist.first_difference(treelist.pack(LISTING), LISTING) is None


def test_first_difference_is_named() -> None:
    changed = LISTING.replace(b"07" * 32, b"99" * 32).replace(b"08" * 32, b"99" * 32)
    found = treelist.first_difference(treelist.pack(LISTING), changed)
    assert found == "/usr/f7: sha256 070707 against 999999"
    older = lzma.compress(LISTING.replace(b"07" * 32, b"07" * 6).replace(b"08" * 32, b"08" * 6))
    assert treelist.first_difference(older, LISTING) is None
    assert treelist.first_difference(older, changed) == found


def test_missing_file_is_named() -> None:
    fewer = b"\n".join(LISTING.splitlines()[:-1])
    found = treelist.first_difference(treelist.pack(LISTING), fewer)
    assert found == "/usr/f49: only in the first"


def test_damaged_or_huge_listings_say_nothing() -> None:
    packed = treelist.pack(LISTING)
    bomb = lzma.compress(b"[]\n" * (treelist._LARGEST // 2), preset=0)
    for damaged in (b"", b"x" * 100, packed[:-8], bomb, lzma.compress(b"{")):
        assert treelist.first_difference(damaged, LISTING) is None
