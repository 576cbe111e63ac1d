"""Foreign manifests that overreach: each is refused with the pointer and the reason."""

from __future__ import annotations

from typing import Any

import pytest
from manifest_fakes import document, refused


@pytest.mark.parametrize(
    ("change", "pointer", "reason"),
    [
        ({"image": "nvidia/cuda:12.8.1-devel"}, "/image", "never taken by name and tag"),
        (
            {"image": {"stack": "pytorch/pytorch:latest"}},
            "/image/stack",
            "never taken by name and tag",
        ),
        ({"image": {"tag": "latest"}}, "/image/tag", "pinned stacks"),
        ({"image": {"digest": "sha256:" + "A" * 64}}, "/image/digest", "64 hex digits"),
        ({"image": {"digest": "sha256:" + "0" * 64}}, "/image/digest", "real digest|copy it"),
        ({"image": {"stack": "--privileged"}}, "/image/stack", "never taken"),
        ({"name": "--output=/etc"}, "/name", "allowed"),
        ({"title": "-rf /"}, "/title", "allowed"),
        ({"title": "\x1b[31mPASS"}, "/title", "allowed"),
        ({"title": "\u202egnp.exe"}, "/title", "allowed"),
        ({"description": "a\x07b"}, "/description", "allowed"),
        (
            {"mounts": [{"source": "/", "target": "/host"}]},
            "/mounts",
            "never how a container is run",
        ),
        ({"volumes": ["/:/host"]}, "/volumes", "never how a container is run"),
        ({"privileged": True}, "/privileged", "never how a container is run"),
        ({"device": {"devices": ["/dev/mem"]}}, "/device/devices", "never how a container is run"),
        ({"env": {"LD_PRELOAD": "/tmp/x.so"}}, "/env", "never how a container is run"),
        ({"environment": {"PYTHONPATH": "/tmp"}}, "/environment", "never how a container is run"),
        ({"network": "host"}, "/network", "never how a container is run"),
        (
            {"image": {"dockerfile": "# syntax=evil/frontend\nFROM x"}},
            "/image/dockerfile",
            "pinned stacks",
        ),
        ({"image": {"add": "http://example.invalid/x"}}, "/image/add", "pinned stacks"),
        ({"output": "../../etc/cron.d/x"}, "/output", "results go where"),
        ({"name": "../x"}, "/name", "allowed"),
        ({"name": "a/b"}, "/name", "allowed"),
        ({"inputs": {"file": "x.pkl"}}, "/inputs/file", "come from the generator"),
        ({"inputs": {"pickle": "gASV"}}, "/inputs/pickle", "come from the generator"),
        ({"inputs": {"generator": "pickle:x"}}, "/inputs/generator", "allowed|choose"),
        ({"timing": {"launches": 10**12}}, "/timing/launches", "limits"),
        ({"bits": {"repeats": 10**12}}, "/bits/repeats", "limits"),
        ({"timing": {"samples": [2, 10**12]}}, "/timing/samples/1", "limits"),
        ({"timing": {"cell_seconds": 1e300}}, "/timing/cell_seconds", "limits"),
        ({"limits": {"total_seconds": 1e12}}, "/limits/total_seconds", "limits"),
        ({"checks": False}, "/checks", "always run"),
        ({"accuracy": {"skip_oracle": True}}, "/accuracy/skip_oracle", "always run"),
        ({"accuracy": {"rule": "none"}}, "/accuracy/rule", "allowed|choose|write"),
        ({"accuracy": {"output": {"multiplier": 1e6}}}, "/accuracy/output/multiplier", "limits"),
        ({"accuracy": {"ulps": {"bfloat16": 10**6}}}, "/accuracy/ulps/bfloat16", "limits"),
        ({"accuracy": {"block": 10**6}}, "/accuracy/block", "limits"),
        ({"bits": {"repeats": 0}}, "/bits/repeats", "limits"),
        (
            {"subjects": [{"id": "a", "backend": "os.system('x')"}]},
            "/subjects/0/backend",
            "allowed",
        ),
        (
            {"subjects": [{"id": "a", "backend": "eager", "options": {"env": {}}}]},
            "/subjects/0/options/env",
            "never how",
        ),
        (
            {"subjects": [{"id": "a", "backend": "eager", "image": {"stack": "x:1"}}]},
            "/subjects/0/image/stack",
            "never taken",
        ),
        ({"subjects": [{"id": "a\n", "backend": "eager"}]}, "/subjects/0/id", "allowed"),
        ({"workload": {"batch": 2**53 - 1}}, "/workload/batch", "limits"),
        ({"sweep": {"/limits/total_seconds": [1]}}, "/sweep/~1limits~1total_seconds", "rename"),
        ({"sweep": {"/workload/../device": [1]}}, "/sweep/~1workload~1..~1device", "rename"),
        (
            {"variants": [{"id": "a", "set": {"/subjects/0/backend": "x"}}]},
            "/variants/0/set/~1subjects~10~1backend",
            "rename",
        ),
    ],
)
def test_refused_with_pointer_and_reason(change: dict[str, Any], pointer: str, reason: str) -> None:
    problem = refused(document(**change))[pointer]
    assert any(word in f"{problem.allowed} {problem.fix}" for word in reason.split("|")), problem


def test_every_word_of_a_problem_is_on_one_line() -> None:
    found = refused(document(title="a\nb\x1b[0m", **{"x\x1b[2Jy": 1}))
    assert all("\n" not in p.line() for p in found.values())
