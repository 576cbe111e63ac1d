from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attnrepro_runner import work
from attnrepro_runner.semantics import Workload


def make(seqlen_q: Any, seqlen_k: Any, **changes: Any) -> Workload:
    document: dict[str, Any] = {
        "phase": "forward",
        "batch": 1,
        "seqlen_q": seqlen_q,
        "seqlen_k": seqlen_k,
        "heads_q": 4,
        "head_dim": 8,
        "dtype": "bfloat16",
    }
    return Workload.parse(document | changes)


def window(left: int | None, right: int | None, causal: str = "none") -> dict[str, Any]:
    return {"mask": {"causal": causal, "window": {"left": left, "right": right}}}


@pytest.mark.parametrize(
    ("seqlen_q", "seqlen_k", "mask", "expected"),
    [
        (1, 8192, {"mask": {"causal": "bottom_right"}}, 8192),
        (512, 4096, {"mask": {"causal": "bottom_right"}}, 1_966_336),
        (512, 4096, {"mask": {"causal": "top_left"}}, 131_328),
        (128, 64, {"mask": {"causal": "bottom_right"}}, 2_080),
        (128, 64, {"mask": {"causal": "top_left"}}, 6_176),
        (4096, 4096, window(256, 0, "top_left"), 1_019_776),
        (4096, 4096, window(255, 0, "top_left"), 1_015_936),
        (129, 32, window(32, 64), 2_576),
        (1024, 1024, window(256, None), 754_048),
    ],
)
def test_check_values(seqlen_q: int, seqlen_k: int, mask: dict[str, Any], expected: int) -> None:
    assert work.work_of(make(seqlen_q, seqlen_k, **mask)).pairs == expected


@given(
    seqlen_q=st.integers(0, 12),
    seqlen_k=st.integers(0, 12),
    causal=st.sampled_from(["none", "top_left", "bottom_right"]),
    left=st.none() | st.integers(0, 13),
    right=st.none() | st.integers(0, 13),
    alignment=st.sampled_from([None, "top_left", "bottom_right"]),
)
def test_pairs_agree_with_counting(
    seqlen_q: int,
    seqlen_k: int,
    causal: str,
    left: int | None,
    right: int | None,
    alignment: str | None,
) -> None:
    mask = window(left, right, causal)
    mask["mask"]["window"]["alignment"] = alignment
    workload = make(seqlen_q, seqlen_k, **mask)
    counted = 0
    for i in range(seqlen_q):
        lo, hi = workload.key_range(0, i)
        counted += max(0, hi - lo)
    assert work.pairs(workload, 0) == counted


def test_a_million_keys_are_counted_by_formula(monkeypatch: pytest.MonkeyPatch) -> None:
    workload = make(2**20, 2**20, **window(4096, 0, "bottom_right"))
    asked, honest = [], type(workload).key_range

    def key_range(self: Workload, b: int, i: int) -> tuple[int, int]:
        asked.append(i)
        return honest(self, b, i)

    monkeypatch.setattr(type(workload), "key_range", key_range)
    count = work.work_of(workload).pairs
    assert len(asked) < 100, "row by row"
    assert count == 2**20 * 4097 - 4096 * 4097 // 2


def test_flops_count_query_heads_and_both_widths() -> None:
    forward = work.work_of(make(4, 6, heads_kv=2, head_dim_v=16))
    assert forward.pairs == 24
    assert forward.flops == forward.flops_forward == 2 * 4 * 24 * (8 + 16)
    both = work.work_of(make(4, 6, heads_kv=2, head_dim_v=16, phase="forward_backward"))
    assert both.flops_backward == 2 * 4 * 24 * (3 * 8 + 2 * 16)
    equal = work.work_of(make(4, 6, phase="forward_backward"))
    assert 2 * equal.flops_backward == 5 * equal.flops_forward


def test_bytes() -> None:
    forward = work.work_of(make(4, 6, heads_kv=2, head_dim_v=16, dtype_out="float32"))
    q, kv, out, lse = 4 * 4 * 8 * 2, 6 * 2 * (8 + 16) * 2, 4 * 4 * 16 * 4, 4 * 4 * 4
    assert forward.bytes == q + kv + out + lse
    both = work.work_of(make(4, 6, heads_kv=2, phase="forward_backward"))
    q, k, out = 4 * 4 * 8 * 2, 6 * 2 * 8 * 2, 4 * 4 * 8 * 2
    assert both.bytes_forward == q + 2 * k + out + lse
    assert both.bytes_backward == (q + 2 * k + 2 * out + lse) + (q + 2 * k)


def test_bytes_count_attended_keys_and_whole_pages() -> None:
    cache = {"kind": "paged", "page_size": 16, "append": 1, "append_in_call": True}
    decode = work.work_of(
        make(1, 100, phase="decode", heads_q=1, cache=cache, **window(20, 0, "bottom_right"))
    )
    row = 2 * 8 * 2
    assert decode.bytes_forward == 8 * 2 + 8 * 2 + 4 + 21 * row
    assert decode.bytes_pages == 48 * row  # keys 79..99 lie in three pages
    assert decode.bytes_append == 2 * row
    assert decode.bytes == decode.bytes_forward + decode.bytes_append
