"""The source of a kernel of the user's own: a wheel, an sdist, or a git checkout at a commit.

Each becomes one file with a SHA-256. A checkout is exported with `git archive`; one with
uncommitted changes is refused, or recorded as such together with the digest of those changes.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from dataclasses import dataclass
from typing import TYPE_CHECKING

from attnrepro.errors import BuildFailed, Unavailable
from attnrepro.files import sha256_file
from attnrepro.images import fetch
from attnrepro.images.locks import Wheel
from attnrepro.jsonio import JsonObject, canonical, loads

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from attnrepro.images.spec import Stack
    from attnrepro.images.store import Store

ARCHIVE = "kernel.tar"
"""Name of an exported checkout among the build's files."""
FACTS = "source.json"
"""Recipe file that says what a kernel's source was."""


@dataclass(frozen=True, kw_only=True)
class Source:
    """A kernel's source, in the store."""

    document: JsonObject
    """`source` of the image record."""
    size: int
    """Bytes of the file."""

    @property
    def file(self) -> str:
        """Name of the file in the build."""
        return str(self.document["file"])

    @property
    def sha256(self) -> str:
        """Hex digest of the file."""
        return str(self.document["sha256"])

    def as_wheel(self) -> Wheel:
        """The file as an item of the build's wheelhouse."""
        return Wheel(name="kernel", version="0", sha256=self.sha256, file=self.file, size=self.size)


def obtain(
    store: Store,
    stack: Stack,
    *,
    python: str,
    allow_dirty: bool,
    offline: bool,
    progress: Callable[[str], None],
) -> Source:
    """Put a stack's kernel source into the store.

    Raises:
        BuildFailed: it is not there, hashes otherwise, or the checkout is dirty.
        Unavailable: git is not installed.
    """
    if FACTS in stack.files:
        return _carried(store, stack)
    wanted = stack.document["source"]
    if wanted["kind"] == "git":
        if stack.folder is None:
            message = "a recipe out of an artifact may not name a checkout on this machine"
            raise BuildFailed(message)
        return _from_git(store, stack.folder, wanted, allow_dirty=allow_dirty, progress=progress)
    return _from_file(store, stack, python=python, offline=offline, progress=progress)


def _carried(store: Store, stack: Stack) -> Source:
    """The source that a recipe carries, or that the store still has."""
    document = loads(stack.files[FACTS], what=FACTS)
    source = Source(document=document["source"], size=document["size"])
    data = stack.files.get(f"source/{source.file}")
    if data is not None:
        if hashlib.sha256(data).hexdigest() != source.sha256:
            message = f"the recipe's {source.file} is not what {FACTS} says"
            raise BuildFailed(message)
        store.add_bytes(data)
    if not store.intact(source.sha256):
        message = f"the recipe does not carry {source.file} ({source.size / 1e6:.0f} MB)"
        raise BuildFailed(message, hint=f"ask its author for the file with sha256 {source.sha256}")
    return source


def facts(source: Source) -> bytes:
    """The recipe file that `_carried` reads."""
    return canonical({"source": source.document, "size": source.size}) + b"\n"


def _from_file(
    store: Store,
    stack: Stack,
    *,
    python: str,
    offline: bool,
    progress: Callable[[str], None],
) -> Source:
    wanted = stack.document["source"]
    file, sha256 = wanted["file"], wanted["sha256"]
    beside = stack.folder / file if stack.folder is not None else None
    if beside is not None and beside.is_file():
        found = sha256_file(beside)
        if found != sha256:
            message = f"{beside} has sha256 {found}, image.json says {sha256}"
            raise BuildFailed(message, hint="put the right file there, or correct image.json")
        if not store.has(sha256, beside.stat().st_size):
            with store.workspace("source") as folder:
                shutil.copyfile(beside, folder / "file")
                store.adopt(folder / "file", sha256)
    elif not store.intact(sha256):
        if wanted["kind"] == "sdist":
            # pip would run the sdist's own code on this machine to learn its name.
            message = f"there is no {file} beside image.json"
            raise BuildFailed(message, hint="download the sdist and put it there")
        name, version = file.split("-")[:2]
        item = Wheel(name=name.replace("_", "-"), version=version, sha256=sha256, file=file, size=1)
        fetch.wheels(store, [item], python=python, sources={}, offline=offline, progress=progress)
    size = store.blob(sha256).stat().st_size
    return Source(
        document={"kind": wanted["kind"], "file": file, "sha256": sha256, "dirty": False},
        size=size,
    )


