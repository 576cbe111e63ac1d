"""A small client of the OCI distribution protocol: one image, by digest, as a root tar.

Everything is checked by digest, so that neither the registry nor a proxy needs to be believed.
"""

from __future__ import annotations

import gzip
import hashlib
import re
import shutil
import tarfile
import time
import urllib.error
import urllib.parse
import urllib.request
from typing import IO, TYPE_CHECKING, Final, cast

from attnrepro.errors import BuildFailed
from attnrepro.images.sources import reachable
from attnrepro.images.tree import CHUNK
from attnrepro.jsonio import JsonObject, loads

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from attnrepro.images.sources import BaseImage
    from attnrepro.images.store import Store

_ACCEPT: Final = ", ".join(
    [
        "application/vnd.oci.image.index.v1+json",
        "application/vnd.oci.image.manifest.v1+json",
        "application/vnd.docker.distribution.manifest.list.v2+json",
        "application/vnd.docker.distribution.manifest.v2+json",
    ]
)
_MAX_MANIFEST: Final = 4 << 20
_TIMEOUT: Final = 60.0


class _Registry:
    """One repository of one registry; a bearer token is fetched when asked for."""

    def __init__(self, url: str, repository: str) -> None:
        self._base = f"{url}/v2/{repository}"
        self._repository = repository
        self._token: str | None = None

    def open(self, path: str, accept: str = "*/*") -> IO[bytes]:
        try:
            return self._request(f"{self._base}/{path}", accept)
        except urllib.error.HTTPError as error:
            challenge = error.headers.get("WWW-Authenticate", "")
            if error.code != 401 or not challenge.lower().startswith("bearer "):
                raise
        self._token = self._fetch_token(challenge)
        return self._request(f"{self._base}/{path}", accept)

    def _request(self, url: str, accept: str) -> IO[bytes]:
        request = urllib.request.Request(url, headers={"Accept": accept})
        if self._token is not None:
            # Unredirected: a registry sends blobs from elsewhere, which must not see the token.
            request.add_unredirected_header("Authorization", f"Bearer {self._token}")
        return cast("IO[bytes]", urllib.request.urlopen(request, timeout=_TIMEOUT))

    def _fetch_token(self, challenge: str) -> str:
        fields = dict(re.findall(r'(\w+)="([^"]*)"', challenge))
        query = {"scope": f"repository:{self._repository}:pull"}
        if "service" in fields:
            query["service"] = fields["service"]
        url = f"{fields['realm']}?{urllib.parse.urlencode(query)}"
        with urllib.request.urlopen(url, timeout=_TIMEOUT) as answer:
            document = loads(answer.read(_MAX_MANIFEST), what="the registry's token")
        return cast("str", document.get("token") or document["access_token"])


def pull(
    image: BaseImage,
    *,
    url: str,
    store: Store,
    folder: Path,
    root: Path,
    offline: bool,
    progress: Callable[[str], None],
) -> None:
    """Fetch an image by digest and write its flattened root file system.

    Args:
        image: What to fetch.
        url: Root of the registry.
        store: Keeps the manifest and layers as they came.
        folder: For decompressed layers.
        root: The tar to write.
        offline: Take everything from the store.
        progress: Told what is fetched.

    Raises:
        BuildFailed: not reachable, not there, or not what its digest says.
    """
    client = _Registry(url, image.repository)
    reference = f"{image.registry}/{image.repository}@{image.digest}"
    try:
        manifest = _manifest(client, image, store, offline, url)
        paths = []
        for layer in manifest["layers"]:
            _blob(client, layer, store, offline, progress)
            paths.append(_unpacked(store.blob(layer["digest"]), layer["mediaType"], folder))
    except (OSError, urllib.error.URLError) as error:
        message = f"cannot fetch the base image {reference}: {error}"
        raise BuildFailed(
            message, hint="check the network, or build a stack with a Debian base"
        ) from None
    except (KeyError, TypeError, ValueError) as error:
        message = f"the registry's answer for {reference} is not an image ({error!r})"
        raise BuildFailed(message) from None
    flatten(paths, root)


def resolve(repository: str, tag: str, *, url: str) -> str:
    """Digest that a tag has now, from the manifest's own bytes.

    Raises BuildFailed if the registry cannot be asked.
    """
    started = time.monotonic()
    why = reachable(url)
    if why is None:
        try:
            with _Registry(url, repository).open(f"manifests/{tag}", _ACCEPT) as answer:
                return "sha256:" + hashlib.sha256(answer.read(_MAX_MANIFEST)).hexdigest()
        except (OSError, urllib.error.URLError) as error:
            why = str(error)
    message = (
        f"no answer for {repository}:{tag}: {why}; tried for {time.monotonic() - started:.1f} s"
    )
    raise BuildFailed(message, hint="resolve it where the registry is reachable")


