"""Level probes: which scale, softcap and descales a call really used; slopes are in `alibiprobe`.

Softmax is blind to a shift of all logits, so a level shows as the difference of two. Keys of even
index get one logit and odd ones another, V tells the two kinds apart, and the logarithm of their
ratio is the effective difference. Each parameter is assigned to the nearest declared hypothesis;
where two are about as near, or none differs by more than roundings, the verdict is inconclusive.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from attnrepro_runner import views
from attnrepro_runner.blockrule import hex_float

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from attnrepro_runner.bench import ProbeBench
    from attnrepro_runner.semantics import Workload

_TARGET = 4.0
"""Logit difference that a probe aims at: e^-4 is exact enough in every dtype."""
_BENT = 0.7
"""Share of a low cap that a descale of 1 brings a logit to."""
_E4M3_ROUNDING = 2.0**-4
_NEAR_MISS = 1.01
_LOW_CAP = 3.0
"""Up to here a cap is probed by logits of twice itself and their negatives: e^-6 at most, and 4
where there is none against 1.93, 3.05 and 1.00 for the cap, its double and its half."""
TOLD = 4.0
"""Roundings that two hypotheses must lie apart to be told."""
DECIDED = 0.5
"""The chosen hypothesis must be this much nearer than the next."""
FARTHEST = 0.2
"""A relative distance beyond which no hypothesis is accepted."""
NOTHING_TOLD = ": no other value can be told from it"


@dataclass(frozen=True, kw_only=True)
class Level:
    """One parameter's classification."""

    name: str
    declared: str
    chosen: str | None
    effective: float
    margin: float
    """How much nearer the chosen hypothesis is than the next, in relative distance."""
    verdict: str
    """match, other or inconclusive."""

    def to_json(self) -> dict[str, object]:
        """Return an item of `levels` of a result document."""
        return {
            "name": self.name,
            "declared": self.declared,
            "chosen": self.chosen,
            "effective": hex_float(self.effective),
            "margin": hex_float(self.margin),
            "verdict": self.verdict,
        }


def classify(
    name: str,
    declared: str,
    effective: float,
    hypotheses: Mapping[str, float],
    *,
    rounding: float = 0.0,
) -> Level:
    """Assign a measured number to the nearest hypothesis, by relative distance.

    Args:
        name: of the parameter.
        declared: key of the hypothesis that the manifest means.
        effective: what was measured.
        hypotheses: label to the number it predicts. Those that cannot be told from the declared one
            are dropped; where none is left of several, nothing is decided.
        rounding: by how much an honest measurement may be off.

    """
    meant = hypotheses[declared]
    distances = {
        label: abs(effective - value) / max(abs(value), abs(meant) * 0.1, 1e-30)
        for label, value in hypotheses.items()
        if label == declared or abs(value - meant) > max(1e-6 * abs(meant), TOLD * rounding)
    }
    ranked = sorted(distances, key=lambda label: distances[label])
    chosen = ranked[0]
    nearest = distances[chosen]
    next_one = distances[ranked[1]] if len(ranked) > 1 else FARTHEST
    margin = next_one - nearest
    untold = len(hypotheses) > len(ranked) == 1
    found: str | None = None
    if math.isnan(effective):
        verdict, margin = "inconclusive", 0.0
    elif math.isinf(effective) or (nearest > FARTHEST and abs(effective - meant) > TOLD * rounding):
        # Far from everything: certainly not what was declared.
        verdict, margin = "other", 0.0
    elif untold or nearest > DECIDED * next_one:
        verdict, margin = "inconclusive", 0.0 if untold else margin
    else:
        found = chosen
        verdict = "match" if chosen == declared else "other"
    return Level(
        name=name,
        declared=f"{declared} = {meant:.6g}{NOTHING_TOLD if untold else ''}",
        chosen=found,
        effective=effective,
        margin=margin,
        verdict=verdict,
    )


def probe_scale(bench: ProbeBench) -> Level:
    """Classify the factor on q.k."""
    workload = bench.workload
    scale = workload.scale_value
    cap = workload.softcap
    # Far above its cap a logit says nothing of its scale.
    root = _amplitude(workload, min(_TARGET, cap or _TARGET) / scale)
    difference = effective_difference(bench, (root,), (root,), (0.0,))
    product = root * root

    def seen(factor: float) -> float:
        return capped(workload, factor * product)

    head_dim = workload.head_dim
    padded = 1 << (head_dim - 1).bit_length()
    hypotheses = {
        "scale": seen(scale),
        "1/sqrt(head_dim)": seen(head_dim**-0.5),
        "1/head_dim": seen(1 / head_dim),
        "1": seen(1.0),
        "scale * log2(e)": seen(scale / math.log(2)),
        "scale * ln(2)": seen(scale * math.log(2)),
        "scale / 2": seen(scale / 2),
        "scale * 2": seen(scale * 2),
        "1/sqrt(head_dim_v)": seen(workload.head_dim_v**-0.5),
        "1/sqrt(padded head_dim)": seen(padded**-0.5),
        # e4m3 weights cannot tell one per cent, nor can bfloat16 outputs below a low cap.
        "scale * 1.01": seen(scale * _NEAR_MISS),
        "scale / 1.01": seen(scale / _NEAR_MISS),
    }
    return classify("scale", "scale", difference, hypotheses, rounding=_rounding(workload))


