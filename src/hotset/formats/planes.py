"""Neuron-major copies of down projections in plain GGUF files.

A plain file stores `ffn_down` with a row per output: a quantised block has 32 *neurons* of one output, and
the weights of a neuron are spread over the whole matrix. Decoding and encoding again would change values. So
the blocks are split into planes, in which every number is the file's own:

    blk.N.ffn_down_t.codes   int8 [n_ff, bytes per neuron]  the codes of a neuron, one output after the other
      Q4_0: for each 32 outputs 16 bytes, byte j = code[j] | code[j + 16] << 4; value = scale * (code - 8)
      Q8_0: one int8 per output; value = scale * code
    blk.N.ffn_down_t.scales  F16  [n_ff / 32, n_embd]       scale of neuron i and output c: [i // 32, c]

Float matrices are simply transposed (`blk.N.ffn_down_t.weight`, same type). Other types have nested scales;
their down projections get no such copy.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

import numpy as np

from hotset.formats.quants import TYPES, GGMLType

if TYPE_CHECKING:
    from hotset.formats.gguf import GGUFFile, GGUFWriter, TensorInfo

Layout = Literal["planes", "transposed"]
PLANE_GROUP = 32  # neurons that share a row of scales, and outputs whose nibbles are packed together

_FLOATS: dict[GGMLType, np.dtype] = {
    GGMLType.F32: np.dtype("<u4"),
    GGMLType.F16: np.dtype("<u2"),
    GGMLType.BF16: np.dtype("<u2"),
}
_TILE_ROWS, _TILE_BYTES = 512, 64  # of a transposition, so that both sides stay in the second-level cache


def layout_of(info: TensorInfo) -> Layout | None:
    """Return the neuron-major layout of an `ffn_down` of this type and shape; None if values would change."""
    if info.type in _FLOATS:
        return "transposed"
    # Kernels read codes, and Q4_0 packs them, for 32 outputs at a time.
    if info.type in (GGMLType.Q8_0, GGMLType.Q4_0) and info.shape[1] % PLANE_GROUP == 0:
        return "planes"
    return None


def add_down(writer: GGUFWriter, gguf: GGUFFile, name: str) -> None:
    """Add the neuron-major copy of `<name>.weight` as `<name>_t`; it is built when it is written.

    Requires that layout_of is not None.
    """
    info = gguf.tensors[f"{name}.weight"]
    n_ff, n_embd = info.shape
    if layout_of(info) == "transposed":
        writer.add_tensor(
            f"{name}_t.weight",
            lambda: transpose(gguf.data(info.name), info.type, info.shape).view(np.uint8),
            info.type,
            (n_embd, n_ff),
        )
        return
    n_bytes = n_embd // 2 if info.type == GGMLType.Q4_0 else n_embd
    writer.add_tensor(
        f"{name}_t.codes",
        lambda: codes_of(gguf.data(info.name), info.type, info.shape).view(np.uint8),
        GGMLType.I8,
        (n_bytes, n_ff),
    )
    writer.add_tensor(
        f"{name}_t.scales",
        lambda: scales_of(gguf.data(info.name), info.type, info.shape),
        GGMLType.F16,
        (n_embd, n_ff // PLANE_GROUP),
    )


def transpose(data: np.ndarray, type: GGMLType, shape: tuple[int, ...]) -> np.ndarray:
    """Return a float matrix of GGUF shape (n_ff, n_embd) as unsigned integers [n_ff, n_embd] of its bits."""
    n_ff, n_embd = shape
    matrix: np.ndarray = data.view(_FLOATS[type]).reshape(n_embd, n_ff)
    out = np.empty((n_ff, n_embd), matrix.dtype)
    step = _TILE_BYTES // matrix.itemsize

    def chunk(first: int) -> None:
        _transpose_tiled(matrix[:, first : first + step], out[first : first + step])

    in_parallel(chunk, range(0, n_ff, step))
    return out


def codes_of(data: np.ndarray, type: GGMLType, shape: tuple[int, ...]) -> np.ndarray:
    """Return the codes of a Q4_0, Q4_1 or Q8_0 matrix of GGUF shape (n_ff, n_embd): int8 [n_ff, bytes]."""
    n_ff, n_embd = shape
    codes = _blocks(data, type, shape)["qs"].view(np.uint8)  # [n_embd, groups, 16 or 32]
    n_bytes = codes.shape[2]
    out = np.empty((n_ff, n_embd * n_bytes // PLANE_GROUP), np.uint8)
    step = _TILE_BYTES // n_bytes

    def chunk(first: int) -> None:
        part = codes[:, first : first + step].reshape(n_embd, -1)
        rows = out[first * PLANE_GROUP : (first + step) * PLANE_GROUP]
        if type == GGMLType.Q8_0:
            _transpose_tiled(part, rows)
            return
        by_neurons = np.empty((part.shape[1], n_embd), np.uint8)  # byte: neuron j (low), neuron j + 16 (high)
        _transpose_tiled(part, by_neurons)
        pairs = by_neurons.reshape(-1, 16, n_embd // PLANE_GROUP, 2, 16)
        low, high = pairs[..., 0, :], pairs[..., 1, :]  # outputs j and j + 16 of each 32
        nibbles = rows.reshape(-1, 2, 16, n_embd // PLANE_GROUP, 16)
        np.bitwise_or(low & 15, high << np.uint8(4), out=nibbles[:, 0])
        np.bitwise_or(low >> np.uint8(4), high & np.uint8(0xF0), out=nibbles[:, 1])

    in_parallel(chunk, range(0, n_ff // PLANE_GROUP, step))
    return out.view(np.int8)


def scales_of(data: np.ndarray, type: GGMLType, shape: tuple[int, ...], field: str = "d") -> np.ndarray:
    """Return the scales of a matrix of GGUF shape (n_ff, n_embd) with one per 32 weights, or another field.

    The result is float16 [n_ff / 32, n_embd].
    """
    return np.ascontiguousarray(_blocks(data, type, shape)[field].T)


def decode(codes: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Return the values of planes: float32 [n_ff, n_embd], bitwise identical to the decoded matrix.

    codes: int8 or uint8 [n_ff, n_embd / 2] (Q4_0) or [n_ff, n_embd] (Q8_0). scales: float16 [n_ff / 32,
    n_embd].
    """
    n_ff, n_embd = len(codes), scales.shape[1]
    if codes.shape[1] == n_embd:
        values = codes.view(np.int8).astype(np.float32)
    else:
        packed = codes.view(np.uint8).reshape(n_ff, n_embd // PLANE_GROUP, 1, 16)
        nibbles = np.concatenate([packed & 15, packed >> np.uint8(4)], axis=2)
        values = nibbles.reshape(n_ff, n_embd).astype(np.float32) - 8
    values = values.reshape(len(scales), -1, n_embd)
    values *= scales.astype(np.float32)[:, None, :]
    return values.reshape(n_ff, n_embd)


def _blocks(data: np.ndarray, type: GGMLType, shape: tuple[int, ...]) -> np.ndarray:
    """Return the structured blocks of a matrix of GGUF shape (n_ff, n_embd): [n_embd, n_ff / 32]."""
    layout = TYPES[type].block
    assert layout is not None
    return data.view(layout).reshape(shape[1], shape[0] // PLANE_GROUP)


def _transpose_tiled(source: np.ndarray, out: np.ndarray) -> None:
    """Set out = source.T, some rows at a time: a row of the source is a column of the result."""
    for row in range(0, len(source), _TILE_ROWS):
        out[:, row : row + _TILE_ROWS] = source[row : row + _TILE_ROWS].T


def in_parallel(work: Callable[[int], None], items: range) -> None:
    """Run `work` for each item in a few threads: NumPy copies without the interpreter's lock."""
    n_threads = min(4, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 2)
    if len(items) < 8 or n_threads == 1:
        for item in items:
            work(item)
        return
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(n_threads) as pool:
        list(pool.map(work, items))
