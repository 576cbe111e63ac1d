"""Sequences and heads of a tensor, whatever its layout: for checking.

One (sequence, head) pair is a two-dimensional view; `gather_` copies many at once, of sequences of
equal lengths. Lengths and pages come from the workload, never from the tensors that a backend was
handed.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import accumulate
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from attnrepro_runner.backends.base import Tensors
    from attnrepro_runner.semantics import Workload

    Pairs = Sequence[tuple[int, int]]
    """(sequence, head) each."""

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float8_e4m3fn": torch.float8_e4m3fn,
}


@lru_cache(maxsize=16)
def attended(workload: Workload, b: int) -> torch.Tensor:
    """Return which keys each query of a sequence attends: bool (seqlen_q, seqlen_k), to be read."""
    found = torch.zeros((workload.seqlens_q[b], workload.seqlens_k[b]), dtype=torch.bool)
    for i in range(workload.seqlens_q[b]):
        lo, hi = workload.key_range(b, i)
        found[i, lo:hi] = True
    return found


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


def gather_queries(
    tensor: torch.Tensor, workload: Workload, pairs: Pairs, rows: torch.Tensor | None = None
) -> torch.Tensor:
    """Copy rows of each (sequence, query head) of q, out, dq or dO: (pairs, rows, width).

    Args:
        tensor: in the workload's layout.
        workload: the semantics.
        pairs: of sequences of equal seqlen_q.
        rows: int64 (rows) on the tensor's device; None is all.

    """
    return _gather(tensor, workload, workload.seqlens_q, pairs, rows)


def gather_lses(
    tensor: torch.Tensor, workload: Workload, pairs: Pairs, rows: torch.Tensor
) -> torch.Tensor:
    """Copy rows of each (sequence, query head) of an LSE: (pairs, rows)."""
    b, h = _columns(pairs, tensor.device)
    if workload.is_packed:
        return tensor[h, _firsts(workload.seqlens_q, pairs, tensor.device) + rows]
    return tensor[b, h, rows]


def gather_keys(tensor: torch.Tensor, workload: Workload, pairs: Pairs) -> torch.Tensor:
    """Copy the rows of each (sequence, KV head) of k, v, dk or dv: (pairs, seqlen_k, width)."""
    cache = workload.cache
    if cache is None:
        return _gather(tensor, workload, workload.seqlens_k, pairs)
    b, h = _columns(pairs, tensor.device)
    rows = torch.arange(workload.seqlens_k[pairs[0][0]], device=tensor.device)
    if cache.page_size is None:
        return tensor[b, rows, h]
    table = _page_table(workload).to(tensor.device)
    return tensor[table[b, rows // cache.page_size], rows % cache.page_size, h]


def gather_logical_keys(
    tensors: Tensors, name: str, workload: Workload, pairs: Pairs
) -> torch.Tensor:
    """Copy the keys or values as `logical_keys` does: (pairs, seqlen_k, width)."""
    rows = gather_keys(tensors.k if name == "k" else tensors.v, workload, pairs)
    new = tensors.k_new if name == "k" else tensors.v_new
    if new is not None:
        b, h = torch.tensor(pairs, device=new.device).unbind(1)
        rows[:, rows.shape[1] - new.shape[1] :] = new[b, :, h]
    return rows


def gather_packed(
    tensor: torch.Tensor,
    seqlens: tuple[int, ...],
    pairs: Pairs,
    rows: torch.Tensor | None = None,
) -> torch.Tensor:
    """Copy rows of each (sequence, head) of (tokens, heads, width): (pairs, rows, width)."""
    if rows is None:
        rows = torch.arange(seqlens[pairs[0][0]], device=tensor.device)
    _, h = _columns(pairs, tensor.device)
    return tensor[_firsts(seqlens, pairs, tensor.device) + rows, h]


@lru_cache(maxsize=8)
def _page_table(workload: Workload) -> torch.Tensor:
    return torch.tensor(page_rows(workload))


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


def _gather(
    tensor: torch.Tensor,
    workload: Workload,
    seqlens: tuple[int, ...],
    pairs: Pairs,
    rows: torch.Tensor | None = None,
) -> torch.Tensor:
    if workload.layout == "thd":
        return gather_packed(tensor, seqlens, pairs, rows)
    if rows is None:
        rows = torch.arange(seqlens[pairs[0][0]], device=tensor.device)
    b, h = _columns(pairs, tensor.device)
    if workload.layout == "bhsd":
        return tensor[b, h, rows]
    return tensor[b, rows, h]


def _columns(pairs: Pairs, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the sequences and the heads of pairs as indices, each (pairs, 1)."""
    b, h = torch.tensor(pairs, device=device)[:, :, None].unbind(1)
    return b, h


def _firsts(seqlens: tuple[int, ...], pairs: Pairs, device: torch.device) -> torch.Tensor:
    """Return where each pair's sequence starts in a packed tensor: (pairs, 1)."""
    start = _starts(seqlens)
    return torch.tensor([[start[b]] for b, _ in pairs], device=device)
