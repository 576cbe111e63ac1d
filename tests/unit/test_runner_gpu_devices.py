"""The neutral device record, filled from a stand-in of NVML; processes on a device."""

from __future__ import annotations

import json
import os
import sys
import types
from typing import TYPE_CHECKING

import pytest

from attnrepro_runner import accelerator, amdsmi, device, nvml

if TYPE_CHECKING:
    from pathlib import Path

KEY = bytes(range(32))
UUID = "GPU-11111111-2222-3333-4444-555555555555"


class NVMLError(Exception):
    """As pynvml's."""


class FakeNvml(types.ModuleType):
    """The calls that an H200 answers; the others raise, as NVML does."""

    NVMLError = NVMLError

    def __init__(self) -> None:
        super().__init__("pynvml")
        self.open = 0
        self.reasons = 0x4
        self.pids = [os.getpid()]

    def nvmlInit(self) -> None:
        self.open += 1

    def nvmlShutdown(self) -> None:
        self.open -= 1

    def nvmlDeviceGetHandleByIndex(self, index: int) -> str:
        if index:
            raise NVMLError("Invalid Argument")
        return "handle"

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        if uuid != UUID:
            raise NVMLError("Not Found")
        return "handle"

    def nvmlDeviceGetName(self, handle: str) -> bytes:
        return b"NVIDIA H200"

    def nvmlDeviceGetCudaComputeCapability(self, handle: str) -> tuple[int, int]:
        return 9, 0

    def nvmlDeviceGetMigMode(self, handle: str) -> list[int]:
        return [0, 0]

    def nvmlSystemGetCudaDriverVersion_v2(self) -> int:
        return 13020

    def nvmlSystemGetDriverVersion(self) -> str:
        return "580.159.04"

    def nvmlSystemGetNVMLVersion(self) -> str:
        return "13.580.159.04"

    def nvmlDeviceGetPowerManagementLimitConstraints(self, handle: str) -> list[int]:
        return [200000, 700000]

    def nvmlDeviceGetEnforcedPowerLimit(self, handle: str) -> int:
        return 700000

    def nvmlDeviceGetEccMode(self, handle: str) -> list[int]:
        return [1, 1]

    def nvmlDeviceGetMemoryInfo(self, handle: str) -> types.SimpleNamespace:
        return types.SimpleNamespace(total=150754820096, used=1 << 30)

    def nvmlDeviceGetVbiosVersion(self, handle: str) -> str:
        return "96.00"

    def nvmlDeviceGetPersistenceMode(self, handle: str) -> int:
        return 1

    def nvmlDeviceGetMaxClockInfo(self, handle: str, domain: int) -> int:
        return {1: 1980, 2: 3201}[domain]

    def nvmlDeviceGetDefaultApplicationsClock(self, handle: str, domain: int) -> int:
        raise NVMLError("Not Supported")

    def nvmlDeviceGetClockInfo(self, handle: str, domain: int) -> int:
        return {1: 1755, 2: 3201}[domain]

    def nvmlDeviceGetPowerUsage(self, handle: str) -> int:
        return 693211

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: str) -> int:
        return 123456789

    def nvmlDeviceGetTemperature(self, handle: str, sensor: int) -> int:
        return 51

    def nvmlDeviceGetCurrentClocksEventReasons(self, handle: str) -> int:
        return self.reasons

    def nvmlDeviceGetComputeRunningProcesses(self, handle: str) -> list[types.SimpleNamespace]:
        return [types.SimpleNamespace(pid=pid) for pid in self.pids]

    def nvmlDeviceGetUUID(self, handle: str) -> str:
        return UUID

    def nvmlDeviceGetSerial(self, handle: str) -> str:
        return "1654321000000"


