"""A Docker Engine that travels: Debian's programs, unpacked beside whatever a machine has."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Final

from attnrepro.errors import BuildFailed, Unavailable
from attnrepro.images.process import output, run
from attnrepro.images.sources import source_url

if TYPE_CHECKING:
    from collections.abc import Callable

    Progress = Callable[[str], None]

SUITE: Final = "trixie"
"""Debian 13: Docker 26.1, which has CDI and both stores."""
PACKAGES: Final = ("docker.io", "docker-cli", "containerd", "runc")
PROGRAMS: Final = (
    "usr/sbin/dockerd",
    "usr/bin/docker",
    "usr/bin/containerd",
    "usr/bin/containerd-shim-runc-v2",
    "usr/bin/ctr",
)
_KEYRING: Final = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
_SBIN: Final = ":/usr/local/sbin:/usr/sbin:/sbin"
# Of the C library itself a program takes the host's, or nothing.
_LIBC: Final = re.compile(r"(ld-linux|libc|libm|libdl|libpthread|librt|libresolv)[.-]")


def put(target: Path, *, root: Path | None, work: Path, progress: Progress) -> None:
    """Put the engine's programs and their libraries into `target`/bin and `target`/lib.

    Args:
        target: A folder that is made.
        root: An unpacked engine (usr/sbin/dockerd …); None fetches Debian's.
        work: For temporary files.
        progress: Told what is fetched.

    Raises:
        BuildFailed: a download failed, or `root` lacks a program.
        Unavailable: this machine cannot fetch Debian packages.
    """
    programs, libraries = target / "bin", target / "lib"
    programs.mkdir(parents=True)
    libraries.mkdir()
    source = root if root is not None else _fetch(work / "engine", progress)
    for name in PROGRAMS:
        if not (source / name).is_file():
            message = f"{source} has no {name}"
            raise BuildFailed(message, hint="name the root of an unpacked docker.io and containerd")
        shutil.copy(source / name, programs)
    # The machine's own runc first: a newer Debian's needs a newer C library.
    own = shutil.which("runc", path=os.environ.get("PATH", os.defpath) + _SBIN)
    runc = Path(own) if own else source / "usr/sbin/runc"
    if not runc.is_file():
        message = "there is no runc to bundle"
        raise BuildFailed(message, hint="apt-get install runc")
    shutil.copy(runc, programs / "runc")
    for program in sorted(programs.iterdir()):
        for library in _libraries(program):
            shutil.copy(library, libraries)


def _libraries(program: Path) -> list[Path]:
    said = output(["ldd", str(program)]) or ""
    found = [Path(path) for path in re.findall(r"=> (/\S+) \(0x", said)]
    return [path for path in found if not _LIBC.match(path.name)]


def _fetch(folder: Path, progress: Progress) -> Path:
    """Fetch the packages by a private apt state and unpack them; nothing is installed."""
    if not _KEYRING.is_file():
        message = f"{_KEYRING} is missing, with which Debian's packages are proven"
        raise Unavailable(message, hint="apt-get install debian-archive-keyring")
    debs = folder / "debs"
    for place in (folder / "lists/partial", folder / "archives/partial", debs):
        place.mkdir(parents=True)
    (folder / "status").touch()
    line = f"deb [signed-by={_KEYRING} arch=amd64] {_mirror()} {SUITE} main\n"
    (folder / "sources.list").write_text(line)
    options = {
        "Dir::Etc::SourceList": folder / "sources.list",
        "Dir::Etc::SourceParts": "/dev/null",
        "Dir::Etc::PreferencesParts": "/dev/null",
        "Dir::State::Lists": folder / "lists",
        "Dir::State::status": folder / "status",
        "Dir::Cache": folder,
        "Dir::Cache::Archives": "archives",
        "APT::Sandbox::User": "root",
        "APT::Architecture": "amd64",
        "Acquire::Languages": "none",
    }
    apt = ["apt-get", "-q", *(f"-o{name}={value}" for name, value in options.items())]
    run([*apt, "update"], progress=progress, doing="reading Debian's package list")
    run([*apt, "download", *PACKAGES], progress=progress, doing="fetching the engine", cwd=debs)
    for deb in sorted(debs.glob("*.deb")):
        run(["dpkg", "-x", str(deb), str(folder / "root")], progress=progress, doing="unpacking")
    return folder / "root"


def _mirror() -> str:
    """The Debian mirror of this machine's own apt, else the public one."""
    command = ["apt-get", "indextargets", "--format", "$(REPO_URI)", "Created-By: Packages"]
    for line in (output(command) or "").splitlines():
        if re.search(r"/debian/?$", line):
            return line.rstrip("/")
    return source_url("apt", "debian")
