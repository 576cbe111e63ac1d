"""Quantiles of the normal distribution as integers, computed with integers.

Entry k of the table is the (2k + 1) / 2^17 quantile, k = 0..2^16 - 1, in units of 2^-40. The upper
half is marched from zero in fixed point: each step solves

    Phi(z + h) - Phi(z) = 2^-16

by Newton's method on the Taylor series of the density at z. No float takes part, so every machine
gets the same integers; their digest is pinned, and an interpreter that computes others is refused.
"""

from __future__ import annotations

import hashlib
import struct
from functools import lru_cache

INDEX_BITS = 16
FRACTION_BITS = 40
SHA256 = "86e0f9307c5b509b2cb8aa7657ea54058ebf08d58d4c550833279dcb210bfd4a"
"""Of the table as little-endian int64."""

_BITS = 96
_ONE = 1 << _BITS
_TOLERANCE = 1 << 16
# floor(2^96 / sqrt(2 pi)), from isqrt of the rational 2^192 / (2 pi) with pi to 40 digits.
_DENSITY_AT_ZERO = 31607463825455920808620519744


@lru_cache(maxsize=1)
def normal_table() -> tuple[int, ...]:
    """Return the 65,536 quantiles in units of 2^-40, ascending.

    Raises:
        RuntimeError: this interpreter's integer arithmetic gives another table.

    """
    half = _upper_half(1 << (INDEX_BITS - 1))
    table = (*(-z for z in reversed(half)), *half)
    found = hashlib.sha256(struct.pack(f"<{len(table)}q", *table)).hexdigest()
    if found != SHA256:
        msg = f"normal table has digest {found}, not {SHA256}: integer arithmetic is broken here"
        raise RuntimeError(msg)
    return table


def _upper_half(count: int) -> list[int]:
    z, density = 0, _DENSITY_AT_ZERO
    step = _ONE >> INDEX_BITS
    drop = _BITS - FRACTION_BITS
    half = []
    for k in range(count):
        h = _solve(z, density, step // 2 if k == 0 else step)
        density = density * _exp_of_minus(_mul(z, h) + _mul(h, h) // 2) >> _BITS
        z += h
        half.append((z + (1 << (drop - 1))) >> drop)
    return half


def _solve(z: int, density: int, area: int) -> int:
    """Return h with Phi(z + h) - Phi(z) = area; all in units of 2^-96."""
    u = (area << _BITS) // density
    square = _mul(u, u)
    h = u + _mul(z, square) // 2 + _mul(2 * _mul(z, z) + _ONE, _mul(square, u)) // 6
    while True:
        error = _mul(density, _relative_area(z, h)) - area
        slope = _mul(density, _exp_of_minus(_mul(z, h) + _mul(h, h) // 2))
        correction = (error << _BITS) // slope
        h -= correction
        if abs(correction) < _TOLERANCE:
            return h


def _relative_area(z: int, h: int) -> int:
    """Integral over t = 0..h of exp(-z t - t^2 / 2), by its Taylor series in h.

    The coefficients obey c[n + 1] = -(z c[n] + c[n - 1]) / (n + 1); a[n] = c[n] h^n here.
    """
    zh, hh = _mul(z, h), _mul(h, h)
    before, term, total, n = 0, _ONE, _ONE, 0
    while abs(term) > 1 or abs(before) > 1:
        before, term = term, -(_mul(zh, term) + _mul(hh, before)) // (n + 1)
        n += 1
        total += term // (n + 1)
    return _mul(h, total)


def _exp_of_minus(x: int) -> int:
    """exp(-x) for x of a few tenths, by its series."""
    term, total, n = _ONE, _ONE, 0
    while abs(term) > 1:
        n += 1
        term = -_mul(x, term) // n
        total += term
    return total


def _mul(a: int, b: int) -> int:
    return a * b >> _BITS
