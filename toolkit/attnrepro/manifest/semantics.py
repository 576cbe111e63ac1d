"""Whether a cell means something, and what it costs in elements, offsets and operations.

Masks, lengths, caches and strides are judged by the runner's own `Workload`, so that host and
runner cannot disagree; this module adds the rules of a benchmark (phases, sizes, combinations that
no one can mean) and says what to do about each.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from attnrepro import schema_words
from attnrepro.errors import Problem
from attnrepro.jsonio import MAX_INTEGER
from attnrepro_runner import models
from attnrepro_runner.fields import DTYPE_BYTES, TENSOR_NAMES
from attnrepro_runner.semantics import Workload, WorkloadError
from attnrepro_runner.work import Work, work_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from attnrepro.jsonio import JsonObject
    from attnrepro.manifest.model import Cell
    from attnrepro_runner.fields import Defect

LOW_ENTROPY: Final = frozenset({"large_negative", "one_hot"})
"""Distributions on which kernels run faster than on real data: not timed."""
_INT32_REACH: Final = 2**31

_FIXES: Final = {
    "/mask/causal": 'write "top_left" (query i sees keys 0..i) or "bottom_right" (the last query '
    "sees all keys; decode and caches mean this)",
    "/heads_kv": "make heads_q a multiple of heads_kv",
    "/seqlen_q": 'give one length, or layout "thd" with one per sequence',
    "/seqlen_k": 'give one length, layout "thd", or a cache with one length per sequence',
    "/cache": "set cache to null, or choose the phase prefill or decode",
    "/cache/append": "append at most the new tokens of the shortest sequence",
    "/cache/capacity": "raise capacity, or leave it out",
    "/cache/pool_pages": "raise pool_pages, or leave it out",
    "/dropout": "set dropout to null, or choose a training phase",
    "/fp8": 'give fp8 (an empty object will do) with dtype "float8_e4m3fn", and only there',
    "/alibi/slopes": 'write "geometric", or one slope per query head',
    "/strides/q": "give strides under which every element has its own place",
    "/strides/k": "give strides under which every element has its own place; shared heads are "
    "heads_kv, not a stride of 0",
    "/strides/v": "give strides under which every element has its own place; shared heads are "
    "heads_kv, not a stride of 0",
}
_FIXES_BY_RULE: Final = (
    (
        "/seqlen_q",
        "at most seqlen_k",
        "lower seqlen_q, or raise seqlen_k, which counts the keys of these queries too",
    ),
    ("/seqlen_q", "at least 1", "give every sequence at least one query"),
    ("/cache/page_size", "an integer", 'give page_size, or choose the kind "contiguous"'),
    ("/cache/page_size", "null", 'leave page_size out, or choose the kind "paged"'),
    ("/cache/pool_pages", "null", 'leave pool_pages out, or choose the kind "paged"'),
)
"""Fixes of fields that several rules are about: field, how what is allowed begins, fix."""


@dataclass(frozen=True, kw_only=True)
class Complaint:
    """One thing wrong with a cell, by the pointer of the cell's own field."""

    pointer: str
    found: str
    allowed: str
    fix: str


@dataclass(frozen=True, kw_only=True)
class CellFacts:
    """Figures of a valid cell, known before anything runs."""

    work: Work
    tensor_bytes: int
    """Bytes of the inputs and outputs of one call, gradients included."""
    largest_offset: int
    """Largest element offset in q, k or v."""
    offset_beyond_int32: bool
    """A kernel with 32-bit offsets would read elsewhere."""
    flops_beyond_exact: bool
    """FLOPs of one call exceed 2^53 - 1."""
    has_empty_rows: bool


def facts(workload: Workload) -> CellFacts:
    """Count what one call of a valid workload is; closed forms, nothing is allocated."""
    work = work_of(workload)
    largest = max(workload.storage_elements(name) for name in TENSOR_NAMES) - 1
    return CellFacts(
        work=work,
        tensor_bytes=_tensor_bytes(workload),
        largest_offset=largest,
        offset_beyond_int32=largest >= _INT32_REACH,
        flops_beyond_exact=work.flops > MAX_INTEGER,
        has_empty_rows=workload.has_empty_rows,
    )


