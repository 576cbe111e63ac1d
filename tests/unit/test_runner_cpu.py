from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING

import pytest

from attnrepro_runner import cpu, preflight, telemetry
from attnrepro_runner.accelerator import AcceleratorRecord, AcceleratorSample
from attnrepro_runner.device import AcceleratorSource, Device

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

CPUINFO = """processor\t: 0
vendor_id\t: AuthenticAMD
cpu family\t: 25
model\t\t: 17
model name\t: AMD EPYC 9654 96-Core Processor
stepping\t: 1
microcode\t: 0xa101148
flags\t\t: fpu cx16 lahf_lm popcnt pni sse4_1 sse4_2 ssse3 avx avx2 bmi1 bmi2 f16c fma abm movbe \
xsave hypervisor

processor\t: 1
vendor_id\t: Other
"""


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    def write(name: str, text: str) -> None:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    write("proc/cpuinfo", CPUINFO)
    write("proc/meminfo", "MemTotal:       1000 kB\n")
    write("proc/loadavg", "1.25 0.5 0.1 3/234 5678\n")
    write("proc/stat", "cpu  10 1 5 100 4 2 3 7 0 0\ncpu0 1 1 1 1 1 1 1 1 0 0\n")
    base = "sys/devices/system/cpu/cpu0/"
    for index, (level, kind, size) in enumerate(
        [("1", "Data", "32K"), ("2", "Unified", "1024K"), ("3", "Unified", "32M")]
    ):
        write(f"{base}cache/index{index}/level", level)
        write(f"{base}cache/index{index}/type", kind)
        write(f"{base}cache/index{index}/size", size)
        write(f"{base}cache/index{index}/shared_cpu_list", "0-1")
    write(f"{base}topology/thread_siblings_list", "0,96")
    write(f"{base}cpufreq/scaling_governor", "performance\n")
    write(f"{base}cpufreq/scaling_cur_freq", "3500000\n")
    write(f"{base}cpufreq/cpuinfo_max_freq", "3700000\n")
    (tmp_path / "sys/devices/system/node/node0").mkdir(parents=True)
    (tmp_path / "sys/devices/system/node/node1").mkdir()
    return tmp_path


def test_the_record_of_a_machine(machine: Path) -> None:
    record = cpu.describe(machine)
    assert record["vendor"] == "AuthenticAMD"
    assert (record["family"], record["model"], record["stepping"]) == (25, 17, 1)
    assert record["name"] == "AMD EPYC 9654 96-Core Processor"
    assert record["isa"] == "x86_64_v3"
    assert record["hypervisor"] is True
    assert record["threads_per_core"] == 2
    assert record["numa_nodes"] == 2
    assert record["memory_bytes"] == 1_024_000
    assert record["governor"] == "performance"
    assert record["frequency_max_khz"] == 3_700_000
    assert record["frequency_min_khz"] is None
    assert record["last_level_cache_bytes"] == 32 << 20
    assert cpu.caches(machine)[0] == {
        "level": 1,
        "kind": "data",
        "bytes": 32768,
        "shared_by": "0-1",
    }


def test_what_a_machine_does_not_say_is_null(tmp_path: Path) -> None:
    record = cpu.describe(tmp_path)
    assert record["name"] == "unknown"
    for name in ("vendor", "family", "isa", "governor", "last_level_cache_bytes", "memory_bytes"):
        assert record[name] is None
    assert record["caches"] == []


