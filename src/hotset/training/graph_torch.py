"""A graph in torch, over whole texts, with the gradient of the values inside: what a calibration asks.

It executes what `model/decoder.py` describes, as the reference does, for any architecture without recurrent
layers and latent vectors. Which experts a token has is a choice without a gradient; how much each counts has
one. Weights are frozen; they are decoded to float32 where they are read, and kept while they fit in a budget.
What is kept of a forward pass are the residual streams between the layers: the way back computes one layer
after the other again, so that a large model needs the memory of one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from hotset.backends.gpu.twins import activate, layer_norm, rms_norm, rotate
from hotset.backends.reference import routed
from hotset.errors import UnsupportedModelError
from hotset.formats.planes import decode
from hotset.formats.quants import GGMLType, dequantize
from hotset.model.graph import Graph
from hotset.model.operations import (
    Activate,
    Add,
    Attention,
    Cutoff,
    Embed,
    ExpertLinear,
    ExpertSum,
    LayerNorm,
    Linear,
    Mask,
    Multiply,
    Primitive,
    RMSNorm,
    Rope,
    Rotate,
    Route,
    Scale,
    SelectOutputs,
    SoftCap,
    TransposedLinear,
    Value,
)

if TYPE_CHECKING:
    from hotset.formats.source import WeightSource

Edit = Callable[[Tensor], Tensor]


class TorchGraph:
    """A model over texts [n_texts, n_tokens], each from position 0; values are [n_texts * n_tokens, width].

    room: bytes of decoded weights that are kept. Cutoffs cut nothing: that is for edits to do. Raises
    UnsupportedModelError for recurrent layers and latent vectors.
    """

    def __init__(self, weights: WeightSource, graph: Graph, *, room: int = 4 << 30) -> None:
        self.weights, self.graph = weights, graph
        starts = graph.layer_starts
        ends = [*starts, len(graph.ops)]
        self._parts = [
            _Part(graph, first, last) for first, last in zip([0, *starts], ends, strict=True) if last > first
        ]
        self.n_parts = len(self._parts) - 1  # that each pass computes
        self.on_part: Callable[[], None] = lambda: None  # is called after each of a pass
        self._kept: dict[str, Tensor] = {}
        self._room = room
        self._turns: dict[tuple[Rope, int, int], Tensor] = {}

    @torch.no_grad()
    def streams(self, tokens: Tensor, edits: Mapping[int, Edit] | None = None) -> list[Tensor]:
        """The residual streams: what leaves the embedding and each layer. edits: by the id of a value, what
        stands in its place for whoever reads it."""
        out: list[Tensor] = []
        for part in self._parts[:-1]:
            out.append(self._run(part, tokens, out[-1] if out else None, edits or {}))
            self.on_part()
        return out

    @torch.no_grad()
    def logits(self, tokens: Tensor, edits: Mapping[int, Edit] | None = None) -> Tensor:
        """float32 [n_texts * n_tokens, n_vocab]."""
        return self._run(self._parts[-1], tokens, self.streams(tokens, edits)[-1], edits or {})

    def gradients(
        self,
        tokens: Tensor,
        streams: Sequence[Tensor],
        loss: Callable[[Tensor], Tensor],
        watched: Sequence[Value],
        found: Callable[[Value, Tensor, Tensor], None],
    ) -> None:
        """Calls found(value, x, gradient of the loss for x) for every watched value, the last layer's first.

        streams: of the same tokens. loss: a number, of the logits.
        """
        upstream: Tensor | None = None
        for index in reversed(range(1, len(self._parts))):
            part = self._parts[index]
            x = streams[index - 1].detach().requires_grad_()
            held: dict[int, Tensor] = {}

            inside = [value for value in watched if value.id in part.made]
            out = self._run(part, tokens, x, {value.id: _holder(held, value.id) for value in inside})
            wanted = [x, *(held[value.id] for value in inside)]
            if upstream is None:
                upstream, *rest = torch.autograd.grad(loss(out), wanted)
            else:
                upstream, *rest = torch.autograd.grad(out, wanted, upstream)
            for value, gradient in zip(inside, rest, strict=True):
                found(value, held[value.id].detach(), gradient)
            self.on_part()

    def _run(self, part: _Part, tokens: Tensor, x: Tensor | None, edits: Mapping[int, Edit]) -> Tensor:
        values: dict[int, Tensor] = {}
        if part.entering is not None:
            assert x is not None
            values[part.entering.id] = x
        for op in part.ops:
            out = self._compute(op, values, tokens)
            edit = edits.get(op.out.id)
            values[op.out.id] = out if edit is None else edit(out)
        return values[part.result.id]

    def _compute(self, op: Primitive, values: Mapping[int, Tensor], tokens: Tensor) -> Tensor:
        match op:
            case Embed():
                at = tokens if op.of == "token" else torch.arange(tokens.shape[1]) + op.first_row
                return F.embedding(at.expand(tokens.shape), self._weight(op.weight)).flatten(0, 1)
            case RMSNorm():
                return rms_norm(values[op.x.id], self._weight(op.weight), op.eps, op.n_head)
            case LayerNorm():
                bias = None if op.bias is None else self._weight(op.bias)
                return layer_norm(values[op.x.id], self._weight(op.weight), bias, op.eps)
            case Linear():
                rows = slice(op.first_row, op.first_row + op.out.width)
                weight = self._weight(op.weight).reshape(-1, op.x.width)
                out = values[op.x.id] @ weight[rows].T
                return out if op.bias is None else out + self._weight(op.bias)[rows]
            case TransposedLinear():
                out = values[op.x.id] @ self._by_neuron(op)
                return out if op.bias is None else out + self._weight(op.bias)
            case Rotate():
                turns = self._turns_of(op.rope, *tokens.shape)
                return rotate(values[op.x.id], turns, n_head=op.n_head, kind=op.rope.kind)
            case Attention():
                q, k, v = (values[x.id].unflatten(0, tokens.shape) for x in (op.q, op.k, op.v))
                return self._attended(op, q, k, v).flatten(0, 1)
            case Activate():
                return activate(values[op.x.id], op.kind, op.threshold)
            case Multiply():
                return values[op.a.id] * values[op.b.id]
            case Add():
                return values[op.a.id] + values[op.b.id]
            case Scale():
                return values[op.x.id] * op.factor
            case SoftCap():
                return op.cap * torch.tanh(values[op.x.id] / op.cap)
            case Mask():
                kept = F.pad(values[op.scores.id] >= op.threshold, (op.first, 0), value=True)
                return torch.where(kept, values[op.x.id], 0.0)
            case Route():
                return self._routed(op, values[op.x.id])
            case ExpertLinear() | ExpertSum():
                return self._of_experts(op, values[op.x.id], values[op.route.id])
            case SelectOutputs() | Cutoff():  # all of them; nobody's
                return values[op.x.id]
            case _:
                raise UnsupportedModelError(
                    f"there are no gradients of a model with the operation {type(op).__name__}; thresholds "
                    "are found for models without recurrent layers and latent vectors"
                )

    def _turns_of(self, rope: Rope, n_texts: int, n_tokens: int) -> Tensor:
        """Cosines and sines of all tokens' angles, [2, n_texts * n_tokens, n_rot / 2]."""
        key = rope, n_texts, n_tokens
        if key not in self._turns:
            angle = torch.outer(
                torch.arange(n_tokens, dtype=torch.float64), torch.tensor(rope.freq, dtype=torch.float64)
            )
            both = (torch.stack((angle.cos(), angle.sin())) * rope.magnitude).float()
            self._turns[key] = both.repeat(1, n_texts, 1)
        return self._turns[key]

    def _attended(self, op: Attention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        n_texts, n_tokens, _ = q.shape
        group = op.n_head // op.n_head_kv
        q = q.view(n_texts, n_tokens, op.n_head_kv, group, op.head_dim).permute(0, 2, 3, 1, 4)
        k = k.view(n_texts, n_tokens, op.n_head_kv, 1, op.head_dim).permute(0, 2, 3, 4, 1)
        v = v.view(n_texts, n_tokens, op.n_head_kv, 1, op.head_dim_v).permute(0, 2, 3, 1, 4)
        scores = (q * op.scale) @ k  # [n_texts, n_head_kv, group, n_tokens, n_tokens]
        if op.softcap:
            scores = op.softcap * torch.tanh(scores / op.softcap)
        ago = torch.arange(n_tokens)[:, None] - torch.arange(n_tokens)
        seen = (ago >= 0) & (ago < op.window) if op.window else ago >= 0
        scores = scores.masked_fill(~seen, -torch.inf)
        if op.sinks is not None:
            sinks = self._weight(op.sinks).view(1, op.n_head_kv, group, 1, 1)
            scores = torch.cat((scores, sinks.expand(n_texts, -1, -1, n_tokens, -1)), -1)
        shares = scores.softmax(-1)[..., :n_tokens]
        return (shares @ v).permute(0, 3, 1, 2, 4).reshape(n_texts, n_tokens, -1)

    # ---- experts

    def _routed(self, op: Route, x: Tensor) -> Tensor:
        bias = None if op.bias is None else self._weight(op.bias).numpy()
        ids = torch.from_numpy(routed(x.detach().numpy(), bias, op)[:, : op.n_used])
        p = {"softmax": lambda x: x.softmax(-1), "sigmoid": torch.sigmoid}.get(op.scoring, lambda x: x)(x)
        weights = p.gather(1, ids.long())
        if op.scoring == "softmax_chosen":
            weights = weights.softmax(-1)
        if op.normalised:
            weights = weights / weights.sum(-1, keepdim=True).clamp(min=2**-14)
        return torch.cat((ids, weights * op.scale), 1)

    def _of_experts(self, op: ExpertLinear | ExpertSum, x: Tensor, route: Tensor) -> Tensor:
        """The products of each token's experts, side by side or summed by their weights."""
        ids, n = route[:, : op.n_used].detach().long(), op.n_used
        parts = isinstance(op, ExpertSum) or op.of_parts
        x = x.view(len(x), n, -1) if parts else x[:, None].expand(-1, n, -1)
        first, n_rows = (0, op.out.width) if isinstance(op, ExpertSum) else (op.first_row, op.n_rows)
        out = x.new_zeros(len(x), n, n_rows)
        for expert in ids.unique().tolist():
            of_it = ids == expert
            matrix = self._expert(op, expert)
            if isinstance(op, ExpertSum) and op.by_neuron:
                matrix = matrix.T
            product = x[of_it] @ matrix[first : first + n_rows].T
            if op.bias is not None:
                product = product + self._weight(op.bias)[expert, first : first + n_rows]
            out[of_it] = product
        return (out * route[:, n:, None]).sum(1) if isinstance(op, ExpertSum) else out.flatten(1)

    # ---- weights

    def _expert(self, op: ExpertLinear | ExpertSum, expert: int) -> Tensor:
        """The matrix of one expert. Where there is no room to keep those of all, it is decoded by itself."""
        if len(op.weights) > 1:
            return self._weight(op.weights[expert])
        name = op.weights[0]
        info = self.weights.tensors[name]
        if name in self._kept or 4 * math.prod(info.shape) <= self._room:
            return self._weight(name)[expert]
        data = self.weights.data(name).reshape(op.n_expert, -1)[expert]
        return _decoded(data, info.type, info.shape[:2])

    def _weight(self, name: str) -> Tensor:
        if name not in self._kept:
            info = self.weights.tensors[name]
            return self._keep(name, _decoded(self.weights.data(name), info.type, info.shape))
        return self._kept[name]

    def _by_neuron(self, op: TransposedLinear) -> Tensor:
        """The matrix of a down projection [n_ff, width], from its rows or from its planes."""
        if op.scales is None or op.weight in self._kept:
            return self._weight(op.weight)
        codes = self.weights.data(op.weight).view("int8").reshape(op.x.width, -1)
        scales = self.weights.data(op.scales).view("float16").reshape(-1, op.out.width)
        return self._keep(op.weight, torch.from_numpy(decode(codes, scales)))

    def _keep(self, name: str, weight: Tensor) -> Tensor:
        if weight.nbytes <= self._room:
            self._room -= weight.nbytes
            self._kept[name] = weight
        return weight


def _decoded(data: np.ndarray, type: GGMLType, shape: tuple[int, ...]) -> Tensor:
    """A tensor of GGUF shape as float32, its last dimension the first of the shape."""
    return torch.from_numpy(dequantize(data, type, shape).reshape(shape[::-1]))


def _holder(held: dict[int, Tensor], id: int) -> Edit:
    """An edit that changes nothing and remembers what it saw."""

    def hold(value: Tensor) -> Tensor:
        held[id] = value
        return value

    return hold


class _Part:
    """Operations between two places where only the residual stream crosses."""

    def __init__(self, graph: Graph, first: int, last: int) -> None:
        part, self.entering = graph.cut(first, last)
        self.ops = list(part.primitives)
        self.result = part.result
        self.made = {op.out.id for op in self.ops}
