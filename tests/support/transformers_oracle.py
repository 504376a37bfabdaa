"""Tiny models of every architecture, and their logits from transformers and from the backends."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from backend_runs import cpu_backend
from cases import quick_are
from made_once import made_once

from hotset.backends.base import BLOCK_SIZE, Backend, Batch
from hotset.backends.reference import ReferenceBackend
from hotset.formats.gguf import GGUFFile, open_gguf
from hotset.model.config import config_from_gguf
from hotset.model.decoder import describe

torch = pytest.importorskip("torch")


tiny_models = pytest.importorskip("tiny_models")


TOLERANCE = 1e-4  # of the largest logit
LENGTHS = (150, 90, 37)  # tokens of the sequences
BLOCKS_EACH = 3
N_CTX = BLOCKS_EACH * BLOCK_SIZE
BACKENDS: dict[str, Callable[..., Backend]] = {"reference": ReferenceBackend, "cpu": cpu_backend}
RECIPES = tiny_models.RECIPES | tiny_models.EXPERTS


FIRST = tiny_models.first_of_each_architecture()


@pytest.fixture(params=quick_are(FIRST, RECIPES))
def recipe(request: pytest.FixtureRequest, run_folder: Path) -> Iterator[Any]:
    """Yield (open GGUF file, sequences of token ids, their logits by transformers)."""
    name = request.param
    rng = np.random.default_rng(0)
    sequences = [rng.integers(0, tiny_models.VOCABULARY, n) for n in LENGTHS]

    def compute(path: Path) -> None:
        theirs = tiny_models.build(RECIPES[name])
        with torch.no_grad(), path.open("wb") as file:
            np.savez(file, *[theirs(torch.tensor(s)[None]).logits[0].numpy() for s in sequences])

    with np.load(made_once(run_folder / f"{name}.npz", compute)) as logits:
        expected = list(logits.values())
    with open_gguf(tiny_models.shared_gguf(name, run_folder)) as gguf:
        yield gguf, sequences, expected


def open_backend(name: str, gguf: GGUFFile) -> Backend:
    graph = describe(config_from_gguf(gguf).for_context(N_CTX), gguf.tensors)
    return BACKENDS[name](
        gguf, graph, n_blocks=BLOCKS_EACH * len(LENGTHS), n_states=2 * len(LENGTHS), max_batch=256,
        kv_type="f32",
    )  # fmt: skip


def run(backend: Backend, sequences: Sequence[np.ndarray], plan: Sequence[Sequence[tuple[int, int]]]) -> list:
    """Return logits [n_tokens, n_vocab] of each sequence.

    plan: for each step, (sequence, number of tokens) pairs. The KV blocks of the sequences are interleaved,
    so that a block table is never the identity.
    """
    tables = np.arange(BLOCKS_EACH * len(sequences), dtype="i4").reshape(BLOCKS_EACH, -1).T[:, ::-1].copy()
    done, logits = [0] * len(sequences), [[] for _ in sequences]
    steps = np.zeros(len(sequences), np.int32)
    for step in plan:
        tokens, positions, owners = [], [], []
        for i, n in step:
            tokens += sequences[i][done[i] : done[i] + n].tolist()
            positions += range(done[i], done[i] + n)
            owners += [i] * n
            done[i] += n
        arrays = (np.array(a, np.int32) for a in (tokens, positions, owners))
        batch = Batch(*arrays, tables, np.arange(len(tokens), dtype=np.int32))
        result = backend.step(batch.with_states_of_rows(steps))
        steps[[i for i, _ in step]] += 1
        for i in range(len(sequences)):
            logits[i].append(result.logits[np.array(owners) == i].copy())
    assert done == [len(s) for s in sequences]
    return [np.concatenate(rows) for rows in logits]


def relative_error(found: np.ndarray, expected: np.ndarray) -> float:
    assert found.shape == expected.shape
    return float(np.abs(found - expected).max() / np.abs(expected).max())


def mixed_plan() -> list[list[tuple[int, int]]]:
    """Return prompts that start late and end early while others decode.

    0 prefills first, then all proceed at different paces.
    """
    plan = [[(0, 70)], [(0, 1), (1, 50)], [(1, 1), (2, 30), (0, 5)]]
    plan += [[(2, 1), (0, 1), (1, 1)]] * 7
    rest = [LENGTHS[0] - 83, LENGTHS[1] - 58, 0]
    return [*plan, [(1, rest[1]), (0, rest[0])]]


PLANS = {
    "prefill": [[(i, n)] for i, n in enumerate(LENGTHS)],
    "chunks": [[(i, min(23, n - at))] for i, n in enumerate(LENGTHS) for at in range(0, n, 23)],
    "decode": [[(i, 1)] for i, n in enumerate(LENGTHS) for _ in range(n)],
    "mixed": mixed_plan(),
}
