from __future__ import annotations

import os
from typing import Any

import pytest
from host_fakes import FakeEngine

from attnrepro.errors import Unavailable, UsageError
from attnrepro.placement import check_architecture, list_form, place, spread


def asked(**device: Any) -> dict[str, Any]:
    usual: dict[str, Any] = {"vendor": "cpu", "threads": 1, "count": 1, "architectures": []}
    wanted = usual | {"clocks": {"policy": "observe", "sm_mhz": None}} | device
    return {"device": wanted, "limits": {"memory_bytes": 1 << 30}}


def test_threads_get_one_core_each() -> None:
    placement = place(asked(), FakeEngine(), device=None)
    assert placement.cpuset == str(min(os.sched_getaffinity(0)))
    assert placement.memory_bytes == 1 << 30
    assert placement.device_id == "cpu"


def test_more_threads_than_cores_are_refused() -> None:
    with pytest.raises(Unavailable, match="asks for 100000 threads"):
        place(asked(threads=100000), FakeEngine(), device=None)


def test_gpu_needs_an_engine_that_can_give_one() -> None:
    with pytest.raises(Unavailable, match="cannot give a GPU"):
        place(asked(vendor="nvidia"), FakeEngine(), device=None)


def test_device_of_another_vendor_is_refused() -> None:
    with pytest.raises(Unavailable, match="asks for a device of nvidia"):
        place(asked(vendor="nvidia"), FakeEngine(), device="cpu")


def test_physical_cores_come_before_their_siblings() -> None:
    siblings = {0: 0, 1: 1, 2: 0, 3: 1}
    assert spread([0, 1, 2, 3], 2, siblings=siblings) == [0, 1]
    assert spread([0, 2, 3], 2, siblings=siblings) == [0, 3]
    assert spread([0, 1, 2, 3], 3, siblings=siblings) == [0, 1, 2]


@pytest.mark.parametrize(
    ("cores", "text"), [([0], "0"), ([0, 1, 2, 8], "0-2,8"), ([1, 3, 4], "1,3-4")]
)
def test_list_form(cores: list[int], text: str) -> None:
    assert list_form(cores) == text


def test_higher_level_of_a_cpu_serves_a_lower_one() -> None:
    check_architecture(["x86_64_v3"], {"isa": "x86_64_v4"})
    check_architecture([], {"isa": None})
    with pytest.raises(Unavailable, match="for x86_64_v4: this device is x86_64_v3"):
        check_architecture(["x86_64_v4"], {"isa": "x86_64_v3"})


def test_gpu_of_another_architecture_is_refused() -> None:
    with pytest.raises(Unavailable, match="for sm_90: this device is sm_80"):
        check_architecture(["sm_90"], {"architecture": "sm_80"})
    with pytest.raises(Unavailable, match="no driver"):
        check_architecture(["sm_90"], {"reason": "no driver"})


def test_a_clock_is_locked_by_the_flag_and_the_manifest_together() -> None:
    clocks = {"policy": "lock", "sm_mhz": 1200}
    with pytest.raises(UsageError, match="--lock-clocks is not given"):
        place(asked(vendor="nvidia", clocks=clocks), FakeEngine(), device=None)
    with pytest.raises(UsageError, match="with the clock policy observe"):
        place(asked(vendor="nvidia"), FakeEngine(), device=None, lock_clocks=True)
    with pytest.raises(Unavailable, match="of amd is not set"):
        place(asked(vendor="amd", clocks=clocks), FakeEngine(), device=None, lock_clocks=True)


def test_a_required_clock_is_the_runners_to_hold_to() -> None:
    clocks = {"policy": "require", "sm_mhz": 1200}
    with pytest.raises(Unavailable, match="cannot give a GPU"):  # past the clocks
        place(asked(vendor="nvidia", clocks=clocks), FakeEngine(), device=None)


def test_several_devices_are_refused() -> None:
    with pytest.raises(Unavailable, match="asks for 2 devices"):
        place(asked(vendor="nvidia", count=2), FakeEngine(), device=None)


def test_a_device_is_not_named_in_vain() -> None:
    with pytest.raises(UsageError, match="is for the CPU"):
        place(asked(), FakeEngine(), device="nvidia:7")
