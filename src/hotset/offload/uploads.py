"""What devices take of files under a budget of memory: read when it is asked for, and kept nowhere here.

A device's weights are read past the page cache, some rows at a time, and so take no more of this machine's
memory than those. Of neurons that come to a device for a prompt, and of embeddings, what StoredWeights has is
not read again.
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
    """Rows of matrices, one under the other, uint8 [n, bytes of a row], read when they are asked for.

    parts: of each its tensor, the first row and how many.
    """

    stored: StoredWeights
    parts: tuple[tuple[str, int, int], ...]

    def __getitem__(self, rows: slice | np.ndarray) -> np.ndarray:
        """Of a slice, or of numbers, int64 [n], in their order."""
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
    """Some rows of a matrix that are in memory, by their numbers in it. numbers: int64 [n], rising; rows:
    uint8 [n, bytes of a row]."""

    numbers: np.ndarray
    rows: np.ndarray

    def __getitem__(self, numbers: slice | np.ndarray) -> np.ndarray:
        assert not isinstance(numbers, slice)
        return self.rows[np.searchsorted(self.numbers, numbers)]


Lines = np.ndarray | FileRows | SomeRows
"""Rows of a matrix as they are in a file, uint8 [n, bytes of a row], wherever they are."""


class Uploads:
    """A WeightSource for devices, beside StoredWeights, which has what the CPU computes with.

    stored: it stays the caller's. runtime: of the plans that compute with these; None: none does. All methods
    raise ReadError.
    """

    def __init__(self, stored: StoredWeights, runtime: _core.Runtime | None = None) -> None:
        self._stored, self._runtime = stored, runtime

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Name → type and shape."""
        return self._stored.tensors

    def data(self, name: str) -> np.ndarray:
        """The tensor's bytes, uint8 [nbytes], read anew, but for a table of n-grams."""
        return self._stored.data(name) if name in self._stored.tables else self._stored.read(name)

    def check(self) -> None:
        """Raises ReadError where a file has been changed."""
        self._stored.check()

    def rows(self, *parts: tuple[str, int, int]) -> FileRows:
        """Rows of tensors, one under the other: of each its name, the first row and how many."""
        return FileRows(self._stored, parts)

    def neurons(self, names: Collection[str], numbers: np.ndarray) -> dict[str, SomeRows]:
        """The rows of some neurons, int64 [n], rising, of those tensors that come from a store, by name; what
        is not in memory is read."""
        found: dict[str, np.ndarray] = {}
        for name in names:
            if name not in found:
                found |= self._stored.copy(name, numbers, self._runtime)
        return {name: SomeRows(numbers, found[name]) for name in names if name in found}

    def there(self, name: str, row: int) -> np.ndarray | None:
        """A row, or an expert's matrix, uint8 [bytes of a row], where it is in memory for the CPU."""
        return self._stored.peek(name, row, self._runtime)

    def looked_up(self, name: str, rows: np.ndarray) -> np.ndarray:
        """Rows of an embedding, uint8 [n, bytes of a row]."""
        numbers, own = np.unique(rows, return_inverse=True)
        found = self._stored.copy(name, numbers, self._runtime)
        if not found:
            return _rows(self._stored.data(name), self.tensors[name].shape[-1], rows)
        return found[name][own.reshape(-1)]


def rows_at(source: WeightSource, name: str, rows: np.ndarray) -> np.ndarray:
    """Rows of an embedding, uint8 [n, bytes of a row], wherever it is."""
    if isinstance(source, Uploads):
        return source.looked_up(name, rows)
    return _rows(source.data(name), math.prod(source.tensors[name].shape[1:]), rows)


def _rows(matrix: object, n_rows: int, rows: np.ndarray) -> np.ndarray:
    found: np.ndarray = np.asarray(matrix).reshape(n_rows, -1)[rows]
    return found


def matrix_rows(source: WeightSource, parts: Sequence[tuple[str, int, int]], row_bytes: int) -> Lines:
    """Rows of matrices, one under the other: of each its tensor, the first row and how many."""
    if isinstance(source, Uploads):
        return source.rows(*parts)
    found = [source.data(name).reshape(-1, row_bytes)[first : first + n] for name, first, n in parts]
    return found[0] if len(found) == 1 else np.concatenate(found)
