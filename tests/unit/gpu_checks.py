"""A step of a GPU library's adapter over its stand-in, held against textbook attention."""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING

import pytest
import torch

from attnrepro_runner.backends import registry
from attnrepro_runner.inputs import make_inputs

if TYPE_CHECKING:
    from attnrepro_runner.backends.base import Tensors
    from attnrepro_runner.semantics import Workload


INPUTS = {"seed": 7, "distribution": "normal"}


def expected(w: Workload, tensors: Tensors) -> tuple[torch.Tensor, list[list[float]]]:
    """Attention by the semantics module's own key ranges, packed (tokens, heads, width)."""
    outs, lses = [], []
    starts = list(itertools.accumulate(w.seqlens_q, initial=0))
    starts_k = list(itertools.accumulate(w.seqlens_k, initial=0))
    table = w.page_table()
    slopes = w.alibi_slopes()
    for b in range(w.batch):
        if w.is_packed:
            q = tensors.q[starts[b] : starts[b + 1]]
        else:
            q = (tensors.q.transpose(1, 2) if w.layout == "bhsd" else tensors.q)[b]
        if table is not None:
            k, v = (t[list(table[b])].flatten(0, 1) for t in (tensors.k, tensors.v))
        elif w.cache is not None:
            k, v = tensors.k[b], tensors.v[b]
        elif w.is_packed:
            k, v = (t[starts_k[b] : starts_k[b + 1]] for t in (tensors.k, tensors.v))
        else:
            k, v = (
                (t.transpose(1, 2) if w.layout == "bhsd" else t)[b] for t in (tensors.k, tensors.v)
            )
        for i in range(w.seqlens_q[b]):
            lo, hi = w.key_range(b, i)
            row, lse = [], []
            for h in range(w.heads_q):
                if lo >= hi:
                    row.append(torch.zeros(w.head_dim_v, dtype=torch.float64))
                    lse.append(-math.inf)
                    continue
                keys = k[lo:hi, w.kv_head(h)].double()
                logits = keys @ q[i, h].double() * w.scale_value
                if w.softcap is not None:
                    logits = w.softcap * torch.tanh(logits / w.softcap)
                if slopes is not None:
                    logits = (
                        logits - slopes[h] * (i + w.offset(b) - torch.arange(lo, hi)).abs().double()
                    )
                row.append(torch.softmax(logits, 0) @ v[lo:hi, w.kv_head(h)].double())
                lse.append(float(torch.logsumexp(logits, 0)))
            outs.append(torch.stack(row))
            lses.append(lse)
    return torch.stack(outs), lses


def check_step(name: str, w: Workload, options: dict[str, object] | None = None) -> None:
    backend = registry.load(name)
    chosen = options or {}
    tensors = make_inputs(w, INPUTS, stream=0, device="cpu")
    missing = w.active_fields() - backend.consumed(w, chosen) - {"dtype_out"}
    assert not missing, f"{name} leaves {missing}"
    assert set(chosen) <= backend.consumed(w, chosen)
    prepared = backend.prepare(w, chosen, tensors)
    prepared.append_step()
    outputs = prepared.step()
    reference, reference_lse = expected(w, tensors)
    assert outputs.out.shape == w.shape("out")
    flat = outputs.out.detach()
    if not w.is_packed:
        flat = (flat.transpose(1, 2) if w.layout == "bhsd" else flat).flatten(0, 1)
    torch.testing.assert_close(flat.double(), reference, atol=2e-2, rtol=2e-2)
    if outputs.lse is None:
        return
    assert outputs.lse.shape == w.shape("lse")
    lse = outputs.lse if w.is_packed else outputs.lse.transpose(0, 1).flatten(1)
    for token, row in enumerate(reference_lse):
        for h, value in enumerate(row):
            wanted = backend.empty_row_lse if value == -math.inf else value
            assert float(lse[h, token]) == pytest.approx(wanted, abs=1e-2)


FLASH = ["flash_attn_2", "flash_attn_3", "flash_attn_4", "torch.varlen"]
