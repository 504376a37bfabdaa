"""Weights under a memory budget: weights that every token needs are read once, rows of neurons on demand.

Files are read, not mapped. So a file that is cut short raises ReadError, and the budget limits the memory.
Skippable rows of FFNs, and experts, come from a store (csrc/store/store.h), in one group of rows for
everything that becomes known at one time:

    predicted    gate, up and down of the neurons that the predictor selects
    exact        all of the gate; then up and down of the neurons that fire
    dense        all of the three matrices
    experts      the matrices of the experts that the router selects

Embeddings are read only in the rows of a step's tokens, unless all weights fit. Other weights stay in
memory or, as far as they do not fit, are streamed (offload/streaming.py). Results are bitwise identical under
any budget.

With devices, this applies to the CPU's part: its own layers, and the devices' cold neurons or experts. A
device's weights are not in host memory; they are read when they are uploaded (uploads.py).
"""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
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

HALF_LIFE = 64  # requests of a layer after which a use counts half (decision 013)
_SMALL_ROW = 64 << 10  # bytes of a neuron; such rows are read many at a time, because single reads are slow
_HOT_SHARE = 1 / 8  # of all neurons: keeping these in memory saves more than streaming costs (decision 012)
_PER_ROW, _PER_PART = 56, 8  # bytes of tables: of Replacement, and an address
# Neurons of a layer without a slot for which room is reserved, for one token. Larger steps (prompts, barely
# sparse models) borrow slots, whose rows must then be read again.
USUAL_SHARE, USUAL_LEAST = 1 / 8, 1024
# The largest step under a tight budget: buffers for larger ones, which only long prompts use, would take
# memory.
STEP = 128


@dataclass(frozen=True)
class RowGroup:
    """Tensors whose rows are fetched together.

    n_rows: of each tensor. at_once: how many rows a step needs at most. usual: how many rows without a slot
    single tokens need, approximately. slot_bytes: of one row of each, in memory. n_asked: rows that are ever
    needed, if a device has the others.
    """

    names: tuple[str, ...]
    n_rows: int
    slot_bytes: int
    usual: int
    at_once: int
    n_asked: int

    @property
    def nbytes(self) -> int:
        """Return the bytes of all rows that are ever needed."""
        return self.n_asked * self.slot_bytes


Helped = Mapping[int, "np.ndarray | None"]
"""Layers of a device in whose FFN the CPU helps → the neurons that the device lacks, bool [n_ff].

The value is None for experts, of which the device may lack any.
"""


@dataclass(frozen=True, kw_only=True)
class Use:
    """How a backend uses the weights of a store.

    sparse: as of the backend. step: the most tokens of a step, unless all weights have room. helped: layers
    of devices that the CPU helps; they are in the graph only for that (placement/build.py: host_part).
    """

    sparse: bool
    step: int = STEP
    helped: Helped = field(default_factory=dict)


def groups_of(
    graph: Graph, tensors: Mapping[str, TensorInfo], *, sparse: bool, helped: Helped | None = None
) -> Iterator[RowGroup]:
    """Yield the groups of rows that a store keeps, by layer."""
    helped = helped or {}
    for op in graph.ops:
        if isinstance(op, Ffn) and op.route is not None:
            if len(op.up.weights if isinstance(op.up, ExpertLinear) else ()) == 1:  # of all, not of each
                names = list(dict.fromkeys(name for each in _experts(op) for name in each.weights))
                yield _row_group(names, tensors, op.route.n_used)
        elif isinstance(op, Ffn) and op.fires_exactly:  # neurons skipped by thresholds have no rows here
            together: list[list[str]] = [[]] if not sparse or op.mask is not None else [[], []]
            for matrix in (op.gate, op.up, op.down):
                by_output = matrix is op.down and not op.neuron_major  # it may be square
                if not by_output and _has_row_per_neuron(matrix, op.n_ff, tensors):
                    assert isinstance(matrix, Linear | TransposedLinear)
                    decides = matrix is op.decides
                    together[0 if decides else -1].append(matrix.weight)
            cold = helped.get(op.layer)
            n_asked = op.n_ff if cold is None else int(cold.sum())
            some = max(int(op.n_ff * USUAL_SHARE), USUAL_LEAST)
            for names in filter(None, together):
                is_whole = not sparse or (op.mask is None and op.decides.weight in names)
                yield _row_group(names, tensors, None if is_whole else some, n_asked=n_asked)


