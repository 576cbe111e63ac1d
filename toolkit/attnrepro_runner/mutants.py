"""The measured detection power: wrong backends, and which check rejects each.

`python -m attnrepro_runner mutants` runs every mutant at each length through the probes and the
oracle that a benchmark runs, and prints who killed it. Honest controls run alike and must live.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from attnrepro_runner import inputs, mutantbackends, oracle, probes
from attnrepro_runner.backends import registry
from attnrepro_runner.fields import Window
from attnrepro_runner.mutantbackends import Mutant, SeededDropout
from attnrepro_runner.oracle import Oracle
from attnrepro_runner.probeshape import small_workload
from attnrepro_runner.semantics import Workload

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from attnrepro_runner.backends.base import Backend, Outputs
    from attnrepro_runner.mutantbackends import Prepare
    from attnrepro_runner.probes import ProbeReport

LENGTHS = (1024, 4096, 16384, 65536)
_ROWS = 512
"""Query rows of lengths above it: a chunk at the end, where rows are longest."""
_TRAINING_ROWS = 256


@dataclass(frozen=True, kw_only=True)
class Case:
    """One mutant, or an honest control."""

    name: str
    workload: str
    backend: str
    make: Callable[[], Backend]
    honest: bool = False
    oracle: bool = True
    """Whether the oracle judges it: a mask is read in a call for every head_dim keys, too many of
    these at 64k."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What happened to one case at one length."""

    case: Case
    length: int
    probes: str | None
    """Which probe rejected it."""
    oracle: str | None
    """Which tensor the oracle rejected, and by what factor of the limit."""

    @property
    def killed(self) -> bool:
        """Whether anything rejected it."""
        return self.probes is not None or self.oracle is not None

    @property
    def as_expected(self) -> bool:
        """Whether a mutant was killed, or an honest control was not."""
        return self.killed != self.case.honest

    def text(self) -> str:
        """Return the table's entry."""
        if not self.killed:
            return "passes" if self.case.honest else "**SURVIVES**"
        return "; ".join(part for part in (self.probes, self.oracle) if part)


def workload_of(kind: str, length: int) -> Workload:
    """Return the workload of a kind at a number of keys.

    Raises:
        KeyError: unknown kind.

    """
    rows = min(length, _ROWS) if length > 1024 else length
    document: dict[str, Any] = {
        "phase": "prefill",
        "batch": 1,
        "seqlen_q": rows,
        "seqlen_k": length,
        "heads_q": 4,
        "heads_kv": 2,
        "head_dim": 64,
        "dtype": "bfloat16",
        "mask": {"causal": "bottom_right"},
    }
    few = {"seqlen_q": 64}
    changes: dict[str, dict[str, Any]] = {
        "causal": {},
        "window": {"mask": {"window": {"left": 255, "right": 0}}},
        "softcap": few | {"softcap": 15.0},
        "decode": {
            "phase": "decode",
            "batch": 2,
            "seqlen_q": 1,
            "mask": {},
            "cache": {"kind": "paged", "page_size": 64, "append": 1},
        },
        "training": {"phase": "forward_backward", "seqlen_q": min(rows, _TRAINING_ROWS)},
        "float32": few | {"phase": "forward_backward", "dtype": "float32"},
        "steep float32": few | {"phase": "forward_backward", "dtype": "float32", "scale": 1.25},
        "dropout": few | {"phase": "forward_backward", "dropout": {"p": 0.1, "seed": 7}},
    }
    return Workload.parse(document | changes[kind])


