"""`attnrepro show`: a summary, one member, or tables."""

from __future__ import annotations

import sys
from pathlib import Path  # noqa: TC003 - typer reads it at run time
from typing import Annotated

import typer

from attnrepro.artifact import explain, trust
from attnrepro.artifact.budget import MIB, Budget
from attnrepro.artifact.verify import Verified, verify
from attnrepro.cli.output import emit, printable, say
from attnrepro.errors import UsageError
from attnrepro.report import export, terminal


def show(
    file: Annotated[Path, typer.Argument(help="NAME.attnrepro or NAME.rerun.attnrepro.")],
    member: Annotated[
        str | None, typer.Option(help="Write this member of the content to stdout, as it is.")
    ] = None,
    members: Annotated[bool, typer.Option("--members", help="List the content's members.")] = False,
    as_csv: Annotated[
        bool, typer.Option("--csv", help="Times as CSV; with --member, that series of samples.")
    ] = False,
    trust_file: Annotated[
        Path | None, typer.Option("--trust", help="Another trust file than your own.")
    ] = None,
    max_mib: Annotated[
        int, typer.Option(min=1, max=3072, help="Most MiB of content that are read.")
    ] = 128,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document.")] = False,
) -> None:
    """Show what an artifact holds. It is verified first; a rejected one is not shown."""
    asked = [
        flag
        for flag, given in (
            ("--member", member is not None),
            ("--members", members),
            ("--csv", as_csv and member is None),
            ("--json", as_json and not members),
        )
        if given
    ]
    if len(asked) > 1:
        message = f"{' and '.join(asked)} exclude each other"
        raise UsageError(message, hint="give one of them")
    verified = verify(file, trust=trust.load(trust_file), budget=Budget(content=max_mib * MIB))
    if member is not None:
        _write_member(verified, member, as_csv=as_csv)
    elif as_csv:
        say(printable(export.times(verified.observations)))
    elif members:
        sizes = {name: len(data) for name, data in verified.members.items()}
        lines = [f"{size:>10}  {name}" for name, size in sizes.items()]
        emit({"members": sizes}, as_json=as_json, text=lambda: "\n".join(lines))
    else:
        emit(
            {
                "kind": verified.kind.value,
                "trusted": verified.trusted,
                "owner": verified.owner,
                "signer": verified.signer.fingerprint,
                "predicate": verified.predicate,
                "manifest": verified.manifest,
                "observations": verified.observations,
                "repeatable": verified.repeatable,
            },
            as_json=as_json,
            text=lambda: "\n".join(
                [
                    terminal.summary(
                        verified.observations,
                        title=str(verified.manifest.get("title") or verified.manifest["name"]),
                    ),
                    *explain.verdict_lines(verified.predicate),
                    explain.signer_line(verified),
                ]
            ),
        )


def _write_member(verified: Verified, name: str, *, as_csv: bool) -> None:
    if name not in verified.members:
        message = f"the content has no member {name!r}"
        raise UsageError(message, hint="attnrepro show FILE --members lists them")
    data = verified.members[name]
    if as_csv:
        if not name.startswith("samples/"):
            message = f"{name} is no series of samples"
            raise UsageError(message, hint="--csv goes with a member of samples/")
        say(export.samples(data))
    elif not sys.stdout.isatty():
        say(data)
    else:
        try:
            say(printable(data.decode()))
        except UnicodeDecodeError:
            message = f"{name} is not text"
            raise UsageError(message, hint="send it to a file: … > FILE") from None
