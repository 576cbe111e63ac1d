"""What an artifact carries to be run again: the runner, and the recipes of its images."""

from __future__ import annotations

import difflib
import hashlib
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Final

from attnrepro import treelist
from attnrepro.artifact import container
from attnrepro.artifact.budget import Budget
from attnrepro.errors import Rejected, Unavailable
from attnrepro.packing import IMAGES_FOLDER, RUNNER_FOLDER
from attnrepro.runnerwheel import RunnerWheel
from attnrepro.usedimages import HOST_ROOT, ready

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from attnrepro.artifact.verify import Verified
    from attnrepro.images.store import ImageRecord, Store
    from attnrepro.manifest.model import ImageRef
    from attnrepro.usedimages import ReadyImage

_NOT_CODE: Final = ("/RECORD", "claims.json")
"""Files that decide nothing of what runs: a wheel's list of its files, what releases claim."""

HOST_RECORD: Final = "host.json"
"""What a recipe of a host's own root holds in place of a Dockerfile."""

_SHOWN_LINES: Final = 200
"""Lines of a difference that are shown; the rest is counted."""


def runner(verified: Verified) -> RunnerWheel:
    """The runner that an artifact carries. Verification has shown that it is there."""
    wanted = verified.predicate["runner"]
    for name, data in verified.members.items():
        if name.startswith(RUNNER_FOLDER) and hashlib.sha256(data).hexdigest() == wanted["sha256"]:
            return RunnerWheel(
                name=PurePosixPath(name).name,
                version=wanted["version"],
                data=data,
                sha256=wanted["sha256"],
            )
    message = f"the artifact holds no runner below {RUNNER_FOLDER}"
    raise Rejected(message, rule="crosscheck.runner")


def recipe(verified: Verified, key: str) -> dict[str, bytes]:
    """Files of the recipe of an image, by path."""
    folder = f"{IMAGES_FOLDER}{key}/"
    return {
        name.removeprefix(folder): data
        for name, data in verified.members.items()
        if name.startswith(folder)
    }


def runner_difference(carried: RunnerWheel, installed: RunnerWheel) -> list[str]:
    """How a carried runner differs from this package's, as a unified diff; empty if equal."""
    if carried.sha256 == installed.sha256:
        return []
    try:
        ours, theirs = (
            container.read(wheel.data, budget=Budget()) for wheel in (installed, carried)
        )
    except Rejected as error:
        return [f"the runner is no canonical wheel: {error.message}"]
    return [
        f"runner {carried.version} (sha256:{carried.sha256[:16]}…) against this package's "
        f"{installed.version} (sha256:{installed.sha256[:16]}…):",
        *_shortened(_differences(ours, theirs)),
    ]


def recipe_differences(verified: Verified) -> list[str]:
    """How the carried recipes differ from those that this package ships; empty if all are known."""
    from attnrepro.images import spec

    lines: list[str] = []
    for image in verified.predicate["images"]:
        files = recipe(verified, image["key"])
        label = f"{image['stack']}@{image['revision']}"
        shipped = spec.shipped(image["stack"], image["revision"])
        if shipped is None:
            lines += [
                f"the image {label} is no stack of this package:",
                *_shortened(_listed(files)),
            ]
        elif difference := list(_differences(shipped.files, files)):
            lines += [
                f"the recipe of {label} differs from this package's:",
                *_shortened(iter(difference)),
            ]
    return lines


