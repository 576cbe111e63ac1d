"""How much memory workers may take, and how much they do."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable

_SHARE: Final = 0.9
"""Of the memory that is there; the rest is the coordinator's, the page cache's and the kernel's."""


def memory_limit(asked: int | None, root: Path = Path("/")) -> int:
    """Return the bytes that all workers together may hold resident.

    The least of what the manifest asks, 0.9 of the control group's limit, and 0.9 of the memory
    that is free now: a worker is ended with a reason before the kernel ends one at random.
    """
    bounds = [int(_SHARE * available(root))]
    if (group := group_limit(root)) is not None:
        bounds.append(int(_SHARE * group))
    if asked is not None:
        bounds.append(asked)
    return min(bounds)


def available(root: Path = Path("/")) -> int:
    """Return MemAvailable in bytes."""
    for line in (root / "proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def group_limit(root: Path = Path("/")) -> int | None:
    """Return the memory limit of this control group, version 2 or 1, as a container sees it."""
    for name in ("memory.max", "memory/memory.limit_in_bytes"):
        with suppress(OSError, ValueError):
            value = int((root / "sys/fs/cgroup" / name).read_text())
            # Version 1 says "no limit" by a number near 2^63.
            return value if value < 1 << 60 else None
    return None


def kernel_kills(root: Path = Path("/")) -> int | None:
    """Return how many processes of this control group the kernel ended for want of memory."""
    for name in ("memory.events", "memory/memory.oom_control"):
        with suppress(OSError, ValueError):
            for line in (root / "sys/fs/cgroup" / name).read_text().splitlines():
                key, _, value = line.partition(" ")
                if key == "oom_kill":
                    return int(value)
    return None


def resident(pids: Iterable[int], root: Path = Path("/")) -> int:
    """Return the resident bytes of processes; one that is gone counts nothing."""
    page = os.sysconf("SC_PAGE_SIZE")
    total = 0
    for pid in pids:
        with suppress(OSError, IndexError):
            total += int((root / f"proc/{pid}/statm").read_text().split()[1]) * page
    return total
