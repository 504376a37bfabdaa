"""Text models inside checkpoints of models that see and hear."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tiny_models import RECIPES, build, save

from hotset.convert.hf import convert_hf


def test_published_text_model_of_gemma_3n(tmp_path: Path) -> None:
    """A part of a model that sees and hears: settings in text_config, names below model.language_model."""
    folder = tmp_path / "model"
    folder.mkdir()
    save(RECIPES["gemma3n"], build(RECIPES["gemma3n"]), folder)
    convert_hf(folder, tmp_path / "text.gguf", "f32")
    tensors = load_file(folder / "model.safetensors")
    inside = {name.replace("model.", "model.language_model.", 1): values for name, values in tensors.items()}
    for name in ("vision_tower.timm_model.conv", "audio_tower.conv", "embed_vision.norm", "embed_audio.norm"):
        inside[f"model.{name}.weight"] = torch.ones(4)
    save_file(inside, folder / "model.safetensors")
    text = json.loads((folder / "config.json").read_text())
    config = {"architectures": ["Gemma3nForConditionalGeneration"], "text_config": text, "audio_config": {}}
    (folder / "config.json").write_text(json.dumps(config))
    convert_hf(folder, tmp_path / "whole.gguf", "f32")
    assert (tmp_path / "whole.gguf").read_bytes() == (tmp_path / "text.gguf").read_bytes()
