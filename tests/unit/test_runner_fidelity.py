"""The fidelity command's own arithmetic, the counters' table, and a request in a worker."""

from __future__ import annotations

import csv
import dataclasses
import io
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from attnrepro import schema
from attnrepro_runner import (
    counters,
    fidelity,
    flush,
    harness,
    interleave,
    othertimers,
    requested,
    subject,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

HEADING = ["ID", "Kernel Name", "Section Name", "Metric Name", "Metric Unit", "Metric Value"]


def ncu_table(*kernels: tuple[float, float, float]) -> str:
    """Kernels as ncu lists them: microseconds, percent of compute, percent of memory."""
    text = io.StringIO()
    rows = csv.writer(text, quoting=csv.QUOTE_ALL)
    rows.writerow(HEADING)
    for number, (microseconds, compute, memory) in enumerate(kernels):
        for name, unit, value in (
            ("Duration", "us", f"{microseconds:,.2f}"),
            ("Compute (SM) Throughput", "%", f"{compute:.2f}"),
            ("Memory Throughput", "%", f"{memory:.2f}"),
            ("L1/TEX Hit Rate", "%", "n/a"),
        ):
            rows.writerow([number, "flash_fwd", "SpeedOfLight", name, unit, value])
    return "==PROF== Connected to process 7\n" + text.getvalue()


class Ncu:
    """Runs nothing; writes what the tool would."""

    def __init__(self, table: Path, *texts: str, said: str = "") -> None:
        self.table, self.texts, self.said = table, list(texts), said
        self.commands: list[list[str]] = []

    def __call__(
        self, command: Sequence[str], environment: Mapping[str, str], seconds: float
    ) -> tuple[int, str]:
        if command[-1] == "--version":
            return 0, (
                "NVIDIA (R) Nsight Compute Command Line Profiler\n"
                "Version 2025.3.1.0 (build 36398880) (public-release)"
            )
        self.commands.append(list(command))
        if self.texts:
            self.table.write_text(self.texts.pop(0))
        return (0 if self.table.exists() else 1), self.said


def counted(tool: Ncu) -> counters.Counters:
    return counters.count(["python", "x"], {}, tool.table, run=tool, find="/opt/ncu")


def test_counters_are_weighted_by_duration_and_name_the_bound(tmp_path: Path) -> None:
    tool = Ncu(tmp_path / "t.csv", ncu_table((1000.0, 80.0, 30.0), (3.0, 5.0, 90.0)))
    found = counted(tool)
    assert (found.tool, found.bound) == ("ncu 2025.3.1.0", "compute")
    assert found.metrics["Compute (SM) Throughput"].startswith("79.7")
    assert "compute 80 %, memory 30 % of peak over 2 kernels of 1003.0 us" in found.evidence


def test_the_tool_never_touches_clocks(tmp_path: Path) -> None:
    tool = Ncu(tmp_path / "t.csv", ncu_table((1.0, 1.0, 1.0)))
    counted(tool)
    (command,) = tool.commands
    assert command[command.index("--clock-control") + 1] == "none"
    assert command[-2:] == ["python", "x"]


@pytest.mark.parametrize(
    ("compute", "memory", "bound"), [(20.0, 85.0, "memory"), (30.0, 40.0, "latency")]
)
def test_other_bounds(tmp_path: Path, compute: float, memory: float, bound: str) -> None:
    assert counted(Ncu(tmp_path / "t", ncu_table((9.0, compute, memory)))).bound == bound


def test_single_metrics_that_the_tool_does_not_know_are_left_out(tmp_path: Path) -> None:
    tool = Ncu(tmp_path / "t.csv", "==ERROR== no such metric\n", ncu_table((9.0, 70.0, 10.0)))
    assert counted(tool).bound == "compute"
    assert ["--metrics" in command for command in tool.commands] == [True, False]


def test_a_kernel_that_cannot_be_prepared_is_replayed_with_its_application(tmp_path: Path) -> None:
    failed = (
        "==ERROR== Failed to prepare kernel for profiling\n==ERROR== Unknown Error on device 0.\n"
    )
    tool = Ncu(tmp_path / "t.csv", failed, failed, ncu_table((9.0, 70.0, 10.0)))
    assert counted(tool).bound == "compute"
    modes = [line[line.index("--replay-mode") + 1] for line in tool.commands]
    assert modes == ["kernel", "kernel", "application"]
    found = counted(Ncu(tmp_path / "t.csv", failed, failed, failed))
    assert found.bound == "undetermined"
    assert "prepare kernel for profiling; ==ERROR== Unknown Error" in found.evidence


def test_without_tool_or_right_the_bound_is_undetermined(tmp_path: Path) -> None:
    absent = counters.count(["python"], {"PATH": str(tmp_path)}, tmp_path / "t")
    assert (absent.tool, absent.bound) == (None, "undetermined")
    assert absent.evidence == "ncu is not here"
    denied = Ncu(tmp_path / "t", said="==ERROR== ERR_NVGPUCTRPERM - no permission")
    found = counted(denied)
    assert found.bound == "undetermined"
    assert "ERR_NVGPUCTRPERM" in found.evidence
    assert len(denied.commands) == 1
    amd = counters.count(["python"], {}, tmp_path / "t", vendor="amd")
    assert "devices of amd" in amd.evidence


def test_ratios_and_reasons_stand_in_the_table() -> None:
    document = {
        "versions": {"torch": "2.13"},
        "rows": [
            {"case": "one", "op": 1_234_500, "op/do_bench": 0.9987},
            {"case": "two", "reason": "Unsupported: no"},
        ],
    }
    text = fidelity.table(document)
    assert "1234.5 us" in text
    assert "0.999" in text
    assert text.splitlines()[-1].split() == ["two", "Unsupported:", "no"]


def test_the_harnesss_job_is_valid() -> None:
    for vendor in ("cpu", "nvidia", "amd"):
        assert schema.validate("job", harness.job(vendor, 6, 60)) == []


def test_what_a_cell_costs_beyond_oracle_warm_up_and_samples() -> None:
    def entry(cell_id: str, handling: int) -> dict[str, Any]:
        return {
            "cell": cell_id,
            "subject": "a",
            "status": "PASS",
            "oracle_before": {"duration_ns": 10},
            "oracle_after": {"duration_ns": 20},
            "warmup": {"duration_ns": 70},
            "handling_ns": handling,
        }

    cells = ["c000", "c001", "c002"]
    first = interleave.shuffled(cells, "0/launch-00")[0]
    broken = {"cell": "c000", "subject": "b", "status": "CRASH", "reason": "signal SIGSEGV"}
    task = {
        "task": "launch-00",
        "workers": [{"start_ns": 0, "ready_ns": 500}, {"start_ns": 10, "ready_ns": 800}],
        "entries": [*(entry(c, 1100 if c == first else 300) for c in cells), broken],
    }
    found = harness.costs([task])
    assert found["worker_start_ns"] == [500, 790]
    assert found["first_cell_ns"] == [1000]
    assert found["later_cell_ns"] == [200, 200]
    assert found["oracle_ns"] == [10, 20] * 3
    assert found["failed"] == ["launch-00 c000 b: CRASH: signal SIGSEGV"]
    assert "first cell of a process" in harness.table(found)


def test_nvbench_without_its_package_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(othertimers.importlib.util, "find_spec", lambda _: None)
    assert othertimers.nvbench([]) == "cuda-bench is not installed"


def test_torchs_benchmark_is_near_our_clock() -> None:
    # A process of its own: setuptools, which it imports, refuses a distutils imported before it.
    code = (
        "import torch; from attnrepro_runner import othertimers; x = torch.ones(1 << 20);"
        "print(othertimers.torch_benchmark(lambda: x + 1, threads=1, runs=5))"
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        env={**os.environ, "PYTHONPATH": str(Path(othertimers.__file__).parents[1])},
        capture_output=True,
        text=True,
        check=True,
    )
    assert 10_000 < int(done.stdout) < 1_000_000_000


# A request model in a worker.


def cell(model: str, **changes: Any) -> subject.Cell:
    workload = {
        "phase": "prefill",
        "batch": 1,
        "seqlen_q": 16,
        "seqlen_k": 16,
        "heads_q": 4,
        "heads_kv": 2,
        "head_dim": 64,
        "dtype": "float32",
        **changes,
    }
    return subject.Cell.read(
        {
            "id": "c000",
            "label": "x",
            "workload": workload,
            "inputs": {"seed": 1, "distribution": "normal"},
            "request": {"model": model, "layers": 1},
        }
    )


def built(one: subject.Cell) -> requested.Requested:
    document = {"id": "a", "backend": "eager", "options": {}}
    found = subject.Subject(document, torch.device("cpu"), threads=1)
    assert one.request is not None
    return requested.build(found, one, one.request, None, flush.Warm())


def test_a_request_is_described_and_its_weights_are_flushed() -> None:
    found = built(cell("small_prefill"))
    root = schema.schema_of("result")
    assert set(found.description) == {*root["$defs"]["request"]["required"], "agreement"}
    assert (
        schema.validate_value(
            root["$defs"]["request"], found.description, kind="result", pointer=""
        )
        == []
    )
    assert found.description["device_ns"] is None
    assert found.description["layers"] == 1
    pointers = {tensor.data_ptr() for tensor in found.reads}
    assert {w.data_ptr() for w in found.steps.weights.values()} <= pointers


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("model", ["small_prefill", "small_training_step"])
def test_a_request_that_computes_something_else_is_not_timed(model: str, dtype: str) -> None:
    phase = "forward_backward" if "training" in model else "prefill"
    one = cell(
        model, phase=phase, dtype=dtype, seqlen_q=64, seqlen_k=64, mask={"causal": "bottom_right"}
    )
    found = subject.Subject(
        {"id": "a", "backend": "sdpa.math", "options": {}}, torch.device("cpu"), threads=1
    )
    # The last token of one layer attends every key, mask or not: the second layer tells.
    wanted = {"model": model, "layers": 2}
    honest = requested.build(found, one, wanted, None, flush.Warm()).description["agreement"]
    assert isinstance(honest, dict)
    assert float.fromhex(honest["error"]) <= float.fromhex(honest["limit"])

    class Maskless(type(found.backend)):  # type: ignore[misc]
        def prepare(self, workload: Any, options: Any, tensors: Any) -> Any:
            mask = dataclasses.replace(workload.mask, causal="none")
            return super().prepare(dataclasses.replace(workload, mask=mask), options, tensors)

    found.backend = Maskless()
    with pytest.raises(requested.WrongOutput, match="textbook attention"):
        requested.build(found, one, wanted, None, flush.Warm())


def test_a_twin_that_does_not_fit_leaves_the_request_uncompared(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    honest = requested.registry.load

    def load(name: str, *rest: Any) -> Any:
        if name == "eager" and not rest:
            raise MemoryError("out of memory")
        return honest(name, *rest)

    one = cell("small_prefill")
    found = subject.Subject(
        {"id": "a", "backend": "sdpa.math", "options": {}}, torch.device("cpu"), threads=1
    )
    monkeypatch.setattr(requested.registry, "load", load)
    assert one.request is not None
    said = requested.build(found, one, one.request, None, flush.Warm()).description["agreement"]
    assert isinstance(said, dict)
    assert said["error"] is None
    assert "not compared" in said["reason"]


def test_another_models_attention_is_no_request() -> None:
    with pytest.raises(requested.NoRequest, match="heads_q"):
        built(cell("small_prefill", heads_q=8))


def test_others_times_are_all_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, object] = {}

    def do_bench(work: Any, **how: object) -> list[float]:
        asked.update(how)
        work()
        return [0.125, 0.25]

    module = SimpleNamespace(do_bench=do_bench)
    monkeypatch.setitem(sys.modules, "triton", SimpleNamespace(testing=module))
    monkeypatch.setitem(sys.modules, "triton.testing", module)
    calls: list[int] = []
    assert othertimers.do_bench(lambda: calls.append(1)) == [125_000, 250_000]
    assert asked["return_mode"] == "all"
    assert calls == [1]


def test_a_device_row_takes_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device that slows down by the minute reads the same by every timer."""
    now = [1000]

    def timed(count: int) -> list[int]:
        now[0] += 100
        return [now[0]] * count

    class Clock:
        def take(self, count: int, _following: object) -> list[int]:
            return timed(count)

    bound = SimpleNamespace(device=torch.device("cpu"), synchronize=lambda: None)
    monkeypatch.setattr(fidelity, "WARM_SECONDS", 0.0)
    monkeypatch.setattr(fidelity, "_bind", lambda _: (bound, [], lambda: None))
    monkeypatch.setattr("attnrepro_runner.torchdevice.TorchDevice", lambda: None)
    monkeypatch.setattr("attnrepro_runner.clocks.make", lambda *_: Clock())
    monkeypatch.setattr(othertimers, "profiler", lambda *_: timed(3))
    monkeypatch.setattr(othertimers, "do_bench", lambda _: timed(50))
    row = fidelity._gpu_row(fidelity.cases("nvidia")[0])
    assert abs(row["kernel/profiler"] - 1) < 0.1
    assert abs(row["op/do_bench"] - 1) < 0.1
    assert now[0] == 1000 + 100 * 5 * fidelity.ROUNDS
