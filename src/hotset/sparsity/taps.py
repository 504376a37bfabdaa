"""Runs token sequences through a backend and hands out what its taps saw: calibration and profiling."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import numpy as np

from hotset.backends.base import PAGE_SIZE, Batch
from hotset.backends.cpu.backend import CpuBackend
from hotset.reporter import Reporter

if TYPE_CHECKING:
    from hotset.backends.base import Backend
    from hotset.formats.source import WeightSource
    from hotset.model.graph import Graph

MAX_SEQUENCE = 512  # tokens; longer texts are cut into sequences of this length
_N_PAGES = MAX_SEQUENCE // PAGE_SIZE
_STEP = 128  # tokens at a time: a tapped model of 32 layers and 11,008 neurons then holds 180 MB of taps

BackendFactory = Callable[["WeightSource", "Graph"], "Backend"]


def open_cpu(weights: WeightSource, graph: Graph) -> Backend:
    """The CPU backend, skipping what does not fire, with a cache for MAX_SEQUENCE tokens."""
    return CpuBackend(weights, graph, n_pages=_N_PAGES, max_batch=_STEP, kv_type="f16", sparse=True)


def run(backend: Backend, tokens: np.ndarray, taps: tuple[str, ...]) -> dict[str, np.ndarray]:
    """What the taps see of one sequence: name → float32 [n_tokens, width]."""
    parts = list(steps(backend, tokens, taps))
    return {name: np.concatenate([part[name] for part in parts]) for name in taps}


def steps(backend: Backend, tokens: np.ndarray, taps: tuple[str, ...]) -> Iterator[dict[str, np.ndarray]]:
    """As `run`, a step at a time: for those who only add up. Needs ceil(n_tokens / PAGE_SIZE) pages."""
    pages = np.arange(-(-len(tokens) // PAGE_SIZE), dtype=np.int32)[None]
    step = min(_STEP, backend.max_batch)
    for i, first in enumerate(range(0, len(tokens), step)):
        part = np.asarray(tokens[first : first + step], np.int32)
        positions = np.arange(first, first + len(part), dtype=np.int32)
        batch = Batch(part, positions, np.zeros(len(part), np.int32), pages, np.zeros(0, np.int32), taps)
        yield dict(backend.step(batch.with_states_of_rows(i)).taps)


def longest_sequence(backend: Backend) -> int:
    """Tokens that fit its cache, up to MAX_SEQUENCE."""
    return min(MAX_SEQUENCE, backend.n_pages * PAGE_SIZE)


def sequences(tokens: np.ndarray, n_max: int = MAX_SEQUENCE) -> list[np.ndarray]:
    """A text as sequences of at most n_max tokens (or rows, where it is [n_sequences, n_tokens] already)."""
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
    """Texts that the model writes itself, sampled at temperature 1: int32 [n_sequences, n_tokens].

    All are written at once. first: the token that starts each (BOS); None: a random one. Needs
    n_sequences * ceil(n_tokens / PAGE_SIZE) pages.
    """
    report, total = progress or Reporter(), n_sequences * (n_tokens - 1)
    rng = np.random.default_rng(seed)
    n_pages = -(-n_tokens // PAGE_SIZE)
    pages = np.arange(n_sequences * n_pages, dtype=np.int32).reshape(n_sequences, n_pages)
    rows = np.arange(n_sequences, dtype=np.int32)
    out = np.empty((n_sequences, n_tokens), np.int32)
    out[:, 0] = rng.integers(0, backend.n_vocab, n_sequences) if first is None else first
    for position in range(n_tokens - 1):
        report.advance("generating text", n_sequences * position, total, "tokens")
        batch = Batch(out[:, position].copy(), np.full(n_sequences, position, np.int32), rows, pages, rows)
        logits = backend.step(batch.with_states_of_rows(position)).logits
        noise = rng.gumbel(size=logits.shape).astype(np.float32)  # argmax(logits + Gumbel) samples softmax
        out[:, position + 1] = np.argmax(logits + noise, axis=1)
    report.advance("generating text", total, total, "tokens")
    return out
