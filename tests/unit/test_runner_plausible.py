"""Times that cannot be true, and what a finished series is flagged for."""

from __future__ import annotations

from typing import Any

import pytest
from test_runner_rules import H200, LONG, finished, seen

from attnrepro_runner import plausible
from attnrepro_runner.semantics import Workload
from attnrepro_runner.work import work_of


def limits(dtype: str = "bfloat16", **device: Any) -> plausible.Limits:
    measured_here = [
        {
            "kind": "copy",
            "dtype": "uint8",
            "unit": "byte",
            "work": 4_260_000,
            "fastest_ns": 1000,
            "per_second": 4_260_000_000_000,
        },
        {"kind": "matmul", "dtype": dtype, "unit": "flop", "per_second": 800_000_000_000_000},
    ]
    return plausible.limits(H200 | device, measured_here, dtype=dtype, clock_khz=1_830_000)


def hold(median_ns: int, flops: int, traffic: int, **changes: Any) -> plausible.Finding:
    usual: dict[str, Any] = {"touched": 1 << 30, "flushed": True, "known": limits()}
    return plausible.judge("op", median_ns, (flops, traffic), **(usual | changes))


def test_an_architecture_bounds_operations_at_the_clock_seen() -> None:
    # H200: 132 multiprocessors at 1,830 MHz give the datasheet's 989 TFLOP/s in bf16.
    bound = plausible.flops_limit("sm_90", 132, 1830, "bfloat16")
    assert bound is not None
    assert bound / 1e12 == pytest.approx(989, rel=0.01)
    assert plausible.flops_limit("sm_90", 132, None, "bfloat16") is None
    assert plausible.flops_limit("sm_77", 132, 1830, "bfloat16") is None
    assert plausible.flops_limit("sm_80", 108, 1410, "float8_e4m3fn") is None
    assert hold(1_000_000, bound // 1000 - 10**9, 0).invalid is None
    impossible = hold(1_000_000, bound // 1000 + 10**9, 0)
    assert "TFLOP/s, and no kernel of this device exceeds" in str(impossible.invalid)


@pytest.mark.parametrize(
    ("precision", "rate"), [("highest", 683), ("high", 2048), ("medium", 4096)]
)
def test_float32_products_may_run_on_tensor_cores(precision: str, rate: int) -> None:
    known = {"dtype": "float32", "clock_khz": 1_830_000, "precision": precision}
    bound = plausible.limits(H200, [], **known).flops  # type: ignore[arg-type]
    assert bound == rate * 132 * 1_830_000_000
    assert plausible.flops_limit("gfx90a", 1, 1, "float32", "high") == 256_000_000


@pytest.mark.parametrize("precision", ["highest", "high"])
def test_a_float32_time_is_held_to_the_precision_asked_for(precision: str) -> None:
    # A fifth of the TF32 rate is nothing for tensor cores in TF32, nor in three products of it;
    # four fifths are beyond the latter.
    workload = LONG | {"dtype": "float32"}
    workload |= {"math": {"float32_matmul_precision": precision}}
    flops = work_of(Workload.parse(workload)).flops
    for tenths, possible in ((2, True), (8, precision == "high")):
        time_ns = flops * 10**9 * 10 // (2048 * 132 * 1_980_000_000 * tenths)
        entry = finished(time_ns, seen((1980, "", 0)), workload=workload, flushed=False)
        assert entry["status"] == ("PASS" if possible else "INVALID")


def test_a_bus_bounds_flushed_traffic_beyond_the_cache() -> None:
    bus = plausible.memory_limit(3201, 6144)
    assert bus == 4_916_736_000_000  # the datasheet says 4.8 TB/s
    faster = bus // 1000 + (60 << 20) + 10**6
    assert "GB/s from flushed memory" in str(hold(1_000_000, 0, faster).invalid)
    # Warm samples, and footprints that the cache holds, may honestly be faster.
    for changes in ({"flushed": False}, {"touched": 100 << 20}):
        served = hold(1_000_000, 0, faster, **changes)
        assert served.invalid is None
        assert "the cache serves it" in served.flags[0]


def test_without_a_known_bus_the_measured_ceiling_bounds() -> None:
    known = limits(memory_bus_bits=None)
    assert known.dram == 4_260_000_000_000 * 102 // 100
    assert hold(1_000_000, 0, 4_300_000_000 + (60 << 20), known=known).invalid is None
    assert hold(1_000_000, 0, 4_400_000_000 + (60 << 20), known=known).invalid is not None


def test_above_a_measured_product_is_a_flag() -> None:
    (flag,) = hold(1_000_000, 850_000_000_000, 0).flags
    assert flag.startswith("clock op: 850 TFLOP/s, above the 800 measured in this run")
    assert hold(1_000_000, 810_000_000_000, 0).flags == ()  # within 1.02


def test_no_time_at_all_is_invalid() -> None:
    assert hold(0, 1, 1).invalid is not None


def test_a_backward_has_its_own_work_and_an_append_none() -> None:
    w = Workload.parse(
        {
            "phase": "forward_backward",
            "batch": 1,
            "seqlen_q": 64,
            "seqlen_k": 64,
            "heads_q": 2,
            "head_dim": 64,
            "dtype": "bfloat16",
        }
    )
    work = work_of(w)
    assert plausible.work_of_clock("backward_op", work) == (
        work.flops_backward,
        work.bytes_backward,
    )
    assert plausible.work_of_clock("op", work) == (work.flops, work.bytes)
    assert plausible.work_of_clock("append_op", work) is None
    assert plausible.work_of_clock("request", work) is None


def test_an_impossible_time_is_invalid_and_keeps_its_samples() -> None:
    entry = finished(1000, seen((1980, "", 0)))
    assert entry["status"] == "INVALID"
    assert entry["place"] == "sampling"
    assert entry["conditions"]["clock_khz"] == [1_980_000] * 3
    assert finished(2_000_000, seen((1980, "", 0)))["status"] == "PASS"


def test_an_unsettled_warm_up_is_flagged() -> None:
    warmup = {"duration_ns": 5_000_000_000, "iterations": 9, "stationary": False, "rule": ""}
    entry = finished(2_000_000, seen((1980, "", 0)), warmup=warmup)
    assert entry["status"] == "PASS"
    assert entry["flags"] == ["not stationary after 5.0 s of warming up"]


def test_a_worse_status_is_not_overwritten() -> None:
    entry = finished(2_000_000, seen((900, "hardware_thermal", 0)), status="INCORRECT")
    assert entry["status"] == "INCORRECT"
