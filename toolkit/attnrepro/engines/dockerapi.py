"""The SDK's client, typed, closed when left, and told where to connect."""

# ruff: noqa: D102 - the SDK documents its methods
from __future__ import annotations

import os
import socket
from contextlib import contextmanager
from typing import IO, TYPE_CHECKING, Any, Final, Protocol, cast

from attnrepro.errors import Unavailable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    import requests

CALL_SECONDS: Final = 30
"""Limit of one ordinary call; loading an image and waiting have none."""
ANY_API: Final = "1.44"
"""Spelt only to ask, without a version in the path, which API version the daemon speaks."""
_DEFAULT_SOCKET: Final = "unix:///var/run/docker.sock"
START_HINT: Final = (
    "start Docker (systemctl start docker), join the group that may use it, point DOCKER_HOST at "
    "its socket, or use podman; attnrepro doctor says what is there"
)


class Api(Protocol):
    """What we call of `docker.APIClient`, whose own types are partial."""

    timeout: int | None
    hooks: dict[str, list[Callable[..., None]]]

    def attach(
        self, container: str, *, stdout: bool, stderr: bool, stream: bool
    ) -> Iterable[bytes]: ...
    def close(self) -> None: ...
    def containers(self, *, all: bool, filters: dict[str, str]) -> list[dict[str, Any]]: ...
    def create_container_from_config(self, config: dict[str, Any], name: str) -> dict[str, Any]: ...
    def info(self) -> dict[str, Any]: ...
    def inspect_container(self, container: str) -> dict[str, Any]: ...
    def inspect_image(self, image: str) -> dict[str, Any]: ...
    def kill(self, container: str) -> None: ...
    def load_image(self, data: IO[bytes], *, quiet: bool) -> Iterable[dict[str, Any]]: ...
    def remove_container(self, container: str, *, force: bool, v: bool) -> None: ...
    def remove_image(self, image: str, *, force: bool) -> None: ...
    def start(self, container: str) -> None: ...
    def version(self, *, api_version: bool) -> dict[str, Any]: ...
    def wait(self, container: str) -> dict[str, Any]: ...


def knock(url: str) -> None:
    """Connect once to a local socket: the SDK words a refusal badly, and leaks the connection."""
    if not url.startswith("unix://"):
        return
    path = "/" + url.removeprefix("unix://").lstrip("/")
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(CALL_SECONDS)
        try:
            probe.connect(path)
        except OSError as error:
            message = f"Docker does not answer at {path}: {error.strerror or error}"
            raise Unavailable(message, hint=START_HINT) from None


@contextmanager
def connection(url: str, api: str) -> Iterator[Api]:
    """Open a client of API version `api`; every connection it made is closed on leaving."""
    import docker

    client = cast("Api", docker.APIClient(base_url=url, version=api, timeout=CALL_SECONDS))
    # The SDK leaves a stream's connection to the garbage collector; we close what came.
    responses: list[requests.Response] = []
    client.hooks["response"].append(lambda response, **_: responses.append(response))
    try:
        yield client
    finally:
        for response in responses:
            response.close()
        client.close()


def endpoint() -> str:
    """Find the address that the user's own docker client would use."""
    if host := os.environ.get("DOCKER_HOST"):
        return host
    from docker.context import ContextAPI
    from docker.errors import DockerException

    name = os.environ.get("DOCKER_CONTEXT")
    try:
        context: Any = ContextAPI.get_context(name) if name else ContextAPI.get_current_context()
    except DockerException as error:
        message = f"Docker's configuration cannot be read: {error}"
        raise Unavailable(message, hint="docker context ls shows the contexts") from None
    if context is not None:
        return str(context.Host or _DEFAULT_SOCKET)
    if name:
        message = f"there is no Docker context {name!r}"
        raise Unavailable(message, hint="docker context ls shows the contexts")
    return _DEFAULT_SOCKET
