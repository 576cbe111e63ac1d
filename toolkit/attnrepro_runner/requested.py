"""A cell's request model inside a worker: built round the subject, described, ready to be timed."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch

from attnrepro_runner import clocks, models, orderstats, requests
from attnrepro_runner.backends.base import Unsupported

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from attnrepro_runner.flush import Flush
    from attnrepro_runner.requests import Request
    from attnrepro_runner.subject import Cell, Subject

REPEATS: Final = 5
"""Passes with marks, and passes on the device alone."""


class NoRequest(Exception):
    """The request cannot be built round this subject; the message is the reason."""


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
        NoRequest: the model is another one's, or the adapter takes no tensors of a model.

    """
    try:
        request = requests.Request(
            models.find(str(wanted["model"]), wanted.get("layers")),
            subject.backend,
            cell.workload,
            subject.options,
            cell.inputs,
            subject.device,
        )
    except (Unsupported, ValueError) as error:
        raise NoRequest(str(error)) from error
    for _ in range(2):  # the first compiles
        request.step()
    subject.synchronize()
    reads = _reads(request)

    def before() -> None:
        empty(reads)
        subject.synchronize()

    description = requests.describe(request, subject.device, repeats=REPEATS, before=before)
    description["device_ns"] = _device_ns(request, device)
    return Requested(steps=request, reads=reads, description=description)


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
