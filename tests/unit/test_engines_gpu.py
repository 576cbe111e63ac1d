"""GPU doors, decided on recorded machines."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from attnrepro.engines import cdi, gpuhost
from attnrepro.engines.gpu import (
    EngineDoors,
    GpuHost,
    GpuMode,
    GpuVendor,
    parse_device,
    resolve,
)
from attnrepro.errors import InvalidDocument, Unavailable, UsageError

if TYPE_CHECKING:
    from pathlib import Path

ALL_DOORS = EngineDoors(cdi=True, nvidia_runtime=True)
NO_CDI = EngineDoors(cdi=False, cdi_reason="features.cdi is off", nvidia_runtime=True)
NODES_ONLY = EngineDoors(cdi=False, cdi_reason="features.cdi is off", nvidia_runtime=False)
UUIDS = ("GPU-11111111-aaaa-bbbb-cccc-000000000001", "GPU-22222222-aaaa-bbbb-cccc-000000000002")


def put(root: Path, path: str, text: str = "") -> None:
    place = root / path.lstrip("/")
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_text(text)


def nvidia_machine(root: Path, *, folder: bool = False, version: str = "580.95.05") -> Path:
    """Two GPUs; the second in PCI order has the first minor number."""
    for node in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm", "nvidia-uvm-tools"):
        put(root, f"/dev/{node}")
    put(
        root,
        "/proc/driver/nvidia/version",
        f"NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  {version}  Release Build\n",
    )
    for bus, minor, uuid in (("0000:1b:00.0", 1, UUIDS[0]), ("0000:43:00.0", 0, UUIDS[1])):
        text = f"Model: \t\t NVIDIA H200\nGPU UUID: \t {uuid}\nDevice Minor: \t {minor}\n"
        put(root, f"/proc/driver/nvidia/gpus/{bus}/information", text)
    base = "/usr/local/nvidia/lib64" if folder else "/usr/lib/x86_64-linux-gnu"
    put(root, f"{base}/libcuda.so.{version}")
    (root / base.lstrip("/") / "libcuda.so.1").symlink_to(f"libcuda.so.{version}")
    put(root, f"{base}/libnvidia-ml.so.1")
    return root


NVIDIA_CTK_YAML = """
cdiVersion: 0.5.0
kind: nvidia.com/gpu
devices:
- name: "0"
  containerEdits:
    deviceNodes:
    - path: /dev/nvidia1
- name: GPU-11111111-aaaa-bbbb-cccc-000000000001
  containerEdits:
    deviceNodes:
    - path: /dev/nvidia1
- name: all
  containerEdits:
    deviceNodes:
    - path: /dev/nvidia0
    - path: /dev/nvidia1
containerEdits:
  deviceNodes:
  - path: /dev/nvidiactl
  hooks:
  - hookName: createContainer
    path: /usr/bin/nvidia-cdi-hook
    args: [nvidia-cdi-hook, update-ldcache]
  mounts:
  - hostPath: /usr/lib/x86_64-linux-gnu/libcuda.so.VERSION
    containerPath: /usr/lib/x86_64-linux-gnu/libcuda.so.VERSION
    options: [ro, nosuid, nodev, bind]
