"""Matrices in a Vulkan device's memory, in the order in which its kernels read them.

csrc/device_tiles.h defines the layout. The weights are bitwise identical to the file's.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from hotset import _core
from hotset.backends.cpu.lowering import PLANES
from hotset.backends.decoded import decoded_vector
from hotset.backends.device.weights import KeptWeights
from hotset.backends.vulkan.memory import BufferArena, BufferRange
from hotset.backends.vulkan.plugin import CAPABILITIES, refused
from hotset.cores import usable_cores
from hotset.errors import UnsupportedModelError
from hotset.formats.lora import FloatMatrix
from hotset.formats.quants import GGMLType, row_bytes
from hotset.formats.source import WeightSource
from hotset.model.operations import Linear

TILE = 32  # rows
_MOST_THREADS = 4  # of an upload: more do not make memory and buses faster
_T = GGMLType
FLOATS = (_T.F32, _T.F16, _T.BF16)
_PLANES = 100  # added to a type: neuron-major codes, scales by 32 neurons (formats/planes.py)
COMPUTED = CAPABILITIES.tensor_types


@dataclass(frozen=True)
class MatrixPart:
    """Rows [first, first + n_rows) of a matrix, or of each of its experts.

    more: bytes other than codes; None if the type has only codes. tile: the first of the rows' tiles in both.
    nbytes: the bytes of the rows.
    """

    codes: BufferRange
    more: BufferRange | None
    first: int
    n_rows: int
    nbytes: int
    tile: int = 0


@dataclass(frozen=True)
class VulkanMatrix:
    """A matrix, in several parts if one binding cannot hold it. type: the GGML type, or a type of planes."""

    type: int
    n_rows: int
    n_cols: int
    parts: tuple[MatrixPart, ...]

    def rows(self, first: int, n_rows: int) -> VulkanMatrix:
        """Return the rows [first, first + n_rows) as a matrix. first: a multiple of 32."""
        found = []
        for part in self.parts:
            start, end = max(first, part.first), min(first + n_rows, part.first + part.n_rows)
            if start < end:
                found.append(self._view(part, start - first, end - start, (start - part.first) // TILE))
        return VulkanMatrix(self.type, n_rows, self.n_cols, tuple(found))

    def expert(self, i: int) -> VulkanMatrix:
        """Return the matrix of one expert."""
        found = (self._view(part, part.first, part.n_rows, i * n_tiles(part.n_rows)) for part in self.parts)
        return VulkanMatrix(self.type, self.n_rows, self.n_cols, tuple(found))

    def _view(self, part: MatrixPart, first: int, n_rows: int, tile: int) -> MatrixPart:
        n_bytes = n_tiles(n_rows) * sum(tile_bytes(GGMLType(self.type), self.n_cols))
        return MatrixPart(part.codes, part.more, first, n_rows, n_bytes, part.tile + tile)


@dataclass(frozen=True)
class JoinedProducts:
    """Products of one input, with weights of one type, whose rows are in one matrix on the device.

    gated: gate and up, which are as two experts, so that a part has the same neurons of both; otherwise the
    rows follow each other.
    """

    ops: tuple[Linear, ...]
    gated: bool


class VulkanWeights(KeptWeights[BufferRange]):
    """The weights of a stage on a device.

    loaded: weights of the same model on the device; tensors that it holds are not loaded again.
    """

    def __init__(
        self, source: WeightSource, device: _core.VulkanDevice, loaded: VulkanWeights | None = None
    ) -> None:
        super().__init__(source, None if loaded is None else loaded.kept)
        self._max_range = int(device.max_range)
        self.tensors = source.tensors
        self.arena = BufferArena(device)
        self._n_threads = min(usable_cores(), _MOST_THREADS)
        self._joined: dict[tuple[str, int, int], JoinedProducts] = {}

    def upload(self, values: np.ndarray) -> BufferRange:
        """Copy numbers to the device, as float32."""
        piece = self.arena.piece(4 * len(values))
        piece.buffer.write(piece.offset, np.ascontiguousarray(values, np.float32).view(np.uint8))
        return piece

    def rows(self, name: str, n_cols: int, first: int, n_rows: int) -> VulkanMatrix:
        """Return rows of a matrix. Raises UnsupportedModelError if no kernel decodes its type."""
        return self.experts([name], 1, n_cols, first, n_rows)

    def join(self, groups: Iterable[JoinedProducts]) -> None:
        """Load the matrices and biases of these products together when they are needed."""
        self._joined |= {_rows_of(op): joined for joined in groups for op in joined.ops}

    def has(self, joined: JoinedProducts) -> bool:
        """Return whether these products, and no others, were joined."""
        return all(self._joined.get(_rows_of(op)) == joined for op in joined.ops)

    def of_product(self, op: Linear) -> tuple[VulkanMatrix, BufferRange | None, int]:
        """Return the matrix of a product, its biases or None, and the number of its first bias."""
        joined = self._joined.get(_rows_of(op))
        if joined is None:
            matrix = self.rows(op.weight, op.x.width, op.first_row, op.out.width)
            return matrix, self.bias(op.bias, op.first_row, op.out.width), 0
        (matrix, biases), rows = self.of_products(joined), list(map(_rows_of, joined.ops))
        at = rows.index(_rows_of(op))
        first = sum(n_rows for *_, n_rows in rows[:at])
        own = matrix.expert(at) if joined.gated else matrix.rows(first, op.out.width)
        return own, biases, first

    def of_products(self, joined: JoinedProducts) -> tuple[VulkanMatrix, BufferRange | None]:
        """Return the matrix of joined products, and their biases, one after the other, or None."""
        key, ops, biases = tuple(map(_rows_of, joined.ops)), joined.ops, None
        if ops[0].bias is not None:
            own = [(op.bias, slice(op.first_row, op.first_row + op.out.width)) for op in ops if op.bias]
            biases = self.made(
                (*key, "biases"),
                lambda: np.concatenate([decoded_vector(self.source, name)[rows] for name, rows in own]),
            )
        return self.once(key, lambda: self._load_joined(joined)), biases

    def _load_joined(self, joined: JoinedProducts) -> VulkanMatrix:
        ops, n_cols = joined.ops, joined.ops[0].x.width
        type_ = self._type_of(ops[0].weight)
        data = [
            self.source.data(op.weight).reshape(-1, row_bytes(type_, n_cols))[op.first_row :][: op.out.width]
            for op in ops
        ]
        if joined.gated:
            return self._upload([rows[None] for rows in data], type_, n_cols, np.arange(ops[0].out.width))
        matrix, first = self.empty(type_, 1, sum(map(len, data)), n_cols), 0
        for rows in data:
            for part in matrix.rows(first, len(rows)).parts:
                chosen = np.arange(part.first, part.first + part.n_rows)
                self._write(part, type_, n_cols, [rows[None]], chosen)
            first += len(rows)
        return matrix

    def chosen(self, name: str, n_cols: int, rows: np.ndarray) -> VulkanMatrix:
        """Return some rows of a matrix, in this order.

        A matrix and a first row must always have the same rows.
        """
        return self.once((name, "chosen", int(rows[0])), lambda: self._load([name], 1, n_cols, rows))

    def experts(
        self, names: Sequence[str], n_expert: int, n_cols: int, first: int, n_rows: int
    ) -> VulkanMatrix:
        """Return rows of each expert's matrix, from one tensor with all experts or one tensor per expert."""
        rows = np.arange(first, first + n_rows)
        return self.once((*names, first, n_rows), lambda: self._load(names, n_expert, n_cols, rows))

    def _load(self, names: Sequence[str], n_expert: int, n_cols: int, rows: np.ndarray) -> VulkanMatrix:
        type_, of_each = self._type_of(names[0]), n_expert // len(names)
        data = [self.source.data(name).reshape(of_each, -1, row_bytes(type_, n_cols)) for name in names]
        return self._upload(data, type_, n_cols, rows)

    def planes(self, name: str, scales: str, n_cols: int, rows: np.ndarray | None = None) -> VulkanMatrix:
        """Return a neuron-major matrix that is stored as planes, or some of its rows, with all scales."""
        return self.once((name,), lambda: self._load_planes(name, scales, n_cols, rows))

    def _load_planes(self, name: str, scales: str, n_cols: int, rows: np.ndarray | None) -> VulkanMatrix:
        codes = self.source.data(name).view(np.uint8).reshape(1, -1, self.tensors[name].shape[0])
        own = self.source.data(scales).view(np.uint8)
        type_ = _T.Q8_0 if codes.shape[2] == n_cols else _T.Q4_0
        rows = np.arange(codes.shape[1]) if rows is None else rows
        n_rows = -(-len(rows) // TILE) * TILE
        sizes = n_rows * codes.shape[2], own.nbytes
        if max(sizes) > self._max_range:
            raise UnsupportedModelError(
                f"{name} is more than the device binds at a time; use sparsity='dense'"
            )
        of_codes, of_scales = map(self.arena.piece, sizes)
        part = MatrixPart(of_codes, of_scales, 0, n_rows, sum(sizes))
        self._write(part, PLANES[n_cols // codes.shape[2]], n_cols, [codes], rows)
        # The file already stores the 32 scales of a tile and a block contiguously.
        write_all([(of_scales, 0, own)])
        return VulkanMatrix(type_ + _PLANES, n_rows, n_cols, (part,))

    def given(self, key: tuple[object, ...], matrix: FloatMatrix, first: int, n_rows: int) -> VulkanMatrix:
        """Return rows of a matrix that is not in the model's files."""
        data, rows = matrix.data.reshape(1, matrix.shape[0], -1), np.arange(first, first + n_rows)
        return self.once(key, lambda: self._upload([data], matrix.type, matrix.shape[1], rows))

    def numbers_of(self, vector: BufferRange, key: object, chosen: np.ndarray) -> BufferRange:
        """Return some numbers of a vector, in this order."""
        return self.made(key, lambda: np.frombuffer(vector.read(), np.float32)[chosen])

    def _type_of(self, name: str) -> GGMLType:
        type_ = self.source.tensors[name].type
        if type_ not in COMPUTED:
            raise refused(name, f"the type {type_.name}")
        return type_

    def _upload(
        self, data: Sequence[np.ndarray], type_: GGMLType, n_cols: int, rows: np.ndarray
    ) -> VulkanMatrix:
        """Upload some rows of the matrices in `data`, arrays of uint8 [n, rows, bytes of a row].

        Several arrays hold the experts one after the other.
        """
        matrix = self.empty(type_, sum(map(len, data)), len(rows), n_cols)
        for part in matrix.parts:
            self._write(part, type_, n_cols, data, rows[part.first : part.first + part.n_rows])
        return matrix

    def _write(
        self, part: MatrixPart, type_: int, n_cols: int, data: Sequence[np.ndarray], rows: np.ndarray
    ) -> None:
        """Upload rows to a part. type_: as in csrc/types.h; types of planes have only codes."""
        of_codes, of_more = _core.vulkan_tile_bytes(type_, n_cols)
        codes, more, n_before = part.codes, part.more if of_more else None, part.tile
        for matrices in data:
            _core.vulkan_upload(
                type_, n_cols, matrices, rows.astype(np.int32),
                (codes.buffer, codes.offset + n_before * of_codes),
                None if more is None else (more.buffer, more.offset + n_before * of_more), self._n_threads,
            )  # fmt: skip
            n_before += len(matrices) * -(-len(rows) // TILE)

    def empty(self, type_: GGMLType, n_expert: int, n_rows: int, n_cols: int) -> VulkanMatrix:
        """Allocate room for n_rows rows of each of n_expert experts; 1 for a plain matrix.

        Raises UnsupportedModelError if the device cannot bind a tile of all experts.
        """
        # A part holds as many tiles of 32 rows as one binding reaches in the larger array.
        code_bytes, more_bytes = tile_bytes(type_, n_cols)
        largest = max(code_bytes, more_bytes) * n_expert
        n = n_tiles(n_rows)
        tiles_of_part = min(self._max_range // largest, n)
        if not tiles_of_part:
            raise UnsupportedModelError(
                f"32 rows of {n_expert} experts of {n_cols} columns are more than the device binds at a time"
            )
        parts = []
        for tile in range(0, n, tiles_of_part):
            of_part = min(tiles_of_part, n - tile)
            codes = self.arena.piece(code_bytes * of_part * n_expert)
            more = self.arena.piece(more_bytes * of_part * n_expert) if more_bytes else None
            rows = min(of_part * TILE, n_rows - tile * TILE)
            n_bytes = (code_bytes + more_bytes) * of_part * n_expert
            parts.append(MatrixPart(codes, more, tile * TILE, rows, n_bytes))
        return VulkanMatrix(type_, n_rows, n_cols, tuple(parts))


Placed = tuple[BufferRange, int, np.ndarray]  # a range, an offset in it, and its new bytes


def placed(matrix: VulkanMatrix, expert: int, rows: np.ndarray) -> Iterator[Placed]:
    """Yield the device bytes for rows of a matrix or of one of its experts, one part at a time.

    rows: uint8 [n, bytes of a row], as in the file.
    """
    code_bytes, more_bytes = tile_bytes(GGMLType(matrix.type), matrix.n_cols)
    for part in matrix.parts:
        chosen = np.arange(part.first, part.first + part.n_rows, dtype=np.int32)
        codes, more = _core.vulkan_rearranged(matrix.type, matrix.n_cols, rows[None], chosen, 1)
        tile = expert * -(-part.n_rows // TILE)
        yield part.codes, tile * code_bytes, codes
        if part.more is not None:
            yield part.more, tile * more_bytes, more


def write_all(found: Iterable[Placed]) -> None:
    """Copy bytes to the device. No program that reads them may be running."""
    for piece, offset, data in found:
        piece.buffer.write(piece.offset + offset, data)


def n_tiles(n_rows: int) -> int:
    """Return the tiles of n_rows rows."""
    return -(-n_rows // TILE)


def _rows_of(op: Linear) -> tuple[str, int, int]:
    """Return the tensor of a product, and its first row and number of rows in it."""
    return op.weight, op.first_row, op.out.width


def tile_bytes(type_: GGMLType, n_cols: int) -> tuple[int, int]:
    """Return the bytes of 32 rows of a type: of the codes, and of the rest."""
    return _core.vulkan_tile_bytes(int(type_), n_cols)
