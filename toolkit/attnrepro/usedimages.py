"""Finding, or building, the images that a manifest's subjects run in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol

from attnrepro.engines.base import ImageIdentity
from attnrepro.errors import ImageDiffers, Unavailable
from attnrepro.packing import UsedImage

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from attnrepro.images.store import ImageRecord, Store
    from attnrepro.manifest.model import ImageRef

HOST_ROOT: Final = "host-rootfs"
"""Kind of a base that was made of one host's own root file system."""


@dataclass(frozen=True, kw_only=True)
class ReadyImage:
    """An image that an engine can load, and what of it enters the artifact."""

    identity: ImageIdentity
    python: str
    """Interpreter inside it."""
    used: UsedImage


class ImageSource(Protocol):
    """Where images come from; the store is one, an artifact's recipe another."""

    def get(self, ref: ImageRef, progress: Callable[[str], None]) -> ReadyImage:
        """The image of a stack.

        Raises InvalidDocument where there is no such stack, Unavailable where its image is not
        there, BuildFailed, ImageDiffers.
        """
        ...


class StoreImages:
    """Images of the store; with `build`, a missing one is built."""

    def __init__(self, store: Store, *, build: bool, engine: str | None = None) -> None:
        """Take images from `store`; build a missing one with `engine` (None: the first there)."""
        self._store = store
        self._build = build
        self._engine = engine

    def get(self, ref: ImageRef, progress: Callable[[str], None]) -> ReadyImage:
        """See `ImageSource.get`."""
        record = self._store.find(ref.stack, ref.revision)
        if ref.digest is not None and (record is None or record.manifest_digest != ref.digest):
            record = self._store.by_digest(ref.digest) or record
        if record is None:
            from attnrepro.manifest import stacks

            stacks.find(ref, self._store)  # a stack that nobody has can be built by nobody
        if record is None and self._build:
            from attnrepro.images.build import build

            record = build(_label(ref), engine=self._engine, store=self._store, progress=progress)
        if record is None:
            message = f"the image of {ref} is not built yet"
            name = ref.stack if ref.revision is None else f"{ref.stack}@{ref.revision}"
            raise Unavailable(
                message, hint=f"attnrepro build {name}, or add --build to this command"
            )
        if ref.digest is not None and record.manifest_digest != ref.digest:
            message = (
                f"the manifest wants {ref} as {ref.digest}, and its recipe gave "
                f"{record.manifest_digest}"
            )
            hint = "attnrepro build --check names the first file that differs"
            raise ImageDiffers(message, hint=hint)
        return ready(record, self._store, rebuild_status=rebuild_status(record))


def ready(record: ImageRecord, store: Store, *, rebuild_status: str) -> ReadyImage:
    """A record of the store as something that an engine can load."""
    return ReadyImage(
        identity=ImageIdentity(
            archive=store.archive(record),
            name=record.name,
            manifest_digest=record.manifest_digest,
            config_digest=record.config_digest,
        ),
        python=record.python,
        used=UsedImage(
            key=f"{record.stack}-{record.revision}",
            document=record.document,
            recipe=record.recipe,
            sbom=record.sbom,
            listing=record.listing,
            rebuild_status=rebuild_status,
        ),
    )


def rebuild_status(record: ImageRecord) -> str:
    """What a stranger may hope for, in words."""
    if record.document["base"]["kind"] == HOST_ROOT:
        return "cannot be rebuilt elsewhere: made of one host's root file system"
    if record.document["modified"]:
        return "built with changes that are not in the recipe"
    return "recipe included; not rebuilt for this run"


def _label(ref: ImageRef) -> str:
    return ref.stack if ref.revision is None else f"{ref.stack}@{ref.revision}"


def distinct(refs: Iterable[ImageRef]) -> list[ImageRef]:
    """Each image once, in the order of first use."""
    return list(dict.fromkeys(refs))
