"""Encoders compared with transformers: tiny models with random parameters give the same hidden states.

Every backend runs each recipe of `tiny_models.ENCODERS` with one text, and with several texts in one step,
which must not change a bit. Texts are longer than the windows (24), and need several KV blocks.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from backend_runs import assert_every_operation_is_right, cpu_backend
from fuzz import fuzz_reads

import hotset
from hotset.backends.reference import ReferenceBackend
from hotset.errors import ContextLengthError, InvalidRequestError, UnsupportedModelError
from hotset.formats.gguf import GGUFFile
from hotset.model.graph import Graph
from hotset.offload.weight_store import STEP
from hotset.placement import ram

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
tiny_models = pytest.importorskip("tiny_models")
from encoders_oracle import BLOCKS_EACH, LENGTHS, TOLERANCE, recipe, run, states_of_transformers, texts  # noqa: E402

__all__ = ["recipe"]  # the fixture


def opened(kind: Any, gguf: GGUFFile, graph: Graph, **how: Any) -> Any:
    how |= {"n_blocks": BLOCKS_EACH * len(LENGTHS), "max_batch": 512, "kv_type": "f32"}
    return closing(kind(gguf, graph, **how))


@pytest.mark.parametrize("kind", [ReferenceBackend, cpu_backend])
def test_hidden_states_match_transformers_alone_and_together(recipe: Any, kind: Any) -> None:
    gguf, graph, expected = recipe
    with opened(kind, gguf, graph) as backend:
        alone = [run(backend, [i])[0] for i in range(len(LENGTHS))]
        for i, states in enumerate(alone):
            assert np.abs(states - expected[i]).max() < TOLERANCE * np.abs(expected[i]).max(), i
        for order in ([0, 1, 2, 3], [3, 2, 0], [1, 0]):
            for i, states in zip(order, run(backend, order), strict=True):
                if kind is cpu_backend:
                    assert np.array_equal(states, alone[i]), (order, i)
                else:  # NumPy's products depend on the number of rows
                    assert np.abs(states - alone[i]).max() < TOLERANCE * np.abs(alone[i]).max()


def test_threads_and_instructions_change_no_bit(recipe: Any) -> None:
    gguf, graph, _ = recipe
    found = []
    for how in ({"n_threads": 1}, {"n_threads": 3}, {"n_threads": 2, "isa": "scalar"}):
        with opened(cpu_backend, gguf, graph, **how) as backend:
            found.append(np.concatenate(run(backend, [0, 1, 2, 3])))
    assert np.array_equal(found[0], found[1])
    assert np.array_equal(found[0], found[2])


def test_the_graph_in_torch_computes_the_same(recipe: Any) -> None:
    from hotset.backends.torch.graph import TorchGraph

    gguf, graph, expected = recipe
    found = TorchGraph(gguf, graph).logits(torch.tensor(texts()[0])[None]).detach().numpy()
    assert np.abs(found - expected[0]).max() < TOLERANCE * np.abs(expected[0]).max()


def test_every_operation_is_right(recipe: Any) -> None:
    gguf, graph, _ = recipe
    with closing(cpu_backend(gguf, graph, n_blocks=2, max_batch=100, n_threads=1, kv_type="f32")) as backend:
        assert_every_operation_is_right(gguf, graph, backend, texts()[1], [], [0, 1])


@pytest.mark.backend("triton")
@pytest.mark.parametrize("name", ["bert", "gemma-embedding"])
def test_a_device_refuses_by_name(name: str, run_folder: Path) -> None:
    path = tiny_models.shared_gguf(name, run_folder)
    with pytest.raises(UnsupportedModelError, match="attention of encoders is computed on the CPU"):
        hotset.load(path, device="simulated")


# ---- the engine


@pytest.fixture
def encoder(run_folder: Path) -> Iterator[hotset.Model]:
    path = tiny_models.shared_gguf("bert", run_folder)
    with hotset.load(path, device="cpu", n_threads=2, max_batch=16) as model:
        yield model


def test_text_is_computed_in_one_step_despite_max_batch(encoder: hotset.Model) -> None:
    expected = states_of_transformers("bert")
    steps = encoder.engine.counters().steps
    vectors = encoder.embed(texts(), pooling="mean")
    assert encoder.backend.max_batch == encoder.n_ctx == 256
    assert encoder.engine.counters().steps - steps <= len(LENGTHS)
    for vector, states in zip(vectors, expected, strict=True):
        mean = states.mean(axis=0, dtype=np.float64)
        assert np.abs(vector - mean / np.linalg.norm(mean)).max() < 1e-3  # keys and values are F16


def test_a_text_that_does_not_fit_is_refused(encoder: hotset.Model) -> None:
    assert encoder.embed([[5] * 256]).shape == (1, 96)
    with pytest.raises(ContextLengthError, match="257 tokens do not fit in the context of 256"):
        encoder.embed([[5] * 257])


def test_taps_are_of_one_step(encoder: hotset.Model) -> None:
    tapped = encoder.taps(texts()[0], ["result", "blk.2.ffn_act"])
    assert tapped["blk.2.ffn_act"].shape == (150, 160)
    expected = states_of_transformers("bert")[0]
    assert np.abs(tapped["result"] - expected).max() < 5e-3 * np.abs(expected).max()


def test_generating_requests_are_refused(encoder: hotset.Model) -> None:
    message = "this is an embedding model, .* use hotset embed or /v1/embeddings"
    for ask in (
        lambda: encoder.generate("hello"),
        lambda: next(encoder.stream("hello")),
        lambda: encoder.chat([{"role": "user", "content": "hello"}]),
        lambda: encoder.logits([5, 6]),
        lambda: encoder.perplexity("hello " * 100, n_ctx=16),
    ):
        with pytest.raises(InvalidRequestError, match=message):
            ask()


def test_training_on_logits_is_refused(encoder: hotset.Model, tmp_path: Path) -> None:
    from hotset.training.student import unsupported_operations
    from hotset.training.thresholds import calibrate_thresholds

    path = encoder.gguf.path
    with pytest.raises(InvalidRequestError, match="this is an embedding model"):
        calibrate_thresholds(path, "hello " * 2000, tmp_path / "out.thresholds")
    assert unsupported_operations(encoder.graph) == "is an embedding model"


def test_encoder_with_zeros_computes_only_firing_neurons(run_folder: Path) -> None:
    path, found = tiny_models.shared_gguf("bert-relu", run_folder), []
    for sparsity in ("dense", "exact"):
        with hotset.load(path, device="cpu", n_threads=2, sparsity=sparsity) as model:
            found.append(model.embed(texts()))
    assert np.array_equal(*found)
    with pytest.raises(InvalidRequestError, match="predictors for embedding models are not supported"):
        hotset.load(path, device="cpu", predictor="svd")


def test_all_layers_share_one_cache(encoder: hotset.Model) -> None:
    assert encoder.cost.kv_bytes_per_token("f16") == 2 * 2 * 96  # keys and values of one layer


def test_a_memory_budget_has_room_for_whole_texts(
    encoder: hotset.Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ram, "own_memory", lambda: 0)  # the tests use enough memory for many such models
    monkeypatch.setattr(ram, "PROGRAM", 0)
    path, how = encoder.gguf.path, {"device": "cpu", "n_threads": 2, "max_batch": 16}
    with hotset.load(path, **how, ram_budget=fuzz_reads.least_budget(path, **how)) as model:
        assert model.ram is not None
        assert model.engine.n_ctx == model.backend.max_batch == 256 > STEP
        assert np.array_equal(model.embed(texts()), encoder.embed(texts()))
