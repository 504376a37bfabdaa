"""Triton kernels for the experts in a device's slots, bitwise identical to the reference in exact.py.

A *pair* is a token and one of its experts. Inputs are quantised once. A program then computes some rows of
one pair's expert: each row has sixteen lanes, which take blocks in turn. For a pair whose expert has no slot,
programs start and end at once. With many tokens, pairs are sorted by their slots. A program then has rows of
one expert and several pairs, and decodes the rows once. Products of blocks are whole numbers, which tensor
cores add exactly. The host reads nothing back, and only shapes decide the launches. The compiler must not
fuse products and sums (`fused=False`); kernels fuse them explicitly.
"""

# Kernel arguments have no Python types: they are pointers, numbers and constants.
# mypy: disable-error-code="no-untyped-def"
# ruff: noqa: SIM109

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, get_args

import torch
import triton
import triton.language as tl
from torch import Tensor

from hotset.backends.torch import functions
from hotset.backends.triton import launch as launcher
from hotset.backends.triton.fallback import TokenThreshold
from hotset.backends.triton.matrix import FIELDS, DeviceMatrix, HostRows, block_fields
from hotset.backends.triton.tiles import pow2
from hotset.backends.triton.triton_kernels import (
    CLAMPED_PLUS_ONE,
    CLAMPED_SILU,
    FATRELU,
    FEW_TOKENS,
    FLOAT,
    FORMATS,
    GELU_TANH,
    KINDS,
    Q4_0,
    Q4_1,
    Q4_K,
    Q5_0,
    Q5_1,
    Q6_K,
    Q8_0,
    RELU,
    RELU2,
    SIGMOID,
    SILU,
    _zero_small,
    await_launches,
    is_amd,
)
from hotset.formats.quants import GGMLType
from hotset.model.operations import Activate, Route, Scoring

MXFP4 = tl.constexpr(8)
TYPES = FORMATS | {GGMLType.MXFP4: 8}
TO_WHOLE = tl.constexpr(12582912.0)  # 1.5 * 2^23; (x + it) - it rounds |x| < 2^22 to a whole number


@triton.jit
def _quantize_kernel(x, q, scales, sums, n_blocks, B: tl.constexpr):
    """Compute exact.quantize of B blocks of one row; q: int8."""
    await_launches()
    row = tl.program_id(0).to(tl.int64)
    b = tl.program_id(1) * B + tl.arange(0, B)
    at = (row * n_blocks + b)[:, None] * 32 + tl.arange(0, 32)[None, :]
    inside = (b < n_blocks)[:, None]
    v = tl.load(x + at, mask=inside, other=0.0)
    size = tl.abs(v)
    finite = tl.sum((size < float("inf")).to(tl.int32), axis=1) == 32
    largest = tl.max(size, axis=1)
    steps = tl.div_rn(tl.full([B], 127.0, tl.float32), largest)
    inverse = tl.where(steps < float("inf"), steps, 0.0)
    codes = (v * inverse[:, None] + TO_WHOLE) - TO_WHOLE
    codes = tl.where(finite[:, None], codes, 0.0)
    scale = tl.where(finite, tl.div_rn(largest, tl.full([B], 127.0, tl.float32)), float("nan"))
    total = tl.sum(codes.to(tl.int32), axis=1).to(tl.float32)
    tl.store(q + at, codes.to(tl.int8), mask=inside)
    tl.store(scales + row * n_blocks + b, scale, mask=b < n_blocks)
    tl.store(sums + row * n_blocks + b, scale * total, mask=b < n_blocks)


