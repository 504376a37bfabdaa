"""The native kernels compared with independent decoders, and with each other. Errors: test_numerics.py.

The C++ program csrc/tests/kernel_test.cpp (`make kernel-test`) compares the bits of all instruction sets with
the scalar reference at many shapes. Here NumPy checks the scalar and the chosen kernels.
"""

from __future__ import annotations

import numpy as np
import pytest
from make_blocks import random_blocks

from hotset import _core
from hotset.formats.quants import DECODABLE, GGMLType, dequantize


def matrix(type_: GGMLType, rows: int, cols: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Return random blocks, flat, and the same matrix decoded to float64 [rows, cols]."""
    data = np.ascontiguousarray(random_blocks(type_, rows, cols, np.random.default_rng(seed))).reshape(-1)
    return data, dequantize(data, type_, (cols, rows)).astype(np.float64)


@pytest.mark.parametrize("type_", sorted(DECODABLE), ids=lambda t: t.name)
def test_native_decoding_equals_numpy(type_: GGMLType) -> None:
    data, expected = matrix(type_, 5, 768)
    np.testing.assert_array_equal(_core.dequantize(type_, data, 5, 768), expected.astype(np.float32))


@pytest.mark.parametrize("type_", sorted(DECODABLE), ids=lambda t: t.name)
def test_one_token_equals_many_on_every_instruction_set(type_: GGMLType) -> None:
    rows, cols = 21, 768
    data, _ = matrix(type_, rows, cols)
    n = 37  # more tokens than the kernels for few tokens handle
    x = np.random.default_rng(3).standard_normal((n, cols)).astype(np.float32)
    expected = _core.linear(type_, data, rows, x, "scalar")
    for isa in _core.available_isas():
        np.testing.assert_array_equal(_core.linear(type_, data, rows, x, isa), expected)
        one_by_one = np.concatenate(
            [_core.linear(type_, data, rows, x[i : i + 1].copy(), isa) for i in range(n)]
        )
        np.testing.assert_array_equal(one_by_one, expected)


def test_wrong_arguments_give_one_message() -> None:
    data = np.zeros(18, np.uint8)
    x = np.zeros((1, 32), np.float32)
    with pytest.raises(ValueError, match="takes 36 bytes, not 18"):
        _core.linear(GGMLType.Q4_0, data, 2, x)
    with pytest.raises(ValueError, match="whole blocks"):
        _core.linear(GGMLType.Q4_0, data, 1, np.zeros((1, 31), np.float32))
    with pytest.raises(ValueError, match="tensor type 15 has no kernel"):
        _core.linear(15, data, 1, x)
    with pytest.raises(ValueError, match="HOTSET_ISA=sse"):
        _core.linear(GGMLType.Q4_0, data, 1, x, "sse")


def test_bandwidth_is_measured() -> None:
    data = np.ones(64 << 20, np.uint8)
    assert 1e8 < _core.read_bandwidth(data, 2) < 1e13
    pieces = np.arange(0, len(data), 4096)[::2]
    assert 1e8 < _core.gather_bandwidth(data, pieces, 1024, 2) < 1e13
    with pytest.raises(ValueError, match="in the data"):
        _core.gather_bandwidth(data, pieces + len(data), 1024, 2)
