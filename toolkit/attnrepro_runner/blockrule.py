"""The per-block rule: max|x - ref| <= m * max|low - ref| + c * ulp(max|ref|) in every block.

One global maximum is blind in long rows, where early rows have few keys and large values: a kernel
that drops 64 keys for half the rows of 16k passes it, and fails here.

An LSE, a dQ and a dK may be small because large terms cancel (with one key dQ is 0), and then keep
the float32 rounding of those terms: two units of the largest are allowed besides.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch

# Precision in bits and least normal exponent.
_FORMATS = {
    torch.float32: (24, -126),
    torch.bfloat16: (8, -126),
    torch.float16: (11, -14),
    torch.float8_e4m3fn: (4, -6),
}

_TERM_ULPS = 2


def ulp(magnitude: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the spacing of dtype's numbers at each magnitude (float64, not negative)."""
    bits, least = _FORMATS[dtype]
    _, exponent = torch.frexp(magnitude)
    exponent = torch.where(magnitude > 0, exponent - 1, least).clamp_min(least) - (bits - 1)
    return torch.pow(2.0, exponent.to(torch.float64))


@dataclass(frozen=True, kw_only=True)
class Rule:
    """Limits of one tensor."""

    block: int
    multiplier: float
    """m."""
    ulps: int
    """c."""
    dtype: torch.dtype
    """In which ulps are counted."""
    mean_multiplier: float | None = None
    """Where given, also mean|x - ref| <= this * mean|low - ref| + c * ulp(max|ref|)."""


@dataclass(frozen=True, kw_only=True)
class Expected:
    """What rows of one tensor should hold, for several heads of one sequence."""

    values: torch.Tensor
    """float64 (heads, rows, width)."""
    low_errors: torch.Tensor
    """max|low - ref| of each row, float64 (heads, rows)."""
    low_means: torch.Tensor
    """mean|low - ref| of each row."""
    rows: torch.Tensor
    """int64 (rows): index of each in its sequence."""
    exact: torch.Tensor
    """bool (rows): rows that must be zero, exactly."""
    slack: torch.Tensor
    """Rounding of terms that cancel, float64 (heads, rows)."""

    @classmethod
    def of(
        cls,
        high: torch.Tensor,
        low: torch.Tensor,
        rows: torch.Tensor,
        exact: torch.Tensor,
        terms: torch.Tensor | None = None,
    ) -> Expected:
        """Compare the low computation with the reference once.

        Args:
            high: the reference, (heads, rows, width).
            low: in the tested dtype.
            rows: index of each row.
            exact: rows that must be zero.
            terms: largest term of each row's sums, (heads, rows); None where none cancels.

        """
        difference = (low.to(torch.float64) - high).abs()
        # -inf on both sides of an empty row's LSE.
        difference = torch.where(low.to(torch.float64) == high, 0.0, difference)
        return cls(
            values=high,
            low_errors=_largest(difference),
            low_means=difference.mean(-1),
            rows=rows,
            exact=exact,
            slack=_TERM_ULPS * ulp(terms, torch.float32)
            if terms is not None
            else high.new_zeros(high.shape[:-1]),
        )

    def bytes(self) -> int:
        """Memory held."""
        return self.values.numel() * 8


