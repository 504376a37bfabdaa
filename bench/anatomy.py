"""The parts of a decoded token: streamed bytes, gathered bytes, fired neurons."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from hotset.backends.base import BLOCK_SIZE, Batch
from hotset.sparsity.stats import StepCosts

if TYPE_CHECKING:
    from hotset import Model
    from hotset.backends.base import StepStats

STREAMS_ABOVE = 0.75  # share of a matrix's rows above which the engine reads all of them


@dataclass(frozen=True)
class Anatomy:
    """Means over tokens and layers. streamed, gathered: bytes per token; selected, active: shares of neurons.

    seconds: median of a step; predictor, ffn, attention: mean seconds within it.
    """

    streamed: float
    gathered: float
    selected: float
    active: float
    seconds: float
    predictor: float
    ffn: float
    attention: float


def decode(model: Model, tokens: Sequence[int]) -> tuple[list[float], list[StepStats]]:
    """Decode the tokens one by one, directly with the backend; return seconds and statistics of each step."""
    n = len(tokens)
    blocks = np.arange(-(-n // BLOCK_SIZE), dtype=np.int32)[None]
    zero = np.zeros(1, np.int32)
    seconds, stats = [], []
    for position, token in enumerate(tokens):
        at = np.array([position], np.int32)
        start = time.perf_counter()
        model.backend.step(Batch(np.array([token], np.int32), at, zero, blocks, zero))
        seconds.append(time.perf_counter() - start)
        counted = model.backend.stats()
        assert counted is not None, "this backend keeps no statistics"
        stats.append(counted)
    return seconds, stats


def random_tokens(model: Model, n: int, seed: int = 0) -> list[int]:
    """Return token ids without repetitions, as a benchmark needs them."""
    return np.random.default_rng(seed).integers(0, model.backend.n_vocab, n).tolist()


def anatomy(model: Model, n_tokens: int = 24, n_warm: int = 4) -> Anatomy:
    """Decode random tokens, the first `n_warm` uncounted. The model needs a context of n_tokens + n_warm."""
    seconds, stats = decode(model, random_tokens(model, n_tokens + n_warm))
    seconds, stats = seconds[n_warm:], stats[n_warm:]
    n_ff = np.array(model.config.n_ff)
    rows = {
        "gate": np.mean([s.gate_rows for s in stats], axis=0) / n_ff,
        "up": np.mean([s.up_rows for s in stats], axis=0) / n_ff,
        "down": np.mean([s.down_rows for s in stats], axis=0) / n_ff,
    }
    gathered = 0.0
    tensors = model.weights.tensors
    for ffn in model.graph.ffns:
        for name, op in (("gate", ffn.gate), ("up", ffn.up), ("down", ffn.down)):
            if op is None:
                continue
            share = rows[name][ffn.layer]
            if share < STREAMS_ABOVE and (name != "down" or ffn.neuron_major):
                gathered += tensors[op.weight].nbytes * share
    summary = StepCosts(model.graph, tensors).summary(stats)
    keys_and_values = model.cost.kv_bytes_read(n_warm + n_tokens / 2, model.kv_type)
    return Anatomy(
        streamed=summary.bytes_touched_per_token - gathered + keys_and_values,
        gathered=gathered,
        selected=summary.selected_share,
        active=summary.active_share,
        seconds=float(np.median(seconds)),
        predictor=summary.seconds["predictor"],
        ffn=summary.seconds["ffn"],
        attention=summary.seconds["attention"],
    )
