"""Requests, bounds, boundary and cost, from observations made by hand."""

from __future__ import annotations

import copy
from fractions import Fraction
from typing import Any

import pytest
from host_fakes import check_entry, cold_entry, job, launch_entry, sample_bytes, task

from attnrepro import jsonio, schema
from attnrepro.compare import boundary, bounds, explain, wholework
from attnrepro.manifest.load import load
from attnrepro.report import terminal
from attnrepro.report import wholework as report
from attnrepro.results import Context, merge
from attnrepro_runner import shares

REQUEST = {
    "model": "small_prefill",
    "layers": 2,
    "repeats": 5,
    "stages_ns": {"norm": 100, "attention": 500, "mlp": 400},
    "attention_ns": 500,
    "total_ns": 1000,
    "largest_remaining": "mlp",
    "device_ns": None,
}


def written(**changes: Any) -> dict[str, Any]:
    return {
        "schema": "attnrepro.manifest/1",
        "name": "tiny",
        "image": {"stack": "cpu-torch2.13"},
        "device": {"vendor": "cpu", "threads": 1},
        "workload": {
            "phase": "prefill",
            "batch": 1,
            "seqlen_q": 64,
            "seqlen_k": 64,
            "heads_q": 4,
            "heads_kv": 2,
            "head_dim": 64,
            "dtype": "float32",
        },
        "request": {"model": "small_prefill"},
        "timing": {
            "launches": 5,
            "samples": [10, 10],
            "clocks": ["host", "request"],
            "tails": [],
        },
        "subjects": [
            {"id": "fast", "backend": "sdpa.flash", "role": "candidate"},
            {"id": "slow", "backend": "eager", "role": "baseline"},
        ],
        **changes,
    }


def canonical(**changes: Any) -> dict[str, Any]:
    return dict(load(jsonio.canonical(written(**changes))).document)


def series(subject: str, launch: int, clock: str) -> dict[str, Any]:
    record = dict(launch_entry(subject, launch)["samples"][0])
    return record | {
        "clock": clock,
        "member": record["member"].replace("host.i64", f"{clock}.i64"),
        "repeated": 0,
    }


def launch_of(subject: str, launch: int, khz: int = 2_000_000) -> dict[str, Any]:
    stages = REQUEST["stages_ns"] | {"attention": 500 if subject == "slow" else 250}  # type: ignore[operator]
    return launch_entry(
        subject,
        launch,
        samples=[series(subject, launch, clock) for clock in ("host", "request")],
        request={**REQUEST, "stages_ns": stages},
        preparation={"prepare_ns": [9000, 3000 + launch]},
        conditions={
            "rows": 3,
            "clock_khz": [khz, khz, khz],
            "throttle": [],
            "other_processes": None,
        },
        flags=["the clock drifted"] if launch == 1 else [],
    )


CEILINGS = {
    "measured": [
        {
            "kind": kind,
            "dtype": dtype,
            "work": 10,
            "unit": unit,
            "median_ns": 5,
            "fastest_ns": 4,
            "repeats": 5,
            "shape": "1",
            "per_second": rate,
        }
        for kind, dtype, unit, rate in (
            ("matmul", "float32", "flop", 10**13),
            ("copy", "uint8", "byte", 10**12),
        )
    ],
    "reason": None,
}


def observations(**changes: Any) -> dict[str, Any]:
    names = ("fast", "slow")
    results = [
        task("check", "check", None, [check_entry(n) for n in names]),
        task("cold", "cold", None, [cold_entry(n) for n in names]),
        *(task(f"launch-{i}", "launch", i, [launch_of(n, i) for n in names]) for i in range(5)),
    ]
    results[2]["ceilings"] = CEILINGS
    asked = canonical()
    cells = [{**job()["cells"][0], "workload": asked["workload"], "label": "prefill"}]
    context = Context(
        run_id="0123456789abcdef",
        started_utc="2026-01-01T00:00:00Z",
        duration_ns=10,
        tool="0.1.0",
        resumed=False,
        engine="podman",
        engine_version="4.3.1",
        contained=True,
        facts={},
        uncompared={},
        images=[{"stack": "cpu-torch2.13", "revision": "r1", "size": 5 << 20, "build_ms": 7000}],
        device_identity="ab" * 32,
    )
    tasks = [*job()["tasks"], {"id": "cold", "stage": "cold", "launch": None, "subjects": []}]
    found = merge(asked, [job(cells=cells, tasks=tasks)], results, sample_bytes, context)
    return copy.deepcopy(found.observations) | changes


