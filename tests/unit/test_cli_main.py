from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import typer

from attnrepro import __version__
from attnrepro.cli import main
from attnrepro.errors import EXIT_CODES, AttnreproError, InvalidDocument, Problem, Unavailable

TOOLKIT = Path(main.__file__).parents[2]


def raising(error: BaseException) -> ModuleType:
    """A verb's module whose verb raises."""
    module = ModuleType("attnrepro.cli.run")

    def run(as_json: bool = typer.Option(False, "--json")) -> None:
        raise error

    module.run = run  # type: ignore[attr-defined]
    return module


@pytest.fixture
def verb_raises(monkeypatch: pytest.MonkeyPatch):  # type: ignore[no-untyped-def]
    def set_up(error: BaseException) -> None:
        monkeypatch.setattr(main, "import_module", lambda name: raising(error))

    return set_up


def test_help_lists_every_verb_without_importing_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["--help"]) == 0
    shown = capsys.readouterr().out
    for verb, line in main.VERBS.items():
        assert f"  {verb} " in shown
        assert line in " ".join(shown.split())


@pytest.mark.parametrize("verb", main.VERBS)
def test_every_verb_is_there_and_has_help(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run([verb, "--help"]) == 0
    assert "--help" in capsys.readouterr().out


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["--version"]) == 0
    assert capsys.readouterr().out == f"attnrepro {__version__}\n"


def test_help_costs_little_more_than_python() -> None:
    def once(*arguments: str) -> float:
        """CPU time, s: the work is imports alone, and a busy machine stretches only the wall."""
        before = os.times()
        subprocess.run(
            [sys.executable, *arguments],
            check=True,
            stdout=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": str(TOOLKIT)},
        )
        after = os.times()
        return (after.children_user + after.children_system) - (
            before.children_user + before.children_system
        )

    bare = min(once("-c", "pass") for _ in range(5))
    ours = min(once("-m", "attnrepro", "--help") for _ in range(5))
    assert ours - bare <= 0.15


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys; from attnrepro.cli import main; main.run(['--help']);"
        "heavy = {'torch', 'numpy', 'docker', 'jsonschema', 'cryptography', 'rich', 'rfc8785'};"
        "sys.exit(repr(heavy & set(sys.modules)) if heavy & set(sys.modules) else 0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(TOOLKIT)},
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("arguments", [["runn"], ["run"], ["run", "--no-such"], ["--no-such"], []])
def test_wrong_command_line_is_usage(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.run(arguments) == 2
    assert capsys.readouterr().err


def test_typo_is_answered_with_what_was_meant(capsys: pytest.CaptureFixture[str]) -> None:
    main.run(["verfy"])
    assert "did you mean 'verify'?" in capsys.readouterr().err


def test_usage_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["verify", "--json"]) == 2
    error = json.loads(capsys.readouterr().out)["error"]
    assert error["exit_code"] == 2
    assert "file" in error["message"].lower()


@pytest.mark.parametrize("kind", AttnreproError.__subclasses__())
def test_error_becomes_its_exit_code(
    kind: type[AttnreproError], verb_raises, capsys: pytest.CaptureFixture[str]
) -> None:
    verb_raises(kind("it went wrong", hint="do this"))
    assert main.run(["run"]) == kind.exit_code
    assert kind.exit_code in EXIT_CODES
    captured = capsys.readouterr()
    assert captured.err == "attnrepro: it went wrong\n  do this\n"
    assert captured.out == ""


def test_all_problems_are_printed(verb_raises, capsys: pytest.CaptureFixture[str]) -> None:
    problems = [Problem(pointer=f"/a/{n}", found="x", allowed="y", fix="write y") for n in range(3)]
    verb_raises(InvalidDocument("m.json is not valid", problems=problems))
    assert main.run(["run"]) == 2
    shown = capsys.readouterr().err.splitlines()
    assert len(shown) == 4
    assert shown[3] == "  /a/2: found x; allowed: y; write y"


def test_errors_as_json(verb_raises, capsys: pytest.CaptureFixture[str]) -> None:
    problem = Problem(pointer="/a", found="x", allowed="y", fix="write y")
    verb_raises(InvalidDocument("not valid", hint="mend it", rule="r.1", problems=[problem]))
    assert main.run(["run", "--json"]) == 2
    assert json.loads(capsys.readouterr().out)["error"] == {
        "exit_code": 2,
        "message": "not valid",
        "hint": "mend it",
        "rule": "r.1",
        "problems": [{"pointer": "/a", "found": "x", "allowed": "y", "fix": "write y"}],
        "trace": None,
    }


