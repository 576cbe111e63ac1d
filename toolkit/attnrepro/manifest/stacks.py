"""From the image that a subject names to what is known of that stack."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from attnrepro import jsonio, resources
from attnrepro.errors import InvalidDocument, Problem
from attnrepro.manifest.capability import FILE, Capability
from attnrepro.schema_words import did_you_mean

if TYPE_CHECKING:
    from attnrepro.images.store import Store
    from attnrepro.jsonio import JsonObject
    from attnrepro.manifest.model import ImageRef


@dataclass(frozen=True, kw_only=True)
class StackFacts:
    """What a stack claims and costs."""

    capability: Capability
    vendor: str
    is_built: bool
    """Whether its image is in the store."""
    image_bytes: int
    """Size of the image, or what its recipe says it will be about."""
    build_seconds: float
    """What its recipe says a build takes about."""
    manifest_digest: str | None
    """The image in the store; None where it was not built here."""
    pulls: str | None
    """Key in images/digests.json of the registry image that a build needs; None where none."""


def shipped_names() -> tuple[str, ...]:
    """Stacks that this release ships, sorted."""
    return tuple(sorted({p.parts[-3] for p in resources.images_dir().glob("*/r*/image.json")}))


def find(ref: ImageRef, store: Store | None = None) -> StackFacts:
    """Facts of a shipped stack, or of one of the user's own that is in the store.

    Args:
        ref: What a subject names.
        store: Where built images are; None is the user's own.

    Raises:
        InvalidDocument: there is no such stack, or its capability data are not valid.

    """
    if store is None:
        from attnrepro.images.store import Store as TheStore

        store = TheStore()
    record = store.find(ref.stack, ref.revision)
    folder = resources.images_dir() / ref.stack / (ref.revision or "")
    if ref.revision is not None and (folder / "image.json").is_file():
        image = jsonio.loads((folder / "image.json").read_bytes(), what=f"image.json of {ref}")
        return StackFacts(
            capability=Capability.load(folder),
            vendor=image["device"],
            is_built=record is not None,
            image_bytes=record.document["size"] if record else image["cost"]["image_bytes"],
            build_seconds=image["cost"]["seconds"],
            manifest_digest=record.manifest_digest if record else None,
            pulls=image["base"].get("image", image["base"].get("graft", {}).get("image")),
        )
    if record is None:
        raise _unknown(ref)
    return StackFacts(
        capability=_author(ref, record.document, record.recipe.get(str(record.document["claims"]))),
        vendor=record.document["device"],
        is_built=True,
        image_bytes=record.document["size"],
        build_seconds=0,
        manifest_digest=record.manifest_digest,
        pulls=None,
    )


def _author(ref: ImageRef, document: JsonObject, claims: bytes | None) -> Capability:
    extends = document["extends"]
    base = Capability(stack=str(ref), claims=())
    if extends is not None:
        folder = resources.images_dir() / extends["stack"] / extends["revision"]
        if (folder / FILE).is_file():
            base = Capability.load(folder)
    return Capability.of_author(
        str(ref), claims, base=base, has_adapter=document["adapter"] is not None
    )


def _unknown(ref: ImageRef) -> InvalidDocument:
    known = shipped_names()
    stack = resources.images_dir() / ref.stack
    if stack.is_dir() and ref.stack in known:
        revisions = ", ".join(sorted(p.name for p in stack.glob("r*")))
        problem = Problem(
            pointer="/image/revision",
            found=f'"{ref.revision}"',
            allowed=revisions,
            fix="name one of them, or leave it out for the newest",
        )
    else:
        meant = did_you_mean(ref.stack, known)
        problem = Problem(
            pointer="/image/stack",
            found=f'"{ref.stack}"',
            allowed="a shipped stack ("
            + ", ".join(known)
            + ") or one of your own that has been built",
            fix=f'did you mean "{meant}"?' if meant else "attnrepro build FOLDER makes your own",
        )
    message = f"there is no stack {ref}"
    return InvalidDocument(message, problems=[problem])
