"""Traces: which experts or neurons each token of a text needed, layer by layer.

    trace = record(...)  # sparsity/recorder.py
    trace.save(trace_path(gguf.path))
    open_trace(path)

A trace suffices to simulate any cache over the text (report/replay.py). The file is GGUF
(`<model>.trace.hotset.gguf`), with keys that start with `hotset.trace.`: `model` (fingerprint), `name` (of
the model file), `data` (hash of the text's tokens), `starts` (the first token of each sequence), `stored`
(a store's contents under a budget: the first five numbers of each StoredGroup), `usual`
(the sixth numbers; a file without them has room for all rows).

    experts   `n_experts`, `expert_bytes` (of one, by layer), and for each layer with experts an I16 tensor
              `blk.N.routes` [n_used, n_tokens], each token's experts, best first
    neurons   `n_neurons`, `neuron_bytes` (bytes that a token reads of a needed neuron; both by layer),
              `sparsity` (the mode that selected neurons), and for each layer with skippable neurons an I8
              tensor `blk.N.neurons` [ceil(n / 8), n_tokens]: bit i % 8 of byte i / 8 is neuron i
"""

from __future__ import annotations

import abc
import functools
import itertools
import os
import re
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np

from hotset.errors import FormatError
from hotset.formats.gguf import GGUFWriter, ValueType, open_gguf
from hotset.formats.quants import GGMLType
from hotset.model.keys import MAX_EXPERTS
from hotset.sparsity import sidecar

if TYPE_CHECKING:
    from hotset.formats.gguf import GGUFFile

_PREFIX = "hotset.trace."
_MAX_BYTES = 1 << 44  # of an expert, so that sums over experts and tokens stay below 2^63
_MAX_NEURONS = 1 << 24  # of the largest layer times the layers: a table of this size simulates caches
MOST_BITS = 1 << 33  # of a trace of neurons, in a file and in memory: 1 GiB

EVERY, OTHER = -1, -2  # instead of a layer: rows that every token needs, and rows outside the trace


@dataclass(frozen=True)
class StoredGroup:
    """Rows that a store keeps together (csrc/store/store.h), of experts or neurons.

    layer: index into the trace's layers, or EVERY, OTHER. n_rows: number of rows. slot_bytes: of one row in
    memory; read_bytes: bytes read from the file for a single row, in whole pages; all_bytes: for all rows.
    usual: rows for which there is room without a slot.
    """

    layer: int
    n_rows: int
    slot_bytes: int
    read_bytes: int
    all_bytes: int
    usual: int


