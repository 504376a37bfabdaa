"""Input-major copies of matrices in plain GGUF files, so that channels whose input is zero need not be read.

As in neuron-major down projections (formats/planes.py), a block of 32 inputs of one output is split into
codes per input and scales per 32 inputs. Every number is the file's own, so sums are bitwise identical.

    <name>_c.blocks  int8 [n_groups, bytes]   n_groups: n_in / 32, for K-quants n_in / 256
                     int8 [n_expert, bytes]   for experts, each like a single matrix

Outputs are split into tiles (tile_of), one after the other. For each 32 channels, a tile has the scales of
its outputs (F16), for Q4_1 also the minimums added to scale * code (F16), and for each channel the codes:

    Q8_0              a byte per output
    Q4_0, Q4_1, Q4_K  16 bytes for 32 outputs: byte j = code[j] | code[j + 16] << 4
    Q5_K              the low four bits in the same way, for the whole tile; then 4 bytes for 32 outputs: bit
                      i of byte j is the fifth bit of code[j + 4 i]
    Q6_K              the same, but with two planes of 4 bytes for 32 outputs: bits 2 i and 2 i + 1 of byte j
                      are the high bits of code[j + 4 i], in the second plane of code[16 + j + 4 i]

K-quants have scales of one byte (unpacked) instead, followed by their minimums, or for Q6_K by the scales of
the second 16 channels. Before each 256 channels are the factors of all these (d and dmin, F16).

So a tile is computed from one stream of memory in which long pieces are skipped. Narrower tiles take up to
twice as long (decision 015).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from hotset.errors import UnsupportedModelError
from hotset.formats.planes import PLANE_GROUP, codes_of, in_parallel, scales_of
from hotset.formats.quants import TYPES, GGMLType, k_parts

if TYPE_CHECKING:
    from hotset.formats.gguf import GGUFFile, GGUFWriter, TensorInfo

ALIGNMENT = 4096  # of the tensors: a page
COPY_SUFFIX = "_c.blocks"  # of the tensors' names
LAYOUT = 3  # version of the layout; files with another version are built again
_MOST, _LINE = 4096, 128  # outputs of a tile at most; outputs in a cache line of four-bit codes
_K_GROUP = 256


@dataclass(frozen=True)
class _Format:
    """halves: the float16 fields of a block or, if `grouped`, of 256 inputs. bits: of a code."""

    halves: tuple[str, ...]
    bits: int
    grouped: bool = False


_FORMATS = {
    GGMLType.Q4_0: _Format(("d",), 4),
    GGMLType.Q4_1: _Format(("d", "m"), 4),
    GGMLType.Q8_0: _Format(("d",), 8),
    GGMLType.Q4_K: _Format(("d", "dmin"), 4, True),
    GGMLType.Q5_K: _Format(("d", "dmin"), 5, True),
    GGMLType.Q6_K: _Format(("d",), 6, True),
}


TYPES_BY_CHANNEL = frozenset(_FORMATS)
HALVES = {GGMLType.Q4_0: 16, GGMLType.Q4_1: 16, GGMLType.Q4_K: 32}
"""For types whose 4-bit codes devices store input-major: the number of outputs in the low halves of bytes."""


def copy_name(tensor: str) -> str:
    """Return the name of a matrix's input-major copy."""
    return f"{tensor.removesuffix('.weight')}{COPY_SUFFIX}"


def can_be_input_major(info: TensorInfo) -> bool:
    """Return whether a matrix, or each expert's, can be input-major: its outputs must be a multiple of 32."""
    return info.type in _FORMATS and len(info.shape) > 1 and info.shape[1] % PLANE_GROUP == 0


def can_be_input_major_on_device(type: GGMLType, n_out: int) -> bool:
    """Return whether a device can store a matrix with n_out rows input-major.

    4-bit codes of HALVES[type] outputs share bytes.
    """
    whole = type in (GGMLType.F32, GGMLType.F16, GGMLType.BF16, GGMLType.Q8_0)
    return whole or (type in HALVES and n_out % (2 * HALVES[type]) == 0)


def copy_bytes(info: TensorInfo) -> tuple[int, int]:
    """Return the bytes of codes, and of scales and minimums, of one input-major matrix."""
    n_in, n_out = info.shape[:2]
    of = _FORMATS[info.type]
    halves, own = n_out * 2 * len(of.halves), 2 * n_out
    heads = (
        n_in // _K_GROUP * halves + n_in // PLANE_GROUP * own if of.grouped else n_in // PLANE_GROUP * halves
    )
    return n_in * n_out * of.bits // 8, heads


def all_bytes(info: TensorInfo) -> int:
    """Return the bytes of an input-major matrix, of all experts together."""
    return math.prod(copy_shape(info))


def copy_shape(info: TensorInfo) -> tuple[int, int]:
    """Return the shape of the tensor with an input-major matrix, or with all experts' matrices."""
    if len(info.shape) == 3:
        return sum(copy_bytes(info)), info.shape[2]
    n_groups = info.shape[0] // (_K_GROUP if _FORMATS[info.type].grouped else PLANE_GROUP)
    return sum(copy_bytes(info)) // n_groups, n_groups


def break_even(info: TensorInfo, rate: float) -> float:
    """Return the share of needed channels below which reading channels is faster than reading all rows.

    rate: bytes per second input-major, divided by bytes per second by row.
    """
    codes, scales = copy_bytes(info)
    n_bytes = info.row_bytes * info.shape[1]
    return min(max((rate * n_bytes - scales) / codes, 0.0), 1.0)