def test_a_level_needs_those_below() -> None:
    v2 = {"cx16", "lahf_lm", "popcnt", "pni", "sse4_1", "sse4_2", "ssse3"}
    v3 = {"avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe", "xsave"}
    v4 = {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
    assert cpu.isa_level(frozenset()) is None
    assert cpu.isa_level(frozenset(v2)) == "x86_64_v2"
    assert cpu.isa_level(frozenset(v2 | v3)) == "x86_64_v3"
    assert cpu.isa_level(frozenset(v2 | v3 | v4)) == "x86_64_v4"
    assert cpu.isa_level(frozenset(v2 | v4)) == "x86_64_v2"


def test_this_machines_record_holds_no_reals_and_no_host_name() -> None:
    device = Device("cpu", threads=2)
    text = json.dumps(device.record)
    assert device.record["kind"] == "cpu"
    assert device.record["threads"] == 2
    assert "." not in json.dumps([v for v in device.record.values() if isinstance(v, int)])
    import socket

    assert socket.gethostname() not in text or len(socket.gethostname()) < 4
    device.close()


def test_a_cpus_own_run_reads_everything_each_time() -> None:
    for vendor, every in (("cpu", True), ("amd", False)):
        device = Device(vendor, threads=1)
        rows = [device.sources[0].read() for _ in range(11)]
        assert [row[0] is not None for row in rows] == [True, *[every] * 9, True]
        device.close()


def test_an_accelerator_that_is_not_there_is_recorded() -> None:
    device = Device("amd", threads=1)
    if device.record["name"] == "unavailable":
        assert device.record["kind"] == "amd"
        assert device.record["reason"]
        assert len(device.sources) == 1
    assert isinstance(device.record["host"], dict)
    device.close()


def test_a_reading_of_the_machine(machine: Path) -> None:
    source = telemetry.CpuSource(machine)
    row = dict(zip(source.columns, source.read(), strict=True))
    assert row == {
        "cpu_busy_ticks": 10 + 1 + 5 + 2 + 3,
        "cpu_idle_ticks": 104,
        "cpu_steal_ticks": 7,
        "load1_hundredths": 125,
        "runnable": 3,
        "frequency_khz": 3_500_000,
    }
    assert telemetry.CpuSource(machine / "nothing").read() == (None,) * 6


def test_ticks_and_load_can_be_read_less_often_than_the_frequency(machine: Path) -> None:
    source = telemetry.CpuSource(machine, every=3)
    rows = [dict(zip(source.columns, source.read(), strict=True)) for _ in range(7)]
    for slow in telemetry.CpuSource.columns[:-1]:
        assert [n for n in range(7) if rows[n][slow] is not None] == [0, 3, 6]
    assert {row["frequency_khz"] for row in rows} == {3_500_000}


class Broken:
    columns = ("x",)

    def read(self) -> Sequence[telemetry.Value]:
        message = "gone"
        raise OSError(message)


def test_a_series_goes_on_where_a_source_fails(machine: Path) -> None:
    recorder = telemetry.Recorder([Broken(), telemetry.CpuSource(machine)], period_s=0.01)
    with recorder:
        time.sleep(0.15)
    document = recorder.document()
    rows = document["rows"]
    assert isinstance(rows, list)
    assert len(rows) >= 5
    assert all(row[1] is None and row[2] == 21 for row in rows)
    assert [row[0] for row in rows] == sorted(row[0] for row in rows)
    assert document["errors"][0] == "OSError: gone"  # type: ignore[index]
    assert document["columns"] == ["elapsed_ns", "x", *telemetry.CpuSource.columns]


def test_a_long_series_keeps_its_rate_and_thins_its_oldest_rows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(telemetry, "ROWS_LIMIT", 80)
    recorder = telemetry.Recorder([])
    recorder._began = recorder._ended = 0
    step = round(telemetry.PERIOD_S * 1e9)
    for n in range(1000):
        recorder._keep([n * step])
        assert len(recorder._rows) < 80
        # What a cell's conditions come from is whole: the last half of what is kept.
        if n >= 40:
            assert recorder.conditions((n - 38) * step, n * step).rows == 40
    document = recorder.document()
    rows = document["rows"]
    assert isinstance(rows, list)
    assert len(rows) + document["dropped"] == 1000  # type: ignore[operator]
    assert document["period_ns"] == step
    assert rows[0] == [0]
    assert rows == sorted(rows)


def test_a_task_of_hours_is_read_at_twenty_hertz_at_least() -> None:
    assert telemetry.PERIOD_S <= 1 / 20
    assert telemetry.ROWS_LIMIT * telemetry.PERIOD_S >= 5 * 3600


def test_equal_values_are_kept_once() -> None:
    recorder = telemetry.Recorder([])
    for n in range(3):
        recorder._keep([n, int("1980000"), "software_power_cap idle"[:18]])
    first, *others = recorder._rows
    assert all(row[1] is first[1] and row[2] is first[2] for row in others)
    assert [row[0] for row in recorder._rows] == [0, 1, 2]


def test_reading_costs_less_than_a_hundredth_of_a_core() -> None:
    source = telemetry.CpuSource()
    costs = []
    for _ in range(50):
        began = time.thread_time_ns()
        source.read()
        costs.append(time.thread_time_ns() - began)
    assert sorted(costs)[25] < 0.01 * telemetry.PERIOD_S * 1e9


class FakeGpu:
    """An accelerator whose state changes with each reading."""

    def __init__(self) -> None:
        self.counted = 0

    def record(self) -> AcceleratorRecord:
        raise AssertionError

    def sample(self, *, whole: bool = True) -> AcceleratorSample:
        return AcceleratorSample(
            time_ns=1,
            sm_clock_mhz=1980,
            memory_clock_mhz=None,
            power_mw=700_000 if whole else None,
            temperature_c=60,
            memory_temperature_c=None,
            utilization_percent=100 if whole else None,
            memory_used_bytes=1 << 30 if whole else None,
            throttle=("software_power_cap", "software_thermal"),
            throttle_raw=0x24,
        )

    def other_processes(self) -> int | None:
        self.counted += 1
        return self.counted

    def energy_mj(self) -> int | None:
        return 5 * self.counted

    def identity(self, key: bytes) -> str | None:
        raise AssertionError

    def close(self) -> None:
        raise AssertionError


def test_a_gpus_state_is_columns() -> None:
    gpu = FakeGpu()
    source = AcceleratorSource(gpu)
    rows = [dict(zip(source.columns, source.read(), strict=True)) for _ in range(101)]
    assert rows[0]["sm_clock_mhz"] == 1980
    assert rows[0]["memory_clock_mhz"] is None
    assert rows[0]["throttle"] == "software_power_cap software_thermal"
    assert [rows[n]["other_processes"] for n in (0, 19, 20)] == [1, 1, 2]
    # The counter's reading is slow, so that it is there once in five seconds.
    assert [n for n in range(101) if rows[n]["energy_mj"] is not None] == [0, 100]
    for slow in ("power_mw", "utilization_percent"):
        assert [n for n in range(21) if rows[n][slow] is not None] == [0, 10, 20]


def test_the_preflight_executes_a_file(tmp_path: Path) -> None:
    assert preflight.executes(tmp_path)
    assert not preflight.executes(tmp_path / "nowhere")
