"""Dropout probes, and the mask that a call really used.

Under q = k = 0 and V = I the output shows every weight: n(1 - p) times it is 1 where it was kept.
Masks come from position, seed and offset, never from data, so the mask read out at one seed and
offset is the mask of any call with them; the oracle uses it.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from attnrepro_runner import views
from attnrepro_runner.backends.base import Unsupported
from attnrepro_runner.bench import ProbeBench
from attnrepro_runner.blockrule import hex_float

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from attnrepro_runner.backends.base import Backend
    from attnrepro_runner.fields import Dropout
    from attnrepro_runner.semantics import Workload

Masks = dict[tuple[int, int], torch.Tensor]
"""(sequence, query head) to bool (seqlen_q, seqlen_k)."""
Weights = dict[tuple[int, int], torch.Tensor]
"""(sequence, query head) to float64 (seqlen_q, keys)."""

_CHANCE = 1e-9
"""What coincidence may do in one probe of many thousand: agree where masks are independent, or show
a rate that is not the declared one's."""
_MOST_CALLS = 64
_KEPT_TOLERANCE = 0.02
_OTHER_OFFSET = 64
"""Distance to another offset: what takes multiples of 4 alone takes this too."""
_SEEDS = 1 << 64


@dataclass(frozen=True, kw_only=True)
class DropoutProbe:
    """What the rules of dropout say of one backend; None where coincidence could say the same."""

    rate: float
    """Share of attended weights that were dropped."""
    rate_ok: bool
    kept_value: float
    """Mean kept weight against an undropped one; 1 / (1 - p) is right."""
    kept_value_ok: bool | None
    next_call_differs: bool | None
    seed_repeats: bool | None
    other_seed_differs: bool | None
    other_offset_differs: bool | None
    """The two are None too where the backend refuses another."""
    backward_same: bool | None
    """None too in phases without a backward."""
    weights: int
    calls: int
    """Consecutive calls whose masks are compared with those of another binding."""
    undecided: tuple[str, ...] = ()
    """Rules that so few weights, or so few drops, cannot show."""

    @property
    def rules(self) -> dict[str, bool | None]:
        """What is known of each rule."""
        return {
            "rate_ok": self.rate_ok,
            "kept_value_ok": self.kept_value_ok,
            "next_call_differs": self.next_call_differs,
            "seed_repeats": self.seed_repeats,
            "other_seed_differs": self.other_seed_differs,
            "other_offset_differs": self.other_offset_differs,
            "backward_same": self.backward_same,
        }

    @property
    def broken(self) -> tuple[str, ...]:
        """Rules that do not hold."""
        return tuple(name for name, holds in self.rules.items() if holds is False)

    @property
    def ok(self) -> bool:
        """Whether no rule was seen broken."""
        return not self.broken

    def to_json(self) -> dict[str, object]:
        """Return the `dropout` object of a result document."""
        document: dict[str, object] = {
            "rate": hex_float(self.rate),
            "kept_value": hex_float(self.kept_value),
            "weights": self.weights,
            "calls": self.calls,
        }
        return document | {name: holds for name, holds in self.rules.items() if holds is not None}


