"""Task results as the runner writes them, made by hand for the host's tests."""

from __future__ import annotations

import json
import struct
from typing import TYPE_CHECKING, Any

from attnrepro.engines.base import ContainerSpec, EngineFacts, ExitStatus, ImageIdentity

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

DIGEST = "ab" * 32
DEVICE = {
    "kind": "cpu",
    "name": "Some CPU",
    "vendor": "Some Vendor",
    "family": 6,
    "model": 1,
    "isa": "x86_64_v3",
    "threads": 1,
}

WORKLOAD: dict[str, Any] = {
    "phase": "forward",
    "batch": 1,
    "seqlen_q": 64,
    "seqlen_k": 64,
    "heads_q": 2,
    "head_dim": 32,
    "dtype": "float32",
}


def manifest(**changes: Any) -> dict[str, Any]:
    return {
        "schema": "attnrepro.manifest/1",
        "name": "tiny",
        "subjects": [
            {"id": "fast", "backend": "sdpa.flash", "role": "candidate", "required": True},
            {"id": "slow", "backend": "eager", "role": "baseline", "required": True},
        ],
        "timing": {
            "launches": 5,
            "samples": [10, 10],
            "tails": [0.9],
            "confidence": 0.95,
            "median_ci": 0.005,
            "clocks": ["host"],
        },
        "inputs": {"expected": {}},
        **changes,
    }


def job(planned: int = 5, **changes: Any) -> dict[str, Any]:
    launches = [
        {"id": f"launch-{n}", "stage": "launch", "launch": n, "subjects": ["fast", "slow"]}
        for n in range(planned)
    ]
    return {
        "schema": "attnrepro.job/1",
        "run": "0123456789abcdef",
        "tasks": [
            {"id": "check", "stage": "check", "launch": None, "subjects": ["fast", "slow"]},
            *launches,
        ],
        "cells": [
            {
                "id": "c000",
                "label": "forward",
                "workload": WORKLOAD,
                "inputs": {"seed": 2026},
                "request": None,
                "subjects": ["fast", "slow"],
            }
        ],
        "subjects": [],
        "unsupported": [],
        "accuracy": {},
        "bits": {},
        "timing": {},
        "device": {},
        "limits": {},
        **changes,
    }


def oracle(ok: bool = True) -> dict[str, Any]:
    return {
        "reference_dtype": "float64",
        "rule": "two_reference m=2 c=4",
        "tensors": {
            "out": {
                "ok": ok,
                "worst_ratio": (0.5).hex(),
                "worst_block": [0, 0, 0],
                "max_abs": (1e-7).hex(),
                "max_rel": (1e-6).hex(),
                "rms": (1e-8).hex(),
                "max_ulps": (1.0).hex(),
                "max_abs_low": (2e-7).hex(),
                "total_max_abs": None,
                "nan": False,
            }
        },
        "guards_intact": True,
        "poison": "best_effort",
        "duration_ns": 1000,
        "seed": "2026",
        "coverage": "all",
    }


def check_entry(subject: str, **changes: Any) -> dict[str, Any]:
    operator = "aten::bmm" if subject == "slow" else "aten::_flash"
    return {
        "cell": "c000",
        "subject": subject,
        "status": "PASS",
        "reason": None,
        "place": None,
        "inputs": {"q": DIGEST, "k": DIGEST, "v": DIGEST},
        "probes": {
            "set": {
                "v": {
                    "expected": DIGEST,
                    "observed": DIGEST,
                    "equal": True,
                    "first_difference": None,
                }
            },
            "levels": [
                {
                    "name": "scale",
                    "declared": "rsqrt_head_dim",
                    "chosen": "rsqrt_head_dim",
                    "effective": (4.0).hex(),
                    "margin": (0.5).hex(),
                    "verdict": "match",
                }
            ],
            "dropout": None,
            "shape": "small",
        },
        "oracle_before": oracle(),
        "bits": {
            "profile": "portable",
            "claimed": "bitwise",
            "repeats": 10,
            "observed": {"out": "repeats", "lse": "repeats"},
            "digests": {"out": "cd" * 32, "lse": "ef" * 32},
            "batch_invariant": None,
        },
        "execution": {
            "operators": {operator: 1},
            "kernels": [
                {"name": operator, "count": 1, "total_ns": 10},
                {"name": operator, "count": 2, "total_ns": None},
            ],
            "libraries": {"torch/lib/libtorch_cpu.so": {"version": "2.13.0", "sha256": DIGEST}},
            "toolchain": {},
            "cubins": [],
            "plan": {},
            "expected": operator,
            "verdict": "as_named",
            "reason": None,
        },
        **changes,
    }


def launch_entry(subject: str, launch: int, task_id: str = "", **changes: Any) -> dict[str, Any]:
    return {
        "cell": "c000",
        "subject": subject,
        "status": "PASS",
        "reason": None,
        "place": None,
        "oracle_before": oracle(),
        "oracle_after": oracle(),
        "warmup": {"duration_ns": 5, "iterations": 3, "stationary": True, "rule": "a fake"},
        "samples": [
            {
                "clock": "host",
                "member": f"samples/{task_id or f'launch-{launch}'}/c000-{subject}-host.i64",
                "n": 12,
                "discards": [{"first": 0, "count": 2, "reason": "first after a switch"}],
                "stop": "max_samples",
                "flushed": True,
                "calls_per_sample": 1,
            }
        ],
        **changes,
    }


