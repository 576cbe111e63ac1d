"""The content-addressed store: fetched files, layers, and the records of built images.

blobs/sha256/HEX                         wheels, debs, layers, manifests, recipe files, listings
images/STACK@REVISION/HEX.json           image records, by recipe digest
archives/HEX.tar                         an image as one file, made when first asked for
bases/HEX.json                           recipe of a base to its layer
tmp/PID-…  locks/                        work in progress
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import tempfile
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING, Final, cast

from attnrepro.errors import BuildFailed, InvalidDocument, Unavailable
from attnrepro.files import atomic_write, sha256_file, store_dir, sync_folder
from attnrepro.images.disk import disk_errors
from attnrepro.images.oci import Image, Layer, write_archive
from attnrepro.jsonio import JsonObject, canonical, loads

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

HOST_LAYER: Final = "host-rootfs"
"""Name of a layer made of a host's own root: ten gigabytes that only the engine holds."""
_HEX: Final = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, kw_only=True)
class ImageRecord:
    """What was built; see schema/image.schema.json for every field of `document`."""

    document: JsonObject = field(repr=False)
    store: Store = field(repr=False, compare=False)

    @property
    def stack(self) -> str:
        """Name of the stack."""
        return cast("str", self.document["stack"])

    @property
    def revision(self) -> str:
        """Revision of the stack, as r1."""
        return cast("str", self.document["revision"])

    @property
    def name(self) -> str:
        """Repository and tag under which the archive loads."""
        return cast("str", self.document["name"])

    @property
    def manifest_digest(self) -> str:
        """`sha256:` and hex: the image's identity."""
        return cast("str", self.document["manifest_digest"])

    @property
    def config_digest(self) -> str:
        """`sha256:` and hex: the id that Docker's classic store and podman show."""
        return cast("str", self.document["config_digest"])

    @property
    def tree_sha256(self) -> str:
        """`sha256:` and hex of the tree's listing."""
        return cast("str", self.document["tree_sha256"])

    @property
    def recipe_digest(self) -> str:
        """`sha256:` and hex over the recipe's files and the writer's version."""
        return cast("str", self.document["recipe_digest"])

    @property
    def title(self) -> str:
        """One line on what it is."""
        return cast("str", self.document["title"])

    @property
    def size(self) -> int:
        """Sum of the layers, bytes."""
        return cast("int", self.document["size"])

    @property
    def builder(self) -> str:
        """Name and version of what built it, which do not matter to its identity."""
        made = self.document["builder"]
        return f"{made['name']} {made['version']}"

    @property
    def modified(self) -> tuple[str, ...]:
        """Ways in which it is not the pinned stack, in words."""
        return tuple(self.document["modified"])

    @property
    def layers(self) -> tuple[Layer, ...]:
        """The layers, lowest first."""
        return tuple(Layer(**layer) for layer in self.document["layers"])

    @property
    def env(self) -> Mapping[str, str]:
        """Environment of the image's configuration."""
        return cast("Mapping[str, str]", self.document["env"])

    @property
    def python(self) -> str:
        """Absolute path, in the image, of the interpreter that imports the framework."""
        return cast("str", self.document["python"])

    @property
    def recipe(self) -> Mapping[str, bytes]:
        """The files from which this image can be built again, as they were used."""
        return {
            path: self.store.read(digest)
            for path, digest in sorted(self.document["recipe"].items())
        }

    @property
    def sbom(self) -> bytes:
        """SPDX 2.3 JSON."""
        return self.store.read(cast("str", self.document["sbom"]))

    @property
    def listing(self) -> bytes:
        """The tree's listing (`tree.parse_listing`)."""
        return self.store.read(self.tree_sha256)

    @property
    def image(self) -> Image:
        """Manifest and configuration."""
        return Image(
            manifest=self.store.read(self.manifest_digest),
            config=self.store.read(self.config_digest),
        )


