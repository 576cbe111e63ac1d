"""From nothing to a signed artifact: engine, image, a small benchmark, verify."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from attnrepro import resources, run
from attnrepro.artifact import trust
from attnrepro.artifact.verify import verify
from attnrepro.engines import select
from attnrepro.errors import Unavailable
from attnrepro.images.store import Store
from attnrepro.manifest.load import load
from attnrepro.usedimages import StoreImages

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from attnrepro.artifact.verify import Verified
    from attnrepro.engines.base import Engine
    from attnrepro.run import Outcome

MANIFEST: Final = "quickstart"


@dataclass(frozen=True, kw_only=True)
class Started:
    """What the quickstart left."""

    outcome: Outcome
    verified: Verified
    engine: str
    installed: tuple[str, ...]
    """Packages that were installed for it."""


def quickstart(
    *,
    folder: Path,
    engine_name: str | None,
    install_engine: bool,
    invocation: tuple[str, ...],
    progress: Callable[[str], None],
    engines: Callable[[str | None], Engine] = select.choose,
) -> Started:
    """Build, run and verify the quickstart manifest.

    Args:
        folder: where the artifact goes; an earlier one there is replaced.
        engine_name: docker or podman; None takes the first that answers.
        install_engine: whether podman may be installed where none answers (needs root).
        invocation: the command line, for the statement.
        progress: told each step.
        engines: chooses an engine by name.

    Raises what `run.run` raises; Unavailable where there is no engine.
    """
    manifest = load(resources.manifests_dir() / MANIFEST / "manifest.json")
    engine, installed = _engine(engine_name, install_engine, engines, progress)
    folder.mkdir(parents=True, exist_ok=True)
    outcome = run.run(
        manifest,
        images=StoreImages(Store(), build=True, engine=engine.name),
        engine=engine,
        options=run.Options(
            output=folder / f"{manifest.name}{run.SUFFIX}",
            runs=folder / "runs",
            replace=True,
            invocation=invocation,
        ),
        progress=progress,
    )
    progress(f"verifying {outcome.path}")
    verified = verify(outcome.path, trust=trust.load())
    return Started(
        outcome=outcome, verified=verified, engine=engine.name, installed=tuple(installed)
    )


def _engine(
    name: str | None,
    install: bool,
    engines: Callable[[str | None], Engine],
    progress: Callable[[str], None],
) -> tuple[Engine, list[str]]:
    try:
        return engines(name), []
    except Unavailable as error:
        if not install:
            hint = "attnrepro quickstart --install-engine installs podman (as root)"
            raise Unavailable(error.message, hint=hint, rule=error.rule) from None
    from attnrepro.engines.install import install_engine

    installed = install_engine(progress)
    return engines(name), installed
