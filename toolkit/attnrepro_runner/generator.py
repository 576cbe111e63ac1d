"""Random tensors from Philox4x32-10 by integer and table arithmetic.

Element e of a stream takes 16 bits of the words of counter e // 8 (word (e % 8) // 2, low half
first) and looks its value up in a table of bit patterns of the target dtype. No float operation
whose rounding could differ takes part: tables are built from the integers of `normaltable`, and
what is added (outliers) is exact in float64 and rounded by one IEEE conversion. So ISA, device,
thread count and chunking do not matter.
"""

from __future__ import annotations

import struct
from functools import lru_cache
from typing import TYPE_CHECKING

import torch

from attnrepro_runner.normaltable import FRACTION_BITS, INDEX_BITS, normal_table
from attnrepro_runner.philox import MASK32, MULTIPLIERS, ROUNDS, WEYL, key_of_seed

if TYPE_CHECKING:
    from collections.abc import Iterator

PER_COUNTER = 8
_OUTLIER_BELOW = (1 << 32) // 1000
"""A 32-bit word below this is an outlier: probability 0.001 within 2^-32."""
_OUTLIER_FACTOR = 10
# Counters in flight: on a CPU the int64 buffers of one chunk stay in the second-level cache of each
# thread; on a GPU a launch should have work.
_CHUNK_CPU = 1 << 16
_CHUNK_GPU = 1 << 22
# The third counter word is the stream, the fourth the tensor's tag plus one of these.
_PURPOSE_VALUE = 0
_PURPOSE_CHOICE = 1 << 8
_PURPOSE_OUTLIER = 2 << 8


def philox_words(
    block: torch.Tensor, stream: int, tag: int, seed: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the four 32-bit words of counters (block low, block high, stream, tag).

    Args:
        block: int64 counter indices below 2^63, any shape.
        stream: third counter word.
        tag: fourth counter word.
        seed: 64-bit key.

    Returns:
        Four int64 tensors of the shape of `block`, values below 2^32.

    """
    k0, k1 = key_of_seed(seed)
    c0, c1 = block & MASK32, block >> 32
    c2, c3 = torch.full_like(block, stream), torch.full_like(block, tag)
    for _ in range(ROUNDS):
        # int64 products wrap modulo 2^64, so their bits are those of the unsigned products.
        product0, product1 = c0.mul_(MULTIPLIERS[0]), c2.mul_(MULTIPLIERS[1])
        c0 = (product1 >> 32).bitwise_xor_(c1).bitwise_xor_(k0).bitwise_and_(MASK32)
        c2 = (product0 >> 32).bitwise_xor_(c3).bitwise_xor_(k1).bitwise_and_(MASK32)
        c1, c3 = product1, product0
        k0, k1 = (k0 + WEYL[0]) & MASK32, (k1 + WEYL[1]) & MASK32
    return c0, c1.bitwise_and_(MASK32), c2, c3.bitwise_and_(MASK32)


def normal(
    count: int, *, dtype: torch.dtype, device: torch.device, seed: int, stream: int, tag: int
) -> torch.Tensor:
    """Return `count` values of N(0, 1), exact in dtype (float32, bfloat16 or float16)."""
    table = _table(dtype, str(device))
    out = torch.empty(_padded(count), dtype=table.dtype, device=device)
    for first, block in _blocks(count, device):
        words = philox_words(block, stream, tag | _PURPOSE_VALUE, seed)
        indices = torch.empty((len(block), 4, 2), dtype=torch.int32, device=device)
        for w, word in enumerate(words):
            indices[:, w, 0] = word & 0xFFFF
            indices[:, w, 1] = word >> 16
        part = out[first * PER_COUNTER : (first + len(block)) * PER_COUNTER]
        torch.index_select(table, 0, indices.view(-1), out=part)
    return out[:count].view(dtype)


def normal_outliers(
    count: int, *, dtype: torch.dtype, device: torch.device, seed: int, stream: int, tag: int
) -> torch.Tensor:
    """Return N(0, 1) + Bernoulli(0.001) * N(0, 100), the mix of the FlashAttention-3 paper."""
    out = normal(count, dtype=dtype, device=device, seed=seed, stream=stream, tag=tag)
    fixed = torch.tensor(normal_table(), dtype=torch.int64, device=device)
    for first, block in _blocks(count, device):
        choice = torch.stack(philox_words(block, stream, tag | _PURPOSE_CHOICE, seed), dim=-1)
        extra = torch.stack(
            philox_words(block + (1 << 62), stream, tag | _PURPOSE_CHOICE, seed), -1
        )
        words = torch.cat((choice, extra), dim=-1).view(-1)
        where = (words < _OUTLIER_BELOW).nonzero().view(-1) + first * PER_COUNTER
        where = where[where < count]
        base = philox_words(where // PER_COUNTER, stream, tag | _PURPOSE_VALUE, seed)
        lane = where % PER_COUNTER
        word = torch.stack(base, dim=-1).gather(-1, (lane // 2)[:, None]).view(-1)
        index = (word >> (16 * (lane % 2))) & 0xFFFF
        other = philox_words(where, stream, tag | _PURPOSE_OUTLIER, seed)[0] & 0xFFFF
        # At most 51 * 2^40: exact in int64 and in float64.
        total = fixed[index] + _OUTLIER_FACTOR * fixed[other]
        value = (total.to(torch.float64) * 2.0**-FRACTION_BITS).to(torch.float32)
        out[where] = value.to(dtype)
    return out


def one_hot(
    rows: int,
    width: int,
    value: float,
    *,
    dtype: torch.dtype,
    device: torch.device,
    seed: int,
    stream: int,
    tag: int,
) -> torch.Tensor:
    """Return `rows` rows of `width` elements, one of them `value` and the others 0."""
    block = torch.arange(rows, dtype=torch.int64, device=device)
    word = philox_words(block, stream, tag | _PURPOSE_VALUE, seed)[0]
    out = torch.zeros((rows, width), dtype=dtype, device=device)
    out.scatter_(1, (word * width >> 32)[:, None], value)
    return out.view(-1)


def _blocks(count: int, device: torch.device) -> Iterator[tuple[int, torch.Tensor]]:
    chunk = _CHUNK_GPU if device.type == "cuda" else _CHUNK_CPU
    total = _padded(count) // PER_COUNTER
    for first in range(0, total, chunk):
        yield (
            first,
            torch.arange(first, min(first + chunk, total), dtype=torch.int64, device=device),
        )


def _padded(count: int) -> int:
    return -(-count // PER_COUNTER) * PER_COUNTER


@lru_cache(maxsize=16)
def _table(dtype: torch.dtype, device: str) -> torch.Tensor:
    """Bit patterns of the quantiles in dtype, as integers of its width."""
    values = [z * 2.0**-FRACTION_BITS for z in normal_table()]
    n = 1 << INDEX_BITS
    if dtype is torch.float16:
        packed, kind = struct.pack(f"<{n}e", *values), torch.int16
    elif dtype is torch.float32:
        packed, kind = struct.pack(f"<{n}f", *values), torch.int32
    elif dtype is torch.bfloat16:
        bits = struct.unpack(f"<{n}I", struct.pack(f"<{n}f", *values))
        # Round to nearest even on the upper 16 bits of the float32.
        halves = [(b + 0x7FFF + (b >> 16 & 1)) >> 16 for b in bits]
        packed, kind = struct.pack(f"<{n}H", *halves), torch.int16
    else:
        msg = f"no table for {dtype}"
        raise ValueError(msg)
    return torch.frombuffer(bytearray(packed), dtype=kind).to(device)
