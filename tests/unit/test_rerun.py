from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest
from host_artifacts import FakeImages, make
from host_fakes import DEVICE, FakeEngine

from attnrepro import carried, placement, rerun, run, runnerwheel
from attnrepro.artifact import container, keys, trust
from attnrepro.artifact.budget import Budget
from attnrepro.artifact.verify import support, verify
from attnrepro.errors import Rejected, Unavailable, UsageError
from attnrepro.rerun import Asked, RerunOutcome
from attnrepro.runnerwheel import RunnerWheel


@pytest.fixture(autouse=True)
def own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, folder in (("HOME", "home"), ("STORE", "store"), ("LOCKS", "locks")):
        monkeypatch.setenv(f"ATTNREPRO_{name}", str(tmp_path / folder))
    (tmp_path / "locks").mkdir()
    monkeypatch.delenv("ATTNREPRO_KEY", raising=False)
    monkeypatch.setattr(placement, "here", lambda vendor, threads: DEVICE)


def again(
    file: Path,
    *,
    asked: Asked | None = None,
    engine: FakeEngine | None = None,
    told: list[str] | None = None,
    **more: Any,
) -> RerunOutcome:
    return rerun.rerun(
        file,
        trust=trust.load(),
        engine=engine or FakeEngine(),
        asked=asked or Asked(),
        options=run.Options(
            output=file.with_name("again.rerun.attnrepro"), runs=file.parent / "runs", replace=True
        ),
        progress=(told if told is not None else []).append,
        **more,
    )


def results(outcome: RerunOutcome) -> dict[str, str]:
    return {name: verdict.result.value for name, verdict in outcome.verdicts.items()}


def test_equal_rerun_on_the_bare_host(tmp_path: Path) -> None:
    outcome = again(make(tmp_path).path)
    assert results(outcome) == {
        "authentic": "yes",
        "image_identical": "not_comparable",
        "kernels_identical": "yes",
        "outputs_identical": "yes",
        "performance_consistent": "yes",
    }
    assert outcome.exit_code == 0


def test_rerun_is_a_signed_statement_about_the_original(tmp_path: Path) -> None:
    original = make(tmp_path).path
    verified = verify(again(original).path, trust=trust.load())
    content = verify(original, trust=trust.load()).statement.content_sha256
    assert verified.kind == "rerun"
    assert verified.statement.original_sha256 == content
    assert verified.predicate["verdicts"]["outputs_identical"]["result"] == "yes"


def test_rerun_by_another_key_counts_as_independent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = make(tmp_path).path
    author = verify(original, trust=trust.load()).signer
    monkeypatch.setenv("ATTNREPRO_HOME", str(tmp_path / "reviewer"))
    outcome = again(original)
    assert results(outcome)["authentic"] == "no"
    assert outcome.exit_code == 0
    entry = trust.TrustedKey(owner="author", key=author, added=trust._time("2026-01-01T00:00:00Z"))
    store = trust.load().with_key(entry)
    first, second = (verify(path, trust=store) for path in (original, outcome.path))
    assert support(first, [second], trust=store).independent == ("self",)


def test_rerun_uses_the_image_of_the_artifact(tmp_path: Path) -> None:
    original = make(tmp_path, engine=FakeEngine(contained=True)).path
    same = again(original, engine=FakeEngine(contained=True), images=FakeImages(), asked=YES)
    assert results(same)["image_identical"] == "yes"


YES = Asked(yes=True)


def test_other_image_is_told_and_fails_only_where_required(tmp_path: Path) -> None:
    original = make(tmp_path, engine=FakeEngine(contained=True)).path
    images = FakeImages("2")
    images.first_difference = "usr/bin/python3: other content"
    engine = FakeEngine(contained=True)
    outcome = again(original, engine=engine, images=images, asked=YES)
    verdict = outcome.verdicts["image_identical"]
    assert (verdict.result, verdict.required) == ("no", False)
    assert verdict.first_difference == "usr/bin/python3: other content"
    assert outcome.exit_code == 0
    required = Asked(yes=True, require_image=True)
    assert again(original, engine=engine, images=images, asked=required).exit_code == 6


def other_bits(result: dict[str, Any]) -> None:
    for entry in result["entries"]:
        if "bits" in entry and entry["subject"] == "fast":
            entry["bits"]["digests"]["out"] = "99" * 32


def test_other_bits_within_scope_are_a_failure(tmp_path: Path) -> None:
    outcome = again(make(tmp_path).path, engine=FakeEngine(change=other_bits))
    verdict = outcome.verdicts["outputs_identical"]
    assert (verdict.result, verdict.required) == ("no", True)
    assert verdict.first_difference is not None
    assert verdict.first_difference.startswith("c000 fast out: cdcd")
    assert outcome.exit_code == 5


