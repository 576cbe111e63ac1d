"""Source distributions by hash, from the package indexes that the host's pip is configured for.

pip itself runs an sdist's own code to learn its name, even when it only downloads it. A build
fetches from an index what a lock names, and runs nothing of it on the host.
"""

from __future__ import annotations

import base64
import re
import ssl
import sys
import urllib.error
import urllib.request
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path
from typing import IO, TYPE_CHECKING, Final, cast
from urllib.parse import unquote, urljoin, urlsplit, urlunsplit

from attnrepro.errors import BuildFailed, InvalidDocument
from attnrepro.files import sha256_file
from attnrepro.images.process import output
from attnrepro.images.sources import reachable, source_url
from attnrepro.images.tree import CHUNK
from attnrepro.jsonio import loads

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_ACCEPT: Final = "application/vnd.pypi.simple.v1+json, text/html;q=0.5"
_MAX_PAGE: Final = 32 << 20
_TIMEOUT: Final = 60.0


@dataclass(frozen=True, kw_only=True)
class _Host:
    """Where this host's pip looks."""

    folders: Sequence[Path]
    indexes: Sequence[str]
    context: ssl.SSLContext


class _Links(HTMLParser):
    """The targets of a page's anchors."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found += [value for name, value in attrs if tag == "a" and name == "href" and value]


def find(
    project: str, file: str, folder: Path, *, source: str, progress: Callable[[str], None]
) -> Path | None:
    """Download a project's file; its hash is the caller's to check.

    Args:
        project: Normalised name of the distribution.
        file: Name of the file.
        folder: Where it goes.
        source: Key in `wheels` of images/sources.json, asked after the host's own indexes.
        progress: Told which index is asked.

    Returns:
        The file, or None where no index has it.
    """
    host = _configured()
    for place in host.folders:
        if (place / file).is_file():
            return place / file
    public = source_url("wheels", source)
    for index in dict.fromkeys([*host.indexes, public]):
        shown = source if index == public else _shown(index)
        if index.startswith("http") and (why := reachable(index)):
            progress(f"index {shown} is not reachable ({why})")
            continue
        try:
            address = _address(f"{index.rstrip('/')}/{project}/", file, host)
            if address is not None:
                progress(f"fetching {file} from {shown}")
                return _download(address, folder / file, host)
        except (OSError, urllib.error.URLError, InvalidDocument) as error:
            progress(f"index {shown}: {error}")
    return None


def digest(project: str, file: str, folder: Path, *, source: str) -> tuple[str, int]:
    """SHA-256 (hex) and size in bytes of a project's file, for a lock. Raises BuildFailed."""
    path = find(project, file, folder, source=source, progress=lambda _: None)
    if path is None:
        message = f"no index has {file} of {project}"
        raise BuildFailed(message, hint="correct /wheels/sdists in image.json")
    return sha256_file(path), path.stat().st_size


def _configured() -> _Host:
    """What the host's pip is configured for, in pip's order of trust."""
    listed = output([sys.executable, "-m", "pip", "config", "list"]) or ""
    values: dict[str, list[str]] = {}
    for key, value in re.findall(r"^\S*\.([a-z-]+)='(.*)'$", listed, re.MULTILINE):
        values.setdefault(key, []).extend(value.replace("\\n", " ").split())
    indexes = [*values.get("index-url", []), *values.get("extra-index-url", [])]
    refused = values.get("no-index", ["0"])[-1].lower() in ("1", "on", "true", "yes")
    bundle = values.get("cert", [None])[-1]
    return _Host(
        folders=[Path(unquote(urlsplit(text).path)) for text in values.get("find-links", [])],
        indexes=[] if refused else indexes,
        context=ssl.create_default_context(cafile=bundle),
    )


def _shown(index: str) -> str:
    """An index's address without what may be a password."""
    parts = urlsplit(index)
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))


def _open(address: str, host: _Host) -> IO[bytes]:
    parts = urlsplit(address)
    if parts.scheme not in ("http", "https", "file"):
        message = f"{_shown(address)} is no address of an index"
        raise OSError(message)
    headers = {"Accept": _ACCEPT}
    if parts.username:
        secret = f"{unquote(parts.username)}:{unquote(parts.password or '')}".encode()
        headers["Authorization"] = "Basic " + base64.b64encode(secret).decode()
        bare = parts.netloc.rpartition("@")[2]
        address = urlunsplit((parts.scheme, bare, parts.path, parts.query, ""))
    if parts.scheme == "file" and parts.path.endswith("/"):
        address += "index.html"
    request = urllib.request.Request(address, headers=headers)
    answer = urllib.request.urlopen(request, timeout=_TIMEOUT, context=host.context)
    return cast("IO[bytes]", answer)


def _address(page: str, file: str, host: _Host) -> str | None:
    """Where a project's page says that a file lies."""
    with _open(page, host) as answer:
        data = answer.read(_MAX_PAGE)
    links: Sequence[str]
    if data.lstrip()[:1] == b"{":
        links = [entry["url"] for entry in loads(data, what=_shown(page))["files"]]
    else:
        parser = _Links()
        parser.feed(data.decode("utf-8", "replace"))
        links = parser.found
    for link in links:
        absolute = urljoin(page, link)
        if unquote(urlsplit(absolute).path).rpartition("/")[2] == file:
            return absolute
    return None


def _download(address: str, target: Path, host: _Host) -> Path:
    with _open(address, host) as answer, target.open("wb") as written:
        while piece := answer.read(CHUNK):
            written.write(piece)
    return target
