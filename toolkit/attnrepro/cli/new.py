"""`attnrepro new`: write a manifest by flags or questions."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from attnrepro.cli.output import emit, progress
from attnrepro.errors import AttnreproError, UsageError
from attnrepro.files import check_target, write_output
from attnrepro.manifest import draft, explain
from attnrepro.manifest.load import load

_DEFAULTS = draft.Answers()


def new(
    output: Annotated[Path, typer.Argument(help="The file to write.")] = Path("manifest.json"),
    name: Annotated[str, typer.Option(help="Short name.")] = _DEFAULTS.name,
    stack: Annotated[str, typer.Option(help="NAME or NAME@REVISION.")] = _DEFAULTS.stack,
    vendor: Annotated[str, typer.Option(help="cpu, nvidia or amd.")] = _DEFAULTS.vendor,
    threads: Annotated[int, typer.Option(help="CPU threads.")] = _DEFAULTS.threads,
    phase: Annotated[
        str, typer.Option(help="forward, forward_backward, prefill or decode.")
    ] = _DEFAULTS.phase,
    batch: Annotated[int, typer.Option(help="Sequences.")] = _DEFAULTS.batch,
    seqlen_q: Annotated[
        list[int] | None, typer.Option(help="Query length; several make an axis.")
    ] = None,
    seqlen_k: Annotated[
        list[int] | None, typer.Option(help="Key length; several make an axis.")
    ] = None,
    heads_q: Annotated[int, typer.Option(help="Query heads.")] = _DEFAULTS.heads_q,
    heads_kv: Annotated[
        int | None, typer.Option(help="Key and value heads; as many as query heads.")
    ] = None,
    head_dim: Annotated[int, typer.Option(help="Width of a head.")] = _DEFAULTS.head_dim,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16, float16 …")] = _DEFAULTS.dtype,
    causal: Annotated[str, typer.Option(help="none, top_left or bottom_right.")] = _DEFAULTS.causal,
    subject: Annotated[
        list[str] | None, typer.Option(help="Candidate: BACKEND or ID=BACKEND.")
    ] = None,
    baseline: Annotated[
        list[str] | None, typer.Option(help="Baseline: BACKEND or ID=BACKEND.")
    ] = None,
    pr: Annotated[
        tuple[str, str] | None,
        typer.Option(metavar="BASE HEAD", help="Compare one kernel of two stacks."),
    ] = None,
    ask: Annotated[bool, typer.Option("--ask", help="Ask for each of these.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace the file.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document.")] = False,
) -> None:
    """Write a valid manifest to go on editing; `attnrepro check` says what of it can run."""
    check_target(output)
    if output.exists() and not force:
        message = f"{output} is there already"
        raise UsageError(message, hint="--force replaces it")
    queries = tuple(seqlen_q or ([1] if phase == "decode" else _DEFAULTS.seqlens_q))
    given: dict[str, Any] = {
        "name": name,
        "stack": stack,
        "vendor": vendor,
        "threads": threads,
        "phase": phase,
        "batch": batch,
        "seqlens_q": queries,
        "seqlens_k": tuple(seqlen_k or (_DEFAULTS.seqlens_k if phase == "decode" else queries)),
        "heads_q": heads_q,
        "heads_kv": heads_kv,
        "head_dim": head_dim,
        "dtype": dtype,
        "causal": causal,
        "subjects": tuple(subject or _DEFAULTS.subjects),
        "baselines": tuple(baseline or _DEFAULTS.baselines),
    }
    if ask:
        given = _asked(given)
    document = draft.document(draft.Answers(**given, pull_request=pr))
    data = draft.text(document).encode()
    write_output(output, data, inputs=(), force=force)
    if doubt := _doubt(data):
        progress(f"note: attnrepro check refuses this so far: {doubt}")
    emit(
        {"file": str(output), "manifest": document},
        as_json=as_json,
        text=lambda: f"wrote {output}\nnext: attnrepro check {output}",
    )


def _doubt(data: bytes) -> str | None:
    """What `check` would refuse; the stack may be built after the manifest is written."""
    try:
        problem = explain.document(load(data))["problem"]
    except AttnreproError as error:
        return error.message
    return str(problem) if problem else None


def _asked(given: dict[str, Any]) -> dict[str, Any]:
    """The same with each value asked for; an empty answer keeps it."""
    if not sys.stdin.isatty():
        message = "--ask needs a terminal"
        raise UsageError(message, hint="give the values by flags")
    answers: dict[str, Any] = {}
    for name, value in given.items():
        shown = " ".join(map(str, value)) if isinstance(value, tuple) else value
        word = str(typer.prompt(name.replace("_", " "), default=shown, err=True))
        if isinstance(value, tuple):
            kind = type(value[0])
            answers[name] = tuple(kind(part) for part in word.split())
        elif value is None or isinstance(value, int):
            answers[name] = None if word == "None" else int(word)
        else:
            answers[name] = word
    return answers
