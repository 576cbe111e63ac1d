"""Public upstream names and pinned base images: two data files, read by key and checked.

Code, locks and stacks name an upstream by its key in `images/sources.json`, never by address, and a
base image by its key in `images/digests.json`, where each digest stands once.
"""

from __future__ import annotations

import importlib.metadata
import re
import shutil
import socket
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from attnrepro.errors import BuildFailed, InvalidDocument, Problem
from attnrepro.images.process import output
from attnrepro.jsonio import loads
from attnrepro.resources import images_dir

if TYPE_CHECKING:
    from collections.abc import Mapping

PROBE_SECONDS: Final = 3.0
PIN_FIELDS: Final = ("registry", "repository", "tag", "digest")
"""What a pin in digests.json says about the image; its other fields say why it is believed."""

_DIGEST: Final = re.compile(r"sha256:([0-9a-f]{64})")


def check_digest(value: object, pointer: str) -> list[Problem]:
    """Problems of a `sha256:` digest; one repeated character is an invented one."""
    if isinstance(value, str) and (match := _DIGEST.fullmatch(value)) and len(set(match[1])) > 1:
        return []
    return [
        Problem(
            pointer=pointer,
            found=repr(value)[:80],
            allowed="sha256: and 64 lower-case hex digits of a real digest",
            fix="take the digest from the registry, not from memory",
        )
    ]


@dataclass(frozen=True, kw_only=True)
class BaseImage:
    """A base image in a registry, by digest."""

    registry: str
    """Key in `registries` of images/sources.json."""
    repository: str
    tag: str
    """The human name beside the digest; never used to fetch."""
    digest: str


def source_url(kind: str, key: str) -> str:
    """Address of an upstream by its key, without a trailing slash.

    Args:
        kind: `apt`, `wheels` or `registries`.
        key: The key in images/sources.json.

    Raises:
        BuildFailed: no such key, or the tool whose default it is cannot say it.
    """
    sources = loads((images_dir() / "sources.json").read_bytes(), what="images/sources.json")
    try:
        entry: dict[str, str] = sources[kind][key]
        url = entry["url"] if "url" in entry else _default_of(entry["default_of"])
    except KeyError:
        known = ", ".join(sorted(sources.get(kind, {})))
        message = f"images/sources.json has no {kind} source {key!r}"
        raise BuildFailed(message, hint=f"known keys: {known}") from None
    return url.rstrip("/")


def pip_is_here() -> bool:
    """Whether this interpreter has pip.

    Its metadata are asked, not the import system: a finder that looks for pip makes setuptools'
    hook give up its distutils for the rest of the process, and torch's compiler then fails.
    """
    return any(True for _ in importlib.metadata.distributions(name="pip"))


def _default_of(tool: str) -> str:
    """The archive that pip or mmdebstrap itself asks where nothing else is configured."""
    if tool == "pip":
        code = "from pip._internal.models.index import PyPI; print(PyPI.simple_url)"
        found = output([sys.executable, "-c", code])
        if found and found.strip():
            return found.strip()
        hint = f"{sys.executable} -m ensurepip"
    else:
        program = shutil.which(tool)
        text = Path(program).read_text(errors="replace") if program else ""
        if match := re.search(r"https?://[a-z.]+/debian\b", text):
            return match[0]
        hint = "name a mirror with --mirror"
    message = f"{tool} does not say which archive it asks by default"
    raise BuildFailed(message, hint=hint)


def base_image(digests: bytes, key: str, *, what: str) -> BaseImage:
    """The pinned base image `key` of a digests.json.

    Raises:
        InvalidDocument: the key is missing or its digest is not one.
    """
    pins: Mapping[str, Mapping[str, str]] = loads(digests, what=what)
    pin = pins.get(key)
    pointer = f"/{key}"
    if pin is None or not set(PIN_FIELDS) <= pin.keys():
        problems = [
            Problem(
                pointer=pointer,
                found="no such pin" if pin is None else ", ".join(sorted(pin)),
                allowed=", ".join(PIN_FIELDS),
                fix=f"pin the image in {what}",
            )
        ]
    else:
        problems = check_digest(pin["digest"], f"{pointer}/digest")
    if problems or pin is None:
        message = f"{what} does not pin the base image {key!r}"
        raise InvalidDocument(message, problems=problems)
    return BaseImage(
        registry=pin["registry"],
        repository=pin["repository"],
        tag=pin["tag"],
        digest=pin["digest"],
    )


def reachable(url: str, *, seconds: float = PROBE_SECONDS) -> str | None:
    """None if a host answers at the address within `seconds`, else why not.

    A name that nobody serves then costs seconds, not a client's minutes of retries. With a proxy
    in the environment the proxy is asked, since the name may be known only there.
    """
    from urllib.parse import urlsplit
    from urllib.request import getproxies, proxy_bypass

    parts = urlsplit(url)
    proxy = getproxies().get(parts.scheme)
    if proxy and parts.hostname and not proxy_bypass(parts.hostname):
        parts = urlsplit(proxy if "//" in proxy else f"//{proxy}")
    host = parts.hostname or ""
    port = parts.port or (443 if parts.scheme == "https" else 80)
    try:
        socket.create_connection((host, port), timeout=seconds).close()
    except OSError as error:
        return f"{host}: {error.strerror or error}"
    return None
