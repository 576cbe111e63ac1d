"""Set probes: exactly which keys and values each query reads, as hashes.

V side: q = k = 0 makes all weights equal, and V = I in blocks of keys shows them. Each (sequence,
KV head) holds its own power of two, so that the weight also names the value head and page it came
from. K side: each key's channels hold the bits of its index, and of its (sequence, head) against
the parity of the index; a query that asks for one bit attends the keys whose K row has it.
Expectations come from the semantics module alone.
"""

from __future__ import annotations

import hashlib
import math
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from attnrepro_runner import views

if TYPE_CHECKING:
    from collections.abc import Mapping

    from attnrepro_runner.backends.base import Outputs
    from attnrepro_runner.bench import ProbeBench
    from attnrepro_runner.semantics import Workload

# Sources hold 2^-4 .. 2^7: normal numbers of every dtype, e4m3 included.
_FIRST_EXPONENT = -4
_NOTHING = -100
_NAN = -101
_LOGIT = 14.0
"""A key that has the asked bit stands this far above and one without it this far below zero."""


@dataclass(frozen=True, kw_only=True)
class SetProbe:
    """Hash of what was read against hash of what the manifest says."""

    expected: str
    observed: str
    first_difference: str | None

    @property
    def equal(self) -> bool:
        """Whether both hashes agree."""
        return self.expected == self.observed

    def to_json(self) -> dict[str, object]:
        """Return the `set_probe` object of a result document."""
        return {
            "expected": self.expected,
            "observed": self.observed,
            "equal": self.equal,
            "first_difference": self.first_difference,
        }


Grid = dict[tuple[int, int], torch.Tensor]
"""(sequence, query head) to int64 (seqlen_q, seqlen_k), the number of what was read there."""


def probe_values(bench: ProbeBench, repeats: int) -> tuple[SetProbe, Outputs]:
    """Show which values each query reads, and from which sequence and head.

    Args:
        bench: the backend's.
        repeats: calls whose readings are joined, where dropout hides some.

    Returns:
        The probe, and the outputs of its last call (whose LSE counts keys).

    """
    workload = bench.workload
    amount = torch.pow(2.0, bench.source_ids() + float(_FIRST_EXPONENT))
    zero_q, zero_k = torch.zeros_like(bench.packed["q"]), torch.zeros_like(bench.packed["k"])
    observed: Grid = {}
    for _ in range(repeats):
        weights, outputs = bench.weights(amount, q=zero_q, k=zero_k)
        for (b, h), found in weights.items():
            reading = _sources(found, workload, b)
            if (b, h) in observed:
                reading = torch.maximum(observed[b, h], reading)
            observed[b, h] = reading
    expected = {}
    for b, h in observed:
        number = b * workload.heads_kv + workload.kv_head(h)
        mask = views.attended(workload, b)
        expected[b, h] = _mark_empty(torch.where(mask, number, _NOTHING), workload, b)
    return compare(expected, observed), outputs


def probe_keys(bench: ProbeBench) -> SetProbe:
    """Show which K row each query reads where it reads a value."""
    workload = bench.workload
    index, source = bench.key_index(), bench.source_ids()
    bits_of_index = max(1, (max(*workload.seqlens_k, 1) - 1).bit_length())
    bits_of_source = max(1, (workload.batch * workload.heads_kv - 1).bit_length())
    # (tokens_k, heads_kv, bits)
    patterns = [(index >> bit & 1)[:, None].expand_as(source) for bit in range(bits_of_index)]
    patterns += [(source >> bit & 1) ^ (index & 1)[:, None] for bit in range(bits_of_source)]
    width = workload.head_dim
    step = _amplitude(workload)
    ones = torch.ones_like(source)
    observed = _empty_grid(workload)
    expected = _empty_grid(workload)
    for first in range(0, len(patterns), width):
        group = patterns[first : first + width]
        k = torch.zeros_like(bench.packed["k"], dtype=torch.float32)
        for channel, pattern in enumerate(group):
            k[:, :, channel] = (2.0 * pattern - 1.0) * step
        for channel, pattern in enumerate(group):
            q = torch.zeros_like(bench.packed["q"], dtype=torch.float32)
            q[:, :, channel] = step
            weights, _ = bench.weights(ones, q=q, k=k)
            place = 1 << (first + channel)
            for (b, h), found in weights.items():
                observed[b, h] += place * _most_attended(found).long()
                expected[b, h] += place * _asked(workload, pattern, b, h).long()
    return compare(expected, observed)


