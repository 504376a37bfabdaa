"""Adapters (LoRA): their contribution to a model's matrices, and llama.cpp's file format.

An adapter adds factor * b @ a to a matrix [outputs, inputs], with a [rank, inputs] and b [outputs, rank]. In
a GGUF file with general.type "adapter" and adapter.type "lora", NAME.lora_a and NAME.lora_b belong to the
tensor NAME of the model, and factor is adapter.lora.alpha / rank (1 if alpha is 0).

Opening an adapter reads only the header: its size in memory and the matrices that it changes. So memory can
be reserved before the matrices are read.

Files are untrusted: names, pairs, shapes and numbers are checked here, and the fit to a model in
`check_model`.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Self

import numpy as np

from hotset.errors import FormatError, InvalidRequestError, UnsupportedModelError
from hotset.escaping import clause
from hotset.formats.gguf import open_gguf
from hotset.formats.quants import TYPES, GGMLType, dequantize, quantize

if TYPE_CHECKING:
    from hotset.formats.gguf import GGUFFile
    from hotset.formats.mapped import MappedFile

_FLOATS = (GGMLType.F32, GGMLType.F16, GGMLType.BF16)
_LEAVE_OUT = "choose an adapter of this model, or omit it"


@dataclass(frozen=True, eq=False)
class FloatMatrix:
    """A matrix of floats in memory. shape: rows, columns. data: uint8, row by row, in a float type."""

    type: GGMLType
    shape: tuple[int, int]
    data: np.ndarray

    @classmethod
    def of(cls, values: np.ndarray, type: GGMLType = GGMLType.F32) -> FloatMatrix:
        """Store float32 [rows, columns] in a float type."""
        return cls(type, values.shape, quantize(np.ascontiguousarray(values, np.float32), type).reshape(-1))

    @cached_property
    def floats(self) -> np.ndarray:
        """Return float32 [rows, columns]."""
        return dequantize(self.data, self.type, self.shape[::-1]).reshape(self.shape)

    def rows(self, first: int, last: int) -> np.ndarray:
        """Return the bytes of the rows [first, last)."""
        row = self.data.nbytes // self.shape[0]
        return self.data[first * row : last * row]


@dataclass(frozen=True, eq=False)
class LowRankPair:
    """The contribution to one matrix: factor * b @ a."""

    a: FloatMatrix
    b: FloatMatrix
    factor: float

    @property
    def rank(self) -> int:
        return self.a.shape[0]


@dataclass(frozen=True, eq=False)
class LoraAdapter:
    """An adapter in memory. pairs: by the names of the model's matrices."""

    path: Path
    pairs: Mapping[str, LowRankPair]

    @cached_property
    def digest(self) -> str:
        """Return a hash of the adapter's contents, without its name: 64 hexadecimal digits."""
        sha = hashlib.sha256()
        for name in sorted(self.pairs):
            pair = self.pairs[name]
            sha.update(f"{name} {pair.factor!r}".encode())
            for matrix in (pair.a, pair.b):
                sha.update(f" {int(matrix.type)} {matrix.shape}".encode())
                sha.update(matrix.data.tobytes())
        return sha.hexdigest()

    @property
    def nbytes(self) -> int:
        """Return the bytes of its matrices in memory."""
        return sum(pair.a.data.nbytes + pair.b.data.nbytes for pair in self.pairs.values())


@dataclass(frozen=True, eq=False)
class StoredMatrix:
    """A matrix in an adapter's file. type, shape: in memory. read: loads it."""

    type: GGMLType
    shape: tuple[int, int]
    read: Callable[[], FloatMatrix]

    @property
    def nbytes(self) -> int:
        """Return its bytes in memory."""
        return math.prod(self.shape) * TYPES[self.type].block_bytes