def probe_softcap(bench: ProbeBench) -> Level:
    """Classify c of c tanh(s / c), by two logits near c, or for a low one beyond it on both sides.

    A second channel holds the difference of the two, which a rounding of the greater would hide: at
    c = 100 those of e4m3 are 8 apart, at 10^5 those of bfloat16 512.
    """
    workload = bench.workload
    cap = workload.softcap
    assert cap is not None
    scale = workload.scale_value
    low = cap <= _LOW_CAP
    root = _amplitude(workload, (2 * cap if low else cap) / scale)
    upper = scale * root * root
    bent = max(0.0, math.tanh(upper / cap) - _TARGET / cap)
    apart = 2 * upper if low else upper - cap * math.atanh(bent)
    if workload.head_dim > 1 and not low:
        fine = _amplitude(workload, apart / scale)
        difference = effective_difference(bench, (root, fine), (root, 0.0), (root, -fine))
        lower = upper - scale * fine * fine
    else:
        lowered = rounded(workload, (upper - apart) / scale / root)
        difference = effective_difference(bench, (root,), (root,), (lowered,))
        lower = scale * root * lowered

    def seen(c: float) -> float:
        return c * (math.tanh(upper / c) - math.tanh(lower / c))

    hypotheses = {
        "softcap": seen(cap),
        "off": upper - lower,
        "softcap / 2": seen(cap / 2),
        "softcap * 2": seen(cap * 2),
        "cap before scale": seen(cap * scale),
        "softcap / scale": seen(cap / scale),
    }
    return classify("softcap", "softcap", difference, hypotheses, rounding=_rounding(workload))


def probe_descales(bench: ProbeBench) -> list[Level]:
    """Classify the descales of q, k and v, each set to distinct numbers per KV head in turn."""
    workload = bench.workload
    numbers = torch.arange(workload.batch * workload.heads_kv, device=bench.device)
    distinct = torch.pow(2.0, (numbers % 3) - 1.0).view(workload.batch, workload.heads_kv)
    factors = distinct.cpu().double()
    hypotheses = {
        "declared": factors,
        "ignored": torch.ones_like(factors),
        "first head's": factors[0, 0].expand_as(factors),
        "inverted": 1 / factors,
    }
    levels = []
    for name in views_of_descales():
        tensor: torch.Tensor | None = getattr(bench.tensors, name)
        if tensor is None:
            continue
        tensor.copy_(distinct)
        measured, seen, rounding = _descaled(bench, name)
        read = _is_read(workload, two_keys=name != "v_descale")
        tensor.fill_(1.0)
        meant = seen(factors)
        error = {
            label: float((measured - seen(values))[read].abs().max())
            for label, values in hypotheses.items()
            # One KV head is the first one: what predicts the same is no alternative.
            if label == "declared"
            or float((seen(values) - meant)[read].abs().max()) > TOLD * rounding
        }
        ranked = sorted(error, key=lambda label: error[label])
        nearest = error[ranked[0]]
        following = error[ranked[1]] if len(ranked) > 1 else 0.0
        decided = nearest < DECIDED * following and nearest < FARTHEST * float(meant.max())
        levels.append(
            Level(
                name=name,
                declared="declared = 0.5, 1, 2 by KV head"
                + ("" if len(ranked) > 1 else NOTHING_TOLD),
                chosen=ranked[0] if decided else None,
                effective=float((measured / meant)[read].mean()),
                margin=following - nearest,
                verdict="inconclusive"
                if not decided
                else "match"
                if ranked[0] == "declared"
                else "other",
            )
        )
    return levels


def views_of_descales() -> tuple[str, str, str]:
    """Return the names of the three descales."""
    return "q_descale", "k_descale", "v_descale"


def effective_difference(
    bench: ProbeBench, q: Sequence[float], even: Sequence[float], odd: Sequence[float]
) -> float:
    """Return the logit difference of even and odd keys: ln(o0 / o1) over all rows with both.

    Args:
        bench: the backend's.
        q: entries of every query's first channels.
        even: entries of even keys' first channels.
        odd: of odd keys.

    """
    differences = _differences(bench, q, even, odd)
    return float(torch.cat([d.view(-1) for d in differences.values()]).mean())


