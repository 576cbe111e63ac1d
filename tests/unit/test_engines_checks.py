"""doctor's checks on recorded machines."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from test_engines_gpu import NVIDIA_CTK_YAML, UUIDS, nvidia_machine, put

from attnrepro.cli.main import run
from attnrepro.engines import checks, gpuchecks, gpuhost, install
from attnrepro.engines.base import EngineFacts
from attnrepro.engines.checks import Check, Diagnosis, Level
from attnrepro.engines.docker import DockerEngine
from attnrepro.engines.gpu import EngineDoors
from attnrepro.errors import Unavailable

if TYPE_CHECKING:
    from pathlib import Path

DOORS = EngineDoors(cdi=True, nvidia_runtime=False)


@pytest.mark.parametrize(
    ("name", "version", "machine", "level"),
    [
        ("debian", "12", "x86_64", Level.OK),
        ("debian", "13", "x86_64", Level.OK),
        ("debian", None, "x86_64", Level.OK),
        ("debian", "11", "x86_64", Level.MISSING),
        ("ubuntu", "24.04", "x86_64", Level.OK),
        ("ubuntu", "26.04", "x86_64", Level.OK),
        ("ubuntu", "22.04", "x86_64", Level.MISSING),
        ("ubuntu", "24.04", "aarch64", Level.MISSING),
        ("fedora", "42", "x86_64", Level.MISSING),
        ("debian", "rolling", "x86_64", Level.MISSING),
    ],
)
def test_platforms(name: str, version: str | None, machine: str, level: Level) -> None:
    release = {"ID": name, "PRETTY_NAME": name}
    if version is not None:
        release["VERSION_ID"] = version
    check = checks.platform_check(release, machine)
    assert check.level is level
    assert (check.fix is None) == (level is Level.OK)


@pytest.mark.parametrize(
    ("driver", "cuda", "how"),
    [
        ("580.65.06", "13.0", "whole"),
        ("580.159.04", "13.0", "whole"),
        ("580.159.04", "13.1", "minor"),
        ("590.44.01", "13.1", "whole"),
        ("590.44.01", "12.8", "whole"),
        ("575.57.08", "13.0", "no"),
        ("550.54.14", "12.4", "whole"),
        ("550.54.14", "12.8", "minor"),
        ("525.60.12", "12.0", "no"),
        ("470.1", "12.8", "no"),
        ("580.65.06", "14.0", "no"),
    ],
)
def test_driver_against_cuda(driver: str, cuda: str, how: str) -> None:
    assert gpuchecks.runs_cuda(driver, cuda) == how


def test_table_of_drivers_is_in_order() -> None:
    drivers = [least for _, least in gpuchecks.CUDA_DRIVERS]
    assert drivers == sorted(drivers)
    assert gpuchecks.driver("535.54.03").level == "warn"
    assert gpuchecks.driver("470.82.01").level == "missing"
    assert gpuchecks.driver("580.95.05").level == "ok"


def levels(root: Path, doors: EngineDoors = DOORS) -> dict[str, str]:
    found: dict[str, str] = {}
    for finding in gpuchecks.findings(root, (doors,)):
        found[finding.id] = finding.level
        assert finding.level in ("ok", "note") or finding.fix
    return found


def test_machine_without_gpu(tmp_path: Path) -> None:
    assert levels(tmp_path) == {"gpu": "note"}


def test_good_gpu_machine(tmp_path: Path) -> None:
    root = nvidia_machine(tmp_path)
    put(root, "/etc/cdi/nvidia.yaml", NVIDIA_CTK_YAML.replace("VERSION", "580.95.05"))
    assert levels(root) == {"gpu.devices": "ok", "gpu.driver": "ok", "gpu.cdi": "ok"}
    [devices] = [f for f in gpuchecks.findings(root, (DOORS,)) if f.id == "gpu.devices"]
    assert all(uuid in devices.found for uuid in UUIDS)


def test_stale_missing_and_unused_cdi(tmp_path: Path) -> None:
    root = nvidia_machine(tmp_path)
    assert levels(root)["gpu.cdi"] == "warn"
    assert levels(root, EngineDoors(cdi=True, nvidia_runtime=True))["gpu.cdi"] == "note"
    closed = EngineDoors(cdi=False, cdi_reason="features.cdi is off", nvidia_runtime=False)
    assert levels(root, closed)["gpu.cdi.engine"] == "warn"
    put(root, "/etc/cdi/nvidia.yaml", NVIDIA_CTK_YAML.replace("VERSION", "570.10.01"))
    [stale] = [f for f in gpuchecks.findings(root, (DOORS,)) if f.id == "gpu.cdi"]
    assert "stale" in stale.found
    assert "570.10.01" in stale.found
    assert "nvidia-ctk cdi generate --output=/etc/cdi/nvidia.yaml" in (stale.fix or "")


def test_control_nodes_that_lack(tmp_path: Path) -> None:
    root = nvidia_machine(tmp_path)
    (root / "dev/nvidia-uvm").unlink()
    (root / "dev/nvidia-uvm-tools").unlink()
    assert levels(root)["gpu.nodes"] == "missing"


def test_rocm_groups(tmp_path: Path) -> None:
    for node in ("/dev/kfd", "/dev/dri/renderD128"):
        put(tmp_path, node)
    host = replace(gpuhost.read(tmp_path), node_groups={"/dev/kfd": 109, "/dev/dri/renderD128": 44})
    [bad] = gpuchecks.rocm(host, {44}, uid=1000)
    assert bad.level == "missing"
    assert "109" in bad.found
    assert [f.level for f in gpuchecks.rocm(host, {44, 109}, uid=1000)] == ["ok"]
    assert [f.level for f in gpuchecks.rocm(host, set(), uid=0)] == ["ok"]
    [none] = gpuchecks.rocm(replace(host, render_nodes=()), {44, 109}, uid=0)
    assert none.level == "missing"


def test_disk_and_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "DISK_NEED_BYTES", 1)
    assert checks.disk_check(tmp_path / "not" / "yet", gpu=False).level is Level.OK
    monkeypatch.setattr(checks, "GPU_DISK_NEED_BYTES", 1 << 60)
    assert checks.disk_check(tmp_path, gpu=True).level is Level.WARN
    assert checks.memory_check(64 << 30).level is Level.OK
    assert checks.memory_check(1 << 30).level is Level.WARN
    assert checks.memory_check(None).level is Level.NOTE


def test_governors(tmp_path: Path) -> None:
    def governor() -> Check:
        return next(c for c in checks.cpu_checks(tmp_path) if c.id == "cpu.governor")

    assert governor().level is Level.NOTE
    put(tmp_path, "/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor", "performance\n")
    assert governor().level is Level.OK
    put(tmp_path, "/sys/devices/system/cpu/cpu1/cpufreq/scaling_governor", "powersave\n")
    assert governor().level is Level.WARN


class Up(DockerEngine):
    def __init__(self) -> None:
        super().__init__("unix:///nowhere")

    def facts(self) -> EngineFacts:
        return EngineFacts(
            name="docker",
            version="1",
            store="classic",
            runtime="runc",
            cgroup_version="v2",
            rootless=True,
            contained=True,
        )

    def doors(self) -> EngineDoors:
        return DOORS


class Down(Up):
    def facts(self) -> EngineFacts:
        message = "down"
        raise Unavailable(message, hint="start it")


def test_one_engine_is_enough() -> None:
    both = checks.engine_checks({"docker": Down, "podman": Up})
    assert [check.level for check, _ in both] == [Level.NOTE, Level.OK]
    assert "rootless" in both[1][0].found
    none = checks.engine_checks({"docker": Down, "podman": Down})
    assert {check.level for check, _ in none} == {Level.MISSING}
    assert {check.fix for check, _ in none} == {"start it"}
    assert not Diagnosis(checks=tuple(check for check, _ in none)).usable
    usable = Diagnosis(checks=tuple(check for check, _ in both))
    assert usable.usable
    assert "This machine can build" in usable.text()
    lacking = Check(id="platform", level=Level.MISSING, found="x", fix="y")
    assert not Diagnosis(checks=(*usable.checks, lacking)).usable


def test_asking_for_pip_leaves_the_import_system_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    class Refusing:
        def find_spec(self, name: str, path: object = None, target: object = None) -> None:
            assert name != "pip"

    monkeypatch.setattr(sys, "meta_path", [Refusing(), *sys.meta_path])
    assert checks.python_check().found.endswith("with pip")


def test_doctor_on_this_machine_is_json(capsys: pytest.CaptureFixture[str]) -> None:
    code = run(["doctor", "--json"])
    document = json.loads(capsys.readouterr().out)
    assert code == (0 if document["usable"] else 8)
    assert {c["id"] for c in document["checks"]} >= {"platform", "python", "disk", "engine.podman"}
    assert document["installed"] == []


def test_doctor_writes_a_spec_only_where_there_is_a_gpu(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    host = gpuhost.read(nvidia_machine(tmp_path))
    monkeypatch.setattr(gpuhost, "read", lambda: host)
    assert run(["doctor", "--write-cdi", str(tmp_path / "spec.json"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["devices"] == ["0", UUIDS[0], "1", UUIDS[1], "all"]
    assert json.loads((tmp_path / "spec.json").read_text())["kind"] == "nvidia.com/gpu"
    monkeypatch.setattr(gpuhost, "read", gpuhost.GpuHost)
    assert run(["doctor", "--write-cdi", str(tmp_path / "other.json")]) == 8
    assert not (tmp_path / "other.json").exists()


def test_install_says_the_exact_command(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    monkeypatch.setattr(install.shutil, "which", lambda name, path=None: None)
    monkeypatch.setattr(install.os, "getuid", lambda: 1000)
    assert "runc" in install.wanted(cgroup_v2=False)
    assert "crun" in install.wanted(cgroup_v2=True)
    with pytest.raises(Unavailable, match="needs root") as caught:
        install.install_engine(told.append)
    assert (caught.value.hint or "").startswith("sudo apt-get install -y --no-install-recommends")
    assert "podman" in (caught.value.hint or "")
    assert told == []


def fake_apt(folder: Path, script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "apt-get").write_text(f"#!/bin/sh\n{script}\n")
    (folder / "apt-get").chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=":")
    monkeypatch.setattr(install.os, "getuid", lambda: 0)
    monkeypatch.setattr(install, "wanted", lambda *, cgroup_v2: ["podman", "runc"])
    monkeypatch.setattr(install, "mount_cgroups", lambda progress: None)


def test_install_runs_apt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    fake_apt(tmp_path, f'echo "$DEBIAN_FRONTEND $*" >>{tmp_path}/calls', monkeypatch)
    assert install.install_engine(told.append) == ["podman", "runc"]
    assert (tmp_path / "calls").read_text().split("\n") == [
        "noninteractive -q update",
        "noninteractive -q install -y --no-install-recommends podman runc",
        "",
    ]
    assert len(told) == 2


def test_install_that_fails_tells_the_last_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_apt(tmp_path, "echo E: Unable to locate package podman; exit 100", monkeypatch)
    with pytest.raises(Unavailable, match="Unable to locate package podman"):
        install.install_engine(lambda line: None)


def test_install_where_all_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(install, "wanted", lambda *, cgroup_v2: [])
    monkeypatch.setattr(install, "mount_cgroups", lambda progress: None)
    assert install.install_engine(lambda line: None) == []
