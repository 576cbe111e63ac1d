"""What this device reaches in this run: a large product per dtype, a large copy.

Measured on random data, since a product of zeros runs faster. Each figure is the median of its
repeats, with the work of one repeat, so that a rate is exact arithmetic on integers. Above a
measured ceiling a result is only flagged; `plausible` says what is INVALID.
"""

from __future__ import annotations

import itertools
import resource
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import torch

from attnrepro_runner import orderstats

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

MATMUL = "matmul"
COPY = "copy"
READ = "read"
_BLOCK = 1 << 20
_CPU_SECONDS = 0.4
"""Time after which a ceiling of a CPU has repeats enough, if there are five."""
_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float8_e4m3fn": torch.float8_e4m3fn,
}


@dataclass(frozen=True, kw_only=True)
class Ceiling:
    """One measured rate."""

    kind: str
    """matmul, copy or read."""
    dtype: str
    work: int
    """Operations, or bytes read and written, of one repeat."""
    unit: str
    """flop or byte."""
    median_ns: int
    fastest_ns: int
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
            "fastest_ns": self.fastest_ns,
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
        fastest_ns=min(times),
        repeats=len(times),
        shape=f"{n}x{n}x{n}",
    )


def measure_copy(
    device: torch.device, *, size_bytes: int | None = None, repeats: int = 20
) -> Ceiling:
    """Time a copy of a buffer several times the last-level cache; bytes are read and written."""
    source = _noise(size_bytes or _buffer_bytes(device), device)
    target = torch.empty_like(source)
    times = _times(lambda: target.copy_(source), device, repeats)
    return _traffic(COPY, 2 * source.nbytes, times, source.nbytes)


def measure_read(
    device: torch.device, *, size_bytes: int | None = None, repeats: int = 20
) -> Ceiling:
    """Time a sum over a buffer: reading alone, which a decode step does, beats copying."""
    source = _noise(size_bytes or _buffer_bytes(device), device).view(torch.int64)
    times = _times(lambda: source.sum(), device, repeats)
    return _traffic(READ, source.nbytes, times, source.nbytes)


def measure(dtypes: Sequence[str], device: torch.device) -> tuple[Ceiling, ...]:
    """Measure copying, reading and one product a dtype; a dtype without product is left out."""
    found = [measure_copy(device), measure_read(device)]
    for dtype in dtypes:
        try:
            found.append(measure_matmul(dtype, device))
        except (RuntimeError, NotImplementedError):
            continue
    return tuple(found)


def _traffic(kind: str, work: int, times: list[int], size: int) -> Ceiling:
    return Ceiling(
        kind=kind,
        dtype="uint8" if kind == COPY else "int64",
        work=work,
        unit="byte",
        median_ns=_median(times),
        fastest_ns=min(times),
        repeats=len(times),
        shape=str(size),
    )


def _buffer_bytes(device: torch.device) -> int:
    """Return the size of a buffer beside what other workers hold, in whole blocks."""
    if device.type == "cuda":
        free = int(torch.cuda.mem_get_info(device)[0])
        return max(_BLOCK, min(4 << 30, free // 8) // _BLOCK * _BLOCK)
    allowed = resource.getrlimit(resource.RLIMIT_DATA)[0]
    most = 256 << 20
    if allowed != resource.RLIM_INFINITY:
        most = min(most, allowed // 8)
    return max(_BLOCK, most // _BLOCK * _BLOCK)


def _noise(size: int, device: torch.device) -> torch.Tensor:
    """Return random bytes, one block of them repeated: drawing them all takes seconds on a CPU."""
    block = torch.randint(0, 256, (min(size, _BLOCK),), dtype=torch.uint8, device=device)
    return block.repeat(size // block.numel())


def _times(work: Callable[[], torch.Tensor], device: torch.device, repeats: int) -> list[int]:
    """Return one time a repeat in ns: device events on a GPU, the host's clock on a CPU."""
    for _ in range(3 if device.type == "cuda" else 1):
        work()
    if device.type != "cuda":
        times: list[int] = []
        first = time.perf_counter_ns()
        for _ in range(repeats):
            begun = time.perf_counter_ns()
            if len(times) >= 5 and begun - first > _CPU_SECONDS * 1e9:
                break
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
