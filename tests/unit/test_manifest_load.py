from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from manifest_fakes import decode, document, loaded, refused

from attnrepro import jsonio, resources, schema
from attnrepro.errors import InvalidDocument, UsageError
from attnrepro.manifest import load

MANIFESTS = sorted(resources.manifests_dir().glob("*/manifest.json"))


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda p: p.parent.name)
def test_shipped_manifests_are_valid_and_canonical_once(path: Path) -> None:
    manifest = load(path)
    assert manifest.name == path.parent.name
    again = load(manifest.canonical)
    assert again == manifest
    assert jsonio.canonical(manifest.document) == manifest.canonical


def test_defaults_are_explicit() -> None:
    manifest = loaded(document(workload={"heads_kv": ...}))
    workload = manifest.document["workload"]
    assert (workload["heads_kv"], workload["head_dim_v"], workload["dtype_out"]) == (
        4,
        64,
        "bfloat16",
    )
    assert manifest.document["image"]["revision"] == "r1"
    assert manifest.document["timing"]["launches"] == 5
    assert schema.with_defaults("manifest", manifest.document) == manifest.document


def test_what_follows_a_changed_field_stays_open() -> None:
    value = document(workload={"heads_kv": ...}, sweep={"/workload/heads_q": [2, 4]})
    manifest = loaded(value)
    assert manifest.document["workload"]["heads_kv"] is None
    assert [c.workload["heads_kv"] for c in manifest.cells] == [2, 4]
    assert load(manifest.canonical).cells == manifest.cells


def test_null_in_an_axis_is_resolved_where_its_source_stays() -> None:
    manifest = loaded(document(sweep={"/workload/heads_kv": [None, 2]}))
    assert manifest.document["sweep"] == {"/workload/heads_kv": [4, 2]}


def test_true_and_false_become_words() -> None:
    manifest = loaded(
        document(
            workload={"mask": {"causal": True}},
            variants=[
                {"id": "full", "set": {"/workload/mask/causal": False}},
                {"id": "causal", "set": {"/workload/mask": {"causal": True}}},
            ],
        )
    )
    assert manifest.document["workload"]["mask"]["causal"] == "top_left"
    assert [c.workload["mask"]["causal"] for c in manifest.cells] == ["none", "top_left"]


def _shuffled(value: Any, order: Any) -> Any:
    if isinstance(value, dict):
        keys = sorted(value)
        order.shuffle(keys)
        return {key: _shuffled(value[key], order) for key in keys}
    if isinstance(value, list):
        return [_shuffled(item, order) for item in value]
    return value


def _floats(value: Any, order: Any) -> Any:
    if isinstance(value, dict):
        return {key: _floats(item, order) for key, item in value.items()}
    if isinstance(value, list):
        return [_floats(item, order) for item in value]
    if isinstance(value, int) and not isinstance(value, bool) and order.random() < 0.5:
        return float(value)
    return value


def _thinned(value: Any, full: Any, part: Any, order: Any) -> Any:
    """Without some of the fields that only repeat a default."""
    root = schema.schema_of("manifest")
    from attnrepro import schema_words

    part = schema_words.resolve(part, root)
    if not isinstance(value, dict) or "properties" not in part:
        return value
    result = {}
    for key, item in value.items():
        inner = schema_words.resolve(part["properties"][key], root)
        is_default = (
            "default" in inner and schema.fill(inner, inner["default"], kind="manifest") == item
        )
        if not is_default or order.random() < 0.5:
            result[key] = _thinned(item, full, inner, order)
    return result


@settings(max_examples=40, deadline=None)
@given(st.randoms(use_true_random=False), st.sampled_from([p.parent.name for p in MANIFESTS]))
def test_one_digest_for_every_spelling(order: Any, name: str) -> None:
    manifest = load(resources.manifests_dir() / name / "manifest.json")
    root = schema.schema_of("manifest")
    thin = _thinned(manifest.document, manifest.document, root, order)
    other = _floats(_shuffled(thin, order), order)
    again = loaded(other)
    assert again.sha256 == manifest.sha256
    assert again.cells == manifest.cells


def test_number_spellings_and_seeds() -> None:
    base = loaded(document(inputs={"seed": 7})).sha256
    text = json.dumps(document(inputs={"seed": 7}))
    assert load(text.replace('"seed": 7', '"seed": 7.0e0').encode()).sha256 == base
    assert loaded(document(inputs={"seed": "7"})).sha256 == base
    large = loaded(document(inputs={"seed": str(2**64 - 1)}))
    assert large.document["inputs"]["seed"] == str(2**64 - 1)
    assert "/inputs/seed" in refused(document(inputs={"seed": str(2**64)}))


def test_other_content_has_another_digest() -> None:
    assert loaded(document()).sha256 != loaded(document(title="x")).sha256


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"{",
        b"[]x",
        b'{"a": 1, "a": 2}',
        b'{"a": NaN}',
        b'{"a": 1e400}',
        b'{"a": 9007199254740993}',
        b'{"a": -0.0}',
        b'\xef\xbb\xbf{"a": 1}',
        b'{"a": "\xff"}',
        b'{"a": "\\ud800"}',
        b"[" * 100_000,
        b'{"a":' * 5000,
    ],
)
def test_what_is_not_strict_json(text: bytes) -> None:
    with pytest.raises(InvalidDocument) as caught:
        load(text)
    assert caught.value.problems


