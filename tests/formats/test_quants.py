"""Block formats compared with the codecs of the `gguf` package, bit for bit, and with arithmetic."""

import gguf
import numpy as np
import pytest
from gguf.quants import dequantize as oracle_dequantize
from gguf.quants import quantize as oracle_quantize
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from make_blocks import random_blocks

from hotset.errors import FormatError, InvalidRequestError, UnsupportedModelError
from hotset.formats.codebooks import codebook
from hotset.formats.quants import (
    CHUNK_VALUES,
    DECODABLE,
    ENCODABLE,
    TYPES,
    GGMLType,
    dequantize,
    quantize,
    row_bytes,
)

decodable = pytest.mark.parametrize("type", sorted(DECODABLE), ids=lambda type: type.name)
encodable = pytest.mark.parametrize("type", sorted(ENCODABLE), ids=lambda type: type.name)
BLOCK_TYPES = sorted(ENCODABLE - {GGMLType.F32, GGMLType.F16, GGMLType.BF16})
LINEAR_TYPES = [type for type in BLOCK_TYPES if type != GGMLType.MXFP4]  # codes are d apart


def oracle(type: GGMLType) -> gguf.GGMLQuantizationType:
    return gguf.GGMLQuantizationType(int(type))


def expected_values(data: np.ndarray, type: GGMLType) -> np.ndarray:
    """Return the values of rows of blocks, by the gguf package or, for a type that it only lists, by bits."""
    if type != GGMLType.Q1_0:
        return oracle_dequantize(data, oracle(type))
    blocks = data.reshape(-1, 18)
    d = blocks[:, :2].copy().view("<f2").astype(np.float32)
    bits = [blocks[:, 2 + i // 8] >> (i % 8) & 1 for i in range(128)]
    return np.where(np.stack(bits, axis=1) == 1, d, -d).reshape(len(data), -1)


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    return a.shape == b.shape and np.array_equal(a.view(np.uint32), b.view(np.uint32))


def any_blocks(type: GGMLType, n_rows: int, ne0: int, seed: int) -> np.ndarray:
    """Return rows of every bit pattern, except that float16 values that are not finite are replaced."""
    data = np.random.default_rng(seed).integers(0, 256, (n_rows, row_bytes(type, ne0)), dtype=np.uint8)
    blocks = data.reshape(-1).view(TYPES[type].block)
    floats = [blocks] if blocks.dtype.names is None else [blocks[n] for n in blocks.dtype.names]
    for field in floats:
        if field.dtype.kind == "f":
            field[~np.isfinite(field)] = 0.25
    if type == GGMLType.IQ1_M:
        blocks["scales"][:, 3] &= 0xBFFF  # the highest bit of the scale's exponent
    return data


@decodable
@pytest.mark.parametrize("shape", [(256,), (512, 7), (768, 3, 5), (256, 2, 1, 3)])
def test_decoder_equals_the_gguf_package(type: GGMLType, shape: tuple[int, ...]) -> None:
    data = any_blocks(type, int(np.prod(shape[1:])), shape[0], seed=len(shape))
    with np.errstate(all="ignore"):
        expected = expected_values(data, type).reshape(shape[::-1])
    assert same_bits(dequantize(data, type, shape), expected)


@decodable
def test_decoder_crosses_its_chunks(type: GGMLType) -> None:
    n_rows = CHUNK_VALUES // 256 + 3
    data = random_blocks(type, n_rows, 256, np.random.default_rng(1))
    expected = expected_values(data, type)
    assert same_bits(dequantize(data, type, (256, n_rows)), expected)


@pytest.mark.parametrize("name", ["IQ1_S", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S"])
def test_codebooks_equal_the_gguf_packages(name: str) -> None:
    theirs = getattr(gguf.quants, name)
    theirs.init_grid()
    expected = theirs.grid[0, 0]
    values = np.array(theirs.grid_map, np.float32)
    assert np.array_equal(values[codebook(name)], expected)


@pytest.mark.parametrize("type", list(TYPES), ids=lambda type: type.name)
def test_sizes_equal_the_gguf_package(type: GGMLType) -> None:
    facts = TYPES[type]
    assert oracle(type).name == facts.name == type.name
    if (
        type == GGMLType.Q8_1
    ):  # in the package, scale and sum are float32; in block_q8_1 they have been float16 since 2023
        assert facts.block_bytes == 2 + 2 + 32
    else:
        assert gguf.GGML_QUANT_SIZES[oracle(type)] == (facts.block_size, facts.block_bytes)
    if facts.block is not None:
        assert facts.block.itemsize == facts.block_bytes
    assert row_bytes(type, 3 * facts.block_size) == 3 * facts.block_bytes


def test_known_blocks() -> None:
    """Check values computed manually from the bit diagrams, independently of any decoder."""
    half = np.array([0.5], "<f2").view(np.uint8)
    nibbles = np.arange(16, dtype=np.uint8) | np.uint8(0xF0)
    values = dequantize(np.concatenate([half, nibbles]), GGMLType.Q4_0, (32,))
    assert values.tolist() == [0.5 * (i - 8) for i in range(16)] + [3.5] * 16
    fifth = np.array([0xFF, 0x00, 0x00, 0xFF], np.uint8)  # the first and the last eight values have bit 4
    values = dequantize(np.concatenate([half, half, fifth, nibbles]), GGMLType.Q5_1, (32,))
    q = [i + 16 for i in range(8)] + list(range(8, 16)) + [15] * 8 + [31] * 8
    assert values.tolist() == [0.5 * i + 0.5 for i in q]
    k_block = np.zeros(144, np.uint8)  # Q4_K: only group 5 has a scale, 0b11_0010, and a minimum, 0b01_0011
    k_block[0:2], k_block[2:4] = half, half
    k_block[4 + 1], k_block[4 + 5], k_block[4 + 9] = 0b11_000000, 0b01_000000, 0b0011_0010
    k_block[16 + 64 : 16 + 96] = 0x70  # high nibbles of pair 2: group 5
    expected = np.zeros((8, 32))
    expected[5] = 0.5 * 50 * 7 - 0.5 * 19
    assert dequantize(k_block, GGMLType.Q4_K, (256,)).tolist() == expected.reshape(-1).tolist()


@encodable
@pytest.mark.parametrize("scale", [1.0, 1e-5, 3e3, 0.0])
def test_encoder_equals_the_gguf_package(type: GGMLType, scale: float) -> None:
    values = (np.random.default_rng(2).standard_normal((3, 37, 1280)) * scale).astype(np.float32)
    values[0, 0] = np.round(values[0, 0])  # ties
    values += 0  # -0 becomes 0: the package and GGML disagree about the sign of a zero scale
    expected = oracle_quantize(values, oracle(type)).view(np.uint8)
    assert np.array_equal(quantize(values, type), expected)


@given(
    values=arrays(np.float32, (2, 256), elements=st.floats(-1e4, 1e4, width=32, allow_subnormal=False)),
    type=st.sampled_from(sorted(ENCODABLE)),
)
def test_encoder_equals_the_gguf_package_on_any_values(values: np.ndarray, type: GGMLType) -> None:
    values = values + np.float32(0)  # -0 becomes 0
    size = TYPES[type].block_size
    expected = oracle_quantize(values, oracle(type)).view(np.uint8).reshape(512 // size, -1)
    found = quantize(values, type).reshape(512 // size, -1)
    largest = np.abs(values).reshape(-1, size).max(axis=1)
    defined = largest >= 1e-30  # 1 / scale overflows below: the package's bytes are undefined
    if type == GGMLType.MXFP4:  # its logarithm rounds up
        defined &= np.frexp(largest)[0] < 1 - 2**-17
    assert np.array_equal(found[defined], expected[defined])


@pytest.mark.parametrize("type", LINEAR_TYPES, ids=lambda type: type.name)
def test_encoding_error_is_within_a_step(type: GGMLType) -> None:
    """Check half a step d (one at the short end of the symmetric codes), and the rounding of float16."""
    values = np.random.default_rng(3).standard_normal((50, 1280)).astype(np.float32)
    encoded = quantize(values, type)
    size = TYPES[type].block_size
    d = encoded.reshape(-1).view(TYPES[type].block)["d"].astype(np.float64)
    steps = 1.0 if type in (GGMLType.Q4_0, GGMLType.Q5_0) else 0.5
    bound = np.abs(d) * steps + 2.0**-10 * np.abs(values.reshape(-1, size)).max(axis=1)
    error = np.abs(dequantize(encoded, type, (1280, 50)) - values).reshape(-1, size).max(axis=1)
    assert np.all(error <= bound)
    assert error.max() > 0


def test_mxfp4_stores_the_nearest_number_of_its_blocks_power() -> None:
    grid = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    values = np.random.default_rng(3).standard_normal((50, 320)).astype(np.float32)
    found = dequantize(quantize(values, GGMLType.MXFP4), GGMLType.MXFP4, (320, 50)).reshape(-1, 32)
    x = values.reshape(-1, 32).astype(np.float64)
    unit = 2.0 ** (np.floor(np.log2(np.abs(x).max(axis=1, keepdims=True))) - 2)
    nearest = np.abs(np.abs(x / unit)[..., None] - grid).argmin(axis=2)
    assert np.array_equal(found, np.sign(x) * grid[nearest] * unit)
    below = np.full((1, 32), np.nextafter(np.float32(8192), np.float32(0)))  # one unit below a power of two
    assert quantize(below, GGMLType.MXFP4)[0, 0] == 127 + 12 - 2


def test_bfloat16_rounds_to_even_and_keeps_nan() -> None:
    bits = np.array([0x3F808000, 0x3F818000, 0x3F808001, 0x7F800001, 0xFF800000, 0x7F7FFFFF], np.uint32)
    encoded = quantize(bits.view(np.float32), GGMLType.BF16).view(np.uint16)
    assert encoded.tolist() == [0x3F80, 0x3F82, 0x3F81, 0x7FC0, 0xFF80, 0x7F80]


def test_q8_0_rounds_only_halves_away_from_zero() -> None:
    values = np.zeros(32, np.float32)
    values[:4] = 127.0, 0.5, -0.5, np.nextafter(np.float32(0.5), np.float32(0))  # d = 1
    assert quantize(values, GGMLType.Q8_0)[2:6].view(np.int8).tolist() == [127, 1, -1, 0]


@pytest.mark.parametrize("type", BLOCK_TYPES, ids=lambda type: type.name)
def test_blocks_of_tiny_values_decode_to_almost_nothing(type: GGMLType) -> None:
    values = np.full((1, 256), 1e-44, np.float32)
    assert np.abs(dequantize(quantize(values, type), type, (256, 1))).max() <= 1e-7


@decodable
def test_random_blocks_have_the_magnitude_of_weights(type: GGMLType) -> None:
    data = random_blocks(type, 64, 512, np.random.default_rng(4))
    values = dequantize(data, type, (512, 64))
    assert data.shape == (64, row_bytes(type, 512))
    assert np.isfinite(values).all()
    assert 0.3 < np.sqrt(np.mean(values**2)) * np.sqrt(512) < 3


def test_exponents_of_mxfp4_are_powers_of_two_down_to_subnormal_ones() -> None:
    data = np.zeros((256, 17), np.uint8)
    data[:, 0], data[:, 1] = np.arange(256), 1  # the first code is 0.5
    values = dequantize(data, GGMLType.MXFP4, (32, 256)).astype(np.float64)
    assert np.array_equal(values[:, 0], 2.0 ** (np.arange(256) - 128))


def test_decoding_does_not_alias_the_file() -> None:
    data = np.zeros(16, np.uint8)
    values = dequantize(data, GGMLType.F32, (4,))
    values[:] = 1
    assert not data.any()


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 1e9])
@pytest.mark.parametrize(
    "type", sorted(ENCODABLE - {GGMLType.F32, GGMLType.BF16}), ids=lambda type: type.name
)
def test_values_without_a_finite_scale_are_refused(type: GGMLType, value: float) -> None:
    values = np.zeros((1, 256), np.float32)
    values[0, 7] = value
    if type == GGMLType.MXFP4 and np.isfinite(value):
        assert quantize(values, type)[0, 0] == 127 + 29 - 2
        return
    with pytest.raises(InvalidRequestError, match=type.name):
        quantize(values, type)


def test_mistakes_give_one_message() -> None:
    with pytest.raises(FormatError, match="row of 33 values cannot be Q4_0"):
        row_bytes(GGMLType.Q4_0, 33)
    with pytest.raises(FormatError, match="99"):
        row_bytes(GGMLType(99), 32)
    with pytest.raises(FormatError, match="takes 36 bytes"):
        dequantize(np.zeros(35, np.uint8), GGMLType.Q4_0, (32, 2))
    with pytest.raises(FormatError, match="takes 16 bytes"):
        dequantize(np.zeros(16, np.float32), GGMLType.F32, (4,))
    with pytest.raises(UnsupportedModelError, match="Q8_1"):
        dequantize(np.zeros(36, np.uint8), GGMLType.Q8_1, (32,))
    with pytest.raises(InvalidRequestError, match="choose one of F32, F16"):
        quantize(np.zeros((1, 256), np.float32), GGMLType.Q4_K)


def test_unknown_type_ids_have_a_name() -> None:
    assert GGMLType(99).name == "UNKNOWN_99"
    assert GGMLType(99) not in TYPES
    with pytest.raises(ValueError, match="-1"):
        GGMLType(-1)
