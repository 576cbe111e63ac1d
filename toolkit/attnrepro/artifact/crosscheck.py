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
from attnrepro_runner import bitclaims

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from attnrepro.manifest import Manifest


def check(
    members: Mapping[str, bytes],
    documents: Mapping[str, Any],
    manifest: Manifest,
    statement: Statement,
) -> None:
    """Hold members, documents and statement against each other.

    Args:
        members: content.zip's members.
        documents: parsed `repeatable.json` and `observations.json`, valid, and `verdicts.json`.
        manifest: loaded from `manifest.json`.
        statement: parsed; its digest of content.zip has been checked.

    Raises Rejected with a `crosscheck.*` rule.
    """
    _check_statement(members, documents, statement)
    _check_crate(members)
    observations = documents[content.OBSERVATIONS]
    _check_cells(manifest, observations)
    _check_repeatable(documents[content.REPEATABLE], manifest, observations)
    for where, subject in _subjects(observations):
        _check_status(where, subject)
    samples.check(members, manifest.document, observations)


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


def _check_cells(manifest: Manifest, observations: Mapping[str, Any]) -> None:
    """Every cell and subject that the manifest asks for is there, once, and no other."""
    asked = {cell.id: cell for cell in manifest.cells}
    found = [cell["id"] for cell in observations["cells"]]
    if sorted(found) != sorted(asked):
        _refuse("cells", "the observed cells are not those that the manifest asks for")
    backends = {subject.id: (subject.backend, subject.role) for subject in manifest.subjects}
    for cell in observations["cells"]:
        wanted = asked[cell["id"]]
        if (cell["label"], cell["phase"]) != (wanted.label, wanted.workload["phase"]):
            _refuse("cells", f"cell {cell['id']} has another label or phase than in the manifest")
        names = [subject["subject"] for subject in cell["subjects"]]
        if sorted(names) != sorted(wanted.subjects):
            _refuse("cells", f"cell {cell['id']} lacks a subject, or shows one more")
        for subject in cell["subjects"]:
            if (subject["backend"], subject["role"]) != backends[subject["subject"]]:
                _refuse("cells", f"cell {cell['id']} shows another backend than the manifest")


def _check_repeatable(
    claimed: Mapping[str, Any], manifest: Manifest, observations: Mapping[str, Any]
) -> None:
    """What the repeatable part claims must have been seen: bits, probes, kernels, work."""
    planned = [{"id": cell.id, "workload": cell.workload} for cell in manifest.cells]
    expected = repeatable.build(planned, observations["cells"], {})
    if not set(claimed["inputs"]) <= {cell.id for cell in manifest.cells}:
        _refuse("inputs", "repeatable.json names a cell that was not run")
    for section in ("semantics", "outputs", "execution"):
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
    if bits and bitclaims.broken(bits["claimed"], bits["observed"]):
        _refuse("status", f"{where}: PASS although claimed bits differ")


def _subjects(observations: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for cell in observations["cells"]:
        for subject in cell["subjects"]:
            yield f"cell {cell['id']}, {subject['subject']}", subject


def _refuse(rule: str, message: str) -> NoReturn:
    raise Rejected(message, rule=f"crosscheck.{rule}")
