"""Whole artifacts made with a fake engine: the host's real path from manifest to signed file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from host_fakes import WORKLOAD, FakeEngine

from attnrepro import run
from attnrepro.engines.base import ImageIdentity
from attnrepro.manifest.load import load
from attnrepro.packing import UsedImage
from attnrepro.usedimages import ReadyImage

if TYPE_CHECKING:
    from collections.abc import Callable

    from attnrepro.manifest.model import ImageRef

MANIFEST: dict[str, Any] = {
    "schema": "attnrepro.manifest/1",
    "name": "tiny",
    "title": "A tiny forward",
    "image": {"stack": "cpu-torch2.13"},
    "device": {"vendor": "cpu", "threads": 1},
    "workload": WORKLOAD,
    "subjects": [
        {"id": "fast", "backend": "sdpa.flash", "role": "candidate"},
        {"id": "slow", "backend": "eager", "role": "baseline"},
    ],
    "bits": {"profile": "portable", "scope": "same_isa"},
    "timing": {"launches": 5, "samples": [10, 10], "tails": [0.9]},
}


class FakeImages:
    """One image for every stack."""

    def __init__(self, digit: str = "1") -> None:
        self.digest = "sha256:" + digit * 63 + "0"
        self.asked: list[ImageRef] = []
        self.first_difference: str | None = None

    def get(self, ref: ImageRef, progress: Callable[[str], None]) -> ReadyImage:
        self.asked.append(ref)
        return ReadyImage(
            identity=ImageIdentity(
                archive=Path("/dev/null"),
                name="localhost/attnrepro/cpu-torch2.13:r1",
                manifest_digest=self.digest,
                config_digest=self.digest,
            ),
            python="/opt/stack/bin/python3",
            used=UsedImage(
                key="cpu-torch2.13-r1",
                document={
                    "stack": "cpu-torch2.13",
                    "revision": "r1",
                    "manifest_digest": self.digest,
                    "config_digest": self.digest,
                    "tree_sha256": self.digest,
                    "base": {"kind": "debian"},
                    "builder": {"name": "podman", "version": "4.3.1"},
                    "adapter": None,
                    "size": 1000,
                    "times": {"build_ms": 5},
                },
                recipe={"Dockerfile": b"FROM scratch\n", "image.json": b"{}\n"},
                listing=b'["etc","folder","0755",0,0,0,""]\n',
                sbom=b'{"spdxVersion":"SPDX-2.3"}',
                rebuild_status="recipe included; not rebuilt for this run",
            ),
        )


def make(
    folder: Path,
    *,
    engine: FakeEngine | None = None,
    images: Any = None,
    manifest: dict[str, Any] | None = None,
    told: list[str] | None = None,
    **options: Any,
) -> run.Outcome:
    """Run the manifest and write folder/tiny.attnrepro."""
    usual = {"output": folder / "tiny.attnrepro", "runs": folder / "runs"}
    return run.run(
        load(json.dumps(manifest or MANIFEST).encode()),
        images=images or FakeImages(),
        engine=engine or FakeEngine(),
        options=run.Options(**(usual | options)),
        progress=(told if told is not None else []).append,
    )
