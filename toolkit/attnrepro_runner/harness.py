"""What the harness itself costs: a job of identical code against itself, run as any other.

From its results: how long a worker takes to start, how long the oracle takes, and what is left of
a cell beyond the oracle and the measured calls. Its samples are those of an A/A test. The standard
library alone.
"""

from __future__ import annotations

import json
import struct
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from attnrepro_runner import interleave

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

LENGTHS: Final = {"cpu": (128, 256), "nvidia": (1024, 4096), "amd": (1024, 4096)}
ORDER_SEED: Final = 0
_ORACLES: Final = ("oracle_before", "oracle_after")


def job(vendor: str, launches: int, seconds: int) -> dict[str, Any]:
    """Return a job of two subjects with one backend, two cells, and so many launches."""
    dtype = "float32" if vendor == "cpu" else "bfloat16"
    subjects = ["a", "b"]
    tasks = [
        {
            "id": f"launch-{n:02d}",
            "stage": "launch",
            "launch": n,
            "subjects": subjects[:: -1 if n % 2 else 1],
        }
        for n in range(launches)
    ]
    return {
        "schema": "attnrepro.job/1",
        "run": "0" * 16,
        "tasks": tasks,
        "cells": [
            {
                "id": f"c{n:03d}",
                "label": f"seqlen={length}",
                "workload": {
                    "phase": "prefill",
                    "batch": 1,
                    "seqlen_q": length,
                    "seqlen_k": length,
                    "heads_q": 4 if vendor == "cpu" else 16,
                    "head_dim": 64 if vendor == "cpu" else 128,
                    "dtype": dtype,
                    "mask": {"causal": "top_left"},
                },
                "inputs": {"seed": 2026, "distribution": "normal"},
                "request": None,
                "subjects": subjects,
            }
            for n, length in enumerate(LENGTHS[vendor])
        ],
        "subjects": [
            {"id": s, "backend": "sdpa.flash", "role": role, "options": {}, "adapter": None}
            for s, role in zip(subjects, ("candidate", "baseline"), strict=True)
        ],
        "unsupported": [],
        "accuracy": {},
        "bits": {"profile": "native", "repeats": 2, "claim": "none"},
        "timing": {
            "clocks": ["host"] if vendor == "cpu" else ["op"],
            "samples": [60, 60],
            "block": 10,
            "warmup_seconds": [0.05, 0.5],
            "cell_seconds": 4,
            "order_seed": ORDER_SEED,
        },
        "device": {"vendor": vendor, "threads": 1},
        "limits": {"cell_seconds": 60, "total_seconds": seconds},
    }


def measure(vendor: str, *, launches: int, seconds: int, samples: Path | None) -> dict[str, Any]:
    """Run the job and read its costs, in ns.

    Args:
        vendor: of the device.
        launches: of the job.
        seconds: limit of the job; what is not done then has no figures.
        samples: file that the samples are kept in, with the device's name.

    """
    with tempfile.TemporaryDirectory(prefix="attnrepro-") as name:
        folder = Path(name)
        (folder / "job.json").write_text(json.dumps(job(vendor, launches, seconds)))
        command = [sys.executable, "-m", "attnrepro_runner"]
        done = subprocess.run(
            [*command, str(folder / "job.json"), str(folder / "out")],
            capture_output=True,
            text=True,
            check=False,
        )
        results = [json.loads(p.read_text()) for p in sorted((folder / "out/tasks").glob("*.json"))]
        series = list(_series(results, folder / "out"))
    if samples is not None:
        device = results[0]["device"]["name"] if results else "unknown"
        kept = {"schema": "attnrepro.aa/1", "device": device, "series": series}
        samples.write_text(json.dumps(kept))
    return costs(results) | {"exit_status": done.returncode}


def costs(results: list[dict[str, Any]]) -> dict[str, Any]:
    """Return what the tasks of a job cost beyond what they measured."""
    found: dict[str, Any] = {
        "failed": [
            f"{task['task']} {e['cell']} {e['subject']}: {e['status']}: {e['reason']}"[:200]
            for task in results
            for e in task["entries"]
            if e["status"] not in ("PASS", "NONDETERMINISTIC")
        ],
        "worker_start_ns": sorted(
            w["ready_ns"] - w["start_ns"] for task in results for w in task["workers"]
        ),
    }
    first: list[int] = []
    later: list[int] = []
    oracles: list[int] = []
    for task in results:
        seen: set[str] = set()
        cells = sorted({entry["cell"] for entry in task["entries"]})
        order = interleave.shuffled(cells, f"{ORDER_SEED}/{task['task']}")
        # The first cell of a process pays for what it uses first.
        for entry in sorted(task["entries"], key=lambda e: order.index(e["cell"])):
            if "handling_ns" not in entry or "warmup" not in entry:
                continue
            parts = [entry[p]["duration_ns"] for p in _ORACLES if p in entry]
            oracles += parts
            beyond = entry["handling_ns"] - sum(parts) - entry["warmup"]["duration_ns"]
            (later if entry["subject"] in seen else first).append(beyond)
            seen.add(entry["subject"])
    return found | {"oracle_ns": oracles, "first_cell_ns": first, "later_cell_ns": later}


def table(found: Mapping[str, Any]) -> str:
    """Return the costs as text: medians, and the largest."""
    names = {
        "worker_start_ns": "a worker's start",
        "oracle_ns": "oracle, each time",
        "first_cell_ns": "first cell of a process, beyond oracle and calls",
        "later_cell_ns": "any other cell, beyond oracle and calls",
    }
    lines = [""]
    for name, words in names.items():
        values = sorted(found[name])
        if values:
            middle = values[(len(values) - 1) // 2]
            lines.append(
                f"{words}: median {middle / 1e9:.2f} s, largest {values[-1] / 1e9:.2f} s "
                f"(of {len(values)})"
            )
    return "\n".join([*lines, *found["failed"]])


def _series(results: list[dict[str, Any]], folder: Path) -> Iterator[dict[str, Any]]:
    for task in results:
        for entry in task["entries"]:
            for record in entry.get("samples", ()):
                data = (folder / record["member"]).read_bytes()
                yield {
                    "task": task["task"],
                    "launch": task["launch"],
                    "cell": entry["cell"],
                    "subject": entry["subject"],
                    "clock": record["clock"],
                    "discards": record["discards"],
                    "stop": record["stop"],
                    "flushed": record["flushed"],
                    "samples": list(struct.unpack(f"<{record['n']}q", data)),
                }
