"""Checkpoints of embedding models and rerankers give the vectors of transformers, or are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cli_runs import inside

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
    """Save a recipe's model in a folder without its output layer, as embedding models are, and return it."""
    recipe = (tiny_models.RECIPES | tiny_models.ENCODERS)[name]
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
    assert convert_hf(tmp_path / "hf", tmp_path / "out.gguf", "f32").use == "embed"
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


@pytest.mark.parametrize("path", ["../other", "1_Pooling/../../other", "/other"])
def test_a_module_lies_inside_the_checkpoint(tmp_path: Path, path: str) -> None:
    folder = tmp_path / "hf"
    checkpoint(folder, "llama", {"modules.json": [{"path": path, "type": "models.Pooling"}]})
    write(tmp_path, {"other/config.json": {"pooling_mode_mean_tokens": True}})
    with pytest.raises(FormatError, match="a folder outside of the checkpoint: "):
        convert_hf(folder, tmp_path / "out.gguf")
    assert not (tmp_path / "out.gguf").exists()


def dense(folder: Path, n_in: int, n_out: int, *, bias: bool, **config: Any) -> dict[str, np.ndarray]:
    """Write a random module of kind Dense and return its tensors."""
    from safetensors.numpy import save_file

    folder.mkdir()
    rng = np.random.default_rng(n_out)
    tensors = {"linear.weight": rng.standard_normal((n_out, n_in)).astype(np.float32)}
    tensors |= {"linear.bias": rng.standard_normal(n_out).astype(np.float32)} if bias else {}
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(
        json.dumps({"activation_function": "torch.nn.modules.linear.Identity"} | config)
    )
    return tensors


def projected(modules: int) -> list[dict[str, Any]]:
    kind = "sentence_transformers.models.Dense"
    more = [{"path": f"{i + 2}_Dense", "type": kind} for i in range(modules)]
    return [*MODULES, *more, {"path": "9_Normalize", "type": "sentence_transformers.models.Normalize"}]


def test_projections_of_a_checkpoint(tmp_path: Path) -> None:
    files = {"1_Pooling/config.json": {"pooling_mode_mean_tokens": True}, "modules.json": projected(2)}
    theirs = checkpoint(tmp_path / "hf", "gemma-embedding", files)
    width = theirs.config.hidden_size
    second = dense(tmp_path / "hf" / "2_Dense", width, 96, bias=True)
    third = dense(tmp_path / "hf" / "3_Dense", 96, 40, bias=False)
    convert_hf(tmp_path / "hf", tmp_path / "out.gguf", "f32")
    with hotset.load(tmp_path / "out.gguf", n_threads=1) as model:
        metadata = model.gguf.metadata
        sizes = [metadata[f"gemma-embedding.dense_{i}_feat_{end}"] for i in (2, 3) for end in ("in", "out")]
        assert sizes == [width, 96, 96, 40]
        for text, vector in zip(TEXTS, model.embed(TEXTS), strict=True):
            with torch.no_grad():
                states = theirs(torch.tensor([model.encode(text)])).last_hidden_state[0].numpy()
            found = second["linear.weight"] @ states.mean(axis=0) + second["linear.bias"]
            found = third["linear.weight"] @ found
            np.testing.assert_allclose(vector, found / np.linalg.norm(found), atol=1e-3)


def test_projections_that_are_refused(tmp_path: Path) -> None:
    folder = tmp_path / "hf"
    checkpoint(folder, "llama", POOLING | {"modules.json": projected(1)})
    dense(folder / "2_Dense", 31, 40, bias=False, activation_function="torch.nn.modules.activation.Tanh")
    with pytest.raises(UnsupportedModelError, match="is Tanh; supported is Identity"):
        convert_hf(folder, tmp_path / "out.gguf")
    (folder / "2_Dense" / "config.json").write_text('{"activation_function": "a.Identity"}')
    with pytest.raises(FormatError, match=r"is \[40, 31\], and must have 96 columns"):
        convert_hf(folder, tmp_path / "out.gguf")
    write(folder, {"modules.json": [*MODULES, {"path": "2_CNN", "type": "sentence_transformers.models.CNN"}]})
    with pytest.raises(UnsupportedModelError, match="a module of kind CNN"):
        convert_hf(folder, tmp_path / "out.gguf")


