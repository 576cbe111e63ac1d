"""A/A: a benchmark of identical code against itself, for what this machine's verdicts are worth.

Two subjects with one backend are interleaved launch by launch, as in any run. Every choice of
`LAUNCHES` launches out of those that were made is one comparison that a user could have got. How
many of them say FASTER or SLOWER is the false-verdict rate; the smallest factor by which one side
must be slowed so that most of them say SLOWER is the smallest difference that can be detected.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from fractions import Fraction
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from attnrepro import schema
from attnrepro.compare import published, statistics
from attnrepro.compare.statistics import Verdict
from attnrepro.errors import AttnreproError, InvalidDocument, Problem, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from attnrepro.engines.base import Engine
    from attnrepro.jsonio import JsonObject
    from attnrepro.usedimages import ImageSource

LAUNCHES: Final = 5
"""Launches of one comparison: the default of a manifest."""
MADE: Final = 10
"""Launches that are made; 252 choices of 5."""
POWER: Final = Fraction(8, 10)
"""Share of comparisons that must see a difference for it to count as detectable."""
_LARGEST: Final = 400
"""Largest slowing that is tried, in hundredths."""

_MANIFEST: Final = {
    "schema": "attnrepro.manifest/1",
    "name": "aa",
    "title": "Identical code against itself",
    "image": {"stack": "cpu-torch2.13"},
    "device": {"vendor": "cpu", "threads": 1},
    "workload": {
        "phase": "prefill",
        "batch": 1,
        "seqlen_q": 256,
        "seqlen_k": 256,
        "heads_q": 8,
        "heads_kv": 8,
        "head_dim": 64,
        "dtype": "float32",
        "layout": "bhsd",
        "mask": {"causal": "top_left"},
    },
    "subjects": [
        {"id": "a", "backend": "sdpa.flash", "role": "candidate"},
        {"id": "b", "backend": "sdpa.flash", "role": "baseline"},
    ],
    "bits": {"repeats": 2},
    "timing": {
        "launches": MADE,
        "samples": [60, 60],
        "cell_seconds": 10,
        "tails": [],
        "cold_start": False,
        "memory": False,
    },
}


@dataclass(frozen=True, kw_only=True)
class Noise:
    """What identical code looks like on this machine."""

    where: str
    """Engine and device, in words."""
    launches: int
    left_out: tuple[str, ...]
    """Launches that have no usable sample on a side: no comparison has them."""
    taken: int
    """Launches a side of one comparison."""
    comparisons: int
    false_verdicts: int
    """Comparisons of identical code that said FASTER or SLOWER."""
    smallest_detectable: float | None
    """Factor; None where even the largest that was tried is not seen."""
    scatter: float
    """Largest launch median over the smallest, of one side."""
    disjoint: tuple[int, int]
    """Pairs of launches of identical code whose within-launch intervals are disjoint, of all."""

    def document(self) -> JsonObject:
        """What `--json` prints."""
        return {
            "where": self.where,
            "launches": self.launches,
            "left_out": list(self.left_out),
            "comparisons": self.comparisons,
            "false_verdicts": self.false_verdicts,
            "false_verdict_rate": self.false_verdicts / self.comparisons,
            "smallest_detectable_ratio": self.smallest_detectable,
            "launch_scatter": self.scatter,
            "disjoint_intervals": list(self.disjoint),
            "margin": float(statistics.MARGIN),
        }

    def text(self) -> str:
        """The same in words."""
        rate = self.false_verdicts / self.comparisons
        detect = "no difference up to 4× can be told apart here"
        if self.smallest_detectable is not None:
            detect = (
                f"a difference of {self.smallest_detectable:.2f}× is detected in "
                f"{float(POWER) * 100:g} % of comparisons; smaller ones may go unseen"
            )
        disjoint, pairs = self.disjoint
        left = [f"left out         launch {one}" for one in self.left_out]
        return "\n".join(
            [
                f"identical code against itself, {self.launches} launches a side, {self.where}",
                *left,
                f"false verdicts   {self.false_verdicts} of {self.comparisons} comparisons of "
                f"{self.taken} launches ({rate * 100:.1f} %; the test allows at most 5 %); they "
                "share launches, so that few of them say little of the rate",
                f"detectable       {detect}",
                f"launch scatter   {(self.scatter - 1) * 100:.1f} % between the fastest and the "
                "slowest launch",
                f"within a launch  {disjoint} of {pairs} pairs of launches have disjoint 95 % "
                "intervals: such an interval says nothing about another launch",
            ]
        )


def doctor_aa(progress: Callable[[str], None]) -> Noise:
    """Run A/A with the first engine that answers. Raises Unavailable where there is none."""
    from attnrepro.engines import select
    from attnrepro.images.store import Store
    from attnrepro.usedimages import StoreImages

    engine = select.choose(None)
    progress(f"{2 * MADE} launches of identical code in {engine.name}: about 3 min")
    return measure(
        engine=engine,
        images=StoreImages(Store(), build=False, engine=engine.name),
        progress=progress,
    )


def measure(*, engine: Engine, images: ImageSource, progress: Callable[[str], None]) -> Noise:
    """Run A/A on an engine."""
    from attnrepro import run, runfolder, runnerwheel
    from attnrepro.manifest.load import load
    from attnrepro.report.rows import headline

    performed = run.perform(
        load(json.dumps(_MANIFEST).encode()),
        images=images,
        engine=engine,
        options=run.Options(output=Path("aa"), runs=Path(runfolder.DEFAULT_ROOT)),
        runner=runnerwheel.installed(),
        progress=progress,
    )
    performed.folder.remove()
    observations = performed.merged.observations
    subjects = {s["subject"]: s for s in observations["cells"][0]["subjects"]}
    for subject in subjects.values():
        # A machine too noisy for the stop rule is INCONCLUSIVE: just what is to be shown here.
        timed = len(published.launch_medians(subject["timing"].get("host", {"launches": []})))
        if subject["status"] not in ("PASS", "INCONCLUSIVE") or timed < LAUNCHES:
            message = f"A/A did not run: {subject['status']}: {subject['reason']}"
            raise AttnreproError(message)
    timings = [subjects[name]["timing"]["host"] for name in ("a", "b")]
    return judge(timings[0], timings[1], where=headline(observations))


def from_samples(document: Mapping[str, Any]) -> list[Noise]:
    """A/A of a job that the runner's `fidelity --samples` made, one a cell.

    Raises UsageError where the document is another, InvalidDocument with all that is wrong in it,
    AttnreproError with too few launches.
    """
    if not isinstance(document, dict) or document.get("schema") != "attnrepro.aa/1":
        message = "the file holds no samples of `attnrepro_runner fidelity --samples`"
        raise UsageError(message, hint="name the file that --samples wrote")
    problems = schema.validate("aa", document) or list(_unlike(document["series"]))
    if problems:
        message = "the file's samples are damaged"
        raise InvalidDocument(message, problems=problems)
    found = []
    for cell, clock in sorted({(one["cell"], one["clock"]) for one in document["series"]}):
        sides = []
        for subject in ("a", "b"):
            launches = [
                published.launch_timing(
                    {**one, "member": "", "calls_per_sample": 1},
                    one["samples"],
                    launch=one["launch"],
                    tails=(),
                    confidence="0.95",
                )
                for one in document["series"]
                if (one["cell"], one["clock"], one["subject"]) == (cell, clock, subject)
            ]
            launches.sort(key=lambda launch: launch["launch"])
            sides.append(published.clock_timing(launches, tails=(), confidence="0.95"))
        found.append(judge(*sides, where=f"{document['device']}, {cell}, {clock}"))
    return found


def _unlike(series: Sequence[Mapping[str, Any]]) -> Iterator[Problem]:
    """What no schema can say: a launch twice, discards outside their samples."""
    seen: dict[tuple[object, ...], int] = {}
    for index, one in enumerate(series):
        key = (one["cell"], one["clock"], one["subject"], one["launch"])
        if key in seen:
            yield Problem(
                pointer=f"/series/{index}/launch",
                found=str(one["launch"]),
                allowed=f"a launch once a subject; /series/{seen[key]} is the same",
                fix="remove one of the two",
            )
        seen.setdefault(key, index)
        try:
            published.used_samples(one["samples"], one["discards"])
        except ValueError as error:
            yield Problem(
                pointer=f"/series/{index}/discards",
                found=str(error),
                allowed=f"parts of {len(one['samples'])} samples that do not overlap",
                fix="write the samples anew with fidelity --samples",
            )


def judge(first: Mapping[str, Any], second: Mapping[str, Any], *, where: str) -> Noise:
    """What two timings (`clock_timing`) of identical code say about this machine."""
    by_launch = [
        {launch["launch"]: launch["median"]["value_ns"] for launch in side["launches"]}
        for side in (first, second)
    ]
    numbers = sorted(set(by_launch[0]) | set(by_launch[1]))
    both = [n for n in numbers if all(side.get(n) is not None for side in by_launch)]
    a, b = ([side[n] for n in both] for side in by_launch)
    made = len(both)
    taken = min(LAUNCHES, made - 1)
    if taken < statistics.LEAST_LAUNCHES:
        message = f"{made} launches: A/A needs {statistics.LEAST_LAUNCHES + 1}"
        raise AttnreproError(message)
    choices = list(combinations(range(made), taken))
    false = sum(_verdict(a, b, choice) in (Verdict.FASTER, Verdict.SLOWER) for choice in choices)
    return Noise(
        where=where,
        launches=made,
        left_out=tuple(_left_out(n, by_launch) for n in numbers if n not in both),
        taken=taken,
        comparisons=len(choices),
        false_verdicts=false,
        smallest_detectable=_smallest(a, b, choices),
        scatter=max(max(side) / min(side) for side in (a, b)),
        disjoint=_disjoint([*first["launches"], *second["launches"]]),
    )


def _left_out(number: int, sides: Sequence[Mapping[int, int | None]]) -> str:
    lacking = [name for name, side in zip("ab", sides, strict=True) if side.get(number) is None]
    return f"{number}: no usable sample of {' and '.join(lacking)}"


def _verdict(a: Sequence[int], b: Sequence[int], choice: Sequence[int]) -> Verdict:
    return statistics.compare([a[i] for i in choice], [b[i] for i in choice]).verdict


def _smallest(a: Sequence[int], b: Sequence[int], choices: Sequence[Sequence[int]]) -> float | None:
    """Smallest slowing of `a`, in hundredths, that `POWER` of the comparisons call SLOWER.

    Slowing more is never seen less, so the smallest is found by halving.
    """

    def seen(hundredths: int) -> bool:
        slowed = [value * hundredths // 100 for value in a]
        found = sum(_verdict(slowed, b, choice) is Verdict.SLOWER for choice in choices)
        return found >= POWER * len(choices)

    low, high = 100, _LARGEST
    if not seen(high):
        return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if seen(middle) else (middle, high)
    return high / 100


def _disjoint(launches: Sequence[Mapping[str, Any]]) -> tuple[int, int]:
    intervals = [
        (launch["interval"]["lower_ns"], launch["interval"]["upper_ns"])
        for launch in launches
        if launch["interval"]["lower_ns"] is not None
    ]
    pairs = list(combinations(intervals, 2))
    return sum(p[1] < q[0] or q[1] < p[0] for p, q in pairs), len(pairs)
