"""The ALiBi probe: which slopes a call used, and from which diagonal.

With q = k = 0 each weight shows its bias against that of the row's nearest key. A steep slope would
leave that key alone: at 8 the next one weighs 3e-4, at 1,000 nothing. For such a head, q and k lift
every second key by nearly the slope, so that a nearest key that is not lifted and its neighbours
that are stand about one apart.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from attnrepro_runner import views
from attnrepro_runner.levels import DECIDED, FARTHEST, NOTHING_TOLD, TOLD, Level, capped, rounded

if TYPE_CHECKING:
    from attnrepro_runner.bench import ProbeBench
    from attnrepro_runner.semantics import Workload

_VISIBLE = 6.0
_STEEP = 3.0
"""From here on a head's keys are lifted: two steps would be out of sight."""
_LEFT = 1.0
"""What lifting leaves of a step of a steep slope."""
_NEAR_CAP = 0.95
"""Share of the softcap above which no logit is made."""


def probe_alibi(bench: ProbeBench) -> Level:
    """Classify the ALiBi slopes and the diagonal they are measured from.

    `effective` is the factor on the declared differences. Only weights are read whose bias is more
    than roundings; where there is none, nothing is decided.
    """
    workload = bench.workload
    slopes = workload.alibi_slopes()
    assert slopes is not None
    q, k, lifts = _lifted(bench, slopes)
    weights, _ = bench.weights(torch.ones_like(bench.source_ids()), q=q, k=k)
    candidates = _candidates(workload, slopes)
    errors, apart = dict.fromkeys(candidates, 0.0), dict.fromkeys(candidates, 0.0)
    fit = energy = size = rounding = 0.0
    for (b, h), found in weights.items():
        if not found.numel():
            continue
        declared, top = _declared(workload, b, slopes[h], lifts[h])
        off_by = _roundings(workload, declared, slopes[h], lifts[h])
        visible = (declared > -_VISIBLE).scatter(-1, top, value=False)
        if any(slopes):
            # Slopes that are all zero differ from others by what should not be there.
            visible &= declared.abs() > TOLD * off_by
        logs = found.log()
        logs = (logs - logs.gather(-1, top)).nan_to_num(0.0, 2 * _VISIBLE, -2 * _VISIBLE)[visible]
        seen = declared[visible]
        fit += float((logs * seen).sum())
        energy += float(seen.square().sum())
        size += float(seen.abs().sum())
        rounding += float(off_by[visible].sum())
        for label, (values, alignment) in candidates.items():
            predicted = _logits(workload, b, values[h], lifts[h], alignment)
            # Only differences show: shift all to the key that is nearest by declaration.
            predicted = (predicted - predicted.gather(-1, top)).clamp(-2 * _VISIBLE, 2 * _VISIBLE)
            errors[label] += float((logs - predicted[visible]).abs().sum())
            apart[label] += float((seen - predicted[visible]).abs().sum())
    # Candidates that predict the same (one head; equal lengths), or nearly, are no alternatives.
    ranked = sorted(
        (label for label in errors if label == "slopes" or apart[label] > TOLD * rounding),
        key=lambda label: errors[label],
    )
    # Without slopes, and with those that a manifest would mean by none, nothing would be shown.
    told = ("off" if any(slopes) else "geometric") in ranked
    nearest, following = errors[ranked[0]], errors[ranked[1]] if len(ranked) > 1 else 0.0
    decided = told and nearest < DECIDED * following and following - nearest > rounding
    # Far from what was declared is wrong, whatever else it is.
    far = told and errors["slopes"] > FARTHEST * size + rounding
    chosen = ranked[0] if decided and not (far and ranked[0] == "slopes") else None
    verdict = "match" if chosen == "slopes" else "other" if chosen or far else "inconclusive"
    return Level(
        name="alibi",
        declared=f"slopes = {slopes[0]:.6g}, …{'' if told else NOTHING_TOLD}",
        chosen=chosen,
        effective=fit / energy if energy else math.inf,
        margin=1 - nearest / following if following else 0.0,
        verdict=verdict,
    )