"""


def test_devices_are_in_pci_order_with_their_minor(tmp_path: Path) -> None:
    host = gpuhost.read(nvidia_machine(tmp_path))
    assert [(d.index, d.node, d.uuid) for d in host.nvidia] == [
        (0, "/dev/nvidia1", UUIDS[0]),
        (1, "/dev/nvidia0", UUIDS[1]),
    ]
    assert host.driver_version == "580.95.05"
    assert host.driver_folder is None
    assert ("libcuda.so.1", "/usr/lib/x86_64-linux-gnu/libcuda.so.580.95.05") in host.libraries


def test_sandbox_without_the_drivers_proc(tmp_path: Path) -> None:
    put(tmp_path, "/dev/nvidia0")
    put(tmp_path, "/dev/nvidiactl")
    put(tmp_path, "/usr/local/nvidia/lib64/libcuda.so.1")
    put(tmp_path, "/usr/local/nvidia/lib64/libcuda.so.580.159.04")
    host = gpuhost.read(tmp_path)
    assert [(d.node, d.uuid) for d in host.nvidia] == [("/dev/nvidia0", None)]
    assert host.driver_version == "580.159.04"
    assert host.driver_folder == "/usr/local/nvidia"
    assert host.libraries == ()


def test_nothing_on_a_machine_without_gpu(tmp_path: Path) -> None:
    assert gpuhost.read(tmp_path) == GpuHost()


def test_cdi_comes_first(tmp_path: Path) -> None:
    root = nvidia_machine(tmp_path)
    put(root, "/etc/cdi/nvidia.yaml", NVIDIA_CTK_YAML.replace("VERSION", "580.95.05"))
    host = gpuhost.read(root)
    assert host.cdi_problems == {}
    for text in ("nvidia", "nvidia:0", f"nvidia:{UUIDS[0]}"):
        choice = parse_device(text)
        assert choice is not None
        access = resolve(choice, host, ALL_DOORS)
        assert access.mode is GpuMode.CDI
        assert access.cdi_names == (f"nvidia.com/gpu={UUIDS[0]}",)
        assert access.device_id == UUIDS[0]
        assert access.nodes == access.runtime_ids == access.mounts == ()
        assert access.facts["driver"] == "580.95.05"
        # An artifact has a keyed digest of the device, and no name that anybody can look up.
        assert access.facts["cdi_device"] == "by UUID"
        assert UUIDS[0] not in str(access.facts)
    # The spec has no device of exactly the second GPU's node, and `all` would give away both.
    choice = parse_device("nvidia:1")
    assert choice is not None
    access = resolve(choice, host, ALL_DOORS)
    assert access.mode is GpuMode.RUNTIME
    assert "no device for /dev/nvidia0" in access.facts["not_cdi"]


@pytest.mark.parametrize("stale", ["path", "driver"])
def test_stale_cdi_is_not_used(tmp_path: Path, stale: str) -> None:
    root = nvidia_machine(tmp_path)
    put(root, "/etc/cdi/nvidia.yaml", NVIDIA_CTK_YAML.replace("VERSION", "570.10.01"))
    if stale == "driver":
        put(root, "/usr/lib/x86_64-linux-gnu/libcuda.so.570.10.01")
    host = gpuhost.read(root)
    told = host.cdi_problems["/etc/cdi/nvidia.yaml"]
    assert told == (
        ("written for driver 570.10.01, but 580.95.05 is loaded",)
        if stale == "driver"
        else (
            "/usr/lib/x86_64-linux-gnu/libcuda.so.570.10.01 is named by the spec "
            "and does not exist",
            "written for driver 570.10.01, but 580.95.05 is loaded",
        )
    )
    choice = parse_device("nvidia")
    assert choice is not None
    access = resolve(choice, host, ALL_DOORS)
    assert access.mode is GpuMode.RUNTIME
    assert access.runtime_ids == (UUIDS[0],)
    assert "570.10.01" in access.facts["not_cdi"]


def test_runtime_second_nodes_third(tmp_path: Path) -> None:
    host = gpuhost.read(nvidia_machine(tmp_path))
    choice = parse_device("nvidia:1")
    assert choice is not None
    assert resolve(choice, host, NO_CDI).mode is GpuMode.RUNTIME
    access = resolve(choice, host, NODES_ONLY)
    assert access.mode is GpuMode.NODES
    assert access.nodes == (
        "/dev/nvidia0",
        "/dev/nvidiactl",
        "/dev/nvidia-uvm",
        "/dev/nvidia-uvm-tools",
    )
    assert "/dev/nvidia1" not in access.nodes
    assert dict(access.mounts)["/usr/lib/x86_64-linux-gnu/libcuda.so.580.95.05"] == (
        "/usr/local/nvidia/lib64/libcuda.so.1"
    )
    assert access.library_path == ("/usr/local/nvidia/lib64",)
    assert access.facts["not_cdi"] == "features.cdi is off"
    for doors in (ALL_DOORS, NO_CDI, NODES_ONLY):
        assert resolve(choice, host, doors).visible["CUDA_VISIBLE_DEVICES"] == UUIDS[1]
    nameless = replace(host, nvidia=tuple(replace(each, uuid=None) for each in host.nvidia))
    assert resolve(choice, nameless, NODES_ONLY).visible == {
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "CUDA_VISIBLE_DEVICES": "1",
    }


def test_driver_folder_is_mounted_as_one(tmp_path: Path) -> None:
    host = gpuhost.read(nvidia_machine(tmp_path, folder=True))
    choice = parse_device("nvidia")
    assert choice is not None
    access = resolve(choice, host, NODES_ONLY)
    assert access.mounts == (("/usr/local/nvidia", "/usr/local/nvidia"),)


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    host = gpuhost.read(nvidia_machine(tmp_path))
    choice = parse_device("nvidia:7")
    assert choice is not None
    with pytest.raises(Unavailable, match="nvidia:0, nvidia:1"):
        resolve(choice, host, ALL_DOORS)
    choice = parse_device("nvidia")
    assert choice is not None
    with pytest.raises(Unavailable, match=r"libcuda\.so\.1"):
        resolve(choice, replace(host, libraries=()), NODES_ONLY)
    with pytest.raises(Unavailable, match="/dev/nvidia-uvm is missing"):
        resolve(choice, replace(host, control_nodes=("/dev/nvidiactl",)), NODES_ONLY)
    choice = parse_device("rocm")
    assert choice is not None
    with pytest.raises(Unavailable, match="/dev/kfd"):
        resolve(choice, host, ALL_DOORS)


def test_rocm_nodes_and_groups(tmp_path: Path) -> None:
    for node in ("/dev/kfd", "/dev/dri/renderD129", "/dev/dri/renderD128", "/dev/dri/card0"):
        put(tmp_path, node)
    host = gpuhost.read(tmp_path)
    assert host.render_nodes == ("/dev/dri/renderD128", "/dev/dri/renderD129")
    host = replace(host, node_groups={"/dev/kfd": 109, "/dev/dri/renderD129": 109})
    choice = parse_device("rocm:1")
    assert choice is not None
    assert choice.vendor is GpuVendor.ROCM
    access = resolve(choice, host, NODES_ONLY)
    assert access.nodes == ("/dev/kfd", "/dev/dri/renderD129")
    assert access.groups == (109,)
    assert access.visible == {"ROCR_VISIBLE_DEVICES": "1"}
    choice = parse_device("rocm:2")
    assert choice is not None
    with pytest.raises(Unavailable, match="render nodes: 2"):
        resolve(choice, host, NODES_ONLY)


@pytest.mark.parametrize(
    "text",
    ["", "cuda", "nvidia:", "nvidia:-1", "nvidia:x", "cpu:1", "--privileged", "nvidia:GPU-../x"],
)
def test_devices_that_are_none(text: str) -> None:
    if text == "nvidia:":
        assert parse_device(text) == parse_device("nvidia:0")
        return
    with pytest.raises(UsageError):
        parse_device(text)
    assert parse_device("cpu") is None


@pytest.mark.parametrize("folder", [True, False])
def test_written_spec_reads_back_good_until_the_driver_changes(
    tmp_path: Path, folder: bool
) -> None:
    root = nvidia_machine(tmp_path, folder=folder)
    host = gpuhost.read(root)
    document = cdi.write_spec(host, root / "etc/cdi/attnrepro.json")
    assert document["kind"] == "nvidia.com/gpu"
    assert all("ro" in mount["options"] for mount in document["containerEdits"]["mounts"])
    after = gpuhost.read(root)
    assert after.cdi_problems == {}
    choice = parse_device(f"nvidia:{UUIDS[1]}")
    assert choice is not None
    access = resolve(choice, after, ALL_DOORS)
    assert access.mode is GpuMode.CDI
    assert access.cdi_names == (f"nvidia.com/gpu={UUIDS[1]}",)
    assert access.library_path == ("/usr/local/nvidia/lib64",)
    put(root, "/proc/driver/nvidia/version", "NVRM version: Kernel Module  590.48.01  x\n")
    assert gpuhost.read(root).cdi_problems["/etc/cdi/attnrepro.json"] == (
        "written for driver 580.95.05, but 590.48.01 is loaded",
    )


def test_spec_of_a_machine_without_gpu_is_refused() -> None:
    with pytest.raises(Unavailable, match="no NVIDIA device"):
        cdi.make_spec(GpuHost())


def test_spec_that_cannot_be_written(tmp_path: Path) -> None:
    host = gpuhost.read(nvidia_machine(tmp_path))
    put(tmp_path, "/file")
    with pytest.raises(Unavailable, match="cannot write"):
        cdi.write_spec(host, tmp_path / "file" / "x.json")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.json", "{"),
        ("a.json", "[]"),
        ("a.json", "null"),
        ("a.json", json.dumps({"kind": "x", "devices": [{"name": "0", "containerEdits": 3}]})),
        ("a.yaml", "a: [b"),
        ("a.yaml", "!!python/object/apply:os.system ['true']"),
        ("a.yaml", "kind: x"),
    ],
)
def test_damaged_specs_are_named_not_used(tmp_path: Path, name: str, text: str) -> None:
    with pytest.raises(InvalidDocument):
        cdi.parse_spec(text, name)
    put(tmp_path, f"/etc/cdi/{name}", text)
    specs, problems = cdi.load_specs(tmp_path)
    assert specs == ()
    assert list(problems) == [f"/etc/cdi/{name}"]
