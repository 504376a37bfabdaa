"""Importance matrices: the mean squares of each weight matrix's inputs, which weight quantisation errors.

The files are llama.cpp's (`llama-imatrix`). The current format is a GGUF file with `general.type` = imatrix,
the keys `imatrix.datasets`, `.chunk_count` and `.chunk_size`, and for each matrix NAME two F32 tensors:

    NAME.in_sum2  [n_matrices, width]  sums of x^2 over the inputs x of the matrix
    NAME.counts   [n_matrices, 1]      number of inputs

n_matrices is the number of experts, or 1. The older format (.dat), which hotset only reads, has neither magic
nor version; all numbers are little-endian:

    n_entries i32
    n_entries x  length i32 | name | n_calls i32 | n_values i32 | f32[n_values]: means of x^2, times n_calls
    n_chunks i32 | length i32 | name of the text        (may be missing)
"""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hotset.errors import FormatError, InvalidRequestError
from hotset.files import open_regular, read_bounded
from hotset.formats.gguf import MAX_NAME, GGUFFile, GGUFWriter, open_gguf
from hotset.formats.quants import GGMLType

_SUMS, _COUNTS = ".in_sum2", ".counts"
_LONGEST_DAT = 1 << 30  # bytes of a file in the older format
_LARGEST = 1e36  # limit of sums and counts, so that some hundred files can be added
_I32 = struct.Struct("<i")


@dataclass(frozen=True)
class Inputs:
    """The inputs of a matrix, or of each of its experts.

    sums: of squares, float32 [n_matrices, width]. counts: of inputs, float32 [n_matrices].
    """

    sums: np.ndarray
    counts: np.ndarray


