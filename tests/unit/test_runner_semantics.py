from __future__ import annotations

import subprocess
import sys
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import attnrepro_runner
from attnrepro_runner.semantics import ACTIVE_FIELDS, Workload, WorkloadError


def make(**changes: Any) -> Workload:
    document: dict[str, Any] = {
        "phase": "forward",
        "batch": 1,
        "seqlen_q": 8,
        "seqlen_k": 8,
        "heads_q": 4,
        "head_dim": 64,
        "dtype": "bfloat16",
    }
    return Workload.parse(document | changes)


def rows(workload: Workload, b: int = 0) -> list[str]:
    found = []
    for i in range(workload.seqlens_q[b]):
        lo, hi = workload.key_range(b, i)
        found.append("".join("01"[lo <= j < hi] for j in range(workload.seqlens_k[b])))
    return found


def defects(**changes: Any) -> dict[str, str]:
    with pytest.raises(WorkloadError) as caught:
        make(**changes)
    return {d.pointer: d.allowed for d in caught.value.defects}


def test_alignments() -> None:
    top_left = make(seqlen_q=2, seqlen_k=5, mask={"causal": "top_left"})
    assert rows(top_left) == ["10000", "11000"]
    bottom_right = make(seqlen_q=2, seqlen_k=5, mask={"causal": "bottom_right"})
    assert rows(bottom_right) == ["11110", "11111"]
    tall = make(seqlen_q=5, seqlen_k=2, mask={"causal": "bottom_right"})
    assert rows(tall) == ["00", "00", "00", "10", "11"]
    assert [tall.is_empty_row(0, i) for i in range(5)] == [True] * 3 + [False] * 2
    assert tall.attending_rows(0) == range(3, 5)
    decode = make(phase="decode", seqlen_q=1, seqlen_k=4, mask={"causal": "bottom_right"})
    assert rows(decode) == ["1111"]


def test_windows() -> None:
    window = make(seqlen_q=6, seqlen_k=6, mask={"window": {"left": 2, "right": 0}})
    assert rows(window)[5] == "000111"
    both = make(
        seqlen_q=4,
        seqlen_k=4,
        mask={"causal": "top_left", "window": {"left": 1, "right": 3}},
    )
    assert rows(both) == ["1000", "1100", "0110", "0011"]
    mixed = make(
        seqlen_q=2,
        seqlen_k=4,
        mask={
            "causal": "top_left",
            "window": {"left": 0, "right": None, "alignment": "bottom_right"},
        },
    )
    assert rows(mixed) == ["0000", "0000"]
    assert mixed.attended_keys(0) == range(0)


def test_packed_sequences_with_an_empty_key_set() -> None:
    packed = make(batch=2, seqlen_q=[2, 1], seqlen_k=[0, 4], layout="thd")
    assert rows(packed, 0) == ["", ""]
    assert rows(packed, 1) == ["1111"]
    assert packed.has_empty_rows
    assert packed.shape("q") == (3, 4, 64)
    assert packed.shape("lse") == (4, 3)


@given(
    seqlen_q=st.integers(0, 9),
    seqlen_k=st.integers(0, 9),
    causal=st.sampled_from(["none", "top_left", "bottom_right"]),
    left=st.none() | st.integers(0, 10),
    right=st.none() | st.integers(0, 10),
    alignment=st.sampled_from([None, "top_left", "bottom_right"]),
)
def test_ranges_agree_with_the_definition(
    seqlen_q: int,
    seqlen_k: int,
    causal: str,
    left: int | None,
    right: int | None,
    alignment: str | None,
) -> None:
    workload = make(
        seqlen_q=seqlen_q,
        seqlen_k=seqlen_k,
        mask={
            "causal": causal,
            "window": {"left": left, "right": right, "alignment": alignment},
        },
    )
    offsets = {"top_left": 0, "bottom_right": seqlen_k - seqlen_q}
    diagonal = offsets[alignment or (causal if causal != "none" else "bottom_right")]
    attended = {
        (i, j)
        for i in range(seqlen_q)
        for j in range(seqlen_k)
        if (causal == "none" or j <= i + offsets[causal])
        and (left is None or j >= i + diagonal - left)
        and (right is None or j <= i + diagonal + right)
    }
    for i in range(seqlen_q):
        lo, hi = workload.key_range(0, i)
        assert {j for j in range(seqlen_k) if lo <= j < hi} == {
            j for other, j in attended if other == i
        }
    assert set(workload.attending_rows(0)) == {i for i, _ in attended}
    assert set(workload.attended_keys(0)) == {j for _, j in attended}
    assert workload.has_empty_rows == (len({i for i, _ in attended}) < seqlen_q)


def test_bare_causal_needs_equal_lengths() -> None:
    assert make(mask={"causal": True}).mask.causal == "top_left"
    assert "differ" in defects(seqlen_q=4, mask={"causal": True})["/mask/causal"]
    assert make(seqlen_q=4, mask={"causal": False}).mask.causal == "none"


def test_numbers_of_the_logit() -> None:
    assert make().scale_value == 0.125
    assert make(scale=0.5).scale_value == 0.5
    assert make(alibi={"slopes": "geometric"}).alibi_slopes() == (0.25, 0.0625, 2**-6, 2**-8)
    (slope,) = set(make(alibi={"slopes": [0.1] * 4}).alibi_slopes() or ())
    assert slope == 0.10000000149011612
    assert [make(heads_kv=2).kv_head(h) for h in range(4)] == [0, 0, 1, 1]


