"""Task results as the runner writes them, made by hand for the host's tests."""

from __future__ import annotations

import struct
from typing import Any

DIGEST = "ab" * 32
DEVICE = {"kind": "cpu", "name": "Some CPU"}

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
        "timing": {"launches": 5, "tails": [0.9], "confidence": 0.95, "median_ci": 0.005},
        "inputs": {"expected": {}},
        **changes,
    }


def job(**changes: Any) -> dict[str, Any]:
    launches = [
        {"id": f"launch-{n}", "stage": "launch", "launch": n, "subjects": ["fast", "slow"]}
        for n in range(5)
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
            "observed": {"out": "repeats", "lse": "differs"},
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


def launch_entry(subject: str, launch: int, **changes: Any) -> dict[str, Any]:
    return {
        "cell": "c000",
        "subject": subject,
        "status": "PASS",
        "reason": None,
        "place": None,
        "oracle_before": oracle(),
        "oracle_after": oracle(),
        "samples": [
            {
                "clock": "host",
                "member": f"samples/launch-{launch}/c000-{subject}-host.i64",
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


def sample_bytes(member: str) -> bytes:
    """Twelve samples: two slow ones first, then ten; `slow` takes twice as long as `fast`."""
    launch = int(member.split("/")[1].removeprefix("launch-"))
    base = (2000 if "slow" in member else 1000) + launch
    values = [9_000_000, 9_000_000, *(base + step for step in range(10))]
    return struct.pack("<12q", *values)
