"""Real containers on the engines of this machine."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tiny_image import make_tiny_image

from attnrepro.engines import closed
from attnrepro.engines.base import ContainerSpec, Engine, ExitStatus, ImageIdentity, Mount
from attnrepro.engines.docker import DockerEngine
from attnrepro.engines.gpu import GpuAccess, GpuMode
from attnrepro.engines.podman import PodmanEngine
from attnrepro.errors import ImageDiffers, Interrupted, Unavailable

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module", params=["docker", "podman"])
def engine(request: pytest.FixtureRequest) -> DockerEngine | PodmanEngine:
    made = DockerEngine() if request.param == "docker" else PodmanEngine()
    try:
        made.facts()
    except Unavailable as error:
        pytest.skip(f"{request.param}: {error.message}")
    return made


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> ImageIdentity:
    return make_tiny_image(tmp_path_factory.mktemp("image"), tag="a")


@pytest.fixture
def spec(image: ImageIdentity, tmp_path: Path) -> ContainerSpec:
    (tmp_path / "out").mkdir()
    (tmp_path / "job.json").write_text("{}")
    return ContainerSpec(
        image=image,
        command=("/bin/true",),
        mounts=(
            Mount(source=tmp_path / "job.json", target="/in/job.json", read_only=True),
            Mount(source=tmp_path / "out", target="/out", read_only=False),
        ),
        uid=os.getuid(),
        gid=os.getgid(),
        name=closed.container_name(),
    )


def shell(spec: ContainerSpec, script: str, **changes: object) -> ContainerSpec:
    return replace(spec, command=("/bin/sh", "-c", script), **changes)  # type: ignore[arg-type]


def run(engine: Engine, spec: ContainerSpec, tmp_path: Path) -> tuple[ExitStatus, str]:
    status = engine.run(spec, log=tmp_path / "log")
    assert not exists(engine, spec.name)
    return status, (tmp_path / "log").read_text()


def exists(engine: Engine, name: str) -> bool:
    if isinstance(engine, PodmanEngine):
        done = subprocess.run(["podman", "container", "exists", name], check=False)
        return done.returncode == 0
    import docker

    assert isinstance(engine, DockerEngine)
    client = docker.DockerClient(base_url=engine._url)
    try:
        return any(c.name == name for c in client.containers.list(all=True))
    finally:
        client.close()


def test_output_and_exit_code_arrive(engine: Engine, spec: ContainerSpec, tmp_path: Path) -> None:
    status, log = run(engine, shell(spec, "echo one; echo two >&2; exit 3"), tmp_path)
    assert (status.code, status.timed_out, status.oom_killed, status.stopped) == (3, 0, 0, 0)
    assert sorted(log.split()) == ["one", "two"]
    assert 0 < status.duration_ns < 60e9


def test_signal_in_the_container_is_its_code(
    engine: Engine, spec: ContainerSpec, tmp_path: Path
) -> None:
    status, _ = run(engine, shell(spec, "sh -c 'kill -SEGV $$'; exit $?"), tmp_path)
    assert status.code == 139


def test_container_is_closed(engine: Engine, spec: ContainerSpec, tmp_path: Path) -> None:
    script = """
    id -u
    for p in /x /etc/x /in/job.json /usr/x /run/x /var/x; do
        ( : >>$p ) 2>/dev/null && echo "wrote $p"
    done
    cat /proc/net/dev | tail -n +3
    env
    echo result >/out/result
    """
    status, log = run(engine, shell(spec, script, environment={"OMP_NUM_THREADS": "2"}), tmp_path)
    lines = log.split("\n")
    assert status.code == 0
    assert lines[0] == str(os.getuid())
    assert "wrote" not in log
    interfaces = [line.split(":")[0].strip() for line in lines if ":" in line and "lo:" in line]
    assert interfaces == ["lo"]
    assert "OMP_NUM_THREADS=2" in lines
    assert "HOME=/tmp" in lines
    assert not [line for line in lines if "proxy" in line.lower()]
    result = tmp_path / "out" / "result"
    assert result.read_text() == "result\n"
    assert result.stat().st_uid == os.getuid()


def test_preflight_proves_it(engine: Engine, spec: ContainerSpec, tmp_path: Path) -> None:
    facts = closed.preflight(engine, spec, log=tmp_path / "log")
    assert facts["preflight_CapEff"] == facts["preflight_CapBnd"] == "0" * 16
    assert facts["preflight_NoNewPrivs"] == "1"
    assert facts["preflight_Seccomp"] == "2"
    assert facts["preflight_interfaces"] == "lo"


def test_another_user_than_root(engine: Engine, spec: ContainerSpec, tmp_path: Path) -> None:
    if os.getuid() != 0:
        pytest.skip("the other tests run as another user already")
    os.chown(tmp_path / "out", 12345, 12345)
    other = replace(spec, uid=12345, gid=12345)
    facts = closed.preflight(engine, other, log=tmp_path / "log")
    assert facts["preflight_CapEff"] == "0" * 16
    status, log = run(engine, shell(other, "id -u; : >/out/x && echo wrote"), tmp_path)
    assert (status.code, log.split()) == (0, ["12345", "wrote"])
    assert (tmp_path / "out" / "x").stat().st_uid == 12345


def test_preflight_names_what_fails(engine: Engine, spec: ContainerSpec, tmp_path: Path) -> None:
    # 4 KiB of /tmp with a first file that fills it: the preflight's own file cannot be written.
    broken = replace(spec, tmpfs_bytes=1, uid=spec.uid)
    filled = [
        Mount(source=tmp_path / "job.json", target="/tmp/attnrepro-preflight", read_only=True)
    ]
    broken = replace(broken, mounts=(*broken.mounts, *filled))
    with pytest.raises(Unavailable, match="/tmp is not writable"):
        closed.preflight(engine, broken, log=tmp_path / "log")


def test_timeout_kills_and_removes(engine: Engine, spec: ContainerSpec, tmp_path: Path) -> None:
    began = time.monotonic()
    status, log = run(engine, shell(spec, "echo begun; sleep 60", timeout_seconds=1.0), tmp_path)
    assert status.timed_out
    assert status.code is None
    assert log == "begun\n"
    assert time.monotonic() - began < 20


def test_stop_callback_ends_it(engine: Engine, spec: ContainerSpec, tmp_path: Path) -> None:
    began = time.monotonic()
    status = engine.run(
        shell(spec, "sleep 60"),
        log=tmp_path / "log",
        stop=lambda: time.monotonic() - began > 1,
    )
    assert status.stopped
    assert not exists(engine, spec.name)


def test_memory_limit_is_told(
    engine: Engine, spec: ContainerSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    limit = 64 << 20
    status, _ = run(engine, shell(spec, "exec tail /dev/zero", memory_bytes=limit), tmp_path)
    assert status.oom_killed
    assert status.code == 137
    script = "tail /dev/zero; echo child $?"
    status, log = run(
        engine, shell(spec, script, memory_bytes=limit, name=closed.container_name()), tmp_path
    )
    assert status.oom_killed
    assert status.code == 0
    assert "child 137" in log
    assert not list(here.iterdir()), "something was left where the command was started"


def test_cores_are_pinned(engine: Engine, spec: ContainerSpec, tmp_path: Path) -> None:
    core = str(max(os.sched_getaffinity(0)))
    script = (
        'while read -r k v; do [ "$k" = Cpus_allowed_list: ] && echo "$v"; done </proc/self/status'
    )
    _, log = run(engine, shell(spec, script, cpuset=core), tmp_path)
    assert log.strip() == core


def test_much_output_does_not_block(engine: Engine, spec: ContainerSpec, tmp_path: Path) -> None:
    status, log = run(engine, shell(spec, "head -c 5000000 /dev/zero"), tmp_path)
    assert status.code == 0
    assert len(log) == 5_000_000


def test_missing_program_is_told(engine: Engine, spec: ContainerSpec, tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match="nothere"):
        engine.run(replace(spec, command=("/bin/nothere",)), log=tmp_path / "log")
    assert not exists(engine, spec.name)


def test_other_image_is_refused(
    engine: Engine, image: ImageIdentity, spec: ContainerSpec, tmp_path: Path
) -> None:
    # The same name, other content: the engine would run it happily.
    other = make_tiny_image(tmp_path, tag="a", extra="changed")
    assert other.name == image.name
    lying = replace(image, archive=other.archive)
    engine.remove_image(image)
    with pytest.raises(ImageDiffers):
        engine.ensure_image(lying)
    with pytest.raises(ImageDiffers):
        engine.run(replace(spec, image=lying), log=tmp_path / "log")
    assert engine.ensure_image(image) in (image.manifest_digest, image.config_digest)
    engine.remove_image(other)


def test_missing_archive_is_told(engine: Engine, image: ImageIdentity, tmp_path: Path) -> None:
    absent = make_tiny_image(tmp_path, tag="absent", extra="absent")
    absent.archive.unlink()
    with pytest.raises(Unavailable, match="attnrepro-test/tiny:absent"):
        engine.ensure_image(absent)


def test_damaged_archive_is_told(engine: Engine, tmp_path: Path) -> None:
    damaged = make_tiny_image(tmp_path, tag="damaged", extra="damaged")
    data = bytearray(damaged.archive.read_bytes())
    place = data.index(b"damaged", data.index(b"etc/extra"))
    data[place] ^= 1
    damaged.archive.write_bytes(data)
    for _ in range(2):  # the first failure leaves nothing that the second would take for the image
        with pytest.raises((Unavailable, ImageDiffers)):
            engine.ensure_image(damaged)


CHILD = """
import sys
from pathlib import Path
from attnrepro.engines.base import ContainerSpec, ImageIdentity
from attnrepro.engines.docker import DockerEngine
from attnrepro.engines.podman import PodmanEngine
from attnrepro.errors import Interrupted
engine = DockerEngine() if sys.argv[1] == "docker" else PodmanEngine()
image = ImageIdentity(archive=Path(sys.argv[2]), name=sys.argv[3], manifest_digest=sys.argv[4],
                      config_digest=sys.argv[5])