def cases() -> tuple[Case, ...]:
    """Return every control and mutant."""
    controls = [
        Case(
            name=f"honest {kind}",
            workload=kind,
            backend=backend,
            make=partial(registry.load, backend),
            honest=True,
        )
        for kind, backend in (
            ("causal", "sdpa.flash"),
            ("window", "sdpa.flash"),
            ("softcap", "eager"),
            ("decode", "eager"),
            ("training", "eager"),
            ("float32", "sdpa.flash"),
            ("steep float32", "sdpa.flash"),
        )
    ]
    controls.append(
        Case(
            name="honest dropout",
            workload="dropout",
            backend="sdpa.math",
            make=partial(SeededDropout, seeded=True),
            honest=True,
            oracle=False,
        )
    )
    mistakes: tuple[tuple[str, str, str, Prepare], ...] = (
        ("tile of keys dropped for half the rows", "causal", "sdpa.flash", _HALF_THE_ROWS),
        ("one tile of the last block dropped", "causal", "sdpa.flash", _LAST_BLOCK),
        ("scale x 1.01", "causal", "sdpa.flash", mutantbackends.told(_scaled)),
        ("scale 1/head_dim", "causal", "sdpa.flash", mutantbackends.told(_scaled_twice)),
        ("softcap ignored", "softcap", "eager", mutantbackends.told(_uncapped)),
        ("alignment off by one", "causal", "sdpa.flash", mutantbackends.told(_ahead)),
        ("window one key wider", "window", "sdpa.flash", mutantbackends.told(_window(1))),
        ("window one key narrower", "window", "sdpa.flash", mutantbackends.told(_window(-1))),
        (
            "GQA interleaved on the K side",
            "causal",
            "sdpa.flash",
            mutantbackends.k_heads_interleaved,
        ),
        ("K pages swapped", "decode", "eager", mutantbackends.k_pages_swapped),
        ("page of another sequence", "decode", "eager", mutantbackends.pages_of_another),
        ("last key of the cache missed", "decode", "eager", mutantbackends.told(_shorter)),
        ("stale output", "causal", "sdpa.flash", mutantbackends.stale),
        ("dK of one tile lost", "training", "eager", mutantbackends.answered(_dk_lost)),
        ("dQ added twice", "training", "eager", mutantbackends.answered(_dq_twice)),
        ("TF32 products", "float32", "sdpa.flash", mutantbackends.tf32_products),
        ("TF32 products, steep", "steep float32", "sdpa.flash", mutantbackends.tf32_products),
    )
    mutants = [
        Case(
            name=name,
            workload=kind,
            backend=backend,
            make=partial(_mutant, backend, prepare),
        )
        for name, kind, backend, prepare in mistakes
    ]
    mutants.append(
        Case(
            name="unseeded dropout",
            workload="dropout",
            backend="sdpa.math",
            make=partial(SeededDropout, seeded=False),
            oracle=False,
        )
    )
    return (*controls, *mutants)


def run(lengths: Sequence[int], chosen: Sequence[Case] | None = None) -> Iterator[Verdict]:
    """Judge every case at every length; cases of one workload share its reference."""
    by_kind: dict[str, list[Case]] = {}
    for case in cases() if chosen is None else chosen:
        by_kind.setdefault(case.workload, []).append(case)
    probed: dict[tuple[str, Workload], str | None] = {}
    for length in lengths:
        for kind, group in by_kind.items():
            workload = workload_of(kind, length)
            yield from _judge(workload, length, group, probed)


def _judge(
    workload: Workload,
    length: int,
    group: Sequence[Case],
    probed: dict[tuple[str, Workload], str | None],
) -> Iterator[Verdict]:
    tensors = inputs.make_inputs(workload, {}, stream=0, device="cpu")
    small = small_workload(workload, dropout=True)
    for stream in (0, 1):
        # The second draw is what the oracle judges: a stale output shows.
        mutantbackends.refill(workload, tensors, stream)
    judge = Oracle(workload, {}, tensors)
    for case in group:
        backend = case.make()
        key = (case.name, small)
        if key not in probed:
            probed[key] = _probe_text(probes.run_probes(backend, {}, workload, "cpu"))
        found = None
        if case.oracle:
            mutantbackends.refill(workload, tensors, 0)
            prepared = backend.prepare(workload, {}, tensors)
            _call(workload, prepared.append_step, prepared.step)
            mutantbackends.refill(workload, tensors, 1)
            outputs = _call(workload, prepared.append_step, prepared.step)
            report = judge.check(outputs, empty_row_lse=backend.empty_row_lse)
            found = _oracle_text(report)
        yield Verdict(case=case, length=length, probes=probed[key], oracle=found)


def _call(workload: Workload, append: Callable[[], None], step: Callable[[], Outputs]) -> Outputs:
    if workload.cache is not None and workload.cache.append:
        append()
    return step()


def _probe_text(report: ProbeReport) -> str | None:
    if report.status() == "PASS":
        return None
    names = [name for name, probe in report.sets.items() if not probe.equal]
    names += [level.name for level in report.levels if level.verdict != "match"]
    if report.dropout is not None and not report.dropout.ok:
        names.append("dropout")
    return "probe " + ", ".join(names)


def _oracle_text(report: oracle.OracleReport) -> str | None:
    if report.ok:
        return None
    parts = [f"{name} {t.worst_ratio:.3g}x" for name, t in report.tensors.items() if not t.ok]
    return "oracle " + (", ".join(parts) or "guards")


