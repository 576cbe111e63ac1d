"""Reported cases: what a time holds, and what a result may say."""

from __future__ import annotations

import dataclasses
import json
import time
from collections import Counter
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest
from case_fakes import (
    CPU,
    LONG,
    clock_series,
    ended,
    open_cell,
    own_process,  # noqa: F401 - an autouse fixture
)
from device_fakes import FakeDevice, FakeTime, FakeTrace
from host_artifacts import make
from host_fakes import DEVICE, FakeEngine, tasks
from numerics_fakes import ReferenceBackend, workload_of
from test_compare_explain import side
from test_results_merge import merged
from test_results_merge import subject as merged_subject
from test_runner_coordinator import Scripted, launch
from test_runner_rules import REQUIRE, opened

from attnrepro import schema
from attnrepro.artifact.content import find_real
from attnrepro.compare import published, statistics
from attnrepro.compare.explain import Stage, compare
from attnrepro.errors import Interrupted
from attnrepro_runner import (
    clocks,
    finish,
    flush,
    kernels,
    plausible,
    timing,
)
from attnrepro_runner.backends import registry
from attnrepro_runner.status import Status
from attnrepro_runner.subject import Cell
from attnrepro_runner.work import work_of

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from attnrepro.compare.verdicts import Side
    from attnrepro_runner.backends.base import Outputs, Prepared, Tensors
    from attnrepro_runner.semantics import Workload


# What a time holds.


class Planning(ReferenceBackend):
    """Plans for long before the call."""

    PLAN_S = 0.02

    def prepare(self, workload: Workload, options: Any, tensors: Tensors) -> Prepared:
        time.sleep(self.PLAN_S)
        kept = super().prepare(workload, options, tensors).step()
        return Kept(kept)


class Kept:
    """Copies a result that is there."""

    def __init__(self, outputs: Outputs) -> None:
        self.outputs = outputs

    def step(self) -> Outputs:
        return dataclasses.replace(self.outputs, out=self.outputs.out.clone())

    backward_step = step

    def append_step(self) -> None:
        raise AssertionError


def test_flashinfer_bench_127_planning_is_timed_apart() -> None:
    cell, report, readable = open_cell(Planning())
    assert (report.status, readable) == (Status.PASS, {"host": 1}), report.reason
    planned = report.parts["preparation"]["prepare_ns"]  # type: ignore[index]
    assert len(planned) == 2  # one of each set of inputs
    assert min(planned) >= Planning.PLAN_S * 1e9
    samples = cell.block(["host"], 20).samples["host"]
    assert min(samples) < Planning.PLAN_S * 1e9 / 4


@pytest.mark.parametrize("wanted", [True, False])
def test_triton_404_cold_and_warm_samples_are_told_apart(wanted: bool) -> None:
    # KV of 16 MB stays in a second-level cache of 50 MB unless that is displaced.
    empty = flush.WriteMemory(CPU, 50 << 20) if wanted else flush.choose(CPU, wanted=False)
    assert empty.complete == wanted
    named = empty.describe()
    assert named.get("bytes") == (str(100 << 20) if wanted else None)
    assert ("warm" in named["method"]) == (not wanted)
    scripted = Scripted({"a": 100})
    scripted.opened["a"] = {"flushed": empty.complete}
    (record,) = finish.records(launch(scripted).measured["a"], lambda clock, samples: "x.i64")
    results = tasks()
    for result in results[1:]:
        for entry in result["entries"]:
            entry["samples"][0]["flushed"] = record["flushed"]
    clock = merged_subject(merged(results), "fast")["timing"]["host"]
    assert {one["flushed"] for one in clock["launches"]} == {wanted}


def test_triton_2306_a_cold_devices_clock_is_a_series_and_its_drift_is_said() -> None:
    entry = ended(LONG, 2_000_000, clock_series(1980, 1860, 1500, 1390))
    assert entry["conditions"]["rows"] == 250
    assert entry["conditions"]["clock_khz"] == [1_390_000, 1_500_000, 1_980_000]
    assert entry["flags"] == ["the clock drifted from 1390 to 1980 MHz"]
    assert "flags" not in ended(LONG, 2_000_000, clock_series(1755, 1740))
    fixed = ended(LONG, 2_000_000, clock_series(1980, 1390), policy=REQUIRE)
    assert fixed["status"] == "THROTTLED"
    record = {"member": "x", "discards": [], "stop": "budget", "flushed": True}
    drifting = [10_000 + 5 * n for n in range(100)]
    told = published.launch_timing(
        record | {"calls_per_sample": 1}, drifting, launch=0, tails=[], confidence=0.95
    )
    assert float.fromhex(told["autocorrelation_lag1"]) > 0.9


