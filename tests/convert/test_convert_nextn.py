"""Layers for multi-token prediction (MTP) in a checkpoint become MTP layers of the file.

tests/backends/test_nextn.py compares their logits. Here the last layer of a model becomes an MTP layer,
stored in the checkpoint under the names of its publisher. Its tensors must equal the same layer of the whole
model.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hotset.convert.hf import convert_hf
from hotset.errors import UnsupportedModelError
from hotset.formats.gguf import open_gguf
from hotset.model.config import config_from_gguf
from hotset.model.decoder import describe, describe_nextn
from hotset.sparsity.profile import Profile

pytest.importorskip("transformers")
torch = pytest.importorskip("torch")
tiny_models = pytest.importorskip("tiny_models")

D = tiny_models.SHAPE["hidden_size"]
LAYERS = ["linear_attention", "full_attention", "full_attention"]
# Recipe → settings, names of the tensors around the layer, and whether the stored norms are lower by one.
BEHIND = {"eh_proj": "eh_proj", "enorm": "enorm", "hnorm": "hnorm", "shared_head_norm": "shared_head.norm"}
MODULE = {
    "eh_proj": "fc", "enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden",
    "shared_head_norm": "norm",
}  # fmt: skip
MODELS: dict[str, tuple[dict[str, Any], dict[str, str], bool]] = {
    "glm4moe": ({"num_hidden_layers": 3}, BEHIND, False),
    "deepseek2-v3": ({"num_hidden_layers": 3}, BEHIND, False),
    "qwen3next": ({"layer_types": LAYERS, "num_hidden_layers": 3}, MODULE, True),
    "qwen35": ({"layer_types": LAYERS, "num_hidden_layers": 3}, MODULE, True),
}


def around(*, own_matrices: bool) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    shapes = {"eh_proj": (D, 2 * D), "enorm": (D,), "hnorm": (D,), "shared_head_norm": (D,)}
    if own_matrices:
        shapes |= dict.fromkeys(("embed_tokens", "shared_head_head"), (tiny_models.VOCABULARY, D))
    return {stem: torch.randn(shape, generator=generator) for stem, shape in shapes.items()}


def save_with_nextn(name: str, folder: Path, *, own_matrices: bool = False) -> dict[str, torch.Tensor]:
    """Save a checkpoint whose last layer is an MTP layer, and return the tensors around that layer."""
    from safetensors.torch import load_file, save_file

    settings, names, _ = MODELS[name]
    recipe = (tiny_models.RECIPES | tiny_models.EXPERTS)[name]
    tiny_models.save(recipe, tiny_models.build(recipe, **settings), folder)
    tensors, own = load_file(folder / "model.safetensors"), around(own_matrices=own_matrices)
    prefix = "model.layers.2"
    if names is MODULE:
        prefix = "mtp"
        tensors = {re.sub(r"^model\.layers\.2\.", "mtp.layers.0.", n): t for n, t in tensors.items()}
    others = {"embed_tokens": "embed_tokens", "shared_head_head": "shared_head.head"}
    tensors |= {f"{prefix}.{(names | others)[stem]}.weight": tensor for stem, tensor in own.items()}
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    config |= {"num_hidden_layers": 2} | ({"layer_types": LAYERS[:2]} if names is MODULE else {})
    (folder / "config.json").write_text(json.dumps(config))
    return own


@pytest.mark.parametrize("name", [*MODELS, "glm4moe, own matrices"])
def test_layer_equals_the_whole_models(run_folder: Path, tmp_path: Path, name: str) -> None:
    name, _, own_matrices = name.partition(", ")
    settings, _, less_one = MODELS[name]
    own = save_with_nextn(name, tmp_path / "checkpoint", own_matrices=bool(own_matrices))
    convert_hf(tmp_path / "checkpoint", tmp_path / "model.gguf", "f32")
    recipe = (tiny_models.RECIPES | tiny_models.EXPERTS)[name]
    whole = tiny_models.to_gguf(recipe, tiny_models.build(recipe, **settings), tmp_path / "whole")
    with open_gguf(tmp_path / "model.gguf") as found, open_gguf(whole) as expected:
        architecture = found.architecture
        assert found.metadata[f"{architecture}.nextn_predict_layers"] == 1
        assert found.metadata[f"{architecture}.block_count"] == 3
        around_it = {f"blk.2.nextn.{stem}.weight" for stem in own}
        assert set(found.tensors) == set(expected.tensors) | around_it
        for tensor in expected.tensors:
            np.testing.assert_array_equal(found.data(tensor), expected.data(tensor))
        for stem, values in own.items():
            plus = float(less_one and values.dim() == 1)
            data = found.data(f"blk.2.nextn.{stem}.weight").view(np.float32).reshape(values.shape)
            np.testing.assert_array_equal(data, values.numpy() + np.float32(plus))
        config = config_from_gguf(found)
        assert (config.n_layer, config.n_extra_layers) == (2, 1)
        describe(config, found.tensors)
        describe_nextn(config, found.tensors)


def test_layers_that_lack_a_part_or_that_nothing_computes_are_left_out(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder = tmp_path / "checkpoint"
    save_with_nextn("qwen35", folder)
    whole = load_file(folder / "model.safetensors")
    for removed in ("mtp.fc.weight", "mtp.norm.weight"):
        save_file({n: t for n, t in whole.items() if n != removed}, folder / "model.safetensors")
        convert_hf(folder, tmp_path / "model.gguf", "f32")
        with open_gguf(tmp_path / "model.gguf") as found:
            assert not [name for name in found.tensors if name.startswith("blk.2.")]
            assert "qwen35.nextn_predict_layers" not in found.metadata
            assert found.metadata["qwen35.block_count"] == 2
    second = {
        n.replace("layers.0.", "layers.1."): t.clone() for n, t in whole.items() if "mtp.layers.0." in n
    }
    save_file(whole | second, folder / "model.safetensors")  # the other tensors could belong to either layer
    convert_hf(folder, tmp_path / "model.gguf", "f32")
    with open_gguf(tmp_path / "model.gguf") as found:
        assert "qwen35.nextn_predict_layers" not in found.metadata
    whole.pop("mtp.layers.0.self_attn.q_proj.weight")
    save_file(whole, folder / "model.safetensors")
    with pytest.raises(
        UnsupportedModelError, match=r"does not load: the file lacks the tensor blk\.2\.attn_q"
    ):
        convert_hf(folder, tmp_path / "model.gguf", "f32")


def test_profile_follows_the_order_of_the_models_layers(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    save_with_nextn("qwen35", folder)
    counts = tuple(np.random.default_rng(i).permutation(160).astype(np.uint64) for i in range(2))
    convert_hf(folder, tmp_path / "plain.gguf", "f32")
    convert_hf(folder, tmp_path / "moved.gguf", "f32", profile=Profile(counts, 200, "", ()))
    with open_gguf(tmp_path / "plain.gguf") as plain, open_gguf(tmp_path / "moved.gguf") as moved:
        for layer in range(3):
            name = f"blk.{layer}.ffn_up.weight"
            assert np.array_equal(plain.data(name), moved.data(name)) == (layer == 2)