@dataclass(kw_only=True)
class Tally:
    """Errors of one tensor, over all blocks seen."""

    rule: Rule
    ok: bool = True
    nan: bool = False
    worst_ratio: float = 0.0
    worst_block: tuple[int, int, int] = (0, 0, 0)
    max_abs: float = 0.0
    max_rel: float = 0.0
    max_ulps: float = 0.0
    max_abs_low: float = 0.0
    total_max_abs: float | None = None
    _squares: float = 0.0
    _count: int = 0
    _notes: list[str] = field(default_factory=list)

    def add(self, found: torch.Tensor, expected: Expected, b: int, heads: tuple[int, ...]) -> None:
        """Judge rows (heads, rows, width) of sequence b."""
        if expected.values.numel() == 0:
            return
        actual = found.to(torch.float64)
        missing = actual.isnan()
        self.nan |= bool(missing.any())
        # Equal infinities (the LSE of an empty row) differ by nothing.
        difference = torch.where(actual == expected.values, 0.0, (actual - expected.values).abs())
        difference = torch.where(missing, torch.inf, difference)
        self._squares += float(torch.where(missing, 0.0, difference).square().sum())
        self._count += difference.numel()
        wrong_zero = expected.exact[None, :, None] & (actual != 0)
        place, numbers = _blocks(expected.rows, self.rule.block)
        error = _by_block(_largest(torch.where(wrong_zero, torch.inf, difference)), place)
        low = _by_block(expected.low_errors, place)
        finite = torch.where(expected.values.isinf(), 0.0, expected.values.abs())
        size = _by_block(_largest(finite), place)
        unit = ulp(size, self.rule.dtype)
        slack = self.rule.ulps * unit + _by_block(expected.slack, place)
        ratio = _ratio(error, self.rule.multiplier * low + slack)
        if self.rule.mean_multiplier is not None:
            means = _by_block(difference.mean(-1), place, "mean")
            limit = self.rule.mean_multiplier * _by_block(expected.low_means, place, "mean") + slack
            ratio = torch.maximum(ratio, _ratio(means, limit))
        worst = int(ratio.argmax())
        value = float(ratio.view(-1)[worst])
        if value > self.worst_ratio:
            self.worst_ratio = value
            head, number = divmod(worst, ratio.shape[1])
            self.worst_block = (b, heads[head], int(numbers[number]))
        self.ok &= value <= 1
        self.max_abs = max(self.max_abs, float(error.max()))
        self.max_abs_low = max(self.max_abs_low, float(low.max()))
        self.max_ulps = max(self.max_ulps, float((error / unit).max()))
        self.max_rel = max(self.max_rel, float(_ratio(error, size).max()))

    def fail(self, note: str) -> None:
        """Fail as a whole, for a reason that is no number."""
        self.ok, self.worst_ratio, self.max_abs = False, math.inf, math.inf
        self._notes.append(note)

    def describe(self, name: str) -> str:
        """Say what is wrong, for a status reason."""
        if self._notes:
            return f"{name}: {'; '.join(self._notes)}"
        b, h, block = self.worst_block
        what = "NaN" if self.nan else f"{self.worst_ratio:.3g} times the allowed error"
        return f"{name}: {what} in batch {b}, head {h}, block {block} of {self.rule.block}"

    def to_json(self) -> dict[str, object]:
        """Return the result document's tensor_error."""
        rms = math.sqrt(self._squares / self._count) if self._count else 0.0
        return {
            "ok": self.ok,
            "worst_ratio": hex_float(self.worst_ratio),
            "worst_block": list(self.worst_block),
            "max_abs": hex_float(self.max_abs),
            "max_rel": hex_float(self.max_rel),
            "rms": hex_float(rms),
            "max_ulps": hex_float(self.max_ulps),
            "max_abs_low": hex_float(self.max_abs_low),
            "total_max_abs": None if self.total_max_abs is None else hex_float(self.total_max_abs),
            "nan": self.nan,
        }


def hex_float(value: float) -> str:
    """Return a real as a hexadecimal float; what is no number counts as infinite."""
    if math.isnan(value):
        return "inf"
    return value.hex() if math.isfinite(value) else str(value)


def _largest(x: torch.Tensor) -> torch.Tensor:
    return x.amax(-1) if x.shape[-1] else x.new_zeros(x.shape[:-1])


def _ratio(value: torch.Tensor, limit: torch.Tensor) -> torch.Tensor:
    """Return value / limit, with 0 / 0 = 0."""
    return torch.where(value == 0, 0.0, value / limit)


def _by_block(values: torch.Tensor, index: torch.Tensor, reduce: str = "amax") -> torch.Tensor:
    """Reduce over the rows of each block that occurs: (heads, rows) to (heads, blocks)."""
    out = values.new_zeros((values.shape[0], int(index[-1]) + 1))
    where = index.expand_as(values)
    return out.scatter_reduce_(1, where, values, reduce, include_self=False)


def _blocks(rows: torch.Tensor, block: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Number ascending rows by their block: (row to block's place, place to block)."""
    block_of = rows // block
    starts = torch.ones_like(block_of, dtype=torch.bool)
    starts[1:] = block_of[1:] != block_of[:-1]
    return starts.cumsum(0) - 1, block_of[starts]
