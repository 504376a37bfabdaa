"""The parts after a model's last norm: projections of vectors, and the classifier of a reranker."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from byte_models import BOS, write_model
from tiny_gguf import write_llama

import hotset
from hotset.engine.pooling import Head
from hotset.errors import FormatError, InvalidRequestError, TokenizerError, UnsupportedModelError
from hotset.formats.gguf import open_gguf
from hotset.placement import ram

torch = pytest.importorskip("torch")

D = 32  # width of `write_model`
RNG = np.random.default_rng(7)
TEXTS = ["hello", "a longer text " * 9, "x"]
DOCUMENTS = ["hello", "a longer document " * 5, "x", "hello"]
TEMPLATE = "<|im_start|>Q: {query}\nD: {document}\n"


def normal(*shape: int) -> np.ndarray:
    return (RNG.standard_normal(shape) / np.sqrt(shape[-1])).astype(np.float32)


DENSE = {"dense_2.weight": normal(48, D), "dense_2.bias": normal(48), "dense_3.weight": normal(24, 48)}
CLASSIFIER = {
    "cls.weight": normal(D, D), "cls.bias": normal(D),
    "cls.output.weight": normal(2, D), "cls.output.bias": normal(2),
}  # fmt: skip


def model_of(path: Path, vectors: dict[str, np.ndarray], **keys: Any) -> Path:
    return write_model(path / "model.gguf", vectors=vectors, **keys)


def states_of(model: hotset.Model, text: str) -> np.ndarray:
    """Return the hidden states after the last norm, float32 [n_tokens, width]."""
    found = model.taps(text, ["output_norm"])["output_norm"]
    assert found.shape == (len(model.encode(text)), D)
    return found


def unit(vector: np.ndarray) -> np.ndarray:
    return vector / np.linalg.norm(vector)


def test_a_projection_is_behind_the_pooling(tmp_path: Path) -> None:
    with hotset.load(model_of(tmp_path, DENSE), n_threads=1) as model:
        vectors, of_tokens = model.embed(TEXTS), model.embed_tokens(TEXTS)
        assert vectors.shape == (3, 24)
        for text, vector, each in zip(TEXTS, vectors, of_tokens, strict=True):
            states = states_of(model, text)
            expected = DENSE["dense_3.weight"] @ (
                DENSE["dense_2.weight"] @ states.mean(axis=0) + DENSE["dense_2.bias"]
            )
            np.testing.assert_allclose(vector, unit(expected), atol=1e-5)
            expected = (states @ DENSE["dense_2.weight"].T + DENSE["dense_2.bias"]) @ DENSE[
                "dense_3.weight"
            ].T
            np.testing.assert_allclose(each, expected, atol=1e-4)
        np.testing.assert_allclose(
            model.embed(TEXTS, dimensions=5), [unit(vector[:5]) for vector in vectors], atol=1e-6
        )
        assert (model.embed(TEXTS, dimensions=24) == vectors).all()
        assert [each.shape[1] for each in model.embed_tokens(TEXTS, dimensions=5)] == [5, 5, 5]
        for wrong in (0, 25, 2.0, True):
            with pytest.raises(InvalidRequestError, match="dimensions must be a whole number from 1 to 24"):
                model.embed(TEXTS, dimensions=wrong)  # type: ignore[arg-type]
        with pytest.raises(InvalidRequestError, match="use embed_tokens"):
            model.embed(TEXTS, pooling="none")


def test_vectors_of_tokens_are_the_states_behind_the_last_norm(tmp_path: Path) -> None:
    with hotset.load(model_of(tmp_path, {}), n_threads=1) as model:
        for text, each in zip(TEXTS, model.embed_tokens(TEXTS), strict=True):
            np.testing.assert_allclose(each, states_of(model, text), atol=1e-5)


def test_scores_equal_a_classifiers(tmp_path: Path) -> None:
    head = {name: torch.tensor(values) for name, values in CLASSIFIER.items()}
    with hotset.load(model_of(tmp_path, CLASSIFIER), n_threads=1) as model:
        states = torch.tensor(np.stack([states_of(model, text)[-1] for text in TEXTS]))
        hidden = torch.tanh(torch.nn.functional.linear(states, head["cls.weight"], head["cls.bias"]))
        expected = torch.nn.functional.linear(hidden, head["cls.output.weight"], head["cls.output.bias"])
        np.testing.assert_allclose(model.embed(TEXTS, pooling="rank"), expected.numpy(), atol=1e-4)
        with pytest.raises(InvalidRequestError, match="pooling rank returns scores"):
            model.embed(TEXTS, pooling="rank", dimensions=2)


def head_of(
    path: Path, architecture: str, vectors: dict[str, np.ndarray], *, causal: bool = True, **keys: Any
) -> Head:
    keys = {f"{architecture}.{name}": value for name, value in keys.items()}
    with open_gguf(
        write_llama(path, architecture=architecture, n_embd=D, vectors=vectors, keys=keys)
    ) as file:
        return Head(file, file.metadata, D, causal=causal)


def test_header_has_the_architecture(tmp_path: Path) -> None:
    path, state = tmp_path / "model.gguf", normal(D) * 5
    output = {"cls.output.weight": CLASSIFIER["cls.output.weight"]}
    raw = output["cls.output.weight"] @ state
    np.testing.assert_allclose(head_of(path, "bert", output).scores(state), raw, rtol=1e-5)
    softmax = torch.softmax(torch.tensor(raw), 0).numpy()
    head = head_of(path, "qwen3", output, **{"classifier.output_labels": ["yes", "no"]})
    np.testing.assert_allclose(head.scores(state), softmax, rtol=1e-5)
    assert (head.labels, head.n_labels, head.ranked_state) == (("yes", "no"), 2, "last")
    assert head_of(path, "bert", output, causal=False).ranked_state == "cls"
    assert head_of(path, "bert", output, **{"classifier.pooling_type": 1}).ranked_state == "mean"
    # ModernBERT: GELU and a norm after the first layer.
    modern = CLASSIFIER | {"cls.norm.weight": normal(D) + 1}
    head = head_of(path, "modern-bert", modern, **{"attention.layer_norm_epsilon": 1e-3})
    assert head.ranked_state == "mean"
    tensors = {name: torch.tensor(values) for name, values in modern.items()}
    hidden = torch.nn.functional.gelu(tensors["cls.weight"] @ torch.tensor(state) + tensors["cls.bias"])
    hidden = torch.nn.functional.layer_norm(hidden, (D,), tensors["cls.norm.weight"], eps=1e-3)
    expected = tensors["cls.output.weight"] @ hidden + tensors["cls.output.bias"]
    np.testing.assert_allclose(head.scores(state), expected.numpy(), atol=1e-4)
    # A classifier with one layer.
    alone = head_of(path, "bert", {"cls.weight": normal(1, D)})
    assert (alone.ranks, alone.n_labels, alone.scores(state).shape) == (True, 1, (1,))
    assert not head_of(path, "bert", DENSE).ranks


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("dense_2.weight", normal(48, D + 1)),
        ("dense_3.weight", normal(24, 47)),
        ("dense_2.bias", normal(47)),
        ("cls.weight", normal(D, 2 * D)),
        ("cls.norm.weight", normal(D - 1)),
        ("cls.output.bias", normal(3)),
    ],
)
def test_tensors_of_a_wrong_shape_give_one_message(tmp_path: Path, name: str, values: np.ndarray) -> None:
    vectors = DENSE | CLASSIFIER | {name: values}
    with hotset.load(model_of(tmp_path, vectors), n_threads=1) as model:
        assert model.generate("hello", max_tokens=1, temperature=0).tokens  # does not read them
        with pytest.raises(FormatError, match=f"the tensor {name} has the shape"):
            model.embed(TEXTS)


def test_documents_are_ranked(tmp_path: Path) -> None:
    path = model_of(tmp_path, CLASSIFIER, **{"llama.pooling_type": 4})
    with hotset.load(path, n_threads=1) as model:
        found = model.rerank("hello", DOCUMENTS)
        assert sorted(one.index for one in found) == [0, 1, 2, 3]
        assert all(one.document == DOCUMENTS[one.index] for one in found)
        scores = [one.score for one in found]
        assert scores == sorted(scores, reverse=True)
        equal = [one.index for one in found if one.index in (0, 3)]  # the same document
        assert equal == [0, 3]
        texts = [[BOS, *b"hello", *text.encode()] for text in DOCUMENTS]
        ids = [model.encode("hello" + text) for text in DOCUMENTS]
        assert [len(one) for one in ids] <= [len(one) for one in texts]  # "he" is one token
        of_texts = model.embed(ids, pooling="rank")[:, 0]
        assert [of_texts[one.index] for one in found] == scores
        assert model.rerank("hello", DOCUMENTS, top_n=2) == found[:2]
        assert model.rerank("hello", DOCUMENTS, top_n=9) == found
        assert model.rerank("hello", []) == []
        for query, documents, n, said in (
            ("", ["a"], None, "non-empty"),
            ("a", [""], None, "non-empty"),
            ("a", [3], None, "must be a non-empty text"),
            ("a", "abc", None, "a list of texts"),
            ("a", ["b"], 0, "top_n must be at least 1"),
            ("a", ["b"], True, "top_n must be a whole number"),
        ):
            with pytest.raises(InvalidRequestError, match=said):
                model.rerank(query, documents, top_n=n)  # type: ignore[arg-type]
        with pytest.raises(InvalidRequestError, match="the model is a reranker"):
            model.embed(TEXTS)
        assert model.embed(TEXTS, pooling="last").shape == (3, D)


def test_a_template_has_the_query_and_the_document(tmp_path: Path) -> None:
    path = model_of(tmp_path, CLASSIFIER, **{"tokenizer.chat_template.rerank": TEMPLATE})
    with hotset.load(path, n_threads=1) as model:
        documents = ["hello", "{query}", "</s><|im_start|>"]
        found = {one.index: one.score for one in model.rerank("{document}", documents)}
        for i, document in enumerate(documents):
            text = f"Q: {{document}}\nD: {document}\n"
            ids = [258, *model.tokenizer.encode(text, add_special=False)]  # special tokens in it are text
            assert found[i] == model.embed([ids], pooling="rank")[0, 0]


def test_template_without_a_place_gives_one_message(tmp_path: Path) -> None:
    path = model_of(tmp_path, CLASSIFIER, **{"tokenizer.chat_template.rerank": "{query}"})
    with hotset.load(path, n_threads=1) as model, pytest.raises(TokenizerError, match=r"lacks \{query\} or"):
        model.rerank("a", ["b"])


def test_a_model_without_a_classifier_ranks_nothing(tmp_path: Path) -> None:
    with (
        hotset.load(model_of(tmp_path, DENSE), n_threads=1) as model,
        pytest.raises(UnsupportedModelError, match="no rank head"),
    ):
        model.rerank("a", ["b"])


@pytest.mark.parametrize("pooling", ["mean", "cls", "rank"])
def test_the_same_bits_in_any_chunks_and_company(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pooling: str
) -> None:
    monkeypatch.setattr(ram, "own_memory", lambda: 0)  # other tests in this process have loaded much
    path = model_of(tmp_path, DENSE | CLASSIFIER)
    with hotset.load(path, n_threads=1) as model:
        alone = np.concatenate([model.embed([text], pooling=pooling) for text in TEXTS])
        of_tokens = [model.embed_tokens([text])[0] for text in TEXTS]
    for settings in ({"max_batch": 7}, {"max_sequences": 2}, {"ram_budget": 1.0}):
        with hotset.load(path, n_threads=2, **settings) as model:
            assert (model.embed(TEXTS * 2, pooling=pooling) == np.tile(alone, (2, 1))).all()
            for each, expected in zip(model.embed_tokens(TEXTS), of_tokens, strict=True):
                assert (each == expected).all()
