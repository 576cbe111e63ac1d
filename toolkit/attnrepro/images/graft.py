"""Folders of a registry image on a Debian base: a toolkit or an interpreter that Debian lacks.

The rest of the vendor's image stays away, so that libc, compiler and packages are the locked ones.
"""

from __future__ import annotations

import tarfile
from dataclasses import dataclass
from typing import TYPE_CHECKING

from attnrepro.errors import BuildFailed
from attnrepro.images import registry
from attnrepro.images.sources import source_url

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from attnrepro.images.sources import BaseImage
    from attnrepro.images.store import Store


@dataclass(frozen=True, kw_only=True)
class Graft:
    """What is taken over, and from which image."""

    image: BaseImage
    paths: tuple[str, ...]
    """Folders or files, relative to the root."""

    def holds(self, name: str) -> bool:
        """Whether a path of the image is taken over."""
        return any(_below(name, path) for path in self.paths)


def _below(name: str, path: str) -> bool:
    return name == path or name.startswith(f"{path}/")


def add(
    graft: Graft,
    root: Path,
    *,
    store: Store,
    folder: Path,
    offline: bool,
    progress: Callable[[str], None],
) -> Path:
    """The base with the graft on it, as a new tar in the same folder.

    Args:
        graft: What to take over.
        root: The base's root tar.
        store: Keeps the image's layers as they came.
        folder: For the tars.
        offline: Take everything from the store.
        progress: Told what is fetched.

    Raises:
        BuildFailed: the image is not to be had, or a path is not in it.
    """
    whole, part, merged = (folder / f"{name}.tar" for name in ("image", "graft", "grafted"))
    registry.pull(
        graft.image,
        url=source_url("registries", graft.image.registry),
        store=store,
        folder=folder,
        root=whole,
        offline=offline,
        progress=progress,
    )
    found = _select(graft, whole, part)
    missing = [path for path in graft.paths if not any(_below(name, path) for name in found)]
    if missing:
        image = graft.image
        message = f"{image.repository}@{image.digest} has no {', '.join(missing)}"
        raise BuildFailed(message, hint="correct /base/graft/paths in image.json")
    whole.unlink()
    registry.flatten([root, part], merged)
    return merged


def _select(graft: Graft, whole: Path, part: Path) -> Sequence[str]:
    """Copy the entries that are taken over; gives their names."""
    names = []
    with (
        tarfile.open(whole, "r:") as source,
        tarfile.open(part, "w", format=tarfile.PAX_FORMAT) as to,
    ):
        for member in source:
            name = "/".join(word for word in member.name.split("/") if word not in ("", "."))
            if graft.holds(name):
                to.addfile(member, source.extractfile(member) if member.isreg() else None)
                names.append(name)
    return names
