"""Containers that other readers accept: as the file itself, and as a validly signed content."""

from __future__ import annotations

import hashlib
import io
import struct
import zipfile
from typing import TYPE_CHECKING

import pytest

from attnrepro import jsonio
from attnrepro.artifact import container, sign
from attnrepro.artifact.statement import Statement, parse
from attnrepro.artifact.trust import TrustStore
from attnrepro.artifact.verify import verify
from attnrepro.distribute import oci
from attnrepro.errors import Rejected
from support import example, zipforge
from support.zipforge import Entry, build

if TYPE_CHECKING:
    from collections.abc import Callable

Forger = "Callable[[dict[str, bytes]], bytes]"


def _with(**changes: object) -> Callable[[dict[str, bytes]], bytes]:
    """Forger that changes fields of the first member."""

    def forge(members: dict[str, bytes]) -> bytes:
        items = zipforge.entries(members)
        for name, value in changes.items():
            setattr(items[0], name, value)
        return build(items)

    return forge


def _added(*extra: Entry, ordered: bool = True) -> Callable[[dict[str, bytes]], bytes]:
    """Forger that adds members, in byte order."""

    def forge(members: dict[str, bytes]) -> bytes:
        items = [*zipforge.entries(members), *extra]
        return build(sorted(items, key=lambda item: item.name) if ordered else items)

    return forge


def _overlap(members: dict[str, bytes]) -> bytes:
    items = zipforge.entries(members)
    items[1].offset = 0
    return build(items)


def _quoted(members: dict[str, bytes]) -> bytes:
    """A member whose data hold the next member's local header (David Fifield's overlap)."""
    inner = Entry(name=b"recipe/b", data=b"payload")
    outer = Entry(name=b"recipe/a", data=inner.local())
    inner.offset = len(zipforge.build([outer])) - len(inner.local()) - 46 - 8 - 22
    items = zipforge.entries(members)
    return build([*items, outer, inner])


def _joined(members: dict[str, bytes]) -> bytes:
    first = container.write(members)
    return first + first


def _polyglot(members: dict[str, bytes]) -> bytes:
    return b"#!/bin/sh\nexit 0\n" + container.write(members)


def _directory_gap(members: dict[str, bytes]) -> bytes:
    return build(zipforge.entries(members), gap=b"hidden")


def _unsorted(members: dict[str, bytes]) -> bytes:
    return build(list(reversed(zipforge.entries(members))))


def _too_many(members: dict[str, bytes]) -> bytes:
    extra = [Entry(name=b"logs/%05d" % index) for index in range(20_000)]
    return build(sorted([*zipforge.entries(members), *extra], key=lambda item: item.name))


def _lying_count(members: dict[str, bytes]) -> bytes:
    return build(zipforge.entries(members), count=len(members) - 1)


