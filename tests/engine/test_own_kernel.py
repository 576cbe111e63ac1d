"""A pull request's base and head as two stacks and two subjects of one manifest.

The kernel is thirty lines: textbook attention, in a base version and in a head version that does
three tenths of its work once more. Its two stacks extend the CPU stack by a wheel and an adapter.
"""

from __future__ import annotations

import base64
import hashlib
import json
import zipfile
from typing import TYPE_CHECKING, Any

import pytest
from test_end_to_end import attnrepro

from attnrepro.artifact import trust
from attnrepro.artifact.verify import Verified, verify
from attnrepro.compare import published
from attnrepro.engines import select
from attnrepro.errors import AttnreproError
from attnrepro.images.store import Store

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(1200)]

KERNEL = '''
"""A toy kernel: textbook attention."""
import torch


def again(attend, q, k, v):
    """The work that this version does beyond what is needed."""
    rows = int(q.shape[2] * {share})
    if rows:
        attend(q[:, :, :rows], k, v)
'''

ADAPTER = '''
"""The toy kernel: textbook attention as in `eager`, after the extra work of the version."""
from __future__ import annotations

import toy_attn
import torch
from attnrepro_runner.backends.eager import EagerBackend, _EagerPrepared


class _Prepared(_EagerPrepared):
    def _call(self, q, k, v, group):
        toy_attn.again(self._plain, q, k, v)
        return super()._call(q, k, v, group)

    def _plain(self, q, k, v):
        k, v = (x.float().repeat_interleave(self._shared_heads, dim=1) for x in (k, v))
        weights = torch.exp(torch.matmul(q.float(), k.transpose(-2, -1)))
        return torch.matmul(weights / weights.sum(-1, keepdim=True), v)


class Toy(EagerBackend):
    name = "toy"

    def prepare(self, workload, options, tensors):
        return _Prepared(workload, tensors)


BACKEND = Toy()
'''

MANIFEST: dict[str, Any] = {
    "schema": "attnrepro.manifest/1",
    "name": "pull-request",
    "image": {"stack": "toy-base"},
    "device": {"vendor": "cpu", "threads": 1},
    "workload": {
        "phase": "prefill",
        "batch": 1,
        "seqlen_q": 256,
        "seqlen_k": 256,
        "heads_q": 8,
        "head_dim": 64,
        "dtype": "float32",
        "layout": "bhsd",
    },
    "subjects": [
        {"id": "base", "backend": "toy", "role": "baseline"},
        {"id": "same", "backend": "toy", "role": "candidate"},
        {"id": "head", "backend": "toy", "role": "candidate", "image": {"stack": "toy-head"}},
    ],
    "timing": {
        "launches": 5,
        "samples": [24, 24],
        "cell_seconds": 30,
        "tails": [],
        "cold_start": False,
        "memory": False,
    },
}


def write_stack(folder: Path, name: str, share: float) -> Path:
    """A folder for `attnrepro build`, with the kernel's wheel and its adapter."""
    stack = folder / name
    stack.mkdir()
    version = "1.0" if share == 0 else "1.1"
    info = f"toy_attn-{version}.dist-info"
    files = {
        "toy_attn/__init__.py": KERNEL.format(share=share),
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: toy-attn\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\n"
        "Tag: py3-none-any\n",
    }
    record = ""
    for path, text in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=")
        record += f"{path},sha256={digest.decode()},{len(text.encode())}\n"
    wheel = stack / f"toy_attn-{version}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for path, text in (files | {f"{info}/RECORD": f"{record}{info}/RECORD,,\n"}).items():
            archive.writestr(zipfile.ZipInfo(path, (2020, 1, 1, 0, 0, 0)), text)
    (stack / "adapter.py").write_text(ADAPTER)
    image = {
        "schema": "attnrepro.stack/1",
        "stack": name,
        "revision": "r1",
        "title": f"Toy kernel {version}",
        "extends": "cpu-torch2.13",
        "source": {
            "kind": "wheel",
            "file": wheel.name,
            "sha256": hashlib.sha256(wheel.read_bytes()).hexdigest(),
        },
        "kernels": [{"name": "toy-attn", "version": version}],
        "adapter": "adapter.py",
    }
    (stack / "image.json").write_text(json.dumps(image))
    return stack


@pytest.fixture(scope="module")
def engine() -> str:
    try:
        name = select.choose(None).name
    except AttnreproError as error:
        pytest.skip(f"no engine answers here: {error.message}")
    if Store().find("cpu-torch2.13") is None:
        pytest.skip("the image cpu-torch2.13 is not built here")
    return name


@pytest.fixture(scope="module")
def verified(engine: str, tmp_path_factory: pytest.TempPathFactory) -> Verified:
    place = tmp_path_factory.mktemp("own")
    (place / "pr.json").write_text(json.dumps(MANIFEST))
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("ATTNREPRO_HOME", str(place / "state"))
        patched.chdir(place)
        for name, share in (("toy-base", 0), ("toy-head", 0.3)):
            built = attnrepro("build", str(write_stack(place, name, share)), "--engine", engine)
            assert built.returncode == 0, built.stderr
        ran = attnrepro("run", "pr.json", "--engine", engine)
        assert ran.returncode == 0, ran.stdout + ran.stderr
        return verify(place / "pull-request.attnrepro", trust=trust.load())


def comparison(verified: Verified, subject: str) -> dict[str, Any]:
    found = {s["subject"]: s for s in verified.observations["cells"][0]["subjects"]}
    (only,) = found[subject]["comparisons"]
    result: dict[str, Any] = only
    return result


def test_slower_head_is_slower(verified: Verified) -> None:
    subjects = {s["subject"]: s for s in verified.observations["cells"][0]["subjects"]}
    medians = published.launch_medians(subjects["base"]["timing"]["host"])
    scatter = max(medians) / min(medians)
    if scatter > 1.25:
        pytest.skip(f"others use this machine: launches of one kernel scatter by {scatter:.2f}x")
    found = comparison(verified, "head")
    assert found["verdict"] == "SLOWER"
    assert 1 / 1.6 < float.fromhex(found["ratio"]) < 1 / 1.1


def test_equal_code_gets_no_verdict_of_a_difference(verified: Verified) -> None:
    assert comparison(verified, "same")["verdict"] in ("SAME", "AMBIGUOUS")


def test_artifact_names_both_images_and_carries_both_recipes(verified: Verified) -> None:
    keys = [image["key"] for image in verified.predicate["images"]]
    assert sorted(keys) == ["toy-base-r1", "toy-head-r1"]
    for key in keys:
        assert f"recipe/images/{key}/adapter.py" in verified.members
        assert f"sbom/{key}.spdx.json" in verified.members


def test_both_versions_give_the_same_bits(verified: Verified) -> None:
    digests = verified.repeatable["outputs"]["digests"]["c000"]
    assert digests["base"] == digests["same"] == digests["head"]
