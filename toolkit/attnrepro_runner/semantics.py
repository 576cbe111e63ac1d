"""What a workload means: which keys a query attends, and with which logit.

One definition for the runner and the host, in the standard library alone. Query i of sequence b
stands at key position i + offset, where the offset is seqlen_k - seqlen_q (bottom_right) or 0
(top_left). Its logit with key j is

    cap(scale * q.k) - slope[h] * |i + seqlen_k - seqlen_q - j|,    cap(s) = c * tanh(s / c)

and it attends j when the causal mask and the window both allow it. A mask is a band
low <= j - i <= high, so that counting needs no matrix.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from functools import cached_property

from attnrepro_runner import fields, meaning
from attnrepro_runner.fields import (
    Alibi,
    Cache,
    Defect,
    Dropout,
    Fp8,
    Mask,
    MathFlags,
    Reader,
    WorkloadError,
)
from attnrepro_runner.philox import permutation

__all__ = ["ACTIVE_FIELDS", "Defect", "Workload", "WorkloadError"]

ACTIVE_FIELDS = (
    "seqlen_q",  # lengths differ between sequences
    "seqlen_k",
    "heads_kv",  # fewer than heads_q
    "head_dim_v",  # other than head_dim
    "dtype_out",  # other than dtype
    "accumulate",  # float64
    "layout",  # thd
    "strides.q",  # not contiguous
    "strides.k",
    "strides.v",
    "mask.causal",  # not none
    "mask.window",  # left, right and alignment together
    "mask.masked_rows",  # some row attends nothing
    "scale",  # not rsqrt_head_dim
    "softcap",
    "alibi",
    "dropout",  # p, seed and offset together
    "cache",  # kind and capacity
    "cache.append",  # above 0
    "cache.page_size",  # paged: page size, pool, table
    "fp8",  # descales
)
"""Names that `Workload.active_fields` may hold, each with what makes it more than neutral."""

_KEYS = (
    "phase",
    "batch",
    "seqlen_q",
    "seqlen_k",
    "heads_q",
    "heads_kv",
    "head_dim",
    "head_dim_v",
    "dtype",
    "dtype_out",
    "accumulate",
    "math",
    "layout",
    "strides",
    "mask",
    "scale",
    "softcap",
    "alibi",
    "dropout",
    "cache",
    "fp8",
)


@dataclass(frozen=True, kw_only=True)
class Workload:
    """One attention workload, every default explicit."""

    phase: str
    batch: int
    seqlens_q: tuple[int, ...]
    seqlens_k: tuple[int, ...]
    """Per sequence; after the append."""
    heads_q: int
    heads_kv: int
    head_dim: int
    head_dim_v: int
    dtype: str
    dtype_out: str
    accumulate: str
    math: MathFlags
    layout: str
    strides: tuple[tuple[int, ...] | None, tuple[int, ...] | None, tuple[int, ...] | None]
    """Of q, k, v in elements, in the layout's order; None is contiguous."""
    mask: Mask
    scale: float | None
    """None is 1 / sqrt(head_dim)."""
    softcap: float | None
    alibi: Alibi | None
    dropout: Dropout | None
    cache: Cache | None
    fp8: Fp8 | None

    @classmethod
    def parse(cls, document: object) -> Workload:
        """Read a manifest's workload object; missing fields take the manifest's defaults.

        Raises:
            WorkloadError: a ValueError with every defect and its JSON pointer.

        """
        defects: list[Defect] = []
        top = Reader(document, "", defects, _KEYS)
        batch = top.integer("batch", least=1)
        if batch > 65535:
            top.defect("/batch", batch, "at most 65535")
            batch = 1
        seqlens_q = top.lengths("seqlen_q", batch)
        seqlens_k = top.lengths("seqlen_k", batch)
        heads_q = top.integer("heads_q", least=1)
        heads_kv = top.integer("heads_kv", least=1, default=heads_q)
        head_dim = top.integer("head_dim", least=1)
        dtype = top.choice("dtype", tuple(fields.DTYPE_BYTES))
        is_fp8 = dtype == "float8_e4m3fn"
        cache = top.child("cache", fields.CACHE_KEYS)
        fp8 = top.child("fp8", fields.FP8_KEYS)
        alibi = top.child("alibi", ("slopes",))
        dropout = top.child("dropout", ("p", "seed", "offset"))
        strides = top.child("strides", fields.TENSOR_NAMES)
        default_scale = top.document.get("scale", fields.RSQRT) == fields.RSQRT
        workload = cls(
            phase=top.choice("phase", fields.PHASES),
            batch=batch,
            seqlens_q=seqlens_q,
            seqlens_k=seqlens_k,
            heads_q=heads_q,
            heads_kv=heads_kv,
            head_dim=head_dim,
            head_dim_v=top.integer("head_dim_v", least=1, default=head_dim),
            dtype=dtype,
            dtype_out=top.choice(
                "dtype_out",
                ("float32", "bfloat16", "float16"),
                "bfloat16" if is_fp8 else dtype,
            ),
            accumulate=top.choice("accumulate", ("float32", "float64"), "float32"),
            math=fields.read_math(top.child("math", fields.MATH_KEYS)),
            layout=top.choice("layout", fields.LAYOUTS, "bshd"),
            strides=(
                fields.read_strides(strides, "q"),
                fields.read_strides(strides, "k"),
                fields.read_strides(strides, "v"),
            ),
            mask=fields.read_mask(
                top.child("mask", fields.MASK_KEYS), square=seqlens_q == seqlens_k
            ),
            scale=None if default_scale else top.number("scale", above=0),
            softcap=None if top.document.get("softcap") is None else top.number("softcap", above=0),
            alibi=None
            if alibi is None
            else Alibi(slopes=alibi.numbers("slopes", fields.GEOMETRIC, (heads_q,), least=0)),
            dropout=None
            if dropout is None
            else Dropout(
                p=dropout.number("p", above=0, below=1),
                seed=dropout.seed("seed", None),
                offset=dropout.seed("offset", 0),
            ),
            cache=None if cache is None else fields.read_cache(cache, max(seqlens_k)),
            fp8=None if fp8 is None else fields.read_fp8(fp8, heads_kv),
        )
        if not defects:
            meaning.check(workload, top)
        if defects:
            raise WorkloadError(defects)
        return workload

    # Which keys are attended.

    def offset(self, b: int, alignment: str = "bottom_right") -> int:
        """Return the key position of query 0 of sequence b."""
        return 0 if alignment == "top_left" else self.seqlens_k[b] - self.seqlens_q[b]

    def diagonals(self, b: int) -> tuple[int | None, int | None]:
        """Return the band (low, high) of j - i that is attended, inclusive; None is open."""
        low: int | None = None
        highs = []
        window = self.mask.window
        if window is not None:
            offset = self.offset(b, window.alignment)
            if window.left is not None:
                low = offset - window.left
            if window.right is not None:
                highs.append(offset + window.right)
        if self.mask.causal != "none":
            highs.append(self.offset(b, self.mask.causal))
        return low, min(highs, default=None)

    def key_range(self, b: int, i: int) -> tuple[int, int]:
        """Return the keys [lo, hi) that query i attends; empty where lo >= hi, never negative."""
        low, high = self.diagonals(b)
        lo = 0 if low is None else max(0, i + low)
        hi = self.seqlens_k[b] if high is None else max(0, min(self.seqlens_k[b], i + high + 1))
        return lo, hi

    def is_empty_row(self, b: int, i: int) -> bool:
        """Say whether query i of sequence b attends nothing."""
        lo, hi = self.key_range(b, i)
        return lo >= hi

    def attending_rows(self, b: int) -> range:
        """Return the queries of sequence b that attend at least one key; they are contiguous."""
        low, high = self.diagonals(b)
        seqlen_q, seqlen_k = self.seqlens_q[b], self.seqlens_k[b]
        if seqlen_k == 0 or (low is not None and high is not None and low > high):
            return range(0)
        first = 0 if high is None else max(0, -high)
        end = seqlen_q if low is None else min(seqlen_q, seqlen_k - low)
        return range(first, max(first, end))

    def attended_keys(self, b: int) -> range:
        """Return the keys of sequence b that some query attends; they are contiguous."""
        rows = self.attending_rows(b)
        if not rows:
            return range(0)
        return range(self.key_range(b, rows[0])[0], self.key_range(b, rows[-1])[1])

    @cached_property
    def has_empty_rows(self) -> bool:
        """Say whether some query attends nothing."""
        return any(len(self.attending_rows(b)) < self.seqlens_q[b] for b in range(self.batch))

    # With which logit.

    @property
    def scale_value(self) -> float:
        """Factor on q.k."""
        return 1 / math.sqrt(self.head_dim) if self.scale is None else self.scale

    def alibi_slopes(self) -> tuple[float, ...] | None:
        """Return one slope a query head, rounded to float32 as every kernel takes them."""
        if self.alibi is None:
            return None
        slopes = self.alibi.slopes
        if slopes is None:
            heads = self.heads_q
            slopes = tuple(2.0 ** (-8 * (h + 1) / heads) for h in range(heads))
        return tuple(struct.unpack("<f", struct.pack("<f", s))[0] for s in slopes)

    def kv_head(self, h: int) -> int:
        """Return the key and value head that query head h reads."""
        return h // (self.heads_q // self.heads_kv)

    # In which tensors.

    @property
    def is_packed(self) -> bool:
        """Whether sequences are packed along one axis, with cu_seqlens."""
        return self.layout == "thd"

    @property
    def has_backward(self) -> bool:
        """Whether gradients are computed."""
        return self.phase == "forward_backward"

    @property
    def pages_per_sequence(self) -> int:
        """Width of the page table; 0 without pages."""
        if self.cache is None or self.cache.page_size is None:
            return 0
        return -(-self.cache.capacity // self.cache.page_size)

    @property
    def pool_pages(self) -> int:
        """Pages of the pool; 0 without pages."""
        if self.cache is None or self.cache.page_size is None:
            return 0
        return self.cache.pool_pages or self.batch * self.pages_per_sequence

    def page_table(self) -> tuple[tuple[int, ...], ...] | None:
        """Return the pool's page for each (sequence, page); pages are shared by nobody."""
        if self.cache is None or self.cache.page_size is None:
            return None
        seed = self.cache.permutation_seed
        pool = range(self.pool_pages) if seed is None else permutation(self.pool_pages, seed)
        width = self.pages_per_sequence
        return tuple(tuple(pool[b * width : (b + 1) * width]) for b in range(self.batch))

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of q, k, v, k_new, v_new, out or lse, as `Tensors` describes them."""
        if name == "lse":
            if self.is_packed:
                return (self.heads_q, sum(self.seqlens_q))
            return (self.batch, self.heads_q, self.seqlens_q[0])
        width = self.head_dim_v if name[0] in "vo" else self.head_dim
        if name in ("k_new", "v_new"):
            return (self.batch, self.cache.append if self.cache else 0, self.heads_kv, width)
        if name in ("q", "out"):
            return self._dense(self.seqlens_q, self.heads_q, width)
        if self.cache is None:
            return self._dense(self.seqlens_k, self.heads_kv, width)
        if self.cache.page_size is not None:
            return (self.pool_pages, self.cache.page_size, self.heads_kv, width)
        return (self.batch, self.cache.capacity, self.heads_kv, width)

    def stride(self, name: str) -> tuple[int, ...]:
        """Return the strides of q, k or v in elements."""
        given = self.strides[fields.TENSOR_NAMES.index(name)]
        return fields.contiguous(self.shape(name)) if given is None else given

    def storage_elements(self, name: str) -> int:
        """Return the elements from the first to the last of q, k or v: largest offset plus 1."""
        shape = self.shape(name)
        if 0 in shape:
            return 0
        return 1 + sum((n - 1) * s for n, s in zip(shape, self.stride(name), strict=True))

    def active_fields(self) -> frozenset[str]:
        """Return those of `ACTIVE_FIELDS` whose value is not the neutral one."""
        active = {
            "seqlen_q": len(set(self.seqlens_q)) > 1,
            "seqlen_k": len(set(self.seqlens_k)) > 1,
            "heads_kv": self.heads_kv != self.heads_q,
            "head_dim_v": self.head_dim_v != self.head_dim,
            "dtype_out": self.dtype_out != self.dtype,
            "accumulate": self.accumulate != "float32",
            "layout": self.is_packed,
            "mask.causal": self.mask.causal != "none",
            "mask.window": self.mask.window is not None,
            "mask.masked_rows": self.has_empty_rows,
            "scale": self.scale is not None,
            "softcap": self.softcap is not None,
            "alibi": self.alibi is not None,
            "dropout": self.dropout is not None,
            "cache": self.cache is not None,
            "cache.append": self.cache is not None and self.cache.append > 0,
            "cache.page_size": self.cache is not None and self.cache.page_size is not None,
            "fp8": self.fp8 is not None,
        }
        for name in fields.TENSOR_NAMES:
            active[f"strides.{name}"] = self.stride(name) != fields.contiguous(self.shape(name))
        return frozenset(name for name, is_active in active.items() if is_active)

    def _dense(self, seqlens: tuple[int, ...], heads: int, width: int) -> tuple[int, ...]:
        if self.layout == "thd":
            return (sum(seqlens), heads, width)
        if self.layout == "bhsd":
            return (self.batch, heads, seqlens[0], width)
        return (self.batch, seqlens[0], heads, width)
