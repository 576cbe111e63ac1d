"""The shipped reference artifact, rerun here: equal bits where the CPU is in its scope.

Elsewhere the rerun says so (exit 8), and two runs of this machine are compared instead.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from attnrepro import resources
from attnrepro.engines import select
from attnrepro.errors import AttnreproError
from attnrepro.images.store import Store

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1200)]

TOOLKIT = Path(select.__file__).parents[2]
QUICKSTART = resources.manifests_dir() / "quickstart"
TWO_CELLS = resources.manifests_dir() / "two-cells" / "manifest.json"


@pytest.fixture
def engine() -> str:
    try:
        name = select.choose(None).name
    except AttnreproError as error:
        pytest.skip(f"no engine answers here: {error.message}")
    if Store().find("cpu-torch2.13") is None:
        pytest.skip("the image cpu-torch2.13 is not built here")
    return name


def attnrepro(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "attnrepro", *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        env={
            **os.environ,
            "PYTHONPATH": str(TOOLKIT),
            "ATTNREPRO_HOME": str(folder / "state"),
        },
    )


def test_the_reference_repeats_here_or_is_said_to_be_out_of_scope(
    engine: str, tmp_path: Path
) -> None:
    reference = QUICKSTART / "reference.attnrepro"
    arguments = ["--engine", engine, "--json", "-o", "again.attnrepro"]
    done = attnrepro("rerun", str(reference), *arguments, folder=tmp_path)
    if done.returncode == 8:
        problem = json.loads(done.stdout or done.stderr[done.stderr.index("{") :])
        assert "scope" in json.dumps(problem), problem
        own_runs_agree(engine, tmp_path)
        return
    assert done.returncode == 0, (done.returncode, done.stdout[-3000:], done.stderr[-3000:])
    verdicts = json.loads(done.stdout)["verdicts"]
    assert verdicts["outputs_identical"]["result"] == "yes", verdicts
    assert verdicts["image_identical"]["result"] == "yes", verdicts


def own_runs_agree(engine: str, folder: Path) -> None:
    first = attnrepro(
        "run", str(TWO_CELLS), "--engine", engine, "-o", "first.attnrepro", folder=folder
    )
    assert first.returncode == 0, first.stderr[-3000:]
    second = attnrepro("rerun", "first.attnrepro", "--engine", engine, "--json", folder=folder)
    assert second.returncode == 0, (second.stdout[-3000:], second.stderr[-3000:])
    assert json.loads(second.stdout)["verdicts"]["outputs_identical"]["result"] == "yes"
