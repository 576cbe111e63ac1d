"""The oracle: outputs against a float64 reference from the same rounded inputs, block by block."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from attnrepro_runner import inputs, reference, views
from attnrepro_runner.blockrule import Expected, Rule, Tally
from attnrepro_runner.philox import permutation

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from attnrepro_runner.backends.base import Outputs, Tensors
    from attnrepro_runner.reference import GroupResult, KeepMask
    from attnrepro_runner.semantics import Workload

GRADIENTS = ("dq", "dk", "dv")
_ALIBI_GRADIENTS = 8.0
_FP8_CACHE_MAXIMUM = 4.0
_FP8_CACHE_MEAN = 3.0
_SOFTCAP_LSE = 4.0
"""Kernels cap logits by the hardware's approximate tanh (flash-attn 2, 3 and 4 on an H200 are up
to 1.14 times what 2 allows)."""
_FP8_LSE_ULPS = 2048
"""Hopper accumulates FP8 products with about 14 bits: FlashAttention-3's LSE is off by 550 ulps."""
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

    @property
    def ok(self) -> bool:
        """Whether every tensor is within the rule and nothing else was touched."""
        return self.guards_intact and all(tally.ok for tally in self.tensors.values())

    def status(self) -> str:
        """PASS or INCORRECT."""
        return "PASS" if self.ok else "INCORRECT"

    def reason(self) -> str | None:
        """Say what is wrong, with its place; None for PASS."""
        notes = [t.describe(name) for name, t in self.tensors.items() if not t.ok]
        if not self.guards_intact:
            notes.append("the call changed its inputs or the memory round them")
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
class _GroupReference:
    """Expected tensors of the query heads of one KV head."""

    expected: dict[str, Expected] = field(default_factory=dict)
    unquantised_out: torch.Tensor | None = None


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
        self.rules = _rules(workload, accuracy)
        self.groups, self.partial = _groups(workload, select), select is not None
        self.blocks = None if select is None or workload.has_backward else select.blocks
        self._kept: dict[tuple[int, tuple[int, ...]], _GroupReference] = {}
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
        for b, heads in self.groups:
            group = self._reference(b, heads)
            for name, expected in group.expected.items():
                if name in tallies and tallies[name].worst_ratio < float("inf"):
                    found = self._found(outputs, name, b, heads, expected)
                    if name == "lse":
                        found = _translate(found, expected, empty_row_lse)
                    elif name == "out" and self.workload.mask.masked_rows == "nan":
                        found = _demand_nan(found, expected)
                    tallies[name].add(found, expected, b, heads)
            if group.unquantised_out is not None and tallies["out"].worst_ratio < float("inf"):
                found = self._found(outputs, "out", b, heads, group.expected["out"])
                total = (found.to(torch.float64) - group.unquantised_out).abs().max()
                before = tallies["out"].total_max_abs or 0.0
                tallies["out"].total_max_abs = max(before, float(total))
        return OracleReport(
            rule=self._rule_text(),
            tensors=tallies,
            guards_intact=intact,
            poison=poison,
            duration_ns=time.perf_counter_ns() - start,
            seed=self.seed,
            coverage=self._coverage(),
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

    def _reference(self, b: int, heads: tuple[int, ...]) -> _GroupReference:
        key = (b, heads)
        if key in self._kept:
            return self._kept[key]
        workload = self.workload
        given = reference.from_tensors(workload, self.tensors, b, heads)
        block = self.rules["out"].block
        rows = None
        if self.blocks is not None:
            end = workload.seqlens_q[b]
            rows = [
                range(n * block, min((n + 1) * block, end)) for n in self.blocks if n * block < end
            ]
        high, low = (
            reference.attend(workload, given, b, heads, precision, blocks=rows, keep=self.keep)
            for precision in (reference.HIGH, reference.low_precision(workload))
        )
        made = _GroupReference(expected=_expected(workload, b, high, low))
        if self.unquantised is not None:
            drawn = reference.from_packed(workload, self.unquantised, b, heads)
            made.unquantised_out = reference.attend(
                workload, drawn, b, heads, reference.HIGH, blocks=rows, keep=self.keep
            ).out
        size = sum(expected.bytes() for expected in made.expected.values())
        if self._kept_bytes + size <= _KEPT_BYTES:
            self._kept[key] = made
            self._kept_bytes += size
        return made

    def _found(
        self, outputs: Outputs, name: str, b: int, heads: tuple[int, ...], expected: Expected
    ) -> torch.Tensor:
        """Read the rows of one tensor as (heads, rows, width)."""
        tensor: torch.Tensor = getattr(outputs, name)
        if name in ("dk", "dv"):
            return views.key_rows(tensor, self.workload, b, self.workload.kv_head(heads[0]))[None]
        if name == "lse":
            rows = [views.lse_row(tensor, self.workload, b, h)[:, None] for h in heads]
        else:
            rows = [views.query_rows(tensor, self.workload, b, h) for h in heads]
        return torch.stack([r[expected.rows] for r in rows])

    def _rule_text(self) -> str:
        parts = [
            f"{name}: m={rule.multiplier:g} c={rule.ulps} ulp({str(rule.dtype)[6:]})"
            for name, rule in self.rules.items()
        ]
        text = f"two_reference per {self.rules['out'].block} rows; " + "; ".join(parts)
        return f"{text}; lse, dq, dk: + 2 ulp(float32) of the largest term summed"

    def _coverage(self) -> str:
        heads = sum(len(group) for _, group in self.groups)
        total = self.workload.batch * self.workload.heads_q
        text = f"{heads} of {total} (batch, head) pairs"
        if self.blocks is None:
            return f"{text}, all rows"
        return f"{text}, row blocks {', '.join(map(str, self.blocks))}"


def _rules(workload: Workload, accuracy: Mapping[str, object]) -> dict[str, Rule]:
    ulps = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 2}
    ulps |= _mapping(accuracy, "ulps")
    block = accuracy.get("block", 64)
    assert isinstance(block, int)
    out, grads, lse = (
        float(_mapping(accuracy, name).get("multiplier", default))
        for name, default in (("output", 2), ("gradients", 3), ("lse", 2))
    )
    if workload.alibi is not None:
        grads = max(grads, _ALIBI_GRADIENTS)
    if workload.softcap is not None:
        lse = max(lse, _SOFTCAP_LSE)
    cached_fp8 = workload.fp8 is not None and workload.cache is not None

    def rule(
        multiplier: float, dtype: str, mean: float | None = None, *, ulps_: int | None = None
    ) -> Rule:
        return Rule(
            block=block,
            multiplier=multiplier,
            ulps=ulps[dtype] if ulps_ is None else ulps_,
            dtype=views.DTYPES[dtype],
            mean_multiplier=mean,
        )

    rules = {
        "out": rule(
            max(out, _FP8_CACHE_MAXIMUM) if cached_fp8 else out,
            workload.dtype_out,
            _FP8_CACHE_MEAN if cached_fp8 else None,
        ),
        # An LSE is a float32 whatever is tested.
        "lse": rule(lse, "float32", ulps_=_FP8_LSE_ULPS if workload.fp8 is not None else None),
    }
    if workload.has_backward:
        rules |= {name: rule(grads, workload.dtype) for name in GRADIENTS}
    return rules


