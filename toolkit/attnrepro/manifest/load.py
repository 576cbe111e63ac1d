"""Reading a manifest: strict JSON, schema, defaults, meaning; every problem at once.

manifest = load(Path("manifest.json"))
manifest.sha256, len(manifest.cells)
"""

from __future__ import annotations

import copy
import hashlib
import stat
from typing import TYPE_CHECKING, Any, Final

from attnrepro import jsonio, schema
from attnrepro.errors import InvalidDocument, Problem, UsageError
from attnrepro.manifest import cells, contract, defaults, foreign, semantics
from attnrepro.manifest.model import ImageRef, Manifest, Subject

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from attnrepro.jsonio import JsonObject
    from attnrepro.manifest.model import Cell

MAX_BYTES: Final = 1 << 20
"""Longest manifest file."""


def load(
    source: Path | bytes,
    *,
    newest: Callable[[str], str | None] = defaults.shipped_revision,
    stack: str | Sequence[str] | None = None,
) -> Manifest:
    """Read and check a manifest.

    Args:
        source: File or bytes of at most `MAX_BYTES`.
        newest: Gives the revision that an image without one means.
        stack: NAME or NAME@REVISION that takes the place of the manifest's own image, and
            SUBJECT=NAME of a subject's; what is run, and recorded, is the manifest with them.

    Raises:
        InvalidDocument: with all problems.
        UsageError: the file cannot be read, or `stack` names no subject of it.

    """
    data, what = (source, "the manifest") if isinstance(source, bytes) else _read(source)
    document = defaults.plain(jsonio.loads(data, what=what))
    words = [stack] if isinstance(stack, str) else stack or ()
    targets = [word.partition("=")[0] if "=" in word else "" for word in words]
    if len(set(targets)) < len(targets):
        message = f"--stack {', --stack '.join(words)}: two stacks for one image"
        raise UsageError(message, hint="give one for the manifest and one for a subject")
    for word in words if isinstance(document, dict) else ():
        document = _elsewhere(document, word)
    problems = [_in_context(p) for p in schema.validate(defaults.KIND, document)]
    judged, replaced = _mended(document, problems)
    checked: list[Cell] = []
    if judged is not None:
        touched = [p.pointer for p in problems] + replaced
        told, checked = _check(judged)
        problems += [p for p in told if not _concerns(p.pointer, touched)]
    if problems:
        number = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        message = f"{what} is not a valid manifest: {number}"
        raise InvalidDocument(message, problems=problems)
    return _manifest(defaults.canonical(defaults.explicit(document), newest), checked)


def image(word: str) -> JsonObject:
    """The image that NAME or NAME@REVISION means."""
    name, _, revision = word.partition("@")
    return {"stack": name, "revision": revision} if revision else {"stack": name}


def _elsewhere(document: JsonObject, word: str) -> JsonObject:
    """The manifest with another image: its own, or with SUBJECT=NAME one subject's."""
    subject, equals, name = word.partition("=")
    if not equals:
        return {**document, "image": image(word)}
    listed = document.get("subjects")
    listed = listed if isinstance(listed, list) else []
    # What is no valid subject stays, and is told by the schema after this.
    known = [str(s.get("id")) for s in listed if isinstance(s, dict)]
    if subject not in known:
        message = f"--stack {word}: the manifest has no subject {subject}"
        raise UsageError(message, hint=f"its subjects: {', '.join(known)}")
    changed = [
        {**s, "image": image(name)} if isinstance(s, dict) and s.get("id") == subject else s
        for s in listed
    ]
    return {**document, "subjects": changed}


def _manifest(document: JsonObject, checked: list[Cell]) -> Manifest:
    canonical = jsonio.canonical(document)
    expanded, _ = cells.expand(document)
    for cell, same in zip(expanded, checked, strict=True):
        cell.take(same)
    return Manifest(
        document=document,
        canonical=canonical,
        sha256=hashlib.sha256(canonical).hexdigest(),
        cells=tuple(expanded),
        subjects=tuple(
            Subject(
                id=subject["id"],
                backend=subject["backend"],
                role=subject["role"],
                options=subject["options"],
                image=ImageRef.of(subject["image"] or document["image"]),
                required=subject["required"],
            )
            for subject in document["subjects"]
        ),
        notes=contract.notes(document, expanded),
    )


