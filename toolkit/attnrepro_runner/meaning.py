"""Checks of a workload that is well formed and may yet have no meaning."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attnrepro_runner import fields

if TYPE_CHECKING:
    from attnrepro_runner.fields import Reader
    from attnrepro_runner.semantics import Workload

_LARGEST_BYTES = 1 << 63


def check(workload: Workload, top: Reader) -> None:
    """Note what is well formed and yet has no meaning."""
    cache = workload.cache
    if workload.heads_q % workload.heads_kv:
        top.defect("/heads_kv", workload.heads_kv, f"a divisor of heads_q, {workload.heads_q}")
        return
    if not workload.is_packed and len(set(workload.seqlens_q)) > 1:
        top.defect("/seqlen_q", list(workload.seqlens_q), "one length, or layout thd")
        return
    if not workload.is_packed and cache is None and len(set(workload.seqlens_k)) > 1:
        top.defect("/seqlen_k", list(workload.seqlens_k), "one length, or layout thd, or a cache")
        return
    if workload.phase in ("prefill", "decode"):
        for seqlen_q, seqlen_k in zip(workload.seqlens_q, workload.seqlens_k, strict=True):
            if seqlen_q > seqlen_k:
                top.defect(
                    "/seqlen_q", seqlen_q, f"at most seqlen_k, {seqlen_k}, in {workload.phase}"
                )
                break
        if workload.dropout is not None:
            top.defect("/dropout", workload.dropout.p, "null without training")
    elif cache is not None:
        top.defect("/cache", cache.kind, "null in a training phase")
    if workload.phase == "decode" and min(workload.seqlens_q) < 1:
        top.defect("/seqlen_q", min(workload.seqlens_q), "at least 1 in decode")
    if (workload.dtype == "float8_e4m3fn") != (workload.fp8 is not None):
        top.defect("/fp8", top.document.get("fp8"), "descales with float8_e4m3fn, null otherwise")
    if cache is not None:
        shortest = min(*workload.seqlens_q, *workload.seqlens_k)
        if cache.append > shortest:
            top.defect("/cache/append", cache.append, f"at most the shortest sequence, {shortest}")
        if cache.append_in_call and not cache.append:
            top.defect("/cache/append_in_call", True, "false where nothing is appended")
        needed = workload.batch * workload.pages_per_sequence
        if cache.pool_pages is not None and cache.pool_pages < needed:
            top.defect("/cache/pool_pages", cache.pool_pages, f"at least {needed}, for no sharing")
    for name in fields.TENSOR_NAMES:
        _check_strides(workload, top, name)


def _check_strides(workload: Workload, top: Reader, name: str) -> None:
    shape, stride = workload.shape(name), workload.stride(name)
    if len(shape) != len(stride):
        top.defect(f"/strides/{name}", list(stride), f"{len(shape)} strides")
        return
    covered = 1
    for step, n in sorted((s, n) for s, n in zip(stride, shape, strict=True) if n > 1):
        if step < covered:
            top.defect(f"/strides/{name}", list(stride), "strides under which no elements overlap")
            return
        covered = step * (n - 1) + covered
    size = workload.storage_elements(name) * fields.DTYPE_BYTES[workload.dtype]
    if size >= _LARGEST_BYTES:
        top.defect(f"/strides/{name}", size, "a tensor of less than 2^63 bytes")
