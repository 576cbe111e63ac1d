from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from host_fakes import (
    DIGEST,
    check_entry,
    job,
    launch_entry,
    manifest,
    sample_bytes,
    task,
    tasks,
)

from attnrepro import schema
from attnrepro.artifact import samples
from attnrepro.artifact.content import find_real
from attnrepro.errors import AttnreproError
from attnrepro.results import SEVERITY, Context, Merged, merge

CONTEXT = Context(
    run_id="0123456789abcdef",
    started_utc="2026-01-01T00:00:00Z",
    duration_ns=10,
    tool="0.1.0",
    resumed=False,
    engine="podman",
    engine_version="4.3.1",
    contained=True,
    facts={"store": "containers-storage"},
    uncompared={"c000": ["sdpa.math"]},
)


def merged(results: list[dict[str, Any]], **changes: Any) -> Merged:
    return merge(manifest(), [job(**changes)], results, sample_bytes, CONTEXT)


def subject(result: Merged, name: str) -> dict[str, Any]:
    cell = result.observations["cells"][0]
    found: dict[str, Any] = next(s for s in cell["subjects"] if s["subject"] == name)
    return found


def test_documents_are_valid_and_hold_no_reals() -> None:
    result = merged(tasks())
    assert schema.validate("repeatable", result.repeatable) == []
    assert schema.validate("observations", result.observations) == []
    assert find_real(result.repeatable) is None
    assert find_real(result.observations) is None


def test_published_statistics_are_those_that_verify_recomputes() -> None:
    result = merged(tasks())
    samples.check(result.samples, manifest(), result.observations)
    assert len(result.samples) == 10


def test_discarded_samples_take_no_part() -> None:
    launch = subject(merged(tasks()), "fast")["timing"]["host"]["launches"][0]
    assert (launch["n"], launch["used"]) == (12, 10)
    assert launch["median"]["value_ns"] == 1004


def test_a_launch_of_which_nothing_was_written_is_missed() -> None:
    given = [one for one in tasks() if one["launch"] != 1]
    assert len(given) == len(tasks()) - 1
    found = subject(merged(given), "fast")
    assert found["status"] == "INCONCLUSIVE"
    assert found["reason"].startswith("no result was written of ")


def test_median_is_taken_over_launch_medians() -> None:
    clock = subject(merged(tasks()), "slow")["timing"]["host"]
    assert clock["median"]["value_ns"] == 2000 + 2 + 4
    assert clock["interval"]["confidence"] == "0.9375"
    assert (clock["interval"]["lower_ns"], clock["interval"]["upper_ns"]) == (2004, 2008)


def test_candidate_is_compared_with_the_baseline_only() -> None:
    result = merged(tasks())
    (comparison,) = subject(result, "fast")["comparisons"]
    assert comparison["verdict"] == "FASTER"
    assert comparison["baseline"] == "slow"
    assert 1.9 < float.fromhex(comparison["ratio"]) < 2.1
    assert subject(result, "slow")["comparisons"] == []


def test_three_launches_give_no_verdict() -> None:
    three = merged(tasks(launches=3), planned=3)
    (comparison,) = subject(three, "fast")["comparisons"]
    assert comparison["verdict"] == "INCONCLUSIVE"
    assert "needs 4" in comparison["reason"]


@pytest.mark.parametrize("worse", range(len(SEVERITY) - 1))
def test_worst_status_wins(worse: int) -> None:
    results = tasks()
    results[1]["entries"][0] |= {"status": SEVERITY[worse + 1], "reason": "mild"}
    results[2]["entries"][0] |= {"status": SEVERITY[worse], "reason": "bad"}
    found = subject(merged(results), "fast")
    assert found["status"] == SEVERITY[worse]
    assert found["reason"] == "launch-1: bad"


@pytest.mark.parametrize("status", ["INCORRECT", "FALLBACK", "INVALID"])
def test_times_of_wrong_work_are_not_published(status: str) -> None:
    results = tasks()
    results[0]["entries"][0] |= {"status": status, "reason": "no"}
    result = merged(results)
    assert subject(result, "fast")["timing"] == {}
    assert subject(result, "fast")["comparisons"] == []
    assert not [name for name in result.samples if "fast" in name]
    samples.check(result.samples, manifest(), result.observations)


def test_crashed_subject_leaves_the_other_its_results() -> None:
    results = tasks()
    results[3]["entries"][0] = {
        "cell": "c000",
        "subject": "fast",
        "status": "CRASH",
        "reason": "signal 11",
        "place": "timing",
    }
    result = merged(results)
    assert subject(result, "fast")["status"] == "CRASH"
    assert subject(result, "fast")["comparisons"] == []
    assert subject(result, "slow")["status"] == "PASS"
    assert len(subject(result, "slow")["timing"]["host"]["launches"]) == 5


