"""A small, complete and consistent artifact, and the means to forge others from it."""

from __future__ import annotations

import copy
import hashlib
import json
import lzma
import struct
from typing import TYPE_CHECKING, Any

from attnrepro import jsonio
from attnrepro import repeatable as repeatable_part
from attnrepro.artifact import bundle, container, sign
from attnrepro.artifact.budget import Budget
from attnrepro.artifact.content import Content
from attnrepro.artifact.keys import Signer, generate
from attnrepro.artifact.public_key import Algorithm, checked
from attnrepro.compare import published, statistics
from attnrepro.manifest import load

if TYPE_CHECKING:
    from collections.abc import Mapping

RUNNER = b"the runner wheel, standing in"
CELL = "c000"


def signer(seed: int = 1) -> Signer:
    """An Ed25519 signer from a seed, the same in every test run."""
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    private = Ed25519PrivateKey.from_private_bytes(hashlib.sha256(bytes([seed])).digest())
    return Signer(public=checked(private.public_key()), private=private)


def p256_signer() -> Signer:
    return generate(Algorithm.P256)


def manifest(**changes: Any) -> dict[str, Any]:
    """The canonical manifest: every default explicit."""
    loaded = load(jsonio.canonical({**written(), **changes}))
    return copy.deepcopy(loaded.document)


def written() -> dict[str, Any]:
    """The manifest as a person writes it."""
    return {
        "schema": "attnrepro.manifest/1",
        "name": "example",
        "title": "An example",
        "image": {"stack": "cpu-torch2.13", "revision": "r1", "digest": None},
        "workload": {
            "phase": "forward",
            "batch": 1,
            "seqlen_q": 64,
            "seqlen_k": 64,
            "heads_q": 2,
            "head_dim": 64,
            "dtype": "float32",
        },
        "subjects": [
            {"id": "flash", "backend": "sdpa.flash", "role": "candidate"},
            {"id": "eager", "backend": "eager", "role": "baseline"},
        ],
        "device": {"vendor": "cpu", "threads": 2},
        "timing": {"launches": 5, "clocks": ["host"], "tails": [0.9], "confidence": 0.95},
    }


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _error() -> dict[str, Any]:
    half = (0.5).hex()
    numbers = ("worst_ratio", "max_abs", "max_rel", "rms", "max_ulps", "max_abs_low")
    return {
        "ok": True,
        "worst_block": [0, 0, 0],
        "total_max_abs": None,
        "nan": False,
        **dict.fromkeys(numbers, half),
    }


def _probes() -> dict[str, Any]:
    digest = _digest("probe")
    return {
        "set": {
            "v": {"expected": digest, "observed": digest, "equal": True, "first_difference": None}
        },
        "levels": [
            {
                "name": "scale",
                "declared": "rsqrt_head_dim",
                "chosen": "rsqrt_head_dim",
                "effective": (4.0).hex(),
                "margin": (2.0).hex(),
                "verdict": "match",
            }
        ],
        "dropout": None,
        "shape": "1x64x2x64",
    }


def _execution(kernel: str) -> dict[str, Any]:
    return {
        "operators": {kernel: 1},
        "kernels": [],
        "libraries": {"libtorch_cpu.so": {"version": None, "sha256": _digest("library")}},
        "toolchain": {},
        "cubins": [],
        "plan": {},
        "expected": kernel,
        "verdict": "as_named",
        "reason": None,
    }


def sample_values(subject: str, launch: int) -> list[int]:
    """40 samples, the first two of them to be discarded."""
    base = 1_000_000 if subject == "flash" else 1_300_000
    return [base + 997 * launch + 31 * ((index * 17) % 40) for index in range(40)]


def _subject(name: str, backend: str, role: str, count: int = 5) -> dict[str, Any]:
    launches = []
    for launch in range(count):
        values = sample_values(name, launch)
        entry = {
            "member": sample_member(name, launch),
            "discards": [{"first": 0, "count": 2, "reason": "switch"}],
            "stop": "interval reached",
            "flushed": True,
            "calls_per_sample": 1,
        }
        launches.append(
            published.launch_timing(entry, values, launch=launch, tails=[0.9], confidence=0.95)
        )
    timing = {"host": published.clock_timing(launches, tails=[0.9], confidence=0.95)}
    oracle = {
        "reference_dtype": "float64",
        "rule": "two_reference",
        "tensors": {"out": _error()},
        "guards_intact": True,
        "poison": "full",
        "duration_ns": 5,
        "seed": "7",
    }
    return {
        "subject": name,
        "backend": backend,
        "role": role,
        "required": True,
        "status": "PASS",
        "reason": None,
        "place": None,
        "probes": _probes(),
        "oracle": [{"task": "t-1", "when": when, "oracle": oracle} for when in ("before", "after")],
        "bits": {
            "profile": "portable",
            "claimed": "bitwise",
            "repeats": 10,
            "observed": {"out": "repeats"},
            "digests": {"out": _digest(name)},
            "batch_invariant": None,
        },
        "execution": _execution(f"aten::{name}"),
        "timing": timing,
        "comparisons": [],
    }


def sample_member(subject: str, launch: int) -> str:
    return f"samples/{CELL}-{subject}-host-{launch}.i64"


def observations() -> dict[str, Any]:
    flash = _subject("flash", "sdpa.flash", "candidate")
    eager = _subject("eager", "eager", "baseline")
    medians = [published.launch_medians(item["timing"]["host"]) for item in (flash, eager)]
    comparison = statistics.compare(*medians, confidence=0.95)
    flash["comparisons"].append(comparison.document(clock="host", baseline="eager"))
    return {
        "schema": "attnrepro.observations/1",
        "run": {
            "id": "run-1",
            "started_utc": "2026-01-02T03:04:05Z",
            "duration_ns": 9,
            "tool": "0.1.0",
            "resumed": False,
            "timing": {},
        },
        "containment": {"engine": "podman", "version": "4.3.1", "contained": True, "facts": {}},
        "device": {"vendor": "cpu"},
        "environment": {},
        "tasks": [],
        "cells": [
            {
                "id": CELL,
                "label": "forward",
                "phase": "forward",
                "uncompared": [],
                "subjects": [flash, eager],
            }
        ],
        "summary": {"passed": 2, "failed": 0, "unsupported": 0},
    }


