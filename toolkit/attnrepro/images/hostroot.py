"""The stack `host-torch`: a host's own root as the base, the kernels' wheels as a layer on top.

For GPU hosts that can pull nothing. The base is streamed into the engine once and never written to
a file; the image is still known by the digests that our own writer gives it, and its record says
what it is: base kind `host-rootfs`, which nobody else can rebuild.
"""

from __future__ import annotations

import io
import json
import os
import tarfile
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol, cast

from attnrepro.errors import BuildFailed, Unavailable
from attnrepro.images import hostrecord, hosttree, oci, wheelfiles
from attnrepro.images.disk import disk_errors
from attnrepro.images.hostrecord import REVISION, Kernels, Made
from attnrepro.images.process import run
from attnrepro.images.store import HOST_LAYER
from attnrepro.images.tree import Entry, Kind

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from attnrepro.engines.docker import DockerEngine
    from attnrepro.images.hosttree import HostPython, LayerStream, Selection
    from attnrepro.images.store import ImageRecord, Store
    from attnrepro.images.wheelfiles import WheelInfo
    from attnrepro.jsonio import JsonObject

    Progress = Callable[[str], None]

ROOTS: Final = ("torch", "numpy", "nvidia-ml-py")
_COMPILER: Final = "nvidia-cuda-nvcc"
"""Wheel that makes the kernels' layer hold a toolkit: for libraries that compile where they run."""
_TOOLKIT: Final = "nvidia/cu13"
"""Where the CUDA 13 wheels lie below site-packages."""
_IMPORTED: Final = "attnrepro-import:host-rootfs"


class _Importer(Protocol):
    def import_image_from_data(
        self, data: Iterable[bytes], *, repository: str, tag: str
    ) -> str: ...
    def inspect_image(self, image: str) -> dict[str, JsonObject]: ...
    def remove_image(self, image: str) -> object: ...
    def close(self) -> None: ...


@dataclass(frozen=True, kw_only=True)
class KernelSet:
    """Kernels of one image of this host."""

    stack: str
    """Its name (`hostrecord.is_host_stack`)."""
    wheels: Sequence[Path]
    digests: Mapping[str, str]
    """File name to the hex SHA-256 of the wheel as its index has it, where a bundle carries it
    uncompressed; other names are hashed as they are."""


@dataclass(frozen=True, kw_only=True)
class _Named:
    """What an image is of."""

    stack: str
    selection: Selection
    kernels: Kernels


def build(
    *,
    engine: DockerEngine,
    store: Store,
    sets: Sequence[KernelSet],
    public: Sequence[WheelInfo],
    progress: Progress,
    root: Path = Path("/"),
    python: HostPython | None = None,
    roots: Sequence[str] = ROOTS,
) -> list[ImageRecord]:
    """Make the images of this host, load them into the engine, and keep their records.

    Args:
        engine: Docker with its classic store; podman and the containerd store would compress, or
            copy, ten gigabytes.
        store: Where records, kernels' layers and recipes go.
        sets: One image of each. They share one base where each finds there what it requires.
        public: Public wheels, by RECORD, with which installed packages are compared.
        progress: Told each step.
        root: Of the host's file system.
        python: The environment; None is the running interpreter's.
        roots: Requirements that must stay in the environment.

    Returns:
        A record of each set, in their order.

    Raises:
        Unavailable: the engine's store is not the classic one, or it vanished.
        BuildFailed: no torch in the environment, a damaged wheel, the disk is full.
        ImageDiffers: the engine holds something else than was given to it.
    """
    if engine.facts().store != "classic":
        message = "Docker's containerd store would compress the host's root on one core"
        hint = 'set {"features": {"containerd-snapshotter": false}} in its daemon.json'
        raise Unavailable(message, hint=hint)
    environment = python or hosttree.this_python()
    # Folders and what gcc and compileall write are another user's to read in the image.
    os.umask(0o022)
    with store.workspace("hostroot") as work, disk_errors("making the host's image"):
        kernels: dict[str, Kernels] = {}
        for one in sets:
            kernels[one.stack] = _kernels(work / one.stack, one.wheels, one.digests, environment)
            if _COMPILER in {info.name for info in kernels[one.stack].infos}:
                _complete_toolkit(kernels[one.stack].folder / _TOOLKIT, progress)
        records = {}
        for selection, stacks in _bases(kernels, environment, roots, root):
            began = time.monotonic()
            try:
                base = _import_root(engine, selection, progress)
                base_ms = int((time.monotonic() - began) * 1000)
                for stack in stacks:
                    began = time.monotonic()
                    layers, entries = [base.layer], list(base.entries)
                    if kernels[stack].infos:
                        layer = work / "layers" / stack
                        layer.parent.mkdir(exist_ok=True)
                        upper = _kernels_layer(store, layer, kernels[stack], environment)
                        layers.append(upper.layer)
                        entries = _merged(entries, upper.entries)
                    write_ms = int((time.monotonic() - began) * 1000)
                    records[stack] = _finish(
                        engine,
                        store,
                        _Named(stack=stack, selection=selection, kernels=kernels[stack]),
                        layers,
                        entries,
                        public,
                        {"base_ms": base_ms, "write_ms": write_ms},
                        progress,
                    )
            except BaseException:
                with suppress(Exception):  # what went wrong first is what is told
                    _forget_import(engine)
                raise
            _forget_import(engine)
        return [records[one.stack] for one in sets]


