"""Inputs of a workload: the same bytes on every machine, in guarded memory.

Values are drawn in one canonical order, packed (token, head, channel), and then placed in the
workload's layout, strides, cache or pages: two layouts of one workload hold the same numbers.
A stream is one draw; another stream is fresh data.
"""

from __future__ import annotations

import ctypes
import dataclasses
import hashlib
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import torch

from attnrepro_runner import generator, guards, views
from attnrepro_runner.backends.base import Tensors

if TYPE_CHECKING:
    from collections.abc import Mapping

    from attnrepro_runner.semantics import Workload

GENERATOR = "philox4x32-10/normal-table/1"
LOW_ENTROPY = frozenset({"one_hot"})
"""Distributions that must not be timed: products of zeros run faster."""

TAIL = 256.0
"""Value of keys and values in a cache behind a sequence's length. It is finite, since kernels that
load whole tiles (FlashAttention-3 and -4, cuDNN) give such keys the weight 0 and multiply: NaN
would stay NaN, and their releases ask for finite rows there. It is exact in every dtype and far
outside of the distributions, so that a kernel that attends it is found."""

_TAGS = {"q": 0, "k": 1, "v": 2, "grad_out": 3}
_LARGE_NEGATIVE_K = -8.0
_ONE_HOT_QK = 8.0
_E4M3_MAX = 448.0
_DIGEST_CHUNK = 1 << 26
_MARK_CHUNK = 1 << 25
_ODD = -7046029254386353131  # 2^64 / golden ratio, as int64


def make_inputs(
    workload: Workload,
    inputs: Mapping[str, object],
    *,
    stream: int,
    device: torch.device | str,
) -> Tensors:
    """Make the tensors of one call.

    Args:
        workload: shapes, layout, dtype, cache.
        inputs: the manifest's `inputs` object: seed, distribution.
        stream: which draw, 0 to 2^32 - 1.
        device: where the tensors live.

    Raises:
        ValueError: unknown generator or distribution, or a stream out of range.

    """
    device = torch.device(device)
    drawn = draw(workload, inputs, stream=stream, device=device)
    descales: dict[str, torch.Tensor] = {}
    if workload.fp8 is not None:
        for name in ("q", "k", "v"):
            descale = _descale(workload, name, drawn[name])
            drawn[name] = _quantise(workload, name, drawn[name], descale)
            descales[f"{name}_descale"] = descale
    return assemble(workload, drawn, device, descales)


def draw(
    workload: Workload, inputs: Mapping[str, object], *, stream: int, device: torch.device | str
) -> dict[str, torch.Tensor]:
    """Return q, k, v and grad_out as drawn: packed (tokens, heads, width), before quantisation.

    float32 where the workload is float8 (what the total error is measured against), else in the
    workload's dtype.
    """
    device = torch.device(device)
    if inputs.get("generator", GENERATOR) != GENERATOR:
        msg = f"generator {inputs['generator']!r} is not {GENERATOR}"
        raise ValueError(msg)
    if not 0 <= stream < 1 << 32:
        msg = f"stream {stream} is not an unsigned 32-bit integer"
        raise ValueError(msg)
    seed = int(str(inputs.get("seed", 2026)))
    distribution = str(inputs.get("distribution", "normal"))
    dtype = torch.float32 if workload.fp8 is not None else views.DTYPES[workload.dtype]
    tokens_q, tokens_k = sum(workload.seqlens_q), sum(workload.seqlens_k)
    shapes = {
        "q": (tokens_q, workload.heads_q, workload.head_dim),
        "k": (tokens_k, workload.heads_kv, workload.head_dim),
        "v": (tokens_k, workload.heads_kv, workload.head_dim_v),
    }
    drawn = {
        name: _values(distribution, name, shape, dtype, device, seed, stream)
        for name, shape in shapes.items()
    }
    if workload.has_backward:
        shape = (tokens_q, workload.heads_q, workload.head_dim_v)
        out = views.DTYPES[workload.dtype_out]
        drawn["grad_out"] = _values("normal", "grad_out", shape, out, device, seed, stream)
    return drawn


