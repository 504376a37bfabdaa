"""Weights under a budget of memory: what every token needs is read once, rows of neurons as they are needed.

Files are read here, never mapped: one that is cut short is a sentence (ReadError), and what of it is in
memory is what the budget says. Rows of an FFN that can be left out, and experts, come through a store
(csrc/store/store.h), a group of rows for all that is known to be needed at one time:

    predicted    gate, up and down of the neurons that the predictor names
    exact        the gate, all of it; then up and down of those that fire
    dense        all three, all of them
    experts      their matrices, of those that the router names

Of an embedding the rows of a step's tokens are read, unless all has room. Everything else stays, or streams
as far as it does not fit (offload/streaming.py). The bits are the same with any budget.

Beside devices all this is of what the CPU computes: its own layers, and the cold neurons, or experts, of the
devices'. What a device has is not in this machine's memory; it is read when it is uploaded (uploads.py).
"""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hotset import _core
from hotset.errors import OutOfMemoryError
from hotset.formats.gguf import TensorInfo
from hotset.formats.overlay import Overlay
from hotset.model.graph import Graph
from hotset.model.operations import Embed, ExpertLinear, ExpertSum, Ffn, Linear, NgramEmbed, TransposedLinear
from hotset.offload.cache_stats import CacheStats
from hotset.offload.streaming import Piece, Streamed, Streaming, arrange, least_for, padded, pieces_of
from hotset.units import human_size

HALF_LIFE = 64  # requests of a layer after which what it was asked for counts half (decision 013)
_SMALL_ROW = 64 << 10  # bytes of a neuron, of which many are read at a time: each for itself is slow
_HOT_SHARE = 1 / 8  # of all neurons: room for those spares more than streaming costs (decision 012)
_PER_ROW, _PER_PART = 56, 8  # bytes of tables: Replacement's, and an address
# Neurons of a layer that one token needs without a slot, for which room is set apart. A step that needs more
# (a prompt, a model that is hardly sparse) borrows slots, whose rows are then read anew.
_USUAL_SHARE, _USUAL_LEAST = 1 / 8, 1024
# Tokens of a step where weights have no room: buffers for more, which only long prompts use, would take it.
STEP = 128


@dataclass(frozen=True)
class RowGroup:
    """Tensors whose rows are fetched together: n_rows of each, of which a step needs `at_once` at most, and
    while single tokens are computed `usual` that have no slot, more or less. slot_bytes: of one of each in
    memory. n_asked: rows that are ever needed, where a device has the others."""

    names: tuple[str, ...]
    n_rows: int
    slot_bytes: int
    usual: int
    at_once: int
    n_asked: int

    @property
    def nbytes(self) -> int:
        """With all its rows in memory that are ever needed."""
        return self.n_asked * self.slot_bytes


Helped = Mapping[int, "np.ndarray | None"]
"""Layers of a device in whose FFN the CPU helps: which neurons the device lacks, bool [n_ff], or None where
these are experts, of which it may lack any."""


def groups_of(
    graph: Graph, tensors: Mapping[str, TensorInfo], *, sparse: bool, helped: Helped | None = None
) -> Iterator[RowGroup]:
    """What a store keeps, by layer."""
    helped = helped or {}
    for op in graph.ops:
        if isinstance(op, Ffn) and op.route is not None:
            if len(op.up.weights if isinstance(op.up, ExpertLinear) else ()) == 1:  # of all, not of each
                names = list(dict.fromkeys(name for each in _experts(op) for name in each.weights))
                yield _row_group(names, tensors, op.route.n_used)
        elif isinstance(op, Ffn) and op.fires_exactly:  # what thresholds leave out has no rows here
            together: list[list[str]] = [[]] if not sparse or op.mask is not None else [[], []]
            for matrix in (op.gate, op.up, op.down):
                by_output = matrix is op.down and not op.neuron_major  # as wide as it is high, perhaps
                if not by_output and _has_row_per_neuron(matrix, op.n_ff, tensors):
                    assert isinstance(matrix, Linear | TransposedLinear)
                    decides = matrix is op.decides
                    together[0 if decides else -1].append(matrix.weight)
            cold = helped.get(op.layer)
            n_asked = op.n_ff if cold is None else int(cold.sum())
            some = max(int(op.n_ff * _USUAL_SHARE), _USUAL_LEAST)
            for names in filter(None, together):
                is_whole = not sparse or (op.mask is None and op.decides.weight in names)
                yield _row_group(names, tensors, None if is_whole else some, n_asked=n_asked)


