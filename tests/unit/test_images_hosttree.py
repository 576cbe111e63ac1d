"""What of a host enters its own image."""

from __future__ import annotations

import hashlib
import io
import os
import stat
import sys
import tarfile
from pathlib import Path

import pytest

from attnrepro.errors import BuildFailed
from attnrepro.images import hosttree

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "engine"))

from small_host import PYTHON, SITE, make_host, make_wheel, put


@pytest.fixture
def root(tmp_path: Path) -> Path:
    make_host(tmp_path / "root")
    return tmp_path / "root"


def stream(root: Path, replaced: tuple[str, ...] = ()) -> tuple[hosttree.LayerStream, bytes]:
    selection = hosttree.select(PYTHON, roots=["torch", "numpy"], replaced=replaced, root=root)
    made = hosttree.LayerStream(
        name="host-rootfs", paths=hosttree.paths(selection), keep_times=("opt/env/",)
    )
    return made, b"".join(made)


def test_layer_is_what_it_says(root: Path) -> None:
    made, data = stream(root)
    assert made.layer.size == len(data)
    assert made.layer.digest == f"sha256:{hashlib.sha256(data).hexdigest()}"
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        members = {m.name: m for m in archive}
        extracted = archive.extractfile(f"{SITE}/torch/__init__.py")
        assert extracted is not None
        assert extracted.read() == b"x = 1\n"
    assert [e.path for e in made.entries] == list(members)
    by_path = {e.path: e for e in made.entries}
    assert by_path[f"{SITE}/torch/__init__.py"].sha256 == hashlib.sha256(b"x = 1\n").hexdigest()
    assert stream(root)[1] == data


def test_only_what_is_needed_goes_in(root: Path) -> None:
    names = {entry.path for entry in stream(root)[0].entries}
    for path in ("usr/bin/sh", "bin", f"{SITE}/sympy/__init__.py", "var/lib/dpkg/status"):
        assert path in names
    assert f"{SITE}/torch/__pycache__/__init__.cpython-312.pyc" in names
    forbidden = ("shadow", "ssh", "secret", "home", "jax", "cuda-13.0", "nvidia/lib64", "share/doc")
    assert not [n for n in names for word in forbidden if word in n]
    assert "opt/other" not in names


def test_mount_points_have_their_modes(root: Path) -> None:
    modes = {e.path: e.mode for e in stream(root)[0].entries}
    assert modes["tmp"] == modes["var/tmp"] == 0o1777
    assert {"proc", "sys", "dev", "run", "attnrepro"} <= set(modes)


def test_times_of_the_system_are_fixed_and_of_bytecode_kept(root: Path) -> None:
    _, data = stream(root)
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        times = {m.name: m.mtime for m in archive}
    source = root / SITE / "torch/__init__.py"
    assert times[f"{SITE}/torch/__init__.py"] == int(source.stat().st_mtime)
    assert times["usr/bin/sh"] == hosttree.EPOCH


def test_replaced_distribution_stays_out(root: Path) -> None:
    names = {entry.path for entry in stream(root, replaced=("Sympy",))[0].entries}
    assert f"{SITE}/sympy/__init__.py" not in names


def test_closure_follows_markers_and_extras(tmp_path: Path) -> None:
    from small_host import install

    for name, requires in (
        ("a", ("b", "c; python_version < '3'", "d; extra == 'more'")),
        ("b", ("a", "nowhere")),
        ("c", ()),
        ("d", ()),
    ):
        install(tmp_path, make_wheel(tmp_path, name, "1", {f"{name}.py": b""}, requires))
    installed = hosttree.distributions(tmp_path / SITE)
    assert hosttree.closure(["A"], installed) == {"a", "b"}
    assert hosttree.closure(["a[more]", "not a requirement ("], installed) == {"a", "b", "d"}


def test_environment_without_torch(tmp_path: Path) -> None:
    (tmp_path / SITE).mkdir(parents=True)
    with pytest.raises(BuildFailed, match="no torch"):
        hosttree.select(PYTHON, roots=["torch"], replaced=(), root=tmp_path)


def test_file_that_shrinks_is_told(tmp_path: Path) -> None:
    class Shrinking(type(tmp_path)):  # type: ignore[misc]
        """Tells a larger size than can be read."""

        def lstat(self) -> os.stat_result:
            fields = list(super().lstat())
            fields[stat.ST_SIZE] = 100
            return os.stat_result(fields)

    put(tmp_path, "big", b"x")
    layer = hosttree.LayerStream(name="x", paths=[("usr/lib/big", Shrinking(tmp_path / "big"))])
    with pytest.raises(BuildFailed, match="became shorter"):
        list(layer)


def test_this_python_is_described() -> None:
    python = hosttree.this_python()
    assert Path("/", python.site).is_dir()
    assert python.executable == sys.executable
    assert not any(p.startswith(("/", "usr/")) for p in python.prefixes)
