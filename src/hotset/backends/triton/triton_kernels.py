"""The kernels of the GPU backend in Triton; `fallback` has the same functions in plain torch.

Decoding is bound by the read rate of weights, so the kernels optimise the reading of their bytes:

- A word is four bytes of codes. It has eight weights in two *parts*, the low nibbles and the high ones (Q8_0:
  four weights, one part). The weights of a part are four neighbouring columns under one scale. Threads take
  neighbouring words, so that a warp reads codes and inputs in whole cache lines. A thread sums its own
  products, and one reduction over threads follows at the end.
- Codes become floats without conversion instructions, which are slow on GPUs. Or-ed into the mantissa of 2^23
  they are 2^23 + code, and one subtraction removes 2^23 and the type's offset. Codes need no shift to the
  lowest bits: a code p bits further up is 2^p times as large, and its input or scale is made 2^p times
  smaller, which rounds nothing. Masking and or-ing are one instruction on CUDA. So a weight takes three
  instructions: this one, the subtraction, and the multiply-add.
- Unselected neurons cost nothing. As many programs as the device runs at a time share the list of selected
  neurons, which each program finds by counting the predictor's bits. The down projection uses the same list,
  in ranges of equal length (without a predictor: of all neurons), and skips neurons that did not fire.

Results are bitwise identical on every run. There are no atomic additions of floats, and `_add_kernel` adds
partial sums of fixed ranges in order. Products that threads add for each other are rounded first
(`_rounded`). No kernel waits for another, the host reads nothing back, and only shapes decide the launches.
So a step can be captured in a CUDA graph.

With TRITON_INTERPRET=1, set before this module is imported, all kernels run on a CPU.
"""

# Kernel arguments have no Python types: they are pointers, numbers and constants. The kernel language has no
# `in`, and no stars in tuples.
# mypy: disable-error-code="no-untyped-def"
# ruff: noqa: SIM109, RUF005

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any, get_args

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from hotset.backends.base import BLOCK_SIZE, LOGIT_GROUP
from hotset.backends.torch import functions
from hotset.backends.triton import fallback
from hotset.backends.triton import launch as launcher
from hotset.backends.triton.fallback import Entering, Weighed
from hotset.backends.triton.matrix import DeviceMatrix
from hotset.backends.triton.tiles import LEAST_SHARED, pow2, prompt_tile, row_tile, token_tile
from hotset.formats.quants import GGMLType
from hotset.model.operations import ActivationKind, RopeKind

FEW_TOKENS = 8  # most tokens for the vector kernels, which read a matrix once; more tokens use tiles

# Formats and activations as constants of the kernels. For FLOAT the pointer type of codes has the float type.
FLOAT = tl.constexpr(0)
Q8_0 = tl.constexpr(1)
Q4_0 = tl.constexpr(2)  # in this and the following formats a byte holds two codes
Q4_1 = tl.constexpr(3)
Q5_0 = tl.constexpr(4)
Q5_1 = tl.constexpr(5)
Q4_K = tl.constexpr(6)
Q6_K = tl.constexpr(7)
FORMATS = {
    GGMLType.F32: 0, GGMLType.F16: 0, GGMLType.BF16: 0, GGMLType.Q8_0: 1, GGMLType.Q4_0: 2, GGMLType.Q4_1: 3,
    GGMLType.Q5_0: 4, GGMLType.Q5_1: 5, GGMLType.Q4_K: 6, GGMLType.Q6_K: 7,
}  # fmt: skip
# Numbers of activations in the order of ActivationKind; None: no activation.
KINDS: dict[str | None, int] = {None: -1, **{kind: i for i, kind in enumerate(get_args(ActivationKind))}}
SILU = tl.constexpr(KINDS["silu"])
GELU = tl.constexpr(KINDS["gelu"])
GELU_TANH = tl.constexpr(KINDS["gelu_tanh"])
RELU = tl.constexpr(KINDS["relu"])
RELU2 = tl.constexpr(KINDS["relu2"])
FATRELU = tl.constexpr(KINDS["fatrelu"])
SIGMOID = tl.constexpr(KINDS["sigmoid"])
CLAMPED_SILU = tl.constexpr(KINDS["clamped_silu"])
CLAMPED_PLUS_ONE = tl.constexpr(KINDS["clamped_plus_one"])
FUSED = (None, "silu", "gelu", "gelu_tanh", "relu", "relu2", "fatrelu")  # the activations of _activated

KV_BLOCK = tl.constexpr(BLOCK_SIZE)
MANTISSA = tl.constexpr(0x4B000000)  # 2^23 as float32: or-ing n < 2^23 into it gives 2^23 + n
TWO_23 = tl.constexpr(8388608.0)
# Older versions spread the rows that _axpy_kernel adds over several threads; 3.9 gives one thread all rows.
SPREADS_ROWS = tl.constexpr(tuple(map(int, triton.__version__.split(".")[:2])) < (3, 9))
SIGN_BITS = tl.constexpr(-0x7F7F7F80)  # 0x80808080
DEPENDENT = tl.constexpr(launcher.DEPENDENT)
# Numbers that change with the tokens of a step. Their divisibility by 16 makes no new variant of a kernel.
OF_STEP = ["n_tokens", "n_packed"]


@triton.jit
def await_launches():
    """Wait for the launch before this one; the first statement of every kernel.

    A programmatic dependent launch begins when all programs of the launch before have begun. It waits here
    until they end and their stores are visible. They waited for earlier launches, so launches are in order.
    """
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()


@triton.jit
def _rounded(a, b):
    """Return a * b, rounded, for a sum over threads.

    The compiler would fuse a plain product with the first addition: each thread would add its unrounded
    product to the other's rounded one, so sums would differ.
    """
    return tl.fma(a, b, tl.zeros_like(a))


@triton.jit
def _fused(a, b, acc):
    """Return acc [T, R, W] + a * b [1, W], rounded once."""
    return tl.fma(tl.broadcast_to(a[None, :, :], acc.shape), tl.broadcast_to(b[None, :, :], acc.shape), acc)


# ---- weights -------------------------------------------------------------------------------------------
#
# A matrix has six pointers (codes, scales, mins, high, sub_scales, group_of) and the number of words in a row
# of codes: int32 words of four or eight codes, or single floats. Pointers of fields that the type lacks are
# None; kernels decide by the type which fields to read. In the functions below rows [R] are the rows of a
# tile, live [R] marks the rows to read, w [W] are its words, and `part` is 0 or 1, the low or high nibbles.