@triton.jit
def _codes(codes, high, row, n_blocks, b, inside, TYPE: tl.constexpr):
    """Load the codes of blocks b of rows as whole numbers, int32 [R, 16, 32]. row: int64 [R]."""
    i = tl.arange(0, 32)[None, None, :]
    block = b[None, :, None]
    mask = inside[None, :, None]
    at = row[:, None, None] * (n_blocks * (32 if TYPE == Q8_0 else 16))
    if TYPE == Q8_0:
        return tl.load(codes + at + block * 32 + i, mask=mask, other=0).to(tl.int32)
    elif TYPE == Q4_K:
        byte = tl.load(codes + at + block // 2 * 32 + i, mask=mask, other=0).to(tl.int32)
        return (byte >> (block % 2 * 4)) & 15
    elif TYPE == Q6_K:
        j = block % 8
        low = at + block // 8 * 128 + j // 4 * 64 + j % 2 * 32 + i
        byte = tl.load(codes + low, mask=mask, other=0).to(tl.int32) >> (j % 4 // 2 * 4)
        upper = row[:, None, None] * (n_blocks * 8) + block // 8 * 64 + j // 4 * 32 + i
        bits = tl.load(high + upper, mask=mask, other=0).to(tl.int32) >> (j % 4 * 2)
        return ((byte & 15) | (bits & 3) << 4) - 32
    else:
        byte = tl.load(codes + at + block * 16 + i % 16, mask=mask, other=0).to(tl.int32)
        number = (byte >> (i // 16 * 4)) & 15
        if TYPE == Q5_0 or TYPE == Q5_1:
            bits = tl.load(high + row[:, None] * n_blocks + b[None, :], mask=inside[None, :], other=0)
            number = number | ((bits[:, :, None] >> i) & 1) << 4
        if TYPE == MXFP4:  # twice a sign, two bits of exponent and one of mantissa
            exponent = number >> 1 & 3
            size = tl.where(exponent == 0, number & 1, (number & 1 | 2) << tl.maximum(exponent - 1, 0))
            number = tl.where(number >= 8, -size, size)
        if TYPE == Q4_0:
            number = number - 8
        if TYPE == Q5_0:
            number = number - 16
        return number


@triton.jit
def _small_scale(sub_scales, at, j, mask, first: tl.constexpr):
    """Load a scale (first = 0) or a minimum (first = 4) of Q4_K, six bits of its twelve bytes."""
    low = tl.load(sub_scales + at + first + j % 4, mask=mask, other=0).to(tl.int32)
    last = tl.load(sub_scales + at + 8 + j % 4, mask=mask, other=0).to(tl.int32)
    # The high two bits of numbers from 4 on are above the first four numbers of the same kind.
    later = ((last >> first) & 15) | (low >> 6) << 4
    return tl.where(j < 4, low & 63, later).to(tl.float32)


@triton.jit
def _expert_rows_kernel(
    x, q, q_scales, q_sums, slots, out, bias, codes, scales, mins, high, sub_scales,
    n_rows, n_cols, n_blocks, pairs_of_input,
    TYPE: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """Compute out [pairs, n_rows]: exact.linear of each pair's input and R rows of its expert, + bias.

    The result is 0 for an expert without slot.
    """
    await_launches()
    rows = tl.program_id(0) * R + tl.arange(0, R)
    pair = tl.program_id(1)
    slot = tl.load(slots + pair)
    inside_rows = rows < n_rows
    y = tl.zeros([R], tl.float32)
    if slot >= 0:
        given = (pair // pairs_of_input).to(tl.int64)
        row = slot.to(tl.int64) * n_rows + tl.where(inside_rows, rows, 0)
        lanes = tl.zeros([R, 16], tl.float32)
        lane = tl.arange(0, 16)
        if TYPE == FLOAT:
            for first in range(0, n_cols, 16):
                k = first + lane
                w = tl.load(codes + row[:, None] * n_cols + k[None, :], mask=(k < n_cols)[None, :], other=0.0)
                v = tl.load(x + given * n_cols + k, mask=k < n_cols, other=0.0)
                lanes = tl.fma(w.to(tl.float32), tl.broadcast_to(v[None, :], [R, 16]), lanes)
        else:
            for first in range(0, n_blocks, 16):
                b = first + lane
                inside = b < n_blocks
                at = given * n_blocks + b
                i = tl.arange(0, 32)
                xs = tl.load(q + at[:, None] * 32 + i[None, :], mask=inside[:, None], other=0).to(tl.int32)
                products = _codes(codes, high, row, n_blocks, b, inside, TYPE) * xs[None, :, :]
                PER: tl.constexpr = 8 if TYPE == Q4_K or TYPE == Q6_K else 1  # blocks under one scale
                above = row[:, None] * (n_blocks // PER) + (b // PER)[None, :]
                mask = inside[None, :]
                if TYPE == MXFP4:  # 2^(e - 128) by its bits; the two smallest are subnormal
                    e = tl.load(scales + above, mask=mask, other=0).to(tl.int32)
                    least_bits = tl.where(e == 0, 0x00200000, 0x00400000)
                    scale = tl.where(e < 2, least_bits, (e - 1) << 23).to(tl.float32, bitcast=True)
                else:
                    scale = tl.load(scales + above, mask=mask, other=0.0).to(tl.float32)
                if TYPE == Q6_K:
                    halves = tl.sum(tl.reshape(products, [R, 16, 2, 16]), axis=3)
                    h = tl.arange(0, 2)[None, None, :]
                    sub = row[:, None, None] * (n_blocks * 2) + b[None, :, None] * 2 + h
                    own = tl.load(sub_scales + sub, mask=inside[None, :, None], other=0).to(tl.int32)
                    dots = tl.sum(halves * own, axis=2)
                else:
                    dots = tl.sum(products, axis=2)
                if TYPE == Q4_K:
                    j = (b % 8)[None, :]
                    scale = scale * _small_scale(sub_scales, above * 12, j, mask, 0)
                weight = scale * tl.load(q_scales + at, mask=inside, other=0.0)[None, :]
                more = tl.fma(weight, dots.to(tl.float32), lanes)
                if TYPE == Q4_1 or TYPE == Q5_1 or TYPE == Q4_K:
                    least = tl.load(mins + above, mask=mask, other=0.0).to(tl.float32)
                    if TYPE == Q4_K:
                        least = -(least * _small_scale(sub_scales, above * 12, j, mask, 4))
                    total = tl.load(q_sums + at, mask=inside, other=0.0)
                    more = tl.fma(least, tl.broadcast_to(total[None, :], [R, 16]), more)
                lanes = tl.where(mask, more, lanes)
        # Sum lanes in pairs: (l, l + 8), then (l, l + 4), (l, l + 2), (l, l + 1).
        eight = tl.sum(tl.reshape(lanes, [R, 2, 8]), axis=1)
        four = tl.sum(tl.reshape(eight, [R, 2, 4]), axis=1)
        y = tl.sum(tl.sum(tl.reshape(four, [R, 2, 2]), axis=1), axis=1)
        if bias is not None:
            y += tl.load(bias + row)
    tl.store(out + pair.to(tl.int64) * n_rows + rows, y, mask=inside_rows)


@triton.jit
def _block_scale(scales, sub_scales, row, n_blocks, b, TYPE: tl.constexpr):
    """Return the scale of block b of rows, float32 [R], and its index."""
    PER: tl.constexpr = 8 if TYPE == Q4_K or TYPE == Q6_K else 1  # blocks under one scale
    above = row * (n_blocks // PER) + b // PER
    if TYPE == MXFP4:  # 2^(e - 128) by its bits; the two smallest are subnormal
        e = tl.load(scales + above).to(tl.int32)
        least_bits = tl.where(e == 0, 0x00200000, 0x00400000)
        scale = tl.where(e < 2, least_bits, (e - 1) << 23).to(tl.float32, bitcast=True)
    else:
        scale = tl.load(scales + above).to(tl.float32)
    if TYPE == Q4_K:
        scale = scale * _small_scale(sub_scales, above * 12, b % 8, row >= 0, 0)
    return scale, above


@triton.jit
def _lane(
    lane, row, given, q, q_scales, q_sums, codes, scales, mins, high, sub_scales, n_blocks,
    TYPE: tl.constexpr, R: tl.constexpr, M: tl.constexpr,
):  # fmt: skip
    """Sum the blocks of one lane, float32 [R, M]: blocks lane, lane + 16, ..., of rows [R] and inputs [M]."""
    acc = tl.zeros([R, M], tl.float32)
    i = tl.arange(0, 32)
    for b in range(lane, n_blocks, 16):
        at = given * n_blocks + b
        xs = tl.load(q + at[None, :] * 32 + i[:, None])
        one = b + tl.arange(0, 1)
        w = tl.reshape(_codes(codes, high, row, n_blocks, one, one >= 0, TYPE), [R, 32]).to(tl.int8)
        scale, above = _block_scale(scales, sub_scales, row, n_blocks, b, TYPE)
        if TYPE == Q6_K:  # each half has a whole number as scale
            sub = sub_scales + row * (n_blocks * 2) + b * 2
            low = tl.where((i < 16)[None, :], w, 0).to(tl.int8)
            upper = tl.where((i < 16)[None, :], 0, w).to(tl.int8)
            dots = tl.dot(low, xs, out_dtype=tl.int32) * tl.load(sub).to(tl.int32)[:, None]
            dots += tl.dot(upper, xs, out_dtype=tl.int32) * tl.load(sub + 1).to(tl.int32)[:, None]
        else:
            dots = tl.dot(w, xs, out_dtype=tl.int32)
        weight = scale[:, None] * tl.load(q_scales + at)[None, :]
        acc = tl.fma(weight, dots.to(tl.float32), acc)
        if TYPE == Q4_1 or TYPE == Q5_1 or TYPE == Q4_K:
            least = tl.load(mins + above).to(tl.float32)
            if TYPE == Q4_K:
                least = -(least * _small_scale(sub_scales, above * 12, b % 8, row >= 0, 4))
            total = tl.load(q_sums + at)[None, :]
            acc = tl.fma(tl.broadcast_to(least[:, None], [R, M]), tl.broadcast_to(total, [R, M]), acc)
    return acc


@triton.jit
def _expert_tiles_kernel(
    x, q, q_scales, q_sums, order, tile_slots, tile_firsts, tile_ends, out, bias,
    codes, scales, mins, high, sub_scales, n_rows, n_cols, n_blocks, pairs_of_input,
    TYPE: tl.constexpr, R: tl.constexpr, M: tl.constexpr,
):  # fmt: skip
    """Compute out [pairs, n_rows], as _expert_rows_kernel does: R rows of the pairs order[first : end].

    These are at most M pairs, which have one slot (expert_tiles).
    """
    await_launches()
    slot = tl.load(tile_slots + tl.program_id(1))
    if slot >= 0:
        rows = tl.program_id(0) * R + tl.arange(0, R)
        place = tl.load(tile_firsts + tl.program_id(1)) + tl.arange(0, M)
        end = tl.load(tile_ends + tl.program_id(1))
        # Missing rows and pairs repeat other ones; their results are not stored.
        pair = tl.load(order + tl.minimum(place, end - 1)).to(tl.int64)
        row = slot.to(tl.int64) * n_rows + tl.minimum(rows, n_rows - 1)
        given = pair // pairs_of_input
        y = tl.zeros([R, M], tl.float32)
        if TYPE == FLOAT:
            lane = tl.arange(0, 16)
            lanes = tl.zeros([R, M, 16], tl.float32)
            for first in range(0, n_cols, 16):
                k = first + lane
                w = tl.load(codes + row[:, None] * n_cols + k[None, :], mask=(k < n_cols)[None, :], other=0.0)
                v = tl.load(x + given[:, None] * n_cols + k[None, :], mask=(k < n_cols)[None, :], other=0.0)
                w = tl.broadcast_to(w.to(tl.float32)[:, None, :], [R, M, 16])
                lanes = tl.fma(w, tl.broadcast_to(v[None, :, :], [R, M, 16]), lanes)
            eight = tl.sum(tl.reshape(lanes, [R, M, 2, 8]), axis=2)
            four = tl.sum(tl.reshape(eight, [R, M, 2, 4]), axis=2)
            y = tl.sum(tl.sum(tl.reshape(four, [R, M, 2, 2]), axis=2), axis=2)
        else:
            # The tree of the lanes, from its leaves: (l, l + 8), then (l, l + 4), (l, l + 2), (l, l + 1).
            two, four, eight = y, y, y
            for i in range(2):
                for j in range(2):
                    for k in range(2):
                        for half in range(2):
                            sums = _lane(
                                i + 2 * j + 4 * k + 8 * half, row, given, q, q_scales, q_sums,
                                codes, scales, mins, high, sub_scales, n_blocks, TYPE, R, M,
                            )  # fmt: skip
                            eight = tl.where(half == 0, sums, eight + sums)
                        four = tl.where(k == 0, eight, four + eight)
                    two = tl.where(j == 0, four, two + four)
                y = tl.where(i == 0, two, y + two)
        if bias is not None:
            y += tl.load(bias + row)[:, None]
        at = pair[None, :] * n_rows + rows[:, None]
        tl.store(out + at, y, mask=(rows < n_rows)[:, None] & (place < end)[None, :])


@triton.jit
def _exp(x, N: tl.constexpr):
    """Compute exact.exp of x [N]."""
    x = tl.where(x > -88.5, x, -88.5)
    x = tl.where(x < 89.0, x, 89.0)
    n = (x * 1.44269504 + TO_WHOLE) - TO_WHOLE
    n = tl.where(n > -127.0, n, -127.0)
    r = tl.fma(n, tl.full([N], -0.693359375, tl.float32), x)
    r = tl.fma(n, tl.full([N], 2.12194440e-4, tl.float32), r)
    p = tl.fma(tl.full([N], 1.9875691500e-4, tl.float32), r, tl.full([N], 1.3981999507e-3, tl.float32))
    p = tl.fma(p, r, tl.full([N], 8.3334519073e-3, tl.float32))
    p = tl.fma(p, r, tl.full([N], 4.1665795894e-2, tl.float32))
    p = tl.fma(p, r, tl.full([N], 1.6666665459e-1, tl.float32))
    p = tl.fma(p, r, tl.full([N], 5.0000001201e-1, tl.float32))
    power = ((n.to(tl.int32) + 127) << 23).to(tl.float32, bitcast=True)
    return tl.fma(p * r, r, r + 1.0) * power


@triton.jit
def _activated(x, threshold, KIND: tl.constexpr, N: tl.constexpr):
    """Compute exact.activate of x [N]."""
    if KIND == SILU:
        return tl.div_rn(x, 1.0 + _exp(0.0 - x, N))
    elif KIND == GELU_TANH:
        u = x * tl.fma(
            x * x, tl.full([N], 0.0713548162726, tl.float32), tl.full([N], 1.59576912161, tl.float32)
        )
        return tl.div_rn(x, 1.0 + _exp(0.0 - u, N))
    elif KIND == RELU:
        return tl.where(x > 0.0, x, 0.0)
    elif KIND == RELU2:
        r = tl.where(x > 0.0, x, 0.0)
        return r * r
    elif KIND == FATRELU:
        return tl.where(x >= threshold, x, 0.0)
    elif KIND == SIGMOID:
        return tl.div_rn(tl.full([N], 1.0, tl.float32), 1.0 + _exp(0.0 - x, N))
    elif KIND == CLAMPED_SILU:
        m = tl.where(x < threshold, x, threshold)
        return tl.div_rn(m, 1.0 + _exp(-1.702 * m, N))
    elif KIND == CLAMPED_PLUS_ONE:
        m = tl.where(x < threshold, x, threshold)
        return tl.where(m > -threshold, m, -threshold) + 1.0
    else:
        return x


@triton.jit
def _values_kernel(
    gate, up, slots, values, counts, n, threshold, up_threshold, thresholded, small, n_used,
    KIND: tl.constexpr, UP_KIND: tl.constexpr, SPARSE: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Compute values [pairs, n] = f(gate) * g(up), or f(up) without a gate.

    Add counts as fallback.experts does.

    thresholded: int32 per token, not 0 if values of f smaller than `small` count as zero; None: for no token.
    n_used: pairs of a token.
    """
    await_launches()
    pair = tl.program_id(0)
    i = tl.program_id(1) * N + tl.arange(0, N)
    inside = i < tl.where(tl.load(slots + pair) >= 0, n, 0)
    at = pair.to(tl.int64) * n + i
    value = tl.load(up + at, mask=inside, other=0.0)
    fires = inside
    if gate is not None:
        fired = _activated(tl.load(gate + at, mask=inside, other=0.0), threshold, KIND, N)
        if thresholded is not None:
            fired = _zero_small(fired, tl.load(thresholded + pair // n_used) != 0, small)
        value = fired * _activated(value, up_threshold, UP_KIND, N)
        if SPARSE:
            fires = inside & (fired != 0.0)
            value = tl.where(fires, value, 0.0)
    else:
        value = _activated(value, threshold, KIND, N)
        if thresholded is not None:
            value = _zero_small(value, tl.load(thresholded + pair // n_used) != 0, small)
    value = tl.where(inside, value, 0.0)
    if counts is not None:
        tl.atomic_add(counts, tl.sum(inside.to(tl.int32), axis=0).to(tl.int64))
        tl.atomic_add(counts + 1, tl.sum((value != 0.0).to(tl.int32), axis=0).to(tl.int64))
    tl.store(values + at, value, mask=i < n)


@triton.jit
def _choose_kernel(
    ids, table, most, asked, slots, fetched, n_pairs, n_spare, first_spare, P: tl.constexpr, S: tl.constexpr
):
    """Compute fallback.choose_experts in one program."""
    await_launches()
    p = tl.arange(0, P)
    inside = p < n_pairs
    id = tl.load(ids + p, mask=inside, other=-1)
    slot = tl.load(table + tl.where(inside, id, 0), mask=inside, other=0)
    missing = inside & (slot < 0)
    same = (id[:, None] == id[None, :]) & missing[None, :]
    before = (same & (p[None, :] < p[:, None])).to(tl.int32)
    first = missing & (tl.sum(before, axis=1) == 0)  # first pair that needs the expert
    n = tl.load(most + tl.sum(first.to(tl.int32), axis=0))
    rank = tl.cumsum(first.to(tl.int32), axis=0) - 1
    own = (same & first[None, :]).to(tl.int32)
    rank = tl.sum(own * rank[None, :], axis=1)
    slot = tl.where(missing & (rank < n), first_spare + rank, slot)
    tl.store(slots + p, slot, mask=inside)
    tl.store(asked + p, tl.where(slot < 0, id, -1 - id), mask=inside)
    i = tl.arange(0, S)
    tl.store(fetched + i, tl.full([S], -1, tl.int32), mask=(i >= n) & (i < n_spare))
    tl.store(fetched + rank, id, mask=first & (rank < n))


def choose_experts(
    ids: Tensor, table: Tensor, most: Tensor, n_spare: int, first_spare: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute fallback.choose_experts."""
    ids = ids.contiguous()
    asked, slots = torch.empty_like(ids), torch.empty_like(ids)
    fetched = torch.empty(n_spare, dtype=torch.int32, device=ids.device)
    launcher.launch(
        _choose_kernel, (1,), ids, table, most, asked, slots, fetched, ids.numel(), n_spare, first_spare,
        P=max(pow2(pow2(len(ids)) * ids.shape[1]), 2), S=max(pow2(n_spare), 2), warps=4,
    )  # fmt: skip
    return asked, slots, fetched


@triton.jit
def _fetch_kernel(
    addresses, fetched, codes, scales, mins, high, sub_scales, n_units, first,
    UNIT: tl.constexpr, BLOCK: tl.constexpr, C0: tl.constexpr, CN: tl.constexpr, S0: tl.constexpr,
    SN: tl.constexpr, M0: tl.constexpr, MN: tl.constexpr, H0: tl.constexpr, HN: tl.constexpr,
    B0: tl.constexpr, BN: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Copy units of an expert's bytes from host memory to the fields of a slot (matrix.py).

    A block has BLOCK units of UNIT bytes. A field has XN of these units, from unit X0 on. n_units: units of
    an expert. Neighbouring threads read neighbouring units of any field.
    """
    await_launches()
    id = tl.load(fetched + tl.program_id(1))
    if id >= 0:
        slot = (first + tl.program_id(1)).to(tl.int64)
        u = tl.program_id(0).to(tl.int64) * N + tl.arange(0, N)
        inside = u < n_units
        address = tl.load(addresses + id)
        if UNIT == 1:
            unit = tl.load(address.to(tl.pointer_type(tl.uint8)) + u, mask=inside, other=0)
        else:
            unit = tl.load(address.to(tl.pointer_type(tl.int16)) + u, mask=inside, other=0)
        block, j = u // BLOCK + slot * (n_units // BLOCK), (u % BLOCK).to(tl.int32)
        tl.store(codes + block * CN + j - C0, unit, mask=inside & (j >= C0) & (j < C0 + CN))
        if SN > 0:
            tl.store(scales + block * SN + j - S0, unit, mask=inside & (j >= S0) & (j < S0 + SN))
        if MN > 0:
            tl.store(mins + block * MN + j - M0, unit, mask=inside & (j >= M0) & (j < M0 + MN))
        if HN > 0:
            tl.store(high + block * HN + j - H0, unit, mask=inside & (j >= H0) & (j < H0 + HN))
        if BN > 0:
            tl.store(sub_scales + block * BN + j - B0, unit, mask=inside & (j >= B0) & (j < B0 + BN))


FETCH_UNITS = 2048  # units per program


def fetch_experts(part: HostRows, fetched: Tensor, to: DeviceMatrix | Tensor, first: int) -> None:
    """Compute fallback.fetch_experts. The device reads host memory directly."""
    fields = {"codes": to} if isinstance(to, Tensor) else {name: getattr(to, name) for name in FIELDS}
    n_block, places = block_fields(part.type)
    size = 2 if n_block % 2 == 0 else 1
    dtype = torch.int16 if size == 2 else torch.uint8
    views = [None if fields.get(name) is None else fields[name].view(dtype) for name in FIELDS]
    places = {name: (at // size, n // size) for name, (at, n) in places.items()}
    constants: dict[str, Any] = {
        f"{letter}{end}": places.get(name, (0, 0))[i]
        for name, letter in zip(FIELDS, "CSMHB", strict=True)
        for i, end in enumerate("0N")
    }
    n_units = part.n_bytes // size
    launcher.launch(
        _fetch_kernel, (-(-n_units // FETCH_UNITS), len(fetched)), part.addresses, fetched, *views, n_units,
        first, UNIT=size, BLOCK=n_block // size, N=FETCH_UNITS, warps=4, fused=True, **constants,
    )  # fmt: skip


SCORINGS: dict[str, int] = {scoring: i for i, scoring in enumerate(get_args(Scoring))}
SOFTMAX = tl.constexpr(SCORINGS["softmax"])
OF_SIGMOID = tl.constexpr(SCORINGS["sigmoid"])
SOFTMAX_CHOSEN = tl.constexpr(SCORINGS["softmax_chosen"])


@triton.jit
def _route_kernel(
    x, bias, scales, ids, weights, n_expert, scale,
    SCORING: tl.constexpr, NORMALISED: tl.constexpr, USED: tl.constexpr, E: tl.constexpr, U: tl.constexpr,
):  # fmt: skip
    """Compute operations.Route of one token, without groups: ids and weights [T, USED].

    E, U: n_expert and USED, rounded up.
    """
    await_launches()
    t = tl.program_id(0).to(tl.int64)
    i, u = tl.arange(0, E), tl.arange(0, U)
    there = i < n_expert
    score = tl.load(x + t * n_expert + i, mask=there, other=float("-inf"))
    is_none = tl.max((score != score).to(tl.int32), axis=0) != 0
    p = score
    if SCORING == SOFTMAX:
        p = tl.exp(score - tl.max(score, axis=0))
        p = p / tl.sum(p, axis=0)
    elif SCORING == OF_SIGMOID:
        p = 1.0 / (1.0 + tl.exp(-score))
    wanted = score
    if bias is not None:
        wanted = p + tl.load(bias + i, mask=there, other=0.0)
    wanted = tl.where(there & (wanted == wanted), wanted, float("-inf"))
    free = there
    chosen, value = tl.zeros([U], tl.int32), tl.full([U], float("-inf"), tl.float32)
    for k in range(USED):
        best = tl.max(tl.where(free, wanted, float("-inf")), axis=0)
        id = tl.min(tl.where(free & (wanted == best), i, E), axis=0)
        free = free & (i != id)
        chosen = tl.where(u == k, id, chosen)
        value = tl.where(u == k, tl.sum(tl.where(i == id, p, 0.0), axis=0), value)
    if SCORING == SOFTMAX_CHOSEN:
        value = tl.exp(value - tl.max(value, axis=0))
        value = value / tl.sum(value, axis=0)
    used = u < USED
    if NORMALISED:
        value = value / tl.maximum(tl.sum(tl.where(used, value, 0.0), axis=0), 0.00006103515625)  # 2^-14
    value = value * scale
    if scales is not None:
        value = value * tl.load(scales + chosen, mask=used, other=0.0)
    tl.store(ids + t * USED + u, chosen, mask=used)
    tl.store(weights + t * USED + u, tl.where(is_none, float("nan"), value), mask=used)


def route(x: Tensor, op: Route, bias: Tensor | None, scales: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Compute fallback.route, in one launch unless experts are in groups."""
    if op.n_groups > 1 or not len(x):
        return functions.route(x, op, bias, scales)
    x = x.contiguous()
    n_tokens, n_expert = x.shape
    ids = torch.empty((n_tokens, op.n_used), dtype=torch.int32, device=x.device)
    weights = torch.empty((n_tokens, op.n_used), device=x.device)
    launcher.launch(
        _route_kernel, (n_tokens,), x, bias, scales, ids, weights, n_expert, float(op.scale),
        SCORING=SCORINGS[op.scoring], NORMALISED=op.normalised, USED=op.n_used, E=pow2(n_expert),
        U=pow2(op.n_used), warps=1,
    )  # fmt: skip
    return ids, weights


@triton.jit
def _sum_kernel(parts, own, asked, weights, residual, out, n_used, n, N: tl.constexpr):
    """Compute out [T, n]: fallback.sum_experts of N numbers of a token."""
    await_launches()
    t = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * N + tl.arange(0, N)
    acc = tl.zeros([N], tl.float32)
    for j in range(n_used):
        pair = t * n_used + j
        inside = i < n
        # Two masked loads, one of which reads. Selecting a pointer would select between parameter addresses.
        if own is not None:
            is_own = i * 0 + tl.load(asked + pair) < 0
            found = tl.load(own + pair * n + i, mask=inside & is_own, other=0.0)
            inside = inside & (is_own == 0)
        part = tl.load(parts + pair * n + i, mask=inside, other=0.0)
        if own is not None:
            part = tl.where(is_own, found, part)
        acc = acc + part * tl.load(weights + pair)
    if residual is not None:
        acc = acc + tl.load(residual + t * n + i, mask=i < n, other=0.0)
    tl.store(out + t * n + i, acc, mask=i < n)


def sum_experts(
    parts: Tensor,
    weights: Tensor,
    residual: Tensor | None = None,
    own: Tensor | None = None,
    asked: Tensor | None = None,
) -> Tensor:
    """Compute fallback.sum_experts."""
    parts, (n_tokens, n_used, n) = parts.contiguous(), parts.shape
    out = torch.empty((n_tokens, n), device=parts.device)
    if n_tokens:
        launcher.launch(
            _sum_kernel, (n_tokens, -(-n // 512)), parts, None if own is None else own.contiguous(), asked,
            weights, residual, out, n_used, n, N=512, warps=4, fused=False,
        )  # fmt: skip
    return out


def experts(
    h: Tensor,
    slots: Tensor,
    gate: DeviceMatrix | None,
    up: DeviceMatrix,
    down: DeviceMatrix,
    *,
    n_neurons: int,
    activation: Activate,
    up_activation: Activate | None,
    neuron_major: bool,
    sparse: bool,
    gate_bias: Tensor | None = None,
    up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    counts: Tensor | None = None,
    gate_threshold: TokenThreshold | None = None,
) -> Tensor:
    """Compute fallback.experts, except for neuron-major down projections (experts.can_hold).

    If several tokens share an expert, its rows are counted for each token.
    """
    assert not neuron_major
    n_tokens, n_used = slots.shape
    h, flat = h.contiguous(), slots.contiguous().view(-1)
    tiles = None
    if n_tokens > FEW_TOKENS:
        n_pairs = 32 if n_tokens >= 256 and not is_amd(h) else 16
        tiles = expert_tiles(flat, up.n_rows // n_neurons, n_pairs)
    gates = None
    given = quantized(h) if not all(m.is_float for m in (gate or up, up)) else (h, h, h)
    values = torch.empty((len(flat), n_neurons), device=h.device)
    if gate is not None:
        gates = expert_rows(h, given, flat, gate, gate_bias, n_neurons, n_used, tiles)
    ups = expert_rows(h, given, flat, up, up_bias, n_neurons, n_used, tiles)
    launcher.launch(
        _values_kernel, (len(flat), -(-n_neurons // 256)), gates, ups, flat, values, counts, n_neurons,
        float(activation.threshold), float(up_activation.threshold) if up_activation else 0.0,
        *((None, 0.0) if gate_threshold is None else (gate_threshold.tokens, gate_threshold.threshold)),
        n_used,
        KIND=KINDS[activation.kind], UP_KIND=KINDS[up_activation.kind if up_activation else None],
        SPARSE=sparse, N=256, warps=4, fused=False,
    )  # fmt: skip
    if counts is not None:
        rows = (slots >= 0).sum() * n_neurons
        counts[2 if gate is not None else 3] += rows
        if gate is not None:
            counts[3] += rows
    given = (values, values, values) if down.is_float else quantized(values)
    return expert_rows(values, given, flat, down, down_bias, h.shape[1], 1, tiles).view(n_tokens, n_used, -1)


@dataclass(frozen=True)
class Tiles:
    """Tiles of pairs sorted by slot.

    order: int32 [pairs]. slots: int32, the slot of each tile, -1 without pairs. firsts, ends: int32, the
    range of `order` of each tile. n_pairs: most pairs of a tile.
    """

    order: Tensor
    slots: Tensor
    firsts: Tensor
    ends: Tensor
    n_pairs: int


def expert_tiles(slots: Tensor, n_slots: int, n: int) -> Tiles:
    """Sort pairs by slot and divide them into tiles of n pairs.

    slots: int32 [pairs]. The number of tiles is the largest possible one, because the host does not read the
    real number.
    """
    by_slot, order = slots.sort(stable=True)
    numbers = torch.arange(n_slots + 1, dtype=slots.dtype, device=slots.device)
    begin = torch.searchsorted(by_slot, numbers)  # pairs without a slot come first
    last = begin[1:]
    last_tile = ((last - begin[:-1] + n - 1) // n).cumsum(0)
    tile = torch.arange(min(len(slots), len(slots) // n + n_slots), device=slots.device)
    slot = torch.searchsorted(last_tile, tile, right=True)
    is_there, slot = slot < n_slots, slot.clamp(max=n_slots - 1)
    before = torch.where(slot > 0, last_tile[(slot - 1).clamp(min=0)], 0)
    first = begin[slot] + (tile - before) * n
    end = torch.minimum(first + n, last[slot])
    slot = torch.where(is_there, slot, -1)
    return Tiles(order.int(), slot.int(), first.int(), end.int(), n)


def quantized(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    n, n_blocks = len(x), x.shape[1] // 32
    q = torch.empty((n, n_blocks * 32), dtype=torch.int8, device=x.device)
    scales, sums = (torch.empty((n, n_blocks), device=x.device) for _ in range(2))
    launcher.launch(
        _quantize_kernel, (n, -(-n_blocks // 16)), x, q, scales, sums, n_blocks, B=16, warps=4, fused=False
    )
    return q, scales, sums


def expert_rows(
    x: Tensor,
    given: tuple[Tensor, Tensor, Tensor],
    slots: Tensor,
    m: DeviceMatrix,
    bias: Tensor | None,
    n_rows: int,
    pairs_of_input: int,
    tiles: Tiles | None = None,
) -> Tensor:
    """Multiply the rows of each pair's expert by its input: [pairs, n_rows]."""
    fields = (m.codes, m.scales, m.mins, m.high, m.sub_scales)
    if tiles is not None:
        out = torch.zeros((len(slots), n_rows), device=x.device)
        rows = 128 // tiles.n_pairs if m.is_float else 32
        launcher.launch(
            _expert_tiles_kernel, (-(-n_rows // rows), len(tiles.slots)),
            x, *given, tiles.order, tiles.slots, tiles.firsts, tiles.ends, out, bias, *fields,
            n_rows, m.n_cols, m.n_cols // 32, pairs_of_input,
            TYPE=TYPES[m.type], R=rows, M=tiles.n_pairs, warps=4, fused=False,
        )  # fmt: skip
        return out
    out = torch.empty((len(slots), n_rows), device=x.device)
    launcher.launch(
        _expert_rows_kernel, (-(-n_rows // 8), len(slots)), x, *given, slots, out, bias, *fields,
        n_rows, m.n_cols, m.n_cols // 32, pairs_of_input, TYPE=TYPES[m.type], R=8, warps=4, fused=False,
    )  # fmt: skip
    return out