def check_cells(cells: Sequence[Cell], *, timed: bool) -> list[Problem]:
    """Problems of all cells; a complaint of several cells is told once, with a count."""
    found: dict[tuple[str, str, str], tuple[Complaint, Cell, int]] = {}
    for cell in cells:
        for complaint in _complaints(cell, timed=timed):
            place = cell.source(complaint.pointer)
            key = (place, complaint.allowed, complaint.fix)
            first, where, count = found.get(key, (complaint, cell, 0))
            found[key] = (first, where, count + 1)
    return [
        Problem(
            pointer=place,
            found=complaint.found + _in_cells(cell, count, len(cells)),
            allowed=allowed,
            fix=fix,
        )
        for (place, allowed, fix), (complaint, cell, count) in found.items()
    ]


def _in_cells(cell: Cell, count: int, total: int) -> str:
    if total == 1:
        return ""
    more = f" and {count - 1} more" if count > 1 else ""
    return f" in cell {cell.id} ({cell.label}){more}"


def _complaints(cell: Cell, *, timed: bool) -> Iterator[Complaint]:
    workload = cell.workload
    own = [*_sizes(workload), *_phase(workload), *_combinations(workload)]
    yield from own
    distribution = cell.inputs["distribution"]
    if timed and distribution in LOW_ENTROPY:
        yield Complaint(
            pointer="/inputs/distribution",
            found=f'"{distribution}" with timing',
            allowed='"normal" or "normal_outliers" where times are taken',
            fix="choose one of them, or set timing.launches to 0 and check accuracy alone",
        )
    try:
        parsed = cell.parsed
    except WorkloadError as error:
        told = {complaint.pointer for complaint in own}
        for defect in error.defects:
            tensor = defect.pointer.removeprefix("/strides/")
            if "/workload" + defect.pointer in told or (
                "/workload" in told and tensor in TENSOR_NAMES and not workload["strides"][tensor]
            ):
                continue
            yield Complaint(
                pointer="/workload" + defect.pointer,
                found=schema_words.shorten(defect.found, 120),
                allowed=defect.allowed,
                fix=_fix(defect),
            )
        return
    if cell.request is not None:
        try:
            models.check(models.find(cell.request["model"], cell.request["layers"]), parsed)
        except ValueError as error:
            yield Complaint(
                pointer="/request/model",
                found=f'"{cell.request["model"]}" with another attention: {error}',
                allowed="the model's own attention in every cell",
                fix="choose another model, change the workload, or set request to null",
            )
    if not any(c.pointer == "/workload" for c in own) and _tensor_bytes(parsed) > MAX_INTEGER:
        yield _overflow(_tensor_bytes(parsed))


def _fix(defect: Defect) -> str:
    for pointer, allowed, fix in _FIXES_BY_RULE:
        if defect.pointer == pointer and defect.allowed.startswith(allowed):
            return fix
    return _FIXES.get(defect.pointer, "choose an allowed value")


def _overflow(size: int) -> Complaint:
    return Complaint(
        pointer="/workload",
        found=f"tensors of {size} bytes",
        allowed="at most 2^53 - 1 bytes",
        fix="make batch, lengths, heads or head_dim smaller",
    )


def _sizes(workload: JsonObject) -> Iterator[Complaint]:
    batch, width = workload["batch"], max(workload["head_dim"], workload["head_dim_v"])
    tokens = max(
        sum(n) if isinstance(n, list) else n * batch
        for n in (workload["seqlen_q"], workload["seqlen_k"])
    )
    size = tokens * workload["heads_q"] * width * DTYPE_BYTES[workload["dtype"]]
    if size > MAX_INTEGER:
        yield _overflow(size)
    for name in ("seqlen_q", "seqlen_k"):
        lengths = workload[name]
        if lengths == 0 or (isinstance(lengths, list) and not any(lengths)):
            yield Complaint(
                pointer=f"/workload/{name}",
                found="no tokens at all",
                allowed="a length of at least 1 (single sequences may be empty in layout thd)",
                fix="give a length",
            )
        elif isinstance(lengths, list) and 0 in lengths and workload["layout"] != "thd":
            yield Complaint(
                pointer=f"/workload/{name}",
                found="an empty sequence",
                allowed="lengths of at least 1 outside layout thd",
                fix='choose layout "thd", or give every sequence a length',
            )

    # The Workload looks at heads only where nothing simpler is wrong.
    if workload["heads_q"] % workload["heads_kv"]:
        yield Complaint(
            pointer="/workload/heads_kv",
            found=str(workload["heads_kv"]),
            allowed=f"a divisor of heads_q, {workload['heads_q']}",
            fix=_FIXES["/heads_kv"],
        )


