"""What a report says of an artifact, before it becomes Markdown or HTML: texts and tables only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from attnrepro.artifact.statement import Kind
from attnrepro.compare import published
from attnrepro.report import wholework
from attnrepro.report.rows import HEADINGS, device_text, duration, headline, ratio, rows
from attnrepro.report.table import Section, Strip, Table, kept, size

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from attnrepro.artifact.verify import Verified


@dataclass(frozen=True, kw_only=True)
class Article:
    """One artifact."""

    title: str
    sections: tuple[Section, ...]


def article(verified: Verified, *, file: str) -> Article:
    """Everything that a report says of one verified artifact."""
    title = str(verified.manifest.get("title") or verified.manifest["name"])
    return Article(title=title, sections=tuple(_sections(verified, file)))


def _sections(verified: Verified, file: str) -> Iterator[Section]:
    yield _identity(verified, file)
    if verified.kind is Kind.RERUN:
        yield _verdicts(verified.predicate["verdicts"])
    yield _results(verified)
    strips = tuple(_strips(verified.observations))
    if strips:
        yield Section(
            heading="Launches",
            texts=(
                "Each mark is the median of one launch, a fresh process; the scatter between "
                "launches is what a verdict rests on.",
            ),
            strips=strips,
        )
    yield from wholework.sections(verified.manifest, verified.observations)
    yield from _further(verified.observations)


def _identity(verified: Verified, file: str) -> Section:
    trust = f"trusted: {verified.owner}" if verified.trusted else "not in the reader's trust file"
    lines = [
        ("file", file),
        ("content", f"sha256:{verified.statement.content_sha256}"),
        ("signer", f"sha256:{verified.signer.fingerprint} ({trust})"),
        ("manifest", f"sha256:{verified.predicate['manifest_sha256']}"),
        ("runner", f"sha256:{verified.predicate['runner']['sha256']}"),
        ("device", device_text(verified.observations)),
    ]
    lines += [
        (f"image {image['key']}", f"{image['manifest_digest']} ({image['rebuild_status']})")
        for image in verified.predicate["images"]
    ]
    return Section(
        heading="What this is",
        texts=(f"Run {headline(verified.observations)}.",),
        tables=(Table(headings=("", ""), lines=tuple(lines)),),
    )


def _verdicts(verdicts: Mapping[str, Mapping[str, Any]]) -> Section:
    lines = tuple(
        (
            name.replace("_", "-"),
            verdict["result"].replace("_", " "),
            verdict["reason"],
            verdict["first_difference"] or "",
        )
        for name, verdict in verdicts.items()
    )
    return Section(
        heading="Verdicts of the rerun",
        tables=(Table(headings=("verdict", "", "why", "first difference"), lines=lines),),
    )


def _results(verified: Verified) -> Section:
    seen = verified.observations
    found = rows(seen)
    counts = seen["summary"]
    texts = [", ".join(f"{counts[name]} {name}" for name in ("passed", "failed", "unsupported"))]
    texts += [
        f"{row.cell}, {row.subject}: {row.status}: {row.reason}" for row in found if row.reason
    ]
    weak = sorted({name for cell in seen["cells"] for name in cell["uncompared"]})
    if weak:
        texts.append(f"Weak baselines: the stack also claims {', '.join(weak)}; not compared.")
    return Section(
        heading="Results",
        texts=tuple(texts),
        tables=(kept(HEADINGS, [row.texts() for row in found]),),
    )


def _strips(observations: Mapping[str, Any]) -> Iterator[Strip]:
    for cell in observations["cells"]:
        clocks = {published.headline_clock(s["timing"]) for s in cell["subjects"]} - {None}
        for clock in sorted(filter(None, clocks)):
            points = tuple(
                (s["subject"], tuple(published.launch_medians(s["timing"][clock])))
                for s in cell["subjects"]
                if clock in s["timing"]
            )
            if any(values for _, values in points):
                yield Strip(title=f"{cell['id']} {cell['label']} ({clock})", points_ns=points)


def _further(observations: Mapping[str, Any]) -> Iterator[Section]:
    subjects = [
        (f"{cell['id']} {cell['label']}", subject)
        for cell in observations["cells"]
        for subject in cell["subjects"]
    ]
    comparisons = [
        (
            cell,
            subject["subject"],
            c["baseline"],
            c["clock"],
            f"{ratio(c['ratio'])}×",
            f"{ratio(c['lower'])}–{ratio(c['upper'])}" if c["lower"] else "",
            ratio(c["p_value"]),
            c["verdict"],
            c["reason"],
        )
        for cell, subject in subjects
        for c in subject["comparisons"]
    ]
    if comparisons:
        names = ["cell", "subject", "baseline", "clock", "ratio", "interval", "p", "verdict", "why"]
        yield Section(heading="Comparisons", tables=(kept(names, comparisons),))
    cold = [
        (
            cell,
            subject["subject"],
            *(
                duration(subject["cold"][f"{name}_ns"])
                for name in ("import", "first_call", "second_call", "steady_call")
            ),
        )
        for cell, subject in subjects
        if "cold" in subject
    ]
    if cold:
        names = ["cell", "subject", "import", "first call", "second call", "steady call"]
        yield Section(heading="Cold start", tables=(kept(names, cold),))
    memory = [
        (
            cell,
            subject["subject"],
            size(subject["memory"]["peak_bytes"]),
            size(subject["memory"]["extra_bytes"]),
            subject["memory"]["declared_order"],
            "above its declared order" if subject["memory"]["alarm"] else "",
        )
        for cell, subject in subjects
        if "memory" in subject
    ]
    if memory:
        names = ["cell", "subject", "peak", "beyond inputs and outputs", "declared", "alarm"]
        yield Section(heading="Memory", tables=(kept(names, memory),))
    kernels = [
        (cell, subject["subject"], f"{kernel['name']} ×{kernel['count']}")
        for cell, subject in subjects
        if "execution" in subject
        for kernel in subject["execution"]["kernels"]
    ]
    if kernels:
        yield Section(heading="What ran", tables=(kept(("cell", "subject", "kernel"), kernels),))
