"""One sequence and head of a tensor, whatever its layout: two-dimensional views for checking.

Lengths and pages come from the workload, never from the tensors that a backend was handed.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import accumulate
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from attnrepro_runner.backends.base import Tensors
    from attnrepro_runner.semantics import Workload

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float8_e4m3fn": torch.float8_e4m3fn,
}


def query_rows(tensor: torch.Tensor, workload: Workload, b: int, h: int) -> torch.Tensor:
    """Return the (seqlen_q, width) view of one sequence and query head of q, out, dq or dO."""
    return _dense(tensor, workload, _starts(workload.seqlens_q), b, h)


def lse_row(tensor: torch.Tensor, workload: Workload, b: int, h: int) -> torch.Tensor:
    """Return the (seqlen_q,) view of one sequence and query head of an LSE."""
    if workload.is_packed:
        start = _starts(workload.seqlens_q)
        return tensor[h, start[b] : start[b + 1]]
    return tensor[b, h]


def key_rows(tensor: torch.Tensor, workload: Workload, b: int, h: int) -> torch.Tensor:
    """Return the (seqlen_k, width) rows of one sequence and KV head of k, v, dk or dv.

    A copy where the rows lie in pages.
    """
    cache = workload.cache
    seqlen = workload.seqlens_k[b]
    if cache is None:
        return _dense(tensor, workload, _starts(workload.seqlens_k), b, h)
    if cache.page_size is None:
        return tensor[b, :seqlen, h]
    pages, slots = page_slots(workload, b, range(seqlen))
    return tensor[pages.to(tensor.device), slots.to(tensor.device), h]


def logical_keys(tensors: Tensors, name: str, workload: Workload, b: int, h: int) -> torch.Tensor:
    """Return the (seqlen_k, width) keys or values after the append, whether or not it was made."""
    stored = tensors.k if name == "k" else tensors.v
    rows = key_rows(stored, workload, b, h)
    new = tensors.k_new if name == "k" else tensors.v_new
    if new is None:
        return rows
    kept = workload.seqlens_k[b] - new.shape[1]
    return torch.cat((rows[:kept], new[b, :, h]))


def page_slots(workload: Workload, b: int, keys: range) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the pool page and the slot in it of each key of sequence b."""
    table = page_rows(workload)[b]
    assert workload.cache is not None
    assert workload.cache.page_size is not None
    index = torch.arange(keys.start, keys.stop)
    return torch.tensor(table)[index // workload.cache.page_size], (
        index % workload.cache.page_size
    )


@lru_cache(maxsize=8)
def page_rows(workload: Workload) -> tuple[tuple[int, ...], ...]:
    """Return the page table; the shuffle of a large pool is drawn once."""
    return workload.page_table() or ()


@lru_cache(maxsize=64)
def _starts(seqlens: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(accumulate(seqlens, initial=0))


def starts(seqlens: tuple[int, ...]) -> tuple[int, ...]:
    """Return cu_seqlens: where each sequence starts in a packed tensor, and the total."""
    return _starts(seqlens)


def _dense(
    tensor: torch.Tensor, workload: Workload, start: tuple[int, ...], b: int, h: int
) -> torch.Tensor:
    if workload.layout == "thd":
        return tensor[start[b] : start[b + 1], h]
    if workload.layout == "bhsd":
        return tensor[b, h]
    return tensor[b, :, h]