def embeddings_of(graph: Graph, tensors: Mapping[str, TensorInfo], step: int = STEP) -> list[RowGroup]:
    """Embeddings of which a step needs the rows of its tokens alone, `step` at most."""
    rows = {op.weight for op in graph.primitives if isinstance(op, Embed) and op.of == "token"}
    others = [op for op in graph.primitives if not (isinstance(op, Embed) and op.of == "token")]
    rows -= {weight.name for op in others for weight in op.weights_read}
    return [_row_group([name], tensors, step, step) for name in sorted(rows)]


def tables_of(graph: Graph) -> set[str]:
    """Tables of n-grams, far larger than all else, of which a token reads a few rows: they stay in the file,
    whose pages the system caches while it has room."""
    return {op.weight for op in graph.ops if isinstance(op, NgramEmbed)}


def _row_group(
    names: Sequence[str],
    tensors: Mapping[str, TensorInfo],
    usual: int | None = None,
    at_once: int | None = None,
    n_asked: int | None = None,
) -> RowGroup:
    """None: all rows."""
    n_rows, _ = rows_of(tensors[names[0]])
    n = n_asked or n_rows
    slot_bytes = _core.RowStore.slot_bytes_of([rows_of(tensors[name])[1] for name in names])
    return RowGroup(tuple(names), n_rows, slot_bytes, min(usual or n, n), min(at_once or n, n), n)


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
    """Bytes of weights. fixed: what always stays. pieces: what does or streams. looked_up: embeddings, which
    stay where all has room; else `staging` is what their rows need. usual: of the room of rows what is for
    those that do not stay; least: the room that rows need; most: that they have a use for; small: whether a
    row is. tables: of where which row is."""

    fixed: int
    pieces: tuple[Piece, ...]
    looked_up: int
    staging: int
    usual: int
    least: int
    most: int
    small: bool
    tables: int

    @property
    def least_of_all(self) -> int:
        """The smallest number of bytes that works."""
        return min(self.fixed + least_for(self.pieces) + self.staging + self.least, self.all)

    @property
    def resident(self) -> int:
        """What stays where nothing streams, and rows have no room."""
        return self.fixed + self.staging + sum(piece.nbytes for piece in self.pieces)

    @property
    def all(self) -> int:
        """With all in memory."""
        return self.resident - self.staging + self.looked_up + self.most


@dataclass(frozen=True)
class Shares:
    """What a number of bytes is for. rows: the room of rows; streamed: bytes that each step reads anew;
    resident: of what stays, with the rows of an embedding that a step needs; whole: all has room."""

    streaming: Streaming
    rows: int
    streamed: int
    resident: int
    whole: bool


def sizes_of(
    graph: Graph,
    tensors: Mapping[str, TensorInfo],
    *,
    sparse: bool,
    step: int = STEP,
    helped: Helped | None = None,
) -> Sizes:
    """What StoredWeights takes."""
    groups = list(groups_of(graph, tensors, sparse=sparse, helped=helped))
    embeddings = embeddings_of(graph, tensors, step)
    pieces, fixed = _whole(graph, tensors, [*groups, *embeddings], helped)
    tables = sum(group.n_rows * (_PER_ROW + _PER_PART * len(group.names)) for group in groups)
    return Sizes(
        sum(padded(tensors[name].nbytes) for name in fixed), tuple(pieces),
        looked_up=sum(padded(tensors[group.names[0]].nbytes) for group in embeddings),
        staging=sum(group.at_once * group.slot_bytes for group in embeddings),
        usual=max((group.usual * group.slot_bytes for group in groups), default=0),
        least=max((group.nbytes for group in groups), default=0),
        most=sum(group.nbytes for group in groups),
        small=max((group.slot_bytes for group in groups), default=0) <= _SMALL_ROW,
        tables=tables + sum(group.n_rows * _PER_PART for group in embeddings),
    )  # fmt: skip


