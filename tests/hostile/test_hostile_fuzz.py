"""Random changes of the signed documents: verify and the views never crash."""

from __future__ import annotations

import copy
import hashlib
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attnrepro import jsonio
from attnrepro.artifact import container, explain, sign
from attnrepro.artifact.trust import TrustStore
from attnrepro.artifact.verify import Support, verify
from attnrepro.distribute import oci
from attnrepro.errors import Rejected
from attnrepro.report import attach, export, terminal
from support import example

HONEST = example.artifact()
MEMBERS = example.members(HONEST)
STATEMENT = example.payload(HONEST)
DOCUMENTS = {
    "observations.json": example.observations(),
    "repeatable.json": example.repeatable(),
    "manifest.json": example.manifest(),
}
ODD = st.sampled_from(
    [
        *(None, True, False, 0, 1, -1, 2**53 - 1, 1 - 2**53),
        *("", "x", "../x", "0" * 64, "0x1.0p+99999", "0x0.0p+0", "-inf", "inf"),
        *("PASS", "CRASH", "UNSUPPORTED", "UNTIMED", "kernel", "c001"),
        *([], {}, [[]], [{}], {"": ""}, [0], {"x": 0}),
    ]
)


def _places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    items = value.items() if isinstance(value, dict) else enumerate(value)
    found = []
    for key, item in items:
        found.append((*path, key))
        if isinstance(item, dict | list):
            found += _places(item, (*path, key))
    return found


PLACES = {name: _places(document) for name, document in DOCUMENTS.items()}
PREDICATE_PLACES = _places(STATEMENT["predicate"])


def _change(data: st.DataObject, document: Any, path: tuple[Any, ...]) -> None:
    for key in path[:-1]:
        document = document[key]
    kind = data.draw(st.sampled_from(["odd", "delete", "repeat", "add"]))
    if kind == "delete":
        del document[path[-1]]
    elif kind == "repeat" and isinstance(document, list):
        document.append(copy.deepcopy(document[path[-1]]))
    elif kind == "add" and isinstance(document, dict):
        document[data.draw(st.sampled_from(["x", "note", "0", "c001"]))] = data.draw(ODD)
    else:
        document[path[-1]] = data.draw(ODD)


def _fits(members: dict[str, bytes], statement: dict[str, Any]) -> bytes:
    content = container.write(members)
    digest = hashlib.sha256(content).hexdigest()
    statement["subject"][0]["digest"]["sha256"] = digest
    statement["subject"][1]["digest"]["sha256"] = oci.manifest_sha256(digest, len(content))
    return sign.sign_payload(jsonio.canonical(statement), content, example.signer())


def _crate(members: dict[str, bytes], manifest: Any, seen: Any) -> bytes:
    from attnrepro.artifact import rocrate

    others = {name: data for name, data in members.items() if name != rocrate.NAME}
    return jsonio.canonical(rocrate.describe(others, manifest=manifest, observations=seen))


def _survives(data: bytes) -> bool:
    """Whether verify accepts it; then every view must be able to show it."""
    try:
        verified = verify(data, trust=TrustStore())
    except Rejected as error:
        assert error.rule  # noqa: PT017 - either outcome is right, a rule must be named
        return False
    terminal.summary(verified.observations, title="x")
    export.times(verified.observations)
    attach.markdown(verified, file="x")
    attach.latex(verified, file="x")
    nobody = Support(owners=(), independent=(), ignored=())
    explain.text(explain.document(verified, file="x", known={}, support=nobody))
    return True


@pytest.mark.slow
@settings(max_examples=400, deadline=None)
@given(st.data())
def test_changed_documents(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(sorted(DOCUMENTS)))
    documents = copy.deepcopy(DOCUMENTS)
    for path in data.draw(st.lists(st.sampled_from(PLACES[name]), min_size=1, max_size=1)):
        _change(data, documents[name], path)
    members, statement = dict(MEMBERS), copy.deepcopy(STATEMENT)
    for member, document in documents.items():
        members[member] = jsonio.canonical(document)
    statement["predicate"]["manifest_sha256"] = hashlib.sha256(members["manifest.json"]).hexdigest()
    for section in ("inputs", "semantics", "outputs", "execution"):
        part = documents["repeatable.json"].get(section)
        digest = hashlib.sha256(jsonio.canonical(part)).hexdigest()
        statement["predicate"]["repeatable"][section] = digest
    seen, manifest = documents["observations.json"], documents["manifest.json"]
    if isinstance(seen.get("run"), dict) and isinstance(seen.get("summary"), dict):
        members["ro-crate-metadata.json"] = _crate(members, manifest, seen)
        statement["predicate"]["summary"] = seen["summary"]
    _survives(_fits(members, statement))


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(st.data())
def test_changed_predicate(data: st.DataObject) -> None:
    statement = copy.deepcopy(STATEMENT)
    _change(data, statement["predicate"], data.draw(st.sampled_from(PREDICATE_PLACES)))
    _survives(_fits(dict(MEMBERS), statement))


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(st.data())
def test_changed_crate(data: st.DataObject) -> None:
    import json

    crate = json.loads(MEMBERS["ro-crate-metadata.json"])
    _change(data, crate, data.draw(st.sampled_from(_places(crate))))
    members = {**MEMBERS, "ro-crate-metadata.json": jsonio.canonical(crate)}
    _survives(_fits(members, copy.deepcopy(STATEMENT)))


def test_the_unchanged_survives() -> None:
    assert _survives(_fits(dict(MEMBERS), copy.deepcopy(STATEMENT)))
