"""repeatable.json: what another run on the same class of device must give again, bit for bit."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from attnrepro.jsonio import MAX_INTEGER
from attnrepro_runner.bitclaims import CLAIMED
from attnrepro_runner.semantics import Workload
from attnrepro_runner.work import BYTES_FORMULA, FLOPS_FORMULA, PAIRS_FORMULA, work_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from attnrepro.jsonio import JsonObject


def build(
    planned: Sequence[Mapping[str, Any]],
    cells: Sequence[Mapping[str, Any]],
    entries: Mapping[tuple[str, str], Sequence[tuple[Mapping[str, Any], Mapping[str, Any]]]],
) -> JsonObject:
    """The four sections, from planned cells (with workload) and merged cells (with evidence)."""
    inputs: JsonObject = {}
    probes: JsonObject = {}
    digests: JsonObject = {}
    not_claimed: JsonObject = {}
    execution: JsonObject = {}
    for cell in cells:
        name = cell["id"]
        for subject in cell["subjects"]:
            key = subject["subject"]
            for _, entry in entries.get((name, key), ()):
                inputs.setdefault(name, {}).update(entry.get("inputs", {}))
            if "probes" in subject:
                probes.setdefault(name, {})[key] = _probes(subject["probes"])
            if "bits" in subject:
                claimed, rest = _outputs(subject["bits"])
                if claimed:
                    digests.setdefault(name, {})[key] = claimed
                if rest:
                    not_claimed.setdefault(name, {})[key] = rest
            if "execution" in subject:
                execution.setdefault(name, {})[key] = _execution(subject["execution"])
    return {
        "schema": "attnrepro.repeatable/1",
        "inputs": inputs,
        "semantics": {
            "work": {cell["id"]: _work(cell["workload"]) for cell in planned},
            "probes": probes,
        },
        "outputs": {"digests": digests, "not_claimed": not_claimed},
        "execution": execution,
    }


def _probes(probes: Mapping[str, Any]) -> JsonObject:
    return {
        "set": {name: probe["observed"] for name, probe in probes["set"].items()},
        "levels": {level["name"]: level["chosen"] for level in probes["levels"]},
    }


def _outputs(bits: Mapping[str, Any]) -> tuple[dict[str, str], list[str]]:
    """Digests of tensors that are claimed and were seen to repeat; names of the others."""
    claimed = {
        tensor: bits["digests"][tensor]
        for tensor, seen in bits["observed"].items()
        if tensor in CLAIMED[bits["claimed"]] and seen == "repeats" and tensor in bits["digests"]
    }
    return claimed, sorted(set(bits["observed"]) - set(claimed))


def _execution(execution: Mapping[str, Any]) -> JsonObject:
    kernels: dict[str, int] = {}
    for kernel in execution["kernels"]:
        kernels[kernel["name"]] = kernels.get(kernel["name"], 0) + kernel["count"]
    return {
        "operators": dict(execution["operators"]),
        "kernels": kernels,
        "libraries": {name: lib["sha256"] for name, lib in execution["libraries"].items()},
        "plan": dict(execution["plan"]),
    }


def _work(workload: Mapping[str, Any]) -> JsonObject:
    work = work_of(Workload.parse(workload))
    return {
        "formula": f"{PAIRS_FORMULA} {FLOPS_FORMULA} {BYTES_FORMULA}",
        "pairs": _count(work.pairs),
        "flops_forward": _count(work.flops_forward),
        "flops_backward": _count(work.flops_backward),
        "bytes_forward": _count(work.bytes_forward),
        "bytes_backward": _count(work.bytes_backward),
    }


def _count(value: int) -> int | str:
    """A string where JSON readers that keep numbers as doubles would round it."""
    return value if value <= MAX_INTEGER else str(value)
