"""Level probes: which scale, softcap, ALiBi slopes and descales a call really used.

Softmax is blind to a shift of all logits, so a level shows as the difference of two. Keys of even
index get one logit and odd ones another, V tells the two kinds apart, and the logarithm of their
ratio is the effective difference. Each parameter is assigned to the nearest declared hypothesis;
where two are about as near, the verdict is inconclusive.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from attnrepro_runner import views
from attnrepro_runner.blockrule import hex_float

if TYPE_CHECKING:
    from collections.abc import Mapping

    from attnrepro_runner.bench import ProbeBench
    from attnrepro_runner.semantics import Workload

_TARGET = 4.0
"""Logit difference that a probe aims at: e^-4 is exact enough in every dtype."""
_NEAR_MISS = 1.01
_TOLD = 4.0
"""Roundings of an output that two hypotheses must lie apart for a near miss to be told."""
_DECIDED = 0.5
"""The chosen hypothesis must be this much nearer than the next."""
_FARTHEST = 0.2
"""A relative distance beyond which no hypothesis is accepted."""
_VISIBLE = 6.0


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


def classify(name: str, declared: str, effective: float, hypotheses: Mapping[str, float]) -> Level:
    """Assign a measured number to the nearest hypothesis, by relative distance.

    Args:
        name: of the parameter.
        declared: key of the hypothesis that the manifest means.
        effective: what was measured.
        hypotheses: label to the number it predicts; those equal to the declared one are dropped.

    """
    meant = hypotheses[declared]
    distances = {
        label: abs(effective - value) / max(abs(value), abs(meant) * 0.1, 1e-30)
        for label, value in hypotheses.items()
        if label == declared or abs(value - meant) > 1e-6 * abs(meant)
    }
    ranked = sorted(distances, key=lambda label: distances[label])
    chosen = ranked[0]
    nearest = distances[chosen]
    next_one = distances[ranked[1]] if len(ranked) > 1 else _FARTHEST
    margin = next_one - nearest
    found: str | None = None
    if math.isnan(effective):
        verdict, margin = "inconclusive", 0.0
    elif math.isinf(effective) or nearest > _FARTHEST:
        # Far from everything: certainly not what was declared.
        verdict, margin = "other", 0.0
    elif nearest > _DECIDED * next_one:
        verdict = "inconclusive"
    else:
        found = chosen
        verdict = "match" if chosen == declared else "other"
    return Level(
        name=name,
        declared=f"{declared} = {meant:.6g}",
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
    difference = effective_difference(bench, root, root, 0.0)
    product = root * root

    def seen(factor: float) -> float:
        return _capped(workload, factor * product)

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
    }
    rounding = torch.finfo(views.DTYPES[workload.dtype_out]).eps
    if workload.fp8 is None and seen(scale * _NEAR_MISS) - seen(scale) > _TOLD * rounding:
        # e4m3 weights cannot tell one per cent, nor can bfloat16 outputs below a low cap.
        hypotheses["scale * 1.01"] = seen(scale * _NEAR_MISS)
        hypotheses["scale / 1.01"] = seen(scale / _NEAR_MISS)
    return classify("scale", "scale", difference, hypotheses)


def probe_softcap(bench: ProbeBench) -> Level:
    """Classify c of c tanh(s / c), by two logits near c."""
    workload = bench.workload
    cap = workload.softcap
    assert cap is not None
    scale = workload.scale_value
    upper = cap
    lower = cap * math.atanh(max(0.0, math.tanh(1.0) - _TARGET / cap))
    q = _amplitude(workload, upper / scale)
    high, low = (_rounded(workload, s / scale / q) for s in (upper, lower))
    difference = effective_difference(bench, q, high, low)
    raw = [scale * q * x for x in (high, low)]

    def seen(c: float) -> float:
        return c * (math.tanh(raw[0] / c) - math.tanh(raw[1] / c))

    hypotheses = {
        "softcap": seen(cap),
        "off": raw[0] - raw[1],
        "softcap / 2": seen(cap / 2),
        "softcap * 2": seen(cap * 2),
        "cap before scale": seen(cap * scale),
        "softcap / scale": seen(cap / scale),
    }
    return classify("softcap", "softcap", difference, hypotheses)


def probe_descales(bench: ProbeBench) -> list[Level]:
    """Classify the descales of q, k and v, each set to distinct numbers per KV head in turn."""
    workload = bench.workload
    numbers = torch.arange(workload.batch * workload.heads_kv, device=bench.device)
    distinct = torch.pow(2.0, (numbers % 3) - 1.0).view(workload.batch, workload.heads_kv)
    levels = []
    for name in views_of_descales():
        tensor: torch.Tensor | None = getattr(bench.tensors, name)
        if tensor is None:
            continue
        tensor.copy_(distinct)
        measured = _descale_factors(bench, name)
        tensor.fill_(1.0)
        error = {
            "declared": (measured / distinct.cpu().double()).log().abs().max(),
            "ignored": measured.log().abs().max(),
            "first head's": (measured / distinct[0, 0].item()).log().abs().max(),
            "inverted": (measured * distinct.cpu().double()).log().abs().max(),
        }
        ranked = sorted(error, key=lambda label: float(error[label]))
        nearest, following = float(error[ranked[0]]), float(error[ranked[1]])
        decided = nearest < _DECIDED * following and nearest < _FARTHEST
        levels.append(
            Level(
                name=name,
                declared="declared = 0.5, 1, 2 by KV head",
                chosen=ranked[0] if decided else None,
                effective=float((measured / distinct.cpu().double()).mean()),
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


def probe_alibi(bench: ProbeBench) -> Level:
    """Classify the ALiBi slopes and the diagonal they are measured from.

    `effective` is the factor on the declared slopes.
    """
    workload = bench.workload
    slopes = workload.alibi_slopes()
    assert slopes is not None
    ones = torch.ones_like(bench.source_ids())
    zero_q, zero_k = torch.zeros_like(bench.packed["q"]), torch.zeros_like(bench.packed["k"])
    weights, _ = bench.weights(ones, q=zero_q, k=zero_k)
    shifted = (*slopes[1:], slopes[0])
    candidates = {
        "slopes": (slopes, None),
        "off": ((0.0,) * len(slopes), None),
        "negated": (tuple(-s for s in slopes), None),
        "next head's": (shifted, None),
        "slopes * log2(e)": (tuple(s / math.log(2) for s in slopes), None),
        "slopes * scale": (tuple(s * workload.scale_value for s in slopes), None),
        "top_left diagonal": (slopes, "top_left"),
    }
    errors = dict.fromkeys(candidates, 0.0)
    fit = energy = 0.0
    for (b, h), found in weights.items():
        if not found.numel():
            continue
        declared, logs, visible = _alibi_rows(workload, found, b, slopes[h])
        fit += float((logs * declared)[visible].sum())
        energy += float(declared.square()[visible].sum())
        for label, (values, alignment) in candidates.items():
            predicted = -values[h] * _distances(workload, b, alignment)
            # Only differences show: shift both to the key that is nearest by declaration.
            predicted = predicted - predicted.gather(-1, declared.argmax(-1, keepdim=True))
            errors[label] += float((logs - predicted).abs()[visible].sum())
    meant = errors["slopes"]
    # Candidates that predict the same (one head; equal lengths) are no alternatives.
    ranked = sorted(
        (label for label in errors if label == "slopes" or abs(errors[label] - meant) > 1e-9),
        key=lambda label: errors[label],
    )
    nearest, following = errors[ranked[0]], errors[ranked[1]] if len(ranked) > 1 else math.inf
    decided = math.isfinite(nearest) and nearest < _DECIDED * following
    return Level(
        name="alibi",
        declared=f"slopes = {slopes[0]:.6g}, …",
        chosen=ranked[0] if decided else None,
        effective=fit / energy if energy else math.inf,
        margin=1 - nearest / following if following else 0.0,
        verdict="inconclusive" if not decided else "match" if ranked[0] == "slopes" else "other",
    )


def effective_difference(bench: ProbeBench, q: float, even: float, odd: float) -> float:
    """Return the logit difference of even and odd keys: ln(o0 / o1) over all rows with both.

    Args:
        bench: the backend's.
        q: entry of every query's first channel.
        even: entry of even keys' first channel.
        odd: of odd keys.

    """
    differences = _differences(bench, q, even, odd)
    return float(torch.cat([d.view(-1) for d in differences.values()]).mean())


def _differences(
    bench: ProbeBench, q: float, even: float, odd: float
) -> dict[tuple[int, int], torch.Tensor]:
    workload = bench.workload
    parity = bench.key_index() & 1
    queries, keys, values = (
        torch.zeros_like(bench.packed[name], dtype=torch.float32) for name in ("q", "k", "v")
    )
    queries[:, :, 0] = q
    keys[:, :, 0] = torch.where(parity == 0, even, odd)[:, None]
    wide = workload.head_dim_v > 1
    values[:, :, 0] = (parity == 0).float()[:, None]
    if wide:
        values[:, :, 1] = (parity == 1).float()[:, None]
    outputs = bench.call(q=queries, k=keys, v=values)
    out = outputs.out.to("cpu", torch.float64)
    found = {}
    for b in range(workload.batch):
        ranges = [workload.key_range(b, i) for i in range(workload.seqlens_q[b])]
        evens = torch.tensor([max(0, (hi + 1) // 2 - (lo + 1) // 2) for lo, hi in ranges]).double()
        odds = torch.tensor([max(0, hi // 2 - lo // 2) for lo, hi in ranges]).double()
        both = (evens > 0) & (odds > 0)
        for h in range(workload.heads_q):
            rows = views.query_rows(out, workload, b, h)
            other = rows[:, 1] if wide else 1 - rows[:, 0]
            ratio = (rows[:, 0] / evens) / (other / odds)
            found[b, h] = ratio[both].log()
    return found


def _descale_factors(bench: ProbeBench, name: str) -> torch.Tensor:
    """Return what a descale did, (batch, heads_kv): to the logits, or for v to the output."""
    workload = bench.workload
    factors = torch.zeros((workload.batch, workload.heads_kv), dtype=torch.float64)
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
        unit = 1.0
    else:
        root = _amplitude(workload, _TARGET / 2 / workload.scale_value)
        found = _differences(bench, root, root, 0.0)
        unit = workload.scale_value * root * root
    for b in range(workload.batch):
        for g in range(workload.heads_kv):
            heads = [h for h in range(workload.heads_q) if workload.kv_head(h) == g]
            readings = torch.cat([found[b, h].reshape(-1) for h in heads])
            factors[b, g] = readings.mean() / unit
    if workload.softcap is not None and name != "v_descale":
        # tanh undone; the logits are small against any useful cap.
        cap = workload.softcap
        factors = cap * torch.atanh((factors * unit / cap).clamp(-0.999, 0.999)) / unit
    return factors


def _alibi_rows(
    workload: Workload, found: torch.Tensor, b: int, slope: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return declared and observed log weights against the nearest key, and which are visible."""
    attended = torch.zeros_like(found, dtype=torch.bool)
    for i in range(workload.seqlens_q[b]):
        lo, hi = workload.key_range(b, i)
        attended[i, lo:hi] = True
    bias = (-slope * _distances(workload, b, None)).masked_fill(~attended, -torch.inf)
    top = bias.argmax(-1, keepdim=True)
    declared = bias - bias.gather(-1, top)
    logs = found.log() - found.log().gather(-1, top)
    visible = attended & (declared > -_VISIBLE) & (declared < 0)
    return declared, logs.nan_to_num(0.0, 0.0, -2 * _VISIBLE), visible


def _distances(workload: Workload, b: int, alignment: str | None) -> torch.Tensor:
    offset = workload.offset(b, alignment or "bottom_right")
    i = torch.arange(workload.seqlens_q[b])[:, None] + offset
    return (i - torch.arange(workload.seqlens_k[b])[None, :]).abs().double()


def _capped(workload: Workload, logit: float) -> float:
    cap = workload.softcap
    return logit if cap is None else cap * math.tanh(logit / cap)


def _amplitude(workload: Workload, product: float) -> float:
    """Entry of q and k whose square is about `product`, exact in the dtype."""
    return _rounded(workload, math.sqrt(product))


def _rounded(workload: Workload, value: float) -> float:
    dtype = views.DTYPES[workload.dtype]
    return float(torch.tensor(value, dtype=torch.float32).to(dtype).to(torch.float32))
