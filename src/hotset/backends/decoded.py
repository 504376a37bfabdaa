"""Tensors of a file as float32."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Generic, TypeVar

import numpy as np

from hotset.formats.planes import decode
from hotset.formats.quants import dequantize
from hotset.model.operations import ExpertLinear, ExpertSum, TransposedLinear

if TYPE_CHECKING:
    from hotset.formats.source import WeightSource

T = TypeVar("T")


def decoded_vector(weights: WeightSource, name: str) -> np.ndarray:
    """Return all numbers of a tensor, float32 [n]."""
    info = weights.tensors[name]
    return np.ascontiguousarray(dequantize(weights.data(name), info.type, info.shape).reshape(-1))


def expert_biases(weights: WeightSource, op: ExpertLinear | ExpertSum) -> np.ndarray:
    """Return the biases of the rows that a product uses, float32 [n_expert, width]."""
    assert op.bias is not None
    own = decoded_vector(weights, op.bias).reshape(op.n_expert, -1)
    if isinstance(op, ExpertLinear):
        own = own[:, op.first_row : op.first_row + op.n_rows]
    return np.ascontiguousarray(own)


class DecodedWeights(Generic[T]):
    """Decoded tensors by name, with shapes in NumPy's order: [ne1, ne0], or [ne0].

    place: converts a decoded array to the backend's type. room: bytes of decoded tensors to keep; other
    tensors are decoded at each use.
    """

    def __init__(self, source: WeightSource, place: Callable[[np.ndarray], T], room: float) -> None:
        self.source, self.place, self.room = source, place, room
        self.kept: dict[str, T] = {}

    def whole(self, name: str) -> T:
        """Return a whole tensor."""
        if name in self.kept:
            return self.kept[name]
        info = self.source.tensors[name]
        array = dequantize(self.source.data(name), info.type, info.shape)
        return self._keep(name, array.reshape(info.shape[::-1]))

    def expert(self, op: ExpertLinear | ExpertSum, expert: int) -> T:
        """Return the matrix of one expert. Decode only this expert if `room` is too small for all."""
        if len(op.weights) > 1:
            return self.whole(op.weights[expert])
        name = op.weights[0]
        info = self.source.tensors[name]
        if name in self.kept or 4 * math.prod(info.shape) <= self.room:
            return self.whole(name)[expert]  # type: ignore[index,no-any-return]
        data = self.source.data(name).reshape(op.n_expert, -1)[expert]
        return self.place(dequantize(data, info.type, info.shape[:2]).reshape(info.shape[1::-1]))

    def neuron_major(self, op: TransposedLinear) -> T:
        """Return the matrix of a down projection [n_ff, width], from its rows or from its planes."""
        if op.scales is None or op.weight in self.kept:
            return self.whole(op.weight)
        codes = self.source.data(op.weight).view(np.int8).reshape(op.x.width, -1)
        scales = self.source.data(op.scales).view(np.float16).reshape(-1, op.out.width)
        return self._keep(op.weight, decode(codes, scales))

    def _keep(self, name: str, array: np.ndarray) -> T:
        placed = self.place(array)
        if array.nbytes <= self.room:
            self.room -= array.nbytes
            self.kept[name] = placed
        return placed
