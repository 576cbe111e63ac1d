"""Write the pins: `python -m attnrepro.images.updater add|resolve|locks`.

The one writer of images/digests.json. A pin never changes its digest: recipes that name it are
immutable, so a tag that has moved becomes a new pin, which a new revision names.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final

from attnrepro.errors import AttnreproError, BuildFailed, InvalidDocument, UsageError
from attnrepro.files import atomic_write
from attnrepro.images import lint, lock, registry, spec
from attnrepro.images.sources import PIN_FIELDS, check_digest, source_url
from attnrepro.jsonio import JsonObject, loads
from attnrepro.resources import images_dir

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    Progress = Callable[[str], None]

FIELDS: Final = (*PIN_FIELDS, "evidence", "resolved")
_KEY: Final = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}")


@dataclass(frozen=True, kw_only=True)
class Resolution:
    """What a registry said of a pin's tag."""

    key: str
    seconds: float
    """How long that took."""
    digest: str | None = None
    """What the tag is now; None where the registry could not be asked."""
    reason: str | None = None
    """Why it could not be asked."""


def read(path: Path | None = None) -> dict[str, JsonObject]:
    """The pins, by key."""
    path = path if path is not None else images_dir() / "digests.json"
    pins: dict[str, JsonObject] = loads(path.read_bytes(), what=path.name)
    return pins


def write(pins: dict[str, JsonObject], path: Path | None = None) -> None:
    """Write the pins, sorted. Raises InvalidDocument rather than write a bad one."""
    path = path if path is not None else images_dir() / "digests.json"
    ordered = {key: {name: pins[key].get(name) for name in FIELDS} for key in sorted(pins)}
    if problems := lint.digests(ordered):
        message = f"{path.name} would not be valid"
        raise InvalidDocument(message, problems=problems)
    atomic_write(path, (json.dumps(ordered, indent=2, ensure_ascii=False) + "\n").encode())


def add(
    pins: dict[str, JsonObject],
    key: str,
    *,
    registry_key: str,
    repository: str,
    tag: str,
    digest: str | None,
    evidence: str,
) -> dict[str, JsonObject]:
    """The pins with one more; its digest is the registry's own where none is given.

    Raises:
        UsageError: the key is taken, or is none.
        InvalidDocument: the digest is not one.
        BuildFailed: the registry cannot be asked.
    """
    if key in pins or not _KEY.fullmatch(key):
        message = f"{key!r} is taken" if key in pins else f"{key!r} is no key of a pin"
        raise UsageError(message, hint="pins do not change: take another key, as IMAGE-TAG")
    resolved = None
    if digest is None:
        digest = registry.resolve(repository, tag, url=source_url("registries", registry_key))
        resolved = _today()
    if problems := check_digest(digest, f"/{key}/digest"):
        message = "that is no digest"
        raise InvalidDocument(message, problems=problems)
    pin = {"registry": registry_key, "repository": repository, "tag": tag, "digest": digest}
    return {**pins, key: {**pin, "evidence": evidence, "resolved": resolved}}


def resolve(
    pins: dict[str, JsonObject], keys: Sequence[str]
) -> tuple[dict[str, JsonObject], list[Resolution]]:
    """Ask the registries what the tags are; a tag that still is its pin is dated today.

    Returns:
        The pins with those dates, and what was found for each key.
    """
    found = []
    result = dict(pins)
    for key in keys or sorted(pins):
        pin = pins[key]
        started = time.monotonic()
        try:
            url = source_url("registries", pin["registry"])
            digest = registry.resolve(pin["repository"], pin["tag"], url=url)
        except BuildFailed as error:
            spent = time.monotonic() - started
            found.append(Resolution(key=key, seconds=spent, reason=error.message))
            continue
        found.append(Resolution(key=key, seconds=time.monotonic() - started, digest=digest))
        if digest == pin["digest"]:
            result[key] = {**pin, "resolved": _today()}
    return result, found


def _today() -> str:
    return datetime.now(UTC).date().isoformat()


def _line(pin: JsonObject, found: Resolution) -> str:
    if found.digest is None:
        return f"{found.key}: not asked ({found.reason})"
    if found.digest == pin["digest"]:
        return f"{found.key}: still {found.digest}"
    return f"{found.key}: {pin['tag']} MOVED to {found.digest}; add it under a new key"


def _arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m attnrepro.images.updater", description=__doc__)
    verbs = parser.add_subparsers(dest="verb", required=True)
    new = verbs.add_parser("add", help="pin an image")
    for name in ("key", "registry", "repository", "tag"):
        new.add_argument(name)
    new.add_argument("--digest", help="where the registry cannot be asked")
    new.add_argument("--evidence", default="the registry itself")
    ask = verbs.add_parser("resolve", help="ask registries what the pinned tags are now")
    ask.add_argument("keys", nargs="*")
    locks = verbs.add_parser("locks", help="write the locks of stacks")
    locks.add_argument("stacks", nargs="+")
    locks.add_argument("--mirror", action="append", default=[], help="asked before the host's own")
    return parser


def _run(arguments: argparse.Namespace, progress: Progress) -> int:
    pins = read()
    if arguments.verb == "add":
        pins = add(
            pins,
            arguments.key,
            registry_key=arguments.registry,
            repository=arguments.repository,
            tag=arguments.tag,
            digest=arguments.digest,
            evidence=arguments.evidence,
        )
        write(pins)
        return 0
    if arguments.verb == "locks":
        for name in arguments.stacks:
            stack, _, revision = name.partition("@")
            known = spec.revisions(stack)
            if not known or revision not in ("", *known):
                message = f"there is no stack {name!r}"
                raise UsageError(message, hint=f"shipped stacks: {', '.join(spec.stacks())}")
            folder = images_dir() / stack / (revision or known[-1])
            lock.write(folder, mirrors=arguments.mirror, progress=progress)
        return 0
    pins, found = resolve(pins, arguments.keys)
    write(pins)
    for item in found:
        print(_line(pins[item.key], item))
    return 0 if all(item.digest == pins[item.key]["digest"] for item in found) else 1


def main() -> int:
    """Run one command line; 1 if a tag has moved or could not be asked for."""
    try:
        return _run(_arguments().parse_args(), lambda line: print(line[:200], file=sys.stderr))
    except AttnreproError as error:
        print(f"{error.message}\n{error.hint or ''}", file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
