"""Whether an exception means that memory is not there, whatever library says so."""

from __future__ import annotations

import torch

_NO_MEMORY = (
    "out of memory",
    "can't allocate memory",
    "cannot allocate memory",
    "not enough memory",
    # cuBLAS, cuDNN and the driver where another process holds the memory.
    "_alloc_failed",
    "error_out_of_memory",
    "erroroutofmemory",
    "errormemoryallocation",
)


def is_out_of_memory(error: BaseException) -> bool:
    """Say whether an exception means that memory is not there."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    text = str(error).lower()
    return any(words in text for words in _NO_MEMORY)


def raise_out_of_memory(error: BaseException) -> None:
    """Raise the exception again if it means that memory is not there: that is no refusal."""
    if is_out_of_memory(error):
        raise error
