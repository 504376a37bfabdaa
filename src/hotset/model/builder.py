"""A graph under construction: one or two lines per operation, over the tensors of a file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hotset.model import operations as ops
from hotset.model.config import ModelConfig
from hotset.model.graph import Graph
from hotset.model.operations import SHIFT, Value
from hotset.model.weights import Weights


class GraphBuilder:
    """A graph under construction, to which operations are added in order, over the tensors of a file."""

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        self.config, self.weights, self.graph = config, weights, Graph()
        self.where: dict[str, Any] = {}  # layer and part of the next operations

    def enter(self, layer: int, part: ops.Part) -> None:
        self.where = {"layer": layer, "part": part}

    def value(self, name: str, width: int) -> Value:
        return self.graph.value(name, width)

    def add(self, op: Any) -> Value:
        return self.graph.add(op)

    def linear_op(self, x: Value, tensor: str, width: int, name: str | None = None) -> ops.Linear:
        weight, bias = self.weights.matrix(tensor, x.width, width), self.weights.bias(tensor, width)
        input_major, out = self.weights.input_major(tensor, x.width), self.value(name or tensor, width)
        return ops.Linear(out, x, weight, bias, input_major=input_major, **self.where)

    def linear(self, x: Value, tensor: str, width: int, name: str | None = None) -> Value:
        return self.add(self.linear_op(x, tensor, width, name))

    def rows_of(self, tensor: str, x: Value, widths: Mapping[str, int]) -> list[ops.Linear]:
        """Return products that share one matrix: each name gets the next `width` rows of it."""
        n_rows, first, parts = sum(widths.values()), 0, []
        weight, bias = self.weights.matrix(tensor, x.width, n_rows), self.weights.bias(tensor, n_rows)
        input_major = self.weights.input_major(tensor, x.width)
        for name, width in widths.items():
            parts.append(
                ops.Linear(self.value(name, width), x, weight, bias, first, input_major, **self.where)
            )
            first += width
        return parts

    def norm_op(
        self, x: Value, tensor: str, name: str | None = None, eps: float | None = None
    ) -> ops.RMSNorm | ops.LayerNorm:
        out = self.value(name or tensor, x.width)
        eps = self.config.norm_eps if eps is None else eps
        if not self.config.norm_weights:
            return ops.LayerNorm(out, x, None, None, eps, **self.where)
        weight = self.weights.vector(tensor, x.width)
        if self.config.norm == "layer":
            bias = self.weights.bias(tensor, x.width, required=self.config.norm_bias)
            return ops.LayerNorm(out, x, weight, bias, eps, **self.where)
        return ops.RMSNorm(out, x, weight, eps, **self.where)

    def norm(self, x: Value, tensor: str, name: str | None = None, eps: float | None = None) -> Value:
        return self.add(self.norm_op(x, tensor, name, eps))

    def scaled(self, x: Value, factor: float, name: str) -> Value:
        if factor == 1.0:
            return x
        return self.add(ops.Scale(self.value(name, x.width), x, factor, **self.where))

    def channels(self, x: Value, first: int, width: int, name: str) -> Value:
        """Add a selection of `width` channels of x, starting at channel `first`."""
        return self.add(ops.Heads(self.value(name, width), x, 1, first, **self.where))

    def shifted(self, h: Value, name: str) -> Value:
        """Add the difference between the previous token's row and the token's own."""
        return self.add(ops.ShortConv(self.value(name, h.width), h, None, len(SHIFT), **self.where))

    def lerped(self, h: Value, more: Value, tensor: str, name: str, j: int = 0, n: int = 1) -> Value:
        """Add h + `more` * a share per channel, which is the j-th of n rows of a tensor."""
        weight, d = self.weights.numbers(tensor, n * h.width), h.width
        share = self.value(f"{name}_share", d)
        share = self.add(ops.Scale(share, more, 1.0, weight, j * d, **self.where))
        return self.add(ops.Add(self.value(name, d), h, share, **self.where))

    def activated(self, x: Value, kind: ops.ActivationKind) -> Value:
        return self.add(ops.Activate(self.value(f"{x.name}_act", x.width), x, kind, **self.where))
