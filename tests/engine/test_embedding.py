"""Vectors of texts: compared with transformers' hidden states, and bitwise independent of other requests."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hotset
from hotset.engine.pooling import pooling_of
from hotset.errors import ContextLengthError, InvalidRequestError, UnsupportedModelError

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
tiny_models = pytest.importorskip("tiny_models")

LENGTHS = (150, 1, 37, 64)


@pytest.fixture(scope="module", params=["llama", "opt", "gemma2", "olmo"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return a file, texts as token ids, and their hidden states from transformers."""
    recipe = tiny_models.RECIPES[request.param]
    theirs = tiny_models.build(recipe)
    path = tiny_models.to_gguf(recipe, theirs, tmp_path_factory.mktemp("checkpoint"))
    rng = np.random.default_rng(0)
    texts = [rng.integers(0, tiny_models.VOCABULARY, n).tolist() for n in LENGTHS]
    with torch.no_grad():
        states = [
            theirs(torch.tensor(text)[None], output_hidden_states=True).hidden_states[-1][0].numpy()
            for text in texts
        ]
    return path, texts, states


def pooled(states: np.ndarray, pooling: str) -> np.ndarray:
    vector = {"mean": states.mean(axis=0), "cls": states[0], "last": states[-1]}[pooling]
    return vector / np.linalg.norm(vector)


def load(path: Path, **settings: Any) -> hotset.Model:
    return hotset.load(path, n_ctx=192, n_threads=2, **settings)


@pytest.mark.parametrize("pooling", ["mean", "cls", "last", None])
def test_vectors_are_transformers_hidden_states(model: Any, pooling: str | None) -> None:
    path, texts, states = model
    with load(path, device="reference") as loaded:
        vectors = loaded.embed(texts, pooling=pooling)
    assert vectors.dtype == np.float32
    for vector, theirs in zip(vectors, states, strict=True):
        assert vector @ vector == pytest.approx(1.0, abs=1e-6)
        # The cache is in F16.
        np.testing.assert_allclose(vector, pooled(theirs, pooling or "mean"), atol=1e-3)


@pytest.mark.parametrize("pooling", ["mean", "last"])
def test_vectors_have_the_same_bits_in_any_chunks_and_company(model: Any, pooling: str) -> None:
    path, texts, _ = model
    with load(path) as loaded:
        alone = np.concatenate([loaded.embed([text], pooling=pooling) for text in texts])
        expected = loaded.generate(texts[2], temperature=0, max_tokens=30, ignore_eos=True).tokens
    for settings in ({"max_batch": 7}, {"max_sequences": 2}, {"n_seqs": 4}):
        with load(path, **settings) as loaded:
            with ThreadPoolExecutor() as beside:
                answer = beside.submit(
                    loaded.generate, texts[2], temperature=0, max_tokens=30, ignore_eos=True
                )
                together = loaded.embed(texts, pooling=pooling)
            assert loaded.engine.scheduler.pool.n_available == loaded.engine.scheduler.pool.n_blocks
        assert (together == alone).all()
        assert answer.result().tokens == expected


def test_no_block_of_a_text_is_kept_for_others(model: Any) -> None:
    path, texts, _ = model
    with load(path) as loaded:
        vectors = loaded.embed(texts)
        assert loaded.thread.counters().blocks_cached == 0
        completion = loaded.generate(texts[0], temperature=0, max_tokens=1)
        assert completion.timings.reused_tokens == 0
        assert (loaded.embed(texts) == vectors).all()  # other requests' prefixes are not used


def test_unembeddable_text_gives_one_message(model: Any) -> None:
    path, texts, _ = model
    with load(path) as loaded:
        with pytest.raises(ContextLengthError, match="193 tokens do not fit in the context of 192"):
            loaded.embed([texts[1], [1] * 193])
        with pytest.raises(InvalidRequestError, match="takes a list of texts"):
            loaded.embed("Hello")
        with pytest.raises(InvalidRequestError, match="one of none, mean, cls, last and rank, not 'max'"):
            loaded.embed(texts, pooling="max")
        with pytest.raises(InvalidRequestError, match="one or more token ids"):
            loaded.embed([[]])
        assert loaded.embed([]).shape == (0, loaded.config.n_embd)
        assert not loaded.engine.has_work
    with pytest.raises(InvalidRequestError, match="has been closed"):
        loaded.embed(texts)


def test_failure_reaches_the_caller(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    path, texts, _ = model
    with load(path) as loaded:
        before = loaded.embed(texts)

        def broken(*_: Any) -> np.ndarray:
            raise ValueError("no")

        monkeypatch.setattr("hotset.engine.embedding.normalised", broken)
        with pytest.raises(ValueError, match="no"):
            loaded.embed(texts)
        monkeypatch.undo()
        assert (loaded.embed(texts) == before).all()


@pytest.mark.parametrize(("number", "pooling"), [(None, "mean"), (0, "mean"), (2, "cls"), (3, "last")])
def test_the_file_says_how_it_pools(number: int | None, pooling: str) -> None:
    metadata = {"general.architecture": "llama"} | ({} if number is None else {"llama.pooling_type": number})
    assert pooling_of(metadata, None) == pooling
    assert pooling_of(metadata, "mean") == "mean"


@pytest.mark.parametrize("number", [5, -1, "mean", [1]])
def test_unknown_pooling_gives_one_message(number: Any) -> None:
    metadata = {"general.architecture": "llama", "llama.pooling_type": number}
    with pytest.raises(
        UnsupportedModelError, match="choose a pooling: one of none, mean, cls, last and rank"
    ):
        pooling_of(metadata, None)
