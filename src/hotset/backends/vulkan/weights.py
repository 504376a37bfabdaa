"""Matrices in a Vulkan device's memory, in the order in which its kernels read them.

Rows are in tiles of 32, columns in blocks of 32. The codes of a block are `vectors` times 16 bytes for each
of the 32 rows, side by side, so that neighbouring lanes, which have neighbouring rows, read neighbouring
memory. What else a block has, scales and high bits, is in a second array (csrc/vulkan/shaders/weights.glsl
decodes both). The weights are those of the file, bit for bit. Rows and columns that fill the last tile or
block are zeros.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from hotset import _core
from hotset.backends.vulkan.memory import Arena, Piece
from hotset.errors import UnsupportedModelError
from hotset.formats.lora import FloatMatrix
from hotset.formats.quants import TYPES, GGMLType, dequantize, k_parts, row_bytes
from hotset.formats.source import WeightSource

TILE = BLOCK = 32
_SLICE_BYTES = 16 << 20  # of a file that are copied to the device at a time
_CACHED_BYTES = 128 << 10  # of a file that are rearranged at a time
_T = GGMLType
_HALVES = (_T.F16, _T.BF16)
FLOATS = (_T.F32, *_HALVES)
_K_TYPES = (_T.Q4_K, _T.Q5_K, _T.Q6_K)
_PLANES = 100  # added to a type: neuron-major codes, scales by 32 neurons (formats/planes.py)
COMPUTED = (_T.F32, _T.F16, _T.BF16, _T.Q4_0, _T.Q4_1, _T.Q5_0, _T.Q5_1, _T.Q8_0, *_K_TYPES, _T.MXFP4)


@dataclass(frozen=True)
class MatrixPart:
    """Rows [first, first + n_rows) of a matrix, or of each of its experts; more: None where there is
    nothing."""

    codes: Piece
    more: Piece | None
    first: int
    n_rows: int


@dataclass(frozen=True)
class DeviceMatrix:
    """A matrix, in parts where one binding is not allowed to hold it all. type: GGML's, or that of planes."""

    type: int
    n_rows: int
    n_cols: int
    parts: tuple[MatrixPart, ...]