@pytest.mark.parametrize("clock", ["op", "append_op", "request"])
@pytest.mark.parametrize("wrong", [0, -5])
def test_a_call_of_no_time_is_invalid(clock: str, wrong: int) -> None:
    """A clock that stood still, or ran back, says nothing; its ratio would be no number."""
    entry = ended(LONG, wrong, clock_series(1980), clock=clock)
    assert entry["status"] == "INVALID"
    assert entry["reason"] == f"{clock}: a call took {wrong} ns: the clock cannot be believed"
    assert statistics.compare([1000] * 4, [1000, 1000, wrong, 1000]).ratio is None


@pytest.mark.parametrize(("settles_s", "stationary"), [(2, True), (60, False)])
def test_triton_2306_warming_up_waits_for_a_stationary_latency(
    settles_s: int, stationary: bool
) -> None:
    device = FakeTime()

    def slower(ns: int) -> int:  # by a quarter a second
        return round(1e6 * float(1.25 ** min(ns / 1e9, settles_s)))

    warmed = timing.warm_up(device.take(slower), least_s=0.3, most_s=10.0, now=device.now)
    assert warmed.stationary == stationary
    assert warmed.duration_ns >= 10**9 * min(settles_s, 10)
    entry = ended(LONG, 2_000_000, clock_series(1980), warmup=warmed.to_json())
    assert entry.get("flags") == (
        None if stationary else ["not stationary after 10.0 s of warming up"]
    )


@pytest.mark.parametrize("discarded", [12, 11, 3, 2])
def test_nvbench_231_too_few_usable_samples_are_inconclusive_with_counts(discarded: int) -> None:
    results = tasks()
    for result in results[1:]:
        for entry in result["entries"]:
            entry["samples"][0]["discards"] = [
                {"first": 0, "count": discarded, "reason": "below the clock asked for"}
            ]
    whole = merged(results)
    found = merged_subject(whole, "fast")
    clock = found["timing"]["host"]
    assert [(one["n"], one["used"]) for one in clock["launches"]] == [(12, 12 - discarded)] * 5
    assert find_real(whole.observations) is None
    assert schema.validate("observations", whole.observations) == []
    if discarded == 2:  # ten count, and the manifest wants ten
        assert found["status"] == "PASS"
        return
    assert found["status"] == "INCONCLUSIVE"
    assert found["comparisons"] == []
    if discarded == 12:
        assert found["reason"] == "no usable sample: 0 of 60 count (below the clock asked for)"
        assert clock["median"]["value_ns"] is None
        assert clock["median"]["reason"] == "no usable sample"
        return
    assert found["reason"] == (
        "5 of 5 series have fewer than 10 usable samples; clock host in launch 0 has "
        f"{12 - discarded} of 12 (below the clock asked for)"
    )


def test_nvbench_231_one_short_launch_is_enough() -> None:
    results = tasks()
    results[3]["entries"][0]["samples"][0]["discards"][0]["count"] = 11
    found = merged_subject(merged(results), "fast")
    assert found["status"] == "INCONCLUSIVE"
    assert "1 of 5 series" in found["reason"]
    assert "launch 2 has 1 of 12" in found["reason"]


def test_nvbench_231_a_clock_that_is_never_reached_loses_no_sample() -> None:
    threshold = {"policy": "require", "sm_mhz": 2500}
    entry = ended(LONG, 2_000_000, clock_series(1980), policy=threshold)
    assert entry["status"] == "THROTTLED"
    assert entry["reason"] == "the clock was 1980 to 1980 MHz; the manifest requires 2500"
    assert entry["conditions"]["rows"] == 250


@pytest.mark.parametrize("distribution", ["one_hot"])
def test_cutlass_2004_easy_inputs_are_never_timed(distribution: str) -> None:
    _, report, readable = open_cell(ReferenceBackend(), distribution=distribution)
    assert (report.status, readable) == (Status.INVALID, {})
    assert "run faster than data do" in str(report.reason)


