"""Products that adapters can change, and the graph with the adapters' contributions (operations.LowRank)."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from hotset.model.graph import Graph
from hotset.model.operations import Ffn, Linear, LowRank, Op, TransposedLinear, Value

if TYPE_CHECKING:
    from hotset.formats.gguf import TensorInfo

_TRANSPOSED = re.compile(r"_t\.(weight|codes)$")
_EMBEDDING, _OUTPUT = "token_embd.weight", "output.weight"


def by_output(name: str) -> str:
    """Return the name of the matrix with a row per output, if the tensor is its neuron-major copy."""
    return _TRANSPOSED.sub(".weight", name)


def adapted_name(op: Linear | TransposedLinear) -> str:
    """Return the name of a product's matrix as adapters use it.

    It is the tensor with a row per output, in whichever layout it is stored; for an output that is tied to
    the embedding, it is the output's name.
    """
    name = by_output(op.weight)
    return _OUTPUT if name == _EMBEDDING else name


def adaptable(graph: Graph, tensors: Mapping[str, TensorInfo]) -> dict[str, tuple[int, int]]:
    """Return the matrices that adapters can change: name → (outputs, inputs)."""
    found = {}
    for op in graph.primitives:
        if isinstance(op, TransposedLinear):
            found[adapted_name(op)] = op.out.width, op.x.width
        elif isinstance(op, Linear):
            n_out = math.prod(tensors[op.weight].shape) // op.x.width
            found[adapted_name(op)] = n_out, op.x.width
    return found


def adapted(graph: Graph, matrices: Collection[str]) -> Graph:
    """Return the graph with adapters added to the products with these matrices, named as in `adaptable`.

    It has all values of the original graph, and the products before adapters are added.
    """
    new = Graph(values=list(graph.values))
    waiting: list[LowRank] = []  # added after all products of one input, which a backend may compute together

    def product(op: Linear | TransposedLinear) -> tuple[Linear | TransposedLinear, LowRank]:
        y = new.value(f"{op.out.name}.product", op.out.width)
        first_row = op.first_row if isinstance(op, Linear) else 0
        added = LowRank(op.out, op.x, y, adapted_name(op), first_row, layer=op.layer, part=op.part)
        return replace(op, out=y), added

    def is_adapted(op: object) -> bool:
        return isinstance(op, Linear | TransposedLinear) and adapted_name(op) in matrices

    def inside(ffn: Ffn) -> Ffn:
        parts = {"gate": ffn.gate, "up": ffn.up, "down": ffn.down}
        made = {name: product(op) for name, op in parts.items() if is_adapted(op)}  # type: ignore[arg-type]
        changes = {name: op for name, (op, _) in made.items()}
        low_ranks = tuple(added for _, added in made.values())
        return replace(ffn, **changes, low_ranks=low_ranks)  # type: ignore[arg-type]

    x: Value | None = None
    for op in graph.ops:
        if not isinstance(op, Linear) or op.x != x:
            new.ops += waiting
            waiting.clear()
        x = op.x if isinstance(op, Linear) else None
        plain: Op = op
        if isinstance(op, Ffn):
            plain = inside(op)
        elif isinstance(op, Linear | TransposedLinear) and is_adapted(op):
            plain, added = product(op)
            waiting.append(added)
        new.ops.append(plain)
    new.ops += waiting
    return new
