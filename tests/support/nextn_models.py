"""Tiny models with a layer for multi-token prediction, made from the model's last layer."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tiny_models
import torch
from made_once import made_once

from hotset.convert.hf import convert_hf
from hotset.formats.gguf import GGUFFile, GGUFWriter, copy_metadata, open_gguf
from hotset.formats.quants import GGMLType

D = tiny_models.SHAPE["hidden_size"]
ALTERNATING = {"layer_types": ["linear_attention", "full_attention"] * 2}
# Recipe → settings, and whether the checkpoint stores norms minus one.
MODELS: dict[str, tuple[dict[str, Any], bool]] = {
    "glm4moe": ({"num_hidden_layers": 3}, False),
    "deepseek2-v3": ({"num_hidden_layers": 3}, False),
    "qwen3next": (ALTERNATING, True),
    "qwen35": (ALTERNATING, True),
    "qwen35moe": (ALTERNATING, True),
}
NEMOTRON = "nemotron-h-moe-latent"
_ADDED = re.compile(r".*\b(o_proj|out_proj|down_proj|fc2_latent_proj)\b.*")  # added to the residual stream


@dataclass
class Nextn:
    """A file with such a layer, the transformers model of only this layer, and the tensors around it."""

    gguf: GGUFFile
    model: Any
    around: dict[str, np.ndarray]
    embedding: np.ndarray


def with_nextn(path: Path, out: Path, around: dict[str, np.ndarray]) -> Path:
    """Write the file with its last layer changed to one for multi-token prediction."""
    with open_gguf(path) as gguf:
        writer, name = GGUFWriter(out, gguf.architecture), gguf.architecture
        copy_metadata(gguf, writer)
        writer.add(f"{name}.nextn_predict_layers", 1)
        for info in gguf.tensors.values():
            writer.add_tensor(info.name, gguf.data(info.name), info.type, info.shape)
        last = int(gguf.metadata[f"{name}.block_count"]) - 1
        for stem, values in around.items():
            data = np.ascontiguousarray(values).view(np.uint8).reshape(-1)
            writer.add_tensor(f"blk.{last}.nextn.{stem}.weight", data, GGMLType.F32, values.shape[::-1])
        writer.write()
    return out


def drawn(*norms: str) -> dict[str, np.ndarray]:
    """Return random norms, and the projection of both inputs."""
    draw = np.random.default_rng(1).standard_normal
    around = {stem: (1 + 0.3 * draw(D)).astype(np.float32) for stem in norms}
    return around | {"eh_proj": (draw((D, 2 * D)) / (2 * D) ** 0.5).astype(np.float32)}


def made(folder: Path, name: str, *, own_matrices: bool) -> Nextn:
    settings, less_one = MODELS[name]
    recipe = (tiny_models.RECIPES | tiny_models.EXPERTS)[name]
    model = tiny_models.build(recipe, **settings)
    around = drawn("enorm", "hnorm", "shared_head_norm")
    if own_matrices:
        shape, draw = (tiny_models.VOCABULARY, D), np.random.default_rng(2).standard_normal
        around |= {stem: draw(shape).astype(np.float32) for stem in ("embed_tokens", "shared_head_head")}
    with_nextn(tiny_models.to_gguf(recipe, model, folder), folder / "nextn.gguf", around)
    embedding = model.model.embed_tokens.weight.detach().numpy()
    model.model.layers = model.model.layers[-1:]
    model.config.num_hidden_layers = model.model.config.num_hidden_layers = 1
    if hasattr(model.config, "layer_types"):
        model.config.layer_types = model.model.config.layer_types = ["full_attention"]
    with torch.no_grad():
        model.model.norm.weight.copy_(torch.from_numpy(around["shared_head_norm"] - np.float32(less_one)))
        if own_matrices:
            model.lm_head.weight.copy_(torch.from_numpy(around["shared_head_head"]))
            embedding = around["embed_tokens"]
    return Nextn(open_gguf(folder / "nextn.gguf"), model, around, embedding)


def write_agreeing(folder: Path, name: str) -> Path:
    """Write a file whose extra layer often agrees with the model: in both the latest token dominates."""
    if name == NEMOTRON:
        return _nemotron(folder, _quiet(_nemotron_model()), agreeing)
    settings, less_one = MODELS[name]
    recipe = (tiny_models.RECIPES | tiny_models.EXPERTS)[name]
    model = _quiet(tiny_models.build(recipe, **settings, tie_word_embeddings=False))
    norm = model.model.norm.weight.detach().numpy() + np.float32(less_one)
    path = tiny_models.to_gguf(recipe, model, folder)
    around = agreeing(drawn("enorm", "hnorm", "shared_head_norm"), "shared_head_norm", norm)
    return with_nextn(path, folder / "nextn.gguf", around)


def kept_agreeing(folder: Path, name: str) -> Path:
    """Return the file of `write_agreeing` in a folder for a whole run; it is written once."""

    def make(path: Path) -> None:
        parts = path.with_suffix(".parts")
        parts.mkdir(exist_ok=True)
        write_agreeing(parts, name).rename(path)

    return made_once(folder / f"nextn-{name}.gguf", make)


def agreeing(around: dict[str, np.ndarray], last: str, norm: np.ndarray) -> dict[str, np.ndarray]:
    """Return the tensors around a layer that mostly passes on the embedding.

    last: the name of its last norm. norm: the model's.
    """
    return {
        "enorm": 0.97 + 0.03 * around["enorm"],
        "hnorm": around["hnorm"],
        "eh_proj": 0.03 * around["eh_proj"] + np.eye(D, 2 * D, dtype=np.float32),
        last: norm + 0.03 * (around[last] - 1),
    }


def _quiet(model: Any) -> Any:
    """Return the same model, with layers that add less to the stream."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if _ADDED.fullmatch(name):
                parameter.mul_(0.03)
    return model


