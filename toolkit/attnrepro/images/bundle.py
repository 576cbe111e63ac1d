"""What a GPU host without a network needs, as parts of a size that travels.

A bundle holds the engine's programs, this package with what it depends on, and either built images
or, for the stack `host-torch`, the kernels' wheels and the RECORDs of the public wheels with which
the host's own are compared. One compressed stream is cut into parts, each with its SHA-256.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import lzma
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from attnrepro import resources
from attnrepro.errors import BuildFailed, Unavailable, UsageError
from attnrepro.files import atomic_write, sha256_file
from attnrepro.images import bundle_engine, spec, wheelfiles
from attnrepro.images.hostrecord import STACK, TWIN, is_host_stack
from attnrepro.images.process import run

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from attnrepro.images.store import ImageRecord, Store
    from attnrepro.images.wheelfiles import WheelInfo
    from attnrepro.jsonio import JsonObject

    Progress = Callable[[str], None]

PACKAGES: Final = ("attnrepro", "attnrepro_runner")
PLATFORMS: Final = ("manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64")
_CHUNK: Final = 1 << 20
_UNITS: Final = {"": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}


@dataclass(frozen=True, kw_only=True)
class Bundle:
    """A written bundle."""

    folder: Path
    parts: tuple[tuple[str, int], ...]
    """Name and bytes of each part."""

    @property
    def size(self) -> int:
        """Bytes of all parts."""
        return sum(size for _, size in self.parts)


def parse_size(text: str) -> int:
    """Parse "31MiB" into bytes. Raises UsageError."""
    match = re.fullmatch(r"([1-9][0-9]{0,9})\s*(KiB|MiB|GiB|)", text)
    if match is None or int(match[1]) * _UNITS[match[2]] < 1 << 16:
        message = f"{text!r} is not a size"
        raise UsageError(message, hint="use 31MiB, 512KiB or bytes; at least 64KiB")
    return int(match[1]) * _UNITS[match[2]]


def by_stack(given: Sequence[str]) -> dict[str, list[Path]]:
    """Read what `--wheel` was given: FILE for host-torch, or STACK=FILE."""
    found: dict[str, list[Path]] = {}
    for text in given:
        name, equals, path = text.partition("=")
        if equals and is_host_stack(name):
            found.setdefault(name, []).append(Path(path))
        elif equals and Path(path).is_file() and not Path(text).exists():
            message = f"--wheel {text}: {name} is no name of a host's stack"
            raise UsageError(message, hint=f"{STACK}, or {STACK}- and lower-case letters or digits")
        else:
            found.setdefault(STACK, []).append(Path(text))
    return found


def make(
    stacks: Sequence[str],
    *,
    out: Path,
    part_size: int,
    wheels: Mapping[str, Sequence[Path]],
    public: Sequence[Path],
    python: str,
    store: Store,
    engine_root: Path | None,
    progress: Progress,
) -> Bundle:
    """Write a bundle into an empty or new folder.

    Args:
        stacks: Built stacks, or `host-torch` and `host-torch-…`.
        out: The folder.
        part_size: Most bytes of a part.
        wheels: Kernels for the upper layer of each `host-torch…`, by its name.
        public: Public wheels with which the host's packages are compared; none: those of the twin
            stack that the store holds.
        python: Minor version on the host, as 3.12.
        store: Holds the built images.
        engine_root: An unpacked engine (usr/bin/dockerd …); None fetches Debian's.
        progress: Told each step.

    Raises:
        UsageError: the folder is not empty, or wheels of a stack that is not among them.
        Unavailable: a stack is not built, or pip is missing.
        BuildFailed: a download failed, a wheel is damaged, or two of one stack hold one file.
    """
    if out.exists() and any(out.iterdir()):
        message = f"{out} is not empty"
        raise UsageError(message, hint="name a new folder with --out")
    names = [name.partition("@")[0] for name in stacks]
    if len(set(names)) < len(names):
        message = f"a stack is named twice: {', '.join(stacks)}"
        raise UsageError(message, hint="a bundle holds one revision of each")
    hosts = [name for name in stacks if is_host_stack(name)]
    if strange := sorted(name for name in wheels if name not in hosts):
        message = f"--wheel is for a stack {STACK}, and {strange[0]} is none of this bundle's"
        raise UsageError(message, hint=f"attnrepro bundle {STACK} --wheel …")
    # The host would only find out after the transfer.
    kernels = {
        name: {wheel: wheelfiles.read_wheel(wheel) for wheel in wheels.get(name, ())}
        for name in hosts
    }
    for found in kernels.values():
        wheelfiles.reject_clashes(list(found.values()))
    _one_file_a_name([info for found in kernels.values() for info in found.values()])
    for name in stacks:
        if name not in hosts:
            _built(name, store)
    with store.workspace("bundle") as work:
        payload = work / "payload"
        payload.mkdir()
        bundle_engine.put(payload / "engine", root=engine_root, work=work, progress=progress)
        _package(payload / "site", work / "wheelhouse", python, progress)
        images = [_image(payload / "images", n, store) for n in stacks if n not in hosts]
        for wheel, info in {w: i for found in kernels.values() for w, i in found.items()}.items():
            _carry(wheel, payload / "kernels" / info.file)
        if hosts:
            _public(payload / "public", public or _twin_wheels(store, work), progress)
        contents = {
            "schema": "attnrepro.bundle-contents/2",
            "images": images,
            "hosts": [
                {
                    "stack": name,
                    "wheels": [{"file": i.file, "sha256": i.sha256} for i in found.values()],
                }
                for name, found in kernels.items()
            ],
            "python": python,
        }
        (payload / "contents.json").write_text(json.dumps(contents, indent=1))
        progress("compressing")
        fresh = not out.exists()
        try:
            return _cut(payload, out, part_size, progress)
        except BaseException:  # half a bundle would stand in the way of the next
            for left in out.iterdir() if out.is_dir() else ():
                left.unlink()
            if fresh:
                with suppress(OSError):
                    out.rmdir()
            raise


def _one_file_a_name(infos: Sequence[WheelInfo]) -> None:
    seen: dict[str, str] = {}
    for info in infos:
        if seen.setdefault(info.file, info.sha256) != info.sha256:
            message = f"two different files are named {info.file}"
            raise BuildFailed(message, hint="give both stacks the same one")


def _package(site: Path, wheelhouse: Path, python: str, progress: Progress) -> None:
    """Put this package, its data and all that it requires into one importable folder."""
    site.mkdir()
    for name in PACKAGES:
        shutil.copytree(
            Path(__file__).resolve().parents[2] / name,
            site / name,
            ignore=shutil.ignore_patterns("__pycache__", "_data"),
        )
    for folder in (resources.schema_dir(), resources.images_dir(), resources.manifests_dir()):
        if folder.is_dir():
            shutil.copytree(folder, site / "attnrepro" / "_data" / folder.name)
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--only-binary=:all:"]
    command += ["--python-version", python, "--implementation", "cp"]
    command += [f"--platform={name}" for name in PLATFORMS]
    command += ["--dest", str(wheelhouse), *_requirements()]
    run(command, progress=progress, doing="fetching what the package requires")
    wheelfiles.unpack(sorted(wheelhouse.glob("*.whl")), site)


def _requirements() -> list[str]:
    try:
        lines = importlib.metadata.requires("attnrepro") or []
    except importlib.metadata.PackageNotFoundError:
        project = resources.data_root() / "pyproject.toml"
        lines = tomllib.loads(project.read_text(encoding="utf-8"))["project"]["dependencies"]
    return [line for line in lines if "extra ==" not in line]


def _built(name: str, store: Store) -> ImageRecord:
    stack, _, revision = name.partition("@")
    record = store.find(stack, revision or None)
    if record is None and stack not in spec.stacks():
        message = f"there is no stack {stack!r}"
        hint = f"shipped: {', '.join(spec.stacks())}; and {STACK}, or one you have built"
        raise UsageError(message, hint=hint)
    if record is None:
        message = f"the image of {name} is not built yet"
        raise Unavailable(message, hint=f"attnrepro build {name}")
    return record


def _image(folder: Path, name: str, store: Store) -> str:
    """Copy a built image's record and blobs."""
    record = _built(name, store)
    target = folder / record.stack
    (target / "blobs").mkdir(parents=True)
    (target / "record.json").write_text(json.dumps(record.document))
    digests = {record.manifest_digest, record.config_digest, record.tree_sha256}
    digests |= {record.document["sbom"], *record.document["recipe"].values()}
    digests |= {layer.digest for layer in record.layers}
    for digest in digests:
        source = store.blob(digest)
        os.link(source, target / "blobs" / source.name)
    return record.stack


