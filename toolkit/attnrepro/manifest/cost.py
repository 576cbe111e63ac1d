"""What a run will cost, roughly: time, device time, memory, disk.

The rates are those of plain kernels on ordinary hardware, so a figure is good to about a factor of
two; both ends are told.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from attnrepro_runner import models
from attnrepro_runner.checking import AT_ONCE, BLOCK, PAIRS_AGAIN, SCORES_AGAIN, affordable
from attnrepro_runner.stoprule import BUDGETS_FOR_FEWEST

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from attnrepro.manifest.model import Cell, ImageRef, Manifest
    from attnrepro.manifest.plan import Plan
    from attnrepro.manifest.stacks import StackFacts


@dataclass(frozen=True, kw_only=True)
class _Machine:
    """Rates of one kind of device."""

    flops: float
    """Attention FLOP/s (a CPU: of each thread)."""
    bytes: float
    """Memory traffic, B/s."""
    call_seconds: float
    """Least time of one call, flush included."""
    oracle_flops: float
    """FLOP/s of the float64 reference (a CPU: of each thread)."""
    elements: float
    """Input elements generated and hashed a second, as the check does."""
    drawn: float
    """Generated, copied and fingerprinted, as launches do (in the grid's on an H200 a few times
    this)."""
    worker_seconds: float
    """Start of one worker: interpreter, framework, device; of a GPU's also what its first cell
    takes besides (on an H200 5 s and 7 s)."""
    cell_seconds: float
    """Probes, profile and bookkeeping of one cell of one subject in the check."""
    pair_seconds: float
    """Least time of the reference of one (sequence, head) pair among many, however short."""


_MACHINES: Final = {
    "cpu": _Machine(
        flops=3e10,
        bytes=8e9,
        call_seconds=5e-3,
        oracle_flops=8e9,
        elements=2e7,
        drawn=2e7,
        worker_seconds=2.5,
        cell_seconds=0.7,
        pair_seconds=5e-4,
    ),
    "nvidia": _Machine(
        flops=3e14,
        bytes=2e12,
        call_seconds=2e-4,
        oracle_flops=1.4e13,
        elements=7e8,
        drawn=3e9,
        worker_seconds=12,
        cell_seconds=1,
        pair_seconds=1e-3,
    ),
    "amd": _Machine(
        flops=2e14,
        bytes=2e12,
        call_seconds=2e-4,
        oracle_flops=1.4e13,
        elements=7e8,
        drawn=3e9,
        worker_seconds=12,
        cell_seconds=1,
        pair_seconds=1e-3,
    ),
}
_COMPILED: Final = {"flex": 12.0, "flash_attn_4": 4.0, "flashinfer": 20.0}
"""Backends that compile at the first call of a shape class: seconds, with empty caches."""
_COMPILED_FA3: Final = 110.0
"""Likewise flashinfer's Hopper kernels (an H200's host, 32 cores; its others took 20)."""
_FROM_CACHE: Final = 0.1
"""Part of that which a call still takes once the run's caches hold its code."""
_MODEL_SECONDS: Final = 4.0
"""What a request model takes in each launch: weights, textbook attention's output, its stages."""
_LOOK: Final = 2
"""Doublings of the fewest samples after which a quiet machine has stopped."""


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Estimate of one run."""

    seconds_low: float
    seconds_high: float
    device_seconds: float
    """Of a GPU, the upper end; 0 for a CPU."""
    memory_bytes: int
    """Of the largest cell: tensors, rotation and reference."""
    disk_bytes: int
    """Samples, and images that are not built yet, twice (store and engine)."""
    build_seconds: float
    """Of images that are not built yet."""
    limit_seconds: float
    """The manifest's own limit: what is not done then is not done."""

    def text(self) -> str:
        """One line, e.g. "3.2 GB, about 5 min"."""
        low, high = duration(self.seconds_low), duration(self.seconds_high)
        time = f"about {high}" if low == high else f"{low} to {high}"
        line = f"{size(self.disk_bytes)} of disk, {time}"
        if self.build_seconds:
            line += f", after a build of about {duration(self.build_seconds)}"
        return line


