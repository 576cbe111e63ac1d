"""The folders that a builder reads: the recipe with the base's root tar, and what was fetched."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attnrepro.images import base, extend

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from attnrepro.images.locks import Wheel
    from attnrepro.images.store import ImageRecord, Store


def write(
    store: Store,
    folder: Path,
    files: Mapping[str, bytes],
    *,
    root: str | ImageRecord,
    wheels: Sequence[Wheel],
    trees: Mapping[str, str],
) -> tuple[Path, Path]:
    """Write both folders, with links into the store.

    Args:
        store: Where everything lies already.
        folder: An empty folder of the store's.
        files: The recipe; what lies in folders of its own (a parent, a source) is left out.
        root: Digest of the base's root tar, or the image on which this one is built.
        wheels: Locked files that the Dockerfile installs or compiles.
        trees: Tars of public source trees: name to digest.

    Returns:
        The main context and the context `wheels`.
    """
    main, fetched = folder / "context", folder / "wheels"
    main.mkdir()
    fetched.mkdir()
    if isinstance(root, str):
        base.link_or_copy(store.blob(root), main / "base.tar")
    else:
        extend.write_parent_root(store, root, main / "base.tar")
    for path, data in files.items():
        if "/" not in path:
            (main / path).write_bytes(data)
    for wheel in wheels:
        base.link_or_copy(store.blob(wheel.sha256), fetched / wheel.file)
    for file, digest in trees.items():
        base.link_or_copy(store.blob(digest), fetched / file)
    return main, fetched
