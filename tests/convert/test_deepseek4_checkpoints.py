"""DeepSeek V4 as published, in FP8 and FP4: the same weights in float32 give the same files."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import EXPERTS, FP8_FP4, Tensors, build, published_fp8_fp4, save

from hotset.convert import fp8
from hotset.convert.hf import convert_hf
from hotset.errors import FormatError, UnsupportedModelError
from hotset.formats.gguf import open_gguf
from hotset.formats.quants import GGMLType, dequantize

FP8 = "layers.1.attn.wq_b"
FP4 = "layers.2.ffn.experts.3.w2"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Tensors]:
    """Save a checkpoint; return its folder and its tensors in float32."""
    folder = tmp_path_factory.mktemp("published")
    recipe = EXPERTS["deepseek4-published"]
    save(recipe, build(recipe), folder)
    return folder, load_file(folder / "model.safetensors")


def write(checkpoint: tuple[Path, Tensors], folder: Path, tensors: Tensors, block: list[int]) -> Path:
    """Write a folder like the checkpoint's, with other tensors."""
    into = folder / "model"
    into.mkdir(exist_ok=True)
    for path in checkpoint[0].glob("*.json"):
        (into / path.name).write_text(path.read_text())
    config = json.loads((into / "config.json").read_text())
    config |= FP8_FP4
    config["quantization_config"] = config["quantization_config"] | {"weight_block_size": block}
    (into / "config.json").write_text(json.dumps(config))
    save_file(tensors, into / "model.safetensors")
    return into


def test_powers_are_torchs() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    assert np.array_equal(fp8.POWERS, codes.view(torch.float8_e8m0fnu).float().numpy(), equal_nan=True)


@pytest.mark.parametrize("block", [[128, 128], [16, 32]])
def test_file_equals_the_values(checkpoint: tuple[Path, Tensors], tmp_path: Path, block: list[int]) -> None:
    packed, plain = published_fp8_fp4(checkpoint[1], block)
    kinds = {name: values.dtype for name, values in packed.items()}
    assert kinds[f"{FP8}.weight"] == torch.float8_e4m3fn
    assert kinds[f"{FP4}.weight"] == torch.int8
    assert kinds[f"{FP8}.scale"] == kinds[f"{FP4}.scale"] == torch.float8_e8m0fnu
    packed["mtp.0.e_proj.weight"], packed["mtp.0.e_proj.scale"] = (  # which the file leaves out
        packed[f"{FP8}.{kind}"].clone() for kind in ("weight", "scale")
    )
    decoded, stays = tmp_path / "decoded.gguf", tmp_path / "stays.gguf"
    folder = write(checkpoint, tmp_path, packed, block)
    convert_hf(folder, decoded, "f32", tensor_types=["_exps=f32"])
    convert_hf(folder, stays, "f32")
    convert_hf(write(checkpoint, tmp_path, plain, block), tmp_path / "plain.gguf", "f32")
    assert decoded.read_bytes() == (tmp_path / "plain.gguf").read_bytes()
    with open_gguf(decoded) as one, open_gguf(stays) as other:
        assert one.tensors.keys() == other.tensors.keys()
        for name, info in other.tensors.items():
            if "_exps." not in name:
                assert info.type == one.tensors[name].type
                np.testing.assert_array_equal(other.data(name), one.data(name))
                continue
            assert info.type == GGMLType.MXFP4
            values = dequantize(other.data(name), info.type, info.shape).reshape(-1)
            np.testing.assert_array_equal(values, one.data(name).view(np.float32))


def test_oversized_input_is_refused(checkpoint: tuple[Path, Tensors], tmp_path: Path) -> None:
    fine = published_fp8_fp4(checkpoint[1], [16, 32])[0]
    codes, scale = fine[f"{FP4}.weight"], fine[f"{FP4}.scale"]
    of_blocks = fine[f"{FP8}.scale"]
    one = of_blocks[:1, :1].clone()
    for changed, message in (
        (
            {f"{FP4}.scale": scale[:, :1].clone()},
            rf"{FP4}.weight in FP4 is \[96, 80\] and its scales \[96, 1",
        ),
        ({f"{FP4}.scale": scale[:-1].clone()}, "in FP4 is .* each 16 bytes of a row have one"),
        ({f"{FP4}.scale": scale[0].clone()}, "in FP4 is"),
        ({f"{FP4}.scale": scale[0, 0].clone()}, "in FP4 is"),
        ({f"{FP4}.weight": codes[0].clone()}, "in FP4 is"),
        ({f"{FP4}.scale": None}, f"{FP4}.weight is I8 without a scale in F8_E8M0"),
        ({f"{FP4}.scale": scale.float()}, "is I8 without a scale in F8_E8M0"),
        (
            {f"{FP4}.weight": codes[:, :16].clone(), f"{FP4}.scale": scale[:, :1].clone()},
            r"blk\.2\.ffn_down_exps\.weight have shapes that differ",
        ),
        (
            {f"{FP4}.weight": torch.zeros(96, 160), f"{FP4}.scale": None},
            "has 7 of the 8 experts of blk.2.ffn_down_exps.weight in FP4",
        ),
        ({f"{FP4}.weight": torch.zeros(96, 160)}, f"{FP4}.scale is F8_E8M0 and no scale of one"),
        (
            {f"{FP8}.scale": one},
            rf"{FP8}.weight is \[128, 28\] and its scales \[1, 1\], for blocks of 16 by 32",
        ),
        ({f"{FP8}.scale": one.repeat(128, 1)}, "for blocks of 16 by 32"),
        ({f"{FP8}.weight": fine[f"{FP8}.weight"].float()}, f"{FP8}.scale is F8_E8M0 and no scale"),
        (
            {"layers.1.attn_norm.weight": of_blocks.clone()},
            "attn_norm.weight in .* is F8_E8M0, which is not supported",
        ),
        ({f"{FP8}.weight": torch.zeros(128, 28, dtype=torch.int8)}, "wq_b.weight in .* is I8, which is not"),
    ):
        tensors = {name: values for name, values in (fine | changed).items() if values is not None}
        folder = write(checkpoint, tmp_path, tensors, [16, 32])
        with pytest.raises((FormatError, UnsupportedModelError), match=message):
            convert_hf(folder, tmp_path / "m.gguf", "f32")
        assert not (tmp_path / "m.gguf").exists()