def assemble(
    workload: Workload,
    packed: Mapping[str, torch.Tensor],
    device: torch.device | str,
    descales: Mapping[str, torch.Tensor] | None = None,
) -> Tensors:
    """Place packed (tokens, heads, width) values into the workload's tensors.

    Foreign pages and all guard bands hold NaN, keys behind a sequence's length hold TAIL.

    Args:
        workload: layout, strides, cache.
        packed: q, k, v and, with a backward, grad_out.
        device: where.
        descales: q_descale, k_descale, v_descale, float32 (batch, heads_kv); 1 where missing.

    """
    device = torch.device(device)
    cache = workload.cache
    starts_q, starts_k = views.starts(workload.seqlens_q), views.starts(workload.seqlens_k)
    shapes = {name: workload.shape(name) for name in ("q", "k", "v")}
    made = {
        name: guards.allocate(shape, workload.stride(name), packed[name].dtype, device)
        for name, shape in shapes.items()
    }
    if cache is not None and cache.append:
        for name in ("k", "v"):
            shape = workload.shape(f"{name}_new")
            made[f"{name}_new"] = _guarded(shape, packed[name].dtype, device)
    if workload.has_backward:
        made["grad_out"] = _guarded(workload.shape("out"), packed["grad_out"].dtype, device)
    rewrite(workload, Tensors(**made), packed)
    if workload.is_packed:
        made["cu_seqlens_q"] = torch.tensor(starts_q, dtype=torch.int32, device=device)
        if cache is None:
            made["cu_seqlens_k"] = torch.tensor(starts_k, dtype=torch.int32, device=device)
    if cache is not None:
        made["seqused_k"] = torch.tensor(workload.seqlens_k, dtype=torch.int32, device=device)
        if cache.page_size is not None:
            table = views.page_rows(workload)
            made["page_table"] = torch.tensor(table, dtype=torch.int32, device=device)
    slopes = workload.alibi_slopes()
    if slopes is not None:
        made["alibi_slopes"] = torch.tensor(slopes, dtype=torch.float32, device=device)
    if workload.fp8 is not None:
        ones = torch.ones((workload.batch, workload.heads_kv), device=device)
        made |= {f"{name}_descale": ones for name in ("q", "k", "v")} | dict(descales or {})
    return Tensors(**made)


def rewrite(workload: Workload, tensors: Tensors, packed: Mapping[str, torch.Tensor]) -> None:
    """Write packed values into tensors of `assemble`, in place; a cache is as before the append."""
    tensors.q.copy_(_unpacked(workload, packed["q"]))
    for name, stored, new in (
        ("k", tensors.k, tensors.k_new),
        ("v", tensors.v, tensors.v_new),
    ):
        if workload.cache is None:
            stored.copy_(_unpacked(workload, packed[name]))
            continue
        guards.poison(stored)
        _fill_cache(workload, stored, packed[name])
        if new is not None:
            count, ends = new.shape[1], views.starts(workload.seqlens_k)[1:]
            for b, end in enumerate(ends):
                new[b].copy_(packed[name][end - count : end])
    if tensors.grad_out is not None:
        tensors.grad_out.copy_(_unpacked(workload, packed["grad_out"]))


def digests(tensors: Tensors) -> dict[str, str]:
    """Return the SHA-256 of every tensor given, by its name."""
    named = ((f.name, getattr(tensors, f.name)) for f in dataclasses.fields(tensors))
    return digest_all({name: tensor for name, tensor in named if tensor is not None})


def unchanging(workload: Workload, tensors: Tensors) -> dict[str, tuple[int, int]]:
    """Fingerprint what no call may change: all inputs, a cache without the places of the append."""
    named = {f.name: getattr(tensors, f.name) for f in dataclasses.fields(tensors)}
    cache = workload.cache
    if cache is not None and cache.append:
        for name in ("k", "v"):
            stored = named[name].clone()
            for b in range(workload.batch):
                keys = range(workload.seqlens_k[b] - cache.append, workload.seqlens_k[b])
                if cache.page_size is None:
                    guards.poison(stored[b, keys.start : keys.stop])
                else:
                    pages, slots = views.page_slots(workload, b, keys)
                    where = (pages.to(stored.device), slots.to(stored.device))
                    guards.as_integers(stored)[where] = guards.poison_bits(stored.dtype)
            named[name] = stored
    return {name: fingerprint(tensor) for name, tensor in named.items() if tensor is not None}


