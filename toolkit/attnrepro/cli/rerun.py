"""`attnrepro rerun`: repeat an artifact from what it carries."""

from __future__ import annotations

import sys
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from attnrepro.cli.output import emit, progress
from attnrepro.errors import EXIT_CODES

if TYPE_CHECKING:
    from attnrepro.rerun import RerunOutcome


class Require(StrEnum):
    """Verdicts that are no failure unless they are required."""

    IMAGE = "image"
    PERFORMANCE = "performance"


def rerun(
    file: Annotated[Path, typer.Argument(help="NAME.attnrepro, by anybody.")],
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Rerun to write; NAME.rerun.attnrepro by default."),
    ] = None,
    engine: Annotated[
        str | None, typer.Option(help="docker, podman, or host (no container, said so).")
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="Which device of several: nvidia:1, nvidia:GPU-<uuid>.")
    ] = None,
    yes: Annotated[
        bool,
        typer.Option("--yes", help="Run a recipe or runner that this package does not know."),
    ] = False,
    on_other_device: Annotated[
        bool,
        typer.Option("--on-other-device", help="Run outside the scope that the artifact declares."),
    ] = False,
    require: Annotated[
        list[Require] | None,
        typer.Option(help="Exit 6 where the image differs, 7 where times do; may be repeated."),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing rerun.")] = False,
    trust_file: Annotated[
        Path | None, typer.Option("--trust", help="Another trust file than your own.")
    ] = None,
    runs: Annotated[Path, typer.Option(help="Folder in which unfinished runs are kept.")] = Path(
        "attnrepro-runs"
    ),
    python: Annotated[
        Path | None, typer.Option(help="With --engine host: the interpreter that has torch.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document.")] = False,
) -> None:
    """Verify an artifact, run it again from what it carries, and sign how the two compare.

    Exit 0: everything that was claimed repeats. 1: rejected. 5: outputs differ within the declared
    scope. 4: some cells did not pass. 8, 9: no engine or device, no image.
    """
    from attnrepro import rerun as library
    from attnrepro.artifact import trust
    from attnrepro.cli import choices
    from attnrepro.run import Options

    wanted = require or []
    outcome = library.rerun(
        file,
        trust=trust.load(trust_file),
        engine=choices.engine(engine, python),
        asked=library.Asked(
            yes=yes,
            on_other_device=on_other_device,
            require_image=Require.IMAGE in wanted,
            require_performance=Require.PERFORMANCE in wanted,
        ),
        options=Options(
            output=output or library.default_output(file),
            runs=runs,
            replace=force,
            device=device,
            invocation=("attnrepro", *sys.argv[1:]),
            passphrase=choices.passphrase,
        ),
        progress=progress,
    )
    found = document(outcome, file)
    emit(found, as_json=as_json, text=lambda: text(outcome, file))
    if outcome.exit_code:
        raise typer.Exit(outcome.exit_code)


def document(outcome: RerunOutcome, file: Path) -> dict[str, Any]:
    """What `--json` prints."""
    return {
        "original": str(file),
        "file": str(outcome.path),
        "sha256": outcome.sha256,
        "signer": outcome.fingerprint,
        "verdicts": {name: verdict.document() for name, verdict in outcome.verdicts.items()},
        "failed": outcome.merged.failed_required(),
        "summary": outcome.merged.observations["summary"],
        "exit_code": outcome.exit_code,
    }


def text(outcome: RerunOutcome, file: Path) -> str:
    """The verdicts, one a line, and what follows."""
    from attnrepro.report import terminal

    lines = [f"rerun of {file}", ""]
    lines += terminal.verdict_lines(
        {name: verdict.document() for name, verdict in outcome.verdicts.items()}
    )
    lines += [f"  did not pass: {line}" for line in outcome.merged.failed_required()]
    lines += ["", f"wrote {outcome.path}, signed by sha256:{outcome.fingerprint[:16]}…"]
    if outcome.fingerprint == outcome.original.signer.fingerprint:
        lines.append("by the key of the original: this is no independent confirmation")
    else:
        lines.append(
            f"attnrepro verify {file} --rerun {outcome.path} counts it beside the original"
        )
    if outcome.exit_code:
        lines.append(f"exit {outcome.exit_code}: {EXIT_CODES[outcome.exit_code]}")
    return "\n".join(lines)