def probe_count(bench: ProbeBench, outputs: Outputs, empty_row_lse: float) -> SetProbe | None:
    """Count each row's keys by its LSE under q = k = 0; None where the call returns none."""
    if outputs.lse is None:
        return None
    workload = bench.workload
    slopes = workload.alibi_slopes()
    lse = outputs.lse.to("cpu", torch.float64)
    expected, observed = {}, {}
    for b in range(workload.batch):
        mask = views.attended(workload, b)
        count = mask.sum(-1)
        for h in range(workload.heads_q):
            effective = mask.double()
            if slopes is not None:
                effective = effective * torch.exp(-slopes[h] * _distance(workload, b))
            total = effective.sum(-1)
            row = views.lse_row(lse, workload, b, h)
            seen = (row.exp() * count / total).round().nan_to_num(_NAN, _NAN, _NAN).long()
            observed[b, h] = torch.where((row == empty_row_lse) & (count == 0), 0, seen)[:, None]
            expected[b, h] = count[:, None]
    return compare(expected, observed)


def compare(expected: Grid, observed: Grid) -> SetProbe:
    """Hash both grids and name the first place where they differ."""
    first = None
    for (b, h), wanted in expected.items():
        wrong = (wanted != observed[b, h]).nonzero()
        if len(wrong):
            i, j = (int(x) for x in wrong[0])
            seen, asked = int(observed[b, h][i, j]), int(wanted[i, j])
            first = (
                f"batch {b}, head {h}, query {i}, key {j}: read {_name(seen)}, not {_name(asked)}"
            )
            break
    return SetProbe(expected=_hash(expected), observed=_hash(observed), first_difference=first)


def _name(number: int) -> str:
    return {_NOTHING: "nothing", _NAN: "NaN"}.get(number, str(number))


def _hash(grid: Mapping[tuple[int, int], torch.Tensor]) -> str:
    """SHA-256 over (sequence, head, rows, columns) and the row-major int64 of each grid."""
    whole = hashlib.sha256()
    for (b, h), values in sorted(grid.items()):
        flat = values.contiguous().view(-1).tolist()
        whole.update(struct.pack("<4q", b, h, *values.shape))
        whole.update(struct.pack(f"<{len(flat)}q", *flat))
    return whole.hexdigest()


def _sources(found: torch.Tensor, workload: Workload, b: int) -> torch.Tensor:
    """Turn weights times amounts into source numbers."""
    missing = found.isnan()
    present = found.nan_to_num(0.0) > 0
    kept = 1.0 if workload.dropout is None else 1 / (1 - workload.dropout.p)
    count = present.sum(-1, keepdim=True).clamp_min(1)
    if workload.dropout is not None:
        # Dropped weights still count in the softmax.
        count = views.attended(workload, b).sum(-1, keepdim=True).clamp_min(1)
    amount = torch.where(present, found.nan_to_num(1.0) * count / kept, 1.0)
    number = amount.log2().round().long() - _FIRST_EXPONENT
    return torch.where(missing, _NAN, torch.where(present, number, _NOTHING))


def _mark_empty(expected: torch.Tensor, workload: Workload, b: int) -> torch.Tensor:
    """Under masked_rows nan, a row that attends nothing is NaN in every column."""
    if workload.mask.masked_rows == "nan":
        for i in range(workload.seqlens_q[b]):
            if workload.is_empty_row(b, i):
                expected[i] = _NAN
    return expected


def _most_attended(weights: torch.Tensor) -> torch.Tensor:
    """Keys whose weight is more than half of the row's greatest."""
    if not weights.numel():
        return torch.zeros_like(weights, dtype=torch.bool)
    top = weights.nan_to_num(0.0).amax(-1, keepdim=True)
    return (weights > 0.5 * top) & (top > 0)


def _asked(workload: Workload, pattern: torch.Tensor, b: int, h: int) -> torch.Tensor:
    """Keys that a query for one bit attends most: those that have it, or all where none has."""
    start = views.starts(workload.seqlens_k)
    bit = pattern[start[b] : start[b + 1], workload.kv_head(h)].cpu().bool()
    mask = views.attended(workload, b)
    having = mask & bit[None, :]
    return torch.where(having.any(-1, keepdim=True), having, mask)


def _amplitude(workload: Workload) -> float:
    """Entry of q and k whose product is _LOGIT after scaling: a power of two, exact everywhere."""
    root = math.sqrt(_LOGIT / workload.scale_value)
    return 2.0 ** math.ceil(math.log2(root))


def _distance(workload: Workload, b: int) -> torch.Tensor:
    i = torch.arange(workload.seqlens_q[b])[:, None] + workload.offset(b)
    return (i - torch.arange(workload.seqlens_k[b])[None, :]).abs().double()


def _empty_grid(workload: Workload) -> Grid:
    return {
        (b, h): torch.zeros((workload.seqlens_q[b], workload.seqlens_k[b]), dtype=torch.int64)
        for b in range(workload.batch)
        for h in range(workload.heads_q)
    }
