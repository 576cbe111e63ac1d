"""Checks of the manifest as a whole: subjects, device, bits, timing, inputs, images."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final

from attnrepro.errors import Problem
from attnrepro.manifest.model import Note
from attnrepro.schema_words import did_you_mean, escape
from attnrepro_runner.orderstats import samples_needed

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from attnrepro.jsonio import JsonObject
    from attnrepro.manifest.model import Cell

_REPEATED: Final = re.compile(r"^sha256:(.)\1{63}$")
_LARGEST_SEED: Final = 2**64 - 1
_FEWEST_LAUNCHES: Final = 4
_CPU_CLOCKS: Final = frozenset({"host", "request"})
_RULE: Final = {"output": 2, "gradients": 3, "lse": 2}
_ULPS: Final = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 2}


def check(document: JsonObject) -> list[Problem]:
    """Problems of an explicit manifest that no single cell shows."""
    return [
        *_names(document),
        *_device(document),
        *_timing(document),
        *_digests(document),
        *_seeds(document),
    ]


def check_expected(document: JsonObject, cells: Sequence[Cell]) -> list[Problem]:
    """Expected digests of cells that are not there."""
    labels = [cell.label for cell in cells]
    problems = []
    for label in document["inputs"]["expected"]:
        if label not in labels:
            meant = did_you_mean(label, labels)
            problems.append(
                Problem(
                    pointer=f"/inputs/expected/{escape(label)}",
                    found="digests of a cell that is not there",
                    allowed="labels of cells: " + ", ".join(labels[:8]),
                    fix=f'did you mean "{meant}"?' if meant else "take it out",
                )
            )
    return problems


def notes(document: JsonObject, cells: Sequence[Cell]) -> tuple[Note, ...]:
    """What the author of a valid manifest should know."""
    return tuple(
        Note(pointer=pointer, text=text)
        for pointer, text in [
            *_accuracy_notes(document),
            *_timing_notes(document),
            *_subject_notes(document),
            *_cell_notes(cells),
        ]
    )


def _names(document: JsonObject) -> Iterator[Problem]:
    for kind in ("subjects", "variants"):
        seen: set[str] = set()
        for index, item in enumerate(document[kind]):
            if item["id"] in seen:
                yield Problem(
                    pointer=f"/{kind}/{index}/id",
                    found=f'"{item["id"]}" twice',
                    allowed="each id once",
                    fix="rename one of the two",
                )
            seen.add(item["id"])
    known = [subject["id"] for subject in document["subjects"]]
    for index, variant in enumerate(document["variants"]):
        for place, name in enumerate(variant["subjects"] or ()):
            if name not in known:
                meant = did_you_mean(name, known)
                yield Problem(
                    pointer=f"/variants/{index}/subjects/{place}",
                    found=f'"{name}"',
                    allowed="an id of a subject: " + ", ".join(known),
                    fix=f'did you mean "{meant}"?' if meant else "name a subject, or take it out",
                )


def _device(document: JsonObject) -> Iterator[Problem]:
    device, clocks = document["device"], document["device"]["clocks"]
    on_cpu = device["vendor"] == "cpu"
    if on_cpu and device["threads"] is None and document["bits"]["claim"] != "none":
        yield Problem(
            pointer="/device/threads",
            found="null with a claim of equal bits on a CPU",
            allowed="the number of threads: bits depend on it",
            fix='set threads (1 runs anywhere), or bits.claim to "none"',
        )
    if on_cpu and device["count"] != 1:
        yield Problem(
            pointer="/device/count",
            found=str(device["count"]),
            allowed="1 for a CPU",
            fix="leave it out",
        )
    if on_cpu and clocks["policy"] != "observe":
        yield Problem(
            pointer="/device/clocks/policy",
            found=f'"{clocks["policy"]}" on a CPU',
            allowed='"observe": a CPU\'s clock is not set from here',
            fix="leave it out",
        )
    if (clocks["policy"] == "observe") != (clocks["sm_mhz"] is None):
        yield Problem(
            pointer="/device/clocks/sm_mhz",
            found=f"{clocks['sm_mhz'] or 'null'} with policy {clocks['policy']}",
            allowed="a clock in MHz with require and lock, null with observe",
            fix="give sm_mhz, or change the policy",
        )
    if not on_cpu and document["bits"]["profile"] != "native":
        yield Problem(
            pointer="/bits/profile",
            found=f'"{document["bits"]["profile"]}" on a GPU',
            allowed='"native": profiles pin CPU arithmetic',
            fix="leave it out",
        )


def _timing(document: JsonObject) -> Iterator[Problem]:
    timing = document["timing"]
    for name in ("samples", "warmup_seconds"):
        low, high = timing[name]
        if low > high:
            yield Problem(
                pointer=f"/timing/{name}",
                found=f"[{low}, {high}]",
                allowed="the lesser first",
                fix="swap them",
            )
    if document["device"]["vendor"] == "cpu":
        for index, clock in enumerate(timing["clocks"]):
            if clock not in _CPU_CLOCKS:
                yield Problem(
                    pointer=f"/timing/clocks/{index}",
                    found=f'"{clock}" on a CPU',
                    allowed='"host", and "request" with a request model',
                    fix='write "host"',
                )
    if "request" in timing["clocks"] and document["request"] is None:
        yield Problem(
            pointer="/request",
            found="null with the clock request",
            allowed="a request model",
            fix='name one, or take "request" out of timing.clocks',
        )


def _digests(document: JsonObject) -> Iterator[Problem]:
    for pointer, value in _walk(document, ""):
        if isinstance(value, str) and _REPEATED.match(value):
            yield Problem(
                pointer=pointer,
                found="a digest of one repeated character",
                allowed="a real digest",
                fix="copy it from `attnrepro build` or from an artifact, or leave it out",
            )


def _seeds(document: JsonObject) -> Iterator[Problem]:
    for pointer, value in (
        ("/inputs/seed", document["inputs"]["seed"]),
        ("/timing/order_seed", document["timing"]["order_seed"]),
    ):
        if int(value) > _LARGEST_SEED:
            yield Problem(
                pointer=pointer,
                found=str(value),
                allowed="an unsigned 64-bit integer",
                fix="choose a smaller one",
            )


def _walk(value: Any, pointer: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _walk(item, f"{pointer}/{escape(key)}")
    elif isinstance(value, list) and pointer.startswith("/subjects"):
        for index, item in enumerate(value):
            yield from _walk(item, f"{pointer}/{index}")
    else:
        yield pointer, value


def _accuracy_notes(document: JsonObject) -> Iterator[tuple[str, str]]:
    accuracy = document["accuracy"]
    for name, usual in _RULE.items():
        if (given := accuracy[name]["multiplier"]) > usual:
            yield (
                f"/accuracy/{name}/multiplier",
                f"{given} is looser than the usual {usual}; the artifact shows it",
            )
    for dtype, usual in _ULPS.items():
        if (given := accuracy["ulps"][dtype]) > usual:
            yield (
                f"/accuracy/ulps/{dtype}",
                f"{given} is looser than the usual {usual}; the artifact shows it",
            )


def _timing_notes(document: JsonObject) -> Iterator[tuple[str, str]]:
    timing = document["timing"]
    if timing["launches"] == 0:
        yield "/timing/launches", "nothing is timed: accuracy and bits only"
        return
    if timing["launches"] < _FEWEST_LAUNCHES:
        yield (
            "/timing/launches",
            f"{timing['launches']} launches give numbers and no verdict; a verdict needs "
            f"{_FEWEST_LAUNCHES} a side",
        )
    for index, tail in enumerate(timing["tails"]):
        needed = samples_needed(tail, timing["confidence"])
        if timing["samples"][1] < needed:
            yield (
                f"/timing/tails/{index}",
                f"the tail {tail} needs {needed} samples a launch at {timing['confidence']} and "
                f"timing.samples allows {timing['samples'][1]}: it will not be printed",
            )
    if not timing["flush_cache"]:
        yield "/timing/flush_cache", "times are labelled warm"
    if document["request"] is not None and "request" not in timing["clocks"]:
        yield "/request", 'the request model is not timed: timing.clocks has no "request"'


def _subject_notes(document: JsonObject) -> Iterator[tuple[str, str]]:
    subjects = document["subjects"]
    if document["timing"]["launches"] and not any(s["role"] == "baseline" for s in subjects):
        yield "/subjects", "no subject is a baseline: no ratio and no verdict will be given"
    seen: dict[str, str] = {}
    for index, subject in enumerate(subjects):
        key = repr((subject["backend"], sorted(subject["options"].items()), subject["image"]))
        if key in seen:
            yield (
                f"/subjects/{index}",
                f"the same code as {seen[key]}: the two measure this machine's noise",
            )
        seen.setdefault(key, subject["id"])


def _cell_notes(cells: Sequence[Cell]) -> Iterator[tuple[str, str]]:
    told: set[tuple[str, str]] = set()
    for cell in cells:
        for pointer, text in _one_cell_notes(cell):
            note = (cell.source(pointer), text)
            if note not in told:
                told.add(note)
                yield note[0], f"{text} (cell {cell.id}, {cell.label})"


def _one_cell_notes(cell: Cell) -> Iterator[tuple[str, str]]:
    workload, figures = cell.parsed, cell.facts
    if figures.offset_beyond_int32:
        yield (
            "/workload",
            f"the largest element offset, {figures.largest_offset}, is beyond 2^31: kernels with "
            "32-bit offsets read elsewhere",
        )
    if figures.flops_beyond_exact:
        yield "/workload", f"{figures.work.flops} FLOPs a call are beyond 2^53"
    if figures.has_empty_rows:
        yield (
            "/workload/mask",
            f"some queries attend nothing; their output must be {workload.mask.masked_rows}",
        )
    lengths_differ = workload.seqlens_q != workload.seqlens_k
    if workload.mask.causal == "top_left" and lengths_differ and workload.cache is not None:
        yield (
            "/workload/mask/causal",
            "top_left against a cache: query i sees keys 0..i only, not the cache's end",
        )
    window = workload.mask.window
    if window is not None and workload.mask.causal != "none" and window.right:
        yield "/workload/mask/window/right", "causal hides keys on the right: right acts as 0"
