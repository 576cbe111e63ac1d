"""Real builds: one image whatever the engine, the store or the base's origin."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

from attnrepro.errors import BuildFailed, Unavailable
from attnrepro.images import base, builders, spec, tree
from attnrepro.images.build import build, build_from_recipe
from attnrepro.images.store import ImageRecord, Store
from support import debs, mini_stack

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]


def quiet(_: str) -> None:
    pass


def engines() -> list[str]:
    found = []
    for name in builders.ENGINES:
        try:
            builders.choose(name)
        except Unavailable:
            continue
        found.append(name)
    return found


@pytest.fixture(scope="module")
def engine() -> str:
    if not (found := engines()):
        pytest.skip("no engine that builds on this machine")
    try:
        base.bootstrap_version()
    except Unavailable as error:
        pytest.skip(error.message)
    return found[0]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return Store(tmp_path_factory.mktemp("store"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return mini_stack.write(tmp_path_factory.mktemp("stacks") / "mini")


@pytest.fixture(scope="module")
def mini(engine: str, store: Store, folder: Path) -> ImageRecord:
    return build(folder, store=store, engine=engine, progress=quiet)


def test_two_uncached_builds_are_identical(mini: ImageRecord, store: Store, folder: Path) -> None:
    record = build(folder, store=store, check=True, offline=True, progress=quiet)
    assert record.manifest_digest == mini.manifest_digest


def test_another_engine_gives_the_same_image(mini: ImageRecord, store: Store, folder: Path) -> None:
    if (found := engines()) != list(builders.ENGINES):
        pytest.skip(f"NOT CHECKED: docker against podman; this machine has {found}")
    record = build(
        folder, store=store, engine="podman", no_cache=True, offline=True, progress=quiet
    )
    assert record.document["builder"]["name"] == "podman"
    assert record.manifest_digest == mini.manifest_digest


def test_the_base_is_the_same_when_made_again(
    mini: ImageRecord, store: Store, folder: Path
) -> None:
    stack = spec.load(folder)
    before = store.base_layer(stack.base_digest)
    assert before is not None
    store.blob(before[0]).unlink()
    base.prepare(store, stack, offline=True, progress=quiet)
    assert store.base_layer(stack.base_digest) == before


def test_unchanged_costs_little(mini: ImageRecord, store: Store, folder: Path) -> None:
    started = time.monotonic()
    record = build(folder, store=store, progress=quiet)
    assert record.manifest_digest == mini.manifest_digest
    assert time.monotonic() - started < 10, "it was built again"


def test_the_store_refuses_an_image_with_a_lost_layer_and_builds_it_again(
    mini: ImageRecord, store: Store, folder: Path
) -> None:
    path = store.blob(mini.layers[1].digest)
    path.write_bytes(path.read_bytes()[:-512])
    record = build(folder, store=store, offline=True, progress=quiet)
    assert record.manifest_digest == mini.manifest_digest
    assert store.intact(mini.layers[1].digest)


@pytest.mark.parametrize("name", builders.ENGINES)
def test_engines_load_it_and_show_its_digest(mini: ImageRecord, store: Store, name: str) -> None:
    if name not in engines():
        pytest.skip(f"NOT CHECKED: {name} is not usable on this machine")
    command = [name, *(builders.podman_options() if name == "podman" else [])]
    run = subprocess.run
    run([*command, "load", "--input", store.archive(mini)], check=True, capture_output=True)
    try:
        asked = [*command, "image", "inspect", "--format", "{{.Id}}", mini.name]
        shown = run(asked, check=True, capture_output=True, text=True).stdout.strip()
        digests = {mini.config_digest, mini.manifest_digest}
        assert f"sha256:{shown.removeprefix('sha256:')}" in digests
    finally:
        run([*command, "rmi", mini.name], check=True, capture_output=True)


def test_a_step_without_network_has_none(engine: str, store: Store, folder: Path) -> None:
    stack = spec.load(folder)
    step = b"RUN python3.11 -c \"import socket; socket.create_connection(('1.1.1.1', 53), 3)\"\n"
    files = {**stack.files, "Dockerfile": stack.files["Dockerfile"] + step}
    with pytest.raises(BuildFailed, match="unreachable"):
        build_from_recipe(files, store=store, engine=engine, offline=True, progress=quiet)
    assert list((store.root / "tmp").iterdir()) == []


# An own kernel --------------------------------------------------------------------------------

PYPROJECT = """\
[build-system]
requires = ["setuptools"]
build-backend = "setuptools.build_meta"
[project]
name = "toy-attn"
version = "1.0"
"""


def kernel_stack(folder: Path, name: str, code: str) -> Path:
    source = folder / "src"
    (source / "toy_attn").mkdir(parents=True)
    (source / "pyproject.toml").write_text(PYPROJECT)
    (source / "toy_attn" / "__init__.py").write_text(code)
    identity = ["-c", "user.name=x", "-c", "user.email=x@example.com"]
    for arguments in (["init", "-q"], ["add", "-A"], ["commit", "-qm", "x"]):
        subprocess.run(["git", "-C", source, *identity, *arguments], check=True)
    document = {
        "schema": "attnrepro.stack/1",
        "stack": name,
        "revision": "r1",
        "title": name,
        "extends": "mini",
        "source": {"kind": "git", "path": "src"},
    }
    (folder / "image.json").write_text(json.dumps(document))
    return folder


def test_base_and_head_of_a_kernel_share_all_but_their_own_layer(
    mini: ImageRecord,
    store: Store,
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    parent = spec.load(folder)
    monkeypatch.setattr(spec, "resolve", lambda name: parent)
    records = [
        build(
            kernel_stack(tmp_path / name, f"toy-{name}", f"speed = {name!r}\n"),
            store=store,
            offline=True,
            progress=quiet,
        )
        for name in ("base", "head")
    ]
    assert [record.layers[:-1] for record in records] == [mini.layers, mini.layers]
    assert records[0].layers[-1] != records[1].layers[-1]
    assert records[0].layers[-1].size < 100_000
    trees = [tree.parse_listing(record.listing) for record in records]
    difference = tree.first_difference(trees[0], trees[1])
    assert difference is not None
    assert "toy_attn" in difference
    monkeypatch.undo()
    fresh = Store(tmp_path / "fresh")
    for item in (*parent.debs, *parent.wheels):
        path = fresh.blob(item.sha256)
        path.parent.mkdir(parents=True, exist_ok=True)
        os.link(store.blob(item.sha256), path)
    again = build_from_recipe(records[1].recipe, store=fresh, offline=True, progress=quiet)
    assert again.manifest_digest == records[1].manifest_digest


# A base out of a registry ---------------------------------------------------------------------


@contextmanager
def registry(folder: Path) -> Iterator[str]:
    """A real registry on loopback."""
    program = debs.program("bookworm", "docker-registry")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    config = folder / "registry.yml"
    config.write_text(
        f"version: 0.1\nstorage:\n  filesystem:\n    rootdirectory: {folder}/registry\n"
        f"http:\n  addr: 127.0.0.1:{port}\n"
    )
    with (folder / "registry.log").open("wb") as log:
        process = subprocess.Popen([program, "serve", config], stdout=log, stderr=log)
    try:
        for _ in range(600):
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.05)
        else:
            pytest.fail((folder / "registry.log").read_text())
        yield f"127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(10)


def podman(*arguments: str) -> None:
    command = ["podman", *builders.podman_options(), *arguments]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_base_by_digest_from_a_registry(
    mini: ImageRecord,
    store: Store,
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Our own image serves as the base: pushed by podman, gzipped there, pulled by digest."""
    if "podman" not in engines():
        pytest.skip("NOT CHECKED: a registry base; podman pushes it")
    digest_file = tmp_path / "digest"
    with registry(tmp_path) as address:
        monkeypatch.setattr(base, "source_url", lambda kind, key: f"http://{address}")
        podman("load", "--input", str(store.archive(mini)))
        try:
            arguments = ("--tls-verify=false", "--digestfile", str(digest_file))
            podman("push", *arguments, mini.name, f"{address}/a/b:1")
        finally:
            podman("rmi", mini.name)
        files = mini_stack.files(
            stack="over-registry", base={"kind": "registry", "image": "pushed"}
        )
        del files["debs.lock"]
        pin = {"registry": "docker.io", "repository": "a/b", "tag": "1"}
        pin["digest"] = digest_file.read_text().strip()
        files["digests.json"] = json.dumps({"pushed": pin}).encode()
        files["Dockerfile"] = b"FROM scratch\nADD base.tar /\nRUN echo new > /opt/stack/new\n"
        record = build(spec.from_files(files), store=store, progress=quiet)
    before, after = tree.parse_listing(mini.listing), tree.parse_listing(record.listing)
    assert tree.first_difference(before, after) == "/opt/stack/new: only in the second"
    assert record.document["base"] == {
        "kind": "registry",
        "reference": "docker.io/a/b:1",
        "digest": pin["digest"],
    }


@pytest.mark.timeout(1200)
def test_the_cpu_stack_is_one_image_by_either_engine() -> None:
    """Two uncached builds of the shipped stack, by Docker and by podman: one manifest digest."""
    store = Store()
    if (first := store.find("cpu-torch2.13")) is None:
        pytest.skip("the image cpu-torch2.13 is not built here")
    if (found := engines()) != list(builders.ENGINES):
        pytest.skip(f"NOT CHECKED: docker against podman; this machine has {found}")
    by = first.document["builder"]["name"]
    other = "docker" if by == "podman" else "podman"
    again = build("cpu-torch2.13", store=store, engine=other, no_cache=True, progress=quiet)
    assert again.document["builder"]["name"] != by
    assert again.manifest_digest == first.manifest_digest
