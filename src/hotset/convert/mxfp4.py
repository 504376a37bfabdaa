"""Matrices of experts that a checkpoint holds as MXFP4: the same codes and exponents in GGUF's blocks.

A checkpoint has codes and exponents apart (`_blocks`, `_scales`) and two neighbouring values in a byte, low
half first; a block of GGUF has its exponent in front, and values i and i + 16 in byte i. Nothing is decoded,
so that each value stays what it is.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from hotset.formats.gguf import PIECE_VALUES
from hotset.formats.quants import TYPES, GGMLType, dequantize

BLOCK_BYTES = 16  # of a checkpoint's block of 32 values


@dataclass(frozen=True)
class Packed:
    """The matrices of all experts. blocks: uint8 [n_expert, rows, blocks of a row, BLOCK_BYTES]; scales:
    [n_expert, rows, blocks of a row]."""

    blocks: np.ndarray
    scales: np.ndarray

    @property
    def shape(self) -> tuple[int, ...]:
        """Outermost first, of the values."""
        return (*self.scales.shape[:2], self.scales.shape[2] * 2 * BLOCK_BYTES)

    def pieces(self) -> Iterator[np.ndarray]:
        """The bytes of a GGUF file in order, whole rows, some megabytes at a time."""
        n_expert, n_rows, n_values = self.shape
        step = max(PIECE_VALUES // n_values, 1)
        for expert in range(n_expert):
            for start in range(0, n_rows, step):
                rows = slice(start, start + step)
                yield in_gguf_blocks(self.blocks[expert, rows], self.scales[expert, rows])

    def floats(self) -> Iterator[np.ndarray]:
        """The values, as pieces of rows."""
        n_values = self.shape[2]
        for piece in self.pieces():
            shape = (n_values, piece.size // TYPES[GGMLType.MXFP4].block_bytes * 2 * BLOCK_BYTES // n_values)
            yield dequantize(piece, GGMLType.MXFP4, shape).reshape(shape[::-1])


def in_gguf_blocks(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """blocks [rows, n, BLOCK_BYTES] and scales [rows, n] as uint8 of GGUF's blocks."""
    codes = np.stack([blocks & 15, blocks >> 4], axis=-1).reshape(*scales.shape, 2 * BLOCK_BYTES)
    halves = codes[..., :BLOCK_BYTES] | codes[..., BLOCK_BYTES:] << 4
    return np.concatenate([scales[..., None], halves], axis=-1).reshape(-1)
