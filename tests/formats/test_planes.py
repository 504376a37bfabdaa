"""The neuron-major down matrix: every value is bitwise the same as in the file."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from make_blocks import random_blocks

from hotset.formats import planes
from hotset.formats.gguf import GGUFWriter, TensorInfo, open_gguf
from hotset.formats.quants import GGMLType, dequantize

SHAPES = [(32, 32), (96, 64), (1376, 160), (64, 576)]  # (n_ff, n_embd)


def same_bits(one: np.ndarray, other: np.ndarray) -> bool:
    return one.shape == other.shape and np.array_equal(one.view(np.uint32), other.view(np.uint32))


@pytest.mark.parametrize("type_", [GGMLType.Q4_0, GGMLType.Q8_0])
@pytest.mark.parametrize("shape", SHAPES)
def test_planes_hold_the_values_of_the_matrix(type_: GGMLType, shape: tuple[int, int]) -> None:
    n_ff, n_embd = shape
    data = random_blocks(type_, n_embd, n_ff, np.random.default_rng(n_ff))
    data = np.ascontiguousarray(data).reshape(-1).view(np.uint8)
    codes, scales = planes.codes_of(data, type_, shape), planes.scales_of(data, type_, shape)
    assert codes.dtype == np.int8
    assert codes.shape == (n_ff, n_embd // 2 if type_ == GGMLType.Q4_0 else n_embd)
    assert scales.dtype == np.float16
    assert scales.shape == (n_ff // 32, n_embd)
    expected = np.ascontiguousarray(dequantize(data, type_, shape).T)
    assert same_bits(planes.decode(codes, scales), expected)


def test_a_neuron_is_packed_as_a_q4_0_row() -> None:
    """Check that the codes of neuron i are, nibble for nibble, the same as in a Q4_0 row of its outputs."""
    n_ff, n_embd = 64, 96
    data = random_blocks(GGMLType.Q4_0, n_embd, n_ff, np.random.default_rng(3)).reshape(-1).view(np.uint8)
    codes = planes.codes_of(data, GGMLType.Q4_0, (n_ff, n_embd)).view(np.uint8)
    blocks = data.reshape(n_embd, n_ff // 32, 18)
    for neuron, output in [(0, 0), (17, 5), (33, 95), (63, 48)]:
        byte = blocks[output, neuron // 32, 2 + neuron % 16]
        expected = byte >> 4 if neuron % 32 >= 16 else byte & 15
        found = codes[neuron, output // 32 * 16 + output % 16]
        assert (found >> 4 if output % 32 >= 16 else found & 15) == expected


@pytest.mark.parametrize("type_", [GGMLType.F32, GGMLType.F16, GGMLType.BF16])
def test_float_matrices_are_transposed(type_: GGMLType, tmp_path: Path) -> None:
    n_ff, n_embd = 200, 72
    values = np.random.default_rng(5).standard_normal((n_embd, n_ff)).astype(np.float32)
    writer = GGUFWriter(tmp_path / "model.gguf", "llama")
    writer.add_tensor("blk.0.ffn_down.weight", values, type_)
    writer.write()
    with open_gguf(tmp_path / "model.gguf") as model:
        writer = GGUFWriter(tmp_path / "down.gguf", "hotset")
        planes.add_down(writer, model, "blk.0.ffn_down")
        writer.write()
        expected = dequantize(model.data("blk.0.ffn_down.weight"), type_, (n_ff, n_embd)).T
    with open_gguf(tmp_path / "down.gguf") as down:
        info = down.tensors["blk.0.ffn_down_t.weight"]
        assert (info.type, info.shape) == (type_, (n_embd, n_ff))
        found = dequantize(down.data(info.name), info.type, info.shape)
    assert same_bits(found, np.ascontiguousarray(expected))


def test_types_whose_values_would_change_have_no_layout() -> None:
    def info(type_: GGMLType, n_ff: int, n_embd: int) -> TensorInfo:
        return TensorInfo("blk.0.ffn_down.weight", (n_ff, n_embd), type_, 0, 0)

    assert planes.layout_of(info(GGMLType.Q4_0, 64, 64)) == "planes"
    assert planes.layout_of(info(GGMLType.Q8_0, 64, 64)) == "planes"
    assert planes.layout_of(info(GGMLType.BF16, 3, 5)) == "transposed"
    for type_ in (GGMLType.Q4_0, GGMLType.Q8_0):  # the kernels of planes take 32 outputs at a time
        assert planes.layout_of(info(type_, 64, 40)) is None
    assert planes.layout_of(info(GGMLType.Q4_K, 256, 64)) is None
    assert planes.layout_of(info(GGMLType.Q4_1, 64, 64)) is None
