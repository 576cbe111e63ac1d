"""Engines that are missing, talk nonsense, or go away in the middle of a run."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tiny_image import make_tiny_image

from attnrepro.engines import closed
from attnrepro.engines.base import ContainerSpec
from attnrepro.engines.docker import DockerEngine
from attnrepro.engines.dockerapi import endpoint
from attnrepro.engines.podman import PodmanEngine
from attnrepro.errors import Unavailable

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [
    pytest.mark.engine,
]


class Proxy:
    """A socket before the real daemon's, which can be cut at any moment as if the daemon died."""

    def __init__(self, path: Path, upstream: str) -> None:
        self._upstream = upstream
        self._open: list[socket.socket] = []
        self._lock, self._is_cut = threading.Lock(), False
        self._server = socket.socket(socket.AF_UNIX)
        self._server.bind(str(path))
        self._server.listen(32)
        self._threads = [threading.Thread(target=self._serve, daemon=True)]
        self._threads[0].start()

    def _serve(self) -> None:
        while True:
            try:
                near = self._server.accept()[0]
            except OSError:
                return
            far = socket.socket(socket.AF_UNIX)
            with self._lock:
                self._open += [near, far]
                if self._is_cut:
                    near.close()
                    far.close()
                    return
            far.connect(self._upstream)
            for source, target in ((near, far), (far, near)):
                thread = threading.Thread(target=self._copy, args=(source, target), daemon=True)
                thread.start()
                self._threads.append(thread)

    @staticmethod
    def _copy(source: socket.socket, target: socket.socket) -> None:
        try:
            while data := source.recv(1 << 16):
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)
        except OSError:
            pass

    def cut(self) -> None:
        with self._lock:
            self._is_cut = True
        for end in (self._server, *self._open):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        self._server.close()
        for thread in self._threads:
            thread.join(10)
        for end in self._open:
            end.close()


@pytest.fixture
def upstream() -> str:
    try:
        url = endpoint()
        DockerEngine(url).facts()
    except Unavailable as error:
        pytest.skip(f"docker: {error.message}")
    if not url.startswith("unix://"):
        pytest.skip(f"docker is not on a local socket: {url}")
    return url.removeprefix("unix://")


@pytest.fixture
def proxy(upstream: str, tmp_path: Path) -> Iterator[Proxy]:
    made = Proxy(tmp_path / "p.sock", upstream)
    yield made
    made.cut()


def spec_for(tmp_path: Path) -> ContainerSpec:
    return ContainerSpec(
        image=make_tiny_image(tmp_path, tag="vanish"),
        command=("/bin/sh", "-c", "echo begun; sleep 8"),
        mounts=(),
        uid=0,
        gid=0,
        name=closed.container_name(),
    )


def when_begun(log: Path, act: object) -> threading.Thread:
    def wait() -> None:
        deadline = time.monotonic() + 30
        while not (log.exists() and log.read_bytes()) and time.monotonic() < deadline:
            time.sleep(0.05)
        time.sleep(0.5)  # by then the engine is being waited for
        act()  # type: ignore[operator]

    thread = threading.Thread(target=wait)
    thread.start()
    return thread


def test_docker_dies_in_mid_run(proxy: Proxy, upstream: str, tmp_path: Path) -> None:
    spec = spec_for(tmp_path)
    thread = when_begun(tmp_path / "log", proxy.cut)
    began = time.monotonic()
    with pytest.raises(Unavailable, match="went away"):
        DockerEngine(f"unix://{tmp_path}/p.sock").run(spec, log=tmp_path / "log")
    thread.join()
    assert time.monotonic() - began < 7, "it must not wait for the container's own end"
    # The daemon is only unreachable: its container is taken away for the next test.
    DockerEngine(f"unix://{upstream}")._remove(spec.name)


def test_podman_dies_in_mid_run(tmp_path: Path) -> None:
    engine = PodmanEngine()
    try:
        engine.facts()
    except Unavailable as error:
        pytest.skip(f"podman: {error.message}")
    spec = spec_for(tmp_path)

    def kill() -> None:
        for entry in Path("/proc").iterdir():
            if entry.name.isdecimal():
                try:
                    words = (entry / "cmdline").read_bytes().split(b"\0")
                except OSError:
                    continue
                if words[0] == b"podman" and f"--name={spec.name}".encode() in words:
                    os.kill(int(entry.name), signal.SIGKILL)

    thread = when_begun(tmp_path / "log", kill)
    with pytest.raises(Unavailable, match="killed by signal 9"):
        engine.run(spec, log=tmp_path / "log")
    thread.join()
    gone = subprocess.run(["podman", "container", "exists", spec.name], check=False).returncode
    assert gone == 1


def test_docker_socket_missing(tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match="does not answer") as caught:
        DockerEngine(f"unix://{tmp_path}/none.sock").facts()
    assert caught.value.hint is not None
    assert "doctor" in caught.value.hint


# The SDK drops a connection, unclosed, whose answer it cannot read.
@pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning")
@pytest.mark.parametrize(
    "reply",
    [
        b"garbage\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\n{{{",
        b"HTTP/1.1 500 Internal Server Error\r\nContent-Length: 0\r\n\r\n",
        b"",
    ],
)
def test_docker_socket_talks_garbage(tmp_path: Path, reply: bytes) -> None:
    server = socket.socket(socket.AF_UNIX)
    server.bind(str(tmp_path / "g.sock"))
    server.listen(8)

    def serve() -> None:
        while True:
            try:
                near = server.accept()[0]
            except OSError:
                return
            with near, contextlib.suppress(OSError):
                near.recv(65536)
                near.sendall(reply)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    with pytest.raises(Unavailable):
        DockerEngine(f"unix://{tmp_path}/g.sock").facts()
    server.shutdown(socket.SHUT_RDWR)
    server.close()
    thread.join(10)


def test_podman_that_is_not_installed() -> None:
    with pytest.raises(Unavailable, match="not installed") as caught:
        PodmanEngine("podman-is-not-here").facts()
    assert "apt-get install podman" in (caught.value.hint or "")
