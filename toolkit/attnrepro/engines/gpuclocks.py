"""Locking a GPU's clock for a run, by an explicit flag only, and giving it back however it ends.

A guardian process holds the lock: it sets the clock, and resets it when the pipe from this process
closes. So the clock is given back after an error, a signal, and even a kill that nothing can catch.
A device that anybody else uses, or that is divided, is refused: its clock is theirs too.
"""

from __future__ import annotations

import importlib
import signal
import subprocess
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final, Protocol, TextIO, cast

from attnrepro.errors import Unavailable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

LOCKED: Final = "locked"
_SM: Final = 1
_WAIT_S: Final = 20


class _Library(Protocol):
    """The part of `pynvml` that is used, by its own names."""

    NVMLError: type[Exception]

    def nvmlInit(self) -> None: ...
    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> object: ...
    def nvmlDeviceGetMigMode(self, handle: object) -> tuple[int, int]: ...
    def nvmlDeviceGetComputeRunningProcesses(self, handle: object) -> list[object]: ...
    def nvmlDeviceGetMaxClockInfo(self, handle: object, domain: int) -> int: ...
    def nvmlDeviceSetGpuLockedClocks(self, handle: object, low: int, high: int) -> None: ...
    def nvmlDeviceResetGpuLockedClocks(self, handle: object) -> None: ...


class Refused(Exception):
    """The clock is not locked; the message is the reason."""


@contextmanager
def locked(uuid: str, mhz: int) -> Iterator[None]:
    """Hold a device's clock at a frequency for the length of a block.

    Raises Unavailable where it is shared, divided, or its clock cannot be set or given back.
    """
    command = [sys.executable, "-m", "attnrepro.engines.gpuclocks", uuid, str(mhz)]
    with subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as guardian:
        assert guardian.stdin is not None
        assert guardian.stdout is not None
        answer = guardian.stdout.readline().strip()
        if answer != LOCKED:
            message = f"the clock is not locked: {answer or 'its guardian ended'}"
            hint = 'use the policy "observe", or a device of your own as root'
            raise Unavailable(message, hint=hint)
        try:
            yield
        finally:
            guardian.stdin.close()
            said = guardian.stdout.read().strip()
            if guardian.wait(_WAIT_S):
                message = f"the clock may still be locked: {said}"
                raise Unavailable(message, hint="nvidia-smi --reset-gpu-clocks, as root")


def hold(library: _Library, uuid: str, mhz: int, until: Callable[[], object], tell: TextIO) -> int:
    """Lock, say so, wait, reset; the exit status is 0 where the clock is the device's own again.

    Args:
        library: NVML.
        uuid: of the device.
        mhz: clock of its multiprocessors.
        until: returns when the clock is to be given back.
        tell: where to say `locked`, or the reason why not.
    """
    is_locked = False
    try:
        library.nvmlInit()
        handle = library.nvmlDeviceGetHandleByUUID(uuid)
        _refuse(library, handle, mhz)
        # From here on the clock is reset: a call that failed may have set it all the same.
        is_locked = True
        library.nvmlDeviceSetGpuLockedClocks(handle, mhz, mhz)
        tell.write(f"{LOCKED}\n")
        tell.flush()
        until()
    except (library.NVMLError, Refused, OSError) as error:
        _tell(tell, str(error))
        failed = 1
    else:
        failed = 0
    if is_locked:
        try:
            library.nvmlDeviceResetGpuLockedClocks(handle)
        except library.NVMLError as error:
            _tell(tell, f"the reset failed: {error}")
            return 1
    return failed


def _refuse(library: _Library, handle: object, mhz: int) -> None:
    try:
        divided = library.nvmlDeviceGetMigMode(handle)[0]
    except library.NVMLError:
        divided = 0  # a device that cannot be divided
    if divided:
        message = "the device is divided (MIG), and its clock is every part's"
        raise Refused(message)
    if others := len(library.nvmlDeviceGetComputeRunningProcesses(handle)):
        message = f"{others} processes use the device, and its clock is theirs too"
        raise Refused(message)
    highest = library.nvmlDeviceGetMaxClockInfo(handle, _SM)
    if mhz > highest:
        message = f"{mhz} MHz is above the device's {highest}"
        raise Refused(message)


def _tell(tell: TextIO, text: str) -> None:
    try:
        tell.write(f"{text}\n")
        tell.flush()
    except OSError:
        pass  # whoever asked is gone; the reset is what matters


def main(uuid: str, mhz: int) -> int:
    """Be the guardian: reset when standard input closes."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE):
        signal.signal(number, signal.SIG_IGN)
    try:
        library = cast("_Library", importlib.import_module("pynvml"))
    except ImportError as error:
        _tell(sys.stdout, f"nvidia-ml-py is not installed ({error})")
        return 1
    return hold(library, uuid, mhz, sys.stdin.read, sys.stdout)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2])))
