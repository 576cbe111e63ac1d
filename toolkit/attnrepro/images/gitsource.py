"""Public source trees at a commit, for stacks that compile a kernel that has no release.

A commit's id is a hash over its tree, so it is the lock: what comes back under it is what was
pinned, whoever served it. Each tree becomes one tar in the store and a file of the build's context.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from attnrepro.errors import BuildFailed, Unavailable
from attnrepro.files import sha256_file
from attnrepro.images.sources import reachable, source_url
from attnrepro.jsonio import canonical

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from attnrepro.images.store import Store

_SECONDS: Final = 1800


@dataclass(frozen=True, kw_only=True)
class GitSource:
    """A tree that a stack pins."""

    source: str
    """Key in `git` of images/sources.json."""
    commit: str
    """Hex id of 40 or 64 digits."""

    @property
    def file(self) -> str:
        """Name of its tar in the build's context `wheels`; all below a folder of the key's name."""
        return f"{self.source}-{self.commit[:12]}.tar"

    @property
    def key(self) -> str:
        """`sha256:` and hex under which the store remembers its tar."""
        data = canonical({"git": self.source, "commit": self.commit})
        return "sha256:" + hashlib.sha256(data).hexdigest()


def fetch(
    store: Store,
    wanted: Sequence[GitSource],
    *,
    offline: bool,
    progress: Callable[[str], None],
) -> dict[str, str]:
    """Put trees into the store.

    Returns:
        File name in the build's context to `sha256:` and hex of the tar in the store.

    Raises:
        BuildFailed: an upstream is not reachable or does not have the commit.
        Unavailable: git is not installed.
    """
    found = {}
    for item in wanted:
        known = store.base_layer(item.key)
        if known is not None and store.intact(known[0]):
            found[item.file] = known[0]
            continue
        if offline:
            message = f"the store lacks {item.source} at {item.commit}, and --offline fetches none"
            raise BuildFailed(message, hint="build once without --offline to fill the store")
        found[item.file] = _fetch_one(store, item, progress)
    return found


def _fetch_one(store: Store, item: GitSource, progress: Callable[[str], None]) -> str:
    if shutil.which("git") is None:
        message = "git is not installed"
        raise Unavailable(message, hint="apt-get install git")
    url = source_url("git", item.source)
    if not url.startswith("file:") and (why := reachable(url)):
        message = f"the source {item.source} is not reachable ({why})"
        raise BuildFailed(message, hint="build where it is, or a stack that is made of wheels")
    progress(f"fetching {item.source} at {item.commit[:12]}")
    with store.workspace("git") as folder:
        repository, target = folder / "repository.git", folder / item.file
        _git(folder, "init", "--quiet", "--bare", str(repository))
        _git(repository, "fetch", "--quiet", "--depth", "1", "--no-tags", url, item.commit)
        got = _git(repository, "rev-parse", "FETCH_HEAD^{commit}").strip()
        if got != item.commit:
            message = f"{item.source} gave commit {got}, not {item.commit}"
            raise BuildFailed(message)
        prefix = f"--prefix={item.source}/"
        arguments = ("archive", "--format=tar", prefix, "--output", str(target), item.commit)
        _git(repository, "-c", "tar.umask=0022", *arguments)
        digest = "sha256:" + sha256_file(target)
        store.adopt(target, digest)
    store.save_base(item.key, digest, f"git {item.commit}")
    return digest


def _git(folder: Path, *arguments: str) -> str:
    """Run git, which never asks for a password: the upstreams are public."""
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            check=False,
            timeout=_SECONDS,
            env={**os.environ, "GIT_TERMINAL_PROMPT": "0", "LC_ALL": "C"},
        )
    except subprocess.TimeoutExpired:
        message = f"git {arguments[0]} did not end within {_SECONDS} s"
        raise BuildFailed(message) from None
    if done.returncode:
        said = done.stderr.decode(errors="replace").strip()
        message = f"git {arguments[0]} failed: {said}"
        raise BuildFailed(message)
    return done.stdout.decode()
