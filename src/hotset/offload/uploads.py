"""Weights that devices read from files under a memory budget: read on request and not kept here.

A device's weights are read past the page cache, some rows at a time, so they take no more host memory than
these rows. Neurons uploaded for a prompt, and embeddings, are taken from StoredWeights if it has them.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from hotset import _core
from hotset.formats.gguf import TensorInfo
from hotset.formats.source import WeightSource
from hotset.offload.weight_store import StoredWeights


@dataclass(frozen=True)
class FileRows:
    """Rows of matrices, stacked, uint8 [n, bytes of a row], read on request.

    parts: for each its tensor, the first row and the number of rows.
    """

    stored: StoredWeights
    parts: tuple[tuple[str, int, int], ...]

    def __getitem__(self, rows: slice | np.ndarray) -> np.ndarray:
        """Read the rows of a slice, or of numbers, int64 [n], in their order."""
        numbers = np.arange(sum(n for _, _, n in self.parts))[rows] if isinstance(rows, slice) else rows
        out: np.ndarray | None = None
        before = 0
        for name, first, n in self.parts:
            own = (numbers >= before) & (numbers < before + n)
            if own.all():
                return self.stored.read(name, first + numbers - before)
            if own.any():
                found = self.stored.read(name, first + numbers[own] - before)
                out = np.empty((len(numbers), found.shape[1]), np.uint8) if out is None else out
                out[own] = found
            before += n
        assert out is not None
        return out


@dataclass(frozen=True)
class SomeRows:
    """Some rows of a matrix, in memory.

    numbers: of the rows, int64 [n], ascending; rows: uint8 [n, bytes of a row].
    """

    numbers: np.ndarray
    rows: np.ndarray

    def __getitem__(self, numbers: slice | np.ndarray) -> np.ndarray:
        assert not isinstance(numbers, slice)
        return self.rows[np.searchsorted(self.numbers, numbers)]


Lines = np.ndarray | FileRows | SomeRows
"""Rows of a matrix as stored in a file, uint8 [n, bytes of a row], in memory or not."""


class Uploads:
    """A WeightSource for devices; StoredWeights holds the weights of the CPU.

    stored: remains the caller's. runtime: of the plans that compute with these weights; None: no plans. All
    methods raise ReadError.
    """

    def __init__(self, stored: StoredWeights, runtime: _core.Runtime | None = None) -> None:
        self._stored, self._runtime = stored, runtime

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Return name → type and shape."""
        return self._stored.tensors

    def data(self, name: str) -> np.ndarray:
        """Read a tensor's bytes, uint8 [nbytes], from its file; a table of n-grams is mapped."""
        return self._stored.data(name) if name in self._stored.tables else self._stored.read(name)

    def check(self) -> None:
        """Raise ReadError if a file has been changed."""
        self._stored.check()

    def rows(self, *parts: tuple[str, int, int]) -> FileRows:
        """Return rows of tensors, stacked. parts: each a name, the first row and the number of rows."""
        return FileRows(self._stored, parts)

    def neurons(self, names: Collection[str], numbers: np.ndarray) -> dict[str, SomeRows]:
        """Return rows of neurons, int64 [n], ascending, of the tensors that come from a store, by name.

        Rows that are not in memory are read.
        """
        found: dict[str, np.ndarray] = {}
        for name in names:
            if name not in found:
                found |= self._stored.copy(name, numbers, self._runtime)
        return {name: SomeRows(numbers, found[name]) for name in names if name in found}

    def there(self, name: str, row: int) -> np.ndarray | None:
        """Return a row, or an expert's matrix, uint8 [bytes of a row], if the CPU has it in memory."""
        return self._stored.peek(name, row, self._runtime)

    def looked_up(self, name: str, rows: np.ndarray) -> np.ndarray:
        """Return rows of an embedding, uint8 [n, bytes of a row]."""
        numbers, own = np.unique(rows, return_inverse=True)
        found = self._stored.copy(name, numbers, self._runtime)
        if not found:
            return _rows(self._stored.data(name), self.tensors[name].shape[-1], rows)
        return found[name][own.reshape(-1)]


def rows_at(source: WeightSource, name: str, rows: np.ndarray) -> np.ndarray:
    """Return rows of an embedding, uint8 [n, bytes of a row], from memory or a file."""
    if isinstance(source, Uploads):
        return source.looked_up(name, rows)
    return _rows(source.data(name), math.prod(source.tensors[name].shape[1:]), rows)


def _rows(matrix: object, n_rows: int, rows: np.ndarray) -> np.ndarray:
    found: np.ndarray = np.asarray(matrix).reshape(n_rows, -1)[rows]
    return found


def matrix_rows(source: WeightSource, parts: Sequence[tuple[str, int, int]], row_bytes: int) -> Lines:
    """Return rows of matrices, stacked. parts: each a tensor, the first row and the number of rows."""
    if isinstance(source, Uploads):
        return source.rows(*parts)
    found = [source.data(name).reshape(-1, row_bytes)[first : first + n] for name, first, n in parts]
    return found[0] if len(found) == 1 else np.concatenate(found)
