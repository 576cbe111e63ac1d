from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any

import pytest
from manifest_fakes import cell, decode, document, loaded, subject

from attnrepro import resources, schema
from attnrepro.errors import InvalidDocument
from attnrepro.manifest.capability import (
    Capability,
    Device,
    Supported,
    Unsupported,
    decide,
    read_release,
    uncompared,
)

if TYPE_CHECKING:
    from pathlib import Path

CLAIMS = resources.images_dir() / "claims"
CPU = Device(vendor="cpu")
HOPPER = Device(vendor="nvidia", architectures=("sm_90",))
CDNA = Device(vendor="amd", architectures=("gfx942",))


@pytest.fixture
def stack() -> Capability:
    return Capability.load(resources.images_dir() / "cpu-torch2.13" / "r1")


def release(name: str) -> Capability:
    return Capability(
        stack=name,
        claims=tuple(
            schema.with_defaults("claims", {"schema": "attnrepro.claims/1", "claims": [c]})[
                "claims"
            ][0]
            for c in read_release(CLAIMS / f"{name}.json")
        ),
    )


def verdict(
    capability: Capability, backend: str, device: Device, *, options: Any = None, **workload: Any
) -> str | None:
    """The reason why a call is not claimed; None where it is."""
    decision = decide(cell(**workload), subject(backend, **(options or {})), capability, device)
    if isinstance(decision, Unsupported):
        assert decision.source
        return decision.reason
    return None


@pytest.mark.parametrize("path", sorted(CLAIMS.glob("*.json")), ids=lambda p: p.stem)
def test_every_claim_is_valid_and_has_source_and_date(path: Path) -> None:
    claims = read_release(path)
    assert claims
    assert all(claim["source"] and claim["date"] for claim in claims)
    names = [(c["backend"], c["case"]) for c in claims]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize(
    ("backend", "workload", "word"),
    [
        ("eager", {"softcap": 30, "alibi": {"slopes": "geometric"}, "head_dim_v": 32}, None),
        ("eager", {"phase": "forward", "dropout": {"p": 0.1, "seed": 1}}, None),
        ("sdpa.math", {"phase": "forward", "dropout": {"p": 0.1, "seed": 1}}, "dropout"),
        ("sdpa.flash", {"head_dim_v": 32}, "head_dim_v"),
        ("sdpa.flash", {"softcap": 30}, "softcap"),
        ("sdpa.flash", {"strides": {"v": [2048, 1, 1024, 16]}}, "strides"),
        ("sdpa.flash", {"mask": {"window": {"left": 3, "right": 0}}}, None),
        ("sdpa.math", {"dtype": "float8_e4m3fn", "fp8": {}}, "float8"),
        ("flex", {"phase": "forward"}, "phase"),
        ("flex", {"layout": "thd"}, "layout"),
        ("flex", {"softcap": 30}, None),
        ("eager", {"accumulate": "float64"}, "accumulate"),
        ("eager", {"dtype_out": "float32"}, "dtype_out"),
    ],
)
def test_the_cpu_stack(
    stack: Capability, backend: str, workload: dict[str, Any], word: str | None
) -> None:
    reason = verdict(stack, backend, CPU, **workload)
    assert (reason is None) == (word is None), reason
    assert word is None or word in str(reason)


def test_rows_without_keys_have_the_value_that_the_release_gives(stack: Capability) -> None:
    tall = {"phase": "forward", "seqlen_q": 5, "seqlen_k": 2}
    nan = {"mask": {"causal": "bottom_right", "masked_rows": "nan"}}
    assert "nan" in str(verdict(stack, "sdpa.flash", CPU, **tall, **nan))
    assert verdict(stack, "sdpa.flash", CPU, **nan) is None  # no such row when lengths are equal


def test_an_unknown_backend_gets_a_suggestion(stack: Capability) -> None:
    assert 'did you mean "sdpa.flash"' in str(verdict(stack, "sdpa.flahs", CPU))


