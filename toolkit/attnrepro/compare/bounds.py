"""What bounds a call, and on which evidence; `undetermined` where none decides.

Rates come from a call's median and its counted work, ceilings from the same run. The formulas count
the least traffic, so a share of the copying rate is a lower bound of what the memory did.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Any, Final

from attnrepro.compare.wholework import attention_clock
from attnrepro.manifest.cells import expand
from attnrepro_runner.work import Work, work_of

if TYPE_CHECKING:
    from collections.abc import Mapping

REACHED: Final = Fraction(6, 10)
"""Share of a ceiling from which it is what bounds the call, as Nsight Compute has it."""

LAUNCH: Final = 2
"""A call whose synchronised time is this many times its device's waits for the host."""


@dataclass(frozen=True, kw_only=True)
class Bound:
    """One subject in one cell."""

    cell: str
    subject: str
    clock: str
    flops_per_second: int
    bytes_per_second: int
    intensity: Fraction
    """FLOP a byte of the least traffic."""
    compute: Fraction | None
    """Share of the measured product's rate in the cell's dtype."""
    memory: Fraction | None
    """Share of the faster of copying and reading."""
    bound: str
    """compute, memory, latency, launch or undetermined."""
    evidence: str


def bounds(manifest: Mapping[str, Any], observations: Mapping[str, Any]) -> list[Bound]:
    """Every timed call of an artifact, in its order.

    Args:
        manifest: canonical.
        observations: valid.
    """
    cells = {cell.id: cell for cell in expand(dict(manifest))[0]}
    measured = [
        ceiling
        for found in observations.get("ceilings", {}).values()
        for ceiling in found["measured"]
    ]
    found = []
    for cell in observations["cells"]:
        asked = cells[cell["id"]]
        work = work_of(asked.parsed)
        compute = _best(measured, "matmul", asked.parsed.dtype)
        memory = max((c["per_second"] for c in measured if c["unit"] == "byte"), default=None)
        for subject in cell["subjects"]:
            name = f"{cell['id']} {cell['label']}"
            one = _bound(name, subject, work, compute, memory)
            if one is not None:
                found.append(one)
    return found


def _best(measured: list[Mapping[str, Any]], kind: str, dtype: str) -> int | None:
    rates = [c["per_second"] for c in measured if c["kind"] == kind and c["dtype"] == dtype]
    return max(rates, default=None)


def _bound(
    cell: str,
    subject: Mapping[str, Any],
    work: Work,
    compute: int | None,
    memory: int | None,
) -> Bound | None:
    timing = subject["timing"]
    clock = attention_clock(timing)
    median = timing[clock]["median"]["value_ns"] if clock else None
    if clock is None or not median:
        return None
    flops, traffic = work.flops * 10**9 // median, work.bytes * 10**9 // median
    shares = (
        None if compute is None else Fraction(flops, compute),
        None if memory is None else Fraction(traffic, memory),
    )
    bound, evidence = _name(subject, clock, median, shares)
    return Bound(
        cell=cell,
        subject=subject["subject"],
        clock=clock,
        flops_per_second=flops,
        bytes_per_second=traffic,
        intensity=Fraction(work.flops, max(1, work.bytes)),
        compute=shares[0],
        memory=shares[1],
        bound=bound,
        evidence=evidence,
    )


def _name(
    subject: Mapping[str, Any],
    clock: str,
    median: int,
    shares: tuple[Fraction | None, Fraction | None],
) -> tuple[str, str]:
    counters = subject.get("counters")
    if counters is not None and counters["bound"] != "undetermined":
        return counters["bound"], f"counters: {counters['evidence']}"
    reached = [
        (share, name)
        for share, name in zip(shares, ("compute", "memory"), strict=True)
        if share is not None and share >= REACHED
    ]
    if reached:
        share, name = max(reached)
        return name, f"{float(share):.0%} of the {name} ceiling of this run"
    host = subject["timing"].get("host", {}).get("median", {}).get("value_ns")
    if clock != "host" and host is not None and host >= LAUNCH * median:
        return "launch", f"the host needs {host / median:.1f}× the device's time"
    why = "no counters" if counters is None else f"counters: {counters['evidence']}"
    return "undetermined", f"no ceiling is reached to {float(REACHED):.0%}; {why}"
