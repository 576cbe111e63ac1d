"""Graphs of cuDNN's attention, built from a workload and the tensors that it will be given."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

import torch

from attnrepro_runner.backends.flash_common import refuse

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from types import ModuleType

    from attnrepro_runner.backends.base import Tensors
    from attnrepro_runner.semantics import Workload

_OWN_ENGINES = ("sdpa_fwd_prefill", "sdpa_bwd_sm")
"""Names of the frontend's own engines, in part."""


@dataclass
class Graph:
    """One built graph; tables and lengths are bound once, tensors at each execution."""

    graph: object
    bound: dict[object, torch.Tensor] = field(default_factory=dict)
    named: dict[str, object] = field(default_factory=dict)
    workspace: torch.Tensor | None = None

    def execute(self, values: Mapping[str, torch.Tensor], handle: object) -> None:
        """Run on the handle's stream; values by name, outputs included."""
        pack = {self.named[name]: value for name, value in values.items()}
        execute = cast("Callable[..., None]", self.graph.execute)  # type: ignore[attr-defined]
        execute({**self.bound, **pack}, self.workspace, handle=handle)


class GraphBuilder:
    """Builds forward and backward of one workload."""

    def __init__(
        self, cudnn: ModuleType, workload: Workload, tensors: Tensors, handle: object
    ) -> None:
        self._cudnn = cudnn
        self._workload = workload
        self._tensors = tensors
        self._handle = handle
        self._device = tensors.q.device

    def forward(self) -> Graph:
        """Build the forward; it returns output and statistics."""
        return self._build(self._describe_forward)

    def backward(self, *, deterministic: bool) -> Graph:
        """Build the backward."""
        return self._build(
            lambda graph, built: self._describe_backward(graph, built, deterministic)
        )

    def _build(self, describe: Callable[[object, Graph], None]) -> Graph:
        cudnn, w = self._cudnn, self._workload
        graph = cudnn.pygraph(
            io_data_type=_data_type(cudnn, w.dtype),
            intermediate_data_type=cudnn.data_type.FLOAT,
            compute_data_type=cudnn.data_type.FLOAT,
            handle=self._handle,
        )
        built = Graph(graph=graph)
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

    def _describe_forward(self, graph: object, built: Graph) -> None:
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
                q=self._tensor(graph, built, "q", bhsd(self._workload, t.q)),
                k=self._tensor(graph, built, "k", keys_bhsd(self._workload, t.k)),
                v=self._tensor(graph, built, "v", keys_bhsd(self._workload, t.v)),
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

    def _describe_backward(self, graph: object, built: Graph, deterministic: bool) -> None:
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
                q=self._tensor(graph, built, "q", bhsd(self._workload, t.q)),
                k=self._tensor(graph, built, "k", bhsd(self._workload, t.k)),
                v=self._tensor(graph, built, "v", bhsd(self._workload, t.v)),
                o=self._tensor(graph, built, "o", out.transpose(1, 2)),
                dO=self._tensor(graph, built, "dO", bhsd(self._workload, self._grad_out())),
                stats=self._tensor(graph, built, "stats", stats),
                attn_scale=w.scale_value,
                **extra,
            ),
        )
        for name, grad, like in zip(("dQ", "dK", "dV"), grads, (t.q, t.k, t.v), strict=True):
            view = bhsd(self._workload, like)
            _as_output(grad, tuple(view.shape), tuple(view.stride()))
            built.named[name] = grad

    def _mask(self, graph: object, built: Graph) -> dict[str, object]:
        w, t = self._workload, self._tensors
        arguments: dict[str, object] = {}
        window = w.mask.window
        right = 0 if w.mask.causal != "none" else (None if window is None else window.right)
        left = None if window is None else window.left
        if right is not None or left is not None:
            arguments["diagonal_alignment"] = getattr(
                self._cudnn.diagonal_alignment, alignment(w).upper()
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
        self, graph: object, built: Graph, name: str, like: torch.Tensor, *, bind: bool = False
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


def bhsd(workload: Workload, tensor: torch.Tensor) -> torch.Tensor:
    """View a tensor of the workload's layout with heads before sequence."""
    return tensor if workload.layout == "bhsd" else tensor.transpose(1, 2)


def keys_bhsd(workload: Workload, tensor: torch.Tensor) -> torch.Tensor:
    """View keys or values so; a cache has its heads behind in every layout."""
    return bhsd(workload, tensor) if workload.cache is None else tensor.transpose(1, 2)


def alignment(workload: Workload) -> str:
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