def _nemotron_model() -> Any:
    parts = ["moe", "full_attention", "linear_attention", "full_attention", "moe"]
    return tiny_models.build(tiny_models.EXPERTS[NEMOTRON], layers_block_type=parts, num_hidden_layers=5)


def made_nemotron(folder: Path) -> tuple[Path, Any, dict[str, np.ndarray], np.ndarray]:
    """Return a file of Nemotron 3 and its parts.

    Two layers of the model are one there, and the last norm has a mean. The parts are the transformers model
    of only this layer, the tensors around it, and the embedding.
    """
    model = _nemotron_model()
    around: dict[str, np.ndarray] = {}

    def keep(drawn: dict[str, np.ndarray], *_: Any) -> dict[str, np.ndarray]:
        around.update(drawn)
        return drawn

    path = _nemotron(folder, model, keep)
    embedding = model.model.embeddings.weight.detach().numpy()
    model.model.layers = model.model.layers[-2:]
    model.model.norm_f = torch.nn.LayerNorm(D, model.config.layer_norm_epsilon, bias=False)
    with torch.no_grad():
        model.model.norm_f.weight.copy_(torch.from_numpy(around["final_layernorm"]))
    return path, model, around, embedding


def _nemotron(folder: Path, model: Any, changed: Any) -> Path:
    """Write the file as the converter does. changed: modifies the tensors around the layer."""
    from safetensors.torch import load_file, save_file

    checkpoint = folder / "checkpoint"
    tiny_models.save(tiny_models.EXPERTS[NEMOTRON], model, checkpoint)
    renamed = {
        re.sub(r"^backbone\.layers\.([34])\.", lambda match: f"mtp.layers.{int(match[1]) - 3}.", name): tensor
        for name, tensor in load_file(checkpoint / "model.safetensors").items()
    }
    last = "final_layernorm"
    around = changed(drawn("enorm", "hnorm", last), last, model.model.norm_f.weight.detach().numpy())
    of = {stem: f"mtp.layers.{int(stem == last)}.{stem}.weight" for stem in around}
    tensors = {of[stem]: torch.from_numpy(np.ascontiguousarray(values)) for stem, values in around.items()}
    save_file(renamed | tensors, checkpoint / "model.safetensors")
    config = json.loads((checkpoint / "config.json").read_text())
    config |= {"layers_block_type": config["layers_block_type"][:3], "num_hidden_layers": 3}
    (checkpoint / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 1}))
    convert_hf(checkpoint, folder / "nextn.gguf", "f32")
    return folder / "nextn.gguf"
