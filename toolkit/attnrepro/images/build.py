"""From a stack to an image in the store.

Fetch by hash, make the base, let an engine run the Dockerfile without network, and write the image
from what it exported. The engine's own image never counts: ours is a function of the tree alone.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from attnrepro.errors import ImageDiffers
from attnrepro.images import (
    base,
    builders,
    context,
    extend,
    fetch,
    gitsource,
    preflight,
    record,
    spec,
    tree,
)
from attnrepro.images.compose import Composed, compose
from attnrepro.images.disk import disk_errors
from attnrepro.images.store import ImageRecord, Store

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from attnrepro.images.builders import Builder
    from attnrepro.images.extend import Extension
    from attnrepro.images.locks import Deb, Wheel
    from attnrepro.images.spec import Stack

    Progress = Callable[[str], None]

PACK_LIMIT: Final = 16 << 20
"""A kernel's source of up to this many bytes travels in the recipe, and so in every artifact."""


@dataclass(frozen=True, kw_only=True)
class _Options:
    """How to build; what is built is the stack's alone."""

    engine: str | None
    offline: bool
    check: bool
    no_cache: bool
    allow_newer: bool
    allow_dirty: bool
    mirrors: tuple[str, ...]
    foreign: bool


@dataclass(kw_only=True)
class _Job:
    """One build while it runs."""

    store: Store
    stack: Stack
    options: _Options
    progress: Progress
    extension: Extension | None = None
    trees: Mapping[str, str] = field(default_factory=dict)
    """Tars of public source trees: name in the build's context to digest."""
    times: dict[str, int] = field(default_factory=dict)

    @property
    def wheels(self) -> Sequence[Wheel]:
        """Wheels that the build itself needs; an extending one takes the rest from its parent."""
        return self.stack.wheels if self.extension is None else self.extension.wheels

    @property
    def debs(self) -> Sequence[Deb]:
        """Packages that the build itself needs."""
        return self.stack.debs if self.extension is None else ()

    def timed(self, step: str, started: float) -> None:
        self.times[step] = self.times.get(step, 0) + round((time.monotonic() - started) * 1000)


def build(
    target: str | Path | Stack,
    *,
    progress: Progress,
    engine: str | None = None,
    offline: bool = False,
    check: bool = False,
    no_cache: bool = False,
    allow_newer: bool = False,
    allow_dirty: bool = False,
    mirrors: Sequence[str] = (),
    store: Store | None = None,
) -> ImageRecord:
    """The image of a stack, built if the store does not hold it.

    Args:
        target: A stack, its name (NAME or NAME@REVISION), or a folder.
        progress: Told each step.
        engine: docker or podman; None takes the first that is there.
        offline: Fetch nothing.
        check: Build twice, uncached, and compare.
        no_cache: Build although the image is in the store, without the builder's cache.
        allow_newer: Take today's versions of Debian packages that are gone: another image.
        allow_dirty: Build a kernel's checkout with uncommitted changes, recorded as such.
        mirrors: Roots of Debian mirrors or archives, asked before the host's own.
        store: Where images live; the user's own if None.

    Raises:
        UsageError: no such stack.
        InvalidDocument: its recipe is not valid.
        BuildFailed: something cannot be fetched or built; nothing half-written is left.
        ImageDiffers: two builds differ, or a new one and the store's; the first path is named.
        Unavailable: no engine, or another build of the same image is running.
    """
    if isinstance(target, str):
        stack = spec.resolve(target)
    else:
        stack = spec.load(target) if isinstance(target, Path) else target
    options = _Options(
        engine=engine,
        offline=offline,
        check=check,
        no_cache=no_cache,
        allow_newer=allow_newer,
        allow_dirty=allow_dirty,
        mirrors=tuple(mirrors),
        foreign=False,
    )
    return _run(stack, options, store, progress)


