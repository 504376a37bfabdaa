"""Checkpoints whose experts are in MXFP4 (gpt-oss): the same codes in GGUF's blocks, transformers' logits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers_oracle import LENGTHS, PLANS, TOLERANCE, open_backend, relative_error, run

from hotset.convert.hf import convert_hf
from hotset.errors import FormatError, UnsupportedModelError
from hotset.formats.gguf import GGUFFile, open_gguf
from hotset.formats.quants import GGMLType, dequantize

torch = pytest.importorskip("torch")
tiny_models = pytest.importorskip("tiny_models")
safetensors = pytest.importorskip("safetensors.torch")

RECIPE = tiny_models.EXPERTS["gpt-oss"]


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """Save a checkpoint; return its folder and transformers' model of it."""
    folder = tmp_path_factory.mktemp("packed")
    model = tiny_models.build(RECIPE)
    tiny_models.save_packed(RECIPE, model, folder)
    return folder, model


def converted(folder: Path, out: Path, type_: str = "f32", *rules: str) -> GGUFFile:
    convert_hf(folder, out, type_, tensor_types=rules)
    return open_gguf(out)


def values(gguf: GGUFFile, name: str) -> np.ndarray:
    info = gguf.tensors[name]
    return dequantize(gguf.data(name), info.type, info.shape).reshape(info.shape[::-1])


def test_every_value_is_transformers(packed: tuple[Path, Any], tmp_path: Path) -> None:
    folder, model = packed
    for type_ in ("f32", "q4_0"):
        gguf = converted(folder, tmp_path / f"{type_}.gguf", type_)
        for i, layer in enumerate(model.model.layers):
            experts = layer.mlp.experts
            gate_up, down = experts.gate_up_proj.detach().numpy(), experts.down_proj.detach().numpy()
            wanted = {"gate": gate_up[..., ::2], "up": gate_up[..., 1::2], "down": down}
            for name, expected in wanted.items():
                tensor = f"blk.{i}.ffn_{name}_exps.weight"
                assert gguf.tensors[tensor].type == GGMLType.MXFP4
                np.testing.assert_array_equal(values(gguf, tensor), expected.swapaxes(1, 2))
        assert gguf.tensors["blk.0.attn_q.weight"].type == GGMLType[type_.upper()]


@pytest.mark.parametrize("plan", ["prefill", "mixed"])
def test_logits_match_transformers(packed: tuple[Path, Any], tmp_path: Path, plan: str) -> None:
    """Compare the reference backend, which decodes MXFP4, and the CPU backend on the same values in F32."""
    folder, model = packed
    rng = np.random.default_rng(0)
    sequences = [rng.integers(0, tiny_models.VOCABULARY, n) for n in LENGTHS]
    with torch.no_grad():
        expected = [model(torch.tensor(s)[None]).logits[0].numpy() for s in sequences]
    for name, rules in (("reference", ()), ("cpu", ("_exps=f32",))):
        with converted(folder, tmp_path / f"{name}.gguf", "f32", *rules) as gguf:
            backend = open_backend(name, gguf)
            found = run(backend, sequences, PLANS[plan])
            backend.close()
        for i in range(len(sequences)):
            assert relative_error(found[i], expected[i]) < TOLERANCE


def test_a_rule_decodes_them(packed: tuple[Path, Any], tmp_path: Path) -> None:
    plain = converted(packed[0], tmp_path / "plain.gguf")
    other = converted(packed[0], tmp_path / "other.gguf", "f32", "ffn_down_exps=f16", "ffn_up_exps=q8_0")
    down, up, gate = (f"blk.1.ffn_{name}_exps.weight" for name in ("down", "up", "gate"))
    assert [other.tensors[n].type for n in (down, up, gate)] == [GGMLType.F16, GGMLType.Q8_0, GGMLType.MXFP4]
    np.testing.assert_array_equal(values(other, down), values(plain, down))
    np.testing.assert_array_equal(other.data(gate), plain.data(gate))
    difference = np.abs(values(other, up) - values(plain, up))
    assert 0 < difference.max() < np.abs(values(plain, up)).max() / 200


def test_damaged_input_is_refused(packed: tuple[Path, Any], tmp_path: Path) -> None:
    folder = packed[0]
    tensors = safetensors.load_file(folder / "model.safetensors")
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_text((folder / name).read_text())
    stem = "model.layers.1.mlp.experts.down_proj"
    blocks, scales = tensors[f"{stem}_blocks"], tensors[f"{stem}_scales"]
    for change, message in (
        ({f"{stem}_scales": None}, r"blk\.1\.ffn_down_exps in MXFP4 and only its blocks"),
        (
            {f"{stem}_scales": scales[:, :-1].clone()},
            r"in MXFP4 are \[5, 96, 5, 16\] and \[5, 95, 5\]",
        ),
        ({f"{stem}_blocks": blocks[..., :8].clone()}, "down_proj in MXFP4 are"),
        (
            {f"{stem}_blocks": blocks[0].clone(), f"{stem}_scales": scales[0].clone()},
            "down_proj in MXFP4 are",
        ),
        ({f"{stem}_scales": scales[0, 0, :1].clone()}, "down_proj in MXFP4 are"),
        ({stem: torch.zeros(5, 160, 96)}, r"ffn_down_exps\.weight twice"),
        ({f"{stem}_blocks": blocks.float()}, "is F32, which is not supported"),
        ({"model.norm.weight": torch.zeros(96, dtype=torch.uint8)}, "is U8, which is not supported"),
    ):
        changed = {k: v for k, v in (tensors | change).items() if v is not None}
        safetensors.save_file(changed, tmp_path / "model.safetensors")
        with pytest.raises((FormatError, UnsupportedModelError), match=message):
            convert_hf(tmp_path, tmp_path / "m.gguf", "f32")
    config = json.loads((folder / "config.json").read_text())
    for entry in ({"quant_method": "gptq"}, {}, "mxfp4", None):
        (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": entry}))
        safetensors.save_file(tensors, tmp_path / "model.safetensors")
        if entry is None:  # like a missing entry
            convert_hf(tmp_path, tmp_path / "m.gguf", "f32")
            continue
        with pytest.raises(UnsupportedModelError, match="is quantised"):
            convert_hf(tmp_path, tmp_path / "m.gguf", "f32")
