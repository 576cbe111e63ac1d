"""Random workloads: what a release claims, its backend must do as the semantics say."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, assume, given, settings
from manifest_fakes import subject
from numerics_fakes import ReferenceBackend, ReferencePrepared
from workload_strategies import documents, input_documents

from attnrepro import resources
from attnrepro.manifest.capability import Capability, Device, Supported, decide
from attnrepro.manifest.model import Cell
from attnrepro_runner import dropout, inputs, probes, views
from attnrepro_runner.backends import registry
from attnrepro_runner.oracle import Oracle, pairs
from attnrepro_runner.probeshape import small_workload
from attnrepro_runner.semantics import ACTIVE_FIELDS, Workload
from attnrepro_runner.work import work_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from attnrepro_runner.backends.base import Backend, Outputs, Prepared, Tensors

CPU = torch.device("cpu")
CLAIMS = Capability.load(resources.images_dir() / "cpu-torch2.13" / "r1")
BACKENDS = ("eager", "sdpa.math", "sdpa.flash", "flex", "fake")

# Where most of what is drawn would be refused. flex compiles two or three graphs a workload.
NARROW: dict[str, dict[str, Any]] = {
    "flex": {
        "shortest": 17,
        "phases": ("prefill", "decode"),
        "layouts": ("bshd", "bhsd"),
        "dtypes": ("float32", "bfloat16", "float16"),
    },
    # Row by row in Python.
    "fake": {"longest": 20, "head_dims": (24, 64)},
}
FEW = {"eager": 10, "sdpa.math": 10, "sdpa.flash": 10, "flex": 1, "fake": 8}
MANY = {"eager": 100, "sdpa.math": 100, "sdpa.flash": 100, "flex": 12, "fake": 60}

# What a backend's claims leave out of ACTIVE_FIELDS; nobody here claims to add in float64.
UNCLAIMED = {
    "eager": {"dtype_out", "fp8"},
    "sdpa.math": {"dtype_out", "fp8", "softcap", "alibi", "dropout"},
    "sdpa.flash": {"dtype_out", "fp8", "softcap", "alibi", "dropout", "head_dim_v"},
    "flex": {"dtype_out", "fp8", "dropout", "seqlen_q", "seqlen_k", "layout"},
    "fake": set[str](),
}
UNDECIDED = 0.1
"""Share of judged workloads whose probes may be INCONCLUSIVE; see `Ledger.probe`."""


class Honest(ReferenceBackend):
    """The reference as a backend, for what no CPU backend claims: float8, NaN for empty rows."""

    def prepare(
        self, workload: Workload, options: Mapping[str, object], tensors: Tensors
    ) -> Prepared:
        return HonestPrepared(self, workload, tensors)


class HonestPrepared(ReferencePrepared):
    def step(self) -> Outputs:
        workload, found = self.workload, super().step()
        if workload.mask.masked_rows == "nan":
            for b in range(workload.batch):
                empty = [i for i in range(workload.seqlens_q[b]) if workload.is_empty_row(b, i)]
                for h in range(workload.heads_q):
                    views.query_rows(found.out, workload, b, h)[empty] = torch.nan
        return found


def backend_of(name: str) -> Backend:
    return Honest() if name == "fake" else registry.load(name)


def claims(name: str, document: dict[str, Any]) -> bool:
    if name == "fake":
        # It adds gradients up in their own dtype, and rounds weights to it after dropout.
        trains = document["phase"] == "forward_backward" or document.get("dropout") is not None
        return document["dtype"] != "float8_e4m3fn" or not trains
    asked = Cell(
        id="c000",
        label="",
        variant=None,
        workload=document,
        inputs={},
        request=None,
        subjects=("a",),
    )
    return isinstance(decide(asked, subject(name), CLAIMS, Device(vendor="cpu")), Supported)


@dataclass
class Ledger:
    """What one run of a property test has seen of a backend."""

    name: str
    judged: int = 0
    """Workloads of at least one attended pair that oracle and probes looked at."""
    undecided: list[str] = field(default_factory=list)
    fields: set[str] = field(default_factory=set)
    seen: Counter[str] = field(default_factory=Counter)
    """Distributions, dtypes, and levels that were decided."""

    def judge(self, document: dict[str, Any], given_inputs: dict[str, object]) -> None:
        workload = Workload.parse(document)
        backend = backend_of(self.name)
        # What is claimed is never refused: no Unsupported from here on.
        backend.check(workload, {})
        assert workload.active_fields() <= backend.consumed(workload, {})
        self.compare(backend, workload, given_inputs)
        self.probe(backend, workload)
        if work_of(workload).pairs:
            self.judged += 1
            self.fields |= workload.active_fields()
            self.seen.update([str(given_inputs["distribution"]), workload.dtype])

    def compare(
        self, backend: Backend, workload: Workload, given_inputs: dict[str, object]
    ) -> None:
        """Hold the call, and the backward alone, to the oracle."""
        tensors = inputs.make_inputs(workload, given_inputs, stream=3, device=CPU)
        keep = None
        if workload.dropout is not None:
            keep = dropout.read_mask(backend, {}, workload, CPU, pairs=pairs(workload, None))
        judge = Oracle(workload, {}, tensors, keep=keep)
        prepared = backend.prepare(workload, {}, tensors)
        cache = workload.cache
        if cache is not None and cache.append and not cache.append_in_call:
            prepared.append_step()
        report = judge.check(prepared.step(), empty_row_lse=backend.empty_row_lse)
        assert report.ok, (report.reason(), given_inputs)
        if workload.has_backward:
            # Newly bound: the dropout mask is that of the first call.
            alone = backend.prepare(workload, {}, tensors).backward_step()
            report = judge.check(alone, empty_row_lse=backend.empty_row_lse)
            assert report.ok, ("the backward alone", report.reason(), given_inputs)

    def probe(self, backend: Backend, workload: Workload) -> None:
        """Demand the probes that the semantics call for, and that they decide.

        INCONCLUSIVE is accepted only where an honest call of the same probe is no clearer, and
        then counts as undecided.
        """
        seen = probes.run_probes(backend, {}, workload, CPU)
        assert seen.status() in ("PASS", "INCONCLUSIVE"), seen.reason()
        assert {"v", "k"} <= seen.sets.keys()
        assert [level.name for level in seen.levels] == levels_of(workload)
        assert (seen.dropout is None) == (workload.dropout is None)
        if seen.status() == "INCONCLUSIVE":
            honest = probes.run_probes(Honest(), {}, workload, CPU)
            assert honest.status() == "INCONCLUSIVE", seen.reason()
            self.undecided.append(str(seen.reason()))
        self.seen.update(level.name for level in seen.levels if level.verdict == "match")

    def close(self, least: int) -> None:
        """Fail a run that said nothing: too few workloads, or too many without an answer."""
        assert self.judged >= least, self
        assert len(self.undecided) <= max(1, UNDECIDED * self.judged), self.undecided
        assert self.seen["scale"] >= self.judged / 2, self


def can_be_told(document: dict[str, Any]) -> bool:
    """Whether dropout has weights enough that two of its masks never agree by chance.

    The probe reads those of the first head_dim_v keys.
    """
    if document.get("dropout") is None:
        return True
    workload = Workload.parse(document)
    weights = workload.heads_q * sum(
        len(range(lo, min(hi, workload.head_dim_v)))
        for b in range(workload.batch)
        for lo, hi in (workload.key_range(b, i) for i in range(workload.seqlens_q[b]))
    )
    p = document["dropout"]["p"]
    return bool((p**2 + (1 - p) ** 2) ** weights < 1e-9)


def levels_of(workload: Workload) -> list[str]:
    """Levels that the probe of a workload must classify: none where no row attends two keys."""
    small = small_workload(workload)
    ranges = [small.key_range(b, i) for b in range(small.batch) for i in range(small.seqlens_q[b])]
    if all(hi - lo < 2 for lo, hi in ranges):
        return []
    found = ["scale"]
    found += ["softcap"] if workload.softcap is not None else []
    found += ["q_descale", "k_descale", "v_descale"] if workload.fp8 is not None else []
    return found + (["alibi"] if workload.alibi is not None else [])


def run(name: str, examples: int, **changes: Any) -> Ledger:
    """Judge as many claimed workloads as asked; what is not claimed is drawn again."""
    ledger = Ledger(name)

    @settings(
        max_examples=examples,
        deadline=None,
        derandomize=True,
        phases=(Phase.generate,),  # an example takes seconds, and to shrink it minutes
        suppress_health_check=[
            HealthCheck.filter_too_much,
            HealthCheck.too_slow,
            HealthCheck.data_too_large,
        ],
    )
    @given(document=documents(**changes | NARROW.get(name, {})), given_inputs=input_documents())
    def each(document: dict[str, Any], given_inputs: dict[str, object]) -> None:
        # Hypothesis begins with the simplest, which say little.
        assume(len(Workload.parse(document).active_fields()) > 1)
        assume(claims(name, document) and can_be_told(document))
        ledger.judge(document, given_inputs)

    each()
    return ledger


def test_every_backend_of_the_cpu_stack_is_here() -> None:
    assert {*CLAIMS.backends, "fake"} == {*BACKENDS}


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
@pytest.mark.parametrize("name", BACKENDS)
def test_a_few_random_workloads(name: str) -> None:
    # Some attend nothing.
    run(name, FEW[name], longest=24).close(least=max(1, FEW[name] // 2))


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
@pytest.mark.parametrize("name", BACKENDS)
def test_many_random_workloads(name: str) -> None:
    ledger = run(name, MANY[name])
    ledger.close(least=MANY[name] * 3 // 4)
    if name == "flex":
        return  # too few for every field
    missing = {*ACTIVE_FIELDS} - {"accumulate"} - UNCLAIMED[name] - ledger.fields
    assert not missing, ledger
