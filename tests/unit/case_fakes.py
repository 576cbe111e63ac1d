"""What the tests of reported cases share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from numerics_fakes import workload_of
from test_runner_rules import COLUMNS, H200, OBSERVE

from attnrepro_runner import (
    conditions,
    finish,
    flush,
    interleave,
    libraries,
    mathflags,
    measured,
    stages,
)
from attnrepro_runner.report import Report
from attnrepro_runner.stoprule import Series
from attnrepro_runner.subject import Cell, Subject

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from attnrepro_runner.backends.base import Backend
    from attnrepro_runner.clocks import DeviceApi
    from attnrepro_runner.conditions import Conditions

CPU = torch.device("cpu")
TINY: dict[str, Any] = {"batch": 1, "heads_q": 2, "heads_kv": 1, "seqlen_q": 24, "seqlen_k": 24}


@pytest.fixture(autouse=True)
def own_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave this process's flags and the user's folders alone; digest no library."""
    monkeypatch.setattr(mathflags, "apply", lambda flags: mathflags.read_back())
    monkeypatch.setattr(libraries, "file_digest", lambda path: "0" * 64)
    for name, folder in (("HOME", "home"), ("STORE", "store"), ("LOCKS", "locks")):
        monkeypatch.setenv(f"ATTNREPRO_{name}", str(tmp_path / folder))
    (tmp_path / "locks").mkdir()
    monkeypatch.delenv("ATTNREPRO_KEY", raising=False)


def subject_of(backend: Backend, **options: object) -> Subject:
    one = Subject({"id": "s", "backend": "eager", "options": options}, CPU, 1)
    one.backend = backend
    return one


def checked(backend: Backend, **workload: Any) -> Report:
    """Do a whole check stage in this process."""
    report = Report(lambda place: None)
    one = Cell(id="c000", label="", workload=workload_of(**TINY | workload), inputs={})
    shared: dict[str, Any] = {"accuracy": {}, "bits": {"repeats": 2}}
    stages.check(subject_of(backend), one, report, shared, profile="native")
    return report


def open_cell(
    backend: Backend,
    wanted: Sequence[str] = ("host",),
    device: DeviceApi | None = None,
    **inputs: object,
) -> tuple[measured.MeasuredCell, Report, dict[str, int]]:
    """Open a cell of a launch in this process."""
    report = Report(lambda place: None)
    one = Cell(id="c000", label="", workload=workload_of(**TINY), inputs=inputs)
    shared = {"accuracy": {}, "timing": {"clocks": wanted, "warmup_seconds": [0.0, 0.01]}}
    found = measured.MeasuredCell(
        subject_of(backend), one, shared, launch=0, device=device, empty=flush.Warm()
    )
    return found, report, found.open(report)


def ended(
    workload: dict[str, Any],
    median_ns: int,
    found: Conditions,
    *,
    flushed: bool = True,
    policy: dict[str, Any] = OBSERVE,
    clock: str = "op",
    **entry: Any,
) -> dict[str, Any]:
    """Return the entry of a subject whose samples all are of one length."""
    one = interleave.Measured({"status": "PASS", "reason": None, **entry})
    one.flushed = flushed
    one.series = {clock: Series(samples=[median_ns] * 20, usable=[median_ns] * 20, stop="budget")}
    finish.judge(one, {"workload": workload}, found, device=H200, policy=policy, ceilings=[])
    return one.entry


def clock_series(*mhz: int) -> Conditions:
    """Ten seconds of readings at 25 Hz, in equal shares."""
    rows = [(n * 40_000_000, mhz[n * len(mhz) // 250], "", 0) for n in range(250)]
    return conditions.between(COLUMNS, rows, 0, 10**10)


LONG: dict[str, Any] = {
    **{"phase": "forward", "batch": 4, "seqlen_q": 4096, "seqlen_k": 4096},
    **{"heads_q": 32, "head_dim": 128, "dtype": "bfloat16"},
}
