"""The way from a stack to the store, with an engine that we make up."""

from __future__ import annotations

import errno
import io
import json
import tarfile
from typing import TYPE_CHECKING

import pytest

from attnrepro.errors import BuildFailed, ImageDiffers, InvalidDocument, Unavailable
from attnrepro.images import builders, fetch, locks, spec, tree
from attnrepro.images.build import build, build_from_recipe
from attnrepro.images.store import Store
from attnrepro.schema import validate
from support import mini_stack

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


class MadeUpBuilder:
    """Exports what a function says, after looking at what it was given."""

    name = "buildx"
    version = "0"

    def __init__(self) -> None:
        self.calls = 0
        self.cached: list[bool] = []
        self.files: dict[str, bytes] = {"usr/bin/tool": b"tool", "opt/stack/kernel.so": b"kernel"}
        self.also: Callable[[], object] = lambda: None

    def build(
        self,
        context: Path,
        *,
        wheels: Path,
        epoch: int,
        cached: bool,
        target: Path,
        progress: builders.Progress,
    ) -> None:
        self.calls += 1
        self.cached.append(cached)
        assert (context / "base.tar").is_file()
        assert (context / "Dockerfile").is_file()
        assert epoch > 0
        self.seen = sorted(path.name for path in wheels.iterdir())
        self.also()
        with tarfile.open(target, "w") as archive:
            for name, data in self.files.items():
                info = tarfile.TarInfo(name)
                info.size = len(data)
                info.mtime = self.calls
                archive.addfile(info, io.BytesIO(data))


@pytest.fixture
def builder(monkeypatch: pytest.MonkeyPatch) -> MadeUpBuilder:
    made = MadeUpBuilder()
    monkeypatch.setattr(builders, "choose", lambda engine: made)
    return made


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store")


@pytest.fixture
def stack(store: Store) -> spec.Stack:
    """The small stack under made-up locks whose files, and base, are in the store."""
    files = mini_stack.files()
    deb, wheel = b"deb", b"wheel"
    sha256 = {data: store.add_bytes(data)[7:] for data in (deb, wheel)}
    files["debs.lock"] = locks.render(
        [
            locks.Deb(
                name="toy",
                version="1",
                arch="all",
                sha256=sha256[deb],
                size=len(deb),
                path="pool/main/t/toy/toy_1_all.deb",
            )
        ],
        [],
    )
    files["requirements.lock"] = locks.render(
        [
            locks.Wheel(
                name="pip",
                version="1",
                sha256=sha256[wheel],
                file="pip-1-py3-none-any.whl",
                size=len(wheel),
            )
        ],
        [],
    )
    made = spec.from_files(files)
    store.save_base(made.base_digest, store.add_bytes(b"base"), "made up")
    return made


def quiet(_: str) -> None:
    pass


def test_an_image_is_built_recorded_and_found(
    builder: MadeUpBuilder, store: Store, stack: spec.Stack
) -> None:
    lines: list[str] = []
    record = build(stack, store=store, offline=True, progress=lines.append)
    assert validate("image", record.document) == []
    assert builder.seen == ["pip-1-py3-none-any.whl"]
    assert [layer.name for layer in record.layers] == ["base", "wheels"]
    assert store.find("mini") == store.by_digest(record.manifest_digest) == record
    assert record.document["builder"]["bootstrap"] == "made up"
    assert dict(record.recipe) == dict(stack.files)
    assert json.loads(record.sbom)["spdxVersion"] == "SPDX-2.3"
    assert set(tree.parse_listing(record.listing)) >= {"usr/bin/tool", "opt/stack/kernel.so"}
    assert "GB of disk" in lines[0]
    assert "about" in lines[0]
    assert list((store.root / "tmp").iterdir()) == []


def test_an_unchanged_stack_is_not_built_again(
    builder: MadeUpBuilder, store: Store, stack: spec.Stack
) -> None:
    first = build(stack, store=store, offline=True, progress=quiet)
    assert build(stack, store=store, offline=True, progress=quiet) == first
    assert builder.calls == 1
    assert builder.cached == [True]


def test_new_claims_need_no_new_build_but_are_carried(
    builder: MadeUpBuilder, store: Store, stack: spec.Stack
) -> None:
    first = build(stack, store=store, offline=True, progress=quiet)
    claimed = spec.from_files({**stack.files, "claims.json": b'{"new": true}'})
    second = build(claimed, store=store, offline=True, progress=quiet)
    assert builder.calls == 1
    assert second.manifest_digest == first.manifest_digest
    assert second.recipe["claims.json"] == b'{"new": true}'


def test_check_builds_twice_uncached_and_agrees(
    builder: MadeUpBuilder, store: Store, stack: spec.Stack
) -> None:
    lines: list[str] = []
    build(stack, store=store, offline=True, check=True, progress=lines.append)
    assert builder.cached == [False, False]
    assert any("identical to the first build" in line for line in lines)


