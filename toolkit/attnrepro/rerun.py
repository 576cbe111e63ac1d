"""`attnrepro rerun`: repeat an artifact from what it carries, and say what came out the same.

Nothing but the file and this package is needed. The image is found by its digest or built from the
recipe in the artifact, the runner is the artifact's own.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from attnrepro import carried, placement, runnerwheel
from attnrepro.artifact import keys, sign
from attnrepro.artifact.statement import Kind
from attnrepro.artifact.verify import verify
from attnrepro.compare import scope, verdicts
from attnrepro.compare.verdicts import Side, Verdict
from attnrepro.errors import (
    ImageDiffers,
    OutputsDiffer,
    PerformanceDiffers,
    Unavailable,
    UsageError,
)
from attnrepro.manifest.load import load
from attnrepro.run import SUFFIX, Options, check_output, perform, write

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from attnrepro.artifact.trust import TrustStore
    from attnrepro.artifact.verify import Verified
    from attnrepro.carried import RecipeImages
    from attnrepro.engines.base import Engine
    from attnrepro.manifest.model import Manifest
    from attnrepro.results import Merged

RERUN_SUFFIX: Final = ".rerun.attnrepro"


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What the user asked of a rerun."""

    yes: bool = False
    """Run a recipe or runner that this package does not know, after showing the difference."""
    on_other_device: bool = False
    """Run on a device outside the scope that the artifact declares."""
    require_image: bool = False
    require_performance: bool = False


@dataclass(frozen=True, kw_only=True)
class RerunOutcome:
    """A rerun that was written."""

    path: Path
    sha256: str
    fingerprint: str
    original: Verified
    verdicts: dict[str, Verdict]
    """By the names of the predicate, in the order in which they are told."""
    merged: Merged

    @property
    def exit_code(self) -> int:
        """The first that applies: 5 outputs, 4 cells, then 6 image and 7 times where required."""
        if self.verdicts["outputs_identical"].failed:
            return OutputsDiffer.exit_code
        if self.merged.failed_required():
            return 4
        if self.verdicts["image_identical"].failed:
            return ImageDiffers.exit_code
        if self.verdicts["performance_consistent"].failed:
            return PerformanceDiffers.exit_code
        return 0


def rerun(
    file: Path,
    *,
    trust: TrustStore,
    engine: Engine,
    asked: Asked,
    options: Options,
    images: RecipeImages | None = None,
    progress: Callable[[str], None],
) -> RerunOutcome:
    """Verify an artifact, run it again and write a signed statement of how it compares.

    Args:
        file: the artifact.
        trust: the verifier's trust file.
        engine: where it runs.
        asked: what the user allows and requires.
        options: output, run folders, device, as for a run.
        images: where images come from; the store and the artifact's recipe by default.
        progress: told each step.

    Raises:
        Rejected: the artifact (exit 1).
        UsageError: its recipe or runner is unknown and `yes` is not given; output or key unusable.
        Unavailable: no engine, or a device outside the declared scope without `on_other_device`.
        BuildFailed: the image cannot be rebuilt.
    """
    original = verify(file, trust=trust)
    if original.kind is not Kind.RUN:
        message = f"{file} is a rerun itself"
        raise UsageError(message, hint="rerun the original; verify --rerun counts both")
    check_output(options)
    manifest = _manifest(original)
    _check_device(original, asked)
    runner = carried.runner(original)
    stack_differences = carried.recipe_differences(original)
    _confirm(
        [*carried.runner_difference(runner, runnerwheel.installed()), *stack_differences],
        asked,
        contained=engine.facts().contained,
        progress=progress,
    )
    signer, created = keys.load_or_create_signer(options.passphrase)
    if created:
        progress(
            f"made a signing key: {keys.key_path()} (sha256:{signer.public.fingerprint[:16]}…)"
        )
    source = images or carried.RecipeImages(original, engine=engine.name)
    performed = perform(
        manifest,
        images=source,
        engine=engine,
        options=options,
        runner=runner,
        progress=progress,
    )
    there, here = (
        Side.of(original),
        Side(
            repeatable=performed.merged.repeatable,
            observations=performed.merged.observations,
            device_class=performed.predicate["device_class"],
            images={i["key"]: i["manifest_digest"] for i in performed.predicate["images"]},
        ),
    )
    found = judge(original, there, here, asked, first_file=source.first_difference)
    data = sign.make_rerun(
        performed.content,
        predicate=performed.predicate,
        original=sign.Original.of(original),
        verdicts={name: verdict.document() for name, verdict in found.items()},
        signer=signer,
    )
    write(options.output, data)
    performed.folder.remove()
    return RerunOutcome(
        path=options.output,
        sha256=hashlib.sha256(data).hexdigest(),
        fingerprint=signer.public.fingerprint,
        original=original,
        verdicts=found,
        merged=performed.merged,
    )


def judge(
    original: Verified, there: Side, here: Side, asked: Asked, *, first_file: str | None
) -> dict[str, Verdict]:
    """The five verdicts."""
    manifest = original.manifest
    return {
        "authentic": verdicts.authentic(
            trusted=original.trusted,
            owner=original.owner,
            fingerprint=original.signer.fingerprint,
        ),
        "image_identical": verdicts.image_identical(
            there, here, required=asked.require_image, first_file=first_file
        ),
        "kernels_identical": verdicts.kernels_identical(there, here),
        "outputs_identical": verdicts.outputs_identical(there, here, bits=manifest["bits"]),
        "performance_consistent": verdicts.performance_consistent(
            there,
            here,
            required=asked.require_performance,
            confidence=str(manifest["timing"]["confidence"]),
        ),
    }


def default_output(file: Path) -> Path:
    """NAME.rerun.attnrepro in the working folder."""
    from pathlib import Path

    return Path(file.name.removesuffix(SUFFIX) + RERUN_SUFFIX)


def _manifest(original: Verified) -> Manifest:
    data = original.members["manifest.json"]
    manifest = load(data)
    if manifest.canonical != data:
        message = "this release reads the artifact's manifest otherwise than the one that made it"
        tool = original.predicate["tool"]["version"]
        raise UsageError(message, hint=f"rerun it with attnrepro {tool}")
    return manifest


def _check_device(original: Verified, asked: Asked) -> None:
    manifest = original.manifest
    vendor, threads = manifest["device"]["vendor"], manifest["device"]["threads"]
    here = scope.device_class(placement.here(vendor, threads))
    reason = scope.outside(
        manifest["bits"], original.predicate["device_class"], here, before_the_run=True
    )
    if reason is not None and not asked.on_other_device:
        message = f"this device is outside the scope that the artifact declares: {reason}"
        hint = "--on-other-device runs it all the same; then no difference is a failure"
        raise Unavailable(message, hint=hint)


def _confirm(
    differences: list[str],
    asked: Asked,
    *,
    contained: bool,
    progress: Callable[[str], None],
) -> None:
    if not differences:
        return
    progress("the artifact carries code that this package does not know:")
    for line in differences:
        progress(f"  {line}")
    if not asked.yes:
        where = "inside a closed container" if contained else "on this machine, NOT in a container"
        message = "the artifact's recipe or runner is not one of this package"
        raise UsageError(message, hint=f"read the difference above; --yes runs it, {where}")