def on_other_vendor(result: dict[str, Any]) -> None:
    result["device"] = DEVICE | {"vendor": "Other Vendor"}


def test_device_outside_the_scope_is_refused_without_the_flag(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = make(tmp_path).path
    other = DEVICE | {"vendor": "Other Vendor"}
    monkeypatch.setattr(placement, "here", lambda vendor, threads: other)
    engine = FakeEngine(change=on_other_vendor)
    with pytest.raises(Unavailable, match="vendor Other Vendor here, Some Vendor there"):
        again(original, engine=engine)
    assert engine.specs == []
    outcome = again(original, engine=engine, asked=Asked(on_other_device=True))
    assert results(outcome)["outputs_identical"] == "yes"
    assert results(outcome)["performance_consistent"] == "not_comparable"


def test_other_bits_outside_the_scope_are_no_failure(tmp_path: Path) -> None:
    def change(result: dict[str, Any]) -> None:
        other_bits(result)
        on_other_vendor(result)

    outcome = again(make(tmp_path).path, engine=FakeEngine(change=change))
    verdict = outcome.verdicts["outputs_identical"]
    assert (verdict.result, verdict.required) == ("no", False)
    assert "outside the declared scope" in verdict.reason
    assert outcome.exit_code == 0


def test_failed_cells_of_a_rerun_are_4_and_lost_bits_come_first(tmp_path: Path) -> None:
    def crash(result: dict[str, Any]) -> None:
        if result["stage"] == "launch" and result["launch"] == 2:
            result["entries"][1] |= {"status": "CRASH", "reason": "signal 11"}

    assert again(make(tmp_path).path, engine=FakeEngine(change=crash)).exit_code == 4


def test_other_library_explains_and_decides_nothing(tmp_path: Path) -> None:
    def change(result: dict[str, Any]) -> None:
        for entry in result["entries"]:
            if "execution" in entry:
                entry["execution"]["libraries"]["torch/lib/libtorch_cpu.so"]["sha256"] = "77" * 32

    outcome = again(make(tmp_path).path, engine=FakeEngine(change=change))
    verdict = outcome.verdicts["kernels_identical"]
    assert (verdict.result, verdict.required) == ("no", False)
    assert "libtorch_cpu.so" in (verdict.first_difference or "")
    assert outcome.exit_code == 0


def test_tampered_artifact_is_rejected_before_anything_runs(tmp_path: Path) -> None:
    path = make(tmp_path).path
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    engine = FakeEngine()
    with pytest.raises(Rejected):
        again(path, engine=engine)
    assert engine.specs == []


def test_rerun_of_a_rerun_is_refused(tmp_path: Path) -> None:
    outcome = again(make(tmp_path).path)
    with pytest.raises(UsageError, match="is a rerun itself"):
        again(outcome.path)


def test_foreign_runner_needs_a_yes_after_its_difference(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = runnerwheel.installed()
    members = container.read(own.data, budget=Budget())
    members["attnrepro_runner/elapsed.py"] += b"# changed by somebody\n"
    data = container.write(members)
    foreign = RunnerWheel(
        name=own.name, version=own.version, data=data, sha256=hashlib.sha256(data).hexdigest()
    )
    with monkeypatch.context() as patched:
        patched.setattr(run.runnerwheel, "installed", lambda: foreign)
        original = make(tmp_path).path
    told: list[str] = []
    engine = FakeEngine()
    with pytest.raises(UsageError, match="not one of this package") as caught:
        again(original, engine=engine, told=told)
    assert engine.specs == []
    assert "NOT in a container" in (caught.value.hint or "")
    assert any("+# changed by somebody" in line for line in told)
    outcome = again(original, engine=engine, asked=YES)
    verified = verify(outcome.path, trust=trust.load())
    assert verified.predicate["runner"]["sha256"] == foreign.sha256
    assert carried.runner(verified).data == data


def test_foreign_recipe_needs_a_yes(tmp_path: Path) -> None:
    original = make(tmp_path, engine=FakeEngine(contained=True)).path
    verified = verify(original, trust=trust.load())
    assert carried.recipe(verified, "cpu-torch2.13-r1") == {
        "Dockerfile": b"FROM scratch\n",
        "image.json": b"{}\n",
    }
    with pytest.raises(UsageError):
        again(original, engine=FakeEngine(contained=True), images=FakeImages())


def test_key_that_cannot_be_used_stops_before_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = make(tmp_path).path
    keys.key_path().chmod(0o644)
    engine = FakeEngine()
    with pytest.raises(UsageError, match="can be read by others"):
        again(original, engine=engine)
    assert engine.specs == []


def test_name_of_the_rerun() -> None:
    assert rerun.default_output(Path("/x/a.attnrepro")) == Path("a.rerun.attnrepro")
