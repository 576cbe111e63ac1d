"""The five verdicts of a rerun, each for itself and never merged into one."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from fractions import Fraction
from typing import TYPE_CHECKING, Any, Final

from attnrepro.compare import diff, published, scope, statistics
from attnrepro.compare.diff import Section

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from attnrepro.artifact.verify import Verified
    from attnrepro.jsonio import JsonObject

CONSISTENCY: Final = Fraction(10, 100)
"""A rerun's time is consistent unless it is shown to differ by more than this.

Wider than the margin between two subjects of one run: those share their minutes, a rerun does not,
and launch medians of identical code drift by several per cent between days on one machine."""

COMPARED: Final = (Section.INPUTS, Section.SEMANTICS, Section.OUTPUTS)
"""Sections that decide `outputs_identical`, in causal order; differences in `execution` explain."""

COMPILED_AT_RUN_TIME: Final = frozenset({"flex", "flash_attn_4", "flashinfer"})
"""Backends whose kernels lie in no library: a library's digest does not say which code ran."""


class Result(StrEnum):
    """What one verdict says."""

    YES = "yes"
    NO = "no"
    NOT_COMPARABLE = "not_comparable"


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """One verdict."""

    result: Result
    required: bool
    """False where a `no` is outside what was declared, and no failure."""
    reason: str
    first_difference: str | None = None

    def document(self) -> JsonObject:
        """As the predicate's `verdicts` has it."""
        return {
            "result": self.result.value,
            "required": self.required,
            "reason": self.reason,
            "first_difference": self.first_difference,
        }

    @property
    def failed(self) -> bool:
        """Whether this is a failure."""
        return self.required and self.result is Result.NO


@dataclass(frozen=True, kw_only=True)
class Side:
    """What a verdict needs of a run."""

    repeatable: Mapping[str, Any]
    observations: Mapping[str, Any]
    device_class: Mapping[str, Any]
    images: Mapping[str, str]
    """Image key to manifest digest; empty where there was no container."""

    @classmethod
    def of(cls, verified: Verified) -> Side:
        """From a verified artifact."""
        return cls(
            repeatable=verified.repeatable,
            observations=verified.observations,
            device_class=verified.predicate["device_class"],
            images={i["key"]: i["manifest_digest"] for i in verified.predicate["images"]},
        )


def authentic(*, trusted: bool, owner: str | None, fingerprint: str) -> Verdict:
    """Signature and trust, of an artifact whose signature is valid."""
    if trusted:
        return Verdict(result=Result.YES, required=True, reason=f"signed by {owner}")
    return Verdict(
        result=Result.NO,
        required=False,
        reason=f"intact, but the key {fingerprint[:16]}… is not in your trust file",
    )


def image_identical(
    original: Side, rerun: Side, *, required: bool, first_file: str | None = None
) -> Verdict:
    """Whether every image has the manifest digest that the artifact names."""
    if not original.images or not rerun.images:
        where = "the original" if not original.images else "this rerun"
        return Verdict(
            result=Result.NOT_COMPARABLE,
            required=required,
            reason=f"{where} ran without a container",
        )
    for key, digest in sorted(original.images.items()):
        if rerun.images.get(key) != digest:
            found = rerun.images.get(key, "nothing")
            return Verdict(
                result=Result.NO,
                required=required,
                reason=f"the image {key} has another digest",
                first_difference=first_file or f"{digest} there, {found} here",
            )
    return Verdict(result=Result.YES, required=required, reason="every image has the digest it had")


def kernels_identical(original: Side, rerun: Side) -> Verdict:
    """Whether the libraries and compiled kernels that ran have the same digests. It explains."""
    difference = next(diff.kernel_libraries(original.repeatable, rerun.repeatable), None)
    if difference is None:
        difference = next(_cubins(original.observations, rerun.observations), None)
    if difference is not None:
        return Verdict(
            result=Result.NO,
            required=False,
            reason="other kernel code ran",
            first_difference=str(difference),
        )
    if not original.repeatable[Section.EXECUTION.value]:
        return Verdict(
            result=Result.NOT_COMPARABLE, required=False, reason="no kernel was recorded"
        )
    if (place := _unrecorded(original.observations)) is not None:
        return Verdict(
            result=Result.NOT_COMPARABLE,
            required=False,
            reason=f"the libraries are equal byte for byte, but {place} compiles its kernels at "
            "run time, and their digests were not recorded",
        )
    return Verdict(
        result=Result.YES,
        required=False,
        reason="the libraries and the compiled code that ran are equal byte for byte",
    )


