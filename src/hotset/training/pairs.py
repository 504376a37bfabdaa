"""Training data of predictors: pairs of a predictor's input and the neurons that then fired, on disk.

    pairs = collect(folder, steps, sources, training, held_out, max_bytes=2 << 30, settings={...})
    batch = pairs.layer(3, "train").batch(rows)

A predictor's input p is divided by its root mean square. Every norm between it and the neurons does the same,
so the scale does not change which neurons fire, and F16 can hold p for any size of the residual stream.
Magnitudes are stored with the active set, because a neuron that barely fires matters little.

The pairs are in shards: GGUF files, each with some sequences of all layers, which appear when they are
complete:

    train-00000.gguf, held_out-00000.gguf, ... blk.N.inputs      F16 [n_embd, n_tokens]          p divided by
                                                        its root mean square blk.N.active      I8  [ceil(n_ff
                                                        / 8), n_tokens]  bit i % 8 of byte i // 8: neuron i
                                                        fired blk.N.magnitudes  I8  [n_active + 1]
                                                        uint8 per firing neuron, in order: the largest of a
                                                        token is 255, the least 1; one more at the end

So training maps only the data of one layer, and a killed collection continues after its last shard.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np

from hotset.errors import HotsetError, InvalidRequestError
from hotset.files import write_whole
from hotset.formats.gguf import GGUFFile, GGUFWriter, open_gguf
from hotset.formats.quants import GGMLType

if TYPE_CHECKING:
    from hotset.reporter import Reporter
    from hotset.sparsity.taps import TapSteps

Part = Literal["train", "held_out"]

HELD_OUT_SHARE = 0.1  # of the bytes, at most
SHARD_BYTES = 64 << 20  # kept in memory until they are written
_SETTINGS_KEY, _SEQUENCES_KEY, _COMPLETE = "hotset.pairs.settings", "hotset.pairs.sequences", "complete.json"
_COMPLETE_BYTES = 512
_CACHE_BYTES = 256 << 20  # the largest layer that is kept decoded
_BYTES_PER_TENSOR = 160  # of a shard's header, with padding
_POPCOUNT = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1).sum(axis=1).astype(np.int64)


@dataclass(frozen=True)
class LayerTaps:
    """The sources of a layer's pairs: the names of the taps, and their widths."""

    inputs: str
    neurons: str
    n_embd: int
    n_ff: int


@dataclass(frozen=True)
class Collected:
    """The collected pairs: tokens of each part, bytes, and whether the limit truncated the text."""

    n_train: int
    n_held_out: int
    n_bytes: int
    limited: bool


def collect(
    folder: Path,
    steps: TapSteps,
    sources: Sequence[LayerTaps],
    train: Sequence[np.ndarray],
    held_out: Sequence[np.ndarray],
    *,
    max_bytes: int,
    settings: Mapping[str, object],
    progress: Reporter | None = None,
) -> Collected:
    """Run sequences of tokens (int32 [n] each) through a model and write their pairs into `folder`.

    steps: Model.tap_steps. settings: identify these pairs; a folder with other pairs is emptied, one with the
    same is continued. The files never exceed max_bytes: at most a tenth for the held-out part, and as much of
    the training text, from its start, as fits. Raises InvalidRequestError if not even one sequence of each
    part fits.
    """
    digest = hashlib.sha256(json.dumps({**settings, "max_bytes": max_bytes}, sort_keys=True).encode())
    key = digest.hexdigest()[:32]
    complete = folder / _COMPLETE
    if complete.is_file() and (found := json.loads(complete.read_text())).pop("settings") == key:
        return Collected(**found)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(_settings_of(path) != key for path in _shards(folder)):
            for path in _shards(folder):
                path.unlink()
        complete.unlink(missing_ok=True)
        for left in folder.glob(".*.tmp"):  # of a run that was killed while writing
            left.unlink()
    except OSError as error:
        raise HotsetError(
            f"the pairs cannot be stored in {folder} ({error.strerror or error}); choose another folder"
        ) from None

    limits = {"held_out": int(max_bytes * HELD_OUT_SHARE), "train": max_bytes - _COMPLETE_BYTES}
    n_tokens, n_bytes, limited = {}, 0, False
    for part, sequences in (("held_out", held_out), ("train", train)):
        writer = _PartWriter(folder, part, sources, limits[part] - n_bytes, key)
        done = writer.n_sequences
        label = f"pairs ({part.replace('_', ' ')})"
        if progress is not None:
            progress.advance(label, done, len(sequences), "sequences")
        for sequence in sequences[done:]:
            if not writer.add(_pairs_of(steps, sources, sequence)):
                limited = True
                break
            done += 1
            if progress is not None:
                progress.advance(label, done, len(sequences), "sequences")
        writer.flush()
        n_tokens[part] = writer.n_tokens
        n_bytes += writer.n_bytes
        if not n_tokens[part]:
            raise InvalidRequestError(
                f"not one sequence of {len(sequences[0]) if len(sequences) else 0} tokens fits in the "
                f"{limits[part]:,} bytes that its pairs may take; raise max_bytes or shorten the sequences"
            )
    result = Collected(n_tokens["train"], n_tokens["held_out"], n_bytes, limited)
    write_whole({complete: json.dumps({"settings": key, **vars(result)})})
    return result


