"""What `check` says of a manifest: cells, support, what is left uncompared, notes, cost."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Final

from attnrepro.errors import UsageError
from attnrepro.manifest import cost, stacks
from attnrepro.manifest.plan import device_of, images_of, judge, plan

if TYPE_CHECKING:
    from collections.abc import Mapping

    from attnrepro.images.store import Store
    from attnrepro.jsonio import JsonObject
    from attnrepro.manifest.capability import Device
    from attnrepro.manifest.model import Cell, Manifest

_MAX_ROWS: Final = 48


def document(
    manifest: Manifest, *, device: Device | None = None, store: Store | None = None
) -> JsonObject:
    """Everything that can be said of a manifest before it runs, as one JSON object.

    Raises:
        InvalidDocument: a stack is not known, or its claims are not valid.

    """
    known = {ref: stacks.find(ref, store) for ref in images_of(manifest)}
    claims = {ref: found.capability for ref, found in known.items()}
    judged = judge(manifest, claims, device or device_of(manifest))
    reasons = {(item.cell, item.subject): item for item in judged.unsupported}
    cells = []
    for cell in manifest.cells:
        support: dict[str, Any] = {}
        for subject in cell.subjects:
            refused = reasons.get((cell.id, subject))
            support[subject] = (
                {"status": "SUPPORTED"}
                if refused is None
                else {
                    "status": "UNSUPPORTED",
                    "reason": refused.reason,
                    "source": refused.source,
                }
            )
        cells.append(
            {
                "id": cell.id,
                "label": cell.label,
                "phase": cell.workload["phase"],
                **_figures(cell),
                "subjects": support,
                "uncompared": list(judged.uncompared[cell.id]),
            }
        )
    result: JsonObject = {
        "name": manifest.name,
        "title": manifest.document["title"],
        "manifest_sha256": manifest.sha256,
        "subjects": [
            {"id": s.id, "backend": s.backend, "role": s.role, "image": str(s.image)}
            for s in manifest.subjects
        ],
        "images": [
            {"image": str(ref), "device": found.vendor, "built": found.is_built}
            for ref, found in known.items()
        ],
        "cells": cells,
        "bits": dict(manifest.document["bits"]),
        "notes": [{"pointer": n.pointer, "text": n.text} for n in manifest.notes],
        "problem": None,
        "cost": None,
    }
    try:
        planned = plan(manifest, judged=judged)
    except UsageError as error:
        return {**result, "problem": error.message}
    estimate = cost.estimate(manifest, planned, known.values())
    result["tasks"] = [task.id for segment in planned.segments for task in segment.tasks]
    result["cost"] = {
        "text": estimate.text(),
        "seconds": [round(estimate.seconds_low), round(estimate.seconds_high)],
        "device_seconds": round(estimate.device_seconds),
        "memory_bytes": estimate.memory_bytes,
        "disk_bytes": estimate.disk_bytes,
        "build_seconds": round(estimate.build_seconds),
        "limit_seconds": round(estimate.limit_seconds),
        "within_limit": estimate.seconds_high <= estimate.limit_seconds,
    }
    return result


def text(found: Mapping[str, Any]) -> str:
    """The same for a terminal."""
    lines = [f"{found['name']}: {found['title']}" if found["title"] else found["name"]]
    lines.append(f"manifest sha256:{found['manifest_sha256']}")
    for image in found["images"]:
        built = "built" if image["built"] else "not built here"
        lines.append(f"image {image['image']} ({image['device']}, {built})")
    lines.append(_bits(found["bits"]))
    lines += ["", *_table(found)]
    lines += _reasons(found["cells"])
    lines += _left_out(found["cells"])
    if found["notes"]:
        lines += ["", "Notes"]
        lines += [f"  {note['pointer']}: {note['text']}" for note in found["notes"]]
    lines.append("")
    if found["problem"]:
        lines.append(found["problem"])
    else:
        lines += _cost(found)
    return "\n".join(lines)


def _bits(bits: Mapping[str, Any]) -> str:
    said = {
        "bitwise": "every tensor of a call is claimed to repeat its bits",
        "forward": "output and LSE are claimed to repeat their bits, gradients are not",
        "none": "no bits are claimed",
    }[bits["claim"]]
    scope = "" if bits["claim"] == "none" else f"; scope {bits['scope']}"
    return f"bits: {said}; {bits['repeats']} calls are hashed{scope}"


def _figures(cell: Cell) -> dict[str, Any]:
    figures = cell.facts
    return {
        "pairs": figures.work.pairs,
        "flops": str(figures.work.flops),
        "bytes": figures.work.bytes,
        "largest_offset": figures.largest_offset,
    }


def _table(found: Mapping[str, Any]) -> list[str]:
    names = [subject["id"] for subject in found["subjects"]]
    rows = [["cell", "phase", "GFLOP", "MB", *names]]
    for cell in found["cells"][:_MAX_ROWS]:
        marks = [
            {"SUPPORTED": "yes", "UNSUPPORTED": "UNSUPPORTED"}[cell["subjects"][n]["status"]]
            if n in cell["subjects"]
            else "-"
            for n in names
        ]
        rows.append(
            [
                f"{cell['id']} {cell['label']}",
                cell["phase"],
                f"{int(cell['flops']) / 1e9:.3g}",
                f"{cell['bytes'] / 1e6:.3g}",
                *marks,
            ]
        )
    lines = columns(rows)
    if (more := len(found["cells"]) - _MAX_ROWS) > 0:
        lines.append(f"… and {more} more cells (--json lists all)")
    return lines


def columns(rows: list[list[str]]) -> list[str]:
    """Rows as aligned columns; the first row is the heading."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def _reasons(cells: list[Any]) -> list[str]:
    """Each reason once, with the number of cells that it is about."""
    counts: dict[tuple[str, str, str], list[str]] = {}
    for cell in cells:
        for subject, support in cell["subjects"].items():
            if support["status"] == "UNSUPPORTED":
                key = (subject, support["reason"], support["source"])
                counts.setdefault(key, []).append(cell["id"])
    if not counts:
        return []
    lines = ["", "UNSUPPORTED (not launched)"]
    for (subject, reason, source), ids in counts.items():
        where = ", ".join(ids[:4]) + (f" and {len(ids) - 4} more" if len(ids) > 4 else "")
        lines += [f"  {subject} in {where}: {reason}", f"    source: {source}"]
    return lines


def _left_out(cells: list[Any]) -> list[str]:
    counts: dict[str, int] = {}
    for cell in cells:
        for backend in cell["uncompared"]:
            counts[backend] = counts.get(backend, 0) + 1
    if not counts:
        return []
    lines = ["", "Uncompared: the stack has them, they claim cells, and no subject names them"]
    lines += [f"  {name}: {number} of {len(cells)} cells" for name, number in counts.items()]
    return lines


def _cost(found: Mapping[str, Any]) -> list[str]:
    spent = found["cost"]
    lines = [f"{len(found['cells'])} cells, {len(found['tasks'])} tasks: {spent['text']}"]
    lines.append(f"memory of the largest cell: about {cost.size(spent['memory_bytes'])}")
    here = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if not spent["device_seconds"] and spent["memory_bytes"] > here:
        lines.append(f"  this machine has {cost.size(here)}: the cell would end OUT_OF_MEMORY here")
    if spent["device_seconds"]:
        lines.append(f"device time: up to {cost.duration(spent['device_seconds'])}")
    if not spent["within_limit"]:
        limit = cost.duration(spent["limit_seconds"])
        lines.append(
            f"this may not fit into limits.total_seconds ({limit}): what is not done then "
            "has the status TIMEOUT"
        )
    return lines
