"""The neutral device record, filled from a stand-in of amdsmi."""

from __future__ import annotations

import json
import os
import sys
import types
from typing import TYPE_CHECKING

import pytest
import torch

from attnrepro_runner import accelerator, amdsmi, device, libraries

if TYPE_CHECKING:
    from pathlib import Path

KEY = bytes(range(32))


class AmdSmiException(Exception):
    """As amdsmi's."""


class FakeAmdsmi(types.ModuleType):
    """amdsmi 7.0.2 on an MI300X: keys as its interface returns them."""

    AmdSmiException = AmdSmiException
    AmdSmiClkType = types.SimpleNamespace(GFX="gfx", MEM="mem")
    AmdSmiTemperatureType = types.SimpleNamespace(HOTSPOT="hot", VRAM="vram")
    AmdSmiTemperatureMetric = types.SimpleNamespace(CURRENT="now")

    def __init__(self) -> None:
        super().__init__("amdsmi")
        self.violations: dict[str, object] | None = {
            "active_ppt_pwr": True,
            "active_socket_thrm": False,
            "active_hbm_thrm": "N/A",
        }
        self.throttlers: object = "N/A"
        self.open = 0
        self.gone = False

    def __getattribute__(self, name: str) -> object:
        found = super().__getattribute__(name)
        if name.startswith("amdsmi_get") and self.gone:

            def fail(*_: object) -> object:
                raise AmdSmiException("AMDSMI_STATUS_FILE_ERROR")

            return fail
        return found

    def amdsmi_init(self) -> None:
        self.open += 1

    def amdsmi_shut_down(self) -> None:
        self.open -= 1

    def amdsmi_get_gpu_device_bdf(self, handle: str) -> str:
        return {"gpu0": "0000:0C:00.0", "gpu1": "0000:22:00.0"}[handle]

    def amdsmi_get_processor_handles(self) -> list[str]:
        return ["gpu0", "gpu1"]

    def amdsmi_get_lib_version(self) -> dict[str, object]:
        return {"major": 26, "minor": 0, "release": 2, "build": "x"}

    def amdsmi_get_gpu_asic_info(self, handle: str) -> dict[str, object]:
        return {
            "market_name": "AMD Instinct MI300X" if handle == "gpu0" else "AMD Instinct MI325X",
            "asic_serial": "0x00AA",
            "num_compute_units": 304,
            "target_graphics_version": "gfx942",
        }

    def amdsmi_get_power_cap_info(self, handle: str) -> dict[str, int]:
        return {
            "power_cap": 750000000,
            "default_power_cap": 750000000,
            "min_power_cap": 0,
            "max_power_cap": 750000000,
        }

    def amdsmi_get_gpu_compute_partition(self, handle: str) -> str:
        return "SPX"

    def amdsmi_get_gpu_memory_partition(self, handle: str) -> str:
        return "NPS1"

    def amdsmi_get_gpu_vram_info(self, handle: str) -> dict[str, int]:
        return {"vram_size": 196592}

    def amdsmi_get_clock_info(self, handle: str, kind: str) -> dict[str, object]:
        return {"clk": 2100 if kind == "gfx" else 1300, "max_clk": 2100, "clk_locked": False}

    def amdsmi_get_power_info(self, handle: str) -> dict[str, object]:
        return {"current_socket_power": 612, "average_socket_power": "N/A"}

    def amdsmi_get_energy_count(self, handle: str) -> dict[str, float]:
        return {"energy_accumulator": 2000, "counter_resolution": 15.25, "timestamp": 1}

    def amdsmi_get_temp_metric(self, handle: str, sensor: str, metric: str) -> int:
        return 60

    def amdsmi_get_gpu_activity(self, handle: str) -> dict[str, object]:
        return {"gfx_activity": "N/A"}

    def amdsmi_get_violation_status(self, handle: str) -> dict[str, object]:
        if self.violations is None:
            raise AmdSmiException("not supported")
        return self.violations

    def amdsmi_get_gpu_metrics_info(self, handle: str) -> dict[str, object]:
        return {"throttle_status": True, "indep_throttle_status": self.throttlers}

    def amdsmi_get_gpu_process_list(self, handle: str) -> list[dict[str, int]]:
        return [{"pid": os.getpid()}, {"pid": 1}]

    def amdsmi_get_gpu_device_uuid(self, handle: str) -> str:
        return "aaff-000"


@pytest.fixture
def fake_amdsmi(monkeypatch: pytest.MonkeyPatch) -> FakeAmdsmi:
    fake = FakeAmdsmi()
    monkeypatch.setitem(sys.modules, "amdsmi", fake)
    monkeypatch.setattr(amdsmi, "in_process_namespace", lambda: False)
    return fake


def test_record_of_amdsmi(fake_amdsmi: FakeAmdsmi) -> None:
    device = amdsmi.open_amdsmi()
    record = device.record()
    assert (record.model, record.architecture) == ("AMD Instinct MI300X", "gfx942")
    assert record.compute_units == 304
    assert record.partition == "SPX/NPS1"
    assert record.memory_bytes == 196592 << 20
    assert record.power_limit_mw == 750000
    assert record.clocks_locked is False
    assert record.driver is None
    assert "driver" in record.absent
    assert "aaff" not in json.dumps(record.to_dict())
    assert device.identity(KEY) is not None
    device.close()


