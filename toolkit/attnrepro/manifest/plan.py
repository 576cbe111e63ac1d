"""From a manifest to jobs: which cells run, in which containers, in which order.

Every choice is a function of the manifest alone, so that a run that was broken off goes on where it
stopped, and a rerun does the same. Where all subjects have one image, one container runs all tasks;
else each launch is a fresh container for each image.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from attnrepro.errors import UsageError
from attnrepro.manifest import stacks
from attnrepro.manifest.capability import Capability, Device, Unsupported, decide, uncompared

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from attnrepro.jsonio import JsonObject
    from attnrepro.manifest.model import Cell, ImageRef, Manifest, Subject

_GROUP_NAMES: Final = "abcdefghijklmnop"
"""One letter an image; a manifest has at most 16 subjects."""


@dataclass(frozen=True, kw_only=True)
class UnsupportedCell:
    """A cell of a subject that is never launched."""

    cell: str
    subject: str
    reason: str
    source: str


@dataclass(frozen=True, kw_only=True)
class Judged:
    """What the releases claim of every cell."""

    unsupported: tuple[UnsupportedCell, ...]
    uncompared: Mapping[str, tuple[str, ...]]
    """Cell to backends of its subjects' stacks that claim it and are no subject."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """One task of a job."""

    id: str
    stage: str
    launch: int | None
    subjects: tuple[str, ...]
    """In the order in which they take their turns."""


@dataclass(frozen=True, kw_only=True)
class Segment:
    """Tasks that one container runs."""

    id: str
    image: ImageRef
    tasks: tuple[Task, ...]
    _document: JsonObject = field(repr=False)

    def job(self, run_id: str) -> JsonObject:
        """The job of this segment, valid against the job schema, for a run's id (16 hex digits)."""
        tasks = [
            {"id": t.id, "stage": t.stage, "launch": t.launch, "subjects": list(t.subjects)}
            for t in self.tasks
        ]
        return {"schema": "attnrepro.job/1", "run": run_id, "tasks": tasks, **self._document}


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a run will do."""

    segments: tuple[Segment, ...]
    """In the order in which they run."""
    unsupported: tuple[UnsupportedCell, ...]
    uncompared: Mapping[str, tuple[str, ...]]
    """Cell to backends of its subjects' stacks that claim it and are no subject."""


def plan(
    manifest: Manifest,
    *,
    adapters: Mapping[ImageRef, str | None] | None = None,
    capabilities: Mapping[ImageRef, Capability] | None = None,
    device: Device | None = None,
    judged: Judged | None = None,
    counters: bool = False,
) -> Plan:
    """Plan a run.

    Args:
        manifest: What is asked.
        adapters: Module of the backend adapter that an image of the user's own carries.
        capabilities: Claims by image; of an image that is not there, the stack's own are read.
        device: Where it runs; None is what the manifest names.
        judged: What `judge` said of the manifest already; None asks it now.
        counters: Whether a pass under a profiler of hardware counters is added.

    Raises:
        InvalidDocument: a stack is not known, or its claims are not valid.
        UsageError: no subject's release claims any cell.

    """
    if judged is None:
        claims = {
            ref: (capabilities or {}).get(ref) or stacks.find(ref).capability
            for ref in images_of(manifest)
        }
        judged = judge(manifest, claims, device or device_of(manifest))
    unsupported = judged.unsupported
    refused = {(item.cell, item.subject) for item in unsupported}
    runs = {
        subject.id: [
            cell
            for cell in manifest.cells
            if subject.id in cell.subjects and (cell.id, subject.id) not in refused
        ]
        for subject in manifest.subjects
    }
    if not any(runs.values()):
        first = unsupported[0]
        message = f"nothing can be run: no cell is supported; {first.subject}: {first.reason}"
        raise UsageError(message, hint="attnrepro check lists every reason")
    groups = list(images_of(manifest))
    whole = len(groups) == 1
    segments = []
    for number, ref in enumerate(groups):
        subjects = [s for s in manifest.subjects if s.image == ref and runs[s.id]]
        suffix = "" if whole else f"-{_GROUP_NAMES[number]}"
        tasks = _tasks(manifest, subjects, suffix, counters=counters)
        document = _document(manifest, ref, refused, unsupported, (adapters or {}).get(ref))
        parts = [tasks] if whole else [[t for t in tasks if t.launch is None]]
        parts += [] if whole else [[t] for t in tasks if t.launch is not None]
        segments += [
            Segment(
                id="all"
                if whole
                else part[-1].id
                if part[0].launch is not None
                else f"once{suffix}",
                image=ref,
                tasks=tuple(part),
                _document=document,
            )
            for part in parts
            if part
        ]
    return Plan(
        segments=tuple(sorted(segments, key=lambda s: _turn(manifest, s))),
        unsupported=unsupported,
        uncompared=judged.uncompared,
    )


