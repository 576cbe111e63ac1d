from __future__ import annotations

import pytest

from attnrepro_runner import mutants
from attnrepro_runner.mutants import Case, Verdict

QUICK = {
    "honest causal",
    "honest steep float32",
    "K pages swapped",
    "TF32 products, steep",
    "tile of keys dropped for half the rows",
}
BY_ORACLE_ALONE = {
    "tile of keys dropped for half the rows",
    "one tile of the last block dropped",
    "dK of one tile lost",
    "dQ added twice",
    "TF32 products",
    "TF32 products, steep",
}


def judge(chosen: list[Case], lengths: tuple[int, ...] = (1024,)) -> list[Verdict]:
    verdicts = list(mutants.run(lengths, chosen))
    assert len(verdicts) == len(chosen) * len(lengths)
    return verdicts


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in QUICK else pytest.mark.slow)
        for name in sorted(case.name for case in mutants.cases())
    ],
)
def test_mutants_die_and_controls_live(name: str) -> None:
    (verdict,) = judge([case for case in mutants.cases() if case.name == name])
    assert verdict.as_expected, verdict.text()
    assert verdict.killed != name.startswith("honest")
    if name in BY_ORACLE_ALONE:
        assert verdict.probes is None
    if "GQA" in name or "pages" in name:
        assert verdict.probes == "probe k"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_what_the_oracle_alone_finds_does_not_survive_at_4k() -> None:
    """The probes never see these; `python -m attnrepro_runner mutants` judges all, to 64k."""
    wanted = {*BY_ORACLE_ALONE, "honest causal", "honest training", "honest float32"}
    verdicts = judge([case for case in mutants.cases() if case.name in wanted], (4096,))
    assert len(verdicts) == len(wanted)
    assert [v.case.name for v in verdicts if not v.as_expected] == []
    assert {v.case.name for v in verdicts if v.killed and v.probes is None} == BY_ORACLE_ALONE


def test_table_and_exit_status(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    control, *_ = [case for case in mutants.cases() if case.honest]
    mutant, *_ = [case for case in mutants.cases() if not case.honest]
    outcome: dict[str, str | None] = {control.name: None, mutant.name: "probe v"}

    def run(lengths: list[int]) -> list[Verdict]:
        return [
            Verdict(case=case, length=n, probes=outcome[case.name], oracle=None)
            for n in lengths
            for case in (control, mutant)
        ]

    monkeypatch.setattr(mutants, "run", run)
    assert mutants.main(["--lengths", "1024,4096"]) == 0
    printed = capsys.readouterr().out
    assert f"| {mutant.backend} | {mutant.name} | probe v | probe v |" in printed
    assert f"| {control.backend} | {control.name} | passes | passes |" in printed
    outcome[mutant.name] = None
    assert mutants.main([]) == 1
    assert "**SURVIVES**" in capsys.readouterr().out
    outcome[mutant.name], outcome[control.name] = "probe v", "probe k"
    assert mutants.main([]) == 1


@pytest.mark.parametrize("lengths", ["abc", "0", "64", "1023", "-1024", "", "1024,", "1024,x", "²"])
def test_lengths_that_cannot_be_judged_are_told(
    lengths: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(mutants, "run", lambda *_: pytest.fail("it ran"))
    assert mutants.main([f"--lengths={lengths}"]) == 2
    found = capsys.readouterr()
    assert not found.out
    assert found.err.count("\n") == 1
    assert "--lengths: found" in found.err
    assert "from 1024" in found.err
