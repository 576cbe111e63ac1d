"""`attnrepro run`: manifest → plan → images → containers → artifact.

What can fail for the user's reasons (key, output, image, device) fails before anything runs. What
has run is kept until it is in a signed file.
"""

from __future__ import annotations

import hashlib
import secrets
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attnrepro import (
    __version__,
    deviceidentity,
    files,
    packing,
    results,
    runfolder,
    runnerwheel,
    schema,
)
from attnrepro.artifact import keys, sign
from attnrepro.compare import scope
from attnrepro.engines.lock import device_lock, run_lock
from attnrepro.errors import AttnreproError, UsageError
from attnrepro.execute import NO_IMAGE, Segment, execute
from attnrepro.manifest import cost, stacks
from attnrepro.manifest import plan as planning
from attnrepro.placement import place
from attnrepro.usedimages import distinct

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from contextlib import AbstractContextManager

    from attnrepro.artifact.content import Content
    from attnrepro.engines.base import Engine
    from attnrepro.execute import Executed, Placement
    from attnrepro.jsonio import JsonObject
    from attnrepro.manifest.model import ImageRef, Manifest
    from attnrepro.results import Merged
    from attnrepro.runfolder import RunFolder
    from attnrepro.runnerwheel import RunnerWheel
    from attnrepro.usedimages import ImageSource, ReadyImage

SUFFIX = ".attnrepro"


@dataclass(frozen=True, kw_only=True)
class Options:
    """How a run is done; none of it changes what is measured."""

    output: Path
    """The artifact to write."""
    runs: Path
    """Folder of run folders."""
    replace: bool = False
    """Whether an existing output is replaced."""
    device: str | None = None
    """Which device of several."""
    counters: bool = False
    """Whether a pass under a profiler of hardware counters is added."""
    lock_clocks: bool = False
    """Whether the manifest may lock the device's clock."""
    invocation: tuple[str, ...] = ()
    """The command line, for the statement."""
    passphrase: Callable[[], str] | None = None
    """Asks for the key's passphrase."""


@dataclass(frozen=True, kw_only=True)
class Performed:
    """A manifest that was run, not yet signed."""

    merged: Merged
    content: Content
    predicate: JsonObject
    folder: RunFolder
    """To be removed once the content is in a file."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """An artifact that was written."""

    path: Path
    sha256: str
    """Of the file."""
    fingerprint: str
    """Of the signer's key."""
    key_created: bool
    merged: Merged


def run(
    manifest: Manifest,
    *,
    images: ImageSource,
    engine: Engine,
    options: Options,
    progress: Callable[[str], None],
) -> Outcome:
    """Run a manifest and write its signed artifact.

    Raises:
        UsageError: output or key unusable (before the run), disk full.
        Unavailable: engine, image or device missing, or vanished; resumable.
        Interrupted: resumable.
        BuildFailed, ImageDiffers: of an image.
        AttnreproError: the runner failed.
    """
    check_output(options)
    signer, created = keys.load_or_create_signer(options.passphrase)
    if created:
        progress(
            f"made a signing key: {keys.key_path()} (sha256:{signer.public.fingerprint[:16]}…)"
        )
    performed = perform(
        manifest,
        images=images,
        engine=engine,
        options=options,
        runner=runnerwheel.installed(),
        progress=progress,
    )
    data = sign.make_artifact(performed.content, predicate=performed.predicate, signer=signer)
    write(options.output, data)
    performed.folder.remove()
    return Outcome(
        path=options.output,
        sha256=hashlib.sha256(data).hexdigest(),
        fingerprint=signer.public.fingerprint,
        key_created=created,
        merged=performed.merged,
    )


def perform(
    manifest: Manifest,
    *,
    images: ImageSource,
    engine: Engine,
    options: Options,
    runner: RunnerWheel,
    progress: Callable[[str], None],
) -> Performed:
    """Run a manifest with a given runner; everything but signing and writing."""
    contained = engine.facts().contained
    placement = place(
        manifest.document, engine, device=options.device, lock_clocks=options.lock_clocks
    )
    refs = distinct(subject.image for subject in manifest.subjects)
    ready = {ref: images.get(ref, progress) for ref in refs} if contained else {}
    plan = planning.plan(manifest, adapters=_adapters(ready), counters=options.counters)
    expected = cost.estimate(manifest, plan, map(stacks.find, refs) if contained else ())
    progress(f"{manifest.name}: {len(manifest.cells)} cells, {expected.text()}")
    packing.check_members(
        [segment.job("0" * 16) for segment in plan.segments],
        clocks=manifest.document["timing"]["clocks"],
    )
    key = _key(manifest, ready, engine, runner, placement, counters=options.counters)
    folder = runfolder.open_folder(options.runs, manifest.name, key)
    with (
        run_lock(folder.path),
        device_lock(placement.device_id),
        _clock(manifest, placement),
    ):
        state = folder.start(key)
        if state.resumed:
            progress(f"resumed: {folder.path} goes on since {state.started_utc}")
        segments = [
            Segment(
                id=segment.id,
                image=ready[segment.image].identity if contained else NO_IMAGE,
                python=ready[segment.image].python if contained else "python3",
                job=_checked_job(segment.job(state.run_id)),
            )
            for segment in plan.segments
        ]
        executed = execute(
            segments,
            engine=engine,
            folder=folder,
            state=state,
            runner=runner,
            placement=placement,
            total_seconds=manifest.document["limits"]["total_seconds"],
            progress=progress,
        )
        vendor = manifest.document["device"]["vendor"]
        identity = deviceidentity.identify(vendor, placement.device_id)
        merged = _merge(
            manifest, segments, executed, engine, folder, plan.uncompared, identity, ready.values()
        )
        return _packed(manifest, merged, segments, list(ready.values()), runner, folder, options)


