"""`attnrepro run`: run a manifest inside its image and sign what came out."""

from __future__ import annotations

import sys
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from attnrepro.cli.output import emit, progress
from attnrepro.errors import CellsFailed, PerformanceDiffers

if TYPE_CHECKING:
    from attnrepro.run import Outcome


class FailOn(StrEnum):
    """Verdicts of candidates against baselines that make the run exit 7."""

    SLOWER = "slower"
    NOT_FASTER = "not-faster"


def run(
    manifest: Annotated[Path, typer.Argument(help="The manifest.")],
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Artifact to write; NAME.attnrepro here by default."),
    ] = None,
    engine: Annotated[
        str | None,
        typer.Option(help="docker, podman, or host (no container, said so in the artifact)."),
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="Which device of several: nvidia:1, nvidia:GPU-<uuid>.")
    ] = None,
    stack: Annotated[
        list[str] | None,
        typer.Option(
            metavar="[SUBJECT=]NAME",
            help="NAME or NAME@REVISION instead of the manifest's image, or of one subject's; "
            "recorded so; may be given again.",
        ),
    ] = None,
    build: Annotated[bool, typer.Option("--build", help="Build images that are missing.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing artifact.")] = False,
    fail_on: Annotated[
        FailOn | None, typer.Option(help="Exit 7 where a candidate is slower, or not faster.")
    ] = None,
    counters: Annotated[
        bool,
        typer.Option(
            "--counters", help="Add a pass under ncu, where the image has it; its clocks stay."
        ),
    ] = False,
    lock_clocks: Annotated[
        bool,
        typer.Option(
            "--lock-clocks",
            help="Let the manifest lock this device's clock; given back at the end.",
        ),
    ] = False,
    runs: Annotated[Path, typer.Option(help="Folder in which unfinished runs are kept.")] = Path(
        "attnrepro-runs"
    ),
    python: Annotated[
        Path | None, typer.Option(help="With --engine host: the interpreter that has torch.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document.")] = False,
) -> None:
    """Run a manifest inside its image, check what ran, and sign it as NAME.attnrepro.

    Exit 0: all required cells passed. Exit 4: the artifact is written, and some did not. An
    interrupted run (exit 8 or 10) goes on with the same command.
    """
    from attnrepro import run as library
    from attnrepro.cli import choices
    from attnrepro.images.store import Store
    from attnrepro.manifest.load import load
    from attnrepro.usedimages import StoreImages

    loaded = load(manifest, stack=stack)
    for note in loaded.notes:
        progress(f"note: {note.pointer}: {note.text}")
    chosen = choices.engine(engine, python)
    outcome = library.run(
        loaded,
        images=StoreImages(Store(), build=build, engine=chosen.name),
        engine=chosen,
        options=library.Options(
            output=output or Path(f"{loaded.name}{library.SUFFIX}"),
            runs=runs,
            replace=force,
            device=device,
            counters=counters,
            lock_clocks=lock_clocks,
            invocation=("attnrepro", *sys.argv[1:]),
            passphrase=choices.passphrase,
        ),
        progress=progress,
    )
    found = document(outcome)
    emit(found, as_json=as_json, text=lambda: text(outcome))
    end(outcome, fail_on, as_json=as_json)


def document(outcome: Outcome) -> dict[str, Any]:
    """What `--json` prints."""
    from attnrepro.report.rows import rows

    observations = outcome.merged.observations
    return {
        "file": str(outcome.path),
        "sha256": outcome.sha256,
        "signer": outcome.fingerprint,
        "contained": observations["containment"]["contained"],
        "resumed": observations["run"]["resumed"],
        "summary": observations["summary"],
        "failed": outcome.merged.failed_required(),
        "rows": [
            {
                "cell": row.cell,
                "subject": row.subject,
                "status": row.status,
                "median": row.median,
                "interval": row.interval,
                "tails": row.tails,
                "against": row.against,
                "error": row.error,
                "bits": row.bits,
                "reason": row.reason,
            }
            for row in rows(observations)
        ],
    }


def text(outcome: Outcome) -> str:
    """The table and where the artifact is."""
    from attnrepro.report import terminal

    table = terminal.summary(outcome.merged.observations, title=str(outcome.path))
    return f"{table}\nwrote {outcome.path}, signed by sha256:{outcome.fingerprint[:16]}…"


def end(outcome: Outcome, fail_on: FailOn | None, *, as_json: bool) -> None:
    """Exit 4 or 7 where the artifact says so. Raises CellsFailed, PerformanceDiffers."""
    failed = outcome.merged.failed_required()
    bad = _against(outcome, fail_on)
    if as_json and (failed or bad):  # the document has said it
        raise typer.Exit(CellsFailed.exit_code if failed else PerformanceDiffers.exit_code)
    if failed:
        message = f"{len(failed)} required cells did not pass"
        raise CellsFailed(message, hint=f"{failed[0]}; attnrepro show {outcome.path} has all")
    if bad:
        message = f"--fail-on {fail_on}: {bad[0]}"
        raise PerformanceDiffers(message)


def _against(outcome: Outcome, fail_on: FailOn | None) -> list[str]:
    if fail_on is None:
        return []
    found = []
    for cell in outcome.merged.observations["cells"]:
        for subject in cell["subjects"]:
            for comparison in subject["comparisons"]:
                verdict = comparison["verdict"]
                met = verdict == "SLOWER" if fail_on is FailOn.SLOWER else verdict != "FASTER"
                if met:
                    found.append(
                        f"{cell['label']}, {subject['subject']} against "
                        f"{comparison['baseline']} ({comparison['clock']}): {verdict}"
                    )
    return found
