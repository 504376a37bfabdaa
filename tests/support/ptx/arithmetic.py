"""PTX's arithmetic instructions: functions of arrays, by opcode.

A 16-bit bfloat16 is a float32 here, and rounded when it is stored.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

Values = np.ndarray
DTYPES: dict[str, type[np.generic]] = {
    "b8": np.uint8, "u8": np.uint8, "s8": np.int8, "b16": np.uint16, "u16": np.uint16, "s16": np.int16,
    "b32": np.uint32, "u32": np.uint32, "s32": np.int32, "b64": np.uint64, "u64": np.uint64, "s64": np.int64,
    "f16": np.float16, "bf16": np.uint16, "f32": np.float32, "tf32": np.uint32, "f64": np.float64,
    "pred": np.bool_,
}  # fmt: skip
PACKED = {
    "f16x2": "f16",
    "bf16x2": "bf16",
    "f32x2": "f32",
    "s16x2": "s16",
    "u16x2": "u16",
}  # two per register


def from_bfloat16(bits: Values) -> Values:
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def to_bfloat16(x: Values) -> Values:
    """Round to the nearest, ties to even."""
    bits = np.asarray(x, np.float32).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(x), np.uint16(0x7FFF), rounded.astype(np.uint16))


def fused(a: Values, b: Values, c: Values) -> Values:
    """Return a * b + c of float32 or float16, rounded once."""
    product, c64 = a.astype(np.float64) * b.astype(np.float64), c.astype(np.float64)
    total = product + c64  # float32 products are exact, the sum may be rounded
    if a.dtype == np.float32:
        bits = total.view(np.uint64)
        # A second rounding can be wrong only at ties, and for results with fewer bits than float32.
        near = ((bits & np.uint64((1 << 29) - 1)) == np.uint64(1 << 28)) | (np.abs(total) < 2.0**-125)
        if near.any():
            part = total - product
            lost = (product - (total - part)) + (c64 - part)
            # Round to odd: a digit below float32's last one shows the side of a tie.
            is_even = (bits & np.uint64(1)) == 0
            inexact = near & is_even & (lost != 0) & np.isfinite(total)
            step = np.where((lost > 0) == (total > 0), 1, -1).astype(np.int64)
            total = np.where(inexact, (total.view(np.int64) + step).view(np.float64), total)
    return total.astype(a.dtype)


def shifted(a: Values, n: Values, *, left: bool) -> Values:
    bits = 8 * a.itemsize
    a, n = np.broadcast_arrays(a, n.astype(np.uint32))
    amount = np.minimum(n, bits - 1).astype(a.dtype)
    if left:
        return np.where(n >= bits, a.dtype.type(0), a << amount)
    if a.dtype.kind == "i":
        return a >> amount
    return np.where(n >= bits, a.dtype.type(0), a >> amount)


def bit_field(a: Values, first: Values, n: Values) -> Values:
    """bfe: extract n bits starting at `first`, sign-extended for signed types."""
    bits, wide = 8 * a.itemsize, a.view(f"u{a.itemsize}").astype(np.uint64)
    n64 = np.minimum(n & 255, bits).astype(np.uint64)
    field = (wide >> np.minimum(first & 255, 63).astype(np.uint64)) & ((np.uint64(1) << n64) - np.uint64(1))
    if a.dtype.kind == "i":
        top = np.where(n64 > 0, (field >> (np.maximum(n64, 1) - np.uint64(1))) & np.uint64(1), 0)
        field = np.where(top != 0, field | ~((np.uint64(1) << n64) - np.uint64(1)), field)
    return field.astype(f"u{a.itemsize}").view(a.dtype)


def bit_insert(a: Values, b: Values, first: Values, n: Values) -> Values:
    """bfi: return b with n bits of a inserted at `first`."""
    wide = np.minimum(n & 255, 32).astype(np.uint64)
    mask = ((np.uint64(1) << wide) - np.uint64(1)) << np.minimum(first & 255, 32).astype(np.uint64)
    moved = a.astype(np.uint64) << np.minimum(first & 255, 32).astype(np.uint64)
    return ((b & ~mask) | (moved & mask)).astype(np.uint32)


def permuted(a: Values, b: Values, selector: Values) -> Values:
    """prmt: select four of the eight bytes of a and b, or their signs."""
    both = a.astype(np.uint64) | b.astype(np.uint64) << np.uint64(32)
    result = np.uint32(0)
    for i in range(4):
        nibble = (selector >> np.uint32(4 * i)) & np.uint32(15)
        byte = (both >> ((nibble & np.uint32(7)).astype(np.uint64) * np.uint64(8))).astype(np.uint8)
        byte = np.where(nibble & np.uint32(8), (byte.view(np.int8) >> np.int8(7)).view(np.uint8), byte)
        result = result | byte.astype(np.uint32) << np.uint32(8 * i)
    return np.asarray(result)


def looked_up(a: Values, b: Values, c: Values, table: Values) -> Values:
    """lop3: look up each bit of the three operands in `table`."""
    result = np.uint32(0)
    for i in range(8):
        if int(table) >> i & 1:
            of = (a if i & 4 else ~a) & (b if i & 2 else ~b) & (c if i & 1 else ~c)
            result = result | of
    return np.asarray(result)


def funnel(a: Values, b: Values, n: Values, *, left: bool) -> Values:
    """shf.wrap: shift 32 bits of the concatenation of b and a."""
    both, n64 = b.astype(np.uint64) << np.uint64(32) | a, (n & np.uint32(31)).astype(np.uint64)
    return ((both << n64) >> np.uint64(32) if left else both >> n64).astype(np.uint32)


def high_product(a: Values, b: Values) -> Values:
    """Return the high half of a product (mul.hi)."""
    bits = 8 * a.itemsize
    if bits < 64:
        wide = np.int64 if a.dtype.kind == "i" else np.uint64
        return (a.astype(wide) * b.astype(wide) >> wide(bits)).astype(a.dtype)
    pairs = np.broadcast(a, b)
    return np.array([int(x) * int(y) >> 64 for x, y in pairs], object).astype(a.dtype).reshape(pairs.shape)


def quotient(a: Values, b: Values) -> Values:
    """Divide towards zero; division by zero gives all bits set, as on devices."""
    if a.dtype.kind == "f":
        return a / b
    safe = np.where(b == 0, b.dtype.type(1), b)
    found = a // safe
    if a.dtype.kind == "i":
        found = np.sign(a) * np.sign(safe) * (np.abs(a) // np.abs(safe))
    return np.where(b == 0, ~a.dtype.type(0), found)


def remainder(a: Values, b: Values) -> Values:
    return np.where(b == 0, a, np.fmod(a, np.where(b == 0, b.dtype.type(1), b)))


def converted(x: Values, dtype: type[np.generic], kinds: tuple[str, ...]) -> Values:
    """cvt: clamp floats to the integer's range; NaN becomes 0."""
    to = np.dtype(dtype)
    if x.dtype.kind == "f" and to.kind in "iu":
        ways = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}
        (way,) = [ways[kind] for kind in kinds if kind in ways]
        wide = np.nan_to_num(way(x.astype(np.float64)), nan=0.0)
        info = np.iinfo(to)
        below = wide < 2.0 ** (8 * to.itemsize - (to.kind == "i"))
        return np.where(below, np.where(below, np.maximum(wide, info.min), 0).astype(to), to.type(info.max))
    if x.dtype.kind == "f" and to.kind == "f" and (ways := {"rni", "rzi", "rmi", "rpi"} & set(kinds)):
        whole = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}[ways.pop()]
        return whole(x).astype(to)
    return x.astype(to)