@pytest.mark.parametrize("error", [KeyboardInterrupt(), typer.Abort()])
def test_interrupt_is_10(
    error: BaseException, verb_raises, capsys: pytest.CaptureFixture[str]
) -> None:
    verb_raises(error)
    assert main.run(["run"]) == 10
    assert "interrupted" in capsys.readouterr().err


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_signals_unwind_as_ctrl_c_does(
    number: signal.Signals, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    module, temporary = ModuleType("attnrepro.cli.run"), tmp_path / "temporary"

    def run() -> None:
        temporary.touch()
        try:
            signal.raise_signal(number)
        finally:
            temporary.unlink()

    module.run = run  # type: ignore[attr-defined]
    monkeypatch.setattr(main, "import_module", lambda name: module)
    before = signal.getsignal(number)
    assert main.run(["run"]) == 10
    assert not temporary.exists()
    assert signal.getsignal(number) is before


def test_unexpected_error_leaves_a_trace_and_prints_none(
    verb_raises, capsys: pytest.CaptureFixture[str]
) -> None:
    verb_raises(ZeroDivisionError("by nothing"))
    assert main.run(["run"]) == 70
    shown = capsys.readouterr().err
    assert "Traceback" not in shown
    assert "ZeroDivisionError: by nothing" in shown
    trace = Path(shown.strip().rsplit(" ", 1)[1])
    assert "Traceback" in trace.read_text()
    trace.unlink()


@pytest.mark.parametrize(
    ("number", "words"), [(errno.ENOSPC, "no space left"), (errno.EACCES, "no permission")]
)
def test_disk_and_permission_are_the_users_to_mend(
    number: int, words: str, verb_raises, capsys: pytest.CaptureFixture[str]
) -> None:
    verb_raises(OSError(number, os.strerror(number), "/some/file"))
    assert main.run(["run"]) == 2
    shown = capsys.readouterr().err
    assert words in shown
    assert "/some/file" in shown


def test_escape_sequences_of_a_foreign_file_do_not_reach_the_terminal(
    verb_raises, capsys: pytest.CaptureFixture[str]
) -> None:
    verb_raises(Unavailable("\x1b[31mred\x1b[0m \u202e"))
    main.run(["run"])
    assert "\x1b" not in capsys.readouterr().err


def test_exit_of_a_verb_is_kept(verb_raises) -> None:
    verb_raises(typer.Exit(4))
    assert main.run(["run"]) == 4


def test_closed_pipe_ends_quietly() -> None:
    code = (
        "import sys; from attnrepro.cli import main\n"
        "main.VERBS.update({f'verb{n}': 'x' * 70 for n in range(20000)})\n"
        "sys.exit(main.run(['--help']))"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(TOOLKIT)},
    )
    assert process.stdout is not None
    assert process.stderr is not None
    with process:
        process.stdout.read(10)
        process.stdout.close()
        shown = process.stderr.read()
    assert shown == b""
    assert process.returncode == 0


CLOSED = {
    "stdout closed": (">&-", 0),
    "stderr closed": ("2>&-", 0),
    "no reader": ("| (exec <&-; sleep 0.5)", 0),
    "full disk": (">/dev/full", 2),
}


@pytest.mark.parametrize("case", CLOSED)
@pytest.mark.parametrize(("arguments", "code"), [("matrix --json", 0), ("verify gone --json", 2)])
def test_output_that_cannot_be_written_changes_no_verdict(
    case: str, arguments: str, code: int, tmp_path: Path
) -> None:
    redirection, own = CLOSED[case]
    script = f"{sys.executable} -m attnrepro {arguments} {redirection}; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(
        ["bash", "-c", script],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == (code or own), done.stderr
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr


def test_a_terminal_of_another_encoding_gets_escapes(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "attnrepro", "verify", "b\u00e4d\u2013file"],
        cwd=tmp_path,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(sys.path),
            "PYTHONIOENCODING": "ascii:strict",
        },
        capture_output=True,
        check=False,
    )
    assert done.returncode == 2
    assert b"b\\xe4d\\u2013file" in done.stderr


@pytest.mark.parametrize("verb", ["verify", "show", "check"])
def test_a_path_that_cannot_be_is_usage(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run([verb, "x" * 5000]) == 2
    assert "too long" in capsys.readouterr().err
    assert main.run([verb, "/dev/null/x"]) == 2
