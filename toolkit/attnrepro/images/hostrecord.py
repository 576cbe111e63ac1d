"""What is written down of a `host-rootfs` image: record, packages, claims, bill of materials."""

from __future__ import annotations

import hashlib
import os
import platform
import re
import subprocess
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from attnrepro.errors import InvalidDocument
from attnrepro.images import hosttree, oci, sbom
from attnrepro.images.locks import Deb, Wheel
from attnrepro.jsonio import canonical
from attnrepro.resources import images_dir

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from attnrepro.images.hosttree import Selection
    from attnrepro.images.store import ImageRecord, Store
    from attnrepro.images.tree import Entry
    from attnrepro.images.wheelfiles import PublicCheck, WheelInfo
    from attnrepro.jsonio import JsonObject

STACK: Final = "host-torch"
REVISION: Final = "r1"
TWIN: Final = "cuda13.0-torch2.11-fa4"
_CLAIMS: Final = (
    ("fa3-fwd", "0.0.3", "fa3-fwd-0.0.3"),
    ("flash-attn", "2.8.3", "flash-attn-2.8.3-cuda"),
    ("flash-attn", "2.8.3.post2", "flash-attn-2.8.3-cuda"),
    ("flash-attn-4", "4.0.0b36", "flash-attn-4-4.0.0b36"),
    ("flashinfer-python", "0.7.4", "flashinfer-python"),
    ("nvidia-cudnn-frontend", "1.32.0", "cudnn-frontend-1.x"),
)
"""Kernels: distribution, version, and that release's file in images/claims. Other versions claim
nothing."""


_NAME: Final = re.compile(r"host-torch(-[a-z0-9]{1,40}(\.[a-z0-9]{1,10}){0,4})?")


def is_host_stack(name: str) -> bool:
    """Whether a stack is made of a host's own root: host-torch, or host-torch- and a word."""
    return _NAME.fullmatch(name) is not None


@dataclass(frozen=True, kw_only=True)
class Kernels:
    """The wheels of the upper layer, unpacked and compiled."""

    folder: Path
    infos: tuple[WheelInfo, ...]


@dataclass(frozen=True, kw_only=True)
class Made:
    """A finished image, to be written down."""

    stack: str
    selection: Selection
    kernels: Kernels
    layers: Sequence[oci.Layer]
    entries: Sequence[Entry]
    """Of the whole tree, in path order."""
    image: oci.Image
    name: str
    environment: Mapping[str, str]
    times: Mapping[str, int]
    checks: Sequence[PublicCheck]


def save(store: Store, made: Made, *, progress: Callable[[str], None]) -> ImageRecord:
    """Write the record; the layers' blobs but the base's are in the store already.

    What is held in a version that has no claims here is told.

    Raises InvalidDocument (a mistake of ours) where the record is not valid.
    """
    from attnrepro.schema import validate

    selection, kernels, layers = made.selection, made.kernels, made.layers
    installed = hosttree.distributions(selection.root / selection.python.site)
    versions = {n: installed[n].version for n in sorted(selection.kept)}
    versions |= {info.name: info.version for info in kernels.infos}
    debs = _debs(selection.root)
    cuda = versions.get("nvidia-cuda-runtime")
    host: JsonObject = {
        "schema": "attnrepro.host-rootfs/1",
        "twin": TWIN,
        "python": selection.python.version,
        "system": _system(selection.root),
        "debian_packages": [[deb.name, deb.version] for deb in debs],
        "distributions": versions,
        "kernel_wheels": [[info.file, info.sha256] for info in kernels.infos],
        "public_wheels": [check.document() for check in made.checks],
        "not_compared": sorted(set(versions) - {check.name for check in made.checks}),
    }
    claims = {"schema": "attnrepro.claims/1", "include": _claims(versions)}
    for line in _unclaimed(versions):
        progress(line)
    recipe = {"host.json": canonical(host), "claims.json": canonical(claims)}
    parts = {path: hashlib.sha256(data).hexdigest() for path, data in recipe.items()}
    parts["layer"] = layers[0].digest
    recipe_digest = hashlib.sha256(canonical({"writer": oci.WRITER, "files": parts})).hexdigest()
    listing = b"".join(entry.line() for entry in sorted(made.entries, key=lambda e: e.path))
    document: JsonObject = {
        "schema": "attnrepro.image/1",
        "stack": made.stack,
        "revision": REVISION,
        "title": f"This host's own PyTorch {versions['torch']} and system, with kernels on top",
        "platform": "linux/amd64",
        "device": "nvidia",
        "name": made.name,
        "recipe_digest": f"sha256:{recipe_digest}",
        "recipe": {path: store.add_bytes(data) for path, data in recipe.items()},
        "manifest_digest": store.add_bytes(made.image.manifest),
        "config_digest": store.add_bytes(made.image.config),
        "tree_sha256": store.add_bytes(listing),
        "layers": [{"name": x.name, "digest": x.digest, "size": x.size} for x in layers],
        "size": sum(layer.size for layer in layers),
        "base": {"kind": "host-rootfs", "digest": layers[0].digest, "packages": len(debs)},
        "builder": {
            "name": "host-import",
            "version": f"attnrepro on Python {platform.python_version()}",
            "bootstrap": None,
            "writer": oci.WRITER,
        },
        "times": {"fetch_ms": 0, "build_ms": 0, **made.times},
        "env": dict(made.environment),
        "user": "65532:65532",
        "workdir": "/",
        "entrypoint": [],
        "python": selection.python.executable,
        "toolkit": {"name": "cuda", "version": cuda, "source": "wheels of the host"}
        if cuda
        else None,
        "compiler": _compiler(),
        "framework": {
            "name": "torch",
            "version": versions["torch"],
            "source": "the host's own environment",
        },
        "kernels": [
            {"name": "torch", "version": versions["torch"], "source": "the host's own environment"},
            *(
                {"name": x.name, "version": x.version, "source": f"wheel sha256:{x.sha256}"}
                for x in kernels.infos
            ),
        ],
        "arch": ["x86-64"],
        "source_date_epoch": hosttree.EPOCH,
        "sbom": store.add_bytes(
            _sbom(made.stack, debs, versions, kernels, recipe_digest, selection.root)
        ),
        "claims": "claims.json",
        "modified": [],
        "origin": "stack",
        "extends": None,
        "source": None,
        "adapter": None,
    }
    if problems := validate("image", document):
        message = "the image record is not valid"
        raise InvalidDocument(message, problems=problems)
    return store.save(document)


