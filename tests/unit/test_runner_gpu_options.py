"""Options of GPU libraries, and what their adapters refuse, against the stand-ins."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import sys
import types

import gpu_fakes
import pytest
import torch
from gpu_checks import INPUTS, check_step
from gpu_fakes import workload

from attnrepro_runner.backends import (
    flash_attn_2,
    flash_attn_3,
    flash_attn_4,
    packages,
    registry,
    varlen,
)
from attnrepro_runner.backends import flashinfer as flashinfer_adapter
from attnrepro_runner.backends.base import Unsupported
from attnrepro_runner.inputs import make_inputs


@pytest.mark.parametrize(
    ("name", "options", "call"),
    [
        ("flash_attn_2", {"deterministic": True}, {"deterministic": True}),
        ("flash_attn_3", {"num_splits": 3}, {"num_splits": 3, "pack_gqa": None}),
        (
            "flash_attn_3",
            {"num_splits": 1, "pack_gqa": False},
            {"num_splits": 1, "pack_gqa": False},
        ),
        ("flash_attn_4", {"pack_gqa": True, "num_splits": 1}, {"pack_gqa": True, "num_splits": 1}),
        ("torch.varlen", {"num_splits": 1}, {"num_splits": 1}),
    ],
)
def test_options_reach_the_call(
    calls: list[dict[str, object]],
    name: str,
    options: dict[str, object],
    call: dict[str, object],
) -> None:
    check_step(name, workload(), options)
    assert {key: calls[-1][key] for key in call} == call


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("flash_attn_2", {"num_splits": 2}),
        ("flash_attn_2", {"pack_gqa": True}),
        ("flash_attn_4", {"compile_mode": "default"}),
        ("flash_attn_4", {"num_splits": 2}),
        ("torch.varlen", {"pack_gqa": True}),
        ("cudnn_frontend", {"deterministic": True}),
    ],
)
def test_options_without_effect_are_refused(
    calls: list[dict[str, object]], name: str, options: dict[str, object]
) -> None:
    with pytest.raises(Unsupported):
        registry.load(name).check(workload(phase="prefill"), options)


def test_composable_kernel_refuses_what_it_would_drop(calls: list[dict[str, object]]) -> None:
    backend = flash_attn_2.FlashAttention2RocmCk()
    with pytest.raises(Unsupported, match="ignores softcap"):
        backend.check(workload(softcap=2.0), {})
    backend.check(workload(mask={"window": {"left": 2, "right": 0}}), {})
    assert "softcap" not in backend.consumed(workload(softcap=2.0), {})
    assert "mask.window" in backend.consumed(workload(), {})


def test_triton_refuses_what_it_would_drop(calls: list[dict[str, object]]) -> None:
    backend = flash_attn_2.FlashAttention2RocmTriton()
    with pytest.raises(Unsupported, match="ignore softcap"):
        backend.check(workload(softcap=2.0), {})
    windowed = workload(mask={"window": {"left": 2, "right": 0}})
    with pytest.raises(Unsupported, match="ignore window_size"):
        backend.check(windowed, {})
    assert "mask.window" not in backend.consumed(windowed, {})
    backend.check(workload(mask={"causal": "bottom_right"}), {})
    # A window that says no more than causal loses nothing.
    causal = workload(mask={"window": {"left": None, "right": 0}})
    backend.check(causal, {})
    assert "mask.window" in backend.consumed(causal, {})


FWD_ONLY = {
    "FLASHATTENTION_DISABLE_BACKWARD": True,
    "FLASHATTENTION_DISABLE_PAGEDKV": True,
    "FLASHATTENTION_DISABLE_LOCAL": True,
    "FLASHATTENTION_DISABLE_FP16": True,
    "FLASHATTENTION_DISABLE_SOFTCAP": False,
    "FLASHATTENTION_DISABLE_HDIM96": False,
    "FLASH_ATTENTION_DISABLE_HDIMDIFF64": False,
}
"""Flags of the wheel fa3-fwd 0.0.3, in part."""


@pytest.mark.parametrize(
    ("changes", "feature"),
    [
        ({"phase": "forward_backward"}, "BACKWARD"),
        ({"dtype": "float16"}, "FP16"),
        ({"mask": {"window": {"left": 2, "right": 0}}}, "LOCAL"),
        (
            {"phase": "decode", "seqlen_q": 1, "cache": {"kind": "paged", "page_size": 16}},
            "PAGEDKV",
        ),
    ],
)
def test_what_was_compiled_out_of_fa3_is_refused(
    calls: list[dict[str, object]], changes: dict[str, object], feature: str
) -> None:
    backend = flash_attn_3.FlashAttention3()
    backend.check(workload(**changes), {})
    sys.modules["fa3_fwd_config"].CONFIG = {"build_flags": FWD_ONLY}  # type: ignore[attr-defined]
    with pytest.raises(Unsupported, match=f"without {feature}"):
        backend.check(workload(**changes), {})
    backend.check(workload(softcap=2.0, mask={"causal": "bottom_right"}), {})


def test_two_builds_of_fa3_are_none(
    calls: list[dict[str, object]], monkeypatch: pytest.MonkeyPatch
) -> None:
    other = types.ModuleType("flash_attn_interface")
    other.__spec__ = importlib.util.spec_from_loader("flash_attn_interface", None)
    monkeypatch.setitem(sys.modules, "flash_attn_interface", other)
    found = flash_attn_3.FlashAttention3().availability()
    assert not found.available
    assert "flash_attn_interface and fa3_fwd_interface" in str(found.reason)


def test_fa3_fp8_passes_descales_and_asks_for_e4m3_kernels(
    calls: list[dict[str, object]],
) -> None:
    w = workload(phase="prefill", dtype="float8_e4m3fn", fp8={}, head_dim=64, seqlen_k=5)
    backend = flash_attn_3.FlashAttention3()
    tensors = make_inputs(w, INPUTS, stream=0, device="cpu")
    assert w.active_fields() <= backend.consumed(w, {})
    prepared = backend.prepare(w, {}, tensors)
    prepared.step()
    assert calls[-1]["q_descale"] is tensors.q_descale
    assert calls[-1]["v_descale"] is tensors.v_descale
    assert any("e4m3" in pattern for pattern in backend.patterns(w, {}).must)


def test_fp8_is_refused_where_no_descale_is_taken(calls: list[dict[str, object]]) -> None:
    w = workload(phase="prefill", dtype="float8_e4m3fn", fp8={}, head_dim=64)
    for name in ("flash_attn_2", "flash_attn_4", "torch.varlen", "cudnn_frontend", "flashinfer"):
        with pytest.raises(Unsupported, match="dtype"):
            registry.load(name).check(w, {})


def test_varlen_refuses_where_torch_would_run_cudnn(
    calls: list[dict[str, object]], monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = varlen.TorchVarlen()
    full = workload(seqlen_q=200, seqlen_k=200, heads_kv=4)
    monkeypatch.setattr(varlen, "capability", lambda: (9, 0))
    monkeypatch.setattr(varlen, "_cudnn_version", lambda: 92400)
    backend.check(full, {})
    monkeypatch.setattr(torch, "__version__", "2.14.1+cu130")
    with pytest.raises(Unsupported, match="cuDNN"):
        backend.check(full, {})
    backend.check(full, {"num_splits": 1})
    backend.check(workload(seqlen_q=200, seqlen_k=200, heads_kv=4, mask={"causal": True}), {})
    backend.check(workload(seqlen_q=200, seqlen_k=200, heads_kv=2), {})
    backend.check(workload(seqlen_q=128, seqlen_k=200, heads_kv=4), {})
    monkeypatch.setattr(varlen, "_cudnn_version", lambda: 91700)
    backend.check(full, {})


@pytest.mark.parametrize(
    ("torch_release", "fa4_release", "refused"),
    [("2.13.0", "4.0.0b19", True), ("2.13.0", "4.0.0b18", False), ("2.14.1", "4.0.0b36", False)],
)
def test_torch_with_a_later_fa4_is_refused(
    monkeypatch: pytest.MonkeyPatch, torch_release: str, fa4_release: str, refused: bool
) -> None:
    monkeypatch.setattr(torch, "__version__", torch_release)
    monkeypatch.setattr(varlen, "capability", lambda: (9, 0))
    monkeypatch.setattr(packages, "release", lambda name: fa4_release)
    if refused:
        with pytest.raises(Unsupported, match="unpacks two values"):
            varlen.check_implementation({"implementation": "fa4"})
    else:
        varlen.check_implementation({"implementation": "fa4"})


def test_varlen_without_a_parameter_refuses_what_needs_it(
    calls: list[dict[str, object]], monkeypatch: pytest.MonkeyPatch
) -> None:
    module = importlib.import_module(varlen._MODULE)
    monkeypatch.setattr(module, "varlen_attn", gpu_fakes.varlen_attn(calls, release="2.11.0"))
    varlen.TorchVarlen().check(workload(heads_kv=4), {})
    with pytest.raises(Unsupported, match="num_splits"):
        varlen.TorchVarlen().check(workload(), {"num_splits": 1})
    cached = workload(phase="decode", seqlen_q=1, cache={"kind": "contiguous"})
    with pytest.raises(Unsupported, match="seqused_k"):
        varlen.TorchVarlen().check(cached, {})
    with pytest.raises(Unsupported, match="enable_gqa"):
        varlen.TorchVarlen().check(workload(), {})
    monkeypatch.setattr(module, "varlen_attn", gpu_fakes.varlen_attn(calls, release="2.10.0"))
    with pytest.raises(Unsupported, match="scale"):
        varlen.TorchVarlen().check(workload(heads_kv=4), {})


def test_deterministic_varlen_restores_the_switch(calls: list[dict[str, object]]) -> None:
    w = workload(phase="forward_backward", seqlen_k=5)
    tensors = make_inputs(w, INPUTS, stream=0, device="cpu")
    prepared = varlen.TorchVarlen().prepare(w, {"deterministic": True}, tensors)
    prepared.step()
    assert not torch.are_deterministic_algorithms_enabled()
    assert torch.utils.deterministic.fill_uninitialized_memory


def test_missing_libraries_say_so() -> None:
    for name in (
        "flash_attn_2",
        "flash_attn_2.rocm_ck",
        "flash_attn_2.rocm_triton",
        "flash_attn_3",
        "flash_attn_4",
        "cudnn_frontend",
        "flashinfer",
    ):
        found = registry.load(name).availability()
        assert not found.available
        assert found.reason


def test_dropout_is_drawn_from_a_seeded_generator(
    calls: list[dict[str, object]],
) -> None:
    w = workload(dropout={"p": 0.25, "seed": 3}, seqlen_k=5)
    tensors = make_inputs(w, INPUTS, stream=0, device="cpu")
    backend = registry.load("flash_attn_2")
    backend.prepare(w, {}, tensors)
    first = torch.rand(3)
    prepared = backend.prepare(w, {}, tensors)
    assert torch.equal(first, torch.rand(3))
    outputs = prepared.step()
    assert calls[-1]["dropout_p"] == 0.25
    assert calls[-1]["return_attn_probs"] is False
    assert outputs.lse is None


def test_flashinfer_plans_only_pages_that_hold_keys(calls: list[dict[str, object]]) -> None:
    w = workload(
        phase="decode",
        seqlen_q=1,
        seqlen_k=[300, 256],
        head_dim=64,
        cache={"kind": "paged", "page_size": 256, "capacity": 1024},
    )
    tensors = make_inputs(w, INPUTS, stream=0, device="cpu")
    flashinfer_adapter.Flashinfer().prepare(w, {}, tensors)
    assert calls[-1]["indptr"].tolist() == [0, 2, 3]  # type: ignore[attr-defined]
    assert calls[-1]["last_page_len"].tolist() == [44, 256]  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("widths", "major", "refused"),
    [
        ((256, 256), 9, False),
        ((264, 264), 9, True),
        ((192, 128), 10, False),
        ((136, 136), 10, True),
        ((60, 60), 9, True),
    ],
)
def test_fa4_widths_by_architecture(
    monkeypatch: pytest.MonkeyPatch, widths: tuple[int, int], major: int, refused: bool
) -> None:
    monkeypatch.setattr(flash_attn_4, "capability", lambda: (major, 0))
    w = workload(head_dim=widths[0], head_dim_v=widths[1])
    if refused:
        with pytest.raises(Unsupported):
            flash_attn_4.FlashAttention4().check(w, {})
    else:
        flash_attn_4.FlashAttention4().check(w, {})


def test_releases_compare_as_numbers() -> None:
    assert packages.release_key("2.13.0+cu130") == (2, 13, 0)
    assert packages.release_key("4.0.0b36") > packages.release_key("4.0.0b9")
    with pytest.raises(ValueError, match="not a release"):
        packages.release_key("nightly")


def test_altered_files_are_found(
    tmp_path: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pathlib import Path

    root = Path(str(tmp_path))
    (root / "demo").mkdir()
    (root / "demo/a.py").write_text("x = 1\n")
    (root / "demo/k.so").write_bytes(b"\x7fELF")
    info = root / "demo-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: demo\nVersion: 1.0\n")
    import base64
    import hashlib

    lines = []
    for name in ("demo/a.py", "demo/k.so"):
        digest = hashlib.sha256((root / name).read_bytes()).digest()
        lines.append(f"{name},sha256={base64.urlsafe_b64encode(digest).rstrip(b'=').decode()},6")
    (info / "RECORD").write_text("\n".join(lines) + "\n")
    monkeypatch.syspath_prepend(str(root))
    assert packages.release("demo") == "1.0"
    assert packages.altered_files("demo") == []
    files = packages.kernel_files("demo", python=True)
    assert files["demo/k.so"] == hashlib.sha256(b"\x7fELF").hexdigest()
    assert "demo/1 python files" in files
    (root / "demo/a.py").write_text("x = 2\n")
    assert packages.altered_files("demo") == ["demo/a.py"]