def estimate(manifest: Manifest, plan: Plan, stacks: Iterable[StackFacts]) -> Cost:
    """Estimate what the plan of a manifest costs."""
    device = manifest.document["device"]
    timing = manifest.document["timing"]
    threads = (device["threads"] or 1) if device["vendor"] == "cpu" else 1
    machine = _MACHINES[device["vendor"]]
    refused = {(item.cell, item.subject) for item in plan.unsupported}
    launches = int(timing["launches"])
    on_gpu = device["vendor"] != "cpu"
    low = high = 0.0
    series = 0
    checks: dict[ImageRef, list[float]] = {}
    starts: dict[ImageRef, list[int]] = {}
    images = {subject.image for subject in manifest.subjects}
    figures = {c.id: _figures(c, machine, threads, on_gpu=on_gpu) for c in manifest.cells}
    for subject in manifest.subjects:
        cells = [
            c
            for c in manifest.cells
            if subject.id in c.subjects and (c.id, subject.id) not in refused
        ]
        if not cells:
            continue
        timed = launches if subject.is_timed else 0
        alone = (int(timing["cold_start"]) * len(cells) + int(timing["memory"])) * bool(timed)
        starts.setdefault(subject.image, []).append(1 + timed)
        # Empty caches stand before the check, which may run under another profile, before the cold
        # pass, and before what is timed.
        # Several images take turns, each time in a container of its own, whose caches are empty.
        kept = _FROM_CACHE if len(images) == 1 else 1.0
        fresh = (1 + int(timing["cold_start"])) * bool(timed) + kept * timed
        seconds = _COMPILED.get(subject.backend, 0.0)
        if subject.backend == "flashinfer" and subject.options.get("implementation") == "fa3":
            seconds = _COMPILED_FA3
        compiled = seconds * _compilations(subject.backend, cells)
        begun = alone * machine.worker_seconds
        low, high = low + begun + fresh * compiled, high + begun + 1.5 * fresh * compiled
        checked = compiled
        for cell in cells:
            call, judged, again = figures[cell.id]
            repeats = int(manifest.document["bits"]["repeats"]) * call
            checked += machine.cell_seconds + judged + repeats
            if not timed:
                continue
            fewest, most = timing["samples"]
            warm = timing["warmup_seconds"]
            quick = min(timing["cell_seconds"], fewest * _LOOK * call) + warm[0]
            budget = timing["cell_seconds"]
            slow = min(most * call, max(budget, min(fewest * call, BUDGETS_FOR_FEWEST * budget)))
            slow += min(warm[1], warm[0] + 1)
            made = _MODEL_SECONDS * (on_gpu and cell.request is not None)
            low += timed * (2 * again + quick + made) + 3 * call
            high += timed * (4 * again + slow + 1.5 * made) + 3 * call
            series += timed * most * len(timing["clocks"])
        checks.setdefault(subject.image, []).append(checked)
    for image, each in checks.items():
        # The subjects of one image start side by side on a GPU, for the check and for each launch.
        begun = (max if on_gpu else sum)(starts[image]) * machine.worker_seconds
        low += begun + _checked(each, on_gpu)
        high += begun + 2 * _checked(each, on_gpu)
    found = list(stacks)
    missing = [s for s in found if not s.is_built]
    return Cost(
        seconds_low=low,
        seconds_high=high,
        device_seconds=0.0 if device["vendor"] == "cpu" else high,
        memory_bytes=max(
            _memory(c, int(timing["rotate_inputs"]), len(manifest.subjects)) for c in manifest.cells
        ),
        disk_bytes=series * 8 + sum(2 * s.image_bytes for s in missing),
        build_seconds=sum(s.build_seconds for s in missing),
        limit_seconds=float(manifest.document["limits"]["total_seconds"]),
    )


def _checked(each: Sequence[float], on_gpu: bool) -> float:
    """Time of all subjects' checks: one after the other, or on a GPU side by side."""
    return max(max(each), sum(each) / AT_ONCE) if on_gpu else sum(each)


