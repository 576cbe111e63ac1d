"""`attnrepro bundle`: what a host without a network needs, in parts that travel."""

from __future__ import annotations

from pathlib import Path  # noqa: TC003 - typer reads it at run time
from typing import Annotated

import typer

from attnrepro.cli.output import emit, progress


def bundle(
    stacks: Annotated[
        list[str],
        typer.Argument(
            metavar="STACK...",
            help="Built stacks; or host-torch: the host's own PyTorch with kernels on top. Several "
            "sets of kernels are host-torch and host-torch-NAME.",
        ),
    ],
    out: Annotated[Path, typer.Option(help="A new folder for the parts.")],
    part_size: Annotated[str, typer.Option(help="Most bytes of a part, as 30MiB.")] = "30MiB",
    wheel: Annotated[
        list[str] | None,
        typer.Option(
            metavar="[STACK=]FILE",
            help="A kernel's wheel for host-torch, or for the host-torch-NAME before the `=`; may "
            "be given again.",
        ),
    ] = None,
    public: Annotated[
        list[Path] | None,
        typer.Option(
            help="host-torch: a public wheel with which the host's package is compared; may be "
            "given again. Default: the wheels of the public twin that the store holds."
        ),
    ] = None,
    python: Annotated[str, typer.Option(help="Python's minor version on the host.")] = "3.12",
    engine_root: Annotated[
        Path | None,
        typer.Option(help="An unpacked Docker (usr/sbin/dockerd …); default: Debian's, fetched."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document.")] = False,
) -> None:
    """Pack images, engine and this package for a host without a network.

    On the host, as root, with the Python that imports torch:  python3 FOLDER/install
    """
    from attnrepro.images import bundle as bundles
    from attnrepro.images.store import Store

    made = bundles.make(
        stacks,
        out=out,
        part_size=bundles.parse_size(part_size),
        wheels=bundles.by_stack(wheel or ()),
        public=public or (),
        python=python,
        store=Store(),
        engine_root=engine_root,
        progress=progress,
    )
    document = {
        "folder": str(made.folder),
        "bytes": made.size,
        "parts": [{"name": name, "bytes": size} for name, size in made.parts],
    }
    emit(
        document,
        as_json=as_json,
        text=lambda: "\n".join(
            [
                f"{made.folder}: {len(made.parts)} parts, {made.size / 1e6:.1f} MB",
                f"on the host, as root: python3 {made.folder.name}/install",
            ]
        ),
    )
