"""Stand-ins of the GPU libraries: their recorded signatures, their documented meaning, on a CPU.

Each function accepts exactly the parameters of the release named, refuses others as Python would,
records how it was called, and computes what the release's documentation says (its own spelling of
an open window included), so that a wrong translation gives wrong numbers.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
import sys
import types
from typing import TYPE_CHECKING

import torch
from gpu_signatures import recorded

from attnrepro_runner.semantics import Workload

if TYPE_CHECKING:
    from collections.abc import Collection

    import pytest

    Drops = Collection[str]


def workload(**changes: object) -> Workload:
    document = {
        "phase": "forward",
        "batch": 2,
        "seqlen_q": 5,
        "seqlen_k": 7,
        "heads_q": 4,
        "heads_kv": 2,
        "head_dim": 16,
        "dtype": "bfloat16",
    }
    return Workload.parse(document | changes)


def install(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, object]]:
    """Put the stand-ins where the adapters look; return the list in which calls are noted."""
    noted: list[dict[str, object]] = []
    fakes = {
        "flash_attn": types.ModuleType("flash_attn"),
        "flash_attn.flash_attn_interface": flash_attn_2(noted),
        "fa3_fwd_interface": flash_attn_3(noted),
        "flash_attn.cute": types.ModuleType("flash_attn.cute"),
        "flash_attn.cute.interface": flash_attn_4(noted),
        "flashinfer": flashinfer(noted),
    }
    config = types.ModuleType("fa3_fwd_config")
    config.CONFIG = {"build_flags": {}}  # type: ignore[attr-defined]
    fakes["fa3_fwd_config"] = config
    for name, module in fakes.items():
        module.__spec__ = importlib.util.spec_from_loader(name, None)
        monkeypatch.setitem(sys.modules, name, module)
    real = importlib.import_module("torch.nn.attention.varlen")
    monkeypatch.setattr(real, "varlen_attn", varlen_attn(noted))
    return noted


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    scale: float,
    low: int | None,
    high: int | None,
    softcap: float,
    slopes: torch.Tensor | None,
    empty_lse: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One sequence, (seqlen, heads, width), band of the bottom right: output and LSE."""
    group = q.shape[1] // k.shape[1]
    keys, values = (t.double().repeat_interleave(group, 1).transpose(0, 1) for t in (k, v))
    scores = q.double().transpose(0, 1) @ keys.transpose(1, 2) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    distance = (
        torch.arange(k.shape[0])[None, :]
        - torch.arange(q.shape[0])[:, None]
        - (k.shape[0] - q.shape[0])
    )
    if slopes is not None:
        scores = scores - slopes.double()[:, None, None] * distance.abs()
    seen = torch.ones_like(distance, dtype=torch.bool)
    if low is not None:
        seen &= distance >= -low
    if high is not None:
        seen &= distance <= high
    scores = scores.masked_fill(~seen, -math.inf)
    lse = torch.logsumexp(scores, -1)
    weights = torch.where(seen.any(-1)[None, :, None], torch.softmax(scores, -1), 0.0)
    weights = torch.nan_to_num(weights)
    out = (weights @ values).transpose(0, 1).to(q.dtype)
    return out, lse.masked_fill(lse == -math.inf, empty_lse).float().detach()


def minus_one_is_open(causal: bool, window: tuple[int, int]) -> tuple[int | None, int | None]:
    """FlashAttention-2 and -3: -1 is open, causal overwrites the right side with 0."""
    left, right = window
    right = 0 if causal else right
    return (None if left < 0 else left), (None if right < 0 else right)


def none_is_open(
    causal: bool, window: tuple[int | None, int | None]
) -> tuple[int | None, int | None]:
    """FlashAttention-4: None is open and a negative number is a number (except a pair of them)."""
    left, right = window
    if left is not None and right is not None and left < 0 and right < 0:
        left = right = None
    return left, (0 if causal else right)