def _differences(
    bench: ProbeBench, q: Sequence[float], even: Sequence[float], odd: Sequence[float]
) -> dict[tuple[int, int], torch.Tensor]:
    workload = bench.workload
    parity = bench.key_index() & 1
    queries, keys = (
        torch.zeros_like(bench.packed[name], dtype=torch.float32) for name in ("q", "k")
    )
    for channel, entries in enumerate(zip(q, even, odd, strict=True)):
        queries[:, :, channel] = entries[0]
        keys[:, :, channel] = torch.where(parity == 0, entries[1], entries[2])[:, None]
    shares = _shares(bench, queries, keys)
    found = {}
    for b in range(workload.batch):
        ranges = [workload.key_range(b, i) for i in range(workload.seqlens_q[b])]
        evens = torch.tensor([max(0, (hi + 1) // 2 - (lo + 1) // 2) for lo, hi in ranges]).double()
        odds = torch.tensor([max(0, hi // 2 - lo // 2) for lo, hi in ranges]).double()
        both = (evens > 0) & (odds > 0)
        for h in range(workload.heads_q):
            rows = views.query_rows(shares, workload, b, h)
            ratio = (rows[:, 0] / evens) / (rows[:, 1] / odds)
            found[b, h] = ratio[both].log()
    return found


def _shares(bench: ProbeBench, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """Return the output's weight of even keys and of odd ones, as its first two channels.

    Values of one channel take a call for each: 1 - 0.982 would be 0.018 to 0.002 in bfloat16.
    """
    parity = bench.key_index() & 1
    parts = []
    for channels in ((0, 1),) if bench.workload.head_dim_v > 1 else ((0,), (1,)):
        values = torch.zeros_like(bench.packed["v"], dtype=torch.float32)
        for channel, kind in enumerate(channels):
            values[:, :, channel] = (parity == kind).float()[:, None]
        parts.append(bench.call(q=q, k=k, v=values).out.to("cpu", torch.float64, copy=True))
    return torch.cat(parts, dim=-1)


def _descaled(
    bench: ProbeBench, name: str
) -> tuple[torch.Tensor, Callable[[torch.Tensor], torch.Tensor], float]:
    """Measure what a descale did.

    Returns:
        Outputs (v) or logit differences, (batch, heads_kv); what factors of such a shape predict;
        and by how much an honest measurement may be off.

    """
    workload = bench.workload
    if name == "v_descale":
        zero = torch.zeros_like(bench.packed["q"], dtype=torch.float32)
        values = torch.ones_like(bench.packed["v"], dtype=torch.float32)
        out = bench.call(q=zero, k=torch.zeros_like(bench.packed["k"]), v=values).out
        found = {
            (b, h): views.query_rows(out.to("cpu", torch.float64), workload, b, h)[
                workload.attending_rows(b).start : workload.attending_rows(b).stop
            ]
            for b in range(workload.batch)
            for h in range(workload.heads_q)
        }
        return _by_kv_head(workload, found), lambda factors: factors, _rounding(workload)
    # Logits on both sides of zero, so that a low cap leaves them apart: under 1 by 0.67, 1.2, 1.8.
    aim = min(_TARGET / 4, (workload.softcap or math.inf) * _BENT)
    root = _amplitude(workload, aim / workload.scale_value)
    measured = _by_kv_head(workload, _differences(bench, (root,), (root,), (-root,)))
    logit = workload.scale_value * root * root

    def seen(factors: torch.Tensor) -> torch.Tensor:
        cap = workload.softcap
        logits = factors * logit
        return 2 * (logits if cap is None else cap * torch.tanh(logits / cap))

    return measured, seen, _rounding(workload)


def _by_kv_head(workload: Workload, found: Mapping[tuple[int, int], torch.Tensor]) -> torch.Tensor:
    """Average readings of (sequence, query head) over rows and the heads of a group."""
    means = torch.zeros((workload.batch, workload.heads_kv), dtype=torch.float64)
    for b in range(workload.batch):
        for g in range(workload.heads_kv):
            heads = [h for h in range(workload.heads_q) if workload.kv_head(h) == g]
            means[b, g] = torch.cat([found[b, h].reshape(-1) for h in heads]).mean()
    return means


def _is_read(workload: Workload, *, two_keys: bool) -> torch.Tensor:
    """Say of which (sequence, KV head) there are readings: rows of one key or of two."""
    wanted = 2 if two_keys else 1
    ranges = (
        [workload.key_range(b, i) for i in range(workload.seqlens_q[b])]
        for b in range(workload.batch)
    )
    some = torch.tensor([any(hi - lo >= wanted for lo, hi in rows) for rows in ranges])
    return some[:, None].expand(-1, workload.heads_kv)


def _rounding(workload: Workload) -> float:
    """Return by how much roundings may move a logit difference: of two outputs, and of e4m3 P."""
    out = torch.finfo(views.DTYPES[workload.dtype_out]).eps
    return out if workload.fp8 is None else out + _E4M3_ROUNDING


def capped(workload: Workload, logit: float) -> float:
    """Return a logit as the softcap leaves it."""
    cap = workload.softcap
    return logit if cap is None else cap * math.tanh(logit / cap)


def _amplitude(workload: Workload, product: float) -> float:
    """Entry of q and k whose square is about `product`, exact in the dtype."""
    return rounded(workload, math.sqrt(product))


def rounded(workload: Workload, value: float) -> float:
    """Return the nearest value of the inputs' dtype."""
    dtype = views.DTYPES[workload.dtype]
    return float(torch.tensor(value, dtype=torch.float32).to(dtype).to(torch.float32))
