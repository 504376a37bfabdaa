"""Checkpoints in FP8 give, byte for byte, the same files as the same weights in float32."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import EXPERTS, RECIPES, build, save

from hotset.convert import fp8
from hotset.convert.hf import convert_hf
from hotset.errors import FormatError, UnsupportedModelError

Tensors = dict[str, torch.Tensor]
BLOCKS = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [16, 32]}
ROWS = {"quant_method": "compressed-tensors", "format": "float-quantized"}
MODELOPT = {"quant_method": "modelopt", "quant_algo": "FP8"}


def in_blocks(matrix: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return codes, a scale for each 16 rows and 32 columns, and the values."""
    shape = matrix.shape
    n_rows, n_columns = -(-shape[0] // 16), -(-shape[1] // 32)
    padded = torch.zeros(n_rows * 16, n_columns * 32)
    padded[: shape[0], : shape[1]] = matrix
    blocks = padded.reshape(n_rows, 16, n_columns, 32)
    scale = (blocks.abs().amax(dim=(1, 3)) / 448).clamp(min=1e-6)
    codes = (blocks / scale[:, None, :, None]).to(torch.float8_e4m3fn)
    values = (codes.float() * scale[:, None, :, None]).reshape(padded.shape)[: shape[0], : shape[1]]
    return codes.reshape(padded.shape)[: shape[0], : shape[1]].contiguous(), scale, values.contiguous()


def under(matrix: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    codes = (matrix / scale).to(torch.float8_e4m3fn)
    return codes, scale, codes.float() * scale


def of_rows(matrix: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return under(matrix, matrix.abs().amax(dim=1, keepdim=True) / 448)


def of_all(matrix: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    codes, scale, values = under(matrix, matrix.abs().max() / 448)
    return codes, scale.reshape(()), values


def write(folder: Path, tensors: Tensors, quantised: dict[str, Any] | None = None) -> None:
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    config.pop("quantization_config", None)
    entry = {} if quantised is None else {"quantization_config": quantised}
    (folder / "config.json").write_text(json.dumps(config | entry))


def checkpoint(folder: Path, name: str) -> Tensors:
    recipe = (RECIPES | EXPERTS)[name]
    folder.mkdir()
    save(recipe, build(recipe), folder)
    return load_file(folder / "model.safetensors")


def test_codes_are_torchs() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    assert np.array_equal(fp8.VALUES, codes.view(torch.float8_e4m3fn).float().numpy(), equal_nan=True)


@pytest.mark.parametrize(
    ("name", "quantised", "made", "kind"),
    [
        ("llama", BLOCKS, in_blocks, "weight_scale_inv"),  # the converter permutes rows of q and k
        ("llama", ROWS, of_rows, "weight_scale"),
        ("llama", MODELOPT, of_all, "weight_scale"),
        ("phi3", ROWS, of_rows, "weight_scale"),  # q, k and v lie in one matrix
        ("qwen3moe", BLOCKS, in_blocks, "weight_scale_inv"),
        ("deepseek2-v3", BLOCKS, in_blocks, "weight_scale_inv"),  # keys and values of a latent vector
    ],
)
def test_file_equals_the_values(
    name: str, quantised: dict[str, Any], made: Any, kind: str, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    tensors = checkpoint(folder, name)
    plain, packed = dict(tensors), dict(tensors)
    for key, values in tensors.items():
        if values.ndim == 2 and "layers." in key and "mlp.gate.weight" not in key:
            stem = key.removesuffix(".weight")
            packed[key], packed[f"{stem}.{kind}"], plain[key] = made(values.float())
            packed[f"{stem}.input_scale"] = torch.ones(1)
    write(folder, plain)
    convert_hf(folder, tmp_path / "plain.gguf", "f32")
    write(folder, packed, quantised)
    convert_hf(folder, tmp_path / "packed.gguf", "f32")
    assert (tmp_path / "packed.gguf").read_bytes() == (tmp_path / "plain.gguf").read_bytes()


def test_what_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    tensors = checkpoint(folder, "llama")
    stem = "model.layers.1.mlp.up_proj"
    codes, scale, _ = in_blocks(tensors[f"{stem}.weight"])
    fine = tensors | {f"{stem}.weight": codes, f"{stem}.weight_scale_inv": scale}
    write(folder, fine, BLOCKS)
    convert_hf(folder, tmp_path / "m.gguf", "f32")
    for changed, message in (
        ({f"{stem}.weight_scale_inv": None}, "up_proj.weight is FP8 .* without a weight_scale"),
        ({f"{stem}.weight_scale_inv": scale[:-1].contiguous()}, r"scales \[.*blocks of 16 by 32"),
        ({f"{stem}.weight": codes[0].clone()}, "FP8 in 1 dimensions"),
        ({f"{stem}.weight_scale_inv": scale * np.nan}, "NaN"),
    ):
        write(folder, {k: v for k, v in (fine | changed).items() if v is not None}, BLOCKS)
        with pytest.raises((FormatError, UnsupportedModelError, Exception), match=message):
            convert_hf(folder, tmp_path / "m.gguf", "q8_0")
    for quantised in ({"quant_method": "fp8", "fmt": "e5m2"}, {**ROWS, "format": "pack-quantized"}):
        write(folder, fine, quantised)
        with pytest.raises(UnsupportedModelError, match="is quantised"):
            convert_hf(folder, tmp_path / "m.gguf", "f32")
    write(folder, fine, {**BLOCKS, "weight_block_size": [0, 32]})
    with pytest.raises(FormatError, match="two whole numbers"):
        convert_hf(folder, tmp_path / "m.gguf", "f32")
    shutil.rmtree(folder)


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("rwkv6", "rwkv.blocks.0.attention.time_decay_w1"),
        ("rwkv7", "model.layers.0.attn.r_k"),
        ("qwen3next", "model.layers.0.mlp.shared_expert_gate.weight"),
    ],
)
def test_matrices_missing_in_the_file_are_refused(tmp_path: Path, name: str, tensor: str) -> None:
    tensors = checkpoint(tmp_path / "hf", name)
    codes, scale, _ = of_all(tensors.pop(tensor))
    scale_name = f"{tensor.removesuffix('.weight')}.weight_scale"
    write(tmp_path / "hf", tensors | {tensor: codes, scale_name: scale})
    with pytest.raises(UnsupportedModelError, match=f"the tensor {tensor} is FP8"):
        convert_hf(tmp_path / "hf", tmp_path / "m.gguf", "f32")
    assert not (tmp_path / "m.gguf").exists()


@pytest.mark.parametrize("block", [[10**30, 1], [0, 1], [1], "x" * 500, [True, 1]])
def test_blocks_are_two_small_numbers(block: Any) -> None:
    with pytest.raises(FormatError, match="two whole numbers are needed") as caught:
        fp8.block_of({"quant_method": "fp8", "weight_block_size": block})
    assert len(str(caught.value)) < 200
