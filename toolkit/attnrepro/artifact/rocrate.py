"""ro-crate-metadata.json: the content described for archives and search engines.

RO-Crate 1.1 (JSON-LD). Derived from the other members alone, so it repeats with them.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

NAME: Final = "ro-crate-metadata.json"
_FORMATS: Final = {
    ".json": "application/json",
    ".lock": "text/plain",
    ".txt": "text/plain",
    ".log": "text/plain",
    ".py": "text/x-python",
    ".whl": "application/zip",
}


def describe(
    members: Mapping[str, bytes], *, manifest: Mapping[str, Any], observations: Mapping[str, Any]
) -> dict[str, Any]:
    """The metadata document.

    Args:
        members: every other member of the content by name.
        manifest: parsed `manifest.json`.
        observations: parsed `observations.json`; the run's start and tool are read from it.
    """
    run: Mapping[str, Any] = observations.get("run", {})
    started = str(run.get("started_utc", "1980-01-01T00:00:00Z"))
    names = sorted(members)
    title = str(manifest.get("title") or manifest.get("name") or "attention benchmark")
    graph: list[dict[str, Any]] = [
        {
            "@id": NAME,
            "@type": "CreativeWork",
            "conformsTo": {"@id": "https://w3id.org/ro/crate/1.1"},
            "about": {"@id": "./"},
        },
        {
            "@id": "./",
            "@type": "Dataset",
            "name": title,
            "description": str(manifest.get("description") or title),
            "datePublished": started,
            "license": "The signer's; the recipe and the logs are included for verification.",
            "hasPart": [{"@id": name} for name in names],
            "mentions": {"@id": "#run"},
        },
        {
            "@id": "#run",
            "@type": "CreateAction",
            "name": f"run of {manifest.get('name', 'a manifest')}",
            "startTime": started,
            "instrument": {"@id": "#tool"},
            "object": {"@id": "manifest.json"},
            "result": [{"@id": "repeatable.json"}, {"@id": "observations.json"}],
        },
        {
            "@id": "#tool",
            "@type": "SoftwareApplication",
            "name": "attnrepro",
            "version": str(run.get("tool", "")),
        },
    ]
    graph += [_file(name, members[name]) for name in names]
    return {"@context": "https://w3id.org/ro/crate/1.1/context", "@graph": graph}


def _file(name: str, content: bytes) -> dict[str, Any]:
    suffix = name[name.rfind(".") :] if "." in name else ""
    return {
        "@id": name,
        "@type": "File",
        "contentSize": str(len(content)),
        "encodingFormat": _FORMATS.get(suffix, "application/octet-stream"),
        "sha256": hashlib.sha256(content).hexdigest(),
    }
