"""Matrices by channel: the numbers of the file, in another order."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from make_blocks import random_blocks

from hotset.errors import UnsupportedModelError
from hotset.formats.channels import add_channels, can_be_by_channel, tile_of
from hotset.formats.gguf import GGUFFile, GGUFWriter, open_gguf
from hotset.formats.quants import GGMLType, dequantize

T = GGMLType
N_IN, N_OUT = 64, 4288  # tiles of which the last is narrower


def written(folder: Path, data: np.ndarray, type_: GGMLType) -> GGUFFile:
    writer = GGUFWriter(folder / "matrix.gguf", "hotset")
    writer.add_tensor("m.weight", data, type_, (N_IN, N_OUT))
    writer.write()
    return open_gguf(folder / "matrix.gguf")


def by_channel(folder: Path, gguf: GGUFFile) -> GGUFFile:
    writer = GGUFWriter(folder / "channels.gguf", "hotset")
    assert can_be_by_channel(gguf.tensors["m.weight"])
    add_channels(writer, gguf, "m.weight")
    writer.write()
    return open_gguf(folder / "channels.gguf")


def values_of(blocks: np.ndarray, type_: GGMLType) -> np.ndarray:
    """What a copy's bytes say, float32 [n_in, n_out], number by number."""
    out = np.empty((N_IN, N_OUT), np.float32)
    n_heads, step, at = 2 if type_ == T.Q4_1 else 1, tile_of(N_OUT), 0
    for first in range(0, N_OUT, step):
        width = min(step, N_OUT - first)
        for group in range(N_IN // 32):
            heads = blocks[at : at + 2 * n_heads * width].view(np.float16).reshape(n_heads, width)
            at += 2 * n_heads * width
            for channel in range(group * 32, group * 32 + 32):
                codes = blocks[at : at + (width if type_ == T.Q8_0 else width // 2)]
                at += len(codes)
                if type_ == T.Q8_0:
                    numbers = codes.view(np.int8).astype(np.float32)
                else:
                    nibbles = codes.reshape(-1, 16)
                    numbers = np.stack([nibbles & 15, nibbles >> 4], axis=1).reshape(-1).astype(np.float32)
                if type_ == T.Q4_0:
                    numbers -= 8
                values = heads[0].astype(np.float32) * numbers
                values = values + heads[1].astype(np.float32) if type_ == T.Q4_1 else values
                out[channel, first : first + width] = values
    assert at == len(blocks)
    return out


@pytest.mark.parametrize("type_", [T.Q4_0, T.Q4_1, T.Q8_0], ids=lambda t: t.name)
def test_values_are_those_of_the_file(tmp_path: Path, type_: GGMLType) -> None:
    gguf = written(tmp_path, random_blocks(type_, N_OUT, N_IN, np.random.default_rng(3)), type_)
    found = values_of(by_channel(tmp_path, gguf).data("m_c.blocks").view(np.uint8).reshape(-1), type_)
    expected = dequantize(gguf.data("m.weight"), type_, (N_IN, N_OUT)).reshape(N_OUT, N_IN).T
    np.testing.assert_array_equal(found, expected)


def test_a_weight_that_is_not_finite_is_refused(tmp_path: Path) -> None:
    data = random_blocks(T.Q8_0, N_OUT, N_IN, np.random.default_rng(3)).reshape(-1).copy()
    data[34:36] = (0, 0x7C)  # the scale of the second block: infinity
    with pytest.raises(UnsupportedModelError, match=r"m.weight has weights that are not finite"):
        by_channel(tmp_path, written(tmp_path, data, T.Q8_0))
    assert not (tmp_path / "channels.gguf").exists()
