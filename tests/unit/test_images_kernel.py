"""A kernel's source: pinned by digest, exported from a clean commit, carried by the recipe."""

from __future__ import annotations

import hashlib
import json
import subprocess
import tarfile
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest

from attnrepro.errors import BuildFailed, InvalidDocument
from attnrepro.images import extend, kernel, spec, tree
from attnrepro.images.store import Store
from attnrepro.images.tree import Entry, Kind

if TYPE_CHECKING:
    from pathlib import Path


@dataclass
class Checkout:
    path: Path

    def git(self, *arguments: str) -> str:
        identity = ("-c", "user.name=x", "-c", "user.email=x@example.com")
        command = ["git", "-C", str(self.path), *identity, *arguments]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        return done.stdout.strip()

    def commit(self, **files: str) -> str:
        for name, text in files.items():
            (self.path / f"{name}.py").write_text(text)
        self.git("add", "--all")
        self.git("commit", "--quiet", "--message", "x")
        return self.git("rev-parse", "HEAD")


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    made = Checkout(tmp_path / "src")
    made.path.mkdir()
    made.git("init", "--quiet")
    return made


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store")


def stack_of(folder: Path, source: dict[str, Any]) -> spec.Stack:
    folder.mkdir(exist_ok=True)
    document = {
        "schema": "attnrepro.stack/1",
        "stack": "mine",
        "revision": "r1",
        "title": "mine",
        "extends": "cpu-torch2.13",
        "source": source,
    }
    (folder / "image.json").write_text(json.dumps(document))
    return spec.load(folder)


def obtain(store: Store, stack: spec.Stack, *, allow_dirty: bool = False) -> kernel.Source:
    return kernel.obtain(
        store,
        stack,
        python="3.11",
        allow_dirty=allow_dirty,
        offline=True,
        progress=lambda _: None,
    )


def git_stack(tmp_path: Path, **more: str) -> spec.Stack:
    return stack_of(tmp_path / "stack", {"kind": "git", "path": "../src", **more})


def test_a_clean_commit_is_archived_and_recorded(
    checkout: Checkout, store: Store, tmp_path: Path
) -> None:
    commit = checkout.commit(a="1")
    source = obtain(store, git_stack(tmp_path, commit=commit))
    assert source.document["commit"] == commit
    assert source.document["tree"] == checkout.git("rev-parse", "HEAD^{tree}")
    assert source.document["dirty"] is False
    with tarfile.open(store.blob(source.sha256)) as archive:
        assert archive.getnames() == ["kernel", "kernel/a.py"]
    assert obtain(store, git_stack(tmp_path)).sha256 == source.sha256


def test_a_dirty_tree_is_refused_and_named(
    checkout: Checkout, store: Store, tmp_path: Path
) -> None:
    checkout.commit(a="1")
    (checkout.path / "new.py").write_text("2")
    with pytest.raises(BuildFailed, match=r"new\.py") as error:
        obtain(store, git_stack(tmp_path))
    assert "--allow-dirty" in (error.value.hint or "")


def test_an_allowed_dirty_tree_is_recorded_and_leaves_no_trace(
    checkout: Checkout, store: Store, tmp_path: Path
) -> None:
    checkout.commit(a="1", b="1")
    (checkout.path / "a.py").write_text("2")
    (checkout.path / "b.py").unlink()
    (checkout.path / "new.py").write_text("3")
    before = {path: path.read_bytes() for path in checkout.path.rglob("*") if path.is_file()}
    source = obtain(store, git_stack(tmp_path), allow_dirty=True)
    after = {path: path.read_bytes() for path in checkout.path.rglob("*") if path.is_file()}
    assert after == before
    assert source.document["dirty"] is True
    assert source.document["tree"] != checkout.git("rev-parse", "HEAD^{tree}")
    with tarfile.open(store.blob(source.sha256)) as archive:
        assert archive.getnames() == ["kernel", "kernel/a.py", "kernel/new.py"]
        assert archive.extractfile("kernel/a.py").read() == b"2"  # type: ignore[union-attr]
    again = obtain(store, git_stack(tmp_path), allow_dirty=True)
    assert again.document == source.document
    (checkout.path / "a.py").write_text("4")
    other = obtain(store, git_stack(tmp_path), allow_dirty=True)
    assert other.document["diff_sha256"] != source.document["diff_sha256"]


def test_another_commit_than_the_pinned_one_is_refused(
    checkout: Checkout, store: Store, tmp_path: Path
) -> None:
    first = checkout.commit(a="1")
    checkout.commit(a="2")
    with pytest.raises(BuildFailed, match=first):
        obtain(store, git_stack(tmp_path, commit=first))


def test_submodules_are_refused(checkout: Checkout, store: Store, tmp_path: Path) -> None:
    checkout.commit(a="1")
    head = checkout.git("rev-parse", "HEAD")
    checkout.git("update-index", "--add", "--cacheinfo", f"160000,{head},sub")
    checkout.git("commit", "--quiet", "--message", "sub")
    with pytest.raises(BuildFailed, match="submodules"):
        obtain(store, git_stack(tmp_path))


def test_no_checkout_no_repository_no_commit(store: Store, tmp_path: Path) -> None:
    with pytest.raises(BuildFailed, match="no checkout"):
        obtain(store, git_stack(tmp_path))
    (tmp_path / "src").mkdir()
    with pytest.raises(BuildFailed, match="not a git repository"):
        obtain(store, git_stack(tmp_path))