@triton.jit
def _column(w, part: tl.constexpr, TYPE: tl.constexpr):
    """Return the first of the four columns that a part of word w holds."""
    HALF: tl.constexpr = 16 if TYPE == Q6_K else (8 if TYPE == Q4_K else 4)  # in words
    if TYPE <= Q8_0:
        return w * 4
    else:
        return (w // HALF * (2 * HALF) + w % HALF) * 4 + HALF * 4 * part


@triton.jit
def _load(
    codes, scales, mins, high, sub_scales, group_of, stride, rows, live, w, last, TYPE: tl.constexpr
):  # fmt: skip
    """Load the stored fields of a tile: codes, high bits, d, m, three words of sub-scales; each [R, W].

    last: words from `last` on are not read; None: all are. Floats: [R, W, 4]. For fields that the type lacks
    the codes are returned, because Triton 3.6 cannot compile a tuple with None. `_planes` loads the scales of
    planes.
    """
    row = rows.to(tl.int64)[:, None]
    mask = live[:, None]
    if last is not None:
        mask = mask & (w < last)[None, :]
    if TYPE == FLOAT:
        column = (w * 4)[:, None] + tl.arange(0, 4)[None, :]
        inside = mask[:, :, None] & (column < stride)[None, :, :]
        words = tl.load(codes + row[:, :, None] * stride + column[None, :, :], mask=inside, other=0.0)
    else:
        words = tl.load(codes + row * stride + w[None, :], mask=mask, other=0)
    bits, d, m, s0, s1, s2 = words, words, words, words, words, words
    if TYPE != FLOAT:
        PER_BLOCK: tl.constexpr = 32 if TYPE >= Q4_K else (8 if TYPE == Q8_0 else 4)  # words of codes
        block = row * (stride // PER_BLOCK) + (w // PER_BLOCK)[None, :]
        if TYPE == Q6_K:
            word = row * (stride // 2) + (w // 16 * 8 + w % 8)[None, :]
            bits = tl.load(high + word, mask=mask, other=0)
            sub = row * (stride // 2) + (w // 16 * 8 + w % 16 // 4)[None, :]
            s0 = tl.load(sub_scales + sub, mask=mask, other=0)
            s1 = tl.load(sub_scales + sub + 4, mask=mask, other=0)
        elif TYPE == Q5_0 or TYPE == Q5_1:
            bits = tl.load(high + block, mask=mask, other=0)
        if group_of is None:
            if TYPE == Q4_K:
                s0 = tl.load(sub_scales + block * 3, mask=mask, other=0)
                s1 = tl.load(sub_scales + block * 3 + 1, mask=mask, other=0)
                s2 = tl.load(sub_scales + block * 3 + 2, mask=mask, other=0)
            d = tl.load(scales + block, mask=mask, other=0.0)
            if TYPE == Q4_1 or TYPE == Q5_1 or TYPE == Q4_K:
                m = tl.load(mins + block, mask=mask, other=0.0)
    return words, bits, d, m, s0, s1, s2


@triton.jit
def _numbers(words, bits, w, zero, part: tl.constexpr, TYPE: tl.constexpr):
    """Decode codes to the numbers that scales multiply, float32 [R, W, 4].

    The numbers are too large by the powers of `_lowered`.

    zero: see _dot_rows. An instruction takes only one constant: `zero` keeps MANTISSA in a register.
    """
    if TYPE == FLOAT:
        return words.to(tl.float32)
    else:
        i = tl.arange(0, 4)[None, None, :]
        IS_NIBBLE: tl.constexpr = TYPE == Q4_0 or TYPE == Q4_1 or TYPE == Q4_K
        LOWEST: tl.constexpr = 4 * part if IS_NIBBLE else 0
        if TYPE == Q8_0:  # flip the sign bit: codes from 0 to 255, 128 too high
            words = words ^ SIGN_BITS
        elif TYPE == Q6_K:
            shift = (w % 16 // 8 * 2 + 4 * part)[None, :]
            words = ((words >> (4 * part)) & 0x0F0F0F0F) | ((bits >> shift) & 0x03030303) << 4
        elif TYPE == Q5_0 or TYPE == Q5_1:  # spread four neighbouring bits to bit 4 of four bytes
            four = (bits >> (w % 4 * 4 + 16 * part)[None, :]) & 15
            words = ((words >> (4 * part)) & 0x0F0F0F0F) | ((four * 0x02040810) & 0x10101010)
        # Codes keep their place, but codes of the upper bytes move down, clear of the exponent.
        upper = (words >> 16) | zero  # without zero, the compiler shifts and masks each of the four codes
        MASK: tl.constexpr = 15 if IS_NIBBLE else 255
        q = tl.where(i < 2, words[:, :, None], upper[:, :, None]) & (MASK << (i % 2 * 8 + LOWEST))
        OFFSET: tl.constexpr = (
            8.0 if TYPE == Q4_0 else 128.0 if TYPE == Q8_0 else 16.0 if TYPE == Q5_0 else 32.0 if TYPE == Q6_K
            else 0.0
        )  # fmt: skip
        raised = tl.where(i % 2 == 0, 1.0, 256.0) * (1.0 if LOWEST == 0 else 16.0)
        return (q | (MANTISSA + zero)).to(tl.float32, bitcast=True) - (TWO_23 + OFFSET * raised)


@triton.jit
def _lowered(part: tl.constexpr, TYPE: tl.constexpr):
    """Return the factors that remove the powers of two in numbers of _numbers: float32 [4]. Not for FLOAT."""
    i = tl.arange(0, 4)
    IS_NIBBLE: tl.constexpr = TYPE == Q4_0 or TYPE == Q4_1 or TYPE == Q4_K
    return tl.where(i % 2 == 0, 1.0, 0.00390625) * (0.0625 if IS_NIBBLE and part == 1 else 1.0)


@triton.jit
def _scale(d, s0, s1, s2, w, part: tl.constexpr, TYPE: tl.constexpr):
    """Return the scale of a part of each word, float32 [R, W]."""
    if TYPE == Q4_K:
        group = w % 32 // 8 * 2 + part
        at = (group % 4 * 8)[None, :]
        scale = tl.where((group < 4)[None, :], (s0 >> at) & 63, ((s2 >> at) & 15) | ((s0 >> at) & 0xC0) >> 2)
        return d.to(tl.float32) * scale.to(tl.float32)
    elif TYPE == Q6_K:
        return d.to(tl.float32) * (s0 if part == 0 else s1).to(tl.float32)
    else:
        return d.to(tl.float32)


@triton.jit
def _minimum(m, s1, s2, w, part: tl.constexpr, TYPE: tl.constexpr):
    """Return the minimum that is added to each weight of a part of each word, float32 [R, W]."""
    if TYPE == Q4_K:
        group = w % 32 // 8 * 2 + part
        at = (group % 4 * 8)[None, :]
        minimum = tl.where(
            (group < 4)[None, :], (s1 >> at) & 63, ((s2 >> (at + 4)) & 15) | ((s1 >> at) & 0xC0) >> 2
        )
        return -(m.to(tl.float32) * minimum.to(tl.float32))
    else:
        return m.to(tl.float32)


@triton.jit
def _planes(scales, mins, high, sub_scales, group, columns, n_cols, mask, TYPE: tl.constexpr):
    """Load the scales and minimums of weights of planes, float32 in the shape of columns and mask.

    group: the group of each row, in a shape that broadcasts to theirs.
    """
    if TYPE == Q4_K:  # 256 rows share scales and mins, 32 rows share their factors
        at, own = group // 8 * n_cols + columns, group * n_cols + columns
        scale = tl.load(scales + at, mask=mask, other=0.0).to(tl.float32)
        scale = scale * tl.load(sub_scales + own, mask=mask, other=0).to(tl.float32)
        least = tl.load(mins + at, mask=mask, other=0.0).to(tl.float32)
        return scale, -(least * tl.load(high + own, mask=mask, other=0).to(tl.float32))
    else:
        at = group * n_cols + columns
        scale = tl.load(scales + at, mask=mask, other=0.0).to(tl.float32)
        least = scale
        if TYPE == Q4_1:
            least = tl.load(mins + at, mask=mask, other=0.0).to(tl.float32)
        return scale, least


@triton.jit
def _weights(
    raw, scales, mins, high, sub_scales, group_of, stride, rows, live, w, last, zero,
    part: tl.constexpr, TYPE: tl.constexpr,
):  # fmt: skip
    """Decode a tile to float32 [R, W, 4]. In planes, each column has a scale for 32 neurons."""
    words, bits, d, m, s0, s1, s2 = raw
    q = _numbers(words, bits, w, zero, part, TYPE)
    if TYPE == FLOAT:
        return q
    elif group_of is not None:
        PER_WORD: tl.constexpr = 4 if TYPE == Q8_0 else 8
        group = tl.load(group_of + rows, mask=live, other=0).to(tl.int64)
        columns = _column(w, part, TYPE)[:, None] + tl.arange(0, 4)[None, :]
        mask = live[:, None, None] & (w < last)[None, :, None]
        scale, least = _planes(
            scales, mins, high, sub_scales, group[:, None, None], columns[None, :, :], stride * PER_WORD,
            mask, TYPE,
        )  # fmt: skip
        y = q * (scale * _lowered(part, TYPE)[None, None, :])
        if TYPE == Q4_1 or TYPE == Q4_K:
            y += least
        return y
    else:
        y = q * (_scale(d, s0, s1, s2, w, part, TYPE)[:, :, None] * _lowered(part, TYPE)[None, None, :])
        if TYPE == Q4_1 or TYPE == Q5_1 or TYPE == Q4_K:
            y += _minimum(m, s1, s2, w, part, TYPE)[:, :, None]
        return y


# ---- a few tokens: rows times vectors ------------------------------------------------------------------


@triton.jit
def _row_at(codes, scales, mins, high, sub_scales, stride, row, TYPE: tl.constexpr):
    """Return the start of a row for each pointer of a matrix. Fields that its type lacks get the codes."""
    at = row.to(tl.int64)
    first = codes + at * stride
    of_scales, of_mins, of_high, of_sub_scales = first, first, first, first
    if TYPE != FLOAT:
        PER_BLOCK: tl.constexpr = 32 if TYPE >= Q4_K else (8 if TYPE == Q8_0 else 4)  # words of codes
        block = at * (stride // PER_BLOCK)
        of_scales = scales + block
        if TYPE == Q4_1 or TYPE == Q5_1 or TYPE == Q4_K:
            of_mins = mins + block
        if TYPE == Q5_0 or TYPE == Q5_1:
            of_high = high + block
        if TYPE == Q4_K:
            of_sub_scales = sub_scales + block * 3
        if TYPE == Q6_K:
            of_high, of_sub_scales = high + at * (stride // 2), sub_scales + at * (stride // 2)
    return first, of_scales, of_mins, of_high, of_sub_scales


@triton.jit
def _add_words(
    acc, x, n_tokens, n_cols, rows, lives, stride, first, last, zero,
    TYPE: tl.constexpr, T: tl.constexpr, R: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    """Return acc [T, R, W] + x [T, n_cols] times words first to first + W of rows.

    last: words from `last` on do not exist; None: all exist. The rest is as in _dot_rows.
    """
    PARTS: tl.constexpr = 1 if TYPE <= Q8_0 else 2
    token, place = tl.arange(0, T)[:, None, None], tl.arange(0, R)[None, :, None]
    # Hides from the compiler that words are neighbours. So neighbouring threads take neighbouring words, and
    # each reads its columns of x with one load.
    w = first + tl.max_contiguous(tl.arange(0, W), [1])
    raws = ()  # type: Any
    for r in tl.static_range(R):
        codes, scales, mins, high, sub_scales = rows[r]
        live = tl.full([1], 1, tl.int1)
        if lives is not None:
            live = live & lives[r]
        raw = _load(
            codes, scales, mins, high, sub_scales, None, stride, tl.zeros([1], tl.int32), live, w, last, TYPE
        )
        raws = raws + (raw,)
    for part in tl.static_range(PARTS):
        column = (_column(w, part, TYPE)[:, None] + tl.arange(0, 4)[None, :])[None, :, :]
        for t in tl.static_range(T):
            # [1, W, 4]; missing tokens repeat the last one, and their results are not stored
            at = x + tl.minimum(t, n_tokens - 1) * n_cols + column
            if last is None:
                xs = tl.load(at)
            else:
                inside = (w < last)[None, :, None]
                if TYPE == FLOAT:
                    inside = inside & (column < n_cols)
                xs = tl.load(at, mask=inside, other=0.0)
            for r in tl.static_range(R):
                words, bits, d, m, s0, s1, s2 = raws[r]
                q = _numbers(words, bits, w, zero, part, TYPE)
                if TYPE == FLOAT:  # rows may be unaligned: then several threads share four neighbours
                    y = acc + tl.sum(_rounded(q, xs), axis=2)[None, :, :]
                else:
                    y = tl.sum(q * (xs * _lowered(part, TYPE)[None, None, :]), axis=2)
                    y = _fused(y, _scale(d, s0, s1, s2, w, part, TYPE), acc)
                    if TYPE == Q4_1 or TYPE == Q5_1 or TYPE == Q4_K:
                        y = _fused(tl.sum(xs, axis=2), _minimum(m, s1, s2, w, part, TYPE), y)
                # The compiler knows which sum this is, so no choice is left at run time.
                acc = tl.where((token == t) & (place == r), y, acc)
    return acc


@triton.jit
def _dot_rows(
    x, n_tokens, n_cols, rows, lives, stride, first_word, last_word, zero,
    TYPE: tl.constexpr, T: tl.constexpr, R: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    """Multiply x [T, n_cols] by R rows, over words [first_word, last_word): float32 [T, R].

    rows: the result of _row_at for each row. lives: whether each row is read; None: all are. Every row is
    loaded separately: a tile of rows in two dimensions would move between threads through shared memory, with
    barriers. zero: 0, but unknown to the compiler. An instruction takes only one constant, and `zero` keeps
    MANTISSA in a register.
    """
    acc = tl.zeros([T, R, W], tl.float32)
    if TYPE == FLOAT:  # the last word may be shorter
        for first in range(first_word, last_word, W):
            acc = _add_words(
                acc, x, n_tokens, n_cols, rows, lives, stride, first, last_word, zero, TYPE, T, R, W
            )
    else:
        whole = first_word + (last_word - first_word) // W * W
        for first in range(first_word, whole, W):
            acc = _add_words(acc, x, n_tokens, n_cols, rows, lives, stride, first, None, zero, TYPE, T, R, W)
        if whole < last_word:
            acc = _add_words(
                acc, x, n_tokens, n_cols, rows, lives, stride, whole, last_word, zero, TYPE, T, R, W
            )
    return tl.sum(acc, axis=2)


@triton.jit
def _norm_factor(squares, n_tokens, n_parts, n_cols, eps, T: tl.constexpr, S: tl.constexpr):
    """Return the RMSNorm factor of each token, float32 [T, 1], from squares [n_tokens, n_parts] (Weighed)."""
    t, s = tl.arange(0, T)[:, None], tl.arange(0, S)[None, :]
    parts = tl.load(squares + t * n_parts + s, mask=(t < n_tokens) & (s < n_parts), other=0.0)
    return (1.0 / tl.sqrt(tl.sum(parts, axis=1) / n_cols + eps))[:, None]


@triton.jit(do_not_specialize_on_alignment=OF_STEP)
def _matvec_kernel(
    x, out, bias, residual, codes, scales, mins, high, sub_scales, squares, norm, weighed, squares_out,
    n_tokens, n_rows, n_cols, stride, n_words, words_of_split, threshold, n_parts, eps, zero,
    TYPE: tl.constexpr, SPLIT: tl.constexpr, KIND: tl.constexpr, UP_KIND: tl.constexpr, BITS: tl.constexpr,
    PAIRS: tl.constexpr, T: tl.constexpr, R: tl.constexpr, W: tl.constexpr, S: tl.constexpr,
):  # fmt: skip
    """Compute out [T, n_rows], or partial sums [SPLIT, T, n_rows] if the columns are split.

    With BITS, eight rows a program, out is uint8 [T, ceil(n_rows / 8)], a bit for each sum that is not below
    the threshold. With PAIRS, out is f(gate) * g(up), [T, n_rows / 2]; the matrix has all rows of gate, then
    all rows of up.

    squares: given if x is Weighed, n_parts per token, rounded up S. norm: the weight of an RMSNorm of out.
    weighed, squares_out: the Weighed of out; each program stores a part of the squares.
    """
    await_launches()
    EACH: tl.constexpr = 2 if PAIRS else 1  # rows per number of out
    n_out = n_rows // EACH
    rows = tl.program_id(0) * (R // EACH) + tl.arange(0, R // EACH)
    live = rows < n_out
    first = tl.program_id(1) * words_of_split
    last = tl.minimum(first + words_of_split, n_words)
    begins = ()  # type: Any
    for r in tl.static_range(R):  # missing rows repeat the last one, and their results are not stored
        row = tl.minimum(tl.program_id(0) * (R // EACH) + r // EACH, n_out - 1) + r % EACH * n_out
        begins = begins + (_row_at(codes, scales, mins, high, sub_scales, stride, row, TYPE),)
    y = _dot_rows(x, n_tokens, n_cols, begins, None, stride, first, last, zero, TYPE, T, R, W)
    # Not before the loop: there it would occupy registers, and a product has none to spare.
    if squares is not None:
        y *= _norm_factor(squares, n_tokens, n_parts, n_cols, eps, T, S)
    t = tl.arange(0, T)[:, None]
    mask = (t < n_tokens) & live[None, :]
    where = t * n_out + rows[None, :]
    if PAIRS:
        y, up = tl.split(tl.reshape(y, [T, R // 2, 2]))
        if bias is not None:
            up += tl.load(bias + n_out + rows, mask=live, other=0.0)[None, :]
    if SPLIT == 1:
        if bias is not None:
            y += tl.load(bias + rows, mask=live, other=0.0)[None, :]
        if residual is not None:
            y += tl.load(residual + where, mask=mask, other=0.0)
        y = _activated(y, threshold, KIND)
    if PAIRS:
        y = tl.where(y != 0.0, y * _activated(up, threshold, UP_KIND), 0.0)
    if BITS:
        chosen = ~(y < threshold) & live[None, :]
        byte = tl.sum(chosen.to(tl.int32) << tl.arange(0, R)[None, :], axis=1)
        t = tl.arange(0, T)
        at = out + t * tl.cdiv(n_rows, 8) + tl.program_id(0)
        tl.store(at, byte.to(tl.uint8), mask=t < n_tokens)
    else:
        tl.store(out + tl.program_id(1).to(tl.int64) * n_tokens * n_rows + where, y, mask=mask)
    if norm is not None:
        y = tl.where(mask, y, 0.0)
        tl.store(weighed + where, y * tl.load(norm + rows, mask=live, other=0.0)[None, :], mask=mask)
        t = tl.arange(0, T)
        at = squares_out + t * tl.num_programs(0) + tl.program_id(0)
        tl.store(at, tl.sum(_rounded(y, y), axis=1), mask=t < n_tokens)


@triton.jit
def _row_of_pair(pair, second, n_turned, half, DIM: tl.constexpr, NEOX: tl.constexpr):
    """Return the row of one number of a pair.

    The rows up to n_turned are heads of DIM rows, of which RoPE rotates `half` pairs; it does not change
    other rows.
    """
    row = pair * 2 + second
    if NEOX:
        i = pair % (DIM // 2)
        row = tl.where((row < n_turned) & (i < half), pair // (DIM // 2) * DIM + i + second * half, row)
    return row


@triton.jit(do_not_specialize_on_alignment=OF_STEP)
def _project_heads_kernel(
    x, out, bias, codes, scales, mins, high, sub_scales, squares, cos_sin, k_blocks, v_blocks, tables,
    sequences, positions,
    n_tokens, n_rows, n_cols, stride, n_words, n_parts, eps, n_head, n_head_kv, half, max_kv_blocks, zero,
    TYPE: tl.constexpr, DIM: tl.constexpr, DIM_V: tl.constexpr, NEOX: tl.constexpr, T: tl.constexpr,
    R: tl.constexpr, W: tl.constexpr, S: tl.constexpr,
):  # fmt: skip
    """Compute R rows of a matrix of queries, keys and values, all of one kind.

    They are R / 2 pairs, which RoPE rotates. Store queries in out [T, n_head * DIM], keys and values in their
    KV blocks. squares: as in _matvec_kernel.
    """
    await_launches()
    n_q, n_turned = n_head * DIM, (n_head + n_head_kv) * DIM
    pair = tl.program_id(0) * (R // 2)
    # The compiler must know neither the first word, 0, nor that rows are adjacent. Otherwise it would keep an
    # address for each load of the loop, in 80 registers instead of 64.
    begins = ()  # type: Any
    for r in tl.static_range(R):
        row = _row_of_pair(pair + r // 2, r % 2, n_turned, half, DIM, NEOX)
        row = tl.minimum(row, n_rows - 1)
        begins = begins + (_row_at(codes, scales, mins, high, sub_scales, stride, row, TYPE),)
    y = _dot_rows(x, n_tokens, n_cols, begins, None, stride, zero, n_words, zero, TYPE, T, R, W)
    if squares is not None:
        y *= _norm_factor(squares, n_tokens, n_parts, n_cols, eps, T, S)
    a, b = tl.split(tl.reshape(y, [T, R // 2, 2]))
    pairs = pair + tl.arange(0, R // 2)
    rows_a = _row_of_pair(pairs, 0, n_turned, half, DIM, NEOX)
    rows_b = _row_of_pair(pairs, 1, n_turned, half, DIM, NEOX)
    if bias is not None:
        a += tl.load(bias + rows_a)[None, :]
        b += tl.load(bias + rows_b)[None, :]
    t, i = tl.arange(0, T), (pairs % (DIM // 2))[None, :]
    there = t < n_tokens
    token = tl.minimum(t, n_tokens - 1).to(tl.int64)[:, None]
    turns = there[:, None] & (i < tl.where(pair * 2 < n_turned, half, 0))
    cos = tl.load(cos_sin + token * half + i, mask=turns, other=1.0)
    sin = tl.load(cos_sin + (n_tokens + token) * half + i, mask=turns, other=0.0)
    a, b = a * cos - b * sin, b * cos + a * sin
    if pair * 2 < n_q:
        tl.store(out + token * n_q + rows_a[None, :], a, mask=there[:, None])
        tl.store(out + token * n_q + rows_b[None, :], b, mask=there[:, None])
    else:
        position = tl.load(positions + t, mask=there, other=0)
        sequence = tl.load(sequences + t, mask=there, other=0).to(tl.int64)
        kv_block = tl.load(tables + sequence * max_kv_blocks + position // KV_BLOCK, mask=there, other=-1)
        stored = (kv_block >= 0)[:, None]
        if pair * 2 < n_turned:
            _store_pair(
                k_blocks, kv_block, position, rows_a - n_q, rows_b - n_q, a, b, stored, n_head_kv, DIM
            )
        else:
            _store_pair(
                v_blocks, kv_block, position, rows_a - n_turned, rows_b - n_turned, a, b, stored,
                n_head_kv, DIM_V,
            )  # fmt: skip


@triton.jit
def _store_pair(kv_blocks, kv_block, position, rows_a, rows_b, a, b, mask, n_head_kv, DIM: tl.constexpr):
    """Store a and b [T, n] at rows [n] of heads of DIM, in a KV block of each token. kv_block: int32 [T]."""
    first = kv_block.to(tl.int64) * n_head_kv
    for second in tl.static_range(2):
        rows, y = (rows_b, b) if second else (rows_a, a)
        slot = (first[:, None] + (rows // DIM)[None, :]) * KV_BLOCK + (position % KV_BLOCK)[:, None]
        at = kv_blocks + slot * DIM + (rows % DIM)[None, :]
        tl.store(at, y.to(kv_blocks.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize_on_alignment=OF_STEP)
def _add_kernel(
    partials, out, bias, residual, packed, count, counts, n_parts, n_tokens, n, n_packed, threshold,
    KIND: tl.constexpr, P: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Add up partial sums [n_parts, T, n] in a fixed order, P of them at a time.

    packed, count: see _count.
    """
    await_launches()
    i = tl.program_id(0) * N + tl.arange(0, N)
    t = tl.program_id(1)
    if packed is not None:  # noqa: SIM102  (known when this is compiled, unlike the next)
        if t == 0:
            _count(packed, count, counts, n_packed)
    acc = tl.zeros([N], tl.float32)
    for first in range(0, n_parts, P):
        p = first + tl.arange(0, P)
        pointers = partials + (p.to(tl.int64) * n_tokens + t)[:, None] * n + i[None, :]
        acc += tl.sum(tl.load(pointers, mask=(p < n_parts)[:, None] & (i < n)[None, :], other=0.0), axis=0)
    if bias is not None:
        acc += tl.load(bias + i, mask=i < n, other=0.0)
    if residual is not None:
        acc += tl.load(residual + t * n + i, mask=i < n, other=0.0)
    tl.store(out + t * n + i, _activated(acc, threshold, KIND), mask=i < n)


# ---- a few tokens: the sparse FFN ----------------------------------------------------------------------


@triton.jit
def _count(packed, count, counts, n_packed):
    """Add up the packed counts of the programs that computed neurons: int32 [n_packed], or [count].

    A count has eight bits each for selected and active neurons, and four each for rows of gate, up and down.
    Each program adds up a share.

    Counts are whole numbers, so their order does not matter. Five additions to the same addresses by every
    program that has neurons would be slower.
    """
    if count is not None:
        n_packed = tl.load(count)
    share = tl.cdiv(n_packed, tl.num_programs(0))
    first = tl.program_id(0) * share
    last = tl.minimum(first + share, n_packed)
    selected = tl.zeros([128], tl.int32)
    active, gate, up, down = selected, selected, selected, selected
    for at in range(first, last, 128):
        i = at + tl.arange(0, 128)
        n = tl.load(packed + i, mask=i < last, other=0)
        selected += n & 255
        active += (n >> 8) & 255
        gate += (n >> 16) & 15
        up += (n >> 20) & 15
        down += (n >> 24) & 15
    tl.atomic_add(counts, tl.sum(selected, axis=0).to(tl.int64))
    tl.atomic_add(counts + 1, tl.sum(active, axis=0).to(tl.int64))
    tl.atomic_add(counts + 2, tl.sum(gate, axis=0).to(tl.int64))
    tl.atomic_add(counts + 3, tl.sum(up, axis=0).to(tl.int64))
    tl.atomic_add(counts + 4, tl.sum(down, axis=0).to(tl.int64))


@triton.jit(do_not_specialize_on_alignment=OF_STEP)
def _count_kernel(packed, count, counts, n_packed):
    await_launches()
    _count(packed, count, counts, n_packed)


@triton.jit
def _activated(x, threshold, KIND: tl.constexpr):
    """Return f(x). NaN stays NaN."""
    if KIND == RELU:
        return tl.where(x < 0.0, 0.0, x)
    elif KIND == RELU2:
        y = tl.where(x < 0.0, 0.0, x)
        return y * y
    elif KIND == FATRELU:
        return tl.where(x >= threshold, x, 0.0)
    elif KIND == SILU:
        return x / (1.0 + tl.exp(-x))
    elif KIND == GELU:
        return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif KIND == GELU_TANH:  # (1 + tanh(u)) / 2 is the logistic function of 2u
        u = 0.7978845608028654 * (x + 0.044715 * x * x * x)
        return x / (1.0 + tl.exp(-2.0 * u))
    else:
        return x


@triton.jit
def _zero_small(x, is_thresholded, threshold):
    """Set small values of thresholded tokens in x to zero. is_thresholded: of x's shape, or broadcastable."""
    return tl.where(is_thresholded & (tl.abs(x) < threshold), 0.0, x)


@triton.jit
def _is_thresholded(thresholded, t, n_tokens):
    """Return whether tokens t are thresholded, from flags int32 [n_tokens]."""
    return tl.load(thresholded + t, mask=t < n_tokens, other=0) != 0


@triton.jit
def _rows_of(
    h, n_tokens, n_cols, codes, scales, mins, high, sub_scales, stride, rows, live, n_words, zero,
    TYPE: tl.constexpr, T: tl.constexpr, R: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    """Multiply h [T, n_cols] by rows [R], of which only live ones are read: float32 [T, R]."""
    begins, lives = (), ()  # type: Any, Any
    for r in tl.static_range(R):
        mine = tl.arange(0, R) == r
        lives = lives + (tl.sum(tl.where(mine, live.to(tl.int32), 0), axis=0) != 0,)
        row = tl.sum(tl.where(mine & live, rows, 0), axis=0)
        begins = begins + (_row_at(codes, scales, mins, high, sub_scales, stride, row, TYPE),)
    if R == 1:  # callers skip a single row that is not live
        lives = None
    return _dot_rows(h, n_tokens, n_cols, begins, lives, stride, 0, n_words, zero, TYPE, T, R, W)


@triton.jit
def _values_of(
    h, rows, wanted, inside, gate_bias, up_bias,
    gate_codes, gate_scales, gate_mins, gate_high, gate_sub_scales,
    codes, scales, mins, high, sub_scales,
    n_tokens, n_cols, gate_stride, gate_words, stride, n_words, threshold, thresholded, gate_threshold,
    value_threshold, zero,
    GATE_TYPE: tl.constexpr, TYPE: tl.constexpr, KIND: tl.constexpr, UP_KIND: tl.constexpr,
    T: tl.constexpr, R: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    """Return f(gate) * g(up), or f(up) without a gate, and packed counts for _count.

    The values are [T, R], for rows [R] that tokens select.

    thresholded: int32 [T], None: no token is. gate_threshold, value_threshold: the thresholds of f and of the
    result, 0: none.
    """
    live = tl.max(wanted.to(tl.int32), axis=0) != 0
    n_live = tl.sum(live.to(tl.int32), axis=0)
    value = tl.zeros([T, R], tl.float32)
    up_wanted = wanted
    if GATE_TYPE is not None:
        z = _rows_of(
            h, n_tokens, n_cols, gate_codes, gate_scales, gate_mins, gate_high, gate_sub_scales,
            gate_stride, rows, live, gate_words, zero, GATE_TYPE, T, R, W,
        )  # fmt: skip
        if gate_bias is not None:
            z += tl.load(gate_bias + rows, mask=inside, other=0.0)[None, :]
        value = _activated(z, threshold, KIND)
        if thresholded is not None:
            value = _zero_small(
                value, _is_thresholded(thresholded, tl.arange(0, T)[:, None], n_tokens), gate_threshold
            )
        value = tl.where(wanted, value, 0.0)
        up_wanted = value != 0.0
    up_live = tl.max(up_wanted.to(tl.int32), axis=0) != 0
    n_up = tl.sum(up_live.to(tl.int32), axis=0)
    if n_up > 0:
        z = _rows_of(
            h, n_tokens, n_cols, codes, scales, mins, high, sub_scales, stride, rows, up_live, n_words,
            zero, TYPE, T, R, W,
        )  # fmt: skip
        if up_bias is not None:
            z += tl.load(up_bias + rows, mask=inside, other=0.0)[None, :]
        if GATE_TYPE is not None:
            value = tl.where(up_wanted, value * _activated(z, threshold, UP_KIND), 0.0)
        else:
            value = _activated(z, threshold, KIND)
            if thresholded is not None:
                value = _zero_small(
                    value, _is_thresholded(thresholded, tl.arange(0, T)[:, None], n_tokens), gate_threshold
                )
            value = tl.where(up_wanted, value, 0.0)
    if thresholded is not None:
        value = _zero_small(
            value, _is_thresholded(thresholded, tl.arange(0, T)[:, None], n_tokens), value_threshold
        )
    active = (value != 0.0).to(tl.int32)
    counted = tl.sum(tl.sum(wanted.to(tl.int32) + (active << 8), axis=1), axis=0)
    counted += (n_up << 20) + (tl.sum(tl.max(active, axis=0), axis=0) << 24)
    if GATE_TYPE is not None:
        counted += n_live << 16
    return value, counted


@triton.jit(do_not_specialize_on_alignment=OF_STEP)
def _neurons_kernel(
    h, values, packed, gate_bias, up_bias,
    gate_codes, gate_scales, gate_mins, gate_high, gate_sub_scales,
    codes, scales, mins, high, sub_scales,
    n_tokens, n, n_cols, gate_stride, gate_words, stride, n_words, threshold, thresholded, gate_threshold,
    value_threshold, zero,
    GATE_TYPE: tl.constexpr, TYPE: tl.constexpr, KIND: tl.constexpr, UP_KIND: tl.constexpr,
    T: tl.constexpr, R: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    """Compute values [T, n] of all neurons, R of them a program. packed: see _count."""
    await_launches()
    rows = tl.program_id(0) * R + tl.arange(0, R)
    inside = rows < n
    t = tl.arange(0, T)[:, None]
    wanted = (t < n_tokens) & inside[None, :]
    value, counted = _values_of(
        h, rows, wanted, inside, gate_bias, up_bias,
        gate_codes, gate_scales, gate_mins, gate_high, gate_sub_scales,
        codes, scales, mins, high, sub_scales,
        n_tokens, n_cols, gate_stride, gate_words, stride, n_words, threshold, thresholded, gate_threshold,
        value_threshold, zero,
        GATE_TYPE, TYPE, KIND, UP_KIND, T, R, W,
    )  # fmt: skip
    if packed is not None:
        tl.store(packed + tl.program_id(0), counted)
    tl.store(values + t * n + rows[None, :], value, mask=wanted)


@triton.jit
def _ones(x):
    """Return the number of set bits of each word; x: uint32."""
    x = x - ((x >> 1) & 0x55555555)
    x = (x & 0x33333333) + ((x >> 2) & 0x33333333)
    x = (x + (x >> 4)) & 0x0F0F0F0F
    x = x + (x >> 8)
    return ((x + (x >> 16)) & 63).to(tl.int32)


@triton.jit(do_not_specialize_on_alignment=OF_STEP)
def _chosen_kernel(
    h, values, selected, held, held_before, ids, count, packed, gate_bias, up_bias,
    gate_codes, gate_scales, gate_mins, gate_high, gate_sub_scales,
    codes, scales, mins, high, sub_scales,
    n_tokens, n, n_cols, gate_stride, gate_words, stride, n_words, n_bytes, threshold,
    thresholded, gate_threshold, value_threshold, zero,
    GATE_TYPE: tl.constexpr, TYPE: tl.constexpr, KIND: tl.constexpr, UP_KIND: tl.constexpr,
    T: tl.constexpr, W: tl.constexpr, S: tl.constexpr,
):  # fmt: skip
    """Compute values of the neurons that some token selects, one at a time. The programs share their list.

    The list is in the order of neurons, and it is not stored. A program counts the bits before each word of
    32 neurons, [S], and finds its own list entries: program_id, program_id + num_programs, and so on. With
    ids, the value of the k-th neuron is at k of values [T, n], its row is ids[k], and count gets the length
    of the list. Without ids, values [T, n] are by row. packed [n]: by list entry, see _count. held: int32 [n
    words], bits of the neurons whose rows the matrices have, in order; None: all. held_before: the number of
    held neurons before each word.
    """
    await_launches()
    s = tl.arange(0, S)
    byte = s[:, None] * 4 + tl.arange(0, 4)[None, :]
    bits = tl.zeros([S], tl.int32)
    for t in tl.static_range(T):
        four = tl.load(
            selected + tl.minimum(t, n_tokens - 1) * n_bytes + byte, mask=byte < n_bytes, other=0
        ).to(tl.int32)
        bits = bits | tl.sum(four << (8 * tl.arange(0, 4))[None, :], axis=1)
    if held is not None:
        bits = bits & tl.load(held + s, mask=s * 4 < n_bytes, other=0)
    n_each = _ones(bits.to(tl.uint32, bitcast=True))
    up_to = tl.cumsum(n_each, axis=0)
    n_chosen = tl.sum(n_each, axis=0)
    if count is not None:  # noqa: SIM102  (known when this is compiled, unlike the next)
        if tl.program_id(0) == 0:
            tl.store(count, n_chosen)
    t = tl.arange(0, T)[:, None]
    j = tl.arange(0, 32)
    for k in range(tl.program_id(0), n_chosen, tl.num_programs(0)):
        # The word of the k-th neuron: its number, its bits, and the neuron's rank among them.
        has = (up_to > k) & (up_to - n_each <= k)
        word = tl.sum(tl.where(has, s, 0), axis=0)
        nth = tl.sum(tl.where(has, k - (up_to - n_each), 0), axis=0)
        own = tl.sum(tl.where(has, bits, 0), axis=0)
        is_set = (own >> j) & 1
        bit = tl.sum((tl.cumsum(is_set, axis=0) <= nth).to(tl.int32), axis=0)
        number = word * 32 + bit
        row = number
        if held is not None:
            below = (tl.load(held + word) >> j) & 1
            row = tl.load(held_before + word) + tl.sum(tl.where(j < bit, below, 0), axis=0)
        rows = row + tl.arange(0, 1)
        mine = tl.load(selected + t * n_bytes + number // 8, mask=t < n_tokens, other=0).to(tl.int32)
        wanted = ((mine >> (number % 8)) & 1) != 0
        value, counted = _values_of(
            h, rows, wanted, rows < n, gate_bias, up_bias,
            gate_codes, gate_scales, gate_mins, gate_high, gate_sub_scales,
            codes, scales, mins, high, sub_scales,
            n_tokens, n_cols, gate_stride, gate_words, stride, n_words, threshold, thresholded,
            gate_threshold, value_threshold,
            zero, GATE_TYPE, TYPE, KIND, UP_KIND, T, 1, W,
        )  # fmt: skip
        if ids is not None:
            tl.store(ids + k, row)
            tl.store(values + t * n + k, value, mask=t < n_tokens)
        else:
            tl.store(values + t * n + row, value, mask=t < n_tokens)
        if packed is not None:
            tl.store(packed + k, counted)


@triton.jit
def _over_rows(by, y, TYPE: tl.constexpr):
    """Return the sum of by [R, 1 or W, 1] * y [R, W, 4] over rows: [W, 4]."""
    if TYPE == FLOAT or SPREADS_ROWS:  # threads share the rows
        return tl.sum(_rounded(tl.broadcast_to(by, y.shape), y), axis=0)
    else:
        return tl.sum(by * y, axis=0)


@triton.jit(do_not_specialize_on_alignment=OF_STEP)
def _axpy_kernel(
    x, ids, count, partials, codes, scales, mins, high, sub_scales, group_of,
    n_tokens, n_rows, n_cols, stride, n_words, left_out, row_bytes, zero,
    TYPE: tl.constexpr, RANGE: tl.constexpr, T: tl.constexpr, R: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    """Compute partials [ranges, T, n_cols]: x [T, n_rows] times the rows of one range, in W of their words.

    ids, count: x has only the `count` rows `ids`, which the ranges share evenly. None: x has all rows.
    left_out: int64 [1], to which row_bytes are added for every row that no token needs.
    """
    await_launches()
    PARTS: tl.constexpr = 1 if TYPE <= Q8_0 else 2
    # Types without minimums multiply the scale of a row by its x, once for all four columns of a part.
    NO_MIN: tl.constexpr = TYPE == Q8_0 or TYPE == Q4_0 or TYPE == Q5_0 or TYPE == Q6_K
    BY_ROW: tl.constexpr = group_of is None and NO_MIN
    w = tl.program_id(0) * W + (tl.arange(0, W) | zero)  # see _dot_rows
    n = n_rows
    if count is not None:
        n = tl.load(count)
    share = tl.cdiv(n, tl.num_programs(1))
    begin = tl.program_id(1) * share
    end = tl.minimum(begin + share, n)
    token = tl.arange(0, T)[:, None, None]
    # Zeros by a load that reads nothing. So threads hold sums in the layout of the rows, four columns each.
    # tl.zeros would use another layout, and every row would pass through shared memory.
    base = partials + (tl.program_id(1).to(tl.int64) * n_tokens + token) * n_cols
    column = (_column(w, 0, TYPE)[:, None] + tl.arange(0, 4)[None, :])[None, :, :]
    low = tl.load(base + column, mask=(token < zero) & (column < n_cols), other=0.0)
    upper = low
    n_read = 0
    for start in range(begin, end, RANGE):
        i = start + tl.arange(0, RANGE)
        fires = tl.zeros([RANGE], tl.int32)
        for t in tl.static_range(T):
            mine = tl.load(x + tl.minimum(t, n_tokens - 1) * n_rows + i, mask=i < end, other=0.0)
            fires = fires | (mine != 0.0).to(tl.int32)
        n_before = tl.cumsum(fires, axis=0)  # firing neurons of the range, up to and including each
        n_fires = tl.sum(fires, axis=0)
        n_read += n_fires
        for k in range(0, n_fires, R):
            # The k-th firing neuron follows all neurons whose n_before is at most k.
            wanted = k + tl.arange(0, R)
            live = wanted < n_fires
            index = tl.sum((n_before[None, :] <= wanted[:, None]).to(tl.int32), axis=1)
            at = start + tl.where(live, index, 0)
            rows = at
            if ids is not None:
                rows = tl.load(ids + at, mask=live, other=0)
            raw = _load(codes, scales, mins, high, sub_scales, group_of, stride, rows, live, w, n_words, TYPE)
            words, bits, d, _, s0, s1, s2 = raw
            for part in tl.static_range(PARTS):
                if BY_ROW:
                    y = _numbers(words, bits, w, zero, part, TYPE)
                    scale = _scale(d, s0, s1, s2, w, part, TYPE)
                else:
                    y = _weights(
                        raw, scales, mins, high, sub_scales, group_of, stride, rows, live, w, n_words, zero,
                        part, TYPE,
                    )  # fmt: skip
                for t in tl.static_range(T):
                    v = tl.load(x + tl.minimum(t, n_tokens - 1) * n_rows + at, mask=live, other=0.0)
                    by = v[:, None, None]
                    if BY_ROW:
                        by = (v[:, None] * scale)[:, :, None]
                    added = _over_rows(by, y, TYPE)[None, :, :]
                    if part == 0:
                        low = tl.where(token == t, low + added, low)
                    else:
                        upper = tl.where(token == t, upper + added, upper)
    if left_out is not None:  # noqa: SIM102  (known when this is compiled, unlike the next)
        if tl.program_id(0) == 0:
            tl.atomic_add(left_out, (tl.maximum(end - begin, 0) - n_read).to(tl.int64) * row_bytes)
    for part in tl.static_range(PARTS):
        column = (_column(w, part, TYPE)[:, None] + tl.arange(0, 4)[None, :])[None, :, :]
        mask = (token < n_tokens) & (w < n_words)[None, :, None] & (column < n_cols)
        y = low if part == 0 else upper
        if BY_ROW:
            y = y * _lowered(part, TYPE)[None, None, :]
        tl.store(base + column, y, mask=mask)


@triton.jit
def _pack_kernel(scores, bits, threshold, first, n_scores, n_bytes, B: tl.constexpr):
    """Pack a bit per neuron. It is set for neurons below `first` and for scores not below the threshold."""
    await_launches()
    byte = tl.program_id(1) * B + tl.arange(0, B)
    t = tl.program_id(0).to(tl.int64)
    j = tl.arange(0, 8)[None, :]
    i = byte[:, None] * 8 + j - first
    score = tl.load(scores + t * n_scores + i, mask=(i >= 0) & (i < n_scores), other=0.0)
    chosen = ((i < 0) | ~(score < threshold)) & (i < n_scores)
    packed = tl.sum(chosen.to(tl.int32) << j, axis=1)
    tl.store(bits + t * n_bytes + byte, packed.to(tl.uint8), mask=byte < n_bytes)


# ---- many tokens: decode a tile, multiply it --------------------------------------------------------------
#
# Tensor cores multiply halves. Weights of 16 bits stay unchanged; scaled weights of quantised types have at
# most eleven significant bits. Inputs are rounded to halves beforehand, once for all rows. For float16, each
# token is first scaled by its own power of two, so that a large token makes no other small. For bfloat16, an
# input is a sum of two bfloat16 values, which matches the precision of the weights. Float32 by float32 takes
# three products of TF32.


@triton.jit
def _in_order(place, TYPE: tl.constexpr):
    """Return the columns at places [K] of a decoded tile's row.

    They are ordered by word, low nibbles first. Bytes are in the order 0, 2, 1, 3, because two codes 16 bits
    apart become halves together.
    """
    if TYPE == FLOAT:
        return place
    byte = (place & 2) >> 1 | (place & 1) << 1
    if TYPE == Q8_0:
        return (place & -4) | byte
    else:
        w = place // 8
        return tl.where(place % 8 < 4, _column(w, 0, TYPE), _column(w, 1, TYPE)) + byte


@triton.jit(do_not_specialize_on_alignment=OF_STEP)
def _halves_kernel(x, out, sizes, n, ORDER: tl.constexpr, N: tl.constexpr):
    """Convert a row of x [T, n] to halves in the order of a type's words.

    float16: out [T, n] is multiplied by a power of two, whose inverse is in sizes [T]. bfloat16: out [2, T,
    n] also has the rounding errors.
    """
    await_launches()
    row = tl.program_id(0).to(tl.int64) * n
    n_all = tl.num_programs(0).to(tl.int64) * n
    i = tl.arange(0, N)
    factor = 1.0
    if sizes is not None:
        largest = tl.zeros([N], tl.float32)
        for first in range(0, n, N):
            at = first + i
            largest = tl.maximum(largest, tl.abs(tl.load(x + row + at, mask=at < n, other=0.0)))
        # Scale the largest value to at least 2^14 and below 2^15. Rows with infinite values are not scaled.
        exponent = tl.max(largest, axis=0).to(tl.int32, bitcast=True) >> 23
        exponent = tl.where(exponent == 255, 141, tl.maximum(exponent, 15))
        factor = ((268 - exponent) << 23).to(tl.float32, bitcast=True)
        tl.store(sizes + tl.program_id(0), ((exponent - 14) << 23).to(tl.float32, bitcast=True))
    for first in range(0, n, N):
        at = first + i
        y = tl.load(x + row + _in_order(at, ORDER), mask=at < n, other=0.0) * factor
        high = y.to(out.dtype.element_ty)
        tl.store(out + row + at, high, mask=at < n)
        if sizes is None:
            # A value that is not finite has no rounding error.
            left = tl.where(tl.abs(y) < float("inf"), y - high.to(tl.float32), 0.0)
            tl.store(out + n_all + row + at, left.to(out.dtype.element_ty), mask=at < n)


@triton.jit
def _pair(words, bits, w, odd: tl.constexpr, part: tl.constexpr, TYPE: tl.constexpr):
    """Decode bytes 0 and 2, or 1 and 3, of each word to float16 [R, W] each: codes minus their offset.

    Two codes at a time are or-ed into the mantissa of 2^10, which gives 2^10 + code.
    """
    if TYPE == Q8_0:
        q = ((words ^ SIGN_BITS) >> (8 * odd)) & 0x00FF00FF
    else:
        q = (words >> (8 * odd + 4 * part)) & 0x000F000F
        if TYPE == Q6_K:
            both = bits >> ((w % 16 // 8 * 2 + 4 * part)[None, :] + 8 * odd)
            q = q | (both & 0x00030003) << 4
        elif TYPE == Q5_0 or TYPE == Q5_1:
            four = bits >> ((w % 4 * 4 + 16 * part)[None, :] + odd)
            q = q | (four & 1) << 4 | (four & 4) << 18
    q = q | 0x64006400
    OFFSET: tl.constexpr = (
        128 if TYPE == Q8_0 else 8 if TYPE == Q4_0 else 16 if TYPE == Q5_0 else 32 if TYPE == Q6_K else 0
    )
    low = q.to(tl.int16).to(tl.float16, bitcast=True) - (1024.0 + OFFSET)
    upper = (q >> 16).to(tl.int16).to(tl.float16, bitcast=True) - (1024.0 + OFFSET)
    return low, upper


@triton.jit
def _scaled(
    q, d, scale, least, scales, mins, high, sub_scales, group_of, stride, rows, live, w, n_words,
    byte: tl.constexpr, part: tl.constexpr, TYPE: tl.constexpr,
):  # fmt: skip
    """Scale the numbers q of one byte of each word to weights, float16 [R, W]."""
    if group_of is not None:
        PER_WORD: tl.constexpr = 4 if TYPE == Q8_0 else 8
        group = tl.load(group_of + rows, mask=live, other=0).to(tl.int64)
        columns, mask = (_column(w, part, TYPE) + byte)[None, :], live[:, None] & (w < n_words)[None, :]
        if TYPE == Q8_0 or TYPE == Q4_0:
            at = scales + group[:, None] * (stride * PER_WORD) + columns
            return q * tl.load(at, mask=mask, other=0.0)
        else:
            scale, least = _planes(
                scales, mins, high, sub_scales, group[:, None], columns, stride * PER_WORD, mask, TYPE
            )
            return (q.to(tl.float32) * scale + least).to(tl.float16)
    elif TYPE == Q8_0 or TYPE == Q4_0 or TYPE == Q5_0:
        return q * d
    elif TYPE == Q6_K:
        return (q.to(tl.float32) * scale).to(tl.float16)
    else:
        return (q.to(tl.float32) * scale + least).to(tl.float16)


@triton.jit
def _part_of_words(
    raw, scales, mins, high, sub_scales, group_of, stride, rows, live, w, n_words,
    part: tl.constexpr, TYPE: tl.constexpr,
):  # fmt: skip
    """Decode the weights of bytes 0, 2, 1 and 3 of a part of each word, float16 [R, W] each."""
    words, bits, d, m, s0, s1, s2 = raw
    scale, least = d, d
    if group_of is None:
        scale = _scale(d, s0, s1, s2, w, part, TYPE)
        if TYPE == Q4_1 or TYPE == Q5_1 or TYPE == Q4_K:
            least = _minimum(m, s1, s2, w, part, TYPE)
    a, c = _pair(words, bits, w, 0, part, TYPE)
    b, e = _pair(words, bits, w, 1, part, TYPE)
    a = _scaled(
        a, d, scale, least, scales, mins, high, sub_scales, group_of, stride, rows, live, w, n_words, 0,
        part, TYPE,
    )  # fmt: skip
    b = _scaled(
        b, d, scale, least, scales, mins, high, sub_scales, group_of, stride, rows, live, w, n_words, 1,
        part, TYPE,
    )  # fmt: skip
    c = _scaled(
        c, d, scale, least, scales, mins, high, sub_scales, group_of, stride, rows, live, w, n_words, 2,
        part, TYPE,
    )  # fmt: skip
    e = _scaled(
        e, d, scale, least, scales, mins, high, sub_scales, group_of, stride, rows, live, w, n_words, 3,
        part, TYPE,
    )  # fmt: skip
    return a, c, b, e


@triton.jit
def _tile(raw, scales, mins, high, sub_scales, group_of, stride, rows, live, w, n_words, TYPE: tl.constexpr):
    """Decode words w of rows [R] to float16 [R, 4 W or 8 W] in the order of _in_order.

    They are interleaved in registers, because threads would share words of a tile in three dimensions.
    """
    a, c, b, e = _part_of_words(
        raw, scales, mins, high, sub_scales, group_of, stride, rows, live, w, n_words, 0, TYPE
    )
    if TYPE != Q8_0:
        a1, c1, b1, e1 = _part_of_words(
            raw, scales, mins, high, sub_scales, group_of, stride, rows, live, w, n_words, 1, TYPE
        )
        a, c = tl.interleave(a, a1), tl.interleave(c, c1)
        b, e = tl.interleave(b, b1), tl.interleave(e, e1)
    return tl.interleave(tl.interleave(a, b), tl.interleave(c, e))


@triton.jit
def _half(word):
    """Return the lower half of each int32 as float16."""
    return word.to(tl.int16).to(tl.float16, bitcast=True)


@triton.jit
def _of_blocks(numbers, row, block, n_blocks, w, PER_BLOCK: tl.constexpr, TWO: tl.constexpr):
    """Load the float16 number of each word's block: [R, W], or [R, 1] if all words w [W] are in one block.

    TWO: they are in `block` and the next one; if that does not exist, its words do not either. numbers:
    float16, or int32 with two numbers each if rows have an even number of blocks.
    """
    if numbers.dtype.element_ty == tl.int32:
        both = tl.load(numbers + row * (n_blocks // 2) + block // 2)
        a, b = _half(both >> (block % 2 * 16)), _half(both >> 16)
    else:
        a = tl.load(numbers + row * n_blocks + block)
        b = tl.load(numbers + row * n_blocks + tl.minimum(block + 1, n_blocks - 1)) if TWO else a
    if TWO:
        return tl.where((w // PER_BLOCK % 2 == 0)[None, :], a, b)
    else:
        return a


@triton.jit
def _load_tile(
    codes, scales, mins, high, sub_scales, stride, rows, first, n_words, TYPE: tl.constexpr, W: tl.constexpr
):  # fmt: skip
    """Load words first to first + W of rows [R] for tensor cores, as _load does.

    A number that all words share is [R, 1]. Loads have four bytes, because such loads are copied to shared
    memory while other tiles are multiplied. The kernel would wait for smaller loads.
    """
    PER_BLOCK: tl.constexpr = 32 if TYPE >= Q4_K else (8 if TYPE == Q8_0 else 4)  # words of codes
    TWO: tl.constexpr = W > PER_BLOCK
    w = first + tl.arange(0, W)
    row, inside = rows.to(tl.int64)[:, None], (w < n_words)[None, :]
    block, n_blocks = first // PER_BLOCK, stride // PER_BLOCK
    words = tl.load(codes + row * stride + w[None, :], mask=inside, other=0)
    d = _of_blocks(scales, row, block, n_blocks, w, PER_BLOCK, TWO)
    bits, m, s0, s1, s2 = words, d, words, words, words
    if TYPE == Q4_1 or TYPE == Q5_1 or TYPE == Q4_K:
        m = _of_blocks(mins, row, block, n_blocks, w, PER_BLOCK, TWO)
    if TYPE == Q5_0 or TYPE == Q5_1:
        bits = tl.load(high + row * n_blocks + block)
        if TWO:
            after = tl.load(high + row * n_blocks + tl.minimum(block + 1, n_blocks - 1))
            bits = tl.where((w // PER_BLOCK % 2 == 0)[None, :], bits, after)
    elif TYPE == Q4_K:
        at = sub_scales + (row * n_blocks + block) * 3
        s0, s1, s2 = tl.load(at), tl.load(at + 1), tl.load(at + 2)
    elif TYPE == Q6_K:  # a scale byte for four words of each part
        at = row * (stride // 2) + (w // 16 * 8 + w % 8)[None, :]
        bits = tl.load(high + at, mask=inside, other=0)
        four = sub_scales + row * (stride // 8) + first // 16 * 2
        up = (24 - w % 16 // 4 * 8)[None, :]
        s0, s1 = (tl.load(four) << up) >> 24, (tl.load(four + 1) << up) >> 24
    return words, bits, d, m, s0, s1, s2


@triton.jit
def _multiplied(weights, x, acc, at, mask, n_all, PRECISION: tl.constexpr):
    """Return acc [R, T] + weights [R, K] times inputs [K, T].

    Inputs are at x + at, and their rounding errors n_all further on (_halves_kernel).
    """
    xs = tl.load(x + at, mask=mask, other=0.0)
    if x.dtype.element_ty == tl.float32:
        return tl.dot(weights, xs, acc, input_precision=PRECISION)
    elif x.dtype.element_ty == tl.bfloat16:
        low = tl.load(x + n_all + at, mask=mask, other=0.0)
        return tl.dot(weights, low, tl.dot(weights, xs, acc))
    else:
        return tl.dot(weights, xs, acc)


@triton.jit
def _put(acc, sizes, out, bias, residual, t, n_tokens, column, n, inside):
    """Store sums [R, T] in columns [R] of out [T, n], after scaling and adding bias and residual."""
    if sizes is not None:
        acc = acc * tl.load(sizes + t, mask=t < n_tokens, other=0.0)[None, :]
    y = tl.trans(acc)
    if bias is not None:
        y += tl.load(bias + column, mask=inside, other=0.0)[None, :]
    where = t[:, None].to(tl.int64) * n + column[None, :]
    mask = (t < n_tokens)[:, None] & inside[None, :]
    if residual is not None:
        y += tl.load(residual + where, mask=mask, other=0.0)
    tl.store(out + where, y, mask=mask)


@triton.jit(do_not_specialize_on_alignment=OF_STEP)
def _matmul_kernel(
    x, sizes, out, bias, residual, codes, scales, mins, high, sub_scales,
    n_tokens, n_rows, n_cols, stride, n_words,
    TYPE: tl.constexpr, PRECISION: tl.constexpr, M: tl.constexpr, N: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    """Compute out [T, n_rows] = x [T, n_cols] @ matrix.T, M tokens and N rows a program, W words at a time.

    x, sizes: see _halves_kernel, or x float32 and no sizes. Weights are the first factor, so that few tokens
    fill an instruction too.
    """
    await_launches()
    PER_WORD: tl.constexpr = 4 if TYPE <= Q8_0 else 8
    rows = tl.program_id(0) * N + tl.arange(0, N)
    t = tl.program_id(1) * M + tl.arange(0, M)
    # Missing rows and tokens repeat the last one; their results are not stored.
    row = tl.minimum(rows, n_rows - 1)
    token = tl.minimum(t, n_tokens - 1)[None, :].to(tl.int64) * n_cols
    n_all = n_tokens.to(tl.int64) * n_cols
    acc = tl.zeros([N, M], tl.float32)
    k = tl.arange(0, W * PER_WORD)
    for first in range(0, n_words, W):
        column = first * PER_WORD + k
        inside = column < n_cols
        if TYPE == FLOAT:
            at = codes + row.to(tl.int64)[:, None] * stride + column[None, :]
            y = tl.load(at, mask=inside[None, :], other=0.0)
        else:
            raw = _load_tile(codes, scales, mins, high, sub_scales, stride, row, first, n_words, TYPE, W)
            w = first + tl.arange(0, W)
            y = _tile(raw, scales, mins, high, sub_scales, None, stride, row, None, w, n_words, TYPE)
        acc = _multiplied(y, x, acc, token + column[:, None], inside[:, None], n_all, PRECISION)
    _put(acc, sizes, out, bias, residual, t, n_tokens, rows, n_rows, rows < n_rows)


@triton.jit(do_not_specialize_on_alignment=OF_STEP)
def _matmul_t_kernel(
    x, sizes, out, bias, residual, codes, scales, mins, high, sub_scales, group_of,
    n_tokens, n_rows, n_cols, stride, n_words,
    TYPE: tl.constexpr, PRECISION: tl.constexpr, M: tl.constexpr, K: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    """Compute out [T, n_cols] = x [T, n_rows] @ matrix, M tokens and W words a program, K rows at a time.

    x, sizes: as in _matmul_kernel.
    """
    await_launches()
    PER_WORD: tl.constexpr = 4 if TYPE <= Q8_0 else 8
    w = tl.program_id(0) * W + tl.arange(0, W)
    place = tl.program_id(0) * W * PER_WORD + tl.arange(0, W * PER_WORD)
    t = tl.program_id(1) * M + tl.arange(0, M)
    token = tl.minimum(t, n_tokens - 1)[None, :].to(tl.int64) * n_rows
    n_all = n_tokens.to(tl.int64) * n_rows
    acc = tl.zeros([W * PER_WORD, M], tl.float32)
    k = tl.arange(0, K)
    if TYPE != FLOAT:
        words, bits, d, m, s0, s1, s2 = _load(
            codes, scales, mins, high, sub_scales, group_of, stride, k, k < n_rows, w, n_words, TYPE
        )
    for first in range(0, n_rows, K):
        rows = first + k
        live = rows < n_rows
        if TYPE == FLOAT:
            at = codes + rows.to(tl.int64)[:, None] * stride + place[None, :]
            y = tl.load(at, mask=live[:, None] & (place < n_cols)[None, :], other=0.0)
            acc = _multiplied(tl.trans(y), x, acc, token + rows[:, None], live[:, None], n_all, PRECISION)
        else:
            after = rows + K
            raw = words, bits, d, m, s0, s1, s2
            words, bits, d, m, s0, s1, s2 = _load(
                codes,
                scales,
                mins,
                high,
                sub_scales,
                group_of,
                stride,
                after,
                after < n_rows,
                w,
                n_words,
                TYPE,
            )
            y = _tile(raw, scales, mins, high, sub_scales, group_of, stride, rows, live, w, n_words, TYPE)
            acc = _multiplied(tl.trans(y), x, acc, token + rows[:, None], live[:, None], n_all, PRECISION)
    column = _in_order(place, TYPE)
    _put(acc, sizes, out, bias, residual, t, n_tokens, column, n_cols, place < n_cols)


@triton.jit(do_not_specialize_on_alignment=OF_STEP)
def _fired_kernel(
    gate, up, values, selected, numbers, counts, n_tokens, n, stride, n_bytes, threshold,
    thresholded, gate_threshold, value_threshold,
    KIND: tl.constexpr, UP_KIND: tl.constexpr, READ: tl.constexpr, DENSE: tl.constexpr, T: tl.constexpr,
    N: tl.constexpr,
):  # fmt: skip
    """Compute values [T, n] = f(gate) * g(up), or 0 for neurons that are not selected or do not fire.

    gate: computed sums of the gate, or of up if `up` is None, with rows `stride` apart. A program has N
    neurons of all tokens, T tokens at a time. READ: count every row of up as read. DENSE: as in
    fallback.fired.

    numbers: int32 [n], the numbers of the neurons; None: 0 to n - 1. counts: updated as by fallback.count.
    thresholded: as in _values_of.
    """
    await_launches()
    i = tl.program_id(0) * N + tl.arange(0, N)
    inside = i < n
    number = i
    if numbers is not None:
        number = tl.load(numbers + i, mask=inside, other=0)
    n_selected, n_active = tl.zeros([N], tl.int32), tl.zeros([N], tl.int32)
    n_fires = n_active
    for first in range(0, n_tokens, T):
        t = first + tl.arange(0, T)
        there = (t < n_tokens)[:, None] & inside[None, :]
        wanted = there
        if selected is not None:
            at = selected + t[:, None] * n_bytes + number[None, :] // 8
            byte = tl.load(at, mask=there, other=0).to(tl.int32)
            wanted = ((byte >> (number % 8)[None, :]) & 1) != 0
        at = t[:, None].to(tl.int64) * stride + i[None, :]
        z = tl.load(gate + at, mask=there, other=0.0)
        value = _activated(z, threshold, KIND)
        if thresholded is not None:
            value = _zero_small(value, _is_thresholded(thresholded, t[:, None], n_tokens), gate_threshold)
        value = tl.where(wanted, value, 0.0)
        if up is not None:
            fires = value != 0.0
            n_fires += tl.sum((fires | (READ & there)).to(tl.int32), axis=0)
            z = tl.load(up + at, mask=fires, other=0.0)
            value = tl.where(fires, value * _activated(z, threshold, UP_KIND), 0.0)
        if thresholded is not None:
            value = _zero_small(value, _is_thresholded(thresholded, t[:, None], n_tokens), value_threshold)
        tl.store(values + t[:, None].to(tl.int64) * n + i[None, :], value, mask=there)
        n_selected += tl.sum(wanted.to(tl.int32), axis=0)
        n_active += tl.sum((value != 0.0).to(tl.int32), axis=0)
    if counts is not None:
        tl.atomic_add(counts, tl.sum(n_selected, axis=0).to(tl.int64))
        tl.atomic_add(counts + 1, tl.sum(n_active, axis=0).to(tl.int64))
        every = inside & DENSE
        n_rows = tl.sum(((n_selected > 0) | every).to(tl.int32), axis=0).to(tl.int64)
        if up is not None:
            tl.atomic_add(counts + 2, n_rows)
            n_rows = tl.sum((n_fires > 0).to(tl.int32), axis=0).to(tl.int64)
        tl.atomic_add(counts + 3, n_rows)
        tl.atomic_add(counts + 4, tl.sum(((n_active > 0) | every).to(tl.int32), axis=0).to(tl.int64))


# ---- attention, norms, rotation --------------------------------------------------------------------------


@triton.jit
def _finite(largest):
    """Replace a largest score of -inf by 0. Without visible positions, -inf - (-inf) would be NaN."""
    return tl.where(largest == float("-inf"), 0.0, largest)


@triton.jit
def _weighed(scores, largest, total):
    """Return the weights of scores [Q, N], the factor for earlier sums, and the new `largest` and `total`.

    largest, total: [Q], the largest score and the sum of weights of earlier positions.
    """
    now = tl.maximum(largest, tl.max(scores, axis=1))
    shrink = tl.exp(largest - _finite(now))
    weights = tl.exp(scores - _finite(now)[:, None])
    return weights, shrink, now, total * shrink + tl.sum(weights, axis=1)


@triton.jit
def _mean(acc, largest, total, sinks, head, mask):
    """Divide sums [Q, V] of weighted values by the sum of all weights, including a head's sink."""
    if sinks is not None:
        total += tl.exp(tl.load(sinks + head, mask=mask, other=0.0) - _finite(largest))
    return acc / tl.where(total == 0.0, 1.0, total)[:, None]


@triton.jit
def _attention_kernel(
    q, out, stats, k_blocks, v_blocks, tables, sequences, positions,
    sinks, scale, softcap, window, n_head, n_head_kv, max_kv_blocks, kv_blocks_of_split, n_splits,
    SPLIT: tl.constexpr, CAPPED: tl.constexpr, PRECISION: tl.constexpr,
    GROUP: tl.constexpr, DIM: tl.constexpr, DIM_V: tl.constexpr,
    H: tl.constexpr, D: tl.constexpr, V: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Compute attention of one token, for H heads of a KV head and the KV blocks of one split.

    H is at most GROUP, the number of heads of the KV head. Positions are read N at a time.

    Without SPLIT: out [T, n_head, DIM_V]. With SPLIT: undivided sums in out [T, n_head, n_splits, DIM_V], and
    the largest score and the sum of weights relative to it in stats [T, n_head, n_splits, 2]. D, V: DIM,
    DIM_V rounded up.
    """
    await_launches()
    PARTS: tl.constexpr = (GROUP + H - 1) // H
    t, kv, split = tl.program_id(0).to(tl.int64), tl.program_id(1) // PARTS, tl.program_id(2)
    position = tl.load(positions + t)
    table = tables + tl.load(sequences + t).to(tl.int64) * max_kv_blocks
    start = 0
    if window > 0:
        start = tl.maximum(position - window + 1, 0)
    first = tl.maximum(split * kv_blocks_of_split * KV_BLOCK, start // N * N)
    last = tl.minimum((split + 1) * kv_blocks_of_split * KV_BLOCK, position + 1)
    last = tl.minimum(last, max_kv_blocks * KV_BLOCK)

    h, d, dv, n = tl.arange(0, H), tl.arange(0, D), tl.arange(0, V), tl.arange(0, N)
    h = tl.program_id(1) % PARTS * H + h
    head = kv * GROUP + h
    of_group = h < GROUP
    query = tl.load(
        q + t * n_head * DIM + head[:, None] * DIM + d[None, :],
        mask=of_group[:, None] & (d < DIM)[None, :], other=0.0,
    ) * scale  # fmt: skip
    largest = tl.full([H], float("-inf"), tl.float32)
    total = tl.zeros([H], tl.float32)
    acc = tl.zeros([H, V], tl.float32)
    for at in range(first, last, N):
        i = at + n
        kv_block = tl.load(table + i // KV_BLOCK)  # one block: N divides KV_BLOCK
        seen = (i >= start) & (i <= position) & (kv_block >= 0)
        # Unseen positions are not read: KV blocks may hold old data.
        slot = (kv_block.to(tl.int64) * n_head_kv + kv) * KV_BLOCK + i % KV_BLOCK
        k = tl.load(
            k_blocks + slot[:, None] * DIM + d[None, :], mask=seen[:, None] & (d < DIM)[None, :], other=0.0
        ).to(tl.float32)
        scores = tl.dot(query, tl.trans(k), input_precision=PRECISION)
        if CAPPED:
            scores = softcap - 2 * softcap / (tl.exp(2 * scores / softcap) + 1)
        scores = tl.where(seen[None, :], scores, float("-inf"))
        weights, shrink, largest, total = _weighed(scores, largest, total)
        v = tl.load(
            v_blocks + slot[:, None] * DIM_V + dv[None, :],
            mask=seen[:, None] & (dv < DIM_V)[None, :],
            other=0.0,
        ).to(tl.float32)
        acc = tl.dot(weights, v, acc * shrink[:, None], input_precision=PRECISION)
    mask = of_group[:, None] & (dv < DIM_V)[None, :]
    if SPLIT:
        row = (t * n_head + head) * n_splits + split
        tl.store(out + row[:, None] * DIM_V + dv[None, :], acc, mask=mask)
        tl.store(stats + row * 2, largest, mask=of_group)
        tl.store(stats + row * 2 + 1, total, mask=of_group)
    else:
        acc = _mean(acc, largest, total, sinks, head, of_group)
        tl.store(out + t * n_head * DIM_V + head[:, None] * DIM_V + dv[None, :], acc, mask=mask)


@triton.jit
def _halved(x):
    """Split x, at most 1 in magnitude, into a sum of two halves, exact to 2^-24, like float32 near 1."""
    high = x.to(tl.float16)
    return high, (x - high.to(tl.float32)).to(tl.float16)


@triton.jit
def _rows_at(matrix, rows, there, column, WIDTH: tl.constexpr):
    """Load rows of WIDTH numbers, and zeros for missing rows."""
    mask = there[:, None] & (column < WIDTH)[None, :]
    return tl.load(matrix + rows[:, None] * WIDTH + column[None, :], mask=mask, other=0.0)


@triton.jit(do_not_specialize_on_alignment=OF_STEP)
def _prompt_attention_kernel(
    q, out, k_blocks, v_blocks, tables, sequences, positions,
    sinks, scale, softcap, window, n_tokens, n_head, n_head_kv, max_kv_blocks,
    CAPPED: tl.constexpr, PRECISION: tl.constexpr,
    GROUP: tl.constexpr, DIM: tl.constexpr, DIM_V: tl.constexpr,
    G: tl.constexpr, D: tl.constexpr, V: tl.constexpr, R: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Compute attention out [T, n_head, DIM_V], R queries a program and N positions at a time.

    The queries are R / G neighbouring tokens with G of the GROUP heads of one KV head.

    Tiles of positions begin at multiples of N. A tile without visible positions does not change a query, so a
    token's bits do not depend on its neighbours. Tokens of several sequences take turns. D, V: DIM, DIM_V
    rounded up.
    """
    await_launches()
    HALVES: tl.constexpr = k_blocks.dtype.element_ty == tl.float16
    PARTS: tl.constexpr = (GROUP + G - 1) // G
    kv = tl.program_id(1) // PARTS
    r, d, dv, n = tl.arange(0, R), tl.arange(0, D), tl.arange(0, V), tl.arange(0, N)
    token = tl.program_id(0) * (R // G) + r // G
    h = tl.program_id(1) % PARTS * G + r % G
    head = kv * GROUP + h
    live = (token < n_tokens) & (h < GROUP)
    position = tl.load(positions + token, mask=live, other=-1)
    sequence = tl.load(sequences + token, mask=live, other=-1)
    start = tl.zeros([R], tl.int32)
    if window > 0:
        start = tl.maximum(position - window + 1, 0)
    row = token.to(tl.int64) * n_head + head
    query = _rows_at(q, row, live, d, DIM) * scale
    if HALVES:  # two products of halves are as exact as three of TF32, with a third of the work
        size = tl.max(tl.abs(query), axis=1)
        size = tl.where(size > 0.0, size, 1.0)
        high, low = _halved(query / size[:, None])
    largest = tl.full([R], float("-inf"), tl.float32)
    total = tl.zeros([R], tl.float32)
    acc = tl.zeros([R, V], tl.float32)
    of = tl.max(sequence, axis=0)
    while of >= 0:
        mine = live & (sequence == of)
        table = tables + of.to(tl.int64) * max_kv_blocks
        last = tl.minimum(tl.max(tl.where(mine, position, -1), axis=0) + 1, max_kv_blocks * KV_BLOCK)
        first = tl.min(tl.where(mine, start, last), axis=0) // N * N
        for at in range(first, last, N):
            i = at + n
            kv_block = tl.load(table + at // KV_BLOCK)  # one block: N divides KV_BLOCK
            there = i < tl.where(kv_block >= 0, last, at)
            seen = (i[None, :] <= position[:, None]) & (i[None, :] >= start[:, None])
            seen = seen & mine[:, None] & there[None, :]
            slot = (kv_block.to(tl.int64) * n_head_kv + kv) * KV_BLOCK + i % KV_BLOCK
            k = _rows_at(k_blocks, slot, there, d, DIM)
            v = _rows_at(v_blocks, slot, there, dv, DIM_V)
            # A weight of zero times NaN is NaN. So values that are not finite are replaced by zero, and only
            # the queries that see them get NaN as their sum of weights.
            spoilt = tl.max((~(tl.abs(v.to(tl.float32)) < float("inf"))).to(tl.int32), axis=1) != 0
            v = tl.where(spoilt[:, None], 0.0, v)
            total = tl.where(tl.max((seen & spoilt[None, :]).to(tl.int32), axis=1) != 0, float("nan"), total)
            if HALVES:
                scores = tl.dot(low, tl.trans(k), tl.dot(high, tl.trans(k))) * size[:, None]
            else:
                scores = tl.dot(query, tl.trans(k), input_precision=PRECISION)
            if CAPPED:
                scores = softcap - 2 * softcap / (tl.exp(2 * scores / softcap) + 1)
            scores = tl.where(seen, scores, float("-inf"))
            weights, shrink, largest, total = _weighed(scores, largest, total)
            acc = acc * shrink[:, None]
            if HALVES:
                upper, lower = _halved(weights)
                acc = tl.dot(lower, v.to(tl.float16), tl.dot(upper, v.to(tl.float16), acc))
            else:
                acc = tl.dot(weights, v, acc, input_precision=PRECISION)
        of = tl.max(tl.where(sequence < of, sequence, -1), axis=0)
    acc = _mean(acc, largest, total, sinks, head, live)
    tl.store(out + row[:, None] * DIM_V + dv[None, :], acc, mask=live[:, None] & (dv < DIM_V)[None, :])


@triton.jit
def _merge_kernel(
    partials, stats, out, sinks, n_splits, n_head,
    DIM_V: tl.constexpr, V: tl.constexpr, S: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    """Merge the splits of one token and head, weighted relative to the largest score, P of them at a time."""
    await_launches()
    row = tl.program_id(0).to(tl.int64)
    s, dv = tl.arange(0, S), tl.arange(0, V)
    largest = tl.max(
        tl.load(stats + (row * n_splits + s) * 2, mask=s < n_splits, other=float("-inf")), axis=0
    )
    largest = tl.where(largest == float("-inf"), 0.0, largest)
    total = 0.0
    acc = tl.zeros([V], tl.float32)
    for first in range(0, n_splits, P):
        p = first + tl.arange(0, P)
        at = row * n_splits + p
        own = tl.load(stats + at * 2, mask=p < n_splits, other=float("-inf"))
        weight = tl.exp(own - largest)
        sums = tl.load(stats + at * 2 + 1, mask=p < n_splits, other=0.0)
        total += tl.sum(_rounded(weight, sums), axis=0)
        mask = (own != float("-inf"))[:, None] & (dv < DIM_V)[None, :]
        part = tl.load(partials + at[:, None] * DIM_V + dv[None, :], mask=mask, other=0.0)
        acc += tl.sum(_rounded(tl.broadcast_to(weight[:, None], [P, V]), part), axis=0)
    if sinks is not None:
        total += tl.exp(tl.load(sinks + row % n_head) - largest)
    tl.store(out + row * DIM_V + dv, acc / tl.where(total == 0.0, 1.0, total), mask=dv < DIM_V)


@triton.jit
def _norm_kernel(x, out, weight, bias, eps, n, thresholded, threshold, LAYER: tl.constexpr, N: tl.constexpr):
    """Compute RMSNorm or LayerNorm of one part of one row. A threshold requires that a row has one part."""
    await_launches()
    row = tl.program_id(0).to(tl.int64) * n
    i = tl.arange(0, N)
    y = tl.load(x + row + i, mask=i < n, other=0.0)
    if LAYER:
        y = tl.where(i < n, y - tl.sum(y, axis=0) / n, 0.0)
    y = (
        y
        * (1.0 / tl.sqrt(tl.sum(_rounded(y, y), axis=0) / n + eps))
        * tl.load(weight + i, mask=i < n, other=0.0)
    )
    if bias is not None:
        y += tl.load(bias + i, mask=i < n, other=0.0)
    if thresholded is not None:
        y = _zero_small(y, tl.load(thresholded + tl.program_id(0)) != 0, threshold)
    tl.store(out + row + i, y, mask=i < n)


@triton.jit
def _gaussian_top_k_kernel(x, out, multiplier, n, N: tl.constexpr):
    """Subtract the mean plus `multiplier` deviations from a row, and set negative results to 0. NaN stays."""
    await_launches()
    row = tl.program_id(0).to(tl.int64) * n
    i = tl.arange(0, N)
    y = tl.load(x + row + i, mask=i < n, other=0.0)
    mean = tl.sum(y, axis=0) / n
    centred = tl.where(i < n, y - mean, 0.0)
    y -= mean + multiplier * tl.sqrt(tl.sum(_rounded(centred, centred), axis=0) / n)
    tl.store(out + row + i, tl.where(y <= 0.0, 0.0, y), mask=i < n)


@triton.jit
def _zero_small_kernel(x, out, thresholded, threshold, n, N: tl.constexpr):
    """Set small values in the rows of x [T, n] to zero, N numbers a program."""
    await_launches()
    i = tl.program_id(1) * N + tl.arange(0, N)
    t = tl.program_id(0)
    at = t.to(tl.int64) * n + i
    y = tl.load(x + at, mask=i < n, other=0.0)
    tl.store(out + at, _zero_small(y, tl.load(thresholded + t) != 0, threshold), mask=i < n)


@triton.jit
def _largest_kernel(x, out, n_groups, G: tl.constexpr, B: tl.constexpr):
    """Compute the largest of each group of G numbers of a row, B groups a program.

    A group with a number that is not finite yields NaN.
    """
    await_launches()
    i = tl.program_id(1) * B + tl.arange(0, B)
    group = tl.program_id(0).to(tl.int64) * n_groups + i
    y = tl.load(x + group[:, None] * G + tl.arange(0, G)[None, :], mask=(i < n_groups)[:, None], other=0.0)
    most = tl.max(tl.where(tl.abs(y) < float("inf"), y, float("inf")), axis=1)
    tl.store(out + group, tl.where(most == float("inf"), float("nan"), most), mask=i < n_groups)


@triton.jit(do_not_specialize_on_alignment=OF_STEP)
def _angles_kernel(
    positions, near, far, out, n_tokens, half, n_far, STEP: tl.constexpr, H: tl.constexpr
):  # fmt: skip
    """Compute cos and sin of one token's angles, out [2, T, half]: sums of a near angle and a far one."""
    await_launches()
    t = tl.program_id(0)
    i = tl.arange(0, H)
    mask = i < half
    position = tl.load(positions + t)
    at = (position % STEP) * half + i
    cos_near = tl.load(near + at, mask=mask, other=0.0)
    sin_near = tl.load(near + STEP * half + at, mask=mask, other=0.0)
    at = tl.minimum(position // STEP, n_far - 1) * half + i
    cos_far = tl.load(far + at, mask=mask, other=0.0)
    sin_far = tl.load(far + n_far * half + at, mask=mask, other=0.0)
    tl.store(out + t * half + i, cos_near * cos_far - sin_near * sin_far, mask=mask)
    tl.store(out + (n_tokens + t) * half + i, sin_near * cos_far + cos_near * sin_far, mask=mask)


@triton.jit
def _turned(
    head, norm, cos_sin, t, n_tokens, half, eps, DIM: tl.constexpr, D: tl.constexpr, NEOX: tl.constexpr
):
    """Normalise and rotate one head. Each channel is combined with the other channel of its pair."""
    i = tl.arange(0, D)
    rotated = i < 2 * half
    if NEOX:
        is_first = i < half
        other = tl.where(is_first, i + half, i - half)
        pair = tl.where(is_first, i, i - half)
    else:
        is_first = i % 2 == 0
        other = i ^ 1
        pair = i // 2
    x = tl.load(head + i, mask=i < DIM, other=0.0)
    y = tl.load(head + other, mask=rotated, other=0.0)
    if norm is not None:
        r = 1.0 / tl.sqrt(tl.sum(_rounded(x, x), axis=0) / DIM + eps)
        x = x * r * tl.load(norm + i, mask=i < DIM, other=0.0)
        y = y * r * tl.load(norm + other, mask=rotated, other=0.0)
    if cos_sin is not None:
        cos = tl.load(cos_sin + t * half + pair, mask=rotated, other=1.0)
        sin = tl.load(cos_sin + (n_tokens + t) * half + pair, mask=rotated, other=0.0)
        x = x * cos + tl.where(is_first, -y, y) * sin
    return x


@triton.jit(do_not_specialize_on_alignment=OF_STEP)
def _heads_kernel(
    q, k, v, q_out, cos_sin, q_norm, k_norm, k_blocks, v_blocks, tables, sequences, positions,
    eps, n_tokens, n_head, n_head_kv, half, max_kv_blocks,
    DIM: tl.constexpr, DIM_V: tl.constexpr, D: tl.constexpr, NEOX: tl.constexpr,
):  # fmt: skip
    """Process one head of one token: rotate q, rotate and store k, store v. q, or k and v, may be None."""
    await_launches()
    t, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    i = tl.arange(0, D)
    if q is not None:  # noqa: SIM102  (known when this is compiled, unlike the next)
        if head < n_head:
            at = (t * n_head + head) * DIM
            x = _turned(q + at, q_norm, cos_sin, t, n_tokens, half, eps, DIM, D, NEOX)
            tl.store(q_out + at + i, x, mask=i < DIM)
    if k is not None:  # noqa: SIM102
        if head >= n_head:
            position = tl.load(positions + t)
            table = tables + tl.load(sequences + t).to(tl.int64) * max_kv_blocks
            kv_block = tl.load(table + position // KV_BLOCK)
            is_key = head < n_head + n_head_kv
            kv = (head - n_head) % n_head_kv
            slot = (kv_block.to(tl.int64) * n_head_kv + kv) * KV_BLOCK + position % KV_BLOCK
            if kv_block >= 0:
                if is_key:
                    at = (t * n_head_kv + kv) * DIM
                    x = _turned(k + at, k_norm, cos_sin, t, n_tokens, half, eps, DIM, D, NEOX)
                    tl.store(k_blocks + slot * DIM + i, x.to(k_blocks.dtype.element_ty), mask=i < DIM)
                else:
                    x = tl.load(v + (t * n_head_kv + kv) * DIM_V + i, mask=i < DIM_V, other=0.0)
                    tl.store(v_blocks + slot * DIM_V + i, x.to(v_blocks.dtype.element_ty), mask=i < DIM_V)


# ---- launches --------------------------------------------------------------------------------------------
#
# Only shapes choose the tiles, never timing, so that a model has one result.

MATVEC_ROWS = {1: 4, 2: 4, 4: 2, 8: 2}  # by padded number of tokens
MATVEC_WORDS = 256  # words per row: two for each thread of four warps
BITS_WORDS = {1: 128, 2: 128, 4: 64, 8: 64}  # words per row with eight rows
MATVEC_PROGRAMS = 256  # with fewer programs the columns are split
WEIGHED_TOKENS = 2  # most tokens for which products apply the factor of the norm before them
MOST_SQUARES = 4096  # most parts of squares of all tokens; each program adds up all of them
MAX_SPLITS = 8
# Words per row in a program with one neuron: a whole row of a 7B model.
NEURON_WORDS = {1: 512, 2: 512, 4: 256, 8: 128}
AXPY_ROWS = {1: 8, 2: 8, 4: 4, 8: 4}
AXPY_RANGE = 64  # values that are checked together
MAX_RANGES = 128  # most ranges of a down projection; each adds a row of partial sums
CHOSEN_PROGRAMS = 8  # resident programs per multiprocessor, which share the selected neurons
WIDE_ROWS = 8192  # numbers per token from which a program of a product takes twice as many
MOST_TILED_TOKENS = 512  # from this number of tokens on, the tiles of a product do not change
HOPPER_PRODUCTS = 2048  # products of halves per multiprocessor and cycle: 989 TFLOP/s of an H100
# Bytes that a multiprocessor reads per cycle. This is a guess, not a measurement. Values from 8 to 38 lead to
# the same tiles, except for 3 of 90 products of 128 to 512 tokens.
HOPPER_L2_BYTES = 24
PROMPT_TOKENS = 32  # from this number of tokens on, attention has enough programs without splits
SPLIT_KV_BLOCKS = 2
MAX_ATTENTION_SPLITS = 256


def _precision(x: Tensor) -> str:
    """Return the precision of tl.dot for float32.

    Three products of TF32 are as exact as one of float32, and use the tensor cores.
    """
    return "tf32x3" if x.device.type != "cpu" and not is_amd(x) else "ieee"


def _parts(m: DeviceMatrix) -> tuple[Tensor | None, ...]:
    """Return codes, scales, mins, high and sub_scales as the kernels read them, in words."""
    floats = m.codes.is_floating_point()
    codes = m.codes if floats else m.codes.view(torch.int32)
    high, sub_scales = m.high, m.sub_scales
    if m.group_of is None:  # in planes, high and sub_scales have a byte per column
        high = None if high is None else high.view(torch.int32)
        if sub_scales is not None and m.type == GGMLType.Q4_K:
            sub_scales = sub_scales.view(torch.int32)
    return codes, m.scales, m.mins, high, sub_scales


def _parts_of_tiles(m: DeviceMatrix) -> tuple[Tensor | None, ...]:
    """Return the fields of `_parts`, but with scales also in words, as _load_tile reads them."""
    codes, scales, mins, high, sub_scales = _parts(m)
    assert m.group_of is None, "planes are multiplied by their transpose"
    if scales is not None and scales.shape[1] % 2 == 0:
        scales, mins = scales.view(torch.int32), None if mins is None else mins.view(torch.int32)
    if sub_scales is not None and m.type == GGMLType.Q6_K:
        sub_scales = sub_scales.view(torch.int32)
    return codes, scales, mins, high, sub_scales


def _row(m: DeviceMatrix) -> tuple[int, int]:
    """Return the length of a row of codes, in words or floats, and its number of words."""
    n = m.codes.shape[1]
    return (n, -(-n // 4)) if m.codes.is_floating_point() else (n // 4, n // 4)


def _new(x: Tensor, *shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.float32, device=x.device)


def _inputs(x: Tensor) -> Tensor:
    """Return x contiguous and aligned to 16 bytes, which a slice of a row may not be.

    From unaligned inputs a thread loads single numbers, so threads would share the products of a word, which
    are not rounded.
    """
    x = x.contiguous()
    return x if x.data_ptr() % 16 == 0 else x.clone()


def _given(x: Entering) -> tuple[Tensor, Tensor | None, int, float]:
    """Return the inputs of a product of few tokens.

    For Weighed inputs also return the squares, their number per token, and eps.
    """
    if isinstance(x, Weighed):
        return x.x, x.squares, x.squares.shape[1], x.eps
    return _inputs(x), None, 0, 0.0


def linear(
    x: Entering,
    m: DeviceMatrix,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    out: Tensor | None = None,
    activation: ActivationKind | None = None,
    threshold: float = 0.0,
) -> Tensor:
    """Compute fallback.linear."""
    n_tokens = len(x)
    out = torch.empty((n_tokens, m.n_rows), device=m.codes.device) if out is None else out
    if n_tokens == 0 or m.n_rows == 0:
        return out
    if activation is not None and (n_tokens > FEW_TOKENS or activation not in FUSED):
        return out.copy_(functions.activate(linear(x, m, bias, residual), activation, threshold))
    if n_tokens > FEW_TOKENS:
        assert isinstance(x, Tensor)
        return _linear_many(halves(_inputs(x), m, FORMATS[m.type]), m, bias, residual, out)
    y = _matvec(x, m, out, bias, residual, activation, threshold)
    if y is not out:
        _add(y, out, bias, residual, activation, threshold)
    return out


def _matvec(
    x: Entering, m: DeviceMatrix, out: Tensor, bias: Tensor | None, residual: Tensor | None,
    activation: ActivationKind | None = None, threshold: float = 0.0,
    after: tuple[Tensor | None, Tensor | None, Tensor | None] = (None, None, None),
) -> Tensor:  # fmt: skip
    """Compute a product of few tokens.

    Return out, or partial sums if columns are split. after: norm, weighed, squares_out.
    """
    assert m.group_of is None, "planes are multiplied by their transpose"
    given, squares, n_parts, eps = _given(x)
    n_tokens, (stride, n_words), tokens = len(given), _row(m), pow2(len(given))
    rows = MATVEC_ROWS[tokens]
    words, warps = row_tile(rows, MATVEC_WORDS, n_words, lanes(given))
    programs = -(-m.n_rows // rows)
    splits = max(1, min(MAX_SPLITS, MATVEC_PROGRAMS // programs, n_words // words))
    words_of_split = -(-n_words // (words * splits)) * words
    splits = -(-n_words // words_of_split)
    y = out if splits == 1 else _new(given, splits, n_tokens, m.n_rows)
    launcher.launch(
        _matvec_kernel, (programs, splits),
        given, y, bias, residual, *_parts(m), squares, *after,
        n_tokens, m.n_rows, m.n_cols, stride, n_words, words_of_split, threshold, n_parts, eps, 0,
        TYPE=FORMATS[m.type], SPLIT=splits, KIND=KINDS[activation], UP_KIND=-1, BITS=False, PAIRS=False,
        T=tokens, R=rows, W=words, S=pow2(n_parts), warps=warps,
    )  # fmt: skip
    return y


def _is_whole(m: DeviceMatrix, n_tokens: int) -> bool:
    """Return whether a product of few tokens has enough rows for MATVEC_PROGRAMS, so no columns are split."""
    return 0 < n_tokens <= FEW_TOKENS and -(-m.n_rows // MATVEC_ROWS[pow2(n_tokens)]) >= MATVEC_PROGRAMS


def linear_normed(
    x: Entering, m: DeviceMatrix, bias: Tensor | None, residual: Tensor | None, weight: Tensor, eps: float
) -> tuple[Tensor, Entering]:
    """Compute fallback.linear_normed, for one or two tokens in one launch that returns Weighed."""
    n_tokens, n = len(x), m.n_rows
    n_parts = -(-n // MATVEC_ROWS[pow2(min(n_tokens, WEIGHED_TOKENS))])
    if n_tokens > WEIGHED_TOKENS or not _is_whole(m, n_tokens) or n_tokens * n_parts > MOST_SQUARES:
        out = linear(x, m, bias, residual)
        return out, rms_norm(out, weight, eps)
    out, weighed, squares = (_new(weight, n_tokens, width) for width in (n, n, n_parts))
    _matvec(x, m, out, bias, residual, after=(weight, weighed, squares))
    return out, Weighed(weighed, squares, eps)


def gated(
    h: Entering,
    m: DeviceMatrix,
    bias: Tensor | None = None,
    *,
    activation: ActivationKind,
    threshold: float = 0.0,
    up_activation: ActivationKind | None = None,
) -> Tensor:
    """Compute fallback.gated, for few tokens in one launch unless columns are split (_is_whole)."""
    n_tokens, n = len(h), m.n_rows // 2
    if activation not in FUSED or up_activation not in FUSED or not _is_whole(m, n_tokens):
        gate, up = linear(h, m, bias).split(n, dim=1)
        return fired(gate, up, activation=activation, threshold=threshold, up_activation=up_activation)
    given, squares, n_parts, eps = _given(h)
    (stride, n_words), rows = _row(m), MATVEC_ROWS[pow2(n_tokens)]
    words, warps = row_tile(rows, MATVEC_WORDS, n_words, lanes(given))
    out = _new(given, n_tokens, n)
    launcher.launch(
        _matvec_kernel, (-(-n // (rows // 2)), 1),
        given, out, bias, None, *_parts(m), squares, None, None, None,
        n_tokens, m.n_rows, m.n_cols, stride, n_words, -(-n_words // words) * words, threshold, n_parts, eps,
        0,
        TYPE=FORMATS[m.type], SPLIT=1, KIND=KINDS[activation], UP_KIND=KINDS[up_activation], BITS=False,
        PAIRS=True, T=pow2(n_tokens), R=rows, W=words, S=pow2(n_parts), warps=warps,
    )  # fmt: skip
    return out


def linear_bits(x: Tensor, m: DeviceMatrix, bias: Tensor | None, threshold: float, first: int = 0) -> Tensor:
    """Compute fallback.linear_bits, for few tokens in one launch."""
    x, n_tokens = _inputs(x), len(x)
    if n_tokens > FEW_TOKENS or n_tokens == 0 or m.n_rows == 0 or first:
        return pack_bits(linear(x, m, bias), threshold, first)
    stride, n_words = _row(m)
    tokens = pow2(n_tokens)
    words, warps = row_tile(8, BITS_WORDS[tokens], n_words, lanes(x))
    bits = torch.empty((n_tokens, -(-m.n_rows // 8)), dtype=torch.uint8, device=x.device)
    launcher.launch(
        _matvec_kernel, (bits.shape[1], 1),
        x, bits, bias, None, *_parts(m), None, None, None, None,
        n_tokens, m.n_rows, m.n_cols, stride, n_words, -(-n_words // words) * words, threshold, 0, 0.0, 0,
        TYPE=FORMATS[m.type], SPLIT=1, KIND=KINDS[None], UP_KIND=-1, BITS=True, PAIRS=False, T=tokens, R=8,
        W=words, S=1, warps=warps,
    )  # fmt: skip
    return bits


@dataclass(frozen=True)
class Halves:
    """Inputs of many tokens, as halves for the tensor cores (_halves_kernel), or unchanged as float32."""

    x: Tensor
    sizes: Tensor | None
    n_tokens: int


def halves(x: Tensor, m: DeviceMatrix, order: int = 0) -> Halves:
    """Convert x [T, n] for products with m or any matrix of its type.

    order: the format whose words define the order of columns.
    """
    if m.type == GGMLType.F32:
        return Halves(x, None, len(x))
    is_brain = m.type == GGMLType.BF16
    shape = (2, *x.shape) if is_brain else x.shape
    out = torch.empty(shape, dtype=torch.bfloat16 if is_brain else torch.float16, device=x.device)
    sizes = None if is_brain else _new(x, len(x))
    launcher.launch(
        _halves_kernel, (len(x),), x, out, sizes, x.shape[1],
        ORDER=order, N=max(4, min(4096, pow2(x.shape[1]))), warps=4,
    )  # fmt: skip
    return Halves(out, sizes, len(x))


@dataclass(frozen=True)
class Tile:
    """The tile that a program multiplies at a time: rows of the matrix, tokens, and weights of each row."""

    rows: int
    tokens: int
    depth: int
    warps: int

    def cycles(self, n_tokens: int, n_rows: int, weight_bytes: float, n_multiprocessors: int) -> float:
        """Estimate the cycles of a product on Hopper, per weight of a row.

        Each multiprocessor computes a tile, limited by its tensor cores or by reads of inputs and weights
        from the L2 cache.
        """
        n_programs = -(-n_tokens // self.tokens) * -(-n_rows // self.rows)
        n_bytes = 2 * self.tokens + weight_bytes * self.rows
        each = max(self.rows * self.tokens / HOPPER_PRODUCTS, n_bytes / HOPPER_L2_BYTES)
        return -(-n_programs // n_multiprocessors) * each


def product_tile(given: Halves, m: DeviceMatrix, n_out: int) -> Tile:
    """Return the tile of a product with n_out numbers for each token."""
    tokens = max(pow2(given.n_tokens), 16)
    is_float32 = given.x.dtype == torch.float32
    if is_float32 and is_amd(given.x):  # without tensor cores
        return Tile(64, min(tokens, 64), 16, 8)
    if is_float32 or is_amd(given.x):
        return Tile(64, min(tokens, 64), 32, 4)
    depth = 64 if given.sizes is not None else 32
    if is_hopper(given.x) and given.sizes is not None and tokens >= 128:
        tiles = [Tile(64, 128, depth, 4), Tile(128, 128, depth, 8)]
        if tokens >= 256:
            tiles.append(Tile(128, 256, depth, 8))
        # Tokens are a power of two, so that stage.WARM_SIZES warms up every tile.
        shape = min(tokens, MOST_TILED_TOKENS), n_out, m.row_bytes / m.n_cols, multiprocessors(given.x.device)
        return min(tiles, key=lambda tile: tile.cycles(*shape))
    if tokens >= 128 and m.is_float and n_out >= WIDE_ROWS:
        return Tile(128, 128, depth, 8)
    return Tile(64, min(tokens, 128), depth, 4)


def multiprocessors(device: torch.device) -> int:
    """Return the number of multiprocessors of a device, or a small number for a simulated one."""
    if device.type != "cuda":
        return 8
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def is_hopper(x: Tensor) -> bool:
    return x.device.type == "cuda" and not is_amd(x) and torch.cuda.get_device_capability(x.device)[0] == 9


def is_amd(x: Tensor) -> bool:
    return x.device.type != "cpu" and torch.version.hip is not None


def lanes(x: Tensor) -> int:
    """Return the number of threads of a warp."""
    if x.device.type != "cuda" or not is_amd(x):
        return 32
    return int(torch.cuda.get_device_properties(x.device).warp_size)


@cache
def shared_memory(device: torch.device) -> int:
    """Return the most bytes of shared memory of a block. Triton checks this limit when it loads a kernel."""
    if device.type != "cuda":
        return LEAST_SHARED
    with launcher.build_errors():
        utils: Any = triton.runtime.driver.active.utils
    return int(utils.get_device_properties(device.index)["max_shared_mem"])


def _linear_many(
    given: Halves, m: DeviceMatrix, bias: Tensor | None, residual: Tensor | None, out: Tensor
) -> Tensor:
    n_tokens, (stride, n_words) = given.n_tokens, _row(m)
    tile = product_tile(given, m, m.n_rows)
    launcher.launch(
        _matmul_kernel, (-(-m.n_rows // tile.rows), -(-n_tokens // tile.tokens)),
        given.x, given.sizes, out, bias, residual, *_parts_of_tiles(m),
        n_tokens, m.n_rows, m.n_cols, stride, n_words,
        TYPE=FORMATS[m.type], PRECISION=_precision(given.x), M=tile.tokens, N=tile.rows,
        W=tile.depth // _per_word(m), warps=tile.warps,
    )  # fmt: skip
    return out


def _per_word(m: DeviceMatrix) -> int:
    """Return the weights of a word, or the number of floats that are read together."""
    return 4 if m.is_float or m.type == GGMLType.Q8_0 else 8


def _add(
    partials: Tensor, out: Tensor, bias: Tensor | None, residual: Tensor | None,
    activation: ActivationKind | None = None, threshold: float = 0.0,
    counted: Counted | None = None, counts: Tensor | None = None,
) -> None:  # fmt: skip
    """Add up partials [n_parts, T, n] into out [T, n], and add `counted` to `counts`."""
    n_parts, n_tokens, n = partials.shape
    launcher.launch(
        _add_kernel, (-(-n // 32), n_tokens), partials, out, bias, residual,
        *_counted(counted), counts, n_parts, n_tokens, n,
        0 if counted is None else len(counted.packed), threshold,
        KIND=KINDS[activation], P=min(64, pow2(n_parts)), N=32, warps=4,
    )  # fmt: skip


def linear_t(
    x: Tensor,
    m: DeviceMatrix,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    out: Tensor | None = None,
    left_out: Tensor | None = None,
) -> Tensor:
    """Compute fallback.linear_t. More than FEW_TOKENS tokens read every row."""
    return _linear_t(x, m, bias, residual, out, left_out=left_out)


@dataclass(frozen=True)
class Counted:
    """Packed counts that are not yet added (_count).

    packed: int32 [n]. count: int32 [1], the number of used entries; None: all.
    """

    packed: Tensor
    count: Tensor | None


def _counted(counted: Counted | None) -> tuple[Tensor | None, Tensor | None]:
    return (None, None) if counted is None else (counted.packed, counted.count)


def _linear_t(
    x: Tensor, m: DeviceMatrix, bias: Tensor | None, residual: Tensor | None, out: Tensor | None,
    ids: Tensor | None = None, count: Tensor | None = None,
    counted: Counted | None = None, counts: Tensor | None = None, left_out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Compute linear_t, and with few tokens add `counted` to `counts`.

    ids, count: the results of _chosen_kernel; x then has these rows.
    """
    x, n_tokens = x.contiguous(), len(x)
    out = _new(x, n_tokens, m.n_cols) if out is None else out
    if n_tokens == 0:
        return out
    if m.n_rows == 0:
        return fallback.linear_t(x, m, bias, residual, out)
    stride, n_words = _row(m)
    shape = (n_tokens, m.n_rows, m.n_cols, stride, n_words)
    if n_tokens > FEW_TOKENS:
        given = halves(x, m)
        tile = product_tile(given, m, m.n_cols)
        words = tile.rows // _per_word(m)
        launcher.launch(
            _matmul_t_kernel, (-(-n_words // words), -(-n_tokens // tile.tokens)),
            given.x, given.sizes, out, bias, residual, *_parts(m), m.group_of, *shape,
            TYPE=FORMATS[m.type], PRECISION=_precision(x), M=tile.tokens, K=tile.depth, W=words,
            warps=tile.warps,
        )  # fmt: skip
        return out
    tokens = pow2(n_tokens)
    # In planes every weight has a scale, so only half the rows fit in a thread's registers.
    rows = AXPY_ROWS[tokens] if m.group_of is None else AXPY_ROWS[tokens] // 2
    words = lanes(x)  # one warp: a thread has a word of each row and adds up only its own columns
    ranges = min(MAX_RANGES, -(-m.n_rows // AXPY_ROWS[1]))
    partials = _new(x, ranges, n_tokens, m.n_cols)
    launcher.launch(
        _axpy_kernel, (-(-n_words // words), ranges),
        x, ids, count, partials, *_parts(m), m.group_of, *shape, left_out, m.row_bytes, 0,
        TYPE=FORMATS[m.type], RANGE=AXPY_RANGE, T=tokens, R=rows, W=words, warps=1,
    )  # fmt: skip
    _add(partials, out, bias, residual, counted=counted, counts=counts)
    return out


@dataclass(frozen=True)
class _What:
    """Activations and thresholds of gate and up: arguments of fallback.neurons."""

    activation: ActivationKind
    threshold: float
    up_activation: ActivationKind | None
    gate_threshold: fallback.TokenThreshold | None
    value_threshold: fallback.TokenThreshold | None

    @property
    def numbers(self) -> tuple[float, Tensor | None, float, float]:
        """Return the threshold, the flags of thresholded tokens, and both thresholds of _values_of."""
        either = self.gate_threshold or self.value_threshold
        small = [0.0 if by is None else by.threshold for by in (self.gate_threshold, self.value_threshold)]
        return self.threshold, None if either is None else either.tokens, small[0], small[1]

    @property
    def kinds(self) -> dict[str, Any]:
        return {"KIND": KINDS[self.activation], "UP_KIND": KINDS[self.up_activation]}


def neurons(
    h: Tensor,
    gate: DeviceMatrix | None,
    up: DeviceMatrix,
    *,
    activation: ActivationKind,
    threshold: float = 0.0,
    up_activation: ActivationKind | None = None,
    selected: Tensor | None = None,
    held: fallback.Held | None = None,
    gate_bias: Tensor | None = None,
    up_bias: Tensor | None = None,
    counts: Tensor | None = None,
    gate_threshold: fallback.TokenThreshold | None = None,
    value_threshold: fallback.TokenThreshold | None = None,
) -> Tensor:
    """Compute fallback.neurons. More than FEW_TOKENS tokens read every row."""
    h, n_tokens = _inputs(h), len(h)
    what = _What(activation, threshold, up_activation, gate_threshold, value_threshold)
    if n_tokens > FEW_TOKENS:
        return _all_neurons(h, gate, up, what, selected, held, gate_bias, up_bias, counts)
    if n_tokens == 0 or up.n_rows == 0:
        return _new(h, n_tokens, up.n_rows)
    if selected is None:
        values, counted = _every_neuron(h, gate, up, what, gate_bias, up_bias, counts)
    else:
        values = torch.zeros((n_tokens, up.n_rows), device=h.device)
        count = None if counts is None else torch.empty(1, dtype=torch.int32, device=h.device)
        counted = _chosen(
            h, gate, up, what, selected, held, gate_bias, up_bias, values, None, count, counts is not None
        )
    if counted is not None:
        n = len(counted.packed)
        launcher.launch(_count_kernel, (-(-n // 512),), *_counted(counted), counts, n, warps=4)
    return values


def _every_neuron(
    h: Tensor, gate: DeviceMatrix | None, up: DeviceMatrix, what: _What,
    gate_bias: Tensor | None, up_bias: Tensor | None, counts: Tensor | None,
) -> tuple[Tensor, Counted | None]:  # fmt: skip
    """Compute the values of all neurons for few tokens, [T, n].

    Return them and, if requested, the counts to add.
    """
    n_tokens = len(h)
    values, tokens = _new(h, n_tokens, up.n_rows), pow2(n_tokens)
    per_program = MATVEC_ROWS[tokens]  # the rows of a program share their reads of h
    matrices, shape = _gate_and_up(gate, up)
    words, warps = row_tile(per_program, MATVEC_WORDS, max(shape[2], shape[4]), lanes(h))
    programs = -(-up.n_rows // per_program)
    packed = None if counts is None else torch.empty(programs, dtype=torch.int32, device=h.device)
    launcher.launch(
        _neurons_kernel, (programs,),
        h, values, packed, gate_bias, up_bias, *matrices, n_tokens, up.n_rows, *shape, *what.numbers, 0,
        GATE_TYPE=None if gate is None else FORMATS[gate.type], TYPE=FORMATS[up.type], **what.kinds,
        T=tokens, R=per_program, W=words, warps=warps,
    )  # fmt: skip
    return values, None if packed is None else Counted(packed, None)


def _chosen(
    h: Tensor, gate: DeviceMatrix | None, up: DeviceMatrix, what: _What,
    selected: Tensor, held: fallback.Held | None, gate_bias: Tensor | None, up_bias: Tensor | None,
    values: Tensor, ids: Tensor | None, count: Tensor | None, is_counted: bool,
) -> Counted | None:  # fmt: skip
    """Compute the values of selected neurons for few tokens (_chosen_kernel). Return the counts to add."""
    n_tokens, tokens = len(h), pow2(len(h))
    matrices, shape = _gate_and_up(gate, up)
    words, warps = row_tile(1, NEURON_WORDS[tokens], max(shape[2], shape[4]), lanes(h))
    packed = torch.empty(up.n_rows, dtype=torch.int32, device=h.device) if is_counted else None
    n_bytes = selected.shape[1]
    assert held is not None or n_bytes == -(-up.n_rows // 8), "a bit for each row"
    launcher.launch(
        _chosen_kernel, (min(up.n_rows, n_resident(h.device)),),
        h, values, selected, None if held is None else held.words, None if held is None else held.before,
        ids, count, packed, gate_bias, up_bias, *matrices, n_tokens, up.n_rows, *shape, n_bytes,
        *what.numbers, 0,
        GATE_TYPE=None if gate is None else FORMATS[gate.type], TYPE=FORMATS[up.type], **what.kinds,
        T=tokens, W=words, S=max(32, pow2(-(-n_bytes // 4))), warps=warps,
    )  # fmt: skip
    return None if packed is None else Counted(packed, count)


def _gate_and_up(
    gate: DeviceMatrix | None, up: DeviceMatrix
) -> tuple[tuple[Tensor | None, ...], tuple[int, ...]]:
    """Return the matrices as the kernels read them, and n_cols, with the stride and words of each matrix."""
    none: tuple[None, ...] = (None,) * 5
    parts = (*(none if gate is None else _parts(gate)), *_parts(up))
    return parts, (up.n_cols, *((0, 0) if gate is None else _row(gate)), *_row(up))


def n_resident(device: torch.device) -> int:
    """Return the number of programs of _chosen_kernel that a device runs at once.

    Results do not depend on it.
    """
    return CHOSEN_PROGRAMS * multiprocessors(device)


def _all_neurons(
    h: Tensor, gate: DeviceMatrix | None, up: DeviceMatrix, what: _What,
    selected: Tensor | None, held: fallback.Held | None,
    gate_bias: Tensor | None, up_bias: Tensor | None, counts: Tensor | None,
) -> Tensor:  # fmt: skip
    """Compute neurons of many tokens.

    Nearly every row fires for some token, so all are computed, then masked.
    """
    n_tokens, n = len(h), up.n_rows
    values = _new(h, n_tokens, n)
    if n == 0:
        return values
    of_up, given = None, halves(h, up, FORMATS[up.type])
    if gate is None:
        _linear_many(given, up, up_bias, None, values)
    else:
        of_up = _linear_many(given, up, up_bias, None, _new(h, n_tokens, n))
        given = given if gate.type == up.type else halves(h, gate, FORMATS[gate.type])
        _linear_many(given, gate, gate_bias, None, values)
    launcher.launch(
        _fired_kernel, (-(-n // 64),),
        values, of_up, values, selected, None if held is None or selected is None else held.numbers, counts,
        n_tokens, n, n, 0 if selected is None else selected.shape[1], *what.numbers, **what.kinds,
        READ=False, DENSE=False, T=16, N=64, warps=4,
    )  # fmt: skip
    return values


def fired(
    gate: Tensor,
    up: Tensor | None = None,
    *,
    activation: ActivationKind,
    threshold: float = 0.0,
    up_activation: ActivationKind | None = None,
    selected: Tensor | None = None,
    counts: Tensor | None = None,
    gate_threshold: fallback.TokenThreshold | None = None,
    value_threshold: fallback.TokenThreshold | None = None,
    dense: bool = False,
) -> Tensor:
    """Compute fallback.fired."""
    what = _What(activation, threshold, up_activation, gate_threshold, value_threshold)
    n_tokens, n = gate.shape
    if activation not in FUSED or up_activation not in FUSED:
        return fallback.fired(
            gate, up, activation=activation, threshold=threshold, up_activation=up_activation,
            selected=selected, counts=counts, gate_threshold=gate_threshold, value_threshold=value_threshold,
            dense=dense,
        )  # fmt: skip
    if up is None or up.stride() != gate.stride() or gate.stride(1) != 1:
        gate, up = gate.contiguous(), None if up is None else up.contiguous()
    values = _new(gate, n_tokens, n)
    if n_tokens:
        launcher.launch(
            _fired_kernel, (-(-n // 64),),
            gate, up, values, selected, None, counts, n_tokens, n, gate.stride(0),
            0 if selected is None else selected.shape[1], *what.numbers, **what.kinds,
            READ=True, DENSE=dense, T=min(16, pow2(n_tokens)), N=64, warps=4,
        )  # fmt: skip
    return values


def sparse_ffn(
    h: Tensor,
    gate: DeviceMatrix | None,
    up: DeviceMatrix,
    down_t: DeviceMatrix,
    *,
    activation: ActivationKind,
    threshold: float = 0.0,
    up_activation: ActivationKind | None = None,
    selected: Tensor | None = None,
    held: fallback.Held | None = None,
    gate_bias: Tensor | None = None,
    up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    residual: Tensor | None = None,
    counts: Tensor | None = None,
    gate_threshold: fallback.TokenThreshold | None = None,
    value_threshold: fallback.TokenThreshold | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Compute fallback.sparse_ffn."""
    h, n_tokens, n = _inputs(h), len(h), up.n_rows
    what = _What(activation, threshold, up_activation, gate_threshold, value_threshold)
    if n_tokens > FEW_TOKENS:
        values = _all_neurons(h, gate, up, what, selected, held, gate_bias, up_bias, counts)
        return _linear_t(values, down_t, down_bias, residual, out)
    if n_tokens == 0 or n == 0:
        return _linear_t(_new(h, n_tokens, n), down_t, down_bias, residual, out)
    if selected is None:
        values, counted = _every_neuron(h, gate, up, what, gate_bias, up_bias, counts)
        return _linear_t(values, down_t, down_bias, residual, out, counted=counted, counts=counts)
    values = _new(h, n_tokens, n)
    ids, count = (torch.empty(size, dtype=torch.int32, device=h.device) for size in (n, 1))
    counted = _chosen(
        h, gate, up, what, selected, held, gate_bias, up_bias, values, ids, count, counts is not None
    )
    return _linear_t(values, down_t, down_bias, residual, out, ids, count, counted, counts)


def pack_bits(scores: Tensor, threshold: float, first: int = 0) -> Tensor:
    """Compute fallback.pack_bits."""
    scores = scores.contiguous()
    n_tokens, n_scores = scores.shape
    n_bytes = -(-(first + n_scores) // 8)
    bits = torch.empty((n_tokens, n_bytes), dtype=torch.uint8, device=scores.device)
    launcher.launch(
        _pack_kernel, (n_tokens, -(-n_bytes // 64)), scores, bits, threshold, first, n_scores, n_bytes,
        B=64, warps=1,
    )  # fmt: skip
    return bits


def zero_small(x: Tensor, by: fallback.TokenThreshold | None) -> Tensor:
    """Compute fallback.zero_small."""
    if by is None or not len(x):
        return x
    x = x.contiguous()
    out, (n_tokens, n) = torch.empty_like(x), x.shape
    launcher.launch(
        _zero_small_kernel, (n_tokens, -(-n // 1024)), x, out, by.tokens, by.threshold, n, N=1024, warps=4
    )
    return out


def largest(logits: Tensor) -> Tensor:
    """Compute fallback.largest."""
    n_tokens, n_groups = len(logits), logits.shape[1] // LOGIT_GROUP
    out = torch.empty((n_tokens, n_groups), device=logits.device)
    launcher.launch(
        _largest_kernel, (n_tokens, -(-n_groups // 16)), logits.contiguous(), out, n_groups,
        G=LOGIT_GROUP, B=16, warps=4,
    )  # fmt: skip
    return out


def rms_norm(
    x: Tensor, weight: Tensor, eps: float, n_head: int = 1, by: fallback.TokenThreshold | None = None
) -> Tensor:
    """Compute fallback.rms_norm. `by` requires n_head = 1."""
    assert by is None or n_head == 1
    return _norm(x, weight, None, eps, x.shape[1] // n_head, by, layer=False)


def layer_norm(
    x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, by: fallback.TokenThreshold | None = None
) -> Tensor:
    """Compute fallback.layer_norm."""
    return _norm(x, weight, bias, eps, x.shape[1], by, layer=True)


def _norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    n: int,
    by: fallback.TokenThreshold | None,
    *,
    layer: bool,
) -> Tensor:
    x = x.contiguous()
    out = torch.empty_like(x)
    tokens, threshold = (None, 0.0) if by is None else (by.tokens, by.threshold)
    launcher.launch(
        _norm_kernel, (x.numel() // n,), x, out, weight, bias, eps, n, tokens, threshold,
        LAYER=layer, N=pow2(n), warps=4 if n <= 1024 else 16,
    )  # fmt: skip
    return out


def gaussian_top_k(x: Tensor, multiplier: float) -> Tensor:
    """Compute fallback.gaussian_top_k."""
    x, n = x.contiguous(), x.shape[1]
    out = torch.empty_like(x)
    launcher.launch(
        _gaussian_top_k_kernel, (len(x),), x, out, multiplier, n, N=pow2(n), warps=4 if n <= 4096 else 8
    )
    return out


def angles(positions: Tensor, table: fallback.RopeTable) -> Tensor:
    """Compute fallback.angles."""
    half, n_far = table.near.shape[2], table.far.shape[1]
    out = _new(positions, 2, len(positions), half)
    launcher.launch(
        _angles_kernel, (len(positions),), positions, table.near, table.far, out,
        len(positions), half, n_far, STEP=fallback.ANGLE_STEP, H=pow2(half), warps=1,
    )  # fmt: skip
    return out


def rotate(
    x: Tensor,
    cos_sin: Tensor,
    *,
    n_head: int,
    kind: RopeKind,
    norm_weight: Tensor | None = None,
    eps: float = 0.0,
) -> Tensor:
    """Compute fallback.rotate."""
    x = x.contiguous()
    out = torch.empty_like(x)
    head_dim = x.shape[1] // n_head
    launcher.launch(
        _heads_kernel, (len(x), n_head),
        x, None, None, out, cos_sin.contiguous(), norm_weight, None, None, None, None, None, None,
        eps, len(x), n_head, 0, cos_sin.shape[2], 0,
        DIM=head_dim, DIM_V=head_dim, D=pow2(head_dim), NEOX=kind == "neox", warps=1,
    )  # fmt: skip
    return out


def store_kv(
    k: Tensor,
    v: Tensor,
    k_blocks: Tensor,
    v_blocks: Tensor,
    block_tables: Tensor,
    sequences: Tensor,
    positions: Tensor,
) -> None:
    """Compute fallback.store_kv."""
    _heads(
        None, k, v, None, k_blocks, v_blocks, block_tables, sequences, positions, 0, "norm", None, None, 0.0
    )


def rotate_store(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos_sin: Tensor | None,
    k_blocks: Tensor,
    v_blocks: Tensor,
    block_tables: Tensor,
    sequences: Tensor,
    positions: Tensor,
    *,
    n_head: int,
    kind: RopeKind = "norm",
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 0.0,
) -> Tensor:
    """Compute fallback.rotate_store."""
    if cos_sin is None:
        store_kv(k, v, k_blocks, v_blocks, block_tables, sequences, positions)
        return q
    out = _heads(
        q,
        k,
        v,
        cos_sin,
        k_blocks,
        v_blocks,
        block_tables,
        sequences,
        positions,
        n_head,
        kind,
        q_norm,
        k_norm,
        eps,
    )
    assert out is not None
    return out


def _heads(
    q: Tensor | None, k: Tensor, v: Tensor, cos_sin: Tensor | None, k_blocks: Tensor, v_blocks: Tensor,
    block_tables: Tensor, sequences: Tensor, positions: Tensor, n_head: int, kind: RopeKind,
    q_norm: Tensor | None, k_norm: Tensor | None, eps: float,
) -> Tensor | None:  # fmt: skip
    n_head_kv, dim, dim_v = k_blocks.shape[1], k_blocks.shape[3], v_blocks.shape[3]
    q = None if q is None else q.contiguous()
    out = None if q is None else torch.empty_like(q)
    launcher.launch(
        _heads_kernel, (len(k), n_head + 2 * n_head_kv),
        q, k.contiguous(), v.contiguous(), out, None if cos_sin is None else cos_sin.contiguous(),
        q_norm, k_norm, k_blocks, v_blocks, block_tables, sequences, positions,
        eps, len(k), n_head, n_head_kv, 0 if cos_sin is None else cos_sin.shape[2], block_tables.shape[1],
        DIM=dim, DIM_V=dim_v, D=pow2(max(dim, dim_v)), NEOX=kind == "neox", warps=1,
    )  # fmt: skip
    return out


def project_heads(
    h: Entering,
    m: DeviceMatrix,
    bias: Tensor | None,
    cos_sin: Tensor,
    k_blocks: Tensor,
    v_blocks: Tensor,
    block_tables: Tensor,
    sequences: Tensor,
    positions: Tensor,
    *,
    n_head: int,
    kind: RopeKind,
) -> Tensor:
    """Compute fallback.project_heads, for few tokens and many rows in one launch."""
    n_tokens, (n_head_kv, dim, dim_v) = len(h), (k_blocks.shape[1], k_blocks.shape[3], v_blocks.shape[3])
    if not _is_whole(m, n_tokens) or dim % 4 or dim_v % 4:  # otherwise a program could mix queries and keys
        widths = [n_head * dim, n_head_kv * dim, n_head_kv * dim_v]
        q, k, v = linear(h, m, bias).split(widths, dim=1)
        where = block_tables, sequences, positions
        return rotate_store(q, k, v, cos_sin, k_blocks, v_blocks, *where, n_head=n_head, kind=kind)
    given, squares, n_parts, eps = _given(h)
    (stride, n_words), rows = _row(m), MATVEC_ROWS[pow2(n_tokens)]
    words, warps = row_tile(rows, MATVEC_WORDS, n_words, lanes(given))
    out = _new(given, n_tokens, n_head * dim)
    launcher.launch(
        _project_heads_kernel, (m.n_rows // rows,),
        given, out, bias, *_parts(m), squares, cos_sin.contiguous(), k_blocks, v_blocks, block_tables,
        sequences, positions,
        n_tokens, m.n_rows, m.n_cols, stride, n_words, n_parts, eps, n_head, n_head_kv, cos_sin.shape[2],
        block_tables.shape[1], 0,
        TYPE=FORMATS[m.type], DIM=dim, DIM_V=dim_v, NEOX=kind == "neox", T=pow2(n_tokens), R=rows, W=words,
        S=pow2(n_parts), warps=warps,
    )  # fmt: skip
    return out


def attention(
    q: Tensor,
    k_blocks: Tensor,
    v_blocks: Tensor,
    block_tables: Tensor,
    sequences: Tensor,
    positions: Tensor,
    *,
    n_head: int,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:
    """Compute fallback.attention.

    Fewer than PROMPT_TOKENS tokens split their positions, and the splits are merged in order.
    """
    q, n_tokens = q.contiguous(), len(q)
    n_head_kv, dim, dim_v = k_blocks.shape[1], k_blocks.shape[3], v_blocks.shape[3]
    max_kv_blocks, group = block_tables.shape[1], n_head // n_head_kv
    out = _new(q, n_tokens, n_head * dim_v)
    sizes: dict[str, Any] = {
        "GROUP": group, "DIM": dim, "DIM_V": dim_v, "D": max(16, pow2(dim)), "V": max(16, pow2(dim_v)),
        "CAPPED": softcap > 0, "PRECISION": _precision(q),
    }  # fmt: skip
    is_half, amd, head = k_blocks.dtype == torch.float16, is_amd(q), max(dim, dim_v)
    shared = shared_memory(q.device)
    tile = prompt_tile(head, is_half=is_half, shared=shared, amd=amd, hopper=is_hopper(q))
    if n_tokens >= PROMPT_TOKENS and tile is not None:
        heads = min(pow2(group), tile.queries)
        launcher.launch(
            _prompt_attention_kernel,
            (-(-n_tokens // (tile.queries // heads)), n_head_kv * -(-group // heads)),
            q, out, k_blocks, v_blocks, block_tables, sequences, positions, sinks,
            scale, softcap, window, n_tokens, n_head, n_head_kv, max_kv_blocks,
            G=heads, R=tile.queries, N=tile.positions, **sizes, warps=tile.warps, stages=tile.stages,
        )  # fmt: skip
        return out
    tile = token_tile(head, group, is_half=is_half, amd=amd)
    least = max_kv_blocks if n_tokens >= PROMPT_TOKENS else SPLIT_KV_BLOCKS  # prompts need no splits
    kv_blocks_of_split = max(least, -(-max_kv_blocks // MAX_ATTENTION_SPLITS))
    n_splits = -(-max_kv_blocks // kv_blocks_of_split)
    sums, stats = out, None
    if n_splits > 1:
        sums, stats = _new(q, n_tokens, n_head, n_splits, dim_v), _new(q, n_tokens, n_head, n_splits, 2)
    launcher.launch(
        _attention_kernel, (n_tokens, n_head_kv * -(-group // tile.queries), n_splits),
        q, sums, stats, k_blocks, v_blocks, block_tables, sequences, positions, sinks,
        scale, softcap, window, n_head, n_head_kv, max_kv_blocks, kv_blocks_of_split, n_splits,
        SPLIT=n_splits > 1, H=tile.queries, N=tile.positions, **sizes, warps=tile.warps, stages=tile.stages,
    )  # fmt: skip
    if stats is not None:
        at_once = 32 if dim_v <= 128 else 16  # more do not fit in the registers
        launcher.launch(
            _merge_kernel, (n_tokens * n_head,), sums, stats, out, sinks, n_splits, n_head,
            DIM_V=dim_v, V=pow2(dim_v), S=pow2(n_splits), P=min(at_once, pow2(n_splits)), warps=1,
        )  # fmt: skip
    return out
