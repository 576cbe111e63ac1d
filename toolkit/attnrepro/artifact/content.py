"""content.zip: which members it holds, and building it."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from attnrepro import jsonio
from attnrepro.artifact import container, rocrate
from attnrepro.errors import InvalidDocument, Rejected

if TYPE_CHECKING:
    from collections.abc import Mapping

MANIFEST: Final = "manifest.json"
REPEATABLE: Final = "repeatable.json"
OBSERVATIONS: Final = "observations.json"
VERDICTS: Final = "verdicts.json"
SBOM: Final = "sbom.spdx.json"

REQUIRED: Final = frozenset({MANIFEST, REPEATABLE, OBSERVATIONS, rocrate.NAME})
FOLDERS: Final = ("samples/", "telemetry/", "logs/", "recipe/", "sbom/")
SECTIONS: Final = ("inputs", "semantics", "outputs", "execution")
"""Sections of repeatable.json that are compared apart."""


@dataclass(frozen=True, kw_only=True)
class Content:
    """Everything that one run leaves behind, before it is signed."""

    manifest: bytes
    """Canonical (RFC 8785) bytes of the manifest as run."""
    repeatable: dict[str, Any]
    """What must repeat bit for bit; integers and strings only."""
    observations: dict[str, Any]
    """What was seen; integers and strings only."""
    files: Mapping[str, bytes] = field(default_factory=dict)
    """Further members: `samples/`, `telemetry/`, `logs/`, `recipe/`, `sbom.spdx.json`."""

    def members(self) -> dict[str, bytes]:
        """All members by name, `ro-crate-metadata.json` made from the others.

        Raises InvalidDocument for a name in `files` that a content does not hold, and for a real
        number in `repeatable` or `observations`.
        """
        for name in self.files:
            if name in REQUIRED or not is_member_name(name):
                message = f"{name[:80]!r} is no further member of a content"
                raise InvalidDocument(message, rule="content.member")
        for name, document in ((REPEATABLE, self.repeatable), (OBSERVATIONS, self.observations)):
            if pointer := find_real(document):
                message = f"{name} holds a real number at {pointer}; write it as a hex string"
                raise InvalidDocument(message, rule="content.real")
        members = {
            MANIFEST: self.manifest,
            REPEATABLE: jsonio.canonical(self.repeatable),
            OBSERVATIONS: jsonio.canonical(self.observations),
            **self.files,
        }
        manifest = jsonio.loads(self.manifest, what=MANIFEST)
        crate = rocrate.describe(members, manifest=manifest, observations=self.observations)
        members[rocrate.NAME] = jsonio.canonical(crate)
        return members

    def to_zip(self) -> bytes:
        """The bytes of content.zip. Raises InvalidDocument where a member cannot be packed."""
        try:
            return container.write(self.members())
        except Rejected as error:
            message = f"the content cannot be packed: {error.message}"
            hint = "rename the file: letters, digits, . _ - and at most 8 levels"
            raise InvalidDocument(message, rule=error.rule, hint=hint) from None


def is_member_name(name: str) -> bool:
    """Whether a content may hold a member of this name."""
    return name in REQUIRED or name in (SBOM, VERDICTS) or name.startswith(FOLDERS)


def section_digests(repeatable: Mapping[str, Any]) -> dict[str, str]:
    """SHA-256 of the canonical bytes of each section of repeatable.json."""
    return {
        section: hashlib.sha256(jsonio.canonical(repeatable[section])).hexdigest()
        for section in SECTIONS
    }


def _overflows(text: str) -> bool:
    if not text.removeprefix("-").startswith("0x"):
        return False
    try:
        float.fromhex(text)
    except OverflowError:
        return True
    except ValueError:
        return False  # another text that begins so
    return False


def find_real(value: object, pointer: str = "") -> str | None:
    """JSON pointer of the first real number in a parsed document; None if there is none.

    A hexadecimal float string that no double holds is one as well.
    """
    if isinstance(value, float) or (isinstance(value, str) and _overflows(value)):
        return pointer or "/"
    items: list[tuple[str, object]] = []
    if isinstance(value, dict):
        items = [(str(key), item) for key, item in value.items()]
    elif isinstance(value, list):
        items = [(str(index), item) for index, item in enumerate(value)]
    for key, item in items:
        escaped = key.replace("~", "~0").replace("/", "~1")
        if found := find_real(item, f"{pointer}/{escaped}"):
            return found
    return None
