"""The store: what is damaged is found, what is half-done goes, what is needed stays."""

from __future__ import annotations

import errno
import hashlib
import os
import subprocess
import sys
import tarfile
from typing import TYPE_CHECKING

import pytest

from attnrepro.errors import BuildFailed, Unavailable
from attnrepro.images import oci
from attnrepro.images.collect import collect
from attnrepro.images.disk import disk_errors
from attnrepro.images.store import ImageRecord, Store

if TYPE_CHECKING:
    from pathlib import Path


def add_layer(store: Store, content: bytes) -> oci.Layer:
    return oci.Layer(name="base", digest=store.add_bytes(content), size=len(content))


def save(
    store: Store, *, stack: str = "toy", revision: str = "r1", recipe: bytes = b"r", **more: object
) -> ImageRecord:
    layer = add_layer(store, b"layer of " + recipe)
    image = oci.image(
        [layer],
        platform="linux/amd64",
        epoch=1,
        env={},
        entrypoint=(),
        user="1:1",
        workdir="/",
        labels={},
    )
    for data in (image.manifest, image.config):
        store.add_bytes(data)
    document = {
        "stack": stack,
        "revision": revision,
        "name": f"localhost/attnrepro/{stack}:{revision}-{image.manifest_digest[7:19]}",
        "recipe_digest": "sha256:" + hashlib.sha256(recipe).hexdigest(),
        "recipe": {"image.json": store.add_bytes(recipe)},
        "manifest_digest": image.manifest_digest,
        "config_digest": image.config_digest,
        "tree_sha256": store.add_bytes(b"tree of " + recipe),
        "layers": [{"name": layer.name, "digest": layer.digest, "size": layer.size}],
        "sbom": store.add_bytes(b"sbom"),
        "modified": [],
        "origin": "stack",
        "source": None,
        **more,
    }
    return store.save(document)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store")


def test_bytes_are_kept_under_their_digest(store: Store) -> None:
    digest = store.add_bytes(b"x")
    assert digest == "sha256:" + hashlib.sha256(b"x").hexdigest()
    assert store.read(digest) == b"x"
    assert store.has(digest, 1)
    assert not store.has(digest, 2)


@pytest.mark.parametrize("digest", ["../../etc/passwd", "sha256:xyz", "", "sha256:" + "A" * 64])
def test_a_digest_is_never_a_path(store: Store, digest: str) -> None:
    with pytest.raises(BuildFailed, match="not a digest"):
        store.blob(digest)


def test_a_damaged_blob_is_found_and_removed(store: Store) -> None:
    digest = store.add_bytes(b"precious")
    store.blob(digest).write_bytes(b"precio")
    with pytest.raises(BuildFailed, match="damaged"):
        store.read(digest)
    assert not store.intact(digest)
    assert not store.has(digest)
    with pytest.raises(BuildFailed, match="lacks"):
        store.read(digest)


