"""The graph of one forward step: operations (model/operations.py) in order.

The decoder (`model/decoder.py`) builds it once, at load. Backends execute it: `reference` interprets it with
NumPy, `cpu` lowers it to a native plan. Fusion belongs to the backends, not to the description.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hotset.errors import InvalidRequestError
from hotset.model.operations import (
    NO_LAYER,
    Attention,
    Embed,
    Ffn,
    Linear,
    Op,
    Primitive,
    Recurrent,
    Threshold,
    Value,
)

if TYPE_CHECKING:
    from hotset.formats.gguf import TensorInfo


@dataclass
class Graph:
    """The operations of one step in order.

    A whole model yields the logits [n_outputs, n_vocab], an encoder hidden states [n_outputs, n_embd].
    """

    ops: list[Op] = field(default_factory=list)
    values: list[Value] = field(default_factory=list)

    def value(self, name: str, width: int) -> Value:
        """Return a new value. Names must be unique, so that taps are unambiguous."""
        value = Value(len(self.values), width, name)
        self.values.append(value)
        return value

    def add(self, op: Op) -> Value:
        """Append `op`; return the value that it computes."""
        self.ops.append(op)
        return op.out

    @property
    def result(self) -> Value:
        """Return the last operation's value: the logits or, in a part of a model, the residual stream."""
        return self.ops[-1].out

    @property
    def is_encoder(self) -> bool:
        """Return whether a token attends to later ones, so that a text is computed in one step."""
        return any(isinstance(op, Attention) and not op.causal for op in self.ops)

    def n_vocab(self, tensors: Mapping[str, TensorInfo]) -> int:
        """Return the vocabulary: the number of logits or, in an encoder, of its token embeddings."""
        if not self.is_encoder:
            return self.result.width
        embeds = (op for op in self.ops if isinstance(op, Embed) and op.of == "token")
        embed = next(embeds, None)
        return self.result.width if embed is None else int(tensors[embed.weight].shape[-1])

    @property
    def primitives(self) -> Iterator[Primitive]:
        """Yield all operations in order, with FFNs expanded."""
        for op in self.ops:
            yield from op.primitives if isinstance(op, Ffn) else (op,)

    @property
    def ffns(self) -> tuple[Ffn, ...]:
        """Return the FFNs of the layers, in order, without shared experts."""
        return tuple(op for op in self.ops if isinstance(op, Ffn) and not op.shared)

    @property
    def has_thresholds(self) -> bool:
        """Return whether there are activation thresholds, which Batch.thresholded controls per token."""
        return any(isinstance(op, Threshold) for op in self.primitives)

    @property
    def recurrent(self) -> tuple[Recurrent, ...]:
        """Return the operations with a state, in order."""
        return tuple(op for op in self.ops if isinstance(op, Recurrent))

    @property
    def n_layer(self) -> int:
        return 1 + max((op.layer for op in self.ops), default=NO_LAYER)

    @property
    def layer_starts(self) -> list[int]:
        """Return the index of each layer's first operation, and of the first one after all layers."""
        starts: dict[int, int] = {}
        after = 0
        for index, op in enumerate(self.ops):
            if op.layer != NO_LAYER:
                starts.setdefault(op.layer, index)
                after = index + 1
        return [*(starts[layer] for layer in sorted(starts)), after]

    @property
    def is_layered(self) -> bool:
        """Return whether only one value crosses each layer border, so that the graph can be split there."""
        readers = [set(op.inputs) for op in self.ops]
        for start in self.layer_starts:
            made = {op.out for op in self.ops[:start]}
            if len(made & set[Value]().union(*readers[start:])) > 1:
                return False
        return True

    @property
    def entering(self) -> set[Value]:
        """Return the values that operations read but none computes."""
        return {value for op in self.ops for value in op.inputs} - {op.out for op in self.ops}

    def split(self, first_op: int, last_op: int) -> tuple[Graph, Value | None]:
        """Return the operations [first_op, last_op) as a graph, and the value that enters it.

        Raises InvalidRequestError if the range does not begin and end between layers, where only the residual
        stream crosses.
        """
        if not 0 <= first_op < last_op <= len(self.ops):
            raise InvalidRequestError(
                f"a graph of {len(self.ops)} operations has no part {first_op}:{last_op}"
            )
        part = Graph(self.ops[first_op:last_op], self.values)
        entering = part.entering
        leaving = {value for op in self.ops[last_op:] for value in op.inputs} & {op.out for op in part.ops}
        if len(entering) > 1 or leaving - {part.result}:
            raise InvalidRequestError(
                f"a graph can be split only between layers, where one value crosses, not at operations "
                f"{first_op}:{last_op}"
            )
        return part, next(iter(entering), None)


def thresholded_products(graph: Graph) -> list[Linear]:
    """Return the matrix products with a row per output whose inputs, or some of them, are thresholded."""
    thresholded = {op.out for op in graph.primitives if isinstance(op, Threshold)}
    thresholded |= {ffn.selected for ffn in graph.ffns if ffn.gate_threshold is not None}
    return [op for op in graph.primitives if isinstance(op, Linear) and op.x in thresholded]
