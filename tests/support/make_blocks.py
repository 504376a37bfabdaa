"""Random valid blocks of any tensor type, for tests of decoders and kernels.

All bit patterns of codes and small scales can occur. Only the float16 scales, MXFP4's exponents and float
values are chosen: they are finite, and decoded values have a magnitude of about 1/sqrt(ne0), like weights.
"""

import numpy as np

from hotset.formats.quants import TYPES, GGMLType, dequantize, quantize, row_bytes

_FLOATS = (GGMLType.F32, GGMLType.F16, GGMLType.BF16)


def random_blocks(type: GGMLType, n_rows: int, ne0: int, rng: np.random.Generator) -> np.ndarray:
    """Return uint8 [n_rows, row_bytes(type, ne0)]."""
    target = 1 / np.sqrt(ne0)
    if type in _FLOATS:
        return quantize((rng.standard_normal((n_rows, ne0)) * target).astype(np.float32), type)
    data = rng.integers(0, 256, (n_rows, row_bytes(type, ne0)), dtype=np.uint8)
    blocks = data.reshape(-1).view(TYPES[type].block)
    if type == GGMLType.MXFP4:
        blocks["e"] = 128  # 1
        exponent = np.log2(target / np.sqrt(np.mean(dequantize(data, type, (ne0, n_rows)) ** 2)))
        blocks["e"] = 128 + np.rint(exponent) + rng.integers(-1, 2, len(blocks))
        return data
    if type == GGMLType.IQ1_M:
        _put_scale(blocks, np.full(len(blocks), 1, np.float16))
        unit = target / np.sqrt(np.mean(dequantize(data, type, (ne0, n_rows)) ** 2))
        spread = unit * rng.uniform(0.5, 1.5, len(blocks)) * rng.choice([-1.0, 1.0], len(blocks))
        _put_scale(blocks, spread.astype(np.float16))
        return data
    scales = [name for name in ("d", "m", "dmin") if name in blocks.dtype.names]
    for name in scales:
        blocks[name] = 1
    raw = dequantize(data, type, (ne0, n_rows))
    unit = target / np.sqrt(np.mean(np.square(raw, dtype=np.float64)))
    for name in scales:
        spread = unit * rng.uniform(0.5, 1.5, len(blocks))
        if name == "m":  # the minimum of Q4_1 and Q5_1 is added, not scaled: centre the block
            spread = -blocks["d"].astype(np.float32) * (7.5 if type == GGMLType.Q4_1 else 15.5)
        elif name == "d":
            spread = spread * rng.choice([-1.0, 1.0], len(blocks))
        blocks[name] = spread
    return data


def _put_scale(blocks: np.ndarray, scale: np.ndarray) -> None:
    """Store the scale of IQ1_M in the high bits of its four words."""
    pieces = scale.view(np.uint16)[:, None] >> np.arange(0, 16, 4, dtype=np.uint16)
    blocks["scales"] = (blocks["scales"] & np.uint16(0x0FFF)) | pieces << np.uint16(12)
