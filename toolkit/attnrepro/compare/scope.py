"""On which devices a result must repeat, and on which its times may be compared."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

    from attnrepro.jsonio import JsonObject

CLASS_FIELDS: Final = (
    "kind",
    "vendor",
    "name",
    "family",
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
        *("kind", "vendor", "family", "model", "architecture", "isa", "compute_units", "threads"),
    ),
    "same_isa": ("kind", "vendor", "isa", "threads"),
    "any": (),
}
"""Scope of the manifest's bit contract to the fields that must be equal."""

_PORTABLE: Final = {"x86_64_v4": "x86_64_v3"}
"""Under the portable profile a CPU computes as one of this level, whatever else it can."""


def device_class(device: Mapping[str, Any]) -> JsonObject:
    """The class of a device from its record; only what is known stands in it."""
    return {name: device[name] for name in CLASS_FIELDS if device.get(name) is not None}


def outside(
    bits: Mapping[str, Any],
    declared: Mapping[str, Any],
    here: Mapping[str, Any],
    *,
    before_the_run: bool = False,
) -> str | None:
    """Why a device is outside the scope that was declared on another one; None if it is inside.

    Args:
        bits: the manifest's bit contract.
        declared: class of the device on which the artifact was made.
        here: class of this device.
        before_the_run: only what is known of this device counts; the framework tells the rest.
    """
    if bits["profile"] == "portable":
        declared, here = _as_portable(declared), _as_portable(here)
    fields = _SCOPES[bits["scope"]]
    if before_the_run:
        fields = tuple(name for name in fields if here.get(name) is not None)
    return _first_difference(fields, declared, here)


def other_class(declared: Mapping[str, Any], here: Mapping[str, Any]) -> str | None:
    """Why times on two devices are not comparable; None if the classes are equal."""
    return _first_difference(CLASS_FIELDS, declared, here)


def _as_portable(device: Mapping[str, Any]) -> dict[str, Any]:
    return {**device, "isa": _PORTABLE.get(str(device.get("isa")), device.get("isa"))}


def _first_difference(
    fields: tuple[str, ...], declared: Mapping[str, Any], here: Mapping[str, Any]
) -> str | None:
    for name in fields:
        if declared.get(name) != here.get(name):
            return f"{name} {_word(here.get(name))} here, {_word(declared.get(name))} there"
    return None


def _word(value: object) -> str:
    return "unknown" if value is None else str(value)
