"""The lint of shipped stacks, and the one writer of pins."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import pytest

from attnrepro.errors import BuildFailed, InvalidDocument, UsageError
from attnrepro.images import lint, registry, spec, updater
from attnrepro.resources import images_dir

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

STACK = "cuda13.0-torch2.13-fa2.8.3"
REAL = "sha256:" + "0123456789abcdef" * 4
OTHER = "sha256:" + "fedcba9876543210" * 4


def changed(
    change: Callable[[dict[str, Any], dict[str, bytes]], object], name: str = STACK
) -> spec.Stack:
    """A shipped stack with one mistake that each of its files survives by itself."""
    folder = images_dir() / name / "r1"
    files = spec.read_folder(folder)
    if (loaded := spec.shipped(name)) is not None and "digests.json" in loaded.files:
        files["digests.json"] = loaded.files["digests.json"]
    document = json.loads(files["image.json"])
    change(document, files)
    files["image.json"] = json.dumps(document).encode()
    return spec.from_files(files, folder=folder)


def sub(files: dict[str, bytes], name: str, pattern: str, new: str) -> None:
    before = files[name]
    files[name] = re.sub(pattern.encode(), new.encode(), before, count=1)
    assert files[name] != before


@pytest.mark.parametrize(
    "name", [f"{name}@{r}" for name in spec.stacks() for r in spec.revisions(name)]
)
def test_every_shipped_stack_is_good(name: str) -> None:
    subject = spec.resolve(name)
    assert [problem.line() for problem in lint.stack(subject)] == []


@pytest.mark.parametrize(
    ("change", "pointer"),
    [
        (lambda d, f: sub(f, "Dockerfile", "set -eu;", "curl https://x;"), "/Dockerfile:"),
        (
            lambda d, f: sub(f, "requirements.lock", "# Python", "# http://x Python"),
            "/requirements",
        ),
        (lambda d, f: d["env"].update(PIP="10.1.2.3:8080"), "/image.json:"),
        (lambda d, f: d["wheels"]["requirements"].append("scipy==1.0"), "/wheels/requirements/"),
        (lambda d, f: d["wheels"]["requirements"].append("einops"), "/wheels/requirements/"),
        (lambda d, f: sub(f, "requirements.lock", "einops==0.8.2", "einops==0.8.1"), "/wheels/req"),
        (lambda d, f: d["wheels"].pop("sdists"), "/wheels/sdists"),
        (
            lambda d, f: sub(f, "requirements.lock", "numpy-2.4.6-cp311", "numpy-2.4.6-cp312"),
            "/req",
        ),
        (lambda d, f: sub(f, "requirements.lock", "flash-attn==[^\n]*\n", ""), "/wheels/req"),
        (lambda d, f: d["kernels"][0].update(source=f"wheel {REAL}"), "/kernels/0/source"),
        (lambda d, f: d["framework"].update(source=f"wheel {REAL}"), "/framework/source"),
        (lambda d, f: d["base"]["packages"].append("vim"), "/base/packages"),
        (lambda d, f: sub(f, "debs.lock", "pool/main/a", "pool/contrib/a"), "/debs.lock"),
        (lambda d, f: d["wheels"].update(sources={"torch": "nobody"}), "/wheels"),
        (lambda d, f: d.update(trees=[{"source": "cutlass", "commit": "1" * 39 + "2"}]), "/trees"),
        (lambda d, f: d.update(trees=[{"source": "x", "commit": "1" * 39 + "2"}]), "/git"),
        (lambda d, f: d.update(device="amd"), "/claims.json"),
    ],
)
def test_a_mistake_is_named(
    change: Callable[[dict[str, Any], dict[str, bytes]], object], pointer: str
) -> None:
    found = [problem.pointer for problem in lint.stack(changed(change))]
    assert [name for name in found if name.startswith(pointer)], found


def test_the_command_lints_all_and_tells_a_bad_one(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["lint"])
    assert lint.main() == 0
    said = capsys.readouterr().out
    assert all(f"{name}@" in said for name in spec.stacks())
    bad = changed(lambda d, f: d["base"]["packages"].append("vim"))
    monkeypatch.setattr(spec, "resolve", lambda name: bad)
    assert lint.main() == 2
    assert "vim is not locked" in capsys.readouterr().out


# Digests --------------------------------------------------------------------------------------


def pin(**fields: object) -> dict[str, Any]:
    return {
        **{"registry": "docker.io", "repository": "a/b", "tag": "1", "digest": REAL},
        **{"evidence": "seen", "resolved": None},
        **fields,
    }


@pytest.mark.parametrize(
    "pins",
    [
        {"a": pin(digest="sha256:" + "a" * 64)},
        {"a": pin(digest=REAL[:-1])},
        {"a": pin(digest=REAL.upper())},
        {"a": pin(digest="sha256:" + "g" + REAL[8:])},
        {"a": pin(), "b": pin()},
        {"a": pin(registry="elsewhere.example")},
        {"a": pin(evidence="")},
        {"a": {"digest": REAL}},
    ],
)
def test_bad_pins_are_refused(pins: dict[str, Any], tmp_path: Path) -> None:
    assert lint.digests(pins)
    with pytest.raises(InvalidDocument):
        updater.write(pins, tmp_path / "digests.json")
    assert not (tmp_path / "digests.json").exists()


def test_each_base_is_pinned_once_and_used_by_key(tmp_path: Path) -> None:
    path = images_dir() / "digests.json"
    pins = updater.read()
    assert lint.digests(pins) == []
    updater.write(pins, tmp_path / "digests.json")
    assert (tmp_path / "digests.json").read_bytes() == path.read_bytes()
    hexes = [entry["digest"].removeprefix("sha256:") for entry in pins.values()]
    for file in images_dir().glob("*/r*/*"):
        assert not [digest for digest in hexes if digest.encode() in file.read_bytes()], file


def test_a_pin_is_added_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, str]] = []

    def answer(repository: str, tag: str, *, url: str) -> str:
        asked.append((repository, tag))
        return OTHER

    monkeypatch.setattr(registry, "resolve", answer)
    where = {"registry_key": "docker.io", "repository": "a/b", "tag": "1", "evidence": "x"}
    given = updater.add({}, "b-1", digest=REAL, **where)
    assert given["b-1"]["digest"] == REAL
    assert given["b-1"]["resolved"] is None
    both = updater.add(given, "b-1-new", digest=None, **where)
    assert both["b-1-new"]["digest"] == OTHER
    assert both["b-1-new"]["resolved"] is not None
    assert asked == [("a/b", "1")]
    with pytest.raises(UsageError, match="taken"):
        updater.add(both, "b-1", digest=OTHER, **where)
    with pytest.raises(InvalidDocument):
        updater.add(both, "b-2", digest="sha256:" + "0" * 64, **where)


def test_a_tag_that_moved_keeps_its_pin(monkeypatch: pytest.MonkeyPatch) -> None:
    pins = {"same": pin(), "moved": pin(digest=OTHER, tag="2"), "gone": pin(repository="c")}

    def answer(repository: str, tag: str, *, url: str) -> str:
        if repository == "c":
            message = "no answer"
            raise BuildFailed(message)
        return REAL

    monkeypatch.setattr(registry, "resolve", answer)
    result, found = updater.resolve(pins, [])
    assert {key: entry["digest"] for key, entry in result.items()} == {
        key: entry["digest"] for key, entry in pins.items()
    }
    assert result["same"]["resolved"] is not None
    assert result["moved"]["resolved"] is result["gone"]["resolved"] is None
    assert {item.key: item.digest for item in found} == {"same": REAL, "moved": REAL, "gone": None}
