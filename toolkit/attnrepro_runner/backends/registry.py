"""From a backend's name to its adapter, which alone is imported."""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, cast

from attnrepro_runner.backends.base import Unsupported

if TYPE_CHECKING:
    from attnrepro_runner.backends.base import Backend

_PACKAGE = "attnrepro_runner.backends"

ADAPTER_FOLDER = "/opt/attnrepro"
"""Where an image of the user's own holds its adapter, and nothing else."""

BACKENDS = {
    "eager": ("eager", "EagerBackend"),
    "sdpa.math": ("sdpa", "SdpaMath"),
    "sdpa.flash": ("sdpa", "SdpaFlash"),
    "sdpa.efficient": ("sdpa", "SdpaEfficient"),
    "sdpa.cudnn": ("sdpa", "SdpaCudnn"),
    "flex": ("flex", "FlexBackend"),
    "torch.varlen": ("varlen", "TorchVarlen"),
    "flash_attn_2": ("flash_attn_2", "FlashAttention2"),
    "flash_attn_2.rocm_ck": ("flash_attn_2", "FlashAttention2RocmCk"),
    "flash_attn_2.rocm_triton": ("flash_attn_2", "FlashAttention2RocmTriton"),
    "flash_attn_3": ("flash_attn_3", "FlashAttention3"),
    "flash_attn_4": ("flash_attn_4", "FlashAttention4"),
    "cudnn_frontend": ("cudnn_frontend", "CudnnFrontend"),
    "flashinfer": ("flashinfer", "Flashinfer"),
}
"""Backend name to (module, class) in this package."""

_PARTS = (
    "availability",
    "check",
    "consumed",
    "memory_order",
    "patterns",
    "prepare",
    "name",
    "empty_row_lse",
    "option_names",
)


def load(name: str, adapter: str | None = None) -> Backend:
    """Return the adapter of a backend.

    Args:
        name: as the manifest spells it.
        adapter: module that the subject's own image carries. Its `BACKEND` adds the one name that
            it bears; a built-in name always means the built-in adapter.

    Raises:
        Unsupported: no such backend, or the module is not a whole adapter.

    """
    if name in BACKENDS:
        module_name, class_name = BACKENDS[name]
        module = importlib.import_module(f"{_PACKAGE}.{module_name}")
        return cast("Backend", getattr(module, class_name)())
    if adapter is None:
        message = f"no backend {name!r}; this runner knows {', '.join(sorted(BACKENDS))}"
        raise Unsupported(message)
    if ADAPTER_FOLDER not in sys.path:
        sys.path.insert(0, ADAPTER_FOLDER)
    try:
        backend = getattr(importlib.import_module(adapter), "BACKEND", None)
    except ImportError as error:
        message = f"the adapter module {adapter} cannot be imported: {error}"
        raise Unsupported(message) from error
    missing = [part for part in _PARTS if not hasattr(backend, part)]
    if missing:
        message = f"{adapter}.BACKEND lacks {', '.join(missing)}"
        raise Unsupported(message)
    found = cast("Backend", backend)
    if found.name != name:
        message = f"{adapter}.BACKEND is named {found.name!r}, the manifest asks for {name!r}"
        raise Unsupported(message)
    return found