def test_check_names_the_first_path_that_differs(
    builder: MadeUpBuilder, store: Store, stack: spec.Stack
) -> None:
    def drift() -> None:
        builder.files["opt/stack/kernel.so"] = f"kernel {builder.calls}".encode()
        builder.files["opt/stack/later.so"] = f"later {builder.calls}".encode()

    builder.also = drift
    with pytest.raises(ImageDiffers, match=r"first build: /opt/stack/kernel\.so: .*sha256"):
        build(stack, store=store, offline=True, check=True, progress=quiet)
    assert store.find("mini") is None


def test_a_build_that_differs_from_the_stores_is_not_kept(
    builder: MadeUpBuilder, store: Store, stack: spec.Stack
) -> None:
    first = build(stack, store=store, offline=True, progress=quiet)
    builder.files["extra"] = b"1"
    with pytest.raises(ImageDiffers, match="image in the store: /extra: only in the second"):
        build(stack, store=store, offline=True, no_cache=True, progress=quiet)
    assert store.find("mini") == first


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(errno.ENOSPC, "full")])
def test_nothing_half_written_is_left(
    builder: MadeUpBuilder, store: Store, stack: spec.Stack, error: BaseException
) -> None:
    def fail() -> None:
        raise error

    builder.also = fail
    expected = KeyboardInterrupt if isinstance(error, KeyboardInterrupt) else BuildFailed
    with pytest.raises(expected):
        build(stack, store=store, offline=True, progress=quiet)
    assert store.records() == []
    assert list((store.root / "tmp").iterdir()) == []
    builder.also = lambda: None
    assert build(stack, store=store, offline=True, progress=quiet)


def test_two_builds_at_once_are_refused(
    builder: MadeUpBuilder, store: Store, stack: spec.Stack
) -> None:
    def second() -> None:
        with pytest.raises(Unavailable, match="another build"):
            build(stack, store=store, offline=True, progress=quiet)

    builder.also = second
    assert build(stack, store=store, offline=True, progress=quiet)
    assert builder.calls == 1


def test_too_little_disk_is_said_before_anything_is_fetched(
    builder: MadeUpBuilder, store: Store, stack: spec.Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Store, "free_bytes", lambda self: 1000)
    with pytest.raises(BuildFailed, match=r"wants .* GB of free disk"):
        build(stack, store=store, offline=True, progress=quiet)
    assert builder.calls == 0


@pytest.mark.parametrize("lost", ["debs.lock", "requirements.lock"])
def test_offline_with_a_gap_names_the_file(
    builder: MadeUpBuilder, store: Store, stack: spec.Stack, lost: str
) -> None:
    item = stack.debs[0] if lost == "debs.lock" else stack.wheels[0]
    store.blob(item.sha256).write_bytes(b"x" * item.size)
    with pytest.raises(BuildFailed, match=item.file):
        build(stack, store=store, offline=True, progress=quiet)
    assert builder.calls == 0


def test_gone_packages_are_an_error_or_a_modified_image(
    builder: MadeUpBuilder, store: Store, stack: spec.Stack, monkeypatch: pytest.MonkeyPatch
) -> None:
    from attnrepro.images import lock

    newer = locks.Deb(
        name="toy",
        version="2",
        arch="all",
        sha256=store.add_bytes(b"newer")[7:],
        size=5,
        path="pool/main/t/toy/toy_2_all.deb",
    )
    store.blob(stack.debs[0].sha256).unlink()
    monkeypatch.setattr(fetch, "apt_mirrors", lambda source, extra=(): ["http://127.0.0.1:9/x"])
    with pytest.raises(fetch.MissingDebs, match="toy 1"):
        build(stack, store=store, progress=quiet)
    monkeypatch.setattr(lock, "resolve_debs", lambda *_, **__: ([newer], "today"))
    files = {**stack.files, "debs.lock": locks.render([newer], ["today", "main only"])}
    base = spec.from_files(files).base_digest
    store.save_base(base, store.add_bytes(b"newer base"), "made up")
    lines: list[str] = []
    record = build(stack, store=store, allow_newer=True, progress=lines.append)
    assert record.modified == ("--allow-newer: other versions of toy",)
    assert record.recipe_digest != stack.recipe_digest
    assert any("DIFFERENT" in line for line in lines)
    assert store.find("mini") is None


def test_a_recipe_gives_the_same_image_in_an_empty_store(
    builder: MadeUpBuilder, store: Store, stack: spec.Stack, tmp_path: Path
) -> None:
    record = build(stack, store=store, offline=True, progress=quiet)
    other = Store(tmp_path / "other")
    for digest in (*stack.debs, *stack.wheels):
        other.add_bytes(store.read(digest.sha256))
    other.save_base(stack.base_digest, other.add_bytes(b"base"), "made up")
    again = build_from_recipe(record.recipe, store=other, offline=True, progress=quiet)
    assert again.manifest_digest == record.manifest_digest
    assert other.find("mini") is None
    build(stack, store=other, offline=True, progress=quiet)
    assert other.find("mini") is not None
    assert builder.calls == 2