def share_out(sizes: Sizes, n_bytes: int) -> Shares:
    """What stays, what streams and the room of rows, in n_bytes: least_of_all at least.

    Rows have what is left. Where something streams they have little, since every byte that does is read in
    each step: the hottest neurons alone are needed as often, and are dearer to read.
    """
    if n_bytes >= sizes.all:
        return Shares(Streaming((True,) * len(sizes.pieces), 0), sizes.most, 0, sizes.all - sizes.most, True)
    fixed = sizes.fixed + sizes.staging
    hot = int((sizes.most - sizes.least) * _HOT_SHARE) if sizes.small else 0
    least = max(min(sizes.usual + hot, sizes.most), sizes.least)  # for rows, if what streams allows it
    for_pieces = n_bytes - fixed - sizes.least
    if n_bytes - fixed - least < sizes.resident - fixed:
        for_pieces -= min(least - sizes.least, max(for_pieces - least_for(sizes.pieces, 2), 0))
    streaming = arrange(sizes.pieces, min(for_pieces, sizes.resident - fixed))
    stays = list(zip(sizes.pieces, streaming.stays, strict=True))
    resident = fixed + sum(piece.nbytes for piece, stay in stays if stay)
    streamed = sum(piece.nbytes for piece, stay in stays if not stay)
    rows = min(n_bytes - resident - streaming.ring, sizes.most)
    return Shares(streaming, rows, streamed, resident, False)


def _whole(
    graph: Graph, tensors: Mapping[str, TensorInfo], groups: Sequence[RowGroup], helped: Helped | None = None
) -> tuple[list[Piece], list[str]]:
    """Tensors that are read and have no rows in a group: those that may stream, and the others."""
    of_rows = {name for group in groups for name in group.names}
    # A device asks for its layers when it likes: nothing of them comes in the order of the step.
    of_devices = {
        weight.name for op in graph.primitives if op.layer in (helped or {}) for weight in op.weights_read
    }
    pieces = pieces_of(graph, tensors, of_rows | of_devices)
    names = {weight.name for op in graph.primitives for weight in op.weights_read}
    kept = of_rows | {name for piece in pieces for name in piece.names} | tables_of(graph)
    return pieces, sorted(names - kept)


