"""How far from the reference each tensor may be, by the manifest and by what kernels need."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from attnrepro_runner import views
from attnrepro_runner.blockrule import RUNNING_SUM, TERM_ULPS, Rule
from attnrepro_runner.terms import logit_roundings

if TYPE_CHECKING:
    from collections.abc import Mapping

    from attnrepro_runner.semantics import Workload

GRADIENTS = ("dq", "dk", "dv")
_ALIBI_GRADIENTS = 8.0
_FP8_CACHE_MAXIMUM = 4.0
_FP8_CACHE_MEAN = 3.0
_TANH = 2.0**-11
"""Greatest relative error of the hardware's approximate tanh (PTX ISA, tanh.approx.f32), with which
kernels cap logits: an LSE is a mean of logits and errs as they do. Seen on an H200 at softcap 30:
flash-attn 3 and 4 are up to 30 float32 ulps off in rows of few keys."""
_FP8_LSE_ULPS = 2048
_FP8_LOGIT = 2.0**-12
"""Hopper accumulates FP8 products with about 14 bits, 32 channels at a time, so that a large logit
errs by 2^-13 of itself and more. Seen on an H200 in FlashAttention-3's LSE: 2^-12.9 where one logit
of many keys stands out, 2^-12.1 in rows of few keys, 4e-5 elsewhere."""
_UNIT = 2.0**-24
"""Unit roundoff of float32."""


def rules(workload: Workload, accuracy: Mapping[str, object]) -> dict[str, Rule]:
    """Return the rule of each tensor of a workload.

    Args:
        workload: the semantics.
        accuracy: the manifest's `accuracy` object.

    """
    ulps = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 2}
    ulps |= _mapping(accuracy, "ulps")
    block = accuracy.get("block", 64)
    assert isinstance(block, int)
    out, grads, lse = (
        float(_mapping(accuracy, name).get("multiplier", default))
        for name, default in (("output", 2), ("gradients", 3), ("lse", 2))
    )
    if workload.alibi is not None:
        grads = max(grads, _ALIBI_GRADIENTS)
    cached_fp8 = workload.fp8 is not None and workload.cache is not None

    def rule(
        multiplier: float,
        dtype: str,
        mean: float | None = None,
        *,
        ulps_: int | None = None,
        of_terms: float = 0.0,
        term_ulps: float = TERM_ULPS,
        absolute: float = 0.0,
    ) -> Rule:
        return Rule(
            block=block,
            multiplier=multiplier,
            ulps=ulps[dtype] if ulps_ is None else ulps_,
            dtype=views.DTYPES[dtype],
            mean_multiplier=mean,
            of_terms=of_terms,
            term_ulps=term_ulps,
            absolute=absolute,
        )

    found = {
        "out": rule(
            max(out, _FP8_CACHE_MAXIMUM) if cached_fp8 else out,
            workload.dtype_out,
            _FP8_CACHE_MEAN if cached_fp8 else None,
        ),
        # An LSE is a float32 whatever is tested. Its sum of n weights is formed one tile after the
        # other, where torch adds pairwise. Seen on an H200: 6.4e-6 at 128k keys in flash-attn-4's
        # decode, 2.6e-6 at 32k, 1.4e-6 at 4k; half of it is allowed besides, since a key of average
        # weight is no more at 64k keys.
        "lse": rule(
            lse,
            "float32",
            ulps_=_FP8_LSE_ULPS if workload.fp8 is not None else None,
            of_terms=max(
                0.0 if workload.softcap is None else _TANH,
                0.0 if workload.fp8 is None else _FP8_LOGIT,
            ),
            term_ulps=TERM_ULPS * max(1.0, logit_roundings(workload)),
            absolute=RUNNING_SUM * _UNIT * math.sqrt(max(workload.seqlens_k, default=0)),
        ),
    }
    if workload.has_backward:
        found |= {name: rule(grads, workload.dtype) for name in GRADIENTS}
    return found


def describe(workload: Workload, found: Mapping[str, Rule]) -> str:
    """Say the rules in one line, for the record."""
    parts = [
        f"{name}: m={rule.multiplier:g} c={rule.ulps} ulp({str(rule.dtype)[6:]})"
        + (f" + {rule.of_terms:.2g} of the largest logit" if rule.of_terms else "")
        + (f" + {rule.absolute:.2g}" if rule.absolute else "")
        for name, rule in found.items()
    ]
    text = f"two_reference per {found['out'].block} rows; " + "; ".join(parts)
    if workload.dtype == "float32":
        return f"{text}; + 2 ulp(float32) of what logits and running sums leave of the terms summed"
    return f"{text}; lse, dq, dk: + 2 ulp(float32) of the largest term summed"


def _mapping(accuracy: Mapping[str, object], name: str) -> dict[str, int]:
    value = accuracy.get(name, {})
    assert isinstance(value, dict)
    return value
