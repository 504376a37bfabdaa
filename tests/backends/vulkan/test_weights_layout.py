"""Weights in the order of Vulkan kernels (csrc/device_tiles.h), compared with a plain implementation.

No driver is needed.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from hotset import _core
from hotset.backends.cpu.lowering import PLANES
from hotset.backends.vulkan.weights import COMPUTED, FLOATS, TILE
from hotset.formats.quants import TYPES, GGMLType, k_parts, row_bytes

T = GGMLType
PLANES4, PLANES8 = PLANES[2], PLANES[1]
SHAPES = [(256, 40), (768, 33), (1280, 1), (512, 64)]
CASES = [
    *((type_, shape) for type_ in COMPUTED for shape in SHAPES),
    *((type_, shape) for type_ in FLOATS for shape in ((1, 3), (37, 5), (100, 70))),
    *((type_, shape) for type_ in (PLANES4, PLANES8) for shape in ((96, 32), (256, 45))),
]


def bytes_of_row(type_: int, n_cols: int) -> int:
    if type_ in (PLANES4, PLANES8):
        return n_cols // 2 if type_ == PLANES4 else n_cols
    return row_bytes(GGMLType(type_), n_cols)


def expected(rows: np.ndarray, type_: int) -> tuple[np.ndarray, np.ndarray]:
    """Return codes and the rest, uint8 [tiles, blocks, bytes], of rows of a file, uint8 [n, row bytes]."""
    rows = np.pad(rows, ((0, -len(rows) % TILE), (0, 0)))
    if type_ in FLOATS or type_ in (PLANES4, PLANES8):
        width = (
            16 if type_ == PLANES4 else 32 if type_ == PLANES8 else 32 * TYPES[GGMLType(type_)].block_bytes
        )
        columns = np.pad(rows, ((0, 0), (0, -rows.shape[1] % width))).reshape(len(rows), -1, width)
        return side_by_side(columns, 16), np.empty(0, np.uint8)
    layout = TYPES[GGMLType(type_)].block
    assert layout is not None
    blocks = np.ascontiguousarray(rows).view(layout)
    own = [name for name in ("d", "m", "dmin", "e") if name in layout.fields]
    scales = np.concatenate([of_field(blocks, name) for name in own], axis=2)
    rest = [side_by_side(scales, scales.shape[2])]
    if "scales" not in layout.fields:
        if "qh" in layout.fields:
            bits = np.unpackbits(of_field(blocks, "qh"), axis=2, bitorder="little")
            rest.insert(0, side_by_side(by_fourths(bits[:, :, None], 1), 4))
        return side_by_side(of_field(blocks, "qs"), 16), np.concatenate(rest, axis=2)
    parts, codes = (one.reshape(*blocks.shape, 8, -1) for one in k_parts(blocks.reshape(-1), GGMLType(type_)))
    rest.append(side_by_side(parts.reshape(*blocks.shape, 16), 4))
    if type_ == T.Q5_K:
        rest.append(side_by_side(by_fourths(codes >> 4, 1), 4))
    if type_ == T.Q6_K:
        rest.append(side_by_side(by_fourths((codes >> 4).reshape(*blocks.shape, 16, 16), 2), 4))
    nibbles = codes[..., :16] & 15 | codes[..., 16:] << 4
    return side_by_side(nibbles.reshape(len(rows), -1, 16), 16), np.concatenate(rest, axis=2)


def side_by_side(of_blocks: np.ndarray, size: int) -> np.ndarray:
    """Return uint8 [tiles, blocks, bytes of 32 rows] from [rows, blocks, bytes], `size` bytes at a time."""
    n_rows, n_blocks, _ = of_blocks.shape
    tiles = of_blocks.reshape(-1, TILE, n_blocks, of_blocks.shape[2] // size, size)
    return np.ascontiguousarray(tiles.transpose(0, 2, 3, 1, 4)).reshape(n_rows // TILE, n_blocks, -1)


def by_fourths(values: np.ndarray, n_bits: int) -> np.ndarray:
    """Return small values, uint8 [rows, blocks, n, columns], packed as [rows, blocks, 4 n].

    Byte i of each n has the values of every fourth column from i on.
    """
    of_fourths = values.reshape(*values.shape[:3], -1, 4) << (n_bits * np.arange(8 // n_bits))[:, None]
    return of_fourths.sum(axis=3).astype(np.uint8).reshape(*values.shape[:2], -1)


def of_field(blocks: np.ndarray, name: str) -> np.ndarray:
    """Return the bytes of a field, uint8 [rows, blocks, bytes]."""
    return np.ascontiguousarray(blocks[name]).view(np.uint8).reshape(*blocks.shape, -1)


@pytest.mark.parametrize(("type_", "shape"), CASES, ids=str)
def test_rows_of_every_type(type_: int, shape: tuple[int, int]) -> None:
    """Check some rows in any order, of one and of three matrices, with any number of threads."""
    (n_cols, n_rows), rng = shape, np.random.default_rng(int(type_))
    sizes = _core.vulkan_tile_bytes(type_, n_cols)
    for n_matrices, chosen in ((1, np.arange(n_rows)), (3, rng.permutation(n_rows)[: -(-n_rows * 2 // 3)])):
        data = rng.integers(0, 256, (n_matrices, n_rows, bytes_of_row(type_, n_cols)), np.uint8)
        wanted = [expected(one[chosen], type_) for one in data]
        for n_threads in (1, 3):
            found = _core.vulkan_rearranged(type_, n_cols, data, chosen.astype(np.int32), n_threads)
            for i, size in enumerate(sizes):
                of_all = np.concatenate([one[i].reshape(-1) for one in wanted])
                assert np.array_equal(found[i], of_all)
                assert len(of_all) == size * n_matrices * -(-len(chosen) // TILE)


def test_many_tiles_by_several_threads() -> None:
    """Check more tiles than a thread takes at a time."""
    data = np.random.default_rng(0).integers(0, 256, (1, 5000, row_bytes(T.Q4_1, 512)), np.uint8)
    codes, more = expected(data[0], T.Q4_1)
    found = _core.vulkan_rearranged(T.Q4_1, 512, data, np.arange(5000, dtype=np.int32), 3)
    assert np.array_equal(found[0], codes.reshape(-1))
    assert np.array_equal(found[1], more.reshape(-1))


ROWS = np.arange(2, dtype=np.int32)
FITTING: dict[str, Any] = {
    "type": T.Q4_0, "cols": 64, "data": np.zeros((1, 2, 36), np.uint8), "rows": ROWS, "n_threads": 1
}  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"type": T.Q2_K}, "no device kernel"), ({"type": -1}, "out of range"),
        ({"type": 1 << 20}, "out of range"),
        ({"cols": 0}, "of columns"), ({"cols": -64}, "of columns"), ({"cols": 1 << 62}, "of columns"),
        ({"cols": 65}, "whole blocks"), ({"cols": 96}, "do not match its columns"),
        ({"data": np.zeros((1, 2, 35), np.uint8)}, "do not match its columns"),
        ({"rows": ROWS + 1}, "outside the matrix"), ({"rows": ROWS - 1}, "outside the matrix"),
        ({"rows": np.zeros(3, np.int32)}, "than the matrix has"),
        ({"n_threads": 0}, "threads"), ({"n_threads": 1 << 20}, "threads"),
    ],
)  # fmt: skip
def test_oversized_input_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        _core.vulkan_rearranged(**{**FITTING, **changes})


def test_no_rows_and_no_matrices() -> None:
    for changes in ({"rows": ROWS[:0]}, {"data": np.zeros((0, 2, 36), np.uint8)}):
        assert [len(one) for one in _core.vulkan_rearranged(**{**FITTING, **changes})] == [0, 0]
