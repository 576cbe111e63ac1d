from __future__ import annotations

import hashlib
import struct
from math import erf, sqrt

import torch
from hypothesis import given
from hypothesis import strategies as st

from attnrepro_runner import generator, normaltable
from attnrepro_runner.philox import MASK32, philox4x32

WORD = st.integers(0, MASK32)


def test_known_answers_of_random123() -> None:
    assert philox4x32((0, 0, 0, 0), (0, 0)) == (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)
    assert philox4x32((MASK32,) * 4, (MASK32,) * 2) == (
        0x408F276D,
        0x41C83B0E,
        0xA20BC7C6,
        0x6D5451FD,
    )
    # The digits of pi, as in Random123's kat_vectors.
    assert philox4x32(
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0)
    ) == (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)


@given(
    low=WORD,
    high=st.integers(0, (1 << 31) - 1),
    stream=WORD,
    tag=WORD,
    seed=st.integers(0, 2**64 - 1),
)
def test_tensor_form_is_the_scalar_form(
    low: int, high: int, stream: int, tag: int, seed: int
) -> None:
    words = generator.philox_words(torch.tensor([low | high << 32]), stream, tag, seed)
    expected = philox4x32((low, high, stream, tag), (seed & MASK32, seed >> 32))
    assert tuple(int(w) for w in words) == expected


def test_normal_table_holds_rounded_quantiles() -> None:
    table = normaltable.normal_table()
    packed = struct.pack(f"<{len(table)}q", *table)
    assert hashlib.sha256(packed).hexdigest() == normaltable.SHA256
    assert list(table) == sorted(set(table))
    assert [-z for z in reversed(table)] == list(table)
    for k in (32768, 32769, 40000, 50000, 60000, 65000, 65534, 65535):
        z = table[k] * 2.0**-40
        # Phi(z) in double precision, away from the cancelling tail.
        assert abs((1 + erf(z / sqrt(2))) / 2 - (2 * k + 1) / 2**17) < 1e-12
