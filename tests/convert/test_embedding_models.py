"""Checkpoints of embedding models and rerankers: what transformers makes of a text, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hotset
from hotset.convert.hf import convert_hf
from hotset.errors import FormatError, HotsetError, TokenizerError, UnsupportedModelError
from hotset.formats.gguf import open_gguf

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
tiny_models = pytest.importorskip("tiny_models")

TEXTS = ["then in the", "the", "a longer text in the " * 4]
POOLING = {"1_Pooling/config.json": {"pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": False}}
MODULES = [
    {"idx": 0, "path": "", "type": "sentence_transformers.models.Transformer"},
    {"idx": 1, "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
]
QUERY, DOCUMENTS = "in the", ["then", "the <|end|> of", "a longer document in the " * 3]


def write(folder: Path, files: dict[str, Any]) -> None:
    for name, value in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(json.dumps(value))


def checkpoint(folder: Path, name: str, files: dict[str, Any], **settings: Any) -> Any:
    """The model of a recipe in a folder, without its output: what makes vectors of texts."""
    recipe = tiny_models.RECIPES[name]
    whole = tiny_models.build(recipe, **settings)
    tiny_models.save(recipe, whole, folder)
    whole.base_model.save_pretrained(folder)  # as sentence-transformers writes it
    write(folder, files)
    return whole.base_model


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("name", ["qwen3", "llama"])
def test_vectors_are_transformers_states(tmp_path: Path, name: str, tied: bool) -> None:
    files = POOLING | {"modules.json": MODULES}
    theirs = checkpoint(tmp_path / "hf", name, files, tie_word_embeddings=tied)
    convert_hf(tmp_path / "hf", tmp_path / "out.gguf", "f32")
    with hotset.load(tmp_path / "out.gguf", n_threads=1) as model:
        assert model.gguf.metadata[f"{name}.pooling_type"] == 3
        assert "output.weight" not in model.gguf.tensors
        for text, vector in zip(TEXTS, model.embed(TEXTS), strict=True):
            with torch.no_grad():
                state = theirs(torch.tensor([model.encode(text)])).last_hidden_state[0, -1].numpy()
            np.testing.assert_allclose(vector, state / np.linalg.norm(state), atol=1e-3)


@pytest.mark.parametrize(
    ("pooling", "number"),
    [
        ({"pooling_mode_cls_token": True}, 2),
        ({"pooling_mode_mean_tokens": True}, 1),
        ({"pooling_mode": "mean"}, 1),
        ({"pooling_mode": "lasttoken"}, 3),
    ],
)
def test_a_checkpoint_says_how_it_pools(tmp_path: Path, pooling: dict[str, Any], number: int) -> None:
    files = {"modules.json": MODULES, "1_Pooling/config.json": pooling}
    checkpoint(tmp_path / "hf", "llama", files)
    convert_hf(tmp_path / "hf", tmp_path / "out.gguf")
    with open_gguf(tmp_path / "out.gguf") as file:
        assert file.metadata["llama.pooling_type"] == number


@pytest.mark.parametrize(
    ("files", "error", "said"),
    [
        ({"1_Pooling/config.json": {"pooling_mode_max_tokens": True}}, UnsupportedModelError, "by None"),
        ({"1_Pooling/config.json": {"pooling_mode": "max"}}, UnsupportedModelError, "by max"),
        (
            {"1_Pooling/config.json": {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": True}},
            UnsupportedModelError,
            "by mean, cls",
        ),
        ({"modules.json": {"a": 1}}, FormatError, "is not a list of modules"),
        ({"modules.json": [1]}, FormatError, "is not a list of modules"),
        ({"modules.json": [{"type": "Pooling"}]}, HotsetError, "None"),
    ],
)
def test_pooling_that_is_refused(tmp_path: Path, files: Any, error: type[HotsetError], said: str) -> None:
    checkpoint(tmp_path / "hf", "llama", POOLING | {"modules.json": MODULES} | files)
    with pytest.raises(error, match=said):
        convert_hf(tmp_path / "hf", tmp_path / "out.gguf")


def test_a_checkpoint_without_output_that_embeds_nothing_is_refused(tmp_path: Path) -> None:
    checkpoint(tmp_path / "hf", "llama", {})
    config = tmp_path / "hf" / "config.json"
    config.write_text(config.read_text().replace("LlamaModel", "LlamaForCausalLM"))
    with pytest.raises(UnsupportedModelError, match="lacks lm_head"):
        convert_hf(tmp_path / "hf", tmp_path / "out.gguf")


def reranker(folder: Path, tied: bool) -> Any:
    """A Qwen3 with the tokens of a Qwen3 Reranker's answers, ids 270 and 280."""
    recipe = tiny_models.RECIPES["qwen3"]
    theirs = tiny_models.build(recipe, tie_word_embeddings=tied, max_position_embeddings=512)
    tiny_models.save(recipe, theirs, folder)
    tokenizer = folder / "tokenizer.json"
    text = tokenizer.read_text()
    tokenizer.write_text(text.replace("<|unused_270|>", "yes").replace("<|unused_280|>", "no"))
    return theirs


