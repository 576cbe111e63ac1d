"""The field tables of docs/manifest.md, made from the schema so that they cannot go stale.

python -m attnrepro.manifest.guide docs/manifest.md
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from attnrepro import files, schema, schema_words
from attnrepro.manifest import defaults

if TYPE_CHECKING:
    from collections.abc import Iterator

    from attnrepro.jsonio import JsonObject

BEGIN: Final = "<!-- fields: made by attnrepro.manifest.guide -->"
END: Final = "<!-- end of fields -->"
_HEAD: Final = "| field | allowed | default | meaning |\n|---|---|---|---|\n"


def fields() -> str:
    """Every field of a manifest as Markdown tables, one a section."""
    root = schema.schema_of(defaults.KIND)
    top = list(_rows(root, "", root, nested=False))
    sections = ["### The manifest itself\n\n" + _HEAD + "\n".join(top) + "\n"]
    for name, part in root["properties"].items():
        body = _object(part, root)
        rows = list(_rows(body, f"/{name}", root, nested=True)) if body else []
        if rows:
            about = schema_words.resolve(part, root).get("description", "")
            text = f"### `{name}`\n\n" + (f"{about}\n\n" if about else "")
            sections.append(text + _HEAD + "\n".join(rows) + "\n")
    return "\n".join(sections)


def undescribed() -> list[str]:
    """Pointers of fields whose meaning the schema does not say."""
    root = schema.schema_of(defaults.KIND)
    return [p for p, part, _ in _walk(root, "", root, nested=True) if not part.get("description")]


def insert(page: str) -> str:
    """A page with the tables between its two marks. Raises ValueError where they are missing."""
    before, mark, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not mark or not end:
        message = f"the page lacks {BEGIN} or {END}"
        raise ValueError(message)
    return f"{before}{BEGIN}\n\n{fields()}\n{END}{after}"


def _rows(body: JsonObject, pointer: str, root: JsonObject, *, nested: bool) -> Iterator[str]:
    for path, part, is_required in _walk(body, pointer, root, nested=nested):
        if "default" in part:
            default = f"`{json.dumps(part['default'])}`"
        else:
            default = "required" if is_required else "none"
        allowed = _allowed(part, root)
        yield (
            "| "
            + " | ".join(
                _cell(text) for text in (f"`{path}`", allowed, default, part.get("description", ""))
            )
            + " |"
        )


def _walk(
    body: JsonObject, pointer: str, root: JsonObject, *, nested: bool
) -> Iterator[tuple[str, JsonObject, bool]]:
    for name, part in body.get("properties", {}).items():
        path = f"{pointer}/{name}"
        resolved = schema_words.resolve(part, root)
        yield path, resolved, name in body.get("required", ())
        inner = _object(part, root)
        if nested and inner is not None:
            suffix = "/N" if _is_list(resolved) else ""
            yield from _walk(inner, path + suffix, root, nested=True)


def _object(part: Any, root: JsonObject) -> JsonObject | None:
    """The object with fixed fields that a part allows, or whose list it allows."""
    for branch in schema_words.branches(schema_words.resolve(part, root), root):
        if _is_list(branch):
            branch = schema_words.resolve(branch.get("items", {}), root)
        if "properties" in branch:
            return branch
    return None


def _is_list(part: JsonObject) -> bool:
    return "array" in (part.get("type") or ())


def _allowed(part: JsonObject, root: JsonObject) -> str:
    return schema_words.describe(part, root).replace("one of ", "")


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def main(path: Path) -> None:
    """Rewrite the tables of a page."""
    page = path.read_text(encoding="utf-8")
    files.atomic_write(path, insert(page).encode())


if __name__ == "__main__":
    main(Path(sys.argv[1]))
