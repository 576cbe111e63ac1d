"""On which devices a result must repeat, and on which its times may be compared."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

    from attnrepro.jsonio import JsonObject

CLASS_FIELDS: Final = (
    "vendor",
    "cpu_vendor",
    "family",
    "model_number",
    "model",
    "architecture",
    "isa",
    "compute_units",
    "threads",
    "power_limit_mw",
)
"""Fields of a device's neutral record that make its class; which exist depends on the device."""

_SCOPES: Final[dict[str, tuple[str, ...]]] = {
    "same_device_model": (
        "vendor",
        "cpu_vendor",
        "family",
        "model_number",
        "architecture",
        "isa",
        "compute_units",
        "threads",
    ),
    "same_isa": ("vendor", "cpu_vendor", "isa", "threads"),
    "any": (),
}
"""Scope of the manifest's bit contract to the fields that must be equal."""

_GPU_MODEL: Final = ("model",)
"""A GPU's name belongs to its model; a CPU's brand string differs within one model number."""


def device_class(device: Mapping[str, Any], *, threads: int | None) -> JsonObject:
    """The class of a device from its record; only what is known stands in it."""
    found = {name: device[name] for name in CLASS_FIELDS if device.get(name) is not None}
    if threads is not None:
        found["threads"] = threads
    return found


def outside(scope: str, declared: Mapping[str, Any], here: Mapping[str, Any]) -> str | None:
    """Why a device is outside the scope that was declared on another one; None if it is inside.

    Args:
        scope: `bits.scope` of the manifest.
        declared: class of the device on which the artifact was made.
        here: class of this device.
    """
    fields = _SCOPES[scope]
    if scope == "same_device_model" and declared.get("vendor") != "cpu":
        fields += _GPU_MODEL
    return _first_difference(fields, declared, here)


def other_class(declared: Mapping[str, Any], here: Mapping[str, Any]) -> str | None:
    """Why times on two devices are not comparable; None if the classes are equal."""
    return _first_difference(CLASS_FIELDS, declared, here)


def _first_difference(
    fields: tuple[str, ...], declared: Mapping[str, Any], here: Mapping[str, Any]
) -> str | None:
    for name in fields:
        if declared.get(name) != here.get(name):
            return f"{name} {_word(here.get(name))} here, {_word(declared.get(name))} there"
    return None


def _word(value: object) -> str:
    return "unknown" if value is None else str(value)
