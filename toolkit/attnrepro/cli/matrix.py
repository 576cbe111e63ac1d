"""`attnrepro matrix`: what does each pinned release claim?"""

from __future__ import annotations

from typing import Annotated

import typer

from attnrepro.cli.output import emit
from attnrepro.manifest import matrix as table


def matrix(
    stacks: Annotated[
        list[str] | None,
        typer.Argument(help="Stacks, each NAME or NAME@REVISION; all that are shipped."),
    ] = None,
    backend: Annotated[str | None, typer.Option(help="This backend only.")] = None,
    everything: Annotated[
        bool, typer.Option("--all", help="Also releases that no shipped stack holds.")
    ] = False,
    details: Annotated[
        bool,
        typer.Option(
            "--details",
            help="Also architectures, layouts, options, page sizes, what is refused, and notes.",
        ),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document.")] = False,
) -> None:
    """Show what each pinned kernel release claims to support, with source and date."""
    found = table.document(stacks or [], everything=everything)
    if backend is not None:
        found = table.one(found, backend)
    emit(found, as_json=as_json, text=lambda: table.text(found, details=details))
