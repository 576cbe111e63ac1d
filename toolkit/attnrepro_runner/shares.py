"""What attention's speed is worth inside the request that it serves; standard library alone.

The host reads this too: shares and predictions are computed from integers in one place.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

ATTENTION = ("attention", "attention_backward")
"""Stages that are a backend's own work."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """One backend against another inside the same request."""

    attention_share: Fraction
    """Of the baseline's request."""
    attention_ratio: Fraction
    """The baseline's attention time over the candidate's; above 1 is faster."""
    end_to_end_ratio: Fraction
    """Likewise of the whole request, as measured."""
    predicted_ratio: Fraction
    """Likewise, as Amdahl's law gives it from the first two."""
    ceiling_ratio: Fraction
    """What attention of no cost at all would give."""
    largest_remaining: str
    """The candidate's largest stage that is not attention."""


def attention_ns(stages: Mapping[str, int]) -> int:
    """Return the time of attention, in ns."""
    return sum(stages.get(name, 0) for name in ATTENTION)


def attention_share(stages: Mapping[str, int]) -> Fraction:
    """Return attention's share of all stages.

    Raises:
        ValueError: the stages took no time.

    """
    total = sum(stages.values())
    if total <= 0:
        msg = "the stages took no time"
        raise ValueError(msg)
    return Fraction(attention_ns(stages), total)


def largest_remaining(stages: Mapping[str, int]) -> str:
    """Return the largest stage that is not attention; of equals the first by name."""
    rest = {name: value for name, value in stages.items() if name not in ATTENTION}
    return max(sorted(rest), key=lambda name: rest[name])


def amdahl(share: Fraction, ratio: Fraction) -> Fraction:
    """Return the whole's ratio when a share of it becomes `ratio` times as fast."""
    if not 0 <= share <= 1 or ratio <= 0:
        msg = f"a share lies in [0, 1] and a ratio above 0, got {share} and {ratio}"
        raise ValueError(msg)
    return 1 / ((1 - share) + share / ratio)


def compare(
    baseline: Mapping[str, int],
    candidate: Mapping[str, int],
    *,
    baseline_total_ns: int,
    candidate_total_ns: int,
) -> Comparison:
    """Compare two backends by their stages and the times of the undivided request.

    Args:
        baseline: stage to ns, from the pass that marks stages.
        candidate: likewise.
        baseline_total_ns: of the pass without marks.
        candidate_total_ns: likewise.

    """
    share = attention_share(baseline)
    ratio = Fraction(attention_ns(baseline), max(1, attention_ns(candidate)))
    return Comparison(
        attention_share=share,
        attention_ratio=ratio,
        end_to_end_ratio=Fraction(baseline_total_ns, candidate_total_ns),
        predicted_ratio=amdahl(share, ratio),
        ceiling_ratio=1 / (1 - share) if share < 1 else Fraction(0),
        largest_remaining=largest_remaining(candidate),
    )


def least_share(ratio: Fraction, noise: Fraction) -> Fraction | None:
    """Return the share of attention below which a gain cannot be told from noise.

    That is the share at which Amdahl's law gives 1 + noise; None where no share does, because
    attention is not faster, or not by more than the noise.

    Args:
        ratio: the baseline's attention time over the candidate's.
        noise: relative half width of the interval of the whole's time.

    """
    if ratio <= 1 or noise < 0:
        return None
    share = (1 - 1 / (1 + noise)) / (1 - 1 / ratio)
    return share if share <= 1 else None
