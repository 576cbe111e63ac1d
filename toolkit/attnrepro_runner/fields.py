"""Parts of a workload, read strictly from its canonical dictionary.

Reading collects every defect instead of stopping at the first, and an unknown key is a defect: a
field that nobody reads would be less work than was asked for.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1}
PHASES = ("forward", "forward_backward", "prefill", "decode")
LAYOUTS = ("bshd", "bhsd", "thd")
CAUSAL = ("none", "top_left", "bottom_right")
TENSOR_NAMES = ("q", "k", "v")
MEASURED = "measured"
GEOMETRIC = "geometric"
RSQRT = "rsqrt_head_dim"


@dataclass(frozen=True, kw_only=True)
class Defect:
    """One thing wrong with a workload."""

    pointer: str
    """JSON pointer below the workload, e.g. "/mask/causal"."""
    found: object
    """The JSON value."""
    allowed: str

    def __str__(self) -> str:
        """Say it in one line."""
        text = json.dumps(self.found, default=repr)
        text = text if len(text) <= 80 else text[:77] + "..."
        return f"{self.pointer}: found {text}; allowed: {self.allowed}"


class WorkloadError(ValueError):
    """A workload that has no meaning; `defects` says why, all at once."""

    def __init__(self, defects: Sequence[Defect]) -> None:
        self.defects = tuple(defects)
        super().__init__("; ".join(map(str, defects)))


@dataclass(frozen=True, kw_only=True)
class MathFlags:
    """The framework's math flags."""

    float32_matmul_precision: str
    allow_reduced_precision_reduction: bool
    allow_math_sdp_reduction: bool


@dataclass(frozen=True, kw_only=True)
class Window:
    """Keys left and right of the aligned diagonal, inclusive; None is open."""

    left: int | None
    right: int | None
    alignment: str
    """top_left or bottom_right, resolved."""


@dataclass(frozen=True, kw_only=True)
class Mask:
    """Which keys a query attends."""

    causal: str
    """none, top_left or bottom_right."""
    window: Window | None
    masked_rows: str
    """zero or nan: the output of a row that attends nothing."""


@dataclass(frozen=True, kw_only=True)
class Alibi:
    """Bias -slope[h] * |i + o - j|, o of bottom_right; None is the geometric series."""

    slopes: tuple[float, ...] | None


@dataclass(frozen=True, kw_only=True)
class Dropout:
    """Probability of dropping a weight, and the generator's seed and offset."""

    p: float
    seed: int
    offset: int


@dataclass(frozen=True, kw_only=True)
class Cache:
    """Key-value cache of prefill chunks and decode."""

    kind: str
    """contiguous or paged."""
    capacity: int
    append: int
    append_in_call: bool
    page_size: int | None
    pool_pages: int | None
    permutation_seed: int | None


@dataclass(frozen=True, kw_only=True)
class Fp8:
    """Descales by which q, k and v are multiplied; None is measured from the data."""

    granularity: str
    """tensor or head_kv."""
    q_descale: tuple[float, ...] | None
    k_descale: tuple[float, ...] | None
    v_descale: tuple[float, ...] | None


class Reader:
    """Typed, strict access to one object of the document."""

    def __init__(
        self, document: object, pointer: str, defects: list[Defect], keys: Sequence[str]
    ) -> None:
        self.pointer, self.defects = pointer, defects
        self.document: Mapping[str, object] = {}
        if not isinstance(document, dict):
            self.defect("", document, "an object")
            return
        self.document = document
        for key in document:
            if key not in keys:
                self.defect(f"/{key}", document[key], f"one of the fields {', '.join(keys)}")

    def defect(self, below: str, found: object, allowed: str) -> None:
        """Note a defect at a pointer below this object."""
        self.defects.append(Defect(pointer=self.pointer + below, found=found, allowed=allowed))

    def child(self, key: str, keys: Sequence[str]) -> Reader | None:
        """Open an object field; None where it is null or missing."""
        value = self.document.get(key)
        if value is None:
            return None
        return Reader(value, f"{self.pointer}/{key}", self.defects, keys)

    def integer(self, key: str, *, least: int, default: int | None = None) -> int:
        """Read an integer; a missing one without default is a defect."""
        value = self.document.get(key)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            self.defect(f"/{key}", value, f"an integer from {least}")
            return least
        return value

    def optional_integer(self, key: str, *, least: int) -> int | None:
        """Read an integer or null."""
        return None if self.document.get(key) is None else self.integer(key, least=least)

    def seed(self, key: str, default: int | None) -> int:
        """Read an unsigned 64-bit integer, a decimal string beyond 2^53 - 1."""
        value = self.document.get(key, default)
        # Longer ones are no 64-bit integer, and Python reads no digits without end.
        if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) <= 20:
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 1 << 64:
            self.defect(f"/{key}", value, "an unsigned 64-bit integer, as a string from 2^53")
            return 0
        return value

    def boolean(self, key: str, *, default: bool) -> bool:
        """Read a boolean."""
        value = self.document.get(key, default)
        if not isinstance(value, bool):
            self.defect(f"/{key}", value, "true or false")
            return default
        return value

    def choice(self, key: str, allowed: Sequence[str], default: str | None = None) -> str:
        """Read one of several words."""
        value = self.document.get(key)
        value = default if value is None else value
        if not isinstance(value, str) or value not in allowed:
            self.defect(f"/{key}", value, " or ".join(allowed))
            return allowed[0]
        return value

    def number(self, key: str, *, above: float, below: float = float("inf")) -> float:
        """Read a number strictly between two bounds."""
        value = self.document.get(key)
        if isinstance(value, bool) or not isinstance(value, int | float):
            self.defect(f"/{key}", value, "a number")
            return 1.0
        if not above < value < below:
            self.defect(f"/{key}", value, f"above {above} and below {below}")
            return 1.0
        return float(value)

    def lengths(self, key: str, batch: int) -> tuple[int, ...]:
        """Read one length for all sequences, or one each."""
        value = self.document.get(key)
        if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
            return (value,) * batch
        if (
            isinstance(value, list)
            and len(value) == batch
            and all(isinstance(n, int) and not isinstance(n, bool) and n >= 0 for n in value)
        ):
            return tuple(value)
        self.defect(f"/{key}", value, f"a length, or a list of {batch} (one per sequence)")
        return (1,) * batch

    def numbers(
        self, key: str, word: str, counts: Sequence[int], *, least: float
    ) -> tuple[float, ...] | None:
        """Read a list of numbers, or None for the word that stands for a rule."""
        value = self.document.get(key, word)
        if value == word:
            return None
        if (
            isinstance(value, list)
            and len(value) in counts
            and all(
                isinstance(n, int | float) and not isinstance(n, bool) and least <= n < float("inf")
                for n in value
            )
        ):
            return tuple(float(n) for n in value)
        lengths = " or ".join(str(n) for n in dict.fromkeys(counts))
        self.defect(f"/{key}", value, f"{word!r}, or {lengths} numbers from {least}")
        return None


