"""`attnrepro doctor`: what this machine has, what it lacks, and the fix for each."""

from __future__ import annotations

from pathlib import Path  # noqa: TC003 - typer reads it at run time
from typing import Annotated

import typer

from attnrepro.cli.output import emit, progress
from attnrepro.errors import Unavailable, UsageError
from attnrepro.files import read_regular, store_dir

_MAX_SAMPLES = 1 << 28  # bytes


def doctor(
    fix: Annotated[
        bool, typer.Option("--fix", help="Install what lacks from the distribution; needs root.")
    ] = False,
    write_cdi: Annotated[
        Path | None,
        typer.Option(help="Write a CDI spec of this machine's NVIDIA GPUs to this file."),
    ] = None,
    aa: Annotated[
        bool,
        typer.Option(
            "--aa", help="Compare a benchmark with itself: this machine's false verdicts."
        ),
    ] = False,
    samples: Annotated[
        Path | None,
        typer.Option(help="With --aa: read these (runner: fidelity --samples), and run nothing."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document.")] = False,
) -> None:
    """Check engine, builders, GPU, CDI, clocks, disk and Python; each with its fix.

    Exit 0: images can be built and run in a container. Exit 8: not yet.
    """
    from attnrepro.engines import cdi, checks, gpuhost, install

    if write_cdi is not None:
        spec = cdi.write_spec(gpuhost.read(), write_cdi)
        devices = [device["name"] for device in spec["devices"]]
        emit(
            {"written": str(write_cdi), "kind": spec["kind"], "devices": devices},
            as_json=as_json,
            text=lambda: f"{write_cdi}: {spec['kind']}={{{','.join(devices)}}}",
        )
        return
    if samples is not None:
        _judge_samples(samples, aa=aa, as_json=as_json)
        return
    if aa:
        from attnrepro.aa import doctor_aa

        found = doctor_aa(progress)
        emit(found.document(), as_json=as_json, text=found.text)
        return
    installed = install.install_engine(progress) if fix else []
    diagnosis = checks.diagnose(store_dir())
    emit({**diagnosis.document(), "installed": installed}, as_json=as_json, text=diagnosis.text)
    if not diagnosis.usable and as_json:  # the document has said it
        raise typer.Exit(Unavailable.exit_code)
    if not diagnosis.usable:
        lacking = [c.id for c in diagnosis.checks if c.level is checks.Level.MISSING]
        message = f"this machine lacks: {', '.join(lacking)}"
        raise Unavailable(message, hint="follow the fixes above")


def _judge_samples(samples: Path, *, aa: bool, as_json: bool) -> None:
    from attnrepro.aa import from_samples
    from attnrepro.jsonio import loads

    if not aa:
        message = "--samples without --aa"
        raise UsageError(message, hint="give both")
    try:
        data = read_regular(samples, limit=_MAX_SAMPLES)
    except OSError as error:
        message = f"cannot read {samples}: {error.strerror}"
        raise UsageError(message, hint="name the file of fidelity --samples") from None
    found = from_samples(loads(data, what=samples.name))
    emit(
        {"cells": [one.document() for one in found]},
        as_json=as_json,
        text=lambda: "\n\n".join(one.text() for one in found),
    )