def embeddings_of(graph: Graph, tensors: Mapping[str, TensorInfo], step: int = STEP) -> list[RowGroup]:
    """Return embeddings of which a step (of at most `step` tokens) needs only the rows of its tokens."""
    rows = {op.weight for op in graph.primitives if isinstance(op, Embed) and op.of == "token"}
    others = [op for op in graph.primitives if not (isinstance(op, Embed) and op.of == "token")]
    rows -= {weight.name for op in others for weight in op.weights_read}
    return [_row_group([name], tensors, step, step) for name in sorted(rows)]


def tables_of(graph: Graph) -> set[str]:
    """Return the tables of n-grams.

    They are far larger than all other weights, and a token reads a few rows of them. So they stay in the
    file, in the system's page cache.
    """
    return {op.weight for op in graph.ops if isinstance(op, NgramEmbed)}


def _row_group(
    names: Sequence[str],
    tensors: Mapping[str, TensorInfo],
    usual: int | None = None,
    at_once: int | None = None,
    n_asked: int | None = None,
) -> RowGroup:
    """Return the group of some tensors. usual, at_once, n_asked: None: all rows."""
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
    """Bytes of weights.

    fixed: weights that always stay. pieces: weights that stay or are streamed. looked_up: embeddings, which
    stay if everything fits; otherwise `staging` is for their rows. usual: the part of the row store for rows
    that do not stay; least: the smallest row store; most: the largest useful one; small: whether rows are
    small. tables: of the row store's indexes.
    """

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
        """Return the smallest number of bytes that works."""
        return min(self.fixed + least_for(self.pieces) + self.staging + self.least, self.all)

    @property
    def resident(self) -> int:
        """Return the bytes that stay if nothing is streamed, without the row store."""
        return self.fixed + self.staging + sum(piece.nbytes for piece in self.pieces)

    @property
    def all(self) -> int:
        """Return the bytes with everything in memory."""
        return self.resident - self.staging + self.looked_up + self.most


@dataclass(frozen=True)
class Shares:
    """The division of a memory budget.

    rows: bytes of the row store; streamed: bytes that each step reads; resident: bytes that stay, with a
    step's rows of an embedding; whole: everything fits.
    """

    streaming: Streaming
    rows: int
    streamed: int
    resident: int
    whole: bool


def sizes_of(
    graph: Graph,
    tensors: Mapping[str, TensorInfo],
    use: Use,
) -> Sizes:
    """Return the sizes of StoredWeights."""
    groups = list(groups_of(graph, tensors, sparse=use.sparse, helped=use.helped))
    embeddings = embeddings_of(graph, tensors, use.step)
    pieces, fixed = _whole(graph, tensors, [*groups, *embeddings], use.helped)
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
    """Divide n_bytes (at least least_of_all) among resident weights, streams and the row store.

    The row store gets the rest. If weights are streamed, it is small, because every streamed byte is read in
    each step: only the hottest neurons are needed as often, and their reads cost more.
    """
    if n_bytes >= sizes.all:
        return Shares(Streaming((True,) * len(sizes.pieces), 0), sizes.most, 0, sizes.all - sizes.most, True)
    fixed = sizes.fixed + sizes.staging
    hot = int((sizes.most - sizes.least) * _HOT_SHARE) if sizes.small else 0
    least = max(min(sizes.usual + hot, sizes.most), sizes.least)  # for rows, if streams leave as much
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
    """Return the tensors that are not in a group: those that may be streamed, and the others."""
    of_rows = {name for group in groups for name in group.names}
    # Devices request their layers at any time, not in the order of the step.
    of_devices = {
        weight.name for op in graph.primitives if op.layer in (helped or {}) for weight in op.weights_read
    }
    pieces = pieces_of(graph, tensors, of_rows | of_devices)
    names = {weight.name for op in graph.primitives for weight in op.weights_read}
    kept = of_rows | {name for piece in pieces for name in piece.names} | tables_of(graph)
    return pieces, sorted(names - kept)


