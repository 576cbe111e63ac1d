"""What each engine is told: closed but for what the spec names."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from attnrepro.engines import closed
from attnrepro.engines.base import (
    ContainerSpec,
    EngineFacts,
    ExitStatus,
    ImageIdentity,
    Mount,
)
from attnrepro.engines.docker import container_config, facts_of
from attnrepro.engines.gpu import GpuAccess, GpuMode
from attnrepro.engines.podman import PodmanSetup, run_arguments, setup_of
from attnrepro.errors import Unavailable, UsageError

IMAGE = ImageIdentity(
    archive=Path("/store/a.tar"),
    name="attnrepro/cpu:r1",
    manifest_digest="sha256:" + "ab" * 32,
    config_digest="sha256:" + "cd" * 32,
)
SPEC = ContainerSpec(
    image=IMAGE,
    command=("python3", "-m", "attnrepro_runner", "/attnrepro/job.json", "/attnrepro/out"),
    mounts=(
        Mount(source=Path("/r/runner.whl"), target="/attnrepro/runner.whl", read_only=True),
        Mount(source=Path("/r/out"), target="/attnrepro/out", read_only=False),
    ),
    environment={"OMP_NUM_THREADS": "2", "PYTHONPATH": "/attnrepro/runner.whl"},
    uid=1000,
    gid=1001,
    memory_bytes=1 << 30,
    cpuset="0-1",
    name="attnrepro-1",
)
FACTS = EngineFacts(
    name="docker",
    version="26",
    store="classic",
    runtime="runc",
    cgroup_version="v2",
    rootless=False,
    contained=True,
)
CDI = GpuAccess(
    mode=GpuMode.CDI,
    device_id="GPU-1",
    cdi_names=("nvidia.com/gpu=0",),
    library_path=("/usr/local/nvidia/lib64",),
)
NODES = GpuAccess(
    mode=GpuMode.NODES,
    device_id="/dev/nvidia0",
    nodes=("/dev/nvidia0", "/dev/nvidiactl"),
    mounts=(("/usr/local/nvidia", "/usr/local/nvidia"),),
    library_path=("/usr/local/nvidia/lib64",),
)


@pytest.mark.parametrize(
    "change",
    [
        {"command": ()},
        {"command": ("--privileged",)},
        {"command": ("sh", "a\0b")},
        {"name": "--privileged"},
        {"name": "a b"},
        {"cpuset": "--device=/dev/sda"},
        {"cpuset": "0-"},
        {"cpuset": ""},
        {"memory_bytes": 0},
        {"tmpfs_bytes": -1},
        {"timeout_seconds": float("nan")},
        {"timeout_seconds": 0.0},
        {"uid": -1},
        {"pids_limit": 0},
        {"environment": {"LD_PRELOAD": "/x.so"}},
        {"environment": {"LD_LIBRARY_PATH": "/x"}},
        {"environment": {"CUDA_INJECTION64_PATH": "/x.so"}},
        {"environment": {"TRITON_PTXAS_PATH": "/x"}},
        {"environment": {"HOME": "/root"}},
        {"environment": {"ATTNREPRO_x": "1"}},
        {"environment": {"OMP_NUM_THREADS=2\nLD_PRELOAD": "1"}},
        {"environment": {"OMP_NUM_THREADS": "2\n3"}},
        {"environment": {"PYTHONPATH": "/attnrepro/out"}},
        {"environment": {"PYTHONPATH": ""}},
        {"environment": {"PYTHONPATH": "/attnrepro/runner.whl:/tmp"}},
        {"environment": {"PYTHONPATH": "/attnrepro/runner.whl/../out"}},
        {"mounts": (Mount(source=Path("relative"), target="/x", read_only=True),)},
        {"mounts": (Mount(source=Path("/a"), target="x", read_only=True),)},
        {"mounts": (Mount(source=Path("/a,ro=false"), target="/x", read_only=True),)},
        {"mounts": (Mount(source=Path("/a:b"), target="/x", read_only=True),)},
        {"mounts": (Mount(source=Path("/a"), target="/x/../etc", read_only=True),)},
        {"mounts": (Mount(source=Path("/a"), target="/", read_only=False),)},
        {"mounts": (Mount(source=Path("/a"), target="/tmp", read_only=False),)},
        {"mounts": (Mount(source=Path("/a\n"), target="/x", read_only=True),)},
    ],
)
def test_hostile_specs_are_refused(change: dict[str, object]) -> None:
    with pytest.raises(UsageError):
        replace(SPEC, **{"environment": {}, **change})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "change",
    [
        {"name": "-x"},
        {"name": "Upper"},
        {"manifest_digest": "sha256:" + "AB" * 32},
        {"config_digest": "latest"},
    ],
)
def test_hostile_images_are_refused(change: dict[str, str]) -> None:
    with pytest.raises(UsageError):
        replace(IMAGE, **change)  # type: ignore[arg-type]


def test_docker_is_told_to_close_everything() -> None:
    config = container_config(SPEC, "sha256:1", FACTS)
    host = config["HostConfig"]
    assert host["NetworkMode"] == "none"
    assert host["ReadonlyRootfs"] is True
    assert host["CapDrop"] == ["ALL"]
    assert host["SecurityOpt"] == ["no-new-privileges"]
    assert host["Privileged"] is False
    assert host["Tmpfs"] == {"/tmp": f"rw,exec,nosuid,nodev,mode=1777,size={2 << 30}"}
    assert host["Memory"] == host["MemorySwap"] == 1 << 30
    assert host["CpusetCpus"] == "0-1"
    assert [(m["Target"], m["ReadOnly"]) for m in host["Mounts"]] == [
        ("/attnrepro/runner.whl", True),
        ("/attnrepro/out", False),
    ]
    assert not {"Devices", "DeviceRequests", "CapAdd", "Binds"} & set(host)
    assert config["User"] == "1000:1001"
    assert config["Entrypoint"] == ["python3"]
    assert config["Cmd"][0] == "-m"
    assert "HOME=/tmp" in config["Env"]
    assert "OMP_NUM_THREADS=2" in config["Env"]
    assert not any(e.startswith("LD_") for e in config["Env"])


def test_rootless_docker_runs_as_the_user_who_owns_the_output() -> None:
    assert container_config(SPEC, "x", replace(FACTS, rootless=True))["User"] == "0:0"


def test_docker_gets_the_gpu_by_each_door() -> None:
    host = container_config(replace(SPEC, gpu=CDI), "x", FACTS)["HostConfig"]
    assert host["DeviceRequests"] == [{"Driver": "cdi", "DeviceIDs": ["nvidia.com/gpu=0"]}]
    assert host["Devices"] == []
    runtime = GpuAccess(mode=GpuMode.RUNTIME, device_id="GPU-1", runtime_ids=("GPU-1",))
    host = container_config(replace(SPEC, gpu=runtime), "x", FACTS)["HostConfig"]
    assert host["DeviceRequests"][0]["Driver"] == "nvidia"
    assert host["DeviceRequests"][0]["DeviceIDs"] == ["GPU-1"]
    config = container_config(replace(SPEC, gpu=NODES), "x", FACTS)
    host = config["HostConfig"]
    assert [d["PathOnHost"] for d in host["Devices"]] == ["/dev/nvidia0", "/dev/nvidiactl"]
    assert {d["CgroupPermissions"] for d in host["Devices"]} == {"rw"}
    assert host["Mounts"][-1]["Source"] == "/usr/local/nvidia"
    assert host["Mounts"][-1]["ReadOnly"] is True
    assert "LD_LIBRARY_PATH=/usr/local/nvidia/lib64" in config["Env"]
    rocm = GpuAccess(
        mode=GpuMode.ROCM,
        device_id="r",
        nodes=("/dev/kfd", "/dev/dri/renderD128"),
        groups=(44, 109),
    )
    host = container_config(replace(SPEC, gpu=rocm), "x", FACTS)["HostConfig"]
    assert host["GroupAdd"] == ["44", "109"]


def test_docker_facts_of_both_stores() -> None:
    info = {
        "ServerVersion": "26.1.5",
        "Driver": "overlay2",
        "DriverStatus": [["Backing Filesystem", "extfs"]],
        "DefaultRuntime": "runc",
        "CgroupVersion": "2",
        "SecurityOptions": ["name=seccomp,profile=builtin", "name=rootless"],
    }
    facts = facts_of(info)
    assert (facts.store, facts.cgroup_version, facts.rootless) == ("classic", "v2", True)
    info["DriverStatus"] = [["driver-type", "io.containerd.snapshotter.v1"]]
    assert facts_of(info).store == "containerd"
    assert facts_of({}).contained


def podman_setup(**change: object) -> PodmanSetup:
    info = {
        "host": {
            "cgroupVersion": "v2",
            "cgroupControllers": ["cpuset", "cpu", "memory", "pids"],
            "security": {"rootless": False, "seccompEnabled": True},
            "kernel": "6.1",
            **change,
        },
        "store": {"graphDriverName": "overlay"},
        "version": {"Version": "4.9.3"},
    }
    return setup_of(info, {"crun": "/usr/bin/crun", "runc": "/usr/sbin/runc"}, systemd=True)


def test_podman_chooses_a_runtime_that_works() -> None:
    assert podman_setup().options == ("--runtime=/usr/bin/crun", "--cgroup-manager=systemd")
    old = podman_setup(cgroupVersion="v1")
    assert old.options == ("--runtime=/usr/sbin/runc", "--cgroup-manager=cgroupfs")
    assert "memory" in old.controllers
    user = {"rootless": True, "seccompEnabled": True}
    assert podman_setup(cgroupVersion="v1", security=user).controllers == frozenset()
    assert "memory" in podman_setup(security=user).controllers


def test_podman_without_a_fitting_runtime_says_what_to_install() -> None:
    info = {"host": {"cgroupVersion": "v1", "security": {"rootless": False}}}
    with pytest.raises(Unavailable) as caught:
        setup_of(info, {"crun": "/usr/bin/crun", "runc": None}, systemd=False)
    assert "apt-get install runc" in (caught.value.hint or "")


def test_podman_is_told_to_close_everything() -> None:
    arguments, facts = run_arguments(SPEC, IMAGE.config_digest, podman_setup())
    assert facts == {}
    image = arguments.index("cd" * 32)
    options, rest = arguments[1:image], arguments[image + 1 :]
    assert rest == list(SPEC.command[1:])
    # One word an option: no value can be read as an option of its own.
    assert all(option.startswith("--") for option in options)
    for needed in (
        "--network=none",
        "--read-only",
        "--read-only-tmpfs=false",
        "--cap-drop=ALL",
        "--security-opt=no-new-privileges",
        "--http-proxy=false",
        "--pull=never",
        "--user=1000:1001",
        f"--memory={1 << 30}b",
        "--cpuset-cpus=0-1",
        '--entrypoint=["python3"]',
        f"--tmpfs=/tmp:rw,exec,nosuid,nodev,mode=1777,size={2 << 30}",
        "--mount=type=bind,source=/r/out,target=/attnrepro/out,ro=false,bind-propagation=rprivate",
    ):
        assert needed in options
    assert not [o for o in options if o.startswith(("--device", "--privileged", "--userns"))]


def test_podman_tells_of_limits_it_cannot_set() -> None:
    setup = podman_setup(cgroupVersion="v1", security={"rootless": True, "seccompEnabled": True})
    arguments, facts = run_arguments(SPEC, IMAGE.config_digest, setup)
    assert "--cgroups=disabled" not in arguments, "runc refuses it"
    assert "--userns=keep-id" in arguments
    assert not [a for a in arguments if a.startswith(("--memory", "--cpuset", "--pids"))]
    assert facts["limit_memory_bytes"].startswith("not enforced")
    assert facts["limit_cpuset"].startswith("by affinity")


def test_crun_is_told_not_to_touch_cgroups_it_cannot_use() -> None:
    setup = replace(podman_setup(), controllers=frozenset())
    assert "--cgroups=disabled" in run_arguments(SPEC, IMAGE.config_digest, setup)[0]


def test_podman_gets_the_gpu_by_each_door() -> None:
    arguments, _ = run_arguments(replace(SPEC, gpu=CDI), "x", podman_setup())
    assert "--device=nvidia.com/gpu=0" in arguments
    assert "--env=LD_LIBRARY_PATH=/usr/local/nvidia/lib64" in arguments
    arguments, _ = run_arguments(replace(SPEC, gpu=NODES), "x", podman_setup())
    assert "--device=/dev/nvidia0:/dev/nvidia0:rw" in arguments
    assert [a for a in arguments if "source=/usr/local/nvidia," in a and "ro=true" in a]


def test_owner_label_tells_the_living_from_the_dead() -> None:
    label = closed.owner()
    assert not closed.orphaned(label)
    machine, _, _ = label.rpartition(":")[0].rpartition(":")
    assert closed.orphaned(f"{machine}:4194999:17")
    assert closed.orphaned(label.rpartition(":")[0] + ":1")  # the pid was given out again
    assert not closed.orphaned(f"other-{machine}:4194999:17")
    assert not closed.orphaned("nonsense")
    assert not closed.orphaned("")


def test_cores_of_a_list() -> None:
    assert closed.cores_of("0-2,8") == {0, 1, 2, 8}


def test_log_is_cut_and_the_rest_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(closed, "LOG_LIMIT", 10)
    read = []

    def chunks() -> object:
        for number in range(5):
            read.append(number)
            yield b"12345"

    copy = closed.LogCopy(chunks(), tmp_path / "log")  # type: ignore[arg-type]
    copy.start()
    copy.finish()
    assert (tmp_path / "log").read_bytes().startswith(b"1234512345\n[attnrepro: output beyond")
    assert read == [0, 1, 2, 3, 4]


def test_log_on_a_full_disk_is_told() -> None:
    copy = closed.LogCopy([b"x" * 100_000], Path("/dev/full"))
    copy.start()
    with pytest.raises(UsageError, match="No space left"):
        copy.finish()


def test_sources_are_checked_before_the_engine_is_asked(tmp_path: Path) -> None:
    absent = Mount(source=tmp_path / "absent", target="/x", read_only=True)
    with pytest.raises(UsageError, match="does not exist"):
        closed.check_sources(replace(SPEC, mounts=(absent,), environment={}))


class FakeEngine:
    """Answers a preflight with given lines."""

    name = "fake"

    def __init__(self, lines: str, code: int = 0) -> None:
        self._lines = lines
        self._code = code

    def facts(self) -> EngineFacts:
        return FACTS

    def ensure_image(self, identity: ImageIdentity) -> str:
        return identity.config_digest

    def remove_image(self, identity: ImageIdentity) -> None:
        raise AssertionError

    def run(self, spec: ContainerSpec, *, log: Path, stop: object = None) -> ExitStatus:
        assert spec.name != SPEC.name
        log.write_text(self._lines)
        return closed.status_of("done", self._code, oom_killed=False, duration_ns=1, facts={})


GOOD = "CapEff=0000000000000000\nNoNewPrivs=1\nSeccomp=2\ninterfaces=lo\nshm=writable\nok=yes\n"


def test_preflight_accepts_a_closed_container(tmp_path: Path) -> None:
    facts = closed.preflight(FakeEngine(GOOD), SPEC, log=tmp_path / "log")
    assert facts["preflight_interfaces"] == "lo"
    assert "preflight_ok" not in facts


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("CapEff=0000000000000000", "CapEff=00000000a80425fb", "capabilities"),
        ("NoNewPrivs=1", "NoNewPrivs=0", "privileges"),
        ("interfaces=lo", "interfaces=eth0,lo", "eth0"),
        ("ok=yes\n", "", "shm=writable"),
        ("CapEff=0000000000000000", "failed: /tmp does not execute", "does not execute"),
    ],
)
def test_preflight_refuses_an_open_one(tmp_path: Path, old: str, new: str, told: str) -> None:
    assert old in GOOD
    with pytest.raises(Unavailable, match=told):
        closed.preflight(FakeEngine(GOOD.replace(old, new)), SPEC, log=tmp_path / "log")
