"""The software bill of materials: every .deb and wheel of an image, as SPDX 2.3 JSON.

Deterministic: the same stack gives the same bytes; the document's time is the stack's epoch and its
namespace comes from the recipe digest.
"""

from __future__ import annotations

import io
import json
from datetime import UTC, datetime
from typing import TYPE_CHECKING
from urllib.parse import quote

from attnrepro import __version__

if TYPE_CHECKING:
    from collections.abc import Sequence

    from spdx_tools.spdx.model.package import Package

    from attnrepro.images.locks import Deb, Wheel


def render(
    *,
    name: str,
    recipe_digest: str,
    epoch: int,
    suite: str | None,
    debs: Sequence[Deb],
    wheels: Sequence[Wheel],
    base: tuple[str, str] | None = None,
    source: tuple[str, str] | None = None,
    trees: Sequence[tuple[str, str]] = (),
    vendor: str = "debian",
) -> bytes:
    """SPDX 2.3 JSON of one image.

    Args:
        name: The image's name and revision.
        recipe_digest: `sha256:` and hex; makes the document's namespace.
        epoch: Time of the document, s since 1970.
        suite: Debian suite of the packages.
        debs: Every Debian package of the image.
        wheels: Every Python distribution of the image.
        base: Reference and digest of a registry base, whose own packages are not listed.
        source: File name and SHA-256 of a kernel of the user's own.
        trees: Name and commit of each public source tree that was compiled.
        vendor: Whose packages the debs are, as os-release's ID has it.
    """
    from spdx_tools.spdx.model.actor import Actor, ActorType
    from spdx_tools.spdx.model.document import CreationInfo, Document
    from spdx_tools.spdx.model.relationship import Relationship, RelationshipType
    from spdx_tools.spdx.writer.json.json_writer import write_document_to_stream

    image_id = "SPDXRef-image"
    packages = [_package(image_id, name, recipe_digest.removeprefix("sha256:")[:16], "image")]
    packages += [
        _package(
            f"SPDXRef-deb-{_id(deb.name)}",
            deb.name,
            deb.version,
            "deb",
            file=deb.file,
            sha256=deb.sha256,
            purl=f"pkg:deb/{vendor}/{quote(deb.name)}@{quote(deb.version)}"
            f"?arch={deb.arch}&distro={suite}",
        )
        for deb in sorted(debs, key=lambda deb: deb.name)
    ]
    packages += [
        _package(
            f"SPDXRef-wheel-{_id(wheel.name)}",
            wheel.name,
            wheel.version,
            "wheel",
            file=wheel.file,
            sha256=wheel.sha256,
            purl=f"pkg:pypi/{quote(wheel.name)}@{quote(wheel.version)}",
        )
        for wheel in sorted(wheels, key=lambda wheel: wheel.name)
    ]
    if base is not None:
        reference, digest = base
        packages.append(
            _package(
                "SPDXRef-base",
                reference,
                digest,
                "image",
                sha256=digest.removeprefix("sha256:"),
            )
        )
    if source is not None:
        file, sha256 = source
        packages.append(
            _package("SPDXRef-kernel", file, sha256[:16], "source", file=file, sha256=sha256)
        )
    packages += [
        _package(f"SPDXRef-tree-{_id(tree)}", tree, commit, "source") for tree, commit in trees
    ]
    document = Document(
        creation_info=CreationInfo(
            spdx_version="SPDX-2.3",
            spdx_id="SPDXRef-DOCUMENT",
            name=name,
            document_namespace=f"urn:attnrepro:sbom:{recipe_digest.removeprefix('sha256:')}",
            creators=[Actor(ActorType.TOOL, f"attnrepro-{__version__}")],
            created=datetime.fromtimestamp(epoch, UTC).replace(tzinfo=None),
        ),
        packages=packages,
        relationships=[
            Relationship("SPDXRef-DOCUMENT", RelationshipType.DESCRIBES, image_id),
            *(
                Relationship(image_id, RelationshipType.CONTAINS, package.spdx_id)
                for package in packages[1:]
            ),
        ],
    )
    stream = io.StringIO()
    write_document_to_stream(document, stream, validate=True)
    parsed = json.loads(stream.getvalue())
    return json.dumps(parsed, sort_keys=True, indent=1, ensure_ascii=True).encode() + b"\n"


def _package(
    spdx_id: str,
    name: str,
    version: str,
    kind: str,
    *,
    file: str | None = None,
    sha256: str | None = None,
    purl: str | None = None,
) -> Package:
    from spdx_tools.spdx.model.checksum import Checksum, ChecksumAlgorithm
    from spdx_tools.spdx.model.package import (
        ExternalPackageRef,
        ExternalPackageRefCategory,
        Package,
        PackagePurpose,
    )
    from spdx_tools.spdx.model.spdx_no_assertion import SpdxNoAssertion

    purposes = {
        "image": PackagePurpose.CONTAINER,
        "source": PackagePurpose.SOURCE,
        "deb": PackagePurpose.INSTALL,
        "wheel": PackagePurpose.LIBRARY,
    }
    references = []
    if purl is not None:
        references.append(
            ExternalPackageRef(ExternalPackageRefCategory.PACKAGE_MANAGER, "purl", purl)
        )
    return Package(
        spdx_id=spdx_id,
        name=name,
        version=version,
        download_location=SpdxNoAssertion(),
        files_analyzed=False,
        file_name=file,
        checksums=[Checksum(ChecksumAlgorithm.SHA256, sha256)] if sha256 else [],
        license_concluded=SpdxNoAssertion(),
        license_declared=SpdxNoAssertion(),
        copyright_text=SpdxNoAssertion(),
        external_references=references,
        primary_package_purpose=purposes[kind],
    )


def _id(name: str) -> str:
    """SPDX ids know letters, digits, dots and hyphens only."""
    return name.replace("+", "-plus").replace("_", "-")
