"""What the tests of reported cases ask of a backend."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from numerics_fakes import fresh_tensors

from attnrepro_runner import probes, setprobes
from attnrepro_runner.bench import ProbeBench
from attnrepro_runner.oracle import Oracle

if TYPE_CHECKING:
    from attnrepro_runner.backends.base import Backend, Outputs, Tensors
    from attnrepro_runner.oracle import OracleReport
    from attnrepro_runner.probes import ProbeReport
    from attnrepro_runner.semantics import Workload
    from attnrepro_runner.setprobes import SetProbe

CPU = torch.device("cpu")
INF = math.inf
TORCH = ("eager", "sdpa.math", "sdpa.flash")
BR = {"causal": "bottom_right"}


def value_set(backend: Backend, workload: Workload) -> SetProbe:
    """Read out who attends what, at the very size of the report."""
    return setprobes.probe_values(ProbeBench(backend, {}, workload, CPU), 1)[0]


def probed(backend: Backend, workload: Workload) -> ProbeReport:
    return probes.run_probes(backend, {}, workload, CPU)


def step(
    backend: Backend, workload: Workload, tensors: Tensors, *, append: bool = False
) -> tuple[Oracle, Outputs]:
    """Call once; the oracle is bound before."""
    judge = Oracle(workload, {}, tensors)
    prepared = backend.prepare(workload, {}, tensors)
    if append:
        prepared.append_step()
    return judge, prepared.step()


def judged(backend: Backend, workload: Workload, *, append: bool = False) -> OracleReport:
    judge, outputs = step(backend, workload, fresh_tensors(workload), append=append)
    return judge.check(outputs, empty_row_lse=backend.empty_row_lse)


def attended(workload: Workload) -> list[str]:
    """Return the mask of the first sequence, a row a string."""
    ranges = [workload.key_range(0, i) for i in range(workload.seqlens_q[0])]
    keys = range(workload.seqlens_k[0])
    return ["".join("01"[lo <= j < hi] for j in keys) for lo, hi in ranges]
