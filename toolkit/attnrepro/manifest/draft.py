"""Writing a first manifest from a few answers."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from attnrepro.errors import UsageError
from attnrepro.manifest.load import image, load

if TYPE_CHECKING:
    from collections.abc import Sequence

    from attnrepro.jsonio import JsonObject

_CACHED: Final = "decode"


@dataclass(frozen=True, kw_only=True)
class Answers:
    """What is asked for. Lists of lengths become an axis of the sweep."""

    name: str = "benchmark"
    stack: str = "cpu-torch2.13"
    vendor: str = "cpu"
    threads: int = 1
    phase: str = "prefill"
    batch: int = 1
    seqlens_q: Sequence[int] = (256,)
    seqlens_k: Sequence[int] = (256,)
    heads_q: int = 8
    heads_kv: int | None = None
    head_dim: int = 64
    dtype: str = "bfloat16"
    causal: str = "none"
    subjects: Sequence[str] = field(default_factory=lambda: ("sdpa.flash",))
    """BACKEND or ID=BACKEND."""
    baselines: Sequence[str] = field(default_factory=lambda: ("eager",))
    pull_request: tuple[str, str] | None = None
    """Base and head stacks, each NAME or NAME@REVISION, of one kernel."""


def document(answers: Answers) -> JsonObject:
    """A manifest of these answers, checked.

    Raises:
        InvalidDocument: they make no valid manifest; every problem with its pointer.
        UsageError: a stack or subject is misspelt.

    """
    device: JsonObject = {"vendor": answers.vendor}
    if answers.vendor == "cpu":
        device["threads"] = answers.threads
    draft: JsonObject = {
        "schema": "attnrepro.manifest/1",
        "name": answers.name,
        "image": image(answers.pull_request[1] if answers.pull_request else answers.stack),
        "device": device,
        "workload": _workload(answers),
    }
    lengths = {
        "/workload/seqlen_q": list(answers.seqlens_q),
        "/workload/seqlen_k": list(answers.seqlens_k),
    }
    if len(answers.seqlens_q) > 1 and answers.seqlens_q == answers.seqlens_k:
        # Equal lists mean pairs of equal lengths, not their product.
        draft["variants"] = [
            {"id": f"s{length}", "set": dict.fromkeys(lengths, length)}
            for length in answers.seqlens_q
        ]
    elif sweep := {pointer: values for pointer, values in lengths.items() if len(values) > 1}:
        draft["sweep"] = sweep
    draft["subjects"] = _subjects(answers)
    if answers.vendor == "cpu":
        draft["bits"] = {"profile": "portable", "scope": "same_isa"}
    else:
        draft["timing"] = {"clocks": ["kernel", "op"]}
    load(text(draft).encode())
    return draft


def text(draft: JsonObject) -> str:
    """The file's text: short values on one line, so that people can read it."""
    parts = []
    for key, value in draft.items():
        if key in ("subjects", "variants"):
            rows = ",\n    ".join(json.dumps(item) for item in value)
            parts.append(f'  "{key}": [\n    {rows}\n  ]')
        else:
            parts.append(f"  {json.dumps(key)}: {json.dumps(value)}")
    return "{\n" + ",\n".join(parts) + "\n}\n"


def _workload(answers: Answers) -> JsonObject:
    workload: dict[str, Any] = {
        "phase": answers.phase,
        "batch": answers.batch,
        "seqlen_q": answers.seqlens_q[0],
        "seqlen_k": answers.seqlens_k[0],
        "heads_q": answers.heads_q,
    }
    if answers.heads_kv is not None:
        workload["heads_kv"] = answers.heads_kv
    workload |= {"head_dim": answers.head_dim, "dtype": answers.dtype}
    if answers.causal != "none":
        workload["mask"] = {"causal": answers.causal}
    chunk = answers.phase == "prefill" and tuple(answers.seqlens_q) != tuple(answers.seqlens_k)
    if answers.phase == _CACHED or chunk:
        workload["cache"] = {"kind": "contiguous"}
    return workload


def _subjects(answers: Answers) -> list[JsonObject]:
    if answers.pull_request is None:
        return [
            *(_subject(word, "candidate") for word in answers.subjects),
            *(_subject(word, "baseline") for word in answers.baselines),
        ]
    base, head = answers.pull_request
    if len(answers.subjects) != 1:
        message = "a pull request is about one kernel"
        raise UsageError(message, hint="name its backend once with --subject")
    backend = answers.subjects[0].rpartition("=")[2]
    return [
        {"id": "head", "backend": backend, "role": "candidate", "image": image(head)},
        {"id": "base", "backend": backend, "role": "baseline", "image": image(base)},
    ]


def _subject(word: str, role: str) -> JsonObject:
    name, _, backend = word.rpartition("=")
    return {"id": name or backend.replace("_", "-"), "backend": backend, "role": role}