def _python_zipfile(members: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as archive:
        for name in sorted(members):
            archive.writestr(name, members[name])
    return buffer.getvalue()


def _zip64(members: dict[str, bytes]) -> bytes:
    extra = struct.pack("<HHQQ", 1, 16, 1, 1)
    return _added(Entry(name=b"logs/a", extra=extra, local_extra=extra, needed=45))(members)


def _unicode_path(members: dict[str, bytes]) -> bytes:
    path = b"logs/other"
    extra = struct.pack("<HHBI", 0x7075, 5 + len(path), 1, 0) + path
    return _added(Entry(name=b"logs/a", extra=extra, local_extra=extra))(members)


SYMLINK = 0o120777 << 16
CASES: dict[str, tuple[Callable[[dict[str, bytes]], bytes], set[str]]] = {
    "parent": (_added(Entry(name=b"../x")), {"name"}),
    "parent inside": (_added(Entry(name=b"logs/../../x")), {"name"}),
    "absolute": (_added(Entry(name=b"/etc/passwd")), {"name"}),
    "drive": (_added(Entry(name=b"C:/x")), {"name"}),
    "drive without slash": (_added(Entry(name=b"C:x")), {"name"}),
    "backslash": (_added(Entry(name=b"logs\\x")), {"name"}),
    "unc": (_added(Entry(name=b"\\\\host\\share")), {"name"}),
    "empty name": (_added(Entry(name=b"")), {"name"}),
    "double slash": (_added(Entry(name=b"logs//x")), {"name"}),
    "dot": (_added(Entry(name=b"./x")), {"name"}),
    "hidden": (_added(Entry(name=b"logs/.x")), {"name"}),
    "folder entry": (_added(Entry(name=b"logs/", data=b"")), {"name"}),
    "nul in name": (_added(Entry(name=b"logs/a\x00.txt")), {"name"}),
    "right-to-left": (_added(Entry(name="logs/a\u202etxt".encode())), {"name"}),
    "utf-8 name": (_added(Entry(name="logs/é".encode(), flags=0x800)), {"name", "flags"}),
    "escape in name": (_added(Entry(name=b"logs/\x1b[2J")), {"name"}),
    "newline in name": (_added(Entry(name=b"logs/a\n")), {"name"}),
    "space": (_added(Entry(name=b"logs/a b")), {"name"}),
    "trailing dot": (_added(Entry(name=b"logs/a.")), {"name"}),
    "colon stream": (_added(Entry(name=b"logs/a:b")), {"name"}),
    "option-like": (_added(Entry(name=b"-rf")), {"name"}),
    "too deep": (_added(Entry(name=b"logs/" + b"a/" * 8 + b"a")), {"name"}),
    "too long": (_added(Entry(name=b"logs/" + b"a" * 250)), {"name"}),
    "device": (_added(Entry(name=b"logs/aux.txt")), {"device_name"}),
    "device folder": (_added(Entry(name=b"logs/COM1/x")), {"device_name"}),
    "device twice dotted": (_added(Entry(name=b"logs/nul.tar.gz")), {"device_name"}),
    "symlink": (_added(Entry(name=b"logs/l", data=b"/etc", attributes=SYMLINK)), {"mode"}),
    "under a symlink": (
        _added(Entry(name=b"logs/l", data=b"/etc", attributes=SYMLINK), Entry(name=b"logs/l/x")),
        {"mode", "file_and_folder"},
    ),
    "setuid": (_added(Entry(name=b"logs/s", attributes=0o104755 << 16)), {"mode"}),
    "executable": (_added(Entry(name=b"logs/s", attributes=0o100755 << 16)), {"mode"}),
    "dos attributes": (_added(Entry(name=b"logs/s", attributes=0o100644 << 16 | 0x10)), {"mode"}),
    "same name twice": (_added(Entry(name=b"logs/a"), Entry(name=b"logs/a")), {"duplicate"}),
    "case": (_added(Entry(name=b"logs/A"), Entry(name=b"logs/a")), {"case_collision"}),
    "folders in two cases": (
        _added(Entry(name=b"logs/X/a"), Entry(name=b"logs/x/b")),
        {"case_collision"},
    ),
    "file and folder": (
        _added(Entry(name=b"logs/a"), Entry(name=b"logs/a/b")),
        {"file_and_folder"},
    ),
    "file and folder in two cases": (
        _added(Entry(name=b"logs/A"), Entry(name=b"logs/a/b")),
        {"file_and_folder"},
    ),
    "deflated zeros": (_added(Entry(name=b"logs/z", data=bytes(10**6), method=8)), {"method"}),
    "unknown method": (_added(Entry(name=b"logs/z", method=99)), {"method"}),
    "size lies": (_with(size=2**31), {"method", "layout"}),
    "overlap": (_overlap, {"layout"}),
    "quoted overlap": (_quoted, {"layout", "order"}),
    "archive comment": (lambda m: build(zipforge.entries(m), comment=b"hello"), {"end"}),
    "comment with an archive": (
        lambda m: build(zipforge.entries(m), comment=container.write({"a": b""})),
        {"layout", "end"},
    ),
    "member comment": (_with(comment=b"hello"), {"comment"}),
    "prefixed": (_polyglot, {"layout"}),
    "prefixed, offsets shifted": (
        lambda m: build(zipforge.entries(m), prefix=b"MZ" + bytes(62)),
        {"layout"},
    ),
    "two joined": (_joined, {"layout"}),
    "gap before the directory": (_directory_gap, {"layout"}),
    "trailing byte": (lambda m: container.write(m) + b"\n", {"end"}),
    "local name differs": (_with(local_name=b"b" * 20), {"local", "layout"}),
    "wrong crc": (_with(crc=1), {"crc"}),
    "encrypted": (_with(flags=1), {"flags"}),
    "encrypted in one header": (_with(local_flags=1), {"flags"}),
    "data descriptor": (_with(flags=8), {"flags"}),
    "utf-8 flag": (_with(flags=0x800), {"flags"}),
    "extra field": (_with(extra=b"UT\x05\x00\x01\x00\x00\x00\x00"), {"extra"}),
    "local extra field": (_with(local_extra=b"\x00\x00\x00\x00"), {"extra", "layout"}),
    "unicode path": (_unicode_path, {"extra"}),
    "zip64": (_zip64, {"extra"}),
    "made on Windows": (_with(made_by=20), {"header"}),
    "a date": (_with(date=0x5A21), {"header"}),
    "unsorted": (_unsorted, {"order", "layout"}),
    "20,000 members": (_too_many, {"members"}),
    "count lies": (_lying_count, {"layout"}),
    "python's zipfile": (_python_zipfile, {"header", "mode"}),
    "empty": (lambda _: b"", {"truncated"}),
    "not a zip": (lambda _: b"\x00" * 1000, {"end"}),
    "empty archive": (lambda _: container.write({}), set()),
}


def _signed_content(forged: bytes) -> bytes:
    """An artifact with this content.zip, everything else right and signed."""
    honest = parse_payload()
    digest = hashlib.sha256(forged).hexdigest()
    claim = Statement(
        kind=honest.kind,
        predicate=honest.predicate,
        content_sha256=digest,
        oci_manifest_sha256=oci.manifest_sha256(digest, len(forged)),
    )
    return sign.sign_payload(claim.to_bytes(), forged, example.signer())


def parse_payload() -> Statement:
    return parse(jsonio.canonical(example.payload(example.artifact())))


@pytest.fixture(scope="module")
def honest() -> bytes:
    return example.artifact()


@pytest.mark.parametrize("case", CASES)
def test_outer_container(case: str, honest: bytes) -> None:
    forge, rules = CASES[case]
    with pytest.raises(Rejected) as caught:
        verify(forge(example.outer(honest)), trust=TrustStore())
    assert caught.value.rule in {f"container.{rule}" for rule in rules} or (
        case == "empty archive" and caught.value.rule == "outer.members"
    )


@pytest.mark.parametrize("case", CASES)
def test_signed_content(case: str, honest: bytes) -> None:
    forge, rules = CASES[case]
    members = example.members(honest)
    with pytest.raises(Rejected) as caught:
        verify(_signed_content(forge(members)), trust=TrustStore())
    assert caught.value.rule in {f"container.{rule}" for rule in rules} or (
        case == "empty archive" and caught.value.rule == "content.missing"
    )


def test_the_forge_can_be_honest(honest: bytes) -> None:
    """Without a change the forged container is the canonical one, so each case tests its change."""
    members = example.members(honest)
    assert build(zipforge.entries(members)) == container.write(members)
    assert not verify(_signed_content(container.write(members)), trust=TrustStore()).trusted


def test_others_accept_what_is_refused(honest: bytes) -> None:
    """The point of a strict reader: `zipfile` opens most of these without complaint."""
    members = example.outer(honest)
    accepted = 0
    for forge, _ in CASES.values():
        data = forge(members)
        try:
            with zipfile.ZipFile(io.BytesIO(data)) as archive:
                accepted += bool(archive.namelist())
        except (zipfile.BadZipFile, NotImplementedError, ValueError):
            continue
    assert accepted > 40


def test_extra_outer_member(honest: bytes) -> None:
    members = {**example.outer(honest), "README.txt": b"run me"}
    with pytest.raises(Rejected) as caught:
        verify(container.write(members), trust=TrustStore())
    assert caught.value.rule == "outer.members"


def test_extra_content_member(honest: bytes) -> None:
    members = example.members(honest)
    forged = container.write({**members, "setup.py": b"import os"})
    with pytest.raises(Rejected) as caught:
        verify(_signed_content(forged), trust=TrustStore())
    assert caught.value.rule == "content.member"
