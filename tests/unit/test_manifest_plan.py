from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from manifest_fakes import document, loaded

from attnrepro import resources, schema
from attnrepro.errors import InvalidDocument, UsageError
from attnrepro.images.store import Store
from attnrepro.manifest import cost, load, stacks
from attnrepro.manifest.capability import Capability
from attnrepro.manifest.model import ImageRef
from attnrepro.manifest.plan import order, plan
from attnrepro_runner import oracle, stages
from attnrepro_runner.checking import PAIRS_AGAIN, SCORES_AGAIN

if TYPE_CHECKING:
    from pathlib import Path

RUN = "0123456789abcdef"


@pytest.fixture(autouse=True)
def empty_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTNREPRO_STORE", str(tmp_path / "store"))


def test_one_image_is_one_container_with_all_tasks() -> None:
    found = plan(loaded(document()))
    (segment,) = found.segments
    job = segment.job(RUN)
    assert schema.validate("job", job) == []
    assert [t["id"] for t in job["tasks"]] == [
        "check",
        "cold",
        "memory",
        *(f"launch-{i:02d}" for i in range(5)),
    ]
    assert job["run"] == RUN
    assert job["cells"][0]["subjects"] == ["flash", "eager"]
    assert job["timing"]["launches"] == 5


def test_the_plan_is_a_function_of_the_manifest() -> None:
    value = document()
    assert plan(loaded(value)) == plan(loaded(value))
    orders = {
        tuple(
            t.subjects
            for t in plan(loaded({**value, "timing": {"order_seed": s}})).segments[0].tasks
        )
        for s in range(8)
    }
    assert len(orders) > 1


def test_each_launch_has_an_order_of_its_own() -> None:
    names = ["a", "b", "c"]
    orders = {order(0, launch, names) for launch in range(20)}
    assert len(orders) > 3
    assert all(sorted(o) == names for o in orders)
    assert order("0", 0, names) == order(0, 0, list(reversed(names)))


def test_unsupported_cells_are_never_launched_and_stay_in_the_job() -> None:
    found = plan(loaded(document(sweep={"/workload/softcap": [None, 30]})))
    job = found.segments[0].job(RUN)
    assert [c["subjects"] for c in job["cells"]] == [["flash", "eager"], ["eager"]]
    (refused,) = job["unsupported"]
    assert (refused["cell"], refused["subject"]) == ("c001", "flash")
    assert "softcap" in refused["reason"]
    assert found.uncompared == {"c000": ("flex", "sdpa.math"), "c001": ("flex",)}


def test_a_subject_without_a_cell_gets_no_task() -> None:
    value = document(workload={"softcap": 30})
    found = plan(loaded(value))
    assert {s for t in found.segments[0].tasks for s in t.subjects} == {"eager"}
    value["subjects"] = [{"id": "flash", "backend": "sdpa.flash"}]
    with pytest.raises(UsageError, match="softcap"):
        plan(loaded(value))


def test_references_are_checked_and_never_timed() -> None:
    value = document()
    value["subjects"].append({"id": "math", "backend": "sdpa.math", "role": "accuracy_reference"})
    tasks = plan(loaded(value)).segments[0].tasks
    assert {t.stage for t in tasks if "math" in t.subjects} == {"check"}


def test_without_launches_nothing_is_timed() -> None:
    tasks = plan(loaded(document(timing={"launches": 0}))).segments[0].tasks
    assert [t.id for t in tasks] == ["check"]


