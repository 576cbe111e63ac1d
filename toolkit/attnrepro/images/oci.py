"""The canonical OCI writer: the same tree and configuration give the same bytes, always.

Layers are uncompressed tars (a compressor's bytes change with its version), entries sorted, every
time set to the stack's epoch, owners numeric; configuration and manifest are sorted JSON without a
builder's history. One file holds an OCI layout and a docker-archive, so that every engine loads it.
"""

from __future__ import annotations

import hashlib
import json
import tarfile
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import IO, TYPE_CHECKING, Final

from attnrepro.errors import BuildFailed
from attnrepro.images.tree import CHUNK, Entry, Kind, chunks, path_order

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

WRITER: Final = "attnrepro.oci-writer/1"
"""Goes into the recipe digest: a writer of other bytes is another image."""

MANIFEST_TYPE: Final = "application/vnd.oci.image.manifest.v1+json"
CONFIG_TYPE: Final = "application/vnd.oci.image.config.v1+json"
LAYER_TYPE: Final = "application/vnd.oci.image.layer.v1.tar"
INDEX_TYPE: Final = "application/vnd.oci.image.index.v1+json"

_TAR_TYPES: Final = {
    Kind.FOLDER: tarfile.DIRTYPE,
    Kind.FILE: tarfile.REGTYPE,
    Kind.LINK: tarfile.SYMTYPE,
}


@dataclass(frozen=True, kw_only=True)
class Layer:
    """One layer of an image."""

    name: str
    """Its name in the stack's split rule."""
    digest: str
    """`sha256:` and hex; for an uncompressed layer its diff id too."""
    size: int


@dataclass(frozen=True, kw_only=True)
class Image:
    """What a written image is known by."""

    manifest: bytes
    config: bytes

    @property
    def manifest_digest(self) -> str:
        """`sha256:` and hex: the one identity of an image."""
        return _digest(self.manifest)

    @property
    def config_digest(self) -> str:
        """`sha256:` and hex: what Docker's classic store and podman show as the image's id."""
        return _digest(self.config)


def _digest(data: bytes) -> str:
    return "sha256:" + hashlib.sha256(data).hexdigest()


def _json(document: object) -> bytes:
    return json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode()


