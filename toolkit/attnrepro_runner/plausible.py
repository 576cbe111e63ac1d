"""Whether a time can be true: operations and bytes a second against what the device can do.

The standard library alone; integers, so that a host comes to the same verdict. INVALID is what no
kernel can do: more operations than the units have at the highest clock seen, or more traffic than
the memory carries, of samples whose inputs were flushed and do not fit the cache. Above what was
merely measured in this run is a flag: a cache serves more than the memory, and a product of zeros
beats one of random data.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from attnrepro_runner.semantics import Workload
    from attnrepro_runner.work import Work

FLOPS_PER_CLOCK: Final = {
    "sm_80": {"float32": 128, "tf32": 1024, "bfloat16": 2048, "float16": 2048},
    "sm_90": {
        **{"float32": 256, "tf32": 2048, "bfloat16": 4096, "float16": 4096},
        "float8_e4m3fn": 8192,
    },
    "sm_100": {
        **{"float32": 256, "tf32": 4096, "bfloat16": 8192, "float16": 8192},
        "float8_e4m3fn": 16384,
    },
    "gfx90a": {"float32": 256, "bfloat16": 1024, "float16": 1024},
    "gfx942": {
        **{"float32": 256, "tf32": 1024, "bfloat16": 2048, "float16": 2048},
        "float8_e4m3fn": 4096,
    },
}
"""Dense operations a clock and multiprocessor (compute unit), by architecture and kind of product:
the vendors' peak rates divided by units and boost clock (A100, H100, B200, MI250X, MI300X
datasheets). float32 is without tensor cores. An architecture that is not here has no limit."""

FLOAT32_PRODUCTS: Final = {
    "highest": (("float32", 1), ("tf32", 3)),
    "high": (("float32", 1), ("tf32", 1)),
    "medium": (("float32", 1), ("tf32", 1), ("bfloat16", 1)),
}
"""torch's float32_matmul_precision to the products that make one of float32: kind, and how many.
Full precision is also reached on tensor cores, by three products of TF32 (as CUTLASS does)."""

TOLERANCE: Final = (102, 100)
"""Of a measured ceiling, as a fraction: it is a measurement itself."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What this device can do, as far as it is known; rates a second."""

    flops: int | None
    """No kernel exceeds it: the architecture's rate at the highest clock seen."""
    dram: int | None
    """No memory traffic exceeds it: clock and width of the bus, else the measured ceiling."""
    dram_source: str
    cache_bytes: int | None
    """Last-level cache."""
    measured_flops: int | None
    """Product in the cell's dtype."""
    measured_bytes: int | None
    """The faster of copying and reading."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """What a time says about itself."""

    invalid: str | None = None
    flags: tuple[str, ...] = ()


def limits(
    device: Mapping[str, Any],
    ceilings: Iterable[Mapping[str, Any]],
    *,
    dtype: str,
    clock_khz: int | None,
    precision: str = "highest",
) -> Limits:
    """Collect what bounds a cell.

    Args:
        device: neutral record.
        ceilings: measured in this run, as `Ceiling.to_dict` gives them.
        dtype: of q, k and v.
        clock_khz: the highest seen while the samples were taken.
        precision: torch's float32_matmul_precision, as the workload asks for it.

    """
    found = list(ceilings)
    rates = [c["per_second"] for c in found if c["unit"] == "byte"]
    measured = max(rates, default=None)
    bus = memory_limit(device.get("memory_clock_max_mhz"), device.get("memory_bus_bits"))
    # By the fastest repeat: a busy moment must not make an honest time impossible.
    best = max(
        (c["work"] * 10**9 // c["fastest_ns"] for c in found if c["unit"] == "byte"), default=None
    )
    allowed = None if best is None else best * TOLERANCE[0] // TOLERANCE[1]
    return Limits(
        flops=flops_limit(
            device.get("architecture"),
            device.get("compute_units"),
            None if clock_khz is None else clock_khz // 1000,
            dtype,
            precision,
        ),
        dram=bus if bus is not None else allowed,
        dram_source="clock and width of its bus" if bus is not None else "the ceiling measured",
        cache_bytes=device.get("last_level_cache_bytes"),
        measured_flops=next(
            (c["per_second"] for c in found if c["kind"] == "matmul" and c["dtype"] == dtype), None
        ),
        measured_bytes=measured,
    )


def flops_limit(
    architecture: str | None,
    units: int | None,
    clock_mhz: int | None,
    dtype: str,
    precision: str = "highest",
) -> int | None:
    """Return the operations a second that no kernel can exceed, or None where it is not known.

    Args:
        architecture: as the device record has it.
        units: multiprocessors or compute units.
        clock_mhz: highest clock seen while the samples were taken.
        dtype: of q, k and v.
        precision: torch's float32_matmul_precision.

    """
    rates = FLOPS_PER_CLOCK.get(architecture or "", {})
    products = FLOAT32_PRODUCTS[precision] if dtype == "float32" else ((dtype, 1),)
    rate = max((-(-rates[kind] // count) for kind, count in products if kind in rates), default=0)
    if not rate or units is None or clock_mhz is None:
        return None
    return rate * units * clock_mhz * 10**6


def memory_limit(clock_mhz: int | None, bus_bits: int | None) -> int | None:
    """Return the bytes a second of a double-data-rate bus, or None where it is not known."""
    if clock_mhz is None or bus_bits is None:
        return None
    return 2 * clock_mhz * 10**6 * bus_bits // 8


def work_of_clock(clock: str, work: Work) -> tuple[int, int] | None:
    """Return operations and bytes of one call by a clock's name; None where it is another work."""
    if clock.startswith("backward_"):
        return work.flops_backward, work.bytes_backward
    if clock in ("kernel", "op", "host"):
        return work.flops, work.bytes
    return None


