"""Do the parts of an artifact say the same thing?

A signature shows who said it, not that it adds up. Here the digests of the statement are recomputed
from the members, every published statistic from the raw samples, and a status is held against the
evidence that it needs. All of it is exact, in integers, with the standard library.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any, NoReturn

from attnrepro import jsonio, repeatable, results
from attnrepro.artifact import content, rocrate, samples
from attnrepro.artifact.statement import Kind, Statement
from attnrepro.errors import Rejected

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping


def check(members: Mapping[str, bytes], documents: Mapping[str, Any], statement: Statement) -> None:
    """Hold members, documents and statement against each other.

    Args:
        members: content.zip's members.
        documents: parsed `manifest.json`, `repeatable.json`, `observations.json`; valid.
        statement: parsed; its digest of content.zip has been checked.

    Raises Rejected with a `crosscheck.*` rule.
    """
    _check_statement(members, documents, statement)
    _check_crate(members)
    manifest, observations = documents[content.MANIFEST], documents[content.OBSERVATIONS]
    _check_cells(manifest, observations)
    _check_repeatable(documents[content.REPEATABLE], observations)
    for where, subject in _subjects(observations):
        _check_status(where, subject)
    samples.check(members, manifest, observations)


def _check_statement(
    members: Mapping[str, bytes], documents: Mapping[str, Any], statement: Statement
) -> None:
    predicate, observations = statement.predicate, documents[content.OBSERVATIONS]
    if predicate["manifest_sha256"] != hashlib.sha256(members[content.MANIFEST]).hexdigest():
        _refuse("manifest", "the statement names another manifest")
    digests = content.section_digests(documents[content.REPEATABLE])
    for section, digest in digests.items():
        if predicate["repeatable"][section] != digest:
            _refuse("repeatable", f"the statement's digest of the section {section} differs")
    statuses = [subject["status"] for _, subject in _subjects(observations)]
    passed, unsupported = statuses.count("PASS"), statuses.count("UNSUPPORTED")
    counted = {
        "passed": passed,
        "failed": len(statuses) - passed - unsupported,
        "unsupported": unsupported,
    }
    if predicate["summary"] != counted or observations["summary"] != counted:
        _refuse("summary", "the statuses do not add up to the summary")
    seen = observations["containment"]
    for name in ("engine", "contained"):
        if predicate["containment"][name] != seen[name]:
            _refuse("containment", f"statement and observations differ on containment: {name}")
    recipe = (data for name, data in members.items() if name.startswith("recipe/"))
    wanted = predicate["runner"]["sha256"]
    if not any(hashlib.sha256(data).hexdigest() == wanted for data in recipe):
        _refuse("runner", "recipe/ does not hold the runner that the statement names")
    if statement.kind is Kind.RERUN:
        if predicate["original"]["content_sha256"] != statement.original_sha256:
            _refuse("original", "predicate and subject name different originals")
        if predicate["verdicts"] != documents[content.VERDICTS]:
            _refuse("verdicts", "verdicts.json differs from the signed verdicts")


def _check_crate(members: Mapping[str, bytes]) -> None:
    crate = jsonio.loads(members[rocrate.NAME], what=rocrate.NAME)
    graph = crate.get("@graph") if isinstance(crate, dict) else None
    if not isinstance(graph, list) or not all(isinstance(item, dict) for item in graph):
        _refuse("ro_crate", f"{rocrate.NAME} has no @graph of objects")
    listed = {
        str(item.get("@id")): str(item.get("sha256"))
        for item in graph
        if item.get("@type") == "File"
    }
    found = {
        name: hashlib.sha256(data).hexdigest()
        for name, data in members.items()
        if name != rocrate.NAME
    }
    if listed != found:
        _refuse("ro_crate", f"{rocrate.NAME} lists other files or digests than the content holds")


def _check_cells(manifest: Mapping[str, Any], observations: Mapping[str, Any]) -> None:
    declared = {subject["id"]: subject["backend"] for subject in manifest["subjects"]}
    identifiers = [cell["id"] for cell in observations["cells"]]
    if len(set(identifiers)) != len(identifiers):
        _refuse("cells", "a cell stands twice in observations.json")
    for cell in observations["cells"]:
        names = [subject["subject"] for subject in cell["subjects"]]
        if len(set(names)) != len(names):
            _refuse("cells", f"a subject stands twice in cell {cell['id']}")
        for subject in cell["subjects"]:
            if declared.get(subject["subject"]) != subject["backend"]:
                _refuse("cells", f"cell {cell['id']} shows a subject that the manifest lacks")


def _check_repeatable(claimed: Mapping[str, Any], observations: Mapping[str, Any]) -> None:
    """What the repeatable part claims must have been seen: bits, probes, kernels."""
    cells = observations["cells"]
    known = {cell["id"] for cell in cells}
    # Inputs and work follow from the manifest, the rest from the observations alone.
    expected = repeatable.build([], cells, {})
    if not set(claimed["inputs"]) | set(claimed["semantics"]["work"]) <= known:
        _refuse("inputs", "repeatable.json names a cell that was not run")
    if claimed["semantics"]["probes"] != expected["semantics"]["probes"]:
        _refuse("semantics", "the probes of repeatable.json are not those observed")
    for section in ("outputs", "execution"):
        if claimed[section] != expected[section]:
            _refuse(section, f"the section {section} of repeatable.json is not what was observed")


def _check_status(where: str, subject: Mapping[str, Any]) -> None:
    """A status needs its evidence; PASS needs all of it to be good."""
    status = subject["status"]
    if status != "PASS":
        if not subject["reason"]:
            _refuse("status", f"{where}: {status} without a reason")
        if status in results.UNTIMED and subject["timing"]:
            _refuse("status", f"{where}: {status} with times, which then say nothing about it")
        return
    oracle = subject.get("oracle", [])
    if not oracle:
        _refuse("status", f"{where}: PASS without a comparison against the oracle")
    for comparison in oracle:
        found = comparison["oracle"]
        if not found["tensors"] or not found["guards_intact"]:
            _refuse("status", f"{where}: PASS with an empty or damaged comparison")
        for tensor, error in found["tensors"].items():
            if not error["ok"] or error["nan"]:
                _refuse("status", f"{where}: PASS although {tensor} is off the oracle")
    probes = subject.get("probes")
    if probes and not all(probe["equal"] for probe in probes["set"].values()):
        _refuse("status", f"{where}: PASS although a set probe differs")
    if probes and any(level["verdict"] == "other" for level in probes["levels"]):
        _refuse("status", f"{where}: PASS although a level probe chose another value")
    if "execution" in subject and subject["execution"]["verdict"] != "as_named":
        _refuse("status", f"{where}: PASS although another backend ran")
    bits = subject.get("bits")
    if bits and bits["claimed"] == "bitwise" and "differs" in bits["observed"].values():
        _refuse("status", f"{where}: PASS although claimed bits differ")


def _subjects(observations: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for cell in observations["cells"]:
        for subject in cell["subjects"]:
            yield f"cell {cell['id']}, {subject['subject']}", subject


def _refuse(rule: str, message: str) -> NoReturn:
    raise Rejected(message, rule=f"crosscheck.{rule}")
