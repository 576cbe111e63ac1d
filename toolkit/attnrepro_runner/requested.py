"""A cell's request model inside a worker: built round the subject, described, ready to be timed."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch

from attnrepro_runner import clocks, models, orderstats, requests
from attnrepro_runner.backends import registry
from attnrepro_runner.backends.base import Unsupported
from attnrepro_runner.blockrule import hex_float
from attnrepro_runner.outofmemory import is_out_of_memory

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from attnrepro_runner.flush import Flush
    from attnrepro_runner.models import RequestModel
    from attnrepro_runner.requests import Request
    from attnrepro_runner.subject import Cell, Subject

REPEATS: Final = 5
"""Passes with marks, and passes on the device alone."""


PASSES_COMPARED: Final = 2
"""A training step's second loss holds what the first one's gradients did."""

_LIMITS: Final = {
    "logits": {"float32": 1e-4, "bfloat16": 5e-2, "float16": 5e-2},
    "loss": {"float32": 1e-5, "bfloat16": 5e-4, "float16": 5e-4},
}
"""Relative error, in the 2-norm, that still is rounding. Two layers of the small model in bfloat16
give 0.0075 (logits) and 1e-5 (loss) between flash and textbook attention, 0.4 and 1.7e-3 where one
of the two forgets the causal mask."""


class NoRequest(Exception):
    """The request cannot be built round this subject; the message is the reason."""


class WrongOutput(NoRequest):
    """The model computes something else round this subject than round textbook attention."""


@dataclass(frozen=True, kw_only=True)
class Requested:
    """A request that can be timed."""

    steps: Request
    reads: Sequence[torch.Tensor]
    """What a flush must reach: weights and caches."""
    description: dict[str, object]
    """The `request` object of a result."""


def build(
    subject: Subject,
    cell: Cell,
    wanted: Mapping[str, Any],
    device: clocks.DeviceApi | None,
    empty: Flush,
) -> Requested:
    """Build a cell's request model and see where its time goes.

    Raises:
        WrongOutput: its output is not that of textbook attention; it is not timed then.
        NoRequest: the model is another one's, or the adapter takes no tensors of a model.

    """
    try:
        model = models.find(str(wanted["model"]), wanted.get("layers"))
        made = cell.workload, subject.options, cell.inputs, subject.device
        request = requests.Request(model, subject.backend, *made)
    except (Unsupported, ValueError) as error:
        raise NoRequest(str(error)) from error
    output = [request.step() for _ in range(PASSES_COMPARED)][-1]
    subject.synchronize()
    agreement = _agreement(output, model, cell, subject.device)
    reads = _reads(request)

    def before() -> None:
        empty(reads)
        subject.synchronize()

    description = requests.describe(request, subject.device, repeats=REPEATS, before=before)
    description["device_ns"] = _device_ns(request, device)
    description["agreement"] = agreement
    return Requested(steps=request, reads=reads, description=description)


def _agreement(
    output: torch.Tensor, model: RequestModel, cell: Cell, device: torch.device
) -> dict[str, object]:
    """Hold a model's output against the same model's round textbook attention.

    Raises:
        WrongOutput: beyond the limit.

    """
    what = "loss" if cell.workload.has_backward else "logits"
    limit = _LIMITS[what][cell.workload.dtype]
    said: dict[str, object] = {"against": "eager", "what": what, "limit": hex_float(limit)}
    twin: Request | None = None
    try:
        twin = requests.Request(
            model, registry.load("eager"), cell.workload, {}, cell.inputs, device
        )
        wanted = [twin.step() for _ in range(PASSES_COMPARED)][-1].to(torch.float64)
    except Exception as error:
        if not isinstance(error, Unsupported) and not is_out_of_memory(error):
            raise
        return {**said, "error": None, "reason": f"not compared: {error}"[:500]}
    finally:
        twin = None  # its weights and caches must not stand beside what is timed
        if device.type == "cuda":
            torch.cuda.empty_cache()
    difference = torch.linalg.vector_norm(output.to(torch.float64) - wanted)
    error_ = float(difference / torch.linalg.vector_norm(wanted))
    if not error_ <= limit:
        message = f"its {what} differ from textbook attention's by {error_:.2g} (limit {limit:.2g})"
        raise WrongOutput(message)
    return {**said, "error": hex_float(error_), "reason": None}


def _device_ns(request: Request, device: clocks.DeviceApi | None) -> int | None:
    """Return the request's time with its launches hidden; None where it waits for the device."""
    if device is None:
        return None
    try:
        times = clocks.OpClock(device).take(REPEATS, lambda: request.step)
    except clocks.ClockUnavailable:
        return None
    return sorted(times)[orderstats.median_rank(len(times)) - 1]


def _reads(request: Request) -> list[torch.Tensor]:
    found = list(request.weights.values())
    for tensors in request.tensors:
        values = [getattr(tensors, field.name) for field in dataclasses.fields(tensors)]
        found += [value for value in values if isinstance(value, torch.Tensor)]
    return found