@pytest.mark.parametrize("tied", [False, True])
def test_scores_are_probabilities_of_yes(tmp_path: Path, tied: bool) -> None:
    theirs = reranker(tmp_path / "Qwen3-Reranker-tiny", tied)
    convert_hf(tmp_path / "Qwen3-Reranker-tiny", tmp_path / "out.gguf", "f32")
    with hotset.load(tmp_path / "out.gguf", n_threads=1) as model:
        metadata = model.gguf.metadata
        assert metadata["qwen3.pooling_type"] == 4
        assert metadata["qwen3.classifier.output_labels"] == ["yes", "no"]
        assert metadata["tokenizer.chat_templates"] == ["rerank"]
        assert "tokenizer.chat_template" in metadata
        assert model.gguf.tensors["cls.output.weight"].shape == (model.config.n_embd, 2)
        assert "output.weight" not in model.gguf.tensors
        template = metadata["tokenizer.chat_template.rerank"]
        ranked = model.rerank(QUERY, DOCUMENTS)
        assert sorted(one.index for one in ranked) == [0, 1, 2]
        for one in ranked:
            head, middle, tail = template.replace("{document}", "{query}").split("{query}")
            text = f"{head}{QUERY}{middle}{one.document}{tail}"  # in which no special token is spelled
            ids = model.tokenizer.encode(text, add_special=False)
            with torch.no_grad():
                logits = theirs(torch.tensor([ids])).logits[0, -1]
            expected = torch.softmax(logits[[270, 280]], 0)[0].item()
            assert one.score == pytest.approx(expected, abs=2e-3)


def test_the_readme_names_a_reranker(tmp_path: Path) -> None:
    reranker(tmp_path / "hf", tied=True)
    convert_hf(tmp_path / "hf", tmp_path / "out.gguf")
    with open_gguf(tmp_path / "out.gguf") as file:
        assert "cls.output.weight" not in file.tensors
    (tmp_path / "hf" / "README.md").write_text("\n# Qwen3-Reranker-0.6B\n")
    convert_hf(tmp_path / "hf", tmp_path / "out.gguf")
    with open_gguf(tmp_path / "out.gguf") as file:
        assert "cls.output.weight" in file.tensors


def test_a_reranker_without_its_answers_is_refused(tmp_path: Path) -> None:
    recipe = tiny_models.RECIPES["qwen3"]
    tiny_models.save(recipe, tiny_models.build(recipe), tmp_path / "Qwen3-Reranker")
    with pytest.raises(TokenizerError, match="lacks the token 'yes'"):
        convert_hf(tmp_path / "Qwen3-Reranker", tmp_path / "out.gguf")
