from __future__ import annotations

from typing import Any

import pytest
import torch
from test_runner_backends import BR, tensors, workload

from attnrepro_runner import memory
from attnrepro_runner.backends import registry
from attnrepro_runner.backends.base import MemoryOrder


def measured(
    name: str, order: MemoryOrder | None = None, *, workspace: int = 0, **case: Any
) -> memory.MemoryUse:
    w = workload(**{"phase": "prefill", "batch": 1, "heads_q": 2, **case})
    backend = registry.load(name)
    t = tensors(w)

    def work() -> object:
        prepared = backend.prepare(w, {}, t)
        return prepared, prepared.step()

    order = order or backend.memory_order(w, {})
    return memory.measure(work, w, t, order, threads=1, workspace=workspace)


def test_the_peak_counts_what_is_alive_together() -> None:
    def work() -> torch.Tensor:
        for _ in range(3):
            kept = torch.empty(1 << 18)  # a megabyte, freed when the next is there
        return kept

    peak = memory.allocator_peak(work)
    assert 2 << 20 <= peak < (2 << 20) + 4096


def test_flash_is_linear_and_eager_holds_the_scores() -> None:
    size = {"seqlen_q": 1024, "seqlen_k": 1024, "head_dim": 16}
    flash, eager = measured("sdpa.flash", **size), measured("eager", **size)
    scores = 2 * 1024 * 1024 * 4
    assert flash.extra_bytes < scores // 2
    assert eager.extra_bytes > 2 * scores
    assert not flash.alarm
    assert not eager.alarm
    assert eager.declared_order == MemoryOrder.SCORES
    assert flash.peak_bytes == flash.resident_bytes + flash.extra_bytes


def test_scores_under_a_linear_declaration_raise_the_alarm() -> None:
    size = {"seqlen_q": 2048, "seqlen_k": 2048, "head_dim": 16}
    use = measured("eager", MemoryOrder.LINEAR, **size)
    assert use.alarm
    assert use.to_json()["alarm"] is True


def test_a_mask_fits_its_declaration_and_no_less() -> None:
    size = {"seqlen_q": 2048, "seqlen_k": 3000, "head_dim": 16, "mask": BR}
    use = measured("sdpa.flash", **size)
    assert use.declared_order == MemoryOrder.MASK
    assert not use.alarm
    assert measured("sdpa.flash", MemoryOrder.LINEAR, **size).alarm


def test_a_declared_workspace_is_allowed_for_and_no_more() -> None:
    size = {"seqlen_q": 2048, "seqlen_k": 2048, "head_dim": 16}
    bare = measured("eager", MemoryOrder.LINEAR, **size)
    missing = bare.extra_bytes - bare.declared_bytes
    assert missing > 0
    use = measured("eager", MemoryOrder.LINEAR, workspace=missing + (1 << 20), **size)
    assert use.declared_bytes == bare.declared_bytes + missing + (1 << 20)
    assert not use.alarm
    assert measured("eager", MemoryOrder.LINEAR, workspace=missing // 2, **size).alarm


class FakeCuda:
    """An allocator that caches, on a device on which a library allocates by itself too."""

    def __init__(self) -> None:
        self.live, self.peak = 1000, 5000
        self.reserved, self.past = 4096, 0

    def synchronize(self) -> None: ...

    def empty_cache(self) -> None:
        self.reserved = self.live

    def reset_peak_memory_stats(self) -> None:
        self.peak = self.live

    def memory_allocated(self) -> int:
        return self.live

    def max_memory_allocated(self) -> int:
        return self.peak

    def max_memory_reserved(self) -> int:
        return self.reserved

    def mem_get_info(self) -> tuple[int, int]:
        return (1 << 20) - self.reserved - self.past, 1 << 20

    def work(self) -> None:
        self.live += 200
        self.peak = self.live + 1800
        self.reserved = max(self.reserved, self.peak)
        self.past += 7000


def test_a_gpus_peak_has_the_devices_own_figure_beside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeCuda()
    for name in ("synchronize", "empty_cache", "reset_peak_memory_stats", "memory_allocated"):
        monkeypatch.setattr(torch.cuda, name, getattr(fake, name))
    for name in ("max_memory_allocated", "max_memory_reserved", "mem_get_info"):
        monkeypatch.setattr(torch.cuda, name, getattr(fake, name))
    resident, peak, source = memory.device_peak(fake.work)
    assert (resident, peak) == (1000, 3000)
    assert source == (
        "torch.cuda allocator; reserved 3000 bytes; used memory of the device rose by 9000 bytes"
    )


@pytest.mark.parametrize("order", list(MemoryOrder))
def test_an_allowance_grows_as_its_order(order: MemoryOrder) -> None:
    def allowed(n: int) -> int:
        w = workload(phase="prefill", batch=1, seqlen_q=n, seqlen_k=n)
        return memory.allowance(w, 0, order, threads=1) - memory.SLACK * 2

    growth = allowed(1 << 15) / allowed(1 << 14)
    assert growth == pytest.approx(2 if order == MemoryOrder.LINEAR else 4, rel=0.05)


def test_guarded_inputs_count_with_their_bands() -> None:
    t = tensors(workload())
    whole = sum(x.numel() * 4 for x in (t.q, t.k, t.v))
    assert memory.input_bytes(t) == whole


def test_the_source_names_both_counters() -> None:
    assert measured("sdpa.flash").source.startswith("c10 allocator events of torch.profiler; peak")
