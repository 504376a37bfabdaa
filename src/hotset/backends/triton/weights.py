"""The weights of a stage in device memory. Each is loaded once, in the file's type."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from hotset.backends.triton.arena import Arena
from hotset.backends.triton.fallback import Held, RopeTable
from hotset.backends.triton.matrix import DeviceMatrix
from hotset.formats.quants import dequantize
from hotset.formats.source import WeightSource
from hotset.model.operations import Linear, Rope, TransposedLinear
from hotset.offload.uploads import Lines, Uploads, matrix_rows


class DeviceWeights:
    """The weights of a file on `device`, each loaded at its first use.

    nbytes: their bytes on the device. table_nbytes: the bytes of tables of rotations. expected: known bytes
    of the weights that will be loaded, or 0.
    """

    def __init__(self, source: WeightSource, device: torch.device, expected: int = 0) -> None:
        self.source, self.device = source, device
        self.nbytes = self.table_nbytes = 0
        self._kept: dict[object, DeviceMatrix | Tensor] = {}
        self._arena = Arena(device, expected)
        self._ropes: dict[Rope, RopeTable] = {}

    def linear(self, *ops: Linear) -> DeviceMatrix:
        """Return the rows of a product, or the stacked rows of several products of one input and type."""
        key = tuple((op.weight, op.first_row, op.out.width) for op in ops)
        if key not in self._kept:
            info = self.source.tensors[ops[0].weight]
            n_rows, n_cols = sum(op.out.width for op in ops), ops[0].x.width
            lines = self._lines(*ops)
            self._keep(
                key,
                DeviceMatrix.from_bytes(lines, info.type, n_rows, n_cols, self.device, arena=self._arena),
            )
        return self._kept[key]  # type: ignore[return-value]

    def input_major(self, *ops: Linear) -> DeviceMatrix:
        """Return the same matrices input-major, a row per input (DeviceMatrix.input_major)."""
        key = "input-major", tuple((op.weight, op.first_row, op.out.width) for op in ops)
        if key not in self._kept:
            widths = [op.out.width for op in ops]
            made = DeviceMatrix.input_major(
                ops[0].x.width, widths, lambda i: self.some_rows(ops[i], None), self._arena
            )
            self._keep(key, made)
        return self._kept[key]  # type: ignore[return-value]

    def down(self, op: TransposedLinear) -> DeviceMatrix:
        """Return a neuron-major down projection, in rows of blocks or as planes."""
        if op.weight not in self._kept:
            self._keep(op.weight, self.some_rows(op, None, self._arena))
        return self._kept[op.weight]  # type: ignore[return-value]

    def hot_rows(self, op: Linear | TransposedLinear, rows: np.ndarray) -> DeviceMatrix:
        """Return the rows of some neurons, int64 [n]. A second call returns the rows of the first call."""
        key = op.weight, op.first_row if isinstance(op, Linear) else 0, "hot"  # gate and up may be one matrix
        if key not in self._kept:
            self._keep(key, self.some_rows(op, rows, self._arena))
        return self._kept[key]  # type: ignore[return-value]

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

    def bias(self, name: str | None, first: int = 0, width: int | None = None) -> Tensor | None:
        """Return `vector(name, first, width)`, or None if `name` is None."""
        return None if name is None else self.vector(name, first, width)

    def biases(self, ops: Sequence[Linear]) -> Tensor | None:
        """Return the biases of products with stacked rows, or None if no product has one.

        A product without bias gets zeros.
        """
        if all(op.bias is None for op in ops):
            return None
        parts = [
            np.zeros(op.out.width, np.float32)
            if op.bias is None
            else self.host_vector(op.bias)[op.first_row : op.first_row + op.out.width]
            for op in ops
        ]
        return self.tensor(tuple((op.bias, op.first_row) for op in ops), np.concatenate(parts))

    def vector(self, name: str, first: int = 0, width: int | None = None) -> Tensor:
        """Return a norm's weight or a bias in float32, or `width` of its values from `first` on."""
        key = name, first, width
        if key not in self._kept:
            values = self.host_vector(name)[first : None if width is None else first + width]
            self._keep(key, self._arena.copy_of(torch.from_numpy(values.copy())))
        return self._kept[key]  # type: ignore[return-value]

    def host_vector(self, name: str) -> np.ndarray:
        """Return a decoded vector of the file, float32 [n]."""
        info = self.source.tensors[name]
        return np.asarray(dequantize(self.source.data(name), info.type, info.shape)).reshape(-1)

    def tensor(self, key: object, values: np.ndarray) -> Tensor:
        """Return an array on the device. The first call with `key` copies it, later calls return the copy."""
        if key not in self._kept:
            self._keep(key, self._arena.copy_of(torch.from_numpy(np.array(values))))
        return self._kept[key]  # type: ignore[return-value]

    def held(self, layer: int, neurons: np.ndarray, n_ff: int) -> Held:
        """Return the hot neurons of a layer on the device. neurons: int64 [n], ascending."""
        return Held.of(neurons, n_ff, lambda name, values: self.tensor((layer, "hot", name), values))

    def rope(self, rope: Rope, n_ctx: int) -> RopeTable:
        """Return the tables of a rotation, which the layers share."""
        if rope not in self._ropes:
            self._ropes[rope] = RopeTable.build(rope, n_ctx, self.device)
            self.table_nbytes += self._ropes[rope].near.nbytes + self._ropes[rope].far.nbytes
        return self._ropes[rope]

    def _lines(self, *ops: Linear | TransposedLinear) -> Lines:
        """Return the stored rows of products of one input, or of a neuron-major down projection."""
        parts = [
            (op.weight, op.first_row, op.out.width) if isinstance(op, Linear) else (op.weight, 0, op.x.width)
            for op in ops
        ]
        return matrix_rows(self.source, parts, self.source.tensors[ops[0].weight].row_bytes)

    def _keep(self, key: object, weight: DeviceMatrix | Tensor) -> None:
        self._kept[key] = weight
        self.nbytes += weight.nbytes

    def clear(self) -> None:
        """Drop all weights and tables."""
        self._kept.clear()
        self._ropes.clear()
        self._arena.clear()
        self.nbytes = self.table_nbytes = 0