def _bases(
    kernels: Mapping[str, Kernels], python: HostPython, roots: Sequence[str], root: Path
) -> Iterator[tuple[Selection, list[str]]]:
    """Each base to import, and the stacks on it: one for all where that lacks nothing for any."""

    def selected(of: Iterable[Kernels]) -> Selection:
        infos = [info for each in of for info in each.infos]
        return hosttree.select(
            python,
            roots=[*roots, *(line for info in infos for line in info.requires)],
            replaced=[info.name for info in infos],
            root=root,
        )

    alone = {stack: selected([each]) for stack, each in kernels.items()}
    # One set's own selection is the shared one; choosing reads every package's list of files.
    shared = selected(kernels.values()) if len(alone) > 1 else next(iter(alone.values()))
    # A package that one set brings, and another has from the host, is not in the shared base.
    if all(each.kept <= shared.kept for each in alone.values()):
        yield shared, list(kernels)
    else:
        yield from ((selection, [stack]) for stack, selection in alone.items())


def _kernels(
    folder: Path, wheels: Sequence[Path], digests: Mapping[str, str], python: HostPython
) -> Kernels:
    folder.mkdir()
    infos = wheelfiles.unpack(wheels, folder)
    infos = [replace(info, sha256=digests.get(info.file, info.sha256)) for info in infos]
    if infos:
        wheelfiles.compile_folder(folder, f"/{python.site}")
    return Kernels(folder=folder, infos=tuple(infos))


def _complete_toolkit(folder: Path, progress: Progress) -> None:
    """Add what a toolkit's own installer lays out otherwise than the wheels, and JIT looks for.

    As in the Dockerfile of cuda13.0-torch2.13-fa4. Raises BuildFailed: the host has no gcc.
    """
    (folder / "lib" / "stubs").mkdir(parents=True, exist_ok=True)
    for place, target in (("lib64", "lib"), ("lib/libcudart.so", "libcudart.so.13")):
        if not os.path.lexists(folder / place):
            (folder / place).symlink_to(target)
    # A link against the driver, which only the host has, needs no more than its name.
    stub = folder / "lib" / "stubs" / "libcuda.so"
    command = ["gcc", "-shared", "-nostdlib", "-Wl,-soname,libcuda.so.1", "-o", str(stub)]
    run([*command, "-x", "c", "/dev/null"], progress=progress, doing="making a stub of the driver")


def _import_root(engine: DockerEngine, selection: Selection, progress: Progress) -> LayerStream:
    from attnrepro.engines.dockerapi import connection

    python = selection.python
    progress(f"importing this host's root file system, {len(selection.kept)} Python packages of it")
    stream = hosttree.LayerStream(
        name=HOST_LAYER,
        paths=hosttree.paths(selection),
        keep_times=tuple(f"{prefix}/" for prefix in (*python.prefixes, "usr/lib/python3")),
        progress=progress,
    )
    repository, _, tag = _IMPORTED.partition(":")
    with connection(engine.url, engine.api_version) as client:
        importer = cast("_Importer", client)
        reply = importer.import_image_from_data(iter(stream), repository=repository, tag=tag)
        if '"error"' in reply:
            message = f"Docker could not import the root file system: {reply[-400:]}"
            raise BuildFailed(message, hint="free disk space where the engine keeps its data")
        held = importer.inspect_image(_IMPORTED)["RootFS"]["Layers"]
    if held != [stream.layer.digest]:
        message = f"Docker took the root file system as {held}, not as {stream.layer.digest}"
        raise BuildFailed(message)
    return stream


def _forget_import(engine: DockerEngine) -> None:
    from attnrepro.engines.dockerapi import connection

    with connection(engine.url, engine.api_version) as client:
        cast("_Importer", client).remove_image(_IMPORTED)