def _carry(wheel: Path, target: Path) -> None:
    """Carry a wheel uncompressed: the whole stream compresses better than a zip does."""
    target.parent.mkdir(exist_ok=True)
    with zipfile.ZipFile(wheel) as source, zipfile.ZipFile(target, "w") as plain:
        for member in source.infolist():
            if not member.is_dir():
                entry = zipfile.ZipInfo(member.filename)
                entry.external_attr = member.external_attr
                plain.writestr(entry, source.read(member), zipfile.ZIP_STORED)


def _twin_wheels(store: Store, work: Path) -> list[Path]:
    """List the twin stack's wheels, linked from the store under their own names."""
    from attnrepro.images.spec import shipped

    twin = shipped(TWIN)
    folder = work / "twin"
    folder.mkdir()
    found = []
    for wheel in twin.wheels if twin is not None else ():
        if wheel.name.startswith(("torch", "nvidia-", "triton")) and store.has(wheel.sha256):
            os.link(store.blob(wheel.sha256), folder / wheel.file)
            found.append(folder / wheel.file)
    return found


def _public(folder: Path, wheels: Sequence[Path], progress: Progress) -> None:
    folder.mkdir()
    if not wheels:
        progress(f"no public wheels to compare with: fetch those of {TWIN}, or name --public")
    for wheel in wheels:
        info = wheelfiles.read_wheel(wheel)
        (folder / f"{info.name}.json").write_text(json.dumps(asdict(info)))


