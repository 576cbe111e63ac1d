"""The float32 rule at its edges: honest kernels pass, and coarser products do not."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from numerics_fakes import workload_of

from attnrepro_runner import inputs, mutantbackends
from attnrepro_runner.backends import registry
from attnrepro_runner.mutantbackends import Mutant
from attnrepro_runner.oracle import Oracle

if TYPE_CHECKING:
    from attnrepro_runner.backends.base import Backend

BACKWARD: dict[str, Any] = {"phase": "forward_backward", "mask": {"causal": "none"}}
MANY_ROWS = BACKWARD | {"seqlen_q": 4000, "seqlen_k": 17, "heads_q": 16, "head_dim": 128}
LONG_ROWS = BACKWARD | {"seqlen_q": 16, "seqlen_k": 8192, "heads_q": 2, "head_dim": 64}
ONE_ROW = BACKWARD | {"seqlen_q": 1, "seqlen_k": 64, "heads_q": 4, "head_dim": 128}


def judge(backend: Backend, distribution: str, seed: int, **change: Any) -> dict[str, float]:
    workload = workload_of(batch=1, heads_kv=1, dtype="float32", **change)
    tensors = inputs.make_inputs(
        workload, {"distribution": distribution, "seed": seed}, stream=0, device="cpu"
    )
    outputs = backend.prepare(workload, {}, tensors).step()
    report = Oracle(workload, {}, tensors).check(outputs, empty_row_lse=backend.empty_row_lse)
    return {name: tally.worst_ratio for name, tally in report.tensors.items()}


@pytest.mark.parametrize(
    ("name", "distribution", "seed", "change"),
    [
        # Each was over the limit under a bound of the largest term alone: 5.6, 3.2, 56 times.
        ("sdpa.flash", "large_negative", 0, MANY_ROWS | {"scale": 5.0}),
        ("sdpa.math", "one_hot", 0, LONG_ROWS),
        ("eager", "normal", 1258, ONE_ROW | {"scale": 20.0, "softcap": 0.5}),
    ],
    ids=["many rows of steep logits", "long rows of like terms", "a small cap"],
)
def test_honest_kernels_are_within_it(
    name: str, distribution: str, seed: int, change: dict[str, Any]
) -> None:
    found = judge(registry.load(name), distribution, seed, **change)
    assert max(found.values()) < 0.85, found
    # Nor is it so wide that nothing would count.
    assert max(found.values()) > 0.05, found


@pytest.mark.parametrize("distribution", ["normal", "normal_outliers", "large_negative"])
@pytest.mark.parametrize("scale", ["rsqrt_head_dim", 1.25, 5.0])
def test_tf32_products_are_beyond_it(distribution: str, scale: object) -> None:
    """At the widest head_dim: the more products a logit sums, the more rounding is allowed."""
    mutant = Mutant(registry.load("sdpa.flash"), mutantbackends.tf32_products)
    change = {"phase": "forward", "seqlen_q": 16, "seqlen_k": 4096, "heads_q": 2, "head_dim": 256}
    with torch.no_grad():
        found = judge(mutant, distribution, 0, scale=scale, **change)
    assert found["out"] > 1.2, found
