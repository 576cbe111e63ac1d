"""Request models: a transformer's training step, prefill and decode step round any backend.

A kernel is judged inside what it serves. Everything but attention is the same torch code for every
backend: norms, projections, rotary embedding, cache append, MLP, head, loss, update. Attention goes
through the adapter of the subject, with the cell's own workload, so that a swapped backend changes
that stage and nothing else. Weights and tokens are drawn from fixed seeds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, runtime_checkable

import torch
from torch.nn import functional

from attnrepro_runner import orderstats, rope, shares
from attnrepro_runner.backends.base import Prepared, Tensors, Unsupported
from attnrepro_runner.inputs import make_inputs
from attnrepro_runner.marks import Marks, NoMarks, TimedMarks
from attnrepro_runner.models import check
from attnrepro_runner.views import DTYPES

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from attnrepro_runner.backends.base import Backend
    from attnrepro_runner.models import RequestModel
    from attnrepro_runner.semantics import Workload

_WEIGHT_SEED = 8_2026
_TOKEN_SEED = 9_2026
_WEIGHT_SCALE = 0.02
_NORM_EPSILON = 1e-5
_LEARNING_RATE = 1e-4


@runtime_checkable
class Swappable(Prepared, Protocol):
    """A prepared call that also takes other tensors: what a model's layers need."""

    def call(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Attention of tensors of the bound shapes; differentiable in training phases."""
        ...


class Request:
    """A model bound to a backend and a workload; `step` is the timed work."""

    def __init__(
        self,
        model: RequestModel,
        backend: Backend,
        workload: Workload,
        options: Mapping[str, object],
        inputs: Mapping[str, object],
        device: torch.device,
    ) -> None:
        """Draw weights and tokens, and bind attention once a layer (once, without a cache).

        Raises:
            Unsupported: the backend cannot do it, or its adapter takes no other tensors.
            ValueError: the workload is not the model's.

        """
        check(model, workload)
        self.model = model
        self._workload = workload
        self._device = device
        self._dtype = DTYPES[workload.dtype]
        self._training = model.kind == "training_step"
        sets = model.layers if workload.cache is not None else 1
        self.tensors = [
            make_inputs(workload, inputs, stream=stream, device=device) for stream in range(sets)
        ]
        self._attention = [
            _swappable(backend, workload, options, tensors) for tensors in self.tensors
        ]
        self.weights = _draw_weights(model, self._dtype, device, training=self._training)
        tokens = sum(workload.seqlens_q)
        generator = torch.Generator().manual_seed(_TOKEN_SEED)
        drawn = torch.randint(0, model.sizes.vocabulary, (tokens + 1,), generator=generator)
        self._tokens, self._targets = drawn[:-1].to(device), drawn[1:].to(device)
        positions = [
            i + (workload.offset(b) if workload.cache is not None else 0)
            for b in range(workload.batch)
            for i in range(workload.seqlens_q[b])
        ]
        self._rope = rope.tables(
            positions, model.sizes.head_dim, model.sizes.rope_theta, self._dtype, device
        )
        ends = torch.tensor(workload.seqlens_q).cumsum(0) - 1
        self._last_tokens = ends.to(device)

    def step(self, timed: Marks | None = None) -> torch.Tensor:
        """Do the request once; return the loss, or the logits of each sequence's last token."""
        marks = timed or NoMarks()
        if self._training:
            return self._train(marks)
        with torch.no_grad():
            x = self._body(marks)
            marks.begin("head")
            logits = self._head(x[self._last_tokens])
        marks.end()
        return logits

    def _train(self, marks: Marks) -> torch.Tensor:
        parameters = list(self.weights.values())
        with torch.enable_grad():
            x = self._body(marks)
            marks.begin("head")
            logits = self._head(x)
            marks.begin("loss")
            loss = functional.cross_entropy(logits.float(), self._targets)
            marks.begin("backward")
            gradients = torch.autograd.grad(loss, parameters)
        marks.begin("update")
        with torch.no_grad():
            torch._foreach_add_(parameters, gradients, alpha=-_LEARNING_RATE)
        marks.end()
        return loss.detach()

    def _body(self, marks: Marks) -> torch.Tensor:
        marks.begin("embedding")
        x = functional.embedding(self._tokens, self.weights["embedding"])
        for layer in range(self.model.layers):
            x = self._layer(layer, x, marks)
        return x

    def _layer(self, layer: int, x: torch.Tensor, marks: Marks) -> torch.Tensor:
        sizes = self.model.sizes
        weight = {name: self.weights[f"{layer}.{name}"] for name in _LAYER_WEIGHTS}
        marks.begin("norm")
        normed = functional.rms_norm(x, (sizes.hidden,), weight["attention_norm"], _NORM_EPSILON)
        marks.begin("qkv_projection")
        packed = functional.linear(normed, weight["qkv"])
        heads = [sizes.heads_q, sizes.heads_kv, sizes.heads_kv]
        q, k, v = torch.split(packed.view(-1, sum(heads), sizes.head_dim), heads, dim=1)
        marks.begin("rotary")
        q, k = rope.rotate(q, *self._rope), rope.rotate(k, *self._rope)
        attended = self._attend(layer, q, k, v, marks)
        marks.begin("output_projection")
        x = x + functional.linear(attended, weight["output"])
        marks.begin("norm")
        normed = functional.rms_norm(x, (sizes.hidden,), weight["mlp_norm"], _NORM_EPSILON)
        marks.begin("mlp")
        gate, up = functional.linear(normed, weight["gate_up"]).chunk(2, dim=-1)
        return x + functional.linear(functional.silu(gate) * up, weight["down"])

    def _attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, marks: Marks
    ) -> torch.Tensor:
        w = self._workload
        attention = self._attention[layer if w.cache is not None else 0]
        if w.cache is not None:
            tensors = self.tensors[layer]
            assert tensors.k_new is not None
            assert tensors.v_new is not None
            marks.begin("cache_append")
            tensors.k_new.copy_(k.view(tensors.k_new.shape))
            tensors.v_new.copy_(v.view(tensors.v_new.shape))
            if not w.cache.append_in_call:
                attention.append_step()
            marks.begin("attention")
            out = attention.call(self._laid_out(q), tensors.k, tensors.v)
        else:
            q, k, v = self._laid_out(q), self._laid_out(k), self._laid_out(v)
            marks.begin("attention")
            out = attention.call(q, k, v)
            if self._training:
                marks.between_gradients("attention_backward", "backward", out, (q, k, v))
        if w.layout == "bhsd":
            out = out.transpose(1, 2)
        return out.reshape(-1, self.model.sizes.heads_q * self.model.sizes.head_dim)

    def _laid_out(self, packed: torch.Tensor) -> torch.Tensor:
        """View (tokens, heads, width) in the workload's layout."""
        w = self._workload
        if w.is_packed:
            return packed
        dense = packed.view(w.batch, -1, *packed.shape[1:])
        return dense.transpose(1, 2) if w.layout == "bhsd" else dense

    def _head(self, x: torch.Tensor) -> torch.Tensor:
        normed = functional.rms_norm(
            x, (self.model.sizes.hidden,), self.weights["norm"], _NORM_EPSILON
        )
        return functional.linear(normed, self.weights["head"])