def test_sample_of_amdsmi(fake_amdsmi: FakeAmdsmi) -> None:
    device = amdsmi.open_amdsmi()
    sample = device.sample()
    assert (sample.sm_clock_mhz, sample.memory_clock_mhz) == (2100, 1300)
    assert sample.power_mw == 612000
    assert device.energy_mj() == 30
    assert sample.throttle == ("software_power_cap",)
    assert sample.utilization_percent is None
    assert device.other_processes() == 1


def test_older_devices_tell_throttling_by_their_metrics(fake_amdsmi: FakeAmdsmi) -> None:
    fake_amdsmi.violations = None
    assert amdsmi.open_amdsmi().sample().throttle == ("throttled",)
    fake_amdsmi.violations = {"active_ppt_pwr": "N/A"}
    assert amdsmi.open_amdsmi().sample().throttle == ("throttled",)


@pytest.mark.parametrize(
    ("bits", "names"),
    [
        (0, ()),
        (1 << 0 | 1 << 22, ("software_power_cap", "current_limit")),
        (1 << 34 | 1 << 40, ("memory_thermal", "regulator_thermal")),
        (1 << 36, ("software_thermal",)),
        (1 << 47, ("hardware_thermal",)),
        (1 << 57, ("throttled",)),
    ],
)
def test_older_devices_name_what_throttles_them(
    fake_amdsmi: FakeAmdsmi, bits: int, names: tuple[str, ...]
) -> None:
    fake_amdsmi.violations, fake_amdsmi.throttlers = None, bits
    sample = amdsmi.open_amdsmi().sample()
    assert (sample.throttle, sample.throttle_raw) == (names, bits)


def test_metrics_that_name_nothing_are_not_read_as_bits(fake_amdsmi: FakeAmdsmi) -> None:
    fake_amdsmi.violations, fake_amdsmi.throttlers = None, 2**64 - 1
    assert amdsmi.open_amdsmi().sample().throttle == ("throttled",)


def test_an_amd_device_that_answers_nothing_any_more_is_gone(fake_amdsmi: FakeAmdsmi) -> None:
    opened = amdsmi.open_amdsmi()
    opened.sample()
    fake_amdsmi.gone = True
    for _ in range(amdsmi.SILENCES - 1):
        assert opened.sample().power_mw is None
    with pytest.raises(accelerator.AcceleratorUnavailable, match="FILE_ERROR"):
        opened.sample()
    fake_amdsmi.gone = False
    assert opened.sample().power_mw == 612000
    fake_amdsmi.gone = True
    assert opened.sample().power_mw is None  # once is a hiccup


def test_an_amd_device_that_never_answered_is_not_gone(fake_amdsmi: FakeAmdsmi) -> None:
    opened = amdsmi.open_amdsmi()
    fake_amdsmi.gone = True
    for _ in range(2 * amdsmi.SILENCES):
        assert opened.sample().sm_clock_mhz is None


def test_the_frameworks_own_amd_device_is_opened(fake_amdsmi: FakeAmdsmi) -> None:
    found = device.Device("amd", 1)
    assert found.record["name"] == "AMD Instinct MI300X"
    found.learn({"pci": "0000:22:00", "uuid": "not of amdsmi"})
    assert found.record["name"] == "AMD Instinct MI325X"
    assert "0000:22" not in json.dumps(found.record)
    assert fake_amdsmi.open == 1
    with pytest.raises(accelerator.AcceleratorUnavailable, match="none of the framework's PCI"):
        amdsmi.open_amdsmi(pci="0000:77:00")


def test_a_framework_that_names_no_device_is_told_of(fake_amdsmi: FakeAmdsmi) -> None:
    found = device.Device("amd", 1)
    found.learn({"pci": None, "compute_units": 304})
    assert found.record["name"] == "AMD Instinct MI300X"
    assert "does not tell which device it uses" in str(found.record["reason"])


def test_amdsmi_without_its_library_prints_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "amdsmi.py").write_text(
        "print('Unable to find libamd_smi.so library')\n{}['libamd_smi.so']\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "amdsmi", raising=False)
    with pytest.raises(accelerator.AcceleratorUnavailable, match="Unable to find libamd_smi"):
        amdsmi.open_amdsmi()
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("known", [True, False])
def test_the_framework_tells_the_address_of_its_device(
    monkeypatch: pytest.MonkeyPatch, known: bool
) -> None:
    found = types.SimpleNamespace(multi_processor_count=304, L2_cache_size=4 << 20)
    if known:
        vars(found).update(pci_domain_id=1, pci_bus_id=0x22, pci_device_id=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: found)
    facts = libraries.device_facts(torch.device("cuda"))
    assert facts["pci"] == ("0001:22:00" if known else None)
