"""The tree reader and the canonical writer: bytes are a function of contents alone."""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attnrepro.errors import BuildFailed
from attnrepro.images import oci, tree
from attnrepro.images.tree import Entry, Kind

if TYPE_CHECKING:
    from pathlib import Path

EPOCH = 1783764000


def member(
    name: str, data: bytes | None = None, *, kind: bytes = tarfile.REGTYPE, **more: object
) -> tuple[tarfile.TarInfo, bytes]:
    info = tarfile.TarInfo(name)
    info.type = kind
    info.size = len(data or b"")
    for key, value in more.items():
        setattr(info, key, value)
    return info, data or b""


def make_tar(path: Path, members: list[tuple[tarfile.TarInfo, bytes]]) -> Path:
    with tarfile.open(path, "w", format=tarfile.PAX_FORMAT) as archive:
        for info, data in members:
            archive.addfile(info, io.BytesIO(data) if info.isreg() else None)
    return path


def written(path: Path, entries: list[Entry], **more: object) -> tuple[oci.Layer, bytes]:
    sink = io.BytesIO()
    with path.open("rb") as source:
        layer, _ = oci.write_layer("x", entries, source, sink, epoch=EPOCH, **more)  # type: ignore[arg-type]
    return layer, sink.getvalue()


FILES = [
    member("etc", kind=tarfile.DIRTYPE, mode=0o755),
    member("etc/passwd", b"root:x:0:0\n", mode=0o644),
    member("usr", kind=tarfile.DIRTYPE, mode=0o755),
    member("usr/bin", kind=tarfile.DIRTYPE, mode=0o755),
    member("usr/bin/tool", b"#!/bin/sh\n" * 400, mode=0o4755, uid=7, gid=8),
    member("bin", kind=tarfile.SYMTYPE, linkname="usr/bin"),
    member("usr/" + "n" * 180, b"long", mode=0o600),
]


@settings(max_examples=30, deadline=None)
@given(order=st.permutations(range(len(FILES))), times=st.integers(0, 2**33))
def test_order_times_and_names_of_owners_do_not_matter(
    order: list[int], times: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("oci")
    plain = make_tar(folder / "a.tar", FILES)
    shuffled = []
    for index in order:
        info, data = FILES[index]
        other = tarfile.TarInfo("./" + info.name)
        other.type, other.mode, other.linkname, other.size = (
            info.type,
            info.mode,
            info.linkname,
            info.size,
        )
        other.uid, other.gid, other.mtime, other.uname = info.uid, info.gid, times, f"u{times}"
        shuffled.append((other, data))
    mixed = make_tar(folder / "b.tar", shuffled)
    assert written(plain, tree.read(plain)) == written(mixed, tree.read(mixed))


def test_one_changed_byte_gives_another_digest(tmp_path: Path) -> None:
    one = make_tar(tmp_path / "a.tar", [member("f", b"one")])
    two = make_tar(tmp_path / "b.tar", [member("f", b"two")])
    assert written(one, tree.read(one))[0].digest != written(two, tree.read(two))[0].digest


def test_what_engines_leave_behind_is_normalised(tmp_path: Path) -> None:
    bare = make_tar(tmp_path / "bare.tar", [member("usr/x", b"1", mode=0o644)])
    littered = make_tar(
        tmp_path / "littered.tar",
        [
            member("usr/x", b"1", mode=0o644),
            member(".dockerenv"),
            member("etc/hosts", b"127.0.0.1 build-7f3a\n", mode=0o600),
            member("etc/hostname", b"7f3a\n"),
            member("etc/resolv.conf", kind=tarfile.SYMTYPE, linkname="../run/x"),
            member("dev/null", kind=tarfile.CHRTYPE, mode=0o666),
            member("run/secrets/key", b"secret"),
            member("tmp/left", b"over"),
            member("tmp", kind=tarfile.DIRTYPE, mode=0o700),
            member("var/log/dpkg.log", b"2026-01-01"),
            member("etc/shadow-", b"old"),
            member("proc", kind=tarfile.DIRTYPE, mode=0o755),
        ],
    )
    assert tree.listing(tree.read(bare)) == tree.listing(tree.read(littered))
    paths = {entry.path for entry in tree.read(bare)}
    assert {"etc/hosts", "etc/resolv.conf", "tmp", "proc", "run"} <= paths


def test_hard_links_become_files_whichever_name_comes_first(tmp_path: Path) -> None:
    one = make_tar(
        tmp_path / "a.tar",
        [member("a", b"same", mode=0o755), member("b", kind=tarfile.LNKTYPE, linkname="a")],
    )
    two = make_tar(
        tmp_path / "b.tar",
        [member("b", b"same", mode=0o755), member("a", kind=tarfile.LNKTYPE, linkname="./b")],
    )
    layer, data = written(one, tree.read(one))
    assert layer == written(two, tree.read(two))[0]
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        links = {name: archive.getmember(name) for name in ("a", "b")}
        assert all(info.isreg() for info in links.values())
        assert archive.extractfile("b").read() == b"same"  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("members", "words"),
    [
        ([member("usr/../../etc/x", b"1")], "path"),
        ([member("usr/pipe", kind=tarfile.FIFOTYPE)], "no file"),
        ([member("usr/disk", kind=tarfile.BLKTYPE)], "no file"),
        ([member("a", kind=tarfile.LNKTYPE, linkname="gone")], "not there"),
    ],
)
def test_what_no_image_may_hold_is_refused(
    tmp_path: Path, members: list[tuple[tarfile.TarInfo, bytes]], words: str
) -> None:
    path = make_tar(tmp_path / "a.tar", members)
    with pytest.raises(BuildFailed, match=words):
        tree.read(path)


