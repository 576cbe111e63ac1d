"""A subject inside its worker: backend, options, device, and how it is bound to a workload."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from attnrepro_runner import guards, mathflags, views
from attnrepro_runner.backends import registry
from attnrepro_runner.backends.base import Unsupported, empty_row_lse, import_modules
from attnrepro_runner.semantics import Workload, WorkloadError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from attnrepro_runner.backends.base import Backend, KernelPattern, Outputs, Prepared, Tensors
    from attnrepro_runner.probes import ProbeReport

OUTPUTS = ("out", "lse", "dq", "dk", "dv")


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One cell as the job has it, read."""

    id: str
    label: str
    workload: Workload
    inputs: Mapping[str, Any]
    request: Mapping[str, Any] | None = None
    """Request model: model and layers."""

    @classmethod
    def read(cls, document: Mapping[str, Any]) -> Cell:
        """Read a cell of the job.

        Raises:
            Unsupported: the workload has no meaning to this runner.

        """
        try:
            workload = Workload.parse(document["workload"])
        except WorkloadError as error:
            message = f"this runner does not understand the workload: {error}"
            raise Unsupported(message) from error
        return cls(
            id=document["id"],
            label=document["label"],
            workload=workload,
            inputs=document["inputs"],
            request=document.get("request"),
        )


class Subject:
    """A backend with the subject's options, on this process's device."""

    def __init__(self, document: Mapping[str, Any], device: torch.device, threads: int) -> None:
        """Load the adapter.

        Raises:
            Unsupported: there is none of the name.

        """
        self.id = str(document["id"])
        self.options: Mapping[str, object] = document["options"]
        self.device = device
        self.threads = threads
        self.probed: dict[str, ProbeReport] = {}
        """What the probes said of each shape class: a grid's lengths share a few."""
        self.backend: Backend = registry.load(document["backend"], document.get("adapter"))

    @property
    def empty_row_lse(self) -> float:
        """LSE that the backend gives to a row that attends nothing, under the subject's options."""
        return empty_row_lse(self.backend, self.options)

    def import_library(self) -> None:
        """Import the backend's library; where it cannot be, its availability says why."""
        import_modules(self.backend, self.options)

    def accept(self, workload: Workload) -> None:
        """Set the math flags and find out whether the call can be made with full semantics.

        Raises:
            Unsupported: a field or an option is not honoured, or the backend refuses.

        """
        mathflags.apply(workload.math)
        unknown = sorted(set(self.options) - self.backend.option_names)
        if unknown:
            message = f"{self.backend.name} has no option {', '.join(unknown)}"
            raise Unsupported(message)
        self.backend.check(workload, self.options)
        consumed = self.backend.consumed(workload, self.options)
        left = sorted((workload.active_fields() | set(self.options)) - consumed)
        if left:
            message = f"{self.backend.name} does not honour {', '.join(left)}"
            raise Unsupported(message)

    def bind(self, workload: Workload, tensors: Tensors) -> Prepared:
        """Prepare a call; where the append is a step of its own, it is done."""
        prepared = self.backend.prepare(workload, self.options, tensors)
        if appends_apart(workload):
            prepared.append_step()
        return prepared

    def patterns(self, workload: Workload) -> KernelPattern:
        """Return what a profile of the call must and must not show."""
        return self.backend.patterns(workload, self.options)

    def poisoned_step(self, workload: Workload, prepared: Prepared) -> Outputs:
        """Make one call after filling free blocks of its outputs' sizes with NaN."""
        self.poison(workload, ("out", "q", "k", "v") if workload.has_backward else ("out",))
        outputs = prepared.step()
        self.synchronize()
        return outputs

    def poison(self, workload: Workload, names: Sequence[str]) -> None:
        """Fill free blocks of the sizes of such tensors with NaN."""
        dtypes = [views.DTYPES[workload.dtype_out if n == "out" else workload.dtype] for n in names]
        shapes = [workload.shape(name) for name in names]
        guards.poison_allocator(shapes, dtypes, self.device)

    def synchronize(self) -> None:
        """Wait for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def appends_apart(workload: Workload) -> bool:
    """Say whether new keys are appended by a step of its own, before the timed call."""
    cache = workload.cache
    return cache is not None and cache.append > 0 and not cache.append_in_call
