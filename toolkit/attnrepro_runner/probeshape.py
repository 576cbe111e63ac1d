"""The small workload on which a probe runs, in the shape class of the benchmarked one.

Kept: phase, head widths, dtype, layout, query-to-KV head ratio, mask kinds, page size, order and
gaps of strides: what a library chooses its kernel by. Made small: batch, KV heads, lengths,
windows. Lengths are no multiples of a tile, and cross one.
"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING

from attnrepro_runner import fields

if TYPE_CHECKING:
    from attnrepro_runner.semantics import Workload

_LONGEST = 200
_SQUARE = 130
_ROWS = 67
_LONG_ROWS = 128
"""A call of so many queries is probed with more than that: below, flex takes its decode kernel."""
_WINDOW = 37
_KV_HEADS = 4
_GAP = 16
"""Elements between rows that were apart; a multiple of 16 bytes in every dtype."""
_SEQUENCES = 3
_TINY_SLOPE = 2.0**-20
"""ALiBi where it must not hide a key: 200 keys away it moves a weight by 2e-4."""
_SEEN_BIAS = 0.125
"""Bias that the probe of small slopes must reach: twice what roundings of bfloat16 could hide."""
_LONGEST_SLOPED = 512
"""As far as it may go for that: a pair's weights are 2 MiB there."""


