"""The bill of materials is valid SPDX, whole, and the same every time."""

from __future__ import annotations

import json

from attnrepro.images import sbom, spec


def render(**more: object) -> bytes:
    stack = spec.resolve("cpu-torch2.13@r1")
    arguments: dict[str, object] = {
        "name": stack.label,
        "recipe_digest": stack.recipe_digest,
        "epoch": stack.epoch,
        "suite": "bookworm",
        "debs": stack.debs,
        "wheels": stack.wheels,
        **more,
    }
    return sbom.render(**arguments)  # type: ignore[arg-type]


def test_every_package_is_listed_with_its_digest() -> None:
    stack = spec.resolve("cpu-torch2.13@r1")
    document = json.loads(render())
    assert document["spdxVersion"] == "SPDX-2.3"
    digests = {
        item["checksums"][0]["checksumValue"]
        for item in document["packages"]
        if item.get("checksums")
    }
    assert digests == {item.sha256 for item in (*stack.debs, *stack.wheels)}
    assert len(document["packages"]) == 1 + len(stack.debs) + len(stack.wheels)
    ids = [item["SPDXID"] for item in document["packages"]]
    assert len(set(ids)) == len(ids)
    purls = [
        ref["referenceLocator"]
        for item in document["packages"]
        for ref in item.get("externalRefs", [])
    ]
    assert "pkg:pypi/torch@2.13.0%2Bcpu" in purls
    assert any(purl.startswith("pkg:deb/debian/g%2B%2B@") for purl in purls)


def test_it_is_the_same_every_time_and_in_any_order() -> None:
    stack = spec.resolve("cpu-torch2.13@r1")
    assert render() == render(debs=stack.debs[::-1], wheels=stack.wheels[::-1])
    assert json.loads(render())["creationInfo"]["created"] == "2026-07-11T10:00:00Z"
    assert render(epoch=1) != render()


def test_a_registry_base_and_a_kernel_are_named() -> None:
    document = json.loads(
        render(
            debs=[],
            base=("docker.io/library/python", "sha256:" + "ab" * 32),
            source=("kernel.tar", "cd" * 32),
        )
    )
    by_id = {item["SPDXID"]: item for item in document["packages"]}
    assert by_id["SPDXRef-base"]["versionInfo"] == "sha256:" + "ab" * 32
    assert by_id["SPDXRef-kernel"]["checksums"][0]["checksumValue"] == "cd" * 32
