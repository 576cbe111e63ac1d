"""Time since the coordinator's process began, so that it fits an exact JSON integer.

Nanoseconds since 1970 are beyond 2^53, and so are those since boot after 104 days.
"""

from __future__ import annotations

import time
from typing import Final

_BEGAN_NS: Final = time.monotonic_ns()


def elapsed_ns() -> int:
    """Return nanoseconds since this module was imported."""
    return time.monotonic_ns() - _BEGAN_NS
