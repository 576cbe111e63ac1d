from __future__ import annotations

import gc
import math
import random
from typing import TYPE_CHECKING, Any

import pytest
import torch
from device_fakes import FakeDevice, FakeTime

from attnrepro_runner import clocks, flush, timing, torchdevice, trace
from attnrepro_runner.backends import registry
from attnrepro_runner.backends.base import Outputs, Tensors
from attnrepro_runner.semantics import Workload
from attnrepro_runner.stoprule import SWITCH_REASON, Series, StopRule

if TYPE_CHECKING:
    from collections.abc import Sequence

RULE = StopRule(fewest=10, most=80, budget_ns=1000, last_ns=4000, half_width=0.01, confidence=0.95)


# The stop rule.


def test_the_rule_looks_at_doublings_only() -> None:
    constant = [100] * 200
    stops = [n for n in range(1, 80) if RULE.verdict(constant[:n], 0) == "median_ci"]
    assert stops == [10, 20, 40]
    assert RULE.verdict(constant[:80], 0) == "max_samples"


def test_a_wide_interval_goes_on_and_the_budget_ends_it() -> None:
    wide = [100, 200] * 40
    assert RULE.verdict(wide[:40], 0) is None
    assert RULE.verdict(wide[:40], 1000) == "budget"
    # Fewer than the fewest are worth nothing: they have four budgets.
    assert RULE.verdict(wide[:3], 3999) is None
    assert RULE.verdict(wide[:3], 4000) == "budget"
    narrow = [1000, 1004] * 20
    assert RULE.verdict(narrow, 5000) == "median_ci"


def test_the_next_look_is_a_doubling_or_the_most() -> None:
    assert [RULE.next_look(n) for n in (0, 9, 10, 19, 20, 40, 79)] == [10, 10, 20, 20, 40, 80, 80]
    odd = StopRule(fewest=10, most=33, budget_ns=1, last_ns=1, half_width=0.1, confidence=0.95)
    assert [odd.next_look(n) for n in (0, 10, 20, 32)] == [10, 20, 33, 33]


def test_too_few_samples_have_no_interval() -> None:
    short = StopRule(
        fewest=2, most=80, budget_ns=1000, last_ns=4000, half_width=0.5, confidence=0.95
    )
    assert short.verdict([100, 100], 0) is None


def test_discards_stay_in_their_place_with_a_reason() -> None:
    series = Series()
    series.add([9, 8, 1, 2], 2)
    series.add([3, 4], 0)
    series.add([7, 5], 1)
    assert series.samples == [9, 8, 1, 2, 3, 4, 7, 5]
    assert series.usable == [1, 2, 3, 4, 5]
    assert series.discards == [
        {"first": 0, "count": 2, "reason": SWITCH_REASON},
        {"first": 6, "count": 1, "reason": SWITCH_REASON},
    ]


# Warming up.


def test_a_stationary_latency_warms_up_in_the_least_time() -> None:
    fake = FakeTime()
    warmed = timing.warm_up(fake.take(lambda _: 1_000_000), least_s=0.3, most_s=5.0, now=fake.now)
    assert warmed.stationary
    assert 300_000_000 <= warmed.duration_ns < 400_000_000
    assert warmed.iterations == warmed.duration_ns // 1_000_000


def test_a_latency_that_settles_is_waited_for() -> None:
    fake = FakeTime()

    def latency(ns: int) -> int:
        return 3_000_000 - min(ns, 1_000_000_000) // 500

    warmed = timing.warm_up(fake.take(latency), least_s=0.3, most_s=5.0, now=fake.now)
    assert warmed.stationary
    assert 1_000_000_000 < warmed.duration_ns < 1_600_000_000