def _shards(folder: Path) -> list[Path]:
    return sorted([*folder.glob("train-*.gguf"), *folder.glob("held_out-*.gguf")])


def _settings_of(path: Path) -> str | None:
    """Return the settings of a shard; None if the file is not a complete shard."""
    try:
        with open_gguf(path) as file:
            settings, count = file.metadata.get(_SETTINGS_KEY), file.metadata.get(_SEQUENCES_KEY)
            inputs = file.tensors.get("blk.0.inputs")
    except HotsetError:
        return None
    is_whole = type(count) is int and inputs is not None and len(inputs.shape) == 2
    return settings if is_whole and isinstance(settings, str) else None


@dataclass(frozen=True)
class _Sequence:
    """The pairs of one sequence: per layer inputs, bits and magnitudes, as in a shard."""

    layers: list[tuple[np.ndarray, np.ndarray, np.ndarray]]
    n_tokens: int

    @property
    def n_bytes(self) -> int:
        return sum(array.nbytes for layer in self.layers for array in layer)


def _pairs_of(steps: TapSteps, sources: Sequence[LayerTaps], tokens: np.ndarray) -> _Sequence:
    names = list(dict.fromkeys(name for source in sources for name in (source.inputs, source.neurons)))
    parts: list[list[tuple[np.ndarray, np.ndarray, np.ndarray]]] = [[] for _ in sources]
    for values in steps(tokens, names):
        for layer, source in zip(parts, sources, strict=True):
            layer.append(encode(values[source.inputs], values[source.neurons]))
    layers = [tuple(map(np.concatenate, zip(*layer, strict=True))) for layer in parts]
    return _Sequence(layers, len(tokens))  # type: ignore[arg-type]