def build_from_recipe(
    files: Mapping[str, bytes],
    *,
    progress: Progress,
    engine: str | None = None,
    offline: bool = False,
    mirrors: Sequence[str] = (),
    store: Store | None = None,
) -> ImageRecord:
    """The image that a recipe from an artifact describes.

    The recipe passes every check that a stack of our own passes; its Dockerfile may only run
    commands without network (`dockerfile.lint`). It needs no other file than those given: an
    extending recipe carries its parent below `parent/` and, where it fits, its kernel's source
    below `source/`.

    Raises what `build` raises.
    """
    options = _Options(
        engine=engine,
        offline=offline,
        check=False,
        no_cache=False,
        allow_newer=False,
        allow_dirty=False,
        mirrors=tuple(mirrors),
        foreign=True,
    )
    return _run(spec.from_files(dict(files)), options, store, progress)


def _run(stack: Stack, options: _Options, store: Store | None, progress: Progress) -> ImageRecord:
    with disk_errors(f"building {stack.label}"):
        return _resolve(store if store is not None else Store(), stack, options, progress)


def _resolve(store: Store, stack: Stack, options: _Options, progress: Progress) -> ImageRecord:
    """Build the parent of an extending stack first."""
    job = _Job(store=store, stack=stack, options=options, progress=progress)
    if stack.extends is not None:
        below = replace(options, check=False, no_cache=False)
        parent = _resolve(store, _parent(stack), below, progress)
        job.extension = extend.prepare(
            store,
            stack,
            parent,
            allow_dirty=options.allow_dirty,
            pack_limit=PACK_LIMIT,
            offline=options.offline,
            progress=progress,
        )
        job.stack = job.extension.stack
    return _build(job)


def _parent(stack: Stack) -> Stack:
    carried = {
        path.removeprefix("parent/"): data
        for path, data in stack.files.items()
        if path.startswith("parent/")
    }
    if carried:
        return spec.from_files(carried)
    return spec.resolve(str(stack.extends))


def _build(job: _Job) -> ImageRecord:
    stack, store, options = job.stack, job.store, job.options
    preflight.check_host(stack)
    known = store.by_recipe(stack.name, stack.revision, stack.recipe_digest)
    if known is not None and not (options.check or options.no_cache):
        return _refresh(job, known)
    with store.lock(f"build-{stack.recipe_digest[7:23]}"):
        if job.extension is None:
            base.check(store, stack, offline=options.offline)
        preflight.announce(store, stack, [*job.wheels, *job.debs], job.progress)
        job, modified = _fetch_all(job)
        stack = job.stack
        builder = builders.choose(options.engine)
        base_digest = _base(job)
        rounds = 2 if options.check else 1
        results = []
        for number in range(rounds):
            if rounds > 1:
                job.progress(f"build {number + 1} of {rounds}, uncached")
            cached = not (options.check or options.no_cache)
            results.append(_one_image(job, builder, base_digest, cached=cached))
            _compare(job, results, known)
        latest = results[-1]
        return record.save(
            store,
            stack,
            image=latest.image,
            layers=latest.layers,
            listing=latest.listing,
            builder=builder,
            times=job.times,
            modified=modified,
            extension=job.extension,
            foreign=options.foreign,
        )


def _refresh(job: _Job, known: ImageRecord) -> ImageRecord:
    """The same image under today's claims, and no longer foreign once we ask for it ourselves."""
    if job.options.foreign:
        return known
    recipe = {path: job.store.add_bytes(data) for path, data in job.stack.files.items()}
    if (recipe, "stack") == (known.document["recipe"], known.document["origin"]):
        return known
    return job.store.save({**known.document, "recipe": recipe, "origin": "stack"})


