"""Fetching wheels and .debs by hash, through the host's own pip and apt configuration.

The store is asked first, then what the host is configured for (mirror, proxy, CA, credentials),
then the public upstream that the stack names. Nothing enters the store that does not hash to its
name.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections import Counter
from contextlib import suppress
from typing import TYPE_CHECKING, Final, TypeVar

from attnrepro.errors import BuildFailed, Unavailable
from attnrepro.files import sha256_file
from attnrepro.images.process import output, run, stream
from attnrepro.images.simpleindex import find
from attnrepro.images.sources import pip_is_here, reachable, source_url

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from pathlib import Path

    from attnrepro.images.locks import Deb, Wheel
    from attnrepro.images.store import Store

    Progress = Callable[[str], None]

_Item = TypeVar("_Item", "Wheel", "Deb")

_APT_HELPER: Final = "/usr/lib/apt/apt-helper"
_APT_BATCH: Final = 64


class MissingDebs(BuildFailed):
    """Packages that no mirror holds any more."""

    def __init__(self, debs: Sequence[Deb], asked: Sequence[str]) -> None:
        names = ", ".join(f"{deb.name} {deb.version}" for deb in debs[:8])
        more = f" and {len(debs) - 8} more" if len(debs) > 8 else ""
        super().__init__(
            f"no mirror has {names}{more} (asked: {', '.join(asked) or 'none'})",
            hint="name an archive that keeps old packages with --mirror URL (a snapshot service), "
            "or take today's versions with --allow-newer, which builds a different image",
        )
        self.debs = tuple(debs)


def missing(store: Store, items: Iterable[Wheel | Deb]) -> list[Wheel | Deb]:
    """What a build still has to fetch, judged by name and size."""
    return [item for item in items if not store.has(item.sha256, item.size)]


def _damaged_or_missing(store: Store, items: Iterable[_Item]) -> list[_Item]:
    return [item for item in items if not store.intact(item.sha256)]


def _refuse_offline(items: Sequence[Wheel | Deb]) -> None:
    names = ", ".join(item.file for item in items[:8])
    message = f"the store lacks {len(items)} files ({names}…), and --offline fetches none"
    raise BuildFailed(message, hint="build once without --offline to fill the store")


def _adopt(store: Store, path: Path, item: Wheel | Deb) -> bool:
    if not path.is_file() or sha256_file(path) != item.sha256:
        return False
    store.adopt(path, item.sha256)
    return True


def _adopt_copy(store: Store, path: Path, folder: Path, item: Wheel) -> bool:
    """Like `_adopt`, of a file that may be the user's own and stays where it is."""
    copy = folder / "copy"
    shutil.copyfile(path, copy)
    return _adopt(store, copy, item)


# Wheels ---------------------------------------------------------------------------------------


def wheels(
    store: Store,
    items: Sequence[Wheel],
    *,
    python: str,
    sources: Mapping[str, str],
    offline: bool,
    progress: Progress,
) -> int:
    """Put the wheels of a lock into the store; returns the bytes that were fetched.

    Args:
        store: Where they go.
        items: The lock.
        python: Minor version inside the image, as 3.11.
        sources: Distribution to its key in `wheels` of images/sources.json, for the fallback.
        offline: Fetch nothing.
        progress: Told what is done.

    Raises:
        BuildFailed: a wheel is nowhere to be had, or has another hash.
        Unavailable: this Python has no pip.
    """
    wanted = _damaged_or_missing(store, items)
    if not wanted:
        return 0
    if offline:
        _refuse_offline(wanted)
    if not pip_is_here():
        message = f"{sys.executable} has no pip, which fetches the wheels"
        raise Unavailable(message, hint=f"{sys.executable} -m ensurepip")
    total = sum(item.size for item in wanted)
    progress(f"fetching {len(wanted)} wheels, {total / 1e6:.0f} MB")
    reasons: dict[str, str] = {}
    with store.workspace("wheels") as folder:
        for item in [item for item in wanted if item.file.endswith(".tar.gz")]:
            # pip would run the sdist's own code on this machine to learn its name.
            key = sources.get(item.name, "pypi")
            path = find(item.name, item.file, folder, source=key, progress=progress)
            if path is None or not _adopt_copy(store, path, folder, item):
                reasons[item.file] = "no index has it" if path is None else "it hashes otherwise"
        wheels_only = [item for item in wanted if item.file.endswith(".whl")]
        left = _download(store, folder, wheels_only, python, [], reasons, progress)
        if left and len(wheels_only) > 1:
            # One unknown file fails the whole call: ask for each alone.
            for item in left:
                _download(store, folder, [item], python, [], reasons, progress)
            left = [item for item in left if not store.has(item.sha256)]
        groups = Counter(sources.get(item.name, "pypi") for item in left)
        for key in groups:
            url = source_url("wheels", key)
            members = [item for item in left if sources.get(item.name, "pypi") == key]
            if why := reachable(url):
                progress(f"source {key} is not reachable ({why})")
                continue
            index = ["--isolated", "--index-url", url, "--timeout", "15", "--retries", "1"]
            index += _certificates()
            _download(store, folder, members, python, index, reasons, progress)
    left = [item for item in wanted if not store.has(item.sha256)]
    if left:
        names = ", ".join(item.file for item in left)
        detail = "\n".join(reasons[item.file] for item in left if item.file in reasons)
        message = f"cannot fetch {names} with the locked hash:\n{detail[-2000:]}"
        raise BuildFailed(
            message,
            hint="check `pip config list`; the file may be put into a folder that "
            "PIP_FIND_LINKS names",
        )
    return total