def outputs_identical(original: Side, rerun: Side, *, bits: Mapping[str, Any]) -> Verdict:
    """Whether inputs, semantics and every claimed output have the same bits.

    `bits` is the manifest's bit contract.
    """
    reason = scope.outside(bits, original.device_class, rerun.device_class)
    inside = reason is None
    claimed = sum(
        len(tensors)
        for subjects in original.repeatable["outputs"]["digests"].values()
        for tensors in subjects.values()
    )
    for section in COMPARED:
        difference = diff.first_difference(section, original.repeatable, rerun.repeatable)
        if difference is not None:
            where = "" if inside else f", on a device outside the declared scope ({reason})"
            return Verdict(
                result=Result.NO,
                required=inside,
                reason=f"{section.value} differ{where}",
                first_difference=str(difference),
            )
    if not claimed:
        return Verdict(
            result=Result.NOT_COMPARABLE, required=inside, reason="no output's bits were claimed"
        )
    where = "" if inside else f", even on a device outside the declared scope ({reason})"
    return Verdict(
        result=Result.YES, required=inside, reason=f"{claimed} outputs have the same bits{where}"
    )


def performance_consistent(
    original: Side, rerun: Side, *, required: bool, confidence: str
) -> Verdict:
    """Whether no time on an equal class of device is shown to differ by more than `CONSISTENCY`."""
    if reason := scope.other_class(original.device_class, rerun.device_class):
        return Verdict(
            result=Result.NOT_COMPARABLE, required=required, reason=f"another device: {reason}"
        )
    there, here = (
        original.observations["containment"]["contained"],
        rerun.observations["containment"]["contained"],
    )
    if there != here:
        return Verdict(
            result=Result.NOT_COMPARABLE,
            required=required,
            reason="one ran in a container and the other did not",
        )
    judged = 0
    worst: tuple[Fraction, str] | None = None
    for place, before, after in _times(original.observations, rerun.observations):
        found = statistics.compare(after, before, confidence=confidence, margin=CONSISTENCY)
        if found.verdict is statistics.Verdict.INCONCLUSIVE or found.ratio is None:
            continue
        judged += 1
        if found.verdict in (statistics.Verdict.FASTER, statistics.Verdict.SLOWER):
            size = max(found.ratio, 1 / found.ratio)
            if worst is None or size > worst[0]:
                word = "faster" if found.verdict is statistics.Verdict.FASTER else "slower"
                worst = (size, f"{place}: {float(size):.3g}× {word} ({found.reason})")
    percent = f"{float(CONSISTENCY) * 100:g} %"
    if not judged:
        return Verdict(
            result=Result.NOT_COMPARABLE,
            required=required,
            reason=f"no time has {statistics.LEAST_LAUNCHES} launches on both sides",
        )
    if worst is not None:
        return Verdict(
            result=Result.NO,
            required=required,
            reason=f"a time differs by more than {percent}",
            first_difference=worst[1],
        )
    return Verdict(
        result=Result.YES,
        required=required,
        reason=f"none of {judged} times is shown to differ by more than {percent}",
    )


def _times(
    original: Mapping[str, Any], rerun: Mapping[str, Any]
) -> Iterator[tuple[str, list[int], list[int]]]:
    """(place, launch medians there, launch medians here) of each row's headline clock."""
    here = {
        (cell["id"], subject["subject"]): subject
        for cell in rerun["cells"]
        for subject in cell["subjects"]
    }
    for cell in original["cells"]:
        for subject in cell["subjects"]:
            clock = published.headline_clock(subject["timing"])
            other = here.get((cell["id"], subject["subject"]))
            if clock is None or other is None or clock not in other["timing"]:
                continue
            yield (
                f"{cell['id']} {subject['subject']} {clock}",
                published.launch_medians(subject["timing"][clock]),
                published.launch_medians(other["timing"][clock]),
            )


def _unrecorded(observations: Mapping[str, Any]) -> str | None:
    """A cell and subject whose kernels were compiled when it ran, without a trace of them."""
    for cell in observations["cells"]:
        for subject in cell["subjects"]:
            compiles = subject["backend"] in COMPILED_AT_RUN_TIME
            if compiles and not subject.get("execution", {"cubins": True})["cubins"]:
                return f"{cell['id']} {subject['subject']}"
    return None


def _cubins(original: Mapping[str, Any], rerun: Mapping[str, Any]) -> Iterator[diff.Difference]:
    """Differences of the device code that each subject compiled.

    Over all its cells: a cell's list holds what the cells before it compiled too, and their order
    is not part of the code.
    """
    ran = _both_ran(original, rerun)
    there, here = _compiled(original, ran), _compiled(rerun, ran)
    for subject, before in there.items():
        after = here[subject]
        if before != after:
            yield diff.Difference(
                place=f"{subject} cubins",
                first=f"{len(before)} cubins",
                second=f"{len(after)} cubins, {len(before & after)} of them equal",
            )


def _both_ran(*runs: Mapping[str, Any]) -> set[tuple[str, str]]:
    found = [
        {
            (cell["id"], subject["subject"])
            for cell in run["cells"]
            for subject in cell["subjects"]
            if "execution" in subject
        }
        for run in runs
    ]
    return set.intersection(*found)


def _compiled(run: Mapping[str, Any], ran: set[tuple[str, str]]) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for cell in run["cells"]:
        for subject in cell["subjects"]:
            if (cell["id"], subject["subject"]) in ran:
                digests = subject["execution"]["cubins"]
                found.setdefault(subject["subject"], set()).update(digests)
    return found