def _fetch_all(job: _Job) -> tuple[_Job, list[str]]:
    """Fill the store; with --allow-newer the job may become one of other packages."""
    started = time.monotonic()
    stack, store, options = job.stack, job.store, job.options
    modified: list[str] = []
    if job.debs:
        settings = stack.document["base"]
        try:
            fetch.debs(
                store,
                job.debs,
                source=settings["source"],
                mirrors=options.mirrors,
                offline=options.offline,
                progress=job.progress,
            )
        except fetch.MissingDebs as error:
            if not options.allow_newer:
                raise
            stack, modified = _newer(job, error)
            job = replace(job, stack=stack)
    wheels = stack.document["wheels"]
    fetch.wheels(
        store,
        job.wheels,
        python=wheels["python"],
        sources=wheels.get("sources", {}),
        offline=options.offline,
        progress=job.progress,
    )
    job.trees = gitsource.fetch(
        store, job.stack.trees, offline=options.offline, progress=job.progress
    )
    job.timed("fetch_ms", started)
    return job, modified


def _newer(job: _Job, error: fetch.MissingDebs) -> tuple[Stack, list[str]]:
    """The stack with today's Debian packages: another image, and said so."""
    from attnrepro.images.lock import resolve_debs
    from attnrepro.images.locks import render

    settings = job.stack.document["base"]
    job.progress(f"{error.message}: taking today's versions, which gives a DIFFERENT image")
    mirror = fetch.apt_mirrors(settings["source"], job.options.mirrors)[0]
    with job.store.workspace("newer") as folder:
        debs, about = resolve_debs(
            folder,
            settings["packages"],
            suite=settings["suite"],
            mirror=mirror,
            progress=job.progress,
        )
    files = {**job.stack.files, "debs.lock": render(debs, [about, "main only"])}
    stack = spec.from_files(files, folder=job.stack.folder)
    fetch.debs(
        job.store,
        stack.debs,
        source=settings["source"],
        mirrors=job.options.mirrors,
        offline=False,
        progress=job.progress,
    )
    old = {deb.name: deb.version for deb in job.stack.debs}
    changed = sorted(deb.name for deb in stack.debs if old.get(deb.name) != deb.version)
    return stack, [f"--allow-newer: other versions of {', '.join(changed) or 'no package'}"]


def _base(job: _Job) -> str | None:
    """Digest of the root tar that the engine starts from; None where that is a parent image."""
    if job.extension is not None:
        return None
    started = time.monotonic()
    digest = base.prepare(job.store, job.stack, offline=job.options.offline, progress=job.progress)
    job.timed("base_ms", started)
    return digest


def _one_image(job: _Job, builder: Builder, base_digest: str | None, *, cached: bool) -> Composed:
    stack, store = job.stack, job.store
    with store.workspace("build") as folder:
        below = job.extension.parent if job.extension is not None else str(base_digest)
        main, wheels = context.write(
            store, folder, stack.files, root=below, wheels=job.wheels, trees=job.trees
        )
        root = folder / "root.tar"
        started = time.monotonic()
        builder.build(
            main,
            wheels=wheels,
            epoch=stack.epoch,
            cached=cached,
            target=root,
            progress=job.progress,
        )
        job.timed("build_ms", started)
        started = time.monotonic()
        result = compose(store, stack, root, folder=folder, extension=job.extension)
        job.timed("write_ms", started)
    return result


def _compare(job: _Job, results: Sequence[Composed], known: ImageRecord | None) -> None:
    """Refuse a build that differs from the one before it, or from the image in the store.

    Raises ImageDiffers naming the first path that differs.
    """
    latest = results[-1]
    if len(results) > 1:
        other, against, what = results[-2].listing, results[-2].image.manifest_digest, "first build"
    elif known is not None:
        other, against, what = known.listing, known.manifest_digest, "image in the store"
    else:
        return
    if against == latest.image.manifest_digest:
        job.progress(f"identical to the {what}: {against}")
        return
    left, right = tree.parse_listing(other), tree.parse_listing(latest.listing)
    difference = tree.first_difference(left, right) or "the trees are equal, the settings are not"
    message = f"{job.stack.label}: this build differs from the {what}: {difference}"
    raise ImageDiffers(
        message, hint=f"{against} against {latest.image.manifest_digest}; the store keeps the first"
    )
