"""From the runner's task results to what an artifact holds: observations, repeatable, samples.

Nothing is measured here. The worst status of a cell wins; every statistic is computed from the raw
samples by `compare.published`, every comparison by `compare.statistics`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from attnrepro import evidence, repeatable
from attnrepro.compare import published, statistics
from attnrepro.errors import AttnreproError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from attnrepro.jsonio import JsonObject

SEVERITY: Final = (
    "CRASH",
    "OUT_OF_MEMORY",
    "TIMEOUT",
    "UNSUPPORTED",
    "FALLBACK",
    "INCORRECT",
    "NONDETERMINISTIC",
    "INVALID",
    "THROTTLED",
    "INCONCLUSIVE",
    "PASS",
)
"""Statuses, worst first: the first that any task reports is the cell's."""

UNTIMED: Final = frozenset({"UNSUPPORTED", "FALLBACK", "INCORRECT", "INVALID"})
"""Statuses whose times, if any were taken, say nothing about the subject and are not published."""

COMPARABLE: Final = frozenset({"PASS", "NONDETERMINISTIC"})


@dataclass(frozen=True, kw_only=True)
class Context:
    """What the host knows of a run."""

    run_id: str
    started_utc: str
    duration_ns: int
    tool: str
    resumed: bool
    engine: str
    engine_version: str
    contained: bool
    facts: Mapping[str, str]
    uncompared: Mapping[str, Sequence[str]]
    """Cell to backends of its stacks that claim it and were not compared."""
    missing: tuple[str, str] | None = None
    """Status and reason of what has no result because the whole container was ended."""
    images: Sequence[Mapping[str, Any]] = ()
    """Stack, revision, size in bytes and build time in ms of each image."""
    device_identity: str | None = None
    """Keyed digest of the device (`deviceidentity`)."""


@dataclass(frozen=True, kw_only=True)
class Merged:
    """A run's documents, valid against their schemas, and the samples that they cite."""

    repeatable: JsonObject
    observations: JsonObject
    samples: Mapping[str, bytes]

    def failed_required(self) -> list[str]:
        """Required cells that did not pass, one line each."""
        return [
            f"{cell['id']} {subject['subject']}: {subject['status']} ({subject['reason']})"
            for cell in self.observations["cells"]
            for subject in cell["subjects"]
            if subject["required"] and subject["status"] != "PASS"
        ]


def merge(
    manifest: Mapping[str, Any],
    jobs: Sequence[Mapping[str, Any]],
    tasks: Iterable[Mapping[str, Any]],
    read_sample: Callable[[str], bytes],
    context: Context,
) -> Merged:
    """Merge all task results of a run.

    Args:
        manifest: canonical.
        jobs: what the runner was given, one a segment; together they name every cell.
        tasks: results of the finished tasks (`result` schema).
        read_sample: a samples member's bytes by its name.
        context: the host's own facts.

    Raises AttnreproError where a result names a sample that cannot be read.
    """
    turns = {task["id"]: turn for turn, task in enumerate(t for j in jobs for t in j["tasks"])}
    results = sorted(tasks, key=lambda task: turns[task["task"]])
    timing = manifest["timing"]
    declared = {subject["id"]: subject for subject in manifest["subjects"]}
    expected = manifest["inputs"]["expected"]
    entries = _entries(results)
    unsupported = {
        (item["cell"], item["subject"]): f"{item['reason']} (source: {item['source']})"
        for job in jobs
        for item in job["unsupported"]
    }
    samples: dict[str, bytes] = {}
    cells = []
    for cell in _cells(jobs):
        subjects = []
        for name in declared:
            key = (cell["id"], name)
            if name not in cell["subjects"] and key not in unsupported:
                continue
            found = entries.get(key, [])
            merged = _subject(
                declared[name], found, unsupported.get(key), _planned(jobs, name), context.missing
            )
            _check_inputs(merged, expected.get(cell["label"], {}), found)
            merged["timing"] = (
                {} if merged["status"] in UNTIMED else _timing(found, read_sample, timing, samples)
            )
            short = None
            if merged["status"] == "PASS" and "launch" in _planned(jobs, name).values():
                short = _short_of_samples(merged["timing"], timing["samples"][0])
            if short is not None:
                merged |= {"status": "INCONCLUSIVE", "reason": short, "place": None}
            subjects.append(merged)
        for subject in subjects:
            subject["comparisons"] = comparisons(subject, subjects, timing["confidence"])
        cells.append(
            {
                "id": cell["id"],
                "label": cell["label"],
                "phase": cell["workload"]["phase"],
                "uncompared": list(context.uncompared.get(cell["id"], ())),
                "subjects": subjects,
            }
        )
    return Merged(
        repeatable=repeatable.build(_cells(jobs), cells, entries),
        observations=_observations(results, cells, timing, context),
        samples=samples,
    )


