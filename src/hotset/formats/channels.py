"""Matrices of a plain GGUF file, laid out again by channel = input, so that channels whose input is zero need
not be read.

As planes of down projections are by neuron (formats/planes.py): a block of 32 inputs of one output is split
in codes by input and scales by 32 inputs, every number the file's own, so that sums are the same to the bit.

    <name>_c.blocks  int8 [n_in / 32, bytes of n_out blocks]   as many bytes as the matrix by rows has

Outputs are cut into tiles (tile_of), one after the other; a tile is for each 32 channels the scales of its
outputs (F16), of Q4_1 what is added to scale * code (F16), and then for each of the channels the codes of the
outputs: of Q8_0 one byte each, of Q4_0 and Q4_1 for each 32 outputs 16 bytes, byte j = code[j] | code[j + 16]
<< 4. So whoever computes a tile reads one stream of memory, of which long pieces are left out: in narrower
tiles this takes up to twice as long (docs/LOG.md).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from hotset.errors import UnsupportedModelError
from hotset.formats.planes import PLANE_GROUP, codes_of, scales_of
from hotset.formats.quants import GGMLType

if TYPE_CHECKING:
    from hotset.formats.gguf import GGUFFile, GGUFWriter, TensorInfo

ALIGNMENT = 4096  # of the tensors: a page
LAYOUT = 3  # rises when the layout changes, so that files of another one are built again
_MOST, _LINE = 4096, 128  # outputs of a tile, and those of a line of codes of four bits
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


def tile_of(n_out: int) -> int:
    """Outputs of a tile: of about as wide ones as do not exceed 4,096, whose lanes stay in the second-level
    cache. The longer the pieces are that are left out and read, the quicker."""
    n_tiles = math.ceil(n_out / _MOST)
    return math.ceil(n_out / n_tiles / _LINE) * _LINE


def add_channels(writer: GGUFWriter, gguf: GGUFFile, tensor: str) -> None:
    """Adds the matrix `<name>.weight` by channel, under `<name>_c`; built when it is written.

    can_be_by_channel must say yes. What is written is refused (UnsupportedModelError) where a scale is not
    finite: zero times it is no zero, and would have to be read.
    """
    info = gguf.tensors[tensor]
    n_groups = info.shape[0] // PLANE_GROUP
    writer.add_tensor(
        f"{tensor.removesuffix('.weight')}_c.blocks",
        lambda: _blocks_of(gguf, tensor),
        GGMLType.I8,
        (info.nbytes // n_groups, n_groups),
    )


def _blocks_of(gguf: GGUFFile, tensor: str) -> np.ndarray:
    info = gguf.tensors[tensor]
    n_in, n_out = info.shape
    n_groups = n_in // PLANE_GROUP
    heads = [
        scales_of(gguf.data(tensor), info.type, info.shape, field)
        for field in ("d", "m")[: 2 if info.type == GGMLType.Q4_1 else 1]
    ]
    if not all(np.isfinite(values).all() for values in heads):
        raise UnsupportedModelError(
            f"the tensor {tensor} has weights that are not finite, beside which nothing can be left out"
        )
    codes = codes_of(gguf.data(tensor), info.type, info.shape).view(np.uint8)
    of_output, step = codes.shape[1] / n_out, tile_of(n_out)
    tiles = []
    for first in range(0, n_out, step):
        last = min(first + step, n_out)
        own = codes[:, int(first * of_output) : int(last * of_output)].reshape(n_groups, -1)
        own_heads = [np.ascontiguousarray(head[:, first:last]).view(np.uint8) for head in heads]
        tiles.append(np.concatenate([*own_heads, own], axis=1).reshape(-1))
    return np.concatenate(tiles).reshape(n_groups, -1)