def images_of(manifest: Manifest) -> tuple[ImageRef, ...]:
    """Images of the subjects, each once, in the order of first use."""
    return tuple(dict.fromkeys(subject.image for subject in manifest.subjects))


def device_of(manifest: Manifest) -> Device:
    """The device that the manifest names."""
    device = manifest.document["device"]
    return Device(vendor=device["vendor"], architectures=tuple(device["architectures"]))


def judge(manifest: Manifest, claims: Mapping[ImageRef, Capability], device: Device) -> Judged:
    """Which cells of which subjects no release claims; which backends each cell leaves out."""
    unsupported = []
    left_out: dict[str, tuple[str, ...]] = {}
    for cell in manifest.cells:
        subjects = [s for s in manifest.subjects if s.id in cell.subjects]
        for subject in subjects:
            decision = decide(cell, subject, claims[subject.image], device)
            if isinstance(decision, Unsupported):
                unsupported.append(
                    UnsupportedCell(
                        cell=cell.id,
                        subject=subject.id,
                        reason=decision.reason,
                        source=decision.source,
                    )
                )
        names = {
            name
            for ref in dict.fromkeys(s.image for s in subjects)
            for name in uncompared(cell, subjects, claims[ref], device)
        }
        left_out[cell.id] = tuple(sorted(names))
    return Judged(unsupported=tuple(unsupported), uncompared=left_out)


def order(seed: object, launch: int, names: Sequence[str]) -> tuple[str, ...]:
    """The order of a launch: names by the SHA-256 of "seed:launch:name", the same everywhere."""

    def key(name: str) -> str:
        return hashlib.sha256(f"{seed}:{launch}:{name}".encode()).hexdigest()

    return tuple(sorted(names, key=key))


def _tasks(
    manifest: Manifest, subjects: Sequence[Subject], suffix: str, *, counters: bool
) -> list[Task]:
    timing = manifest.document["timing"]
    everyone = tuple(s.id for s in subjects)
    timed = tuple(s.id for s in subjects if s.is_timed)
    launches = int(timing["launches"])
    once = [("check", everyone)]
    once += [("counters", timed)] if counters else []
    if launches:
        once += [("cold", timed)] if timing["cold_start"] else []
        once += [("memory", timed)] if timing["memory"] else []
    tasks = [
        Task(id=f"{stage}{suffix}", stage=stage, launch=None, subjects=names)
        for stage, names in once
        if names
    ]
    seed = timing["order_seed"]
    tasks += [
        Task(
            id=f"launch-{number:02d}{suffix}",
            stage="launch",
            launch=number,
            subjects=order(seed, number, timed),
        )
        for number in range(launches)
        if timed
    ]
    return tasks


def _document(
    manifest: Manifest,
    ref: ImageRef,
    refused: set[tuple[str, str]],
    unsupported: Sequence[UnsupportedCell],
    adapter: str | None,
) -> JsonObject:
    """A job without its run and tasks. Every cell stands in it, also one without a subject here."""
    mine = {s.id for s in manifest.subjects if s.image == ref}
    document = manifest.document
    return {
        "cells": [_cell(cell, mine, refused) for cell in manifest.cells],
        "subjects": [
            {
                "id": s.id,
                "backend": s.backend,
                "role": s.role,
                "options": dict(s.options),
                "adapter": adapter,
            }
            for s in manifest.subjects
            if s.id in mine
        ],
        "unsupported": [
            {"cell": u.cell, "subject": u.subject, "reason": u.reason, "source": u.source}
            for u in unsupported
            if u.subject in mine
        ],
        **{key: document[key] for key in ("accuracy", "bits", "timing", "device", "limits")},
    }


def _cell(cell: Cell, mine: set[str], refused: set[tuple[str, str]]) -> JsonObject:
    return {
        "id": cell.id,
        "label": cell.label,
        "workload": cell.workload,
        "inputs": cell.inputs,
        "request": cell.request,
        "subjects": [s for s in cell.subjects if s in mine and (cell.id, s) not in refused],
    }


def _turn(manifest: Manifest, segment: Segment) -> tuple[int, str]:
    """Everything that runs once first; then launch by launch, the images in a seeded order."""
    launch = segment.tasks[0].launch
    if launch is None:
        return -1, segment.id
    seed = manifest.document["timing"]["order_seed"]
    return launch, hashlib.sha256(f"{seed}:{launch}:{segment.image}".encode()).hexdigest()
