"""What a step of several tokens of one sequence takes: the price of verifying drafted tokens."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from hotset.backends.base import PAGE_SIZE, Backend, Batch
from hotset.errors import InvalidRequestError

_SEED = 0


class StepTime(NamedTuple):
    """n_tokens: of a step, each with logits. ms: milliseconds that it took, the median of the repetitions."""

    n_tokens: int
    ms: float


def measure_steps(
    backend: Backend, sizes: Sequence[int], *, depth: int = 0, repetitions: int = 5, thresholded: bool = False
) -> list[StepTime]:
    """The time of a step of n random tokens of one sequence for each n of `sizes`, after `depth` others.

    The sizes take turns, so that a machine that becomes slower meanwhile is slower for all of them.
    thresholded: the tokens are computed as those of an answer, where the graph has thresholds. Nothing else
    may use the backend. Raises InvalidRequestError for a size that the backend does not take at once.
    """
    longest = min(backend.max_batch, backend.n_pages * PAGE_SIZE - depth)
    for n in sizes:
        if not 1 <= n <= longest:
            raise InvalidRequestError(f"a step of {n} tokens is not among the 1 to {longest} of this model")
    tokens = np.random.default_rng(_SEED).integers(0, backend.n_vocab, depth + max(sizes), dtype=np.int32)
    n_pages = -(-len(tokens) // PAGE_SIZE)
    pages = np.arange(n_pages, dtype=np.int32)[None]
    n_before = 0  # steps of the sequence, by which its states take turns

    def run(start: int, n: int, n_rows: int) -> float:
        batch = Batch(
            tokens[start : start + n], np.arange(start, start + n, dtype=np.int32), np.zeros(n, np.int32),
            pages, np.arange(n - n_rows, n, dtype=np.int32),
            thresholded=np.full(n, thresholded) if thresholded else None,
        )  # fmt: skip
        batch = batch.with_states_of_rows(n_before)
        begun = time.perf_counter()
        backend.step(batch)
        return time.perf_counter() - begun

    for start in range(0, depth, backend.max_batch):
        run(start, min(backend.max_batch, depth - start), 0)
        n_before += 1
    seconds: dict[int, list[float]] = {n: [] for n in dict.fromkeys(sizes)}
    for i in range(repetitions + 1):
        for n, found in seconds.items():
            taken = run(depth, n, n)
            if i:  # the first is the warm-up
                found.append(taken)
    return [StepTime(n, 1e3 * statistics.median(found)) for n, found in seconds.items()]