def read_math(reader: Reader | None) -> MathFlags:
    """Read the math flags; defaults where there are none."""
    source = reader or Reader({}, "/math", [], MATH_KEYS)
    return MathFlags(
        float32_matmul_precision=source.choice(
            "float32_matmul_precision", ("highest", "high", "medium"), "highest"
        ),
        allow_reduced_precision_reduction=source.boolean(
            "allow_reduced_precision_reduction", default=False
        ),
        allow_math_sdp_reduction=source.boolean("allow_math_sdp_reduction", default=False),
    )


def read_mask(reader: Reader | None, *, square: bool) -> Mask:
    """Read the mask; `square` says that every sequence has equal query and key length."""
    source = reader or Reader({}, "/mask", [], MASK_KEYS)
    value = source.document.get("causal", "none")
    if isinstance(value, bool):
        if value and not square:
            source.defect(
                "/causal", value, "top_left or bottom_right, since seqlen_q and seqlen_k differ"
            )
        causal = "top_left" if value else "none"
    else:
        causal = source.choice("causal", CAUSAL, "none")
    window = None
    inner = source.child("window", WINDOW_KEYS)
    if inner is not None:
        window = Window(
            left=inner.optional_integer("left", least=0),
            right=inner.optional_integer("right", least=0),
            alignment=inner.choice(
                "alignment", CAUSAL[1:], causal if causal != "none" else "bottom_right"
            ),
        )
    return Mask(
        causal=causal,
        window=window,
        masked_rows=source.choice("masked_rows", ("zero", "nan"), "zero"),
    )


def read_cache(reader: Reader, longest: int) -> Cache:
    """Read the cache; `longest` is the greatest key length."""
    kind = reader.choice("kind", ("contiguous", "paged"))
    capacity = reader.integer("capacity", least=1, default=max(longest, 1))
    page_size = reader.optional_integer("page_size", least=1)
    pool_pages = reader.optional_integer("pool_pages", least=1)
    if capacity < longest:
        reader.defect("/capacity", capacity, f"at least the longest seqlen_k, {longest}")
    if kind == "paged" and page_size is None:
        reader.defect("/page_size", None, "an integer from 1 for a paged cache")
        page_size = 1
    if kind == "contiguous":
        for key, value in (("page_size", page_size), ("pool_pages", pool_pages)):
            if value is not None:
                reader.defect(f"/{key}", value, "null for a contiguous cache")
    seed = reader.document.get("permutation_seed", 0)
    return Cache(
        kind=kind,
        capacity=capacity,
        append=reader.integer("append", least=0, default=0),
        append_in_call=reader.boolean("append_in_call", default=False),
        page_size=page_size,
        pool_pages=pool_pages,
        permutation_seed=None if seed is None else reader.seed("permutation_seed", 0),
    )


def read_fp8(reader: Reader, heads_kv: int) -> Fp8:
    """Read the descales."""
    granularity = reader.choice("granularity", ("tensor", "head_kv"), "head_kv")
    counts = (1,) if granularity == "tensor" else (1, heads_kv)
    q, k, v = (
        reader.numbers(f"{name}_descale", MEASURED, counts, least=5e-324) for name in TENSOR_NAMES
    )
    return Fp8(granularity=granularity, q_descale=q, k_descale=k, v_descale=v)


def read_strides(reader: Reader | None, name: str) -> tuple[int, ...] | None:
    """Read the strides of one tensor; None is contiguous."""
    value = None if reader is None else reader.document.get(name)
    if value is None or reader is None:
        return None
    if isinstance(value, list) and all(
        isinstance(n, int) and not isinstance(n, bool) and n >= 0 for n in value
    ):
        return tuple(value)
    reader.defect(f"/{name}", value, "a list of integers from 0")
    return None


def contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return row-major strides in elements."""
    strides = [1] * len(shape)
    for axis in range(len(shape) - 2, -1, -1):
        strides[axis] = strides[axis + 1] * max(shape[axis + 1], 1)
    return tuple(strides)


MATH_KEYS = (
    "float32_matmul_precision",
    "allow_reduced_precision_reduction",
    "allow_math_sdp_reduction",
)
MASK_KEYS = ("causal", "window", "masked_rows")
WINDOW_KEYS = ("left", "right", "alignment")
CACHE_KEYS = (
    "kind",
    "capacity",
    "append",
    "append_in_call",
    "page_size",
    "pool_pages",
    "permutation_seed",
)
FP8_KEYS = ("granularity", "q_descale", "k_descale", "v_descale")
