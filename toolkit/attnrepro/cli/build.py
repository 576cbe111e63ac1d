"""`attnrepro build`: pinned images, or one of your own from a folder."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from attnrepro.cli.output import emit, progress

if TYPE_CHECKING:
    from attnrepro.images.store import ImageRecord


def build(
    targets: Annotated[
        list[str] | None,
        typer.Argument(metavar="[STACK | FOLDER]...", help="Default: the stack for this host."),
    ] = None,
    engine: Annotated[
        str | None, typer.Option(help="docker or podman; default: the first that is there.")
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Build twice, uncached, and compare.")
    ] = False,
    offline: Annotated[bool, typer.Option("--offline", help="Fetch nothing.")] = False,
    no_cache: Annotated[
        bool, typer.Option("--no-cache", help="Build again, although the store has the image.")
    ] = False,
    mirror: Annotated[
        list[str] | None,
        typer.Option(help="A Debian mirror or snapshot archive, asked before the host's own."),
    ] = None,
    allow_newer: Annotated[
        bool,
        typer.Option(
            "--allow-newer", help="Take newer Debian packages for those gone: another image."
        ),
    ] = False,
    allow_dirty: Annotated[
        bool,
        typer.Option("--allow-dirty", help="Build a checkout with uncommitted changes; recorded."),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document.")] = False,
) -> None:
    """Build pinned images, or one of your own from a folder."""
    from attnrepro.images.build import build as build_image
    from attnrepro.images.spec import default_stack

    records = [
        build_image(
            target,
            progress=progress,
            engine=engine,
            offline=offline,
            check=check,
            no_cache=no_cache,
            allow_newer=allow_newer,
            allow_dirty=allow_dirty,
            mirrors=mirror or (),
        )
        for target in targets or [default_stack()]
    ]
    emit(
        {"images": [record.document for record in records]},
        as_json=as_json,
        text=lambda: "\n".join(_text(record, checked=check) for record in records),
    )


def _text(record: ImageRecord, *, checked: bool) -> str:
    lines = [
        f"{record.stack}@{record.revision}  {record.title}",
        f"  image     {record.manifest_digest}",
        f"  config    {record.config_digest}",
        f"  size      {record.size / 1e9:.2f} GB in {len(record.layers)} layers",
        f"  built by  {record.builder}",
    ]
    lines += [f"  MODIFIED  {words}" for words in record.modified]
    if checked:
        lines.append("  check     identical: two uncached builds gave this image")
    return "\n".join(lines)
