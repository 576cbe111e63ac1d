"""Which engine a run uses."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Final

from attnrepro.engines.docker import DockerEngine
from attnrepro.engines.host import HostEngine
from attnrepro.engines.podman import PodmanEngine
from attnrepro.errors import Unavailable, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from attnrepro.engines.base import Engine

ENGINES: Final = ("docker", "podman", "host")

AnyEngine = DockerEngine | PodmanEngine | HostEngine

_MAKERS: Final[Mapping[str, Callable[[], AnyEngine]]] = {
    "docker": DockerEngine,
    "podman": PodmanEngine,
    "host": HostEngine,
}


def choose(name: str | None, *, makers: Mapping[str, Callable[[], Engine]] = _MAKERS) -> Engine:
    """Choose an engine that answers: the named one, else Docker, else podman.

    The bare host is used only when it is named: it contains nothing.

    Raises UsageError for an unknown name, Unavailable (exit 8) where none answers, with the fix.
    """
    if name is not None:
        if name not in makers:
            message = f"{name!r} is not an engine"
            raise UsageError(message, hint=f"use one of {', '.join(makers)}")
        engine = makers[name]()
        engine.facts()
        return engine
    reasons = []
    for candidate in ("docker", "podman"):
        try:
            engine = makers[candidate]()
            engine.facts()
        except Unavailable as error:
            reasons.append(f"{candidate}: {error.message}")
            continue
        return engine
    message = "no container engine answers. " + "; ".join(reasons)
    raise Unavailable(message, hint=install_hint())


def install_hint() -> str:
    """Say how this user gets an engine."""
    install = (
        "attnrepro doctor --fix installs podman"
        if os.getuid() == 0
        else "sudo apt-get install podman, or attnrepro doctor --fix as root"
    )
    return f"{install}; --engine host runs without a container, and says so"
