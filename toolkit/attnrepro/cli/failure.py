"""How a failure is told: all problems at once, what to do, and no traceback on the terminal."""

from __future__ import annotations

import errno
import json
from contextlib import suppress
from typing import Any, Final

from attnrepro.cli.output import murmur, printable, say
from attnrepro.errors import AttnreproError, Interrupted, UsageError
from attnrepro.files import shortened

_PATH_ERRORS: Final = (
    errno.ENAMETOOLONG,
    errno.ENOTDIR,
    errno.EISDIR,
    errno.ELOOP,
    errno.EROFS,
)


def report(error: BaseException, *, as_json: bool) -> int:
    """Tell an error (stderr; as JSON on stdout where asked) and return its exit code."""
    known = _as_known(error)
    trace = None if known else _write_trace(error)
    message = known.message if known else f"internal error: {type(error).__name__}: {error}"
    hint = known.hint if known else f"please report it; the full trace is in {trace}"
    code = known.exit_code if known else 70
    if as_json:
        _print_json(
            {
                "exit_code": code,
                "message": message,
                "hint": hint,
                "rule": known.rule if known else None,
                "problems": [
                    {
                        "pointer": problem.pointer,
                        "found": problem.found,
                        "allowed": problem.allowed,
                        "fix": problem.fix,
                    }
                    for problem in (known.problems if known else ())
                ],
                "trace": trace,
            }
        )
    rule = f" [{known.rule}]" if known and known.rule else ""
    lines = [f"attnrepro: {message}{rule}"]
    if known:
        lines += [f"  {problem.line()}" for problem in known.problems]
    if hint:
        lines.append(f"  {hint}")
    murmur(printable("\n".join(lines)) + "\n")
    return code


def usage_report(error: Exception, *, as_json: bool) -> int:
    """Tell a wrong command line as typer words it; a bare `attnrepro` shows its help. Exit 2."""
    show: Any = error
    message = str(show.format_message())
    if as_json:
        _print_json(
            {
                "exit_code": 2,
                "message": message,
                "hint": None,
                "rule": None,
                "problems": [],
                "trace": None,
            }
        )
    else:
        show.show()
    return 2


def _as_known(error: BaseException) -> AttnreproError | None:
    if isinstance(error, AttnreproError):
        return error
    if isinstance(error, KeyboardInterrupt) or type(error).__name__ == "Abort":
        return Interrupted("interrupted", hint="the same command goes on where it stopped")
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        where = f" ({error.filename})" if error.filename else ""
        return UsageError(
            f"no space left on the disk{where}; nothing half-written was kept",
            hint="free some space (attnrepro store gc), or choose another folder",
        )
    if isinstance(error, PermissionError) and error.filename:
        return UsageError(
            f"no permission for {error.filename}", hint="check its owner and mode, or use another"
        )
    if isinstance(error, OSError) and error.errno in _PATH_ERRORS and error.filename:
        message = f"{shortened(error.filename)}: {error.strerror}"
        return UsageError(message, hint="name another file or folder")
    return None


def _write_trace(error: BaseException) -> str:
    import os
    import tempfile
    import traceback

    text = "".join(traceback.format_exception(error))
    try:
        descriptor, path = tempfile.mkstemp(prefix="attnrepro-trace-", suffix=".txt")
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
    except OSError:
        return "nowhere: no temporary folder could be written"
    return path


def _print_json(error: dict[str, Any]) -> None:
    with suppress(UsageError):  # what failed has been told on stderr, and keeps its code
        say(json.dumps({"error": error}, indent=2) + "\n")