def task(
    name: str, stage: str, launch: int | None, entries: list[dict[str, Any]]
) -> dict[str, Any]:
    return {
        "schema": "attnrepro.result/1",
        "run": "0123456789abcdef",
        "task": name,
        "stage": stage,
        "launch": launch,
        "started_ns": 1000 + (launch if launch is not None else -1),
        "ended_ns": 2000,
        "runner": {"version": "0.1.0", "python": "3.11", "framework": "torch 2.13.0"},
        "device": DEVICE,
        "environment": {"torch": "2.13.0"},
        "workers": [],
        "telemetry": [],
        "entries": entries,
    }


def tasks(launches: int = 5) -> list[dict[str, Any]]:
    return [
        task("check", "check", None, [check_entry("fast"), check_entry("slow")]),
        *(
            task(f"launch-{n}", "launch", n, [launch_entry("fast", n), launch_entry("slow", n)])
            for n in range(launches)
        ),
    ]


def sample_bytes(member: str, usable: int = 10) -> bytes:
    """Two slow samples first, then the usable; `slow` takes twice as long as `fast`."""
    launch = int(member.split("/")[1].split("-")[1])
    base = (2000 if "slow" in member else 1000) + launch
    values = [9_000_000, 9_000_000, *(base + step for step in range(usable))]
    return struct.pack(f"<{len(values)}q", *values)


def cold_entry(subject: str) -> dict[str, Any]:
    return {
        "cell": "c000",
        "subject": subject,
        "status": "PASS",
        "reason": None,
        "place": None,
        "cold": {
            "import_ns": 2_000_000_000,
            "first_call_ns": 5_000_000,
            "second_call_ns": 2_000_000,
            "steady_call_ns": 1_000_000,
            "compile_cache": "none",
        },
    }


def memory_entry(subject: str) -> dict[str, Any]:
    return {
        "cell": "c000",
        "subject": subject,
        "status": "PASS",
        "reason": None,
        "place": None,
        "memory": {
            "resident_bytes": 1000,
            "peak_bytes": 3 << 20,
            "extra_bytes": 2000,
            "declared_order": "S",
            "declared_bytes": 4000,
            "alarm": False,
            "source": "a fake",
        },
    }


def result_of(planned: dict[str, Any], asked: dict[str, Any]) -> dict[str, Any]:
    """What the runner would write for a planned task of a job."""
    make = {
        "check": check_entry,
        "cold": cold_entry,
        "memory": memory_entry,
        "launch": lambda s: launch_entry(s, planned["launch"], planned["id"]),
    }[planned["stage"]]
    entries = []
    for cell in asked["cells"]:
        for subject in sorted(set(planned["subjects"]) & set(cell["subjects"])):
            entry = make(subject) | {"cell": cell["id"]}
            for series in entry.get("samples", []):
                series["member"] = series["member"].replace("c000", cell["id"])
                series["n"] = 2 + asked["timing"].get("samples", [10])[0]
            entries.append(entry)
    result = task(planned["id"], planned["stage"], planned["launch"], entries)
    return result | {"run": asked["run"]}


class FakeEngine:
    """Does what the runner would: writes results of the tasks that are not done."""

    def __init__(
        self,
        *,
        stop_after: int = 99,
        ending: BaseException | None = None,
        contained: bool = False,
        change: Callable[[dict[str, Any]], None] | None = None,
        **status: Any,
    ) -> None:
        self.name = "podman" if contained else "host"
        self.contained = contained
        self.stop_after = stop_after
        self.ending = ending
        self.change = change
        self.status = status
        self.specs: list[ContainerSpec] = []
        self.written: list[str] = []

    def facts(self) -> EngineFacts:
        return EngineFacts(
            name=self.name,
            version="1",
            store="none",
            runtime="none",
            cgroup_version="none",
            rootless=True,
            contained=self.contained,
        )

    def ensure_image(self, identity: ImageIdentity) -> str:
        return identity.config_digest

    def remove_image(self, identity: ImageIdentity) -> None:
        raise AssertionError

    def run(
        self, spec: ContainerSpec, *, log: Path, stop: Callable[[], bool] | None = None
    ) -> ExitStatus:
        if spec.command[0] == "/bin/sh":
            log.write_text("CapEff=0000000000000000\nNoNewPrivs=1\ninterfaces=lo\nok=yes\n")
            return self._ended(code=0)
        self.specs.append(spec)
        places = {mount.target: mount.source for mount in spec.mounts}
        asked = json.loads(places["/attnrepro/job.json"].read_bytes())
        out = places["/attnrepro/out"]
        (out / "tasks").mkdir(exist_ok=True)
        log.write_text("first line\nlast line of the runner\n")
        for planned in asked["tasks"]:
            path = out / "tasks" / f"{planned['id']}.json"
            if path.exists():
                continue
            if len(self.written) == self.stop_after:
                break
            result = result_of(planned, asked)
            if self.change is not None:
                self.change(result)
            for entry in result["entries"]:
                for series in entry.get("samples", []):
                    member = out / series["member"]
                    member.parent.mkdir(parents=True, exist_ok=True)
                    member.write_bytes(sample_bytes(series["member"], series["n"] - 2))
            path.write_text(json.dumps(result))
            self.written.append(planned["id"])
            if stop is not None:
                assert stop() is False
        if self.ending is not None:
            raise self.ending
        return self._ended(**self.status)

    def _ended(self, **status: Any) -> ExitStatus:
        usual = {
            "code": 0,
            "timed_out": False,
            "oom_killed": False,
            "stopped": False,
            "duration_ns": 1,
            "engine_facts": {"limit_memory_bytes": "not enforced"},
        }
        return ExitStatus(**(usual | status))