@dataclass(frozen=True)
class ImportanceMatrix:
    """The inputs of the matrices of one model. chunk_size: tokens; 0 in a file of the older format."""

    inputs: Mapping[str, Inputs]
    datasets: tuple[str, ...] = ()
    n_chunks: int = 0
    chunk_size: int = 0

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> ImportanceMatrix:
        """Read either format. Raises FormatError if the file is invalid or has no sums of squares."""
        path = Path(path)
        with open_regular(path) as file:
            is_gguf = file.read(4) == b"GGUF"
        found = _read_gguf(path) if is_gguf else _read_dat(path)
        for name, inputs in found.inputs.items():
            if not all(((v >= 0) & (v <= _LARGEST)).all() for v in (inputs.sums, inputs.counts)):
                raise FormatError(
                    f"{path}: the sums or counts of {name} are negative, above {_LARGEST:g} or not finite; "
                    "collect it again"
                )
        if not found.inputs:
            raise FormatError(f"{path} has no sums of any matrix; collect it again with 'hotset imatrix'")
        return found

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the GGUF format, with matrices sorted by name."""
        writer = GGUFWriter(path, None)
        writer.add("general.type", "imatrix")
        if self.datasets:
            writer.add("imatrix.datasets", list(self.datasets))
        writer.add("imatrix.chunk_count", self.n_chunks)
        writer.add("imatrix.chunk_size", self.chunk_size)
        for name in sorted(self.inputs):
            inputs = self.inputs[name]
            writer.add_tensor(name + _SUMS, inputs.sums, GGMLType.F32)
            writer.add_tensor(name + _COUNTS, inputs.counts[:, None], GGMLType.F32)
        writer.write()

    def merged(self, other: ImportanceMatrix) -> ImportanceMatrix:
        """Return the sum of both. Raises InvalidRequestError if models or chunk sizes differ."""
        if not self.chunk_size or self.chunk_size != other.chunk_size:
            raise InvalidRequestError(
                f"importance matrices of chunks of {self.chunk_size} and {other.chunk_size} tokens cannot be "
                "added (0: a file of the older format); collect them with the same n_ctx"
            )
        inputs = dict(self.inputs)
        for name, theirs in other.inputs.items():
            mine = inputs.get(name)
            if mine is None:
                inputs[name] = theirs
            elif mine.sums.shape != theirs.sums.shape:
                raise InvalidRequestError(
                    f"the importance matrices have {name} in different shapes: they are of different models"
                )
            else:
                inputs[name] = Inputs(mine.sums + theirs.sums, mine.counts + theirs.counts)
        datasets = (*other.datasets, *self.datasets)
        return ImportanceMatrix(inputs, datasets, self.n_chunks + other.n_chunks, self.chunk_size)

    def weights(self, name: str, shape: Sequence[int]) -> np.ndarray | None:
        """Return the weight of errors for each input of a matrix with this shape (GGUF order).

        The result is float32 [n_matrices, width], 1 for an expert that no token chose; None if the matrix is
        unknown. Raises InvalidRequestError if its sums have another shape.
        """
        inputs = self.inputs.get(name)
        if inputs is None:
            return None
        width, n_matrices = shape[0], math.prod(shape[2:])
        n_counts = inputs.counts.size
        if inputs.sums.size not in (width, width * n_matrices) or n_counts not in (1, n_matrices):
            raise InvalidRequestError(
                f"the importance matrix has {inputs.sums.size} values of {n_counts} matrices for {name}, "
                f"whose shape is {list(shape)}: it belongs to another model"
            )
        means = inputs.sums.reshape(-1, width) / np.maximum(inputs.counts, 1)[:, None]
        means = np.where((inputs.counts > 0)[:, None], means, np.float32(1))
        return np.ascontiguousarray(np.broadcast_to(means, (n_matrices, width)), np.float32)


def _read_gguf(path: Path) -> ImportanceMatrix:
    with open_gguf(path) as file:
        if file.metadata.get("general.type") != "imatrix":
            raise FormatError(f"{path} is a GGUF file, but not an importance matrix (by its general.type)")
        inputs = {}
        for name in file.tensors:
            if name.endswith(_SUMS):
                matrix = name.removesuffix(_SUMS)
                sums, counts = _floats(file, name), _floats(file, matrix + _COUNTS)
                if not counts.size or sums.size % counts.size:
                    raise FormatError(
                        f"{path}: {sums.size} sums of {matrix} do not fit {counts.size} matrices; "
                        "collect it again"
                    )
                inputs[matrix] = Inputs(sums.reshape(counts.size, -1), np.round(counts))
        datasets = file.metadata.get("imatrix.datasets")
        sizes: list[Any] = [file.metadata.get(f"imatrix.{key}") for key in ("chunk_count", "chunk_size")]
        n_chunks, chunk_size = (
            size if isinstance(size, int) and 0 <= size < 1 << 31 else 0 for size in sizes
        )
        texts = tuple(map(str, datasets)) if isinstance(datasets, list) else ()
        return ImportanceMatrix(inputs, texts, n_chunks, chunk_size)


def _floats(file: GGUFFile, name: str) -> np.ndarray:
    info = file.tensors.get(name)
    if info is None or info.type != GGMLType.F32:
        raise FormatError(f"{file.path} lacks the F32 tensor {name}; collect it again with 'hotset imatrix'")
    return file.data(name).view(np.float32).copy()


class _Dat:
    """A forward reader of a file of the older format."""

    def __init__(self, path: Path) -> None:
        self.path, self.pos = path, 0
        with open_regular(path) as file:
            self.data = read_bounded(file, path, _LONGEST_DAT)

    def take(self, n_bytes: int, most: int) -> bytes:
        if not 0 <= n_bytes <= min(most, len(self.data) - self.pos):
            raise FormatError(
                f"{self.path} is not an importance matrix, or is damaged (at byte {self.pos}); "
                "collect it with 'hotset imatrix'"
            )
        self.pos += n_bytes
        return self.data[self.pos - n_bytes : self.pos]

    def number(self) -> int:
        return int(_I32.unpack(self.take(4, 4))[0])

    def text(self) -> str:
        return self.take(self.number(), MAX_NAME).decode(errors="replace")


def _read_dat(path: Path) -> ImportanceMatrix:
    dat = _Dat(path)
    inputs = {}
    for _ in range(dat.number()):
        name, n_calls = dat.text(), dat.number()
        sums = np.frombuffer(dat.take(4 * dat.number(), _LONGEST_DAT), "<f4").astype(np.float32)
        inputs[name] = Inputs(sums[None], np.array([max(n_calls, 1)], np.float32))
    if dat.pos == len(dat.data):
        return ImportanceMatrix(inputs)
    n_chunks = max(dat.number(), 0)
    return ImportanceMatrix(inputs, (dat.text(),), n_chunks)