def dense(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **rest: object
) -> tuple[torch.Tensor, torch.Tensor]:
    """Batched form of `attention`."""
    pairs = [attention(q[b], k[b], v[b], **rest) for b in range(q.shape[0])]  # type: ignore[arg-type]
    return torch.stack([p[0] for p in pairs]), torch.stack([p[1] for p in pairs])


def packed(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_q: torch.Tensor,
    cu_k: torch.Tensor,
    used: torch.Tensor | None = None,
    **rest: object,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Packed form of `attention`."""
    pairs = []
    for b in range(len(cu_q) - 1):
        end = cu_k[b + 1] if used is None else cu_k[b] + used[b]
        rows = (q[cu_q[b] : cu_q[b + 1]], k[cu_k[b] : end], v[cu_k[b] : end])
        pairs.append(attention(*rows, **rest))  # type: ignore[arg-type]
    return torch.cat([p[0] for p in pairs]), torch.cat([p[1] for p in pairs], dim=1)


def cached(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    used: torch.Tensor,
    table: torch.Tensor | None,
    **rest: object,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cache form of `attention`; k and v are buffers or a pool."""
    pairs = []
    for b in range(q.shape[0]):
        rows = [(t[b] if table is None else t[table[b].long()].flatten(0, 1)) for t in (k, v)]
        pairs.append(attention(q[b], rows[0][: used[b]], rows[1][: used[b]], **rest))  # type: ignore[arg-type]
    return torch.stack([p[0] for p in pairs]), torch.stack([p[1] for p in pairs])


def flash_attn_2(calls: list[dict[str, object]], drops: Drops = ()) -> types.ModuleType:
    """`flash_attn.flash_attn_interface` of 2.8.3; its ROCm builds drop what `drops` names."""
    module = types.ModuleType("flash_attn.flash_attn_interface")

    def rest(a: dict) -> dict[str, object]:
        window = (-1, -1) if "window" in drops else a["window_size"]
        low, high = minus_one_is_open(a["causal"], window)
        return {
            "scale": a["softmax_scale"],
            "low": low,
            "high": high,
            "softcap": 0.0 if "softcap" in drops else a["softcap"],
            "slopes": a["alibi_slopes"],
            "empty_lse": math.inf,
        }

    def func(**a: object) -> object:
        out, lse = dense(a["q"], a["k"], a["v"], **rest(a))  # type: ignore[arg-type]
        return (out, lse, None) if a["return_attn_probs"] else out

    def varlen(**a: object) -> object:
        out, lse = packed(
            a["q"],
            a["k"],
            a["v"],
            a["cu_seqlens_q"],
            a["cu_seqlens_k"],
            **rest(a),  # type: ignore[arg-type]
        )
        return (out, lse, None) if a["return_attn_probs"] else out

    def kvcache(**a: object) -> object:
        used = append_to_cache(a, a["block_table"])
        out, lse = cached(
            a["q"],
            a["k_cache"],
            a["v_cache"],
            used,
            a["block_table"],
            **rest(a),  # type: ignore[arg-type]
        )
        return (out, lse) if a["return_softmax_lse"] else out

    for name, body in (
        ("flash_attn_func", func),
        ("flash_attn_varlen_func", varlen),
        ("flash_attn_with_kvcache", kvcache),
    ):
        setattr(module, name, recorded(f"flash-attn 2.8.3 {name}", calls, body))
    return module


def flash_attn_3(calls: list[dict[str, object]], drops: Drops = ()) -> types.ModuleType:
    """`fa3_fwd_interface` of 0.0.3; `drops` names features that it takes and does not have."""
    module = types.ModuleType("fa3_fwd_interface")

    def rest(a: dict) -> dict[str, object]:
        window = (-1, -1) if "LOCAL" in drops else a["window_size"]
        low, high = minus_one_is_open(a["causal"], window)
        return {
            "scale": a["softmax_scale"],
            "low": low,
            "high": high,
            "softcap": 0.0 if "SOFTCAP" in drops else a["softcap"],
            "slopes": None,
            "empty_lse": -math.inf,
        }

    def func(**a: object) -> object:
        q, k, v = a["q"], a["k"], a["v"]
        if "FP16" in drops:
            q, k, v = (t.bfloat16().to(t.dtype) for t in (q, k, v))  # type: ignore[attr-defined]
        out, lse = dense(q, k, v, **rest(a))  # type: ignore[arg-type]
        if "BACKWARD" in drops:
            out = out.detach() + 0 * out
        return (out, lse) if a["return_attn_probs"] else out

    def varlen(**a: object) -> object:
        bounds = [a["cu_seqlens_q"], a["cu_seqlens_k"]]
        if "VARLEN" in drops:
            bounds = [t[[0, -1]] for t in bounds]  # type: ignore[index]
        out, lse = packed(
            a["q"],
            a["k"],
            a["v"],
            *bounds,
            **rest(a),  # type: ignore[arg-type]
        )
        return (out, lse) if a["return_attn_probs"] else out

    def kvcache(**a: object) -> object:
        table = a["page_table"]
        if "PAGEDKV" in drops:
            table = torch.arange(table.numel()).view_as(table)  # type: ignore[attr-defined]
        used = a["cache_seqlens"] if "APPENDKV" in drops else append_to_cache(a, table)  # type: ignore[arg-type]
        out, lse = cached(
            a["q"],
            a["k_cache"],
            a["v_cache"],
            used,
            table,
            **rest(a),  # type: ignore[arg-type]
        )
        return (out, lse, None, None) if a["return_softmax_lse"] else out

    for name, body in (
        ("flash_attn_func", func),
        ("flash_attn_varlen_func", varlen),
        ("flash_attn_with_kvcache", kvcache),
    ):
        setattr(module, name, recorded(f"fa3-fwd 0.0.3 {name}", calls, body))
    return module


def flash_attn_4(calls: list[dict[str, object]]) -> types.ModuleType:
    """`flash_attn.cute.interface` of 4.0.0b36."""
    module = types.ModuleType("flash_attn.cute.interface")

    def rest(a: dict) -> dict[str, object]:
        low, high = none_is_open(a["causal"], a["window_size"])
        return {
            "scale": a["softmax_scale"],
            "low": low,
            "high": high,
            "softcap": a["softcap"],
            "slopes": None,
            "empty_lse": -math.inf,
        }

    def func(**a: object) -> object:
        out, lse = dense(a["q"], a["k"], a["v"], **rest(a))  # type: ignore[arg-type]
        return out, lse if a["return_lse"] else None

    def varlen(**a: object) -> object:
        q, k, v = a["q"], a["k"], a["v"]
        if a["seqused_k"] is not None:
            out, lse = cached(q, k, v, a["seqused_k"], a["page_table"], **rest(a))  # type: ignore[arg-type]
        else:
            out, lse = packed(q, k, v, a["cu_seqlens_q"], a["cu_seqlens_k"], **rest(a))  # type: ignore[arg-type]
        return out, lse if a["return_lse"] else None

    for name, body in (("flash_attn_func", func), ("flash_attn_varlen_func", varlen)):
        setattr(module, name, recorded(f"flash-attn-4 4.0.0b36 {name}", calls, body))
    return module


def varlen_attn(
    calls: list[dict[str, object]], empty_lse: float = math.inf, *, release: str = "2.13.0"
) -> object:
    """`torch.nn.attention.varlen.varlen_attn`; other kernels, another LSE of an empty row."""

    def body(**a: object) -> object:
        window = a["window_size"]
        low, high = minus_one_is_open(False, window)  # type: ignore[arg-type]
        rest = {
            "scale": a["scale"],
            "low": low,
            "high": high,
            "softcap": 0.0,
            "slopes": None,
            "empty_lse": empty_lse,
        }
        query, key, value = a["query"], a["key"], a["value"]
        if a.get("block_table") is None:
            out, lse = packed(
                query,
                key,
                value,
                a["cu_seq_q"],
                a["cu_seq_k"],
                a.get("seqused_k"),
                **rest,  # type: ignore[arg-type]
            )
        else:
            cu = a["cu_seq_q"].tolist()  # type: ignore[attr-defined]
            parts = [
                cached(
                    query[cu[b] : cu[b + 1]][None],  # type: ignore[index]
                    key,  # type: ignore[arg-type]
                    value,  # type: ignore[arg-type]
                    a["seqused_k"][b : b + 1],  # type: ignore[index]
                    a["block_table"][b : b + 1],  # type: ignore[index]
                    **rest,
                )
                for b in range(len(cu) - 1)
            ]
            out = torch.cat([p[0][0] for p in parts])
            lse = torch.cat([p[1][0] for p in parts], dim=1)
        return (out, lse) if a["return_aux"] is not None else out

    return recorded(f"torch {release} varlen_attn", calls, body)


class Wrapper:
    """One of flashinfer's wrappers: plan, then run."""

    def __init__(self, kind: str, calls: list[dict[str, object]]) -> None:
        name = f"flashinfer 0.7.4 {kind}.plan"
        self.plan = recorded(name, calls, self._plan)

    def _plan(self, **planned: object) -> None:
        self.planned = planned

    def _rest(self) -> dict[str, object]:
        p = self.planned
        left = p["window_left"]
        return {
            "scale": p["sm_scale"],
            "low": None if left < 0 else left,  # type: ignore[operator]
            # A decode step's one query is the last key: causal and full are the same there.
            "high": 0 if p.get("causal", True) else None,
            "softcap": p["logits_soft_cap"],
            "slopes": None,
            "empty_lse": -math.inf,
        }

    def run(self, *, q: torch.Tensor, **keys: object) -> torch.Tensor:
        p = self.planned
        if "kv_indptr" in p:
            return packed(q, keys["k"], keys["v"], p["qo_indptr"], p["kv_indptr"], **self._rest())[
                0
            ]  # type: ignore[arg-type]
        k, v = keys["paged_kv_cache"]  # type: ignore[misc]
        indptr = p.get("paged_kv_indptr", p.get("indptr"))
        indices = p.get("paged_kv_indices", p.get("indices"))
        last = p.get("paged_kv_last_page_len", p.get("last_page_len"))
        rows = p.get("qo_indptr", torch.arange(len(last) + 1))  # type: ignore[arg-type]
        outs = []
        for b in range(len(last)):  # type: ignore[arg-type]
            pages = indices[indptr[b] : indptr[b + 1]].long()  # type: ignore[index]
            used = (len(pages) - 1) * k.shape[1] + int(last[b])  # type: ignore[index]
            flat = [t[pages].flatten(0, 1)[:used] for t in (k, v)]
            outs.append(attention(q[rows[b] : rows[b + 1]], *flat, **self._rest())[0])  # type: ignore[index,arg-type]
        return torch.cat(outs)


def flashinfer(calls: list[dict[str, object]]) -> types.ModuleType:
    """`flashinfer` 0.7.4: the three wrappers; `made` holds how each was made."""
    module = types.ModuleType("flashinfer")
    module.made = []  # type: ignore[attr-defined]
    for kind in (
        "BatchDecodeWithPagedKVCacheWrapper",
        "BatchPrefillWithPagedKVCacheWrapper",
        "BatchPrefillWithRaggedKVCacheWrapper",
    ):

        def make(kind: str = kind, **made: object) -> Wrapper:
            module.made.append(made)
            return Wrapper(kind, calls)

        setattr(module, kind, make)
    return module


def append_to_cache(a: dict, table: torch.Tensor | None) -> torch.Tensor:
    """Write the new keys as the libraries do, and return the counts after it."""
    used = a["cache_seqlens"]
    if a["k"] is None:
        return used
    count = a["k"].shape[1]
    for b in range(len(used)):
        for i in range(count):
            at = int(used[b]) + i
            for cache, new in ((a["k_cache"], a["k"]), (a["v_cache"], a["v"])):
                if table is None:
                    cache[b, at] = new[b, i]
                else:
                    cache[table[b, at // cache.shape[1]], at % cache.shape[1]] = new[b, i]
    return used + count
