"""What every backend adapter looks like.

An adapter is one file with one class. It translates a `Workload` into its library's call by
keywords only, says which fields it consumed, and never picks another backend by itself. The class
is created without importing its library; `availability` imports it.
"""

from __future__ import annotations

import contextlib
import importlib
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import torch

    from attnrepro_runner.semantics import Workload


class Unsupported(Exception):
    """The backend cannot do this workload; the message is the reason that is shown."""


class MemoryOrder(StrEnum):
    """Largest allocation a call makes beyond its inputs and outputs, by order."""

    LINEAR = "S"
    MASK = "S2_mask"
    SCORES = "S2_scores"


@dataclass(frozen=True, kw_only=True)
class Availability:
    """Whether the backend's library is here, and exactly which files it is."""

    available: bool
    version: str | None = None
    files: Mapping[str, str] = field(default_factory=dict)
    """Kernel-bearing file (path below site-packages) to its SHA-256."""
    flags: Mapping[str, str] = field(default_factory=dict)
    """Build flags and environment that change results."""
    reason: str | None = None
    """Why it is not available."""


@dataclass(frozen=True, kw_only=True)
class Tensors:
    """Inputs of one call, in the workload's layout and strides.

    bshd: q (batch, seqlen_q, heads_q, head_dim), k (batch, seqlen_k, heads_kv, head_dim),
    v (batch, seqlen_k, heads_kv, head_dim_v). bhsd: heads before sequence. thd: (total, heads,
    width) with cu_seqlens int32 (batch + 1). With a cache, k and v are the cache's buffers:
    contiguous (batch, capacity, heads_kv, width), or a pool (pool_pages, page_size, heads_kv,
    width) with page_table int32 (batch, pages), and k_new, v_new (batch, append, heads_kv, width)
    are the keys to append; seqused_k int32 (batch) counts keys after the append.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    grad_out: torch.Tensor | None = None
    """dO, of the output's shape; given for forward_backward."""
    cu_seqlens_q: torch.Tensor | None = None
    cu_seqlens_k: torch.Tensor | None = None
    seqused_k: torch.Tensor | None = None
    page_table: torch.Tensor | None = None
    k_new: torch.Tensor | None = None
    v_new: torch.Tensor | None = None
    alibi_slopes: torch.Tensor | None = None
    """float32 (heads_q)."""
    q_descale: torch.Tensor | None = None
    """float32 (batch, heads_kv); likewise k_descale, v_descale."""
    k_descale: torch.Tensor | None = None
    v_descale: torch.Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class Outputs:
    """What a call returned, in the workload's layout."""

    out: torch.Tensor
    lse: torch.Tensor | None = None
    """Natural-log LSE, float32 (batch, heads_q, seqlen_q), thd: (heads_q, total_q); raw, with the
    backend's own value for empty rows. None where the timed call returns none."""
    dq: torch.Tensor | None = None
    dk: torch.Tensor | None = None
    dv: torch.Tensor | None = None


class Prepared(Protocol):
    """A backend bound to one workload and one set of tensors; calling it does the timed work."""

    def step(self) -> Outputs:
        """Do exactly the phase's work once: forward, or forward and backward.

        No validation, planning, allocation of inputs or synchronisation is done here, and `.grad`
        is never accumulated into. dq, dk, dv are set in phase forward_backward only.
        """
        ...

    def backward_step(self) -> Outputs:
        """Do the backward alone, of a forward kept from before (phase forward_backward)."""
        ...

    def append_step(self) -> None:
        """Write k_new, v_new into the cache (phases with an append that is not in the call)."""
        ...


@dataclass(frozen=True, kw_only=True)
class KernelPattern:
    """How the work of this backend looks in a profile; regular expressions, searched."""

    family: str
    must: tuple[str, ...]
    """Each must match at least one operator or kernel name."""
    must_not: tuple[str, ...] = ()
    """None may match any."""


class Backend(Protocol):
    """One attention backend of one library release.

    An adapter may have `empty_row_lse_of(options) -> float`, where an option changes what
    `empty_row_lse` says (see `empty_row_lse`), and `modules(options) -> tuple[str, ...]`, the names
    of the modules that its calls import (see `import_modules`).
    """

    name: str
    """As the manifest spells it, e.g. "sdpa.flash"."""
    empty_row_lse: float
    """The backend's own LSE of a row that attends nothing: inf, -inf or 0.0."""
    option_names: frozenset[str]
    """Subject options that it understands."""

    def availability(self) -> Availability:
        """Import the library and say what it is. Never raises."""
        ...

    def check(self, workload: Workload, options: Mapping[str, object]) -> None:
        """Raise Unsupported with the reason if this call cannot be made with full semantics."""
        ...

    def consumed(self, workload: Workload, options: Mapping[str, object]) -> frozenset[str]:
        """Workload fields and options (dotted names, as in the manifest) that this call honours.

        The caller compares them with the fields whose value is not the neutral one; a field left
        over is an error, never less work.
        """
        ...

    def memory_order(self, workload: Workload, options: Mapping[str, object]) -> MemoryOrder:
        """Declared order of the call's own memory."""
        ...

    def patterns(self, workload: Workload, options: Mapping[str, object]) -> KernelPattern:
        """What a profile of the call must and must not show."""
        ...

    def prepare(
        self, workload: Workload, options: Mapping[str, object], tensors: Tensors
    ) -> Prepared:
        """Bind a workload and its tensors; raise Unsupported where that cannot be.

        All that a serving or training loop would do once (plan, metadata, compile wrapper) is done
        here, so that `step` holds the work alone.
        """
        ...


def empty_row_lse(backend: Backend, options: Mapping[str, object]) -> float:
    """Return the LSE that a backend gives to a row that attends nothing: inf, -inf or 0.0.

    Args:
        backend: whose convention is asked for.
        options: of the subject; they may choose among kernels of several conventions.

    """
    asked: Callable[[Mapping[str, object]], float] | None
    asked = getattr(backend, "empty_row_lse_of", None)
    return backend.empty_row_lse if asked is None else asked(options)


def import_modules(backend: Backend, options: Mapping[str, object]) -> None:
    """Import the library of a backend now, so that no later call pays for it.

    Where that fails, nothing is raised: `availability` says why. It is also what imports the
    library of an adapter that names no modules.
    """
    named: Callable[[Mapping[str, object]], tuple[str, ...]] | None
    named = getattr(backend, "modules", None)
    if named is None:
        backend.availability()
        return
    for name in named(options):
        with contextlib.suppress(Exception):
            importlib.import_module(name)