def _candidates(
    workload: Workload, slopes: tuple[float, ...]
) -> dict[str, tuple[tuple[float, ...], str | None]]:
    """Return label to slopes and alignment of the diagonal, None for the documented one."""
    heads = len(slopes)
    candidates: dict[str, tuple[tuple[float, ...], str | None]] = {
        "slopes": (slopes, None),
        "off": ((0.0,) * heads, None),
        "negated": (tuple(-s for s in slopes), None),
        "next head's": ((*slopes[1:], slopes[0]), None),
        "slopes * log2(e)": (tuple(s / math.log(2) for s in slopes), None),
        "slopes * scale": (tuple(s * workload.scale_value for s in slopes), None),
        "top_left diagonal": (slopes, "top_left"),
    }
    if not any(slopes):
        geometric = tuple(2.0 ** (-8 * (h + 1) / heads) for h in range(heads))
        candidates["geometric"] = (geometric, None)
    return candidates


def _lifted(
    bench: ProbeBench, slopes: tuple[float, ...]
) -> tuple[torch.Tensor, torch.Tensor, tuple[float, ...]]:
    """Return packed q and k, and by how much they lift every second key for each query head."""
    workload = bench.workload
    q, k = (torch.zeros_like(bench.packed[name], dtype=torch.float32) for name in ("q", "k"))
    room = math.inf if workload.softcap is None else _NEAR_CAP * workload.softcap
    wanted = [s - _LEFT if _STEEP < s < room + _LEFT else 0.0 for s in slopes]
    if not any(wanted):
        return q, k, (0.0,) * len(slopes)
    scale = workload.scale_value
    key = rounded(workload, math.sqrt(max(wanted) / scale))
    # A second channel holds what the first one's rounding left: 4 of 1,000 in bfloat16.
    channels = range(min(2, workload.head_dim))
    odd = torch.cat([_is_lifted(workload, b) for b in range(workload.batch)]).to(bench.device)
    lifts = []
    for h, lift in enumerate(wanted):
        cap = workload.softcap
        left = raw = 0.0
        left = lift if cap is None else cap * math.atanh(lift / cap)
        for channel in channels:
            entry = rounded(workload, left / scale / key)
            q[:, h, channel] = entry
            raw += scale * entry * key
            left -= scale * entry * key
        lifts.append(capped(workload, raw))
    for channel in channels:
        k[:, :, channel] = key * odd.float()[:, None]
    return q, k, tuple(lifts)


def _is_lifted(workload: Workload, b: int) -> torch.Tensor:
    """Say which keys are lifted: the neighbours of the one that is nearest to the first query."""
    return (torch.arange(workload.seqlens_k[b]) - workload.offset(b)) % 2 == 1


def _logits(
    workload: Workload, b: int, slope: float, lift: float, alignment: str | None
) -> torch.Tensor:
    offset = workload.offset(b, alignment or "bottom_right")
    i = torch.arange(workload.seqlens_q[b])[:, None] + offset
    distances = (i - torch.arange(workload.seqlens_k[b])[None, :]).abs().double()
    return lift * _is_lifted(workload, b).double() - slope * distances


def _declared(
    workload: Workload, b: int, slope: float, lift: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the declared logits against each row's greatest, -inf unattended, and its key."""
    logits = _logits(workload, b, slope, lift, None)
    logits = logits.masked_fill(~views.attended(workload, b), -torch.inf)
    top = logits.argmax(-1, keepdim=True)
    return logits - logits.gather(-1, top), top


def _roundings(
    workload: Workload, declared: torch.Tensor, slope: float, lift: float
) -> torch.Tensor:
    """Return by how much an honest log weight may be off, against the row's greatest.

    Roundings of two weights and two outputs, the spacing of numbers near zero, and of float32
    logits, which FlashAttention takes from the first key and not from the diagonal.
    """
    eps = max(torch.finfo(views.DTYPES[d]).eps for d in (workload.dtype, workload.dtype_out))
    narrow = torch.finfo(views.DTYPES[workload.dtype_out])
    weight = declared.nan_to_num(-torch.inf).softmax(-1).nan_to_num(0.0).clamp_min(1e-30)
    logit = slope * max(workload.seqlens_k) + lift
    return 2 * eps + narrow.smallest_normal * narrow.eps / weight + logit * 2.0**-22
