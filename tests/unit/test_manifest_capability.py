from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import pytest
from manifest_fakes import cell, decode, subject

from attnrepro import resources, schema
from attnrepro.errors import InvalidDocument
from attnrepro.manifest import callfacts
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
    assert all(claim["source"] for claim in claims)
    assert all(len(claim["date"]) == len("2026-11-30") for claim in claims)
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
        ({"phase": "forward_backward"}, "without BACKWARD"),
        ({"dtype": "float16"}, "without FP16"),
        ({"dtype": "float16", "head_dim_v": 32}, "without FP16"),
        ({"mask": {"window": {"left": 4, "right": 4}}}, "without LOCAL"),
        ({"mask": {"window": {"left": None, "right": 0}}}, None),
        (
            {**decode()["workload"], "cache": {"kind": "paged", "page_size": 16}},
            "without PAGEDKV",
        ),
        ({"softcap": 30, "alibi": {"slopes": "geometric"}}, "does not claim alibi"),
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


@pytest.mark.parametrize("path", sorted(CLAIMS.glob("*.json")), ids=lambda p: p.stem)
def test_what_only_rules_are_about_is_not_read_elsewhere(path: Path) -> None:
    """Cells that differ in it alone are decided once, unless a rule of the backend names it."""
    paged = {"cache": {"kind": "paged", "page_size": 16, "append": 1, "append_in_call": True}}
    changes = [{}, decode(**paged)["workload"]]
    changes += [{"layout": "thd", "seqlen_q": [16, 0], "seqlen_k": [16, 0]}]
    changes += [{"phase": "forward_backward", "dropout": {"p": 0.5, "seed": 1}, "seqlen_k": 8}]
    for change in changes:
        call = cell(**change).call
        assert call.keys() >= callfacts.RULES_ONLY
        facts = {name: v for name, v in call.items() if name not in callfacts.RULES_ONLY}
        for claim in read_release(path):
            assert list(callfacts.unmet(claim, facts, {})) is not None


def test_decisions_that_are_kept_differ_where_claims_do() -> None:
    torch = release("torch-2.13.0-cuda13.0")
    for length, claimed in ((1, False), (2, True), (1, False), (16, True)):
        lengths = {"phase": "forward", "seqlen_q": 1, "seqlen_k": length, "heads_kv": 4}
        reason = verdict(torch, "sdpa.cudnn", HOPPER, **lengths)
        assert (reason is None) is claimed, reason
    assert len(torch.decisions) == 3
    for batch in range(1, 9):
        assert verdict(torch, "sdpa.math", HOPPER, batch=batch) is None
    assert len(torch.decisions) == 4
    assert verdict(torch, "sdpa.math", CPU)
    fa4 = release("flash-attn-4-4.0.0b36")
    for value, claimed in ((1, True), (True, False), (1, True), (2, False)):
        reason = verdict(fa4, "flash_attn_4", HOPPER, options={"num_splits": value})
        assert (reason is None) is claimed, (value, reason)


@pytest.mark.parametrize(
    ("name", "backend", "device"),
    [
        ("flash-attn-2.8.3-cuda", "flash_attn_2", HOPPER),
        ("flash-attn-2.8.3-rocm-ck", "flash_attn_2.rocm_ck", CDNA),
    ],
)
def test_a_gpus_generator_takes_some_offsets_of_dropout_only(
    name: str, backend: str, device: Device
) -> None:
    for offset, claimed in ((0, True), (3, False), (8, True), (2**64 - 4, True), (6, False)):
        dropout = {"p": 0.1, "seed": 1, "offset": str(offset)}
        reason = verdict(release(name), backend, device, phase="forward_backward", dropout=dropout)
        assert (reason is None) is claimed, reason
        assert claimed or f"dropout_offset {offset} (claimed: multiples of 4)" in str(reason)


@pytest.mark.parametrize(
    ("mask", "word"),
    [
        ({"window": {"left": None, "right": 0}}, None),
        ({"causal": "bottom_right", "window": {"left": None, "right": 3}}, None),
        ({"causal": "bottom_right", "window": {"left": 3, "right": None}}, "silently ignores it"),
        ({"window": {"left": None, "right": 3}}, "silently ignores it"),
        ({"window": {"left": 0, "right": None}}, "silently ignores it"),
    ],
)
def test_a_window_that_says_no_more_than_causal_is_none(
    mask: dict[str, Any], word: str | None
) -> None:
    triton = release("flash-attn-2.8.3-rocm-triton")
    reason = verdict(triton, "flash_attn_2.rocm_triton", CDNA, mask=mask)
    assert (reason is None) == (word is None), reason
    assert word is None or word in str(reason)


@pytest.mark.parametrize(
    "folder", sorted(resources.images_dir().glob("*/r*")), ids=lambda folder: folder.parent.name
)
def test_claims_name_the_releases_that_the_stack_locks(folder: Path) -> None:
    lock = (folder / "requirements.lock").read_text(encoding="utf-8")
    locked = dict(re.findall(r"^([a-z0-9-]+)==(\S+)", lock, flags=re.MULTILINE))
    named = {claim["backend"]: claim["release"] for claim in Capability.load(folder).claims}
    for backend, distributions in {
        "cudnn_frontend": ("nvidia-cudnn-frontend", "nvidia-cudnn-cu13"),
        "flash_attn_4": ("flash-attn-4",),
        "flashinfer": ("flashinfer-python",),
    }.items():
        assert (backend in named) == (distributions[0] in locked)
        for distribution in distributions if backend in named else ():
            assert f" {locked[distribution]}" in named[backend]


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
