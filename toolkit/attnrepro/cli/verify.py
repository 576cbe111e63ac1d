"""`attnrepro verify`: is this file what a key that I trust signed, whole and consistent?"""

from __future__ import annotations

from pathlib import Path  # noqa: TC003 - typer reads it at run time
from typing import Annotated

import typer

from attnrepro.artifact import explain, trust
from attnrepro.artifact.budget import MIB, Budget
from attnrepro.artifact.statement import Kind
from attnrepro.artifact.verify import check_threshold, support
from attnrepro.artifact.verify import verify as verify_artifact
from attnrepro.cli.output import emit
from attnrepro.errors import UnknownSigner, UsageError


def verify(
    file: Annotated[Path, typer.Argument(help="NAME.attnrepro or NAME.rerun.attnrepro.")],
    rerun: Annotated[
        list[Path] | None,
        typer.Option(help="A rerun of FILE by somebody else; may be given again."),
    ] = None,
    trust_file: Annotated[
        Path | None,
        typer.Option("--trust", help="Another trust file than your own."),
    ] = None,
    max_mib: Annotated[
        int, typer.Option(min=1, max=3072, help="Most MiB of content that are read.")
    ] = 128,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document.")] = False,
) -> None:
    """Check signature, trust, contents and statistics of an artifact.

    Exit 0: intact and signed by a key you trust. Exit 3: intact, the signer is unknown.
    Exit 1: rejected; the failing rule is named.
    """
    store, budget = trust.load(trust_file), Budget(content=max_mib * MIB)
    verified = verify_artifact(file, trust=store, budget=budget)
    reruns = [verify_artifact(path, trust=store, budget=budget) for path in rerun or ()]
    for path, one in zip(rerun or (), reruns, strict=True):
        if (
            one.kind is not Kind.RERUN
            or one.statement.original_sha256 != verified.statement.content_sha256
        ):
            message = f"{path} is no rerun of {file}"
            raise UsageError(message, hint="attnrepro rerun makes one; show says what a file is")
    backing = support(verified, reruns, trust=store)
    if verified.trusted:
        check_threshold(backing, store)
    found = explain.document(verified, file=str(file), known=trust.known_keys(), support=backing)
    emit(found, as_json=as_json, text=lambda: explain.text(found))
    if verified.trusted:
        return
    if as_json:  # the document has said it; an error document after it would be a second one
        raise typer.Exit(UnknownSigner.exit_code)
    message, hint = explain.unknown_signer(found)
    raise UnknownSigner(message, hint=hint, rule="signer.unknown")
