"""What the adapters of GPU libraries refuse, since the library would drop or change it."""

from __future__ import annotations

import re
import sys
from typing import TYPE_CHECKING

import gpu_fakes
import pytest
from gpu_fakes import workload

from attnrepro_runner.backends import flash_attn_3, flash_attn_4, flashinfer, registry
from attnrepro_runner.backends.base import Unsupported
from attnrepro_runner.inputs import make_inputs

if TYPE_CHECKING:
    from attnrepro_runner.semantics import Workload

INPUTS = {"seed": 7, "distribution": "normal"}
PAGED = {"kind": "paged", "page_size": 256}


@pytest.fixture(autouse=True)
def libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put the stand-ins where the adapters look."""
    gpu_fakes.install(monkeypatch)


def test_triton_refuses_dropout_whose_seed_it_would_ignore() -> None:
    backend = registry.load("flash_attn_2.rocm_triton")
    dropped = workload(dropout={"p": 0.1, "seed": 1})
    with pytest.raises(Unsupported, match="seed and an offset of their own"):
        backend.check(dropped, {})
    assert "dropout" not in backend.consumed(dropped, {})
    backend.check(workload(), {})
    registry.load("flash_attn_2.rocm_ck").check(dropped, {})


@pytest.mark.parametrize("value", [True, False])
@pytest.mark.parametrize("phase", ["forward", "forward_backward"])
def test_triton_refuses_deterministic_which_it_would_only_print(phase: str, value: bool) -> None:
    backend = registry.load("flash_attn_2.rocm_triton")
    options = {"deterministic": value}
    with pytest.raises(Unsupported, match="ignore deterministic"):
        backend.check(workload(phase=phase), options)
    assert "deterministic" not in backend.consumed(workload(phase=phase), options)


@pytest.mark.parametrize("name", ["flash_attn_2", "flash_attn_2.rocm_ck"])
@pytest.mark.parametrize(("offset", "refused"), [(0, False), (4, False), (3, True), (6, True)])
def test_an_offset_between_groups_of_four_is_refused(name: str, offset: int, refused: bool) -> None:
    backend = registry.load(name)
    w = workload(dropout={"p": 0.1, "seed": 1, "offset": offset})
    if not refused:
        backend.check(w, {})
        return
    with pytest.raises(Unsupported, match="multiple of 4"):
        backend.check(w, {})
    with pytest.raises(Unsupported, match="multiple of 4"):
        backend.prepare(w, {}, make_inputs(w, INPUTS, stream=0, device="cpu"))


@pytest.mark.parametrize("splits", [None, 0, 1, 2, 3])
@pytest.mark.parametrize("major", [8, 9])
@pytest.mark.parametrize("cache", [None, {"kind": "contiguous"}, PAGED], ids=str)
def test_fa3_refuses_pack_gqa_false_where_it_packs_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
    splits: int | None,
    major: int,
    cache: dict[str, object] | None,
) -> None:
    monkeypatch.setattr(flash_attn_3, "capability", lambda: (major, 0))
    backend = flash_attn_3.FlashAttention3()
    w = workload(phase="prefill", cache=cache)
    chosen = {} if splits is None else {"num_splits": splits}
    honoured = major == 9 and splits in (None, 1) and cache is None
    backend.check(w, {**chosen, "pack_gqa": True})
    if honoured:
        backend.check(w, {**chosen, "pack_gqa": False})
    else:
        with pytest.raises(Unsupported, match="forced on"):
            backend.check(w, {**chosen, "pack_gqa": False})


@pytest.mark.parametrize(
    ("major", "width", "refused"),
    [(10, 256, True), (11, 256, True), (10, 128, False), (9, 256, False)],
)
def test_fa4_refuses_pack_gqa_where_it_is_forced_off(
    monkeypatch: pytest.MonkeyPatch, major: int, width: int, refused: bool
) -> None:
    monkeypatch.setattr(flash_attn_4, "capability", lambda: (major, 0))
    backend = flash_attn_4.FlashAttention4()
    w = workload(head_dim=width)
    backend.check(w, {"pack_gqa": False})
    if refused:
        with pytest.raises(Unsupported, match="forced off"):
            backend.check(w, {"pack_gqa": True})
    else:
        backend.check(w, {"pack_gqa": True})


def decode(heads_kv: int, seqlen_q: int = 1) -> Workload:
    return workload(
        phase="decode",
        seqlen_q=seqlen_q,
        seqlen_k=300,
        heads_q=8,
        heads_kv=heads_kv,
        head_dim=64,
        mask={"causal": "bottom_right"},
        cache=PAGED,
    )


@pytest.mark.parametrize("implementation", ["fa2", "fa3"])
@pytest.mark.parametrize(
    ("heads_kv", "seqlen_q", "refused"), [(8, 1, True), (4, 1, True), (2, 1, False), (8, 2, False)]
)
def test_flashinfer_refuses_an_implementation_on_cuda_cores(
    implementation: str, heads_kv: int, seqlen_q: int, refused: bool
) -> None:
    backend = registry.load("flashinfer")
    w = decode(heads_kv, seqlen_q)
    backend.check(w, {})
    if refused:
        with pytest.raises(Unsupported, match="CUDA cores"):
            backend.check(w, {"implementation": implementation})
    else:
        backend.check(w, {"implementation": implementation})


FLASHINFER_KERNELS = {
    "fa2": "void flashinfer::BatchPrefillWithPagedKVCacheKernel<flashinfer::KernelTraits<(flas",
    "fa2 ragged": "void flashinfer::BatchPrefillWithRaggedKVCacheKernel<flashinfer::KernelTraits<",
    "fa3": "void flashinfer::PrefillWithKVCacheKernel<flashinfer::CollectiveMainloop<Add",
    "CUDA cores": "void flashinfer::BatchDecodeWithPagedKVCacheKernel<(flashinfer::PosEncodingMode",
}
"""One kernel's name of each family."""


@pytest.mark.parametrize(
    ("heads_kv", "seqlen_q", "options", "capability", "kernel"),
    [
        (2, 1, {}, (9, 0), "fa2"),
        (2, 1, {"implementation": "fa3"}, (9, 0), "fa3"),
        (2, 1, {"implementation": "fa2"}, (9, 0), "fa2"),
        (8, 1, {}, (9, 0), "CUDA cores"),
        (8, 2, {}, (9, 0), "fa3"),
        (8, 2, {}, (8, 0), "fa2"),
        (8, 2, {"implementation": "fa2"}, (9, 0), "fa2"),
    ],
)
def test_flashinfer_names_the_kernels_of_one_family(
    monkeypatch: pytest.MonkeyPatch,
    heads_kv: int,
    seqlen_q: int,
    options: dict[str, object],
    capability: tuple[int, int],
    kernel: str,
) -> None:
    monkeypatch.setattr(flashinfer, "capability", lambda: capability)
    w = decode(heads_kv, seqlen_q)
    backend = registry.load("flashinfer")
    pattern = backend.patterns(w, options)
    fits = {
        name
        for name, text in FLASHINFER_KERNELS.items()
        if all(re.search(p, text) for p in pattern.must)
        and not any(re.search(p, text) for p in pattern.must_not)
    }
    assert {name.removesuffix(" ragged") for name in fits} == {kernel}
    tensors = make_inputs(w, INPUTS, stream=0, device="cpu")
    backend.prepare(w, options, tensors)
    made = sys.modules["flashinfer"].made[-1]
    assert made["backend"] == ("fa2" if kernel == "CUDA cores" else kernel)
    assert made.get("use_tensor_cores", True) is (kernel != "CUDA cores")
