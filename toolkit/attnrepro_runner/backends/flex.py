"""`flex`: torch.nn.attention.flex_attention, compiled.

Uncompiled it is a slow, unfused computation with the same result, and after eight recompilations of
one function dynamo runs it that way without a word. So it is compiled with `fullgraph=True` for
each workload, after `torch._dynamo.reset()`. On a CPU torch 2.13 offers the forward alone, without
LSE: those refusals are raised in torch's own words.
"""

from __future__ import annotations

import importlib
import math
from typing import TYPE_CHECKING

import torch

from attnrepro_runner import libraries
from attnrepro_runner.backends import torchcalls
from attnrepro_runner.backends.base import (
    Availability,
    KernelPattern,
    MemoryOrder,
    Prepared,
    Tensors,
    Unsupported,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch.nn.attention.flex_attention import BlockMask

    from attnrepro_runner.backends.torchcalls import Group
    from attnrepro_runner.semantics import Workload

_NO_KERNEL = "NoValidChoicesError"
_MODES = ("default", "max-autotune-no-cudagraphs")


class FlexBackend:
    """FlexAttention through the compiler."""

    name = "flex"
    empty_row_lse = -math.inf
    option_names = frozenset({"compile_mode"})

    def __init__(self) -> None:
        """Compile nothing yet."""
        self._graph: _Graph | None = None

    def modules(self, options: Mapping[str, object]) -> tuple[str, ...]:
        """Name the module within torch."""
        del options
        return ("torch.nn.attention.flex_attention",)

    def availability(self) -> Availability:
        """Say which torch this is, and whether a compiler is there."""
        found = libraries.torch_availability()
        if not found.available or libraries.torch_device().type != "cpu":
            return found
        from torch._inductor import cpp_builder, exc

        try:
            compiler = cpp_builder.get_cpp_compiler()
        except (exc.InductorError, RuntimeError, OSError) as error:
            return Availability(
                available=False,
                version=found.version,
                files=found.files,
                flags=found.flags,
                reason=f"flex_attention is compiled by C++ on a CPU: {error}".strip(),
            )
        version = _compiler_version(compiler)
        return Availability(
            available=True,
            version=found.version,
            files=found.files,
            flags={**found.flags, "compiler": version},
        )

    def check(self, workload: Workload, options: Mapping[str, object]) -> None:
        """Refuse ragged lengths, pages and, on a CPU, gradients."""
        torchcalls.check_shared(workload, options)
        if options.get("compile_mode", _MODES[0]) not in _MODES:
            message = f"compile_mode must be one of {', '.join(_MODES)}"
            raise Unsupported(message)
        if workload.dropout is not None:
            message = "flex_attention has no dropout"
            raise Unsupported(message)
        if len(torchcalls.groups(workload)) > 1 or workload.is_packed:
            message = (
                "this adapter compiles one graph a workload, for equal lengths without packing"
            )
            raise Unsupported(message)
        if min(workload.seqlens_q[0], workload.seqlens_k[0]) == 0:
            message = "flex_attention takes no empty sequences"
            raise Unsupported(message)
        if workload.phase in ("forward", "forward_backward"):
            self._ask_for_gradients()

    def consumed(self, workload: Workload, options: Mapping[str, object]) -> frozenset[str]:
        """Masks, scale, softcap, ALiBi, head counts and widths, and a cache."""
        del workload, options
        return torchcalls.SHARED_FIELDS | {"head_dim_v", "softcap", "alibi", "compile_mode"}

    def memory_order(self, workload: Workload, options: Mapping[str, object]) -> MemoryOrder:
        """Masks are functions; the block mask has an entry for 128 x 128 scores."""
        del workload, options
        return MemoryOrder.LINEAR

    def patterns(self, workload: Workload, options: Mapping[str, object]) -> KernelPattern:
        """One compiled graph, and none of the operators of the uncompiled computation."""
        del workload, options
        if libraries.torch_device().type == "cpu":
            must: tuple[str, ...] = (r"^## Call CompiledFxGraph ",)
        else:
            must = (
                r"triton_tem_fused_.*flex|flex_(attention|decoding)|FlashAttention(Forward|Bwd)",
            )
        return KernelPattern(
            family="flex",
            must=must,
            must_not=(r"^aten::(matmul|bmm|_?softmax|exp|where)$", r"_scaled_dot_product"),
        )

    def prepare(
        self, workload: Workload, options: Mapping[str, object], tensors: Tensors
    ) -> Prepared:
        """Make score and mask functions and the block mask; the first step compiles.

        All bindings of one workload share one graph, or each would be a recompilation.
        """
        self.check(workload, options)
        mode = str(options.get("compile_mode", _MODES[0]))
        if self._graph is None or self._graph.key != (workload, mode):
            self._graph = _Graph(workload, tensors, mode)
        return _FlexPrepared(workload, tensors, self._graph)

    def _ask_for_gradients(self) -> None:
        from torch.nn.attention import flex_attention

        x = torch.zeros(1, 1, 16, 16, device=libraries.torch_device(), requires_grad=True)
        try:
            flex_attention._validate_device(x, x, x)
        except NotImplementedError as error:
            message = f"torch: {error}"
            raise Unsupported(message) from error


class _Graph:
    """What is compiled for one workload."""

    def __init__(self, workload: Workload, tensors: Tensors, mode: str) -> None:
        from torch.nn.attention.flex_attention import flex_attention

        torch._dynamo.reset()
        if workload.has_backward:
            # A donated buffer is gone after one backward, and `backward_step` runs more.
            functorch = importlib.import_module("torch._functorch.config")
            functorch.donated_buffer = False  # type: ignore[attr-defined]
        self.key = (workload, mode)
        self.compiled = torch.compile(flex_attention, fullgraph=True, mode=mode)
        self.score = _score_function(workload, tensors)
        self.mask = _block_mask(workload, tensors.q.device)


class _FlexPrepared(torchcalls.TorchPrepared):
    def __init__(self, workload: Workload, tensors: Tensors, graph: _Graph) -> None:
        self._graph = graph
        self._gqa = workload.heads_q != workload.heads_kv
        super().__init__(workload, tensors, self._call)

    def _call(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, group: Group
    ) -> tuple[torch.Tensor, None]:
        del group
        from torch._inductor.exc import InductorError

        try:
            out = self._graph.compiled(
                q,
                k,
                v,
                score_mod=self._graph.score,
                block_mask=self._graph.mask,
                scale=self._workload.scale_value,
                enable_gqa=self._gqa,
            )
        except InductorError as error:
            # torch 2.11 on an H200: its decode template has no choice for 67 queries of 4 heads a
            # KV head. Any other error of the compiler is a crash.
            if _NO_KERNEL not in str(error):
                raise
            message = f"torch's compiler has no kernel for {q.shape[2]} queries of this shape"
            raise Unsupported(message) from error
        return out, None


def _score_function(workload: Workload, tensors: Tensors) -> Callable[..., torch.Tensor] | None:
    softcap, slopes = workload.softcap, tensors.alibi_slopes
    offset = workload.offset(0)
    if softcap is None and slopes is None:
        return None

    def score(
        s: torch.Tensor, _b: torch.Tensor, h: torch.Tensor, i: torch.Tensor, j: torch.Tensor
    ) -> torch.Tensor:
        if softcap is not None:
            s = softcap * torch.tanh(s / softcap)
        if slopes is not None:
            s = s - slopes[h] * (i + offset - j).abs()
        return s

    return score


def _block_mask(workload: Workload, device: torch.device) -> BlockMask | None:
    from torch.nn.attention.flex_attention import create_block_mask

    if torchcalls.attends_everything(workload, 0):
        return None
    low, high = workload.diagonals(0)
    # Open ends become bounds that every pair of positions meets.
    least = 1 - workload.seqlens_q[0] if low is None else low
    most = workload.seqlens_k[0] - 1 if high is None else high

    def attends(
        _b: torch.Tensor, _h: torch.Tensor, i: torch.Tensor, j: torch.Tensor
    ) -> torch.Tensor:
        return (j - i >= least) & (j - i <= most)

    return create_block_mask(
        attends, None, None, workload.seqlens_q[0], workload.seqlens_k[0], device=str(device)
    )


def _compiler_version(compiler: str) -> str:
    import subprocess

    result = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False)
    return result.stdout.partition("\n")[0].strip() or "unknown"
