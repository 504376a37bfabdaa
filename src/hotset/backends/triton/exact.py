"""The CPU's arithmetic in torch, bitwise identical: an expert's result must not depend on its device.

The device computes an expert of an MoE model while its cache holds it; otherwise the CPU computes it. So both
must round alike. The CPU has one order for everything (csrc/kernels/kernels.h). Activations of quantised
products are int8 with a scale per 32, and the product of a block is an exact integer. Block b belongs to lane
b % 16, each lane adds its blocks by fused multiply-add, and a fixed tree sums the lanes. This module has the
same steps in readable form; experts_kernel.py has them for Triton. Fused multiply-adds are computed in
float64, which Apple's devices lack: there the CPU computes all experts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from hotset.backends.stage import SLICE_VALUES
from hotset.backends.triton.matrix import DeviceMatrix
from hotset.model.operations import ActivationKind

LANES = 16
RANGES, TILE = 8, 64  # ranges and tiles of neurons in a neuron-major down projection (csrc/ops/experts.cpp)


def fma(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """Return a * b + c of float32, rounded once."""
    product, c = a.double() * b.double(), c.double()  # exact: 48 bits
    total = product + c
    back = total - product
    lost = (product - (total - back)) + (c - back)
    # Round to odd, so that the next rounding gives the result of a single rounding.
    bits = total.view(torch.int64)
    is_between = (lost != 0) & (lost == lost) & (bits & 1 == 0)
    away = torch.where((lost > 0) == (total > 0), 1, -1)
    return (bits + torch.where(is_between, away, 0)).view(torch.float64).float()


def exp(x: Tensor) -> Tensor:
    """Return e^x, computed as in csrc/kernels/float_kernels.h."""
    x = torch.where(x > -88.5, x, -88.5)
    x = torch.where(x < 89.0, x, 89.0)
    n = torch.round(x * _f(1.44269504, x))
    n = torch.where(n > -127, n, -127.0)
    r = fma(n, _f(-0.693359375, x), x)
    r = fma(n, _f(2.12194440e-4, x), r)
    p = _f(1.9875691500e-4, x).expand_as(x)
    for term in (
        1.3981999507e-3,
        8.3334519073e-3,
        4.1665795894e-2,
        1.6666665459e-1,
        5.0000001201e-1,
    ):
        p = fma(p, r, _f(term, x))
    power = ((n.to(torch.int32) + 127) << 23).view(torch.float32)
    return fma(p * r, r, r + 1.0) * power


def activate(x: Tensor, kind: ActivationKind, threshold: float = 0.0) -> Tensor:
    """Return f(x), elementwise, for activations without library functions (expert_cache.ACTIVATIONS)."""
    bound = _f(threshold, x)
    match kind:
        case "silu":
            return x / (1.0 + exp(0.0 - x))
        case "gelu_tanh":
            u = x * fma(x * x, _f(0.0713548162726, x), _f(1.59576912161, x))
            return x / (1.0 + exp(0.0 - u))
        case "relu":
            return torch.where(x > 0, x, 0.0)
        case "relu2":
            r = torch.where(x > 0, x, 0.0)
            return r * r
        case "fatrelu":
            return torch.where(x >= bound, x, 0.0)
        case "sigmoid":
            return 1.0 / (1.0 + exp(0.0 - x))
        case "clamped_silu":
            m = torch.where(x < bound, x, bound)
            return m / (1.0 + exp(_f(-1.702, x) * m))
        case "clamped_plus_one":
            m = torch.where(x < bound, x, bound)
            return torch.where(m > -bound, m, -bound) + 1.0
        case _:
            raise AssertionError(f"{kind} is computed only on the CPU")


@dataclass(frozen=True)
class Quantized:
    """Rows of activations in blocks of 32.

    q: whole numbers, float64 [n, blocks, 32]; scale, sum: float32 [n, blocks].

    A block with a value that is not finite has codes 0, and NaN as scale and sum.
    """

    q: Tensor
    scale: Tensor
    sum: Tensor


def quantize(x: Tensor) -> Quantized:
    """Quantise x, float32 [n, k], k a multiple of 32."""
    blocks = x.reshape(len(x), -1, 32)
    largest = blocks.abs().amax(dim=2)
    steps = 127.0 / largest
    inverse = torch.where(steps < torch.inf, steps, 0.0)  # infinite if all values are zero
    q = torch.round(blocks * inverse[..., None])
    is_finite = blocks.isfinite().all(dim=2)
    q = torch.where(is_finite[..., None], q, 0.0)
    scale = torch.where(is_finite, largest / 127.0, torch.nan)
    return Quantized(q.double(), scale, scale * q.sum(dim=2))


def linear(x: Tensor, m: DeviceMatrix, first: int, n_rows: int) -> Tensor:
    """Multiply x [n, n_cols] by the rows [first, first + n_rows) of m: [n, n_rows]."""
    given = None if m.is_float else quantize(x)
    slices = _slices(first, n_rows, max(SLICE_VALUES // (m.n_cols * max(len(x), 1)), 1))
    return torch.cat(
        [_float_rows(x, m.values(rows)) if given is None else _block_rows(given, m, rows) for rows in slices],
        dim=1,
    )


def _block_rows(x: Quantized, m: DeviceMatrix, rows: slice) -> Tensor:
    w = m.blocks(rows)
    halves = (q.reshape(len(q), -1, 16).transpose(0, 1) for q in (x.q, w.q.double()))
    products = torch.einsum("bni,bri->nrb", *halves).unflatten(2, (-1, 2))  # exact, by halves of blocks
    if w.sub_scale is not None:
        products = products * w.sub_scale.double()
    dots = products.sum(dim=3).float()  # [n, rows, blocks]
    scales = w.scale[None] * x.scale[:, None]
    lanes = torch.zeros((*dots.shape[:2], LANES), device=dots.device)
    for at in range(0, dots.shape[2], LANES):
        now = slice(at, min(at + LANES, dots.shape[2]))
        n = now.stop - at
        sums = fma(scales[..., now], dots[..., now], lanes[..., :n])
        if w.min is not None:
            sums = fma(w.min[None, :, now], x.sum[:, None, now], sums)
        lanes[..., :n] = sums
    return _sum_lanes(lanes)


def _float_rows(x: Tensor, w: Tensor) -> Tensor:
    missing = -x.shape[1] % LANES
    x, w = torch.nn.functional.pad(x, (0, missing)), torch.nn.functional.pad(w, (0, missing))
    lanes = torch.zeros((len(x), len(w), LANES), device=x.device)
    for at in range(0, x.shape[1], LANES):
        lanes = fma(w[None, :, at : at + LANES], x[:, None, at : at + LANES], lanes)
    return _sum_lanes(lanes)


def _sum_lanes(lanes: Tensor) -> Tensor:
    half = LANES // 2
    while half:
        lanes = lanes[..., :half] + lanes[..., half:]
        half //= 2
    return lanes[..., 0]


def linear_t(x: Tensor, m: DeviceMatrix, first: int, n_rows: int) -> Tensor:
    """Multiply x [n, n_rows] by the transposed rows [first, first + n_rows) of m: [n, n_cols].

    The neurons are split into ranges. Each range is summed in order, and then the ranges are summed.
    """
    n_tiles = -(-n_rows // TILE)
    of_range = -(-n_tiles // RANGES) * TILE
    missing = -n_rows % of_range
    weights = torch.nn.functional.pad(m.values(slice(first, first + n_rows)), (0, 0, 0, missing))
    weights = weights.reshape(-1, of_range, m.n_cols)
    values = torch.nn.functional.pad(x, (0, missing)).reshape(len(x), -1, of_range, 1)
    sums = torch.zeros((len(x), len(weights), m.n_cols), device=x.device)
    for i in range(of_range):
        value = values[:, :, i]
        sums = torch.where(value != 0, fma(value, weights[None, :, i], sums), sums)
    total = sums[:, 0]
    for i in range(1, len(weights)):
        total = total + sums[:, i]
    return total


def _slices(first: int, n: int, step: int) -> Iterator[slice]:
    for at in range(first, first + n, step):
        yield slice(at, min(at + step, first + n))


def _f(value: float, like: Tensor) -> Tensor:
    """Return a float32 constant on the device of `like`."""
    return torch.tensor(value, dtype=torch.float32, device=like.device)
