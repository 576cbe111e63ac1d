"""`attnrepro store`: list or clean the store of built images."""

from __future__ import annotations

from typing import Annotated

import typer

from attnrepro.cli.output import emit

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)

_Json = Annotated[bool, typer.Option("--json", help="One JSON document.")]


@app.callback()
def store() -> None:
    """List or clean the store of built images."""


@app.command("ls")
def list_images(as_json: _Json = False) -> None:
    """List the images in the store, newest first."""
    from attnrepro.images.store import Store

    place = Store()
    records = place.records()
    rows = [
        {
            "stack": record.stack,
            "revision": record.revision,
            "manifest_digest": record.manifest_digest,
            "size": record.size,
            "complete": place.complete(record),
            "modified": list(record.modified),
        }
        for record in records
    ]
    emit(
        {"root": str(place.root), "images": rows},
        as_json=as_json,
        text=lambda: (
            "\n".join(
                f"{record.stack}@{record.revision}  {record.manifest_digest}"
                f"  {record.size / 1e9:.2f} GB"
                f"{'' if place.complete(record) else '  INCOMPLETE'}"
                f"{'  MODIFIED' if record.modified else ''}"
                for record in records
            )
            or f"no images in {place.root}"
        ),
    )


@app.command("gc")
def collect(
    fetched: Annotated[
        bool, typer.Option("--fetched", help="Fetched wheels and packages too: no --offline then.")
    ] = False,
    superseded: Annotated[
        bool, typer.Option("--superseded", help="Images that a newer one of their stack replaced.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would go.")] = False,
    as_json: _Json = False,
) -> None:
    """Remove what no image needs: archives, leftovers, unreferenced files."""
    from attnrepro.images.collect import collect as collect_garbage
    from attnrepro.images.store import Store

    freed = collect_garbage(Store(), fetched=fetched, superseded=superseded, dry_run=dry_run)
    verb = "would free" if dry_run else "freed"
    emit(
        {"files": freed.files, "bytes": freed.size, "images": list(freed.images)},
        as_json=as_json,
        text=lambda: (
            f"{verb} {freed.size / 1e9:.2f} GB in {freed.files} files"
            + "".join(f"\n  image {name}" for name in freed.images)
        ),
    )
