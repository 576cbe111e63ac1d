"""Dropout and float8 through whole runs: the oracle is given what it needs to judge them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from numerics_fakes import ReferenceBackend, fresh_tensors, workload_of
from run_fakes import adapter, cell, document, results, run

from attnrepro_runner import dropout, oracle
from attnrepro_runner.backends import registry

DROPPED = {
    "phase": "forward_backward",
    "dropout": {"p": 0.25, "seed": 5, "offset": 3},
    "heads_q": 4,
    "heads_kv": 2,
    "mask": {"causal": "top_left"},
}


@pytest.mark.parametrize("layout", ["bshd", "thd"])
def test_the_mask_read_out_is_the_mask_of_the_first_call(layout: str) -> None:
    lengths = [20, 7] if layout == "thd" else [20, 20]
    w = workload_of(**{**DROPPED, "batch": 2, "layout": layout}, seqlen_q=lengths, seqlen_k=lengths)
    backend, t, cpu = registry.load("eager"), fresh_tensors(w), torch.device("cpu")
    chosen = oracle.sample(w, pairs=2)
    keep = dropout.read_mask(backend, {}, w, cpu, pairs=oracle.pairs(w, chosen))
    missing = set(oracle.pairs(w, None)) - set(oracle.pairs(w, chosen))
    with pytest.raises(KeyError):  # of the other heads nothing is kept in memory
        keep(*missing.pop())
    judge = oracle.Oracle(w, {}, t, chosen, keep=keep)
    prepared = backend.prepare(w, {}, t)
    first, second = prepared.step(), prepared.step()
    assert judge.check(first, empty_row_lse=backend.empty_row_lse).ok
    assert not judge.check(second, empty_row_lse=backend.empty_row_lse).ok
    unjudged = oracle.Oracle(w, {}, t, chosen)
    assert not unjudged.check(first, empty_row_lse=backend.empty_row_lse).ok


def test_eager_draws_a_mask_for_each_seed_and_offset() -> None:
    def first(**given: int) -> torch.Tensor:
        w = workload_of(phase="forward", dropout={"p": 0.5, **given})
        return registry.load("eager").prepare(w, {}, fresh_tensors(w)).step().out

    outs = [first(seed=s, offset=o) for s, o in ((1, 0), (1, 1), (2, 0), (1, 0))]
    assert torch.equal(outs[0], outs[3])
    assert not any(torch.equal(outs[0], other) for other in outs[1:3])


@pytest.mark.slow
def test_a_dropout_cell_passes_and_an_unscaled_one_does_not(tmp_path: Path) -> None:
    body = "o = p.step(); return dataclasses.replace(o, out=o.out * 0.75)"
    text = "import dataclasses\n" + adapter("unscaled", body).replace(
        "seqlens_q[0] != 25", "batch > 1"
    )
    (tmp_path / "unscaled_adapter.py").write_text(text)
    subjects = {"eager": "eager", "unscaled": "unscaled"}
    found = document([cell(0, list(subjects), **DROPPED)], subjects, ["check", "launch-0"])
    found["subjects"][1]["adapter"] = "unscaled_adapter"
    assert run(found, tmp_path, modules=tmp_path) == 0
    done = results(tmp_path)
    entries = {e["subject"]: e for e in done["check"]["entries"]}
    eager = entries["eager"]
    assert eager["status"] == "PASS", eager["reason"]
    assert eager["probes"]["dropout"]["next_call_differs"]
    assert set(eager["bits"]["observed"].values()) == {"repeats"}
    assert entries["unscaled"]["status"] == "INCORRECT"
    timed = {e["subject"]: e for e in done["launch-0"]["entries"]}
    assert timed["eager"]["status"] == "PASS", timed["eager"]["reason"]
    assert timed["eager"]["samples"]


@pytest.mark.slow
def test_a_float8_check_tells_the_total_error(tmp_path: Path) -> None:
    text = "from numerics_fakes import ReferenceBackend\nBACKEND = ReferenceBackend()\n"
    (tmp_path / "float8_adapter.py").write_text(text)
    (tmp_path / "numerics_fakes.py").symlink_to(Path(__file__).parent / "numerics_fakes.py")
    name = ReferenceBackend().name
    workload = {"phase": "forward", "dtype": "float8_e4m3fn", "dtype_out": "bfloat16", "fp8": {}}
    found = document([cell(0, ["fake"], **workload)], {"fake": name}, ["check"])
    found["subjects"][0]["adapter"] = "float8_adapter"
    assert run(found, tmp_path, modules=tmp_path) == 0
    (entry,) = results(tmp_path)["check"]["entries"]
    assert entry["oracle_before"]["tensors"]["out"]["total_max_abs"], entry["reason"]
