from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

import pytest
import torch
from test_runner_backends import BR, tensors, workload

from attnrepro_runner import kernels, libraries
from attnrepro_runner.backends import registry
from attnrepro_runner.backends.base import KernelPattern

if TYPE_CHECKING:
    from pathlib import Path

TORCH_FLASH = (
    "void pytorch_flash::flash_fwd_kernel<pytorch_flash::Flash_fwd_kernel_traits<128, 64, 64, 4>>"
)


def seen(name: str, **case: Any) -> kernels.Execution:
    w = workload(**case)
    backend = registry.load(name)
    prepared = backend.prepare(w, {}, tensors(w))
    found = kernels.profile(prepared.step, on_device=False)
    return kernels.judge(found, backend.patterns(w, {}))


@pytest.mark.parametrize("phase", ["prefill", "forward", "forward_backward"])
@pytest.mark.parametrize("name", ["eager", "sdpa.math", "sdpa.flash"])
def test_each_backend_runs_under_its_own_name(name: str, phase: str) -> None:
    execution = seen(name, phase=phase, mask=BR)
    assert execution.verdict == "as_named", execution.reason
    assert execution.ok


def test_another_backend_is_a_fallback_with_its_name() -> None:
    w = workload(phase="prefill")
    math = registry.load("sdpa.math").prepare(w, {}, tensors(w))
    execution = kernels.judge(
        kernels.profile(math.step, on_device=False), registry.load("sdpa.flash").patterns(w, {})
    )
    assert execution.verdict == "fallback"
    assert execution.reason is not None
    assert "flash_attention_for_cpu" in execution.reason
    assert "it looks like torch math" in execution.reason


def test_a_backward_that_did_not_run_is_seen() -> None:
    w = workload(phase="forward_backward")
    forward = registry.load("sdpa.flash").prepare(workload(phase="forward"), {}, tensors(w))
    execution = kernels.judge(
        kernels.profile(forward.step, on_device=False), registry.load("sdpa.flash").patterns(w, {})
    )
    assert execution.verdict == "fallback"
    assert "_backward" in str(execution.reason)


def test_nothing_seen_is_no_pass() -> None:
    pattern = KernelPattern(family="none", must=())
    execution = kernels.judge(kernels.profile(lambda: None, on_device=False), pattern)
    assert execution.verdict == "none_seen"
    assert not execution.ok


@pytest.mark.parametrize(
    ("kernel", "family"),
    [
        (TORCH_FLASH, "torch flash"),
        ("void flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<flash::T>", "flash-attn 2"),
        ("void flash_fwd_kernel<Flash_fwd_kernel_traits<64>>", "flash-attn 2"),
        ("fmha_cutlassF_bf16_aligned_64x128_rf_sm80", "torch memory-efficient"),
        ("fmha_cutlassB_f16_notaligned_64x64_k96_dropout_sm75", "torch memory-efficient"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16", "cuDNN"),
        ("void cutlass::device_kernel<flash::enable_sm90<flash::FlashAttnFwdSm90<X>>>", None),
        ("kernel_cutlass_kernel_flash_attncuteflash_fwd_FlashAttentionForwardSm90_obj", None),
        ("ck_tile::kentry<ck_tile::FmhaFwdKernel<x>>", "ROCm Composable Kernel"),
        ("attn_fwd.kd", "ROCm Triton or AOTriton"),
        ("triton_tem_fused_flex_attention_0", "flex"),
        ("nvjet_hsh_128x256_64x4_1x2_h_bz_coopA_TNT", "unfused products"),
        ("void at::native::elementwise_kernel<1>", None),
    ],
)
def test_kernels_are_told_apart_by_their_names(kernel: str, family: str | None) -> None:
    found = kernels.family([kernel])
    if "FlashAttnFwdSm90" in kernel:
        family = "flash-attn 3"
    if "FlashAttentionForwardSm90" in kernel:
        family = "flash-attn 4"
    assert found == family


def test_the_execution_part_of_a_result_names_libraries_without_folders() -> None:
    document = seen("sdpa.flash", phase="prefill").to_json()
    assert document["verdict"] == "as_named"
    found = document["libraries"]
    assert isinstance(found, dict)
    name = next(n for n in found if n.endswith("libtorch_cpu.so"))
    assert name == "torch/lib/libtorch_cpu.so"
    assert found[name]["version"] == torch.__version__
    assert len(found[name]["sha256"]) == 64
    assert not any(n.startswith("/") for n in found)


def test_a_digest_is_kept_until_the_file_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(libraries, "_digests", {})
    file = tmp_path / "libx.so"
    file.write_bytes(b"one")
    assert libraries.file_digest(file) == hashlib.sha256(b"one").hexdigest()
    known = libraries.known_digests()
    forged = {path: [*entry[:3], "f" * 64] for path, entry in known.items()}
    libraries.learn_digests(forged)
    assert libraries.file_digest(file) == "f" * 64  # kept, since the file is the same
    file.write_bytes(b"three")
    assert libraries.file_digest(file) == hashlib.sha256(b"three").hexdigest()


def test_public_names_hide_the_machine(tmp_path: Path) -> None:
    inside = tmp_path / "home/me/venv/lib/python3.12/site-packages/torch/lib/libx.so"
    assert libraries.public_name(inside) == "torch/lib/libx.so"
    assert libraries.public_name(tmp_path / "lib/libgomp.so.1") == "libgomp.so.1"
