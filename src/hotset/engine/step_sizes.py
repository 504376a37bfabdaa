"""Measures steps of several tokens of one sequence: the cost of verifying drafted tokens."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from hotset.backends.base import BLOCK_SIZE, Backend, Batch
from hotset.errors import InvalidRequestError

_SEED = 0


class StepTime(NamedTuple):
    """The median time of a step, in milliseconds. n_tokens: tokens of the step, each with logits."""

    n_tokens: int
    ms: float


def measure_steps(
    backend: Backend, sizes: Sequence[int], *, depth: int = 0, repetitions: int = 5, thresholded: bool = False
) -> list[StepTime]:
    """Return the times of steps of n random tokens of one sequence, for each n in `sizes`, at a depth.

    The sizes take turns, so that a slowdown of the machine affects all of them. thresholded: compute the
    tokens like an answer's, if the graph has thresholds. The backend must be otherwise unused. Raises
    InvalidRequestError if a size exceeds the largest step.
    """
    longest = min(backend.max_batch, backend.n_blocks * BLOCK_SIZE - depth)
    for n in sizes:
        if not 1 <= n <= longest:
            raise InvalidRequestError(f"a step must have 1 to {longest} tokens with this model, not {n}")
    tokens = np.random.default_rng(_SEED).integers(0, backend.n_vocab, depth + max(sizes), dtype=np.int32)
    n_blocks = -(-len(tokens) // BLOCK_SIZE)
    blocks = np.arange(n_blocks, dtype=np.int32)[None]
    n_before = 0  # steps so far, which decide the slot of the recurrent state

    def run(start: int, n: int, n_rows: int) -> float:
        batch = Batch(
            tokens[start : start + n], np.arange(start, start + n, dtype=np.int32), np.zeros(n, np.int32),
            blocks, np.arange(n - n_rows, n, dtype=np.int32),
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