class _Hashing:
    """A file that also hashes and counts what is written to it."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.sha256 = hashlib.sha256()
        self.size = 0

    def write(self, data: bytes) -> None:
        self._file.write(data)
        self.sha256.update(data)
        self.size += len(data)


def _header(entry: Entry, epoch: int) -> bytes:
    info = tarfile.TarInfo(entry.path + ("/" if entry.kind is Kind.FOLDER else ""))
    info.type = _TAR_TYPES[entry.kind]
    info.mode, info.uid, info.gid, info.mtime = entry.mode, entry.uid, entry.gid, epoch
    info.size = entry.size if entry.kind is Kind.FILE else 0
    info.linkname = entry.target
    return info.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape")


def write_layer(
    name: str,
    entries: Sequence[Entry],
    source: IO[bytes],
    output: IO[bytes],
    *,
    epoch: int,
    whiteouts: Sequence[str] = (),
) -> tuple[Layer, list[Entry]]:
    """Write one layer; returns it, and its entries with their digests.

    Args:
        name: The layer's name.
        entries: In path order, as `tree.read` gives them.
        source: The root tar that the entries' offsets point into.
        output: Where the layer's bytes go.
        epoch: Seconds since 1970 that every entry carries.
        whiteouts: Paths of lower layers that this one removes.

    Raises:
        BuildFailed: the source is shorter than its own headers say.
    """
    sink = _Hashing(output)
    removed = [_whiteout(path) for path in whiteouts]
    done: list[Entry] = []
    for entry in sorted([*entries, *removed], key=lambda entry: path_order(entry.path)):
        sink.write(_header(entry, epoch))
        if entry.kind is Kind.FILE:
            content = hashlib.sha256()
            for piece in chunks(source, entry):
                content.update(piece)
                sink.write(piece)
            sink.write(b"\0" * (-entry.size % tarfile.BLOCKSIZE))
            entry = replace(entry, sha256=content.hexdigest())
        done.append(entry)
    sink.write(b"\0" * (2 * tarfile.BLOCKSIZE))
    marks = {entry.path for entry in removed}
    layer = Layer(name=name, digest="sha256:" + sink.sha256.hexdigest(), size=sink.size)
    return layer, [entry for entry in done if entry.path not in marks]


def _whiteout(path: str) -> Entry:
    folder, _, name = path.rpartition("/")
    return Entry(
        path=f"{folder}/.wh.{name}" if folder else f".wh.{name}", kind=Kind.FILE, mode=0o644
    )


def image(
    layers: Sequence[Layer],
    *,
    platform: str,
    epoch: int,
    env: Mapping[str, str],
    entrypoint: Sequence[str],
    user: str,
    workdir: str,
    labels: Mapping[str, str],
) -> Image:
    """Configuration and manifest over written layers."""
    system, _, architecture = platform.partition("/")
    settings: dict[str, object] = {
        "Env": [f"{name}={value}" for name, value in sorted(env.items())],
        "User": user,
        "WorkingDir": workdir,
        "Labels": dict(labels),
    }
    if entrypoint:
        settings["Entrypoint"] = list(entrypoint)
    config = _json(
        {
            "architecture": architecture,
            "os": system,
            "created": datetime.fromtimestamp(epoch, UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
            "config": settings,
            "rootfs": {"type": "layers", "diff_ids": [layer.digest for layer in layers]},
        }
    )
    manifest = _json(
        {
            "schemaVersion": 2,
            "mediaType": MANIFEST_TYPE,
            "config": {
                "mediaType": CONFIG_TYPE,
                "digest": _digest(config),
                "size": len(config),
            },
            "layers": [
                {"mediaType": LAYER_TYPE, "digest": layer.digest, "size": layer.size}
                for layer in layers
            ],
        }
    )
    return Image(manifest=manifest, config=config)


def write_archive(
    written: Image,
    layers: Sequence[Layer],
    output: IO[bytes],
    *,
    name: str,
    blob: Callable[[str], Path],
) -> None:
    """Write the one file that `docker load` (any store) and `podman load` accept.

    Raises BuildFailed if a layer in the store is not the one that it is called.
    """
    annotations = {
        "io.containerd.image.name": name,
        "org.opencontainers.image.ref.name": name.rpartition(":")[2],
    }
    index = {
        "schemaVersion": 2,
        "mediaType": INDEX_TYPE,
        "manifests": [
            {
                "mediaType": MANIFEST_TYPE,
                "digest": written.manifest_digest,
                "size": len(written.manifest),
                "annotations": annotations,
            }
        ],
    }
    docker = [
        {
            "Config": _member(written.config_digest),
            "RepoTags": [name],
            "Layers": [_member(layer.digest) for layer in layers],
        }
    ]
    small = {
        "oci-layout": _json({"imageLayoutVersion": "1.0.0"}),
        "index.json": _json(index),
        "manifest.json": _json(docker),
        _member(written.manifest_digest): written.manifest,
        _member(written.config_digest): written.config,
    }
    for path in ("blobs", "blobs/sha256"):
        output.write(_header(Entry(path=path, kind=Kind.FOLDER, mode=0o755), 0))
    for path, data in small.items():
        output.write(_header(Entry(path=path, kind=Kind.FILE, mode=0o644, size=len(data)), 0))
        output.write(data + b"\0" * (-len(data) % tarfile.BLOCKSIZE))
    for layer in {layer.digest: layer for layer in layers}.values():
        entry = Entry(path=_member(layer.digest), kind=Kind.FILE, mode=0o644, size=layer.size)
        output.write(_header(entry, 0))
        copy_checked(blob(layer.digest), output, layer)
        output.write(b"\0" * (-layer.size % tarfile.BLOCKSIZE))
    output.write(b"\0" * (2 * tarfile.BLOCKSIZE))


def copy_checked(path: Path, output: IO[bytes], layer: Layer) -> None:
    """Copy a layer's blob, proving on the way that it is whole. Raises BuildFailed."""
    sha256 = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(CHUNK):
            sha256.update(piece)
            output.write(piece)
    if "sha256:" + sha256.hexdigest() != layer.digest:
        message = f"layer {layer.name} in the store is damaged ({path})"
        raise BuildFailed(message, hint="remove that file and build again")


def _member(digest: str) -> str:
    return "blobs/sha256/" + digest.removeprefix("sha256:")
