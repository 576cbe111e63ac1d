"""Every rule of measuring, with a fake clock, a fake device and a fake telemetry."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import pytest

from attnrepro_runner import (
    clocks,
    conditions,
    coordinator,
    energy,
    finish,
    interleave,
    measured,
    timing,
)
from attnrepro_runner.accelerator import AcceleratorUnavailable
from attnrepro_runner.device import AcceleratorSource, Device
from attnrepro_runner.flush import Warm
from attnrepro_runner.status import Failure, Status
from attnrepro_runner.stoprule import Series, StopRule
from attnrepro_runner.telemetry import Recorder

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from attnrepro_runner.telemetry import Value

COLUMNS = ("elapsed_ns", "sm_clock_mhz", "throttle", "other_processes")
H200: dict[str, Any] = {
    "architecture": "sm_90",
    "compute_units": 132,
    "memory_clock_max_mhz": 3201,
    "memory_bus_bits": 6144,
    "last_level_cache_bytes": 60 << 20,
}
OBSERVE: dict[str, Any] = {"policy": "observe", "sm_mhz": None}
REQUIRE: dict[str, Any] = {"policy": "require", "sm_mhz": 1755}
RULE = StopRule(
    fewest=10, most=40, budget_ns=10**9, last_ns=4 * 10**9, half_width=0.001, confidence=0.95
)


def seen(*rows: tuple[int, str, int | None]) -> conditions.Conditions:
    """Conditions of readings: MHz, throttle reasons, other processes."""
    numbered = [(n, *row) for n, row in enumerate(rows)]
    return conditions.between(COLUMNS, numbered, 0, len(rows))


LONG: dict[str, Any] = {
    "phase": "forward",
    "batch": 4,
    "seqlen_q": 4096,
    "seqlen_k": 4096,
    "heads_q": 32,
    "head_dim": 128,
    "dtype": "bfloat16",
}


def finished(
    median_ns: int,
    found: conditions.Conditions,
    workload: Mapping[str, Any] = LONG,
    *,
    flushed: bool = True,
    **changes: Any,
) -> dict[str, Any]:
    one = interleave.Measured({"status": "PASS", "reason": None, **changes})
    one.flushed = flushed
    one.calls = {"op": 1}
    one.series = {"op": Series(samples=[median_ns] * 20, usable=[median_ns] * 20, stop="budget")}
    finish.judge(one, {"workload": workload}, found, device=H200, policy=OBSERVE, ceilings=[])
    return one.entry


# Clocks, heat, other processes.


def test_readings_are_those_of_the_time_asked_for() -> None:
    rows = [(n, 1000 + n, "", 0) for n in range(10)]
    found = conditions.between(COLUMNS, rows, 3, 6)
    assert (found.rows, found.clock_khz) == (4, (1003000, 1004000, 1006000))
    nothing = conditions.between(COLUMNS, rows, 50, 60)
    assert (nothing.rows, nothing.clock_khz, nothing.other_processes) == (0, None, None)


def test_a_cpus_frequency_is_a_clock() -> None:
    found = conditions.between(("elapsed_ns", "frequency_khz"), [(0, 2_500_000), (1, None)], 0, 1)
    assert found.clock_khz == (2_500_000,) * 3


@pytest.mark.parametrize(
    "reason",
    [
        *("hardware_thermal", "hardware_slowdown", "hardware_power_brake", "software_thermal"),
        *("regulator_thermal", "memory_thermal", "throttled"),  # as amdsmi names them
    ],
)
def test_heat_and_brakes_are_throttling(reason: str) -> None:
    found = conditions.judge(seen((1980, "", 0), (1200, f"idle {reason}", 0)), OBSERVE)
    assert found.status is Status.THROTTLED
    assert reason in str(found.reason)


def test_the_power_cap_is_an_observation() -> None:
    found = conditions.judge(seen((1700, "software_power_cap", 0)), OBSERVE)
    assert (found.status, found.flags) == (Status.PASS, ())


def test_a_required_clock_is_held_to() -> None:
    assert conditions.judge(seen((1755, "", 0), (1740, "", 0)), REQUIRE).status is Status.PASS
    off = conditions.judge(seen((1755, "", 0), (1695, "", 0)), REQUIRE)
    assert off.status is Status.THROTTLED
    assert "1695 to 1755 MHz; the manifest requires 1755" in str(off.reason)
    blind = conditions.judge(conditions.between(COLUMNS, [], 0, 1), REQUIRE)
    assert blind.status is Status.INCONCLUSIVE


def test_another_process_is_flagged_or_ends_the_claim_by_policy() -> None:
    rows = seen((1755, "", 0), (1755, "", 2))
    watched = conditions.judge(rows, OBSERVE)
    assert watched.status is Status.PASS
    assert watched.flags == ("2 other processes used the device",)
    assert conditions.judge(rows, REQUIRE).status is Status.INCONCLUSIVE


@pytest.mark.parametrize("policy", ["require", "lock"])
def test_processes_that_cannot_be_seen_end_a_strict_claim(policy: str) -> None:
    hidden = seen((1755, "", None), (1755, "", None))
    unknown = conditions.judge(hidden, {"policy": policy, "sm_mhz": 1755})
    assert unknown.status is Status.INCONCLUSIVE
    assert unknown.reason == "whether other processes used the device cannot be seen from here"
    watched = conditions.judge(hidden, OBSERVE)
    assert (watched.status, watched.flags) == (Status.PASS, (unknown.reason,))
    entry = finished(2_000_000, hidden)
    assert entry["flags"] == [unknown.reason]
    assert entry["conditions"]["other_processes"] is None


def test_a_cpu_has_no_processes_to_count() -> None:
    columns = ("elapsed_ns", "frequency_khz")
    found = conditions.between(columns, [(0, 2_500_000)], 0, 1)
    assert conditions.judge(found, OBSERVE).flags == ()


def test_sampling_without_a_reading_is_flagged() -> None:
    found = conditions.between(COLUMNS, [(9, 1755, "", 0)], 0, 1)
    assert "no reading" in conditions.judge(found, OBSERVE).flags[-1]


def test_a_drifting_clock_is_said() -> None:
    assert conditions.judge(seen((1980, "", 0), (1950, "", 0)), OBSERVE).flags == ()
    (flag,) = conditions.judge(seen((1980, "", 0), (1400, "", 0)), OBSERVE).flags
    assert flag == "the clock drifted from 1400 to 1980 MHz"


# A device that vanishes.


class Gpu:
    """An opened device."""

    def __init__(self, *, lost: bool = False, energy: Sequence[int | None] = ()) -> None:
        self.lost = lost
        self.energy = list(energy)

    def energy_mj(self) -> int | None:
        return self.energy.pop(0) if self.energy else None

    def other_processes(self) -> int | None:
        return 0

    def sample(self, *, whole: bool = True) -> Any:
        if self.lost:
            message = "GPU is lost"
            raise AcceleratorUnavailable(message)
        raise NotImplementedError


class Broken:
    columns: tuple[str, ...] = ("x",)

    def read(self) -> Sequence[Value]:
        message = "once"
        raise ValueError(message)


def test_a_lost_device_is_noticed_and_another_failure_is_not_one() -> None:
    source = AcceleratorSource(Gpu(lost=True))  # type: ignore[arg-type]
    with Recorder([source], period_s=0.001) as recorder:
        deadline = time.monotonic() + 5
        while recorder.lost is None and time.monotonic() < deadline:
            time.sleep(0.001)
    assert recorder.lost == "GPU is lost"
    with Recorder([Broken()], period_s=0.001) as recorder:
        time.sleep(0.02)
    assert recorder.lost is None
    assert recorder.document()["errors"]


def test_nothing_is_asked_of_a_lost_device() -> None:
    class Lost:
        lost = "GPU is lost"

    one = coordinator.Coordinator.__new__(coordinator.Coordinator)
    one._recorder = Lost()  # type: ignore[assignment]
    with pytest.raises(coordinator.DeviceLost, match="GPU is lost"):
        one._ask(None, "a", {"do": "block"}, "native")  # type: ignore[arg-type]


# Energy.


def answers(status: str = "PASS") -> Callable[[Mapping[str, object]], dict[str, object] | Failure]:
    def ask(request: Mapping[str, object]) -> dict[str, object] | Failure:
        if request["do"] == "ready":
            return {"status": status}
        return {"calls": 50, "spent_ns": 500_000_000}

    return ask


def test_energy_is_the_counters_difference_round_the_calls() -> None:
    gpu = Gpu(energy=[1000, 1010, 1360])
    found = energy.measure({}, read=gpu.energy_mj, ask=answers())
    assert found is not None
    assert (found["energy_mj"], found["calls"], found["duration_ns"]) == (350, 50, 500_000_000)


def test_without_a_counter_or_a_call_there_is_no_energy() -> None:
    assert energy.measure({}, read=lambda: None, ask=answers()) is None
    assert energy.measure({}, read=lambda: 5, ask=answers("UNSUPPORTED")) is None


# No sample is lost in silence.


def test_voided_samples_keep_their_places_and_earlier_reasons() -> None:
    series = Series()
    series.add([1, 2, 3, 4], 1)
    series.add([5, 6], 0)
    series.add([7, 8, 9], 2)
    series.void("crashed")
    assert series.usable == []
    assert series.samples == list(range(1, 10))
    covered = [n for d in series.discards for n in range(d["first"], d["first"] + d["count"])]
    assert covered == list(range(9))
    assert [d["reason"] == "crashed" for d in series.discards] == [False, True, False, True]


class Fails:
    """A clock that works a few times."""

    name = "op"

    def __init__(self, good: int) -> None:
        self.good = good

    def take(self, count: int, following: Callable[[], Callable[[], object]]) -> list[int]:
        self.good -= 1
        if self.good < 0:
            message = "the trace shows a call without a kernel"
            raise clocks.ClockUnavailable(message)
        return [following()() and 7] * count  # type: ignore[list-item]


class Steps:
    def step(self) -> bool:
        return True


def opened(**found: Any) -> measured.MeasuredCell:
    one = measured.MeasuredCell.__new__(measured.MeasuredCell)
    one._clocks = found
    one._samplers = dict.fromkeys(
        found, timing.Sampler([timing.Target(prepared=Steps(), reads=())], Warm())
    )
    one._repeated = {}
    one._taken = {}
    return one


def test_a_clock_that_fails_in_a_block_loses_no_others_samples() -> None:
    block = opened(op=Fails(0), host=Fails(9)).block(["op", "host"], 3)
    assert block.partial == {"op": []}
    assert block.samples == {"host": [7, 7, 7]}
    assert block.lost == {"op": "the trace shows a call without a kernel"}


def test_a_lost_clock_keeps_what_it_gave_and_ends_inconclusive() -> None:
    calls = 0

    def ask(_: str, request: Mapping[str, Any]) -> dict[str, Any] | Failure:
        nonlocal calls
        entry = {"status": "PASS", "reason": None, "place": None}
        if request["do"] == "open":
            return {"entry": entry, "clocks": {"op": 1, "host": 1}, "flushed": True}
        if request["do"] == "close":
            return {"entry": entry}
        calls += 1
        n = request["count"] + request["discard"]
        given = {clock: [100] * n for clock in request["clocks"]}
        lost = {"op": "gone"} if calls == 2 else {}
        kept = {clock: v for clock, v in given.items() if clock not in lost}
        answer = {"samples": kept, "lost": lost, "repeated": {"host": 2}, "spent_ns": 1}
        return {**answer, "partial": {clock: [90, 91] for clock in lost}}

    run = interleave.CellLaunch({"id": "c000"}, ["a"], rule=RULE, block=4, seed="s", ask=ask)
    run.run()
    one = run.measured["a"]
    assert one.entry["status"] == "INCONCLUSIVE"
    assert one.entry["reason"] == "clock op: gone"
    op = one.series["op"]
    assert (len(op.usable), op.stop) == (4, "failed")
    # The two samples of the block that failed stay, and do not count.
    assert op.samples == [100] * 4 + [90, 91]
    assert op.discards == [{"first": 4, "count": 2, "reason": "in a block that failed: gone"}]
    record = next(
        r for r in finish.records(one, lambda clock, samples: "x.i64") if r["clock"] == "op"
    )
    assert (record["n"], record["discards"]) == (6, op.discards)
    assert len(one.series["host"].usable) >= RULE.fewest
    assert one.series["host"].repeated == 2 * calls
    assert one.span is not None
    assert one.span[0] <= one.span[1]


# The device that the framework uses.


def test_the_frameworks_facts_complete_the_record() -> None:
    device = Device("cpu", 1)
    device.learn({"compute_units": 132, "uuid": "11111111-2222"})
    assert device.record["compute_units"] == 132
    assert "11111111-2222" not in str(device.record)
    assert device.energy_mj() is None
