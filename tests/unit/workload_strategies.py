"""Random workloads that have a meaning, for property tests."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hypothesis import strategies as st

from attnrepro_runner.semantics import Workload

if TYPE_CHECKING:
    from collections.abc import Sequence

DISTRIBUTIONS = ("normal", "normal_outliers", "large_negative", "one_hot")
PHASES = ("forward", "forward_backward", "prefill", "decode")
LAYOUTS = ("bshd", "bhsd", "thd")


@st.composite
def documents(
    draw: st.DrawFn,
    *,
    shortest: int = 1,
    longest: int = 90,
    phases: Sequence[str] = PHASES,
    layouts: Sequence[str] = LAYOUTS,
    dtypes: Sequence[str] = ("float32", "bfloat16", "float16", "float8_e4m3fn"),
    head_dims: Sequence[int] = (8, 24, 64),
    widest_window: int = 37,
) -> dict[str, Any]:
    """Draw a manifest's `workload` object, from every field but `math` and `accumulate`.

    Each has a meaning: a WorkloadError is a failure of this strategy, or of the reader.

    Args:
        draw: hypothesis's.
        shortest: length of a sequence; packed ones may be empty besides.
        longest: likewise.
        phases: to draw from.
        layouts: likewise.
        dtypes: likewise.
        head_dims: likewise.
        widest_window: keys at either side; 37 is the widest that a probe keeps as it is.

    """
    phase = draw(st.sampled_from(phases))
    layout = draw(st.sampled_from(layouts))
    batch = draw(st.integers(1, 3))
    cached = phase == "decode" or (phase == "prefill" and draw(st.booleans()))
    inference = phase in ("prefill", "decode")
    # Lengths of each sequence where the layout, or for keys a cache, can hold them.
    least = 0 if layout == "thd" and phase != "decode" and draw(st.booleans()) else shortest
    queries = draw(st.lists(st.integers(least, longest), min_size=batch, max_size=batch))
    if layout != "thd":
        queries = queries[:1] * batch
    equal = not cached and layout != "thd"
    # Fewer keys than queries leave rows without keys, in training alone.
    fewer = not inference and draw(st.booleans())
    ranges = [(least, n) if fewer else (n, longest) for n in queries]
    keys = [draw(st.integers(*pair)) for pair in ranges]
    if equal or draw(st.booleans()):
        # One length of all; with a cache beside packed queries, long enough for each.
        keys = [max(keys)] * batch
    heads_kv = draw(st.sampled_from([1, 2, 3]))
    heads_q = heads_kv * draw(st.sampled_from([1, 2]))
    document: dict[str, Any] = {
        "phase": phase,
        "batch": batch,
        "seqlen_q": queries,
        "seqlen_k": keys,
        "heads_q": heads_q,
        "heads_kv": heads_kv,
        "head_dim": draw(st.sampled_from(head_dims)),
        "head_dim_v": draw(st.sampled_from([None, None, 16])),
        "layout": layout,
        "mask": draw(_masks(widest_window)),
        "scale": draw(st.sampled_from(["rsqrt_head_dim", "rsqrt_head_dim", 0.2, 0.02, 1.3])),
        "softcap": draw(st.sampled_from([None, None, None, 2.0, 12.0, 50.0])),
        "alibi": draw(_alibis(heads_q)),
        **draw(_types(dtypes, heads_kv)),
    }
    if cached:
        document["cache"] = draw(_caches(queries, keys))
    if not inference:
        document["dropout"] = draw(
            st.sampled_from([None, None, None, None, {"p": 0.1, "seed": 7}, {"p": 0.2, "seed": 9}])
        )
    plain = Workload.parse(document)
    document["strides"] = {name: draw(_strides(plain.shape(name))) for name in ("q", "k", "v")}
    return document


def input_documents() -> st.SearchStrategy[dict[str, object]]:
    """Draw a manifest's `inputs` object."""
    return st.fixed_dictionaries(
        {"distribution": st.sampled_from(DISTRIBUTIONS), "seed": st.integers(0, 2**53 - 1)}
    )


def _masks(widest: int) -> st.SearchStrategy[dict[str, Any]]:
    side = st.none() | st.integers(0, widest)
    return st.fixed_dictionaries(
        {
            "causal": st.sampled_from(["none", "top_left", "bottom_right"]),
            "window": st.none()
            | st.fixed_dictionaries(
                {
                    "left": side,
                    "right": side,
                    "alignment": st.sampled_from([None, "top_left", "bottom_right"]),
                }
            ),
            "masked_rows": st.sampled_from(["zero", "zero", "zero", "nan"]),
        }
    )


@st.composite
def _alibis(draw: st.DrawFn, heads_q: int) -> dict[str, Any] | None:
    kind = draw(st.sampled_from(["none", "none", "none", "geometric", "given"]))
    if kind == "none":
        return None
    if kind == "geometric":
        return {"slopes": "geometric"}
    # Distinct, since equal slopes hide a swapped head.
    return {"slopes": [0.03 * (n + 1) for n in draw(st.permutations(range(heads_q)))]}


@st.composite
def _types(draw: st.DrawFn, dtypes: Sequence[str], heads_kv: int) -> dict[str, Any]:
    outs = st.sampled_from([None, None, None, "float32", "bfloat16", "float16"])
    found: dict[str, Any] = {"dtype": draw(st.sampled_from(dtypes)), "dtype_out": draw(outs)}
    if found["dtype"] == "float8_e4m3fn":
        granularity = draw(st.sampled_from(["tensor", "head_kv"]))
        count = 1 if granularity == "tensor" else heads_kv
        numbers = st.lists(st.sampled_from([0.01, 0.02]), min_size=count, max_size=count)
        descale = st.just("measured") | numbers
        names = ("q_descale", "k_descale", "v_descale")
        found["fp8"] = {"granularity": granularity} | {name: draw(descale) for name in names}
    return found


@st.composite
def _caches(draw: st.DrawFn, queries: Sequence[int], keys: Sequence[int]) -> dict[str, Any]:
    append = draw(st.integers(0, min(2, *queries, *keys)))
    slack = draw(st.sampled_from([None, 0, 10]))
    capacity = max(*keys, 1) + (slack or 0)
    found: dict[str, Any] = {
        "kind": draw(st.sampled_from(["contiguous", "paged"])),
        "append": append,
        "append_in_call": append > 0 and draw(st.booleans()),
        "capacity": None if slack is None else capacity,
        "permutation_seed": draw(st.sampled_from([None, 0, 5])),
    }
    if found["kind"] == "paged":
        found["page_size"] = size = draw(st.sampled_from([1, 4, 8, 32]))
        spare = draw(st.sampled_from([None, 0, 3]))
        needed = len(queries) * -(-capacity // size)
        found["pool_pages"] = None if spare is None else needed + spare
    return found


@st.composite
def _strides(draw: st.DrawFn, shape: tuple[int, ...]) -> list[int] | None:
    """Draw axes in another order, with gaps between them; contiguous most of the time."""
    kind = draw(st.sampled_from(["contiguous", "contiguous", "rows", "rows", "any"]))
    if kind == "contiguous":
        return None
    *rows, width = range(len(shape))
    # Innermost first. Most kernels want the width to be that, without a gap.
    order = [width, *draw(st.permutations(rows))]
    step = 1
    if kind == "any":
        order, step = draw(st.permutations(order)), draw(st.sampled_from([1, 2]))
    strides = [0] * len(shape)
    for axis in order:
        strides[axis] = step
        step = step * max(shape[axis], 1) + draw(st.sampled_from([0, 0, 3, 16]))
    return strides