def test_a_file_is_taken_by_its_hash_only(store: Store, tmp_path: Path) -> None:
    data = b"wheel"
    wanted = {
        "kind": "wheel",
        "file": "toy-1.0-py3-none-any.whl",
        "sha256": hashlib.sha256(data).hexdigest(),
    }
    stack = stack_of(tmp_path / "stack", wanted)
    with pytest.raises(BuildFailed, match="--offline"):
        obtain(store, stack)
    (tmp_path / "stack" / "toy-1.0-py3-none-any.whl").write_bytes(b"other")
    with pytest.raises(BuildFailed, match=wanted["sha256"]):
        obtain(store, stack)
    (tmp_path / "stack" / "toy-1.0-py3-none-any.whl").write_bytes(data)
    source = obtain(store, stack)
    assert (source.sha256, source.size) == (wanted["sha256"], len(data))
    (tmp_path / "stack" / "toy-1.0-py3-none-any.whl").unlink()
    assert obtain(store, stack) == source


def test_a_recipe_from_elsewhere_may_not_name_a_checkout_here(
    checkout: Checkout, store: Store, tmp_path: Path
) -> None:
    checkout.commit(a="1")
    foreign = spec.from_files(git_stack(tmp_path).files)
    with pytest.raises(BuildFailed, match="out of an artifact"):
        obtain(store, foreign)


def test_a_recipe_carries_its_source(checkout: Checkout, store: Store, tmp_path: Path) -> None:
    checkout.commit(a="1")
    stack = git_stack(tmp_path)
    source = obtain(store, stack)
    packed = store.blob(source.sha256).read_bytes()
    facts = {kernel.FACTS: kernel.facts(source)}
    elsewhere = Store(tmp_path / "elsewhere")
    with pytest.raises(BuildFailed, match="does not carry") as error:
        obtain(elsewhere, spec.from_files({**stack.files, **facts}))
    assert source.sha256 in (error.value.hint or "")
    carried = {**stack.files, **facts, f"source/{source.file}": packed}
    assert obtain(elsewhere, spec.from_files(carried)) == source
    spoilt = {**carried, f"source/{source.file}": packed + b"x"}
    with pytest.raises(BuildFailed, match="not what"):
        obtain(Store(tmp_path / "third"), spec.from_files(spoilt))


@pytest.mark.parametrize(
    "source",
    [
        {"kind": "git"},
        {"kind": "wheel", "file": "../x.whl", "sha256": "0" * 64},
        {"kind": "wheel", "file": "x.whl", "sha256": "0" * 63},
        {"kind": "wheel", "file": "x.exe", "sha256": "0" * 64},
        {"kind": "url", "file": "x.whl", "sha256": "0" * 64},
        {"kind": "git", "path": "x", "commit": "main"},
        {"kind": "git", "path": "x", "subdirectory": "../y"},
        {"kind": "git", "path": "x", "subdirectory": "a b; rm -rf /"},
    ],
)
def test_a_bad_source_is_refused(tmp_path: Path, source: dict[str, Any]) -> None:
    with pytest.raises(InvalidDocument):
        stack_of(tmp_path / "stack", source)


# The layer of the difference ------------------------------------------------------------------


def entry(path: str, content: str = "", kind: Kind = Kind.FILE) -> Entry:
    sha256 = hashlib.sha256(content.encode()).hexdigest() if kind is Kind.FILE else ""
    return Entry(path=path, kind=kind, mode=0o755, sha256=sha256, size=len(content))


def by_path(*entries: Entry) -> dict[str, Entry]:
    return {item.path: item for item in entries}


def test_whiteouts_name_the_top_of_what_is_gone() -> None:
    folder = Kind.FOLDER
    before = by_path(
        entry("opt", kind=folder),
        entry("opt/old", kind=folder),
        entry("opt/old/a"),
        entry("opt/old/b"),
        entry("opt/file"),
        entry("opt/turned", kind=folder),
        entry("opt/turned/x"),
    )
    after = by_path(entry("opt", kind=folder), entry("opt/turned"))
    assert extend._whiteouts(before, after) == ["opt/file", "opt/old"]


def test_dockerfile_of_an_extension_passes_the_linter_and_quotes(tmp_path: Path) -> None:
    below = json.loads((spec.images_dir() / "cpu-torch2.13/r1/image.json").read_text())
    own = stack_of(tmp_path / "s", {"kind": "git", "path": ".", "subdirectory": "a/b"}).document
    own["build_env"] = {"FLAGS": 'a "b" $PATH \\'}
    facts = {"kind": "git", "file": "kernel.tar", "sha256": "0" * 64, "commit": "c", "dirty": True}
    source = kernel.Source(document={**facts, "subdirectory": "a/b"}, size=1)
    document = extend._document(own, below, source)
    text = extend._dockerfile(document, source, "3.11", has_lock=True)
    from attnrepro.images.dockerfile import lint

    files = {"compile.py", "requirements.lock"}
    assert lint(text, contexts={"wheels"}, files=files) == []
    assert 'FLAGS="a \\"b\\" \\$PATH \\\\"' in text
    assert "/tmp/kernel/a/b" in text
    assert document["kernels"][0]["source"] == "git c with uncommitted changes"
    assert document["env"]["PATH"] == below["env"]["PATH"]
    assert tree.listing([entry("x")])
