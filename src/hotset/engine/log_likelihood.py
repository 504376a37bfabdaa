"""Log-likelihoods of continuations: sums of log-probabilities, with several sequences in each step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from hotset.engine.driver import EngineThread
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


def all_logits(
    thread: EngineThread, tokens: list[int], check_open: Callable[[], None], *, reuse_prefix: bool
) -> np.ndarray:
    """Return the logits after each token: float32 [n_tokens, n_vocab].

    check_open: raises if the model was closed meanwhile.
    """
    rows = np.empty((len(tokens), thread.engine.backend.n_vocab), np.float32)

    def keep(position: int, logits: np.ndarray) -> None:
        rows[position : position + len(logits)] = logits

    with thread.exclusive() as engine:
        sequence = engine.enqueue(engine.prepare_score(tokens, keep, reuse_prefix=reuse_prefix))
        try:
            while sequence.finish_reason is None:
                engine.step()
            check_open()
        finally:
            engine.cancel(sequence)
    if sequence.error is not None:
        raise sequence.error
    return rows
