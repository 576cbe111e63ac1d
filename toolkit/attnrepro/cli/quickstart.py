"""`attnrepro quickstart`: from nothing to a signed artifact."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from attnrepro.cli.output import emit, progress

if TYPE_CHECKING:
    from attnrepro.quickstart import Started


def quickstart(
    install_engine: Annotated[
        bool,
        typer.Option("--install-engine", help="Install podman where no engine answers (as root)."),
    ] = False,
    engine: Annotated[str | None, typer.Option(help="docker or podman.")] = None,
    folder: Annotated[Path, typer.Option("--output", "-o", help="Folder for the artifact.")] = Path(
        "attnrepro-quickstart"
    ),
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document.")] = False,
) -> None:
    """Build the CPU image, run a small benchmark of all four phases in it, sign and verify.

    Takes a few minutes and about 4 GB of disk; what it costs is told before each step.
    """
    from attnrepro import quickstart as library
    from attnrepro.cli import run as run_verb
    from attnrepro.errors import UsageError

    if engine not in (None, "docker", "podman"):
        message = f"--engine {engine}: quickstart runs in a container"
        raise UsageError(message, hint="docker or podman; attnrepro run takes --engine host")
    started = library.quickstart(
        folder=folder,
        engine_name=engine,
        install_engine=install_engine,
        invocation=("attnrepro", *sys.argv[1:]),
        progress=progress,
    )
    emit(document(started), as_json=as_json, text=lambda: text(started))
    run_verb.end(started.outcome, None, as_json=as_json)


def document(started: Started) -> dict[str, Any]:
    """What `--json` prints."""
    from attnrepro.cli import run as run_verb

    return {
        **run_verb.document(started.outcome),
        "engine": started.engine,
        "installed": list(started.installed),
        "verified": {"trusted": started.verified.trusted, "owner": started.verified.owner},
    }


def text(started: Started) -> str:
    """The table, where the files are, and what to do next."""
    from attnrepro.artifact.keys import key_path
    from attnrepro.files import store_dir
    from attnrepro.report import terminal

    file = started.outcome.path
    owner = started.verified.owner
    trust = f"signed by {'yourself' if owner == 'self' else owner}, which you trust"
    return "\n".join(
        [
            terminal.summary(started.outcome.merged.observations, title=str(file)),
            "",
            f"verified   {trust if started.verified.trusted else 'intact, signer unknown'}",
            f"artifact   {file}",
            f"key        {key_path()}",
            f"images     {store_dir()}",
            "",
            "next:",
            "  # repeat it from what it carries",
            f"  attnrepro rerun {file}",
            "  # a document, and the block for a pull request",
            f"  attnrepro report {file} --format html -o report.html",
            f"  attnrepro attach {file} --pr",
        ]
    )
