"""The two errors of float8 against length: the kernel's, and the one of rounding its inputs.

The kernel is the reference itself with weights rounded to e4m3, since no CPU backend takes float8.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from numerics_fakes import ReferenceBackend, workload_of

from attnrepro_runner import inputs
from attnrepro_runner.oracle import Oracle

CPU = torch.device("cpu")
LENGTHS = (64, 256, 1024, 4096)


PREFILL: dict[str, Any] = {"phase": "prefill"}
DECODE: dict[str, Any] = {
    "phase": "decode",
    "mask": {"causal": "bottom_right"},
    "cache": {"kind": "paged", "page_size": 16, "append": 1},
}


def errors(call: dict[str, Any], distribution: str, length: int) -> tuple[float, float]:
    """The kernel's and the total error of one head, the greatest of 64 queries."""
    head = {"batch": 1, "heads_q": 1, "heads_kv": 1, "head_dim": 64}
    lengths = {"seqlen_q": 64, "seqlen_k": length}
    workload = workload_of(**head, **lengths, dtype="float8_e4m3fn", fp8={}, **call)
    given: dict[str, object] = {"distribution": distribution}
    tensors = inputs.make_inputs(workload, given, stream=0, device=CPU)
    drawn = inputs.draw(workload, given, stream=0, device=CPU)
    judge = Oracle(workload, {}, tensors, unquantised=drawn)
    backend = ReferenceBackend()
    prepared = backend.prepare(workload, {}, tensors)
    if workload.cache is not None:
        prepared.append_step()
    report = judge.check(prepared.step(), empty_row_lse=backend.empty_row_lse)
    assert report.ok, (distribution, length, report.reason())
    found = report.tensors["out"]
    assert found.total_max_abs is not None
    return found.max_abs, found.total_max_abs


@pytest.mark.slow
@pytest.mark.parametrize("call", [PREFILL, DECODE], ids=["prefill", "decode"])
def test_both_errors_against_length(call: dict[str, Any]) -> None:
    kernel, total = {}, {}
    for distribution in ("normal", "normal_outliers"):
        print(f"{distribution:16} length   kernel    total")
        for length in LENGTHS:
            place = distribution, length
            kernel[place], total[place] = errors(call, *place)
            print(f"{length:23}  {kernel[place]:.4f}   {total[place]:.4f}")
            # Rounding the inputs costs more than a kernel that rounds its weights alike.
            assert kernel[place] < total[place]
    # Means over more keys of N(0, 1) average both away ...
    for error in (kernel, total):
        assert error["normal", 4096] < error["normal", 1024] < error["normal", 64] / 2
    # ... and outliers, of which longer rows have more, do not.
    for length in LENGTHS[1:]:
        assert total["normal_outliers", length] > 2 * total["normal", length]
    assert total["normal_outliers", 4096] > total["normal_outliers", 64]
    assert kernel["normal_outliers", 4096] > 4 * kernel["normal", 4096]
