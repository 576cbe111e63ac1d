"""Cleaning the store: what no image record needs goes."""

from __future__ import annotations

import shutil
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from attnrepro.errors import InvalidDocument
from attnrepro.images.locks import parse_debs, parse_wheels
from attnrepro.resources import images_dir

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    from attnrepro.images.locks import Deb, Wheel
    from attnrepro.images.store import ImageRecord, Store

_LOCKS: Final[dict[str, Callable[[bytes], Iterable[Deb | Wheel]]]] = {
    "debs.lock": parse_debs,
    "requirements.lock": parse_wheels,
}


@dataclass(frozen=True, kw_only=True)
class Freed:
    """What a cleaning removed, or would."""

    files: int
    size: int
    """Bytes."""
    images: tuple[str, ...]
    """Labels of removed images."""


def collect(
    store: Store, *, fetched: bool = False, superseded: bool = False, dry_run: bool = False
) -> Freed:
    """Remove archives (made again when asked for), leftovers and blobs that no record names.

    Args:
        store: What to clean.
        fetched: Remove the wheels, packages and bases too, from which images were built.
        superseded: Remove images of the same stack and revision than which there is a newer one.
        dry_run: Only count.

    Raises:
        Unavailable: a build is running.
    """
    with ExitStack() as stack:
        # A build holds blobs that no record names yet.
        for path in sorted((store.root / "locks").glob("build-*.lock")):
            stack.enter_context(store.lock(path.stem))
        kept, gone = _split(store, superseded=superseded)
        needed: set[str] = set()
        for record in kept:
            needed |= _blobs(record, fetched=fetched)
        bases = list((store.root / "bases").glob("*.json"))
        if not fetched:
            needed |= {store.blob(digest).name for digest in _base_layers(store, bases)}
            needed |= _shipped()
        blobs = (store.root / "blobs" / "sha256").glob("*")
        doomed = [path for path in blobs if path.name not in needed]
        doomed += (store.root / "archives").glob("*.tar")
        doomed += [store.record_path(record) for record in gone]
        doomed += bases if fetched else []
        size = sum(path.stat().st_size for path in doomed)
        if not dry_run:
            for path in doomed:
                path.unlink(missing_ok=True)
            shutil.rmtree(store.root / "tmp", ignore_errors=True)
    labels = tuple(f"{record.stack}@{record.revision} {record.manifest_digest}" for record in gone)
    return Freed(files=len(doomed), size=size, images=labels)


def _split(store: Store, *, superseded: bool) -> tuple[list[ImageRecord], list[ImageRecord]]:
    """Records to keep and to remove; incomplete ones are of no use."""
    kept: list[ImageRecord] = []
    gone: list[ImageRecord] = []
    seen: set[tuple[str, str]] = set()
    for record in store.records():
        key = (record.stack, record.revision)
        if not store.complete(record) or (superseded and key in seen):
            gone.append(record)
        else:
            kept.append(record)
            seen.add(key)
    return kept, gone


def _shipped() -> set[str]:
    """What shipped stacks are built from: an interrupted first build has fetched it already."""
    locks = images_dir().glob("*/*/*.lock")
    return set().union(*(_locked(path.name, path.read_bytes()) for path in locks))


def _blobs(record: ImageRecord, *, fetched: bool) -> set[str]:
    document = record.document
    digests = {record.manifest_digest, record.config_digest, record.tree_sha256, document["sbom"]}
    digests |= {layer.digest for layer in record.layers} | set(document["recipe"].values())
    names = {digest.removeprefix("sha256:") for digest in digests}
    if not fetched:
        for path, data in record.recipe.items():
            names |= _locked(path, data)
        if document["source"] is not None:
            names.add(document["source"]["sha256"])
    return names


def _locked(path: str, data: bytes) -> set[str]:
    """SHA-256 of what a lock names; nothing where the file is no lock or cannot be read."""
    name = path.rpartition("/")[2]
    parse = _LOCKS.get(name)
    if parse is None:
        return set()
    with suppress(InvalidDocument):
        return {item.sha256 for item in parse(data)}
    return set()


def _base_layers(store: Store, bases: Iterable[Path]) -> list[str]:
    found = (store.base_layer(path.stem) for path in bases)
    return [entry[0] for entry in found if entry is not None]
