"""Dropout probes, and the mask that a call really used.

Under q = k = 0 and V = I the output shows every weight: n(1 - p) times it is 1 where it was kept.
Masks come from position, seed and offset, never from data, so the mask read out at one seed and
offset is the mask of any call with them; the oracle uses it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from attnrepro_runner import views
from attnrepro_runner.bench import ProbeBench
from attnrepro_runner.blockrule import hex_float

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from attnrepro_runner.backends.base import Backend
    from attnrepro_runner.semantics import Workload

Masks = dict[tuple[int, int], torch.Tensor]
"""(sequence, query head) to bool (seqlen_q, seqlen_k)."""

_SIGMAS = 6.0
"""Half width of the rate's interval: one honest run in 10^9 falls outside."""
_KEPT_TOLERANCE = 0.02


@dataclass(frozen=True, kw_only=True)
class DropoutProbe:
    """What the rules of dropout say of one backend."""

    rate: float
    """Share of attended weights that were dropped."""
    rate_ok: bool
    kept_value: float
    """Mean kept weight against an undropped one; 1 / (1 - p) is right."""
    kept_value_ok: bool
    next_call_differs: bool
    seed_repeats: bool
    backward_same: bool | None
    """None in phases without a backward."""
    weights: int

    @property
    def ok(self) -> bool:
        """Whether every rule holds."""
        return (
            self.rate_ok
            and self.kept_value_ok
            and self.next_call_differs
            and self.seed_repeats
            and self.backward_same is not False
        )

    def to_json(self) -> dict[str, object]:
        """Return the `dropout` object of a result document."""
        document: dict[str, object] = {
            "rate": hex_float(self.rate),
            "rate_ok": self.rate_ok,
            "kept_value": hex_float(self.kept_value),
            "kept_value_ok": self.kept_value_ok,
            "next_call_differs": self.next_call_differs,
            "seed_repeats": self.seed_repeats,
            "weights": self.weights,
        }
        if self.backward_same is not None:
            document["backward_same"] = self.backward_same
        return document


def probe_dropout(
    backend: Backend, options: Mapping[str, object], workload: Workload, device: torch.device
) -> DropoutProbe:
    """Check the rules of dropout.

    Args:
        backend: under test.
        options: of the subject.
        workload: small, with dropout.
        device: where.

    """
    assert workload.dropout is not None
    p = workload.dropout.p

    def fresh() -> ProbeBench:
        return ProbeBench(backend, options, workload, device)

    pairs = _all_pairs(workload)
    weights, again = (_read(fresh, workload, _exact, pairs) for _ in range(2))
    mask, repeated = _kept(weights), _kept(again)
    # One bound backend, two calls: its generator must move on.
    bench = fresh()
    first, second = (_kept(_one_block(bench, workload, pairs)) for _ in range(2))
    attended = kept = 0
    total = 0.0
    for (b, h), found in weights.items():
        allowed = torch.zeros_like(mask[b, h])
        for i in range(workload.seqlens_q[b]):
            lo, hi = workload.key_range(b, i)
            allowed[i, lo:hi] = True
        count = allowed.sum(-1, keepdim=True)
        attended += int(allowed.sum())
        kept += int((mask[b, h] & allowed).sum())
        total += float((found * count)[mask[b, h]].sum())
    rate = 1 - kept / max(attended, 1)
    value = total / max(kept, 1)
    bound = _SIGMAS * math.sqrt(p * (1 - p) / max(attended, 1))
    return DropoutProbe(
        rate=rate,
        rate_ok=abs(rate - p) <= bound,
        kept_value=value,
        kept_value_ok=abs(value * (1 - p) - 1) <= _KEPT_TOLERANCE,
        next_call_differs=not _same(first, second),
        seed_repeats=_same(mask, repeated),
        backward_same=_backward_same(fresh, workload, mask) if workload.has_backward else None,
        weights=attended,
    )


