"""A tiny image from this machine's own shell and coreutils, so that engine tests fetch nothing.

One file that is an OCI layout and a docker-archive at once, like the product's own images.
"""

from __future__ import annotations

import hashlib
import io
import json
import re
import shutil
import subprocess
import tarfile
from pathlib import Path

from attnrepro.engines.base import ImageIdentity

PROGRAMS = ("sh", "cat", "chmod", "head", "id", "ls", "rm", "sleep", "tail", "env", "true")


def make_tiny_image(folder: Path, *, tag: str, extra: str = "") -> ImageIdentity:
    """Write `folder/TAG.tar`; `extra` changes one file, and so every digest."""
    layer = _layer(extra)
    diff_id = _digest(layer)
    config = _json(
        {
            "architecture": "amd64",
            "os": "linux",
            "config": {"Env": ["PATH=/bin"], "WorkingDir": "/"},
            "rootfs": {"type": "layers", "diff_ids": [diff_id]},
        }
    )
    kinds = "application/vnd.oci.image"
    manifest = _json(
        {
            "schemaVersion": 2,
            "mediaType": f"{kinds}.manifest.v1+json",
            "config": _descriptor(f"{kinds}.config.v1+json", config),
            "layers": [_descriptor(f"{kinds}.layer.v1.tar", layer)],
        }
    )
    name = f"attnrepro-test/tiny:{tag}"
    index = _json(
        {
            "schemaVersion": 2,
            "manifests": [
                {
                    **_descriptor(f"{kinds}.manifest.v1+json", manifest),
                    "annotations": {
                        "io.containerd.image.name": f"docker.io/{name}",
                        "org.opencontainers.image.ref.name": tag,
                    },
                }
            ],
        }
    )
    blob = "blobs/sha256/{}".format
    docker = _json(
        [
            {
                "Config": blob(_hex(config)),
                "RepoTags": [name],
                "Layers": [blob(_hex(layer))],
            }
        ]
    )
    path = folder / f"{tag}.tar"
    with tarfile.open(path, "w", format=tarfile.PAX_FORMAT) as archive:
        for member, data in (
            ("oci-layout", _json({"imageLayoutVersion": "1.0.0"})),
            ("index.json", index),
            ("manifest.json", docker),
            (blob(_hex(config)), config),
            (blob(_hex(manifest)), manifest),
            (blob(_hex(layer)), layer),
        ):
            _add(archive, member, data)
    return ImageIdentity(
        archive=path, name=name, manifest_digest=_digest(manifest), config_digest=_digest(config)
    )


def _layer(extra: str) -> bytes:
    files: dict[str, bytes] = {"etc/extra": extra.encode()}
    for program in PROGRAMS:
        found = shutil.which(program, path="/bin:/usr/bin")
        assert found, f"this machine has no {program}"
        files[f"bin/{program}"] = Path(found).read_bytes()
        listed = subprocess.run(["ldd", found], capture_output=True, text=True, check=False).stdout
        for library in re.findall(r"(/\S+) \(0x", listed):
            files[library.lstrip("/")] = Path(library).read_bytes()
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as archive:
        folders = {str(p) for name in files for p in Path(name).parents} - {"."}
        for folder in sorted(folders | {"tmp", "proc", "sys", "dev", "out", "in"}):
            entry = tarfile.TarInfo(folder)
            # Engines give a tmpfs the mode of the image's own folder, whatever they are told.
            entry.type, entry.mode = tarfile.DIRTYPE, 0o1777 if folder == "tmp" else 0o755
            archive.addfile(entry)
        for name, data in sorted(files.items()):
            _add(archive, name, data, mode=0o755)
    return buffer.getvalue()


def _add(archive: tarfile.TarFile, name: str, data: bytes, mode: int = 0o644) -> None:
    entry = tarfile.TarInfo(name)
    entry.size, entry.mode = len(data), mode
    archive.addfile(entry, io.BytesIO(data))


def _json(value: object) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def _hex(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _digest(data: bytes) -> str:
    return f"sha256:{_hex(data)}"


def _descriptor(kind: str, data: bytes) -> dict[str, object]:
    return {"mediaType": kind, "digest": _digest(data), "size": len(data)}
