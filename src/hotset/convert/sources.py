"""The sources of the tensors of a GGUF file: tensors of a checkpoint, reordered and combined.

Indices describe the changes of a tensor, so every piece is read once, in its final order.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from hotset.convert.fp8 import Scaled
from hotset.convert.mxfp4 import Packed
from hotset.formats.gguf import PIECE_VALUES
from hotset.formats.torch_file import to_floats


@dataclass(frozen=True)
class Origin:
    """The source of a tensor of the new file, and its changes.

    values: as stored, outermost dimension first, in a mapped file. transposed: swap rows and columns first.
    rows, columns: the selected ones, in their new order (None: all). plus: added to each value. decays:
    replace each value x by -exp(x). ternary: replace each value by the nearest of -s, 0 and s, where s is the
    mean magnitude of all. factors: for each row of the result, or one for all. unit: normalise each row to
    length 1.
    """

    values: np.ndarray
    rows: np.ndarray | None = None
    columns: np.ndarray | None = None
    transposed: bool = False
    plus: float = 0.0
    decays: bool = False
    ternary: bool = False
    factors: np.ndarray | None = None
    unit: bool = False

    @classmethod
    def reordered(cls, values: np.ndarray, rows: np.ndarray, *, decays: bool = False) -> Origin:
        """Return the tensor with its rows in another order. Raise ValueError if one of them is left out."""
        if len(rows) != len(values):
            raise ValueError(f"{len(values)} rows, not {len(rows)}")
        return cls(values, rows=rows, decays=decays)

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of the result, outermost first."""
        shape = self.values.shape[::-1] if self.transposed else self.values.shape
        return shape if self.rows is None else (len(self.rows), *shape[1:])

    def piece(self, start: int, stop: int) -> np.ndarray:
        """Return rows start..stop of the result, float32."""
        rows: slice | np.ndarray = slice(start, stop) if self.rows is None else self.rows[start:stop]
        found = self.values[:, rows].T if self.transposed else self.values[rows]
        if self.columns is not None:
            found = found[:, self.columns]
        values: np.ndarray = (
            found.floats() if isinstance(found, Scaled) else to_floats(np.ascontiguousarray(found))
        )
        if self.decays:
            with np.errstate(over="ignore"):  # infinity means that the state is forgotten
                values = -np.exp(values)
        if self.unit:
            values = values / np.maximum(np.linalg.norm(values, axis=1, keepdims=True), np.float32(1e-12))
        if self.factors is not None:
            factors = self.factors if len(self.factors) == 1 else self.factors[start:stop]
            values = values * factors.reshape(-1, *(1,) * (values.ndim - 1))
        return values + np.float32(self.plus) if self.plus else values

    def pieces(self) -> Iterator[np.ndarray]:
        """Yield the result in order, some megabytes at a time."""
        n_rows = self.shape[0]
        step = max(PIECE_VALUES // math.prod(self.shape[1:]), 1)
        starts = range(0, n_rows, step)
        scale = None
        if self.ternary:
            total = sum(
                float(np.abs(self.piece(i, min(i + step, n_rows))).sum(dtype=np.float64)) for i in starts
            )
            scale = np.float32(max(total / math.prod(self.shape), 1e-5))
        for start in starts:
            found = self.piece(start, min(start + step, n_rows))
            yield found if scale is None else np.clip(np.rint(found / scale), -1, 1) * scale


@dataclass(frozen=True)
class Stack:
    """Matrices of one shape in one tensor, such as all experts. of_rows: the tensor is one matrix."""

    parts: tuple[Origin, ...]
    of_rows: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of the result, outermost first."""
        if self.of_rows:
            return (sum(part.shape[0] for part in self.parts), *self.parts[0].shape[1:])
        return (len(self.parts), *self.parts[0].shape)

    def pieces(self) -> Iterator[np.ndarray]:
        """Yield the values in order, like Origin.pieces."""
        for part in self.parts:
            yield from part.pieces()


@dataclass(frozen=True)
class Table:
    """A table of whole numbers, which the file stores as I32."""

    values: np.ndarray

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of the result, outermost first."""
        return self.values.shape

    def pieces(self) -> Iterator[np.ndarray]:
        """Yield the bytes of the file."""
        yield np.ascontiguousarray(self.values.astype("<i4")).view(np.uint8)


Source = Origin | Stack | Packed | Table
