"""What a manifest may claim of a call's bits, and of which tensors it then claims it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

TENSORS: Final = ("out", "lse", "dq", "dk", "dv")
"""Tensors of a call whose bits are observed."""

CLAIMED: Final[Mapping[str, tuple[str, ...]]] = {
    "bitwise": TENSORS,
    # Most backwards add partial sums in the order in which blocks end (measured on an H200:
    # docs/hopper.md), most forwards do not.
    "forward": ("out", "lse"),
    "none": (),
}
"""A manifest's `bits.claim` to the tensors of which equal bits are claimed."""


def broken(claim: str, observed: Mapping[str, str]) -> list[str]:
    """Return the tensors whose bits differed against a claim, in the order of `TENSORS`.

    Args:
        claim: a key of `CLAIMED`.
        observed: tensor to "repeats" or "differs".

    """
    return [name for name in CLAIMED[claim] if observed.get(name) == "differs"]
