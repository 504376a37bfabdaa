"""Matrices by channel: the numbers of the file, in another order."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from make_blocks import random_blocks

from hotset.errors import UnsupportedModelError
from hotset.formats.channels import TILE, add_channels, can_be_by_channel
from hotset.formats.gguf import GGUFFile, GGUFWriter, open_gguf
from hotset.formats.planes import decode
from hotset.formats.quants import GGMLType, dequantize

T = GGMLType
N_IN, N_OUT = 96, 608  # three tiles, of which the last is narrower


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


def side_by_side(tiles: np.ndarray, n_rows: int) -> np.ndarray:
    """Tiles side by side: [n_rows, numbers of all outputs]."""
    per_output = tiles.size / n_rows / N_OUT
    widths = [int(min(TILE, N_OUT - first) * per_output) for first in range(0, N_OUT, TILE)]
    parts = np.split(tiles, np.cumsum([n_rows * width for width in widths])[:-1])
    return np.concatenate([part.reshape(n_rows, -1) for part in parts], axis=1)


@pytest.mark.parametrize("type_", [T.Q4_0, T.Q4_1, T.Q8_0], ids=lambda t: t.name)
def test_values_are_those_of_the_file(tmp_path: Path, type_: GGMLType) -> None:
    gguf = written(tmp_path, random_blocks(type_, N_OUT, N_IN, np.random.default_rng(3)), type_)
    copy = by_channel(tmp_path, gguf)
    halves = {
        n: side_by_side(copy.data(f"m_c.{n}").view(np.float16), N_IN // 32)
        for n in ("scales", "mins")
        if f"m_c.{n}" in copy.tensors
    }
    codes = side_by_side(copy.data("m_c.codes").view(np.int8), N_IN)
    found = decode(codes, halves["scales"])
    if type_ == T.Q4_1:  # no code is taken off, and a minimum is added
        scales = np.repeat(halves["scales"].astype(np.float32), 32, axis=0)
        whole = np.round(found / np.where(scales == 0, 1, scales)) + 8
        found = scales * whole + np.repeat(halves["mins"].astype(np.float32), 32, axis=0)
    expected = dequantize(gguf.data("m.weight"), type_, (N_IN, N_OUT)).reshape(N_OUT, N_IN).T
    np.testing.assert_array_equal(found, expected)


def test_a_weight_that_is_not_finite_is_refused(tmp_path: Path) -> None:
    data = random_blocks(T.Q8_0, N_OUT, N_IN, np.random.default_rng(3)).reshape(-1).copy()
    data[34:36] = (0, 0x7C)  # the scale of the second block: infinity
    with pytest.raises(UnsupportedModelError, match=r"m.weight has weights that are not finite"):
        by_channel(tmp_path, written(tmp_path, data, T.Q8_0))
    assert not (tmp_path / "channels.gguf").exists()