def _kernels_layer(store: Store, path: Path, kernels: Kernels, python: HostPython) -> LayerStream:
    stream = hosttree.LayerStream(name="kernels", paths=_placed(kernels.folder, python.site))
    with path.open("wb") as file:
        for piece in stream:
            file.write(piece)
    store.adopt(path, stream.layer.digest)
    return stream


def _placed(folder: Path, site: str) -> Iterator[tuple[str, Path]]:
    yield site, folder
    for place in sorted(folder.rglob("*"), key=lambda p: p.relative_to(folder).parts):
        yield f"{site}/{place.relative_to(folder).as_posix()}", place


def _merged(lower: Iterable[Entry], upper: Iterable[Entry]) -> list[Entry]:
    found = {entry.path: entry for entry in lower} | {entry.path: entry for entry in upper}
    return [found[path] for path in sorted(found)]


def _finish(
    engine: DockerEngine,
    store: Store,
    named: _Named,
    layers: Sequence[oci.Layer],
    entries: Sequence[Entry],
    public: Sequence[WheelInfo],
    times: Mapping[str, int],
    progress: Progress,
) -> ImageRecord:
    from attnrepro.engines.base import ImageIdentity

    environment = _environment(named.selection.python, named.kernels)
    written = oci.image(
        layers,
        platform="linux/amd64",
        epoch=hosttree.EPOCH,
        env=environment,
        entrypoint=(),
        user="65532:65532",
        workdir="/",
        labels={},
    )
    name = f"localhost/attnrepro/{named.stack}:{REVISION}-{written.manifest_digest[7:19]}"
    archive = store.root / "archives" / f"{written.manifest_digest[7:]}.tar"
    archive.parent.mkdir(parents=True, exist_ok=True)
    _write_archive(archive, written, layers[1:], layers[0], name, store)
    identity = ImageIdentity(
        archive=archive,
        name=name,
        manifest_digest=written.manifest_digest,
        config_digest=written.config_digest,
    )
    progress(f"loading {name}")
    engine.ensure_image(identity)
    checks = _compare(named.selection.python, entries, public)
    record = hostrecord.save(
        store,
        Made(
            stack=named.stack,
            selection=named.selection,
            kernels=named.kernels,
            layers=layers,
            entries=entries,
            image=written,
            name=name,
            environment=environment,
            times=times,
            checks=checks,
        ),
        progress=progress,
    )
    for check in checks:
        state = "equal to the public wheel" if check.identical else "DIFFERS from the public wheel"
        progress(f"  {check.name}: {state}, {check.equal} files")
    return record


def _write_archive(
    path: Path,
    written: oci.Image,
    upper: Sequence[oci.Layer],
    base: oci.Layer,
    name: str,
    store: Store,
) -> None:
    """Write a docker-archive without the base's layer: the engine has it, and looks no further."""
    members = [f"blobs/sha256/{layer.digest[7:]}" for layer in (base, *upper)]
    config = f"blobs/sha256/{written.config_digest[7:]}"
    manifest = [{"Config": config, "RepoTags": [name], "Layers": members}]
    temporary = path.with_suffix(".tmp")
    try:
        with tarfile.open(temporary, "w", format=tarfile.PAX_FORMAT) as archive:
            for member, data in (
                ("manifest.json", json.dumps(manifest).encode()),
                (config, written.config),
            ):
                info = tarfile.TarInfo(member)
                info.size = len(data)
                archive.addfile(info, io.BytesIO(data))
            for layer, member in zip(upper, members[1:], strict=True):
                archive.add(store.blob(layer.digest), arcname=member, recursive=False)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _environment(python: HostPython, kernels: Kernels) -> dict[str, str]:
    path = f"{Path(python.executable).parent}:/usr/local/bin:/usr/bin:/bin"
    toolkit = {}
    if _COMPILER in {info.name for info in kernels.infos}:
        home = f"/{python.site}/{_TOOLKIT}"
        toolkit = {"CUDA_HOME": home, "CC": "/usr/bin/gcc", "CXX": "/usr/bin/g++"}
        path = f"{home}/bin:/{python.site}/{wheelfiles.PROGRAMS}:{path}"
    return {
        "LANG": "C.UTF-8",
        "PATH": path,
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONNOUSERSITE": "1",
        "USER": "attnrepro",
        **toolkit,
    }


def _compare(
    python: HostPython, entries: Iterable[Entry], public: Iterable[WheelInfo]
) -> list[wheelfiles.PublicCheck]:
    prefix = f"{python.site}/"
    installed = {
        entry.path.removeprefix(prefix): entry.sha256
        for entry in entries
        if entry.kind is Kind.FILE and entry.path.startswith(prefix)
    }
    return [wheelfiles.check_public(info, installed) for info in public]
