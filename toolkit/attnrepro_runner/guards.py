"""Memory around and between the elements of a tensor, poisoned and watched.

Storage of an input is longer than its extent at both ends, and every element that the tensor does
not address (bands, gaps between strides) holds one NaN pattern. A kernel that reads there gives
NaN, and one that writes there is found by `intact`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

BAND_BYTES = 1024
"""A multiple of every alignment that kernels ask of their pointers."""

_BITS = {
    torch.float32: (torch.int32, 0x7FC5A5A5),
    torch.bfloat16: (torch.int16, 0x7FC5),
    torch.float16: (torch.int16, 0x7E5A),
    torch.float8_e4m3fn: (torch.uint8, 0x7F),
}
_FREE_BLOCKS = 4


def allocate(
    shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Return a tensor of NaN with guard bands round it.

    Args:
        shape: lengths of the axes.
        stride: elements from one to the next along each axis.
        dtype: float32, bfloat16, float16 or float8_e4m3fn.
        device: where.

    """
    kind, pattern = _BITS[dtype]
    band = BAND_BYTES // dtype.itemsize
    extent = _extent(shape, stride)
    storage = torch.full((band + extent + band,), pattern, dtype=kind, device=device).view(dtype)
    return storage.as_strided(tuple(shape), tuple(stride), band)


def as_integers(tensor: torch.Tensor) -> torch.Tensor:
    """View a tensor's elements as integers of their width."""
    return tensor.view(_BITS[tensor.dtype][0])


def poison_bits(dtype: torch.dtype) -> int:
    """Return the NaN pattern of a dtype as an integer."""
    return _BITS[dtype][1]


def poison(tensor: torch.Tensor) -> None:
    """Fill a tensor with the NaN pattern of its dtype."""
    as_integers(tensor).fill_(poison_bits(tensor.dtype))


def is_poison(tensor: torch.Tensor) -> torch.Tensor:
    """Return where a tensor still holds the NaN pattern, bit for bit."""
    found: torch.Tensor = as_integers(tensor) == poison_bits(tensor.dtype)
    return found


def intact(tensor: torch.Tensor) -> bool:
    """Say whether all memory round and between a tensor of `allocate` is as it was."""
    begin = tensor.storage_offset()
    whole = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    whole.set_(tensor.untyped_storage())
    extent = _extent(tensor.shape, tensor.stride())
    untouched = is_poison(whole)
    if not bool(untouched[:begin].all()) or not bool(untouched[begin + extent :].all()):
        return False
    if extent == tensor.numel():
        return True
    inside = untouched[begin : begin + extent]
    inside.as_strided(tensor.shape, tensor.stride(), inside.storage_offset()).fill_(True)
    return bool(inside.all())


def poison_allocator(
    shapes: Iterable[Sequence[int]], dtypes: Iterable[torch.dtype], device: torch.device
) -> None:
    """Fill free blocks of the sizes that a call will allocate with NaN, then free them.

    A caching allocator hands such a block out again, so an output element that the call does not
    write is NaN and no leftover of the call before. Best effort: another block may be taken.
    """
    wanted = [(tuple(shape), dtype) for shape, dtype in zip(shapes, dtypes, strict=True)]
    blocks = []
    for shape, dtype in wanted:
        for _ in range(_FREE_BLOCKS):
            block = torch.empty(shape, dtype=dtype, device=device)
            poison(block)
            blocks.append(block)
    del blocks


def _extent(shape: Sequence[int], stride: Sequence[int]) -> int:
    if 0 in shape:
        return 0
    return 1 + sum((n - 1) * s for n, s in zip(shape, stride, strict=True))
