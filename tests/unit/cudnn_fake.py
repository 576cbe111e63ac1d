"""A stand-in of the module `cudnn` (nvidia-cudnn-frontend 1.32): graphs that run on a CPU.

As the real ones, they read each tensor by the dimensions and strides that it was declared with,
whatever the tensor's own are; a left bound counts the query's own key.
"""

from __future__ import annotations

import math
import types
from dataclasses import dataclass, field

import torch


class cudnnGraphNotSupportedError(Exception):
    """As cudnn's."""


@dataclass(eq=False)
class Node:
    """A tensor of a graph."""

    name: str
    dim: list[int] = field(default_factory=list)
    stride: list[int] = field(default_factory=list)
    data_type: object = None
    output: bool = False

    def set_output(self, value: bool) -> Node:
        self.output = value
        return self

    def set_dim(self, value: list[int]) -> Node:
        self.dim = value
        return self

    def set_stride(self, value: list[int]) -> Node:
        self.stride = value
        return self

    def set_data_type(self, value: object) -> Node:
        self.data_type = value
        return self

    def view(self, values: dict[Node, torch.Tensor]) -> torch.Tensor:
        """Read memory as the graph does."""
        tensor = values[self]
        return tensor.as_strided(self.dim, self.stride, tensor.storage_offset())


FORWARD = {
    "name", "q", "k", "v", "generate_stats", "attn_scale", "use_padding_mask", "seq_len_q",
    "seq_len_kv", "diagonal_alignment", "diagonal_band_left_bound", "diagonal_band_right_bound",
    "paged_attention_k_table", "paged_attention_v_table", "paged_attention_max_seq_len_kv",
}  # fmt: skip
BACKWARD = (FORWARD - {"generate_stats"}) | {"o", "dO", "stats", "use_deterministic_algorithm"}


class Graph:
    """One graph with one node."""

    selected_engine = None

    def __init__(self, module: Cudnn, **arguments: object) -> None:
        assert arguments["handle"] == "handle"
        self.module = module
        self.barred: list[str] = []
        self.call: dict[str, object] = {}
        self.outputs: tuple[Node, ...] = ()
        self.built = 0

    def tensor(self, *, name: str, dim: list[int], stride: list[int], data_type: object) -> Node:
        return Node(name, dim, stride, data_type)

    def sdpa(self, **call: object) -> tuple[Node, ...]:
        assert set(call) <= FORWARD
        self.call, self.outputs = call, (Node("o"), Node("stats"))
        self.module.calls.append(call)
        return self.outputs

    def sdpa_backward(self, **call: object) -> tuple[Node, ...]:
        assert set(call) <= BACKWARD
        self.call, self.outputs = call, (Node("dQ"), Node("dK"), Node("dV"))
        self.module.calls.append(call)
        return self.outputs

    def deselect_engines(self, names: list[str]) -> None:
        self.barred = names

    def create_execution_plans(self, modes: list[object]) -> None:
        assert self.barred
        assert len(modes) == 2

    def check_support(self) -> None:
        table = self.call.get("paged_attention_k_table")
        if isinstance(table, Node):
            k = self.call["k"]
            assert isinstance(k, Node)
            if table.dim[2] * k.dim[2] != self.call["paged_attention_max_seq_len_kv"]:
                raise cudnnGraphNotSupportedError("block table size must equal ceil(s_kv/size)")

    def validate(self) -> None: ...

    def build_operation_graph(self) -> None: ...

    def build_plans(self) -> None:
        self.built += 1

    def get_workspace_size(self) -> int:
        return 16

    def execute(
        self, pack: dict[Node, torch.Tensor], workspace: torch.Tensor, *, handle: str
    ) -> None:
        assert workspace.numel() >= 16
        q, k, v = (self.call[name].view(pack) for name in ("q", "k", "v"))  # type: ignore[attr-defined]
        if "dO" not in self.call:
            out, stats = self._attend(q, k, v, pack)
            self.outputs[0].view(pack).copy_(out)
            self.outputs[1].view(pack).copy_(stats)
            return
        leaves = [x.detach().clone().requires_grad_() for x in (q, k, v)]
        with torch.enable_grad():
            out, stats = self._attend(*leaves, pack)
        torch.testing.assert_close(self.call["o"].view(pack), out.detach())  # type: ignore[attr-defined]
        torch.testing.assert_close(self.call["stats"].view(pack), stats.detach())  # type: ignore[attr-defined]
        grads = torch.autograd.grad(out, leaves, self.call["dO"].view(pack))  # type: ignore[attr-defined]
        for node, grad in zip(self.outputs, grads, strict=True):
            node.view(pack).copy_(grad)

    def _attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        pack: dict[Node, torch.Tensor],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        outs, stats = [], []
        for b in range(q.shape[0]):
            keys, values = (self._rows(x, name, b, pack) for x, name in ((k, "k"), (v, "v")))
            group = q.shape[1] // keys.shape[0]
            keys, values = (x.float().repeat_interleave(group, 0) for x in (keys, values))
            scores = q[b].float() @ keys.transpose(1, 2) * self.call["attn_scale"]
            scores = scores.masked_fill(~self._seen(q.shape[2], keys.shape[1]), -math.inf)
            outs.append((torch.softmax(scores, -1) @ values).to(q.dtype))
            stats.append(torch.logsumexp(scores, -1, keepdim=True))
        return torch.stack(outs), torch.stack(stats)

    def _rows(
        self, x: torch.Tensor, name: str, b: int, pack: dict[Node, torch.Tensor]
    ) -> torch.Tensor:
        table, lengths = self.call.get(f"paged_attention_{name}_table"), self.call.get("seq_len_kv")
        rows = x[b] if table is None else None
        if isinstance(table, Node):
            pages = table.view(pack)[b, 0, :, 0].long()
            rows = x[pages].transpose(0, 1).flatten(1, 2)
        assert rows is not None
        if isinstance(lengths, Node):
            assert self.call["use_padding_mask"] is True
            rows = rows[:, : int(lengths.view(pack)[b, 0, 0, 0])]
        return rows

    def _seen(self, rows: int, keys: int) -> torch.Tensor:
        offset = keys - rows if self.call.get("diagonal_alignment") == "BOTTOM_RIGHT" else 0
        distance = torch.arange(keys)[None] - torch.arange(rows)[:, None] - offset
        seen = torch.ones(rows, keys, dtype=torch.bool)
        right = self.call.get("diagonal_band_right_bound")
        left = self.call.get("diagonal_band_left_bound")
        if right is not None:
            seen &= distance <= right
        if left is not None:
            seen &= distance > -left  # type: ignore[operator]
        return seen


class Cudnn(types.ModuleType):
    """The module."""

    cudnnGraphNotSupportedError = cudnnGraphNotSupportedError
    data_type = types.SimpleNamespace(BFLOAT16="bf16", HALF="fp16", FLOAT="fp32", INT32="i32")
    diagonal_alignment = types.SimpleNamespace(TOP_LEFT="TOP_LEFT", BOTTOM_RIGHT="BOTTOM_RIGHT")
    heur_mode = types.SimpleNamespace(A="A", FALLBACK="FALLBACK")

    def __init__(self) -> None:
        super().__init__("cudnn")
        self.calls: list[dict[str, object]] = []
        self.streams: list[object] = []

    def pygraph(self, **arguments: object) -> Graph:
        return Graph(self, **arguments)

    def create_handle(self) -> str:
        return "handle"

    def set_stream(self, *, handle: str, stream: object) -> None:
        self.streams.append(stream)

    def backend_version(self) -> int:
        return 91900
