"""What a cold start counts as import: torch, the adapter, and the library under test."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest
import torch
from numerics_fakes import ReferenceBackend

from attnrepro_runner import caches, stages, toolchain, worker
from attnrepro_runner.backends import base, registry

if TYPE_CHECKING:
    from collections.abc import Iterator

SHARED = {"timing": {"flush_cache": False}}
SECONDS = 0.1


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> Iterator[worker.Service]:
    """A worker's service in this process, whose notes nobody reads."""
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
    with Path(os.devnull).open("wb") as notes:
        yield worker.Service(notes.fileno())


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The interface of a build of FlashAttention-3, which takes its time to be imported."""
    path = tmp_path / "fa3_fwd_interface.py"
    path.write_text(f"import time\ntime.sleep({SECONDS})\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield path
    sys.modules.pop("fa3_fwd_interface", None)


def hello(service: worker.Service, backend: str) -> dict[str, object]:
    subject = {"id": "s", "backend": backend, "options": {}}
    return service.do_hello({"subject": subject, "shared": SHARED})


def test_the_librarys_import_is_counted(service: worker.Service, library: Path) -> None:
    hello(service, "flash_attn_3")
    assert "fa3_fwd_interface" in sys.modules
    assert service._import_ns >= SECONDS * 1e9


def test_a_library_that_cannot_be_imported_is_left_to_availability(
    service: worker.Service, library: Path
) -> None:
    library.write_text("raise OSError('no such symbol')\n")
    assert "framework" in hello(service, "flash_attn_3")
    found = registry.load("flash_attn_3").availability()
    assert not found.available
    assert "no such symbol" in str(found.reason)


def test_every_shipped_adapter_names_the_modules_of_its_library() -> None:
    for name in registry.BACKENDS:
        named = registry.load(name).modules({})  # type: ignore[attr-defined]
        assert bool(named) is not name.startswith(("eager", "sdpa")), name
    swapped = registry.load("torch.varlen").modules({"implementation": "fa4"})  # type: ignore[attr-defined]
    assert swapped == ("torch.nn.attention.varlen", "flash_attn.cute.interface")


def test_an_adapter_that_names_no_modules_is_asked_for_its_availability() -> None:
    asked: list[str] = []

    class Own(ReferenceBackend):
        def availability(self) -> base.Availability:
            asked.append("availability")
            return super().availability()

    base.import_modules(Own(), {})
    assert asked == ["availability"]


@pytest.mark.parametrize(
    "name",
    [
        *("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "CUDA_CACHE_PATH"),
        *("FLASH_ATTENTION_CUTE_DSL_CACHE_DIR", "FLASHINFER_WORKSPACE_BASE"),
    ],
)
def test_what_a_library_compiles_goes_into_the_runs_own_folder(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cache below the home folder would outlive the cold start that is to be cold."""
    folder = Path(caches.environment(tmp_path)[name])
    assert folder.is_relative_to(tmp_path)
    monkeypatch.setenv(name, str(folder))
    code = folder / "below" / "kernel.so"
    code.parent.mkdir(parents=True)
    code.write_bytes(b"\x7fELF")
    assert code in toolchain.compiled()


def test_a_worker_primes_its_subjects_device(
    service: worker.Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[object] = []
    monkeypatch.setattr(stages, "prime", found.append)
    service._subject = SimpleNamespace(device="cuda:0")  # type: ignore[assignment]
    assert service.answer({"do": "prime"}) == {"done": {}}
    assert found == ["cuda:0"]