class StoredWeights:
    """A WeightSource that uses at most `n_bytes` of memory, in addition to tables of n-grams (tables_of).

    weights: the files; they remain the caller's, and must stay open. gap: two reads are combined if at most
    this many bytes between them are read unnecessarily. needed: layer → the share of tokens that needed each
    neuron or expert, float [n]: the hottest ones that fit are read at once, and evictions consider it. empty:
    read nothing and touch no memory, to find out how much memory a backend needs in addition to weights.

    Raises OutOfMemoryError if n_bytes is too small, and ReadError.
    """

    def __init__(
        self,
        weights: Overlay,
        graph: Graph,
        n_bytes: int,
        use: Use,
        *,
        reader: _core.Reader,
        gap: int,
        needed: Mapping[int, np.ndarray] | None = None,
        empty: bool = False,
    ) -> None:
        self._weights, self.tables = weights, tables_of(graph)
        self.reader = reader
        groups = list(groups_of(graph, weights.tensors, sparse=use.sparse, helped=use.helped))
        self.sizes = sizes_of(graph, weights.tensors, use)
        if n_bytes < self.sizes.least_of_all:
            raise OutOfMemoryError(
                f"{human_size(n_bytes)} are left for weights, but this model needs at least "
                f"{human_size(self.sizes.least_of_all)}; raise the memory budget by "
                f"{human_size(self.sizes.least_of_all - n_bytes)}"
            )
        self.shares = share_out(self.sizes, n_bytes)
        self._rows: dict[str, _core.StoredRows] = {}
        self._uncounted = CacheStats()
        self._n_bytes = self._n_reads = 0  # of `read`
        self._lock = threading.Lock()
        self._together: dict[str, tuple[str, ...]] = {}  # tensor → the tensors of its group
        embeddings = embeddings_of(graph, weights.tensors, use.step)
        self.store = self._open(reader, gap, groups, self.shares.rows)
        if self.store is not None and not empty:
            self.store.touch_ahead()
        # In a separate store, because these rows are needed only once.
        rows = [] if self.shares.whole else embeddings
        self._embeddings = self._open(reader, 0, rows, self.sizes.staging)
        pieces, names = _whole(graph, weights.tensors, [*groups, *embeddings], use.helped)
        if self.shares.whole:
            names += [name for group in embeddings for name in group.names]
        stays = list(zip(pieces, self.shares.streaming.stays, strict=True))
        names += [name for piece, stay in stays if stay for name in piece.names]
        self.streamed = self._stream([piece.names for piece, stay in stays if not stay])
        self._resident = self._read(names, empty) | self._views()
        if self.store is not None and not empty:
            layers = {weight.name: op.layer for op in graph.primitives for weight in op.weights_read}
            self._preload(self.store, [layers[group.names[0]] for group in groups], needed or {}, use.helped)

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Return name → type and shape."""
        return self._weights.tensors

    def data(self, name: str) -> np.ndarray:
        """Return a tensor's bytes in memory, uint8 [nbytes].

        For a streamed tensor they are valid while a step needs them. For a tensor with rows in a store,
        returns the _core.StoredRows that a native plan uses instead.
        """
        if name in self.tables:
            return self._weights.data(name)
        rows = self._rows.get(name)
        return self._resident[name] if rows is None else rows  # type: ignore[return-value]

    def read(self, name: str, rows: np.ndarray | None = None) -> np.ndarray:
        """Read a tensor, uint8 [nbytes], or its rows, int64 [n], as uint8 [n, bytes of a row], from its file.

        Nothing is cached. Raises ReadError.
        """
        info = self.tensors[name]
        path, offset = self._weights.place(name)
        n_rows, row = rows_of(info)
        numbers = np.arange(n_rows) if rows is None else rows
        stride, out = info.stride or row, np.empty((len(numbers), row), np.uint8)
        # Adjacent rows are read as one piece.
        apart = np.flatnonzero(np.diff(numbers) != 1) + 1 if stride == row else np.arange(1, len(numbers))
        pieces = [
            (offset + int(numbers[first]) * stride, out[first:last].reshape(-1))
            for first, last in itertools.pairwise([0, *apart.tolist(), len(numbers)])
            if first < last
        ]
        if pieces:
            self.reader.read(os.fspath(path), pieces)
            with self._lock:  # experts are read in a separate thread
                self._n_bytes, self._n_reads = self._n_bytes + out.nbytes, self._n_reads + len(pieces)
        return out if rows is not None else out.reshape(-1)

    def peek(self, name: str, row: int, runtime: _core.Runtime | None = None) -> np.ndarray | None:
        """Return a row, uint8 [bytes of a row], if a store has it in memory. runtime: as in `copy`."""
        found = self._rows.get(name)
        if found is None:
            return None
        return found.store.peek(found.group, row, self._together[name].index(name), runtime)

    def copy(
        self, name: str, rows: np.ndarray, runtime: _core.Runtime | None = None
    ) -> dict[str, np.ndarray]:
        """Return rows of a tensor and of its group's others, by name, uint8 [n, bytes of a row].

        Rows that are not in memory are read. Returns {} if the tensor's rows do not come from a store. rows:
        int64, ascending, no more than a step may need at once. runtime: of the plans that compute with these
        weights, which are waited for; None: no plans. Raises ReadError.
        """
        found = self._rows.get(name)
        if found is None:
            return {}
        copies = found.store.copy(found.group, rows.astype(np.int32), runtime)
        together = zip(self._together[name], copies, strict=True)
        return {each: of_part.reshape(len(rows), -1) for each, of_part in together}

    def check(self) -> None:
        """Raise ReadError if a file has been changed."""
        for store in filter(None, (self.store, self._embeddings)):
            store.check()
        if self.streamed is not None:
            self.streamed.stream.check()
        if self.tables:
            self._weights.check()

    @property
    def resident(self) -> np.ndarray:
        """Return all weights that always stay, uint8."""
        return self._block

    def counts(self) -> CacheStats:
        """Return the counts of the store and the stream since `start_counting`."""
        return self._all_counts() - self._uncounted

    def start_counting(self) -> None:
        """Exclude everything so far from the counts: steps that warm up a device."""
        self._uncounted = self._all_counts()

    def _all_counts(self) -> CacheStats:
        counts = CacheStats(*(() if self.store is None else self.store.counts()))
        counts += CacheStats(bytes_read=self._n_bytes, n_reads=self._n_reads)
        if self._embeddings is not None:  # embeddings have neither hits nor misses
            counts += CacheStats(0, 0, *self._embeddings.counts()[2:])
        if self.streamed is not None:
            n_bytes, n_reads, seconds = self.streamed.stream.counts()
            counts += CacheStats(seconds_waited=seconds, bytes_streamed=n_bytes, stream_reads=n_reads)
        return counts

    def _open(
        self, reader: _core.Reader, gap: int, groups: Sequence[RowGroup], n_bytes: int
    ) -> _core.RowStore | None:
        """Return a store of groups, which provides the data of their tensors; None without groups."""
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
        """Read rows that are known to be hot, or all if everything fits. layers: of each group."""
        for number, layer in enumerate(layers):
            n_slots, cold = store.n_slots(number), helped.get(layer)
            if store.is_whole:
                rows = np.arange(n_slots) if cold is None else np.flatnonzero(cold)
            elif layer in needed:
                store.expect(number, needed[layer].astype(np.float32))
                hottest = np.argsort(
                    -needed[layer], kind="stable"
                )  # among equal ones, the lower number first
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
        """Return the data of streamed tensors."""
        if self.streamed is None:
            return {}
        return {name: self.streamed.stream.data(*place) for name, place in self.streamed.places.items()}

    def _read(self, names: list[str], empty: bool) -> dict[str, np.ndarray]:
        n_bytes = sum(padded(self.tensors[name].nbytes) for name in names)
        self._block = block = np.zeros(n_bytes + padded(1), np.uint8)  # does not touch memory
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
    """Return the number of a matrix's rows, or of experts' matrices, and the bytes of one."""
    n_rows = info.shape[-1]
    return n_rows, info.nbytes // n_rows
