"""Images of an artifact that was made on a host's own root."""

from __future__ import annotations

import lzma
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from attnrepro import carried, packing, treelist
from attnrepro.artifact import trust
from attnrepro.artifact.verify import Verified, verify
from attnrepro.errors import Unavailable
from attnrepro.manifest.model import ImageRef

HEADLINE = Path(__file__).parents[2] / "manifests/hopper-headline/reference.attnrepro"


@pytest.fixture(scope="module")
def headline() -> Verified:
    return verify(HEADLINE, trust=trust.TrustStore())


class OneImage:
    """A store with at most one image, of the name asked for."""

    def __init__(self, image: Any = None) -> None:
        self.image = image

    def by_digest(self, digest: str) -> Any:
        found = self.image is not None and self.image.manifest_digest == digest
        return self.image if found else None

    def find(self, stack: str, revision: str | None) -> Any:
        assert (stack, revision) == ("host-torch", "r1")
        return self.image

    def archive(self, _record: Any) -> Path:
        return Path("/dev/null")


def image(digest: str, listing: bytes, kind: str = "host-rootfs") -> Any:
    return SimpleNamespace(
        stack="host-torch",
        revision="r1",
        name="localhost/attnrepro/host-torch:r1",
        manifest_digest=digest,
        config_digest=digest,
        python="/opt/env/bin/python3",
        document={"base": {"kind": kind}},
        recipe={},
        sbom=b"",
        listing=listing,
    )


def ask(headline: Verified, store: OneImage) -> tuple[carried.RecipeImages, Any, list[str]]:
    told: list[str] = []
    images = carried.RecipeImages(headline, store=store)  # type: ignore[arg-type]
    found = images.get(ImageRef(stack="host-torch", revision=None, digest=None), told.append)
    return images, found, told


def listing_of(headline: Verified) -> bytes:
    return headline.members[f"{packing.IMAGES_FOLDER}host-torch-r1{treelist.SUFFIX}"]


def test_another_hosts_root_is_replaced_by_this_hosts_and_named(headline: Verified) -> None:
    lines = lzma.decompress(listing_of(headline)).splitlines(keepends=True)
    own = image("sha256:" + "1f" * 32, b"".join(lines[:-1]))
    images, found, told = ask(headline, OneImage(own))
    assert found.identity.manifest_digest == own.manifest_digest
    assert found.used.rebuild_status == "this host's own root: differs"
    assert "another host's root" in told[0]
    assert images.first_difference is not None
    assert "only in the" in images.first_difference


def test_a_root_that_differs_in_times_alone_is_said_to(headline: Verified) -> None:
    own = image("sha256:" + "1f" * 32, lzma.decompress(listing_of(headline)))
    images, _, _ = ask(headline, OneImage(own))
    assert images.first_difference is not None
    assert images.first_difference.startswith("no path: kind, mode, owner and content")


def test_the_same_root_on_another_host_is_the_image(headline: Verified) -> None:
    digest = headline.predicate["images"][0]["manifest_digest"]
    images, found, told = ask(headline, OneImage(image(digest, listing_of(headline))))
    assert found.used.rebuild_status == "found in the store by its digest"
    assert (images.first_difference, told) == (None, [])


@pytest.mark.parametrize(
    "store", [OneImage(), OneImage(image("sha256:" + "1f" * 32, b"", "debian"))]
)
def test_a_host_without_an_image_of_its_own_is_told_the_ways_on(
    headline: Verified, store: OneImage
) -> None:
    with pytest.raises(Unavailable, match="one host's root") as caught:
        ask(headline, store)
    assert "bundle host-torch" in (caught.value.hint or "")
    assert "--stack" in (caught.value.hint or "")
