from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from manifest_fakes import document

from attnrepro import resources
from attnrepro.cli.main import run
from attnrepro.errors import InvalidDocument, UsageError
from attnrepro.manifest import guide, load

GUIDE = Path(__file__).parents[2] / "docs" / "manifest.md"


@pytest.fixture(autouse=True)
def empty_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTNREPRO_STORE", str(tmp_path / "store"))


@pytest.fixture
def manifest(tmp_path: Path) -> Path:
    path = tmp_path / "manifest.json"
    path.write_text(json.dumps(document(sweep={"/workload/softcap": [None, 30]})))
    return path


def answer(capsys: pytest.CaptureFixture[str], *arguments: object) -> Any:
    assert run([*map(str, arguments), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_check_tells_support_reasons_what_is_uncompared_and_cost(
    manifest: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = answer(capsys, "check", manifest)
    assert found["manifest_sha256"] == load(manifest).sha256
    refused = found["cells"][1]["subjects"]["flash"]
    assert refused["status"] == "UNSUPPORTED"
    assert "softcap" in refused["reason"]
    assert refused["source"]
    assert found["cells"][0]["uncompared"] == ["flex", "sdpa.math"]
    assert found["cost"]["seconds"][0] <= found["cost"]["seconds"][1]
    assert found["tasks"][0] == "check"


def test_check_in_words(manifest: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["check", str(manifest)]) == 0
    text = capsys.readouterr().out
    for word in ("not built here", "UNSUPPORTED", "source:", "Uncompared", "flex: 2 of 2", "GB"):
        assert word in text


def test_check_says_that_a_cell_does_not_fit_this_machine(
    manifest: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for length, fits in ((64, True), (1 << 22, False)):
        workload = {"seqlen_q": length, "seqlen_k": length, "batch": 16}
        manifest.write_text(json.dumps(document(workload=workload)))
        assert run(["check", str(manifest)]) == 0
        assert ("would end OUT_OF_MEMORY here" in capsys.readouterr().out) is not fits


def test_one_subject_runs_in_another_stack(
    manifest: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = load(manifest).subjects[0].id
    there = load(manifest, stack=["cpu-torch2.13", f"{name}=cuda13.0-torch2.13-fa4@r1"])
    assert str(there.subjects[0].image) == "cuda13.0-torch2.13-fa4/r1"
    assert {s.image.stack for s in there.subjects[1:]} == {"cpu-torch2.13"}
    # The manifest with it is what is recorded: read again, it says the same.
    assert load(there.canonical).subjects == there.subjects
    assert run(["check", str(manifest), "--stack", "nobody=cpu-torch2.13", "--json"]) == 2
    message = json.loads(capsys.readouterr().out)["error"]["message"]
    assert "no subject nobody" in message
    for twice in (["a", "b"], [f"{name}=a", f"{name}=b"]):
        with pytest.raises(UsageError, match="two stacks for one image"):
            load(manifest, stack=twice)
    # What is no subject is not dropped on the way: it is as invalid as without the option.
    value = json.loads(manifest.read_text())
    value["subjects"] = [3, *value["subjects"], "junk"]
    manifest.write_text(json.dumps(value))
    with pytest.raises(InvalidDocument) as caught:
        load(manifest, stack=f"{name}=cpu-torch2.13")
    last = len(value["subjects"]) - 1
    assert {p.pointer for p in caught.value.problems} == {"/subjects/0", f"/subjects/{last}"}
    capsys.readouterr()


def test_check_of_what_is_not_valid(manifest: Path, capsys: pytest.CaptureFixture[str]) -> None:
    value = document(workload={"heads_kv": 3}, extra=1)
    manifest.write_text(json.dumps(value))
    assert run(["check", str(manifest), "--json"]) == 2
    found = json.loads(capsys.readouterr().out)
    assert {p["pointer"] for p in found["error"]["problems"]} == {"/extra", "/workload/heads_kv"}


def test_check_where_nothing_can_run(manifest: Path, capsys: pytest.CaptureFixture[str]) -> None:
    value = document(workload={"softcap": 3}, subjects=[{"id": "a", "backend": "sdpa.math"}])
    manifest.write_text(json.dumps(value))
    assert run(["check", str(manifest)]) == 2
    assert "nothing can be run" in capsys.readouterr().out


def test_check_runs_nothing(manifest: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import subprocess

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr(subprocess, "Popen", refuse)
    before = sorted(manifest.parent.rglob("*"))
    assert run(["check", str(manifest)]) == 0
    assert sorted(manifest.parent.rglob("*")) == before


def test_matrix(capsys: pytest.CaptureFixture[str]) -> None:
    found = answer(capsys, "matrix", "--all")
    (stack,) = [s for s in found["stacks"] if s["stack"] == "cpu-torch2.13/r1"]
    assert stack["built"] is False
    assert {c["backend"] for c in stack["claims"]} == {"eager", "sdpa.math", "sdpa.flash", "flex"}
    held = {c["backend"] for s in found["stacks"] for c in s["claims"]}
    assert {"flash_attn_4", "sdpa.cudnn", "flash_attn_3", "flashinfer"} <= held
    assert {"flash_attn_2", "flash_attn_2.rocm_ck", "flash_attn_2.rocm_triton"} <= held
    assert not found["releases_without_a_stack"]
    assert run(["matrix", "--all", "--details"]) == 0
    text = capsys.readouterr().out
    assert "silently ignores softcap" in text
    assert "not built here" in text
    assert run(["matrix", "--backend", "sdpa.flahs"]) == 2
    assert "did you mean 'sdpa.flash'" in capsys.readouterr().err
    assert run(["matrix", "no-such-stack"]) == 2


def test_matrix_prints_every_field_of_a_claim(capsys: pytest.CaptureFixture[str]) -> None:
    name = "cuda13.0-torch2.13-fa2.8.3"
    assert run(["matrix", name, "--backend", "flash_attn_2"]) == 0
    text = capsys.readouterr().out
    for word in ("bshd bhsd thd", "yes/option", "top_left", "2026-11-30"):
        assert word in text
    assert "sm_80" not in text
    assert max(map(len, text.splitlines()[:3])) < 200
    assert run(["matrix", name, "--backend", "flash_attn_2", "--details"]) == 0
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    for line in (
        "architectures: sm_80, sm_86, sm_89, sm_90, sm_100, sm_120",
        "layouts: bshd, bhsd, thd",
        "strides: last_contiguous",
        "determinism: forward yes; backward with the option deterministic",
        "options: deterministic (true, false), num_splits (0 to 128)",
        "page_size: multiples of 256",
        "dropout.offset: multiples of 4",
        "refuses: softcap with dropout raises",
    ):
        assert line in lines
    # What a claim says is said in words too: no value of any field stands in --json alone.
    found = answer(capsys, "matrix", "--all")
    assert run(["matrix", "--all", "--details"]) == 0
    words = set(capsys.readouterr().out.replace(",", " ").replace("(", " ").split())
    for claim in (claim for stack in found["stacks"] for claim in stack["claims"]):
        missing = {*claim["architectures"], *claim["layouts"], *claim["options"]} - words
        assert not missing


def test_new_writes_what_check_accepts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "new.json"
    flags = ["--phase", "decode", "--seqlen-k", "128", "--seqlen-k", "256", "--heads-kv", "2"]
    found = answer(capsys, "new", path, *flags, "--causal", "bottom_right")
    assert found["manifest"] == json.loads(path.read_text())
    assert [c.label for c in load(path).cells] == ["seqlen_k=128", "seqlen_k=256"]
    assert run(["check", str(path)]) == 0
    capsys.readouterr()
    assert run(["new", str(path)]) == 2
    assert "--force" in capsys.readouterr().err
    assert run(["new", str(path), "--force", "--seqlen-q", "8", "--seqlen-q", "16"]) == 0
    assert [c.label for c in load(path).cells] == ["s8", "s16"]


def test_new_for_a_pull_request(tmp_path: Path) -> None:
    path = tmp_path / "pr.json"
    stacks = ["mine", "mine@r2"]
    assert run(["new", str(path), "--pr", *stacks, "--subject", "my_kernel"]) == 0
    head, base = load(path).subjects
    assert (head.id, str(head.image), head.role) == ("head", "mine/r2", "candidate")
    assert (base.id, str(base.image), base.role) == ("base", "mine", "baseline")
    assert head.backend == base.backend == "my_kernel"


def test_new_refuses_what_makes_no_manifest(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "bad.json"
    assert run(["new", str(path), "--head-dim", "0", "--subject", "a=b=c d"]) == 2
    told = capsys.readouterr().err
    assert "/workload/head_dim" in told
    assert "/subjects/0" in told
    assert not path.exists()
    assert run(["new", str(path), "--ask"]) == 2


def test_the_guide_is_what_the_schema_says() -> None:
    page = GUIDE.read_text(encoding="utf-8")
    assert guide.insert(page) == page, "run: python -m attnrepro.manifest.guide docs/manifest.md"
    assert guide.undescribed() == []
    with pytest.raises(ValueError, match="lacks"):
        guide.insert("no marks")


def test_examples_in_the_guide_are_valid() -> None:
    blocks = GUIDE.read_text(encoding="utf-8").split("```json\n")[1:]
    assert blocks
    for block in blocks:
        text = block.partition("```")[0]
        if '"schema"' in text:
            assert load(text.encode()).cells


@pytest.mark.parametrize("name", ["quickstart", "two-cells"])
def test_shipped_cpu_manifests_are_supported_everywhere(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    found = answer(capsys, "check", resources.manifests_dir() / name / "manifest.json")
    statuses = {s["status"] for c in found["cells"] for s in c["subjects"].values()}
    assert statuses == {"SUPPORTED"}
    assert found["cost"]["within_limit"]
