"""`cudnn_frontend`: cuDNN's fused attention through the graphs of nvidia-cudnn-frontend.

The frontend also brings engines of its own (CuTe DSL), which it may rank first; they are barred, so
that the name means cuDNN. Its left bound counts the query's own key: a window of `left` keys before
it is `left + 1`. Graphs are built in `prepare`; the statistics that cuDNN returns are the LSE.
"""

from __future__ import annotations

import importlib
import math
from dataclasses import dataclass, field
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
from attnrepro_runner.backends.flash_common import (
    DENSE_FIELDS,
    CacheAppend,
    check_common,
    check_options,
    flag,
    option_fields,
    refuse,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from types import ModuleType

    from attnrepro_runner.backends.base import Tensors
    from attnrepro_runner.semantics import Workload

_DISTRIBUTION = "nvidia-cudnn-frontend"
_OWN_ENGINES = ["sdpa_fwd_prefill", "sdpa_bwd_sm"]
_ENVIRONMENT = ("CUDNN_FRONTEND_ENABLE_FROST_ENGINES", "CUDNN_FRONTEND_ATTN_DP_WORKSPACE_LIMIT")


class CudnnFrontend:
    """cuDNN's attention by its own graphs."""

    name = "cudnn_frontend"
    empty_row_lse = -math.inf
    option_names = frozenset({"deterministic"})

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
        _alignment(workload)

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
            reason = f"cuDNN {cudnn.backend_version()}: {error}"
            raise Unsupported(reason) from error

    def _honoured(self, workload: Workload) -> frozenset[str]:
        return self.option_names if workload.has_backward else frozenset()


@dataclass
class _Graph:
    """One built graph; inputs are bound once, outputs at each execution."""

    graph: object
    bound: dict[object, torch.Tensor] = field(default_factory=dict)
    named: dict[str, object] = field(default_factory=dict)
    workspace: torch.Tensor | None = None


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
        self._forward_graph = self._build(self._describe_forward)
        self._backward_graph = None
        if workload.has_backward:
            self._backward_graph = self._build(
                lambda graph, built: self._describe_backward(graph, built, deterministic)
            )
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
        values = {"q": self._bhsd(q), "k": self._keys(k), "v": self._keys(v), "o": out}
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
            "q": self._bhsd(q),
            "k": self._bhsd(k),
            "v": self._bhsd(v),
            "o": out,
            "stats": stats,
            "dO": self._bhsd(grad),
            "dQ": self._bhsd(grads[0]),
            "dK": self._bhsd(grads[1]),
            "dV": self._bhsd(grads[2]),
        }
        self._execute(self._backward_graph, values)
        return grads[0], grads[1], grads[2]

    def _execute(self, built: _Graph, values: Mapping[str, torch.Tensor]) -> None:
        stream = torch.cuda.current_stream().cuda_stream if self._device.type == "cuda" else 0
        if stream != self._stream:
            self._cudnn.set_stream(handle=self._handle, stream=stream)
            self._stream = stream
        pack = {built.named[name]: value for name, value in values.items() if name in built.named}
        execute = cast("Callable[..., None]", built.graph.execute)  # type: ignore[attr-defined]
        execute({**built.bound, **pack}, built.workspace, handle=self._handle)

    def _build(self, describe: Callable[[object, _Graph], None]) -> _Graph:
        cudnn, w = self._cudnn, self._workload
        graph = cudnn.pygraph(
            io_data_type=_data_type(cudnn, w.dtype),
            intermediate_data_type=cudnn.data_type.FLOAT,
            compute_data_type=cudnn.data_type.FLOAT,
            handle=self._handle,
        )
        built = _Graph(graph=graph)
        describe(graph, built)
        graph.validate()
        graph.build_operation_graph()
        graph.deselect_engines(list(_OWN_ENGINES))
        graph.create_execution_plans([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
        graph.check_support()
        graph.build_plans()
        if getattr(graph, "selected_engine", None) is not None:
            msg = f"the frontend's own engine {graph.selected_engine.name} was chosen"
            raise ValueError(msg)
        built.workspace = torch.empty(
            max(1, graph.get_workspace_size()), dtype=torch.uint8, device=self._device
        )
        return built

    def _describe_forward(self, graph: object, built: _Graph) -> None:
        w, t = self._workload, self._tensors
        extra = self._mask(graph, built)
        if w.cache is not None and w.cache.page_size is not None and t.page_table is not None:
            table = t.page_table.view(w.batch, 1, -1, 1)
            extra |= {
                "paged_attention_k_table": self._tensor(graph, built, "k_table", table, bind=True),
                "paged_attention_v_table": self._tensor(graph, built, "v_table", table, bind=True),
                # The bound must be the table's width in keys, not the longest sequence.
                "paged_attention_max_seq_len_kv": table.shape[2] * w.cache.page_size,
            }
        out, stats = cast(
            "tuple[object, object]",
            graph.sdpa(  # type: ignore[attr-defined]
                name="sdpa",
                q=self._tensor(graph, built, "q", self._bhsd(t.q)),
                k=self._tensor(graph, built, "k", self._keys(t.k)),
                v=self._tensor(graph, built, "v", self._keys(t.v)),
                generate_stats=True,
                attn_scale=w.scale_value,
                **extra,
            ),
        )
        shape = (w.batch, w.heads_q, w.seqlens_q[0], w.head_dim_v)
        stride = (shape[2] * shape[1] * shape[3], shape[3], shape[1] * shape[3], 1)
        _as_output(out, shape, stride)
        _as_output(stats, (*shape[:3], 1), (shape[1] * shape[2], shape[2], 1, 1))
        stats.set_data_type(self._cudnn.data_type.FLOAT)  # type: ignore[attr-defined]
        built.named |= {"o": out, "stats": stats}

    def _describe_backward(self, graph: object, built: _Graph, deterministic: bool) -> None:
        w, t = self._workload, self._tensors
        shape = (w.batch, w.heads_q, w.seqlens_q[0], w.head_dim_v)
        out = torch.empty((shape[0], shape[2], shape[1], shape[3]), dtype=t.q.dtype, device="meta")
        stats = torch.empty((*shape[:3], 1), dtype=torch.float32, device="meta")
        extra = self._mask(graph, built)
        if deterministic:
            extra["use_deterministic_algorithm"] = True
        grads = cast(
            "tuple[object, object, object]",
            graph.sdpa_backward(  # type: ignore[attr-defined]
                name="sdpa_backward",
                q=self._tensor(graph, built, "q", self._bhsd(t.q)),
                k=self._tensor(graph, built, "k", self._bhsd(t.k)),
                v=self._tensor(graph, built, "v", self._bhsd(t.v)),
                o=self._tensor(graph, built, "o", out.transpose(1, 2)),
                dO=self._tensor(graph, built, "dO", self._bhsd(self._grad_out())),
                stats=self._tensor(graph, built, "stats", stats),
                attn_scale=w.scale_value,
                **extra,
            ),
        )
        for name, grad, like in zip(("dQ", "dK", "dV"), grads, (t.q, t.k, t.v), strict=True):
            view = self._bhsd(like)
            _as_output(grad, tuple(view.shape), tuple(view.stride()))
            built.named[name] = grad

    def _mask(self, graph: object, built: _Graph) -> dict[str, object]:
        w, t = self._workload, self._tensors
        arguments: dict[str, object] = {}
        window = w.mask.window
        right = 0 if w.mask.causal != "none" else (None if window is None else window.right)
        left = None if window is None else window.left
        if right is not None or left is not None:
            arguments["diagonal_alignment"] = getattr(
                self._cudnn.diagonal_alignment, _alignment(w).upper()
            )
        if right is not None:
            arguments["diagonal_band_right_bound"] = right
        if left is not None:
            arguments["diagonal_band_left_bound"] = left + 1
        if w.cache is not None and t.seqused_k is not None:
            lengths_q = torch.tensor(w.seqlens_q, dtype=torch.int32, device=self._device)
            arguments |= {
                "use_padding_mask": True,
                "seq_len_q": self._tensor(
                    graph, built, "len_q", lengths_q.view(-1, 1, 1, 1), bind=True
                ),
                "seq_len_kv": self._tensor(
                    graph, built, "len_kv", t.seqused_k.view(-1, 1, 1, 1), bind=True
                ),
            }
        return arguments

    def _tensor(
        self, graph: object, built: _Graph, name: str, like: torch.Tensor, *, bind: bool = False
    ) -> object:
        node = cast(
            "object",
            graph.tensor(  # type: ignore[attr-defined]
                name=name,
                dim=list(like.shape),
                stride=list(like.stride()),
                data_type=_data_type(self._cudnn, str(like.dtype).removeprefix("torch.")),
            ),
        )
        if bind:
            built.bound[node] = like
        else:
            built.named[name] = node
        return node

    def _grad_out(self) -> torch.Tensor:
        if self._tensors.grad_out is None:
            msg = "a backward needs grad_out"
            raise ValueError(msg)
        return self._tensors.grad_out

    def _bhsd(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor if self._workload.layout == "bhsd" else tensor.transpose(1, 2)

    def _keys(self, tensor: torch.Tensor) -> torch.Tensor:
        """View keys or values with heads before sequence; a cache always has them behind."""
        return self._bhsd(tensor) if self._workload.cache is None else tensor.transpose(1, 2)

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


def _alignment(workload: Workload) -> str:
    """Return the one diagonal that a graph has."""
    mask = workload.mask
    found = {mask.causal} - {"none"}
    if mask.window is not None:
        found.add(mask.window.alignment)
    square = workload.seqlens_q == workload.seqlens_k
    if len(found) > 1 and not square:
        refuse("a graph has one diagonal, and causal mask and window name two")
    if square or not found:
        return "top_left"
    return found.pop()


def _data_type(cudnn: ModuleType, name: str) -> object:
    names = {"bfloat16": "BFLOAT16", "float16": "HALF", "float32": "FLOAT", "int32": "INT32"}
    return getattr(cudnn.data_type, names[name])


def _as_output(node: object, shape: tuple[int, ...], stride: tuple[int, ...]) -> None:
    node.set_output(True)  # type: ignore[attr-defined]
    node.set_dim(list(shape))  # type: ignore[attr-defined]
    node.set_stride(list(stride))  # type: ignore[attr-defined]
