"""Lint shipped stacks without building them: `python -m attnrepro.images.lint [STACK...]`.

A stack whose base cannot be pulled here, or whose kernels compile for hours, can still be checked
for everything that its files say: what is asked for is locked, what is locked has a hash and no
address, what is claimed exists, and every digest is a real one that stands in one place.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections import Counter
from typing import TYPE_CHECKING, Final

from attnrepro.errors import AttnreproError, InvalidDocument, Problem
from attnrepro.images import spec
from attnrepro.images.sources import PIN_FIELDS, check_digest
from attnrepro.jsonio import loads
from attnrepro.manifest.capability import Capability
from attnrepro.resources import images_dir

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from attnrepro.images.locks import Wheel
    from attnrepro.images.spec import Stack
    from attnrepro.jsonio import JsonObject

_ADDRESS: Final = re.compile(rb"[a-z][a-z0-9+.-]*://|\bwww\.|\b(?:\d{1,3}\.){3}\d{1,3}:\d+", re.I)
_PIN: Final = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]*)(?:\[[a-z0-9,_-]+\])?={2,3}(\S+)")
_WHEEL_HASH: Final = re.compile(r"(?:wheel|sdist) sha256:([0-9a-f]{64})")
_TAGS: Final = re.compile(r"-([^-]+)-([^-]+)-([^-]+)\.whl$")


def stack(subject: Stack) -> list[Problem]:
    """What is wrong with a stack whose files are valid each by itself; an empty list if nothing."""
    wheels = {wheel.name: wheel for wheel in subject.wheels}
    return [
        *_addresses(subject),
        *_requirements(subject, wheels),
        *_tags(subject, wheels.values()),
        *_kernels(subject, wheels),
        *_packages(subject),
        *_sources(subject),
        *_claims(subject),
    ]


def digests(pins: Mapping[str, JsonObject]) -> list[Problem]:
    """What is wrong with the pinned images of a digests.json."""
    problems = []
    registries = _upstreams()["registries"]
    for key, pin in pins.items():
        missing = [name for name in (*PIN_FIELDS, "evidence", "resolved") if name not in pin]
        if missing:
            problems.append(_problem(f"/{key}", f"no {', '.join(missing)}", "every field", "add"))
            continue
        problems += check_digest(pin["digest"], f"/{key}/digest")
        if pin["registry"] not in registries:
            allowed = ", ".join(sorted(registries))
            problems.append(_problem(f"/{key}/registry", pin["registry"], allowed, "name a key"))
        if not pin["evidence"]:
            problems.append(_problem(f"/{key}/evidence", "nothing", "why it is believed", "say it"))
    counts = Counter(pin.get("digest") for pin in pins.values())
    problems += [
        _problem("", f"{digest} {count} times", "once", "let both stacks name one key")
        for digest, count in counts.items()
        if digest is not None and count > 1
    ]
    return problems


def _problem(pointer: str, found: object, allowed: str, fix: str) -> Problem:
    return Problem(pointer=pointer, found=str(found)[:120], allowed=allowed, fix=fix)


def _upstreams() -> JsonObject:
    upstreams: JsonObject = loads(
        (images_dir() / "sources.json").read_bytes(), what="images/sources.json"
    )
    return upstreams


def _addresses(subject: Stack) -> Iterator[Problem]:
    """Upstreams are named by their keys; an address would be fetched from, or tell of a machine."""
    for path, data in subject.files.items():
        for number, line in enumerate(data.split(b"\n"), 1):
            if found := _ADDRESS.search(line):
                word = found[0].decode("ascii", "replace")
                fix = "name a key of images/sources.json"
                yield _problem(f"/{path}:{number}", word, "no address", fix)


def _requirements(subject: Stack, wheels: Mapping[str, Wheel]) -> Iterator[Problem]:
    """What image.json asks for, locked in that version; what the Dockerfile compiles, too."""
    settings = subject.document["wheels"]
    for index, text in enumerate([*settings["requirements"], *settings.get("sdists", [])]):
        pointer = f"/wheels/requirements/{index}"
        match = _PIN.fullmatch(text)
        if match is None:
            yield _problem(pointer, text, "NAME==VERSION", "pin it")
            continue
        name = re.sub(r"[-_.]+", "-", match[1]).lower()
        locked = wheels.get(name)
        if locked is None or locked.version != match[2]:
            found = "nothing" if locked is None else locked.version
            yield _problem(pointer, f"{text}, locked: {found}", match[2], "write the lock again")
    compiled = {pin.partition("==")[0] for pin in settings.get("sdists", [])}
    sdists = {name for name, wheel in wheels.items() if not wheel.file.endswith(".whl")}
    for name in sorted(sdists ^ compiled):
        fix = "keep /wheels/sdists and the lock alike"
        yield _problem("/wheels/sdists", name, "the .tar.gz files of the lock", fix)


def _tags(subject: Stack, wheels: Iterable[Wheel]) -> Iterator[Problem]:
    """A lock written for another Python, or for another machine, installs nowhere."""
    python = subject.document["wheels"]["python"]
    own = "cp" + python.replace(".", "")
    for wheel in wheels:
        match = _TAGS.search(wheel.file)
        if match is None:
            continue
        interpreters, abis, platforms = (set(part.split(".")) for part in match.groups())
        minors = {int(tag[3:]) for tag in interpreters if re.fullmatch(r"cp3\d+", tag)}
        fits = (
            own in interpreters & (abis | interpreters)
            or ("abi3" in abis and any(minor <= int(own[3:]) for minor in minors))
            or bool(interpreters & {"py3", own.replace("cp", "py")})
        )
        runs = any(tag == "any" or tag.endswith("_x86_64") for tag in platforms)
        if not (fits and runs):
            found = f"{wheel.file}"
            yield _problem("/requirements.lock", found, f"{own} on x86-64", "write the lock again")


def _kernels(subject: Stack, wheels: Mapping[str, Wheel]) -> Iterator[Problem]:
    """A hash that image.json tells of is one of the lock."""
    locked = {wheel.sha256 for wheel in wheels.values()}
    for index, kernel in enumerate([subject.document["framework"], *subject.document["kernels"]]):
        match = _WHEEL_HASH.search(kernel.get("source", ""))
        if match is not None and match[1] not in locked:
            pointer = f"/kernels/{index - 1}/source" if index else "/framework/source"
            yield _problem(pointer, match[1], "a hash of requirements.lock", "take it from there")
    file = subject.files["Dockerfile"].decode("utf-8", "replace")
    for tree in subject.trees:
        if tree.file not in file:
            found = f"{tree.file} is not used"
            yield _problem("/trees", found, "trees that the Dockerfile compiles", "leave it out")


def _packages(subject: Stack) -> Iterator[Problem]:
    names = {deb.name for deb in subject.debs}
    for package in subject.document["base"].get("packages", []):
        if package not in names:
            fix = "write the lock again"
            yield _problem("/base/packages", f"{package} is not locked", "locked packages", fix)
    for deb in subject.debs:
        if not deb.path.startswith("pool/main/"):
            fix = "take packages from main alone"
            yield _problem("/debs.lock", deb.path, "pool/main/…", fix)


def _sources(subject: Stack) -> Iterator[Problem]:
    """Keys of upstreams that images/sources.json does not have."""
    upstreams = _upstreams()
    base, wheels = subject.document["base"], subject.document["wheels"]
    used = [("wheels", key) for key in wheels.get("sources", {}).values()]
    used += [("git", tree.source) for tree in subject.trees]
    used += [("apt", base["source"])] if "source" in base else []
    for kind, key in used:
        if key not in upstreams.get(kind, {}):
            allowed = ", ".join(sorted(upstreams.get(kind, {})))
            yield _problem(f"/{kind}", key, allowed, "add it to images/sources.json")


def _claims(subject: Stack) -> Iterator[Problem]:
    if subject.folder is None:
        return
    if not (subject.folder / "README.md").is_file():
        yield _problem("/README.md", "no such file", "a short README", "write it")
    try:
        capability = Capability.load(subject.folder)
    except InvalidDocument as error:
        yield _problem("/claims.json", error.message, "capability data", "correct it")
        return
    wrong = [
        claim["backend"]
        for claim in capability.claims
        if subject.document["device"] not in claim["vendors"]
    ]
    for name in dict.fromkeys(wrong):
        fix = "include the release for that device"
        yield _problem("/claims.json", name, f"claims for {subject.document['device']}", fix)


def run(names: list[str]) -> dict[str, list[Problem]]:
    """Problems by stack and revision, and of `digests.json`; a stack without any is there too.

    Args:
        names: Stacks, each NAME or NAME@REVISION; every revision of every shipped one if empty.

    Raises:
        UsageError: a name is no stack.
    """
    wanted = names or [f"{name}@{r}" for name in spec.stacks() for r in spec.revisions(name)]
    pins = loads((images_dir() / "digests.json").read_bytes(), what="images/digests.json")
    found: dict[str, list[Problem]] = {"digests.json": digests(pins)}
    for name in wanted:
        try:
            subject = spec.resolve(name)
        except InvalidDocument as error:
            found[name] = list(error.problems)
        else:
            found[subject.label] = stack(subject)
    return found


def main() -> int:
    """Print every problem; 2 if there is one."""
    parser = argparse.ArgumentParser(prog="python -m attnrepro.images.lint", description=__doc__)
    parser.add_argument("stacks", nargs="*", help="NAME or NAME@REVISION; all if none")
    try:
        found = run(parser.parse_args().stacks)
    except AttnreproError as error:
        print(f"{error.message}\n{error.hint or ''}", file=sys.stderr)
        return error.exit_code
    for name, problems in found.items():
        print(f"{name}: {'good' if not problems else f'{len(problems)} problems'}")
        for problem in problems:
            print(f"  {problem.line()}")
    return 2 if any(found.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