class RecipeImages:
    """Images of an artifact: from the store by digest, else built from the carried recipe."""

    def __init__(
        self, verified: Verified, *, store: Store | None = None, engine: str | None = None
    ) -> None:
        """Serve the images of a verified artifact, building with `engine` where needed."""
        from attnrepro.images.store import Store as TheStore

        self._verified = verified
        self._store = store if store is not None else TheStore()
        self._engine = engine
        self.first_difference: str | None = None
        """First path in which a rebuilt image differs from the artifact's, once one does."""

    def get(self, ref: ImageRef, progress: Callable[[str], None]) -> ReadyImage:
        """See `usedimages.ImageSource.get`."""
        for image in self._verified.predicate["images"]:
            if image["stack"] == ref.stack and ref.revision in (None, image["revision"]):
                return self._get(image, progress)
        message = f"the artifact carries no recipe of {ref}: it was made without a container"
        raise Unavailable(message, hint="--engine host runs it as it was made")

    def _get(self, image: Mapping[str, str], progress: Callable[[str], None]) -> ReadyImage:
        found = self._store.by_digest(image["manifest_digest"])
        if found is not None:
            return ready(found, self._store, rebuild_status="found in the store by its digest")
        if image["base_kind"] == HOST_ROOT and HOST_RECORD in recipe(self._verified, image["key"]):
            own = self._own_host(image)
            progress(
                f"the artifact's {own.stack} was made of another host's root: running in this "
                f"host's, {own.manifest_digest}"
            )
            self._compare(image, own)
            return ready(own, self._store, rebuild_status="this host's own root: differs")
        from attnrepro.images.build import build_from_recipe

        progress(f"building {image['stack']}@{image['revision']} from the artifact's recipe")
        built = build_from_recipe(
            recipe(self._verified, image["key"]),
            engine=self._engine,
            store=self._store,
            progress=progress,
        )
        if built.manifest_digest == image["manifest_digest"]:
            return ready(built, self._store, rebuild_status="rebuilt from the recipe: identical")
        self._compare(image, built)
        progress(
            f"the rebuilt image differs: {built.manifest_digest}, not {image['manifest_digest']}"
        )
        return ready(built, self._store, rebuild_status="rebuilt from the recipe: differs")

    def _own_host(self, image: Mapping[str, str]) -> ImageRecord:
        """This host's image of the same name: nobody can rebuild one of another host's root."""
        own = self._store.find(image["stack"], image["revision"])
        if own is not None and own.document["base"]["kind"] == HOST_ROOT:
            return own
        message = f"{image['stack']} was made of one host's root, and this host has made none"
        hint = (
            f"attnrepro bundle {image['stack']} prepares one; or run the manifest "
            "(attnrepro show FILE --member manifest.json) in a stack that anybody can build, with "
            "--stack, and compare the two artifacts"
        )
        raise Unavailable(message, hint=hint)

    def _compare(self, image: Mapping[str, str], here: ImageRecord) -> None:
        packed = {
            each["key"]: self._verified.members[name]
            for each in self._verified.predicate["images"]
            if (name := f"{IMAGES_FOLDER}{each['key']}{treelist.SUFFIX}") in self._verified.members
        }
        theirs = treelist.unpack(packed, image["key"])
        if theirs is None:
            return
        self.first_difference = treelist.first_difference(theirs, here.listing)
        if self.first_difference is None and treelist.same(theirs, here.listing):
            self.first_difference = (
                "no path: kind, mode, owner and content of every one are equal, and times or the "
                "layers' order differ"
            )


def _differences(ours: Mapping[str, bytes], theirs: Mapping[str, bytes]) -> Iterator[str]:
    """A unified diff of two sets of files, this package's first."""
    for name in sorted(set(ours) | set(theirs)):
        before, after = ours.get(name, b""), theirs.get(name, b"")
        if before == after or name.endswith(_NOT_CODE):
            continue
        try:
            old, new = before.decode().splitlines(), after.decode().splitlines()
        except UnicodeDecodeError:
            yield f"{name}: other bytes ({len(before)} and {len(after)})"
            continue
        yield from difflib.unified_diff(
            old, new, fromfile=f"installed/{name}", tofile=f"artifact/{name}", lineterm="", n=1
        )


def _listed(files: Mapping[str, bytes]) -> Iterator[str]:
    for name, data in sorted(files.items()):
        yield f"{name} ({len(data)} bytes, sha256:{hashlib.sha256(data).hexdigest()[:16]}…)"
    yield from files.get("Dockerfile", b"").decode("utf-8", "replace").splitlines()


def _shortened(lines: Iterator[str]) -> list[str]:
    shown = list(lines)
    if len(shown) <= _SHOWN_LINES:
        return shown
    return [*shown[:_SHOWN_LINES], f"… and {len(shown) - _SHOWN_LINES} lines more"]
