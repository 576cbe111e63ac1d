"""A host's own root as an image, on a real Docker with the classic store."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING

import pytest
from small_host import PYTHON, SITE, make_host, make_wheel

from attnrepro.engines import closed
from attnrepro.engines.base import ContainerSpec
from attnrepro.engines.docker import DockerEngine
from attnrepro.errors import Unavailable
from attnrepro.images import hostroot
from attnrepro.images.store import Store
from attnrepro.images.wheelfiles import read_wheel
from attnrepro.usedimages import ready, rebuild_status

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.engine


@pytest.fixture(autouse=True)
def usual_umask() -> Iterator[None]:
    before = os.umask(0o022)
    yield
    os.umask(before)


@pytest.fixture
def engine() -> DockerEngine:
    made = DockerEngine()
    try:
        facts = made.facts()
    except Unavailable as error:
        pytest.skip(f"docker: {error.message}")
    if facts.store != "classic":
        pytest.skip(f"docker's store is {facts.store}; this procedure needs the classic one")
    return made


def test_host_becomes_an_image_that_runs(engine: DockerEngine, tmp_path: Path) -> None:
    root = tmp_path / "root"
    public = make_host(root)
    altered = root / SITE / "torch/lib/libtorch.so"
    altered.write_bytes(b"\x7fELF other")
    kernel = make_wheel(
        tmp_path,
        "fa3-fwd",
        "0.0.3",
        {"fa3/__init__.py": b"k = 5\n", "fa3/_C.so": b"\x7fELF fa3"},
        ("torch",),
    )
    script = b"#!/bin/sh\necho compiles in $CUDA_HOME\n"
    compiler = make_wheel(
        tmp_path, "nvidia-cuda-nvcc", "13.0.88", {"nvidia/cu13/bin/nvcc": script}, ()
    )
    # Both hold one file, and stand on one base.
    rival = make_wheel(tmp_path, "flash-attn", "2.8.3", {"fa3/__init__.py": b"k = 2\n"}, ())
    store = Store(tmp_path / "store")
    told: list[str] = []
    digests = {kernel.name: "ab" * 32, compiler.name: "cd" * 32}
    os.umask(0o077)  # a hardened host's, which must not keep the image's own user out
    record, other = hostroot.build(
        engine=engine,
        store=store,
        sets=[
            hostroot.KernelSet(stack="host-torch-fa3", wheels=[kernel, compiler], digests=digests),
            hostroot.KernelSet(stack="host-torch-fa2", wheels=[rival], digests={}),
        ],
        public=[read_wheel(public["torch"]), read_wheel(public["nvidia-cuda-runtime"])],
        progress=told.append,
        root=root,
        python=PYTHON,
        roots=["torch", "numpy"],
    )
    try:
        assert store.find("host-torch") is None
        found = store.find("host-torch-fa3")
        assert found is not None
        assert found.manifest_digest == record.manifest_digest
        assert record.document["base"]["kind"] == "host-rootfs"
        assert "cannot be rebuilt" in rebuild_status(found)
        host = json.loads(record.recipe["host.json"])
        torch, runtime = host["public_wheels"]
        assert (torch["identical"], torch["differing"]) == (False, ["torch/lib/libtorch.so"])
        assert (runtime["identical"], runtime["missing"]) == (True, [])
        assert host["kernel_wheels"] == [
            [kernel.name, "ab" * 32],
            [compiler.name, "cd" * 32],
        ]
        assert host["debian_packages"] == [["libc6", "2.39-0"]]
        assert sorted(host["distributions"]) == [
            "fa3-fwd",
            "numpy",
            "nvidia-cuda-nvcc",
            "nvidia-cuda-runtime",
            "sympy",
            "torch",
        ]
        assert json.loads(record.recipe["claims.json"])["include"] == [
            "torch-2.11.0-cuda13.0",
            "fa3-fwd-0.0.3",
        ]
        assert sum(line.startswith("importing") for line in told) == 1
        assert other.document["layers"][0] == record.document["layers"][0]
        assert other.document["layers"][1:] != record.document["layers"][1:]
        names = {p["name"] for p in json.loads(record.sbom)["packages"]}
        assert {"libc6", "torch", "fa3-fwd"} <= names

        image = ready(found, store, rebuild_status="x").identity
        script = """
        cat /etc/shadow /home/user/.ssh/id_ed25519 /var/lib/secret /opt/other/file 2>/dev/null
        ls /etc /opt/env/lib/python3.12/site-packages
        ls /opt/env/lib/python3.12/site-packages/fa3/__pycache__
        ls /opt/env/lib/python3.12/site-packages/torch/__pycache__
        cat /opt/env/lib/python3.12/site-packages/fa3/__init__.py
        nvcc
        ls -l $CUDA_HOME $CUDA_HOME/lib
        ls $CUDA_HOME/lib/stubs
        """
        spec = ContainerSpec(
            image=image,
            command=("/bin/sh", "-c", script),
            mounts=(),
            uid=12345,
            gid=12345,
            name=closed.container_name(),
        )
        closed.preflight(engine, spec, log=tmp_path / "log")
        engine.run(spec, log=tmp_path / "log")
        log = (tmp_path / "log").read_text()
        words = set(log.split())
        assert {"passwd", "torch", "numpy", "sympy", "fa3", "k"} <= words
        assert {"jax", "cuda-13.0", "shadow", "ssh", "environment"} & words == set()
        assert "secret" not in log
        assert "__init__.cpython-312.pyc" in log
        # A library that compiles where it runs finds a toolkit laid out as an installer does it.
        assert f"compiles in /{SITE}/nvidia/cu13" in log
        assert {"lib", "libcudart.so.13", "libcuda.so"} <= words
    finally:
        for one in (record, other):
            engine.remove_image(ready(one, store, rebuild_status="x").identity)
        assert store.archive(record).is_file()