def test_a_drifting_latency_ends_at_the_most_and_says_so() -> None:
    fake = FakeTime()
    warmed = timing.warm_up(
        fake.take(lambda ns: 1_000_000 + ns // 500), least_s=0.3, most_s=2.0, now=fake.now
    )
    assert not warmed.stationary
    assert warmed.duration_ns >= 2_000_000_000
    assert "within 3%" in warmed.rule


def test_one_slow_call_ends_the_warm_up_in_time() -> None:
    fake = FakeTime()
    warmed = timing.warm_up(
        fake.take(lambda _: 3_000_000_000), least_s=0.1, most_s=5.0, now=fake.now
    )
    assert not warmed.stationary
    assert warmed.iterations == timing.WINDOW_CALLS


@pytest.mark.parametrize(("call_ns", "calls"), [(30_000_000, 4), (10**9, 1)])
def test_warming_again_is_bounded(call_ns: int, calls: int) -> None:
    fake = FakeTime()
    again = timing.warm_again(fake.take(lambda _: call_ns), seconds=0.1, now=fake.now)
    assert again == {"duration_ns": calls * call_ns, "iterations": calls}


# Clocks on a fake device.


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> FakeDevice:
    host = FakeTime()
    monkeypatch.setattr(clocks, "now", host.now)
    return FakeDevice(host)


def call(device: FakeDevice, *, python_ns: int, kernels: Sequence[int], wait: bool = False) -> Any:
    def work() -> None:
        for duration in kernels:
            device.host.ns += python_ns
            device.launch(duration)
        if wait:
            device.synchronize()

    return work


def flushing(device: FakeDevice, work: Any) -> Any:
    def following() -> Any:
        device.launch(500_000)  # the flush, which no clock may count
        return work

    return following


def test_the_host_clock_counts_python_and_waits_for_the_device(device: FakeDevice) -> None:
    work = call(device, python_ns=300_000, kernels=[10_000, 20_000])
    assert clocks.HostClock(device).take(3, flushing(device, work)) == [620_000] * 3


def test_the_op_clock_hides_the_launch(device: FakeDevice) -> None:
    clock = clocks.OpClock(device)
    work = call(device, python_ns=300_000, kernels=[10_000, 20_000])
    assert clock.take(5, flushing(device, work)) == [30_000] * 5
    assert clock.repeated == 1
    assert device.slept[0] < 600_000 < device.slept[-1]


def test_a_call_that_waits_for_the_device_has_no_op_clock(device: FakeDevice) -> None:
    work = call(device, python_ns=1_000, kernels=[10_000], wait=True)
    with pytest.raises(clocks.ClockUnavailable, match="waits for the device"):
        clocks.OpClock(device).take(1, flushing(device, work))


def test_what_was_timed_before_a_clock_fails_is_handed_over(device: FakeDevice) -> None:
    calls = [call(device, python_ns=100, kernels=[10_000], wait=n == 2) for n in range(3)]
    turns = iter(calls[:2] + calls[2:] * clocks.OpClock.ATTEMPTS)
    with pytest.raises(clocks.ClockUnavailable, match="waits for the device") as caught:
        clocks.OpClock(device).take(5, lambda: next(turns))
    assert caught.value.taken == [10_000, 10_000]


def test_the_kernel_clock_spans_the_calls_kernels_alone(device: FakeDevice) -> None:
    clock = clocks.KernelClock(device)
    work = call(device, python_ns=100_000, kernels=[10_000, 20_000])
    # The device sleeps while Python launches: between the two kernels it waits for nobody.
    assert clock.take(3, flushing(device, work)) == [10_000 + 20_000] * 3
    assert device.slept == [2 * 3 * 200_000] * 3
    assert clock.take(1, flushing(device, work)) == [30_000]
    with pytest.raises(clocks.ClockUnavailable, match="without a kernel"):
        clock.take(1, flushing(device, lambda: None))


def test_a_trace_that_lost_a_kernel_is_no_time(device: FakeDevice) -> None:
    clock = clocks.KernelClock(device)
    whole = call(device, python_ns=100_000, kernels=[10_000, 20_000])
    lossy = call(device, python_ns=100_000, kernels=[10_000])
    assert clock.take(1, flushing(device, whole)) == [30_000]
    calls = [flushing(device, work) for work in (whole, lossy, whole)]
    with pytest.raises(clocks.ClockUnavailable, match="1 to 2 kernels in equal calls") as caught:
        clock.take(3, lambda: calls.pop(0)())
    assert caught.value.taken == [30_000, 10_000, 30_000]


def test_the_kernel_clock_shows_the_gaps_of_a_call_that_waits_for_the_device(
    device: FakeDevice,
) -> None:
    clock = clocks.KernelClock(device)

    def work() -> None:
        for duration in (10_000, 20_000):
            device.host.ns += 100_000
            device.launch(duration)
            device.synchronize()

    assert clock.take(3, flushing(device, work)) == [10_000 + 100_000 + 20_000] * 3
    # What it learnt was learnt without a sleep, so that no sleep is counted into the next.
    assert device.slept == [2 * 3 * 230_000] * 3


def test_the_kernel_clocks_sleep_has_a_limit(device: FakeDevice) -> None:
    clock = clocks.KernelClock(device)
    work = call(device, python_ns=60_000_000, kernels=[10_000])
    assert clock.take(2, flushing(device, work)) == [10_000] * 2
    assert device.slept == [2 * clocks.KernelClock.MOST_NS] * 2


def test_a_kernel_of_a_side_stream_does_not_escape() -> None:
    windows = [(0, 100), (200, 300)]
    kernels = [(10, 40), (20, 95), (150, 160), (210, 220)]
    assert torchdevice.spans(windows, kernels) == [(10, 95, 2), (210, 220, 1)]
    assert torchdevice.spans([(0, 5)], kernels) == [None]
    assert torchdevice.busy(windows, kernels) == [85, 10]
    assert torchdevice.busy([(0, 100)], [(0, 10), (5, 8), (50, 60)]) == [20]
    assert torchdevice.busy([(0, 5)], kernels) == [None]


def test_the_sleep_before_a_call_is_no_kernel_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = [
        ("attnrepro.call", False, 0, 100),
        ("attnrepro.call", True, 5, 70),
        ("at::cuda::(anonymous namespace)::spin_kernel(long)", True, 5, 50),
        ("flash_fwd_kernel", True, 50, 70),
    ]
    events = [trace.TraceEvent(*one, bytes=0) for one in seen]
    monkeypatch.setattr(trace, "events", lambda profiler: events)
    found = torchdevice.TorchTrace(None)  # type: ignore[arg-type]
    assert found.busy_ns() == [20]
    assert found.spans_ns() == [(50, 70, 1)]


def test_a_cpu_has_the_host_clock_only() -> None:
    assert clocks.make("host", None).name == "host"
    assert clocks.make("host", None, "backward_").name == "backward_host"
    for name in ("op", "kernel"):
        with pytest.raises(clocks.ClockUnavailable, match="a CPU has none"):
            clocks.make(name, None)
    with pytest.raises(clocks.ClockUnavailable, match="no clock request"):
        clocks.make("request", None)


def test_a_device_has_all_three(device: FakeDevice) -> None:
    names = [clocks.make(name, device).name for name in ("kernel", "op", "host")]
    assert names == ["kernel", "op", "host"]


def test_the_host_clock_of_a_cpu_times_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    host = FakeTime()
    monkeypatch.setattr(clocks, "now", host.now)

    def work() -> None:
        host.ns += 700

    def following() -> Any:
        host.ns += 10_000
        return work

    assert clocks.HostClock(None).take(2, following) == [700, 700]


# Sampling.


class Counting:
    def __init__(self, log: list[str], name: str) -> None:
        self.log, self.name = log, name

    def step(self) -> Outputs:
        assert not gc.isenabled()
        self.log.append(f"step {self.name}")
        return Outputs(out=torch.zeros(1))

    def backward_step(self) -> Outputs:
        self.log.append(f"backward {self.name}")
        return Outputs(out=torch.zeros(1))

    def append_step(self) -> None:
        raise AssertionError


class LoggedFlush:
    complete = True

    def __init__(self, log: list[str]) -> None:
        self.log = log

    def __call__(self, tensors: Any) -> None:
        self.log.append(f"flush {len(list(tensors))}")

    def describe(self) -> dict[str, str]:
        return {}


def test_inputs_rotate_and_every_sample_is_flushed() -> None:
    log: list[str] = []
    targets = [
        timing.Target(prepared=Counting(log, name), reads=[torch.zeros(1)] * n)
        for n, name in enumerate("ab", start=1)
    ]
    sampler = timing.Sampler(targets, LoggedFlush(log))
    clock = clocks.HostClock(None)
    assert len(sampler.take(clock, 3)) == 3
    assert gc.isenabled()
    sampler.take(clock, 1, "backward_step")
    assert log == [
        *("flush 1", "step a", "flush 2", "step b", "flush 1", "step a"),
        *("flush 2", "backward b"),
    ]


def test_a_flush_reaches_inputs_and_what_the_adapter_made() -> None:
    document = {
        "phase": "prefill",
        "batch": 1,
        "seqlen_q": 4,
        "seqlen_k": 8,
        "heads_q": 2,
        "head_dim": 16,
        "dtype": "float32",
        "mask": {"causal": "bottom_right"},
    }
    w = Workload.parse(document)
    tensors = Tensors(
        q=torch.zeros(w.shape("q")), k=torch.zeros(w.shape("k")), v=torch.zeros(w.shape("v"))
    )
    prepared = registry.load("sdpa.flash").prepare(w, {}, tensors)
    reached = flush.read_by(tensors, prepared)
    assert sorted(tuple(t.shape) for t in reached) == sorted(
        [w.shape("q"), w.shape("k"), w.shape("v"), (4, 8)]
    )


def test_evicted_lines_keep_their_values() -> None:
    if "clflushopt" not in flush.profiles.cpu_flags():
        pytest.skip("this CPU has no clflushopt")
    chosen = flush.choose(torch.device("cpu"), wanted=True)
    assert isinstance(chosen, flush.EvictLines)
    values = torch.arange(100_001)
    chosen([values, values[7:9], torch.empty(0)])
    assert torch.equal(values, torch.arange(100_001))
    assert chosen.complete


def test_eviction_makes_reading_slow_again() -> None:
    if "clflushopt" not in flush.profiles.cpu_flags():
        pytest.skip("this CPU has no clflushopt")
    evict = flush.EvictLines()
    values = torch.ones(1 << 16, dtype=torch.int64)  # half a megabyte
    warm, cold = [], []
    for _ in range(301):  # of many, some meet an idle moment
        evict([values])
        for times in (cold, warm):
            begin = clocks.now()
            values.sum()
            times.append(clocks.now() - begin)
    assert min(cold) > 1.5 * min(warm)


def test_written_memory_is_complete_only_beyond_twice_the_cache() -> None:
    cpu = torch.device("cpu")
    small = flush.WriteMemory(cpu, 1 << 20)
    assert small.complete
    assert small.describe()["bytes"] == str(2 << 20)
    large = flush.WriteMemory(cpu, 480 << 20)
    assert not large.complete
    assert large.describe()["bytes"] == str(flush.WRITE_LIMIT)
    assert not flush.WriteMemory(cpu, None).complete


def test_warm_samples_are_labelled() -> None:
    chosen = flush.choose(torch.device("cpu"), wanted=False)
    assert not chosen.complete
    assert "warm" in chosen.describe()["method"]


def test_the_median_rule_covers_as_it_says() -> None:
    """Stopping at doublings of a noisy series must not stop at lucky moments only."""
    generator = random.Random(1)
    rule = StopRule(
        fewest=50, most=400, budget_ns=1 << 60, last_ns=1 << 60, half_width=0.02, confidence=0.95
    )
    covered = 0
    for _ in range(200):
        samples: list[int] = []
        while rule.verdict(samples, 0) is None:
            samples += [round(1e6 * math.exp(generator.gauss(0, 0.1))) for _ in range(10)]
        ordered = sorted(samples)
        ranks = timing.orderstats.binomial_interval(len(ordered), "1/2", 0.95)
        assert ranks is not None
        covered += ordered[ranks[0] - 1] <= 1e6 <= ordered[ranks[1] - 1]
    assert covered >= 180