def small_workload(workload: Workload, *, alibi: bool = False, dropout: bool = False) -> Workload:
    """Shrink a workload into its probe.

    Args:
        workload: the benchmarked one.
        alibi: keep the declared ALiBi slopes; else they are tiny.
        dropout: keep the dropout; else there is none.

    """
    heads_kv = min(workload.heads_kv, _KV_HEADS)
    heads_q = heads_kv * (workload.heads_q // workload.heads_kv)
    chosen = _sequences(workload)
    longest = _sloped_length(workload, heads_q) if alibi else _LONGEST
    lengths = [_small_lengths(workload, b, longest) for b in chosen]
    seqlens_k = tuple(pair[1] for pair in lengths)
    small = dataclasses.replace(
        workload,
        # Sets and levels belong to the forward; the dropout probe needs the backward's mask.
        phase="forward" if workload.has_backward and not dropout else workload.phase,
        batch=len(chosen),
        seqlens_q=tuple(pair[0] for pair in lengths),
        seqlens_k=seqlens_k,
        heads_q=heads_q,
        heads_kv=heads_kv,
        strides=(None, None, None),
        mask=_small_mask(workload, max(_WINDOW, longest - _LONGEST)),
        alibi=_small_alibi(workload, heads_q, declared=alibi),
        dropout=workload.dropout if dropout else None,
        cache=_small_cache(workload, chosen, seqlens_k),
        fp8=_small_fp8(workload),
    )
    q, k, v = (
        None if given is None else like_strides(workload.shape(name), given, small.shape(name))
        for name, given in zip(fields.TENSOR_NAMES, workload.strides, strict=True)
    )
    small = dataclasses.replace(small, strides=(q, k, v))
    # A narrower window may leave a row without keys where the workload has no such row.
    widest = max(_WINDOW, longest - _LONGEST)
    while small.mask != workload.mask and _has_empty(small) and not _has_empty(workload):
        widest *= 2
        small = dataclasses.replace(small, mask=_small_mask(workload, widest))
    return small


def _has_empty(workload: Workload) -> bool:
    rows = (len(workload.attending_rows(b)) for b in range(workload.batch))
    return any(found < given for found, given in zip(rows, workload.seqlens_q, strict=True))


def describe(workload: Workload) -> str:
    """Say which shape was probed."""
    parts = [
        f"batch={workload.batch}",
        f"seqlen_q={','.join(map(str, workload.seqlens_q))}",
        f"seqlen_k={','.join(map(str, workload.seqlens_k))}",
        f"heads={workload.heads_q}/{workload.heads_kv}",
        f"head_dim={workload.head_dim}/{workload.head_dim_v}",
        workload.dtype,
        workload.layout,
    ]
    if workload.mask.window is not None:
        parts.append(f"window={workload.mask.window.left},{workload.mask.window.right}")
    if workload.cache is not None:
        parts.append(f"cache={workload.cache.kind}")
    return " ".join(parts)


def like_strides(
    shape: tuple[int, ...], stride: tuple[int, ...], small: tuple[int, ...]
) -> tuple[int, ...]:
    """Lay a smaller tensor out as another: axes in the same order, a gap where that had one."""
    result = [0] * len(shape)
    dense = step = 1
    for n, axis in enumerate(sorted(range(len(shape)), key=lambda axis: stride[axis])):
        if n == 0:
            step = stride[axis]
        elif stride[axis] > dense:
            step += _GAP
        result[axis] = step
        dense = stride[axis] * shape[axis]
        step *= small[axis]
    return tuple(result)


def _sequences(workload: Workload) -> list[int]:
    """Sequences to keep: first, last, and those of the extreme lengths."""
    every = range(workload.batch)
    pairs = list(zip(workload.seqlens_q, workload.seqlens_k, strict=True))
    if len(set(pairs)) == 1:
        return list(every[:2])
    extremes = (
        0,
        min(every, key=lambda b: pairs[b]),
        min(every, key=lambda b: pairs[b][::-1]),
        max(every, key=lambda b: pairs[b][::-1]),
    )
    kept = list(dict.fromkeys(extremes))
    for b in every:
        if len(kept) >= _SEQUENCES:
            break
        if b not in kept:
            kept.append(b)
    return sorted(kept)


def _sloped_length(workload: Workload, heads_q: int) -> int:
    """Return the length at which a bias shows."""
    steepest = max((workload.alibi_slopes() or ())[:heads_q], default=0.0)
    if steepest * _LONGEST >= _SEEN_BIAS or steepest == 0:
        return _LONGEST
    return min(_LONGEST_SLOPED, math.ceil(_SEEN_BIAS / steepest))


def _small_lengths(workload: Workload, b: int, longest: int) -> tuple[int, int]:
    if workload.cache is not None and workload.cache.page_size is not None:
        # Pages can be told apart where there are several.
        longest = max(longest, 2 * workload.cache.page_size + 17)
    seqlen_q, seqlen_k = workload.seqlens_q[b], workload.seqlens_k[b]
    if max(seqlen_q, seqlen_k) <= longest:
        return seqlen_q, seqlen_k
    if seqlen_q == seqlen_k:
        square = max(_SQUARE, longest if longest > _LONGEST else 0)
        return square, square
    if seqlen_q < seqlen_k:
        rows = min(seqlen_q, _SQUARE if seqlen_q >= _LONG_ROWS else _ROWS)
        return rows, rows + min(seqlen_k - seqlen_q, longest - rows)
    keys = min(seqlen_k, _ROWS)
    return keys + min(seqlen_q - seqlen_k, longest - _ROWS), keys


def _small_mask(workload: Workload, widest: int) -> fields.Mask:
    window = workload.mask.window
    if window is None:
        return workload.mask
    left, right = (
        None if side is None else min(side, widest) for side in (window.left, window.right)
    )
    return dataclasses.replace(
        workload.mask, window=dataclasses.replace(window, left=left, right=right)
    )


def _small_alibi(workload: Workload, heads_q: int, *, declared: bool) -> fields.Alibi | None:
    if workload.alibi is None:
        return None
    slopes = workload.alibi_slopes() or ()
    return fields.Alibi(slopes=slopes[:heads_q] if declared else (_TINY_SLOPE,) * heads_q)


def _small_cache(
    workload: Workload, chosen: list[int], seqlens_k: tuple[int, ...]
) -> fields.Cache | None:
    cache = workload.cache
    if cache is None:
        return None
    slack = cache.capacity - max(workload.seqlens_k[b] for b in chosen)
    capacity = max(*seqlens_k, 1) + min(slack, 24)
    pool = None
    if cache.page_size is not None:
        # Some pages that nobody may read.
        pool = len(chosen) * -(-capacity // cache.page_size) + 3
    return dataclasses.replace(cache, capacity=capacity, pool_pages=pool)


def _small_fp8(workload: Workload) -> fields.Fp8 | None:
    if workload.fp8 is None:
        return None
    return dataclasses.replace(workload.fp8, q_descale=(1.0,), k_descale=(1.0,), v_descale=(1.0,))
