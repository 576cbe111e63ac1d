"""Which device it was, told to its owner alone.

A digest keyed by a secret of the signer's: the same owner can show that two artifacts come from two
devices, and nobody can guess a serial number back from it.
"""

from __future__ import annotations

import os
import secrets
from typing import TYPE_CHECKING

from attnrepro import files
from attnrepro.errors import UsageError

if TYPE_CHECKING:
    from pathlib import Path

KEY_BYTES = 32


def key_path() -> Path:
    """Where the secret lies; it never enters an artifact."""
    return files.state_dir() / "device-identity.key"


def load_or_create_key() -> bytes:
    """The signer's secret, made at first use with mode 0600. Raises UsageError."""
    path = key_path()
    try:
        key = path.read_bytes()
    except FileNotFoundError:
        key = secrets.token_bytes(KEY_BYTES)
        path.parent.mkdir(parents=True, exist_ok=True)
        files.atomic_write(path, key, mode=0o600)
        return key
    except OSError as error:
        message = f"cannot read {path}: {error.strerror}"
        raise UsageError(message, hint="give it back to its owner, or remove it") from None
    if len(key) != KEY_BYTES:
        message = f"{path} holds {len(key)} bytes, not {KEY_BYTES}"
        raise UsageError(message, hint="remove it: another one is made, and older digests stay")
    return key


def identify(vendor: str, device_id: str) -> str | None:
    """Keyed digest of a GPU; None for a CPU, or where its library tells no name.

    Args:
        vendor: cpu, nvidia or amd.
        device_id: as the placement has it: a UUID, or a device node.
    """
    if vendor != "nvidia":
        return None
    from attnrepro_runner import nvml
    from attnrepro_runner.accelerator import AcceleratorUnavailable

    uuid = device_id if device_id.startswith(("GPU-", "MIG-")) else None
    try:
        device = nvml.open_nvml(uuid=uuid, index=_index(device_id))
    except AcceleratorUnavailable:
        return None
    try:
        return device.identity(load_or_create_key())
    finally:
        device.close()


def _index(device_id: str) -> int:
    digits = os.path.basename(device_id).removeprefix("nvidia")  # noqa: PTH119 - a device node
    return int(digits) if digits.isdecimal() else 0
