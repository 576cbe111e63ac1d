from __future__ import annotations

import base64
import hashlib
import os
import subprocess
import sys
import zipfile
from io import BytesIO
from typing import TYPE_CHECKING

import pytest

from attnrepro import runnerwheel
from attnrepro.errors import AttnreproError

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def package(tmp_path: Path) -> Path:
    folder = tmp_path / "attnrepro_runner"
    (folder / "backends").mkdir(parents=True)
    (folder / "__init__.py").write_text('__version__ = "1.2.3"\n')
    (folder / "backends" / "__init__.py").write_text("")
    (folder / "py.typed").write_text("")
    return folder


def test_same_files_give_the_same_bytes(package: Path) -> None:
    first = runnerwheel.pack(package)
    cache = package / "__pycache__"
    cache.mkdir()
    (cache / "x.cpython-311.pyc").write_bytes(b"bytecode")
    (package / "y.pyc").write_bytes(b"bytecode")
    for path in package.rglob("*"):
        os.utime(path, (1, 1))
        path.chmod(0o700)
    assert runnerwheel.pack(package) == first


def test_changed_file_gives_another_digest(package: Path) -> None:
    first = runnerwheel.pack(package)
    (package / "backends" / "__init__.py").write_text("x = 1\n")
    assert runnerwheel.pack(package).sha256 != first.sha256


def test_wheel_is_whole(package: Path) -> None:
    wheel = runnerwheel.pack(package)
    assert wheel.name == "attnrepro_runner-1.2.3-py3-none-any.whl"
    assert wheel.sha256 == hashlib.sha256(wheel.data).hexdigest()
    with zipfile.ZipFile(BytesIO(wheel.data)) as archive:
        assert {info.compress_type for info in archive.infolist()} == {zipfile.ZIP_STORED}
        info = "attnrepro_runner-1.2.3.dist-info"
        record = archive.read(f"{info}/RECORD").decode().splitlines()
        assert len(record) == len(archive.namelist())
        for line in record[:-1]:
            name, digest, size = line.split(",")
            data = archive.read(name)
            found = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
            assert (digest, int(size)) == (f"sha256={found}", len(data))


def test_package_without_a_version_is_refused(package: Path) -> None:
    (package / "__init__.py").write_text("")
    with pytest.raises(AttnreproError, match="names no version"):
        runnerwheel.pack(package)


def test_installed_runner_runs_from_its_wheel(tmp_path: Path) -> None:
    path = tmp_path / "runner.whl"
    path.write_bytes(runnerwheel.installed().data)
    done = subprocess.run(
        [sys.executable, "-m", "attnrepro_runner", str(tmp_path / "no-job.json"), str(tmp_path)],
        env={"PYTHONPATH": str(path), "PATH": os.environ["PATH"]},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 3, done.stderr
    assert "no-job.json cannot be read" in done.stderr
