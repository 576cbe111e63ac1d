"""From the root tar that an engine exported to the layers and the image in the store."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from attnrepro.images import extend, oci, tree

if TYPE_CHECKING:
    from pathlib import Path

    from attnrepro.images.extend import Extension
    from attnrepro.images.spec import Stack
    from attnrepro.images.store import Store


@dataclass(frozen=True, kw_only=True)
class Composed:
    """An image whose layers are in the store."""

    image: oci.Image
    layers: tuple[oci.Layer, ...]
    listing: bytes
    """The tree's listing."""


def compose(
    store: Store, stack: Stack, root: Path, *, folder: Path, extension: Extension | None
) -> Composed:
    """Write the layers of a root tar by the stack's split rule, and the image over them.

    Args:
        store: Takes the layers.
        stack: Gives the split rule and the configuration.
        root: What the engine exported.
        folder: For unfinished layers; on the store's file system.
        extension: Keeps the parent's layers and writes the difference alone.

    Raises:
        BuildFailed: the tar is not whole, or holds what no image may hold.
    """
    entries = tree.read(root)
    if extension is not None:
        layers, done = extend.write_layers(store, extension, entries, root, folder)
    else:
        layers, done = [], []
        for index, rule in enumerate(stack.document["layers"]):
            members = [entry for entry in entries if stack.layer_of(entry.path) == index]
            written = folder / f"layer-{index}.tar"
            with root.open("rb") as source, written.open("wb") as file:
                layer, hashed = oci.write_layer(
                    rule["name"], members, source, file, epoch=stack.epoch
                )
            store.adopt(written, layer.digest)
            layers.append(layer)
            done += hashed
    done.sort(key=lambda entry: tree.path_order(entry.path))
    image = oci.image(
        layers,
        platform=stack.document["platform"],
        epoch=stack.epoch,
        env=stack.document["env"],
        entrypoint=stack.document["entrypoint"],
        user=stack.document["user"],
        workdir=stack.document["workdir"],
        labels={
            "org.opencontainers.image.title": stack.name,
            "org.opencontainers.image.version": stack.revision,
        },
    )
    return Composed(image=image, layers=tuple(layers), listing=tree.listing(done))