def test_a_hostile_recipe_never_reaches_the_engine(
    builder: MadeUpBuilder, store: Store, stack: spec.Stack
) -> None:
    for text in (b"# syntax=evil/x\nFROM scratch\n", b"FROM scratch\nADD https://evil/x /x\n"):
        with pytest.raises(InvalidDocument):
            build_from_recipe({**stack.files, "Dockerfile": text}, store=store, progress=quiet)
    assert builder.calls == 0


# An extending stack ---------------------------------------------------------------------------


def own_kernel(folder: Path, name: str, content: bytes) -> Path:
    import hashlib

    folder.mkdir()
    (folder / "toy-1.0-py3-none-any.whl").write_bytes(content)
    document = {
        "schema": "attnrepro.stack/1",
        "stack": name,
        "revision": "r1",
        "title": "mine",
        "extends": "mini",
        "source": {
            "kind": "wheel",
            "file": "toy-1.0-py3-none-any.whl",
            "sha256": hashlib.sha256(content).hexdigest(),
        },
        "adapter": "adapter.py",
        "env": {"TOY": "1"},
    }
    (folder / "image.json").write_text(json.dumps(document))
    (folder / "adapter.py").write_text("# adapter\n")
    return folder


def test_an_own_kernel_keeps_the_parents_layers(
    builder: MadeUpBuilder,
    store: Store,
    stack: spec.Stack,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(spec, "resolve", lambda name: stack)
    parent = build(stack, store=store, offline=True, progress=quiet)
    builder.files = {
        "usr/bin/tool": b"tool",
        "opt/stack/toy.py": b"head",
        "opt/attnrepro/adapter.py": b"# adapter\n",
    }
    folder = own_kernel(tmp_path / "head", "head", b"wheel of head")
    record = build(folder, store=store, offline=True, progress=quiet)
    assert validate("image", record.document) == []
    assert builder.seen == ["toy-1.0-py3-none-any.whl"]
    assert record.layers[:-1] == parent.layers
    assert record.document["extends"]["manifest_digest"] == parent.manifest_digest
    assert record.document["adapter"]["path"] == "/opt/attnrepro/adapter.py"
    assert record.env == {**parent.env, "TOY": "1"}
    with tarfile.open(store.blob(record.layers[-1].digest)) as archive:
        assert archive.getnames() == [
            "opt",
            "opt/attnrepro",
            "opt/attnrepro/adapter.py",
            "opt/stack",
            "opt/stack/.wh.kernel.so",
            "opt/stack/toy.py",
        ]
    assert record.recipe["source/toy-1.0-py3-none-any.whl"] == b"wheel of head"
    again = build_from_recipe(record.recipe, store=store, offline=True, progress=quiet)
    assert again == record
    assert store.find("head") == record


def test_a_kernel_that_installs_nothing_is_an_error(
    builder: MadeUpBuilder,
    store: Store,
    stack: spec.Stack,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(spec, "resolve", lambda name: stack)
    build(stack, store=store, offline=True, progress=quiet)
    with pytest.raises(BuildFailed, match="changes nothing"):
        build(own_kernel(tmp_path / "x", "x", b"x"), store=store, offline=True, progress=quiet)


@pytest.mark.parametrize(
    ("machine", "system"), [("aarch64", "linux"), ("x86_64", "darwin"), ("AMD64", "win32")]
)
def test_a_stack_for_another_machine_is_refused_at_once(
    builder: MadeUpBuilder,
    store: Store,
    stack: spec.Stack,
    monkeypatch: pytest.MonkeyPatch,
    machine: str,
    system: str,
) -> None:
    monkeypatch.setattr("platform.machine", lambda: machine)
    monkeypatch.setattr("sys.platform", system)
    with pytest.raises(Unavailable, match="is for linux/amd64"):
        build(stack, store=store, offline=True, progress=quiet)
    assert builder.calls == 0


# Engines --------------------------------------------------------------------------------------


def test_without_an_engine_each_reason_is_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(Unavailable) as error:
        builders.choose(None)
    assert "docker is not installed" in error.value.message
    assert "podman is not installed" in error.value.message
    with pytest.raises(Unavailable, match="builds no images"):
        builders.choose("host")


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ('case "$1" in buildx) exit 1;; esac', "no buildx"),
        ('case "$1" in version) exit 1;; esac; echo a b', "does not answer"),
        ("echo 20.10.24", "no named build contexts"),
    ],
)
def test_a_docker_that_cannot_build_says_why(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, script: str, words: str
) -> None:
    (tmp_path / "docker").write_text(f"#!/bin/sh\n{script}\n")
    (tmp_path / "docker").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    with pytest.raises(Unavailable, match=words):
        builders.choose("docker")


def test_an_old_podman_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "podman").write_text("#!/bin/sh\necho podman version 3.4.4\n")
    (tmp_path / "podman").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    with pytest.raises(Unavailable, match=r"podman 3\.4\.4"):
        builders.choose("podman")
