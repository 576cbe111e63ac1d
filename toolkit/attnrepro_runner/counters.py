"""A separate pass under Nsight Compute: what bound a call, from hardware counters.

Kernels run serialised and replayed there, so that nothing of this pass is a time. The device's
clocks are left alone (`--clock-control none`), and its caches are not flushed between replays.
`python -m attnrepro_runner count JOB CELL SUBJECT` is the counted process; the coordinator starts
it under `ncu` and reads the table. Where there is no `ncu`, or no right to the counters, the bound
is `undetermined`, with the reason.
"""

from __future__ import annotations

import csv
import io
import re
import shutil
import subprocess
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

SECTIONS: Final = ("SpeedOfLight", "ComputeWorkloadAnalysis", "WarpStateStats")
TENSOR: Final = "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active"
BARRIER: Final = "smsp__average_warps_issue_stalled_barrier_per_issue_active.ratio"
KEPT: Final = (
    "Compute (SM) Throughput",
    "Memory Throughput",
    "DRAM Throughput",
    "SM Busy",
    "Warp Cycles Per Issued Instruction",
    TENSOR,
    BARRIER,
)
"""Metrics that are recorded, by the names of ncu's table."""

BOUND_PERCENT: Final = 60
"""Share of its peak from which a unit is what bounds a kernel, as Nsight Compute has it."""

_SECONDS: Final = 300


@dataclass(frozen=True, kw_only=True)
class Counters:
    """What the counters say of one call, weighted by its kernels' durations."""

    tool: str | None
    metrics: Mapping[str, str] = field(default_factory=dict)
    """Metric to its value, as text with its unit."""
    bound: str = "undetermined"
    """compute, memory, latency or undetermined."""
    evidence: str = ""

    def to_json(self) -> dict[str, object]:
        """Return the `counters` object of a result."""
        return {
            "tool": self.tool,
            "metrics": dict(self.metrics),
            "bound": self.bound,
            "evidence": self.evidence,
        }


class Run(Protocol):
    """Runs a command: status and what it said."""

    def __call__(
        self, command: Sequence[str], environment: Mapping[str, str], seconds: float
    ) -> tuple[int, str]:
        """Return the exit status and the output, standard error included."""
        ...


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """What ncu is asked for, and how it is to run a kernel as often as it must."""

    sections: tuple[str, ...] = SECTIONS
    metrics: tuple[str, ...] = ()
    replay: str = "kernel"


ATTEMPTS: Final = (
    Attempt(metrics=(TENSOR, BARRIER)),
    Attempt(),
    # Without a kernel's memory saved and put back: ncu 2025.3.1 said on an H200, beside a run on
    # the other device, that it could not prepare a kernel, though it could on another day.
    Attempt(sections=("SpeedOfLight",), replay="application"),
)
"""In turn, until one gives a table: an old ncu lacks single metrics."""


def command(ncu: str, table: Path, counted: Sequence[str], attempt: Attempt) -> list[str]:
    """Return the line that counts; clocks stay as they are.

    Args:
        ncu: path of the tool.
        table: file that it writes its table to.
        counted: the process under test.
        attempt: what is asked for.

    """
    words = [ncu, "--clock-control", "none", "--cache-control", "none"]
    words += ["--replay-mode", attempt.replay]
    words += ["--profile-from-start", "off", "--target-processes", "all"]
    words += ["--csv", "--page", "details", "--log-file", str(table)]
    for section in attempt.sections:
        words += ["--section", section]
    if attempt.metrics:
        words += ["--metrics", ",".join(attempt.metrics)]
    return [*words, *counted]


def count(
    counted: Sequence[str],
    environment: Mapping[str, str],
    table: Path,
    *,
    seconds: float = _SECONDS,
    vendor: str = "nvidia",
    run: Run | None = None,
    find: str | None = None,
) -> Counters:
    """Count one call. Never raises for what the tool does.

    Args:
        counted: the process to be counted.
        environment: its environment.
        table: a file for the tool's table; it is removed.
        seconds: limit of all attempts together.
        vendor: of the device.
        run: runs a command.
        find: path of ncu; by default as the environment's PATH has it.

    """
    if vendor != "nvidia":
        return Counters(tool=None, evidence=f"no counters are read of devices of {vendor}")
    ncu = find or shutil.which("ncu", path=environment.get("PATH"))
    if ncu is None:
        return Counters(tool=None, evidence="ncu is not here")
    runner = run or _run
    _, version = runner([ncu, "--version"], environment, 30)
    named = re.search(r"^Version (\S+)", version, re.MULTILINE)
    tool = f"ncu {named[1]}" if named else "ncu"
    reasons: list[str] = []
    until = time.monotonic() + seconds
    for attempt in ATTEMPTS:
        left = until - time.monotonic()
        if reasons and left < 1:
            break
        status, said = runner(command(ncu, table, counted, attempt), environment, left)
        text = table.read_text(errors="replace") if table.exists() else ""
        table.unlink(missing_ok=True)
        if kernels := parse(text):
            return summarise(tool, kernels)
        reasons.append(_reason(text + "\n" + said, status))
        if "ERR_NVGPUCTRPERM" in reasons[-1]:
            break
    return Counters(tool=tool, evidence="; then: ".join(dict.fromkeys(reasons))[:1000])


