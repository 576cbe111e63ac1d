"""`python -m attnrepro_runner fidelity`: our clocks against other people's, on this machine.

One table: the medians of our clocks and of triton's do_bench, nvbench and torch's profiler (a CPU:
torch.utils.benchmark) on the same calls, then what the harness itself costs: a worker's start, the
oracle, and all else, of a job that runs identical code against itself. `--samples FILE` keeps that
job's samples, from which `attnrepro doctor --aa --samples FILE` reads this machine's false
verdicts.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import torch

    from attnrepro_runner.clocks import DeviceApi
    from attnrepro_runner.flush import Flush
    from attnrepro_runner.subject import Subject

SAMPLES: Final = 60
TURN: Final = 20
DEVICE_TURN: Final = 7
ROUNDS: Final = 9
"""Our clocks and the others take turns of so many calls so often: a machine's speed drifts. Timed
one after the other on an H200, one call read 182 us by its kernel and 160 us by its op."""
WARM_SECONDS: Final = 0.5

_BASE: Final = {"batch": 1, "heads_q": 16, "head_dim": 128, "mask": {"causal": "top_left"}}


@dataclass(frozen=True, kw_only=True)
class Case:
    """One call that is timed by everyone."""

    name: str
    backend: str
    workload: Mapping[str, Any]

    @property
    def in_nvbench(self) -> bool:
        """Whether nvbench times it too: forwards of middling length, seconds each."""
        return bool(self.workload["phase"] == "prefill" and self.workload["seqlen_q"] <= 4096)


def cases(vendor: str) -> list[Case]:
    """Calls from launch-bound to long, and one with a backward."""
    if vendor == "cpu":
        small = {**_BASE, "heads_q": 4, "head_dim": 64, "dtype": "float32"}
        return [
            _case("flash 128", "sdpa.flash", small, "prefill", 128),
            _case("flash 512", "sdpa.flash", small, "prefill", 512),
            _case("math 512", "sdpa.math", small, "prefill", 512),
            _case("flash training 256", "sdpa.flash", small, "forward_backward", 256),
        ]
    large = {**_BASE, "dtype": "bfloat16"}
    return [
        _case("flash 512", "sdpa.flash", large, "prefill", 512),
        _case("flash 4096", "sdpa.flash", large, "prefill", 4096),
        _case("flash 16384", "sdpa.flash", large, "prefill", 16384),
        _case("cudnn 4096", "sdpa.cudnn", large, "prefill", 4096),
        _case("efficient 4096", "sdpa.efficient", large, "prefill", 4096),
        _case("flash training 4096", "sdpa.flash", large, "forward_backward", 4096),
    ]


def _case(name: str, backend: str, base: Mapping[str, Any], phase: str, length: int) -> Case:
    workload = {**base, "phase": phase, "seqlen_q": length, "seqlen_k": length}
    return Case(name=name, backend=backend, workload=workload)


def main(arguments: list[str]) -> int:
    """Print the tables; exit status 0 unless nothing could be timed."""
    parser = argparse.ArgumentParser(prog="attnrepro_runner fidelity")
    parser.add_argument("only", nargs="?", choices=["nvbench"], help=argparse.SUPPRESS)
    parser.add_argument("--device", choices=["cpu", "nvidia", "amd"], default=None)
    parser.add_argument("--launches", type=int, default=2, help="of the harness's job; 0 is none")
    parser.add_argument("--seconds", type=int, default=600, help="limit of the harness's job")
    parser.add_argument("--samples", type=Path, help="file for the job's samples")
    parser.add_argument("--output", type=Path, help="file for all figures, as JSON")
    parser.add_argument("--json", action="store_true", help="print them instead of tables")
    asked = parser.parse_args(arguments)
    vendor = asked.device or _vendor()
    _one_thread()
    os.environ["ATTNREPRO_DEVICE"] = "cpu" if vendor == "cpu" else "cuda"
    if asked.only:
        from attnrepro_runner import othertimers

        bound = {case.name: _bind(case)[2] for case in cases(vendor) if case.in_nvbench}
        sys.stdout.write(json.dumps(othertimers.run_nvbench(bound)) + "\n")
        return 0
    document: dict[str, Any] = {"versions": _versions(vendor), "rows": _rows(vendor)}
    if not asked.json:
        sys.stdout.write(table(document) + "\n")
        sys.stdout.flush()
    _write(asked.output, document)
    if asked.launches:
        from attnrepro_runner import harness

        document["harness"] = harness.measure(
            vendor, launches=asked.launches, seconds=asked.seconds, samples=asked.samples
        )
        if not asked.json:
            sys.stdout.write(harness.table(document["harness"]) + "\n")
        _write(asked.output, document)
    if asked.json:
        sys.stdout.write(json.dumps(document, indent=1) + "\n")
    return 0 if any("reason" not in row for row in document["rows"]) else 1


def _write(path: Path | None, document: Mapping[str, Any]) -> None:
    if path is not None:
        path.write_text(json.dumps(document, indent=1) + "\n")


def table(document: Mapping[str, Any]) -> str:
    """Return the rows as text; ratios are ours over theirs."""
    lines = [", ".join(f"{name} {value}" for name, value in document["versions"].items()), ""]
    columns = list(dict.fromkeys(key for row in document["rows"] for key in row if key != "case"))
    rows = [[row["case"], *(_text(row.get(c)) for c in columns)] for row in document["rows"]]
    shown = [["case", *columns], *rows]
    widths = [max(len(line[i]) for line in shown) for i in range(len(shown[0]))]
    lines += [
        "  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip()
        for line in shown
    ]
    return "\n".join(lines)


def _text(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, int):
        return f"{value / 1000:.1f} us"
    return f"{value:.3f}" if isinstance(value, float) else f"{value}"


def _one_thread() -> None:
    """Use one CPU thread, as the job does: on a busy machine two wait for each other."""
    import torch

    torch.set_num_threads(1)


def _vendor() -> str:
    import torch

    if not torch.cuda.is_available():
        return "cpu"
    return "amd" if torch.version.hip else "nvidia"


def _versions(vendor: str) -> dict[str, str]:
    import importlib.metadata as metadata

    import torch

    from attnrepro_runner import cpu

    found = {"device": str(cpu.describe()["name"]), "torch": str(torch.__version__)}
    if vendor != "cpu":
        found["device"] = torch.cuda.get_device_name()
        for package in ("triton", "cuda-bench"):
            try:
                found[package] = metadata.version(package)
            except metadata.PackageNotFoundError:
                found[package] = "not installed"
    else:
        found["threads"] = str(torch.get_num_threads())
    return found


def _bind(case: Case) -> tuple[Subject, list[torch.Tensor], Any]:
    from attnrepro_runner import flush, inputs, libraries, subject
    from attnrepro_runner.semantics import Workload

    device = libraries.torch_device()
    document = {"id": "a", "backend": case.backend, "options": {}}
    one = subject.Subject(document, device, threads=1)
    workload = Workload.parse(case.workload)
    one.accept(workload)
    tensors = inputs.make_inputs(
        workload, {"seed": 2026, "distribution": "normal"}, stream=0, device=device
    )
    prepared = one.bind(workload, tensors)
    return one, flush.read_by(tensors, prepared), prepared.step


def _rows(vendor: str) -> list[dict[str, Any]]:
    rows = []
    for case in cases(vendor):
        try:
            row = _cpu_row(case) if vendor == "cpu" else _gpu_row(case)
        except Exception as error:  # whatever a backend raises: the other rows are worth having
            row = {"reason": f"{type(error).__name__}: {error}"[:120]}
        rows.append({"case": case.name, **row})
    if vendor == "nvidia":
        _add_nvbench(rows)
    return rows


def _cpu_row(case: Case) -> dict[str, Any]:
    import torch

    from attnrepro_runner import clocks, flush, othertimers

    _, reads, step = _bind(case)
    for _ in range(5):
        step()
    ours, theirs = [], []
    for _ in range(ROUNDS):
        ours += _take(clocks.HostClock(None), step, flush.Warm(), reads, count=TURN)
        threads = torch.get_num_threads()
        theirs.append(othertimers.torch_benchmark(step, threads=threads, runs=TURN))
    flushed = _take(
        clocks.HostClock(None), step, flush.choose(torch.device("cpu"), wanted=True), reads
    )
    host, other = _median(ours), _median(theirs)
    return {
        "host warm": host,
        "torch.utils.benchmark": other,
        "host/benchmark": host / other,
        "host flushed": _median(flushed),
    }


def _gpu_row(case: Case) -> dict[str, Any]:
    """Time a call by everyone in turns: a device's clock follows its load and its heat."""
    from attnrepro_runner import clocks, flush, othertimers
    from attnrepro_runner.torchdevice import TorchDevice

    one, reads, step = _bind(case)
    empty = flush.choose(one.device, wanted=True)
    device: DeviceApi = TorchDevice()
    _keep_busy(step, one.synchronize)
    row: dict[str, Any] = {}
    ours: dict[str, list[int]] = {"kernel": [], "op": [], "host": []}
    theirs: dict[str, list[int]] = {"profiler": [], "do_bench": []}
    for _ in range(ROUNDS):
        for name in [name for name in ours if name not in row]:
            try:
                ours[name] += _take(
                    clocks.make(name, device), step, empty, reads, count=DEVICE_TURN
                )
            except clocks.ClockUnavailable as error:
                row[name] = str(error)[:60]
        theirs["profiler"] += othertimers.profiler(step, empty, reads)
        theirs["do_bench"] += othertimers.do_bench(step)
    # A clock that failed in a later turn has its reason there, and no median of the earlier ones.
    row |= {n: _median(times) for n, times in (ours | theirs).items() if times and n not in row}
    for mine, other in (("kernel", "profiler"), ("op", "do_bench")):
        if isinstance(row.get(mine), int) and row.get(other):
            row[f"{mine}/{other}"] = row[mine] / row[other]
    return row


def _keep_busy(step: Callable[[], object], synchronize: Callable[[], None]) -> None:
    """Run calls until the device has left its idle clock."""
    until = time.monotonic() + WARM_SECONDS
    while time.monotonic() < until:
        for _ in range(10):
            step()
        synchronize()


def _add_nvbench(rows: list[dict[str, Any]]) -> None:
    from attnrepro_runner import othertimers

    found = othertimers.nvbench(["--device", "nvidia"])
    for row in rows:
        if isinstance(found, str):
            row["nvbench"] = found
        elif row["case"] in found:
            row["nvbench"] = found[row["case"]]
            if isinstance(row.get("op"), int):
                row["op/nvbench"] = row["op"] / row["nvbench"]


def _take(
    clock: Any, step: Any, empty: Flush, reads: Sequence[torch.Tensor], *, count: int = SAMPLES
) -> list[int]:
    def following() -> Any:
        empty(reads)
        return step

    found: list[int] = clock.take(count, following)
    return found


def _median(times: Sequence[int]) -> int:
    from attnrepro_runner import orderstats

    return sorted(times)[orderstats.median_rank(len(times)) - 1]
