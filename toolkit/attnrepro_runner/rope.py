"""Rotary position embedding, halves rotated (the convention of Llama checkpoints)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence


def tables(
    positions: Sequence[int], width: int, theta: float, dtype: torch.dtype, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cosine and sine (tokens, 1, width) of each token's position.

    Args:
        positions: one a token.
        width: of a head; even.
        theta: base of the frequencies.
        dtype: of the tables; they are computed in float64.
        device: where.

    """
    half = torch.arange(width // 2, dtype=torch.float64, device=device) * 2 / width
    angle = torch.tensor(positions, dtype=torch.float64, device=device)[:, None] * theta**-half
    both = torch.cat((angle, angle), dim=-1)[:, None, :]
    return both.cos().to(dtype), both.sin().to(dtype)


def rotate(x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
    """Rotate (tokens, heads, width)."""
    first, second = x.chunk(2, dim=-1)
    return x * cosine + torch.cat((-second, first), dim=-1) * sine
