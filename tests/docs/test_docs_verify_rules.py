"""Every rule that the code can name is in the table, and the table names no other."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "toolkit" / "attnrepro"
COMPUTED = {
    # f"trust.{standing.value}", f"schema.{kind}", _refuse(section, …)
    *("trust.expired", "trust.not_yet_valid"),
    *("schema.manifest", "schema.repeatable", "schema.observations"),
    *("crosscheck.semantics", "crosscheck.outputs", "crosscheck.execution"),
}


def _named(path: Path) -> set[str]:
    """Rules that a module names: `rule="…"`, and the first argument of its `_refuse`."""
    tree = ast.parse(path.read_text())
    found = set()
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        name = getattr(node.func, "id", getattr(node.func, "attr", ""))
        if name == "_refuse" and node.args and isinstance(node.args[0], ast.Constant):
            rule = str(node.args[0].value)
            found.add(rule if "." in rule else f"{path.stem}.{rule}")
        if name == "_object" and isinstance(node.args[2], ast.Constant):
            found.add(f"bundle.{node.args[2].value}")
        for keyword in node.keywords:
            if keyword.arg == "rule" and isinstance(keyword.value, ast.Constant):
                found.add(str(keyword.value.value))
    return found


def test_table_is_complete() -> None:
    modules = [*(PACKAGE / "artifact").glob("*.py"), PACKAGE / "cli" / "verify.py"]
    named = set().union(*(_named(path) for path in modules)) | COMPUTED
    page = (ROOT / "docs" / "verify-rules.md").read_text()
    listed = re.findall(r"^\| `([a-z0-9_.]+)` \|", page, re.MULTILINE)
    assert len(listed) == len(set(listed))
    assert set(listed) == named
