"""The oracle: outputs against a float64 reference from the same rounded inputs, block by block."""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import torch

from attnrepro_runner import groups, inputs, reference, tolerances, views
from attnrepro_runner.blockrule import Expected, Tally
from attnrepro_runner.philox import permutation

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from attnrepro_runner.backends.base import Outputs, Tensors
    from attnrepro_runner.blockrule import Rule
    from attnrepro_runner.groups import Group
    from attnrepro_runner.reference import GroupResult, KeepMask
    from attnrepro_runner.semantics import Workload

_KEPT_BYTES = 1 << 30
"""References beyond this are computed again at the next check."""


@dataclass(frozen=True, kw_only=True)
class Selection:
    """Part of a workload that is checked."""

    pairs: tuple[tuple[int, int], ...]
    """(sequence, query head)."""
    blocks: tuple[int, ...] | None = None
    """Blocks of query rows of each pair, in phases without a backward; None is all."""


def sample(
    workload: Workload, *, pairs: int, blocks: int | None = None, seed: int = 0, block: int = 64
) -> Selection:
    """Draw a selection: the first and the last (sequence, head) pair and block, the rest by seed.

    Args:
        workload: what is to be checked.
        pairs: (sequence, query head) pairs, at most all.
        blocks: blocks of query rows a pair; None is all. Ignored with a backward.
        seed: of the draw.
        block: rows a block.

    """
    every = workload.batch * workload.heads_q
    chosen = _spread(every, pairs, seed)
    rows = None
    if blocks is not None and not workload.has_backward:
        rows = _spread(-(-max(workload.seqlens_q) // block), blocks, seed + 1)
    return Selection(pairs=tuple(divmod(i, workload.heads_q) for i in chosen), blocks=rows)


@dataclass(kw_only=True)
class OracleReport:
    """The verdict on one call's outputs."""

    rule: str
    tensors: dict[str, Tally]
    guards_intact: bool
    poison: str
    duration_ns: int
    seed: str
    coverage: str
    appended: bool = True
    """Whether the cache holds the new keys and values after the call."""

    @property
    def ok(self) -> bool:
        """Whether every tensor is within the rule and nothing else was touched."""
        whole = self.guards_intact and self.appended
        return whole and all(tally.ok for tally in self.tensors.values())

    def status(self) -> str:
        """PASS or INCORRECT."""
        return "PASS" if self.ok else "INCORRECT"

    def reason(self) -> str | None:
        """Say what is wrong, with its place; None for PASS."""
        notes = [t.describe(name) for name, t in self.tensors.items() if not t.ok]
        if not self.guards_intact:
            notes.append("the call changed its inputs or the memory round them")
        if not self.appended:
            notes.append("the cache does not hold the new keys and values after the call")
        return "; ".join(notes) or None

    def to_json(self) -> dict[str, object]:
        """Return the `oracle` object of a result document."""
        return {
            "reference_dtype": "float64",
            "rule": self.rule,
            "tensors": {name: tally.to_json() for name, tally in self.tensors.items()},
            "guards_intact": self.guards_intact,
            "poison": self.poison,
            "duration_ns": self.duration_ns,
            "seed": self.seed,
            "coverage": self.coverage,
        }


@dataclass(kw_only=True)
class _BatchReference:
    """Expected tensors of a batch of groups."""

    expected: dict[str, Expected]
    unquantised_out: torch.Tensor | None = None
    """(pairs, rows, head_dim_v)."""


class Oracle:
    """References of one workload and one set of inputs, shared by all calls on them.

    References are computed at the first check, from the inputs as they were given here: `check`
    first proves that nobody changed them.
    """

    def __init__(
        self,
        workload: Workload,
        accuracy: Mapping[str, object],
        tensors: Tensors,
        select: Selection | None = None,
        *,
        unquantised: Mapping[str, torch.Tensor] | None = None,
        keep: KeepMask | None = None,
        seed: str = "",
    ) -> None:
        """Bind.

        Args:
            workload: the semantics.
            accuracy: the manifest's `accuracy` object.
            tensors: what the backend was given.
            select: what is checked; None is all.
            unquantised: `inputs.draw` of a float8 workload, for the total error.
            keep: the weights that dropout kept, as read out of the backend.
            seed: what identifies the inputs, for the record.

        """
        self.workload, self.tensors, self.unquantised, self.keep = (
            workload,
            tensors,
            unquantised,
            keep,
        )
        self.seed = seed
        self.rules = tolerances.rules(workload, accuracy)
        self.groups, self.partial = _groups(workload, select), select is not None
        self.blocks = None if select is None or workload.has_backward else select.blocks
        self._batches = groups.batches(
            workload,
            self.groups,
            tensors.q.device.type,
            rows=None if self.blocks is None else len(self.blocks) * self.rules["out"].block,
        )
        self._kept: dict[int, _BatchReference] = {}
        self._kept_bytes = 0
        self._marks = inputs.unchanging(workload, tensors)

    def check(
        self, outputs: Outputs, *, empty_row_lse: float, poison: str = "best_effort"
    ) -> OracleReport:
        """Judge one call's outputs.

        Args:
            outputs: in the workload's layout.
            empty_row_lse: the backend's own LSE of a row that attends nothing.
            poison: "full" where the caller owned poisoned outputs, else "best_effort".

        """
        start = time.perf_counter_ns()
        tallies = self._tallies(outputs)
        intact = inputs.guards_intact(self.tensors)
        intact &= inputs.unchanging(self.workload, self.tensors) == self._marks
        for n, batch in enumerate(self._batches):
            self._judge(outputs, tallies, batch, self._reference(n), empty_row_lse)
        return OracleReport(
            rule=tolerances.describe(self.workload, self.rules),
            tensors=tallies,
            guards_intact=intact,
            poison=poison,
            duration_ns=time.perf_counter_ns() - start,
            seed=self.seed,
            coverage=self._coverage(),
            appended=inputs.appended(self.workload, self.tensors),
        )

    def _tallies(self, outputs: Outputs) -> dict[str, Tally]:
        """Open a tally for each tensor that must or may be there; fail those of a wrong shape."""
        tallies: dict[str, Tally] = {}
        for name, rule in self.rules.items():
            tensor: torch.Tensor | None = getattr(outputs, name)
            if tensor is None and name == "lse":
                continue
            tallies[name] = tally = Tally(rule=rule)
            shape = self.workload.shape(name.removeprefix("d"))
            if tensor is None:
                tally.fail("not returned")
            elif tuple(tensor.shape) != shape or tensor.dtype != rule.dtype:
                tally.fail(f"{tensor.dtype} {tuple(tensor.shape)}, not {rule.dtype} {shape}")
            elif self.partial and name != "lse" and self.workload.mask.masked_rows == "zero":
                # Cheap, and of every element: a head that was never written holds the poison.
                bad = tensor.numel() - int(torch.isfinite(tensor.float()).sum())
                if bad:
                    tally.fail(f"{bad} elements of the whole tensor are NaN or infinite")
        return tallies

    def _judge(
        self,
        outputs: Outputs,
        tallies: Mapping[str, Tally],
        batch: tuple[Group, ...],
        wanted: _BatchReference,
        empty_row_lse: float,
    ) -> None:
        """Add what a call gave for a batch to the tallies of those tensors that can be compared."""
        queries, firsts = groups.query_pairs(batch), [(b, heads[0]) for b, heads in batch]
        for name, expected in wanted.expected.items():
            if name not in tallies or tallies[name].failed or not expected.values.numel():
                continue
            found = self._found(outputs, name, batch, expected)
            if name == "out" and wanted.unquantised_out is not None:
                total = (found.to(torch.float64) - wanted.unquantised_out).abs().max()
                before = tallies["out"].total_max_abs or 0.0
                tallies["out"].total_max_abs = max(before, float(total.nan_to_num(torch.inf)))
            if name == "lse":
                found = _translate(found, expected, empty_row_lse)
            elif name == "out" and self.workload.mask.masked_rows == "nan":
                found = _demand_nan(found, expected)
            tallies[name].add(found, expected, firsts if name in ("dk", "dv") else queries)

    def _reference(self, n: int) -> _BatchReference:
        """Compute what batch n should hold, or return what is kept of it."""
        if n in self._kept:
            return self._kept[n]
        workload, batch = self.workload, self._batches[n]
        given = groups.from_tensors(workload, self.tensors, batch)
        block = self.rules["out"].block
        rows = None
        if self.blocks is not None:
            end = workload.seqlens_q[batch[0][0]]
            rows = [
                range(n * block, min((n + 1) * block, end)) for n in self.blocks if n * block < end
            ]
        high, low = (
            reference.attend(workload, given, batch, precision, blocks=rows, keep=self.keep)
            for precision in (reference.HIGH, reference.low_precision(workload))
        )
        made = _BatchReference(expected=_expected(workload, self.rules, batch[0][0], high, low))
        if self.unquantised is not None:
            drawn = groups.from_packed(workload, self.unquantised, batch)
            made.unquantised_out = reference.attend(
                workload, drawn, batch, reference.HIGH, blocks=rows, keep=self.keep
            ).out.flatten(0, 1)
        size = sum(expected.bytes() for expected in made.expected.values())
        if self._kept_bytes + size <= _KEPT_BYTES:
            self._kept[n] = made
            self._kept_bytes += size
        return made

    def _found(
        self, outputs: Outputs, name: str, batch: tuple[Group, ...], expected: Expected
    ) -> torch.Tensor:
        """Read the rows of one tensor as (pairs, rows, width)."""
        tensor: torch.Tensor = getattr(outputs, name)
        if name in ("dk", "dv"):
            return views.gather_keys(tensor, self.workload, groups.key_pairs(self.workload, batch))
        queries = groups.query_pairs(batch)
        if name == "lse":
            return views.gather_lses(tensor, self.workload, queries, expected.rows)[..., None]
        return views.gather_queries(tensor, self.workload, queries, expected.rows)

    def _coverage(self) -> str:
        heads = sum(len(group) for _, group in self.groups)
        total = self.workload.batch * self.workload.heads_q
        text = f"{heads} of {total} (batch, head) pairs"
        if self.blocks is None:
            return f"{text}, all rows"
        return f"{text}, row blocks {', '.join(map(str, self.blocks))}"


def pairs(workload: Workload, select: Selection | None) -> list[tuple[int, int]]:
    """Return every (sequence, query head) that an oracle of this selection reads."""
    return [(b, h) for b, heads in _groups(workload, select) for h in heads]


def _groups(
    workload: Workload, select: Selection | None
) -> tuple[tuple[int, tuple[int, ...]], ...]:
    """Group pairs by KV head; with a backward, whole groups, since dK and dV sum over them."""
    shared = workload.heads_q // workload.heads_kv
    if select is None:
        chosen: Sequence[tuple[int, int]] = [
            (b, h) for b in range(workload.batch) for h in range(workload.heads_q)
        ]
    else:
        chosen = select.pairs
    groups: dict[tuple[int, int], set[int]] = {}
    for b, h in chosen:
        g = workload.kv_head(h)
        members = groups.setdefault((b, g), set())
        members.update(range(g * shared, (g + 1) * shared) if workload.has_backward else (h,))
    return tuple((b, tuple(sorted(heads))) for (b, _), heads in sorted(groups.items()))


def _expected(
    workload: Workload, rules: Mapping[str, Rule], b: int, high: GroupResult, low: GroupResult
) -> dict[str, Expected]:
    """Join the two computations of a batch, whose sequences are as long as sequence b."""
    empty = _outside(high.rows, workload.attending_rows(b))
    keys = torch.arange(workload.seqlens_k[b])
    ignored = _outside(keys, workload.attended_keys(b))
    places = {
        "out": (high.rows, empty),
        "lse": (high.rows, None),
        "dq": (high.rows, empty),
        "dk": (keys, ignored),
        "dv": (keys, ignored),
    }
    expected = {}
    for name, rule in rules.items():
        rows, exact = places[name]
        expected[name] = Expected.of(
            rule,
            _by_pair(name, getattr(high, name)),
            _by_pair(name, getattr(low, name)),
            rows,
            exact=exact,
            terms=high.terms.get(name),
        )
    return expected


def _by_pair(name: str, x: torch.Tensor) -> torch.Tensor:
    """View as (pairs, rows, width)."""
    if name in ("dk", "dv"):
        return x
    return x.flatten(0, 1)[..., None] if name == "lse" else x.flatten(0, 1)


def _outside(index: torch.Tensor, inside: range) -> torch.Tensor:
    return (index < inside.start) | (index >= inside.stop)


def _translate(found: torch.Tensor, expected: Expected, empty_row_lse: float) -> torch.Tensor:
    """Read a backend's own value of empty rows as -inf; any other value there is wrong."""
    actual = found.to(torch.float64)
    empty = expected.values == -torch.inf
    wrong = torch.where(actual.isnan(), actual, torch.inf)
    return torch.where(empty, torch.where(actual == empty_row_lse, -torch.inf, wrong), actual)


def _demand_nan(found: torch.Tensor, expected: Expected) -> torch.Tensor:
    """Under masked_rows nan: NaN of an empty row is right (0 here), all else is wrong."""
    if expected.exact is None:
        return found
    empty = expected.exact[:, None]
    return torch.where(empty, torch.where(found.isnan(), 0.0, torch.inf), found.to(torch.float64))


@lru_cache(maxsize=64)
def _spread(count: int, wanted: int, seed: int) -> tuple[int, ...]:
    """First, last, and then the permutation's first, until there are enough."""
    chosen = dict.fromkeys((0, count - 1)) if count else {}
    chosen = dict.fromkeys([*chosen][: max(wanted, 1)])
    for i in permutation(count, seed) if wanted < count else range(count):
        if len(chosen) >= wanted:
            break
        chosen[i] = None
    return tuple(sorted(chosen))