def probe_dropout(
    backend: Backend, options: Mapping[str, object], workload: Workload, device: torch.device
) -> DropoutProbe:
    """Check the rules of dropout.

    Where a call has few weights or few drops, two independent masks agree now and then: those of
    eager at p = 1e-4 did for 5 seeds of 10. So many consecutive calls are compared that this has a
    chance below 10^-9; where 64 are too few, agreement decides nothing.

    Args:
        backend: under test.
        options: of the subject.
        workload: small, with dropout.
        device: where.

    """
    given = workload.dropout
    assert given is not None
    p = given.p

    def fresh(dropout: Dropout = given) -> ProbeBench:
        return ProbeBench(backend, options, dataclasses.replace(workload, dropout=dropout), device)

    pairs = _all_pairs(workload)
    allowed = {b: views.attended(workload, b) for b in range(workload.batch)}
    block, in_block = _fullest_block(workload, allowed)
    calls, decides = _calls(p, in_block)

    def series(dropout: Dropout = given) -> list[Weights]:
        # One bound backend: its generator must move on between calls.
        bench = fresh(dropout)
        found = [_one_block(bench, workload, pairs, block) for _ in range(calls)]
        return [{pair: _exact(part) for pair, part in one.items()} for one in found]

    weights, again = (_read(fresh, workload, _exact, pairs) for _ in range(2))
    mask = _kept(weights)
    first, second = series(), series()
    masks = [_kept(one) for one in first]
    tally = _Tally()
    tally.add(weights, allowed)
    width = workload.head_dim_v
    for one in first[1:]:  # the first call's mask is in `weights`
        tally.add(one, allowed, slice(block * width, (block + 1) * width))
    value = tally.total / max(tally.kept, 1)
    rate = 1 - tally.kept / max(tally.attended, 1)
    repeats = _same(mask, _kept(again)) and _all_same(masks, second)
    rules = {
        "kept_value_ok": abs(value * (1 - p) - 1) <= _KEPT_TOLERANCE if tally.kept else None,
        "next_call_differs": _differ(
            any(not _same(masks[0], other) for other in masks[1:]), decides=decides
        ),
        "seed_repeats": _agree(repeats, decides=decides),
    }
    others = {
        "other_seed_differs": dataclasses.replace(given, seed=_other(given.seed, 1)),
        "other_offset_differs": dataclasses.replace(
            given, offset=_other(given.offset, _OTHER_OFFSET)
        ),
    }
    for rule, dropout in others.items():
        try:
            backend.check(dataclasses.replace(workload, dropout=dropout), options)
            moved = series(dropout)
        except Unsupported:
            continue  # who takes one offset alone is told no other
        rules[rule] = _differ(not _all_same(masks, moved), decides=decides)
    if workload.has_backward:
        rules["backward_same"] = _agree(
            _backward_same(fresh, workload, mask),
            decides=_agreement(p, sum(int(allowed[b].sum()) for b, _ in pairs)) <= _CHANCE,
        )
    return DropoutProbe(
        rate=rate,
        rate_ok=_is_rate(
            tally.attended - tally.kept,
            tally.attended,
            p,
            resolution=getattr(backend, "dropout_resolution", 0.0),
        ),
        kept_value=value,
        kept_value_ok=rules["kept_value_ok"],
        next_call_differs=rules["next_call_differs"],
        seed_repeats=rules["seed_repeats"],
        other_seed_differs=rules.get("other_seed_differs"),
        other_offset_differs=rules.get("other_offset_differs"),
        backward_same=rules.get("backward_same"),
        weights=tally.attended,
        calls=calls,
        # Nothing attended, nothing to drop.
        undecided=tuple(name for name, holds in rules.items() if holds is None and tally.attended),
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


@dataclass
class _Tally:
    """Attended weights, those that were kept, and the sum of these against undropped ones."""

    attended: int = 0
    kept: int = 0
    total: float = 0.0

    def add(
        self,
        weights: Weights,
        allowed: Mapping[int, torch.Tensor],
        keys: slice = slice(None),
    ) -> None:
        """Count the weights of some keys."""
        for (b, _), found in weights.items():
            count = allowed[b].sum(-1, keepdim=True)
            mine = allowed[b][:, keys]
            found = found[:, : mine.shape[1]]
            kept = mine & (found > 0)
            self.attended += int(mine.sum())
            self.kept += int(kept.sum())
            self.total += float((found * count)[found > 0].sum())


def _fullest_block(workload: Workload, allowed: Mapping[int, torch.Tensor]) -> tuple[int, int]:
    """Return the block of head_dim_v keys with the most attended weights, and their number.

    A window leaves the first block to nobody where all queries stand behind it.
    """
    width = workload.head_dim_v
    blocks = range(-(-max(*workload.seqlens_k, 1) // width))
    counts = [
        workload.heads_q
        * sum(int(mask[:, n * width : (n + 1) * width].sum()) for mask in allowed.values())
        for n in blocks
    ]
    block = max(blocks, key=lambda n: counts[n])
    return block, counts[block]


def _agreement(p: float, weights: int) -> float:
    """Return the chance that two independent masks agree."""
    return float((p * p + (1 - p) ** 2) ** weights)


def _calls(p: float, weights: int) -> tuple[int, bool]:
    """Return how many consecutive calls decide, and whether they do: none or too few may be left.

    A generator that moves makes all their masks alike, and two generators make the same ones in
    turn, with a chance of at most `_CHANCE`.
    """
    for calls in range(2, _MOST_CALLS + 1):
        alike = (p**calls + (1 - p) ** calls) ** weights
        if max(alike, _agreement(p, calls * weights)) <= _CHANCE:
            return calls, True
    return _MOST_CALLS, False


def _is_rate(dropped: int, weights: int, p: float, *, resolution: float = 0.0) -> bool:
    """Say whether so many drops may be p's: by Chernoff's bound on either tail.

    Six sigmas would reject one honest run in 33,000 where 1.7 drops are expected. A backend that
    rounds p, by what its adapter declares, is held to the nearest value that it may have taken.
    """
    rate = dropped / max(weights, 1)
    p = min(max(rate, p - resolution, 0.0), p + resolution)
    if rate == p:
        return True
    terms = ((rate, p), (1 - rate, 1 - p))
    divergence = sum(seen * math.log(seen / meant) for seen, meant in terms if seen > 0)
    return weights * divergence <= -math.log(_CHANCE)


def _differ(found: bool, *, decides: bool) -> bool | None:
    return True if found else (False if decides else None)


def _agree(found: bool, *, decides: bool) -> bool | None:
    return False if not found else (True if decides else None)


def _other(number: int, distance: int) -> int:
    return number + distance if number + distance < _SEEDS else number - distance


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


def _all_same(a: Sequence[Masks], b: Sequence[Weights]) -> bool:
    return all(_same(one, _kept(other)) for one, other in zip(a, b, strict=True))


def _same(a: Masks, b: Masks) -> bool:
    return all(torch.equal(a[pair], b[pair]) for pair in a)
