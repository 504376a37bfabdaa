"""An interpreter of graphs in torch over whole texts, with gradients, for training and calibration.

It executes the graphs of `model/decoder.py` for every architecture, and its results match the reference. The
weights of a token's experts have a gradient, but the choice of experts does not. The model's weights are
frozen. They are decoded to float32 when an operation needs them, and kept while they fit in a budget.

A caller may replace the computation of an operation: `run` takes a function (`Compute`) that returns the
result of each operation, by default `TorchGraph.compute`. The adapters of a student (training/student.py) and
edited values use such functions.

`gradients` needs only the residual streams between the layers of a forward pass. The backward pass computes
the layers again, one at a time, so that a large model needs only the memory of one layer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, assert_never

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from hotset.backends.base import ImageRows
from hotset.backends.decoded import DecodedWeights
from hotset.backends.torch.functions import (
    activate,
    add_streams,
    attend,
    channel_scan,
    chosen_blocks,
    delta_rule,
    gaussian_top_k,
    hyper_connection,
    join_heads,
    layer_norm,
    left_out,
    match_magnitude,
    mix_rows,
    ngram_rows,
    pool_blocks,
    rms_norm,
    rotate,
    route,
    selective_scan,
    short_conv,
    similarity_gate,
    wkv,
    xielu,
)
from hotset.formats.quants import dequantize
from hotset.model import operations as ops
from hotset.model.graph import Graph
from hotset.model.operations import SHIFT, Primitive, Value
from hotset.model.rope import position_gain
from hotset.offload.uploads import rows_at

if TYPE_CHECKING:
    from hotset.errors import UnsupportedModelError
from hotset.formats.source import WeightSource


@dataclass
class Step:
    """Token ids [n_texts, n_tokens] and the values computed so far, float32 [n_texts * n_tokens, width].

    images: rows that replace the embeddings of tokens, whose places count through all texts.
    """

    tokens: Tensor
    images: ImageRows | None = None
    values: dict[int, Tensor] = field(default_factory=dict)

    def __getitem__(self, value: Value) -> Tensor:
        return self.values[value.id]

    def by_text(self, value: Value) -> Tensor:
        """Return a value by text, [n_texts, n_tokens, width]."""
        rows: Tensor = self[value].unflatten(0, self.tokens.shape)
        return rows


Compute = Callable[[Primitive, Step], Tensor]
Edit = Callable[[Tensor], Tensor]


class TorchGraph:
    """A model over texts [n_texts, n_tokens], each from position 0; values are [n_texts * n_tokens, width].

    room: most bytes of decoded weights to keep. device: the device of weights and values. Thresholds have no
    effect; edits can apply them.
    """

    def __init__(
        self,
        weights: WeightSource,
        graph: Graph,
        *,
        room: float = 4 << 30,
        device: str | torch.device = "cpu",
    ) -> None:
        self.weights, self.graph, self.device = weights, graph, torch.device(device)
        # If several values cross from layer to layer, all layers are one part.
        starts = graph.layer_starts if graph.is_layered else [1]
        ends = [*starts, len(graph.ops)]
        self.parts = [
            GraphPart(graph, first, last)
            for first, last in zip([0, *starts], ends, strict=True)
            if last > first
        ]
        self.n_parts = len(self.parts) - 1  # parts that each pass computes
        self.on_part: Callable[[], None] = lambda: None  # called after each part of a pass
        self._weights = DecodedWeights(weights, lambda x: torch.from_numpy(x).to(self.device), room)
        self._turns: dict[tuple[ops.Rope, int, int], Tensor] = {}

    def streams(self, tokens: Tensor, compute: Compute | None = None) -> list[Tensor]:
        """Compute the residual streams after the embedding and after each layer."""
        out: list[Tensor] = []
        for part in self.parts[:-1]:
            out.append(self.run(part, tokens, out[-1] if out else None, compute)[part.result])
            self.on_part()
        return out

    def logits(self, tokens: Tensor, compute: Compute | None = None) -> Tensor:
        """Compute the logits, float32 [n_texts * n_tokens, n_vocab]."""
        stream = self.streams(tokens, compute)[-1]
        return self.run(self.parts[-1], tokens, stream, compute)[self.graph.result]

    def gradients(
        self,
        tokens: Tensor,
        streams: Sequence[Tensor],
        loss: Callable[[Tensor], Tensor],
        watched: Sequence[Value],
        found: Callable[[Value, Tensor, Tensor], None],
    ) -> None:
        """Call found(value, x, gradient of the loss for x) for every watched value, from the last layer on.

        streams: the residual streams of the same tokens. loss: computes a number from the logits.
        """
        upstream: Tensor | None = None
        for index in reversed(range(1, len(self.parts))):
            part = self.parts[index]
            x = streams[index - 1].detach().requires_grad_()
            step = self.run(part, tokens, x)
            out = step[part.result]
            inside = [value for value in watched if value.id in part.made]
            wanted = [x, *(step[value] for value in inside)]
            if upstream is None:
                upstream, *rest = torch.autograd.grad(loss(out), wanted)
            else:
                upstream, *rest = torch.autograd.grad(out, wanted, upstream)
            for value, gradient in zip(inside, rest, strict=True):
                found(value, step[value].detach(), gradient)
            self.on_part()

    def edited(self, edits: Mapping[int, Edit]) -> Compute:
        """Return a Compute that edits some values for every operation that reads them. edits: by value id."""

        def compute(op: Primitive, step: Step) -> Tensor:
            out = self.compute(op, step)
            edit = edits.get(op.out.id)
            return out if edit is None else edit(out)

        return compute

    def run(
        self,
        part: GraphPart,
        tokens: Tensor,
        x: Tensor | None,
        compute: Compute | None = None,
        until: Value | None = None,
        images: ImageRows | None = None,
    ) -> Step:
        """Compute the values of a part, with x as its input. until: the last value to compute; None: all.

        images: as in Step."""
        step = Step(tokens, images)
        if part.entering is not None:
            assert x is not None
            step.values[part.entering.id] = x
        for op in part.ops:
            step.values[op.out.id] = (compute or self.compute)(op, step)
            if op.out is until:
                break
        return step

    def compute(self, op: Primitive, step: Step) -> Tensor:  # noqa: C901 - a case for each operation
        """Compute the result of an operation from the values of a step."""
        match op:
            case ops.Embed():
                return self._embedded(op, step)
            case ops.MixRows():
                return mix_rows(self.weight(op.weight), step[op.at])
            case ops.Clip():
                return step[op.x].clamp(self.weight(op.low), self.weight(op.high))
            case ops.AddImage():
                return self._with_image(op, step)
            case ops.RMSNorm():
                return rms_norm(step[op.x], self.weight(op.weight), op.eps, op.n_head)
            case ops.UnitNorm():
                ones = step[op.x].new_ones(op.x.width // op.n_head)
                return rms_norm(step[op.x], ones, op.eps, op.n_head)
            case ops.LayerNorm():
                weight = None if op.weight is None else self.weight(op.weight)
                return layer_norm(step[op.x], weight, self.bias(op.bias), op.eps, op.n_head)
            case ops.Linear():
                return F.linear(step[op.x], *self.rows_of(op))
            case ops.TransposedLinear():
                return F.linear(step[op.x], self._weights.neuron_major(op).T, self.bias(op.bias))
            case ops.Heads():
                shared = None if op.shared is None else step[op.shared]
                return join_heads(step[op.x], op.n_head, op.first, op.count, shared)
            case ops.TransposedHeads():
                return (step[op.x] @ self.weight(op.weight)).transpose(0, 1).flatten(1)
            case ops.Rotate():
                turns = self._turns_of(op.rope, step.tokens)
                return rotate(step[op.x], turns, n_head=op.n_head, kind=op.rope.kind, first=op.first)
            case ops.PositionGain():
                return self._gains(op, step.tokens)
            case ops.Attention() | ops.Indexer():
                return self._attended(op, step).flatten(0, 1)
            case (
                ops.NgramEmbed() | ops.ShortConv() | ops.DeltaNet() | ops.SelectiveScan() | ops.ChannelScan()
                | ops.Wkv() | ops.PoolBlocks()
            ):  # fmt: skip
                return self._recurrent(op, step)
            case ops.HeadDot():
                return self._head_dot(op, step)
            case ops.Activate():
                return self._activated(op, step[op.x])
            case ops.GaussianTopK():
                return gaussian_top_k(step[op.x], op.multiplier)
            case ops.Multiply() | ops.GateHeads():
                return self._multiplied(op, step)
            case ops.Add():
                return step[op.a] + step[op.b]
            case ops.Scale():
                return self._scaled(op, step[op.x])
            case ops.SimilarityGate():
                return similarity_gate(op, *(step[value] for value in op.inputs))
            case ops.AddStreams():
                weights = None if op.weights is None else step[op.weights]
                return add_streams(op, None if op.x is None else step[op.x], step[op.y], weights)
            case ops.HyperConnection():
                return hyper_connection(op, step[op.x], self.weight(op.scale), self.weight(op.base))
            case ops.MatchMagnitude():
                return match_magnitude(step[op.x], step[op.like], op.least)
            case ops.SoftCap():
                return op.cap * torch.tanh(step[op.x] / op.cap)
            case ops.Mask():
                kept = F.pad(~(step[op.scores] < op.threshold), (op.first, 0), value=True)
                return torch.where(kept, step[op.x], 0.0)
            case ops.Route():
                ids = None
                if op.table is not None:
                    ids = self.weight(op.table)[step.tokens.flatten()].long()
                found = route(step[op.x], op, self.bias(op.bias), self.bias(op.scales), ids)
                return torch.cat(found, dim=1)
            case ops.ExpertLinear() | ops.ExpertSum():
                return self._of_experts(op, step[op.x], step[op.route])
            case ops.LowRank():
                raise UnsupportedModelError("only the CPU computes a graph with adapters (LoRA)")
            case ops.SelectOutputs() | ops.Threshold():  # all tokens; thresholds have no effect
                return step[op.x]
            case _:
                assert_never(op)

    def _scaled(self, op: ops.Scale, x: Tensor) -> Tensor:
        if op.weight is None:
            return x * op.factor
        return x * op.factor * self.weight(op.weight).flatten()[op.first_weight :][: op.x.width]

    def _embedded(self, op: ops.Embed, step: Step) -> Tensor:
        tokens = step.tokens
        if op.of == "position":
            tokens = torch.arange(tokens.shape[1]).expand(tokens.shape) + op.first_row
        elif op.of == "type":
            tokens = torch.zeros_like(tokens)
        table = self.weight(op.weight).reshape(-1, op.out.width)  # files have one row as a vector
        rows = F.embedding(tokens.to(self.device), table).flatten(0, 1)
        if step.images is None or not op.image_parts:
            return rows
        return rows.index_copy(0, *self._of_images(step.images, 0, op.out.width))

    def _activated(self, op: ops.Activate, x: Tensor) -> Tensor:
        return activate(x, op.kind, op.threshold) if op.xielu is None else xielu(x, op.xielu)

    def _with_image(self, op: ops.AddImage, step: Step) -> Tensor:
        if step.images is None:
            return step[op.x]
        return step[op.x].index_add(0, *self._of_images(step.images, op.index, op.x.width))

    def _of_images(self, images: ImageRows, part: int, width: int) -> tuple[Tensor, Tensor]:
        """Return the places of the rows of images, and a part of the rows."""
        places = torch.from_numpy(images.places.astype(np.int64)).to(self.device)
        rows = images.rows[:, part * width : (part + 1) * width]
        return places, torch.from_numpy(rows).to(self.device)

    def _recurrent(self, op: ops.Recurrent, step: Step) -> Tensor:
        match op:
            case ops.NgramEmbed():  # its table is too large to decode as a whole
                info, rows = self.weights.tensors[op.weight], ngram_rows(op, step.tokens.cpu()).flatten()
                encoded = rows_at(self.weights, op.weight, rows.numpy())
                found = dequantize(encoded, info.type, (info.shape[0], len(rows)))
                return torch.from_numpy(found).to(self.device).view(-1, op.out.width)
            case ops.ShortConv():
                return self._convolved(op, step)
            case ops.DeltaNet():
                x, alpha, beta = (step.by_text(value) for value in (op.x, op.alpha, op.beta))
                rate, bias = self.weight(op.rate).flatten(), self.weight(op.step)
                return delta_rule(op, x, alpha, beta, rate, bias).flatten(0, 1)
            case ops.SelectiveScan():
                vectors = (self.weight(name).flatten() for name in (op.rate, op.step, op.skip))
                return selective_scan(op, step.by_text(op.x), step.by_text(op.dt), *vectors).flatten(0, 1)
            case ops.ChannelScan():
                x, dt, b, c = (step.by_text(value) for value in op.inputs)
                return channel_scan(x, dt, b, c, self.weight(op.rate), self.weight(op.skip)).flatten(0, 1)
            case ops.PoolBlocks():
                x, scores = step.by_text(op.x), None if op.scores is None else step.by_text(op.scores)
                return pool_blocks(op, x, scores, self.bias(op.bias)).flatten(0, 1)
            case ops.Wkv():
                return wkv(op, *(step.by_text(value) for value in op.inputs)).flatten(0, 1)
            case _:
                assert_never(op)

    def _multiplied(self, op: ops.Multiply | ops.GateHeads, step: Step) -> Tensor:
        if isinstance(op, ops.Multiply):
            return step[op.a] * step[op.b]
        gates = torch.sigmoid(step[op.gates]).unsqueeze(-1)
        heads: Tensor = step[op.x].unflatten(-1, (op.gates.width, -1)) * gates
        return heads.flatten(-2)

    def _convolved(self, op: ops.ShortConv, step: Step) -> Tensor:
        if op.weight is None:
            weight = torch.tensor([SHIFT], device=self.device)
        else:
            weight = self.weight(op.weight).view(-1, op.kernel)
        out = short_conv(step.by_text(op.x), weight, op.dilation).flatten(0, 1)
        return out if op.bias is None else out + self.weight(op.bias)

    def _head_dot(self, op: ops.HeadDot, step: Step) -> Tensor:
        a, b, x = (step[value].unflatten(1, (op.n_head, -1)) for value in (op.a, op.b, op.x))
        weight = self.weight(op.weight).view(op.n_head, -1)
        dots: Tensor = x * (a * b * weight).sum(2, keepdim=True)
        return dots.flatten(1)

    def _turns_of(self, rope: ops.Rope, tokens: Tensor) -> Tensor:
        """Return cosines and sines of all tokens' angles, [2, n_texts * n_tokens, n_rot / 2]."""
        n_texts, n_tokens = tokens.shape
        key = rope, n_texts, n_tokens
        if key not in self._turns:
            positions = torch.arange(n_tokens) // rope.every * rope.every
            angle = torch.outer(positions.double(), torch.tensor(rope.freq, dtype=torch.float64))
            both = (torch.stack((angle.cos(), angle.sin())) * rope.magnitude).float()
            self._turns[key] = both.repeat(1, n_texts, 1).to(self.device)
        return self._turns[key]

    def _gains(self, op: ops.PositionGain, tokens: Tensor) -> Tensor:
        """Return the gains of all tokens, float32 [n_texts * n_tokens, 1]."""
        n_texts, n_tokens = tokens.shape
        gains = torch.from_numpy(position_gain(op, np.arange(n_tokens)))
        return gains.repeat(n_texts, 1).to(self.device)

    def _attended(self, op: ops.Attention | ops.Indexer, step: Step) -> Tensor:
        if isinstance(op, ops.Indexer):
            weights = None if op.weights is None else step.by_text(op.weights)
            return chosen_blocks(op, step.by_text(op.q), step.by_text(op.k), weights)
        assert not op.first_seen, "a layer for multi-token prediction"
        assert op.groups != "only", "an image encoder"
        n_tokens, group = step.tokens.shape[1], op.n_head // op.n_head_kv
        q = step.by_text(op.q).unflatten(-1, (op.n_head_kv, group, -1))
        k = step.by_text(op.k).unflatten(-1, (op.n_head_kv, -1)).transpose(1, 2)
        v = step.by_text(op.v).unflatten(-1, (op.n_head_kv, -1)).transpose(1, 2)
        plain = not op.window and not op.softcap and op.sinks is None and op.slopes is None
        if not plain or op.blocks is not None or op.chosen is not None:
            ago = torch.arange(n_tokens, device=self.device)
            ago = ago[:, None] - ago
            if op.causal:
                hidden = (ago < 0) | (ago >= op.window) if op.window else ago < 0
            else:
                hidden = ago.abs() > (op.window // 2 if op.window else n_tokens)
            if op.blocks is not None:
                blocks = step.by_text(op.blocks).unflatten(-1, (op.n_head_kv, -1)).transpose(1, 2)
                blocks = blocks[:, :, op.block_size - 1 :: op.block_size]
                k, v = torch.cat([k, blocks], dim=2), torch.cat([v, blocks], dim=2)
                n_there = (torch.arange(n_tokens, device=self.device) + 1) // op.block_size
                later = torch.arange(blocks.shape[2], device=self.device) >= n_there[:, None]
                hidden = torch.cat([hidden, later], dim=1)
            if op.chosen is not None:
                hidden = hidden | self._not_chosen(op, op.chosen, step, hidden.shape[1])
            sinks = self.bias(op.sinks)
            bias = None
            if op.slopes is not None:
                slopes = torch.tensor(op.slopes, device=self.device).view(op.n_head_kv, 1, group, 1)
                bias = -slopes * ago.abs()[None, :, None]
            out = attend(q * op.scale, k, v, hidden, softcap=op.softcap, sinks=sinks, bias=bias)
            return out.flatten(2)
        if group > 1:
            k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        q = q.flatten(2, 3).transpose(1, 2)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=op.causal, scale=op.scale)
        return out.transpose(1, 2).flatten(2)

    def _not_chosen(self, op: ops.Attention, chosen: Value, step: Step, n_seen: int) -> Tensor:
        """Return the keys that a token did not choose, bool [n_texts, 1, n_tokens, n_seen]."""
        n_tokens, size = step.tokens.shape[1], op.block_size or op.chosen_size
        hidden = left_out(step.by_text(chosen), size, n_tokens)
        if op.blocks is not None:  # they follow the tokens
            return F.pad(hidden, (n_tokens, 0)).unsqueeze(1)
        n_there = (torch.arange(n_tokens, device=self.device) + 1) // size
        complete = torch.arange(hidden.shape[2], device=self.device) < n_there[:, None]
        inside = (hidden & complete).repeat_interleave(size, dim=-1)
        return F.pad(inside, (0, n_seen - inside.shape[-1])).unsqueeze(1)

    def _of_experts(self, op: ops.ExpertLinear | ops.ExpertSum, x: Tensor, route: Tensor) -> Tensor:
        """Compute the products of each token's experts, side by side or as a weighted sum."""
        ids, n = route[:, : op.n_used].detach().long(), op.n_used
        parts = isinstance(op, ops.ExpertSum) or op.of_parts
        x = x.view(len(x), n, -1) if parts else x[:, None].expand(-1, n, -1)
        first, n_rows = (0, op.out.width) if isinstance(op, ops.ExpertSum) else (op.first_row, op.n_rows)
        out = x.new_zeros(len(x), n, n_rows)
        for expert in ids.unique().tolist():
            of_it = ids == expert
            matrix = self._weights.expert(op, expert)
            if isinstance(op, ops.ExpertSum) and op.neuron_major:
                matrix = matrix.T
            bias = None if op.bias is None else self.weight(op.bias)[expert, first : first + n_rows]
            out[of_it] = F.linear(x[of_it], matrix[first : first + n_rows], bias)
        return (out * route[:, n:, None]).sum(1) if isinstance(op, ops.ExpertSum) else out.flatten(1)

    # ---- weights

    def weight(self, name: str) -> Tensor:
        """Return a tensor as float32. Its last dimension is the first of its GGUF shape."""
        return self._weights.whole(name)

    def bias(self, name: str | None) -> Tensor | None:
        """Return a tensor, or None if the operation has none."""
        return None if name is None else self.weight(name)

    def rows_of(self, op: ops.Linear) -> tuple[Tensor, Tensor | None]:
        """Return the rows [out.width, x.width] of a product, and their biases."""
        rows, bias = slice(op.first_row, op.first_row + op.out.width), self.bias(op.bias)
        matrix = self.weight(op.weight).reshape(-1, op.x.width)  # files have one row as a vector
        return matrix[rows], None if bias is None else bias.flatten()[rows]


class GraphPart:
    """The operations between two points of a graph that only the residual stream crosses."""

    def __init__(self, graph: Graph, first: int, last: int) -> None:
        part, self.entering = graph.split(first, last)
        self.ops = list(part.primitives)
        self.result = part.result
        self.made = {op.out.id for op in self.ops}
