"""Matrices of experts that a checkpoint stores as MXFP4: the same codes and exponents in GGUF's blocks.

A checkpoint has separate codes and exponents, and two neighbouring values in a byte, low half first. gpt-oss
has one tensor for all experts (`_blocks`, `_scales`), DeepSeek V4 one for each (`.weight` in I8, `.scale` in
F8_E8M0). A block of GGUF begins with its exponent, and byte i has values i and i + 16. Nothing is decoded, so
no value changes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from hotset.errors import FormatError
from hotset.formats.gguf import PIECE_VALUES
from hotset.formats.quants import TYPES, GGMLType, dequantize

BLOCK_BYTES = 16  # of a block of 32 values in a checkpoint
PAIRS = np.dtype("i1")  # of an expert's matrix: two codes in each byte
EXPONENTS = np.dtype([("e8m0", "u1")])  # a power of two with a bias of 127; 255 is NaN


@dataclass(frozen=True)
class Matrix:
    """A matrix of one expert. blocks: uint8 [rows, n, BLOCK_BYTES]; scales: [rows, n], n blocks per row."""

    blocks: np.ndarray
    scales: np.ndarray

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of the values, outermost first."""
        return len(self.scales), self.scales.shape[1] * 2 * BLOCK_BYTES

    @property
    def ndim(self) -> int:
        return len(self.shape)


def matrix_of(name: str, codes: np.ndarray, scales: np.ndarray) -> Matrix:
    """Return a matrix from its PAIRS [rows, columns / 2] and EXPONENTS [rows, columns / 32]."""
    fits = codes.ndim == scales.ndim == 2
    if not fits or (len(scales), scales.shape[1] * BLOCK_BYTES) != codes.shape:
        raise FormatError(
            f"the tensor {name} in FP4 is {list(codes.shape)} and its scales {list(scales.shape)}, where "
            f"each {BLOCK_BYTES} bytes of a row have one; download the checkpoint again"
        )
    return Matrix(codes.view("u1").reshape(*scales.shape, BLOCK_BYTES), scales["e8m0"])


@dataclass(frozen=True)
class Packed:
    """The matrices of all experts.

    blocks: for each expert uint8 [rows, blocks of a row, BLOCK_BYTES]; scales: [rows, blocks of a row].
    """

    blocks: Sequence[np.ndarray] | np.ndarray
    scales: Sequence[np.ndarray] | np.ndarray

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of the values, outermost first."""
        n_rows, n_blocks = self.scales[0].shape
        return len(self.scales), n_rows, n_blocks * 2 * BLOCK_BYTES

    def pieces(self) -> Iterator[np.ndarray]:
        """Yield the bytes of a GGUF file in order, whole rows, some megabytes at a time."""
        n_expert, n_rows, n_values = self.shape
        step = max(PIECE_VALUES // n_values, 1)
        for expert in range(n_expert):
            for start in range(0, n_rows, step):
                rows = slice(start, start + step)
                yield in_gguf_blocks(self.blocks[expert][rows], self.scales[expert][rows])

    def floats(self) -> Iterator[np.ndarray]:
        """Yield the values, as pieces of rows."""
        n_values = self.shape[2]
        for piece in self.pieces():
            shape = (n_values, piece.size // TYPES[GGMLType.MXFP4].block_bytes * 2 * BLOCK_BYTES // n_values)
            yield dequantize(piece, GGMLType.MXFP4, shape).reshape(shape[::-1])


def in_gguf_blocks(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Return blocks [rows, n, BLOCK_BYTES] and scales [rows, n] as uint8 of GGUF's blocks."""
    codes = np.stack([blocks & 15, blocks >> 4], axis=-1).reshape(*scales.shape, 2 * BLOCK_BYTES)
    halves = codes[..., :BLOCK_BYTES] | codes[..., BLOCK_BYTES:] << 4
    return np.concatenate([scales[..., None], halves], axis=-1).reshape(-1)
