"""The coordinator's whole runs, with real workers."""

from __future__ import annotations

import json
import os
import signal
import struct
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from run_fakes import PHASES, TOOLKIT, adapter, cell, document, results, run

from attnrepro.schema import validate
from attnrepro_runner import coordinator

HOSTILE = {
    "exits": ("os._exit(3)", "CRASH", "exit status 3"),
    "segfaults": ("ctypes.string_at(0)", "CRASH", "signal SIGSEGV"),
    "raises": ("raise KeyError('lost')", "CRASH", "KeyError: 'lost'"),
    "hangs": ("time.sleep(600)", "TIMEOUT", "no answer within"),
    "eats": ("return [bytearray(1 << 30) for _ in range(64)]", "OUT_OF_MEMORY", ""),
    "nan": (
        "o = p.step(); return Outputs(out=o.out * float('nan'), lse=o.lse)",
        "INCORRECT",
        "NaN",
    ),
    "guards": (
        "t = p.tensors.v; w = torch.empty(0, dtype=t.dtype).set_(t.untyped_storage()); "
        "w[t.storage_offset() + t.numel()] = 0; return p.step()",
        "INCORRECT",
        "memory round them",
    ),
}


def test_one_tiny_cell_runs_through_a_launch(tmp_path: Path) -> None:
    found = document([cell(0, ["flash"], **PHASES[0])], {"flash": "sdpa.flash"}, ["launch-0"])
    assert validate("job", found) == []
    assert run(found, tmp_path) == 0
    (entry,) = results(tmp_path)["launch-0"]["entries"]
    assert entry["status"] == "PASS", entry["reason"]
    (record,) = entry["samples"]
    data = (tmp_path / "out" / record["member"]).read_bytes()
    assert len(data) == 8 * record["n"]
    assert record["n"] >= 20
    assert min(struct.unpack(f"<{record['n']}q", data)) > 0
    assert entry["oracle_before"]["seed"] != entry["oracle_after"]["seed"]
    assert {"inputs", "warm-up", "sampling", "oracle_before", "oracle_after"} <= set(entry["spent"])
    assert entry["spent"]["sampling"] >= sum(struct.unpack(f"<{record['n']}q", data))


def test_a_request_and_an_append_have_clocks_of_their_own(tmp_path: Path) -> None:
    workload = {
        **{"phase": "decode", "seqlen_q": 1, "mask": {"causal": "bottom_right"}},
        **{"heads_q": 4, "heads_kv": 2, "head_dim": 64},
        "cache": {"kind": "contiguous", "append": 1, "append_in_call": False},
    }
    one = cell(0, ["flash"], **workload) | {"request": {"model": "small_decode_step", "layers": 1}}
    found = document([one], {"flash": "sdpa.flash"}, ["launch-0", "counters"])
    found["timing"]["clocks"] = ["host", "request"]
    assert run(found, tmp_path) == 0
    done = results(tmp_path)
    (entry,) = done["launch-0"]["entries"]
    assert entry["status"] == "PASS", entry["reason"]
    assert [record["clock"] for record in entry["samples"]] == ["append_host", "host", "request"]
    assert entry["request"]["model"] == "small_decode_step"
    assert entry["request"]["stages_ns"]["cache_append"] > 0
    assert len(entry["preparation"]["prepare_ns"]) == 2
    assert entry["conditions"]["rows"] >= 1
    kinds = {c["kind"] for c in done["launch-0"]["ceilings"]["measured"]}
    assert kinds == {"matmul", "copy", "read"}
    (counted,) = done["counters"]["entries"]
    assert counted["counters"]["bound"] == "undetermined"