def describe(
    request: Request,
    device: torch.device,
    *,
    repeats: int = 5,
    before: Callable[[], None] = lambda: None,
) -> dict[str, object]:
    """Return the `request` object of a result: stages from passes with marks, medians in ns.

    The request's own time is taken by a clock round `step`, in a pass without marks. `before` runs
    before each pass: empties the caches as that clock's samples have them.
    """
    passes = []
    for _ in range(repeats):
        before()
        timed = TimedMarks(device)
        request.step(timed)
        passes.append(timed.totals_ns())
    rank = orderstats.median_rank(repeats)
    stages = {name: sorted(p[name] for p in passes)[rank - 1] for name in passes[0]}
    return {
        "model": request.model.name,
        "layers": request.model.layers,
        "repeats": repeats,
        "stages_ns": stages,
        "attention_ns": shares.attention_ns(stages),
        "total_ns": sum(stages.values()),
        "largest_remaining": shares.largest_remaining(stages),
    }


_LAYER_WEIGHTS = ("attention_norm", "qkv", "output", "mlp_norm", "gate_up", "down")


def _draw_weights(
    model: RequestModel, dtype: torch.dtype, device: torch.device, *, training: bool
) -> dict[str, torch.Tensor]:
    """Draw weights of a fixed scale, one generator for all, in a fixed order."""
    sizes = model.sizes
    width_q, width_kv = sizes.heads_q * sizes.head_dim, sizes.heads_kv * sizes.head_dim
    shapes: dict[str, tuple[int, ...]] = {"embedding": (sizes.vocabulary, sizes.hidden)}
    for layer in range(model.layers):
        shapes |= {
            f"{layer}.attention_norm": (sizes.hidden,),
            f"{layer}.qkv": (width_q + 2 * width_kv, sizes.hidden),
            f"{layer}.output": (sizes.hidden, width_q),
            f"{layer}.mlp_norm": (sizes.hidden,),
            f"{layer}.gate_up": (2 * sizes.ffn, sizes.hidden),
            f"{layer}.down": (sizes.hidden, sizes.ffn),
        }
    shapes |= {"norm": (sizes.hidden,), "head": (sizes.vocabulary, sizes.hidden)}
    generator = torch.Generator(device).manual_seed(_WEIGHT_SEED)
    weights = {}
    for name, shape in shapes.items():
        if len(shape) == 1:
            weights[name] = torch.ones(shape, dtype=dtype, device=device)
        else:
            weights[name] = torch.empty(shape, dtype=dtype, device=device).normal_(
                std=_WEIGHT_SCALE, generator=generator
            )
        weights[name].requires_grad_(training)
    return weights


def _swappable(
    backend: Backend, workload: Workload, options: Mapping[str, object], tensors: Tensors
) -> Swappable:
    prepared = backend.prepare(workload, options, tensors)
    if not isinstance(prepared, Swappable):
        msg = f"the adapter of {backend.name} takes no tensors of a model"
        raise Unsupported(msg)
    return prepared