def repeatable(
    seen: Mapping[str, Any] | None = None, asked: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    cells = load(jsonio.canonical(dict(asked or manifest()))).cells
    planned = [{"id": cell.id, "workload": cell.workload} for cell in cells]
    built = repeatable_part.build(planned, (seen or observations())["cells"], {})
    built["inputs"] = {CELL: {"q": _digest("q")}}
    return built


def files() -> dict[str, bytes]:
    samples = {
        sample_member(name, launch): struct.pack("<40q", *sample_values(name, launch))
        for name in ("flash", "eager")
        for launch in range(5)
    }
    return {
        **samples,
        "logs/flash-0.txt": b"nothing to report\n",
        "recipe/Dockerfile": b"FROM scratch\n",
        "recipe/attnrepro_runner-0.1.0-py3-none-any.whl": RUNNER,
        "sbom.spdx.json": b'{"spdxVersion": "SPDX-2.3"}',
    }


def content(**changes: Any) -> Content:
    """The content; `changes` replace `manifest` (a dict), `repeatable`, `observations`, `files`."""
    seen = changes.get("observations", observations())
    return Content(
        manifest=jsonio.canonical(changes.get("manifest", manifest())),
        repeatable=changes.get("repeatable", repeatable()),
        observations=seen,
        files=changes.get("files", files()),
    )


def predicate() -> dict[str, Any]:
    digest = "sha256:" + _digest("image")
    return {
        "images": [
            {
                "key": "default",
                "stack": "cpu-torch2.13",
                "revision": "r1",
                "manifest_digest": digest,
                "config_digest": digest,
                "tree_sha256": _digest("tree"),
                "base_kind": "debian-rootfs",
                "builder": "buildkit 0.13.1",
                "rebuild_status": "rebuilt once",
            }
        ],
        "runner": {"version": "0.1.0", "sha256": hashlib.sha256(RUNNER).hexdigest()},
        "invocation": ["attnrepro", "run", "manifest.json"],
        "device_class": {"vendor": "cpu", "model": "A CPU", "threads": 2},
        "containment": {"engine": "podman", "contained": True, "options": ["--network", "none"]},
        "redactions": ["home folder"],
    }


def artifact(key: Signer | None = None, **changes: Any) -> bytes:
    return sign.make_artifact(content(**changes), predicate=predicate(), signer=key or signer())


def small_artifact() -> bytes:
    """One subject and one launch: small enough to flip each of its bits."""
    seen = observations()
    cell = seen["cells"][0]
    cell["subjects"] = [_subject("flash", "sdpa.flash", "candidate", count=1)]
    seen["summary"]["passed"] = 1
    asked = manifest(subjects=written()["subjects"][:1])
    kept = {sample_member("flash", 0), "recipe/attnrepro_runner-0.1.0-py3-none-any.whl"}
    few = {name: data for name, data in files().items() if name in kept}
    same = repeatable(seen, asked)
    return artifact(manifest=asked, observations=seen, repeatable=same, files=few)


def verdicts() -> dict[str, Any]:
    good = {"result": "yes", "required": True, "reason": "equal", "first_difference": None}
    names = (
        "authentic",
        "image_identical",
        "kernels_identical",
        "outputs_identical",
        "performance_consistent",
    )
    return {name: dict(good) for name in names}


def rerun(original: sign.Original, key: Signer | None = None, **changes: Any) -> bytes:
    return sign.make_rerun(
        content(),
        predicate=predicate(),
        original=original,
        verdicts={**verdicts(), **changes},
        signer=key or signer(2),
    )


def outer(data: bytes) -> dict[str, bytes]:
    """Members of an artifact, as they stand in the file."""
    return container.read(data, budget=Budget())


def content_zip(data: bytes) -> bytes:
    """The content.zip of an artifact, as it was signed."""
    return lzma.decompress(outer(data)["content.zip.xz"])


def members(data: bytes) -> dict[str, bytes]:
    """Members of an artifact's content."""
    return container.read(content_zip(data), budget=Budget())


def envelope(data: bytes) -> dict[str, Any]:
    """The parsed bundle of an artifact."""
    parsed = json.loads(outer(data)["bundle.sigstore.json"])
    assert isinstance(parsed, dict)
    return parsed


def payload(data: bytes) -> dict[str, Any]:
    """The parsed statement of an artifact."""
    parsed = json.loads(bundle.parse(outer(data)["bundle.sigstore.json"]).payload)
    assert isinstance(parsed, dict)
    return copy.deepcopy(parsed)


def with_bundle(data: bytes, new: bytes) -> bytes:
    """The artifact with another bundle in it."""
    return container.write({**outer(data), "bundle.sigstore.json": new})


def with_stream(data: bytes, new: bytes) -> bytes:
    """The artifact with these bytes where the stream with its content stands."""
    return container.write({**outer(data), "content.zip.xz": new})


def with_content(data: bytes, new: bytes) -> bytes:
    """The artifact with another content.zip in it."""
    return with_stream(data, lzma.compress(new, preset=0))


def resigned(data: bytes, new_payload: bytes, key: Signer | None = None) -> bytes:
    """The artifact with another payload, validly signed."""
    return sign.sign_payload(new_payload, content_zip(data), key or signer())