@pytest.mark.slow
def test_all_phases_and_stages_give_valid_results_and_resume(tmp_path: Path) -> None:
    subjects = {"eager": "eager", "flash": "sdpa.flash"}
    cells = [cell(n, list(subjects), **phase) for n, phase in enumerate(PHASES)]
    stages = ["check", "cold", "memory", "launch-0", "launch-1"]
    found = document(cells, subjects, stages)
    assert validate("job", found) == []
    assert run(found, tmp_path) == 0
    tasks = results(tmp_path)
    assert set(tasks) == set(stages)
    for name, task in tasks.items():
        assert len(task["entries"]) == 8
        assert {(e["status"], e["reason"]) for e in task["entries"]} == {("PASS", None)}, name
        for member in task["telemetry"]:
            assert (tmp_path / "out" / member).stat().st_size > 0
        assert all(w["ready_ns"] > w["start_ns"] for w in task["workers"])
    check = {(e["cell"], e["subject"]): e for e in tasks["check"]["entries"]}
    for entry in check.values():
        assert entry["execution"]["verdict"] == "as_named"
        assert set(entry["bits"]["observed"].values()) == {"repeats"}
        assert entry["bits"]["profile"] == "portable"
        assert all(probe["equal"] for probe in entry["probes"]["set"].values())
    assert check["c000", "eager"]["inputs"] == check["c000", "flash"]["inputs"]
    assert set(check["c001", "flash"]["oracle_before"]["tensors"]) >= {"out", "dq", "dk", "dv"}
    assert "lse" in check["c000", "flash"]["oracle_before"]["tensors"]
    profiles = {w["environment"]["profile"] for w in tasks["check"]["workers"]}
    assert profiles == {"portable"}
    assert tasks["check"]["workers"][0]["environment"]["torch_cpu_capability"] == "AVX2"
    clocks = {s["clock"] for e in tasks["launch-0"]["entries"] for s in e["samples"]}
    assert clocks == {"host", "backward_host"}
    assert any(s["discards"] for e in tasks["launch-0"]["entries"] for s in e["samples"])
    assert {len([w for w in tasks["cold"]["workers"] if w["subject"] == s]) for s in subjects} == {
        4
    }
    # A second start makes what is missing and leaves what is there.
    kept = (tmp_path / "out/tasks/check.json").stat().st_mtime_ns
    (tmp_path / "out/tasks/launch-1.json").unlink()
    assert run(found, tmp_path) == 0
    assert (tmp_path / "out/tasks/check.json").stat().st_mtime_ns == kept
    assert len(results(tmp_path)["launch-1"]["entries"]) == 8


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["check", "launch-0"])
@pytest.mark.parametrize("name", list(HOSTILE))
def test_a_bad_subject_is_a_result_and_the_others_keep_theirs(
    tmp_path: Path, name: str, stage: str
) -> None:
    body, status, words = HOSTILE[name]
    (tmp_path / "bad_adapter.py").write_text(adapter("bad", body))
    subjects = {"bad": "bad", "flash": "sdpa.flash"}
    # The subject is bad in the second cell alone; sizes of the probes are others.
    cells = [
        cell(0, list(subjects), phase="prefill"),
        cell(1, list(subjects), phase="prefill", seqlen_q=25, seqlen_k=25),
        cell(2, list(subjects), phase="prefill", seqlen_q=26, seqlen_k=26),
    ]
    seconds = 20 if status == "TIMEOUT" else 60
    limits = {"cell_seconds": seconds, "total_seconds": 280, "memory_bytes": 3 << 30}
    found = document(cells, subjects, [stage], adapter="bad_adapter", limits=limits)
    assert run(found, tmp_path, modules=tmp_path) == 0
    entries = {(e["cell"], e["subject"]): e for e in results(tmp_path)[stage]["entries"]}
    assert len(entries) == 6
    bad = entries.pop(("c001", "bad"))
    assert bad["status"] == status, bad["reason"]
    assert words in bad["reason"]
    assert bad["place"]
    assert {(e["status"], e["reason"]) for e in entries.values()} == {("PASS", None)}
    restarts = [w["restarts"] for w in results(tmp_path)[stage]["workers"] if w["subject"] == "bad"]
    assert (len(restarts) == 1) == (status == "INCORRECT")


