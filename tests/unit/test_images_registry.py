"""The registry client against a registry of our own that can also lie."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import tarfile
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING

import pytest

from attnrepro.errors import BuildFailed
from attnrepro.images import registry, tree
from attnrepro.images.sources import BaseImage
from attnrepro.images.store import Store

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

MANIFEST = "application/vnd.oci.image.manifest.v1+json"
INDEX = "application/vnd.oci.image.index.v1+json"
LAYER = "application/vnd.oci.image.layer.v1.tar+gzip"


def digest(data: bytes) -> str:
    return "sha256:" + hashlib.sha256(data).hexdigest()


def layer(*members: tuple[str, bytes | str]) -> bytes:
    """A tar; bytes are a file, text that begins with '>' a hard link, other text a link."""
    sink = io.BytesIO()
    with tarfile.open(fileobj=sink, mode="w") as archive:
        for name, what in members:
            info = tarfile.TarInfo(name)
            if isinstance(what, bytes):
                info.size = len(what)
                archive.addfile(info, io.BytesIO(what))
            else:
                info.type = tarfile.LNKTYPE if what.startswith(">") else tarfile.SYMTYPE
                info.linkname = what.lstrip(">")
                archive.addfile(info)
    return sink.getvalue()


class Registry(ThreadingHTTPServer):
    """Blobs and manifests by path; a token is wanted where `realm` is set."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.answers: dict[str, bytes] = {}
        self.asked: list[str] = []
        self.token: str | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def put(self, kind: str, data: bytes) -> str:
        self.answers[f"/v2/a/b/{kind}/{digest(data)}"] = data
        return digest(data)

    def image(self, *layers: bytes, media_type: str = LAYER) -> str:
        packed = [gzip.compress(data) if "gzip" in media_type else data for data in layers]
        entries = [
            {"mediaType": media_type, "digest": self.put("blobs", data), "size": len(data)}
            for data in packed
        ]
        manifest = {"schemaVersion": 2, "mediaType": MANIFEST, "layers": entries}
        return self.put("manifests", json.dumps(manifest).encode())


class Handler(BaseHTTPRequestHandler):
    server: Registry

    def do_GET(self) -> None:
        self.server.asked.append(self.path)
        token = self.server.token
        if self.path.startswith("/token"):
            self.answer(200, json.dumps({"token": token}).encode())
        elif token is not None and self.headers.get("Authorization") != f"Bearer {token}":
            challenge = f'Bearer realm="{self.server.url}/token",service="x"'
            self.answer(401, b"", {"WWW-Authenticate": challenge})
        elif self.path in self.server.answers:
            self.answer(200, self.server.answers[self.path])
        else:
            self.answer(404, b"")

    def answer(self, code: int, data: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(code)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Registry]:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    made = Registry()
    thread = threading.Thread(target=made.serve_forever, args=(0.01,))
    thread.start()
    yield made
    made.shutdown()
    thread.join()
    made.server_close()


def pull(server: Registry, found: str, tmp_path: Path, *, offline: bool = False) -> dict[str, str]:
    """Path to content or link of what a digest gives."""
    root = tmp_path / "root.tar"
    work = tmp_path / "work"
    work.mkdir(exist_ok=True)
    registry.pull(
        BaseImage(registry="test", repository="a/b", tag="1", digest=found),
        url=server.url,
        store=Store(tmp_path / "store"),
        folder=work,
        root=root,
        offline=offline,
        progress=lambda _: None,
    )
    with root.open("rb") as file:
        return {
            entry.path: entry.target or b"".join(tree.chunks(file, entry)).decode()
            for entry in tree.read(root, fixed=False)
        }


def test_layers_lie_over_each_other(server: Registry, tmp_path: Path) -> None:
    lower = layer(("a", b"1"), ("d/x", b"x"), ("d/y", b"y"), ("o/old", b"o"), ("b", "a"))
    upper = layer(
        ("a", b"2"), ("d/.wh.x", b""), ("o/.wh..wh..opq", b""), ("o/new", b"n"), ("l", ">a")
    )
    found = server.image(lower, upper)
    assert pull(server, found, tmp_path) == {
        **{"a": "2", "d/y": "y", "o/new": "n", "b": "a", "l": "2"},
    }


def test_a_hard_link_outlives_the_name_it_points_to(server: Registry, tmp_path: Path) -> None:
    found = server.image(layer(("a", b"1"), ("l", ">a")), layer((".wh.a", b"")))
    assert pull(server, found, tmp_path) == {"l": "1"}


def test_an_index_leads_to_this_platform(server: Registry, tmp_path: Path) -> None:
    right = server.image(layer(("right", b"")), media_type=LAYER.removesuffix("+gzip"))
    wrong = server.image(layer(("wrong", b"")))
    entries = [
        {"digest": wrong, "platform": {"os": "linux", "architecture": "arm64"}},
        {"digest": right, "platform": {"os": "linux", "architecture": "amd64"}},
    ]
    index = {"schemaVersion": 2, "mediaType": INDEX, "manifests": entries}
    found = server.put("manifests", json.dumps(index).encode())
    assert pull(server, found, tmp_path) == {"right": ""}
    del entries[1]
    found = server.put("manifests", json.dumps(index).encode())
    with pytest.raises(BuildFailed, match="no linux/amd64"):
        pull(server, found, tmp_path)


def test_a_token_is_fetched_when_asked_for(server: Registry, tmp_path: Path) -> None:
    server.token = "let-me-in"
    assert pull(server, server.image(layer(("a", b"1"))), tmp_path) == {"a": "1"}
    assert "/token?scope=repository%3Aa%2Fb%3Apull&service=x" in server.asked


def test_the_second_pull_asks_for_nothing_and_works_offline(
    server: Registry, tmp_path: Path
) -> None:
    found = server.image(layer(("a", b"1")))
    with pytest.raises(BuildFailed, match="--offline"):
        pull(server, found, tmp_path, offline=True)
    pull(server, found, tmp_path)
    server.asked.clear()
    assert pull(server, found, tmp_path, offline=True) == {"a": "1"}
    assert server.asked == []


@pytest.mark.parametrize("kind", ["manifests", "blobs"])
def test_a_registry_that_lies_is_found_out(server: Registry, tmp_path: Path, kind: str) -> None:
    found = server.image(layer(("a", b"1")))
    for path in server.answers:
        if f"/{kind}/" in path:
            server.answers[path] += b" "
    with pytest.raises(BuildFailed, match=r"registry's (manifest|layer) is not sha256"):
        pull(server, found, tmp_path)
    assert not (tmp_path / "root.tar").exists()


def test_what_is_not_there_or_not_read_is_said(server: Registry, tmp_path: Path) -> None:
    with pytest.raises(BuildFailed, match="404"):
        pull(server, "sha256:" + "ab" * 32, tmp_path)
    packed = server.image(layer(("a", b"1")), media_type=LAYER.replace("gzip", "zstd"))
    with pytest.raises(BuildFailed, match="only tar and gzip"):
        pull(server, packed, tmp_path)
    nonsense = server.put("manifests", b'{"layers": 7}')
    with pytest.raises(BuildFailed, match="not an image"):
        pull(server, nonsense, tmp_path)


def test_an_unreachable_registry_costs_seconds(server: Registry, tmp_path: Path) -> None:
    class Gone(Registry):
        url = "http://127.0.0.1:9"  # type: ignore[assignment]

    gone = Gone()
    gone.server_close()
    with pytest.raises(BuildFailed, match="not reachable"):
        pull(gone, "sha256:" + "ab" * 32, tmp_path)