class StoredWeights:
    """A WeightSource that holds `n_bytes` of memory at most, beside tables of n-grams (tables_of).

    weights: the files; they stay the caller's, and open. sparse: as of the backend that computes with it.
    gap: bytes that are read in vain rather than two reads made of one. needed: of layers the share of the
    tokens that needed each of their neurons, or experts, float [n]: the hottest, as many as have room, are
    read at once, and what is evicted is chosen with it. empty:
    nothing is read, nor any memory touched: for who wants to know what a backend takes beside its weights.
    step: tokens that a step has at most, unless all has room. helped: beside devices, whose layers are among
    the graph's only where the CPU helps (placement/build.py has what is the CPU's of a graph).

    Raises OutOfMemoryError where n_bytes is too little, ReadError.
    """

    def __init__(  # noqa: PLR0913
        self,
        weights: Overlay,
        graph: Graph,
        n_bytes: int,
        *,
        sparse: bool,
        reader: _core.Reader,
        gap: int,
        needed: Mapping[int, np.ndarray] | None = None,
        empty: bool = False,
        step: int = STEP,
        helped: Helped | None = None,
    ) -> None:
        self._weights, self.tables = weights, tables_of(graph)
        self.reader = reader
        groups = list(groups_of(graph, weights.tensors, sparse=sparse, helped=helped))
        self.sizes = sizes_of(graph, weights.tensors, sparse=sparse, step=step, helped=helped)
        if n_bytes < self.sizes.least_of_all:
            raise OutOfMemoryError(
                f"{human_size(n_bytes)} are left for weights, and what must be in memory of this model takes "
                f"{human_size(self.sizes.least_of_all)}; raise the memory budget by "
                f"{human_size(self.sizes.least_of_all - n_bytes)}"
            )
        self.shares = share_out(self.sizes, n_bytes)
        self._rows: dict[str, _core.StoredRows] = {}
        self._uncounted = CacheStats()
        self._n_bytes = self._n_reads = 0  # that `read` has read
        self._lock = threading.Lock()
        self._together: dict[str, tuple[str, ...]] = {}  # the tensors of a group, by each of them
        embeddings = embeddings_of(graph, weights.tensors, step)
        self.store = self._open(reader, gap, groups, self.shares.rows)
        if self.store is not None and not empty:
            self.store.touch_ahead()
        # Of its own, since these rows are needed once and have no part in what stays.
        rows = [] if self.shares.whole else embeddings
        self._embeddings = self._open(reader, 0, rows, self.sizes.staging)
        pieces, names = _whole(graph, weights.tensors, [*groups, *embeddings], helped)
        if self.shares.whole:
            names += [name for group in embeddings for name in group.names]
        stays = list(zip(pieces, self.shares.streaming.stays, strict=True))
        names += [name for piece, stay in stays if stay for name in piece.names]
        self.streamed = self._stream([piece.names for piece, stay in stays if not stay])
        self._resident = self._read(names, empty) | self._views()
        if self.store is not None and not empty:
            layers = {weight.name: op.layer for op in graph.primitives for weight in op.weights_read}
            self._preload(
                self.store, [layers[group.names[0]] for group in groups], needed or {}, helped or {}
            )

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Name → type and shape."""
        return self._weights.tensors

    def data(self, name: str) -> np.ndarray:
        """The tensor's bytes, uint8 [nbytes], in memory: of one that streams, where they are while a step
        needs them. Of one whose rows come as they are needed what a native plan takes in their place
        (_core.StoredRows)."""
        if name in self.tables:
            return self._weights.data(name)
        rows = self._rows.get(name)
        return self._resident[name] if rows is None else rows  # type: ignore[return-value]

    def read(self, name: str, rows: np.ndarray | None = None) -> np.ndarray:
        """Bytes of a tensor, read now and kept nowhere, wherever else they are: uint8 [nbytes], or of rows,
        int64 [n], uint8 [n, bytes of a row]. Raises ReadError."""
        info = self.tensors[name]
        path, offset = self._weights.place(name)
        n_rows, row = rows_of(info)
        numbers = np.arange(n_rows) if rows is None else rows
        stride, out = info.stride or row, np.empty((len(numbers), row), np.uint8)
        # Rows that lie side by side are one piece.
        apart = np.flatnonzero(np.diff(numbers) != 1) + 1 if stride == row else np.arange(1, len(numbers))
        pieces = [
            (offset + int(numbers[first]) * stride, out[first:last].reshape(-1))
            for first, last in itertools.pairwise([0, *apart.tolist(), len(numbers)])
            if first < last
        ]
        if pieces:
            self.reader.read(os.fspath(path), pieces)
            with self._lock:  # experts are read by a thread of their own
                self._n_bytes, self._n_reads = self._n_bytes + out.nbytes, self._n_reads + len(pieces)
        return out if rows is not None else out.reshape(-1)

    def peek(self, name: str, row: int, runtime: _core.Runtime | None = None) -> np.ndarray | None:
        """A row of a tensor, uint8 [bytes of a row], if a store has it in memory. runtime: as of `copy`."""
        found = self._rows.get(name)
        if found is None:
            return None
        return found.store.peek(found.group, row, self._together[name].index(name), runtime)

    def copy(
        self, name: str, rows: np.ndarray, runtime: _core.Runtime | None = None
    ) -> dict[str, np.ndarray]:
        """Rows of a tensor that come from a store, and those of its group, by name, uint8 [n, bytes of a
        row]: read where they are not in memory, and empty where the tensor's do not come from a store. rows:
        int64, rising, no more than a step may need at once. runtime: whose plans compute with these weights,
        and are waited for; None: none does. Raises ReadError."""
        found = self._rows.get(name)
        if found is None:
            return {}
        copies = found.store.copy(found.group, rows.astype(np.int32), runtime)
        together = zip(self._together[name], copies, strict=True)
        return {each: of_part.reshape(len(rows), -1) for each, of_part in together}

    def check(self) -> None:
        """Raises ReadError where a file has been changed."""
        for store in filter(None, (self.store, self._embeddings)):
            store.check()
        if self.streamed is not None:
            self.streamed.stream.check()
        if self.tables:
            self._weights.check()

    @property
    def resident(self) -> np.ndarray:
        """All that always stays, uint8."""
        return self._block

    def counts(self) -> CacheStats:
        """What the store and the stream did since they are counted."""
        return self._all_counts() - self._uncounted

    def start_counting(self) -> None:
        """What was done until now does not count: steps that warm a device up."""
        self._uncounted = self._all_counts()

    def _all_counts(self) -> CacheStats:
        counts = CacheStats(*(() if self.store is None else self.store.counts()))
        counts += CacheStats(bytes_read=self._n_bytes, n_reads=self._n_reads)
        if self._embeddings is not None:  # no hit is to be had there, and none is missed
            counts += CacheStats(0, 0, *self._embeddings.counts()[2:])
        if self.streamed is not None:
            n_bytes, n_reads, seconds = self.streamed.stream.counts()
            counts += CacheStats(seconds_waited=seconds, bytes_streamed=n_bytes, stream_reads=n_reads)
        return counts

    def _open(
        self, reader: _core.Reader, gap: int, groups: Sequence[RowGroup], n_bytes: int
    ) -> _core.RowStore | None:
        """A store of groups, whose rows are then the data of their tensors; None of none."""
        if not groups:
            return None
        store = _core.RowStore(reader, gap, HALF_LIFE)
        places: dict[str, tuple[int, int]] = {}
        for group in groups:
            parts = []
            for name in group.names:
                path, offset = self._weights.place(name)
                _, row = rows_of(self.tensors[name])
                parts.append((os.fspath(path), offset, row, self.tensors[name].stride or row))
            number = store.group(group.n_rows, parts, group.usual, group.at_once, group.n_asked)
            places |= {name: (number, part) for part, name in enumerate(group.names)}
            self._together |= dict.fromkeys(group.names, group.names)
        store.allocate(n_bytes)
        self._rows |= {name: store.rows(*place) for name, place in places.items()}
        return store

    def _preload(
        self, store: _core.RowStore, layers: list[int], needed: Mapping[int, np.ndarray], helped: Helped
    ) -> None:
        """What is known to be hot, or all where all has room. layers: of each group."""
        for number, layer in enumerate(layers):
            n_slots, cold = store.n_slots(number), helped.get(layer)
            if store.is_whole:
                rows = np.arange(n_slots) if cold is None else np.flatnonzero(cold)
            elif layer in needed:
                store.expect(number, needed[layer].astype(np.float32))
                hottest = np.argsort(-needed[layer], kind="stable")  # of equal ones the lower number
                rows = hottest if cold is None else hottest[cold[hottest]]
                rows = np.sort(rows[:n_slots])
            else:
                continue
            store.preload(number, rows.astype(np.int32))

    def _stream(self, pieces: list[tuple[str, ...]]) -> Streamed | None:
        if not pieces:
            return None
        stream = _core.Stream(self.reader)
        places: dict[str, tuple[int, int]] = {}
        for names in pieces:
            parts = [(self._weights.place(name), self.tensors[name].nbytes) for name in names]
            number = stream.piece([(os.fspath(path), offset, n) for (path, offset), n in parts])
            places |= {name: (number, part) for part, name in enumerate(names)}
        stream.allocate(self.shares.streaming.ring)
        return Streamed(stream, places)

    def _views(self) -> dict[str, np.ndarray]:
        """Of what streams."""
        if self.streamed is None:
            return {}
        return {name: self.streamed.stream.data(*place) for name, place in self.streamed.places.items()}

    def _read(self, names: list[str], empty: bool) -> dict[str, np.ndarray]:
        n_bytes = sum(padded(self.tensors[name].nbytes) for name in names)
        self._block = block = np.zeros(n_bytes + padded(1), np.uint8)  # which touches nothing
        at = -block.ctypes.data % padded(1)
        arrays: dict[str, np.ndarray] = {}
        of_file: dict[Path, list[tuple[int, np.ndarray]]] = {}
        for name in names:
            path, offset = self._weights.place(name)
            n = self.tensors[name].nbytes
            arrays[name] = block[at : at + n]
            if not empty:
                of_file.setdefault(path, []).append((offset, arrays[name]))
            at += padded(n)
        for path, pieces in of_file.items():
            self.reader.read(os.fspath(path), pieces)
        return arrays


def rows_of(info: TensorInfo) -> tuple[int, int]:
    """Rows of a matrix, or the matrices of experts, and bytes of one."""
    n_rows = info.shape[-1]
    return n_rows, info.nbytes // n_rows