def test_options_are_claimed_by_name_and_value(stack: Capability) -> None:
    assert "option" in str(verdict(stack, "eager", CPU, options={"deterministic": True}))
    assert verdict(stack, "flex", CPU, options={"compile_mode": "default"}) is None
    fa2 = release("flash-attn-2.8.3-cuda")
    step = decode()["workload"]
    many = {"num_splits": 129}
    assert "num_splits=129" in str(verdict(fa2, "flash_attn_2", HOPPER, options=many, **step))
    assert "kv-cache" in str(verdict(fa2, "flash_attn_2", HOPPER, options={"num_splits": 2}))


def test_the_wrong_device_is_the_reason(stack: Capability) -> None:
    assert "not on nvidia" in str(verdict(stack, "sdpa.flash", HOPPER))
    old = Device(vendor="nvidia", architectures=("sm_70",))
    assert "not for sm_70" in str(verdict(release("flash-attn-4-4.0.0b36"), "flash_attn_4", old))


@pytest.mark.parametrize(
    ("name", "backend", "workload"),
    [
        ("flash-attn-2.8.3-rocm-ck", "flash_attn_2.rocm_ck", {"softcap": 30}),
        ("flash-attn-2.8.3-rocm-triton", "flash_attn_2.rocm_triton", {"softcap": 30}),
        (
            "flash-attn-2.8.3-rocm-triton",
            "flash_attn_2.rocm_triton",
            {"mask": {"window": {"left": 4, "right": 4}}},
        ),
    ],
)
def test_what_a_release_silently_ignores_is_never_claimed(
    name: str, backend: str, workload: dict[str, Any]
) -> None:
    assert verdict(release(name), backend, CDNA) is None
    assert "silently ignores" in str(verdict(release(name), backend, CDNA, **workload))


@pytest.mark.parametrize(
    ("workload", "word"),
    [
        ({"phase": "forward_backward"}, "phase"),
        ({"dtype": "float16"}, "dtype"),
        ({"mask": {"window": {"left": 4, "right": 4}}}, "window"),
        ({**decode()["workload"], "cache": {"kind": "paged", "page_size": 16}}, "cache"),
        ({}, None),
        ({"dtype": "float8_e4m3fn", "fp8": {}}, None),
    ],
)
def test_what_fa3_fwd_has_compiled_out(workload: dict[str, Any], word: str | None) -> None:
    reason = verdict(release("fa3-fwd-0.0.3"), "flash_attn_3", HOPPER, **workload)
    assert (reason is None) == (word is None), reason
    assert word is None or word in str(reason)


@pytest.mark.parametrize(
    ("architecture", "workload", "claimed"),
    [
        ("sm_90", {"head_dim": 256}, True),
        ("sm_90", {"head_dim": 192, "head_dim_v": 128}, True),
        ("sm_100", {"head_dim": 192, "head_dim_v": 128}, True),
        ("sm_100", {"head_dim": 160}, False),
        ("sm_100", {"head_dim": 256}, True),
        ("sm_100", {"head_dim": 256, "softcap": 30}, False),
        ("sm_90", {"head_dim": 60}, False),
        ("sm_80", {"phase": "forward_backward"}, False),
        ("sm_120", {"phase": "forward_backward"}, True),
        ("sm_90", {"alibi": {"slopes": "geometric"}}, False),
    ],
)
def test_one_of_several_claims_is_enough(
    architecture: str, workload: dict[str, Any], claimed: bool
) -> None:
    device = Device(vendor="nvidia", architectures=(architecture,))
    reason = verdict(release("flash-attn-4-4.0.0b36"), "flash_attn_4", device, **workload)
    assert (reason is None) is claimed, reason


def test_alignment_counts_only_where_lengths_differ() -> None:
    torch = release("torch-2.13.0-cuda13.0")
    assert verdict(torch, "sdpa.flash", HOPPER, mask={"causal": "bottom_right"}) is None
    wide = {"phase": "forward", "seqlen_k": 32}
    assert verdict(torch, "sdpa.flash", HOPPER, **wide, mask={"causal": "bottom_right"}) is None
    assert verdict(torch, "sdpa.flash", HOPPER, **wide, mask={"causal": "top_left"})
    tall = {"phase": "forward", "seqlen_k": 8, "mask": {"causal": "bottom_right"}}
    assert verdict(torch, "sdpa.flash", HOPPER, **tall)
    assert verdict(torch, "sdpa.flash", HOPPER, **wide) is None


