"""Compilers' versions, and digests of what they compiled."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import pytest

from attnrepro_runner import caches, kernels, toolchain
from attnrepro_runner.backends.base import KernelPattern

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(autouse=True)
def no_memory() -> None:
    toolchain.versions.cache_clear()


def test_code_in_any_cache_is_digested_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for n, name in enumerate(caches.VARIABLES):
        monkeypatch.setenv(name, str(tmp_path / str(n)))
    assert toolchain.code_digests() == ()
    (tmp_path / "0/aa").mkdir(parents=True)
    (tmp_path / "1/bb").mkdir(parents=True)
    (tmp_path / "0/aa/kernel.cubin").write_bytes(b"one")
    (tmp_path / "1/bb/main.hsaco").write_bytes(b"two")
    (tmp_path / "1/bb/copy.cubin").write_bytes(b"one")
    (tmp_path / "1/bb/source.cpp").write_bytes(b"three")
    wanted = tuple(sorted(hashlib.sha256(data).hexdigest() for data in (b"one", b"two")))
    assert toolchain.code_digests() == wanted
    assert len(toolchain.compiled()) == 4
    seen = kernels.Seen(operators={"aten::mm": 1})
    pattern = KernelPattern(family="x", must=("mm",))
    judged = kernels.judge(seen, pattern, cubins=toolchain.code_digests())
    assert judged.to_json()["cubins"] == list(wanted)


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("g++ (Debian 12.2.0-14+deb12u1) 12.2.0", "12.2.0"),
        (
            "ptxas: NVIDIA (R) Ptx optimizing assembler\n"
            "Cuda compilation tools, release 13.0, V13.0.88\n"
            "Build cuda_13.0.r13.0/compiler.36424714_0",
            "V13.0.88",
        ),
        ("no version here", None),
    ],
)
def test_a_compilers_own_word_is_its_version(
    text: str, version: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "g++"
    program.write_text(f"#!/bin/sh\ncat <<'END'\n{text}\nEND\n")
    program.chmod(0o755)
    monkeypatch.setenv("CXX", str(program))
    assert toolchain.versions().get("c++") == version


def test_a_compiler_that_is_not_there_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", str(tmp_path / "gone"))
    assert "c++" not in toolchain.versions()


def test_caches_lie_at_one_path_unless_another_run_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(caches.tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr(caches.tempfile, "tempdir", str(tmp_path))
    first, second = caches.make_root(), caches.make_root()
    assert first == tmp_path / "attnrepro-caches"
    assert second.parent == tmp_path
    assert second != first
    assert first.stat().st_mode & 0o077 == 0
    assert set(caches.environment(first)) == set(caches.VARIABLES)
