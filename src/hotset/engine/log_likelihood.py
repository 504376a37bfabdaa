"""Log-likelihoods of continuations: sums of log-probabilities, with several sequences in each step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from hotset.engine.engine import Engine
from hotset.engine.sampler import row_logprobs
from hotset.errors import StepCancelledError


@dataclass(frozen=True)
class Continuation:
    """A text of token ids. first: index of the first scored token, at least 1."""

    tokens: Sequence[int]
    first: int


def log_likelihoods(engine: Engine, continuations: Sequence[Continuation]) -> np.ndarray:
    """Return float64 [n]: for each, the sum of ln p(token i | tokens before it) from index `first` on.

    All run concurrently and share the blocks of common prefixes; no result depends on the others. If
    generated tokens are thresholded (operations.Threshold), all tokens are. Raises ContextLengthError before
    any is computed if one does not fit.
    """
    sums = np.zeros(len(continuations))

    def adder(index: int) -> Callable[[int, np.ndarray], None]:
        targets = continuations[index].tokens

        def add(position: int, rows: np.ndarray) -> None:
            for i, (log_total, _) in enumerate(row_logprobs(rows, 0, engine.backend.runtime)):
                sums[index] += float(rows[i, targets[position + 1 + i]]) - log_total

        return add

    sequences = [  # without the last token, after which nothing is scored
        engine.prepare_score(one.tokens[:-1], adder(index), first=one.first - 1, as_answer=True)
        for index, one in enumerate(continuations)
    ]
    try:
        for sequence in sequences:
            engine.enqueue(sequence)
        while any(sequence.finish_reason is None for sequence in sequences):
            engine.step()
    finally:
        for sequence in sequences:
            engine.cancel(sequence)
    for sequence in sequences:
        if sequence.error is not None:
            raise sequence.error
        if sequence.finish_reason == "cancelled":
            raise StepCancelledError
    return sums
