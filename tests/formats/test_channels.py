"""Input-major matrices: the numbers of the file in another order."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from make_blocks import random_blocks

from hotset.errors import UnsupportedModelError
from hotset.formats.channels import add_channels, can_be_input_major, copy_bytes, tile_of
from hotset.formats.gguf import GGUFFile, GGUFWriter, open_gguf
from hotset.formats.quants import TYPES, GGMLType, dequantize

T = GGMLType
N_OUT = 4288  # several tiles, of which the last is narrower
PLAIN = (T.Q4_0, T.Q4_1, T.Q8_0)
K_QUANTS = (T.Q4_K, T.Q5_K, T.Q6_K)


def n_in(type_: GGMLType) -> int:
    return 512 if type_ in K_QUANTS else 64


def matrix(type_: GGMLType) -> np.ndarray:
    return random_blocks(type_, N_OUT, n_in(type_), np.random.default_rng(3))


def written(folder: Path, data: np.ndarray, type_: GGMLType) -> GGUFFile:
    writer = GGUFWriter(folder / "matrix.gguf", "hotset")
    writer.add_tensor("m.weight", data, type_, (n_in(type_), N_OUT))
    writer.write()
    return open_gguf(folder / "matrix.gguf")


def input_major(folder: Path, gguf: GGUFFile) -> GGUFFile:
    writer = GGUFWriter(folder / "channels.gguf", "hotset")
    assert can_be_input_major(gguf.tensors["m.weight"])
    add_channels(writer, gguf, "m.weight")
    writer.write()
    return open_gguf(folder / "channels.gguf")


class Reader:
    """A reader that takes bytes from the front."""

    def __init__(self, data: np.ndarray) -> None:
        self.data, self.at = data, 0

    def take(self, n: int, dtype: type = np.uint8) -> np.ndarray:
        n_bytes = n * np.dtype(dtype).itemsize
        self.at += n_bytes
        return self.data[self.at - n_bytes : self.at].view(dtype)


def codes_of(reader: Reader, type_: GGMLType, width: int) -> np.ndarray:
    """Return the values of one channel, [width]."""
    if type_ == T.Q8_0:
        return reader.take(width, np.int8).astype(np.int32)
    nibbles = reader.take(width // 2).reshape(-1, 16)
    codes = np.stack([nibbles & 15, nibbles >> 4], axis=1).reshape(-1).astype(np.int32)
    if type_ == T.Q5_K:
        bits = np.unpackbits(reader.take(width // 8).reshape(-1, 1, 4), axis=1, bitorder="little")
        return codes + 16 * bits.reshape(-1)  # [32 outputs, bit, byte]
    if type_ == T.Q6_K:
        planes = np.stack([reader.take(width // 8).reshape(-1, 4) for _ in range(2)], axis=1)
        high = np.stack([planes >> 2 * i & 3 for i in range(4)], axis=2)  # [32 outputs, plane, i, byte]
        return codes + 16 * high.reshape(-1) - 32
    return codes - (8 if type_ == T.Q4_0 else 0)


def values_of(data: np.ndarray, type_: GGMLType) -> np.ndarray:
    """Decode a copy number by number, float32 [n_in, n_out]."""
    out = np.empty((n_in(type_), N_OUT), np.float32)
    step, reader = tile_of(N_OUT), Reader(data)
    of_all = np.ones((2, 1), np.float32)
    for first in range(0, N_OUT, step):
        width = min(step, N_OUT - first)
        for group in range(n_in(type_) // 32):
            if type_ in K_QUANTS and group % 8 == 0:
                n_heads = 1 if type_ == T.Q6_K else 2
                of_all = reader.take(n_heads * width, np.float16).reshape(n_heads, width).astype(np.float32)
            if type_ in K_QUANTS:
                heads = reader.take(2 * width, np.int8).reshape(2, width).astype(np.float32)
            else:
                n_heads = 2 if type_ == T.Q4_1 else 1
                heads = reader.take(n_heads * width, np.float16).reshape(n_heads, width).astype(np.float32)
            for channel in range(32):
                numbers = codes_of(reader, type_, width).astype(np.float32)
                if type_ == T.Q6_K:
                    values = of_all[0] * heads[channel // 16] * numbers
                elif type_ in K_QUANTS:
                    values = of_all[0] * heads[0] * numbers - of_all[1] * heads[1]
                else:
                    values = heads[0] * numbers + (heads[1] if type_ == T.Q4_1 else 0)
                out[32 * group + channel, first : first + width] = values
    assert reader.at == len(data)
    return out


@pytest.mark.parametrize("type_", [*PLAIN, *K_QUANTS], ids=lambda t: t.name)
def test_values_equal_the_file(tmp_path: Path, type_: GGMLType) -> None:
    gguf = written(tmp_path, matrix(type_), type_)
    copy = input_major(tmp_path, gguf).data("m_c.blocks").view(np.uint8).reshape(-1)
    expected = dequantize(gguf.data("m.weight"), type_, (n_in(type_), N_OUT)).reshape(N_OUT, -1).T
    np.testing.assert_array_equal(values_of(copy, type_), expected)
    assert len(copy) == sum(copy_bytes(gguf.tensors["m.weight"]))


@pytest.mark.parametrize("type_", PLAIN, ids=lambda t: t.name)
def test_a_copy_has_the_bytes_of_its_rows(tmp_path: Path, type_: GGMLType) -> None:
    info = written(tmp_path, matrix(type_), type_).tensors["m.weight"]
    assert sum(copy_bytes(info)) == info.nbytes


def test_a_weight_that_is_not_finite_is_refused(tmp_path: Path) -> None:
    data = matrix(T.Q8_0).reshape(-1).copy()
    data[34:36] = (0, 0x7C)  # the scale of the second block: infinity
    with pytest.raises(UnsupportedModelError, match=r"m.weight has weights that are not finite"):
        input_major(tmp_path, written(tmp_path, data, T.Q8_0))
    assert not (tmp_path / "channels.gguf").exists()


@pytest.mark.parametrize("field", ["d", "dmin"])
def test_so_is_one_of_a_k_quant(tmp_path: Path, field: str) -> None:
    data = matrix(T.Q4_K).reshape(-1).copy()
    data.view(TYPES[T.Q4_K].block)[field][1] = np.nan
    with pytest.raises(UnsupportedModelError, match=r"m.weight has weights that are not finite"):
        input_major(tmp_path, written(tmp_path, data, T.Q4_K))