def _cells(jobs: Sequence[Mapping[str, Any]]) -> list[JsonObject]:
    """Every cell once, its subjects those of all segments."""
    cells: dict[str, JsonObject] = {}
    for job in jobs:
        for cell in job["cells"]:
            known = cells.setdefault(cell["id"], {**cell, "subjects": []})
            known["subjects"] += [s for s in cell["subjects"] if s not in known["subjects"]]
    return [cells[name] for name in sorted(cells, key=lambda name: int(name[1:]))]


Entry = tuple["Mapping[str, Any]", "Mapping[str, Any]"]
"""A task's result and one entry of it."""


def _entries(results: Iterable[Mapping[str, Any]]) -> dict[tuple[str, str], list[Entry]]:
    found: dict[tuple[str, str], list[Entry]] = {}
    for task in results:
        for entry in task["entries"]:
            found.setdefault((entry["cell"], entry["subject"]), []).append((task, entry))
    return found


def _planned(jobs: Sequence[Mapping[str, Any]], subject: str) -> dict[str, str]:
    """Tasks of a subject, each with its stage."""
    return {
        task["id"]: task["stage"]
        for job in jobs
        for task in job["tasks"]
        if subject in task["subjects"]
    }


def _subject(
    declared: Mapping[str, Any],
    found: Sequence[Entry],
    unsupported: str | None,
    planned: Mapping[str, str],
    missing: tuple[str, str] | None,
) -> JsonObject:
    """Status and evidence of one subject in one cell."""
    status, reason, place = _status(found, unsupported, planned, missing)
    merged: JsonObject = {
        "subject": declared["id"],
        "backend": declared["backend"],
        "role": declared["role"],
        "required": declared["required"],
        "status": status,
        "reason": reason,
        "place": place,
        "timing": {},
        "comparisons": [],
    }
    return merged | evidence.collect(found)


def _status(
    found: Sequence[Entry],
    unsupported: str | None,
    planned: Mapping[str, str],
    missing: tuple[str, str] | None,
) -> tuple[str, str | None, str | None]:
    if unsupported is not None:
        return "UNSUPPORTED", unsupported, "before launch"
    worst: tuple[int, str, str | None, str | None] | None = None
    done = {task["task"] for task, _ in found}
    for task, entry in found:
        rank = SEVERITY.index(entry["status"])
        if worst is None or rank < worst[0]:
            reason = None
            if entry["status"] != "PASS":
                reason = f"{task['task']}: {entry['reason'] or 'no reason was given'}"
            worst = (rank, entry["status"], reason, entry["place"])
    lacking = {name: stage for name, stage in planned.items() if name not in done}
    if worst is None or worst[1] == "PASS":
        if lacking and missing is not None:
            return missing[0], missing[1], ", ".join(sorted(lacking))
        if worst is None or "check" in lacking.values():
            return "INCONCLUSIVE", "the runner wrote no result for this cell", None
        if launches := sorted(name for name, stage in lacking.items() if stage == "launch"):
            return "INCONCLUSIVE", f"no result was written of {', '.join(launches)}", None
    return worst[1], worst[2], worst[3]


def _check_inputs(merged: JsonObject, expected: Mapping[str, str], found: Sequence[Entry]) -> None:
    """Hold the inputs' digests against those that the manifest expects."""
    for tensor, digest in expected.items():
        for _, entry in found:
            seen = entry.get("inputs", {}).get(tensor)
            if seen is not None and f"sha256:{seen}" != digest:
                reason = f"the input {tensor} has not the digest that the manifest expects"
                merged |= {"status": "INVALID", "reason": reason, "place": "inputs"}
                return


def _timing(
    found: Sequence[Entry],
    read_sample: Callable[[str], bytes],
    timing: Mapping[str, Any],
    samples: dict[str, bytes],
) -> JsonObject:
    """Statistics by clock; the members that they cite are added to `samples`."""
    tails, confidence = timing["tails"], timing["confidence"]
    launches: dict[str, list[JsonObject]] = {}
    for task, entry in found:
        if task["stage"] != "launch":
            continue
        for record in entry.get("samples", []):
            try:
                data = read_sample(record["member"])
                values = published.decode_samples(data)
            except (OSError, ValueError) as error:
                message = f"cannot read the samples {record['member']}: {error}"
                raise AttnreproError(message) from error
            samples[record["member"]] = data
            launches.setdefault(record["clock"], []).append(
                published.launch_timing(
                    record,
                    values,
                    launch=task["launch"],
                    tails=tails,
                    confidence=confidence,
                )
            )
    return {
        clock: published.clock_timing(
            sorted(records, key=lambda record: record["launch"]),
            tails=tails,
            confidence=confidence,
        )
        for clock, records in sorted(launches.items())
    }