def tile_of(n_out: int) -> int:
    """Return the outputs of a tile: nearly equal widths of at most 4,096.

    Their sums then stay in the second-level cache. Longer pieces are faster to skip and to read.
    """
    n_tiles = math.ceil(n_out / _MOST)
    return math.ceil(n_out / n_tiles / _LINE) * _LINE


def add_channels(writer: GGUFWriter, gguf: GGUFFile, tensor: str) -> None:
    """Add the input-major copy of the matrix `<name>.weight`, as `<name>_c`; it is built when it is written.

    Requires can_be_input_major. Raises UnsupportedModelError during the write if a scale is not finite,
    because zero times such a scale is not zero, so the channel could not be skipped.
    """
    info = gguf.tensors[tensor]
    shape = copy_shape(info)

    def blocks() -> np.ndarray:
        if len(info.shape) == 2:
            return _blocks_of(gguf.data(tensor), info)
        one = replace(info, shape=info.shape[:2])
        out = np.empty((shape[1], shape[0]), np.uint8)
        for expert, data in enumerate(gguf.data(tensor).reshape(shape[1], -1)):
            out[expert] = _blocks_of(data, one).reshape(-1).view(np.uint8)
        return out

    writer.add_tensor(copy_name(tensor), blocks, GGMLType.I8, shape)


def _blocks_of(data: np.ndarray, info: TensorInfo) -> np.ndarray:
    """Return the blocks of one matrix with these bytes."""
    n_in, n_out = info.shape
    of = (_k_parts if _FORMATS[info.type].grouped else _plain_parts)(data, info)
    if not all(np.isfinite(values.view(np.float16)).all() for values in of.halves):
        raise UnsupportedModelError(
            f"the tensor {info.name} has weights that are not finite, so no channel can be skipped; "
            "choose the sparsity mode dense"
        )
    n_blocks, (_, n_groups) = n_in // PLANE_GROUP, copy_shape(info)
    tiles, step = [], tile_of(n_out)
    for first in range(0, n_out, step):

        def own(values: np.ndarray, first: int = first, last: int = min(first + step, n_out)) -> np.ndarray:
            n_bytes = values.shape[1]
            return values[:, first * n_bytes // n_out : last * n_bytes // n_out]

        channels = np.concatenate([own(values) for values in of.codes], axis=1).reshape(n_blocks, -1)
        blocks = np.concatenate([*map(own, of.heads), channels], axis=1).reshape(n_groups, -1)
        tiles.append(np.concatenate([*map(own, of.group_heads), blocks], axis=1).reshape(-1))
    return np.concatenate(tiles).reshape(n_groups, -1)


@dataclass(frozen=True)
class _Parts:
    """The parts of a matrix, each uint8 [rows, bytes of all outputs].

    group_heads: per 256 inputs; heads: per 32 inputs; codes: a row per input. halves: the float16 parts.
    """

    group_heads: Sequence[np.ndarray]
    heads: Sequence[np.ndarray]
    codes: Sequence[np.ndarray]

    @property
    def halves(self) -> Sequence[np.ndarray]:
        return self.group_heads or self.heads


def _plain_parts(data: np.ndarray, info: TensorInfo) -> _Parts:
    fields = _FORMATS[info.type].halves
    heads = [scales_of(data, info.type, info.shape, field).view(np.uint8) for field in fields]
    return _Parts([], heads, [codes_of(data, info.type, info.shape).view(np.uint8)])


def _k_parts(data: np.ndarray, info: TensorInfo) -> _Parts:
    (n_in, n_out), of, layout = info.shape, _FORMATS[info.type], TYPES[info.type].block
    assert layout is not None
    blocks = data.view(layout).reshape(n_out, n_in // _K_GROUP)
    high_bits = of.bits - 4
    heads = np.empty((2, n_in // PLANE_GROUP, n_out), np.uint8)
    low = np.empty((n_in, n_out // 2), np.uint8)
    high = np.empty((high_bits, n_in, n_out // 8), np.uint8)

    def take_apart(group: int) -> None:
        own, codes = k_parts(blocks[:, group], info.type)
        heads[:, 8 * group : 8 * group + 8] = own.T
        channels = np.ascontiguousarray(codes.reshape(n_out, _K_GROUP).T)
        rows = slice(_K_GROUP * group, _K_GROUP * (group + 1))
        pairs = (channels & 15).reshape(_K_GROUP, -1, 2, 16)
        low[rows] = (pairs[:, :, 0] | pairs[:, :, 1] << np.uint8(4)).reshape(_K_GROUP, -1)
        if high_bits:
            fields = (channels >> np.uint8(4)).reshape(_K_GROUP, -1, high_bits, 8 // high_bits, 4)
            shifts = np.arange(0, 8, high_bits, dtype=np.uint8)[:, None]
            packed = np.bitwise_or.reduce(fields << shifts, axis=3)  # [256, outputs / 32, planes, 4]
            high[:, rows] = packed.transpose(2, 0, 1, 3).reshape(high_bits, _K_GROUP, -1)

    in_parallel(take_apart, range(n_in // _K_GROUP))
    halves = [np.ascontiguousarray(blocks[field].T).view(np.uint8) for field in of.halves]
    return _Parts(halves, list(heads), [low, *high])