def test_subject_without_a_check_is_inconclusive() -> None:
    results = tasks()
    results[0]["entries"] = [check_entry("slow")]
    assert subject(merged(results), "fast")["status"] == "INCONCLUSIVE"


def test_subject_without_samples_is_inconclusive() -> None:
    results = tasks()
    for launch in results[1:]:
        launch["entries"][0]["samples"] = []
    found = subject(merged(results), "fast")
    assert (found["status"], found["reason"]) == ("INCONCLUSIVE", "no usable sample")


def test_unsupported_before_launch_keeps_reason_and_source() -> None:
    item = {"cell": "c000", "subject": "fast", "reason": "no backward", "source": "release notes"}
    results = tasks()
    for result in results:
        result["entries"] = [e for e in result["entries"] if e["subject"] == "slow"]
    result = merged(results, unsupported=[item])
    found = subject(result, "fast")
    assert found["status"] == "UNSUPPORTED"
    assert "no backward" in found["reason"]
    assert "release notes" in found["reason"]
    assert result.observations["summary"] == {"passed": 1, "failed": 0, "unsupported": 1}
    assert result.failed_required()


def test_outputs_hold_what_is_claimed_and_repeated() -> None:
    results = tasks()
    changed = {"status": "NONDETERMINISTIC", "reason": "lse differs"}
    results[0]["entries"][0] |= changed
    results[0]["entries"][0]["bits"]["observed"]["lse"] = "differs"
    outputs = merged(results).repeatable["outputs"]
    assert outputs["digests"]["c000"]["fast"] == {"out": "cd" * 32}
    assert outputs["not_claimed"]["c000"] == {"fast": ["lse"]}


def test_nothing_is_claimed_without_a_claim() -> None:
    results = tasks()
    results[0]["entries"][0]["bits"]["claimed"] = "none"
    outputs = merged(results).repeatable["outputs"]
    assert "fast" not in outputs["digests"]["c000"]
    assert outputs["not_claimed"]["c000"]["fast"] == ["lse", "out"]


def test_kernels_of_one_name_are_added_up() -> None:
    execution = merged(tasks()).repeatable["execution"]["c000"]["slow"]
    assert execution["kernels"] == {"aten::bmm": 3}
    assert execution["libraries"] == {"torch/lib/libtorch_cpu.so": DIGEST}


def test_unexpected_inputs_are_invalid() -> None:
    asked = manifest(inputs={"expected": {"forward": {"q": "sha256:" + "0" * 64}}})
    result = merge(asked, [job()], tasks(), sample_bytes, CONTEXT)
    found = subject(result, "fast")
    assert (found["status"], found["timing"]) == ("INVALID", {})


def test_missing_sample_member_is_an_error() -> None:
    def read(member: str) -> bytes:
        raise FileNotFoundError(member)

    with pytest.raises(AttnreproError, match="cannot read the samples"):
        merge(manifest(), [job()], tasks(), read, CONTEXT)


def test_task_that_ran_elsewhere_says_so() -> None:
    results = tasks()
    results[2]["device"] = {"kind": "cpu", "name": "Other CPU"}
    kept = merged(results).observations["tasks"]
    assert [t.get("device", {}).get("name") for t in kept] == [None, None, "Other CPU", *[None] * 3]


def test_launch_entries_alone_are_no_check() -> None:
    results = [task("launch-0", "launch", 0, [launch_entry("fast", 0)])]
    assert subject(merged(results), "fast")["status"] == "INCONCLUSIVE"


def test_work_beyond_exact_doubles_is_written_as_text() -> None:
    cell = job()["cells"][0]
    huge = {"seqlen_q": 1 << 24, "seqlen_k": 1 << 24, "heads_q": 64}
    cell = cell | {"workload": cell["workload"] | huge}
    work = merged(tasks(), cells=[cell]).repeatable["semantics"]["work"]["c000"]
    assert work["flops_forward"] == str(4 * 64 * 32 * 2**48)
    assert work["pairs"] == 2**48


def test_ended_container_is_told_of_what_it_left_undone() -> None:
    context = replace(CONTEXT, missing=("TIMEOUT", "the run's limit of 5 s was reached"))
    found = subject(merge(manifest(), [job()], tasks(launches=2), sample_bytes, context), "fast")
    assert (found["status"], found["place"]) == ("TIMEOUT", "launch-2, launch-3, launch-4")
    assert len(found["timing"]["host"]["launches"]) == 2


def test_warming_up_is_kept_launch_by_launch() -> None:
    warmups = subject(merged(tasks()), "fast")["warmups"]
    assert [w["task"] for w in warmups] == [f"launch-{n}" for n in range(5)]
    assert warmups[0]["warmup"]["stationary"] is True