def test_a_workspace_goes_on_every_path_and_so_do_those_of_the_dead(store: Store) -> None:
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    left = store.root / "tmp" / f"{dead.pid}-build-xyz"
    left.mkdir(parents=True)
    (left / "half.tar").write_bytes(b"half")
    mine = store.root / "tmp" / f"{os.getpid()}-build-xyz"
    mine.mkdir()

    def interrupted() -> None:
        with store.workspace("x") as folder:
            (folder / "root.tar").write_bytes(b"half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert list((store.root / "tmp").iterdir()) == [mine]


def test_two_builds_of_one_image_are_refused_by_name_of_the_first(store: Store) -> None:
    with (
        store.lock("build-a"),
        store.lock("build-b"),
        pytest.raises(Unavailable, match=str(os.getpid())),
        store.lock("build-a"),
    ):
        pass
    with store.lock("build-a"):
        pass


def test_images_are_found_by_stack_revision_digest_and_recipe(store: Store) -> None:
    old = save(store, revision="r2", recipe=b"one")
    new = save(store, revision="r10", recipe=b"two")
    assert store.find("toy") == new
    assert store.find("toy", "r2") == old
    assert store.find("toy", "r3") is None
    assert store.find("other") is None
    assert store.by_digest(old.manifest_digest) == old
    assert store.by_digest("sha256:" + "ab" * 32) is None
    assert store.by_recipe("toy", "r10", new.recipe_digest) == new
    assert store.by_recipe("toy", "r10", old.recipe_digest) is None


def test_an_image_that_lacks_a_layer_is_not_found(store: Store) -> None:
    record = save(store)
    store.blob(record.layers[0].digest).write_bytes(b"short")
    assert store.find("toy") is None
    assert store.by_digest(record.manifest_digest) is None
    assert store.by_recipe("toy", "r1", record.recipe_digest) is None


def test_a_modified_image_is_never_taken_for_the_stack(store: Store) -> None:
    record = save(store, modified=["--allow-newer: other versions of bash"])
    assert store.find("toy") is None
    assert store.by_digest(record.manifest_digest) == record


def test_an_image_from_an_artifact_does_not_take_a_name(store: Store) -> None:
    mine = save(store, recipe=b"mine")
    theirs = save(store, recipe=b"theirs", origin="recipe")
    assert store.find("toy") == mine
    assert store.by_recipe("toy", "r1", theirs.recipe_digest) == theirs


def test_an_image_of_another_recipe_than_the_shipped_one_is_not_the_shipped_stack(
    store: Store,
) -> None:
    save(store, stack="cpu-torch2.13", revision="r1", recipe=b"not what is shipped")
    assert store.find("cpu-torch2.13") is None


def test_a_record_cut_short_is_passed_over(store: Store) -> None:
    record = save(store)
    store.record_path(record).write_bytes(b"")
    assert store.records() == []
    assert store.find("toy") is None
    assert store.by_recipe("toy", "r1", record.recipe_digest) is None


def test_archive_is_made_once_and_whole(store: Store) -> None:
    record = save(store)
    path = store.archive(record)
    with tarfile.open(path) as archive:
        assert "index.json" in archive.getnames()
    stamp = path.stat().st_mtime_ns
    assert store.archive(record) == path
    assert path.stat().st_mtime_ns == stamp


def test_no_half_archive_of_a_damaged_layer(store: Store) -> None:
    record = save(store)
    layer = record.layers[0]
    store.blob(layer.digest).write_bytes(b"x" * layer.size)
    with pytest.raises(BuildFailed, match="damaged"):
        store.archive(record)
    assert list((store.root / "archives").iterdir()) == []
    assert list((store.root / "tmp").iterdir()) == []


@pytest.mark.parametrize(
    ("number", "words"),
    [(errno.ENOSPC, "disk is full"), (errno.EDQUOT, "disk is full"), (errno.EROFS, "not writable")],
)
def test_a_full_or_closed_disk_is_said_plainly(number: int, words: str) -> None:
    with pytest.raises(BuildFailed, match=words) as error, disk_errors("building"):
        raise OSError(number, os.strerror(number), "/x")
    assert error.value.hint


def test_other_system_errors_are_not_hidden() -> None:
    with pytest.raises(FileNotFoundError), disk_errors("building"):
        raise FileNotFoundError(errno.ENOENT, "gone", "/x")


def test_cleaning_keeps_what_images_need(store: Store) -> None:
    record = save(store)
    store.archive(record)
    stray = store.add_bytes(b"stray")
    counted = collect(store, dry_run=True)
    assert store.has(stray)
    freed = collect(store)
    assert (freed.files, freed.size) == (counted.files, counted.size) == (2, counted.size)
    assert not store.has(stray)
    assert store.find("toy") == record
    assert store.archive(record).is_file()


def test_cleaning_keeps_what_an_interrupted_build_of_a_stack_has_fetched(
    store: Store, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    wheel, other = (store.add_bytes(data) for data in (b"wheel", b"other"))
    folder = tmp_path / "images" / "cpu-torch2.13" / "r1"
    folder.mkdir(parents=True)
    (folder / "requirements.lock").write_text(
        "# Python 3.11\n"
        f"torch==2.13.0 --hash={wheel}  # torch-2.13.0-cp311-cp311-manylinux_2_28_x86_64.whl 5\n"
    )
    monkeypatch.setattr("attnrepro.images.collect.images_dir", lambda: tmp_path / "images")
    collect(store)
    assert store.has(wheel)
    assert not store.has(other)
    collect(store, fetched=True)
    assert not store.has(wheel)


def test_cleaning_removes_superseded_images_only_when_asked(store: Store) -> None:
    old = save(store, recipe=b"one")
    new = save(store, recipe=b"two")
    os.utime(store.record_path(old), ns=(1, 1))
    assert collect(store).images == ()
    assert collect(store, superseded=True).images == (f"toy@r1 {old.manifest_digest}",)
    assert store.records() == [new]


def test_cleaning_waits_for_no_build(store: Store) -> None:
    save(store)
    code = (
        "import sys, pathlib\n"
        "from attnrepro.images.store import Store\n"
        "with Store(pathlib.Path(sys.argv[1])).lock('build-x'):\n"
        "    print('held', flush=True); sys.stdin.read()\n"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    holder = subprocess.Popen(
        [sys.executable, "-c", code, str(store.root)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=env,
    )
    assert holder.stdout is not None
    assert holder.stdin is not None
    assert holder.stdout.readline() == b"held\n"
    try:
        with pytest.raises(Unavailable, match=str(holder.pid)):
            collect(store)
    finally:
        holder.communicate()