def _short_of_samples(clocks: Mapping[str, Any], fewest: int) -> str | None:
    """Say which launch has fewer usable samples than the manifest's fewest; None where none has."""
    launches = [(name, one) for name, clock in clocks.items() for one in clock["launches"]]
    if not any(one["used"] for _, one in launches):
        taken = sum(one["n"] for _, one in launches)
        counts = f": 0 of {taken} count" if taken else ""
        return f"no usable sample{counts}{_why_discarded(launches)}"
    short = [(name, one) for name, one in launches if one["used"] < fewest]
    if not short:
        return None
    name, one = min(short, key=lambda pair: pair[1]["used"])
    return (
        f"{len(short)} of {len(launches)} series have fewer than {fewest} usable samples; "
        f"clock {name} in launch {one['launch']} has {one['used']} of {one['n']}"
        f"{_why_discarded(short)}"
    )


def _why_discarded(launches: Iterable[tuple[str, Mapping[str, Any]]]) -> str:
    reasons = {discard["reason"] for _, one in launches for discard in one["discards"]}
    return f" ({', '.join(sorted(reasons))})" if reasons else ""


def comparisons(
    subject: Mapping[str, Any], others: Iterable[Mapping[str, Any]], confidence: float | str
) -> list[JsonObject]:
    """A candidate against each baseline of its cell, clock by clock, where both statuses allow it.

    Verify makes them again by this function.
    """
    if subject["role"] != "candidate" or subject["status"] not in COMPARABLE:
        return []
    found = []
    for baseline in others:
        if baseline["role"] != "baseline" or baseline["status"] not in COMPARABLE:
            continue
        for clock in sorted(set(subject["timing"]) & set(baseline["timing"])):
            comparison = statistics.compare(
                published.launch_medians(subject["timing"][clock]),
                published.launch_medians(baseline["timing"][clock]),
                confidence=published.decimal_text(confidence),
            )
            if comparison.ratio is not None:
                found.append(comparison.document(clock=clock, baseline=baseline["subject"]))
    return found


def _observations(
    results: Sequence[Mapping[str, Any]],
    cells: Sequence[JsonObject],
    timing: Mapping[str, Any],
    context: Context,
) -> JsonObject:
    first = results[0] if results else {"device": {}, "environment": {}}
    device = dict(first["device"])
    if context.device_identity is not None:
        device["identity"] = context.device_identity
    measured = evidence.ceilings(results)
    statuses = [subject["status"] for cell in cells for subject in cell["subjects"]]
    unsupported, passed = statuses.count("UNSUPPORTED"), statuses.count("PASS")
    return {
        "schema": "attnrepro.observations/1",
        "run": {
            "id": context.run_id,
            "started_utc": context.started_utc,
            "duration_ns": context.duration_ns,
            "tool": context.tool,
            "resumed": context.resumed,
            "timing": {
                **texts(timing),
                "equivalence_margin": published.decimal_text(float(statistics.MARGIN)),
                "least_launches": statistics.LEAST_LAUNCHES,
            },
        },
        "containment": {
            "engine": context.engine,
            "version": context.engine_version,
            "contained": context.contained,
            "facts": dict(context.facts),
        },
        "device": device,
        "environment": first["environment"],
        "tasks": [_task(task, first) for task in results],
        **({"ceilings": measured} if measured else {}),
        **({"images": [dict(image) for image in context.images]} if context.images else {}),
        "cells": list(cells),
        "summary": {
            "passed": passed,
            "failed": len(statuses) - passed - unsupported,
            "unsupported": unsupported,
        },
    }


def _task(task: Mapping[str, Any], first: Mapping[str, Any]) -> JsonObject:
    """A task without its entries; device and environment only where they differ from the first."""
    kept = {
        name: task[name]
        for name in ("task", "stage", "launch", "started_ns", "ended_ns", "runner", "workers")
    }
    kept["telemetry"] = list(task["telemetry"])
    for part in ("device", "environment"):
        if task[part] != first[part]:
            kept[part] = task[part]
    return kept


def texts(value: Any) -> Any:
    """The document with every real as its shortest decimal text, as observations hold none."""
    if isinstance(value, float):
        return published.decimal_text(value)
    if isinstance(value, dict):
        return {key: texts(item) for key, item in value.items()}
    if isinstance(value, list):
        return [texts(item) for item in value]
    return value
