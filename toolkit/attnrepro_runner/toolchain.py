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
    """Lower-case hex SHA-256 of each file of device code in the caches, sorted, each once."""
    code = (path for path in compiled() if path.suffix in _CODE)
    return tuple(sorted({hashlib.sha256(path.read_bytes()).hexdigest() for path in code}))


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
