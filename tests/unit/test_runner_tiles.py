"""A kernel in tiles, of which a row may attend none: the oracle tells a guarded one."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from test_runner_oracle import make

from attnrepro_runner import inputs
from attnrepro_runner.backends.base import Outputs, Tensors
from attnrepro_runner.oracle import Oracle

if TYPE_CHECKING:
    from attnrepro_runner.semantics import Workload


class Tiled:
    """Online softmax over tiles of 64 keys; unguarded, one without a key gives exp(inf - inf)."""

    def __init__(self, workload: Workload, tensors: Tensors, *, guarded: bool) -> None:
        self.workload, self.tensors, self.guarded = workload, tensors, guarded

    def step(self) -> Outputs:
        w, t = self.workload, self.tensors
        out = torch.zeros(w.shape("out"), dtype=t.q.dtype)
        low, high = w.diagonals(0)
        assert low is not None
        assert high is not None
        distance = torch.arange(w.seqlens_k[0]) - torch.arange(w.seqlens_q[0])[:, None]
        hidden = (distance < low) | (distance > high)
        for head in range(w.heads_q):
            q, k, v = (x[0, :, head].double() for x in (t.q, t.k, t.v))
            scores = (q @ k.T * w.scale_value).masked_fill(hidden, -torch.inf)
            top = torch.full((len(q), 1), -torch.inf, dtype=torch.float64)
            total, summed = torch.zeros_like(top), torch.zeros_like(q)
            for part, values in zip(scores.split(64, 1), v.split(64), strict=True):
                now = torch.maximum(top, part.amax(1, keepdim=True))
                base = now.masked_fill(now == -torch.inf, 0) if self.guarded else now
                weights, kept = (part - base).exp(), (top - base).exp()
                total = total * kept + weights.sum(1, keepdim=True)
                summed = summed * kept + weights @ values
                top = now
            out[0, :, head] = (summed / total).to(out.dtype)
        return Outputs(out=out)


@pytest.mark.parametrize("guarded", [True, False])
def test_a_first_tile_without_a_key_is_judged(guarded: bool) -> None:
    mask = {"causal": "bottom_right", "window": {"left": 63, "right": 0}}
    workload = make(
        phase="prefill", batch=1, seqlen_q=70, seqlen_k=300, heads_q=2, heads_kv=2, mask=mask
    )
    assert workload.key_range(0, 69)[0] > 128
    assert workload.key_range(0, 0)[0] > 64
    tensors = inputs.make_inputs(workload, {}, stream=0, device="cpu")
    judge = Oracle(workload, {}, tensors)
    outputs = Tiled(workload, tensors, guarded=guarded).step()
    assert judge.check(outputs, empty_row_lse=0.0).ok is guarded
