"""Every error that a user can meet, and its exit code.

One base, one exit code a meaning; the table stands in `EXIT_CODES` and nowhere else. Code below
the command line raises these and never prints or exits; `attnrepro.cli.main` maps them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

EXIT_CODES: Final[dict[int, str]] = {
    0: "done, all required verdicts good",
    1: "rejected (verify)",
    2: "usage or invalid manifest",
    3: "intact, signer unknown",
    4: "ran, some cells failed",
    5: "outputs differ within scope",
    6: "image differs",
    7: "performance not consistent, or --fail-on met",
    8: "engine or device unavailable",
    9: "build or fetch failed",
    10: "interrupted, resumable",
    70: "internal error",
}


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One thing wrong with an input file, named so that it can be mended without a search."""

    pointer: str
    """JSON pointer (RFC 6901) to the field; "" is the whole document."""
    found: str
    """What stands there, shortened to one line."""
    allowed: str
    """What may stand there."""
    fix: str
    """What to do."""

    def line(self) -> str:
        """One line for a terminal."""
        return f"{self.pointer or '/'}: found {self.found}; allowed: {self.allowed}; {self.fix}"


class AttnreproError(Exception):
    """Base of all errors that are told to the user without a traceback."""

    exit_code: ClassVar[int] = 70

    def __init__(
        self,
        message: str,
        *,
        hint: str | None = None,
        rule: str | None = None,
        problems: Sequence[Problem] = (),
    ) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        """What to do next, in one sentence."""
        self.rule = rule
        """Stable id of the violated rule, where there is one (verify's `--json`)."""
        self.problems = tuple(problems)


class Rejected(AttnreproError):
    """An artifact that verify rejects. `rule` is always set."""

    exit_code = 1


class UsageError(AttnreproError):
    """The command line, an option or a path is wrong."""

    exit_code = 2


class InvalidDocument(AttnreproError):
    """A manifest, image record, trust file or job is not valid; all problems at once."""

    exit_code = 2


class UnknownSigner(AttnreproError):
    """Intact, but the key is not in the verifier's trust file."""

    exit_code = 3


class CellsFailed(AttnreproError):
    """The run finished and its artifact is written, but some required cells did not pass."""

    exit_code = 4


class OutputsDiffer(AttnreproError):
    """A rerun within the declared scope gave other bits."""

    exit_code = 5


class ImageDiffers(AttnreproError):
    """Two builds, or a build and its record, have different digests."""

    exit_code = 6


class PerformanceDiffers(AttnreproError):
    """A required performance verdict was not met."""

    exit_code = 7


class Unavailable(AttnreproError):
    """The engine or the device is not there, is busy, or vanished."""

    exit_code = 8


class BuildFailed(AttnreproError):
    """Fetching or building an image failed."""

    exit_code = 9


class Interrupted(AttnreproError):
    """Stopped by the user or a signal; the run folder can be resumed."""

    exit_code = 10
