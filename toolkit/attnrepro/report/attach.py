"""The block that goes into a pull request (Markdown) or a paper (LaTeX).

Fields of the artifact are foreign text. In Markdown they stand in code spans, where neither HTML,
links, mentions nor emphasis are read; in LaTeX every special character is replaced.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from attnrepro.report.rows import HEADINGS, Row, headline, rows

if TYPE_CHECKING:
    from attnrepro.artifact.verify import Verified

_SAFE_NAME: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,199}")
_LATEX: Final = {
    "\\": r"\textbackslash{}",
    "{": r"\{",
    "}": r"\}",
    "$": r"\$",
    "&": r"\&",
    "#": r"\#",
    "%": r"\%",
    "_": r"\_",
    "^": r"\textasciicircum{}",
    "~": r"\textasciitilde{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    '"': r"\textquotedbl{}",
    "`": r"\textasciigrave{}",
    "-": "{-}",
    "×": r"$\times$",
    "–": "--",
    "µ": r"$\mu$",
}
_FOREIGN: Final = frozenset({"cell", "subject", "clock"})
_PAPER: Final = ("cell", "subject", "status", "median", "interval", "tails", "against", "error")


def markdown(verified: Verified, *, file: str) -> str:
    """Table, statuses, digests and the line that verifies them, as GitHub's Markdown.

    Args:
        verified: the artifact.
        file: its name, shown in the commands.
    """
    seen, name = verified.observations, _file_name(file)
    found = rows(seen)
    kept = [i for i in range(len(HEADINGS)) if any(row.texts()[i] for row in found)]
    lines = [
        f"### {code(_title(verified))}",
        "",
        "| " + " | ".join(HEADINGS[i] for i in kept) + " |",
        "|" + " --- |" * len(kept),
    ]
    lines += ["| " + " | ".join(_cell(row, i) for i in kept) + " |" for row in found]
    lines += ["", f"{_counts(verified)}; {code(headline(seen))}", ""]
    lines += [f"- {code(_reason(row))}" for row in found if row.reason]
    lines += [
        f"- artifact {code(name)}, content {code('sha256:' + verified.statement.content_sha256)}",
        f"- signed by the key {code('sha256:' + verified.signer.fingerprint)}",
        "",
        "```sh",
        f"attnrepro verify {name}",
        "```",
    ]
    return "\n".join(lines) + "\n"


def latex(verified: Verified, *, file: str) -> str:
    """A table with a footnote that names the digests; needs no package."""
    name, digest = _file_name(file), verified.statement.content_sha256
    found = rows(verified.observations)
    columns = [HEADINGS.index(heading) for heading in _PAPER]
    kept = [i for i in columns if any(row.texts()[i] for row in found)]
    lines = [
        r"\begin{table}",
        r"\caption{" + escape_latex(_title(verified)) + "}",
        r"\begin{minipage}{\linewidth}\centering",
        r"\begin{tabular}{" + "l" * len(kept) + "}",
        r"\hline",
        " & ".join(HEADINGS[i] for i in kept) + r" \\",
        r"\hline",
    ]
    lines += [" & ".join(escape_latex(r.texts()[i]) for i in kept) + r" \\" for r in found]
    note = (
        f"{_counts(verified)}; {headline(verified.observations)}. Median of launch medians with "
        f"its interval over launches. Signed artifact {name}, content sha256:"
    )
    lines += [
        r"\hline",
        r"\end{tabular}",
        r"\par\footnotesize $^{*}$\,"
        + escape_latex(note)
        + rf"\texttt{{{digest[:32]}}} \texttt{{{digest[32:]}}}, key sha256:"
        + rf"\texttt{{{verified.signer.fingerprint[:32]}}} "
        + rf"\texttt{{{verified.signer.fingerprint[32:]}}}. "
        + r"Check: \texttt{"
        + escape_latex(f"attnrepro verify {name}")
        + "}.",
        r"\end{minipage}",
        r"\end{table}",
    ]
    return "\n".join(lines) + "\n"


def code(text: str) -> str:
    """Foreign text as a code span that also holds inside a table cell; empty stays empty."""
    shown = "".join(c if c.isprintable() else " " for c in text)
    # No backslash can guard a backtick in a span, and a bar ends a cell even there.
    shown = " ".join(shown.replace("`", "'").replace("|", "¦").split())
    return f"`{shown}`" if shown else ""


def escape_latex(text: str) -> str:
    """Foreign text for LaTeX: specials replaced, other non-ASCII characters as a question mark."""
    shown = "".join(c if c.isprintable() else " " for c in text)
    return "".join(_LATEX.get(c) or (c if c.isascii() else "?") for c in shown)


def _cell(row: Row, column: int) -> str:
    text = row.texts()[column]
    if HEADINGS[column] in _FOREIGN:
        return code(text)
    return text.replace("_", r"\_")  # numbers, units, names of the schema's own enumerations


def _title(verified: Verified) -> str:
    return str(verified.manifest.get("title") or verified.manifest["name"])


def _counts(verified: Verified) -> str:
    counts = verified.observations["summary"]
    return ", ".join(f"{counts[name]} {name}" for name in ("passed", "failed", "unsupported"))


def _reason(row: Row) -> str:
    return f"{row.cell}, {row.subject}: {row.status}: {row.reason}"


def _file_name(file: str) -> str:
    """The name where it is harmless in shell, Markdown and LaTeX; else a stand-in."""
    return file if _SAFE_NAME.fullmatch(file) else "FILE.attnrepro"
