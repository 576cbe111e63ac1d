from __future__ import annotations

import json
from typing import Any

import pytest
from schema_examples import example, spoilt

from attnrepro import jsonio, resources, schema
from attnrepro.manifest.load import load
from attnrepro.manifest.plan import plan

QUICKSTART = resources.manifests_dir() / "quickstart" / "manifest.json"


def _documents(kind: str) -> list[Any]:
    """Real documents of a kind where the checkout holds some."""
    if kind == "manifest":
        return [
            json.loads(p.read_text()) for p in resources.manifests_dir().glob("*/manifest.json")
        ]
    if kind == "claims":
        return [
            json.loads(p.read_text())
            for pattern in ("claims/*.json", "*/r*/claims.json")
            for p in resources.images_dir().glob(pattern)
        ]
    if kind == "stack":
        return [json.loads(p.read_text()) for p in resources.images_dir().glob("*/r*/image.json")]
    if kind == "job":
        return [s.job("0" * 16) for s in plan(load(QUICKSTART)).segments]
    root = schema.schema_of(kind)
    document = example(root, root)
    if kind == "statement":  # what was contained names its image
        document["images"] = [example(root["properties"]["images"]["items"], root)]
    return [document]


@pytest.mark.parametrize("kind", schema.kinds())
def test_accepts_its_examples(kind: str) -> None:
    documents = _documents(kind)
    assert documents
    for document in documents:
        assert schema.validate(kind, document) == []


@pytest.mark.parametrize("kind", schema.kinds())
def test_refuses_what_is_wrong_at_any_place_and_names_it(kind: str) -> None:
    document = _documents(kind)[0]
    root = schema.schema_of(kind)
    count = 0
    for pointer, bad in spoilt(document, root, root):
        count += 1
        problems = schema.validate(kind, bad)
        assert problems, f"{kind} accepts a wrong {pointer}"
        assert all(p.found and p.allowed and p.fix for p in problems)
        if count >= 400:
            break
    assert count >= 3


@pytest.mark.parametrize("kind", schema.kinds())
def test_refuses_what_is_no_object(kind: str) -> None:
    for alien in (None, [], "x", 1, True):
        assert schema.validate(kind, alien)


@pytest.mark.parametrize("kind", schema.kinds())
def test_every_schema_is_valid_closed_and_versioned(kind: str) -> None:
    from jsonschema import Draft202012Validator

    root = schema.schema_of(kind)
    Draft202012Validator.check_schema(root)
    assert root["$id"] == f"urn:attnrepro:schema:{kind}:1"


def test_unknown_kind() -> None:
    with pytest.raises(KeyError):
        schema.schema_of("recipe")


def test_all_problems_at_once_with_pointer_and_meaning() -> None:
    document = json.loads(QUICKSTART.read_text())
    document["name"] = "-x"
    document["workload"]["phase"] = "forwards"
    document["workload"]["batch"] = "2"
    document["timing"]["launchs"] = 5
    del document["subjects"]
    found = {p.pointer: p for p in schema.validate("manifest", document)}
    assert set(found) == {
        "/name",
        "/workload/phase",
        "/workload/batch",
        "/timing/launchs",
        "/subjects",
    }
    assert found["/workload/phase"].fix == 'did you mean "forward"?'
    assert found["/workload/batch"].fix == "write the number without quotes"
    assert found["/timing/launchs"].fix == 'did you mean "launches"?'
    assert found["/subjects"].found == "nothing"


def test_the_branch_that_was_meant_is_explained() -> None:
    document = json.loads(QUICKSTART.read_text())
    document["workload"]["dropout"] = {"p": 3, "sed": 1}
    pointers = {p.pointer for p in schema.validate("manifest", document)}
    assert pointers == {
        "/workload/dropout/p",
        "/workload/dropout/seed",
        "/workload/dropout/sed",
    }


def test_a_line_break_at_the_end_is_not_the_end() -> None:
    document = json.loads(QUICKSTART.read_text())
    document["name"] = "quickstart\n"
    assert [p.pointer for p in schema.validate("manifest", document)] == ["/name"]


def test_numbers_are_equal_by_value_and_booleans_are_no_numbers() -> None:
    document = json.loads(QUICKSTART.read_text())
    document["workload"]["batch"] = 1.0
    assert schema.validate("manifest", document) == []
    document["workload"]["batch"] = True
    assert [p.pointer for p in schema.validate("manifest", document)] == ["/workload/batch"]


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "hostile",
    [
        {"timing": {"tails": [0.9, "a"] * 60_000}},
        {"workload": {"seqlen_q": ["x"] * 150_000}},
        {"variants": [{"id": "a", "set": {}}] * 50_000},
        {"sweep": {f"/workload/{'a' * 20}{i}": [1] for i in range(60_000)}},
        {f"key{i}": i for i in range(90_000)},
        {"subjects": [{"id": "x" * 100_000, "backend": "a." * 50_000}]},
        {"inputs": {"expected": {"a": {"q": "sha256:" + "a" * 63}}}},
    ],
)
def test_hostile_sizes_are_refused_soon_and_in_few_words(hostile: dict[str, Any]) -> None:
    problems = schema.validate("manifest", hostile)
    assert 0 < len(problems) <= schema.MAX_PROBLEMS + 1
    assert all(len(p.line()) < 2000 for p in problems)


def test_validation_never_fetches(monkeypatch: pytest.MonkeyPatch) -> None:
    import socket

    def refuse(*_: object) -> None:
        raise AssertionError("the network was asked")

    monkeypatch.setattr(socket, "create_connection", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)
    with pytest.raises(Exception, match=r"http://example\.invalid"):
        schema.validate_value(
            {"$ref": "http://example.invalid/x.json"}, {}, kind="manifest", pointer=""
        )


def test_defaults_are_filled_at_every_depth_and_twice_changes_nothing() -> None:
    document = {
        "schema": "attnrepro.manifest/1",
        "name": "a",
        "image": {"stack": "s"},
        "workload": {
            "phase": "decode",
            "batch": 1,
            "seqlen_q": 1,
            "seqlen_k": 8,
            "heads_q": 1,
            "head_dim": 8,
            "dtype": "float32",
            "mask": {"window": {"left": 3, "right": None}},
            "cache": {"kind": "contiguous"},
        },
        "subjects": [{"id": "a", "backend": "eager"}],
    }
    before = jsonio.canonical(document)
    filled = schema.with_defaults("manifest", document)
    assert jsonio.canonical(document) == before
    assert filled["workload"]["mask"]["window"]["alignment"] is None
    assert filled["workload"]["cache"]["append_in_call"] is False
    assert filled["accuracy"]["output"] == {"multiplier": 2}
    assert filled["device"]["clocks"] == {"policy": "observe", "sm_mhz": None}
    assert filled["subjects"][0]["required"] is True
    assert schema.validate("manifest", filled) == []
    assert schema.with_defaults("manifest", filled) == filled


def test_part_follows_references_and_branches() -> None:
    left = schema.part("manifest", "/workload/mask/window/left")
    assert left is not None
    assert "integer" in left["type"]
    assert schema.part("manifest", "/workload/nothing") is None
    assert schema.part("manifest", "/workload/seqlen_q/0") is None