def test_an_architecture_that_is_not_known_refuses_nothing() -> None:
    anywhere = Device(vendor="nvidia")
    assert verdict(release("flash-attn-4-4.0.0b36"), "flash_attn_4", anywhere) is None


def test_backends_that_were_left_out_are_named(stack: Capability) -> None:
    only = cell()
    assert uncompared(only, [subject("eager")], stack, CPU) == ("flex", "sdpa.flash", "sdpa.math")
    training = cell(phase="forward_backward")
    named = [subject("eager"), subject("sdpa.math")]
    assert uncompared(training, named, stack, CPU) == ("sdpa.flash",)


def test_a_thousand_cells(stack: Capability) -> None:
    """Prints what it took (`pytest -s`); less than 1 s is meant, 0.15 s was seen."""
    manifest = loaded(
        document(
            workload={"phase": "forward"},
            sweep={
                "/workload/seqlen_k": list(range(1, 126)),
                "/workload/softcap": [None, 30],
                "/workload/dtype": ["float32", "bfloat16", "float16"],
                "/workload/head_dim_v": [None, 32],
            },
        )
    )
    cells = manifest.cells[:1000]
    assert len(cells) == 1000
    began = time.process_time()
    refusals = 0
    for one in cells:
        for each in manifest.subjects:
            refusals += isinstance(decide(one, each, stack, CPU), Unsupported)
        uncompared(one, manifest.subjects, stack, CPU)
    print(f"1000 cells, 2 subjects: {time.process_time() - began:.2f} s")
    assert refusals == 750  # flash: softcap, or unequal widths


def _own(tmp_path: Path, claims: list[dict[str, Any]]) -> bytes:
    return json.dumps({"schema": "attnrepro.claims/1", "claims": claims}).encode()


def test_claims_of_an_author_come_before_those_of_the_base(
    stack: Capability, tmp_path: Path
) -> None:
    claim = {
        "backend": "toy",
        "release": "toy 1.0",
        "vendors": ["cpu"],
        "phases": ["prefill"],
        "dtypes": ["float32"],
        "head_dim": {"min": 8, "max": 64},
        "head_dim_v": "equal",
        "layouts": ["bshd"],
        "alignments": [],
        "lse": "none",
        "determinism": {"forward": "yes", "backward": "none"},
        "origin": "author",
        "source": "its author",
        "date": "2026-11",
    }
    own = Capability.of_author("toy", _own(tmp_path, [claim]), base=stack, has_adapter=True)
    assert verdict(own, "toy", CPU, dtype="float32", heads_kv=4) is None
    assert "gqa" in str(verdict(own, "toy", CPU, dtype="float32"))
    assert verdict(own, "eager", CPU) is None
    bad = {**claim, "head_dim": "any"}
    with pytest.raises(InvalidDocument) as caught:
        Capability.of_author("toy", _own(tmp_path, [bad]), base=stack, has_adapter=True)
    assert caught.value.problems[0].pointer == "/claims/0/head_dim"


def test_an_adapter_without_claims_answers_for_itself(stack: Capability) -> None:
    own = Capability.of_author("toy", None, base=stack, has_adapter=True)
    decision = decide(cell(), subject("toy"), own, CPU)
    assert isinstance(decision, Supported)
    assert "adapter" in decision.source
    none = Capability.of_author("toy", None, base=stack, has_adapter=False)
    assert isinstance(decide(cell(), subject("toy"), none, CPU), Unsupported)


def test_a_missing_or_nested_include_is_told(tmp_path: Path) -> None:
    folder = tmp_path / "s" / "r1"
    folder.mkdir(parents=True)
    with pytest.raises(InvalidDocument, match="cannot read"):
        Capability.load(folder)
    text = {"schema": "attnrepro.claims/1", "include": ["no-such-release"]}
    (folder / "claims.json").write_text(json.dumps(text))
    with pytest.raises(InvalidDocument, match="no-such-release"):
        Capability.load(folder)
