"""The models round an attention call, by name: their sizes and which workloads are theirs.

The standard library alone: the host refuses a manifest whose attention is not its model's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from attnrepro_runner.semantics import Workload


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """A decoder-only transformer with grouped heads and a gated MLP."""

    hidden: int
    layers: int
    heads_q: int
    heads_kv: int
    head_dim: int
    ffn: int
    vocabulary: int
    rope_theta: float


SIZES = {
    "llama3_8b": Sizes(
        hidden=4096,
        layers=32,
        heads_q=32,
        heads_kv=8,
        head_dim=128,
        ffn=14336,
        vocabulary=128256,
        rope_theta=500000.0,
    ),
    "small": Sizes(
        hidden=256,
        layers=2,
        heads_q=4,
        heads_kv=2,
        head_dim=64,
        ffn=512,
        vocabulary=1024,
        rope_theta=10000.0,
    ),
}
"""Model to its sizes; `llama3_8b` has those of the published configuration."""

_PHASES = {"training_step": "forward_backward", "prefill": "prefill", "decode_step": "decode"}


@dataclass(frozen=True, kw_only=True)
class RequestModel:
    """A model's sizes and what is done with it."""

    name: str
    sizes: Sizes
    kind: str
    """training_step, prefill or decode_step."""
    layers: int


def find(name: str, layers: int | None) -> RequestModel:
    """Return the model of a manifest's name.

    Raises:
        ValueError: no such model.

    """
    for model, sizes in SIZES.items():
        if name.startswith(f"{model}_"):
            kind = name.removeprefix(f"{model}_")
            if kind in _PHASES:
                return RequestModel(
                    name=name, sizes=sizes, kind=kind, layers=layers or sizes.layers
                )
    msg = f"no request model {name!r}"
    raise ValueError(msg)


def check(model: RequestModel, workload: Workload) -> None:
    """Raise ValueError where the cell's workload is not the model's attention."""
    sizes = model.sizes
    wanted = {
        "phase": (_PHASES[model.kind], workload.phase),
        "heads_q": (sizes.heads_q, workload.heads_q),
        "heads_kv": (sizes.heads_kv, workload.heads_kv),
        "head_dim": (sizes.head_dim, workload.head_dim),
        "head_dim_v": (sizes.head_dim, workload.head_dim_v),
    }
    for field, (of_model, of_cell) in wanted.items():
        if of_model != of_cell:
            msg = f"{model.name} has {field} {of_model}, the workload has {of_cell}"
            raise ValueError(msg)
    cache = workload.cache
    if cache is not None and set(workload.seqlens_q) != {cache.append}:
        msg = f"{model.name} appends all new keys: cache.append must be seqlen_q"
        raise ValueError(msg)
    if model.kind == "decode_step" and cache is None:
        msg = f"{model.name} needs a cache"
        raise ValueError(msg)