def _certificates() -> list[str]:
    """Pip's --isolated hides the host's CA bundle too; hand it on."""
    bundle = os.environ.get("PIP_CERT") or output(
        [sys.executable, "-m", "pip", "config", "get", "global.cert"]
    )
    return ["--cert", bundle.strip()] if bundle and bundle.strip() else []


def _download(
    store: Store,
    folder: Path,
    items: Sequence[Wheel],
    python: str,
    index: Sequence[str],
    reasons: dict[str, str],
    progress: Progress,
) -> list[Wheel]:
    """One pip call; returns what it did not bring with the right hash."""
    if not items:
        return []
    lock = folder / "requirements.txt"
    lock.write_text("".join(item.line() + "\n" for item in items))
    arguments = ["download", "--require-hashes", "--no-deps", "--dest", str(folder / "files")]
    arguments += ["--requirement", str(lock), "--disable-pip-version-check", "--no-input"]
    arguments += platform_options(python)
    # A constraint of the host's would have to carry hashes, and the lock pins everything anyway.
    env = {**os.environ, "PIP_CONSTRAINT": ""}
    command = [sys.executable, "-m", "pip", *arguments, *index, "--progress-bar", "off"]
    outcome = stream(command, progress=progress, env=env)
    left = []
    for item in items:
        if not _adopt(store, folder / "files" / item.file, item):
            left.append(item)
            reasons[item.file] = _last_errors(outcome.tail)
    return left


def _last_errors(tail: str) -> str:
    lines = [line for line in tail.splitlines() if "ERROR" in line or "Got" in line]
    return "\n".join(lines[-4:] or tail.splitlines()[-4:])


def platform_options(python: str) -> list[str]:
    """Pip options that choose wheels for the image rather than for the host."""
    tag = "cp" + python.replace(".", "")
    platforms = [f"manylinux_2_{minor}_x86_64" for minor in range(36, 4, -1)]
    platforms += ["manylinux2014_x86_64", "manylinux2010_x86_64", "manylinux1_x86_64"]
    options = ["--only-binary", ":all:", "--implementation", "cp", "--python-version", python]
    for abi in (tag, "abi3", "none"):
        options += ["--abi", abi]
    for platform in [*platforms, "linux_x86_64"]:
        options += ["--platform", platform]
    return options


# Debian packages ------------------------------------------------------------------------------


def apt_mirrors(source: str, extra: Sequence[str] = ()) -> list[str]:
    """Roots of Debian mirrors: those given, those of the host's apt, then the public one.

    Args:
        source: Key in `apt` of images/sources.json; the host's mirrors are those whose address
            ends in that key.
        extra: Given by the user; asked first.
    """
    listed = output(["apt-get", "indextargets", "--format", "$(REPO_URI)", "Created-By: Packages"])
    found = [line.strip().rstrip("/") for line in (listed or "").splitlines()]
    own = [url for url in found if url.endswith(f"/{source}")]
    result = [url.rstrip("/") for url in extra] + own
    with suppress(BuildFailed):  # without a default, those given and configured must do
        result.append(source_url("apt", source))
    return list(dict.fromkeys(result))