def read_mask(
    backend: Backend,
    options: Mapping[str, object],
    workload: Workload,
    device: torch.device,
    *,
    pairs: Sequence[tuple[int, int]],
) -> Callable[[int, int], torch.Tensor]:
    """Read the mask of the first call after `prepare`, as the oracle takes it.

    Costs a call of the whole workload for every head_dim_v keys, and seqlen_q * seqlen_k bytes a
    pair.

    Args:
        backend: under test.
        options: of the subject.
        workload: the benchmarked one, with dropout.
        device: where.
        pairs: (sequence, query head) whose masks will be asked for.

    """
    mask = _read(
        lambda: ProbeBench(backend, options, workload, device),
        workload,
        lambda found: found > 0,  # at once: weights of long rows would not fit
        pairs,
    )

    def keep(b: int, h: int) -> torch.Tensor:
        return mask[b, h]

    return keep


def _read(
    fresh: Callable[[], ProbeBench],
    workload: Workload,
    convert: Callable[[torch.Tensor], torch.Tensor],
    pairs: Sequence[tuple[int, int]],
) -> dict[tuple[int, int], torch.Tensor]:
    """Read weights under one seed and offset: a newly bound backend for each block of keys."""
    parts: dict[tuple[int, int], list[torch.Tensor]] = {pair: [] for pair in pairs}
    bench = fresh()
    for n, block in enumerate(bench.key_blocks()):
        if n:
            bench = fresh()
        for pair, found in _one_block(bench, workload, pairs, block).items():
            parts[pair].append(convert(found))
    return {
        (b, h): torch.cat(part, dim=1)[:, : workload.seqlens_k[b]] for (b, h), part in parts.items()
    }


def _one_block(
    bench: ProbeBench, workload: Workload, pairs: Sequence[tuple[int, int]], block: int = 0
) -> dict[tuple[int, int], torch.Tensor]:
    zero_q, zero_k = torch.zeros_like(bench.packed["q"]), torch.zeros_like(bench.packed["k"])
    values = bench.one_hot_values(block, torch.ones_like(bench.source_ids()))
    out = bench.call(q=zero_q, k=zero_k, v=values).out
    return {(b, h): views.query_rows(out, workload, b, h) for b, h in pairs}


def _exact(found: torch.Tensor) -> torch.Tensor:
    return found.to("cpu", torch.float64)


def _all_pairs(workload: Workload) -> list[tuple[int, int]]:
    return [(b, h) for b in range(workload.batch) for h in range(workload.heads_q)]


def _backward_same(fresh: Callable[[], ProbeBench], workload: Workload, mask: Masks) -> bool:
    """Read the mask that the backward used out of dV = (P * mask)^T dO, dO = I in row blocks."""
    width = workload.head_dim_v
    starts = views.starts(workload.seqlens_q)
    row = torch.cat([torch.arange(n) for n in workload.seqlens_q])
    group = workload.heads_q // workload.heads_kv
    for block in range(-(-max(workload.seqlens_q) // width)):
        for member in range(group):
            # dV sums over the query heads of a group: one of them at a time.
            bench = fresh()
            grad = torch.zeros_like(bench.packed["grad_out"])
            channel = row - block * width
            where = ((channel >= 0) & (channel < width)).nonzero().view(-1)
            grad[where, member::group, channel[where]] = 1.0
            outputs = bench.call(
                q=torch.zeros_like(bench.packed["q"]),
                k=torch.zeros_like(bench.packed["k"]),
                v=bench.one_hot_values(0, torch.ones_like(bench.source_ids())),
                grad_out=grad,
            )
            assert outputs.dv is not None
            dv = outputs.dv.to("cpu", torch.float64)
            for b in range(workload.batch):
                rows = range(block * width, min((block + 1) * width, workload.seqlens_q[b]))
                if starts[b] == starts[b + 1] or not rows:
                    continue
                for g in range(workload.heads_kv):
                    seen = views.key_rows(dv, workload, b, g)[:, : len(rows)].T > 0
                    if not torch.equal(seen, mask[b, g * group + member][rows.start : rows.stop]):
                        return False
    return True


def _kept(weights: dict[tuple[int, int], torch.Tensor]) -> Masks:
    return {pair: found > 0 for pair, found in weights.items()}


def _same(a: Masks, b: Masks) -> bool:
    return all(torch.equal(a[pair], b[pair]) for pair in a)