def test_several_images_are_a_container_each_a_launch() -> None:
    value = document()
    value["subjects"][1]["image"] = {"stack": "other", "revision": "r1"}
    manifest = loaded(value)
    base = Capability.load(resources.images_dir() / "cpu-torch2.13" / "r1")
    other = ImageRef(stack="other", revision="r1", digest=None)
    found = plan(manifest, capabilities={other: base}, adapters={other: "toy_adapter"})
    jobs = [s.job(RUN) for s in found.segments]
    assert all(schema.validate("job", job) == [] for job in jobs)
    ids = [t["id"] for job in jobs for t in job["tasks"]]
    assert len(set(ids)) == len(ids)
    assert len({s.id for s in found.segments}) == len(found.segments) == 2 + 2 * 5
    launches = [t["launch"] for job in jobs for t in job["tasks"] if t["stage"] == "launch"]
    assert launches == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]
    firsts = {s.image for s in found.segments[2::2]}
    assert len(firsts) == 2  # the order of images changes from launch to launch
    for segment, job in zip(found.segments, jobs, strict=True):
        assert [c["id"] for c in job["cells"]] == ["c000"]
        assert {s["id"] for s in job["subjects"]} == {
            "eager" if segment.image == other else "flash"
        }
        adapters = {s["adapter"] for s in job["subjects"]}
        assert adapters == {"toy_adapter" if segment.image == other else None}


def test_stacks_that_are_not_there(tmp_path: Path) -> None:
    value = document(image={"stack": "cpu-torch2.31"})
    with pytest.raises(InvalidDocument) as caught:
        plan(loaded(value))
    assert caught.value.problems[0].fix == 'did you mean "cpu-torch2.13"?'
    value = document(image={"revision": "r99"})
    with pytest.raises(InvalidDocument) as caught:
        plan(loaded(value))
    assert caught.value.problems[0].pointer == "/image/revision"


def test_cost_grows_with_what_is_asked(tmp_path: Path) -> None:
    def seconds(**changes: object) -> float:
        manifest = loaded(document(**changes))
        found = plan(manifest)
        known = [stacks.find(manifest.image)]
        return cost.estimate(manifest, found, known).seconds_high

    base = seconds()
    assert seconds(timing={"launches": 10}) > base
    assert seconds(workload={"seqlen_q": 2048, "seqlen_k": 2048}) > base
    assert seconds(timing={"launches": 1, "cold_start": False, "memory": False}) < base


@pytest.mark.parametrize("on_gpu", [True, False])
def test_what_is_judged_round_timing_is_what_the_runner_selects(on_gpu: bool) -> None:
    kind = "cuda" if on_gpu else "cpu"
    for phase in ("prefill", "forward_backward"):
        for seqlen in (256, 1024, 4096, 16384, 65536):
            sizes = {"phase": phase, "seqlen_q": seqlen, "seqlen_k": seqlen, "heads_q": 16}
            (cell,) = loaded(document(workload=sizes)).cells
            pairs, part = cost._again(cell, on_gpu=on_gpu)
            chosen = stages.selection(
                cell.parsed, kind, scores=SCORES_AGAIN[kind], most=PAIRS_AGAIN[0]
            )
            every = cell.parsed.batch * cell.parsed.heads_q
            judged = len(oracle.pairs(cell.parsed, chosen))
            if phase == "prefill":
                assert min(pairs, every) == judged
            else:  # drawn pairs may share a KV head
                assert judged <= min(pairs, every) <= 2 * judged
            blocks = None if chosen is None else chosen.blocks
            rows = seqlen if blocks is None else 64 * len(blocks)
            assert part == pytest.approx(rows / seqlen, rel=0.05, abs=2 * 64 / seqlen)


def test_an_image_that_is_not_built_costs_a_build(tmp_path: Path) -> None:
    manifest = load(resources.manifests_dir() / "quickstart" / "manifest.json")
    empty = Store(tmp_path)
    facts = stacks.find(manifest.image, empty)
    estimate = cost.estimate(manifest, plan(manifest), [facts])
    assert not facts.is_built
    assert estimate.build_seconds > 0
    assert estimate.disk_bytes > 10**9
    assert "GB" in estimate.text()
    assert "build" in estimate.text()


@pytest.mark.parametrize(
    ("seconds", "words"), [(0.2, "1 s"), (89, "89 s"), (300, "5 min"), (7200, "2.0 h")]
)
def test_durations(seconds: float, words: str) -> None:
    assert cost.duration(seconds) == words


@pytest.mark.parametrize(
    ("count", "words"), [(12, "12 B"), (1500, "1.5 kB"), (3.2e9, "3.2 GB"), (5e12, "5.0 TB")]
)
def test_sizes(count: float, words: str) -> None:
    assert cost.size(count) == words
