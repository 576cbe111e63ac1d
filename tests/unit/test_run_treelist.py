from __future__ import annotations

import lzma

from attnrepro import treelist

LISTING = b"".join(
    b'["usr/f%d","file","0644",0,0,3,"%s"]\n' % (n, b"%02d" % n * 32) for n in range(50)
)


def there_and_back(listing: bytes) -> bytes:
    found = treelist.unpack(treelist.pack({"a": listing}), "a")
    assert found is not None
    return found


def test_equal_listings_have_no_difference() -> None:
    assert treelist.first_difference(there_and_back(LISTING), LISTING) is None
    assert treelist.same(there_and_back(LISTING), LISTING)


def test_first_difference_is_named() -> None:
    changed = LISTING.replace(b"07" * 32, b"99" * 32).replace(b"08" * 32, b"99" * 32)
    found = treelist.first_difference(there_and_back(LISTING), changed)
    assert found == "/usr/f7: sha256 070707 against 999999"
    older = LISTING.replace(b"07" * 32, b"07" * 6).replace(b"08" * 32, b"08" * 6)
    assert treelist.first_difference(older, LISTING) is None
    assert treelist.first_difference(older, changed) == found


def test_missing_file_is_named() -> None:
    fewer = b"\n".join(LISTING.splitlines()[:-1])
    found = treelist.first_difference(there_and_back(LISTING), fewer)
    assert found == "/usr/f49: only in the first"


def test_images_of_one_root_share_its_listing() -> None:
    lines = sorted(LISTING.splitlines())
    changed = lines[3].replace(b"0644", b"0755")
    added = b'["opt/\\u00e9","file","0644",0,0,1,"%s"]' % (b"ab" * 32)
    other = b"\n".join([added, *lines[:3], changed, *lines[5:]])
    unlike = b'["bin","link","0777",0,0,0,"usr/bin"]'
    packed = treelist.pack({"a": b"\n".join(lines), "b": other, "c": unlike})
    assert len(packed["b"]) < len(packed["a"]) * 0.7
    for name, listing in (("a", b"\n".join(lines)), ("b", other), ("c", unlike)):
        found = treelist.unpack(packed, name)
        assert found is not None
        assert treelist.same(found, listing), name


def test_damaged_or_huge_listings_say_nothing() -> None:
    packed = treelist.pack({"a": LISTING})["a"]
    bomb = lzma.compress(b"[]\n" * (treelist._LARGEST // 2), preset=0)
    for damaged in (b"", b"x" * 100, packed[:-8], bomb):
        assert treelist.unpack({"a": damaged}, "a") is None
    for text in (b"{", b'{"like":"a","without":3}', b'{"like":"b","without":[]}', b'{"like":"a"}'):
        assert treelist.unpack({"a": lzma.compress(text), "b": bomb}, "a") is None
    circle = lzma.compress(b'{"like":"a","without":[]}')
    found = treelist.unpack({"a": circle}, "a")
    assert found is None or treelist.first_difference(found, LISTING) is None
    assert treelist.unpack({}, "a") is None
    assert treelist.first_difference(b"[]", LISTING) is None
