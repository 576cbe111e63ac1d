"""Facts of one call, and whether a claim or a condition covers them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

from attnrepro_runner import fields

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from attnrepro.jsonio import JsonObject
    from attnrepro_runner.semantics import Workload

Fact: TypeAlias = "str | bool | int | float | tuple[str, ...] | None"
"""A tuple is what may be the case (architectures); None is a fact that the call does not have."""

_STRIDES = ("contiguous", "last_contiguous", "any")
_LENGTHS = ("equal", "ragged", "empty")
CASE = frozenset({"dtype", "head_dim", "head_dim_v"})
"""Facts that tell the several claims of a backend apart."""
RULES_ONLY = frozenset({"seqlen_q", "seqlen_k", "heads_q", "group", "batch"})
"""Facts that `unmet` does not read: without a rule about them, claims say the same of any value."""


def of_call(workload: Workload) -> dict[str, Fact]:
    """Facts of a call, by the names that claims use in `when`, and a few that only `unmet` uses."""
    cache, dropout, mask = workload.cache, workload.dropout, workload.mask
    square = workload.seqlens_q == workload.seqlens_k
    used = {mask.causal} - {"none"}
    if mask.window is not None:
        used.add(mask.window.alignment)
    lengths = _lengths(workload)
    return {
        "phase": workload.phase,
        "dtype": workload.dtype,
        "dtype_out": workload.dtype_out,
        "accumulate": workload.accumulate,
        "head_dim": workload.head_dim,
        "head_dim_v": workload.head_dim_v,
        "equal_widths": workload.head_dim == workload.head_dim_v,
        "layout": workload.layout,
        "packed": workload.is_packed,
        "lengths": lengths,
        "ragged": lengths != "equal",
        "seqlen_q": max(workload.seqlens_q),
        "seqlen_k": max(workload.seqlens_k),
        "square": square,
        "alignment": "none" if not used else "square" if square else "/".join(sorted(used)),
        "causal": mask.causal != "none" or (mask.window is not None and mask.window.right == 0),
        "window": _has_window(workload),
        "empty_rows": workload.has_empty_rows,
        "masked_rows": mask.masked_rows if workload.has_empty_rows else None,
        "gqa": workload.heads_q != workload.heads_kv,
        "heads_q": workload.heads_q,
        "group": workload.heads_q // workload.heads_kv,
        "batch": workload.batch,
        "scale": workload.scale is not None,
        "softcap": workload.softcap is not None,
        "alibi": workload.alibi is not None,
        "dropout": dropout is not None,
        "dropout_p": dropout.p if dropout else None,
        "dropout_offset": dropout.offset if dropout else None,
        "cache": cache.kind if cache else "none",
        "page_size": cache.page_size if cache else None,
        "append": cache.append if cache else None,
        "append_in_call": bool(cache and cache.append_in_call),
        "fp8": workload.fp8.granularity if workload.fp8 else "none",
        "strides": _strides(workload),
    }


def of_options(options: Mapping[str, object]) -> dict[str, Fact]:
    """Options of a subject as facts, by their names in `when`."""
    return {
        f"option.{name}": value if isinstance(value, str | bool | int) else str(value)
        for name, value in options.items()
    }


def holds(when: JsonObject, facts: Mapping[str, Fact]) -> bool:
    """Whether every condition of a `when` holds; one about a fact that is not there does not."""
    return all(_within(facts.get(name), constraint) for name, constraint in when.items())


def unmet(
    claim: JsonObject, facts: Mapping[str, Fact], options: Mapping[str, Fact]
) -> Iterator[tuple[str, str, str]]:
    """What of a call a claim does not cover: (fact, in words, what is claimed instead)."""
    for fact, field in (
        ("phase", "phases"),
        ("dtype", "dtypes"),
        ("accumulate", "accumulate"),
        ("layout", "layouts"),
    ):
        if facts[fact] not in claim[field]:
            yield fact, f"{fact} {facts[fact]}", ", ".join(claim[field])
    yield from _widths(claim, facts)
    same = "bfloat16" if facts["dtype"] == "float8_e4m3fn" else facts["dtype"]
    outputs = [same] if claim["dtype_out"] == "same" else claim["dtype_out"]
    if facts["dtype_out"] not in outputs:
        yield "dtype_out", f"dtype_out {facts['dtype_out']}", ", ".join(map(str, outputs))
    for fact, order in (("strides", _STRIDES), ("lengths", _LENGTHS)):
        if order.index(str(facts[fact])) > order.index(claim[fact]):
            yield fact, f"{facts[fact]} {fact}", str(claim[fact])
    yield from _mask(claim, facts)
    for fact in ("gqa", "scale", "softcap", "alibi", "dropout", "append_in_call"):
        if facts[fact] and not claim[fact]:
            yield fact, ("a scale of its own" if fact == "scale" else fact), ""
    if facts["dropout"]:
        yield from _dropout(claim, facts)
    if facts["cache"] != "none" and facts["cache"] not in claim["cache"]:
        yield "cache", f"a {facts['cache']} cache", ", ".join(claim["cache"])
    yield from _multiple(claim, "page_multiple", "page_size", facts)
    if facts["fp8"] != "none" and facts["fp8"] not in claim["fp8"]:
        yield "fp8", f"FP8 descales per {facts['fp8']}", ", ".join(claim["fp8"])
    for name, value in options.items():
        option = name.removeprefix("option.")
        if option not in claim["options"]:
            known = ", ".join(claim["options"]) or "no options"
            yield name, f"the option {option}", known
        elif not _within(value, claim["options"][option]):
            yield name, f"the option {option}={words(value)}", words(claim["options"][option])


def words(constraint: Any) -> str:
    """A constraint for people."""
    if isinstance(constraint, dict):
        low, high = constraint.get("min", 0), constraint.get("max")
        step = constraint.get("multiple_of", 1)
        if low == high:
            return str(low)
        text = f"{low} to {high}" if high is not None else f"from {low}"
        return text if step == 1 else f"{text}, multiples of {step}"
    if isinstance(constraint, list):
        return ", ".join(map(words, constraint))
    return str(constraint).lower() if isinstance(constraint, bool) else str(constraint)


def _widths(claim: JsonObject, facts: Mapping[str, Fact]) -> Iterator[tuple[str, str, str]]:
    if not _within(facts["head_dim"], claim["head_dim"]):
        yield "head_dim", f"head_dim {facts['head_dim']}", words(claim["head_dim"])
    if claim["head_dim_v"] == "equal":
        if not facts["equal_widths"]:
            equal = f"equal to head_dim, {facts['head_dim']}"
            yield "head_dim_v", f"head_dim_v {facts['head_dim_v']}", equal
    elif not _within(facts["head_dim_v"], claim["head_dim_v"]):
        yield "head_dim_v", f"head_dim_v {facts['head_dim_v']}", words(claim["head_dim_v"])


def _mask(claim: JsonObject, facts: Mapping[str, Fact]) -> Iterator[tuple[str, str, str]]:
    alignment, known = facts["alignment"], claim["alignments"]
    if (alignment == "square" and not known) or (
        alignment not in ("none", "square") and alignment not in known
    ):
        square = "equal lengths" if known else "no causal mask"
        yield "alignment", f"a mask aligned {alignment}", ", ".join(known) or square
    if facts["window"] and not claim["window"]:
        yield "window", "a window", ""
    if facts["masked_rows"] is not None and facts["masked_rows"] not in claim["masked_rows"]:
        rows = f"{facts['masked_rows']} for rows that attend nothing"
        yield "masked_rows", rows, ", ".join(claim["masked_rows"])


def _dropout(claim: JsonObject, facts: Mapping[str, Fact]) -> Iterator[tuple[str, str, str]]:
    if isinstance(claim["dropout"], dict) and not _within(facts["dropout_p"], claim["dropout"]):
        yield "dropout_p", f"dropout {facts['dropout_p']}", words(claim["dropout"])
    yield from _multiple(claim, "dropout_offset_multiple", "dropout_offset", facts)


def _multiple(
    claim: JsonObject, field: str, fact: str, facts: Mapping[str, Fact]
) -> Iterator[tuple[str, str, str]]:
    value = facts[fact]
    if isinstance(value, int) and value % claim[field]:
        yield fact, f"{fact} {value}", f"multiples of {claim[field]}"


def _within(value: Fact, constraint: Any) -> bool:
    if value is None:
        return False
    if isinstance(value, tuple):
        return any(_within(item, constraint) for item in value)
    if isinstance(constraint, dict):
        if isinstance(value, bool | str):
            return False
        high = constraint.get("max")
        step = constraint.get("multiple_of", 1)
        inside = value >= constraint.get("min", 0) and (high is None or value <= high)
        return bool(inside and (value % step == 0 or (isinstance(value, float) and step == 1)))
    return value in constraint if isinstance(constraint, list) else value == constraint


def _has_window(workload: Workload) -> bool:
    """Whether a window hides more than causal does: open on the left, it may say no more."""
    window = workload.mask.window
    if window is None:
        return False
    right = 0 if workload.mask.causal != "none" else window.right
    return window.left is not None or right != 0


def _lengths(workload: Workload) -> str:
    both = (workload.seqlens_q, workload.seqlens_k)
    if any(0 in lengths for lengths in both):
        return "empty"
    return "ragged" if any(len(set(lengths)) > 1 for lengths in both) else "equal"


def _strides(workload: Workload) -> str:
    result = "contiguous"
    for name, given in zip(fields.TENSOR_NAMES, workload.strides, strict=True):
        if given is None:
            continue
        shape, stride = workload.shape(name), workload.stride(name)
        if stride == fields.contiguous(shape):
            continue
        if shape[-1] > 1 and stride[-1] != 1:
            return "any"
        result = "last_contiguous"
    return result