def test_the_merged_document_is_valid_and_holds_every_part() -> None:
    seen = observations()
    assert schema.validate("observations", seen) == []
    assert seen["device"]["identity"] == "ab" * 32
    assert list(seen["ceilings"]) == ["launch-0"]
    subject = seen["cells"][0]["subjects"][0]
    for name in ("requests", "preparations", "conditions"):
        assert [one["task"] for one in subject[name]] == [f"launch-{n}" for n in range(5)]
    assert subject["flags"] == ["launch-1: the clock drifted"]


def test_a_request_has_share_and_largest_remaining_stage() -> None:
    fast, slow = wholework.requests(observations())
    assert (fast.subject, fast.total_ns) == ("fast", 1006)
    assert fast.share == Fraction(250, 750)
    assert slow.share == Fraction(1, 2)
    assert (slow.largest_remaining, slow.bound) == ("mlp", "undetermined")


@pytest.mark.parametrize(("device", "bound"), [(100, "launch"), (1000, "device")])
def test_a_request_far_above_its_device_waits_for_the_host(device: int, bound: str) -> None:
    seen = observations()
    for one in seen["cells"][0]["subjects"][0]["requests"]:
        one["request"]["device_ns"] = device
    assert wholework.requests(seen)[0].bound == bound


def test_gains_hold_amdahl_against_what_was_measured() -> None:
    (gain,) = wholework.gains(observations())
    assert gain.verdict == "FASTER"
    assert gain.compared.attention_ratio == 2
    assert gain.compared.predicted_ratio == Fraction(4, 3)
    assert gain.compared.end_to_end_ratio == Fraction(2006, 1006)
    assert gain.noise == Fraction(4, 2 * 2006)
    assert gain.least_share == shares.least_share(Fraction(2), gain.noise)


def test_the_least_share_is_where_amdahl_gives_the_noise() -> None:
    share = shares.least_share(Fraction(2), Fraction(1, 50))
    assert share is not None
    assert shares.amdahl(share, Fraction(2)) == Fraction(51, 50)
    assert shares.least_share(Fraction(1), Fraction(1, 50)) is None
    assert shares.least_share(Fraction(101, 100), Fraction(1, 50)) is None


def test_a_bound_is_named_by_the_ceiling_that_is_reached() -> None:
    seen, asked = observations(), canonical()
    fast, slow = bounds.bounds(asked, seen)
    # 64 x 64 pairs of 4 heads of width 64: 4.19 MFLOP in 1,006 ns.
    assert fast.flops_per_second == 4_194_304 * 10**9 // 1006
    assert fast.compute == Fraction(fast.flops_per_second, 10**13)
    assert (fast.bound, slow.bound) == ("undetermined", "undetermined")
    assert "no counters" in fast.evidence
    for ceiling in seen["ceilings"]["launch-0"]["measured"]:
        ceiling["per_second"] = 5 * 10**12
    assert [one.bound for one in bounds.bounds(asked, seen)] == ["compute", "undetermined"]
    seen["cells"][0]["subjects"][0]["counters"] = {
        "tool": "ncu",
        "metrics": {},
        "bound": "memory",
        "evidence": "memory 80 % of peak",
    }
    counted = bounds.bounds(asked, seen)[0]
    assert (counted.bound, counted.evidence) == ("memory", "counters: memory 80 % of peak")
    assert terminal.counted_lines(observations()) == []
    seen["cells"][0]["subjects"][1]["counters"] = {
        "tool": "ncu",
        "metrics": {},
        "bound": "undetermined",
        "evidence": "no permission",
    }
    silent = bounds.bounds(asked, seen)[1]
    assert silent.evidence.endswith("counters: no permission")
    fast_line, slow_line = terminal.counted_lines(seen)[2:]
    assert fast_line.endswith("fast: memory (memory 80 % of peak)")
    assert slow_line == "  undetermined for 1 calls: no permission"


