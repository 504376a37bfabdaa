"""How likely a model finds given continuations: sums of log-probabilities, several sequences in each step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from hotset.engine.engine import Engine
from hotset.engine.sampler import row_logprobs
from hotset.errors import StepCancelledError


@dataclass(frozen=True)
class Continuation:
    """tokens: of a whole text. first: the first of them that is scored, at least 1."""

    tokens: Sequence[int]
    first: int


def log_likelihoods(engine: Engine, continuations: Sequence[Continuation]) -> np.ndarray:
    """float64 [n]: of each, Σ ln p(token i | the tokens before it) over its tokens from `first` on.

    They run side by side, and what they have in common is computed once where it fills pages; no number
    depends on the others. Where generated tokens are thresholded (operations.Threshold) all of them are.
    Raises ContextLengthError for one that does not fit, before any is computed.
    """
    sums = np.zeros(len(continuations))

    def adder(index: int) -> Callable[[int, np.ndarray], None]:
        targets = continuations[index].tokens

        def add(position: int, rows: np.ndarray) -> None:
            for i, (log_total, _) in enumerate(row_logprobs(rows, 0, engine.backend.runtime)):
                sums[index] += float(rows[i, targets[position + 1 + i]]) - log_total

        return add

    sequences = [  # (nothing follows the last token)
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