class Store:
    """Everything below one folder."""

    def __init__(self, root: Path | None = None) -> None:
        self.root = root if root is not None else store_dir()

    # Blobs ------------------------------------------------------------------------------------

    def blob(self, digest: str) -> Path:
        """Where the blob of a digest (`sha256:` and hex) lies, if it is there."""
        name = digest.removeprefix("sha256:")
        if not _HEX.fullmatch(name):
            message = f"{digest[:80]!r} is not a digest"
            raise BuildFailed(message)
        return self.root / "blobs" / "sha256" / name

    def has(self, digest: str, size: int | None = None) -> bool:
        """Whether a blob is there, with the size if one is given; its bytes are not read."""
        try:
            found = self.blob(digest).stat().st_size
        except OSError:
            return False
        return size is None or found == size

    def intact(self, digest: str) -> bool:
        """Whether a blob is there and hashes to its name; a damaged one is removed."""
        path = self.blob(digest)
        try:
            good = sha256_file(path) == path.name
        except OSError:
            return False
        if not good:
            path.unlink(missing_ok=True)
        return good

    def read(self, digest: str) -> bytes:
        """Bytes of a small blob. Raises BuildFailed if it is missing or damaged."""
        path = self.blob(digest)
        try:
            data = path.read_bytes()
        except OSError:
            data = None
        if data is None or hashlib.sha256(data).hexdigest() != path.name:
            message = f"the store lacks {digest}" if data is None else f"{path} is damaged"
            raise BuildFailed(message, hint="build the image again with --no-cache")
        return data

    def add_bytes(self, data: bytes) -> str:
        """Keep bytes; returns their digest."""
        digest = "sha256:" + hashlib.sha256(data).hexdigest()
        if not self.has(digest, len(data)):
            path = self.blob(digest)
            path.parent.mkdir(parents=True, exist_ok=True)
            atomic_write(path, data)
        return digest

    def adopt(self, path: Path, digest: str) -> None:
        """Move a finished file of the store's own temporary folder in under its digest.

        The caller has hashed it. Raises OSError.
        """
        target = self.blob(digest)
        target.parent.mkdir(parents=True, exist_ok=True)
        with path.open("rb") as file:
            os.fsync(file.fileno())
        path.chmod(0o644)
        path.replace(target)
        sync_folder(target.parent)

    # Work in progress -------------------------------------------------------------------------

    @contextmanager
    def workspace(self, purpose: str) -> Iterator[Path]:
        """A temporary folder on the store's own file system, removed on every path.

        What a killed process left is removed on the way in.
        """
        base = self.root / "tmp"
        base.mkdir(parents=True, exist_ok=True)
        for old in base.iterdir():
            if not _alive(old.name.partition("-")[0]):
                shutil.rmtree(old, ignore_errors=True)
        folder = Path(tempfile.mkdtemp(prefix=f"{os.getpid()}-{purpose}-", dir=base))
        # Rootless builders and apt's own user read what lies in it.
        folder.chmod(0o755)
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    @contextmanager
    def lock(self, name: str) -> Iterator[None]:
        """Hold a lock of the store. Raises Unavailable if another process holds it."""
        folder = self.root / "locks"
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{name}.lock"
        with path.open("a+") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                file.seek(0)
                message = (
                    f"another build of the same image is running (pid {file.read(20).strip()})"
                )
                raise Unavailable(message, hint="wait for it; its result serves both") from None
            file.truncate(0)
            file.write(f"{os.getpid()}\n")
            file.flush()
            yield

    def free_bytes(self) -> int:
        """Free space where the store lies."""
        self.root.mkdir(parents=True, exist_ok=True)
        return shutil.disk_usage(self.root).free

    # Images -----------------------------------------------------------------------------------

    def records(self) -> list[ImageRecord]:
        """All image records, newest first; an unreadable one is left out."""
        found = []
        for path in (self.root / "images").glob("*/*.json"):
            with suppress(OSError):
                found.append((path.stat().st_mtime_ns, path.name, path))
        return [record for *_, path in sorted(found, reverse=True) if (record := self._load(path))]

    def _load(self, path: Path) -> ImageRecord | None:
        try:
            document = loads(path.read_bytes(), what=str(path))
        except (OSError, InvalidDocument):
            return None
        return ImageRecord(document=document, store=self)

    def complete(self, record: ImageRecord) -> bool:
        """Whether all blobs of an image are there with their sizes; a host root is the engine's."""
        small = (record.manifest_digest, record.config_digest, record.tree_sha256)
        kept = [layer for layer in record.layers if layer.name != HOST_LAYER]
        return all(self.has(layer.digest, layer.size) for layer in kept) and all(
            self.has(digest)
            for digest in (*small, record.document["sbom"], *record.document["recipe"].values())
        )

    def find(self, stack: str, revision: str | None = None) -> ImageRecord | None:
        """The newest complete image of a stack; without a revision, of its highest one.

        Where the package ships that revision, only an image of that very recipe is found; another
        stack's image is found only if it was not built from somebody's artifact.
        """
        candidates = [
            record
            for record in self.records()
            if record.stack == stack
            and revision in (None, record.revision)
            and not record.modified
            and self.complete(record)
        ]
        candidates.sort(key=lambda record: -int(record.revision[1:]))
        from attnrepro.images.spec import shipped

        for record in candidates:
            pinned = shipped(record.stack, record.revision)
            if (
                record.document["origin"] == "stack"
                if pinned is None
                else pinned.recipe_digest == record.recipe_digest
            ):
                return record
        return None

    def by_digest(self, manifest_digest: str) -> ImageRecord | None:
        """The complete image of a manifest digest."""
        for record in self.records():
            if record.manifest_digest == manifest_digest and self.complete(record):
                return record
        return None

    def by_recipe(self, stack: str, revision: str, recipe_digest: str) -> ImageRecord | None:
        """The complete image that a recipe gave."""
        path = self._record_path(stack, revision, recipe_digest)
        record = self._load(path) if path.is_file() else None
        return record if record is not None and self.complete(record) else None

    def record_path(self, record: ImageRecord) -> Path:
        """Where a record's file lies."""
        return self._record_path(record.stack, record.revision, record.recipe_digest)

    def _record_path(self, stack: str, revision: str, recipe_digest: str) -> Path:
        name = self.blob(recipe_digest).name
        return self.root / "images" / f"{stack}@{revision}" / f"{name}.json"

    def save(self, document: JsonObject) -> ImageRecord:
        """Write an image record; its blobs are in the store already."""
        record = ImageRecord(document=document, store=self)
        path = self._record_path(record.stack, record.revision, record.recipe_digest)
        path.parent.mkdir(parents=True, exist_ok=True)
        atomic_write(path, canonical(document) + b"\n")
        return record

    def archive(self, record: ImageRecord) -> Path:
        """The image as one file for `docker load` and `podman load`, made on first use.

        Raises BuildFailed if a layer is damaged or the disk is full.
        """
        name = record.manifest_digest.removeprefix("sha256:")
        path = self.root / "archives" / f"{name}.tar"
        if not path.is_file():
            if any(layer.name == HOST_LAYER for layer in record.layers):
                message = f"the archive of {record.name}, made of this host's root, is gone"
                raise BuildFailed(message, hint="run the bundle's installer again")
            path.parent.mkdir(parents=True, exist_ok=True)
            with self.workspace("archive") as folder, disk_errors("writing the image's archive"):
                temporary = folder / "image.tar"
                with temporary.open("wb") as file:
                    self.write_archive(record, file)
                    file.flush()
                    os.fsync(file.fileno())
                temporary.replace(path)
            sync_folder(path.parent)
        return path

    def write_archive(self, record: ImageRecord, output: IO[bytes]) -> None:
        """Write the same file to a stream, as an engine's standard input."""
        write_archive(record.image, record.layers, output, name=record.name, blob=self.blob)

    # Bases ------------------------------------------------------------------------------------

    def base_layer(self, key: str) -> tuple[str, str | None] | None:
        """Digest of the root tar that a base's recipe gave, and what made it, if still there."""
        path = self.root / "bases" / f"{self.blob(key).name}.json"
        try:
            entry = loads(path.read_bytes(), what=str(path))
        except (OSError, InvalidDocument):
            return None
        digest = cast("str", entry["digest"])
        return (digest, entry["made_by"]) if self.has(digest, entry["size"]) else None

    def save_base(self, key: str, digest: str, made_by: str | None) -> None:
        """Remember which root tar a base's recipe gave, and what made it."""
        path = self.root / "bases" / f"{self.blob(key).name}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        size = self.blob(digest).stat().st_size
        atomic_write(path, canonical({"digest": digest, "size": size, "made_by": made_by}))


def _alive(pid: str) -> bool:
    try:
        os.kill(int(pid), 0)
    except (ValueError, ProcessLookupError):
        return False
    except PermissionError:
        return True
    return True