def appended(workload: Workload, tensors: Tensors) -> bool:
    """Say whether a cache holds k_new and v_new, bit for bit, where they belong; True without."""
    cache = workload.cache
    if cache is None or not cache.append:
        return True
    for stored, new in ((tensors.k, tensors.k_new), (tensors.v, tensors.v_new)):
        if new is None:
            return False
        for b in range(workload.batch):
            keys = range(workload.seqlens_k[b] - cache.append, workload.seqlens_k[b])
            bits = guards.as_integers(stored)
            if cache.page_size is None:
                found = bits[b, keys.start : keys.stop]
            else:
                pages, slots = views.page_slots(workload, b, keys)
                found = bits[pages.to(stored.device), slots.to(stored.device)]
            if not torch.equal(found, guards.as_integers(new[b])):
                return False
    return True


def fingerprint(tensor: torch.Tensor) -> tuple[int, int]:
    """Sum a tensor's bits, twice, with the place as an odd weight, modulo 2^64.

    Computed where the tensor is: copying gigabytes to the host for a SHA-256 takes longer than the
    call that is checked. In words of four bytes where they fill them, since a launch does this six
    to fourteen times. One changed word always shows, and words that change alike do not cancel: in
    words of eight bytes two changed signs could, since 2^63 is its own negative modulo 2^64. It is
    no defence against an adversary.
    """
    size = tensor.element_size()
    kind = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[size]
    flat = tensor.detach()
    rows = max(1, _MARK_CHUNK // max(1, flat[:1].numel() * flat.element_size()))
    sums = torch.zeros(2, dtype=torch.int64, device=tensor.device)
    place = 0
    for first in range(0, flat.shape[0] if flat.numel() else 0, rows):
        part = flat[first : first + rows].contiguous().view(kind).flatten()
        if size < 4 and part.numel() * size % 4 == 0:
            aligned = part.storage_offset() * size % 4 == 0
            part = (part if aligned else part.clone()).view(torch.int32)
        bits = part.to(torch.int64)
        weight = torch.arange(place, place + bits.numel(), device=tensor.device).mul_(2).add_(1)
        place += bits.numel()
        sums[0] += (bits * weight).sum()
        sums[1] += (bits.square().add_(bits) * weight.mul_(_ODD)).sum()
    low, high = sums.tolist()
    return low, high


def digest_all(named: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Return `digest` of each: several at once, since a core hashes 0.8 GB/s (an H200's host)."""
    with ThreadPoolExecutor(max_workers=4) as pool:
        return dict(zip(named, pool.map(digest, named.values()), strict=True))


def digest(tensor: torch.Tensor) -> str:
    """Return the SHA-256 of a tensor's logical elements, row-major, little-endian."""
    whole = hashlib.sha256()
    flat = tensor.detach()
    rows = max(1, _DIGEST_CHUNK // max(1, flat[:1].numel() * flat.element_size()))
    for first in range(0, flat.shape[0] if flat.numel() else 0, rows):
        local = flat[first : first + rows].contiguous().cpu()
        size = local.numel() * local.element_size()
        whole.update((ctypes.c_char * size).from_address(local.data_ptr()))
    return whole.hexdigest()


def guards_intact(tensors: Tensors) -> bool:
    """Say whether the memory round every floating-point input is as it was made."""
    named = (tensors.q, tensors.k, tensors.v, tensors.grad_out, tensors.k_new, tensors.v_new)
    return all(guards.intact(tensor) for tensor in named if tensor is not None)


def _values(
    distribution: str,
    name: str,
    shape: tuple[int, int, int],
    dtype: torch.dtype,
    device: torch.device,
    seed: int,
    stream: int,
) -> torch.Tensor:
    count = shape[0] * shape[1] * shape[2]
    tag = _TAGS[name]
    if distribution == "one_hot":
        value = 1.0 if name == "v" else _ONE_HOT_QK
        flat = generator.one_hot(
            shape[0] * shape[1],
            shape[2],
            value,
            dtype=dtype,
            device=device,
            seed=seed,
            stream=stream,
            tag=tag,
        )
        return flat.view(shape)
    if distribution not in ("normal", "normal_outliers", "large_negative"):
        msg = f"unknown distribution {distribution!r}"
        raise ValueError(msg)
    function = generator.normal_outliers if distribution == "normal_outliers" else generator.normal
    flat = function(count, dtype=dtype, device=device, seed=seed, stream=stream, tag=tag)
    if distribution == "large_negative" and name in ("q", "k"):
        flat = flat.abs_()
        if name == "k":
            flat.mul_(_LARGE_NEGATIVE_K)  # a power of two: exact
    return flat.view(shape)


def _descale(workload: Workload, name: str, packed: torch.Tensor) -> torch.Tensor:
    """Return float32 (batch, heads_kv): as declared, or max|x| / 448 of the group."""
    assert workload.fp8 is not None
    declared: tuple[float, ...] | None = getattr(workload.fp8, f"{name}_descale")
    shape = (workload.batch, workload.heads_kv)
    if declared is not None:
        values = torch.tensor(declared, dtype=torch.float32, device=packed.device)
        return values.expand(shape).contiguous()
    grouped = _by_kv_head(workload, packed).abs()
    if not grouped.numel():
        largest = grouped.new_zeros(shape)
    elif workload.fp8.granularity == "tensor":
        largest = grouped.amax().expand(shape)
    else:
        start = views.starts(workload.seqlens_q if name == "q" else workload.seqlens_k)
        zero = grouped.new_zeros(workload.heads_kv)
        largest = torch.stack(
            [
                grouped[start[b] : start[b + 1]].amax(dim=(0, 2))
                if start[b + 1] > start[b]
                else zero
                for b in range(workload.batch)
            ]
        )
    scaled = (largest.to(torch.float64) / _E4M3_MAX).to(torch.float32)
    return torch.where(scaled > 0, scaled, torch.ones_like(scaled))


def _quantise(
    workload: Workload, name: str, packed: torch.Tensor, descale: torch.Tensor
) -> torch.Tensor:
    """Divide by the descale of the token's sequence and head, clamp, round to e4m3."""
    seqlens = workload.seqlens_q if name == "q" else workload.seqlens_k
    lengths = torch.tensor(seqlens, device=packed.device)
    each = descale.to(torch.float64).repeat_interleave(lengths, dim=0)
    grouped = _by_kv_head(workload, packed).to(torch.float64)
    scaled = (grouped / each[:, :, None]).clamp_(-_E4M3_MAX, _E4M3_MAX)
    return scaled.to(torch.float8_e4m3fn).view(packed.shape)


def _by_kv_head(workload: Workload, packed: torch.Tensor) -> torch.Tensor:
    """View (tokens, heads, width) as (tokens, heads_kv, the rest); tokens may be none."""
    tokens, heads, width = packed.shape
    return packed.view(tokens, workload.heads_kv, heads * width // workload.heads_kv)


def _unpacked(workload: Workload, packed: torch.Tensor) -> torch.Tensor:
    if workload.is_packed:
        return packed
    tokens = packed.shape[0] // workload.batch
    dense = packed.view(workload.batch, tokens, *packed.shape[1:])
    return dense.transpose(1, 2) if workload.layout == "bhsd" else dense


def _guarded(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return guards.allocate(shape, torch.empty(shape, device="meta").stride(), dtype, device)


def _fill_cache(workload: Workload, stored: torch.Tensor, packed: torch.Tensor) -> None:
    """Write the keys that were there before the append, and TAIL behind each sequence.

    Pages that no sequence uses, and the places of the append, stay NaN.
    """
    assert workload.cache is not None
    start = views.starts(workload.seqlens_k)
    page_size = workload.cache.page_size
    for b in range(workload.batch):
        seqlen = workload.seqlens_k[b]
        if page_size is None:
            stored[b, seqlen:].fill_(TAIL)
        elif seqlen % page_size:
            last, first = views.page_slots(workload, b, range(seqlen - 1, seqlen))
            stored[int(last[0]), int(first[0]) + 1 :].fill_(TAIL)
        kept = workload.seqlens_k[b] - workload.cache.append
        rows = packed[start[b] : start[b] + kept]
        if workload.cache.page_size is None:
            stored[b, :kept].copy_(rows)
        else:
            pages, slots = views.page_slots(workload, b, range(kept))
            where = (pages.to(stored.device), slots.to(stored.device))
            # As integers: float8 has no index_put.
            guards.as_integers(stored)[where] = guards.as_integers(rows)
