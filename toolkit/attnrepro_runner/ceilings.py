"""What this device reaches in this run: a large product per dtype, a large copy.

Measured on random data, since a product of zeros runs faster. Each figure is the median of its
repeats, with the work of one repeat, so that a rate is exact arithmetic on integers. Above a
measured ceiling a result is only flagged; above `flops_limit`, the architecture's own bound at the
highest clock seen, it is INVALID.
"""

from __future__ import annotations

import itertools
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import torch

from attnrepro_runner import orderstats

if TYPE_CHECKING:
    from collections.abc import Callable

MATMUL = "matmul"
COPY = "copy"
_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float8_e4m3fn": torch.float8_e4m3fn,
}

FLOPS_PER_CLOCK = {
    "sm_80": {"float32": 128, "bfloat16": 2048, "float16": 2048},
    "sm_90": {"float32": 256, "bfloat16": 4096, "float16": 4096, "float8_e4m3fn": 8192},
    "sm_100": {"float32": 256, "bfloat16": 8192, "float16": 8192, "float8_e4m3fn": 16384},
    "gfx90a": {"float32": 256, "bfloat16": 1024, "float16": 1024},
    "gfx942": {"float32": 256, "bfloat16": 2048, "float16": 2048, "float8_e4m3fn": 4096},
}
"""Dense operations a clock and multiprocessor (compute unit), by architecture and dtype: the
vendors' peak rates divided by units and boost clock (A100, H100, B200, MI250X, MI300X datasheets).
float32 is without reduced-precision products. An architecture that is not here has no limit."""


@dataclass(frozen=True, kw_only=True)
class Ceiling:
    """One measured rate."""

    kind: str
    """matmul or copy."""
    dtype: str
    work: int
    """Operations, or bytes read and written, of one repeat."""
    unit: str
    """flop or byte."""
    median_ns: int
    repeats: int
    shape: str

    @property
    def per_second(self) -> int:
        """Work a second, rounded down."""
        return self.work * 10**9 // self.median_ns

    def to_dict(self) -> dict[str, object]:
        """Return the ceiling as plain JSON values."""
        return {
            "kind": self.kind,
            "dtype": self.dtype,
            "work": self.work,
            "unit": self.unit,
            "median_ns": self.median_ns,
            "repeats": self.repeats,
            "shape": self.shape,
            "per_second": self.per_second,
        }


def measure_matmul(
    dtype: str, device: torch.device, *, size: int | None = None, repeats: int = 20
) -> Ceiling:
    """Time size x size products in the dtype.

    Raises:
        RuntimeError: the device has no product of this dtype.

    """
    n = size or (8192 if device.type == "cuda" else 1024)
    generator = torch.Generator(device).manual_seed(2026)
    a, b = (torch.randn(n, n, generator=generator, device=device) for _ in range(2))
    if dtype == "float8_e4m3fn":
        left = a.to(torch.float8_e4m3fn)
        # cuBLAS takes the second factor column-major.
        right = b.to(torch.float8_e4m3fn).t()
        one = torch.ones((), device=device)

        def multiply() -> torch.Tensor:
            return torch._scaled_mm(left, right, scale_a=one, scale_b=one, out_dtype=torch.bfloat16)
    else:
        left, right = (x.to(_DTYPES[dtype]) for x in (a, b))

        def multiply() -> torch.Tensor:
            return left @ right

    times = _times(multiply, device, repeats)
    return Ceiling(
        kind=MATMUL,
        dtype=dtype,
        work=2 * n**3,
        unit="flop",
        median_ns=_median(times),
        repeats=repeats,
        shape=f"{n}x{n}x{n}",
    )


def measure_copy(
    device: torch.device, *, size_bytes: int | None = None, repeats: int = 20
) -> Ceiling:
    """Time a copy of a buffer several times the last-level cache; bytes are read and written."""
    size = size_bytes or (4 << 30 if device.type == "cuda" else 256 << 20)
    source = torch.randint(0, 256, (size,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    times = _times(lambda: target.copy_(source), device, repeats)
    return Ceiling(
        kind=COPY,
        dtype="uint8",
        work=2 * size,
        unit="byte",
        median_ns=_median(times),
        repeats=repeats,
        shape=str(size),
    )


def measure(dtypes: tuple[str, ...], device: torch.device) -> tuple[Ceiling, ...]:
    """Measure a copy and one product a dtype; a dtype without product is left out."""
    found = [measure_copy(device)]
    for dtype in dtypes:
        try:
            found.append(measure_matmul(dtype, device))
        except (RuntimeError, NotImplementedError):
            continue
    return tuple(found)


def flops_limit(
    architecture: str | None, units: int | None, clock_mhz: int | None, dtype: str
) -> int | None:
    """Return the operations a second that no kernel can exceed, or None where it is not known.

    Args:
        architecture: as the device record has it.
        units: multiprocessors or compute units.
        clock_mhz: highest clock seen while the samples were taken.
        dtype: of q, k and v.

    """
    rate = FLOPS_PER_CLOCK.get(architecture or "", {}).get(dtype)
    if rate is None or units is None or clock_mhz is None:
        return None
    return rate * units * clock_mhz * 10**6


def _times(work: Callable[[], torch.Tensor], device: torch.device, repeats: int) -> list[int]:
    """Return one time a repeat in ns: device events on a GPU, the host's clock on a CPU."""
    for _ in range(3):
        work()
    if device.type != "cuda":
        times = []
        for _ in range(repeats):
            begun = time.perf_counter_ns()
            work()
            times.append(max(1, time.perf_counter_ns() - begun))
        return times
    event = cast("Callable[..., torch.cuda.Event]", torch.cuda.Event)
    marks = [event(enable_timing=True) for _ in range(repeats + 1)]
    marks[0].record()
    for mark in marks[1:]:
        work()
        mark.record()
    torch.cuda.synchronize(device)
    return [
        max(1, round(first.elapsed_time(second) * 1e6))
        for first, second in itertools.pairwise(marks)
    ]


def _median(times: list[int]) -> int:
    return sorted(times)[orderstats.median_rank(len(times)) - 1]
