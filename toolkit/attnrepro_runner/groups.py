"""Groups: the query heads of one KV head of one sequence, read many at a time.

What a mask allows depends on a sequence's lengths alone, so that groups of equal lengths and of as
many query heads stack into one tensor: a batch. On a GPU the launches of a short group cost far
more than its arithmetic, and a batch launches as often as one group.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from attnrepro_runner import views

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from attnrepro_runner.backends.base import Tensors
    from attnrepro_runner.semantics import Workload

Group = tuple[int, tuple[int, ...]]
"""(sequence, query heads that read one KV head)."""

# What a batch of more than one group may hold, by kind of device: scores, and elements of what is
# read and computed. Six float64 tensors of either size are alive at once (of a float32 workload up
# to 17): 2 to 5 GiB on a GPU, and on a CPU 200 MB.
_SCORES = {"cpu": 1 << 20, "cuda": 1 << 25}
_ELEMENTS = {"cpu": 1 << 22, "cuda": 1 << 25}


@dataclass(frozen=True, kw_only=True)
class GroupInputs:
    """What the groups of a batch read."""

    q: torch.Tensor
    """(groups, heads, seqlen_q, head_dim)."""
    k: torch.Tensor
    """(groups, seqlen_k, head_dim)."""
    v: torch.Tensor
    """(groups, seqlen_k, head_dim_v)."""
    grad_out: torch.Tensor | None = None
    """(groups, heads, seqlen_q, head_dim_v)."""
    logit_factor: torch.Tensor | None = None
    """Product of the descales of q and k, float64 (groups); None is 1."""
    value_factor: torch.Tensor | None = None
    """Descale of v, float64 (groups); None is 1."""


def from_tensors(workload: Workload, tensors: Tensors, groups: Sequence[Group]) -> GroupInputs:
    """Read the inputs of a batch.

    Args:
        workload: the semantics.
        tensors: what the backend was given.
        groups: of equal lengths and as many heads, as `batches` gives them.

    """
    queries, keys = query_pairs(groups), key_pairs(workload, groups)
    grads = tensors.grad_out
    return GroupInputs(
        q=_by_group(views.gather_queries(tensors.q, workload, queries), groups),
        k=views.gather_logical_keys(tensors, "k", workload, keys),
        v=views.gather_logical_keys(tensors, "v", workload, keys),
        grad_out=None
        if grads is None
        else _by_group(views.gather_queries(grads, workload, queries), groups),
        logit_factor=_product((tensors.q_descale, tensors.k_descale), keys),
        value_factor=_product((tensors.v_descale,), keys),
    )


def from_packed(
    workload: Workload, packed: Mapping[str, torch.Tensor], groups: Sequence[Group]
) -> GroupInputs:
    """Read the inputs of a batch as drawn, before quantisation: (tokens, heads, width)."""
    queries, keys = query_pairs(groups), key_pairs(workload, groups)
    return GroupInputs(
        q=_by_group(
            views.gather_packed(packed["q"], workload.seqlens_q, queries),
            groups,
        ),
        k=views.gather_packed(packed["k"], workload.seqlens_k, keys),
        v=views.gather_packed(packed["v"], workload.seqlens_k, keys),
    )


def query_pairs(groups: Sequence[Group]) -> list[tuple[int, int]]:
    """Return each (sequence, query head) of a batch, group by group."""
    return [(b, h) for b, heads in groups for h in heads]


def key_pairs(workload: Workload, groups: Sequence[Group]) -> list[tuple[int, int]]:
    """Return each group's (sequence, KV head)."""
    return [(b, workload.kv_head(heads[0])) for b, heads in groups]


def shape_of(workload: Workload, group: Group) -> tuple[int, int, int]:
    """Return (seqlen_q, seqlen_k, heads): what the groups of a batch share."""
    b, heads = group
    return workload.seqlens_q[b], workload.seqlens_k[b], len(heads)


def batches(
    workload: Workload, groups: Sequence[Group], device: str, *, rows: int | None = None
) -> list[tuple[Group, ...]]:
    """Gather groups of equal shape into batches that memory allows, each at least one group.

    Args:
        workload: the semantics.
        groups: in order; a batch keeps it.
        device: cpu or cuda.
        rows: query rows that are computed of each head; None is all.

    """
    alike: dict[tuple[int, int, int], list[Group]] = {}
    for group in groups:
        alike.setdefault(shape_of(workload, group), []).append(group)
    found = []
    for shape, members in alike.items():
        most = _most(workload, shape, device, rows)
        found += [tuple(members[i : i + most]) for i in range(0, len(members), most)]
    return found


def _most(workload: Workload, shape: tuple[int, int, int], device: str, rows: int | None) -> int:
    seqlen_q, seqlen_k, heads = shape
    if workload.dropout is not None or rows is None:
        rows = seqlen_q  # each pair's mask is read whole
    width = workload.head_dim + workload.head_dim_v
    elements = (heads * seqlen_q + seqlen_k) * width * (2 if workload.has_backward else 1)
    return max(
        1,
        min(
            _SCORES[device] // max(1, heads * rows * seqlen_k),
            _ELEMENTS[device] // max(1, elements),
        ),
    )


def _by_group(rows: torch.Tensor, groups: Sequence[Group]) -> torch.Tensor:
    """Split the leading dimension, of query pairs, into (groups, heads)."""
    return rows.view(len(groups), len(groups[0][1]), *rows.shape[1:])


def _product(
    descales: Sequence[torch.Tensor | None], pairs: Sequence[tuple[int, int]]
) -> torch.Tensor | None:
    """Multiply the (batch, heads_kv) descales that there are, at (sequence, KV head) pairs."""
    result = None
    for descale in descales:
        if descale is not None:
            b, g = torch.tensor(pairs, device=descale.device).unbind(1)
            factor = descale[b, g].to(torch.float64)
            result = factor if result is None else result * factor
    return result
