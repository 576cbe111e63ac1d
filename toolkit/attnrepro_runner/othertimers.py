"""Other people's timers on the same calls: what our clocks are held against.

triton's do_bench, nvbench (PyPI cuda-bench, in a process of its own), torch's profiler and
torch.utils.benchmark. Each is used as its documentation says; one that is not here has no column.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch

from attnrepro_runner import orderstats, trace

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from attnrepro_runner.flush import Flush

PROFILED_CALLS: Final = 3
DO_BENCH_MS: Final = 20
NVBENCH_SECONDS: Final = 60


def do_bench(work: Callable[[], object]) -> list[int]:
    """Return all times of triton.testing.do_bench in ns; none where triton is not here."""
    try:
        testing = importlib.import_module("triton.testing")
    except ImportError:
        return []
    times = testing.do_bench(work, warmup=10, rep=DO_BENCH_MS, return_mode="all")
    return [round(1e6 * float(ms)) for ms in times]


def profiler(work: Callable[[], object], flush: Flush, reads: Sequence[torch.Tensor]) -> list[int]:
    """Return the summed device time of a call's kernels for several calls, in ns.

    The caches are flushed before each call; the flush's own kernels are known by name and left out.
    """
    flushing = {name for name, _ in _kernels(lambda: flush(reads))}
    totals = []
    for _ in range(PROFILED_CALLS):

        def call() -> None:
            flush(reads)
            torch.cuda.synchronize()
            work()

        totals.append(sum(ns for name, ns in _kernels(call) if name not in flushing))
    return [total for total in totals if total]


def _kernels(work: Callable[[], object]) -> list[tuple[str, int]]:
    from torch.profiler import ProfilerActivity

    activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        work()
        torch.cuda.synchronize()
    return [(e.name, e.end_ns - e.start_ns) for e in trace.events(profile) if e.on_device]


def torch_benchmark(work: Callable[[], object], *, threads: int, runs: int) -> int:
    """Return the median of single runs of torch.utils.benchmark in ns.

    Single runs, not its blocks: a block's mean holds the turns of whatever else runs here.
    """
    from torch.utils.benchmark import Timer

    timer = Timer("work()", globals={"work": work}, num_threads=threads)
    times = sorted(float(timer.timeit(1).median) for _ in range(runs))
    return round(1e9 * times[orderstats.median_rank(runs) - 1])


def nvbench(arguments: Sequence[str]) -> dict[str, int] | str:
    """Return each case's median of nvbench's raw cold samples in ns, or why there is none.

    Args:
        arguments: of `fidelity nvbench`, which is run in a process of its own.

    """
    if importlib.util.find_spec("cuda") is None:
        return "cuda-bench is not installed"
    command = [sys.executable, "-m", "attnrepro_runner", "fidelity", "nvbench", *arguments]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=NVBENCH_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return f"no end within {NVBENCH_SECONDS} s"
    last = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not last:
        return (done.stderr.strip().splitlines() or ["it said nothing"])[-1][:200]
    found: dict[str, int] = json.loads(last[-1])
    return found


def run_nvbench(cases: Mapping[str, Callable[[], object]]) -> dict[str, int]:
    """Run every case under nvbench in this process; median of the raw cold samples in ns.

    Without `sync=True`, which would disable its blocking kernel and throttle filter.

    Raises:
        ImportError: cuda-bench or what it needs is not installed.

    """
    bench = importlib.import_module("cuda.bench")
    results = importlib.import_module("cuda.bench.results")
    for name, work in cases.items():
        benchmark = bench.register(_benchmark(work))
        benchmark.set_name(name)
        benchmark.set_timeout(2.0)
        benchmark.set_min_samples(50)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "samples.json"
        bench.run_all_benchmarks(["attnrepro", "--quiet", "--jsonbin", str(path)])
        found = results.BenchmarkResult.from_json(path)
        return {
            name: _nanoseconds(state.samples)
            for name, benchmark in found.items()
            for state in benchmark.states
            if state.samples
        }


def _benchmark(work: Callable[[], object]) -> Callable[[Any], None]:
    def body(state: Any) -> None:
        def launch(launched: Any) -> None:
            stream = torch.cuda.ExternalStream(launched.get_stream().addressof())  # type: ignore[no-untyped-call]
            with torch.cuda.stream(stream):
                work()

        state.exec(launch, batched=False)

    return body


def _nanoseconds(seconds: Iterable[float]) -> int:
    ordered = sorted(seconds)
    return round(1e9 * ordered[orderstats.median_rank(len(ordered)) - 1])
