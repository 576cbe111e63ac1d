"""How much work a workload is: attended pairs, FLOPs and bytes, by formulas with an id.

Pairs are counted in closed form, so that a sequence of 2^20 costs microseconds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from attnrepro_runner.fields import DTYPE_BYTES

if TYPE_CHECKING:
    from attnrepro_runner.semantics import Workload

PAIRS_FORMULA = "attention-pairs/1"
FLOPS_FORMULA = "attention-flops/1"
BYTES_FORMULA = "attention-bytes/1"
LSE_BYTES = 4


@dataclass(frozen=True, kw_only=True)
class Work:
    """Work of one call; FLOPs and bytes of the backward are 0 in phases without one."""

    pairs: int
    """(query, key) pairs attended, over all sequences, of one head."""
    flops_forward: int
    flops_backward: int
    bytes_forward: int
    """Least traffic: Q, the keys and values that some query attends, O and LSE, each once."""
    bytes_backward: int
    bytes_append: int
    """Read and write of the appended keys, where the append belongs to the timed call."""
    bytes_pages: int
    """K and V bytes of the whole pages that hold attended keys; 0 without pages."""

    @property
    def flops(self) -> int:
        """FLOPs of the phase's whole call."""
        return self.flops_forward + self.flops_backward

    @property
    def bytes(self) -> int:
        """Bytes of the phase's whole call."""
        return self.bytes_forward + self.bytes_backward + self.bytes_append


def work_of(workload: Workload) -> Work:
    """Count the work of one call.

    Forward FLOPs 2 Hq P (Dqk + Dv), backward 2 Hq P (3 Dqk + 2 Dv): Hq, never Hkv.
    """
    count = sum(pairs(workload, b) for b in range(workload.batch))
    d_qk, d_v = workload.head_dim, workload.head_dim_v
    size, size_out = DTYPE_BYTES[workload.dtype], DTYPE_BYTES[workload.dtype_out]
    rows = sum(workload.seqlens_q) * workload.heads_q
    keys = sum(len(workload.attended_keys(b)) for b in range(workload.batch)) * workload.heads_kv
    all_keys = sum(workload.seqlens_k) * workload.heads_kv
    forward = rows * (d_qk * size + d_v * size_out + LSE_BYTES) + keys * (d_qk + d_v) * size
    backward = flops_backward = 0
    if workload.has_backward:
        flops_backward = 2 * workload.heads_q * count * (3 * d_qk + 2 * d_v)
        # Reads Q, K, V, O, dO, LSE; writes dQ, dK, dV (zeros where nobody attends).
        backward = forward + rows * d_v * size_out + rows * d_qk * size
        backward += all_keys * (d_qk + d_v) * size
    append = 0
    if workload.cache is not None and workload.cache.append_in_call:
        append = 2 * workload.batch * workload.cache.append * workload.heads_kv
        append *= (d_qk + d_v) * size
    return Work(
        pairs=count,
        flops_forward=2 * workload.heads_q * count * (d_qk + d_v),
        flops_backward=flops_backward,
        bytes_forward=forward,
        bytes_backward=backward,
        bytes_append=append,
        bytes_pages=_pages_touched(workload) * workload.heads_kv * (d_qk + d_v) * size,
    )


def pairs(workload: Workload, b: int) -> int:
    """Return the (query, key) pairs that sequence b attends."""
    low, high = workload.diagonals(b)
    seqlen_q, seqlen_k = workload.seqlens_q[b], workload.seqlens_k[b]
    if low is not None and high is not None and low > high:
        return 0
    upper = seqlen_q * seqlen_k if high is None else _pairs_up_to(high, seqlen_q, seqlen_k)
    return upper - (0 if low is None else _pairs_up_to(low - 1, seqlen_q, seqlen_k))


def _pairs_up_to(diagonal: int, seqlen_q: int, seqlen_k: int) -> int:
    """Pairs with j - i <= diagonal: sum over i of clamp(i + diagonal + 1, 0, seqlen_k)."""
    return _ramp(seqlen_q + diagonal, seqlen_k) - _ramp(diagonal, seqlen_k)


def _ramp(n: int, top: int) -> int:
    """Sum of min(t, top) for t = 1..n; 0 for n <= 0."""
    if n <= 0:
        return 0
    rise = min(n, top)
    return rise * (rise + 1) // 2 + (n - rise) * top


def _pages_touched(workload: Workload) -> int:
    """Keys held by the pages in which attended keys lie, over all sequences."""
    cache = workload.cache
    if cache is None or cache.page_size is None:
        return 0
    size = cache.page_size
    total = 0
    for b in range(workload.batch):
        keys = workload.attended_keys(b)
        if keys:
            total += ((keys[-1] // size) - (keys[0] // size) + 1) * size
    return total
