"""Libraries that take an argument and drop it in silence, with the adapter's guard taken away.

The guard is the first line; the probes and the oracle are the second, which would hold where a
release drops what nobody knew of.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import gpu_fakes
import pytest
import torch
from gpu_fakes import workload

from attnrepro_runner import inputs
from attnrepro_runner.backends.base import Unsupported
from attnrepro_runner.backends.flash_attn_2 import (
    FlashAttention2,
    FlashAttention2RocmCk,
    FlashAttention2RocmTriton,
)
from attnrepro_runner.backends.flash_attn_3 import FlashAttention3
from attnrepro_runner.oracle import Oracle
from attnrepro_runner.probes import run_probes

if TYPE_CHECKING:
    from collections.abc import Mapping

    from attnrepro_runner.backends.base import Backend
    from attnrepro_runner.semantics import Workload

CPU = torch.device("cpu")
SMALL: dict[str, Any] = {"seqlen_q": 24, "seqlen_k": 24, "heads_q": 2, "heads_kv": 1}
BAND = {"window": {"left": 5, "right": 2}}
SLIDING = {"causal": "bottom_right", "window": {"left": 5, "right": None}}
CAUSAL = {"causal": "bottom_right"}


class UnguardedCk(FlashAttention2RocmCk):
    """Refuses what the CUDA build refuses, and nothing for being dropped."""

    def check(self, workload: Workload, options: Mapping[str, object]) -> None:
        FlashAttention2.check(self, workload, options)


class UnguardedTriton(FlashAttention2RocmTriton):
    def check(self, workload: Workload, options: Mapping[str, object]) -> None:
        FlashAttention2.check(self, workload, options)


def verdict(backend: Backend, one: Workload) -> str:
    """What a check of the cell would end with."""
    try:
        probed = run_probes(backend, {}, one, CPU)
        tensors = inputs.make_inputs(one, {}, stream=0, device="cpu")
        prepared = backend.prepare(one, {}, tensors)
        prepared.append_step()
        outputs = prepared.step()
    except Unsupported:
        return "UNSUPPORTED"
    report = Oracle(one, {}, tensors).check(outputs, empty_row_lse=backend.empty_row_lse)
    found = {probed.status(), report.status()}
    return "INCORRECT" if "INCORRECT" in found else "/".join(sorted(found))


ROCM = [
    (FlashAttention2RocmCk, UnguardedCk, "softcap", {"softcap": 5}),
    (FlashAttention2RocmCk, UnguardedCk, "softcap", {"softcap": 50}),
    (FlashAttention2RocmCk, UnguardedCk, "softcap", {"softcap": 30, "phase": "forward_backward"}),
    (FlashAttention2RocmTriton, UnguardedTriton, "softcap", {"softcap": 20}),
    (FlashAttention2RocmTriton, UnguardedTriton, "window", {"mask": BAND}),
    (FlashAttention2RocmTriton, UnguardedTriton, "window", {"mask": SLIDING}),
    (FlashAttention2RocmTriton, UnguardedTriton, "window", {"mask": SLIDING, "layout": "thd"}),
]


@pytest.mark.parametrize(("guarded", "unguarded", "dropped", "changes"), ROCM)
def test_what_a_rocm_build_drops_never_passes(
    monkeypatch: pytest.MonkeyPatch,
    guarded: type[Backend],
    unguarded: type[Backend],
    dropped: str,
    changes: dict[str, Any],
) -> None:
    gpu_fakes.install(monkeypatch)
    one = workload(**SMALL | changes)
    assert verdict(unguarded(), one) == "PASS"
    name = "flash_attn.flash_attn_interface"
    monkeypatch.setitem(sys.modules, name, gpu_fakes.flash_attn_2([], drops={dropped}))
    assert verdict(unguarded(), one) == "INCORRECT"
    assert verdict(guarded(), one) == "UNSUPPORTED"


CACHE: dict[str, Any] = {"phase": "decode", "seqlen_q": 2, "seqlen_k": [40, 33], "mask": CAUSAL}
PAGED = {"kind": "paged", "page_size": 8, "capacity": 48, "pool_pages": 12}
APPENDED = {"kind": "contiguous", "append": 2, "append_in_call": True}
FA3 = [
    ("LOCAL", {"mask": BAND}),
    ("LOCAL", {"mask": SLIDING}),
    ("SOFTCAP", {"softcap": 5}),
    ("SOFTCAP", {"softcap": 50}),
    ("PAGEDKV", CACHE | {"cache": PAGED}),
    ("APPENDKV", CACHE | {"cache": APPENDED}),
    ("VARLEN", {"layout": "thd", "seqlen_q": [40, 24], "seqlen_k": [40, 24]}),
    ("BACKWARD", {"phase": "forward_backward"}),
    ("FP16", {"dtype": "float16"}),
]
"""Features of the build, and a call that needs each."""


@pytest.mark.parametrize(("feature", "changes"), FA3)
def test_what_a_build_of_fa3_lacks_never_passes(
    monkeypatch: pytest.MonkeyPatch, feature: str, changes: dict[str, Any]
) -> None:
    gpu_fakes.install(monkeypatch)
    one = workload(**SMALL | changes)
    assert verdict(FlashAttention3(), one) == "PASS"
    fake = gpu_fakes.flash_attn_3([], drops={feature})
    fake.__spec__ = sys.modules["fa3_fwd_interface"].__spec__
    monkeypatch.setitem(sys.modules, "fa3_fwd_interface", fake)
    assert verdict(FlashAttention3(), one) == "INCORRECT"
    flags = {f"FLASHATTENTION_DISABLE_{feature}": True}
    monkeypatch.setattr(sys.modules["fa3_fwd_config"], "CONFIG", {"build_flags": flags})
    assert verdict(FlashAttention3(), one) == "UNSUPPORTED"