def _claims(versions: Mapping[str, str]) -> list[str]:
    """Names of the releases in images/claims that this environment holds."""
    cuda = ".".join(versions.get("nvidia-cuda-runtime", "").split(".")[:2])
    names = [f"torch-{versions['torch'].split('+')[0]}-cuda{cuda}"]
    names += [
        name
        for distribution, version, name in _CLAIMS
        if versions.get(distribution, "").partition("+")[0] == version
    ]
    return [name for name in names if (images_dir() / "claims" / f"{name}.json").is_file()]


def _unclaimed(versions: Mapping[str, str]) -> list[str]:
    """Say which kernels are of a version of which no claims are known here."""
    known: dict[str, list[str]] = {}
    for distribution, version, _ in _CLAIMS:
        known.setdefault(distribution, []).append(version)
    found = {name: versions[name].partition("+")[0] for name in known if name in versions}
    return [
        f"  {name} {version}: no claims of this version are known (only of "
        f"{', '.join(known[name])}), so that only a run tells which cells it refuses"
        for name, version in found.items()
        if version not in known[name]
    ]


def _debs(root: Path) -> list[Deb]:
    """Installed Debian packages, read from dpkg's own file; their .debs' digests are not known."""
    try:
        text = (root / "var/lib/dpkg/status").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    found = {}
    for block in text.split("\n\n"):
        fields = dict(
            line.split(": ", 1) for line in block.splitlines() if ": " in line and line[0] != " "
        )
        if fields.get("Status", "").endswith(" installed"):
            name, arch = fields["Package"], fields["Architecture"]
            found[name] = Deb(
                name=name,
                version=fields["Version"],
                arch=arch,
                sha256="",
                size=0,
                path=f"{name}.deb",
            )
    return [found[name] for name in sorted(found)]


def _sbom(
    stack: str,
    debs: Sequence[Deb],
    versions: Mapping[str, str],
    kernels: Kernels,
    recipe_digest: str,
    root: Path,
) -> bytes:
    known = {info.name: info for info in kernels.infos}
    system = _system(root)
    return sbom.render(
        name=f"{stack}@{REVISION}",
        recipe_digest=f"sha256:{recipe_digest}",
        epoch=hosttree.EPOCH,
        suite=system.get("VERSION_CODENAME"),
        vendor=system.get("ID", "linux"),
        debs=debs,
        wheels=[
            Wheel(
                name=name,
                version=version,
                sha256=known[name].sha256 if name in known else "",
                file=known[name].file if name in known else name,
                size=0,
            )
            for name, version in versions.items()
        ],
    )


def _system(root: Path) -> dict[str, str]:
    try:
        text = (root / "etc/os-release").read_text(encoding="utf-8")
    except OSError:
        return {}
    pairs = (line.split("=", 1) for line in text.splitlines() if "=" in line)
    wanted = ("ID", "VERSION_ID", "VERSION_CODENAME", "PRETTY_NAME")
    return {key: value.strip('"') for key, value in pairs if key in wanted}


def _compiler() -> JsonObject | None:
    try:
        said = subprocess.run(
            ["gcc", "-dumpfullversion"], capture_output=True, text=True, check=True
        ).stdout
    except (OSError, subprocess.CalledProcessError):
        return None
    return {
        "name": "gcc",
        "version": said.strip(),
        "source": f"the host's own, {os.uname().machine}",
    }
