"""Checkpoints as the hub has them: buffers and names of older versions, tensors that nothing reads."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import hotset
from hotset.convert.hf import convert_hf
from hotset.errors import UnsupportedModelError
from hotset.formats.gguf import open_gguf
from hotset.formats.quants import dequantize

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
tiny_models = pytest.importorskip("tiny_models")

Tensors = dict[str, "torch.Tensor"]
RECIPES = tiny_models.RECIPES | tiny_models.EXPERTS | tiny_models.ENCODERS


def with_positions(tensors: Tensors) -> Tensors:
    return tensors | {"embeddings.position_ids": torch.arange(512)[None]}


def with_boolean_masks(tensors: Tensors) -> Tensors:
    """Add the buffers of GPT-2 and GPT-NeoX before transformers 4.31."""
    masks = {}
    for name in tensors:
        for module in ("attention", "attn"):
            stem, found, _ = name.partition(f".{module}.")
            if found:
                masks[f"{stem}.{module}.bias"] = torch.ones(1, 1, 32, 32, dtype=torch.bool).tril()
                masks[f"{stem}.{module}.masked_bias"] = torch.tensor(-1e9)
    assert masks
    return tensors | masks


def with_rotary_buffers(tensors: Tensors) -> Tensors:
    buffers = {
        f"model.layers.{i}.self_attn.rotary_emb.{name}": torch.zeros(1, 1, 8, 4)
        for i in range(3)
        for name in ("inv_freq", "cos_cached", "sin_cached")
    }
    return tensors | buffers


def with_old_layer_norms(tensors: Tensors) -> Tensors:
    renamed = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace(
            "LayerNorm.bias", "LayerNorm.beta"
        ): values
        for name, values in tensors.items()
    }
    assert renamed.keys() != tensors.keys()
    return renamed


def as_pretraining(tensors: Tensors) -> Tensors:
    """Give BERT's tensors the prefix and the heads of bert-base-uncased."""
    width = len(tensors["embeddings.LayerNorm.bias"])
    heads = {
        "cls.predictions.transform.LayerNorm.gamma": torch.ones(width),
        "cls.predictions.bias": torch.zeros(7),
        "cls.seq_relationship.weight": torch.zeros(2, width),
    }
    return {f"bert.{name}": values for name, values in with_old_layer_norms(tensors).items()} | heads


def with_an_empty_tensor_of_another_part(tensors: Tensors) -> Tensors:
    return tensors | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(0)}


FORMS: dict[str, tuple[str, Callable[[Tensors], Tensors]]] = {
    "positions": ("bert", with_positions),
    "old-layer-norms": ("bert", with_old_layer_norms),
    "pretraining": ("bert", as_pretraining),
    "masks-gpt2": ("gpt2", with_boolean_masks),
    "masks-gptneox": ("gptneox", with_boolean_masks),
    "rotary": ("llama", with_rotary_buffers),
    "empty": ("llama", with_an_empty_tensor_of_another_part),
}


def saved(name: str, folder: Path, **settings: object) -> Tensors:
    """Save the model of a recipe, and return its tensors."""
    from safetensors.torch import load_file

    recipe = RECIPES[name]
    tiny_models.save(recipe, tiny_models.build(recipe, **settings), folder)
    return load_file(folder / "model.safetensors")


def replace_tensors(folder: Path, tensors: Tensors, kind: str = "safetensors") -> None:
    from safetensors.torch import save_file

    (folder / "model.safetensors").unlink()
    if kind == "safetensors":
        save_file(tensors, folder / "model.safetensors")
    else:
        torch.save(tensors, folder / "pytorch_model.bin")


@pytest.mark.parametrize("kind", ["safetensors", "bin"])
@pytest.mark.parametrize("form", FORMS)
def test_old_forms_give_the_same_file(tmp_path: Path, form: str, kind: str) -> None:
    recipe, change = FORMS[form]
    tensors = saved(recipe, tmp_path / "hf")
    convert_hf(tmp_path / "hf", tmp_path / "plain.gguf", "f32")
    replace_tensors(tmp_path / "hf", change(tensors), kind)
    convert_hf(tmp_path / "hf", tmp_path / "old.gguf", "f32")
    assert (tmp_path / "old.gguf").read_bytes() == (tmp_path / "plain.gguf").read_bytes()


@pytest.mark.parametrize("kind", ["safetensors", "bin"])
def test_a_needed_tensor_of_another_type_is_refused(tmp_path: Path, kind: str) -> None:
    tensors = saved("bert", tmp_path / "hf")
    changed = tensors | {"embeddings.LayerNorm.weight": torch.ones(96, dtype=torch.int64)}
    replace_tensors(tmp_path / "hf", changed, kind)
    with pytest.raises(UnsupportedModelError, match=r"embeddings\.LayerNorm\.weight in .* is (I64|int64)"):
        convert_hf(tmp_path / "hf", tmp_path / "out.gguf")


def test_a_needed_tensor_without_elements_is_refused(tmp_path: Path) -> None:
    tensors = saved("llama", tmp_path / "hf")
    replace_tensors(tmp_path / "hf", tensors | {"model.norm.weight": torch.zeros(0)})
    with pytest.raises(UnsupportedModelError, match=r"output_norm\.weight has the shape \[0\]"):
        convert_hf(tmp_path / "hf", tmp_path / "out.gguf")


@pytest.mark.parametrize("recipe", ["llama", "falcon-7b", "kimi-linear", "nemotron-h"])
@pytest.mark.parametrize("own", [True, False])
def test_a_tied_checkpoint_keeps_an_output_that_differs(tmp_path: Path, recipe: str, own: bool) -> None:
    tensors = saved(recipe, tmp_path / "hf", tie_word_embeddings=True)
    embedding = next(values for name, values in tensors.items() if "embed" in name)
    output = embedding.clone()
    if own:
        output[3] += 1
    replace_tensors(tmp_path / "hf", tensors | {"lm_head.weight": output})
    convert_hf(tmp_path / "hf", tmp_path / "out.gguf", "f32")
    with open_gguf(tmp_path / "out.gguf") as file:
        assert ("output.weight" in file.tensors) == own
        if own:
            info = file.tensors["output.weight"]
            found = dequantize(file.data("output.weight"), info.type, info.shape)
            np.testing.assert_array_equal(found, output.numpy())


@pytest.mark.parametrize("limit", [20, 4096, None])
def test_the_limit_of_sentence_transformers_is_the_context(tmp_path: Path, limit: int | None) -> None:
    saved("bert", tmp_path / "hf")
    convert_hf(tmp_path / "hf", tmp_path / "plain.gguf", "f32")
    settings = {"max_seq_length": limit, "do_lower_case": False}
    (tmp_path / "hf" / "sentence_bert_config.json").write_text(json.dumps(settings))
    convert_hf(tmp_path / "hf", tmp_path / "out.gguf", "f32")
    text = "then in the"
    with hotset.load(tmp_path / "plain.gguf") as plain, hotset.load(tmp_path / "out.gguf") as limited:
        n_positions = plain.gguf.metadata["bert.context_length"]
        n_expected = min(n_positions, limit or n_positions)
        assert limited.gguf.metadata["bert.context_length"] == n_expected
        assert limited.gguf.tensors["position_embd.weight"].shape[1] == n_expected
        np.testing.assert_array_equal(limited.embed([text]), plain.embed([text]))