def _phase(workload: JsonObject) -> Iterator[Complaint]:
    phase, cache = workload["phase"], workload["cache"]
    if phase == "decode" and cache is None:
        yield Complaint(
            pointer="/workload/cache",
            found="null in decode",
            allowed="a cache: decode is new tokens against one",
            fix='add "cache": {"kind": "contiguous"} (or "paged" with a page_size)',
        )
    longer = any(q < k for q, k in _pairs_of_lengths(workload))
    if phase == "prefill" and cache is None and longer:
        yield Complaint(
            pointer="/workload/seqlen_k",
            found="keys before the queries, without a cache",
            allowed="seqlen_q equal to seqlen_k, or a chunk against a cache",
            fix='add "cache": {"kind": "contiguous"}, or make the lengths equal',
        )
    if workload["dtype"] == "float8_e4m3fn" and phase in ("forward", "forward_backward"):
        yield Complaint(
            pointer="/workload/phase",
            found=f'"{phase}" with float8_e4m3fn',
            allowed='"prefill" or "decode": no accuracy rule is defined for FP8 training',
            fix="choose one of them, or another dtype",
        )


def _pairs_of_lengths(workload: JsonObject) -> list[tuple[int, int]]:
    batch = workload["batch"]
    q, k = (
        n if isinstance(n, list) else [n] * (batch if isinstance(other, list) else 1)
        for n, other in (
            (workload["seqlen_q"], workload["seqlen_k"]),
            (workload["seqlen_k"], workload["seqlen_q"]),
        )
    )
    return list(zip(q, k, strict=False))  # lists of wrong length are the Workload's complaint


def _combinations(workload: JsonObject) -> Iterator[Complaint]:
    mask, cache = workload["mask"], workload["cache"]
    window: dict[str, Any] | None = mask["window"]
    if window is not None:
        if window["left"] is None and window["right"] is None:
            yield Complaint(
                pointer="/workload/mask/window",
                found="a window open on both sides",
                allowed="null, or a window with a left or a right",
                fix="write null",
            )
        causal = mask["causal"]
        if causal in ("top_left", "bottom_right") and window["alignment"] not in (None, causal):
            yield Complaint(
                pointer="/workload/mask/window/alignment",
                found=f'"{window["alignment"]}" beside causal "{causal}"',
                allowed="null, or causal's own alignment",
                fix="leave it out",
            )
    if cache is not None:
        if cache["append_in_call"] and not cache["append"]:
            yield Complaint(
                pointer="/workload/cache/append_in_call",
                found="true with nothing to append",
                allowed="false, or an append of at least 1",
                fix="set append, or append_in_call to false",
            )
        for name in ("k", "v"):
            if cache["kind"] == "paged" and workload["strides"][name] is not None:
                yield Complaint(
                    pointer=f"/workload/strides/{name}",
                    found="strides of a paged cache",
                    allowed="null: pages are contiguous",
                    fix="leave them out",
                )


def _tensor_bytes(workload: Workload) -> int:
    size = DTYPE_BYTES[workload.dtype]
    inputs = sum(workload.storage_elements(name) for name in TENSOR_NAMES) * size
    rows = sum(workload.seqlens_q) * workload.heads_q
    outputs = rows * (workload.head_dim_v * DTYPE_BYTES[workload.dtype_out] + 4)
    if workload.has_backward:
        outputs += inputs + rows * workload.head_dim_v * size
    return inputs + outputs
