"""`cudnn_frontend`: cuDNN's fused attention through the graphs of nvidia-cudnn-frontend.

The frontend also brings engines of its own (CuTe DSL), which it may rank first; they are barred, so
that the name means cuDNN. Its left bound counts the query's own key: a window of `left` keys before
it is `left + 1`. Graphs are built in `prepare`; the statistics that cuDNN returns are the LSE.
"""

from __future__ import annotations

import importlib
import math
from typing import TYPE_CHECKING, cast

import torch

from attnrepro_runner.backends import packages
from attnrepro_runner.backends.base import (
    Availability,
    KernelPattern,
    MemoryOrder,
    Outputs,
    Prepared,
    Unsupported,
)
from attnrepro_runner.backends.cudnn_graphs import (
    Graph,
    GraphBuilder,
    alignment,
    bhsd,
    keys_bhsd,
)
from attnrepro_runner.backends.flash_common import (
    DENSE_FIELDS,
    CacheAppend,
    check_common,
    check_options,
    flag,
    option_fields,
    refuse,
)
from attnrepro_runner.outofmemory import raise_out_of_memory

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from types import ModuleType

    from attnrepro_runner.backends.base import Tensors
    from attnrepro_runner.semantics import Workload

_DISTRIBUTION = "nvidia-cudnn-frontend"
_ENVIRONMENT = ("CUDNN_FRONTEND_ENABLE_FROST_ENGINES", "CUDNN_FRONTEND_ATTN_DP_WORKSPACE_LIMIT")


class CudnnFrontend:
    """cuDNN's attention by its own graphs."""

    name = "cudnn_frontend"
    empty_row_lse = -math.inf
    option_names = frozenset({"deterministic"})

    def modules(self, options: Mapping[str, object]) -> tuple[str, ...]:
        """Name the package."""
        del options
        return ("cudnn",)

    def availability(self) -> Availability:
        """Import the frontend and say which cuDNN it found."""
        version = packages.release(_DISTRIBUTION)
        if version is None:
            return Availability(available=False, reason="nvidia-cudnn-frontend is not installed")
        flags = packages.environment_flags(_ENVIRONMENT)
        reason = None
        try:
            module = importlib.import_module("cudnn")
            flags["cudnn"] = str(module.backend_version())
        except Exception as error:
            reason = f"cudnn cannot be imported: {type(error).__name__}: {error}"
        return Availability(
            available=reason is None,
            version=version,
            files=packages.kernel_files(_DISTRIBUTION),
            flags=flags,
            reason=reason,
        )

    def check(self, workload: Workload, options: Mapping[str, object]) -> None:
        """Refuse what the graphs here do not express; cuDNN's own refusals come in `prepare`."""
        check_common(workload, dtypes=("float16", "bfloat16"))
        check_options(options, self._honoured(workload))
        for value, what in (
            (workload.softcap, "softcap"),
            (workload.alibi, "ALiBi"),
            (workload.dropout, "dropout"),
        ):
            if value is not None:
                refuse(f"this adapter's graphs have no {what}")
        if workload.is_packed:
            refuse("this adapter's graphs have no packed layout")
        if workload.head_dim % 8 or workload.head_dim_v % 8:
            refuse("head_dim and head_dim_v must be multiples of 8")
        if 0 in workload.seqlens_q or 0 in workload.seqlens_k:
            refuse("a graph has no empty sequences")
        if workload.cache is not None and workload.cache.append_in_call and workload.cache.append:
            refuse("a graph does not append to a cache")
        alignment(workload)

    def consumed(self, workload: Workload, options: Mapping[str, object]) -> frozenset[str]:
        """Return the honoured fields."""
        fields = DENSE_FIELDS | {"head_dim_v"}
        if workload.cache is not None:
            fields |= {"seqlen_k", "cache", "cache.append", "cache.page_size"}
        return fields | option_fields(options, self._honoured(workload))

    def memory_order(self, workload: Workload, options: Mapping[str, object]) -> MemoryOrder:
        """Nothing of the size of the scores is made."""
        del workload, options
        return MemoryOrder.LINEAR

    def patterns(self, workload: Workload, options: Mapping[str, object]) -> KernelPattern:
        """Generated kernels of cuDNN."""
        del workload, options
        return KernelPattern(
            family="cuDNN",
            must=(r"cudnn_generated_(fort_native|oss)_.*sdpa|cudnn.*sdpa",),
            must_not=(r"flash::flash_fwd", r"fmha_cutlass", r"FlashAttnFwdSm"),
        )

    def prepare(
        self, workload: Workload, options: Mapping[str, object], tensors: Tensors
    ) -> Prepared:
        """Build the graphs."""
        self.check(workload, options)
        cudnn = importlib.import_module("cudnn")
        try:
            return _CudnnPrepared(
                cudnn, workload, tensors, deterministic=flag(options, "deterministic")
            )
        except (cudnn.cudnnGraphNotSupportedError, RuntimeError, ValueError) as error:
            raise_out_of_memory(error)
            reason = f"cuDNN {cudnn.backend_version()}: {error}"
            raise Unsupported(reason) from error

    def _honoured(self, workload: Workload) -> frozenset[str]:
        return self.option_names if workload.has_backward else frozenset()