def debs(
    store: Store,
    items: Sequence[Deb],
    *,
    source: str,
    mirrors: Sequence[str],
    offline: bool,
    progress: Progress,
) -> int:
    """Put the packages of a lock into the store; returns the bytes that were fetched.

    Raises:
        MissingDebs: no mirror has a package, or what it has under the name hashes otherwise.
        BuildFailed: they are not in the store, and nothing may be fetched.
        Unavailable: the host has no apt.
    """
    wanted = _damaged_or_missing(store, items)
    if not wanted:
        return 0
    if offline:
        _refuse_offline(wanted)
    total = sum(item.size for item in wanted)
    progress(f"fetching {len(wanted)} Debian packages, {total / 1e6:.0f} MB")
    asked = []
    left = wanted
    with store.workspace("debs") as folder:
        for mirror in apt_mirrors(source, mirrors):
            if not left:
                break
            if mirror.startswith(("http://", "https://")) and (why := reachable(mirror)):
                progress(f"mirror {mirror} is not reachable ({why})")
                asked.append(f"{mirror}: not reachable")
                continue
            asked.append(mirror)
            for start in range(0, len(left), _APT_BATCH):
                _apt_download(folder, left[start : start + _APT_BATCH], mirror, progress)
            left = [item for item in left if not _adopt(store, folder / item.file, item)]
    if left:
        raise MissingDebs(left, asked)
    return total


def _apt_download(folder: Path, items: Sequence[Deb], mirror: str, progress: Progress) -> None:
    """Ask one mirror for several packages; what came is judged by its hash later."""
    arguments = ["-o", "APT::Sandbox::User=root", "-o", "Acquire::Retries=1", "download-file"]
    for item in items:
        arguments += [f"{mirror}/{item.path}", str(folder / item.file), f"SHA256:{item.sha256}"]
    quiet = f"+ {_APT_HELPER} download-file {mirror}/… ({len(items)} files)"
    progress(quiet)
    try:
        outcome = stream([_APT_HELPER, *arguments], progress=lambda _: None)
    except Unavailable:
        message = f"this machine has no {_APT_HELPER}, which fetches the Debian packages"
        raise Unavailable(message, hint="build on Debian ≥ 12 or Ubuntu ≥ 24.04") from None
    if outcome.code:
        # apt-helper stops at the first file that it cannot have: ask for each alone.
        for item in items:
            if not (folder / item.file).is_file() and len(items) > 1:
                _apt_download(folder, [item], mirror, lambda _: None)


def fetch_index(folder: Path, *, mirror: str, suite: str, progress: Progress) -> list[str]:
    """Update a private apt state for one suite of one mirror; returns apt's options for it.

    Raises BuildFailed, also where the archive's keyring is missing.
    """
    keyring = "/usr/share/keyrings/debian-archive-keyring.gpg"
    if not os.path.exists(keyring):  # noqa: PTH110 - a constant path
        message = f"there is no {keyring}, which says which archive to believe"
        raise BuildFailed(message, hint="apt-get install debian-archive-keyring")
    for name in ("lists/partial", "archives/partial"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    (folder / "status").touch()
    line = f"deb [signed-by={keyring} arch=amd64] {mirror} {suite} main\n"
    (folder / "sources.list").write_text(line)
    settings = {
        "Dir::Etc::SourceList": folder / "sources.list",
        "Dir::Etc::SourceParts": "/dev/null",
        "Dir::Etc::PreferencesParts": "/dev/null",
        "Dir::Etc::Preferences": "/dev/null",
        "Dir::State::Lists": folder / "lists",
        "Dir::State::status": folder / "status",
        "Dir::Cache": folder,
        "Dir::Cache::Archives": "archives",
        "APT::Architecture": "amd64",
        "APT::Install-Recommends": "false",
        "APT::Sandbox::User": "root",
        "APT::Update::Post-Invoke-Success::": "",
        "Acquire::Languages": "none",
        "Acquire::GzipIndexes": "false",
    }
    options = [word for key, value in settings.items() for word in ("-o", f"{key}={value}")]
    run(
        ["apt-get", *options, "update"],
        progress=progress,
        doing=f"reading the package list of {suite} at {mirror}",
        hint="name another mirror with --mirror URL",
    )
    return options
