"""The OCI artifact under which a content is pushed; its digest is known before any push.

OCI image-spec 1.1, "Guidelines for Artifact Usage". The bytes are those that `oras push` of the
same file with the same annotation writes (Go's field order, no spaces), so a stranger's push of
content.zip arrives at the digest that the statement names.
"""

from __future__ import annotations

import hashlib
import json
from typing import Final

ARTIFACT_TYPE: Final = "application/vnd.attnrepro.result.v1"
CONTENT_TYPE: Final = "application/vnd.attnrepro.content.v1+zip"
MANIFEST_TYPE: Final = "application/vnd.oci.image.manifest.v1+json"
CREATED: Final = "1980-01-01T00:00:00Z"
"""Fixed: a push time would give every push another digest."""

EMPTY_CONFIG: Final = b"{}"


def manifest(content_sha256: str, content_size: int) -> bytes:
    """The OCI manifest of a content.

    Args:
        content_sha256: lower-case hex SHA-256 of content.zip.
        content_size: its length in bytes.
    """
    document = {
        "schemaVersion": 2,
        "mediaType": MANIFEST_TYPE,
        "artifactType": ARTIFACT_TYPE,
        "config": {
            "mediaType": "application/vnd.oci.empty.v1+json",
            "digest": "sha256:" + hashlib.sha256(EMPTY_CONFIG).hexdigest(),
            "size": len(EMPTY_CONFIG),
            "data": "e30=",
        },
        "layers": [
            {
                "mediaType": CONTENT_TYPE,
                "digest": f"sha256:{content_sha256}",
                "size": content_size,
                "annotations": {"org.opencontainers.image.title": "content.zip"},
            }
        ],
        "annotations": {"org.opencontainers.image.created": CREATED},
    }
    return json.dumps(document, separators=(",", ":")).encode("ascii")


def manifest_sha256(content_sha256: str, content_size: int) -> str:
    """Lower-case hex SHA-256 of `manifest`."""
    return hashlib.sha256(manifest(content_sha256, content_size)).hexdigest()