class DeviceWeights:
    """Loads tensors to a device when they are first asked for, each part once.

    beside: of the same model there; what it has is not loaded again.
    """

    def __init__(
        self, source: WeightSource, device: _core.VulkanDevice, beside: DeviceWeights | None = None
    ) -> None:
        self._source, self._max_range = source, int(device.max_range)
        self.tensors = source.tensors
        self.arena = Arena(device)
        self.matrices: dict[tuple[object, ...], DeviceMatrix] = {}
        self.vectors: dict[str, Piece] = {}
        if beside is not None:
            self.matrices |= beside.matrices
            self.vectors |= beside.vectors
        self._made: dict[object, Piece] = {}

    def rows(self, name: str, n_cols: int, first: int, n_rows: int) -> DeviceMatrix:
        """Rows of a matrix. Raises UnsupportedModelError for a type that no kernel decodes."""
        key = name, first, n_rows
        if key not in self.matrices:
            type_ = self._type_of(name)
            data = self._source.data(name).reshape(1, -1, row_bytes(type_, n_cols))
            self.matrices[key] = self._upload([data], type_, n_cols, first, n_rows)
        return self.matrices[key]

    def chosen(self, name: str, n_cols: int, rows: np.ndarray) -> DeviceMatrix:
        """Some rows of a matrix, in this order: always the same of a matrix and its first row."""
        key = name, "chosen", int(rows[0])
        if key not in self.matrices:
            type_ = self._type_of(name)
            data = self._source.data(name).reshape(-1, row_bytes(type_, n_cols))[rows]
            self.matrices[key] = self._upload([data[None]], type_, n_cols, 0, len(rows))
        return self.matrices[key]

    def planes(self, name: str, scales: str, n_cols: int, rows: np.ndarray | None = None) -> DeviceMatrix:
        """A matrix with a row per neuron that is stored as planes, or some of its rows, with all scales."""
        if (name,) not in self.matrices:
            codes = self._source.data(name).view(np.uint8).reshape(-1, self._source.tensors[name].shape[0])
            own = self._source.data(scales).view(np.uint32)
            type_ = _T.Q8_0 if codes.shape[1] == n_cols else _T.Q4_0
            if rows is not None:
                spare = np.zeros((-len(rows) % TILE, codes.shape[1]), np.uint8)
                codes = np.concatenate([codes[rows], spare])
            # 32 scales of a tile and a block stand side by side as they are.
            arrays = _codes(codes, 2 if type_ == _T.Q8_0 else 1), np.ascontiguousarray(own)
            if max(array.nbytes for array in arrays) > self._max_range:
                raise UnsupportedModelError(
                    f"{name} is more than the device binds at a time; take --sparsity dense"
                )
            pieces = [self.arena.piece(array.nbytes) for array in arrays]
            for piece, array in zip(pieces, arrays, strict=True):
                piece.buffer.write(piece.offset, array.reshape(-1).view(np.uint8))
            part = MatrixPart(pieces[0], pieces[1], 0, len(codes))
            self.matrices[name,] = DeviceMatrix(type_ + _PLANES, len(codes), n_cols, (part,))
        return self.matrices[name,]

    def given(self, key: tuple[object, ...], matrix: FloatMatrix, first: int, n_rows: int) -> DeviceMatrix:
        """Rows of a matrix that is in no file of the model."""
        if key not in self.matrices:
            data = matrix.data.reshape(1, matrix.shape[0], -1)
            self.matrices[key] = self._upload([data], matrix.type, matrix.shape[1], first, n_rows)
        return self.matrices[key]

    def experts(
        self, names: Sequence[str], n_expert: int, n_cols: int, first: int, n_rows: int
    ) -> DeviceMatrix:
        """Rows of each expert's matrix, from one tensor of all or one for each."""
        key = *names, first, n_rows
        if key not in self.matrices:
            type_ = self._type_of(names[0])
            of_each = n_expert // len(names)
            data = [self._source.data(name).reshape(of_each, -1, row_bytes(type_, n_cols)) for name in names]
            self.matrices[key] = self._upload(data, type_, n_cols, first, n_rows)
        return self.matrices[key]

    def vector(self, name: str) -> Piece:
        """All numbers of a tensor, as float32."""
        if name not in self.vectors:
            info = self._source.tensors[name]
            values = dequantize(self._source.data(name), info.type, info.shape).reshape(-1)
            self.vectors[name] = self._numbers(values)
        return self.vectors[name]

    def made(self, key: object, make: Callable[[], np.ndarray]) -> Piece:
        """Float32 numbers that are not of a file as they are, made when they are first asked for."""
        if key not in self._made:
            self._made[key] = self._numbers(make())
        return self._made[key]

    def numbers_of(self, vector: Piece, key: object, chosen: np.ndarray) -> Piece:
        """Some numbers of a vector, in this order."""
        return self.made(key, lambda: np.frombuffer(vector.read(), np.float32)[chosen])

    def _numbers(self, values: np.ndarray) -> Piece:
        piece = self.arena.piece(4 * len(values))
        piece.buffer.write(piece.offset, np.ascontiguousarray(values, np.float32).view(np.uint8))
        return piece

    def _type_of(self, name: str) -> GGMLType:
        type_ = self._source.tensors[name].type
        if type_ not in COMPUTED:
            raise UnsupportedModelError(
                f"{name}: no Vulkan kernel decodes the type {type_.name} yet; leave --device out, and the "
                "CPU computes this model, or take a file of another type"
            )
        return type_

    def _upload(
        self, data: Sequence[np.ndarray], type_: GGMLType, n_cols: int, first: int, n_rows: int
    ) -> DeviceMatrix:
        """data: bytes of rows [n, rows, bytes of a row]; several arrays have experts one after the other."""
        matrix = self.empty(type_, sum(map(len, data)), n_rows, n_cols)
        rows = (one[first : first + n_rows] for matrices in data for one in matrices)
        for number, own in enumerate(rows):
            write_all(placed(matrix, number, own))
        return matrix

    def empty(self, type_: GGMLType, n_expert: int, n_rows: int, n_cols: int) -> DeviceMatrix:
        """Room for n_rows rows of each of so many experts; 1: of a matrix."""
        # The larger array of a tile of 32 rows, as far as bindings reach.
        code_bytes, more_bytes = tile_bytes(type_, n_cols, row_bytes(type_, n_cols))
        largest = max(code_bytes, more_bytes) * n_expert
        n_tiles = -(-n_rows // TILE)
        tiles_of_part = min(self._max_range // largest, n_tiles)
        if not tiles_of_part:
            raise UnsupportedModelError(
                f"32 rows of {n_expert} experts of {n_cols} columns are more than the device binds at a time"
            )
        parts = []
        for tile in range(0, n_tiles, tiles_of_part):
            n = min(tiles_of_part, n_tiles - tile)
            codes = self.arena.piece(code_bytes * n * n_expert)
            more = self.arena.piece(more_bytes * n * n_expert) if more_bytes else None
            parts.append(MatrixPart(codes, more, tile * TILE, min(n * TILE, n_rows - tile * TILE)))
        return DeviceMatrix(type_, n_rows, n_cols, tuple(parts))


Placed = tuple[Piece, int, np.ndarray]  # an offset in a piece, and what goes there, uint8


def placed(matrix: DeviceMatrix, expert: int, rows: np.ndarray) -> Iterator[Placed]:
    """What the rows of a matrix, or of one of its experts, are on the device, some at a time. rows: uint8
    [n, bytes of a row], as in the file."""
    step = max(_SLICE_BYTES // rows.shape[1] // TILE, 1) * TILE
    for part in matrix.parts:
        own, n_tiles = rows[part.first : part.first + part.n_rows], -(-part.n_rows // TILE)
        for at in range(0, len(own), step):
            some, tile = own[at : at + step], expert * n_tiles + at // TILE
            arrays = rearranged(some, GGMLType(matrix.type), matrix.n_cols)
            for piece, array in zip((part.codes, part.more), arrays, strict=True):
                if piece is not None and array is not None:
                    size = array.nbytes // (-(-len(some) // TILE))
                    yield piece, tile * size, array.reshape(-1).view(np.uint8)


def write_all(found: Iterable[Placed]) -> None:
    """Copies to the device, while no program runs that reads there."""
    for piece, offset, data in found:
        piece.buffer.write(piece.offset + offset, data)


def rearranged(rows: np.ndarray, type_: GGMLType, n_cols: int) -> tuple[np.ndarray, np.ndarray | None]:
    """As `packed`, of rows that caches hold at a time: what is made on the way is then not fresh memory."""
    step = max(_CACHED_BYTES // rows.shape[1] // TILE, 1) * TILE
    parts = [packed(rows[at : at + step], type_, n_cols) for at in range(0, len(rows), step)]
    if len(parts) == 1:
        return parts[0]
    codes, more = zip(*parts, strict=True)
    return np.concatenate(codes), None if more[0] is None else np.concatenate(more)


@functools.cache
def tile_bytes(type_: GGMLType, n_cols: int, row: int) -> tuple[int, int]:
    """Bytes of 32 rows of a type, of `row` bytes each in the file: of the codes, and of the rest."""
    codes, more = packed(np.zeros((TILE, row), np.uint8), type_, n_cols)
    return codes.nbytes, 0 if more is None else more.nbytes


def packed(rows: np.ndarray, type_: GGMLType, n_cols: int) -> tuple[np.ndarray, np.ndarray | None]:
    """Bytes of rows, uint8 [n, bytes of a row], as codes, uint32 [tiles, blocks, vectors, 32, 4], and the
    rest, uint32 [tiles, blocks or groups of eight, words] or None."""
    if len(rows) % TILE:
        rows = np.concatenate([rows, np.zeros((-len(rows) % TILE, rows.shape[1]), np.uint8)])
    if type_ == _T.F32 or type_ in _HALVES:
        width = TYPES[type_].block_bytes
        padded = np.zeros((len(rows), -(-n_cols // BLOCK) * BLOCK * width), np.uint8)
        padded[:, : rows.shape[1]] = rows
        return _codes(padded, 2 * width), None
    layout = TYPES[type_].block
    assert layout is not None, "a type with a kernel has a layout"
    blocks = np.ascontiguousarray(rows).view(layout).reshape(len(rows), -1)
    if type_ == _T.Q8_0:
        return _codes(_field(blocks, "qs"), 2), _paired(blocks["d"])
    if type_ in _K_TYPES:
        return _packed_k(blocks, type_)
    codes = _codes(_field(blocks, "qs"), 1)
    if type_ == _T.MXFP4:
        return codes, np.ascontiguousarray(_tiled(blocks["e"])).view(np.uint32)
    scales = (
        _paired(blocks["d"]) if "m" not in (blocks.dtype.names or ()) else _words(_halves(blocks, "d", "m"))
    )
    if "qh" not in (blocks.dtype.names or ()):
        return codes, scales
    bits = np.unpackbits(_field(blocks, "qh"), bitorder="little")
    high = _high_bits(bits.reshape(*blocks.shape, 32))
    return codes, np.concatenate([_words(high), scales], axis=-1)


def _packed_k(blocks: np.ndarray, type_: GGMLType) -> tuple[np.ndarray, np.ndarray]:
    """Of blocks of 256 columns; the rest is of each of them."""
    n_rows, n_blocks = blocks.shape
    own, codes = k_parts(blocks.reshape(-1), type_)  # [n, 8, 2], [n, 8, 32]
    low = (codes & np.uint8(15)).view(np.complex128)  # as in _codes
    nibbles = np.ascontiguousarray(low[:, :, 0]).view(np.uint8)
    nibbles |= np.ascontiguousarray(low[:, :, 1]).view(np.uint8) << np.uint8(4)
    scales = np.ascontiguousarray(own).reshape(-1).view(np.uint32).reshape(n_rows, n_blocks, 4)
    if type_ == _T.Q6_K:
        # Of 16 columns a word: a byte of every fourth.
        high = (codes >> np.uint8(4)).reshape(-1).view(np.uint32).reshape(-1, 4)
        bits = (
            high[:, 0] | high[:, 1] << np.uint32(2) | high[:, 2] << np.uint32(4) | high[:, 3] << np.uint32(6)
        )
        bits = bits.reshape(n_rows, n_blocks, 16)
        more = [_paired(blocks["d"]), *_columns(scales), *_columns(bits)]
    else:
        more = [_words(_halves(blocks, "d", "dmin")), *_columns(scales)]
        if type_ == _T.Q5_K:
            more += _columns(_high_bits(codes >> np.uint8(4)).reshape(n_rows, n_blocks, 8))
    return _codes(nibbles.reshape(n_rows, -1), 1), np.concatenate(more, axis=-1)


def _high_bits(bits: np.ndarray) -> np.ndarray:
    """Bits of 32 columns, uint8 [..., 32], as words: byte i has those of every fourth column from i on."""
    by_column = bits.reshape(*bits.shape[:-1], 8, 4).swapaxes(-1, -2)
    packed = np.packbits(by_column, axis=-1, bitorder="little").reshape(*bits.shape[:-1], 4)
    return np.ascontiguousarray(packed).view(np.uint32).reshape(bits.shape[:-1])


def _codes(bytes_: np.ndarray, vectors: int) -> np.ndarray:
    """uint8 [rows, blocks * vectors * 16] in tiles."""
    n_blocks = bytes_.size // len(bytes_) // 16 // vectors
    of_16 = bytes_.reshape(len(bytes_), -1).view(
        np.complex128
    )  # NumPy moves its numbers whole: 15 times as fast
    tiles = of_16.reshape(-1, TILE, n_blocks, vectors).transpose(0, 2, 3, 1)
    return np.ascontiguousarray(tiles).view(np.uint32).reshape(-1, n_blocks, vectors, TILE, 4)


def _field(blocks: np.ndarray, name: str) -> np.ndarray:
    """A field of blocks that has bytes, uint8 [..., bytes], side by side; each is moved whole."""
    kind, offset = blocks.dtype.fields[name][:2]  # type: ignore[index]
    whole = np.dtype({"names": [name], "formats": [f"V{kind.itemsize}"], "offsets": [offset],
                      "itemsize": blocks.dtype.itemsize})  # fmt: skip
    return np.ascontiguousarray(blocks.view(whole)[name]).view(np.uint8).reshape(*blocks.shape, -1)


def _tiled(values: np.ndarray) -> np.ndarray:
    """[rows, blocks] → [tiles, blocks, 32]."""
    return np.asarray(values.reshape(-1, TILE, values.shape[1]).transpose(0, 2, 1))


def _words(words: np.ndarray) -> np.ndarray:
    """uint32 [rows, blocks], a word for each row."""
    return np.ascontiguousarray(_tiled(words))


def _columns(words: np.ndarray) -> list[np.ndarray]:
    """uint32 [rows, blocks, n] as n such arrays."""
    return [_words(words[:, :, i]) for i in range(words.shape[2])]


def _paired(halves: np.ndarray) -> np.ndarray:
    """float16 [rows, blocks], two rows in a word."""
    return np.ascontiguousarray(_tiled(np.ascontiguousarray(halves).view(np.uint16))).view(np.uint32)


def _halves(blocks: np.ndarray, low: str, high: str) -> np.ndarray:
    """Two float16 fields as words."""
    both = [np.ascontiguousarray(blocks[name]).view(np.uint16).astype(np.uint32) for name in (low, high)]
    return np.asarray(both[0] | both[1] << np.uint32(16))