def _mapping(accuracy: Mapping[str, object], name: str) -> dict[str, int]:
    value = accuracy.get(name, {})
    assert isinstance(value, dict)
    return value


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
    workload: Workload, b: int, high: GroupResult, low: GroupResult
) -> dict[str, Expected]:
    device = high.out.device
    rows = high.rows.to(device)
    attending = workload.attending_rows(b)
    empty = (rows < attending.start) | (rows >= attending.stop)
    none = torch.zeros_like(empty)
    expected = {
        "out": Expected.of(high.out, low.out, rows, empty),
        "lse": Expected.of(
            high.lse[..., None], low.lse[..., None], rows, none, high.terms.get("lse")
        ),
    }
    if high.dq is None or low.dq is None:
        return expected
    assert high.dk is not None
    assert high.dv is not None
    assert low.dk is not None
    assert low.dv is not None
    keys = torch.arange(workload.seqlens_k[b], device=device)
    attended = workload.attended_keys(b)
    ignored = (keys < attended.start) | (keys >= attended.stop)
    expected["dq"] = Expected.of(high.dq, low.dq, rows, empty, high.terms.get("dq"))
    expected["dk"] = Expected.of(high.dk[None], low.dk[None], keys, ignored, high.terms.get("dk"))
    expected["dv"] = Expected.of(high.dv[None], low.dv[None], keys, ignored)
    return expected


def _translate(found: torch.Tensor, expected: Expected, empty_row_lse: float) -> torch.Tensor:
    """Read a backend's own value of empty rows as -inf; any other value there is wrong."""
    actual = found.to(torch.float64)
    empty = expected.values == -torch.inf
    wrong = torch.where(actual.isnan(), actual, torch.inf)
    return torch.where(empty, torch.where(actual == empty_row_lse, -torch.inf, wrong), actual)


def _demand_nan(found: torch.Tensor, expected: Expected) -> torch.Tensor:
    """Under masked_rows nan: NaN of an empty row is right (0 here), all else is wrong."""
    empty = expected.exact[None, :, None]
    return torch.where(empty, torch.where(found.isnan(), 0.0, torch.inf), found.to(torch.float64))


def _spread(count: int, wanted: int, seed: int) -> tuple[int, ...]:
    """First, last, and then the permutation's first, until there are enough."""
    chosen = dict.fromkeys((0, count - 1)) if count else {}
    chosen = dict.fromkeys([*chosen][: max(wanted, 1)])
    for i in permutation(count, seed) if wanted < count else range(count):
        if len(chosen) >= wanted:
            break
        chosen[i] = None
    return tuple(sorted(chosen))
