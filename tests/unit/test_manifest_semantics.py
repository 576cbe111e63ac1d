from __future__ import annotations

from typing import Any

import pytest
from manifest_fakes import cell, decode, document, loaded, refused

from attnrepro.manifest.semantics import facts


@pytest.mark.parametrize(
    ("change", "pointer"),
    [
        ({"seqlen_q": 0}, "/workload/seqlen_q"),
        ({"seqlen_k": 0}, "/workload/seqlen_k"),
        ({"batch": 0}, "/workload/batch"),
        ({"batch": -1}, "/workload/batch"),
        ({"head_dim": 0}, "/workload/head_dim"),
        ({"heads_q": 2**40}, "/workload/heads_q"),
        ({"heads_q": 3}, "/workload/heads_kv"),
        ({"heads_kv": 0}, "/workload/heads_kv"),
        ({"seqlen_q": [16, 16, 16]}, "/workload/seqlen_q"),
        ({"seqlen_q": [16, 8]}, "/workload/seqlen_q"),
        ({"seqlen_k": [16, 8]}, "/workload/seqlen_k"),
        ({"seqlen_k": [16, 0]}, "/workload/seqlen_k"),
        ({"seqlen_k": 32}, "/workload/seqlen_k"),
        ({"seqlen_k": 8}, "/workload/seqlen_q"),
        (
            {"mask": {"causal": True}, "seqlen_k": 32, "cache": {"kind": "contiguous"}},
            "/workload/mask/causal",
        ),
        ({"mask": {"window": {"left": None, "right": None}}}, "/workload/mask/window"),
        (
            {
                "mask": {
                    "causal": "top_left",
                    "window": {"left": 1, "right": 0, "alignment": "bottom_right"},
                }
            },
            "/workload/mask/window/alignment",
        ),
        ({"mask": {"window": {"left": -1, "right": 0}}}, "/workload/mask/window/left"),
        ({"dropout": {"p": 0.1, "seed": 1}}, "/workload/dropout"),
        ({"phase": "forward", "cache": {"kind": "contiguous"}}, "/workload/cache"),
        ({"dtype": "float8_e4m3fn"}, "/workload/fp8"),
        ({"fp8": {}}, "/workload/fp8"),
        ({"dtype": "float8_e4m3fn", "fp8": {}, "phase": "forward_backward"}, "/workload/phase"),
        ({"dtype": "float8_e4m3fn", "fp8": {"q_descale": [1, 2, 3]}}, "/workload/fp8/q_descale"),
        ({"alibi": {"slopes": [0.5]}}, "/workload/alibi/slopes"),
        ({"scale": 0}, "/workload/scale"),
        ({"softcap": -1}, "/workload/softcap"),
        ({"strides": {"k": [0, 128, 64, 1]}}, "/workload/strides/k"),
        ({"strides": {"v": [2048, 128, 0, 1]}}, "/workload/strides/v"),
        ({"strides": {"q": [4096, 256, 64]}}, "/workload/strides/q"),
        (
            {
                "batch": 65535,
                "seqlen_q": 16777216,
                "seqlen_k": 16777216,
                "heads_q": 65535,
                "heads_kv": 65535,
                "head_dim": 1024,
            },
            "/workload",
        ),
    ],
)
def test_a_cell_without_meaning_is_refused_by_its_field(
    change: dict[str, Any], pointer: str
) -> None:
    assert pointer in refused(document(workload=change))


@pytest.mark.parametrize(
    ("change", "pointer"),
    [
        ({"cache": None}, "/workload/cache"),
        ({"seqlen_q": 65}, "/workload/seqlen_q"),
        ({"cache": {"kind": "contiguous", "append": 2}}, "/workload/cache/append"),
        (
            {"cache": {"kind": "contiguous", "append_in_call": True}},
            "/workload/cache/append_in_call",
        ),
        ({"cache": {"kind": "contiguous", "capacity": 63}}, "/workload/cache/capacity"),
        ({"cache": {"kind": "contiguous", "page_size": 16}}, "/workload/cache/page_size"),
        ({"cache": {"kind": "paged"}}, "/workload/cache/page_size"),
        (
            {"cache": {"kind": "paged", "page_size": 16, "pool_pages": 7}},
            "/workload/cache/pool_pages",
        ),
        (
            {"cache": {"kind": "paged", "page_size": 16}, "strides": {"k": [8192, 128, 64, 1]}},
            "/workload/strides/k",
        ),
        ({"dropout": {"p": 0.5, "seed": 3}}, "/workload/dropout"),
    ],
)
def test_a_decode_step_without_meaning_is_refused(change: dict[str, Any], pointer: str) -> None:
    assert pointer in refused(decode(**change))