@pytest.mark.parametrize(
    ("text", "pointer", "place"),
    [
        (b'{"a": {"b": [1, 2,\n NaN]}}', "/a/b/2", "line 2 column 2"),
        (b'{"a": 1,\n "c": {"a": 2, "a": 3}}', "/c/a", "line 2 column 16"),
        (b'{"a": [{"c/d": 123456789012345678901}]}', "/a/0/c~1d", "line 1 column 16"),
        (b'{"a\\"b": {"~": -0.0}}', '/a"b/~0', "line 1 column 16"),
        (b'{"x": ["[", "{", "\\ud800"]}', "/x/2", "line 1 column 18"),
        (b"[" * 66 + b"]" * 66, "/0" * 64, "line 1 column 65"),
        (b'{"a": 1,\n}', "", "line 2 column 1"),
    ],
)
def test_refused_json_is_located(text: bytes, pointer: str, place: str) -> None:
    with pytest.raises(InvalidDocument) as caught:
        load(text)
    (problem,) = caught.value.problems
    assert problem.pointer == pointer
    assert place in problem.found


def test_every_refused_value_is_told() -> None:
    with pytest.raises(InvalidDocument) as caught:
        load(b'{"a": NaN, "b": {"c": 1, "c": 2},\n "d": [-0.0, 1e999, 12345678901234567890]}')
    assert [problem.pointer for problem in caught.value.problems] == [
        "/a",
        "/b/c",
        "/d/0",
        "/d/1",
        "/d/2",
    ]
    with pytest.raises(InvalidDocument) as caught:
        load(b"[" + b"NaN," * 1000 + b"1]")
    assert len(caught.value.problems) == 50


@pytest.mark.parametrize(
    ("change", "pointer"),
    [
        ({"batch": 0}, "/workload/batch"),
        ({"dtype": "bf16"}, "/workload/dtype"),
        ({"phase": "both"}, "/workload/phase"),
        ({"seqlen_q": -1}, "/workload/seqlen_q"),
    ],
)
def test_a_refused_size_hides_no_head_that_does_not_divide(
    change: dict[str, Any], pointer: str
) -> None:
    workload = {"phase": "prefill", "heads_q": 3, "heads_kv": 2, **change}
    assert set(refused(document(workload=workload))) == {pointer, "/workload/heads_kv"}


def test_files_that_are_no_manifests(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot read"):
        load(tmp_path / "missing.json")
    with pytest.raises(UsageError, match="not a regular file"):
        load(tmp_path)
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    with pytest.raises(UsageError, match="not a regular file"):
        load(fifo)
    with pytest.raises(UsageError, match="not a regular file"):
        load(Path("/dev/zero"))
    long = tmp_path / "long.json"
    long.write_bytes(b" " * (1 << 20) + b"{}")
    with pytest.raises(InvalidDocument, match="longer than"):
        load(long)


def test_problems_of_schema_and_meaning_are_told_together() -> None:
    value = decode(heads_kv=3, mask={"causal": True})
    value["mounts"] = ["/etc"]
    value["timing"] = {"launches": 10**12}
    value["subjects"][1]["id"] = "flash"
    found = refused(value)
    assert set(found) == {
        "/mounts",
        "/timing/launches",
        "/subjects/1/id",
        "/workload/mask/causal",
        "/workload/heads_kv",
    }


def test_another_stack_takes_the_image_s_place() -> None:
    data = json.dumps(document()).encode()
    changed = load(data, stack="cuda13.0-torch2.13-fa4@r1")
    assert changed.document["image"]["stack"] == "cuda13.0-torch2.13-fa4"
    assert {subject.image.stack for subject in changed.subjects} == {"cuda13.0-torch2.13-fa4"}
    assert changed.sha256 != load(data).sha256
    with pytest.raises(InvalidDocument) as caught:
        load(data, stack="a/b:latest")
    assert {problem.pointer for problem in caught.value.problems} == {"/image/stack"}


def test_a_required_part_that_is_refused_hides_no_other() -> None:
    value = decode(heads_kv=3)
    del value["image"]
    value["subjects"][0]["backend"] = 5
    assert set(refused(value)) == {"/image", "/subjects/0/backend", "/workload/heads_kv"}
    value = decode(batch=-1)
    value["subjects"][1]["id"] = value["subjects"][0]["id"]
    assert set(refused(value)) == {"/workload/batch", "/subjects/1/id"}
    assert set(refused({"workload": []})) == {
        "/image",
        "/name",
        "/schema",
        "/subjects",
        "/workload",
    }


def test_a_wrong_field_makes_no_second_complaint() -> None:
    value = decode(cache={"kind": "contiguos"})
    assert set(refused(value)) == {"/workload/cache/kind"}


def test_cells_point_to_where_their_value_stands() -> None:
    value = document(
        workload={"mask": {"causal": True}},
        sweep={"/workload/seqlen_k": [16, 32]},
        variants=[{"id": "odd", "set": {"/workload/heads_kv": 3}}],
    )
    found = refused(value)
    assert "/variants/0/set/~1workload~1heads_kv" in found
    value["variants"] = []
    assert "cell c001" in refused(value)["/workload/mask/causal"].found


def test_notes() -> None:
    value = decode(mask={"causal": "top_left"}, strides={"q": [2**31, 256, 64, 1]})
    value["timing"] = {"launches": 3, "samples": [10, 50], "tails": [0.9, 0.99]}
    value["accuracy"] = {"output": {"multiplier": 4}}
    value["subjects"] = [{"id": "a", "backend": "eager"}, {"id": "b", "backend": "eager"}]
    found = {note.pointer: note.text for note in loaded(value).notes}
    assert "no verdict" in found["/timing/launches"]
    assert "299 samples" in found["/timing/tails/1"]
    assert "/timing/tails/0" not in found
    assert "looser" in found["/accuracy/output/multiplier"]
    assert "2^31" in found["/workload"]
    assert "same code as a" in found["/subjects/1"]
    assert "top_left against a cache" in found["/workload/mask/causal"]
