"""Wheels without pip: RECORD, unpacking, comparing."""

from __future__ import annotations

import sys
import zipfile
from pathlib import Path

import pytest

from attnrepro.errors import BuildFailed
from attnrepro.images import wheelfiles

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "engine"))

from small_host import digest, make_wheel


def test_names_are_normalised() -> None:
    assert wheelfiles.normal("Fa3_Fwd") == "fa3-fwd"
    assert wheelfiles.normal("ruamel.yaml--clib") == "ruamel-yaml-clib"


def test_record_gives_hex_digests() -> None:
    text = f'a.py,{digest(b"a")},1\n"b,c.py",{digest(b"b")},1\nx.dist-info/RECORD,,\n'
    found = wheelfiles.parse_record(text)
    assert list(found) == ["a.py", "b,c.py"]
    assert found["a.py"].startswith("ca978112ca1bbdca")


def test_wheel_is_read_and_unpacked(tmp_path: Path) -> None:
    wheel = make_wheel(
        tmp_path,
        "Fa3_Fwd",
        "0.0.3",
        {
            "fa3/__init__.py": b"k = 5\n",
            "Fa3_Fwd-0.0.3.data/platlib/fa3/_C.so": b"\x7fELF",
            "Fa3_Fwd-0.0.3.data/scripts/tool": b"#!python\n",
        },
        ("torch>=2; python_version > '3'",),
    )
    [info] = wheelfiles.unpack([wheel], tmp_path / "site")
    assert (info.name, info.version) == ("fa3-fwd", "0.0.3")
    assert info.requires == ("torch>=2; python_version > '3'",)
    assert (tmp_path / "site/fa3/_C.so").read_bytes() == b"\x7fELF"
    assert not list((tmp_path / "site").rglob("tool"))
    wheelfiles.compile_folder(tmp_path / "site", "/opt/site")
    [compiled] = (tmp_path / "site").rglob("*.pyc")
    # Flags of PEP 552: hash-based, never checked.
    assert compiled.read_bytes()[4:8] == b"\x01\x00\x00\x00"
    assert b"/opt/site/fa3/__init__.py" in compiled.read_bytes()


@pytest.mark.parametrize("name", ["../x.py", "/x.py", "a/../../x.py", "a\\x.py"])
def test_wheel_that_leaves_its_folder(tmp_path: Path, name: str) -> None:
    wheel = make_wheel(tmp_path, "bad", "1", {name: b"x"})
    with pytest.raises(BuildFailed, match="holds the path"):
        wheelfiles.unpack([wheel], tmp_path / "site")


def test_wheel_that_is_not_its_record(tmp_path: Path) -> None:
    wheel = make_wheel(tmp_path, "bad", "1", {"bad.py": b"x = 1\n"})
    altered = tmp_path / "altered.whl"
    with zipfile.ZipFile(wheel) as source, zipfile.ZipFile(altered, "w") as target:
        for member in source.namelist():
            data = source.read(member)
            target.writestr(member, b"x = 2\n" if member == "bad.py" else data)
    with pytest.raises(BuildFailed, match="not what its RECORD says"):
        wheelfiles.unpack([altered], tmp_path / "site")
    with zipfile.ZipFile(altered, "a") as target:
        target.writestr("more.py", b"")
    with pytest.raises(BuildFailed):
        wheelfiles.unpack([altered], tmp_path / "site2")


def test_two_wheels_with_one_file(tmp_path: Path) -> None:
    wheels = [make_wheel(tmp_path, name, "1", {"same.py": b"x"}) for name in ("a", "b")]
    with pytest.raises(BuildFailed, match="in both"):
        wheelfiles.unpack(wheels, tmp_path / "site")
    assert not (tmp_path / "site").exists()


def test_no_wheel(tmp_path: Path) -> None:
    (tmp_path / "a.whl").write_bytes(b"PK")
    with pytest.raises(BuildFailed, match="not a whole wheel"):
        wheelfiles.read_wheel(tmp_path / "a.whl")
    with zipfile.ZipFile(tmp_path / "b.whl", "w") as archive:
        archive.writestr("b.py", b"")
    with pytest.raises(BuildFailed, match="no RECORD"):
        wheelfiles.read_wheel(tmp_path / "b.whl")


def test_installed_against_public(tmp_path: Path) -> None:
    wheel = make_wheel(tmp_path, "torch", "2.11.0", {"torch/a.so": b"a", "torch/b.so": b"b"})
    info = wheelfiles.read_wheel(wheel)
    same = dict(info.files)
    assert wheelfiles.check_public(info, same).identical
    other = wheelfiles.check_public(info, {**same, "torch/a.so": "00" * 32})
    assert (other.identical, other.differing, other.missing) == (False, ("torch/a.so",), ())
    del same["torch/b.so"]
    lacking = wheelfiles.check_public(info, same)
    assert (lacking.identical, lacking.missing) == (False, ("torch/b.so",))
    assert lacking.document()["missing"] == ["torch/b.so"]