def check_output(options: Options) -> None:
    """Refuse an output that could not be written when the work is done. Raises UsageError."""
    path = options.output
    files.check_target(path)
    if path.exists() and not options.replace:
        message = f"{path} is there already"
        raise UsageError(message, hint="--force replaces it; --output names another file")
    # A name as long as that under which the artifact is written first.
    probe = path.absolute().with_name(f".{path.name}.{secrets.token_hex(6)}.tmp")
    try:
        probe.write_bytes(b"x" * 4096)
    except OSError as error:
        message = f"cannot write {path.name[:200]} in {path.absolute().parent}: {error.strerror}"
        raise UsageError(message, hint="--output names another file") from None
    finally:
        with suppress(OSError):
            probe.unlink()


def write(path: Path, data: bytes) -> None:
    """Write the artifact, whole or not at all. Raises UsageError; the run can be resumed."""
    try:
        files.atomic_write(path, data)
    except OSError as error:
        message = f"cannot write {path}: {error.strerror}"
        hint = "nothing is lost: the same command, with room or another --output, writes it"
        raise UsageError(message, hint=hint) from None


def _adapters(ready: Mapping[ImageRef, ReadyImage]) -> dict[ImageRef, str | None]:
    """Module of the adapter that an image of the user's own carries."""
    found = {ref: image.used.document["adapter"] for ref, image in ready.items()}
    return {ref: Path(adapter["path"]).stem if adapter else None for ref, adapter in found.items()}


def _key(
    manifest: Manifest,
    ready: Mapping[ImageRef, ReadyImage],
    engine: Engine,
    runner: RunnerWheel,
    placement: Placement,
    *,
    counters: bool,
) -> str:
    return runfolder.key_of(
        {
            **({"counters": "true"} if counters else {}),
            "manifest": manifest.sha256,
            "images": sorted(image.identity.manifest_digest for image in ready.values()),
            "engine": engine.name,
            "runner": runner.sha256,
            "device": placement.device_id,
            "cpuset": placement.cpuset,
            "tool": __version__,
        }
    )


def _clock(manifest: Manifest, placement: Placement) -> AbstractContextManager[None]:
    """Hold the device's clock, where the manifest says so and the flag allowed it."""
    wanted = manifest.document["device"]["clocks"]
    if wanted["policy"] != "lock":
        return nullcontext()
    from attnrepro.engines import gpuclocks

    return gpuclocks.locked(placement.device_id, int(wanted["sm_mhz"]))


def _checked_job(job: JsonObject) -> JsonObject:
    if problems := schema.validate("job", job):
        message = f"the plan made a job that is not valid: {problems[0].line()}"
        raise AttnreproError(message)
    return job


def _merge(
    manifest: Manifest,
    segments: Sequence[Segment],
    executed: Executed,
    engine: Engine,
    folder: RunFolder,
    uncompared: Mapping[str, Sequence[str]],
    device_identity: str | None,
    ready: Iterable[ReadyImage],
) -> Merged:
    facts = engine.facts()
    described = {**facts.detail, "store": facts.store, "runtime": facts.runtime}
    described |= {"cgroups": facts.cgroup_version, "rootless": str(facts.rootless).lower()}
    places = {
        result["task"]: segment for segment, found in executed.results.items() for result in found
    }

    def read(member: str) -> bytes:
        return folder.read(places[member.split("/")[1]], member)

    merged = results.merge(
        manifest.document,
        [segment.job for segment in segments],
        [result for found in executed.results.values() for result in found],
        read,
        results.Context(
            run_id=executed.state.run_id,
            started_utc=executed.state.started_utc,
            duration_ns=executed.state.elapsed_ns,
            tool=__version__,
            resumed=executed.state.resumed,
            engine=facts.name,
            engine_version=facts.version,
            contained=facts.contained,
            facts={**described, **executed.facts},
            uncompared=uncompared,
            missing=executed.missing,
            device_identity=device_identity,
            images=[_image(one.used.document) for one in ready],
        ),
    )
    for kind, document in (
        ("repeatable", merged.repeatable),
        ("observations", merged.observations),
    ):
        if problems := schema.validate(kind, document):
            message = f"the results do not make a valid {kind}: {problems[0].line()}"
            raise AttnreproError(message, problems=problems)
    return merged


def _image(record: Mapping[str, Any]) -> JsonObject:
    """What an image costs: its size, and how long it took to build here."""
    return {
        "stack": record["stack"],
        "revision": record["revision"],
        "size": record["size"],
        "build_ms": sum(record["times"].values()),
    }


def _packed(
    manifest: Manifest,
    merged: Merged,
    segments: Sequence[Segment],
    ready: Sequence[ReadyImage],
    runner: RunnerWheel,
    folder: RunFolder,
    options: Options,
) -> Performed:
    used = [image.used for image in ready]
    content, redactions = packing.content(
        manifest.canonical,
        merged,
        folder=folder,
        segments=[segment.id for segment in segments],
        images=used,
        runner=runner,
    )
    predicate = packing.predicate(
        merged,
        images=used,
        runner=runner,
        invocation=options.invocation,
        device_class=scope.device_class(merged.observations["device"]),
        redactions=redactions,
    )
    return Performed(merged=merged, content=content, predicate=predicate, folder=folder)
