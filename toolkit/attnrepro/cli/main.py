"""The command `attnrepro`: one typer application, and the one place that ends the process.

A verb's module is imported when that verb runs, so that `--help` costs little more than Python.
Every error becomes its exit code here (`attnrepro.errors.EXIT_CODES`).
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final, NoReturn, cast

import typer
from typer.core import TyperGroup

from attnrepro import __version__
from attnrepro.cli.failure import report, usage_report
from attnrepro.cli.output import say, silence, steady_streams
from attnrepro.signals import unwound_by_signals

if TYPE_CHECKING:
    from collections.abc import Sequence

VERBS: Final[dict[str, str]] = {
    "quickstart": "Build, run and verify a small benchmark, from nothing",
    "build": "Build pinned images, or one of your own from a folder",
    "run": "Run a manifest inside its image and sign what came out",
    "verify": "Check an artifact: signature, trust, contents, statistics",
    "show": "Show an artifact: summary, one member, or a table as CSV",
    "rerun": "Repeat an artifact with its own recipe and give verdicts",
    "compare": "Compare two artifacts cell by cell, and say why they differ",
    "report": "Write a report of artifacts as Markdown or HTML",
    "attach": "Write the block that goes into a pull request or a paper",
    "check": "Explain a manifest without running it",
    "matrix": "Show what each pinned release claims to support",
    "doctor": "Say what this machine lacks, with the fix for each",
    "keygen": "Make a signing key",
    "trust": "Add, list or revoke the keys that you trust",
    "store": "List or clean the store of built images",
    "new": "Write a manifest",
    "bundle": "Pack images for a host without a network",
}
"""Verb to its one line in `--help`. The verb is the function of that name in `cli/VERB.py`, or the
typer application `app` there where it has verbs of its own."""


def _load(verb: str) -> Any:
    """The verb's command object; its type is typer's own, which differs between releases."""
    module = import_module(f"attnrepro.cli.{verb}")
    app = getattr(module, "app", None)
    if app is None:
        app = typer.Typer(
            add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False
        )
        app.command(name=verb)(getattr(module, verb))
    return typer.main.get_command(app)


class _LazyGroup(TyperGroup):
    """A group that knows its verbs' names, and imports one when it is asked for."""

    def list_commands(self, ctx: Any) -> list[str]:  # noqa: ARG002 - typer's signature
        return list(VERBS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:  # noqa: ARG002 - typer's signature
        return _load(cmd_name) if cmd_name in VERBS else None

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args[0] not in VERBS and not args[0].startswith("-"):
            from difflib import get_close_matches

            near = get_close_matches(args[0], VERBS, n=1)
            meant = f"; did you mean {near[0]!r}?" if near else ""
            ctx.fail(f"No such command {args[0]!r}{meant}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: Any, formatter: Any) -> None:  # noqa: ARG002 - typer's signature
        with formatter.section("Commands"):
            formatter.write_dl(list(VERBS.items()))


def _version(wanted: bool) -> None:
    if wanted:
        say(f"attnrepro {__version__}\n")
        raise typer.Exit


def _root(
    version: bool = typer.Option(
        False, "--version", callback=_version, is_eager=True, help="Print the version and end."
    ),
) -> None:
    """Pinned containers, signed artifacts, bit-for-bit reruns: attention-kernel benchmarks."""


def _application() -> Any:
    app = typer.Typer(
        cls=_LazyGroup,
        add_completion=False,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        no_args_is_help=True,
    )
    app.callback()(_root)
    return typer.main.get_command(app)


# typer carries click inside itself since 0.20, and used the package before: BadParameter's
# grandparent is ClickException in both.
_ClickError: Final = cast("type[Exception]", typer.BadParameter.__mro__[2])


def run(arguments: Sequence[str]) -> int:
    """Run one command line; the exit code is the result. Prints, and never raises."""
    as_json = "--json" in arguments
    command = _application()
    try:
        with (
            unwound_by_signals(),
            command.make_context("attnrepro", list(arguments)) as context,
        ):
            command.invoke(context)
        sys.stdout.flush()
    except typer.Exit as ending:
        return ending.exit_code
    except BrokenPipeError:
        silence(sys.stdout)  # of typer's own help: our output goes by `say`
        return 0
    except _ClickError as error:
        return usage_report(error, as_json=as_json)
    except (Exception, KeyboardInterrupt) as error:
        return report(error, as_json=as_json)
    return 0


def main() -> NoReturn:
    """Entry point of the command `attnrepro`."""
    steady_streams()
    sys.exit(run(sys.argv[1:]))