def test_pages() -> None:
    cache = {"kind": "paged", "page_size": 4, "capacity": 10, "pool_pages": 9}
    paged = make(phase="decode", batch=2, seqlen_q=1, seqlen_k=[5, 10], cache=cache)
    table = paged.page_table()
    assert table is not None
    assert [len(row) for row in table] == [3, 3]
    assert len({page for row in table for page in row}) == 6
    assert paged.shape("k") == (9, 4, 4, 64)
    assert table == paged.page_table()
    other = make(
        phase="decode",
        batch=2,
        seqlen_q=1,
        seqlen_k=[5, 10],
        cache=cache | {"permutation_seed": None},
    )
    assert other.page_table() == ((0, 1, 2), (3, 4, 5))


def test_every_permutation_is_drawn() -> None:
    from attnrepro_runner.philox import permutation

    assert {permutation(3, seed) for seed in range(64)} == set(permutations(range(3)))
    # Fixed for ever: artifacts name a seed, not a table.
    assert permutation(8, 0) == (4, 2, 6, 1, 3, 7, 5, 0)


def test_active_fields_name_what_is_not_neutral() -> None:
    assert make().active_fields() == frozenset()
    everything = make(
        phase="prefill",
        batch=2,
        layout="thd",
        seqlen_q=[2, 3],
        seqlen_k=[3, 4],
        heads_kv=2,
        head_dim_v=32,
        dtype="float8_e4m3fn",
        fp8={},
        accumulate="float64",
        strides={name: [4096, 512, 2] for name in "q"}
        | {name: [65536, 4096, 512, 2] for name in "kv"},
        mask={
            "causal": "bottom_right",
            "window": {"left": 0, "right": 0, "alignment": "top_left"},
        },
        scale=1.0,
        softcap=15.0,
        alibi={"slopes": "geometric"},
        cache={"kind": "paged", "page_size": 2, "append": 1},
    )
    assert everything.active_fields() == set(ACTIVE_FIELDS) - {"dropout", "mask.masked_rows"}
    training = make(seqlen_q=9, mask={"causal": "bottom_right"}, dropout={"p": 0.1, "seed": "9"})
    assert training.active_fields() == {"mask.causal", "mask.masked_rows", "dropout"}


def test_all_defects_at_once() -> None:
    found = defects(batch=0, heads_q=True, dtype="int8", unknown=1, mask={"casual": "none"})
    assert set(found) == {"/batch", "/heads_q", "/dtype", "/unknown", "/mask/casual"}


@pytest.mark.parametrize(
    ("changes", "pointer"),
    [
        ({"heads_q": 3, "heads_kv": 2}, "/heads_kv"),
        ({"batch": 2, "seqlen_q": [1, 2]}, "/seqlen_q"),
        ({"batch": 2, "seqlen_k": [1, 2]}, "/seqlen_k"),
        ({"batch": 2, "seqlen_k": [1]}, "/seqlen_k"),
        ({"seqlen_q": -1}, "/seqlen_q"),
        ({"seqlen_q": 1.5}, "/seqlen_q"),
        ({"cache": {"kind": "contiguous"}}, "/cache"),
        ({"phase": "decode", "seqlen_q": 0}, "/seqlen_q"),
        ({"phase": "decode", "seqlen_q": 9}, "/seqlen_q"),
        ({"phase": "decode", "dropout": {"p": 0.5, "seed": 1}}, "/dropout"),
        ({"dropout": {"p": 1.0, "seed": 1}}, "/dropout/p"),
        ({"dropout": {"p": 0.5, "seed": -1}}, "/dropout/seed"),
        ({"dropout": {"p": 0.5, "seed": "9" * 5000}}, "/dropout/seed"),
        ({"dropout": {"p": 0.5}}, "/dropout/seed"),
        ({"scale": 0}, "/scale"),
        ({"scale": float("nan")}, "/scale"),
        ({"softcap": "15"}, "/softcap"),
        ({"alibi": {"slopes": [1.0]}}, "/alibi/slopes"),
        ({"fp8": {}}, "/fp8"),
        ({"dtype": "float8_e4m3fn"}, "/fp8"),
        ({"phase": "decode", "cache": {"kind": "paged"}}, "/cache/page_size"),
        ({"phase": "decode", "cache": {"kind": "contiguous", "capacity": 4}}, "/cache/capacity"),
        ({"phase": "decode", "cache": {"kind": "contiguous", "append": 9}}, "/cache/append"),
        (
            {"phase": "decode", "cache": {"kind": "contiguous", "append_in_call": True}},
            "/cache/append_in_call",
        ),
        (
            {"phase": "decode", "cache": {"kind": "paged", "page_size": 4, "pool_pages": 1}},
            "/cache/pool_pages",
        ),
        ({"strides": {"v": [1, 1, 1, 1]}}, "/strides/v"),
        ({"strides": {"v": [1, 1, 1]}}, "/strides/v"),
        ({"strides": {"k": [2048, 256, 64, 1 << 62]}}, "/strides/k"),
        ({"mask": "causal"}, "/mask"),
    ],
)
def test_meaningless_workloads_are_refused(changes: dict[str, Any], pointer: str) -> None:
    assert pointer in defects(**changes)


def test_largest_offset_is_known_before_allocation() -> None:
    strided = make(seqlen_q=2, heads_q=1, head_dim=1, strides={"q": [0, 2**31, 1, 1]})
    assert strided.storage_elements("q") == 2**31 + 1


def test_stdlib_alone_is_imported() -> None:
    root = Path(attnrepro_runner.__file__).parents[1]
    code = (
        f"import sys; sys.path.insert(0, {str(root)!r})\n"
        "import attnrepro_runner.semantics, attnrepro_runner.work, attnrepro_runner.orderstats\n"
        "print([m for m in ('torch', 'numpy', 'attnrepro') if m in sys.modules])"
    )
    answer = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert answer.stdout.strip() == "[]"