def check_reachable(image: BaseImage, url: str) -> None:
    """Raise BuildFailed, with the source's key and the time it cost, where no host answers."""
    started = time.monotonic()
    if why := reachable(url):
        spent = time.monotonic() - started
        message = (
            f"the source {image.registry} of the base image {image.repository}:{image.tag} is not "
            f"reachable ({why}; tried for {spent:.1f} s)"
        )
        raise BuildFailed(message, hint="build where it is, or a stack that needs no registry")


def _manifest(
    client: _Registry, image: BaseImage, store: Store, offline: bool, url: str
) -> JsonObject:
    digest = image.digest
    for _ in range(2):
        if not store.intact(digest):
            if offline:
                message = f"the store lacks the base image {digest}, and --offline fetches none"
                raise BuildFailed(message, hint="build once without --offline")
            check_reachable(image, url)
            with client.open(f"manifests/{digest}", _ACCEPT) as answer:
                data = answer.read(_MAX_MANIFEST)
            if "sha256:" + hashlib.sha256(data).hexdigest() != digest:
                message = f"the registry's manifest is not {digest}"
                raise BuildFailed(message)
            store.add_bytes(data)
        document: JsonObject = loads(store.read(digest), what=f"the manifest {digest}")
        if "manifests" not in document:
            return document
        digest = _choose(document["manifests"])
    message = f"{image.digest} is an index of indexes"
    raise BuildFailed(message)


def _choose(manifests: Sequence[Mapping[str, JsonObject]]) -> str:
    for entry in manifests:
        platform = entry.get("platform", {})
        if (platform.get("os"), platform.get("architecture")) == ("linux", "amd64"):
            return cast("str", entry["digest"])
    message = "the base image has no linux/amd64 manifest"
    raise BuildFailed(message)


def _blob(
    client: _Registry,
    layer: Mapping[str, str],
    store: Store,
    offline: bool,
    progress: Callable[[str], None],
) -> None:
    digest = layer["digest"]
    if store.intact(digest):
        return
    if offline:
        message = f"the store lacks the base layer {digest}, and --offline fetches none"
        raise BuildFailed(message, hint="build once without --offline")
    progress(f"fetching base layer {digest[7:19]}, {int(layer['size']) / 1e6:.0f} MB")
    with store.workspace("layer") as folder:
        path = folder / "layer"
        sha256 = hashlib.sha256()
        with client.open(f"blobs/{digest}") as answer, path.open("wb") as file:
            while piece := answer.read(CHUNK):
                sha256.update(piece)
                file.write(piece)
        if "sha256:" + sha256.hexdigest() != digest:
            message = f"the registry's layer is not {digest}"
            raise BuildFailed(message)
        store.adopt(path, digest)


def _unpacked(path: Path, media_type: str, folder: Path) -> Path:
    """The layer as an uncompressed tar."""
    if media_type.endswith("tar"):
        return path
    if not media_type.endswith("gzip"):
        message = f"a base layer is {media_type}; only tar and gzip are read"
        raise BuildFailed(message)
    target = folder / f"{path.name}.tar"
    with gzip.open(path) as packed, target.open("wb") as file:
        shutil.copyfileobj(packed, file, CHUNK)
    return target


def flatten(layers: Sequence[Path], root: Path) -> None:
    """Write the root file system that layers give, lowest first, whiteouts applied.

    Hard links become files: the file they name may be hidden by an upper layer.
    """
    owner: dict[str, int] = {}
    for index, path in enumerate(layers):
        with tarfile.open(path, "r:") as archive:
            names = [_clean(member.name) for member in archive]
        for name in names:
            folder, _, last = name.rpartition("/")
            if last == ".wh..wh..opq":
                _remove_below(owner, folder)
            elif last.startswith(".wh."):
                gone = f"{folder}/{last[4:]}" if folder else last[4:]
                owner.pop(gone, None)
                _remove_below(owner, gone)
        for name in names:
            if not name.rpartition("/")[2].startswith(".wh."):
                owner[name] = index
    with tarfile.open(root, "w", format=tarfile.PAX_FORMAT) as output:
        for index, path in enumerate(layers):
            with tarfile.open(path, "r:") as archive:
                for member in archive:
                    if owner.get(_clean(member.name)) != index:
                        continue
                    content = None
                    if member.isreg() or member.islnk():
                        content = archive.extractfile(member)
                    if member.islnk():
                        member.size = archive._find_link_target(member).size  # type: ignore[attr-defined]
                        member.type = tarfile.REGTYPE
                    output.addfile(member, content)


def _clean(name: str) -> str:
    return "/".join(part for part in name.split("/") if part not in ("", "."))


def _remove_below(owner: dict[str, int], folder: str) -> None:
    prefix = f"{folder}/" if folder else ""
    for name in [name for name in owner if name.startswith(prefix)]:
        del owner[name]
