"""Tables for other programs: CSV of an artifact's times, and of one series of samples."""

from __future__ import annotations

import csv
import io
from typing import TYPE_CHECKING, Any, Final

from attnrepro.compare import published

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_FORMULA: Final = ("=", "+", "-", "@", "\t", "\r")


def times(observations: Mapping[str, Any]) -> str:
    """One line a cell, subject and clock; times in ns, ratios as baseline over subject.

    A subject without times has one line with an empty clock, so that no status is lost.
    """
    subjects = [(cell, subject) for cell in observations["cells"] for subject in cell["subjects"]]
    tails = sorted({tail["quantile"] for _, s in subjects for tail in _all_tails(s["timing"])})
    baselines = sorted({c["baseline"] for _, s in subjects for c in s["comparisons"]})
    heading = ["cell", "label", "phase", "subject", "backend", "role", "status", "reason", "clock"]
    heading += ["launches", "median_ns", "lower_ns", "upper_ns", "confidence"]
    heading += [f"quantile_{quantile}_ns" for quantile in tails]
    for baseline in baselines:
        heading += [f"{name}_to_{baseline}" for name in ("ratio", "lower", "upper", "verdict")]
    lines: list[Sequence[object]] = [heading]
    for cell, subject in subjects:
        fixed = [cell[name] for name in ("id", "label", "phase")]
        fixed += [subject[name] for name in ("subject", "backend", "role", "status", "reason")]
        for clock in sorted(subject["timing"]) or [""]:
            line = [*fixed, clock, *_statistics(subject["timing"].get(clock), tails)]
            compared = {c["baseline"]: c for c in subject["comparisons"] if c["clock"] == clock}
            for baseline in baselines:
                line += _comparison(compared.get(baseline))
            lines.append(line)
    return _write(lines)


def samples(data: bytes) -> str:
    """A samples member: position in time order and ns. Raises ValueError."""
    values = published.decode_samples(data)
    return _write([("position", "ns"), *enumerate(values)])


def _all_tails(timing: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [tail for clock in timing.values() for tail in clock["tails"]]


def _statistics(clock: Mapping[str, Any] | None, tails: Sequence[str]) -> list[object]:
    if clock is None:
        return [""] * (5 + len(tails))
    interval = clock["interval"]
    values = {tail["quantile"]: tail["value_ns"] for tail in clock["tails"]}
    return [
        clock["median"]["n"],
        clock["median"]["value_ns"],
        interval["lower_ns"],
        interval["upper_ns"],
        interval["confidence"],
        *(values.get(quantile) for quantile in tails),
    ]


def _comparison(claim: Mapping[str, Any] | None) -> list[object]:
    if claim is None:
        return [""] * 4
    limits = [claim[name] for name in ("ratio", "lower", "upper")]
    reals = [None if text is None else repr(float.fromhex(text)) for text in limits]
    return [*reals, claim["verdict"]]


def _write(lines: Sequence[Sequence[object]]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([_safe(v) for v in line] for line in lines)
    return text.getvalue()


def _safe(value: object) -> object:
    """A spreadsheet runs a text that begins like a formula; an apostrophe makes it a text again."""
    if isinstance(value, str) and value.startswith(_FORMULA):
        return f"'{value}"
    return "" if value is None else value