def test_without_ceilings_nothing_is_named() -> None:
    seen = observations()
    del seen["ceilings"]
    first = bounds.bounds(canonical(), seen)[0]
    assert (first.compute, first.memory, first.bound) == (None, None, "undetermined")


def swept(*verdicts: tuple[str, float]) -> tuple[dict[str, Any], dict[str, Any]]:
    """A manifest with one axis, and observations with these verdicts along it."""
    values = [64 * 2**n for n in range(len(verdicts))]
    asked = canonical(
        request=None,
        timing={"launches": 5, "tails": []},
        variants=[],
        sweep={"/workload/batch": values},
    )
    template = observations()["cells"][0]
    cells = []
    for n, (verdict, ratio) in enumerate(verdicts):
        cell = copy.deepcopy(template) | {"id": f"c{n:03d}", "label": f"batch={values[n]}"}
        subject = cell["subjects"][0]
        if verdict == "UNSUPPORTED":
            subject |= {"status": verdict, "reason": "not claimed", "timing": {}, "comparisons": []}
        for claim in subject["comparisons"]:
            claim |= {"verdict": verdict, "ratio": ratio.hex()}
        cells.append(cell)
    return asked, observations(cells=cells)


def test_the_boundary_counts_places_and_finds_where_the_verdict_turns() -> None:
    asked, seen = swept(
        ("SLOWER", 0.5), ("UNSUPPORTED", 0), ("SAME", 1.0), ("AMBIGUOUS", 1.1), ("FASTER", 1.6)
    )
    (found,) = boundary.boundaries(asked, seen)
    assert [p.place for p in found.places] == ["loses", "UNSUPPORTED", "ties", "open", "wins"]
    assert [(c.before[0], c.before[1], c.after[0], c.after[1]) for c in found.crossovers] == [
        (64, "loses", 256, "ties"),
        (256, "ties", 1024, "wins"),
    ]
    assert found.crossovers[0].axis == "/workload/batch"


def test_costs_name_image_start_and_unsupported_cells() -> None:
    asked, seen = swept(("FASTER", 2.0), ("UNSUPPORTED", 0))
    fast, slow = boundary.costs(asked, seen)
    assert (fast.image_bytes, fast.build_ms) == (5 << 20, 7000)
    assert (fast.first_call_ns, fast.compile_ns) == (5_000_000, 3_000_000)
    assert fast.prepare_ns == 3002
    assert (fast.unsupported, fast.cells, slow.unsupported) == (1, 2, 0)


def test_cycles_are_times_at_each_launchs_clock() -> None:
    seen = observations()
    subject = seen["cells"][0]["subjects"][0]
    assert explain.cycles(subject, seen, "host") == [2 * (1004 + n) for n in range(5)]
    subject["conditions"][2]["conditions"]["clock_khz"] = None
    assert explain.cycles(subject, seen, "host") is None


def test_a_report_has_every_section_and_a_terminal_its_lines() -> None:
    seen = observations()
    seen["cells"][0]["subjects"][0]["energy"] = {
        "calls": 50,
        "duration_ns": 1,
        "energy_mj": 350,
        "source": "a fake",
    }
    found = {section.heading: section for section in report.sections(canonical(), seen)}
    assert list(found) == [
        "The whole request",
        "What bounds it",
        "Where fast wins and loses against slow",
        "What bringing it in costs",
        "Energy",
        "Remarkable",
    ]
    assert "7 mJ" in found["Energy"].tables[0].lines[0]
    lines = report.summary(seen)
    assert "attention 33.3 % of it, largest other stage mlp" in lines[0]
    assert "bound by" not in lines[0]
    for subject in seen["cells"][0]["subjects"]:
        for one in subject["requests"]:
            one["request"]["device_ns"] = 503
    assert "; bound by launch: 2.00× the device's own time" in report.summary(seen)[0]
    assert "not compared" not in report.summary(seen)[0]
    missing = {
        "against": "eager",
        "what": "logits",
        "limit": "0x1p-5",
        "error": None,
        "reason": "x",
    }
    seen["cells"][0]["subjects"][0]["requests"][1]["request"]["agreement"] = missing
    assert "not compared with textbook attention's in 1 of 5 launches" in report.summary(seen)[0]
    assert "Amdahl predicts 1.33×" in lines[2]
