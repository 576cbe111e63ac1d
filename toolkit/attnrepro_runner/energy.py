"""Energy of one call: the device's counter round a stretch of calls back to back.

Reading the counter costs milliseconds, so it is read twice and never beside samples. The standard
library alone; runs in the coordinator.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from attnrepro_runner.status import Failure, Status

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

SECONDS: Final = 0.5
"""Of calls between the two readings: twenty updates of an H200's counter."""

_SOURCE: Final = (
    "the device's energy counter round calls back to back, caches warm; the idle device's share is "
    "in it"
)


def measure(
    cell: Mapping[str, object],
    *,
    read: Callable[[], int | None],
    ask: Callable[[Mapping[str, object]], dict[str, object] | Failure],
) -> dict[str, object] | None:
    """Return the `energy` object of a result, or None where nothing can be told.

    Args:
        cell: of the job.
        read: the counter, in mJ; None where there is none.
        ask: the subject's worker.

    """
    if read() is None:
        return None
    ready = ask({"do": "ready", "cell": cell})
    if isinstance(ready, Failure) or ready["status"] != Status.PASS.value:
        return None
    before = read()
    answer = ask({"do": "repeat", "seconds": SECONDS})
    after = read()
    if isinstance(answer, Failure) or before is None or after is None:
        return None
    return {
        "calls": answer["calls"],
        "duration_ns": answer["spent_ns"],
        "energy_mj": after - before,
        "source": _SOURCE,
    }
