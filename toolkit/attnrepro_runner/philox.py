"""Philox4x32-10 on plain integers, and a permutation drawn from it.

Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC 2011). The known
answers of the authors' Random123 library are in the tests. The tensor form is in `generator`; this
one is the definition it is checked against, and serves where a host without torch needs the same
numbers (page tables).
"""

from __future__ import annotations

MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)
ROUNDS = 10
MASK32 = 0xFFFFFFFF


def philox4x32(
    counter: tuple[int, int, int, int], key: tuple[int, int]
) -> tuple[int, int, int, int]:
    """Return the four 32-bit words of one counter under one key."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        product0, product1 = MULTIPLIERS[0] * c0, MULTIPLIERS[1] * c2
        c0, c1, c2, c3 = (
            (product1 >> 32) ^ c1 ^ k0,
            product1 & MASK32,
            (product0 >> 32) ^ c3 ^ k1,
            product0 & MASK32,
        )
        k0, k1 = (k0 + WEYL[0]) & MASK32, (k1 + WEYL[1]) & MASK32
    return c0, c1, c2, c3


def key_of_seed(seed: int) -> tuple[int, int]:
    """Return the key of a 64-bit seed: low word, high word."""
    return seed & MASK32, (seed >> 32) & MASK32


def permutation(n: int, seed: int) -> tuple[int, ...]:
    """Shuffle 0..n-1 (Fisher-Yates from the end, one counter a step).

    Step i takes floor(w (i + 1) / 2^64) of the counter's first two words w; the bias is below
    n / 2^64.
    """
    key = key_of_seed(seed)
    items = list(range(n))
    for i in range(n - 1, 0, -1):
        low, high, _, _ = philox4x32((i & MASK32, i >> 32, 0, 0), key)
        j = ((high << 32 | low) * (i + 1)) >> 64
        items[i], items[j] = items[j], items[i]
    return tuple(items)
