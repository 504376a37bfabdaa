"""Tiny models whose neurons can be skipped, in every mode, on a backend."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from backend_runs import assert_every_operation_is_right, batch, cpu_backend, logits_of, tokens
from tiny_gguf import write_relu

from hotset.backends.base import Batch
from hotset.backends.cpu.backend import CpuBackend
from hotset.backends.reference import ReferenceBackend
from hotset.formats.gguf import GGUFFile, open_gguf
from hotset.formats.quants import GGMLType
from hotset.model.config import config_from_gguf
from hotset.model.decoder import describe
from hotset.model.graph import Graph
from hotset.model.operations import Op
from hotset.sparsity.modes import choose
from hotset.sparsity.preparing import Prepared, prepare

T = GGMLType
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"architecture": "llama"}, "bamboo": {"architecture": "bamboo"},
    "falcon-7b": {"architecture": "falcon", "n_head_kv": 1},
    "falcon-40b": {"architecture": "falcon", "two_norms": True}, "opt": {"architecture": "opt"},
}  # fmt: skip
ACTIVATIONS = {
    "relu2": {}, "fatrelu": {"hotset.fatrelu_threshold": 0.4}, "relu": {"hotset.up_activation": "relu"},
}  # fmt: skip
N_FF = 736  # eleven and a half tiles of neurons, several chunks
# With F32 weights both sides round sums of at most N_FF terms in different orders: sqrt(N_FF) / 2^24 each,
# over the eight products in each of two layers. Norms and softmax pass errors on with about the same size; a
# factor of four allows for the exceptions.
TOLERANCE = 4 * 16 * math.sqrt(N_FF) * 2.0**-24
ONE_BY_ONE = [*range(1, 12)]


def write(path: Path, model: str, type: GGMLType = T.F32, **options: Any) -> GGUFFile:
    sizes = {"n_embd": 64, "n_ff": N_FF, "type_of": lambda name: type}
    return open_gguf(write_relu(path / "model.gguf", **{**MODELS[model], **sizes, **options}))


def prepared(gguf: GGUFFile, mode: str, predictor: str | None = None) -> tuple[Prepared, Graph]:
    config = config_from_gguf(gguf)
    ready = prepare(gguf, config, choose(config, gguf.tensors, mode, predictor))
    return ready, describe(config, ready.weights.tensors, ready.predictor)


def cpu(gguf: GGUFFile, mode: str, predictor: str | None = None, **options: Any) -> CpuBackend:
    ready, graph = prepared(gguf, mode, predictor)
    given = {"n_blocks": 8, "max_batch": 128, "n_threads": 2, "sparse": mode != "dense", **options}
    return cpu_backend(ready.weights, graph, **given)


def assert_every_value_is_right(gguf: GGUFFile, mode: str) -> None:
    """Assert that each operation matches the reference, and that taps do not change the logits.

    An FFN is split into its operations if a value inside it is tapped.
    """
    ready, graph = prepared(gguf, mode)
    backend = cpu(gguf, mode, kv_type="f32")
    assert_every_operation_is_right(ready.weights, graph, backend, tokens(40), [7, 8, 9], [0])
    expected = logits_of(backend, tokens(40), [7, 8, 9], [0])
    for value in graph.values:
        tapped = backend.step(batch([(tokens(40), 0, [0])], (value.name,)))
        np.testing.assert_array_equal(tapped.logits, expected)


class Replayed(ReferenceBackend):
    """The reference, with scores from another engine."""

    def __init__(self, *arguments: Any, scores: dict[str, np.ndarray], **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.scores = scores

    def _compute(self, op: Op, values: Any, batch: Batch, slots: Any) -> np.ndarray:
        if op.out.name in self.scores:
            return self.scores[op.out.name]
        return super()._compute(op, values, batch, slots)


def step(backend: Any, ids: np.ndarray, taps: Sequence[str]) -> Any:
    return backend.step(batch([(ids, 0, [0])], tuple(taps)))


def hot_neurons(share: float, n_ff: int = N_FF, seed: int = 0) -> np.ndarray:
    hot = np.zeros(n_ff, np.bool_)
    hot[np.random.default_rng(seed).permutation(n_ff)[: round(share * n_ff)]] = True
    return hot


def relative_error(found: np.ndarray, expected: np.ndarray) -> float:
    """Return the root mean square of the difference, relative to the expected values'.

    The largest error says little: in a random model the softmax can depend on the rounding of one score.
    """
    return float(np.sqrt(np.mean((found - expected) ** 2) / np.mean(expected**2)))
