"""Intermediate values over a text, step by step, for profiling, calibration, traces and reports.

The functions take a TapSteps: `of_backend(backend)`, or `Model.tap_steps` (engine/taps.py), which runs
concurrently with other requests. For values with gradients see backends/torch/graph.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from hotset.backends.base import BLOCK_SIZE, Batch
from hotset.backends.cpu.backend import CpuBackend
from hotset.backends.stage import BackendOptions
from hotset.reporter import Reporter

if TYPE_CHECKING:
    from hotset.backends.base import Backend
    from hotset.formats.source import WeightSource
    from hotset.model.graph import Graph

MAX_SEQUENCE = 512  # tokens; longer texts are split into sequences of this length
_N_BLOCKS = MAX_SEQUENCE // BLOCK_SIZE
_STEP = 128  # tokens at a time; with 32 layers of 11,008 neurons the taps then take 180 MB

TapSteps = Callable[["Sequence[int] | np.ndarray", Sequence[str]], Iterator[Mapping[str, np.ndarray]]]
"""A function of (token ids of a sequence from its start, names of graph values). It yields, for each step,
name → float32 [n_tokens of the step, width]. Raises InvalidRequestError if the graph lacks a name."""

BackendFactory = Callable[["WeightSource", "Graph"], "Backend"]


def open_cpu(weights: WeightSource, graph: Graph) -> Backend:
    """Return a CPU backend that skips inactive neurons, with a cache for MAX_SEQUENCE tokens."""
    return CpuBackend(weights, graph, BackendOptions(n_blocks=_N_BLOCKS, max_batch=_STEP, sparse=True))


def of_backend(backend: Backend) -> TapSteps:
    """Return the TapSteps of an otherwise unused backend, whose cache is overwritten from position 0.

    A sequence of n tokens needs ceil(n / BLOCK_SIZE) blocks.
    """

    def steps(tokens: Sequence[int] | np.ndarray, names: Sequence[str]) -> Iterator[dict[str, np.ndarray]]:
        blocks = np.arange(-(-len(tokens) // BLOCK_SIZE))
        for batch in batches(tokens, names, blocks, min(_STEP, backend.max_batch)):
            yield dict(backend.step(batch).taps)

    return steps


def batches(
    tokens: Sequence[int] | np.ndarray,
    names: Sequence[str],
    blocks: Sequence[int] | np.ndarray,
    n_step: int,
    *,
    outputs: bool = False,
    slots: np.ndarray | None = None,
) -> Iterator[Batch]:
    """Yield one sequence [n] as steps of n_step tokens with taps.

    blocks: block numbers, int [ceil(n / BLOCK_SIZE)]. outputs: whether a tap only has rows of output tokens.
    slots: of recurrent states, int32 [1, 2]; None: the first two.
    """
    table = np.asarray(blocks, np.int32)[None]
    for i, first in enumerate(range(0, len(tokens), n_step)):
        part = np.asarray(tokens[first : first + n_step], np.int32)
        every = np.arange(len(part), dtype=np.int32)
        batch = Batch(
            tokens=part,
            positions=every + np.int32(first),
            sequences=np.zeros(len(part), np.int32),
            block_tables=table,
            outputs=every if outputs else every[:0],
            taps=tuple(names),
        )
        yield batch.with_states_of_rows(i, slots)


def whole(
    tap_steps: TapSteps, tokens: Sequence[int] | np.ndarray, names: Sequence[str]
) -> dict[str, np.ndarray]:
    """Return all values of one sequence: name → float32 [n_tokens, width]."""
    parts = list(tap_steps(tokens, names))
    return {name: np.concatenate([part[name] for part in parts]) for name in names}


def over(
    tap_steps: TapSteps,
    tokens: np.ndarray,
    names: Sequence[str],
    *,
    longest: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Iterator[tuple[bool, Mapping[str, np.ndarray]]]:
    """Yield the steps of every sequence of a text: whether the step starts a sequence, and its values.

    tokens: int32 [n] or [n_sequences, n]. longest: split into sequences of at most this many tokens; None: do
    not split. progress: called with (tokens done, total tokens).
    """
    done = 0
    if progress is not None:
        progress(0, tokens.size)
    for sequence in sequences(tokens, longest or tokens.shape[-1]):
        begins = True
        for values in tap_steps(sequence, names):
            yield begins, values
            begins = False
            done += len(values[names[0]])
            if progress is not None:
                progress(done, tokens.size)


def longest_sequence(backend: Backend) -> int:
    """Return how many tokens fit in the backend's cache, at most MAX_SEQUENCE."""
    return min(MAX_SEQUENCE, backend.n_blocks * BLOCK_SIZE)


def sequences(tokens: np.ndarray, n_max: int = MAX_SEQUENCE) -> list[np.ndarray]:
    """Split a text, [n] or [n_sequences, n_tokens], into sequences of at most n_max tokens."""
    if tokens.ndim == 2:
        return [part for row in tokens for part in sequences(row, n_max)]
    return [tokens[i : i + n_max] for i in range(0, len(tokens), n_max)]


def generate(
    backend: Backend,
    n_sequences: int,
    n_tokens: int,
    first: int | None,
    seed: int = 0,
    progress: Reporter | None = None,
) -> np.ndarray:
    """Return texts that the model generates at temperature 1: int32 [n_sequences, n_tokens].

    All are generated together. first: the token that starts each (BOS); None: a random one. Needs n_sequences
    * ceil(n_tokens / BLOCK_SIZE) blocks.
    """
    report, total = progress or Reporter(), n_sequences * (n_tokens - 1)
    rng = np.random.default_rng(seed)
    n_blocks = -(-n_tokens // BLOCK_SIZE)
    blocks = np.arange(n_sequences * n_blocks, dtype=np.int32).reshape(n_sequences, n_blocks)
    rows = np.arange(n_sequences, dtype=np.int32)
    out = np.empty((n_sequences, n_tokens), np.int32)
    out[:, 0] = rng.integers(0, backend.n_vocab, n_sequences) if first is None else first
    for position in range(n_tokens - 1):
        report.advance("generating text", n_sequences * position, total, "tokens")
        batch = Batch(out[:, position].copy(), np.full(n_sequences, position, np.int32), rows, blocks, rows)
        logits = backend.step(batch.with_states_of_rows(position)).logits
        noise = rng.gumbel(size=logits.shape).astype(np.float32)  # argmax(logits + Gumbel) samples softmax
        out[:, position + 1] = np.argmax(logits + noise, axis=1)
    report.advance("generating text", total, total, "tokens")
    return out
