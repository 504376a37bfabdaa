"""Matrices of a plain GGUF file, laid out again by channel = input, so that channels whose input is zero need
not be read.

As planes of down projections are by neuron (formats/planes.py): a block of 32 inputs of one output is split
in codes by input and scales by 32 inputs, every number the file's own, so that sums are the same to the bit.

    <name>_c.codes   int8 [n_in, bytes per channel]  the codes of a channel, one output after the other
      Q4_0, Q4_1: for each 32 outputs 16 bytes, byte j = code[j] | code[j + 16] << 4;  Q8_0: one byte each
    <name>_c.scales  F16  [n_in / 32, n_out]         scale of channel k and output c: [k // 32, c]
    <name>_c.mins    F16  [n_in / 32, n_out]         of Q4_1: what is added to scale * code

Within each of them the outputs are cut into tiles of TILE (the last may be narrower), one tile after the
other: so a chunk of outputs reads adjacent memory, which matters more than a channel in one piece.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import numpy as np

from hotset.errors import UnsupportedModelError
from hotset.formats.planes import PLANE_GROUP, codes_of, scales_of
from hotset.formats.quants import GGMLType

if TYPE_CHECKING:
    from hotset.formats.gguf import GGUFFile, GGUFWriter, TensorInfo

ALIGNMENT = 128  # of the tensors: a channel's codes in a tile are then two whole lines, not parts of three
TILE = 256  # outputs: kChannelTile of csrc/kernels/kernels.h
_TYPES = (GGMLType.Q4_0, GGMLType.Q4_1, GGMLType.Q8_0)


def can_be_by_channel(info: TensorInfo) -> bool:
    """Whether a matrix of this type and shape is laid out by channel: its outputs are taken 32 at a time."""
    return info.type in _TYPES and len(info.shape) == 2 and info.shape[1] % PLANE_GROUP == 0


def copy_bytes(info: TensorInfo) -> tuple[int, int]:
    """Of a matrix by channel: bytes of its codes, and of its scales and minimums."""
    n_values = info.shape[0] * info.shape[1]
    codes = n_values if info.type == GGMLType.Q8_0 else n_values // 2
    return codes, info.nbytes - codes


def break_even(info: TensorInfo, rate: float) -> float:
    """The share of channels below which reading these is quicker than reading all rows.

    rate: bytes per second by channel over those by row.
    """
    codes, scales = copy_bytes(info)
    return min(max((rate * info.nbytes - scales) / codes, 0.0), 1.0)


def tiled(rows: np.ndarray, n_out: int) -> np.ndarray:
    """An array [n, some numbers per output] with its columns cut into tiles, as flat as it is written."""
    per_output = rows.shape[1] / n_out
    borders = [int(c * per_output) for c in [*range(0, n_out, TILE), n_out]]
    parts = [rows[:, a:b].reshape(-1) for a, b in itertools.pairwise(borders)]
    return np.concatenate(parts).reshape(rows.shape)


def add_channels(writer: GGUFWriter, gguf: GGUFFile, tensor: str) -> None:
    """Adds the matrix `<name>.weight` by channel, under `<name>_c`; built when it is written.

    can_be_by_channel must say yes. What is written is refused (UnsupportedModelError) where a scale is not
    finite: zero times it is no zero, and would have to be read.
    """
    info, name = gguf.tensors[tensor], tensor.removesuffix(".weight")
    n_in, n_out = info.shape

    def halves(field: str) -> np.ndarray:
        values = scales_of(gguf.data(tensor), info.type, info.shape, field)
        if not np.isfinite(values).all():
            raise UnsupportedModelError(
                f"the tensor {tensor} has weights that are not finite, beside which nothing can be left out"
            )
        return tiled(values, n_out)

    n_bytes = n_out if info.type == GGMLType.Q8_0 else n_out // 2
    writer.add_tensor(
        f"{name}_c.codes",
        lambda: tiled(codes_of(gguf.data(tensor), info.type, info.shape).view(np.uint8), n_out),
        GGMLType.I8,
        (n_bytes, n_in),
    )
    blocks = n_out, n_in // PLANE_GROUP
    writer.add_tensor(f"{name}_c.scales", lambda: halves("d"), GGMLType.F16, blocks)
    if info.type == GGMLType.Q4_1:
        writer.add_tensor(f"{name}_c.mins", lambda: halves("m"), GGMLType.F16, blocks)
