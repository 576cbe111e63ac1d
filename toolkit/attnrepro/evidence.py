"""What the tasks found of one subject in one cell, gathered into the observations' parts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from attnrepro.jsonio import JsonObject

    Entry = tuple[Mapping[str, Any], Mapping[str, Any]]

ONCE: Final = (
    *("availability", "probes", "bits", "execution"),
    *("cold", "memory", "energy", "counters"),
)
"""Parts of an entry that one task has; copied as they are."""

BY_LAUNCH: Final = {
    "warmup": "warmups",
    "preparation": "preparations",
    "request": "requests",
    "conditions": "conditions",
    "spent": "spent",
}
"""Part of an entry that every launch has -> list of the observations."""


def collect(found: Sequence[Entry]) -> JsonObject:
    """Evidence of a subject in a cell from its (task, entry) pairs."""
    parts: JsonObject = {}
    for name in ONCE:
        for _, entry in found:
            if name in entry:
                parts.setdefault(name, entry[name])
    oracle = [
        {"task": task["task"], "when": when, "oracle": entry[f"oracle_{when}"]}
        for task, entry in found
        for when in ("before", "after")
        if f"oracle_{when}" in entry
    ]
    if oracle:
        parts["oracle"] = oracle
    for name, listed in BY_LAUNCH.items():
        seen = [{"task": task["task"], name: entry[name]} for task, entry in found if name in entry]
        if seen:
            parts[listed] = seen
    flags = [f"{task['task']}: {flag}" for task, entry in found for flag in entry.get("flags", ())]
    if flags:
        parts["flags"] = flags
    return parts


def ceilings(results: Iterable[Mapping[str, Any]]) -> JsonObject:
    """What the device reached, by the task that measured it."""
    return {task["task"]: task["ceilings"] for task in results if "ceilings" in task}