def test_a_cut_tar_is_refused(tmp_path: Path) -> None:
    path = make_tar(tmp_path / "a.tar", [member("f", b"x" * 5000), member("g", b"y")])
    path.write_bytes(path.read_bytes()[:3000])
    with pytest.raises(BuildFailed):
        written(path, tree.read(path))


def test_header_fields_and_known_digest(tmp_path: Path) -> None:
    path = make_tar(tmp_path / "a.tar", FILES)
    layer, data = written(path, tree.read(path, fixed=False))
    assert layer.size == len(data)
    assert layer.digest == "sha256:" + hashlib.sha256(data).hexdigest()
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        found = archive.getmembers()
    assert [info.name for info in found] == sorted(info.name for info in found)
    assert {info.mtime for info in found} == {EPOCH}
    assert {(info.uname, info.gname) for info in found} == {("", "")}
    tool = next(info for info in found if info.name == "usr/bin/tool")
    assert (tool.mode, tool.uid, tool.gid) == (0o4755, 7, 8)


def test_the_tar_format_itself_has_not_moved() -> None:
    """Known bytes: a Python whose tarfile writes headers otherwise must not pass unseen."""
    sink = io.BytesIO()
    entries = [
        Entry(path="a", kind=Kind.FOLDER, mode=0o755),
        Entry(path="a/b", kind=Kind.LINK, mode=0o777, target="c" * 120),
        Entry(path="a/c", kind=Kind.FILE, mode=0o644, uid=3_000_000, gid=5),
    ]
    layer, _ = oci.write_layer("x", entries, io.BytesIO(), sink, epoch=EPOCH)
    assert layer.digest == KNOWN_LAYER
    assert layer.size == 4608


KNOWN_LAYER = "sha256:e4f604b3142fee57e9fcf1d8c589b218c228acb94c8986619508697e734443bf"


def test_whiteouts_stand_beside_what_they_hide() -> None:
    sink = io.BytesIO()
    entries = [Entry(path="opt", kind=Kind.FOLDER, mode=0o755)]
    _, kept = oci.write_layer(
        "x", entries, io.BytesIO(), sink, epoch=0, whiteouts=["opt/old", "gone"]
    )
    with tarfile.open(fileobj=io.BytesIO(sink.getvalue())) as archive:
        assert archive.getnames() == [".wh.gone", "opt", "opt/.wh.old"]
    assert kept == entries