# git ------------------------------------------------------------------------------------------


def _git(
    checkout: Path, *arguments: str, env: Mapping[str, str] | None = None, what: str = "git"
) -> bytes:
    try:
        done = subprocess.run(
            ["git", "-C", str(checkout), *arguments],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            check=False,
            env={**os.environ, "GIT_OPTIONAL_LOCKS": "0", "LC_ALL": "C", **(env or {})},
        )
    except FileNotFoundError:
        message = "git is not installed"
        raise Unavailable(message, hint="apt-get install git") from None
    if done.returncode:
        said = done.stderr.decode(errors="replace").strip()
        message = f"{what} failed in {checkout}: {said}"
        raise BuildFailed(message)
    return done.stdout


def _word(data: bytes) -> str:
    return data.decode().strip()


def _from_git(
    store: Store,
    folder: Path,
    wanted: JsonObject,
    *,
    allow_dirty: bool,
    progress: Callable[[str], None],
) -> Source:
    checkout = (folder / wanted["path"]).resolve()
    if not checkout.is_dir():
        message = f"there is no checkout {checkout}"
        raise BuildFailed(message, hint="correct /source/path in image.json")
    commit = _word(_git(checkout, "rev-parse", "HEAD^{commit}"))
    if wanted.get("commit", commit) != commit:
        message = f"{checkout} is at {commit}, image.json asks for {wanted['commit']}"
        raise BuildFailed(message, hint=f"git -C {checkout} checkout {wanted['commit']}")
    if b"160000 commit" in _git(checkout, "ls-tree", "-r", commit):
        message = f"{checkout} has submodules, which git archive leaves out"
        raise BuildFailed(message, hint="build an sdist that holds them, and name that")
    status = _git(checkout, "status", "--porcelain", "--untracked-files=normal")
    document: JsonObject = {"kind": "git", "file": ARCHIVE, "commit": commit, "dirty": bool(status)}
    subdirectory = wanted.get("subdirectory")
    if subdirectory:
        document["subdirectory"] = subdirectory
    with store.workspace("git") as work:
        archived: str = commit
        env: dict[str, str] = {}
        if status:
            if not allow_dirty:
                lines = status.decode(errors="replace").splitlines()
                message = f"{checkout} has uncommitted changes: {', '.join(lines[:5])}"
                raise BuildFailed(
                    message, hint="commit them, or build with --allow-dirty, which is recorded"
                )
            archived, env = _commit_dirty(checkout, commit, work)
            diff = _git(checkout, "diff-tree", "-p", "--binary", commit, archived, env=env)
            document["diff_sha256"] = hashlib.sha256(diff).hexdigest()
        document["tree"] = _word(_git(checkout, "rev-parse", f"{archived}^{{tree}}", env=env))
        target = work / ARCHIVE
        _git(
            checkout,
            *("-c", "tar.umask=0022", "archive", "--format=tar", "--prefix=kernel/"),
            *("--output", str(target), archived),
            env=env,
            what="git archive",
        )
        document["sha256"] = sha256_file(target)
        size = target.stat().st_size
        progress(f"kernel: {checkout} at {commit[:12]}{' + changes' if status else ''}")
        store.adopt(target, document["sha256"])
    return Source(document=document, size=size)


def _commit_dirty(checkout: Path, commit: str, work: Path) -> tuple[str, dict[str, str]]:
    """A commit of the working tree as it stands, in an object store of our own.

    The user's repository is not written to.
    """
    objects = _word(_git(checkout, "rev-parse", "--path-format=absolute", "--git-path", "objects"))
    (work / "objects").mkdir()
    date = _word(_git(checkout, "show", "-s", "--format=%cI", commit))
    env = {
        "GIT_INDEX_FILE": str(work / "index"),
        "GIT_OBJECT_DIRECTORY": str(work / "objects"),
        "GIT_ALTERNATE_OBJECT_DIRECTORIES": objects,
    }
    for who in ("AUTHOR", "COMMITTER"):
        env |= {f"GIT_{who}_NAME": "attnrepro", f"GIT_{who}_EMAIL": "", f"GIT_{who}_DATE": date}
    _git(checkout, "read-tree", commit, env=env)
    top = _word(_git(checkout, "rev-parse", "--show-toplevel"))
    _git(checkout, "add", "--all", top, env=env)
    tree = _word(_git(checkout, "write-tree", env=env))
    made = _git(checkout, "commit-tree", "-p", commit, "-m", "uncommitted changes", tree, env=env)
    return _word(made), env
