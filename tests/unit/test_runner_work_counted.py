"""Pairs, FLOPs, bytes and pages of random workloads against counting them one by one.

Written from docs/manifest.md and from what the formulas' ids stand for, over the manifest's own
document: which (query, key) is attended is asked of each alone, and traffic is a set of the
elements that a call must touch.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from workload_strategies import documents

from attnrepro_runner.semantics import Workload
from attnrepro_runner.work import Work, pairs, work_of

SIZES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1}


def attends(document: dict[str, Any], b: int, i: int, j: int) -> bool:
    """Whether query i of sequence b attends key j."""
    shift = {
        "top_left": 0,
        "bottom_right": document["seqlen_k"][b] - document["seqlen_q"][b],
    }
    causal, window = document["mask"]["causal"], document["mask"]["window"]
    if causal != "none" and j > i + shift[causal]:
        return False
    if window is None:
        return True
    # null: causal's alignment, or bottom_right.
    default = causal if causal != "none" else "bottom_right"
    diagonal = i + shift[window["alignment"] or default]
    behind, ahead = diagonal - j, j - diagonal
    return (window["left"] is None or behind <= window["left"]) and (
        window["right"] is None or ahead <= window["right"]
    )


def counted(document: dict[str, Any], seen: Counter[str]) -> Work:
    """Count a workload; note in `seen` what kinds of it there were."""
    batch, d_qk = document["batch"], document["head_dim"]
    d_v = document["head_dim_v"] or d_qk
    heads_q, heads_kv = document["heads_q"], document["heads_kv"]
    is_fp8 = document["dtype"] == "float8_e4m3fn"
    size = SIZES[document["dtype"]]
    out = SIZES[document["dtype_out"] or ("bfloat16" if is_fp8 else document["dtype"])]
    cache = document.get("cache") or {}
    page_size = cache.get("page_size")

    attended = 0
    multiplications = 0  # by one FLOP, each with the addition of its product
    backward_multiplications = 0
    rows: set[tuple[int, int, int]] = set()
    keys: set[tuple[int, int, int]] = set()
    every_key: set[tuple[int, int, int]] = set()
    pages: set[tuple[int, int, int]] = set()
    for b in range(batch):
        for h in range(heads_q):
            g = h // (heads_q // heads_kv)
            for j in range(document["seqlen_k"][b]):
                every_key.add((b, g, j))
            for i in range(document["seqlen_q"][b]):
                rows.add((b, h, i))
                found = [j for j in range(document["seqlen_k"][b]) if attends(document, b, i, j)]
                seen["rows without keys"] += not found
                attended += len(found) if h == 0 else 0
                for j in found:
                    keys.add((b, g, j))
                    if page_size is not None:
                        pages.add((b, g, j // page_size))
                    multiplications += d_qk + d_v  # S = QK', O = PV
                    # S again, dP = dO V', dV = P'dO, dQ = dS K, dK = dS'Q
                    backward_multiplications += d_qk + d_v + d_v + d_qk + d_qk

    key_bytes = (d_qk + d_v) * size
    q_bytes, o_bytes, lse_bytes = (len(rows) * n for n in (d_qk * size, d_v * out, 4))
    kv_bytes = len(keys) * key_bytes
    forward = q_bytes + kv_bytes + o_bytes + lse_bytes
    backward = 0
    if document["phase"] == "forward_backward":
        read = q_bytes + kv_bytes + o_bytes + o_bytes + lse_bytes  # O and dO
        written = q_bytes + len(every_key) * key_bytes  # dQ; dK and dV, zeros too
        backward = read + written
        seen["backward"] += 1
    else:
        backward_multiplications = 0
    append = 0
    if cache.get("append_in_call"):
        count = cache["append"]
        new = [(b, g, n) for b in range(batch) for g in range(heads_kv) for n in range(count)]
        append = 2 * len(new) * key_bytes  # read, and written to the cache
        seen["appends"] += 1
    in_pages = len(pages) * (page_size or 0)
    seen["keys that nobody attends"] += len(keys) < len(every_key)
    seen["gaps in pages"] += in_pages > len(keys)
    if page_size is not None:
        by_head = {bg: [k for k in keys if k[:2] == bg] for bg in {k[:2] for k in keys}}
        fewest = sum(-(-len(ks) // page_size) for ks in by_head.values())
        seen["pages split by a window"] += len(pages) > fewest
        seen["pages left out"] += pages < {(b, g, j // page_size) for b, g, j in every_key}
    seen["grouped heads"] += heads_q > heads_kv
    seen["float8"] += is_fp8
    seen["other output"] += out != size
    return Work(
        pairs=attended,
        flops_forward=2 * multiplications,
        flops_backward=2 * backward_multiplications,
        bytes_forward=forward,
        bytes_backward=backward,
        bytes_append=append,
        bytes_pages=in_pages * key_bytes,
    )


KINDS = {
    "rows without keys",
    "keys that nobody attends",
    "backward",
    "appends",
    "grouped heads",
    "float8",
    "other output",
}
IN_PAGES = {"appends", "gaps in pages", "pages left out", "pages split by a window"}


@st.composite
def windows_in_pages(draw: st.DrawFn) -> dict[str, Any]:
    """Draw a decode whose window begins anywhere in a page."""
    document = draw(documents(longest=16, head_dims=(4, 6), phases=("decode",)))
    size, left = draw(st.sampled_from([2, 3, 4, 8])), draw(st.integers(0, 5))
    document["cache"] |= {"kind": "paged", "page_size": size, "pool_pages": None}
    document["mask"]["window"] = {"left": left, "right": None, "alignment": "bottom_right"}
    return document | {"strides": {}}


def compare(examples: int, kinds: set[str], workloads: st.SearchStrategy[dict[str, Any]]) -> None:
    seen: Counter[str] = Counter()

    @settings(
        max_examples=examples,
        deadline=None,
        derandomize=True,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )
    @given(document=workloads)
    def each(document: dict[str, Any]) -> None:
        workload = Workload.parse(document)
        expected, found = counted(document, seen), work_of(workload)
        assert found == expected
        assert sum(pairs(workload, b) for b in range(workload.batch)) == expected.pairs
        assert found.flops == expected.flops_forward + expected.flops_backward
        whole = expected.bytes_forward + expected.bytes_backward + expected.bytes_append
        assert found.bytes == whole

    each()
    assert {kind for kind in kinds if seen[kind] >= 3} == kinds, seen


def test_work_of_random_workloads_is_what_counting_gives() -> None:
    compare(300, KINDS, documents(longest=11, head_dims=(4, 6), widest_window=13))


def test_work_in_pages_is_what_counting_gives() -> None:
    compare(150, IN_PAGES, windows_in_pages())


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_work_of_many_random_workloads_is_what_counting_gives() -> None:
    compare(3000, KINDS, documents(longest=19, head_dims=(4, 6), widest_window=21))
    compare(1000, IN_PAGES, windows_in_pages())
