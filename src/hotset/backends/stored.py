"""Weights under a budget of memory: what every token needs is read once, rows of neurons as they are needed.

Files are read here, never mapped: one that is cut short is a sentence (ReadError), and what of it is in
memory is what the budget says. Rows of an FFN that can be left out, and experts, come through a store
(csrc/store/store.h), a group of rows for all that is known to be needed at one time:

    predicted    gate, up and down of the neurons that the predictor names
    exact        the gate, all of it; then up and down of those that fire
    dense        all three, all of them
    experts      their matrices, of those that the router names

Everything else is resident. The bits are the same with any budget.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np

from hotset import _core
from hotset.errors import OutOfMemoryError
from hotset.formats.gguf import TensorInfo
from hotset.formats.overlay import Overlay
from hotset.model.cost import weights_read
from hotset.model.graph import ExpertLinear, ExpertSum, Ffn, Graph, Linear, TransposedLinear
from hotset.units import human_size

HALF_LIFE = 64  # requests of a layer after which what it was asked for counts half (docs/LOG.md)
_ALIGNMENT = 64
_PER_ROW, _PER_PART = 56, 8  # bytes of tables: Replacement's, and an address


@dataclass(frozen=True)
class StoreCounts:
    """Of rows, since the model was loaded: how many were there when they were needed, and how many were not;
    bytes read for these, in how many reads; and seconds of waiting for them."""

    hits: int
    misses: int
    bytes_read: int
    n_reads: int
    seconds_waited: float

    @property
    def hit_rate(self) -> float | None:
        """Share of the rows that were there; None where none was needed."""
        return self.hits / (self.hits + self.misses) if self.hits + self.misses else None

    def since(self, before: StoreCounts) -> StoreCounts:
        """What was done after `before`."""
        return StoreCounts(*(getattr(self, f.name) - getattr(before, f.name) for f in fields(self)))


def groups_of(graph: Graph, tensors: Mapping[str, TensorInfo], *, sparse: bool) -> Iterator[list[str]]:
    """Tensors whose rows are fetched together, by layer."""
    for op in graph.ops:
        if isinstance(op, Ffn) and op.route is not None:
            if len(op.up.weights if isinstance(op.up, ExpertLinear) else ()) == 1:  # of all, not of each
                yield list(dict.fromkeys(name for each in _experts(op) for name in each.weights))
        elif isinstance(op, Ffn) and op.has_zeros:
            together: list[list[str]] = [[]] if not sparse or op.mask is not None else [[], []]
            for matrix in (op.gate, op.up, op.down):
                if _has_row_per_neuron(matrix, op.n_ff, tensors):
                    assert isinstance(matrix, Linear | TransposedLinear)
                    decides = matrix is op.decides
                    together[0 if decides else -1].append(matrix.weight)
            yield from filter(None, together)


def _experts(ffn: Ffn) -> list[ExpertLinear | ExpertSum]:
    found = (ffn.gate, ffn.up, ffn.down)
    return [op for op in found if isinstance(op, ExpertLinear | ExpertSum)]


def _has_row_per_neuron(matrix: object, n_ff: int, tensors: Mapping[str, TensorInfo]) -> bool:
    if isinstance(matrix, TransposedLinear):
        return True
    is_whole = isinstance(matrix, Linear) and tensors[matrix.weight].shape[-1] == n_ff
    return is_whole and isinstance(matrix, Linear) and matrix.out.width == n_ff


@dataclass(frozen=True)
class Sizes:
    """Bytes of weights. resident: what always stays. least: the room that rows need; most: that they have a
    use for. tables: of where which row is."""

    resident: int
    least: int
    most: int
    tables: int


def sizes_of(graph: Graph, tensors: Mapping[str, TensorInfo], *, sparse: bool) -> Sizes:
    """What StoredWeights takes."""
    groups = list(groups_of(graph, tensors, sparse=sparse))
    rows = [sum(_padded(rows_of(tensors[name])[1]) for name in group) for group in groups]
    sizes = [n * rows_of(tensors[group[0]])[0] for n, group in zip(rows, groups, strict=True)]
    resident = sum(_padded(tensors[name].nbytes) for name in _resident(graph, tensors, groups))
    tables = sum(rows_of(tensors[group[0]])[0] * (_PER_ROW + _PER_PART * len(group)) for group in groups)
    return Sizes(resident, max(sizes, default=0), sum(sizes), tables)


def _resident(graph: Graph, tensors: Mapping[str, TensorInfo], groups: list[list[str]]) -> list[str]:
    """Tensors that are read and have no rows in a group."""
    names = {name for op in graph.primitives for name, _ in weights_read(op, tensors)}
    return sorted(names - {name for group in groups for name in group})


class StoredWeights:
    """A WeightSource that holds `n_bytes` of memory at most.

    weights: the files; they stay the caller's, and open. sparse: as of the backend that computes with it.
    gap: bytes that are read in vain rather than two reads made of one. empty: nothing is read, nor any
    memory touched: for who wants to know what a backend takes beside its weights.

    Raises OutOfMemoryError where n_bytes is too little, ReadError.
    """

    def __init__(
        self,
        weights: Overlay,
        graph: Graph,
        n_bytes: int,
        *,
        sparse: bool,
        reader: _core.Reader,
        gap: int,
        empty: bool = False,
    ) -> None:
        self._weights = weights
        self.reader = reader
        groups = list(groups_of(graph, weights.tensors, sparse=sparse))
        self.sizes = sizes_of(graph, weights.tensors, sparse=sparse)
        self.store: _core.RowStore | None = _core.RowStore(reader, gap, HALF_LIFE) if groups else None
        self._rows: dict[str, _core.StoredRows] = {}
        room = n_bytes - self.sizes.resident
        if room < self.sizes.least:
            raise OutOfMemoryError(
                f"{human_size(n_bytes)} are left for weights, and what must be in memory of this model takes "
                f"{human_size(self.sizes.resident + self.sizes.least)}; raise the memory budget by "
                f"{human_size(self.sizes.least - room)}"
            )
        if self.store is not None:
            places: dict[str, tuple[int, int]] = {}
            for group in groups:
                number = self._add_group(self.store, group)
                places |= {name: (number, part) for part, name in enumerate(group)}
            self.store.allocate(min(room, self.store.most_bytes))
            self._rows = {name: self.store.rows(*place) for name, place in places.items()}
        self._resident = self._read(_resident(graph, weights.tensors, groups), empty)

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Name → type and shape."""
        return self._weights.tensors

    def data(self, name: str) -> np.ndarray:
        """The tensor's bytes, uint8 [nbytes], in memory; of one whose rows come as they are needed what
        a native plan takes in their place (_core.StoredRows)."""
        rows = self._rows.get(name)
        return self._resident[name] if rows is None else rows  # type: ignore[return-value]

    def check(self) -> None:
        """Raises ReadError where a file has been changed."""
        if self.store is not None:
            self.store.check()

    @property
    def resident(self) -> np.ndarray:
        """All that always stays, uint8."""
        return self._block

    def counts(self) -> StoreCounts:
        """What the store did."""
        return StoreCounts(*((0, 0, 0, 0, 0.0) if self.store is None else self.store.counts()))

    def _add_group(self, store: _core.RowStore, group: list[str]) -> int:
        parts = []
        for name in group:
            path, offset = self._weights.place(name)
            n_rows, row = rows_of(self.tensors[name])
            parts.append((os.fspath(path), offset, row, self.tensors[name].stride or row))
        return store.group(n_rows, parts)

    def _read(self, names: list[str], empty: bool) -> dict[str, np.ndarray]:
        self._block = block = np.zeros(self.sizes.resident + _ALIGNMENT, np.uint8)  # which touches nothing
        at = -block.ctypes.data % _ALIGNMENT
        arrays: dict[str, np.ndarray] = {}
        of_file: dict[Path, list[tuple[int, np.ndarray]]] = {}
        for name in names:
            path, offset = self._weights.place(name)
            n = self.tensors[name].nbytes
            arrays[name] = block[at : at + n]
            if not empty:
                of_file.setdefault(path, []).append((offset, arrays[name]))
            at += _padded(n)
        for path, pieces in of_file.items():
            self.reader.read(os.fspath(path), pieces)
        return arrays


def rows_of(info: TensorInfo) -> tuple[int, int]:
    """Rows of a matrix, or the matrices of experts, and bytes of one."""
    n_rows = info.shape[-1]
    return n_rows, info.nbytes // n_rows


def _padded(n: int) -> int:
    return -(-n // _ALIGNMENT) * _ALIGNMENT
