"""The part of the Dockerfile language that a hermetic build may use.

Every stack's Dockerfile passes through here, ours too; a recipe from a foreign artifact has no
other gate. Allowed is a short list, so that what is not known is refused: no frontend, no base by
name, no address, no network, no mount but the named contexts.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from attnrepro.errors import Problem

if TYPE_CHECKING:
    from collections.abc import Collection

_INSTRUCTIONS: Final = frozenset({"FROM", "ADD", "COPY", "RUN", "ARG", "ENV"})
_STAGE: Final = re.compile(r"[a-z][a-z0-9_-]*")
_CONTEXT_FILE: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*(/[A-Za-z0-9_][A-Za-z0-9._-]*)*")
_TARGETS: Final = ("target", "dst", "destination")
_RUN_FLAG: Final = re.compile(r"--([a-z-]+)(?:=(\S*))?\s*")


@dataclass(frozen=True, kw_only=True)
class Instruction:
    """One instruction, continuation lines joined."""

    line: int
    """Where it begins, from 1."""
    name: str
    rest: str


def parse(text: str) -> list[Instruction]:
    """Instructions of a Dockerfile in order; comments and empty lines are left out."""
    result: list[Instruction] = []
    pending, start = "", 0
    for number, raw in enumerate(text.split("\n"), 1):
        stripped = raw.strip()
        if not stripped or stripped.startswith("#"):
            continue
        if not pending:
            start = number
        if stripped.endswith("\\"):
            pending += stripped[:-1] + " "
            continue
        name, _, rest = (pending + stripped).partition(" ")
        result.append(Instruction(line=start, name=name.upper(), rest=rest.strip()))
        pending = ""
    if pending:
        result.append(Instruction(line=start, name="\\", rest=pending))
    return result


def lint(text: str, *, contexts: Collection[str], files: Collection[str]) -> list[Problem]:
    """What a hermetic build refuses in a Dockerfile; an empty list if nothing.

    Args:
        text: The Dockerfile.
        contexts: Named build contexts that a RUN may mount.
        files: Names in the main context, besides base.tar, that may be added or mounted.
    """
    problems: list[Problem] = []
    stages: set[str] = set()

    def refuse(line: int, found: str, allowed: str, fix: str) -> None:
        problems.append(
            Problem(pointer=f"/Dockerfile:{line}", found=found[:120], allowed=allowed, fix=fix)
        )

    for number, raw in enumerate(text.split("\n"), 1):
        if re.match(r"\s*#\s*(syntax|escape|check)\s*=", raw, re.IGNORECASE):
            refuse(
                number,
                raw.strip(),
                "no parser directive",
                "remove it: a frontend is code pulled from a network",
            )
    instructions = parse(text)
    if not instructions or instructions[0].name not in ("FROM", "ARG"):
        refuse(1, "no FROM", "FROM scratch first", "begin with FROM scratch")
    for step in instructions:
        where = f"{step.name} {step.rest}"
        if "<<" in step.rest:
            refuse(step.line, where, "no here-document", "podman 4 does not read them: use &&")
        if step.name not in _INSTRUCTIONS:
            refuse(
                step.line,
                where,
                ", ".join(sorted(_INSTRUCTIONS)),
                "user, workdir and entrypoint stand in image.json",
            )
        elif step.name == "FROM":
            words = step.rest.split()
            if words[:1] != ["scratch"] and not (words and words[0] in stages):
                refuse(
                    step.line,
                    where,
                    "scratch or an earlier stage",
                    "name the base in image.json; the build adds it as base.tar",
                )
            if len(words) == 3 and words[1].upper() == "AS" and _STAGE.fullmatch(words[2]):
                stages.add(words[2])
            elif len(words) != 1:
                refuse(step.line, where, "FROM scratch [AS stage]", "leave flags out")
        elif step.name in ("ADD", "COPY"):
            _lint_copy(step, stages, {*files, "base.tar"}, refuse)
        elif step.name == "RUN":
            _lint_run(step, contexts, set(files), refuse)
    return problems


def _lint_copy(step: Instruction, stages: set[str], files: set[str], refuse: _Refuse) -> None:
    where = f"{step.name} {step.rest}"
    words = step.rest.split()
    from_stage = False
    while words and words[0].startswith("--"):
        flag, _, value = words.pop(0).partition("=")
        if step.name == "COPY" and flag == "--from" and value in stages:
            from_stage = True
        else:
            refuse(step.line, where, "no flag but COPY --from=STAGE", "leave the flag out")
    if len(words) < 2:
        refuse(step.line, where, "sources and a target", "write them without brackets")
        return
    if from_stage:
        return
    for source in words[:-1]:
        if source not in files:
            refuse(
                step.line,
                where,
                f"a file of the recipe: {', '.join(sorted(files))}",
                "put the file beside the Dockerfile; addresses and patterns are not read",
            )


def _lint_run(
    step: Instruction, contexts: Collection[str], files: set[str], refuse: _Refuse
) -> None:
    rest, where = step.rest, f"{step.name} {step.rest}"
    while match := _RUN_FLAG.match(rest):
        rest = rest[match.end() :]
        flag, value = match[1], match[2] or ""
        if flag != "mount":
            refuse(step.line, f"--{flag}", "--mount", "the whole build has no network")
            continue
        options = dict(part.partition("=")[::2] for part in value.split(","))
        source = options.get("source", options.get("src", ""))
        known = {"type", "from", "source", "src", "target", "dst", "destination", "ro", "readonly"}
        target = next((options[key] for key in _TARGETS if key in options), "")
        if not target.startswith("/run/") or ".." in target:
            refuse(
                step.line,
                where,
                "a target below /run",
                "podman leaves mount points behind, and /run is emptied",
            )
        if options.get("type") != "bind" or not options.keys() <= known:
            refuse(step.line, where, "--mount=type=bind, read-only", "no cache, secret or ssh")
        elif "from" in options:
            if options["from"] not in contexts or (source and not _CONTEXT_FILE.fullmatch(source)):
                refuse(
                    step.line,
                    where,
                    f"from={'|'.join(sorted(contexts)) or 'nothing'}",
                    "mount only the contexts that the build names",
                )
        elif source not in files:
            refuse(
                step.line,
                where,
                f"source={'|'.join(sorted(files))}",
                "mount only files of the recipe",
            )


if TYPE_CHECKING:
    from collections.abc import Callable

    _Refuse = Callable[[int, str, str, str], None]
