"""What compiles at run time here, and what it has compiled: versions and digests.

A backend that compiles its kernels has no library whose digest says which code ran. Its compilers'
versions and the digests of the code in its compile caches do.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import importlib.metadata
import importlib.util
import os
import shutil
import struct
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Final

from attnrepro_runner import caches, libraries

if TYPE_CHECKING:
    from collections.abc import Iterator

_DISTRIBUTIONS: Final = (
    "triton",
    "nvidia-cutlass-dsl",
    "apache-tvm-ffi",
    "quack-kernels",
    "flashinfer-python",
)
_CODE: Final = frozenset({".cubin", ".hsaco"})
"""Device code. Host libraries are left out: of the 11 that inductor writes for a CPU's flex, 2 have
other bytes each time (measured, one path, torch 2.13.0), which would call equal code another's."""
_OBJECT: Final = ".o"
"""Host objects, which may hold device images: the CuTe DSL's do."""
_ELF64: Final = b"\x7fELF\x02\x01"
_EM_CUDA: Final = 190
_HEADER_BYTES: Final = 64
_SECONDS: Final = 10.0


@functools.cache
def versions() -> dict[str, str]:
    """Name and version of every compiler that a backend of this process may use."""
    found = {}
    for name in _DISTRIBUTIONS:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    if (nvrtc := _nvrtc()) is not None:
        found["nvrtc"] = nvrtc
    for name, program in _programs():
        if (text := _says(program)) is not None:
            found[name] = text
    return found


def compiled() -> list[Path]:
    """Every file that compilers wrote into this process's caches."""
    folders = {Path(os.environ[name]) for name in caches.VARIABLES if name in os.environ}
    return sorted({p for folder in folders for p in folder.rglob("*") if p.is_file()})


def code_digests() -> tuple[str, ...]:
    """Lower-case hex SHA-256 of each piece of device code in the caches, sorted, each once.

    A file of device code is one; a host object is as many as it holds device images, and the host's
    part of it does not count.
    """
    found = set()
    for path in compiled():
        if path.suffix in _CODE:
            found.add(hashlib.sha256(path.read_bytes()).hexdigest())
        elif path.suffix == _OBJECT:
            found |= {hashlib.sha256(i).hexdigest() for i in device_images(path.read_bytes())}
    return tuple(sorted(found))


def device_images(data: bytes) -> Iterator[bytes]:
    """Yield each CUDA ELF image inside a file, in the file's order.

    64-bit, little-endian, machine EM_CUDA (190), as long as its tables say (System V ABI, ELF
    header); one that is cut short is left out. Measured: flash-attn-4 4.0.0b36's forward, compiled
    for sm_90a by CuTe DSL 4.8.1 in two processes into two folders, holds one image of 45,640 bytes,
    the same both times.
    """
    place = data.find(_ELF64)
    while place >= 0:
        header = data[place : place + _HEADER_BYTES]
        if len(header) == _HEADER_BYTES and struct.unpack_from("<H", header, 18)[0] == _EM_CUDA:
            segments, sections = struct.unpack_from("<QQ", header, 32)
            sizes = struct.unpack_from("<4H", header, 54)
            size = max(segments + sizes[0] * sizes[1], sections + sizes[2] * sizes[3])
            if _HEADER_BYTES <= size <= len(data) - place:
                yield data[place : place + size]
        place = data.find(_ELF64, place + 1)


def _programs() -> Iterator[tuple[str, Path]]:
    """The assembler that Triton brings, and the C++ compiler that a CPU's inductor calls."""
    spec = importlib.util.find_spec("triton")
    for place in (spec.submodule_search_locations or ()) if spec else ():
        program = Path(place) / "backends/nvidia/bin/ptxas"
        if program.is_file():
            yield "ptxas", program
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    if compiler is not None:
        yield "c++", Path(compiler)


def _says(program: Path) -> str | None:
    """The last word of `--version` that looks like one: `V13.0.88`, `12.2.0`."""
    try:
        done = subprocess.run(
            [program, "--version"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    words = [word.strip("(),") for word in done.stdout.split()]
    return next((w for w in reversed(words) if w[:2].strip("V")[:1].isdigit() and "." in w), None)


def _nvrtc() -> str | None:
    """Version of the NVRTC that is loaded."""
    for path in libraries.loaded():
        if path.name.startswith("libnvrtc.so"):
            major, minor = ctypes.c_int(), ctypes.c_int()
            ctypes.CDLL(str(path)).nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
            return f"{major.value}.{minor.value}"
    return None