def _check(document: Any) -> tuple[list[Problem], list[Cell]]:
    """Problems of a schema-valid document beyond its schema, and its cells."""
    if problems := cells.check_changes(document):
        return problems, []
    document = defaults.explicit(document)
    problems = contract.check(document)
    expanded, wrong = cells.expand(document)
    if wrong:
        return problems + wrong, expanded
    problems += semantics.check_cells(expanded, timed=document["timing"]["launches"] > 0)
    problems += cells.check_duplicates(expanded)
    return problems + contract.check_expected(document, expanded), expanded


def _read(path: Path) -> tuple[bytes, str]:
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            message = f"{path} is not a regular file"
            raise UsageError(message, hint="name a manifest.json")
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except OSError as error:
        message = f"cannot read {path}: {error.strerror or error}"
        raise UsageError(message, hint="name a manifest.json that you may read") from None
    if len(data) > MAX_BYTES:
        message = f"{path} is longer than {MAX_BYTES} bytes"
        raise InvalidDocument(message, hint="a manifest is small: put large grids into `sweep`")
    return data, str(path)


def _in_context(problem: Problem) -> Problem:
    """A schema problem with the reason where a manifest overreaches."""
    name = problem.pointer.rsplit("/", 1)[-1].lower()
    fix = problem.fix
    if problem.found.startswith("an unknown field") and name in foreign.FIXES:
        fix = foreign.FIXES[name]
    elif problem.pointer.endswith(("/image", "/image/stack")) and problem.found != "nothing":
        fix = "name a stack of this toolkit; an image is never taken by name and tag, which move"
    elif problem.pointer.endswith("/image/digest"):
        fix = 'write "sha256:" and the 64 hex digits of the image manifest, or leave it out'
    return Problem(pointer=problem.pointer, found=problem.found, allowed=problem.allowed, fix=fix)


_SUBSTITUTE: Final[JsonObject] = {
    "schema": "attnrepro.manifest/1",
    "name": "substitute",
    "image": {"stack": "cpu-torch2.13"},
    "device": {"vendor": "cpu", "threads": 1},
    "workload": {
        "phase": "prefill",
        "batch": 1,
        "seqlen_q": 1,
        "seqlen_k": 1,
        "heads_q": 1,
        "head_dim": 8,
        "dtype": "float32",
    },
    "subjects": [{"id": "substitute", "backend": "eager"}],
}
"""Stands in for a required part that its schema refuses, so that the other parts are judged too."""


def _mended(document: Any, problems: list[Problem]) -> tuple[Any | None, list[str]]:
    """A valid document from the valid parts, and the pointers under which nothing can be said.

    First the refused fields go; where that leaves something required missing, the whole part goes
    or is replaced. None where even that is not valid.
    """
    if not problems:
        return document, []
    if not isinstance(document, dict):
        return None, []
    document = copy.deepcopy(document)
    for problem in problems:
        _drop(document, problem.pointer)
    if isinstance(workload := document.get("workload"), dict):
        _fill(workload)
    parts = {p.pointer.split("/")[1] for p in schema.validate(defaults.KIND, document) if p.pointer}
    if parts & {"workload", "subjects"}:
        # What varies or embeds the call cannot be judged without it.
        parts |= {"sweep", "variants", "request"} & set(document)
    for part in parts:
        document.pop(part, None)
    for part, value in _SUBSTITUTE.items():
        if part not in document and (part != "device" or parts & {"device", "image"}):
            document[part] = value
            parts.add(part)
    if schema.validate(defaults.KIND, document):
        return None, []
    return document, [f"/{part}" for part in parts]


def _fill(workload: dict[str, Any]) -> None:
    """Give a call what it lacks, so that the rest of it is judged: values that go with the rest."""
    for name, twin in (
        ("seqlen_q", "seqlen_k"),
        ("seqlen_k", "seqlen_q"),
        ("heads_q", "heads_kv"),
    ):
        if name not in workload and twin in workload:
            workload[name] = workload[twin]
    for name, value in _SUBSTITUTE["workload"].items():
        workload.setdefault(name, value)


def _drop(document: Any, pointer: str) -> None:
    target = document
    *parents, name = [
        part.replace("~1", "/").replace("~0", "~") for part in pointer.split("/")[1:]
    ] or [""]
    for parent in parents:
        if isinstance(target, list) and parent.isdigit() and int(parent) < len(target):
            target = target[int(parent)]
        else:
            target = target.get(parent) if isinstance(target, dict) else None
    if isinstance(target, dict):
        target.pop(name, None)


def _concerns(pointer: str, touched: list[str]) -> bool:
    return any(
        f"{pointer}/".startswith(f"{other}/") or f"{other}/".startswith(f"{pointer}/")
        for other in touched
    )
