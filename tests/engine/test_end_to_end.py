"""The whole way with the real command line, a real engine and the real image, twice.

Needs the image cpu-torch2.13 in the store (`attnrepro build cpu-torch2.13`, which CI has done).
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from attnrepro.artifact import trust
from attnrepro.artifact.verify import verify
from attnrepro.engines import select
from attnrepro.engines.base import OWNER_LABEL
from attnrepro.errors import AttnreproError
from attnrepro.images.store import Store

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

TOOLKIT = Path(select.__file__).parents[2]

MANIFEST: dict[str, Any] = {
    "schema": "attnrepro.manifest/1",
    "name": "way",
    "image": {"stack": "cpu-torch2.13"},
    "device": {"vendor": "cpu", "threads": 1},
    "workload": {
        "phase": "prefill",
        "batch": 1,
        "seqlen_q": 128,
        "seqlen_k": 128,
        "heads_q": 4,
        "heads_kv": 2,
        "head_dim": 64,
        "dtype": "bfloat16",
        "mask": {"causal": "top_left"},
    },
    "subjects": [
        {"id": "flash", "backend": "sdpa.flash", "role": "candidate"},
        {"id": "eager", "backend": "eager", "role": "baseline"},
    ],
    "bits": {"profile": "portable", "scope": "same_isa"},
    "timing": {
        "launches": 4,
        "samples": [30, 30],
        "cell_seconds": 0.5,
        "tails": [],
        "cold_start": False,
        "memory": False,
    },
}


@pytest.fixture(params=["docker", "podman"])
def engine(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    try:
        select.choose(name)
    except AttnreproError as error:
        pytest.skip(f"{name} does not answer here: {error.message}")
    if Store().find("cpu-torch2.13") is None:
        pytest.skip("the image cpu-torch2.13 is not built here")
    return name


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ATTNREPRO_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "way.json").write_text(json.dumps(MANIFEST))
    return tmp_path


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "attnrepro", *arguments]


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(TOOLKIT)}


def attnrepro(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(*arguments), capture_output=True, text=True, check=False, env=environment()
    )


def owners(engine: str) -> list[str]:
    """Process ids that answer for containers which are there."""
    tool = shutil.which(engine)
    assert tool is not None
    template = f'{{{{.Label "{OWNER_LABEL}"}}}}' if engine == "docker" else "{{.Labels}}"
    found = subprocess.run(
        [tool, "ps", "-a", "--filter", f"label={OWNER_LABEL}", "--format", template],
        capture_output=True,
        text=True,
        check=True,
    )
    return found.stdout.splitlines()


def test_run_verify_rerun(engine: str, place: Path) -> None:
    ran = attnrepro("run", "way.json", "--engine", engine)
    assert ran.returncode == 0, ran.stderr
    verified = verify(place / "way.attnrepro", trust=trust.load())
    assert verified.trusted
    assert verified.predicate["containment"]["contained"] is True
    assert verified.predicate["containment"]["engine"] == engine
    assert verified.observations["summary"] == {"passed": 2, "failed": 0, "unsupported": 0}
    assert attnrepro("verify", "way.attnrepro").returncode == 0
    (place / "nobody.json").write_text('{"schema":"attnrepro.trust/1","threshold":1,"keys":[]}')
    assert attnrepro("verify", "way.attnrepro", "--trust", "nobody.json").returncode == 3

    again = attnrepro("rerun", "way.attnrepro", "--engine", engine, "--json")
    assert again.returncode == 0, again.stderr
    verdicts = json.loads(again.stdout)["verdicts"]
    for name in ("authentic", "image_identical", "kernels_identical", "outputs_identical"):
        assert verdicts[name]["result"] == "yes", verdicts
    assert verify(place / "way.rerun.attnrepro", trust=trust.load()).kind == "rerun"


def test_interrupted_run_leaves_no_container_and_is_resumed(engine: str, place: Path) -> None:
    with subprocess.Popen(
        command("run", "way.json", "--engine", engine),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment(),
    ) as process:
        deadline = time.monotonic() + 300
        while not list(place.glob("attnrepro-runs/*/all/out/tasks/launch-00.json")):
            assert process.poll() is None, process.stdout and process.stdout.read()
            assert time.monotonic() < deadline
            time.sleep(0.2)
        process.send_signal(signal.SIGINT)
        shown, _ = process.communicate(timeout=60)
    assert process.returncode == 10, shown
    assert "the same command goes on from there" in shown
    assert not (place / "way.attnrepro").exists()
    assert not [owner for owner in owners(engine) if f":{process.pid}:" in owner]

    again = attnrepro("run", "way.json", "--engine", engine, "--json")
    assert again.returncode == 0, again.stderr
    assert json.loads(again.stdout)["resumed"] is True
    assert verify(place / "way.attnrepro", trust=trust.load()).observations["run"]["resumed"]
    assert not (place / "attnrepro-runs").exists()
