"""Ask the kernel's log whether a container's cgroup ran out of memory.

podman 4.3 on v1 cgroups says OOMKilled false for a container that the kernel killed; the log names
the cgroup, and the cgroup's name holds the container's id.
"""

from __future__ import annotations

import os
from pathlib import Path

_KMSG = Path("/dev/kmsg")


def oom_killed(container_id: str, log: Path = _KMSG) -> bool:
    """Tell whether the log holds an out-of-memory kill in the container's cgroup.

    Where the log may not be read (a user without rights), False.
    """
    return any(
        "oom-kill:" in record and container_id in record.partition("oom_memcg=")[2]
        for record in _records(log)
    )


def _records(log: Path) -> list[str]:
    try:
        descriptor = os.open(log, os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return []
    records = []
    try:
        # One read is one record; EAGAIN is the end, EPIPE a record overwritten while we read.
        while True:
            try:
                record = os.read(descriptor, 8192)
            except BrokenPipeError:
                continue
            except OSError:
                break
            if not record:
                break
            records.append(record.decode(errors="replace"))
    finally:
        os.close(descriptor)
    return records
