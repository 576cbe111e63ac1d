"""Which torch, and which loaded libraries, by version and digest.

Digests of large libraries cost most of a second each, so a digest once computed for a file (same
size, time of change and inode) is kept, and the coordinator hands the known ones to each worker.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from attnrepro_runner.backends.base import Availability

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

_BEARS_KERNELS = re.compile(
    r"^lib(torch_(cpu|cuda|hip)|aotriton\w*|cudnn\w*|cublas(Lt)?|cutlass\w*|nvrtc\w*|cudart|"
    r"amdhip64|hipblas\w*|rocblas|MIOpen|mkl_\w+|dnnl|onednn|gomp|iomp5|omp)\b[^/]*\.so|"
    r"(flash_attn|flashinfer|sgl_kernel|xformers)[^/]*\.so",
)
"""Libraries whose code computes attention, its products or its parallel loops, by file name."""

_digests: dict[str, tuple[tuple[int, int, int], str]] = {}


def torch_device() -> torch.device:
    """Return the device of this process: `ATTNREPRO_DEVICE` (cpu or cuda), by default cpu."""
    import torch

    return torch.device(os.environ.get("ATTNREPRO_DEVICE", "cpu"))


def device_facts(device: torch.device) -> dict[str, object]:
    """Return what the framework knows of its device.

    UUID and PCI address tell the coordinator which device to open, and are recorded nowhere.
    """
    if device.type != "cuda":
        return {}
    import torch

    found = torch.cuda.get_device_properties(device)
    uuid = getattr(found, "uuid", None)
    address = [getattr(found, f"pci_{part}_id", None) for part in ("domain", "bus", "device")]
    return {
        "compute_units": found.multi_processor_count,
        "last_level_cache_bytes": found.L2_cache_size,
        "uuid": None if uuid is None else str(uuid),
        "pci": pci_address(*address),
    }


def pci_address(domain: int | None, bus: int | None, device: int | None) -> str | None:
    """Return dddd:bb:dd in hexadecimal, or None where a part is not known."""
    if domain is None or bus is None or device is None:
        return None
    return f"{domain:04x}:{bus:02x}:{device:02x}"


def file_digest(path: Path) -> str:
    """Return the lower-case hex SHA-256 of a file, from memory if it has not changed since."""
    status = path.stat()
    key = (status.st_size, status.st_mtime_ns, status.st_ino)
    known = _digests.get(str(path))
    if known is None or known[0] != key:
        with path.open("rb") as file:
            known = key, hashlib.file_digest(file, "sha256").hexdigest()
        _digests[str(path)] = known
    return known[1]


def known_digests() -> dict[str, list[object]]:
    """Return what `file_digest` knows, to be handed to another process."""
    return {path: [*key, digest] for path, (key, digest) in _digests.items()}


def learn_digests(known: Mapping[str, list[object]]) -> None:
    """Take over what another process of this machine knows; changed files are hashed anew."""
    for path, entry in known.items():
        size, changed, inode, digest = entry
        if isinstance(size, int) and isinstance(changed, int) and isinstance(inode, int):
            _digests[path] = (size, changed, inode), str(digest)


def public_name(path: Path) -> str:
    """Return a path below site-packages, or the bare file name, without the machine's folders."""
    parts = path.parts
    for folder in ("site-packages", "dist-packages"):
        if folder in parts:
            return "/".join(parts[len(parts) - parts[::-1].index(folder) :])
    return path.name


@functools.cache
def torch_availability() -> Availability:
    """Describe torch: version, kernel-bearing files, how it was built. Never raises."""
    try:
        import torch
    except ImportError as error:
        return Availability(available=False, reason=f"torch cannot be imported: {error}")
    folder = Path(torch.__file__).parent / "lib"
    files = {
        public_name(path): file_digest(path)
        for path in sorted(folder.glob("libtorch_*.so"))
        if _BEARS_KERNELS.search(path.name)
    }
    flags = {
        "git_version": str(torch.version.git_version),
        "cuda": str(torch.version.cuda),
        "hip": str(torch.version.hip),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
    }
    return Availability(
        available=True, version=str(torch.__version__), files=files, flags=flags, reason=None
    )


def loaded() -> list[Path]:
    """Return the shared libraries of this process, in the order in which they were loaded."""

    class Info(ctypes.Structure):
        # The head of struct dl_phdr_info of <link.h>.
        _fields_ = (("address", ctypes.c_void_p), ("name", ctypes.c_char_p))

    paths: list[Path] = []

    def visit(info: ctypes._Pointer[Info], _size: int, _data: int | None) -> int:
        name = info.contents.name
        if name:
            paths.append(Path(os.fsdecode(name)))
        return 0

    kind = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(Info), ctypes.c_size_t, ctypes.c_void_p)
    ctypes.CDLL(None).dl_iterate_phdr(kind(visit), None)
    return [path for path in paths if path.is_file()]


def kernel_libraries() -> dict[str, dict[str, str | None]]:
    """Return version and digest of the loaded libraries that bear kernels, in load order."""
    result: dict[str, dict[str, str | None]] = {}
    for path in loaded():
        if _BEARS_KERNELS.search(path.name):
            name = public_name(path)
            result[name] = {"version": _version(name), "sha256": file_digest(path)}
    return result


def _version(name: str) -> str | None:
    """Version of the distribution that a library belongs to, where a module loaded says so."""
    module = sys.modules.get(name.split("/", 1)[0])
    version = getattr(module, "__version__", None)
    return None if version is None else str(version)