def to_tf32(x: Values) -> Values:
    """cvt.rna: round to ten bits, ties away from zero."""
    return (x.view(np.uint32) + np.uint32(0x1000)) & np.uint32(0xFFFFE000)


def less_nan(name: str) -> Callable[[Values, Values], Values]:
    """min and max: of floats, return the operand that is not NaN."""
    whole, of_floats = {"min": (np.minimum, np.fmin), "max": (np.maximum, np.fmax)}[name]
    return lambda a, b: of_floats(a, b) if a.dtype.kind == "f" else whole(a, b)


def _bits_set(a: Values) -> Values:
    counted = np.unpackbits(np.ascontiguousarray(a).view(np.uint8).reshape(-1, a.itemsize), axis=1)
    return counted.sum(axis=1, dtype=np.uint32).reshape(a.shape)


def _leading_zeros(a: Values) -> Values:
    bits = 8 * a.itemsize
    lengths = [bits - int(one).bit_length() for one in a.view(f"u{a.itemsize}").reshape(-1)]
    return np.array(lengths, np.uint32).reshape(a.shape)


def _reversed_bits(a: Values) -> Values:
    return np.array([int(f"{int(x):032b}"[::-1], 2) for x in a.reshape(-1)], np.uint32).reshape(a.shape)


COMPARE: dict[str, Callable[[Values, Values], Values]] = {
    "eq": np.equal, "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal,
    "lo": np.less, "ls": np.less_equal, "hi": np.greater, "hs": np.greater_equal,
    "ne": lambda a, b: (a != b) & ~(_is_nan(a) | _is_nan(b)),
    "equ": lambda a, b: (a == b) | _is_nan(a) | _is_nan(b), "neu": np.not_equal,
    "ltu": lambda a, b: ~(a >= b), "leu": lambda a, b: ~(a > b), "gtu": lambda a, b: ~(a <= b),
    "geu": lambda a, b: ~(a < b),
    "num": lambda a, b: ~(_is_nan(a) | _is_nan(b)), "nan": lambda a, b: _is_nan(a) | _is_nan(b),
}  # fmt: skip


def _is_nan(x: Values) -> Values:
    return np.isnan(x) if x.dtype.kind == "f" else np.zeros(x.shape, bool)


UNARY: dict[str, Callable[[Values], Values]] = {
    "neg": lambda a: np.negative(a) if a.dtype.kind == "f" else (a.dtype.type(0) - a),
    "abs": np.abs, "not": np.invert, "sqrt": np.sqrt, "rsqrt": lambda a: a.dtype.type(1) / np.sqrt(a),
    "rcp": lambda a: a.dtype.type(1) / a, "ex2": lambda a: np.exp2(a.astype(np.float64)).astype(a.dtype),
    "lg2": lambda a: np.log2(a.astype(np.float64)).astype(a.dtype), "tanh": np.tanh,
    "sin": np.sin, "cos": np.cos, "popc": _bits_set, "clz": _leading_zeros, "brev": _reversed_bits,
}  # fmt: skip
BINARY: dict[str, Callable[[Values, Values], Values]] = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "and": np.bitwise_and, "or": np.bitwise_or,
    "xor": np.bitwise_xor, "min": less_nan("min"), "max": less_nan("max"), "div": quotient, "rem": remainder,
    "shl": lambda a, n: shifted(a, n, left=True), "shr": lambda a, n: shifted(a, n, left=False),
    "copysign": lambda sign, size: np.copysign(size, sign),
}  # fmt: skip
OTHER: dict[str, Callable[..., Any]] = {
    "bfe": bit_field, "bfi": bit_insert, "prmt": permuted, "lop3": looked_up,
}  # fmt: skip
