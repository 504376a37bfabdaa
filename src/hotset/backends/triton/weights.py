"""The weights of a stage in device memory. Each is loaded once, in the file's type."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from hotset.backends.decoded import decoded_vector
from hotset.backends.device.weights import KeptWeights
from hotset.backends.triton.arena import Arena
from hotset.backends.triton.fallback import Held, RopeTable
from hotset.backends.triton.matrix import DeviceMatrix
from hotset.formats.source import WeightSource
from hotset.model.operations import Linear, Rope, TransposedLinear
from hotset.offload.uploads import Lines, Uploads, matrix_rows


class DeviceWeights(KeptWeights[Tensor]):
    """The weights of a file on `device`. expected: known bytes of the weights that will be loaded, or 0."""

    def __init__(self, source: WeightSource, device: torch.device, expected: int = 0) -> None:
        super().__init__(source)
        self.device = device
        self._arena = Arena(device, expected)
        self._ropes: dict[Rope, RopeTable] = {}

    @property
    def nbytes(self) -> int:
        """Return the bytes of the weights on the device."""
        return sum(weight.nbytes for weight in self.kept.values())

    @property
    def table_nbytes(self) -> int:
        """Return the bytes of the tables of rotations."""
        return sum(table.near.nbytes + table.far.nbytes for table in self._ropes.values())

    def upload(self, values: np.ndarray) -> Tensor:
        """Copy an array to the device."""
        return self._arena.copy_of(torch.from_numpy(np.array(values)))

    def linear(self, *ops: Linear) -> DeviceMatrix:
        """Return the rows of a product, or the stacked rows of several products of one input and type."""
        type = self.source.tensors[ops[0].weight].type
        n_rows, n_cols = sum(op.out.width for op in ops), ops[0].x.width
        return self.once(
            _key(ops),
            lambda: DeviceMatrix.from_bytes(
                self._lines(*ops), type, n_rows, n_cols, self.device, arena=self._arena
            ),
        )

    def input_major(self, *ops: Linear) -> DeviceMatrix:
        """Return the same matrices input-major, a row per input (DeviceMatrix.input_major)."""
        widths = [op.out.width for op in ops]
        return self.once(
            ("input-major", _key(ops)),
            lambda: DeviceMatrix.input_major(
                ops[0].x.width, widths, lambda i: self.some_rows(ops[i], None), self._arena
            ),
        )

    def down(self, op: TransposedLinear) -> DeviceMatrix:
        """Return a neuron-major down projection, in rows of blocks or as planes."""
        return self.once(op.weight, lambda: self.some_rows(op, None, self._arena))

    def hot_rows(self, op: Linear | TransposedLinear, rows: np.ndarray) -> DeviceMatrix:
        """Return the rows of some neurons, int64 [n]. A second call returns the rows of the first call."""
        key = op.weight, op.first_row if isinstance(op, Linear) else 0, "hot"  # gate and up may be one matrix
        return self.once(key, lambda: self.some_rows(op, rows, self._arena))

    def some_rows(
        self,
        op: Linear | TransposedLinear,
        rows: np.ndarray | None,
        arena: Arena | None = None,
        lines: Lines | None = None,
    ) -> DeviceMatrix:
        """Load the rows of some neurons, or of all, on each call.

        Without an arena they get memory of their own. lines: the bytes of the rows, if they are not read from
        the source.
        """
        info = self.source.tensors[op.weight]
        if lines is None:
            lines = self._lines(op)
        if isinstance(op, Linear):
            return DeviceMatrix.from_bytes(
                lines, info.type, op.out.width, op.x.width, self.device, rows, arena
            )
        if op.scales is None:
            return DeviceMatrix.from_bytes(
                lines, info.type, op.x.width, op.out.width, self.device, rows, arena
            )
        scales = self.source.data(op.scales).view(np.float16).reshape(-1, op.out.width)
        rows = np.arange(op.x.width) if rows is None else rows
        return DeviceMatrix.from_planes(lines, scales, self.device, rows, arena)

    def neurons(self, ops: Sequence[Linear | TransposedLinear], rows: np.ndarray) -> list[DeviceMatrix]:
        """Load the rows of some neurons of several matrices, in memory of their own.

        rows: int64 [n], ascending.
        """
        there: Mapping[str, Lines] = {}
        if isinstance(self.source, Uploads):
            there = self.source.neurons([op.weight for op in ops], rows)
        return [self.some_rows(op, rows, lines=there.get(op.weight)) for op in ops]

    def biases(self, ops: Sequence[Linear]) -> Tensor | None:
        """Return the biases of products with stacked rows, or None if no product has one.

        A product without bias gets zeros.
        """
        if all(op.bias is None for op in ops):
            return None
        parts = [
            np.zeros(op.out.width, np.float32)
            if op.bias is None
            else decoded_vector(self.source, op.bias)[op.first_row : op.first_row + op.out.width]
            for op in ops
        ]
        return self.made(tuple((op.bias, op.first_row) for op in ops), lambda: np.concatenate(parts))

    def held(self, layer: int, neurons: np.ndarray, n_ff: int) -> Held:
        """Return the hot neurons of a layer on the device. neurons: int64 [n], ascending."""
        return Held.of(neurons, n_ff, lambda name, values: self.made((layer, "hot", name), lambda: values))

    def rope(self, rope: Rope, n_ctx: int) -> RopeTable:
        """Return the tables of a rotation, which the layers share."""
        if rope not in self._ropes:
            self._ropes[rope] = RopeTable.build(rope, n_ctx, self.device)
        return self._ropes[rope]

    def _lines(self, *ops: Linear | TransposedLinear) -> Lines:
        """Return the stored rows of products of one input, or of a neuron-major down projection."""
        parts = [
            (op.weight, op.first_row, op.out.width) if isinstance(op, Linear) else (op.weight, 0, op.x.width)
            for op in ops
        ]
        return matrix_rows(self.source, parts, self.source.tensors[ops[0].weight].row_bytes)

    def clear(self) -> None:
        """Drop all weights and tables."""
        self.kept.clear()
        self._ropes.clear()
        self._arena.clear()


def _key(ops: Sequence[Linear]) -> object:
    return tuple((op.weight, op.first_row, op.out.width) for op in ops)
