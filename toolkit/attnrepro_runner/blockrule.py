"""The per-block rule: max|x - ref| <= m * max|low - ref| + c * ulp(max|ref|) in every block.

One global maximum is blind in long rows, where early rows have few keys and large values: a kernel
that drops 64 keys for half the rows of 16k passes it, and fails here.

What a kernel's float32 sums leave of their largest terms is allowed besides: see terms.py.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

# Precision in bits and least normal exponent.
_FORMATS = {
    torch.float32: (24, -126),
    torch.bfloat16: (8, -126),
    torch.float16: (11, -14),
    torch.float8_e4m3fn: (4, -6),
}

TERM_ULPS = 2
"""Units in the last place of float32, of a term of a sum, that what is summed may be off."""
RUNNING_SUM = 0.5
"""Roundings that a running sum of n terms may be off, in sqrt(n): it errs by about sqrt(n) of them
(N. J. Higham and T. Mary, A new approach to probabilistic rounding error analysis, 2019)."""


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
    of_terms: float = 0.0
    """Share of the largest term by which a kernel's approximate function may be off."""
    term_ulps: float = TERM_ULPS
    """Float32 units in the last place of the terms that are allowed besides."""
    absolute: float = 0.0
    """What any value may be off besides."""


@dataclass(frozen=True, kw_only=True)
class Expected:
    """What rows of one tensor should hold, for several (sequence, head), and how nearly.

    Blocks are the rule's, of rows; sizes and limits are of each block.
    """

    values: torch.Tensor
    """float64 (pairs, rows, width)."""
    rows: torch.Tensor
    """int64 (rows): index of each in its sequence."""
    exact: torch.Tensor | None
    """bool (rows): rows that must be zero, exactly; None where there are none."""
    rule: Rule
    blocks: tuple[int, ...]
    """Number of each block of `rows` in its sequence."""
    size: torch.Tensor
    """max|ref|, float64 (pairs, blocks)."""
    unit: torch.Tensor
    """Its ulp in the rule's dtype."""
    low: torch.Tensor
    """max|low - ref|."""
    limit: torch.Tensor
    """Of max|x - ref|."""
    mean_limit: torch.Tensor | None
    """Of mean|x - ref|, where the rule has one."""

    @classmethod
    def of(
        cls,
        rule: Rule,
        high: torch.Tensor,
        low: torch.Tensor,
        rows: torch.Tensor,
        *,
        exact: torch.Tensor | None = None,
        terms: torch.Tensor | None = None,
    ) -> Expected:
        """Compare the low computation with the reference once.

        Args:
            rule: of this tensor.
            high: the reference, float64 (pairs, rows, width).
            low: in the tested dtype.
            rows: index of each row, on the CPU; whole blocks, ascending, the last perhaps short.
            exact: rows that must be zero, bool (rows) on the CPU; None is none.
            terms: magnitude of what each row's float32 sums add, (pairs, rows), see terms.py; None
                where it does not count.

        """
        difference = _distance(low, high)
        finite = high.abs().masked_fill_(high.isinf(), 0.0)
        size, error = (_greatest(_largest(x), rule.block) for x in (finite, difference))
        unit = ulp(size, rule.dtype)
        slack = rule.ulps * unit + rule.absolute
        if terms is not None:
            allowed = rule.term_ulps * ulp(terms, torch.float32) + rule.of_terms * terms
            slack += _greatest(allowed, rule.block)
        mean_limit = None
        if rule.mean_multiplier is not None:
            mean_limit = rule.mean_multiplier * _mean(difference.mean(-1), rule.block) + slack
        return cls(
            values=high,
            rows=rows.to(high.device),
            exact=exact.to(high.device) if exact is not None and bool(exact.any()) else None,
            rule=rule,
            blocks=tuple((rows[:: rule.block] // rule.block).tolist()),
            size=size,
            unit=unit,
            low=error,
            limit=rule.multiplier * error + slack,
            mean_limit=mean_limit,
        )

    def bytes(self) -> int:
        """Memory held."""
        return self.values.numel() * 8


@dataclass(kw_only=True)
class Tally:
    """Errors of one tensor, over all blocks seen."""

    rule: Rule
    ok: bool = True
    failed: bool = False
    """As a whole: there is nothing to compare."""
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

    def add(
        self, found: torch.Tensor, expected: Expected, pairs: Sequence[tuple[int, int]]
    ) -> None:
        """Judge rows, and read the verdict from the device once.

        Args:
            found: (pairs, rows, width), at least one element.
            expected: of them.
            pairs: (sequence, head) of each, by which a violation's place is told. Of equally bad
                blocks the first is told, whatever the order of calls.

        """
        block = self.rule.block
        actual = found.to(torch.float64)
        difference = _distance(actual, expected.values)
        squares = difference.square().nansum()
        # NaN is infinitely wrong.
        difference.nan_to_num_(nan=torch.inf, posinf=torch.inf)
        worst = _largest(difference)
        if expected.exact is not None:
            wrong_zero = expected.exact & _largest(actual != 0)
            worst = worst.masked_fill(wrong_zero, torch.inf)
        error = _greatest(worst, block)
        ratio = _ratio(error, expected.limit)
        if expected.mean_limit is not None:
            means = _mean(difference.mean(-1), block)
            ratio = torch.maximum(ratio, _ratio(means, expected.mean_limit))
        place = ratio.argmax()
        nan, squared, value, at, *maxima = torch.stack(
            [
                actual.isnan().any().to(torch.float64),
                squares,
                ratio.view(-1)[place],
                place.to(torch.float64),
                error.max(),
                expected.low.max(),
                (error / expected.unit).max(),
                _ratio(error, expected.size).max(),
            ]
        ).tolist()
        pair, number = divmod(int(at), ratio.shape[1])
        self._rank(value, (*pairs[pair], expected.blocks[number]))
        self.nan |= bool(nan)
        self._squares += squared
        self._count += difference.numel()
        self.max_abs, self.max_abs_low, self.max_ulps, self.max_rel = map(
            max, (self.max_abs, self.max_abs_low, self.max_ulps, self.max_rel), maxima
        )

    def _rank(self, ratio: float, place: tuple[int, int, int]) -> None:
        self.ok &= ratio <= 1
        if ratio > self.worst_ratio or (ratio == self.worst_ratio > 0 and place < self.worst_block):
            self.worst_ratio, self.worst_block = ratio, place

    def fail(self, note: str) -> None:
        """Fail as a whole, for a reason that is no number."""
        self.ok, self.failed, self.worst_ratio, self.max_abs = False, True, math.inf, math.inf
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


def _distance(x: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """Return |x - reference| in float64; equal infinities, as of empty rows, differ by nothing."""
    x = x.to(torch.float64)
    return (x - reference).abs_().masked_fill_(x == reference, 0.0)


def _largest(x: torch.Tensor) -> torch.Tensor:
    return x.amax(-1) if x.shape[-1] else x.new_zeros(x.shape[:-1])


def _ratio(value: torch.Tensor, limit: torch.Tensor) -> torch.Tensor:
    """Return value / limit, with 0 / 0 = 0; infinite where both are."""
    ratio = (value / limit).masked_fill_(value == 0, 0.0)
    return ratio.nan_to_num_(nan=torch.inf, posinf=torch.inf)


def _greatest(values: torch.Tensor, block: int) -> torch.Tensor:
    """Return the maximum in each block of rows: (pairs, rows), not negative, to (pairs, blocks)."""
    return _by_block(values, block).amax(-1)


def _mean(values: torch.Tensor, block: int) -> torch.Tensor:
    """Return the mean over each block of rows, of which the last may be short."""
    counts = _by_block(torch.ones_like(values[:1]), block).sum(-1)
    return _by_block(values, block).sum(-1) / counts


def _by_block(values: torch.Tensor, block: int) -> torch.Tensor:
    """Cut (pairs, rows) into (pairs, blocks, block), filled with zeros."""
    short = -values.shape[1] % block
    padded = torch.nn.functional.pad(values, (0, short)) if short else values
    return padded.view(len(values), -1, block)
