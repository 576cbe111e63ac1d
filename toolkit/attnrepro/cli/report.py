"""`attnrepro report`: artifacts as a document."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path  # noqa: TC003 - typer reads it at run time
from typing import Annotated

import typer

from attnrepro.cli.output import emit, progress


class Format(StrEnum):
    """Formats of a report."""

    MARKDOWN = "markdown"
    HTML = "html"


def report(
    files: Annotated[list[Path], typer.Argument(help="Artifacts and reruns.")],
    output_format: Annotated[
        Format, typer.Option("--format", help="markdown, or html: one file without scripts.")
    ] = Format.MARKDOWN,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="File to write; stdout by default.")
    ] = None,
    trust_file: Annotated[
        Path | None, typer.Option("--trust", help="Another trust file than your own.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing file.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document.")] = False,
) -> None:
    """Write a report of one or more artifacts. Each is verified first (exit 1)."""
    from attnrepro.artifact import trust
    from attnrepro.artifact.verify import verify
    from attnrepro.files import write_output
    from attnrepro.report import html, markdown
    from attnrepro.report.sections import article

    store = trust.load(trust_file)
    articles = [article(verify(path, trust=store), file=path.name) for path in files]
    render = html.render if output_format is Format.HTML else markdown.render
    document = render(articles)
    if output is not None:
        write_output(output, document.encode(), inputs=files, force=force)
        progress(f"wrote {output}")
        if as_json:
            found = {"format": output_format.value, "file": str(output)}
            emit(found, as_json=True, text=str)
        return
    found = {"format": output_format.value, "document": document}
    emit(found, as_json=as_json, text=lambda: document)
