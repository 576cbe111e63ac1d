"""The record of a built image: what schema/image.schema.json says, and its bill of materials."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from attnrepro.errors import InvalidDocument, Problem
from attnrepro.images import oci, sbom

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from attnrepro.images.builders import Builder
    from attnrepro.images.extend import Extension
    from attnrepro.images.sources import BaseImage
    from attnrepro.images.spec import Stack
    from attnrepro.images.store import ImageRecord, Store
    from attnrepro.jsonio import JsonObject

STEPS = ("fetch_ms", "base_ms", "build_ms", "write_ms")


def save(
    store: Store,
    stack: Stack,
    *,
    image: oci.Image,
    layers: Sequence[oci.Layer],
    listing: bytes,
    builder: Builder,
    times: Mapping[str, int],
    modified: Sequence[str],
    extension: Extension | None,
    foreign: bool,
) -> ImageRecord:
    """Write the record of an image whose layers are in the store.

    Args:
        store: Where it goes.
        stack: What was built.
        image: Manifest and configuration.
        layers: The layers, lowest first.
        listing: The tree's listing.
        builder: What built it.
        times: Milliseconds by step.
        modified: Ways in which the image is not the pinned stack.
        extension: What an extending stack adds.
        foreign: Whether the recipe came out of an artifact.
    """
    document = stack.document
    digest = image.manifest_digest
    made = store.base_layer(stack.base_digest)
    for data in (image.manifest, image.config, listing):
        store.add_bytes(data)
    record: JsonObject = {
        "schema": "attnrepro.image/1",
        "name": f"localhost/attnrepro/{stack.name}:{stack.revision}-{digest[7:19]}",
        "recipe_digest": stack.recipe_digest,
        "recipe": {path: store.add_bytes(data) for path, data in stack.files.items()},
        "manifest_digest": digest,
        "config_digest": image.config_digest,
        "tree_sha256": "sha256:" + hashlib.sha256(listing).hexdigest(),
        "layers": [
            {"name": layer.name, "digest": layer.digest, "size": layer.size} for layer in layers
        ],
        "size": sum(layer.size for layer in layers),
        "base": _base_document(stack),
        "builder": {
            "name": builder.name,
            "version": builder.version,
            "bootstrap": made[1] if made is not None else None,
            "writer": oci.WRITER,
        },
        "times": {step: times.get(step, 0) for step in STEPS},
        "sbom": store.add_bytes(_sbom(stack, extension)),
        "claims": document.get("claims"),
        "modified": [*modified, *(extension.modified if extension else ())],
        "origin": "recipe" if foreign else "stack",
        "extends": extension.extends if extension else None,
        "source": extension.source if extension else None,
        "adapter": extension.adapter if extension else None,
    }
    for key in (
        *("stack", "revision", "title", "platform", "device", "env", "user", "workdir"),
        *("entrypoint", "python", "toolkit", "compiler", "framework", "kernels", "arch"),
        "source_date_epoch",
    ):
        record[key] = document[key]
    _validate(record)
    return store.save(record)


def _base_document(stack: Stack) -> JsonObject:
    settings = stack.document["base"]
    if stack.debs:
        lock = stack.files.get("debs.lock") or stack.files["parent/debs.lock"]
        return {
            "kind": "debian",
            "suite": settings["suite"],
            "packages": len(stack.debs),
            "lock_sha256": "sha256:" + hashlib.sha256(lock).hexdigest(),
            **(_image_document(stack.graft.image) if stack.graft is not None else {}),
        }
    return {"kind": "registry", **_image_document(stack.base_image)}


def _image_document(image: BaseImage) -> JsonObject:
    return {
        "reference": f"{image.registry}/{image.repository}:{image.tag}",
        "digest": image.digest,
    }


def _sbom(stack: Stack, extension: Extension | None) -> bytes:
    reference = None
    image = stack.graft.image if stack.graft is not None else None
    if not stack.debs:
        image = stack.base_image
    if image is not None:
        reference = (f"{image.registry}/{image.repository}", image.digest)
    source = None
    if extension is not None:
        source = (str(extension.source["file"]), str(extension.source["sha256"]))
    return sbom.render(
        name=stack.label,
        recipe_digest=stack.recipe_digest,
        epoch=stack.epoch,
        suite=stack.document["base"].get("suite"),
        debs=stack.debs,
        wheels=stack.wheels,
        base=reference,
        source=source,
        trees=[(tree.source, tree.commit) for tree in stack.trees],
    )


def _validate(record: JsonObject) -> None:
    """A record that its own schema refuses is our mistake; find it here, not in an artifact."""
    from attnrepro.schema import validate

    problems: list[Problem] = validate("image", record)
    if problems:
        message = "the image record is not valid"
        raise InvalidDocument(message, problems=problems)
