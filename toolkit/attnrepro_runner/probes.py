"""All probes of one subject on one workload's shape class, and what they say together."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from attnrepro_runner import levels, setprobes
from attnrepro_runner.alibiprobe import probe_alibi
from attnrepro_runner.backends.base import empty_row_lse
from attnrepro_runner.bench import ProbeBench
from attnrepro_runner.dropout import DropoutProbe, probe_dropout
from attnrepro_runner.probeshape import describe, small_workload

if TYPE_CHECKING:
    from collections.abc import Mapping

    from attnrepro_runner.backends.base import Backend
    from attnrepro_runner.levels import Level
    from attnrepro_runner.semantics import Workload
    from attnrepro_runner.setprobes import SetProbe

_UNSEEN = 1e-9
"""Chance that dropout hides one weight in all repeats of a set probe."""


@dataclass(frozen=True, kw_only=True)
class ProbeReport:
    """What the probes saw."""

    sets: Mapping[str, SetProbe]
    levels: tuple[Level, ...]
    dropout: DropoutProbe | None
    shape: str
    notes: tuple[str, ...] = field(default_factory=tuple)

    def status(self) -> str:
        """PASS, INCORRECT, or INCONCLUSIVE where a level's margin or dropout is too small."""
        if (
            not all(probe.equal for probe in self.sets.values())
            or any(level.verdict == "other" for level in self.levels)
            or (self.dropout is not None and not self.dropout.ok)
        ):
            return "INCORRECT"
        if any(level.verdict == "inconclusive" for level in self.levels) or (
            self.dropout is not None and self.dropout.undecided
        ):
            return "INCONCLUSIVE"
        return "PASS"

    def reason(self) -> str | None:
        """Say what does not agree with the manifest; None for PASS."""
        notes = [
            f"{name} probe: {probe.first_difference}"
            for name, probe in self.sets.items()
            if not probe.equal
        ]
        notes += [
            f"{level.name}: {level.chosen or 'no hypothesis'} ({level.effective:.4g}), "
            f"declared {level.declared}"
            for level in self.levels
            if level.verdict != "match"
        ]
        if self.dropout is not None and self.dropout.broken:
            notes.append(f"dropout: {', '.join(self.dropout.broken)}")
        if self.dropout is not None and self.dropout.undecided:
            notes.append(
                f"dropout: {self.dropout.weights} weights are too few at this p to decide "
                f"{', '.join(self.dropout.undecided)}"
            )
        return "; ".join(notes) or None

    def to_json(self) -> dict[str, object]:
        """Return the `probes` object of a result document."""
        return {
            "set": {name: probe.to_json() for name, probe in self.sets.items()},
            "levels": [level.to_json() for level in self.levels],
            "dropout": None if self.dropout is None else self.dropout.to_json(),
            "shape": self.shape,
        }


def run_probes(
    backend: Backend,
    options: Mapping[str, object],
    workload: Workload,
    device: torch.device | str,
) -> ProbeReport:
    """Run every probe that the workload's semantics call for.

    Args:
        backend: under test.
        options: of the subject.
        workload: the benchmarked one; its shape class is probed at a small size.
        device: where.

    Raises:
        Unsupported: the backend refuses the probe's workload.

    """
    device = torch.device(device)
    small = small_workload(workload, dropout=True)
    repeats = 1
    weights = sum(small.seqlens_q) * max(small.seqlens_k) * small.heads_q
    dropped = small.dropout if weights else None  # sequences may all be empty
    if dropped is not None:
        repeats = math.ceil(math.log(_UNSEEN / weights) / math.log(dropped.p))
    bench = ProbeBench(backend, options, small, device)
    values, outputs = setprobes.probe_values(bench, repeats)
    sets = {"v": values}
    count = setprobes.probe_count(bench, outputs, empty_row_lse(backend, options))
    if count is not None:
        sets["lse_count"] = count
    plain = bench
    if small.dropout is not None:
        # Weights as such are read without dropout, by the same backend.
        plain = ProbeBench(backend, options, small_workload(workload), device)
    sets["k"] = setprobes.probe_keys(plain)
    found = []
    if _has_two_keys(plain.workload):
        found.append(levels.probe_scale(plain))
        if small.softcap is not None:
            found.append(levels.probe_softcap(plain))
        if small.fp8 is not None:
            found += levels.probe_descales(plain)
        if small.alibi is not None:
            sloped = ProbeBench(backend, options, small_workload(workload, alibi=True), device)
            found.append(probe_alibi(sloped))
    return ProbeReport(
        sets=sets,
        levels=tuple(found),
        dropout=probe_dropout(backend, options, small, device) if dropped else None,
        shape=describe(small),
    )


def shape_class(workload: Workload) -> str:
    """Name what `run_probes` depends on: workloads of one class have one result."""
    return repr(
        [
            small_workload(workload, dropout=True),
            small_workload(workload),
            small_workload(workload, alibi=True),
        ]
    )


def _has_two_keys(workload: Workload) -> bool:
    """Say whether some row attends two keys: else a level cannot show, and does not matter."""
    return any(
        hi - lo > 1
        for b in range(workload.batch)
        for lo, hi in (workload.key_range(b, i) for i in workload.attending_rows(b))
    )
