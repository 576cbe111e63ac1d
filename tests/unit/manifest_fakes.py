"""Small manifests for tests."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from attnrepro.errors import InvalidDocument
from attnrepro.manifest import load
from attnrepro.manifest.model import Cell, Subject
from attnrepro.manifest.model import ImageRef as Ref

if TYPE_CHECKING:
    from attnrepro.errors import Problem
    from attnrepro.manifest import Manifest


def document(**changes: Any) -> dict[str, Any]:
    """A valid manifest; `workload` and other objects are merged, None takes a field out."""
    result: dict[str, Any] = {
        "schema": "attnrepro.manifest/1",
        "name": "small",
        "image": {"stack": "cpu-torch2.13"},
        "device": {"vendor": "cpu", "threads": 1},
        "workload": {
            "phase": "prefill",
            "batch": 2,
            "seqlen_q": 16,
            "seqlen_k": 16,
            "heads_q": 4,
            "heads_kv": 2,
            "head_dim": 64,
            "dtype": "bfloat16",
        },
        "subjects": [
            {"id": "flash", "backend": "sdpa.flash"},
            {"id": "eager", "backend": "eager", "role": "baseline"},
        ],
    }
    for key, value in changes.items():
        if isinstance(value, dict) and isinstance(result.get(key), dict):
            result[key] = {k: v for k, v in {**result[key], **value}.items() if v is not ...}
        else:
            result[key] = value
    return result


def decode(**workload: Any) -> dict[str, Any]:
    """A valid manifest of one decode step."""
    return document(
        workload={
            "phase": "decode",
            "seqlen_q": 1,
            "seqlen_k": 64,
            "cache": {"kind": "contiguous"},
            "mask": {"causal": "bottom_right"},
            **workload,
        }
    )


def loaded(value: dict[str, Any]) -> Manifest:
    return load(json.dumps(value).encode())


def refused(value: dict[str, Any]) -> dict[str, Problem]:
    """Problems of a manifest by their pointer."""
    with pytest.raises(InvalidDocument) as caught:
        loaded(value)
    assert caught.value.exit_code == 2
    problems = caught.value.problems
    assert problems
    assert all(p.found and p.allowed and p.fix for p in problems)
    return {p.pointer: p for p in problems}


def cell(**workload: Any) -> Cell:
    """One cell of a valid manifest with these workload fields."""
    return loaded(document(workload=workload)).cells[0]


def subject(backend: str, **options: Any) -> Subject:
    return Subject(
        id="a",
        backend=backend,
        role="candidate",
        options=options,
        image=Ref(stack="s", revision="r1", digest=None),
        required=True,
    )