def table(verdicts: Sequence[Verdict]) -> str:
    """Return the verdicts as a Markdown table, one row a case."""
    lengths = sorted({verdict.length for verdict in verdicts})
    entries = {(v.case.name, v.length): v for v in verdicts}
    names = {v.case.name: v.case for v in verdicts}
    lines = [
        "| backend | control or mutant | " + " | ".join(f"{n} keys" for n in lengths) + " |",
        "|---|---|" + "---|" * len(lengths),
    ]
    for name, case in names.items():
        texts = [entries[name, n].text() if (name, n) in entries else "" for n in lengths]
        lines.append(f"| {case.backend} | {name} | " + " | ".join(texts) + " |")
    return "\n".join(lines) + "\n"


def main(arguments: list[str]) -> int:
    """Print the table.

    Exit status 1 where a mutant survives or a control dies, 2 for lengths that cannot be judged.
    """
    parser = argparse.ArgumentParser(prog="attnrepro_runner mutants", description=__doc__)
    parser.add_argument(
        "--lengths",
        default=",".join(map(str, LENGTHS)),
        help="numbers of keys, separated by commas (default: %(default)s)",
    )
    chosen = parser.parse_args(arguments)
    try:
        lengths = _lengths(chosen.lengths)
    except ValueError as error:
        sys.stderr.write(f"{parser.prog}: --lengths: {error}\n")
        return 2
    verdicts = []
    before = time.monotonic()
    for verdict in run(lengths):
        now = time.monotonic()
        sys.stderr.write(
            f"{verdict.length} {verdict.case.name}: {verdict.text()} ({now - before:.1f} s)\n"
        )
        verdicts.append(verdict)
        before = now
    sys.stdout.write(table(verdicts))
    return 0 if all(verdict.as_expected for verdict in verdicts) else 1


def _lengths(text: str) -> list[int]:
    """Read lengths. Raises ValueError for what is no number, and where mutants are not wrong."""
    lengths = []
    for word in text.split(","):
        number = word.strip()
        if not (number.isascii() and number.isdigit()) or int(number) < mutantbackends.LONG:
            message = f"found {number!r}; allowed: numbers of keys from {mutantbackends.LONG}"
            raise ValueError(message)
        lengths.append(int(number))
    return lengths


def _mutant(backend: str, prepare: Prepare) -> Backend:
    return Mutant(registry.load(backend), prepare)


def _scaled(workload: Workload) -> Workload:
    return dataclasses.replace(workload, scale=workload.scale_value * 1.01)


def _scaled_twice(workload: Workload) -> Workload:
    return dataclasses.replace(workload, scale=1 / workload.head_dim)


def _uncapped(workload: Workload) -> Workload:
    return dataclasses.replace(workload, softcap=None)


def _ahead(workload: Workload) -> Workload:
    window = Window(left=None, right=1, alignment="bottom_right")
    mask = dataclasses.replace(workload.mask, causal="none", window=window)
    return dataclasses.replace(workload, mask=mask)


def _window(more: int) -> Callable[[Workload], Workload]:
    def change(workload: Workload) -> Workload:
        window = workload.mask.window
        assert window is not None
        assert window.left is not None
        wrong = dataclasses.replace(window, left=window.left + more)
        return dataclasses.replace(workload, mask=dataclasses.replace(workload.mask, window=wrong))

    return change


def _shorter(workload: Workload) -> Workload:
    fewer = tuple(n - 1 for n in workload.seqlens_k)
    return dataclasses.replace(workload, seqlens_k=fewer)


def _dk_lost(workload: Workload, outputs: Outputs) -> Outputs:
    assert outputs.dk is not None
    dk = outputs.dk.clone()
    tile = mutantbackends.TILE
    dk[:, workload.seqlens_k[0] // 2 :][:, :tile] = 0
    return dataclasses.replace(outputs, dk=dk)


def _dq_twice(workload: Workload, outputs: Outputs) -> Outputs:
    del workload
    assert outputs.dq is not None
    return dataclasses.replace(outputs, dq=2 * outputs.dq)


_HALF_THE_ROWS = mutantbackends.tile_dropped(rows=lambda n: n // 2, tile=lambda n: n // 4)
_LAST_BLOCK = mutantbackends.tile_dropped(
    rows=lambda n: n - 64, tile=lambda n: n - 2 * mutantbackends.TILE
)