@dataclass(frozen=True, kw_only=True)
class Trace(abc.ABC):
    """The entries (experts or neurons) of each layer that each token of a text needed.

    layers: ascending numbers of the layers that have entries. starts: the first token of each sequence,
    ascending from 0. model: fingerprint of the file; name: its name. data: hash of the tokens. stored: the
    rows that a store of the model would keep; empty if the file does not say.
    """

    what: ClassVar[Literal["experts", "neurons"]]
    layers: tuple[int, ...]
    starts: tuple[int, ...]
    model: str
    name: str
    data: str
    stored: tuple[StoredGroup, ...] = ()

    @property
    @abc.abstractmethod
    def n_tokens(self) -> int: ...

    @property
    @abc.abstractmethod
    def sizes(self) -> tuple[int, ...]:
        """Return the number of entries of each layer."""

    @property
    @abc.abstractmethod
    def entry_bytes(self) -> tuple[int, ...]:
        """Return the bytes of one entry of each layer."""

    @abc.abstractmethod
    def chosen(self, layer: int) -> np.ndarray:
        """Return whether each token needed each entry of layers[layer]: bool [n_tokens, entries]."""

    @abc.abstractmethod
    def requests(self, first: int, last: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the entries that the tokens [first, last) need.

        They are int32, by token and then by layer, followed by their numbers, int32 [last - first, n_layers].
        Neurons are in ascending order, experts best first.
        """

    @functools.cached_property
    def counts(self) -> list[np.ndarray]:
        """Return how many tokens needed each entry, by layer: int64 [entries]."""
        return [self.chosen(i).sum(axis=0, dtype=np.int64) for i in range(len(self.layers))]

    @property
    def cycle(self) -> float:
        """Return the mean number of entries that one token needs in all layers."""
        return sum(int(counts.sum()) for counts in self.counts) / self.n_tokens

    @property
    def token_cycle(self) -> int:
        """Return the mean bytes of the entries that one token needs in all layers."""
        each = zip(self.counts, self.entry_bytes, strict=True)
        return round(sum(int(counts.sum()) * size for counts, size in each) / self.n_tokens)

    @property
    def groups(self) -> tuple[StoredGroup, ...]:
        """Return `stored`; if the file does not say, one group per layer with its entries."""
        if self.stored:
            return self.stored
        rows = zip(self.sizes, self.entry_bytes, strict=True)
        return tuple(StoredGroup(i, n, size, size, n * size, n) for i, (n, size) in enumerate(rows))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the file, whole or not at all. Raises HotsetError if it cannot be written."""
        writer = GGUFWriter(path, "hotset")
        for key, text in (("model", self.model), ("name", self.name), ("data", self.data)):
            writer.add(_PREFIX + key, text)
        writer.add(_PREFIX + "starts", np.array(self.starts, np.int64))
        if self.stored:
            numbers = np.array([astuple(group) for group in self.stored], np.int64)
            writer.add(_PREFIX + "stored", numbers[:, :5].reshape(-1))
            writer.add(_PREFIX + "usual", numbers[:, 5])
        self._add(writer)
        writer.write()

    @abc.abstractmethod
    def _add(self, writer: GGUFWriter) -> None:
        """Add the keys and tensors of this kind."""


@dataclass(frozen=True, kw_only=True)
class RouteTrace(Trace):
    """A trace of experts. routes: int32 [n_tokens, n_layers, n_used], the experts of each token, best first.

    n_experts: in each layer. expert_bytes: of one expert, per layer.
    """

    what = "experts"
    routes: np.ndarray
    n_experts: int
    expert_bytes: tuple[int, ...]

    @property
    def n_tokens(self) -> int:
        return len(self.routes)

    @property
    def n_used(self) -> int:
        """Return the experts of a token in a layer."""
        return int(self.routes.shape[2])

    @property
    def sizes(self) -> tuple[int, ...]:
        return (self.n_experts,) * len(self.layers)

    @property
    def entry_bytes(self) -> tuple[int, ...]:
        return self.expert_bytes

    def chosen(self, layer: int) -> np.ndarray:
        chosen = np.zeros((self.n_tokens, self.n_experts), bool)
        np.put_along_axis(chosen, self.routes[:, layer].astype(np.int64), True, axis=1)
        return chosen

    def requests(self, first: int, last: int) -> tuple[np.ndarray, np.ndarray]:
        part = self.routes[first:last]
        return part.reshape(-1), np.full(part.shape[:2], self.n_used, np.int32)

    def _add(self, writer: GGUFWriter) -> None:
        writer.add(_PREFIX + "n_experts", self.n_experts, ValueType.UINT32)
        writer.add(_PREFIX + "expert_bytes", np.array(self.expert_bytes, np.int64))
        for i, layer in enumerate(self.layers):
            routes = np.ascontiguousarray(self.routes[:, i], "<i2")
            writer.add_tensor(
                f"blk.{layer}.routes", routes.view(np.uint8), GGMLType.I16, (self.n_used, self.n_tokens)
            )

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> RouteTrace:
        """Read a trace of experts. Raises ModelNotFoundError or FormatError."""
        found = open_trace(path)
        if not isinstance(found, cls):
            raise FormatError(f"{path} is a trace of neurons, but a trace of experts is needed.")
        return found


@dataclass(frozen=True, kw_only=True)
class NeuronTrace(Trace):
    """A trace of neurons. bits: per layer uint8 [n_tokens, ceil(neurons / 8)], a bit per needed neuron.

    n_neurons: per layer. neuron_bytes: per layer, the bytes that a token reads only of needed neurons.
    sparsity: the mode: in `exact` the firing neurons are needed, in `predicted` the ones that the predictor
    selects.
    """

    what = "neurons"
    bits: tuple[np.ndarray, ...]
    n_neurons: tuple[int, ...]
    neuron_bytes: tuple[int, ...]
    sparsity: str

    @property
    def n_tokens(self) -> int:
        return len(self.bits[0])

    @property
    def sizes(self) -> tuple[int, ...]:
        return self.n_neurons

    @property
    def entry_bytes(self) -> tuple[int, ...]:
        return self.neuron_bytes

    def chosen(self, layer: int) -> np.ndarray:
        return self._unpacked(layer, 0, self.n_tokens)

    def _unpacked(self, layer: int, first: int, last: int) -> np.ndarray:
        n = self.n_neurons[layer]
        return np.unpackbits(self.bits[layer][first:last], axis=1, count=n, bitorder="little").view(bool)

    def requests(self, first: int, last: int) -> tuple[np.ndarray, np.ndarray]:
        parts = [self._unpacked(i, first, last) for i in range(len(self.layers))]
        counts = np.stack([part.sum(axis=1, dtype=np.int32) for part in parts], axis=1)
        ids = np.empty(counts.sum(), np.int32)
        at = np.zeros(counts.size + 1, np.int64)
        np.cumsum(counts.ravel(), out=at[1:])
        for i, part in enumerate(parts):
            tokens, neurons = np.nonzero(part)
            own = np.concatenate([[0], np.cumsum(counts[:, i])])
            ids[at[tokens * len(parts) + i] + np.arange(len(tokens)) - own[tokens]] = neurons
        return ids, counts

    def _add(self, writer: GGUFWriter) -> None:
        writer.add(_PREFIX + "n_neurons", np.array(self.n_neurons, np.int64))
        writer.add(_PREFIX + "neuron_bytes", np.array(self.neuron_bytes, np.int64))
        writer.add(_PREFIX + "sparsity", self.sparsity)
        for layer, bits in zip(self.layers, self.bits, strict=True):
            writer.add_tensor(f"blk.{layer}.neurons", bits, GGMLType.I8, bits.shape[::-1])


# ---- reading


def open_trace(path: str | os.PathLike[str]) -> RouteTrace | NeuronTrace:
    """Read a trace of either kind. Raises ModelNotFoundError or FormatError."""
    with open_gguf(path) as file:
        found = _read(file)
    if found is None:
        raise FormatError(
            f"{path} is not a trace of experts or neurons; make one with 'hotset sparse trace'."
        )
    return found


def _read(file: GGUFFile) -> RouteTrace | NeuronTrace | None:
    """Return the file's trace; None if the file is not a trace or contradicts itself."""
    texts = [file.metadata.get(_PREFIX + key) for key in ("model", "name", "data")]
    names = [re.fullmatch(r"blk\.(\d{1,6})\.(routes|neurons)", name) for name in file.tensors]
    layers = [int(name[1]) for name in names if name]
    starts = _numbers(file, "starts")
    if (
        not all(isinstance(text, str) for text in texts)
        or not layers
        or not all(names)
        or any(a >= b for a, b in itertools.pairwise(layers))
        or len({name[2] for name in names if name}) != 1
        or any(len(info.shape) != 2 for info in file.tensors.values())
        or len(lengths := {info.shape[1] for info in file.tensors.values()}) != 1
        or (n_tokens := lengths.pop()) < 1
        or not starts
        or starts[0] != 0
        or any(a >= b for a, b in zip(starts, [*starts[1:], n_tokens], strict=True))
    ):
        return None
    model, name, data = texts
    facts = {"layers": tuple(layers), "starts": tuple(starts), "model": model, "name": name, "data": data}
    return (_read_routes if names[0] and names[0][2] == "routes" else _read_neurons)(file, facts)


def _read_routes(file: GGUFFile, facts: dict[str, Any]) -> RouteTrace | None:
    n_experts, sizes = file.metadata.get(_PREFIX + "n_experts"), _numbers(file, "expert_bytes")
    shapes = {info.shape for info in file.tensors.values()}
    if (
        type(n_experts) is not int
        or not 1 <= n_experts <= MAX_EXPERTS
        or any(info.type != GGMLType.I16 for info in file.tensors.values())
        or len(shapes) != 1
        or not 1 <= (shape := next(iter(shapes)))[0] <= n_experts
        or len(sizes) != len(file.tensors)
        or not all(0 < size < _MAX_BYTES for size in sizes)
        or (stored := _stored(file, [n_experts] * len(sizes))) is None
    ):
        return None
    parts = [file.data(name).view("<i2").reshape(shape[1], shape[0]) for name in file.tensors]
    routes = np.stack(parts, axis=1).astype(np.int32)
    if routes.min() < 0 or routes.max() >= n_experts or (np.diff(np.sort(routes)) == 0).any():
        return None
    return RouteTrace(routes=routes, n_experts=n_experts, expert_bytes=tuple(sizes), stored=stored, **facts)


def _read_neurons(file: GGUFFile, facts: dict[str, Any]) -> NeuronTrace | None:
    n_neurons, sizes = _numbers(file, "n_neurons"), _numbers(file, "neuron_bytes")
    sparsity = file.metadata.get(_PREFIX + "sparsity")
    infos = list(file.tensors.values())
    if (
        not isinstance(sparsity, str)
        or sparsity not in ("exact", "predicted")
        or len(n_neurons) != len(infos)
        or len(sizes) != len(infos)
        or not all(0 < n * len(infos) < _MAX_NEURONS for n in n_neurons)
        or not all(0 < size < _MAX_BYTES for size in sizes)
        or any(info.type != GGMLType.I8 for info in infos)
        or any(info.shape[0] != -(-n // 8) for info, n in zip(infos, n_neurons, strict=True))
        or 8 * sum(info.nbytes for info in infos) > MOST_BITS
        or (stored := _stored(file, n_neurons)) is None
    ):
        return None
    bits = tuple(file.data(info.name).reshape(info.shape[::-1]).view(np.uint8).copy() for info in infos)
    for n, own in zip(n_neurons, bits, strict=True):
        if n % 8 and (own[:, -1] >> n % 8).any():
            return None
    return NeuronTrace(
        bits=bits, n_neurons=tuple(n_neurons), neuron_bytes=tuple(sizes), sparsity=sparsity, stored=stored,
        **facts,
    )  # fmt: skip


def _stored(file: GGUFFile, n_rows: Sequence[int]) -> tuple[StoredGroup, ...] | None:
    """Return the file's groups of a store, or empty if it has none; None if they are invalid."""
    numbers = _numbers(file, "stored")
    if _PREFIX + "stored" not in file.metadata:
        return ()
    if not numbers or len(numbers) % 5 or len(numbers) > 5 * 4 * len(n_rows) + 5 * (1 << 16):
        return None
    usual = _numbers(file, "usual") or numbers[1::5]
    if len(usual) != len(numbers) // 5:
        return None
    groups = [StoredGroup(*of) for of in zip(*(numbers[i::5] for i in range(5)), usual, strict=True)]
    own = {group.layer: group.n_rows for group in groups if group.layer >= 0}
    sound = all(
        OTHER <= group.layer < len(n_rows)
        and 0 < group.usual <= group.n_rows < _MAX_NEURONS
        and all(0 < n < _MAX_BYTES for n in (group.slot_bytes, group.read_bytes, group.all_bytes))
        for group in groups
    )
    each = sum(group.layer >= 0 for group in groups)
    return tuple(groups) if sound and own == dict(enumerate(n_rows)) and each == len(own) else None


def _numbers(file: GGUFFile, key: str) -> list[int]:
    """Return an array of integers; empty if the key holds something else."""
    value = file.metadata.get(_PREFIX + key)
    if not isinstance(value, np.ndarray) or value.ndim != 1 or value.dtype.kind not in "iu":
        return []
    return [int(one) for one in value]


def trace_path(model: Path) -> Path:
    """Return the path of a model's trace, next to the model."""
    return model.with_name(f"{sidecar.stem_of(model)}.trace{sidecar.SUFFIX}")
