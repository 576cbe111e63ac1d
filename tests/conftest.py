"""What every test needs of its process."""

from __future__ import annotations

import signal


def pytest_configure() -> None:
    """Take Ctrl-C again where the suite was started in the background, with it ignored.

    Children inherit an ignored signal, and several tests interrupt theirs.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