@pytest.mark.parametrize("heads", [32, 64])
def test_flash_attention_pr2463_a_rate_above_the_peak_is_invalid(heads: int) -> None:
    workload = {
        **{"phase": "forward", "batch": 64, "seqlen_q": 128, "seqlen_k": 64, "head_dim": 128},
        **{"heads_q": heads, "dtype": "bfloat16", "mask": {"causal": "bottom_right"}},
    }
    exact = work_of(Cell.read({"id": "", "label": "", "workload": workload, "inputs": {}}).workload)
    assert exact.pairs == 2080 * 64
    peak = plausible.flops_limit("sm_90", 132, 1980, "bfloat16")
    assert peak is not None
    at_peak = exact.flops * 10**9 // peak
    # Counted as a full rectangle, which is 3.9 times the pairs, this time would be above the peak.
    honest = ended(workload, 2 * at_peak, clock_series(1980), flushed=False)
    assert honest["status"] == "PASS"
    insane = ended(workload, at_peak * 9 // 10, clock_series(1980), flushed=False)
    assert insane["status"] == "INVALID"
    assert "no kernel of this device exceeds" in insane["reason"]


# A tracer that sees nothing.


@pytest.mark.parametrize("name", ["eager", "sdpa.math", "sdpa.flash", "flash_attn_3"])
def test_flashinfer_2145_a_profile_without_kernels_fails(name: str) -> None:
    pattern = registry.load(name).patterns(workload_of(phase="prefill"), {})
    operators = ["aten::matmul", "aten::exp", "FlashAttnFwdSm90"]
    operators += ["aten::_scaled_dot_product_attention_math"] if name == "sdpa.math" else []
    operators += ["aten::_scaled_dot_product_flash_attention_for_cpu"] if "flash" in name else []
    seen = kernels.Seen(operators=dict.fromkeys(operators, 1), on_device=True)
    found = kernels.judge(seen, pattern)
    assert (found.verdict, found.ok) == ("none_seen", False)
    assert "no kernel" in str(found.reason)
    assert not kernels.judge(kernels.Seen(), pattern).ok


class Tracerless(FakeDevice):
    """A device whose tracer loses the kernels of some calls, or whole calls."""

    def __init__(self, host: FakeTime, *, whole: bool) -> None:
        super().__init__(host)
        self.whole = whole

    @contextmanager
    def trace(self) -> Iterator[clocks.Trace]:
        trace = FakeTrace(self)
        yield trace
        if self.whole:
            trace.windows.pop()
        else:
            self.kernels.pop()


@pytest.mark.parametrize(
    ("whole", "words"), [(True, "shows 2 of 3 calls"), (False, "a call without a kernel")]
)
def test_flashinfer_2145_a_lost_kernel_clock_is_replaced_by_no_other(
    monkeypatch: pytest.MonkeyPatch, whole: bool, words: str
) -> None:
    host = FakeTime()
    monkeypatch.setattr(clocks, "now", host.now)
    device = Tracerless(host, whole=whole)

    class Call:
        def step(self) -> None:
            device.host.ns += 100
            device.launch(5_000)

    cell = opened(kernel=clocks.KernelClock(device), host=clocks.HostClock(device))
    sampler = timing.Sampler([timing.Target(prepared=Call(), reads=())], flush.Warm())
    cell._samplers = dict.fromkeys(("kernel", "host"), sampler)
    block = cell.block(["kernel", "host"], 3)
    assert list(block.samples) == ["host"]
    assert words in block.lost["kernel"]
    assert block.partial == {"kernel": [5_000, 5_000]}
    _, report, readable = open_cell(ReferenceBackend(), ["kernel", "host"])
    assert (report.status, readable) == (Status.INCONCLUSIVE, {"host": 1})
    assert str(report.reason).startswith("clock kernel: ")


def test_flashinfer_2145_clock_and_number_of_kernels_are_recorded() -> None:
    scripted = Scripted({"a": 100})
    scripted.opened["a"] = {"clocks": {"kernel": 1, "host": 1}}
    records = finish.records(launch(scripted).measured["a"], lambda clock, samples: clock)
    assert [record["clock"] for record in records] == ["host", "kernel"]
    seen = kernels.Seen(kernels={"split": (3, 50), "combine": (1, 9)}, on_device=True)
    judged = kernels.judge(seen, ReferenceBackend().patterns(workload_of(), {}))
    results = tasks()
    results[0]["entries"][0]["execution"] = judged.to_json()
    whole = merged(results)
    assert whole.repeatable["execution"]["c000"]["fast"]["kernels"] == {"split": 3, "combine": 1}


# What is new, and what changed.


def test_mlperf_automations_314_a_second_run_measures_anew(tmp_path: Path) -> None:
    engines = [FakeEngine(), FakeEngine()]
    first, second = (
        make(tmp_path, engine=engine, output=tmp_path / f"{n}.attnrepro")
        for n, engine in enumerate(engines)
    )
    assert engines[0].written == engines[1].written
    assert len(Counter(engines[1].written)) == 8
    runs = [outcome.merged.observations["run"] for outcome in (first, second)]
    assert runs[0]["id"] != runs[1]["id"]
    assert [run["resumed"] for run in runs] == [False, False]


@pytest.mark.parametrize("done", [1, 7])
def test_mlperf_automations_314_an_earlier_result_is_taken_and_said(
    tmp_path: Path, done: int
) -> None:
    with pytest.raises(Interrupted):
        make(tmp_path, engine=FakeEngine(stop_after=done, ending=KeyboardInterrupt()))
    engine, told = FakeEngine(), list[str]()
    outcome = make(tmp_path, engine=engine, told=told)
    assert len(engine.written) == 8 - done
    assert outcome.merged.observations["run"]["resumed"] is True
    assert any(line.startswith("resumed: ") for line in told)


def on(device: dict[str, Any], **change: Any) -> Side:
    """Return one side whose checks were changed."""
    results = tasks()
    for result in results:
        result["device"] = DEVICE | device
    for entry in results[0]["entries"]:
        entry["availability"] = {
            **{"available": True, "version": "2.8.3", "files": {}, "reason": None},
            **{"flags": {"FLASHATTENTION_DISABLE_FP16": "false"}},
        }
        for place, value in change.items():
            part, _, name = place.partition("__")
            entry[part] = entry[part] | {name: value}
    return side(results)


GPU: dict[str, Any] = {
    **{"kind": "gpu", "vendor": "NVIDIA", "name": "NVIDIA H200", "power_limit_mw": 700_000},
    **{"clocks_locked": False, "sm_clock_max_mhz": 1980, "driver": "580.65"},
}


@pytest.mark.parametrize(
    ("device", "change", "stage", "place", "words"),
    [
        ({"power_limit_mw": 500_000}, {}, Stage.POWER_CAP, "power_limit_mw", "500000"),
        ({"name": "NVIDIA H100 PCIe"}, {}, Stage.DEVICE, "name", "H100 PCIe"),
        ({"clocks_locked": True}, {}, Stage.CLOCKS, "clocks_locked", "True"),
        ({"sm_clock_max_mhz": 1755}, {}, Stage.CLOCKS, "sm_clock_max_mhz", "1755"),
        ({"driver": "535.1"}, {}, Stage.DRIVER, "driver", "535.1"),
        ({}, {"availability__version": "2.8.3+gabc"}, Stage.LIBRARIES, "version", "2.8.3+gabc"),
        (
            {},
            {"availability__flags": {"FLASHATTENTION_DISABLE_FP16": "true"}},
            Stage.FLAGS,
            "flags FLASHATTENTION_DISABLE_FP16",
            "true",
        ),
        (
            {},
            {"execution__toolchain": {"matmul_allow_tf32": "true"}},
            Stage.FLAGS,
            "toolchain matmul_allow_tf32",
            "true",
        ),
    ],
)
def test_flash_attention_441_the_first_cause_is_named(
    device: dict[str, Any], change: dict[str, Any], stage: Stage, place: str, words: str
) -> None:
    report = compare(on(GPU), on(GPU | device, **change), confidence="0.95")
    (cause,) = report.causes
    assert cause.stage is stage
    assert cause.difference.place.endswith(place)
    assert words in cause.difference.second
    assert compare(on(GPU), on(GPU), confidence="0.95").causes == ()


def test_flash_attention_517_artifacts_of_other_masks_are_not_compared() -> None:
    results = tasks()
    probe = results[0]["entries"][0]["probes"]["set"]["v"]
    probe |= {"expected": "11" * 32, "observed": "11" * 32}
    before, after = side(), side(json.loads(json.dumps(results)))
    verdict = next(c for c in compare(before, after, confidence="0.95").cells)
    assert verdict.comparison is None
    assert verdict.reason == "the probes show other semantics in one of the two"
