"""The CPU's arithmetic in torch: bitwise equal to the native kernels."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from make_blocks import random_blocks  # noqa: E402

from hotset import _core  # noqa: E402
from hotset.backends.triton import exact  # noqa: E402
from hotset.backends.triton.matrix import EXPERT_TYPES, DeviceMatrix  # noqa: E402
from hotset.formats.quants import GGMLType  # noqa: E402


def wild(*shape: int, seed: int = 0) -> np.ndarray:
    """Return float32 numbers of many magnitudes, with some zeros."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(shape) * 2.0 ** rng.integers(-30, 12, shape)
    return np.where(rng.random(shape) < 0.05, 0.0, x).astype(np.float32)


def test_fma_rounds_once() -> None:
    a, b, c = (wild(4000, seed=i) for i in range(3))
    c[::2] = (-a.astype(np.float64) * b)[::2].astype(np.float32)  # nearly cancels the product
    # Almost halfway between two floats: only far smaller bits decide.
    a[:3], b[:3], c[:3] = 1 + 2.0**-23, 2.0**-24, [1.0, 1 + 2.0**-23, -1.0]
    a[3:5], b[3:5], c[3:5] = 2.0**-60, 2.0**-60, [1.0, -1.0]
    found = exact.fma(*(torch.from_numpy(x) for x in (a, b, c))).numpy()
    for x, y, z, f in zip(a.tolist(), b.tolist(), c.tolist(), found, strict=True):
        whole = Fraction(x) * Fraction(y) + Fraction(z)
        near = [np.nextafter(f, np.float32(np.inf)), f, np.nextafter(f, np.float32(-np.inf))]
        distances = [abs(Fraction(float(v)) - whole) for v in near]
        assert distances[1] <= min(distances), (x, y, z)
        if distances.count(distances[1]) > 1:  # a tie goes to the even one
            assert f.view(np.int32) % 2 == 0


@pytest.mark.parametrize("type_", EXPERT_TYPES, ids=lambda t: GGMLType(t).name)
def test_products_have_the_bits_of_the_native_kernels(type_: GGMLType) -> None:
    k, n_rows = 768, 21
    data = random_blocks(type_, n_rows, k, np.random.default_rng(1)).reshape(-1)
    matrix = DeviceMatrix.empty(type_, n_rows, k, "cpu")
    matrix.put(0, data.reshape(n_rows, -1)[:9])
    matrix.put(9, data.reshape(n_rows, -1)[9:])
    x = wild(5, k)
    x[3], x[4, 40:60] = 0, 1e-42
    expected = _core.linear(int(type_), data, n_rows, x)
    found = exact.linear(torch.from_numpy(x), matrix, 3, 15).numpy()
    np.testing.assert_array_equal(found, expected[:, 3:18])
    x[0, 5], x[1, 700] = np.inf, np.nan
    expected = _core.linear(int(type_), data, n_rows, x)
    found = exact.linear(torch.from_numpy(x), matrix, 0, n_rows).numpy()
    np.testing.assert_array_equal(np.isnan(found), np.isnan(expected))
