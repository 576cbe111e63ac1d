from __future__ import annotations

import pytest

from attnrepro.images import hostrecord
from attnrepro.resources import images_dir

TORCH = {"torch": "2.11.0+cu130", "nvidia-cuda-runtime": "13.0.96"}


@pytest.mark.parametrize(
    ("distribution", "version", "claims"),
    [
        ("nvidia-cudnn-frontend", "1.32.0", ["cudnn-frontend-1.x"]),
        ("nvidia-cudnn-frontend", "1.33.0", []),
        ("flashinfer-python", "0.7.4", ["flashinfer-python"]),
        ("flashinfer-python", "0.7.5", []),
        ("flash-attn", "2.8.3", ["flash-attn-2.8.3-cuda"]),
        ("flash-attn", "2.8.3.post2+cu13", ["flash-attn-2.8.3-cuda"]),
        ("flash-attn", "2.9.0", []),
        ("flash-attn-4", "4.0.0b36", ["flash-attn-4-4.0.0b36"]),
        ("flash-attn-4", "4.0.0b37", []),
    ],
)
def test_a_hosts_package_has_the_claims_of_its_own_version_alone(
    distribution: str, version: str, claims: list[str]
) -> None:
    found = hostrecord._claims(TORCH | {distribution: version})
    assert found == ["torch-2.11.0-cuda13.0", *claims]
    told = hostrecord._unclaimed(TORCH | {distribution: version})
    assert [line.split(":")[0].strip() for line in told] == (
        [] if claims else [f"{distribution} {version}"]
    )


def test_every_release_that_a_host_may_hold_is_written_down() -> None:
    for _, _, name in hostrecord._CLAIMS:
        assert (images_dir() / "claims" / f"{name}.json").is_file()
