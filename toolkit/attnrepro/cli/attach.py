"""`attnrepro attach`: the block for a pull request or a paper."""

from __future__ import annotations

from pathlib import Path  # noqa: TC003 - typer reads it at run time
from typing import Annotated

import typer

from attnrepro.artifact import trust
from attnrepro.artifact.verify import verify
from attnrepro.cli.output import emit
from attnrepro.errors import UsageError
from attnrepro.report.attach import latex, markdown


def attach(
    file: Annotated[Path, typer.Argument(help="NAME.attnrepro.")],
    pull_request: Annotated[
        bool, typer.Option("--pr", help="Markdown for a pull request.")
    ] = False,
    paper: Annotated[bool, typer.Option("--paper", help="A LaTeX table with a footnote.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document.")] = False,
) -> None:
    """Write the block to stdout. The artifact is verified first."""
    if pull_request == paper:
        message = "it goes to one place"
        raise UsageError(message, hint="give one of --pr and --paper")
    verified = verify(file, trust=trust.load())
    block = (markdown if pull_request else latex)(verified, file=file.name)
    found = {
        "format": "markdown" if pull_request else "latex",
        "content_sha256": verified.statement.content_sha256,
        "block": block,
    }
    emit(found, as_json=as_json, text=lambda: block)