def _compilations(backend: str, cells: Sequence[Cell]) -> int:
    """Times that a backend compiles: flex for every shape, the others for every kind of call."""
    if backend == "flex":
        return len(cells)
    if backend == "flashinfer":  # one module for ragged and paged calls, prefill and decode
        return len(
            {
                (w.dtype, w.head_dim, w.mask.window is None, w.softcap is None)
                for w in (cell.parsed for cell in cells)
            }
        )
    return len(
        {
            (w.phase, w.dtype, w.head_dim, w.head_dim_v, w.layout, repr(w.mask), repr(w.cache))
            for w in (cell.parsed for cell in cells)
        }
    )


def duration(seconds: float) -> str:
    """Seconds as people say them."""
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    if seconds < 5400:
        return f"{round(seconds / 60)} min"
    return f"{seconds / 3600:.1f} h"


def size(count: float) -> str:
    """Bytes as people say them."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" or count >= 10 else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def _figures(
    cell: Cell, machine: _Machine, threads: int, *, on_gpu: bool
) -> tuple[float, float, float]:
    """Times of one call, of judging all its pairs, and of judging those read round timing."""
    every = cell.parsed.batch * cell.parsed.heads_q
    return (
        _call(cell, machine, threads),
        _judged(cell, machine, threads, every, 1.0, machine.elements),
        _judged(cell, machine, threads, *_again(cell, on_gpu=on_gpu), machine.drawn),
    )


def _call(cell: Cell, machine: _Machine, threads: int) -> float:
    work = cell.facts.work
    return machine.call_seconds + max(
        work.flops / (machine.flops * threads), work.bytes / machine.bytes
    )


def _again(cell: Cell, *, on_gpu: bool) -> tuple[int, float]:
    """Pairs that are judged round timing, and the part of their rows."""
    workload = cell.parsed
    found = affordable(workload, SCORES_AGAIN["cuda" if on_gpu else "cpu"], PAIRS_AGAIN[0])
    pairs, blocks = found or (workload.batch * workload.heads_q, None)
    if workload.has_backward:
        pairs *= workload.heads_q // workload.heads_kv
    rows = max(workload.seqlens_q)
    return pairs, 1.0 if blocks is None else min(1.0, BLOCK * blocks / max(1, rows))


def _judged(
    cell: Cell, machine: _Machine, threads: int, most: int, part: float, made: float
) -> float:
    """Fresh inputs, the reference in float64 and in the tested dtype, and comparing.

    Of `most` pairs, and a part of their rows; `made` elements a second.
    """
    figures, workload = cell.facts, cell.parsed
    count = workload.batch * workload.heads_q
    pairs = min(count, most)
    flops = 2 * figures.work.flops * pairs / count * part
    elements = figures.tensor_bytes / 2
    computed = flops / (machine.oracle_flops * threads) + elements / made
    return computed + pairs * machine.pair_seconds


def _memory(cell: Cell, rotation: int, subjects: int) -> int:
    # The float64 reference of the inputs and outputs stands beside the rotated sets.
    call = cell.facts.tensor_bytes * (rotation + 5)
    if cell.request is None:
        return call
    model = models.find(str(cell.request["model"]), cell.request.get("layers"))
    sizes, workload = model.sizes, cell.parsed
    width = 4 if workload.dtype == "float32" else 2
    tokens = sum(workload.seqlens_q)
    projections = sizes.hidden * sizes.head_dim * 2 * (sizes.heads_q + sizes.heads_kv)
    layer = projections + 3 * sizes.hidden * sizes.ffn
    weights = width * (model.layers * layer + 2 * sizes.vocabulary * sizes.hidden)
    one = weights + cell.facts.tensor_bytes * (model.layers if workload.cache is not None else 1)
    scores = (
        4
        * workload.heads_q
        * sum(q * k for q, k in zip(workload.seqlens_q, workload.seqlens_k, strict=True))
    )
    if workload.has_backward:
        # Gradients; what the backward keeps of each layer; logits as float32 with their gradient.
        one += weights + width * tokens * model.layers * (10 * sizes.hidden + 3 * sizes.ffn)
        one += 10 * tokens * sizes.vocabulary
        scores *= model.layers
    # Every subject's process keeps its model while all are timed; one at a time has a second model,
    # with textbook attention and all its scores, against which the first is held.
    return subjects * (one + rotation * cell.facts.tensor_bytes) + one + 2 * scores
