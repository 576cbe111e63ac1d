"""Stacks: the shipped ones load, hostile ones are refused with every problem named."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from attnrepro.errors import InvalidDocument, UsageError
from attnrepro.images import locks, sources, spec
from attnrepro.resources import images_dir

if TYPE_CHECKING:
    from collections.abc import Callable

SHIPPED = [(stack, revision) for stack in spec.stacks() for revision in spec.revisions(stack)]


def recipe() -> dict[str, bytes]:
    return dict(spec.read_folder(images_dir() / "cpu-torch2.13" / "r1"))


def changed(change: Callable[[dict[str, Any]], object]) -> dict[str, bytes]:
    files = recipe()
    document = json.loads(files["image.json"])
    change(document)
    return {**files, "image.json": json.dumps(document).encode()}


@pytest.mark.parametrize(("stack", "revision"), SHIPPED)
def test_shipped_stacks_are_valid_and_named_after_their_folders(stack: str, revision: str) -> None:
    loaded = spec.shipped(stack, revision)
    assert loaded is not None
    assert (loaded.name, loaded.revision) == (stack, revision)
    assert loaded.wheels


def test_the_cpu_stack_is_what_it_says() -> None:
    stack = spec.resolve("cpu-torch2.13@r1")
    torch = next(wheel for wheel in stack.wheels if wheel.name == "torch")
    assert torch.sha256 == "6746dbcbeb526eb61330b76b41ff1b4eb848951103a892eeb080dfa2b264667b"
    assert stack.document["framework"]["version"] == torch.version
    asked = {word.split("==")[0] for word in stack.document["wheels"]["requirements"]}
    assert asked <= {wheel.name for wheel in stack.wheels}
    assert set(stack.document["base"]["packages"]) <= {deb.name for deb in stack.debs}
    gcc = next(deb for deb in stack.debs if deb.name == "g++-12")
    assert gcc.version == stack.document["compiler"]["version"]


def test_locks_hold_nothing_but_the_main_suite() -> None:
    for deb in spec.resolve("cpu-torch2.13@r1").debs:
        assert deb.path.startswith("pool/main/")


def test_the_newest_revision_is_the_default() -> None:
    assert spec.resolve("cpu-torch2.13").revision == spec.revisions("cpu-torch2.13")[-1]
    assert spec.default_stack() in spec.stacks()


@pytest.mark.parametrize("name", ["nothing", "cpu-torch2.13@r999", "../images/x", "a b", ""])
def test_an_unknown_stack_is_a_usage_error_that_lists_the_known(name: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError) as error:
        spec.resolve(name or str(tmp_path / "none"))
    assert "cpu-torch2.13" in (error.value.hint or "")


def test_a_folder_without_image_json_is_no_stack(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"no image\.json"):
        spec.load(tmp_path)


@pytest.mark.parametrize(
    ("change", "pointer"),
    [
        (lambda d: d.update(platform="linux/arm64"), "/platform"),
        (lambda d: d.update(stack="../x"), "/stack"),
        (lambda d: d.update(revision="latest"), "/revision"),
        (lambda d: d["env"].update({"LD_PRELOAD\n": "x"}), "/env"),
        (lambda d: d.update(user="root"), "/user"),
        (lambda d: d.pop("framework"), ""),
        (lambda d: d.update(surprise=1), "/surprise"),
        (lambda d: d["base"].update(kind="rolling"), "/base"),
        (lambda d: d["base"].update(packages=["g++; rm -rf /"]), "/base"),
        (lambda d: d.update(claims="nowhere.json"), "/nowhere.json"),
        (lambda d: d["layers"].append({"name": "third"}), "/layers"),
        (lambda d: d.update(source_date_epoch=-1), "/source_date_epoch"),
    ],
)
def test_a_bad_image_json_is_refused_by_pointer(
    change: Callable[[dict[str, Any]], object], pointer: str
) -> None:
    with pytest.raises(InvalidDocument) as error:
        spec.from_files(changed(change))
    assert any(problem.pointer.startswith(pointer) for problem in error.value.problems)
    assert error.value.problems


def test_all_problems_come_at_once() -> None:
    def change(document: dict[str, Any]) -> None:
        document.update(user="root", workdir="relative", python="python3")

    with pytest.raises(InvalidDocument) as error:
        spec.from_files(changed(change))
    assert {"/user", "/workdir", "/python"} <= {problem.pointer for problem in error.value.problems}


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("Dockerfile", b"FROM debian:12\n"),
        ("requirements.lock", b"torch==2.13.0\n"),
        ("requirements.lock", b"--index-url https://example.com\n"),
        ("requirements.lock", b""),
        ("debs.lock", b"bash 5 amd64 " + b"0" * 63 + b" 1 pool/main/b/bash/bash.deb\n"),
        ("debs.lock", b"bash 5 amd64 " + b"0" * 64 + b" 1 pool/../../etc/bash.deb\n"),
        ("../up", b"x"),
        ("-x", b"x"),
        ("big", b"x" * (spec.MAX_RECIPE_BYTES + 1)),
        ("image.json", b"{"),
        ("image.json", b'{"schema": "attnrepro.stack/1", "schema": "attnrepro.stack/1"}'),
        ("image.json", b"[]"),
    ],
)
def test_a_bad_recipe_file_is_refused(name: str, data: bytes) -> None:
    with pytest.raises(InvalidDocument):
        spec.from_files({**recipe(), name: data})


def test_a_missing_recipe_file_is_named() -> None:
    files = recipe()
    del files["debs.lock"]
    with pytest.raises(InvalidDocument) as error:
        spec.from_files(files)
    assert [problem.pointer for problem in error.value.problems] == ["/debs.lock"]


def test_claims_are_no_part_of_the_recipe_digest_and_all_else_is() -> None:
    stack = spec.from_files(recipe())
    claimed = spec.from_files({**recipe(), "claims.json": b'{"other": 1}'})
    assert claimed.recipe_digest == stack.recipe_digest
    others = [
        {**recipe(), "Dockerfile": recipe()["Dockerfile"] + b"RUN true\n"},
        {**recipe(), "requirements.lock": recipe()["requirements.lock"] + b"# more\n"},
        {**recipe(), "extra": b""},
    ]
    digests = {spec.from_files(files).recipe_digest for files in others}
    assert len(digests | {stack.recipe_digest}) == 4


def test_the_base_depends_on_packages_but_not_on_wheels() -> None:
    stack = spec.from_files(recipe())
    wheels = {**recipe(), "requirements.lock": recipe()["requirements.lock"] + b"# more\n"}
    assert spec.from_files(wheels).base_digest == stack.base_digest
    lines = recipe()["debs.lock"].splitlines(keepends=True)
    fewer = {**recipe(), "debs.lock": b"".join(lines[:-1])}
    assert spec.from_files(fewer).base_digest != stack.base_digest


def test_layers_split_by_path() -> None:
    stack = spec.from_files(recipe())
    assert stack.layer_of("opt/stack/lib/x") == 1
    assert stack.layer_of("opt/stack") == 1
    assert stack.layer_of("opt/stacks") == 0
    assert stack.layer_of("usr/bin/env") == 0


# Locks and pins -------------------------------------------------------------------------------


def test_locks_survive_a_round_trip() -> None:
    files = recipe()
    debs = locks.parse_debs(files["debs.lock"])
    assert locks.parse_debs(locks.render(debs, ["again"])) == sorted(debs, key=lambda d: d.name)
    wheels = locks.parse_wheels(files["requirements.lock"])
    assert locks.parse_wheels(locks.render(wheels, [])) == wheels


def test_a_package_twice_is_refused() -> None:
    line = recipe()["requirements.lock"].splitlines(keepends=True)[-1]
    with pytest.raises(InvalidDocument) as error:
        locks.parse_wheels(line + line)
    assert "twice" in error.value.problems[0].found


@pytest.mark.parametrize(
    "digest",
    [
        None,
        "latest",
        "sha256:" + "a" * 64,
        "sha256:" + "0" * 64,
        "sha256:" + "ab" * 31 + "a",
        "sha256:" + "AB" * 32,
        "sha256:" + "xy" * 32,
        "sha512:" + "ab" * 32,
        "sha256:" + "ab" * 32 + "\n",
    ],
)
def test_a_digest_that_is_none_is_refused(digest: object) -> None:
    pins = {"x": {"registry": "docker.io", "repository": "a/b", "tag": "1", "digest": digest}}
    with pytest.raises(InvalidDocument):
        sources.base_image(json.dumps(pins).encode(), "x", what="digests.json")


def test_every_shipped_pin_is_a_digest_that_stands_once() -> None:
    data = (images_dir() / "digests.json").read_bytes()
    pins = json.loads(data)
    found = [sources.base_image(data, key, what="digests.json") for key in pins]
    assert len({pin.digest for pin in found}) == len(found)
    for pin in found:
        assert sources.source_url("registries", pin.registry).startswith("https://")


def test_upstream_names_stand_in_sources_json_only() -> None:
    """Addresses anywhere else would be fetched past the host's configuration."""
    hosts = ("download.pytorch.org", "registry-1.docker.io", "nvcr.io/v2")
    root = Path(__file__).resolve().parents[2]
    for folder in (root / "toolkit", root / "images"):
        for path in folder.rglob("*"):
            if path.is_file() and path.suffix != ".pyc" and path.name != "sources.json":
                text = path.read_text(encoding="utf-8", errors="replace")
                assert not any(host in text for host in hosts), path


def test_archives_that_tools_know_are_asked_of_them() -> None:
    assert sources.source_url("wheels", "pypi").endswith("/simple")
    if shutil.which("mmdebstrap"):
        assert sources.source_url("apt", "debian").endswith("/debian")
    entries = json.loads((images_dir() / "sources.json").read_bytes())
    assert "url" not in entries["wheels"]["pypi"]
    assert "url" not in entries["apt"]["debian"]


def test_a_name_that_nobody_serves_costs_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    assert sources.reachable("http://127.0.0.1:9", seconds=0.5) is not None
