"""GGML's block formats: the meaning of a tensor's bytes, decoded and encoded in plain NumPy.

A tensor is rows of ne0 values; a row is blocks of `block_size` values in `block_bytes` bytes. The layout of a
block is a NumPy structured dtype, so the table below *is* the format. Formats and type ids are GGML's
(ggml-common.h, and the `constants` module of the PyPI package `gguf`). The decoders are the independent
reference for the native kernels: they perform GGML's float32 operations in the same order.

In the bit diagrams a byte is written from its high bit to its low bit, `x_i` is the value at index i, and
`x_i.h` its high bits. All multi-byte fields are little-endian.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cache

import numpy as np

from hotset.errors import FormatError, InvalidRequestError, UnsupportedModelError
from hotset.formats.codebooks import codebook

CHUNK_VALUES = 1 << 18  # values decoded or encoded at a time, so that temporaries stay in cache


I2_S = 36
REFUSED_TYPES = {
    I2_S: "which only bitnet.cpp uses: its layout depends on the processor that wrote the file, and the file "
    "does not say which. Convert the checkpoint of its BF16 weights (hotset convert), to tq2_0 for example"
}
"""Known types that hotset does not compute with, and why."""


class GGMLType(IntEnum):
    """Type ids in a GGUF file. An unlisted id becomes a member named UNKNOWN_<id>, or I2_S."""

    F32 = 0
    F16 = 1
    Q4_0 = 2
    Q4_1 = 3
    Q5_0 = 6
    Q5_1 = 7
    Q8_0 = 8
    Q8_1 = 9
    Q2_K = 10
    Q3_K = 11
    Q4_K = 12
    Q5_K = 13
    Q6_K = 14
    Q8_K = 15
    IQ2_XXS = 16
    IQ2_XS = 17
    IQ3_XXS = 18
    IQ1_S = 19
    IQ4_NL = 20
    IQ3_S = 21
    IQ2_S = 22
    IQ4_XS = 23
    I8 = 24
    I16 = 25
    I32 = 26
    I64 = 27
    F64 = 28
    IQ1_M = 29
    BF16 = 30
    TQ1_0 = 34
    TQ2_0 = 35
    MXFP4 = 39
    Q1_0 = 41

    @classmethod
    def _missing_(cls, value: object) -> GGMLType | None:
        # A file may name any type; it must still be possible to list its tensors.
        if not isinstance(value, int) or not 0 <= value < 1 << 32:
            return None
        unknown = int.__new__(cls, value)
        unknown._name_ = "I2_S" if value == I2_S else f"UNKNOWN_{value}"
        unknown._value_ = value
        return unknown


@dataclass(frozen=True)
class TypeFacts:
    """One row of the table of formats.

    block: dtype of one block; None if only the sizes are known.
    """

    name: str
    block_size: int  # values
    block_bytes: int
    description: str
    block: np.dtype | None = None

    @property
    def bits_per_value(self) -> float:
        return 8 * self.block_bytes / self.block_size


# ---- layouts of the blocks -----------------------------------------------------------------------------
#
# Nibbles of a 32-value block are split in halves, not in neighbours (Q4_0, Q4_1, Q5_0, Q5_1, IQ4_NL):
#
#   qs[j] = | x_{j+16} | x_j |          j = 0..15
#   qh    = 32 bits, bit i is bit 4 of x_i (Q5_0, Q5_1)
_Q4_0 = np.dtype([("d", "<f2"), ("qs", "u1", 16)])  # d * (q - 8); IQ4_NL: d * CODEBOOK[q]
_Q4_1 = np.dtype([("d", "<f2"), ("m", "<f2"), ("qs", "u1", 16)])  # d * q + m
_Q5_0 = np.dtype([("d", "<f2"), ("qh", "u1", 4), ("qs", "u1", 16)])  # d * (q - 16)
_Q5_1 = np.dtype([("d", "<f2"), ("m", "<f2"), ("qh", "u1", 4), ("qs", "u1", 16)])  # d * q + m
_Q8_0 = np.dtype([("d", "<f2"), ("qs", "i1", 32)])  # d * q

# Q1_0: d if bit i % 8 of qs[i / 8] is set, otherwise -d.
_Q1_0 = np.dtype([("d", "<f2"), ("qs", "u1", 16)])

# MXFP4: 2^(e - 128) * FP4[q]; the block's scale is half a power of two, because FP4 holds doubled values.
_MXFP4 = np.dtype([("e", "u1"), ("qs", "u1", 16)])

# The K formats: 256 values in groups of 16 or 32, each with a small integer scale under a float16 one.
#
# Two-bit planes (Q2_K, Q3_K), for each half h of 128 values and j = 0..31:
#   qs[32h + j] = | x_{128h+96+j} | x_{128h+64+j} | x_{128h+32+j} | x_{128h+j} |
#
# Q2_K: x = d * scale * q - dmin * min; group g of 16:  scales[g] = | min_g | scale_g |
_Q2_K = np.dtype([("scales", "u1", 16), ("qs", "u1", 64), ("d", "<f2"), ("dmin", "<f2")])
# Q3_K: x = d * (scale - 32) * (q - (0 if its bit of hmask is set else 4)).
#   hmask[j]      bit k is the high bit of x_{32k+j}
#   scales[i]     = | scale_{i+8}.low4 | scale_i.low4 |                                      i = 0..7
#   scales[8 + i] = | scale_{i+12}.h2 | scale_{i+8}.h2 | scale_{i+4}.h2 | scale_i.h2 |       i = 0..3
_Q3_K = np.dtype([("hmask", "u1", 32), ("qs", "u1", 64), ("scales", "u1", 12), ("d", "<f2")])
# Q4_K, Q5_K: x = d * scale * q - dmin * min, eight groups of 32, scales and mins of 6 bits:
#   scales[i]     = | scale_{i+4}.h2 | scale_i (6 bits) |      i = 0..3
#   scales[4 + i] = | min_{i+4}.h2   | min_i (6 bits)   |
#   scales[8 + i] = | min_{i+4}.low4 | scale_{i+4}.low4 |
#   qs[32p + j]   = | x_{64p+32+j}   | x_{64p+j}        |      pair p = 0..3, j = 0..31
#   qh[j]         bit k is bit 4 of x_{32k+j} (Q5_K)
_Q4_K = np.dtype([("d", "<f2"), ("dmin", "<f2"), ("scales", "u1", 12), ("qs", "u1", 128)])
_Q5_K = np.dtype([("d", "<f2"), ("dmin", "<f2"), ("scales", "u1", 12), ("qh", "u1", 32), ("qs", "u1", 128)])
# Q6_K: x = d * scale * (q - 32), sixteen groups of 16, for each half h of 128 values:
#   ql[64h + j] = | x_{128h+64+j}.low4 | x_{128h+j}.low4 |                                   j = 0..63
#   qh[32h + j] = | x_{128h+96+j}.h2 | x_{128h+64+j}.h2 | x_{128h+32+j}.h2 | x_{128h+j}.h2 | j = 0..31
_Q6_K = np.dtype([("ql", "u1", 128), ("qh", "u1", 64), ("scales", "i1", 16), ("d", "<f2")])
# IQ4_XS: x = d * (scale - 32) * CODEBOOK[q], eight groups of 32:
#   scales_l[i] = | scale_{2i+1}.low4 | scale_{2i}.low4 |      i = 0..3
#   scales_h    = 16 bits, bits 2g and 2g + 1 are scale_g.h2
#   qs[16g + j] = | x_{32g+16+j} | x_{32g+j} |                 j = 0..15
_IQ4_XS = np.dtype([("d", "<f2"), ("scales_h", "<u2"), ("scales_l", "u1", 4), ("qs", "u1", 128)])

# Ternary: x = d * (t - 1). TQ2_0 has the two-bit planes of Q2_K. In TQ1_0 a byte is a fraction of 256 whose
# first digits in base 3 are the t: five of 32 values each in qs[0..31], five of 16 values each in qs[32..47],
# four of 4 values each in qh.
_TQ1_0 = np.dtype([("qs", "u1", 48), ("qh", "u1", 4), ("d", "<f2")])
_TQ2_0 = np.dtype([("qs", "u1", 64), ("d", "<f2")])

# The lattices: groups of 8 values (IQ3: 4) are points of a codebook, times signs, times scales s of 32 or 16
# values, times d. If seven signs of a group of 8 are stored, an even number of the eight are negative.
#
# IQ2_XXS: x = d * (s + 1/2) / 4 * +-point, for each 32 values:
#   qs[0] = | index_3 | index_2 | index_1 | index_0 |
#   qs[1] = | s (4 bits) | signs_3 (7 bits) | signs_2 | signs_1 | signs_0 |
_IQ2_XXS = np.dtype([("d", "<f2"), ("qs", "<u4", (8, 2))])
# IQ2_XS: the same with an s for 16 values: qs[i] = | signs_i (7 bits) | index_i (9 bits) |
#   scales[i] = | s_{2i+1} | s_{2i} |
_IQ2_XS = np.dtype([("d", "<f2"), ("qs", "<u2", 32), ("scales", "u1", 8)])
# IQ2_S: all eight signs of group i are signs[i]; qs[i] the low 8 bits of its index, and
#   qh[i] = | index_{4i+3}.h2 | index_{4i+2}.h2 | index_{4i+1}.h2 | index_{4i}.h2 |
_IQ2_S = np.dtype([("d", "<f2"), ("qs", "u1", 32), ("signs", "u1", 32), ("qh", "u1", 8), ("scales", "u1", 8)])
# IQ3_XXS: x = d * (s + 1/2) / 2 * +-point; signs[i] of 32 values as qs[1] in IQ2_XXS
_IQ3_XXS = np.dtype([("d", "<f2"), ("qs", "u1", 64), ("signs", "<u4", 8)])
# IQ3_S: x = d * (2s + 1) * +-point; bit j of qh[i] is the high bit of index_{8i+j}
_IQ3_S = np.dtype([("d", "<f2"), ("qs", "u1", 64), ("qh", "u1", 8), ("signs", "u1", 32), ("scales", "u1", 4)])
# IQ1_S: x = d * (2s + 1) * (point + delta), for each 32 values:
#   qh = | delta is -1/8, not 1/8 | s (3 bits) | index_3.h3 | index_2.h3 | index_1.h3 | index_0.h3 |
_IQ1_S = np.dtype([("d", "<f2"), ("qs", "u1", 32), ("qh", "<u2", 8)])
# IQ1_M: the same with an s for 16 values and a delta for 8; d has no field:
#   qh[i]     = | delta_{2i+1} | index_{2i+1}.h3 | delta_{2i} | index_{2i}.h3 |
#   scales[i] = | bits 4i.. of d (4 bits) | s_{4i+3} (3 bits) | s_{4i+2} | s_{4i+1} | s_{4i} |
_IQ1_M = np.dtype([("qs", "u1", 32), ("qh", "u1", 16), ("scales", "<u2", 4)])

# The 16 values of IQ4_NL and IQ4_XS, denser near zero, like weights.
CODEBOOK = np.array(
    [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], dtype=np.float32
)

# Twice the values of MXFP4's codes: a sign, two bits of exponent, one of mantissa. -0 is read as 0.
FP4 = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], dtype=np.float32)

_T = GGMLType
TYPES: dict[GGMLType, TypeFacts] = {
    _T.F32: TypeFacts("F32", 1, 4, "float32", np.dtype("<f4")),
    _T.F16: TypeFacts("F16", 1, 2, "float16", np.dtype("<f2")),
    _T.BF16: TypeFacts("BF16", 1, 2, "bfloat16, the high half of a float32", np.dtype("<u2")),
    _T.Q4_0: TypeFacts("Q4_0", 32, 18, "4 bits, one scale per 32", _Q4_0),
    _T.Q4_1: TypeFacts("Q4_1", 32, 20, "4 bits, scale and minimum per 32", _Q4_1),
    _T.Q5_0: TypeFacts("Q5_0", 32, 22, "5 bits, one scale per 32", _Q5_0),
    _T.Q5_1: TypeFacts("Q5_1", 32, 24, "5 bits, scale and minimum per 32", _Q5_1),
    _T.Q8_0: TypeFacts("Q8_0", 32, 34, "8 bits, one scale per 32", _Q8_0),
    _T.Q2_K: TypeFacts("Q2_K", 256, 84, "2 bits, 4-bit scale and minimum per 16", _Q2_K),
    _T.Q3_K: TypeFacts("Q3_K", 256, 110, "3 bits, 6-bit scale per 16", _Q3_K),
    _T.Q4_K: TypeFacts("Q4_K", 256, 144, "4 bits, 6-bit scale and minimum per 32", _Q4_K),
    _T.Q5_K: TypeFacts("Q5_K", 256, 176, "5 bits, 6-bit scale and minimum per 32", _Q5_K),
    _T.Q6_K: TypeFacts("Q6_K", 256, 210, "6 bits, 8-bit scale per 16", _Q6_K),
    _T.IQ4_NL: TypeFacts("IQ4_NL", 32, 18, "4-bit codebook, one scale per 32", _Q4_0),
    _T.IQ4_XS: TypeFacts("IQ4_XS", 256, 136, "4-bit codebook, 6-bit scale per 32", _IQ4_XS),
    _T.MXFP4: TypeFacts("MXFP4", 32, 17, "4-bit float, shared exponent per 32", _MXFP4),
    _T.Q1_0: TypeFacts("Q1_0", 128, 18, "1 bit, one scale per 128", _Q1_0),
    _T.TQ1_0: TypeFacts("TQ1_0", 256, 54, "ternary, 1.69 bits", _TQ1_0),
    _T.TQ2_0: TypeFacts("TQ2_0", 256, 66, "ternary, 2.06 bits", _TQ2_0),
    _T.IQ1_S: TypeFacts("IQ1_S", 256, 50, "1.56-bit lattice", _IQ1_S),
    _T.IQ1_M: TypeFacts("IQ1_M", 256, 56, "1.75-bit lattice", _IQ1_M),
    _T.IQ2_XXS: TypeFacts("IQ2_XXS", 256, 66, "2.06-bit lattice", _IQ2_XXS),
    _T.IQ2_XS: TypeFacts("IQ2_XS", 256, 74, "2.31-bit lattice", _IQ2_XS),
    _T.IQ2_S: TypeFacts("IQ2_S", 256, 82, "2.56-bit lattice", _IQ2_S),
    _T.IQ3_XXS: TypeFacts("IQ3_XXS", 256, 98, "3.06-bit lattice", _IQ3_XXS),
    _T.IQ3_S: TypeFacts("IQ3_S", 256, 110, "3.44-bit lattice", _IQ3_S),
    # hotset lists and copies these, but does not compute with them.
    _T.Q8_1: TypeFacts("Q8_1", 32, 36, "8 bits, scale and sum per 32"),
    _T.Q8_K: TypeFacts("Q8_K", 256, 292, "8 bits, float32 scale per 256"),
    _T.I8: TypeFacts("I8", 1, 1, "int8", np.dtype("i1")),
    _T.I16: TypeFacts("I16", 1, 2, "int16", np.dtype("<i2")),
    _T.I32: TypeFacts("I32", 1, 4, "int32", np.dtype("<i4")),
    _T.I64: TypeFacts("I64", 1, 8, "int64", np.dtype("<i8")),
    _T.F64: TypeFacts("F64", 1, 8, "float64", np.dtype("<f8")),
}


def row_bytes(type: GGMLType, ne0: int) -> int:
    """Return the bytes of a row of `ne0` values. Raises FormatError for partial blocks or an unknown type."""
    facts = TYPES.get(type)
    if facts is None:
        raise FormatError(f"the tensor type {int(type)} is unknown; convert the file again.")
    if ne0 < 0 or ne0 % facts.block_size:
        raise FormatError(
            f"a row of {ne0} values cannot be {facts.name}: blocks hold {facts.block_size} values."
        )
    return ne0 // facts.block_size * facts.block_bytes


def fitting(type: GGMLType, width: int) -> GGMLType:
    """Return the type, or Q4_0 or F16, whichever first has a block size that divides the width."""
    return next(t for t in (type, GGMLType.Q4_0, GGMLType.F16) if width % TYPES[t].block_size == 0)


# ---- decoders: blocks (structured, [n]) → float32 [n, block_size] --------------------------------------


def _planes(packed: np.ndarray, bits: int) -> np.ndarray:
    """Return [..., 8 // bits, m] values of [..., m] bytes: plane j has bits j*bits and up of every byte."""
    packed, whole = np.ascontiguousarray(packed), np.dtype(f"V{packed.shape[-1]}")  # NumPy moves whole rows
    planes = np.empty((*packed.shape[:-1], 8 // bits), whole)
    for j in range(8 // bits):
        plane = (packed >> np.uint8(j * bits)) & np.uint8((1 << bits) - 1)
        planes[..., j] = plane.view(whole)[..., 0]
    return planes.view(np.uint8).reshape(*planes.shape, -1)


def _scale(b: np.ndarray, field: str) -> np.ndarray:
    return b[field].astype(np.float32)[:, None]  # [n, 1]


def _nibbles(b: np.ndarray) -> np.ndarray:
    return _planes(b["qs"], 4).reshape(-1, 32)


def _five_bits(b: np.ndarray) -> np.ndarray:
    high = np.unpackbits(b["qh"], axis=-1, bitorder="little")  # [n, 32]
    return _nibbles(b) | high << np.uint8(4)


def _decode_q4_0(b: np.ndarray) -> np.ndarray:
    return _scale(b, "d") * (_nibbles(b).astype(np.float32) - 8)


def _decode_q4_1(b: np.ndarray) -> np.ndarray:
    return _scale(b, "d") * _nibbles(b).astype(np.float32) + _scale(b, "m")


def _decode_q5_0(b: np.ndarray) -> np.ndarray:
    return _scale(b, "d") * (_five_bits(b).astype(np.float32) - 16)


def _decode_q5_1(b: np.ndarray) -> np.ndarray:
    return _scale(b, "d") * _five_bits(b).astype(np.float32) + _scale(b, "m")


def _decode_q8_0(b: np.ndarray) -> np.ndarray:
    return _scale(b, "d") * b["qs"].astype(np.float32)


def _two_bit_groups(b: np.ndarray) -> np.ndarray:
    return _planes(b["qs"].reshape(-1, 2, 32), 2).reshape(-1, 16, 16)


def _decode_q2_k(b: np.ndarray) -> np.ndarray:
    scale = _scale(b, "d") * (b["scales"] & 15).astype(np.float32)  # [n, 16]
    minimum = _scale(b, "dmin") * (b["scales"] >> 4).astype(np.float32)
    return scale[:, :, None] * _two_bit_groups(b).astype(np.float32) - minimum[:, :, None]


def _decode_q3_k(b: np.ndarray) -> np.ndarray:
    low = _planes(b["scales"][:, :8], 4).reshape(-1, 16)
    high = _planes(b["scales"][:, 8:], 2).reshape(-1, 16)
    scale = _scale(b, "d") * ((low | high << np.uint8(4)).astype(np.float32) - 32)
    high_bit = _planes(b["hmask"], 1).reshape(-1, 16, 16)
    q = (_two_bit_groups(b) | high_bit << np.uint8(2)).astype(np.float32) - 4
    return scale[:, :, None] * q


def k_parts(b: np.ndarray, type: GGMLType) -> tuple[np.ndarray, np.ndarray]:
    """Return the parts per 32 weights in blocks of Q4_K, Q5_K or Q6_K, [n]: uint8 [n, 8, 2] and [n, 8, 32].

    The first are scale and minimum, or for Q6_K the scales of the two halves, bytes of int8. The second are
    the codes; a code of Q6_K is 32 above its value.
    """
    if type == GGMLType.Q6_K:
        low = _planes(b["ql"].reshape(-1, 2, 64), 4).reshape(-1, 8, 32)
        high = _planes(b["qh"].reshape(-1, 2, 32), 2).reshape(-1, 8, 32)
        return b["scales"].view(np.uint8).reshape(-1, 8, 2), low | high << np.uint8(4)
    first, second, third = (b["scales"][:, i : i + 4] for i in (0, 4, 8))
    scale = np.concatenate([first & 63, (third & 15) | (first >> 6) << 4], axis=1)
    minimum = np.concatenate([second & 63, (third >> 4) | (second >> 6) << 4], axis=1)
    codes = _planes(b["qs"].reshape(-1, 4, 32), 4).reshape(-1, 8, 32)
    if type == GGMLType.Q5_K:
        codes |= _planes(b["qh"], 1) << np.uint8(4)
    return np.stack([scale, minimum], axis=2), codes


def _decode_k(b: np.ndarray, type: GGMLType) -> np.ndarray:
    parts, codes = k_parts(b, type)
    scale = _scale(b, "d") * parts[:, :, 0].astype(np.float32)
    minimum = _scale(b, "dmin") * parts[:, :, 1].astype(np.float32)
    return scale[:, :, None] * codes.astype(np.float32) - minimum[:, :, None]


def _decode_q4_k(b: np.ndarray) -> np.ndarray:
    return _decode_k(b, GGMLType.Q4_K)


def _decode_q5_k(b: np.ndarray) -> np.ndarray:
    return _decode_k(b, GGMLType.Q5_K)


def _decode_q6_k(b: np.ndarray) -> np.ndarray:
    parts, codes = k_parts(b, GGMLType.Q6_K)
    scale = _scale(b, "d") * parts.view(np.int8).reshape(-1, 16).astype(np.float32)
    return scale[:, :, None] * (codes.reshape(-1, 16, 16).astype(np.float32) - 32)


def _decode_iq4_nl(b: np.ndarray) -> np.ndarray:
    return _scale(b, "d") * CODEBOOK[_nibbles(b)]


def _decode_iq4_xs(b: np.ndarray) -> np.ndarray:
    low = _planes(b["scales_l"], 4).transpose(0, 2, 1).reshape(-1, 8)
    high = (b["scales_h"][:, None] >> np.arange(0, 16, 2, dtype=np.uint16)) & np.uint16(3)
    scale = _scale(b, "d") * ((low | high << np.uint16(4)).astype(np.float32) - 32)
    q = _planes(b["qs"].reshape(-1, 8, 16), 4).reshape(-1, 8, 32)
    return scale[:, :, None] * CODEBOOK[q]


def _half_of_e8m0(e: np.ndarray) -> np.ndarray:
    """Return 2^(e - 128): half of the power of two for an exponent; the first two are subnormal."""
    e = e.astype(np.uint32)
    bits = np.where(e < 2, np.uint32(0x00200000) << np.minimum(e, 1), (e - np.uint32(1)) << np.uint32(23))
    return bits.view(np.float32)


def _decode_mxfp4(b: np.ndarray) -> np.ndarray:
    return _half_of_e8m0(b["e"])[:, None] * FP4[_nibbles(b)]


def _decode_q1_0(b: np.ndarray) -> np.ndarray:
    bits = np.unpackbits(b["qs"], axis=1, bitorder="little")
    return _scale(b, "d") * (2 * bits.astype(np.float32) - 1)


def _decode_tq2_0(b: np.ndarray) -> np.ndarray:
    return _scale(b, "d") * (_two_bit_groups(b).reshape(-1, 256).astype(np.float32) - 1)


def _decode_tq1_0(b: np.ndarray) -> np.ndarray:
    powers = np.array([1, 3, 9, 27, 81], np.uint8)[:, None]
    parts = ((b["qs"][:, :32], 5), (b["qs"][:, 32:], 5), (b["qh"], 4))
    moved = [(packed[:, None, :] * powers[:n]).reshape(len(b), -1) for packed, n in parts]  # mod 256
    t = (np.concatenate(moved, axis=1).astype(np.uint16) * np.uint16(3)) >> np.uint16(8)
    return _scale(b, "d") * (t.astype(np.float32) - 1)


@cache
def _points(name: str, *values: float) -> np.ndarray:
    """Return a codebook with these values for its digits, float32 [n, 8 or 4]."""
    return np.array(values, np.float32)[codebook(name)]


_IQ2_VALUES = (8, 25, 43)


def _plus_minus(signs: np.ndarray) -> np.ndarray:
    """Return bytes of eight signs [..., m] as float32 [..., m, 8]: -1 for a set bit, otherwise 1."""
    bits = np.unpackbits(signs.astype(np.uint8)[..., None], axis=-1, bitorder="little")
    return 1 - 2 * bits.astype(np.float32)


def _seven_signs(seven: np.ndarray) -> np.ndarray:
    """Return bytes of seven signs with an eighth that makes the number of negative ones even."""
    odd = np.unpackbits(seven.astype(np.uint8)[..., None], axis=-1).sum(axis=-1, dtype=np.uint8) & 1
    return seven.astype(np.uint8) | odd << np.uint8(7)


def _signs_and_scale(words: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return words of IQ2_XXS and IQ3_XXS [n, 8] as signs float32 [n, 8, 4, 8] and s + 1/2 float32 [n, 8]."""
    seven = (words[..., None] >> np.arange(0, 28, 7, dtype=np.uint32)) & np.uint32(127)
    return _plus_minus(_seven_signs(seven)), (words >> np.uint32(28)).astype(np.float32) + np.float32(0.5)


def _half_steps(b: np.ndarray) -> np.ndarray:
    """Return s + 1/2 of each 16 values, from nibbles: float32 [n, 16]."""
    return _nibble_pairs(b["scales"]).astype(np.float32) + np.float32(0.5)


def _nibble_pairs(packed: np.ndarray) -> np.ndarray:
    """Return [n, m] bytes as [n, 2m] nibbles, the low one of each byte first."""
    return _planes(packed, 4).transpose(0, 2, 1).reshape(len(packed), -1)


def _decode_iq2_xxs(b: np.ndarray) -> np.ndarray:
    signs, step = _signs_and_scale(b["qs"][:, :, 1])
    index = np.ascontiguousarray(b["qs"][:, :, 0]).view(np.uint8).reshape(-1, 8, 4)
    scale = _scale(b, "d") * step * np.float32(0.25)
    return scale[:, :, None, None] * _points("IQ2_XXS", *_IQ2_VALUES)[index] * signs


def _decode_iq2_xs(b: np.ndarray) -> np.ndarray:
    signs = _plus_minus(_seven_signs(b["qs"] >> np.uint16(9)))
    scale = _scale(b, "d") * _half_steps(b) * np.float32(0.25)
    points = _points("IQ2_XS", *_IQ2_VALUES)[b["qs"] & np.uint16(511)] * signs
    return scale[:, :, None, None] * points.reshape(-1, 16, 2, 8)


def _decode_iq2_s(b: np.ndarray) -> np.ndarray:
    high = _planes(b["qh"], 2).transpose(0, 2, 1).reshape(-1, 32).astype(np.uint16)
    points = _points("IQ2_S", *_IQ2_VALUES)[b["qs"] | high << np.uint16(8)] * _plus_minus(b["signs"])
    scale = _scale(b, "d") * _half_steps(b) * np.float32(0.25)
    return scale[:, :, None, None] * points.reshape(-1, 16, 2, 8)


def _decode_iq3_xxs(b: np.ndarray) -> np.ndarray:
    signs, step = _signs_and_scale(b["signs"])
    points = _points("IQ3_XXS", 4, 12, 20, 28, 36, 44, 52, 62)[b["qs"]]
    scale = _scale(b, "d") * step * np.float32(0.5)
    return scale[:, :, None, None] * points.reshape(-1, 8, 4, 8) * signs


def _decode_iq3_s(b: np.ndarray) -> np.ndarray:
    high = np.unpackbits(b["qh"], axis=-1, bitorder="little").astype(np.uint16)
    points = _points("IQ3_S", *range(1, 16, 2))[b["qs"] | high << np.uint16(8)]
    scale = _scale(b, "d") * (2 * _nibble_pairs(b["scales"]).astype(np.float32) + 1)
    return (
        scale[:, :, None, None] * points.reshape(-1, 8, 4, 8) * _plus_minus(b["signs"]).reshape(-1, 8, 4, 8)
    )


def _decode_iq1_s(b: np.ndarray) -> np.ndarray:
    high = (b["qh"][:, :, None] >> np.arange(0, 12, 3, dtype=np.uint16)) & np.uint16(7)
    points = _points("IQ1_S", -1, 0, 1)[b["qs"].reshape(-1, 8, 4) | high << np.uint16(8)]
    scale = _scale(b, "d") * (2 * ((b["qh"] >> np.uint16(12)) & np.uint16(7)).astype(np.float32) + 1)
    delta = np.where(b["qh"] >> np.uint16(15), np.float32(-0.125), np.float32(0.125))
    return scale[:, :, None, None] * (points + delta[:, :, None, None])


def _decode_iq1_m(b: np.ndarray) -> np.ndarray:
    parts = (b["scales"] & np.uint16(0xF000)) >> np.array([12, 8, 4, 0], np.uint16)
    d = np.bitwise_or.reduce(parts, axis=1).view(np.float16).astype(np.float32)
    steps = (b["scales"][:, :, None] >> np.arange(0, 12, 3, dtype=np.uint16)) & np.uint16(7)
    scale = d[:, None] * (2 * steps.reshape(-1, 16).astype(np.float32) + 1)
    high = _nibble_pairs(b["qh"])
    points = _points("IQ1_S", -1, 0, 1)[b["qs"] | (high & np.uint8(7)).astype(np.uint16) << np.uint16(8)]
    delta = np.where(high & np.uint8(8), np.float32(-0.125), np.float32(0.125))
    return scale[:, :, None, None] * (points + delta[:, :, None]).reshape(-1, 16, 2, 8)


def _decode_float(b: np.ndarray) -> np.ndarray:
    return b.astype(np.float32)


def _decode_bf16(b: np.ndarray) -> np.ndarray:
    return (b.astype(np.uint32) << np.uint32(16)).view(np.float32)


_DECODERS: dict[GGMLType, Callable[[np.ndarray], np.ndarray]] = {
    _T.F32: _decode_float,
    _T.F16: _decode_float,
    _T.BF16: _decode_bf16,
    _T.Q4_0: _decode_q4_0,
    _T.Q4_1: _decode_q4_1,
    _T.Q5_0: _decode_q5_0,
    _T.Q5_1: _decode_q5_1,
    _T.Q8_0: _decode_q8_0,
    _T.Q2_K: _decode_q2_k,
    _T.Q3_K: _decode_q3_k,
    _T.Q4_K: _decode_q4_k,
    _T.Q5_K: _decode_q5_k,
    _T.Q6_K: _decode_q6_k,
    _T.IQ4_NL: _decode_iq4_nl,
    _T.IQ4_XS: _decode_iq4_xs,
    _T.MXFP4: _decode_mxfp4,
    _T.Q1_0: _decode_q1_0,
    _T.TQ1_0: _decode_tq1_0,
    _T.TQ2_0: _decode_tq2_0,
    _T.IQ1_S: _decode_iq1_s,
    _T.IQ1_M: _decode_iq1_m,
    _T.IQ2_XXS: _decode_iq2_xxs,
    _T.IQ2_XS: _decode_iq2_xs,
    _T.IQ2_S: _decode_iq2_s,
    _T.IQ3_XXS: _decode_iq3_xxs,
    _T.IQ3_S: _decode_iq3_s,
}
DECODABLE = frozenset(_DECODERS)  # types of matrices and vectors that operations use
_DECODERS[_T.I32] = lambda blocks: blocks.astype(np.float32)  # for whole numbers below 2^24


def dequantize(data: np.ndarray, type: GGMLType, shape: Sequence[int]) -> np.ndarray:
    """Return the values of a tensor, including whole numbers (I32).

    data: uint8, any shape, one block after another. shape: as in the file, ne0 first. The result is float32
    [shape[-1], ..., shape[0]], writable and owned by the caller. Raises UnsupportedModelError for a type
    without a decoder, and FormatError if data and shape disagree.
    """
    type = GGMLType(type)
    decode = _DECODERS.get(type)
    if decode is None:
        raise UnsupportedModelError(
            f"tensors of type {type.name} cannot be decoded; use a file of another type."
        )
    facts = TYPES[type]
    assert facts.block is not None, "a decodable type has a layout"
    expected = row_bytes(type, shape[0]) * math.prod(shape[1:])
    if data.size != expected or data.dtype != np.uint8:
        raise FormatError(
            f"{type.name} of shape {list(shape)} takes {expected} bytes, not {data.size} {data.dtype} values."
        )
    blocks = np.ascontiguousarray(data).reshape(-1).view(facts.block)
    out = np.empty((len(blocks), facts.block_size), np.float32)
    step = max(CHUNK_VALUES // facts.block_size, 1)
    with np.errstate(all="ignore"):  # hostile scales yield infinity and NaN, as in GGML
        for i in range(0, len(blocks), step):
            out[i : i + step] = decode(blocks[i : i + step]).reshape(-1, facts.block_size)
    return out.reshape(tuple(shape)[::-1])


# ---- encoders: float32 [n, block_size] → blocks (structured, [n]) --------------------------------------


def _inverse(d: np.ndarray) -> np.ndarray:
    """Return 1 / d, or 0 if d is 0 or so small that 1 / d overflows (the float16 scale is then 0 anyway)."""
    inverse = 1 / d
    return np.where(np.isfinite(inverse), inverse, np.float32(0))


def _pack_halves(q: np.ndarray) -> np.ndarray:
    return (q[:, :16] & 15) | q[:, 16:] << np.uint8(4)


def _pack_fifth_bit(q: np.ndarray) -> np.ndarray:
    return np.packbits(q >> np.uint8(4), axis=-1, bitorder="little")


def _encode_symmetric(x: np.ndarray, block: np.dtype, half: int) -> np.ndarray:
    """Encode Q4_0 (half = 8) or Q5_0 (half = 16): the value of largest magnitude becomes -half exactly."""
    # The first one of largest magnitude; + 0 makes the zero of a block of zeros +0.
    largest = np.take_along_axis(x, np.abs(x).argmax(axis=1, keepdims=True), axis=1) + np.float32(0)
    d = largest / np.float32(-half)
    q = np.trunc(x * _inverse(d) + np.float32(half + 0.5)).clip(0, 2 * half - 1).astype(np.uint8)
    out = np.empty(len(x), block)
    out["d"] = d[:, 0]
    out["qs"] = _pack_halves(q)
    if half == 16:
        out["qh"] = _pack_fifth_bit(q)
    return out


def _encode_affine(x: np.ndarray, block: np.dtype, largest: int) -> np.ndarray:
    """Encode Q4_1 (largest = 15) or Q5_1 (largest = 31): the minimum becomes 0 and the maximum `largest`."""
    low = np.take_along_axis(x, x.argmin(axis=1, keepdims=True), axis=1)  # the first of zeros with two signs
    d = (x.max(axis=1, keepdims=True) - low) / np.float32(largest) + np.float32(0)
    q = np.trunc((x - low) * _inverse(d) + np.float32(0.5)).clip(0, largest).astype(np.uint8)
    out = np.empty(len(x), block)
    out["d"], out["m"] = d[:, 0], low[:, 0]
    out["qs"] = _pack_halves(q)
    if largest == 31:
        out["qh"] = _pack_fifth_bit(q)
    return out


def _encode_q8_0(x: np.ndarray) -> np.ndarray:
    d = np.abs(x).max(axis=1, keepdims=True) / np.float32(127)
    scaled = x * _inverse(d)
    whole = np.trunc(scaled)
    out = np.empty(len(x), _Q8_0)
    out["d"] = d[:, 0]
    # Round halves away from zero. trunc(v + 0.5) fails: in float32, 0.49999997 + 0.5 is 1.
    out["qs"] = (whole + np.trunc(2 * (scaled - whole))).astype(np.int8)
    return out


def _encode_mxfp4(x: np.ndarray) -> np.ndarray:
    """Encode MXFP4: the largest magnitude gets the largest power of two; among nearest values the first wins.

    The power follows the exponent's bits. GGML uses log2f, which rounds up if the largest magnitude is a few
    units in the last place below a power of two.
    """
    mantissa, exponent = np.frexp(np.abs(x).max(axis=1))  # 2^n is 0.5 and n + 1; 0 is 0 and 0
    out = np.empty(len(x), _MXFP4)
    out["e"] = np.where(mantissa > 0, np.maximum(exponent + 124, 0), 0)
    error = np.abs(_half_of_e8m0(out["e"])[:, None, None] * FP4 - x[:, :, None])
    out["qs"] = _pack_halves(error.argmin(axis=2).astype(np.uint8))
    return out


def _ternary(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the largest magnitude d [n], and x / d rounded, as 0, 1 or 2 for -d, 0 and d: uint8 [n, 256]."""
    d = np.abs(x).max(axis=1, keepdims=True)
    scaled = x * _inverse(d)
    whole = np.trunc(scaled)
    return d[:, 0], (whole + np.trunc(2 * (scaled - whole)) + 1).astype(np.uint8)  # halves away from zero


def _encode_tq1_0(x: np.ndarray) -> np.ndarray:
    out = np.empty(len(x), _TQ1_0)
    out["d"], t = _ternary(x)

    def packed(t: np.ndarray, digits: int) -> np.ndarray:
        powers = np.array([81, 27, 9, 3, 1], np.uint16)[:digits, None]
        number = (t.reshape(len(t), digits, -1) * powers).sum(axis=1, dtype=np.uint16)
        return ((number * np.uint16(256) + np.uint16(242)) // np.uint16(243)).astype(np.uint8)  # rounded up

    out["qs"] = np.concatenate([packed(t[:, :160], 5), packed(t[:, 160:240], 5)], axis=1)
    out["qh"] = packed(t[:, 240:], 4)
    return out


def _encode_tq2_0(x: np.ndarray) -> np.ndarray:
    out = np.empty(len(x), _TQ2_0)
    out["d"], t = _ternary(x)
    planes = t.reshape(-1, 2, 4, 32) << np.arange(0, 8, 2, dtype=np.uint8)[:, None]
    out["qs"] = np.bitwise_or.reduce(planes, axis=2).reshape(-1, 64)
    return out


def _encode_bf16(x: np.ndarray) -> np.ndarray:
    bits = x.view(np.uint32)
    is_nan = (bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
    quiet = bits >> np.uint32(16) | np.uint32(0x40)  # rounding a NaN could yield infinity
    rounded = (bits + np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1))) >> np.uint32(16)
    return np.where(is_nan, quiet, rounded).astype(np.uint16)


_ENCODERS: dict[GGMLType, Callable[[np.ndarray], np.ndarray]] = {
    _T.F32: lambda x: x,
    _T.F16: lambda x: x.astype(np.float16),
    _T.BF16: _encode_bf16,
    _T.Q4_0: lambda x: _encode_symmetric(x, _Q4_0, 8),
    _T.Q4_1: lambda x: _encode_affine(x, _Q4_1, 15),
    _T.Q5_0: lambda x: _encode_symmetric(x, _Q5_0, 16),
    _T.Q5_1: lambda x: _encode_affine(x, _Q5_1, 31),
    _T.Q8_0: _encode_q8_0,
    _T.MXFP4: _encode_mxfp4,
    _T.TQ1_0: _encode_tq1_0,
    _T.TQ2_0: _encode_tq2_0,
}
ENCODABLE = frozenset(_ENCODERS)


def quantize(values: np.ndarray, type: GGMLType) -> np.ndarray:
    """Encode rows of float32 [..., ne0] as uint8 [..., row_bytes(type, ne0)], like GGML's reference.

    Raises InvalidRequestError for a type without an encoder, and for NaN, infinity or a value too large for
    the type's float16 scale (F32 and BF16 keep any value, MXFP4 any finite one). Raises FormatError if ne0 is
    not a multiple of the block size.
    """
    type = GGMLType(type)
    encode = _ENCODERS.get(type)
    if encode is None:
        names = ", ".join(t.name for t in sorted(ENCODABLE))
        raise InvalidRequestError(f"values cannot be quantised to {type.name}; choose one of {names}.")
    facts = TYPES[type]
    assert facts.block is not None, "an encodable type has a layout"
    values = np.ascontiguousarray(values, dtype=np.float32)
    out = np.empty((*values.shape[:-1], row_bytes(type, values.shape[-1])), np.uint8)
    x = values.reshape(-1, facts.block_size)
    blocks = out.reshape(-1).view(facts.block)
    step = max(CHUNK_VALUES // facts.block_size, 1)
    with np.errstate(all="ignore"):
        for i in range(0, len(blocks), step):
            chunk = encode(x[i : i + step]).reshape(-1)
            if type not in (_T.F32, _T.BF16):
                _check_finite(x[i : i + step] if type == _T.MXFP4 else chunk, type)
            blocks[i : i + step] = chunk
    return out


def _check_finite(blocks: np.ndarray, type: GGMLType) -> None:
    """Raise InvalidRequestError if floats, or float16 fields of blocks, are not finite."""
    for scale in (
        [blocks] if blocks.dtype.names is None else [blocks[f] for f in ("d", "m") if f in blocks.dtype.names]
    ):
        if not np.isfinite(scale).all():
            raise InvalidRequestError(
                f"values that are NaN, infinite or too large for float16 cannot be stored as {type.name}; "
                "check the checkpoint, or store this tensor as F32 or BF16."
            )
