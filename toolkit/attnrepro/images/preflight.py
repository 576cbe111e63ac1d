"""Before a build: can this host do it, what will it cost, does it fit."""

from __future__ import annotations

import platform
import sys
from typing import TYPE_CHECKING, Final

from attnrepro.errors import BuildFailed, Unavailable
from attnrepro.images import fetch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from attnrepro.images.locks import Deb, Wheel
    from attnrepro.images.spec import Stack
    from attnrepro.images.store import Store

_SPACE_FACTOR: Final = 2.2
"""Free space a build wants, in sizes of its image: the exported tar, the layers, something over."""


def check_host(stack: Stack) -> None:
    """Refuse what this host cannot build. Raises Unavailable."""
    wanted = stack.document["platform"]
    machine = {"x86_64": "amd64", "aarch64": "arm64"}.get(platform.machine(), platform.machine())
    if (here := f"{sys.platform}/{machine}") != wanted:
        message = f"{stack.label} is for {wanted}; this host is {here}"
        raise Unavailable(
            message, hint=f"build on a {wanted} host; verify, show and compare work here"
        )


def announce(
    store: Store,
    stack: Stack,
    items: Sequence[Wheel | Deb],
    progress: Callable[[str], None],
) -> None:
    """Say what a build will cost, and refuse what cannot fit.

    Raises BuildFailed if the disk has too little space.
    """
    to_fetch = sum(item.size for item in fetch.missing(store, items))
    cost = stack.document["cost"]
    wanted = int(cost["image_bytes"] * _SPACE_FACTOR) + to_fetch
    minutes = max(1, round((cost["seconds"] + to_fetch / 10e6) / 60))
    progress(
        f"{stack.label}: {to_fetch / 1e6:.0f} MB to fetch, {wanted / 1e9:.1f} GB of disk while it "
        f"builds, an image of {cost['image_bytes'] / 1e9:.1f} GB, about {minutes} min"
    )
    free = store.free_bytes()
    if free < wanted:
        message = (
            f"{stack.label} wants {wanted / 1e9:.1f} GB of free disk; "
            f"{store.root} has {free / 1e9:.1f} GB"
        )
        raise BuildFailed(message, hint="free some space, or set ATTNREPRO_STORE to another disk")