class _Parts:
    """Cuts what is written to it into files of one size."""

    def __init__(self, folder: Path, size: int) -> None:
        self._folder = folder
        self._size = size
        self._pending = bytearray()
        self.parts: list[JsonObject] = []

    def write(self, data: bytes) -> None:
        self._pending += data
        while len(self._pending) >= self._size:
            self._flush(self._size)

    def close(self) -> None:
        if self._pending:
            self._flush(len(self._pending))

    def _flush(self, size: int) -> None:
        data = bytes(self._pending[:size])
        del self._pending[:size]
        name = f"part-{len(self.parts):04d}"
        atomic_write(self._folder / name, data)
        digest = hashlib.sha256(data).hexdigest()
        self.parts.append({"name": name, "size": len(data), "sha256": digest})


def _cut(payload: Path, out: Path, part_size: int, progress: Progress) -> Bundle:
    out.mkdir(parents=True, exist_ok=True)
    parts = _Parts(out, part_size)
    for piece in _compressed(payload):
        parts.write(piece)
    parts.close()
    installer = Path(__file__).with_name("bundle_install.py").read_bytes()
    atomic_write(out / "install", installer, mode=0o755)
    document = {
        "schema": "attnrepro.bundle/1",
        "parts": parts.parts,
        "install_sha256": sha256_file(out / "install"),
    }
    atomic_write(out / "bundle.json", (json.dumps(document, indent=1) + "\n").encode())
    made = Bundle(folder=out, parts=tuple((p["name"], p["size"]) for p in parts.parts))
    progress(f"{len(made.parts)} parts, {made.size / 1e6:.1f} MB")
    return made


def _compressed(payload: Path) -> Iterator[bytes]:
    """Tar and compress a folder, on all cores where the xz program is there."""
    plain = payload.with_suffix(".tar")
    with tarfile.open(plain, "w", format=tarfile.PAX_FORMAT) as archive:
        archive.add(payload, arcname=".", filter=_anonymous)
    xz = shutil.which("xz")
    if xz is None:
        compressor = lzma.LZMACompressor(preset=4)
        with plain.open("rb") as file:
            while piece := file.read(_CHUNK):
                yield compressor.compress(piece)
        yield compressor.flush()
        return
    command = [xz, "--compress", "--stdout", "-1", "--threads=0", str(plain)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        while piece := process.stdout.read(_CHUNK):
            yield piece
    if process.returncode:
        message = f"xz failed with exit code {process.returncode}"
        raise BuildFailed(message, hint="free some memory or disk space")


def _anonymous(info: tarfile.TarInfo) -> tarfile.TarInfo:
    info.uid = info.gid = info.mtime = 0
    info.uname = info.gname = ""
    return info