@pytest.mark.parametrize("name", ["bert-scores", "bert-roberta-scores", "modern-bert-scores"])
def test_scores_of_encoders_are_transformers_logits(tmp_path: Path, name: str) -> None:
    recipe = tiny_models.ENCODERS[name]
    theirs = tiny_models.build(recipe, num_labels=3)
    path = tiny_models.to_gguf(recipe, theirs, tmp_path)
    rng = np.random.default_rng(0)
    texts = [rng.integers(5, tiny_models.VOCABULARY, n).tolist() for n in (20, 1, 37)]
    with hotset.load(path, n_threads=1) as model:
        labels = model.gguf.metadata[f"{model.gguf.architecture}.classifier.output_labels"]
        assert labels == ["LABEL_0", "LABEL_1", "LABEL_2"]
        for text, scores in zip(texts, model.embed(texts, pooling="rank"), strict=True):
            with torch.no_grad():
                expected = theirs(torch.tensor([text])).logits[0].numpy()
            np.testing.assert_allclose(scores, expected, atol=2e-2 * np.abs(expected).max())


def test_an_encoder_ranks_documents(tmp_path: Path) -> None:
    """Score [CLS] query [SEP] document [SEP], all of type 0, alone and in batches."""
    from tiny_tokenizers import trained_word_piece

    recipe, folder = tiny_models.ENCODERS["bert-scores"], tmp_path / "hf"
    theirs = tiny_models.build(recipe, num_labels=1)
    tiny_models.save(recipe, theirs, folder)
    library = trained_word_piece()
    (folder / "tokenizer.json").write_text(library.to_str())
    (folder / "tokenizer_config.json").write_text("{}")
    done = inside("convert", folder, tmp_path / "out.gguf", "--type", "f32")
    assert f"hotset rerank {tmp_path / 'out.gguf'} QUERY DOC" in " ".join(done.stderr.split())
    with hotset.load(tmp_path / "out.gguf", n_threads=1) as model:
        assert model.gguf.metadata["tokenizer.ggml.token_type_count"] == 2
        ranked = model.rerank(QUERY, DOCUMENTS)
        alone = [model.rerank(QUERY, [document])[0].score for document in DOCUMENTS]
    assert [one.score for one in ranked] == sorted(alone, reverse=True)
    for one in ranked:
        assert one.score == alone[one.index]
        first, second = (library.encode(text, add_special_tokens=False).ids for text in (QUERY, one.document))
        with torch.no_grad():
            expected = theirs(torch.tensor([[2, *first, 3, *second, 3]])).logits[0, 0].item()
        assert one.score == pytest.approx(expected, abs=0.02)


def reranker(folder: Path, tied: bool) -> Any:
    """Save and return a Qwen3 with the tokens of a Qwen3 Reranker's answers, ids 270 and 280."""
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
            text = f"{head}{QUERY}{middle}{one.document}{tail}"  # whose content may not spell special tokens
            ids = model.tokenizer.encode(text, add_special=False)
            with torch.no_grad():
                logits = theirs(torch.tensor([ids])).logits[0, -1]
            expected = torch.softmax(logits[[270, 280]], 0)[0].item()
            assert one.score == pytest.approx(expected, abs=2e-3)


def test_the_readme_names_a_reranker(tmp_path: Path) -> None:
    reranker(tmp_path / "hf", tied=True)
    assert convert_hf(tmp_path / "hf", tmp_path / "out.gguf").use == "run"
    with open_gguf(tmp_path / "out.gguf") as file:
        assert "cls.output.weight" not in file.tensors
    (tmp_path / "hf" / "README.md").write_text("\n# Qwen3-Reranker-0.6B\n")
    assert convert_hf(tmp_path / "hf", tmp_path / "out.gguf").use == "rerank"
    with open_gguf(tmp_path / "out.gguf") as file:
        assert "cls.output.weight" in file.tensors


def test_a_reranker_without_its_answers_is_refused(tmp_path: Path) -> None:
    recipe = tiny_models.RECIPES["qwen3"]
    tiny_models.save(recipe, tiny_models.build(recipe), tmp_path / "Qwen3-Reranker")
    with pytest.raises(TokenizerError, match="lacks the token 'yes'"):
        convert_hf(tmp_path / "Qwen3-Reranker", tmp_path / "out.gguf")