@dataclass(frozen=True, eq=False)
class AdapterFile:
    """An adapter whose header was read; made by `of`. Use it as a context manager, which closes the file.

    architecture: of the model that it is for; None if the file does not say. pairs: matrices a and b by the
    names of the model's matrices; factors: by the same names.
    """

    path: Path
    architecture: str | None
    pairs: Mapping[str, tuple[StoredMatrix, StoredMatrix]]
    factors: Mapping[str, float]
    file: GGUFFile | MappedFile

    @classmethod
    def of(
        cls,
        path: Path,
        architecture: str | None,
        halves: Mapping[tuple[str, str], StoredMatrix],
        factor: Callable[[str, int], float],
        file: GGUFFile | MappedFile,
    ) -> AdapterFile:
        """Check and return an adapter. halves: by (matrix name, "a" or "b"). factor: from name and rank.

        Raises FormatError for a missing half, for ranks that differ or exceed the matrix, and for factors
        that are not finite.
        """
        pairs, factors = {}, {}
        for name in dict.fromkeys(name for name, _ in halves):
            a, b = halves.get((name, "a")), halves.get((name, "b"))
            if a is None or b is None:
                raise FormatError(
                    f"{path}: {clause(name)} has {'lora_b' if a is None else 'lora_a'} without its partner; "
                    "the adapter is damaged, download or convert it again"
                )
            rank = a.shape[0]
            if b.shape[1] != rank or rank > max(b.shape[0], a.shape[1]):
                raise FormatError(
                    f"{path}: the matrices of {clause(name)} are {list(a.shape)} and {list(b.shape)}, "
                    "but must be [rank, inputs] and [outputs, rank], with a rank that does not exceed the "
                    "matrix; convert the adapter again"
                )
            pairs[name], factors[name] = (a, b), factor(name, rank)
            if not math.isfinite(factors[name]):
                raise _not_finite(path, name)
        if not pairs:
            raise FormatError(f"{path} has no matrices of an adapter; choose another file")
        return cls(path, architecture, pairs, factors, file)

    @property
    def nbytes(self) -> int:
        """Return the bytes of its matrices in memory, after `read`."""
        return sum(half.nbytes for pair in self.pairs.values() for half in pair)

    def read(self, check: Callable[[], object] = lambda: None) -> LoraAdapter:
        """Read the adapter into memory. check: called before each pair; its exception ends the reading.

        Raises FormatError for numbers that are not finite, and if the file was cut short meanwhile.
        """
        pairs = {}
        for name, halves in self.pairs.items():
            check()
            a, b = (half.read() for half in halves)
            for matrix in (a, b):
                if not np.isfinite(matrix.floats).all():
                    raise _not_finite(self.path, name)
                matrix.__dict__.pop("floats", None)  # keep only the stored type
            pairs[name] = LowRankPair(a, b, self.factors[name])
        self.file.check()
        return LoraAdapter(self.path, pairs)

    def check_model(self, architecture: str, adaptable: Mapping[str, tuple[int, int]]) -> None:
        """Raise InvalidRequestError if the adapter is for another model.

        adaptable: names of the model's matrices → outputs, inputs (low_rank.adaptable).
        """
        if self.architecture not in (None, architecture):
            raise InvalidRequestError(
                f"the adapter {self.path} is for {clause(str(self.architecture))} models, but this model is "
                f"{architecture}; {_LEAVE_OUT}"
            )
        for name, (a, b) in self.pairs.items():
            expected, found = adaptable.get(name), (b.shape[0], a.shape[1])
            if expected is None:
                raise InvalidRequestError(
                    f"the adapter {self.path} changes {clause(name)}, which adapters cannot change in this "
                    "model (embeddings, experts and the heads of latent attention are not supported); "
                    f"{_LEAVE_OUT}"
                )
            if expected != found:
                raise InvalidRequestError(
                    f"the adapter {self.path} is for a matrix {clause(name)} of {list(found)} (outputs, "
                    f"inputs), but the model's is {list(expected)}; {_LEAVE_OUT}"
                )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(BufferError):  # views exist: the file is closed with the last one
            self.file.close()


def _not_finite(path: Path, name: str) -> FormatError:
    return FormatError(f"{path} has numbers in {clause(name)} that are not finite; train or convert it again")


def open_gguf_adapter(path: Path) -> AdapterFile:
    """Open an adapter in llama.cpp's format.

    Raises ModelNotFoundError, FormatError, and UnsupportedModelError for other kinds of adapters.
    """
    gguf = open_gguf(path)
    try:
        return _gguf_adapter(gguf, path)
    except BaseException:
        gguf.close()
        raise


def _gguf_adapter(gguf: GGUFFile, path: Path) -> AdapterFile:
    metadata = gguf.metadata
    if metadata.get("general.type") != "adapter":
        raise FormatError(
            f"{path} is not an adapter (general.type is {clause(str(metadata.get('general.type')))}); "
            "choose an adapter, or load the file as a model"
        )
    kind = metadata.get("adapter.type")
    if kind != "lora" or "adapter.alora.invocation_tokens" in metadata:
        found = "an activated LoRA (aLoRA)" if kind == "lora" else f"of the type {clause(str(kind))}"
        raise UnsupportedModelError(f"the adapter {path} is {found}; only plain LoRA adapters are supported")
    alpha = metadata.get("adapter.lora.alpha")
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not 0 <= alpha < math.inf:
        raise FormatError(f"{path} needs a number adapter.lora.alpha of at least 0; convert it again")
    halves = {}
    for name in gguf.tensors:
        matrix, _, half = name.rpartition(".lora_")
        if not matrix or half not in ("a", "b"):
            raise UnsupportedModelError(
                f"the adapter {path} has the tensor {clause(name)}, which is not NAME.lora_a or NAME.lora_b"
            )
        halves[matrix, half] = _stored(gguf, name)
    return AdapterFile.of(
        path, gguf.architecture, halves, lambda _, rank: alpha / rank if alpha else 1.0, gguf
    )


def _stored(gguf: GGUFFile, name: str) -> StoredMatrix:
    info = gguf.tensors[name]
    if len(info.shape) != 2 or 0 in info.shape:
        raise UnsupportedModelError(
            f"the adapter {gguf.path} has the tensor {clause(name)} of {list(info.shape)}; only adapters "
            "of matrices are supported, not of experts"
        )
    shape = (int(info.shape[1]), int(info.shape[0]))

    def read() -> FloatMatrix:
        data = gguf.data(name)
        if info.type in _FLOATS:
            return FloatMatrix(info.type, shape, data.copy())
        return FloatMatrix.of(dequantize(data, info.type, info.shape).reshape(shape))

    return StoredMatrix(info.type if info.type in _FLOATS else GGMLType.F32, shape, read)
