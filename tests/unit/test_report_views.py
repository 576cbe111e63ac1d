from __future__ import annotations

import copy
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from host_artifacts import make
from host_fakes import FakeEngine

from attnrepro.artifact import trust
from attnrepro.artifact.verify import Verified, verify
from attnrepro.cli import main
from attnrepro.report import html, markdown, terminal
from attnrepro.report.rows import duration, rows
from attnrepro.report.sections import article

HOSTILE = '<script>alert(1)</script>|`x`\x1b[31m\n# no & "quotes" ![i](http://x)'


@pytest.fixture(autouse=True)
def own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, folder in (("HOME", "home"), ("STORE", "store"), ("LOCKS", "locks")):
        monkeypatch.setenv(f"ATTNREPRO_{name}", str(tmp_path / folder))
    (tmp_path / "locks").mkdir()


def hostile(result: dict[str, Any]) -> None:
    result["device"] = result["device"] | {"name": HOSTILE}
    for entry in result["entries"]:
        if "execution" in entry:
            entry["execution"]["kernels"] = [{"name": HOSTILE, "count": 1, "total_ns": None}]
        if entry["subject"] == "slow":
            entry |= {"status": "CRASH", "reason": HOSTILE}


@pytest.fixture
def verified(tmp_path: Path) -> Verified:
    return verify(make(tmp_path).path, trust=trust.load())


@pytest.fixture
def nasty(tmp_path: Path) -> Verified:
    return verify(make(tmp_path, engine=FakeEngine(change=hostile)).path, trust=trust.load())


class Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))


def test_html_holds_no_script_and_loads_nothing(nasty: Verified) -> None:
    text = html.render([article(nasty, file="x.attnrepro")])
    parser = Tags()
    parser.feed(text)
    allowed = {
        *("html", "head", "meta", "title", "style", "body", "h1", "h2", "p", "div", "table"),
        *("tr", "th", "td", "svg", "text", "line", "circle"),
    }
    assert {tag for tag, _ in parser.tags} <= allowed
    for _, attributes in parser.tags:
        assert not {"src", "href", "onload", "onclick", "xlink:href"} & set(attributes)
    assert "default-src 'none'" in text
    assert "&lt;script&gt;" in text


def test_html_shows_a_mark_for_each_launch(verified: Verified) -> None:
    text = html.render([article(verified, file="x.attnrepro")])
    assert text.count("<circle") == 10
    assert text.count('class="middle"') == 2


def test_markdown_keeps_foreign_text_in_code_spans(nasty: Verified) -> None:
    text = markdown.render([article(nasty, file="x.attnrepro")])
    for line in text.splitlines():
        outside = re.sub(r"`[^`]*`", "", line)
        assert "<script" not in outside
        assert "![i]" not in outside
    assert "\x1b" not in text


def test_report_says_what_ran_and_why_it_failed(nasty: Verified) -> None:
    text = markdown.render([article(nasty, file="x.attnrepro")])
    for heading in ("What this is", "Results", "Launches", "Cold start", "Memory", "What ran"):
        assert f"## {heading}\n" in text
    assert "1 passed, 1 failed, 0 unsupported" in text


def test_table_of_the_terminal(verified: Verified) -> None:
    text = terminal.summary(verified.observations, title="tiny.attnrepro")
    assert "NOT in a container" in text
    assert "Some CPU, 1 thread" in text
    assert "slow: FASTER" in text
    assert "0.50 of bound (out)" in text
    assert "equal in 10 runs" in text
    assert "2 passed, 0 failed, 0 unsupported" in text
    assert "weak baselines: the stack also claims" in text


def test_no_escape_sequence_reaches_the_terminal(
    nasty: Verified, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.run(["report", str(tmp_path / "tiny.attnrepro")]) == 0
    assert "\x1b" not in capsys.readouterr().out


def test_an_interval_stands_with_the_confidence_that_it_reaches(verified: Verified) -> None:
    timing = verified.observations["cells"][0]["subjects"][0]["timing"]
    reached = float(next(iter(timing.values()))["interval"]["confidence"])
    row = rows(verified.observations)[0]
    assert row.interval.endswith(f" ({reached * 100:.3g} %)")
    assert reached < 0.95, "five launches cannot reach it"


def test_row_without_times_is_a_row(verified: Verified) -> None:
    observations = copy.deepcopy(verified.observations)
    subject = observations["cells"][0]["subjects"][0]
    subject |= {"timing": {}, "comparisons": [], "status": "CRASH", "reason": "signal 11"}
    for part in ("bits", "oracle"):
        del subject[part]
    row = rows(observations)[0]
    assert (row.median, row.interval, row.against, row.error, row.bits) == ("", "", "", "", "")
    assert row.reason == "signal 11"


@pytest.mark.parametrize(
    ("ns", "text"),
    [
        (None, ""),
        (0, "0 ns"),
        (999, "999 ns"),
        (1234, "1.234 µs"),
        (12_345_678, "12.35 ms"),
        (123_456_789_012, "123.5 s"),
    ],
)
def test_duration(ns: int | None, text: str) -> None:
    assert duration(ns) == text


def test_compare_of_one_artifact_with_itself(
    verified: Verified, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = str(tmp_path / "tiny.attnrepro")
    assert main.run(["compare", file, file]) == 0
    shown = capsys.readouterr().out
    assert "no difference was found" in shown
    assert shown.count("SAME") == 2


def test_report_goes_to_a_file(
    verified: Verified, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, target = str(tmp_path / "tiny.attnrepro"), tmp_path / "r.html"
    assert main.run(["report", file, file, "--format", "html", "-o", str(target)]) == 0
    assert target.read_text().count("<h1>") == 2
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("kind", ["fifo", "link", "folder"])
def test_report_writes_over_no_device_link_or_folder(
    kind: str, verified: Verified, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / kind
    if kind == "fifo":
        os.mkfifo(target)
    elif kind == "link":
        target.symlink_to(tmp_path / "gone")
    else:
        target.mkdir()
    arguments = ["report", str(tmp_path / "tiny.attnrepro"), "-o", str(target), "--force"]
    assert main.run(arguments) == 2
    assert "no regular file" in capsys.readouterr().err
    assert target.is_symlink() == (kind == "link")
    assert not (tmp_path / "gone").exists()


def test_report_of_a_damaged_file_is_rejected(
    verified: Verified, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "tiny.attnrepro"
    path.write_bytes(path.read_bytes()[:-1])
    assert main.run(["report", str(path)]) == 1
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("verb", ["verify", "show", "compare", "report", "attach"])
def test_reading_needs_no_posix_module(verb: str, verified: Verified, tmp_path: Path) -> None:
    file = str(tmp_path / "tiny.attnrepro")
    more = {"compare": [file], "attach": ["--pr"]}.get(verb, [])
    code = (
        "import sys\n"
        "for name in ('fcntl', 'grp', 'pwd', 'resource', 'termios', 'torch', 'docker'):\n"
        "    sys.modules[name] = None\n"
        "from attnrepro.cli.main import run\n"
        f"sys.exit(run({[verb, file, *more]!r}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(Path(main.__file__).parents[2])},
    )
    assert done.returncode == 0, done.stderr
