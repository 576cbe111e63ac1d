"""What the CPU stack claims, and what its adapters accept, is the same."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from manifest_fakes import cell, subject

from attnrepro import resources
from attnrepro.errors import InvalidDocument
from attnrepro.manifest.capability import Capability, Device, Supported, decide

CHANGES: dict[str, list[Any]] = {
    "phase": ["prefill", "forward", "forward_backward", "decode"],
    "dtype": ["bfloat16", "float32", "float16", "float8_e4m3fn"],
    "head_dim_v": [None, 32],
    "layout": ["bshd", "bhsd", "thd"],
    "mask": [
        {"causal": "top_left"},
        {"causal": "bottom_right"},
        {"window": {"left": 3, "right": 2}},
        {"window": {"left": 0, "right": None, "alignment": "top_left"}, "masked_rows": "nan"},
    ],
    "seqlen_k": [16, 24, [16, 0]],
    "softcap": [None, 20],
    "alibi": [None, {"slopes": "geometric"}],
    "dropout": [None, {"p": 0.1, "seed": 1}],
    "dtype_out": [None, "float32"],
    "accumulate": ["float32", "float64"],
    "scale": ["rsqrt_head_dim", 0.3],
    "heads_kv": [2, 4],
    "strides": [{}, {"v": [2048, 1, 1024, 16]}, {"q": [8192, 512, 64, 1]}],
    "cache": [None, {"kind": "contiguous"}, {"kind": "paged", "page_size": 8}],
}


def _calls() -> list[dict[str, Any]]:
    """The neutral call, each change alone, and each two changes together."""
    singles = [{name: value} for name, values in CHANGES.items() for value in values[1:]]
    pairs = [{**a, **b} for a, b in itertools.combinations(singles, 2) if not a.keys() & b.keys()]
    return [{}, *singles, *pairs]


def _cells() -> list[Any]:
    found = []
    for change in _calls():
        if change.get("dtype") == "float8_e4m3fn":
            change["fp8"] = {}
        try:
            found.append(cell(**change))
        except InvalidDocument:
            continue
    return found


@pytest.fixture(scope="module")
def cells() -> list[Any]:
    return _cells()


@pytest.mark.parametrize("backend", ["eager", "sdpa.math", "sdpa.flash", "flex"])
def test_claims_and_adapters_agree(backend: str, cells: list[Any]) -> None:
    pytest.importorskip("torch", reason="adapters need torch")
    from attnrepro_runner.backends.base import Unsupported
    from attnrepro_runner.backends.registry import load

    capability = Capability.load(resources.images_dir() / "cpu-torch2.13" / "r1")
    adapter = load(backend)
    counts = {True: 0, False: 0}
    for one in cells:
        decision = decide(one, subject(backend), capability, Device(vendor="cpu"))
        try:
            adapter.check(one.parsed, {})
            reason = None
            left = one.parsed.active_fields() - adapter.consumed(one.parsed, {})
            if left:
                reason = f"not consumed: {sorted(left)}"
        except Unsupported as error:
            reason = str(error)
        claimed = isinstance(decision, Supported)
        counts[claimed] += 1
        if backend == "sdpa.flash" and one.workload["strides"]["v"]:
            # The adapter asks torch with contiguous tensors; torch refuses these in the call.
            assert not claimed
            continue
        assert claimed is (reason is None), (one.workload, decision, reason)
    assert min(counts.values()) > 20
