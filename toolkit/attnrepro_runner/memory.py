"""How much a call allocates beyond its inputs, and whether that fits what its adapter declares.

On a GPU the allocator's peak counts. On a CPU the allocator's events in torch's profile are added
up. A library may allocate past torch's allocator, so that a figure of the whole is read beside it:
by how much the device's used memory rose, or the process's peak of resident memory.
"""

from __future__ import annotations

import dataclasses
import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import torch

from attnrepro_runner import trace
from attnrepro_runner.backends.base import MemoryOrder
from attnrepro_runner.fields import DTYPE_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable

    from attnrepro_runner.backends.base import Tensors
    from attnrepro_runner.semantics import Workload

SLACK: Final = 8 << 20
"""Bytes that any call may take for its workspace, and as much again for each thread."""

LINEAR: Final = 6
"""A call of linear memory may take this many times its inputs and outputs: copies in another layout
or in float32, gradients, a GQA expansion of keys."""

SCORES: Final = 8
"""Float32 copies of all scores that an unfused forward and backward hold at once."""


@dataclass(frozen=True, kw_only=True)
class MemoryUse:
    """Peak of one call, its preparation included."""

    resident_bytes: int
    peak_bytes: int
    declared_order: MemoryOrder
    declared_bytes: int
    source: str

    @property
    def extra_bytes(self) -> int:
        """Peak beyond what was resident."""
        return self.peak_bytes - self.resident_bytes

    @property
    def alarm(self) -> bool:
        """Whether the call took more than its adapter declares: another computation ran."""
        return self.extra_bytes > self.declared_bytes

    def to_json(self) -> dict[str, object]:
        """Return the `memory` object of a result."""
        return {
            "resident_bytes": self.resident_bytes,
            "peak_bytes": self.peak_bytes,
            "extra_bytes": self.extra_bytes,
            "declared_order": self.declared_order.value,
            "declared_bytes": self.declared_bytes,
            "alarm": self.alarm,
            "source": self.source,
        }


def measure(
    work: Callable[[], object],
    workload: Workload,
    tensors: Tensors,
    order: MemoryOrder,
    *,
    threads: int,
    workspace: int = 0,
) -> MemoryUse:
    """Run preparation and one call, and count.

    Args:
        work: prepares and makes one call, and returns what must be held for it.
        workload: of the call.
        tensors: its inputs, resident before.
        order: as the adapter declares it.
        threads: of the framework.
        workspace: bytes of a buffer of fixed size that the adapter declares.

    """
    inputs = input_bytes(tensors)
    declared = allowance(workload, inputs, order, threads=threads) + workspace
    if tensors.q.device.type == "cuda":
        resident, peak, source = device_peak(work)
    else:
        resident = inputs
        allocator_peak(lambda: None)  # the profiler's own memory is not the call's
        before = _reset_peak_resident()
        extra = allocator_peak(work)
        peak = resident + extra
        after = _status_bytes("VmHWM")
        source = "c10 allocator events of torch.profiler"
        if before is not None and after is not None:
            source += f"; peak resident memory of the process rose by {max(0, after - before)}"
    return MemoryUse(
        resident_bytes=resident,
        peak_bytes=peak,
        declared_order=order,
        declared_bytes=declared,
        source=source,
    )


def device_peak(work: Callable[[], object]) -> tuple[int, int, str]:
    """Return resident and peak bytes of torch's GPU allocator round a call, and the source.

    The source also tells by how much the memory in use on the whole device was higher after the
    call than before, its results still held: what a library allocated past torch's allocator and
    kept is in it. Cached blocks are given back first, or the allocator's rise would not show.
    """
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    resident = torch.cuda.memory_allocated()
    free_before, _ = torch.cuda.mem_get_info()
    kept = work()
    torch.cuda.synchronize()
    free_after, _ = torch.cuda.mem_get_info()
    peak = torch.cuda.max_memory_allocated()
    del kept
    source = (
        f"torch.cuda allocator; reserved {torch.cuda.max_memory_reserved()} bytes; "
        f"used memory of the device rose by {max(0, free_before - free_after)} bytes"
    )
    return resident, peak, source


def allocator_peak(work: Callable[[], object]) -> int:
    """Return the greatest sum of live bytes that a call allocated through torch's CPU allocator."""
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profiler:
        kept = work()
    del kept
    changes = sorted((e.start_ns, e.bytes) for e in trace.events(profiler) if e.name == "[memory]")
    live = peak = 0
    for _, change in changes:
        live += change
        peak = max(peak, live)
    return peak


def input_bytes(tensors: Tensors) -> int:
    """Return the storage of all inputs, guard bands included, shared storage once."""
    storages = {}
    for part in dataclasses.fields(tensors):
        tensor = getattr(tensors, part.name)
        if isinstance(tensor, torch.Tensor):
            storage = tensor.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def allowance(workload: Workload, inputs: int, order: MemoryOrder, *, threads: int) -> int:
    """Return the bytes beyond its inputs that a call of an order may take.

    S: workspace and a few copies of inputs and outputs. S2_mask: one seqlen_q x seqlen_k mask a
    distinct pair of lengths as well, in bytes and in the inputs' dtype. S2_scores: all scores, a
    few times, in float32.
    """
    pairs = list(zip(workload.seqlens_q, workload.seqlens_k, strict=True))
    tokens = sum(workload.seqlens_q) * workload.heads_q * workload.head_dim_v
    outputs = tokens * 4
    expanded = (
        sum(workload.seqlens_k) * workload.heads_q * (workload.head_dim + workload.head_dim_v)
    )
    linear = SLACK * (1 + threads) + LINEAR * (inputs + outputs) + 4 * expanded
    if order == MemoryOrder.LINEAR:
        return linear
    if order == MemoryOrder.MASK:
        # Indices of the comparison that makes the mask are int64, one at a time.
        each = 16 + 2 * DTYPE_BYTES[workload.dtype]
        return linear + each * sum(q * k for q, k in pairs)
    return linear + 4 * SCORES * workload.heads_q * sum(q * k for q, k in pairs)


def _reset_peak_resident() -> int | None:
    """Set VmHWM back to what is resident now, and return that."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    return _status_bytes("VmRSS")


def _status_bytes(name: str) -> int | None:
    with suppress(OSError):
        match = re.search(rf"^{name}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.M)
        if match:
            return int(match[1]) * 1024
    return None