@pytest.mark.slow
def test_another_backend_under_the_name_is_a_fallback_and_not_timed(tmp_path: Path) -> None:
    (tmp_path / "masked_adapter.py").write_text(
        textwrap.dedent("""
        from attnrepro_runner.backends.sdpa import SdpaFlash, SdpaMath
        class Masked(SdpaFlash):
            name = "masked"
            kind = SdpaMath.kind
        BACKEND = Masked()
        """)
    )
    subjects = {"masked": "masked"}
    cells = [cell(0, ["masked"], phase="prefill")]
    found = document(cells, subjects, ["check", "launch-0"], adapter="masked_adapter")
    assert run(found, tmp_path, modules=tmp_path) == 0
    tasks = results(tmp_path)
    (check,) = tasks["check"]["entries"]
    assert check["status"] == "FALLBACK"
    assert check["execution"]["verdict"] == "fallback"
    assert "torch math" in check["reason"]
    (launched,) = tasks["launch-0"]["entries"]
    assert launched["status"] == "FALLBACK"
    assert "samples" not in launched
    assert tasks["launch-0"]["workers"] == []


@pytest.mark.slow
def test_what_cannot_be_honoured_is_unsupported(tmp_path: Path) -> None:
    subjects = {"flash": "sdpa.flash", "gone": "no_such.backend"}
    cells = [
        cell(0, list(subjects), phase="prefill", softcap=5.0),
        cell(1, list(subjects), phase="prefill"),
    ]
    found = document(cells, subjects, ["check", "memory"])
    assert run(found, tmp_path) == 0
    entries = {
        (e["cell"], e["subject"]): (e["status"], e["reason"])
        for e in results(tmp_path)["check"]["entries"]
    }
    assert entries["c000", "flash"] == (
        "UNSUPPORTED",
        "F.scaled_dot_product_attention has no softcap argument",
    )
    assert entries["c001", "flash"] == ("PASS", None)
    assert entries["c000", "gone"][0] == entries["c001", "gone"][0] == "UNSUPPORTED"


@pytest.mark.slow
def test_a_signal_ends_the_workers_and_leaves_finished_tasks(tmp_path: Path) -> None:
    found = document(
        [cell(n, ["flash"], **PHASES[0]) for n in range(40)],
        {"flash": "sdpa.flash"},
        ["memory", "launch-0"],
    )
    found["timing"]["warmup_seconds"] = [1, 2]
    path = tmp_path / "job.json"
    path.write_text(json.dumps(found))
    process = subprocess.Popen(
        [sys.executable, "-m", "attnrepro_runner", str(path), str(tmp_path / "out")],
        env={**os.environ, "PYTHONPATH": str(TOOLKIT)},
        stderr=subprocess.PIPE,
    )
    deadline = time.monotonic() + 200
    log = tmp_path / "out/logs/launch-0-flash.log"
    while not log.exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    time.sleep(3)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    assert children
    process.send_signal(signal.SIGTERM)
    _, error = process.communicate(timeout=30)
    assert process.returncode == coordinator.INTERRUPTED
    assert b"interrupted by SIGTERM" in error
    assert [p.name for p in (tmp_path / "out/tasks").iterdir()] == ["memory.json"]
    assert not any(Path(f"/proc/{child}").exists() for child in children)


def test_the_coordinator_needs_the_standard_library_alone() -> None:
    code = (
        "import sys, attnrepro_runner.coordinator, attnrepro_runner.nvml;"
        "import attnrepro_runner.preflight;"
        "print([m for m in ('torch', 'numpy', 'attnrepro') if m in sys.modules])"
    )
    found = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(TOOLKIT)},
        check=True,
        capture_output=True,
        text=True,
    )
    assert found.stdout == "[]\n"
