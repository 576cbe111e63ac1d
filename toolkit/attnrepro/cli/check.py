"""`attnrepro check`: what would this manifest do? Runs nothing."""

from __future__ import annotations

from pathlib import Path  # noqa: TC003 - typer reads it at run time
from typing import Annotated

import typer

from attnrepro.cli.output import emit
from attnrepro.errors import UsageError
from attnrepro.manifest import explain, load
from attnrepro.manifest.capability import Device


def check(
    manifest: Annotated[Path, typer.Argument(help="manifest.json")],
    stack: Annotated[
        list[str] | None,
        typer.Option(
            metavar="[SUBJECT=]NAME",
            help="NAME or NAME@REVISION instead of the manifest's image, or of one subject's; may "
            "be given again.",
        ),
    ] = None,
    architecture: Annotated[
        list[str] | None,
        typer.Option(help="Judge for this architecture (sm_90 …); may be given again."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document.")] = False,
) -> None:
    """Explain a manifest: cells, what each release claims of them, what is left uncompared, cost.

    Exit 0: valid. Exit 2: not valid, every problem with its pointer; or no cell is supported.
    """
    asked = load(manifest, stack=stack)
    device = None
    if architecture:
        device = Device(
            vendor=asked.document["device"]["vendor"], architectures=tuple(architecture)
        )
    found = explain.document(asked, device=device)
    emit(found, as_json=as_json, text=lambda: explain.text(found))
    if found["problem"]:
        raise typer.Exit(UsageError.exit_code)