spec = ContainerSpec(image=image, command=("/bin/sh", "-c", "echo begun; sleep 60"), mounts=(),
                     uid=0, gid=0, name=sys.argv[6])
try:
    engine.run(spec, log=Path(sys.argv[7]))
except KeyboardInterrupt:
    sys.exit(40)
except Interrupted:
    sys.exit(41)
"""


def start_child(engine: Engine, spec: ContainerSpec, log: Path) -> subprocess.Popen[bytes]:
    image = spec.image
    engine.ensure_image(image)
    child = subprocess.Popen(
        [
            *(sys.executable, "-c", CHILD, engine.name, str(image.archive), image.name),
            *(image.manifest_digest, image.config_digest, spec.name, str(log)),
        ],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        start_new_session=True,
    )
    deadline = time.monotonic() + 30
    while not (log.exists() and log.read_bytes()):
        assert child.poll() is None, "the child ended before its container began"
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return child


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 40), (signal.SIGTERM, 41)])
def test_signals_leave_no_container(
    engine: Engine, spec: ContainerSpec, tmp_path: Path, number: signal.Signals, code: int
) -> None:
    with start_child(engine, spec, tmp_path / "log") as child:
        assert exists(engine, spec.name)
        os.killpg(child.pid, number)  # as a terminal does: everything in the foreground
        assert child.wait(30) == code
    assert not exists(engine, spec.name)


def test_killed_owner_is_cleaned_up_by_the_next_run(
    engine: Engine, spec: ContainerSpec, tmp_path: Path
) -> None:
    with start_child(engine, spec, tmp_path / "log") as child:
        os.kill(child.pid, signal.SIGKILL)
        child.wait(30)
    assert exists(engine, spec.name), "nobody could remove it"
    run(engine, replace(spec, name=closed.container_name()), tmp_path)
    assert not exists(engine, spec.name)


def test_interrupt_while_removing_waits(
    engine: Engine, spec: ContainerSpec, tmp_path: Path
) -> None:
    timer = threading.Timer(1.2, os.kill, (os.getpid(), signal.SIGTERM))
    timer.start()
    with pytest.raises(Interrupted):
        engine.run(shell(spec, "sleep 60"), log=tmp_path / "log")
    timer.join()
    assert not exists(engine, spec.name)


@pytest.fixture
def cdi_device() -> Iterator[str]:
    """A CDI device of our own: no GPU, but the same door."""
    if os.getuid() != 0:
        pytest.skip("writing to /etc/cdi needs root")
    path = Path(f"/etc/cdi/attnrepro-test-{os.getpid()}.json")
    document = {
        "cdiVersion": "0.5.0",
        "kind": "attnrepro.test/gpu",
        "devices": [
            {"name": "0", "containerEdits": {"deviceNodes": [{"path": "/dev/loop-control"}]}}
        ],
        "containerEdits": {
            "mounts": [
                {
                    "hostPath": "/usr/share",
                    "containerPath": "/driver",
                    "options": ["ro", "nosuid", "nodev", "bind", "rbind"],
                }
            ],
            "env": ["ATTNREPRO_CDI_DRIVER=1.2.3"],
        },
    }
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(document))
    yield "attnrepro.test/gpu=0"
    path.unlink()


LOOK = """
[ -c /dev/loop-control ] && echo node
[ -d /driver ] && echo driver
( : >/driver/x ) 2>/dev/null && echo wrote
env | while read -r line; do case $line in LD_LIB*|ATTN*) echo "$line" ;; esac; done
"""


def test_device_enters_by_cdi(
    engine: DockerEngine | PodmanEngine, spec: ContainerSpec, tmp_path: Path, cdi_device: str
) -> None:
    if not engine.doors().cdi:
        pytest.skip(engine.doors().cdi_reason)
    gpu = GpuAccess(
        mode=GpuMode.CDI,
        device_id="test",
        cdi_names=(cdi_device,),
        library_path=("/driver",),
        facts={"gpu_mode": "cdi"},
    )
    status, log = run(engine, shell(spec, LOOK, gpu=gpu), tmp_path)
    assert set(log.split()) == {
        "node",
        "driver",
        "LD_LIBRARY_PATH=/driver",
        "ATTNREPRO_CDI_DRIVER=1.2.3",
    }
    assert status.engine_facts["gpu_mode"] == "cdi"
    closed.preflight(engine, replace(spec, gpu=gpu), log=tmp_path / "log")


def test_device_enters_by_its_node(engine: Engine, spec: ContainerSpec, tmp_path: Path) -> None:
    if os.getuid() != 0:
        pytest.skip("/dev/loop-control is root's")
    gpu = GpuAccess(
        mode=GpuMode.NODES,
        device_id="test",
        nodes=("/dev/loop-control",),
        mounts=(("/usr/share", "/driver"),),
        library_path=("/driver",),
    )
    _, log = run(engine, shell(spec, LOOK, gpu=gpu), tmp_path)
    assert set(log.split()) == {"node", "driver", "LD_LIBRARY_PATH=/driver"}
    _, log = run(engine, shell(spec, LOOK, name=closed.container_name()), tmp_path)
    assert log == ""