@dataclass
class Kernel:
    """One launch in the table."""

    name: str
    duration_ns: float = 0.0
    metrics: dict[str, tuple[float, str]] = field(default_factory=dict)


def parse(text: str) -> list[Kernel]:
    """Read ncu's CSV of its details page; lines before the heading are messages."""
    lines = text.splitlines()
    start = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), None)
    if start is None:
        return []
    kernels: dict[str, Kernel] = {}
    for row in csv.DictReader(io.StringIO("\n".join(lines[start:]))):
        name, value = row.get("Metric Name") or "", row.get("Metric Value") or ""
        try:
            number = float(value.replace(",", ""))
        except ValueError:
            continue
        kernel = kernels.setdefault(row["ID"], Kernel(name=row.get("Kernel Name") or ""))
        unit = row.get("Metric Unit") or ""
        if name == "Duration":
            kernel.duration_ns = number * _NANOSECONDS.get(unit, 1.0)
        elif name in KEPT:
            kernel.metrics[name] = (number, unit)
    return list(kernels.values())


def summarise(tool: str, kernels: Sequence[Kernel]) -> Counters:
    """Weigh the kernels of a call by their durations, and name the bound."""
    total = sum(k.duration_ns for k in kernels) or float(len(kernels))
    found: dict[str, tuple[float, str]] = {}
    for name in KEPT:
        having = [k for k in kernels if name in k.metrics]
        weight = sum(k.duration_ns for k in having) or float(len(having))
        if having and weight:
            mean = sum(k.metrics[name][0] * (k.duration_ns or 1.0) for k in having) / weight
            found[name] = (mean, having[0].metrics[name][1])
    shares = {
        bound: found[name][0]
        for bound, name in (
            ("compute", "Compute (SM) Throughput"),
            ("memory", "Memory Throughput"),
        )
        if name in found
    }
    metrics = {name: f"{value:.4g} {unit}".strip() for name, (value, unit) in found.items()}
    if len(shares) < 2:
        return Counters(
            tool=tool, metrics=metrics, evidence="the table lacks the throughput of a unit"
        )
    bound = max(shares, key=lambda name: shares[name])
    said = f"compute {shares['compute']:.0f} %, memory {shares['memory']:.0f} % of peak"
    where = f"over {len(kernels)} kernels of {total / 1000:.1f} us under ncu"
    if shares[bound] < BOUND_PERCENT:
        return Counters(
            tool=tool,
            metrics=metrics,
            bound="latency",
            evidence=f"{said} {where}: neither reaches {BOUND_PERCENT} %",
        )
    return Counters(tool=tool, metrics=metrics, bound=bound, evidence=f"{said} {where}")


_NANOSECONDS: Final = {
    "nsecond": 1.0,
    "ns": 1.0,
    "usecond": 1e3,
    "us": 1e3,
    "msecond": 1e6,
    "ms": 1e6,
    "second": 1e9,
    "s": 1e9,
}


def _reason(text: str, status: int) -> str:
    said = [line.strip() for line in text.splitlines() if "ERR" in line or "rror" in line]
    # The first line alone is often the least telling one.
    told = "; ".join(list(dict.fromkeys(said))[:3])
    return (told or f"ncu ended with {status} and wrote no table")[:500]


def _run(command: Sequence[str], environment: Mapping[str, str], seconds: float) -> tuple[int, str]:
    try:
        done = subprocess.run(
            list(command),
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=seconds,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return 124, f"error: no end within {seconds:.0f} s"
    except OSError as error:
        return 127, f"error: {error}"
    return done.returncode, (done.stdout + done.stderr).decode("utf-8", "replace")


def main(job_path: Path, cell_id: str, subject_id: str) -> int:
    """Make one call of a cell between the marks that the tool counts from and to."""
    import torch

    from attnrepro_runner import inputs, job, libraries, stages
    from attnrepro_runner import subject as subjects

    found = job.load(job_path)
    document = next(cell for cell in found.cells if cell["id"] == cell_id)
    cell = subjects.Cell.read(document)
    device = libraries.torch_device()
    subject = subjects.Subject(found.subjects[subject_id], device, threads=1)
    subject.accept(cell.workload)
    tensors = inputs.make_inputs(
        cell.workload, cell.inputs, stream=stages.CHECK_STREAM, device=device
    )
    prepared = subject.bind(cell.workload, tensors)
    prepared.step()
    subject.synchronize()
    torch.cuda.cudart().cudaProfilerStart()  # type: ignore[no-untyped-call]
    prepared.step()
    subject.synchronize()
    torch.cuda.cudart().cudaProfilerStop()  # type: ignore[no-untyped-call]
    return 0
