"""Bits: whether the same call gives the same bytes, call after call, and in another batch."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from attnrepro_runner import bitclaims, guards, inputs, views

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from attnrepro_runner.backends.base import Backend, Outputs, Prepared
    from attnrepro_runner.semantics import Workload


@dataclass(frozen=True, kw_only=True)
class BitsReport:
    """What was claimed and what was observed, apart."""

    profile: str
    claimed: str
    repeats: int
    observed: Mapping[str, str]
    """Tensor name to "repeats" or "differs"."""
    digests: Mapping[str, str]
    """SHA-256 of the first call's tensors."""
    batch_invariant: bool | None

    def status(self) -> str:
        """PASS, or NONDETERMINISTIC where equal bits were claimed and not observed."""
        return "NONDETERMINISTIC" if self._broken() else "PASS"

    def reason(self) -> str | None:
        """Say which claimed tensors differ; None for PASS."""
        if not (names := self._broken()):
            return None
        return f"{', '.join(names)} differed within {self.repeats} calls on the same inputs"

    def _broken(self) -> list[str]:
        return bitclaims.broken(self.claimed, self.observed)

    def to_json(self) -> dict[str, object]:
        """Return the `bits` object of a result document."""
        return {
            "profile": self.profile,
            "claimed": self.claimed,
            "repeats": self.repeats,
            "observed": dict(self.observed),
            "digests": dict(self.digests),
            "batch_invariant": self.batch_invariant,
        }


def repeat(
    prepared_factory: Callable[[], Prepared],
    repeats: int,
    *,
    profile: str = "native",
    claimed: str = "bitwise",
    between: Callable[[], None] | None = None,
    rebind: bool = False,
    batch_invariant: bool | None = None,
) -> BitsReport:
    """Call `repeats` times on the same inputs and compare every output's bytes.

    Args:
        prepared_factory: binds the backend; called once, or with `rebind` for each call.
        repeats: calls, at least 2.
        profile: CPU arithmetic profile in force, for the record.
        claimed: a key of `bitclaims.CLAIMED`.
        between: done before each call, such as poisoning the allocator's free blocks.
        rebind: bind anew for each call, since consecutive calls draw other dropout masks.
        batch_invariant: what `batch_invariance` said, for the record.

    Raises:
        ValueError: fewer than 2 repeats.

    """
    if repeats < 2:
        msg = f"{repeats} call cannot show whether bits repeat"
        raise ValueError(msg)
    prepared = prepared_factory()
    first: dict[str, torch.Tensor] = {}
    differing: set[str] = set()
    for n in range(repeats):
        if between is not None:
            between()
        if rebind and n:
            prepared = prepared_factory()
        found = _returned(prepared.step())
        if n == 0:
            # A copy: a backend may return the same memory again.
            first = {name: tensor.clone() for name, tensor in found.items()}
        differing |= {name for name in first if not _equal(first[name], found.get(name))}
    return BitsReport(
        profile=profile,
        claimed=claimed,
        repeats=repeats,
        observed={name: "differs" if name in differing else "repeats" for name in first},
        digests=inputs.digest_all(first),
        batch_invariant=batch_invariant,
    )


def _returned(outputs: Outputs) -> dict[str, torch.Tensor]:
    named = ((name, getattr(outputs, name)) for name in bitclaims.TENSORS)
    return {name: tensor.detach() for name, tensor in named if tensor is not None}


def _equal(first: torch.Tensor, other: torch.Tensor | None) -> bool:
    """Compare bits (NaN patterns and signed zeros too) where the tensors are."""
    if other is None or other.shape != first.shape or other.dtype != first.dtype:
        return False
    return torch.equal(guards.as_integers(first), guards.as_integers(other.contiguous()))


def batch_invariance(
    backend: Backend,
    options: Mapping[str, object],
    workload: Workload,
    spec: Mapping[str, object],
    *,
    stream: int,
    device: torch.device | str,
) -> bool | None:
    """Say whether the first sequence's output has the same bits alone as in its batch.

    None where there is one sequence, or where the batch enters the call otherwise (a descale
    measured over the whole tensor, a dropout mask drawn for all of it).

    Args:
        backend: under test.
        options: of the subject.
        workload: the benchmarked one.
        spec: the manifest's `inputs`.
        stream: of the draw.
        device: where.

    Raises:
        Unsupported: the backend takes the batch and not the single sequence.

    """
    if workload.batch == 1 or workload.dropout is not None:
        return None
    if workload.fp8 is not None and workload.fp8.granularity == "tensor":
        return None
    pool = workload.cache and dataclasses.replace(workload.cache, pool_pages=None)
    alone = dataclasses.replace(
        workload,
        batch=1,
        seqlens_q=workload.seqlens_q[:1],
        seqlens_k=workload.seqlens_k[:1],
        cache=pool,
    )
    outs = []
    for each in (workload, alone):
        tensors = inputs.make_inputs(each, spec, stream=stream, device=device)
        prepared = backend.prepare(each, options, tensors)
        if each.cache is not None and each.cache.append and not each.cache.append_in_call:
            prepared.append_step()
        out = prepared.step().out
        rows = [views.query_rows(out, each, 0, h) for h in range(each.heads_q)]
        outs.append(torch.stack(rows))
    return _equal(*outs)
