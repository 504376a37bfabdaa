"""Tiny encoders, and their texts' hidden states from transformers and from backends."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from made_once import made_once

from hotset.backends.base import Backend, Batch
from hotset.formats.gguf import GGUFFile, open_gguf
from hotset.model.config import config_from_gguf
from hotset.model.decoder import describe
from hotset.model.graph import Graph

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
tiny_models = pytest.importorskip("tiny_models")

ENCODERS = tiny_models.ENCODERS
LENGTHS = (150, 90, 37, 1)  # tokens
BLOCKS_EACH = 3
TOLERANCE = 1e-4  # of the largest value


def texts() -> list[np.ndarray]:
    """Return token ids without padding."""
    rng = np.random.default_rng(0)
    return [rng.integers(4, 299, n).astype(np.int32) for n in LENGTHS]


def states_of_transformers(name: str) -> list[np.ndarray]:
    model = tiny_models.build(ENCODERS[name])
    encoder = getattr(model, model.base_model_prefix, model)
    with torch.no_grad():
        return [encoder(torch.tensor(text)[None]).last_hidden_state[0].numpy() for text in texts()]


@pytest.fixture(params=ENCODERS)
def recipe(request: pytest.FixtureRequest, run_folder: Path) -> Iterator[tuple[GGUFFile, Graph, list]]:
    """Yield (open GGUF file, its graph, hidden states of the texts by transformers)."""
    name = request.param

    def compute(path: Path) -> None:
        with path.open("wb") as file:
            np.savez(file, *states_of_transformers(name))

    with np.load(made_once(run_folder / f"{name}.npz", compute)) as states:
        expected = list(states.values())
    with open_gguf(tiny_models.shared_gguf(name, run_folder)) as gguf:
        yield gguf, describe(config_from_gguf(gguf), gguf.tensors), expected


def batch_of(numbers: list[int]) -> Batch:
    """Return some of the texts in one step, each in its own KV blocks."""
    tables = np.arange(BLOCKS_EACH * len(LENGTHS), dtype=np.int32).reshape(BLOCKS_EACH, -1).T[:, ::-1].copy()
    chosen = [texts()[i] for i in numbers]
    n = sum(map(len, chosen))
    return Batch(
        np.concatenate(chosen),
        np.concatenate([np.arange(len(text), dtype=np.int32) for text in chosen]),
        np.repeat(np.array(numbers, np.int32), [len(text) for text in chosen]),
        tables,
        np.arange(n, dtype=np.int32),
    )


def run(backend: Backend, numbers: list[int]) -> list[np.ndarray]:
    """Return hidden states of some of the texts, computed in one step."""
    rows = backend.step(batch_of(numbers)).logits.copy()
    return np.split(rows, np.cumsum([LENGTHS[i] for i in numbers])[:-1])