def footprint(workload: Workload, work: Work) -> int:
    """Return the bytes that one call must touch: whole pages where the cache has pages."""
    return max(work.bytes_forward, work.bytes_pages) + (
        work.bytes_backward - work.bytes_forward if workload.has_backward else 0
    )


def judge(
    clock: str, median_ns: int, work: tuple[int, int], *, touched: int, flushed: bool, known: Limits
) -> Finding:
    """Hold a median against the limits.

    Args:
        clock: its name, for the reason.
        median_ns: of the samples that count.
        work: operations and bytes of one call.
        touched: bytes of the call's footprint.
        flushed: whether every sample began with its inputs out of the caches.
        known: limits.

    """
    if median_ns <= 0:
        return Finding(invalid=f"clock {clock}: a median of {median_ns} ns")
    flops, traffic = (amount * 10**9 // median_ns for amount in work)
    if known.flops is not None and flops > known.flops:
        return Finding(
            invalid=f"clock {clock}: {_tera(flops)} TFLOP/s, and no kernel of this device exceeds "
            f"{_tera(known.flops)} at the highest clock seen"
        )
    cache = known.cache_bytes
    if flushed and cache is not None and touched > 2 * cache and known.dram is not None:
        # What was written last may still lie in the cache when the span ends.
        moved = max(0, work[1] - cache) * 10**9 // median_ns
        if moved > known.dram:
            return Finding(
                invalid=f"clock {clock}: {_giga(moved)} GB/s from flushed memory, and this "
                f"device's memory carries {_giga(known.dram)} ({known.dram_source})"
            )
    flags = []
    for rate, ceiling, unit, scale in (
        (flops, known.measured_flops, "TFLOP/s", _tera),
        (traffic, known.measured_bytes, "GB/s", _giga),
    ):
        if ceiling is not None and rate * TOLERANCE[1] > ceiling * TOLERANCE[0]:
            why = "the cache serves it" if unit == "GB/s" else "other shapes and data run faster"
            flags.append(
                f"clock {clock}: {scale(rate)} {unit}, above the {scale(ceiling)} measured in this "
                f"run: {why}"
            )
    return Finding(flags=tuple(flags))


def _tera(rate: int) -> str:
    return f"{rate / 1e12:.4g}"


def _giga(rate: int) -> str:
    return f"{rate / 1e9:.4g}"
