"""`python -m attnrepro_runner smoke`: what this image's libraries are, without a device, as JSON.

Each library but torch is imported in a process of its own, since what one import does to a process
another should not see. Exit status 0 says that torch imports; that a backend is not available here
(its library is not in the image, or wants the driver) is an answer, not a failure.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Final

from attnrepro_runner import __version__
from attnrepro_runner.backends.registry import BACKENDS

_SYMBOLS: Final = {
    "flash_attn_2": (
        "flash_attn.flash_attn_interface",
        ("flash_attn_func", "flash_attn_varlen_func", "flash_attn_with_kvcache"),
    ),
    "flash_attn_3": ("fa3_fwd_interface", ("flash_attn_func", "flash_attn_with_kvcache")),
    "flash_attn_4": ("flash_attn.cute", ("flash_attn_func", "flash_attn_varlen_func")),
    "cudnn_frontend": ("cudnn", ("pygraph", "backend_version", "create_handle")),
    "flashinfer": (
        "flashinfer",
        (
            "BatchDecodeWithPagedKVCacheWrapper",
            "BatchPrefillWithPagedKVCacheWrapper",
            "BatchPrefillWithRaggedKVCacheWrapper",
        ),
    ),
    "torch.varlen": ("torch.nn.attention.varlen", ("varlen_attn",)),
    "flex": ("torch.nn.attention.flex_attention", ("flex_attention", "create_block_mask")),
}
"""What a backend calls; of FlashAttention 3 the wheel's own module."""

_OF_TORCH: Final = frozenset({"eager", "sdpa", "flex", "varlen"})
"""Adapters whose library is torch, which is imported here anyway."""

_TOOLS: Final = ("nvcc", "ptxas", "hipcc", "gcc", "g++", "ninja")
_SECONDS: Final = 600


def main(arguments: list[str]) -> int:
    """Print the answers; with a backend's name, that backend's alone."""
    if arguments:
        sys.stdout.write(json.dumps(backend(arguments[0])) + "\n")
        return 0
    facts: dict[str, object] = {
        "runner": __version__,
        "python": sys.version.split()[0],
        "distributions": distributions(),
        "tools": {name: tool(name) for name in _TOOLS},
        "torch": torch_facts(),
        "backends": {
            name: backend(name) if module in _OF_TORCH else _apart(name)
            for name, (module, _) in BACKENDS.items()
        },
    }
    sys.stdout.write(json.dumps(facts, indent=1, sort_keys=True) + "\n")
    return 0 if facts["torch"] else 70


def distributions() -> dict[str, str]:
    """Return every installed distribution with its version."""
    found = {
        str(item.metadata["Name"]).lower().replace("_", "-"): item.version
        for item in importlib.metadata.distributions()
    }
    return dict(sorted(found.items()))


def tool(name: str) -> str | None:
    """Return the line of a compiler's `--version` that has the version, or None without one."""
    try:
        done = subprocess.run(
            [name, "--version"], capture_output=True, text=True, check=False, timeout=60
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    lines = [line for line in done.stdout.splitlines() if any(c.isdigit() for c in line)]
    lines.sort(key=lambda line: "release" not in line)
    return lines[0] if lines else None


def torch_facts() -> dict[str, object] | None:
    """Return what torch was built for, and the digests of its kernel-bearing libraries."""
    from attnrepro_runner.libraries import kernel_libraries, torch_availability

    found = torch_availability()
    if not found.available:
        return None
    return {
        "version": found.version,
        "flags": dict(found.flags),
        "files": dict(found.files),
        "built_for": _built_for(),
        "loaded": kernel_libraries(),
    }


def _built_for() -> list[str]:
    """Architectures of torch's kernels; torch's own function tells none without a device."""
    import torch

    tell = getattr(torch._C, "_cuda_getArchFlags", None)
    return str(tell() or "").split() if tell is not None else []


def backend(name: str) -> dict[str, object]:
    """Return whether a backend's library can be imported, which files it is, and its functions."""
    from attnrepro_runner.backends import registry

    try:
        found = registry.load(name).availability()
    except Exception as error:  # an adapter whose module needs what is not here
        reason = f"{type(error).__name__}: {error}"
        return {"available": False, "version": None, "reason": reason, "files": {}, "symbols": {}}
    return {
        "available": found.available,
        "version": found.version,
        "reason": found.reason,
        "files": dict(found.files),
        "flags": dict(found.flags),
        "symbols": _symbols(name) if found.version else {},
    }


def _symbols(name: str) -> dict[str, list[str] | None]:
    """Parameters of each function that the backend calls; None where it is not there."""
    if name not in _SYMBOLS:
        return {}
    module_name, names = _SYMBOLS[name]
    try:
        module = importlib.import_module(module_name)
    except Exception:
        return dict.fromkeys((f"{module_name}.{item}" for item in names), None)
    return {f"{module_name}.{item}": _parameters(getattr(module, item, None)) for item in names}


def _parameters(function: object) -> list[str] | None:
    if not callable(function):
        return None
    try:
        return list(inspect.signature(function).parameters)
    except (TypeError, ValueError):  # built into an extension, which tells none
        return []


def _apart(name: str) -> dict[str, object]:
    """Ask for one backend in a process of its own."""
    root = str(Path(__file__).parent.parent)
    path = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
    failed: dict[str, object] = {"available": False, "version": None, "files": {}, "symbols": {}}
    try:
        done = subprocess.run(
            [sys.executable, "-m", "attnrepro_runner", "smoke", name],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            timeout=_SECONDS,
            env={**os.environ, "PYTHONPATH": path},
        )
    except subprocess.TimeoutExpired:
        return {**failed, "reason": f"importing it did not end within {_SECONDS} s"}
    try:
        answer: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        last = (done.stderr.strip().splitlines() or ["nothing"])[-1]
        return {**failed, "reason": f"the process ended with {done.returncode}: {last}"}
    return answer
