"""Jobs, adapters that misbehave, and whole runs of the coordinator in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attnrepro.schema import validate
from attnrepro_runner import coordinator

if TYPE_CHECKING:
    from collections.abc import Mapping

TOOLKIT = Path(coordinator.__file__).parents[1]


def cell(number: int, subjects: list[str], **workload: Any) -> dict[str, Any]:
    return {
        "id": f"c{number:03d}",
        "label": f"cell {number}",
        "workload": {
            "batch": 1,
            "seqlen_q": 24,
            "seqlen_k": 24,
            "heads_q": 2,
            "heads_kv": 1,
            "head_dim": 16,
            "dtype": "float32",
            **workload,
        },
        "inputs": {"seed": 2026, "distribution": "normal"},
        "request": None,
        "subjects": subjects,
    }


PHASES: list[dict[str, Any]] = [
    {"phase": "forward", "mask": {"causal": "top_left"}},
    {"phase": "forward_backward", "dtype": "bfloat16"},
    {
        "phase": "prefill",
        "mask": {"causal": "bottom_right"},
        "seqlen_q": 8,
        "cache": {"kind": "contiguous"},
    },
    {
        "phase": "decode",
        "mask": {"causal": "bottom_right"},
        "seqlen_q": 1,
        "cache": {"kind": "paged", "page_size": 8, "append": 1, "append_in_call": True},
    },
]


def document(
    cells: list[dict[str, Any]],
    subjects: Mapping[str, str],
    stages: list[str],
    *,
    adapter: str | None = None,
    **changes: Any,
) -> dict[str, Any]:
    names = list(subjects)
    return {
        "schema": "attnrepro.job/1",
        "run": "0123456789abcdef",
        "tasks": [
            {
                "id": stage,
                "stage": stage.partition("-")[0],
                "launch": int(stage.partition("-")[2]) if "-" in stage else None,
                "subjects": names,
            }
            for stage in stages
        ],
        "cells": cells,
        "subjects": [
            {
                "id": name,
                "backend": backend,
                "role": "candidate",
                "options": {},
                "adapter": adapter,
            }
            for name, backend in subjects.items()
        ],
        "unsupported": [],
        "accuracy": {},
        "bits": {"profile": "portable", "repeats": 3, "claim": "bitwise"},
        "timing": {
            "warmup_seconds": [0.01, 0.05],
            "samples": [20, 40],
            "block": 5,
            "median_ci": 0.05,
            "cell_seconds": 5,
        },
        "device": {"vendor": "cpu", "threads": 1},
        "limits": {"cell_seconds": 60, "total_seconds": 600},
        **changes,
    }


ADAPTERS = """
import ctypes, os, time
import torch
from attnrepro_runner.backends.base import MemoryOrder, Outputs
from attnrepro_runner.backends.eager import EagerBackend
from attnrepro_runner.backends.sdpa import SdpaMath

class Wrapped:
    def __init__(self, prepared, act):
        self.prepared, self.act = prepared, act
    def step(self):
        return self.act(self.prepared)
    def backward_step(self):
        return self.prepared.backward_step()
    def append_step(self):
        self.prepared.append_step()

class Toy(EagerBackend):
    name = "NAME"
    def prepare(self, workload, options, tensors):
        prepared = super().prepare(workload, options, tensors)
        self.calls = 0
        def act(p):
            self.calls += 1
            if workload.seqlens_q[0] != 25:
                return p.step()
            BODY
        return Wrapped(prepared, act)

BACKEND = Toy()
"""


def adapter(name: str, body: str) -> str:
    return ADAPTERS.replace("NAME", name).replace("BODY", body)


def run(found: dict[str, Any], folder: Path, *, modules: Path | None = None) -> int:
    folder.mkdir(exist_ok=True)
    path = folder / "job.json"
    path.write_text(json.dumps(found))
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(TOOLKIT), *([str(modules)] if modules else [])]),
    }
    return subprocess.run(
        [sys.executable, "-m", "attnrepro_runner", str(path), str(folder / "out")],
        env=environment,
        check=False,
        capture_output=True,
        timeout=280,
    ).returncode


def results(folder: Path) -> dict[str, dict[str, Any]]:
    found = {}
    for path in sorted((folder / "out/tasks").glob("*.json")):
        found[path.stem] = json.loads(path.read_text())
        assert validate("result", found[path.stem]) == []
    return found
