"""Write the locks of a stack: `python -m attnrepro.images.lock FOLDER [--mirror URL]`.

For those who make a stack. image.json says what is wanted; apt and pip resolve it through the
host's configuration, and debs.lock and requirements.lock say what that became, by hash.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from attnrepro.errors import AttnreproError, BuildFailed
from attnrepro.files import atomic_write, sha256_file
from attnrepro.images.fetch import apt_mirrors, fetch_index, platform_options
from attnrepro.images.locks import Deb, Wheel, render
from attnrepro.images.process import output, run
from attnrepro.images.simpleindex import digest
from attnrepro.images.sources import source_url
from attnrepro.images.store import Store
from attnrepro.jsonio import loads

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    Progress = Callable[[str], None]


def resolve_debs(
    folder: Path, packages: Sequence[str], *, suite: str, mirror: str, progress: Progress
) -> tuple[list[Deb], str]:
    """What a list of packages needs in one suite, essential packages included.

    Args:
        folder: An empty folder for apt's private state.
        packages: Names.
        suite: The main suite of a release, as bookworm.
        mirror: Root of a mirror.
        progress: Told the commands.

    Returns:
        The packages, and the suite's version and date for the lock's comment.

    Raises:
        BuildFailed: the mirror cannot be read, or the packages cannot be installed together.
    """
    options = fetch_index(folder, mirror=mirror, suite=suite, progress=progress)
    lists = list((folder / "lists").glob("*_Packages"))
    releases = list((folder / "lists").glob("*InRelease"))
    if not lists or not releases:
        message = f"the mirror {mirror} gave no package list for {suite}"
        raise BuildFailed(message)
    stanzas = _stanzas(lists[0].read_text(encoding="utf-8"))
    essential = [name for name, stanza in stanzas.items() if stanza.get("Essential") == "yes"]
    wanted = sorted({*essential, *packages})
    command = ["apt-get", *options, "--simulate", "--quiet", "install", *wanted]
    plan = output(command, seconds=120)
    if plan is None:
        run(command, progress=progress, doing="resolving the packages")
        message = "apt cannot resolve the packages"
        raise BuildFailed(message)
    names = sorted(set(re.findall(r"^Inst (\S+?)(?::amd64)? ", plan, re.MULTILINE)))
    debs = []
    for name in names:
        stanza = stanzas[name]
        debs.append(
            Deb(
                name=name,
                version=stanza["Version"],
                arch=stanza["Architecture"],
                sha256=stanza["SHA256"],
                size=int(stanza["Size"]),
                path=stanza["Filename"],
            )
        )
    release = releases[0].read_text(encoding="utf-8", errors="replace")
    version = re.search(r"^Version: (.+)$", release, re.MULTILINE)
    date = re.search(r"^Date: (.+)$", release, re.MULTILINE)
    about = f"{suite} {version[1] if version else '?'} of {date[1] if date else '?'}"
    return debs, about


def _stanzas(text: str) -> dict[str, dict[str, str]]:
    result = {}
    for block in text.split("\n\n"):
        fields = dict(
            line.split(": ", 1)
            for line in block.split("\n")
            if re.match(r"[A-Z][A-Za-z0-9-]*: ", line)
        )
        if "Package" in fields:
            result[fields["Package"]] = fields
    return result


def resolve_wheels(
    folder: Path,
    requirements: Sequence[str],
    *,
    python: str,
    sources: Mapping[str, str],
    progress: Progress,
) -> list[Wheel]:
    """What a list of requirements needs, as wheels for the image's Python.

    Args:
        folder: An empty folder; the wheels lie there afterwards.
        requirements: In pip's words, pinned with ==.
        python: Minor version, as 3.11.
        sources: Distribution to its key in `wheels` of images/sources.json.
        progress: Told the commands.

    Raises:
        BuildFailed: pip cannot resolve or fetch them.
    """
    indexes = [
        word
        for key in sorted(set(sources.values()))
        for word in ("--extra-index-url", source_url("wheels", key))
    ]
    command = [sys.executable, "-m", "pip", "download", "--dest", str(folder)]
    command += [*platform_options(python), "--disable-pip-version-check", "--no-input"]
    env = {**os.environ, "PIP_CONSTRAINT": ""}
    try:
        run([*command, *requirements], progress=progress, doing="pip", env=env)
    except BuildFailed:
        run([*command, *indexes, *requirements], progress=progress, doing="pip", env=env)
    wheels = []
    for path in sorted(folder.glob("*.whl")):
        name, version = path.name.split("-")[:2]
        wheels.append(
            Wheel(
                name=re.sub(r"[-_.]+", "-", name).lower(),
                version=version,
                sha256=sha256_file(path),
                file=path.name,
                size=path.stat().st_size,
            )
        )
    return wheels


def _resolve_sdist(folder: Path, pin: str, sources: Mapping[str, str]) -> Wheel:
    """A source distribution, which is named as PEP 625 says."""
    name, _, version = pin.partition("==")
    file = f"{name.replace('-', '_')}-{version}.tar.gz"
    sha256, size = digest(name, file, folder, source=sources.get(name, "pypi"))
    return Wheel(name=name, version=version, sha256=sha256, file=file, size=size)


def write(folder: Path, *, mirrors: Sequence[str], progress: Progress) -> None:
    """Write both locks of the stack in a folder. Raises what the two resolvers raise."""
    document = loads((folder / "image.json").read_bytes(), what=str(folder / "image.json"))
    base, wheels = document["base"], document["wheels"]
    store = Store()
    with store.workspace("lock") as work:
        if base["kind"] == "debian":
            (work / "apt").mkdir()
            mirror = apt_mirrors(base["source"], mirrors)[0]
            debs, about = resolve_debs(
                work / "apt",
                base["packages"],
                suite=base["suite"],
                mirror=mirror,
                progress=progress,
            )
            atomic_write(folder / "debs.lock", render(debs, [about, "main only"]))
        (work / "wheels").mkdir()
        found = resolve_wheels(
            work / "wheels",
            wheels["requirements"],
            python=wheels["python"],
            sources=wheels.get("sources", {}),
            progress=progress,
        )
        for wheel in found:
            # A build that follows need not fetch them again.
            store.adopt(work / "wheels" / wheel.file, "sha256:" + wheel.sha256)
        sources = wheels.get("sources", {})
        found += [_resolve_sdist(work, pin, sources) for pin in wheels.get("sdists", [])]
        atomic_write(folder / "requirements.lock", render(found, [f"Python {wheels['python']}"]))


def main() -> int:
    """Parse the arguments and write the locks; the exit code of the error if there is one."""
    parser = argparse.ArgumentParser(prog="python -m attnrepro.images.lock", description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--mirror", action="append", default=[], help="asked before the host's own")
    arguments = parser.parse_args()
    try:
        write(
            arguments.folder,
            mirrors=arguments.mirror,
            progress=lambda line: print(line[:200], file=sys.stderr),
        )
    except AttnreproError as error:
        print(f"{error.message}\n{error.hint or ''}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
