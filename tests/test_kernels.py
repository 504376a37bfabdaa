"""The native kernels against independent decoders, and against each other.

The bit-for-bit comparison of instruction sets with the scalar reference, at many shapes, is the C++ program
csrc/tests/kernel_test.cpp (`make kernel-test`); here the scalar and the chosen kernels meet NumPy.
"""

from __future__ import annotations

import numpy as np
import pytest
from make_blocks import random_blocks

from hotset import _core
from hotset.formats.quants import DECODABLE, GGMLType, dequantize

QUANTIZED = sorted(t for t in DECODABLE if t not in (GGMLType.F32, GGMLType.F16, GGMLType.BF16))
FLOATS = (GGMLType.F32, GGMLType.F16, GGMLType.BF16)


def matrix(type_: GGMLType, rows: int, cols: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Random blocks, flat, and the same matrix decoded to float64."""
    data = np.ascontiguousarray(random_blocks(type_, rows, cols, np.random.default_rng(seed))).reshape(-1)
    return data, dequantize(data, type_, (cols, rows)).astype(np.float64)


@pytest.mark.parametrize("type_", sorted(DECODABLE), ids=lambda t: t.name)
def test_native_decoding_equals_numpy(type_: GGMLType) -> None:
    data, expected = matrix(type_, 5, 768)
    np.testing.assert_array_equal(_core.dequantize(type_, data, 5, 768), expected.astype(np.float32))


@pytest.mark.parametrize("isa", _core.available_isas())
@pytest.mark.parametrize("n", [1, 7])
@pytest.mark.parametrize("type_", QUANTIZED, ids=lambda t: t.name)
def test_error_is_that_of_int8_activations(type_: GGMLType, n: int, isa: str) -> None:
    """|error| <= sum over k of |w_k| * step / 2, with step = max|x| / 127 of k's block of 32, plus rounding.

    Each activation is rounded to a multiple of its block's step, so it is off by half a step at most; the
    integer dot products are exact. What remains is float32 rounding: a few units of 2^-24 of the sum of
    magnitudes |w_k x_k|, and the representation of the steps themselves.
    """
    rows, cols = 33, 1024
    data, weights = matrix(type_, rows, cols)
    x = np.random.default_rng(1).standard_normal((n, cols)).astype(np.float32)
    x[:, 32:64] *= 100  # a block with another scale
    x[:, 64:96] = 0
    found = _core.linear(type_, data, rows, x, isa)
    steps = np.repeat(np.abs(x.reshape(n, -1, 32)).max(axis=2) / 127, 32, axis=1).astype(np.float64)
    bound = (steps / 2) @ np.abs(weights).T
    rounding = 64 * 2.0**-24 * (np.abs(x).astype(np.float64) @ np.abs(weights).T)
    error = np.abs(found - x.astype(np.float64) @ weights.T)
    # With a minimum, values m and d * q of opposite sign cancel in w: their magnitudes round, not w's.
    slack = (
        1.0
        if type_ not in (GGMLType.Q4_1, GGMLType.Q5_1, GGMLType.Q2_K, GGMLType.Q4_K, GGMLType.Q5_K)
        else 4.0
    )
    assert (error <= bound + slack * rounding + 1e-6).all()
    assert error.max() > 0 or type_ not in QUANTIZED


@pytest.mark.parametrize("isa", _core.available_isas())
@pytest.mark.parametrize("type_", FLOATS, ids=lambda t: t.name)
@pytest.mark.parametrize("shape", [(7, 1), (5, 100), (64, 576)])
def test_float_products_round_only(type_: GGMLType, shape: tuple[int, int], isa: str) -> None:
    rows, cols = shape
    data, weights = matrix(type_, rows, cols)
    for n in (1, 8):
        x = np.random.default_rng(2).standard_normal((n, cols)).astype(np.float32)
        found = _core.linear(type_, data, rows, x, isa)
        bound = (cols / 16 + 5) * 2.0**-24 * (np.abs(x).astype(np.float64) @ np.abs(weights).T)
        assert (np.abs(found - x.astype(np.float64) @ weights.T) <= bound + 1e-30).all()


@pytest.mark.parametrize("type_", sorted(DECODABLE), ids=lambda t: t.name)
def test_one_token_equals_many_on_every_instruction_set(type_: GGMLType) -> None:
    rows, cols = 21, 768
    data, _ = matrix(type_, rows, cols)
    x = np.random.default_rng(3).standard_normal((9, cols)).astype(np.float32)
    expected = _core.linear(type_, data, rows, x, "scalar")
    for isa in _core.available_isas():
        np.testing.assert_array_equal(_core.linear(type_, data, rows, x, isa), expected)
        one_by_one = np.concatenate(
            [_core.linear(type_, data, rows, x[i : i + 1].copy(), isa) for i in range(9)]
        )
        np.testing.assert_array_equal(one_by_one, expected)


def test_wrong_arguments_are_sentences() -> None:
    data = np.zeros(18, np.uint8)
    x = np.zeros((1, 32), np.float32)
    with pytest.raises(ValueError, match="takes 36 bytes, not 18"):
        _core.linear(GGMLType.Q4_0, data, 2, x)
    with pytest.raises(ValueError, match="whole blocks"):
        _core.linear(GGMLType.Q4_0, data, 1, np.zeros((1, 31), np.float32))
    with pytest.raises(ValueError, match="tensor type 16 has no kernel"):
        _core.linear(16, data, 1, x)
    with pytest.raises(ValueError, match="HOTSET_ISA=sse"):
        _core.linear(GGMLType.Q4_0, data, 1, x, "sse")


def test_bandwidth_is_measured() -> None:
    data = np.ones(64 << 20, np.uint8)
    assert 1e8 < _core.read_bandwidth(data, 2) < 1e13