def image_of(layers: list[oci.Layer], **more: object) -> oci.Image:
    settings: dict[str, object] = {
        "platform": "linux/amd64",
        "epoch": EPOCH,
        "env": {"B": "2", "A": "1"},
        "entrypoint": (),
        "user": "1:1",
        "workdir": "/",
        "labels": {},
        **more,
    }
    return oci.image(layers, **settings)  # type: ignore[arg-type]


def test_configuration_has_no_history_and_depends_on_what_it_says() -> None:
    layers = [oci.Layer(name="base", digest="sha256:" + "ab" * 32, size=10)]
    image = image_of(layers)
    config = json.loads(image.config)
    assert "history" not in config
    assert config["config"]["Env"] == ["A=1", "B=2"]
    assert config["created"] == "2026-07-11T10:00:00Z"
    assert config["rootfs"]["diff_ids"] == ["sha256:" + "ab" * 32]
    assert image.manifest_digest == image_of(layers, env={"A": "1", "B": "2"}).manifest_digest
    others = [image_of(layers, env={}), image_of(layers, user="2:2"), image_of(layers, epoch=1)]
    assert len({image.manifest_digest, *(other.manifest_digest for other in others)}) == 4


def test_archive_is_an_oci_layout_and_a_docker_archive(tmp_path: Path) -> None:
    content = b"layer bytes" * 100
    digest = "sha256:" + hashlib.sha256(content).hexdigest()
    (tmp_path / "blob").write_bytes(content)
    layers = [oci.Layer(name="base", digest=digest, size=len(content))]
    image = image_of(layers)
    sink = io.BytesIO()
    oci.write_archive(
        image, layers, sink, name="localhost/x/y:r1", blob=lambda _: tmp_path / "blob"
    )
    with tarfile.open(fileobj=io.BytesIO(sink.getvalue())) as archive:
        blobs = {}
        for info in archive.getmembers():
            if info.isreg():
                blobs[info.name] = archive.extractfile(info).read()  # type: ignore[union-attr]
    index = json.loads(blobs["index.json"])
    (docker,) = json.loads(blobs["manifest.json"])
    assert index["manifests"][0]["digest"] == image.manifest_digest
    assert docker["RepoTags"] == ["localhost/x/y:r1"]
    for path in (docker["Config"], *docker["Layers"], f"blobs/sha256/{image.manifest_digest[7:]}"):
        assert hashlib.sha256(blobs[path]).hexdigest() == path.rpartition("/")[2]


def test_a_damaged_layer_is_not_archived(tmp_path: Path) -> None:
    (tmp_path / "blob").write_bytes(b"rotten")
    layer = oci.Layer(name="base", digest="sha256:" + "ab" * 32, size=6)
    with pytest.raises(BuildFailed, match="base in the store is damaged"):
        oci.copy_checked(tmp_path / "blob", io.BytesIO(), layer)


def test_the_first_difference_is_named_with_what_differs() -> None:
    left = {"a": Entry(path="a", kind=Kind.FILE, mode=0o644, size=1, sha256="11")}
    right = {"a": Entry(path="a", kind=Kind.FILE, mode=0o755, size=1, sha256="22")}
    assert tree.first_difference(left, left) is None
    words = tree.first_difference(left, right)
    assert words == "/a: mode 0644 against 0755, sha256 11 against 22"
    assert tree.first_difference(left, {}) == "/a: only in the first"
    more = {**left, "A": Entry(path="A", kind=Kind.FOLDER, mode=0o755)}
    assert tree.first_difference(left, more) == "/A: only in the second"


def test_a_listing_can_be_read_back(tmp_path: Path) -> None:
    path = make_tar(tmp_path / "a.tar", [*FILES, member("usr/\udcff\u202e", b"odd")])
    with path.open("rb") as source:
        _, entries = oci.write_layer("x", tree.read(path), source, io.BytesIO(), epoch=0)
    data = tree.listing(entries)
    again = tree.parse_listing(data)
    assert tree.listing(again[entry.path] for entry in entries) == data
    with pytest.raises(BuildFailed, match="damaged"):
        tree.parse_listing(data[:-20])
