"""Compilers' versions, and digests of what they compiled."""

from __future__ import annotations

import hashlib
import struct
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


def elf(machine: int, body: bytes, *, sections: int = 0) -> bytes:
    """An ELF image: header, body, and so many section headers at its end."""
    tables = 64 + len(body)
    identity = b"\x7fELF\x02\x01\x01" + bytes(9)
    fields = (2, machine, 1, 0, 0, tables, 0, 64, 56, 0, 64, sections, 0)
    header = identity + struct.pack("<2HI3QI6H", *fields)
    return header + body + bytes(64 * sections)


CUDA, HOST = 190, 62


def test_device_images_inside_host_objects_are_digested_and_the_host_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = elf(CUDA, b"one" * 9, sections=3), elf(CUDA, b"two", sections=1)
    for n, host in enumerate((b"host", b"another compiler's host")):
        whole = elf(HOST, host + one + b"between" + two, sections=2)
        assert list(toolchain.device_images(whole)) == [one, two]
        folder = tmp_path / f"cute/{n}"
        folder.mkdir(parents=True)
        (folder / "fwd.o").write_bytes(whole)
    (tmp_path / "cute/host.o").write_bytes(elf(HOST, b"nothing", sections=2))
    monkeypatch.setenv("FLASH_ATTENTION_CUTE_DSL_CACHE_DIR", str(tmp_path / "cute"))
    wanted = sorted(hashlib.sha256(image).hexdigest() for image in (one, two))
    assert toolchain.code_digests() == tuple(wanted)


@pytest.mark.parametrize("left", [5, 63, 70, 90])
def test_a_device_image_that_is_cut_short_is_none(left: int) -> None:
    image = elf(CUDA, b"one" * 9, sections=3)
    assert list(toolchain.device_images(image[:left])) == []


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
    given = caches.environment(first)
    assert set(given) == {*caches.VARIABLES, *caches.SWITCHES}
    # Without this switch flash-attn-4 writes nothing into its folder.
    assert given["FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED"] == "1"