@pytest.mark.parametrize(
    ("value", "pointer", "found", "fix"),
    [
        (document(workload={"seqlen_q": 65}), "/seqlen_q", "65", "raise seqlen_k"),
        (decode(seqlen_q=65), "/seqlen_q", "65", "raise seqlen_k"),
        (document(workload={"seqlen_q": [3, 4]}), "/seqlen_q", "[3, 4]", 'layout "thd"'),
        (decode(cache={"kind": "paged"}), "/cache/page_size", "null", "give page_size"),
        (
            decode(cache={"kind": "contiguous", "page_size": 16}),
            "/cache/page_size",
            "16",
            "leave page_size out",
        ),
        (
            decode(cache={"kind": "contiguous", "pool_pages": 16}),
            "/cache/pool_pages",
            "16",
            "leave pool_pages out",
        ),
        (
            document(workload={"fp8": {"granularity": "tensor", "q_descale": [0.5]}}),
            "/fp8",
            '{"granularity": "tensor", "q_descale": [0.5], "k_descale": "measured", '
            '"v_descale": "measured"}',
            "and only there",
        ),
        (document(workload={"dtype": "float8_e4m3fn"}), "/fp8", "null", "give fp8"),
        (
            document(
                workload={"phase": "forward", "cache": {"kind": "contiguous"}},
            ),
            "/cache",
            '"contiguous"',
            "set cache to null",
        ),
    ],
)
def test_what_was_found_is_json_and_the_fix_is_of_its_rule(
    value: dict[str, Any], pointer: str, found: str, fix: str
) -> None:
    problem = refused(value)[f"/workload{pointer}"]
    assert problem.found == found
    assert fix in problem.fix


@pytest.mark.parametrize(
    "change",
    [
        {"phase": "forward", "seqlen_k": 8},
        {"phase": "forward_backward", "dropout": {"p": 0.25, "seed": 1, "offset": 8}},
        {"seqlen_k": 64, "cache": {"kind": "contiguous"}, "mask": {"causal": "bottom_right"}},
        {"layout": "thd", "seqlen_q": [16, 0], "seqlen_k": [16, 0]},
        {"layout": "bhsd", "mask": {"window": {"left": 4, "right": None}}},
        {"dtype": "float8_e4m3fn", "fp8": {}},
        {"strides": {"v": [2048, 1, 16 * 64, 16]}},
        {"alibi": {"slopes": "geometric"}, "softcap": 30, "scale": 0.5},
    ],
)
def test_what_has_a_meaning_is_accepted(change: dict[str, Any]) -> None:
    assert len(loaded(document(workload=change)).cells) == 1


def test_low_entropy_is_refused_for_timing_only() -> None:
    value = document(inputs={"distribution": "one_hot"})
    assert set(refused(value)) == {"/inputs/distribution"}
    value["timing"] = {"launches": 0}
    assert loaded(value).cells
    assert loaded(document(inputs={"distribution": "normal_outliers"})).cells


@pytest.mark.parametrize(
    ("change", "pointer"),
    [
        ({"device": {"threads": ...}}, "/device/threads"),
        ({"device": {"count": 2}}, "/device/count"),
        ({"device": {"clocks": {"policy": "lock", "sm_mhz": 1000}}}, "/device/clocks/policy"),
        ({"device": {"vendor": "nvidia", "clocks": {"policy": "lock"}}}, "/device/clocks/sm_mhz"),
        ({"device": {"vendor": "nvidia"}, "bits": {"profile": "portable"}}, "/bits/profile"),
        ({"timing": {"clocks": ["kernel"]}}, "/timing/clocks/0"),
        ({"timing": {"clocks": ["request"]}}, "/request"),
        ({"timing": {"samples": [100, 10]}}, "/timing/samples"),
        ({"timing": {"warmup_seconds": [2, 1]}}, "/timing/warmup_seconds"),
        ({"accuracy": {"output": {}}}, "/accuracy/output/multiplier"),
        (
            {"inputs": {"expected": {"prefil": {"q": "sha256:" + "ab" * 32}}}},
            "/inputs/expected/prefil",
        ),
        (
            {"inputs": {"expected": {"prefill": {"q": "sha256:" + "a" * 64}}}},
            "/inputs/expected/prefill/q",
        ),
        (
            {
                "variants": [
                    {"id": "a", "set": {"/workload/batch": 1}},
                    {"id": "a", "set": {"/workload/batch": 2}},
                ]
            },
            "/variants/1/id",
        ),
        (
            {"variants": [{"id": "a", "set": {"/workload/batch": 1}, "subjects": ["flas"]}]},
            "/variants/0/subjects/0",
        ),
    ],
)
def test_the_manifest_as_a_whole(change: dict[str, Any], pointer: str) -> None:
    assert pointer in refused(document(**change))


def test_figures_of_a_cell_are_exact() -> None:
    figures = facts(cell(seqlen_q=512, seqlen_k=512, batch=1, mask={"causal": "top_left"}).parsed)
    assert figures.work.pairs == 512 * 513 // 2
    assert figures.work.flops == 2 * 4 * figures.work.pairs * 128
    assert figures.largest_offset == 512 * 4 * 64 - 1
    assert not figures.offset_beyond_int32


@pytest.mark.parametrize(
    ("stride", "beyond"), [(2**31 - 15 * 256 - 3 * 64 - 64, False), (2**31, True)]
)
def test_offsets_on_both_sides_of_two_to_the_31(stride: int, beyond: bool) -> None:
    figures = facts(cell(strides={"q": [stride, 256, 64, 1]}).parsed)
    assert figures.offset_beyond_int32 is beyond
    assert figures.largest_offset == stride + 15 * 256 + 3 * 64 + 63


def test_operations_beyond_exact_numbers_are_a_note_and_no_error() -> None:
    manifest = loaded(
        document(
            workload={
                "phase": "forward_backward",
                "batch": 8,
                "seqlen_q": 1 << 20,
                "seqlen_k": 1 << 20,
                "heads_q": 128,
                "heads_kv": 8,
                "head_dim": 128,
            }
        )
    )
    assert any("beyond 2^53" in note.text for note in manifest.notes)