def encode(inputs: np.ndarray, neurons: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return inputs float32 [n, n_embd] and neurons [n, n_ff] as in a shard: float16, uint8 and uint8."""
    size = np.sqrt(np.square(inputs, dtype=np.float64).mean(axis=1, keepdims=True))
    scaled = np.divide(inputs, size, out=np.zeros_like(inputs), where=size > 0).astype(np.float16)
    fires = neurons != 0
    magnitude = np.abs(neurons)
    largest = magnitude.max(axis=1, keepdims=True)
    relative = np.divide(magnitude, largest, out=np.zeros_like(magnitude), where=largest > 0)
    codes = np.clip(np.rint(255 * relative[fires]), 1, 255).astype(np.uint8)
    return scaled, np.packbits(fires, axis=1, bitorder="little"), codes


class _PartWriter:
    """A writer of the shards of one part, up to a limit of bytes; it counts existing shards."""

    def __init__(self, folder: Path, part: str, sources: Sequence[LayerTaps], limit: int, key: str) -> None:
        self.folder, self.part, self.sources, self.key, self.limit = folder, part, sources, key, limit
        self.n_sequences = self.n_tokens = self.n_bytes = self._n_shards = 0
        self._pending: list[_Sequence] = []
        self._header = 4096 + 3 * len(sources) * _BYTES_PER_TENSOR
        while (path := self._path(self._n_shards)).is_file():
            with open_gguf(path) as file:
                count = file.metadata[_SEQUENCES_KEY]
                assert isinstance(count, int)
                self.n_sequences += count
                self.n_tokens += file.tensors["blk.0.inputs"].shape[1]
            self.n_bytes += path.stat().st_size
            self._n_shards += 1

    def _path(self, i: int) -> Path:
        return self.folder / f"{self.part}-{i:05d}.gguf"

    def add(self, sequence: _Sequence) -> bool:
        """Add a sequence, and return True, if it still fits."""
        held = sum(one.n_bytes for one in self._pending)
        if self.n_bytes + self._header + held + sequence.n_bytes > self.limit:
            return False
        self._pending.append(sequence)
        if held + sequence.n_bytes >= min(SHARD_BYTES, self.limit // 8):
            self.flush()
        return True

    def flush(self) -> None:
        if not self._pending:
            return
        path = self._path(self._n_shards)
        writer = GGUFWriter(path, "hotset")
        writer.add(_SETTINGS_KEY, self.key)
        writer.add(_SEQUENCES_KEY, len(self._pending))
        for i, source in enumerate(self.sources):
            parts = zip(*(one.layers[i] for one in self._pending), strict=True)
            inputs, bits, magnitudes = map(np.concatenate, parts)
            closed = np.append(magnitudes, np.uint8(0))
            writer.add_tensor(f"blk.{i}.inputs", inputs, GGMLType.F16, (source.n_embd, len(inputs)))
            writer.add_tensor(f"blk.{i}.active", bits, GGMLType.I8, bits.shape[::-1])
            writer.add_tensor(f"blk.{i}.magnitudes", closed, GGMLType.I8, closed.shape)
        writer.write()
        self._n_shards += 1
        self.n_bytes += path.stat().st_size
        self.n_sequences += len(self._pending)
        self.n_tokens += sum(one.n_tokens for one in self._pending)
        self._pending.clear()


@dataclass(frozen=True)
class _PairShard:
    inputs: np.ndarray  # float16 [n, n_embd]
    active: np.ndarray  # uint8 [n, bytes]
    magnitudes: np.ndarray  # uint8, of all neurons that fired
    ends: np.ndarray  # int64 [n + 1], where each token's magnitudes begin and end


class LayerPairs:
    """The pairs of one layer, mapped: only requested rows are read, and a small layer is kept decoded."""

    def __init__(self, shards: list[_PairShard], n_ff: int) -> None:
        self._shards, self.n_ff = shards, n_ff
        self._decoded: tuple[np.ndarray, np.ndarray] | None = None
        self._first = np.cumsum([0, *(len(shard.inputs) for shard in shards)])
        self.n_embd = shards[0].inputs.shape[1]

    def __len__(self) -> int:
        return int(self._first[-1])

    def batch(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return inputs float32 [n, n_embd] and magnitudes uint8 [n, n_ff], 0 for neurons that did not fire.

        rows: int64 [n]; the result is in ascending order of rows.
        """
        rows = np.sort(rows)
        if self._decoded is None and len(self) * (2 * self.n_embd + self.n_ff) <= _CACHE_BYTES:
            parts = (self._read(np.arange(i, min(i + 1024, len(self)))) for i in range(0, len(self), 1024))
            inputs, magnitudes = map(np.concatenate, zip(*parts, strict=True))
            self._decoded = inputs, magnitudes
        if self._decoded is not None:
            inputs, magnitudes = (array[rows] for array in self._decoded)
        else:
            inputs, magnitudes = self._read(rows)
        return inputs.astype(np.float32), magnitudes

    def _read(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return inputs float16 [n, n_embd] and magnitudes uint8 [n, n_ff] of rows in ascending order."""
        inputs, magnitudes = [], []
        owner = np.searchsorted(self._first, rows, side="right") - 1
        for i in np.unique(owner):
            shard, local = self._shards[i], rows[owner == i] - self._first[i]
            inputs.append(shard.inputs[local])
            fires = np.unpackbits(shard.active[local], axis=1, count=self.n_ff, bitorder="little") != 0
            starts, lengths = shard.ends[local], shard.ends[local + 1] - shard.ends[local]
            # Concatenate ranges: each begins where the previous one ended.
            shift = np.repeat(starts - np.cumsum(lengths) + lengths, lengths)
            dense = np.zeros(fires.shape, np.uint8)
            dense[fires] = shard.magnitudes[shift + np.arange(len(shift))]
            magnitudes.append(dense)
        return np.concatenate(inputs), np.concatenate(magnitudes)

    def frequencies(self) -> np.ndarray:
        """Return how often each neuron fires: float64 [n_ff], 0 to 1."""
        counts = np.zeros(self.n_ff, np.int64)
        for shard in self._shards:
            for first in range(0, len(shard.active), 4096):
                bits = shard.active[first : first + 4096]
                counts += np.unpackbits(bits, axis=1, count=self.n_ff, bitorder="little").sum(
                    axis=0, dtype=np.int64
                )
        return counts / len(self)


class PairShards:
    """The open shards of a folder. Use it as a context manager."""

    def __init__(self, folder: Path, n_ff: Sequence[int]) -> None:
        self._n_ff = n_ff
        self._files: dict[str, list[GGUFFile]] = {
            part: [open_gguf(path) for path in sorted(folder.glob(f"{part}-*.gguf"))]
            for part in ("train", "held_out")
        }

    def layer(self, layer: int, part: Part) -> LayerPairs:
        n_ff, shards = self._n_ff[layer], []
        for file in self._files[part]:
            width, n = file.tensors[f"blk.{layer}.inputs"].shape
            active = file.data(f"blk.{layer}.active").reshape(n, -1)
            ends = np.concatenate([[0], np.cumsum(_POPCOUNT[active].sum(axis=1))])
            inputs = file.data(f"blk.{layer}.inputs").view(np.float16).reshape(n, width)
            shards.append(_PairShard(inputs, active, file.data(f"blk.{layer}.magnitudes"), ends))
        return LayerPairs(shards, n_ff)

    def close(self) -> None:
        for files in self._files.values():
            for file in files:
                file.close()

    def __enter__(self) -> PairShards:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
