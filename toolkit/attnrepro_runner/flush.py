"""Making every sample start with its inputs out of the caches.

On a GPU, twice the last-level cache is written and lines that persist are reset. On a CPU that rule
is often out of reach: a virtual machine reports the whole socket's cache (480 MB seen), and writing
twice of it takes 0.15 s a sample. There the cache lines of everything that the call reads are
evicted one by one by the CPU's own instruction, which is exact at any cache size and costs less
than reading them (0.05 ms/MB; address translations stay cached). Where that instruction cannot be
run, memory is written, and samples are labelled flushed only if it was twice the last-level cache.
"""

from __future__ import annotations

import ctypes
import dataclasses
import mmap
from typing import TYPE_CHECKING, Final, Protocol

from attnrepro_runner import cpu, profiles
from attnrepro_runner.libraries import loaded

if TYPE_CHECKING:
    from collections.abc import Iterable

    import torch

    from attnrepro_runner.backends.base import Prepared, Tensors

WRITE_LIMIT: Final = 256 << 20
"""Bytes that are written at most on a CPU; re-reading costs no more after it than after 960 MB,
measured under a reported cache of 480 MB."""

LINE: Final = 64

# System V AMD64: rdi is the first address, rsi the end. clflushopt reaches every cache of every
# core; mfence waits until it has.
_EVICT: Final = bytes.fromhex(
    "660fae3f"  # again: clflushopt [rdi]
    "4883c740"  # add rdi, 64
    "4839f7"  # cmp rdi, rsi
    "72f3"  # jb again
    "0faef0"  # mfence
    "c3"  # ret
)


class Flush(Protocol):
    """How caches are emptied before a sample."""

    complete: bool
    """Whether samples may be labelled flushed."""

    def __call__(self, tensors: Iterable[torch.Tensor]) -> None:
        """Evict, at least, these tensors."""
        ...

    def describe(self) -> dict[str, str]:
        """Name method and size, for the record."""
        ...


class EvictLines:
    """Evicts the lines of given tensors from all caches of an x86-64 CPU."""

    complete = True

    def __init__(self) -> None:
        """Put the loop into executable memory.

        Raises:
            OSError: the system allows none.

        """
        protection = mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC
        self._code = mmap.mmap(-1, mmap.PAGESIZE, prot=protection)
        self._code.write(_EVICT)
        self._address = ctypes.c_char.from_buffer(self._code)
        function = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p)
        self._evict = function(ctypes.addressof(self._address))

    def __call__(self, tensors: Iterable[torch.Tensor]) -> None:
        """Evict the whole storage of each tensor."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            first = storage.data_ptr()
            if size := storage.nbytes():
                self._evict(first // LINE * LINE, first + size)

    def describe(self) -> dict[str, str]:
        """Name the method."""
        return {"method": "evict the cache lines of all tensors that the call reads (clflushopt)"}


class WriteMemory:
    """Writes a buffer that displaces what the caches hold."""

    def __init__(self, device: torch.device, cache_bytes: int | None) -> None:
        """Allocate the buffer: twice the last-level cache, on a CPU at most WRITE_LIMIT."""
        import torch

        wanted = 2 * (cache_bytes or WRITE_LIMIT // 2)
        size = min(wanted, WRITE_LIMIT) if device.type == "cpu" else wanted
        self.complete = cache_bytes is not None and size >= 2 * cache_bytes
        self._cache_bytes = cache_bytes
        self._buffer = torch.ones(size // 8, dtype=torch.int64, device=device)
        self._reset = _persisting_reset() if device.type == "cuda" else None

    def __call__(self, tensors: Iterable[torch.Tensor]) -> None:
        """Write the buffer, whatever the tensors are."""
        del tensors
        if self._reset is not None:
            self._reset()
        # Adding reads and writes every line. A fill may go past the caches.
        self._buffer.add_(1)

    def describe(self) -> dict[str, str]:
        """Name the method, its size and the cache's."""
        return {
            "method": "write memory",
            "bytes": str(self._buffer.numel() * 8),
            "last_level_cache_bytes": str(self._cache_bytes),
            "persisting_lines_reset": str(self._reset is not None).lower(),
        }


class Warm:
    """Leaves the caches as the last call left them."""

    complete = False

    def __call__(self, tensors: Iterable[torch.Tensor]) -> None:
        """Do nothing."""

    def describe(self) -> dict[str, str]:
        """Say so."""
        return {"method": "none: samples are warm"}


def choose(device: torch.device, *, wanted: bool) -> Flush:
    """Return the way to flush on a device."""
    if not wanted:
        return Warm()
    if device.type == "cuda":
        import torch

        return WriteMemory(device, torch.cuda.get_device_properties(device).L2_cache_size)
    if "clflushopt" in profiles.cpu_flags():
        try:
            return EvictLines()
        except OSError:
            pass  # a system that allows no executable memory
    return WriteMemory(device, cpu.last_level_cache())


def read_by(tensors: Tensors, prepared: Prepared) -> list[torch.Tensor]:
    """Return the tensors that a call reads: its inputs, and what the adapter made of them."""
    import torch

    found: list[torch.Tensor] = []
    values: list[object] = [getattr(tensors, f.name) for f in dataclasses.fields(tensors)]
    values += vars(prepared).values() if hasattr(prepared, "__dict__") else ()
    for value in values:
        members = value.values() if isinstance(value, dict) else [value]
        found.extend(member for member in members if isinstance(member, torch.Tensor))
    unique = {tensor.untyped_storage().data_ptr(): tensor for tensor in found}
    return list(unique.values())


def _persisting_reset() -> ctypes._NamedFuncPointer | None:
    """Return cudaCtxResetPersistingL2Cache of the runtime that torch has loaded; HIP has none."""
    for path in loaded():
        if path.name.startswith("libcudart.so"):
            return getattr(ctypes.CDLL(str(path)), "cudaCtxResetPersistingL2Cache", None)
    return None