@pytest.fixture
def fake_nvml(monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    fake = FakeNvml()
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    monkeypatch.setattr(nvml, "in_process_namespace", lambda: False)
    return fake


def test_record_of_nvml(fake_nvml: FakeNvml) -> None:
    device = nvml.open_nvml(uuid=UUID.removeprefix("GPU-"))
    record = device.record()
    assert (record.vendor, record.model, record.architecture) == ("nvidia", "NVIDIA H200", "sm_90")
    assert record.ecc is True
    assert record.partition == "whole"
    assert record.runtime == "CUDA 13.2"
    assert (record.power_limit_mw, record.power_min_limit_mw) == (700000, 200000)
    assert record.sm_clock_max_mhz == 1980
    assert record.persistence is True
    # What the device does not offer is null with NVML's own words, what the binding lacks too.
    assert record.sm_clock_default_mhz is None
    assert "Not Supported" in record.absent["sm_clock_default_mhz"]
    assert record.pci_width is None
    assert "nvmlDeviceGetMaxPcieLinkWidth" in record.absent["pci_width"]
    device.close()
    assert fake_nvml.open == 0


def test_nothing_that_names_the_device_is_recorded(fake_nvml: FakeNvml) -> None:
    device = nvml.open_nvml()
    text = json.dumps([device.record().to_dict(), device.sample().to_dict()])
    assert "11111111" not in text
    assert "1654321" not in text
    digest = device.identity(KEY)
    assert digest is not None
    assert len(digest) == 64
    assert digest == device.identity(KEY)
    assert digest != device.identity(bytes(32))
    with pytest.raises(ValueError, match="32 bytes"):
        device.identity(b"short")


def test_identity_separates_its_parts() -> None:
    one = accelerator.keyed_identity(KEY, uuid="ab", serial="c")
    assert one != accelerator.keyed_identity(KEY, uuid="a", serial="bc")
    assert accelerator.keyed_identity(KEY, uuid=None, serial=None) is None


def test_sample_of_nvml(fake_nvml: FakeNvml) -> None:
    device = nvml.open_nvml()
    sample = device.sample()
    assert (sample.sm_clock_mhz, sample.memory_clock_mhz) == (1755, 3201)
    assert (sample.power_mw, sample.temperature_c) == (693211, 51)
    assert device.energy_mj() == 123456789
    assert sample.throttle == ("software_power_cap",)
    assert sample.throttle_raw == 4
    assert sample.memory_temperature_c is None
    assert sample.memory_used_bytes == 1 << 30


def test_throttle_names_keep_unknown_bits() -> None:
    assert nvml.throttle_names(0) == ()
    assert nvml.throttle_names(0x24) == ("software_power_cap", "software_thermal")
    assert nvml.throttle_names(0x401) == ("idle", "unknown_0x400")


def test_the_frameworks_own_device_is_opened(fake_nvml: FakeNvml) -> None:
    fake_nvml.nvmlDeviceGetHandleByUUID = lambda uuid: {UUID: "other"}[uuid]  # type: ignore[method-assign]
    fake_nvml.nvmlDeviceGetName = {"handle": b"first", "other": b"NVIDIA H200"}.__getitem__  # type: ignore[method-assign]
    found = device.Device("nvidia", 1)
    assert found.record["name"] == "first"
    facts = {"uuid": UUID.removeprefix("GPU-"), "compute_units": 132, "last_level_cache_bytes": 7}
    found.learn(facts)
    found.learn(facts)
    assert found.record["name"] == "NVIDIA H200"
    assert (found.record["compute_units"], found.record["last_level_cache_bytes"]) == (132, 7)
    assert UUID.removeprefix("GPU-") not in json.dumps(found.record)
    assert fake_nvml.open == 1
    found.close()
    assert fake_nvml.open == 0


def test_a_lost_device_is_not_a_null(fake_nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    device = nvml.open_nvml()

    def lost(handle: str, domain: int) -> int:
        raise NVMLError("GPU is lost")

    monkeypatch.setattr(fake_nvml, "nvmlDeviceGetClockInfo", lost)
    with pytest.raises(accelerator.AcceleratorUnavailable, match="lost"):
        device.sample()


def test_other_processes_are_counted(fake_nvml: FakeNvml) -> None:
    device = nvml.open_nvml()
    assert device.other_processes() == 0
    fake_nvml.pids = [os.getpid(), 1]
    assert device.other_processes() == 1
    fake_nvml.pids = []
    assert device.other_processes() == 0


@pytest.mark.parametrize(
    ("listed", "ours", "others"),
    [
        ([4001, 4002], 2, 0),  # the host's ids, as many as we have
        ([4001, 4002, 4003], 2, 1),
        ([4001], 2, None),  # not even all of ours
        ([], 2, None),
        ([4001], 0, None),  # nothing of ours proves that the list shows everybody
        ([5, 6], 2, None),  # translated: who is outside is left out
        ([5, 6, 9], 2, 1),
    ],
)
def test_in_a_namespace_of_its_own_numbers_are_compared(
    tmp_path: Path, listed: list[int], ours: int, others: int | None
) -> None:
    # 1, the root, reads the device's state and computes nothing; 9 is somebody else's.
    processes = ((1, 0, ["nvidiactl", "nvidia0"]), (5, 1, ["nvidia-uvm"]), (6, 5, ["nvidia-uvm"]))
    for pid, parent, nodes in (*processes, (9, 0, ["nvidia-uvm"])):
        folder = tmp_path / str(pid) / "fd"
        folder.mkdir(parents=True)
        _stat(tmp_path, pid, parent)
        for n, node in enumerate(nodes if pid < 5 + ours else []):
            (folder / str(n)).symlink_to(f"/dev/{node}")
    found = accelerator.count_others(listed, namespaced=True, root=1, proc=tmp_path)
    assert found == others
    found = accelerator.count_others(listed, namespaced=False, root=1, proc=tmp_path)
    assert found == len(set(listed) - {1, 5, 6})


def _stat(proc: Path, pid: int, parent: int) -> None:
    (proc / str(pid)).mkdir(exist_ok=True)
    (proc / str(pid) / "stat").write_text(f"{pid} (a) b) S {parent} 0 0\n")


def test_a_file_that_is_closed_meanwhile_hides_no_process(tmp_path: Path) -> None:
    folder = tmp_path / "5" / "fd"
    folder.mkdir(parents=True)
    (folder / "0").write_text("no link")  # readlink fails, as of a file that is gone
    (folder / "socket").symlink_to("/dev/null")
    (folder / "9").symlink_to("/dev/nvidia-uvm")
    assert accelerator.contexts([5, 6], tmp_path) == 1
    assert not accelerator._is_context(folder / "0")  # whichever is listed first


def test_process_tree(tmp_path: Path) -> None:
    for pid, parent in ((10, 1), (11, 10), (12, 11), (20, 1)):
        _stat(tmp_path, pid, parent)
    assert accelerator.process_tree(10, tmp_path) == {10, 11, 12}


def test_a_process_whose_parents_cannot_be_read_is_not_ours(tmp_path: Path) -> None:
    for pid, parent in ((11, 10), (12, 11), (21, 22), (22, 21)):  # 10 is gone, 21 and 22 a circle
        _stat(tmp_path, pid, parent)

    def others(*pids: int, root: int) -> int | None:
        return accelerator.count_others(pids, namespaced=False, root=root, proc=tmp_path)

    assert others(11, 12, root=11) == 0
    assert others(12, 21, 22, 99, -1, root=10) == 4  # 12 descends of 10, by what 11 says
    assert others(0, root=10) == 1
    (tmp_path / "12" / "stat").write_bytes(b"12 (\xff) S")  # cut off, and a name of any bytes
    assert others(12, root=10) == 1


@pytest.mark.parametrize(
    ("status", "init", "nested"),
    [
        ("NSpid:\t7\n", "systemd", False),
        ("NSpid:\t7\t1\n", "systemd", True),
        ("NSpid:\t7\n", "python3", True),
    ],
)
def test_process_namespace(tmp_path: Path, status: str, init: str, nested: bool) -> None:
    (tmp_path / "self").mkdir()
    (tmp_path / "1").mkdir()
    (tmp_path / "self/status").write_text(f"Name:\tx\n{status}")
    (tmp_path / "1/comm").write_text(init + "\n")
    assert accelerator.in_process_namespace(tmp_path) is nested


def test_without_a_library_or_device_the_reason_is_told(
    monkeypatch: pytest.MonkeyPatch, fake_nvml: FakeNvml
) -> None:
    with pytest.raises(accelerator.AcceleratorUnavailable, match="Invalid Argument"):
        nvml.open_nvml(index=1)
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with pytest.raises(accelerator.AcceleratorUnavailable, match="not installed"):
        nvml.open_nvml()
    monkeypatch.setitem(sys.modules, "amdsmi", None)
    with pytest.raises(accelerator.AcceleratorUnavailable, match="cannot be imported"):
        amdsmi.open_amdsmi()
