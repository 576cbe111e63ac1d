"""The root file system on which a stack stands, as one canonical tar in the store.

A Debian base is made by mmdebstrap from a local repository that holds the locked packages and
nothing else, so that it does not depend on what a mirror holds today. A registry base is the
flattened image of a digest. Either way the engine only ever sees `base.tar`.
"""

from __future__ import annotations

import os
import re
import shutil
from typing import TYPE_CHECKING, Final

from attnrepro.errors import BuildFailed, Unavailable
from attnrepro.images import graft, oci, registry, tree
from attnrepro.images.process import output, run
from attnrepro.images.sources import source_url
from attnrepro.images.spec import BaseKind

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from attnrepro.images.locks import Deb
    from attnrepro.images.spec import Stack
    from attnrepro.images.store import Store

    Progress = Callable[[str], None]

_MERGED_USR: Final = "/usr/share/mmdebstrap/hooks/merged-usr"


def prepare(store: Store, stack: Stack, *, offline: bool, progress: Progress) -> str:
    """Digest of the base's root tar in the store, made now if it is not there.

    The packages of a Debian base lie in the store already.

    Raises:
        BuildFailed: the packages do not install, or the registry does not give the image.
        Unavailable: this host lacks what makes a Debian root file system.
    """
    key = stack.base_digest
    known = store.base_layer(key)
    if known is not None and store.intact(known[0]):
        return known[0]
    made_by = None
    with store.workspace("base") as folder:
        root = folder / "root.tar"
        if stack.base_kind is BaseKind.DEBIAN:
            made_by = bootstrap_version()
            _bootstrap(store, stack, folder, root, progress)
            if stack.graft is not None:
                root = graft.add(
                    stack.graft,
                    root,
                    store=store,
                    folder=folder,
                    offline=offline,
                    progress=progress,
                )
        else:
            image = stack.base_image
            registry.pull(
                image,
                url=source_url("registries", image.registry),
                store=store,
                folder=folder,
                root=root,
                offline=offline,
                progress=progress,
            )
        entries = tree.read(root, drop=stack.drop)
        written = folder / "base.tar"
        with root.open("rb") as source, written.open("wb") as file:
            layer, _ = oci.write_layer("base", entries, source, file, epoch=stack.epoch)
        store.adopt(written, layer.digest)
    store.save_base(key, layer.digest, made_by)
    return layer.digest


def check(store: Store, stack: Stack, *, offline: bool) -> None:
    """Raise BuildFailed if the registry image that a base needs is nowhere to be had.

    Asked before anything else is fetched: gigabytes of wheels are of no use without it.
    """
    image = stack.base_image if stack.base_kind is BaseKind.REGISTRY else None
    image = stack.graft.image if stack.graft is not None else image
    if image is None or offline or store.base_layer(stack.base_digest) or store.has(image.digest):
        return
    registry.check_reachable(image, source_url("registries", image.registry))


def bootstrap_version() -> str:
    """Name and version of what makes a Debian root file system. Raises Unavailable."""
    said = output(["mmdebstrap", "--version"])
    if said is None:
        message = "mmdebstrap, which makes the Debian root file system, is not installed"
        raise Unavailable(message, hint="apt-get install mmdebstrap")
    return said.strip()[:100]


def write_repository(debs: Sequence[Deb], store: Store, folder: Path) -> None:
    """A flat apt repository of exactly these packages, as links into the store.

    Raises BuildFailed if a package's control data cannot be read.
    """
    stanzas = []
    for deb in debs:
        # Apt wants no escapes in a file's name.
        file = f"{deb.name}_{deb.sha256[:16]}_{deb.arch}.deb"
        link_or_copy(store.blob(deb.sha256), folder / file)
        control = output(["dpkg-deb", "--field", str(folder / file)])
        if control is None or f"Package: {deb.name}\n" not in control:
            message = f"{deb.file} is no Debian package of {deb.name}"
            raise BuildFailed(message)
        found = re.search(r"^Version: (.+)$", control, re.MULTILINE)
        if found is None or found[1] != deb.version:
            message = f"{deb.file} is version {found[1] if found else '?'}, not {deb.version}"
            raise BuildFailed(message, hint="write the lock again")
        stanzas.append(
            f"{control.rstrip()}\nFilename: ./{file}\nSize: {deb.size}\nSHA256: {deb.sha256}\n"
        )
    (folder / "Packages").write_text("\n".join(stanzas))


def link_or_copy(source: Path, target: Path) -> None:
    """A hard link where the file system allows it."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


def _bootstrap(store: Store, stack: Stack, folder: Path, root: Path, progress: Progress) -> None:
    progress(f"making the Debian root file system from {len(stack.debs)} packages")
    repository = folder / "repository"
    repository.mkdir()
    write_repository(stack.debs, store, repository)
    scratch = folder / "tmp"
    scratch.mkdir()
    command = ["mmdebstrap", "--variant=custom", "--architectures=amd64", "--format=tar"]
    command += [f"--hook-dir={_MERGED_USR}", '--aptopt=APT::Sandbox::User "root"']
    # The root is thrown away; syncing every file of it costs minutes on a busy disk.
    command += ["--dpkgopt=force-unsafe-io"]
    command += ["--include=" + ",".join(deb.name for deb in stack.debs)]
    # Without a suite and with one explicit source, no mirror and no update suite enters.
    command += ["", str(root), f"deb [trusted=yes] copy://{repository} ./"]
    env = {
        "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        "HOME": os.environ.get("HOME", "/"),
        "LC_ALL": "C",
        "TMPDIR": str(scratch),
        "SOURCE_DATE_EPOCH": str(stack.epoch),
    }
    run(
        command,
        progress=lambda line: progress(line[:160]),
        doing="making the Debian root file system",
        hint="as a user other than root this needs the packages uidmap and mmdebstrap",
        env=env,
    )
