"""Is a 32-byte string a sound Ed25519 public key (RFC 8032, section 5.1)?

OpenSSL takes any point on the curve. With a point of small order one signature verifies for many
messages, so such a key in a trust file would accept what nobody signed. A sound key is encoded
canonically, lies on the curve, and generates the subgroup of prime order L.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Final, TypeAlias

_P: Final = 2**255 - 19
_L: Final = 2**252 + 27742317777372353535851937790883648493
_D: Final = -121665 * pow(121666, -1, _P) % _P
_ROOT: Final = pow(2, (_P - 1) // 4, _P)

_Point: TypeAlias = tuple[int, int, int, int]  # extended coordinates: x = X/Z, y = Y/Z, xy = T/Z
_IDENTITY: Final[_Point] = (0, 1, 1, 0)


@lru_cache(maxsize=256)
def is_sound_key(encoded: bytes) -> bool:
    """Whether the bytes encode, canonically, a point of prime order. About 2 ms."""
    point = _decode(encoded)
    if point is None or _is_identity(point):
        return False
    return _is_identity(_multiply(_L, point))


def _decode(encoded: bytes) -> _Point | None:
    if len(encoded) != 32:
        return None
    number = int.from_bytes(encoded, "little")
    sign, y = number >> 255, number & (2**255 - 1)
    if y >= _P:
        return None
    square = (y * y - 1) * pow(_D * y * y + 1, -1, _P) % _P
    x = pow(square, (_P + 3) // 8, _P)
    if (x * x - square) % _P:
        x = x * _ROOT % _P
    if (x * x - square) % _P or (x == 0 and sign):
        return None
    if x & 1 != sign:
        x = _P - x
    return x, y, 1, x * y % _P


def _add(first: _Point, second: _Point) -> _Point:
    a = (first[1] - first[0]) * (second[1] - second[0]) % _P
    b = (first[1] + first[0]) * (second[1] + second[0]) % _P
    c = 2 * first[3] * second[3] * _D % _P
    d = 2 * first[2] * second[2] % _P
    e, f, g, h = b - a, d - c, d + c, b + a
    return e * f % _P, g * h % _P, f * g % _P, e * h % _P


def _multiply(scalar: int, point: _Point) -> _Point:
    result = _IDENTITY
    while scalar:
        if scalar & 1:
            result = _add(result, point)
        point = _add(point, point)
        scalar >>= 1
    return result


def _is_identity(point: _Point) -> bool:
    return point[0] % _P == 0 and (point[1] - point[2]) % _P == 0