class _CudnnPrepared:
    def __init__(
        self, cudnn: ModuleType, workload: Workload, tensors: Tensors, *, deterministic: bool
    ) -> None:
        self._cudnn = cudnn
        self._workload = workload
        self._tensors = tensors
        self._device = tensors.q.device
        self._handle = cudnn.create_handle()
        self._stream = -1
        cache = workload.cache
        self._append = None
        if cache is not None and cache.append:
            self._append = CacheAppend(workload, tensors)
        self._training = workload.phase in ("forward", "forward_backward")
        builder = GraphBuilder(cudnn, workload, tensors, self._handle)
        self._forward_graph = builder.forward()
        self._backward_graph = None
        if workload.has_backward:
            self._backward_graph = builder.backward(deterministic=deterministic)
        self._kept: tuple[torch.Tensor, torch.Tensor] | None = None

    def step(self) -> Outputs:
        """Do the phase's work once."""
        out, stats = self._forward(self._tensors.q, self._tensors.k, self._tensors.v)
        lse = None if stats is None else stats.squeeze(-1)
        if not self._workload.has_backward or stats is None:
            return Outputs(out=self._laid_out(out), lse=lse)
        dq, dk, dv = self._backward(
            self._tensors.q, self._tensors.k, self._tensors.v, out, stats, self._grad_out()
        )
        return Outputs(out=self._laid_out(out), lse=lse, dq=dq, dk=dk, dv=dv)

    def backward_step(self) -> Outputs:
        """Do the backward alone."""
        t = self._tensors
        if self._kept is None:
            out, stats = self._forward(t.q, t.k, t.v)
            if stats is None:
                msg = "a backward needs the forward's statistics"
                raise ValueError(msg)
            self._kept = (out, stats)
        out, stats = self._kept
        dq, dk, dv = self._backward(t.q, t.k, t.v, out, stats, self._grad_out())
        return Outputs(out=self._laid_out(out), dq=dq, dk=dk, dv=dv)

    def append_step(self) -> None:
        """Write the new keys and values into the cache."""
        if self._append is not None:
            self._append()

    def call(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Attention of other tensors of the same shapes.

        A graph reads its tensors by the strides that it was built for, whatever those of the
        tensors are; other strides are copied.
        """
        t = self._tensors
        q, k, v = (_as_bound(x, like) for x, like in ((q, t.q), (k, t.k), (v, t.v)))
        if self._workload.has_backward:
            apply = cast("Callable[..., torch.Tensor]", _Attention.apply)
            return apply(self, q, k, v)
        return self._laid_out(self._forward(q, k, v)[0])

    def _forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the output (batch, heads, seqlen, width) and the statistics (…, 1)."""
        w = self._workload
        out = torch.empty(
            (w.batch, w.seqlens_q[0], w.heads_q, w.head_dim_v), dtype=q.dtype, device=self._device
        ).transpose(1, 2)
        stats = torch.empty(
            (w.batch, w.heads_q, w.seqlens_q[0], 1), dtype=torch.float32, device=self._device
        )
        values = {
            "q": bhsd(self._workload, q),
            "k": keys_bhsd(self._workload, k),
            "v": keys_bhsd(self._workload, v),
            "o": out,
        }
        self._execute(self._forward_graph, {**values, "stats": stats})
        return out, stats

    def _backward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        stats: torch.Tensor,
        grad: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        assert self._backward_graph is not None
        grads = tuple(
            torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device)
            for t in (q, k, v)
        )
        values = {
            "q": bhsd(self._workload, q),
            "k": bhsd(self._workload, k),
            "v": bhsd(self._workload, v),
            "o": out,
            "stats": stats,
            "dO": bhsd(self._workload, grad),
            "dQ": bhsd(self._workload, grads[0]),
            "dK": bhsd(self._workload, grads[1]),
            "dV": bhsd(self._workload, grads[2]),
        }
        self._execute(self._backward_graph, values)
        return grads[0], grads[1], grads[2]

    def _execute(self, graph: Graph, values: Mapping[str, torch.Tensor]) -> None:
        stream = torch.cuda.current_stream().cuda_stream if self._device.type == "cuda" else 0
        if stream != self._stream:
            self._cudnn.set_stream(handle=self._handle, stream=stream)
            self._stream = stream
        graph.execute(values, self._handle)

    def _grad_out(self) -> torch.Tensor:
        if self._tensors.grad_out is None:
            msg = "a backward needs grad_out"
            raise ValueError(msg)
        return self._tensors.grad_out

    def _laid_out(self, out: torch.Tensor) -> torch.Tensor:
        return out if self._workload.layout == "bhsd" else out.transpose(1, 2)


class _Attention(torch.autograd.Function):
    """The two graphs as one differentiable function."""

    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx,
        prepared: _CudnnPrepared,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
    ) -> torch.Tensor:
        out, stats = prepared._forward(q, k, v)
        assert stats is not None
        ctx.save_for_backward(q, k, v, out, stats)
        ctx.prepared = prepared  # type: ignore[attr-defined]
        return prepared._laid_out(out)

    @staticmethod
    def backward(
        ctx: torch.autograd.function.FunctionCtx, *grads: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        prepared = cast("_CudnnPrepared", ctx.prepared)  # type: ignore[attr-defined]
        q, k, v, out, stats = ctx.saved_tensors  # type: ignore[attr-defined]
        grad = _as_bound(grads[0], prepared._grad_out())
        return (None, *prepared._backward(q, k, v, out, stats, grad))


def _as_bound(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return a tensor's values in another's strides."""
    if tensor.stride() == like.stride():
        return tensor
    bound = torch.empty_strided(like.shape, like.stride(), dtype=tensor.dtype, device=tensor.device)
    return bound.copy_(tensor)
