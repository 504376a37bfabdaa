"""Perplexity by the protocol of llama-perplexity, so that its numbers can be compared.

The tokens are cut into chunks of n_ctx, each computed on its own with BOS in place of its first token where
the model has one; of each chunk the second half is scored, since its tokens have seen enough. The error is
the standard error of the mean negative log-likelihood, carried through the exponential.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from hotset.engine.engine import Engine
from hotset.engine.sampler import log_sum_exp
from hotset.errors import ContextLengthError, InvalidRequestError


@dataclass(frozen=True)
class PerplexityResult:
    """Perplexity over `n_scored` tokens, after `chunk` of `n_chunks` chunks, with its standard error.

    active_share: of all neurons, those that fired for a token, mean; None where they were not counted.
    """

    ppl: float
    error: float
    chunk: int
    n_chunks: int
    n_scored: int
    active_share: float | None = None


def perplexity_chunks(
    engine: Engine,
    tokens: Sequence[int],
    *,
    n_ctx: int = 512,
    chunks: int | None = None,
    bos_id: int | None = None,
    n_neurons: int = 0,
) -> Iterator[PerplexityResult]:
    """Computes chunk after chunk and yields the running result after each; the last one is the answer.

    chunks: how many, None or more than there are for all. bos_id: None for a model that adds no BOS.
    n_neurons: of all layers, for the active share, which the engine counts if it collects statistics.
    Raises InvalidRequestError when there are fewer than 2 * n_ctx tokens, as llama-perplexity does, and
    ContextLengthError when n_ctx is larger than the engine's.
    """
    if n_ctx < 4:
        raise InvalidRequestError(f"perplexity needs an n_ctx of at least 4, not {n_ctx}")
    if n_ctx > engine.n_ctx:
        raise ContextLengthError(
            f"perplexity over chunks of {n_ctx} tokens does not fit in the context of {engine.n_ctx}; "
            "load the model with a larger n_ctx"
        )
    if len(tokens) < 2 * n_ctx:
        raise InvalidRequestError(
            f"perplexity with chunks of {n_ctx} needs at least {2 * n_ctx} tokens, and the text has "
            f"{len(tokens)}; give a longer text or a smaller n_ctx"
        )
    if chunks is not None and chunks < 1:
        raise InvalidRequestError(f"perplexity needs at least one chunk, not {chunks}")
    n_chunks = len(tokens) // n_ctx
    if chunks is not None:
        n_chunks = min(n_chunks, chunks)

    first = n_ctx // 2
    losses: list[float] = []
    n_active = n_counted = 0
    for i in range(n_chunks):
        chunk = list(tokens[i * n_ctx : (i + 1) * n_ctx])
        targets = chunk[1:]
        if bos_id is not None:
            chunk[0] = bos_id

        def score(position: int, logits: np.ndarray, targets: list[int] = targets) -> None:
            for row, target in zip(logits, targets[position : position + len(logits)], strict=True):
                losses.append(log_sum_exp(row) - float(row[target]))

        sequence = engine.score(chunk[:-1], score, first=first)  # nothing follows the last token
        try:
            while sequence.finish_reason is None:
                engine.step()
                if engine.step_stats is not None:
                    n_active += int(engine.step_stats.active.sum())
                    n_counted += engine.step_stats.n_tokens * n_neurons
        finally:
            engine.cancel(sequence)
        if sequence.error is not None:
            raise sequence.error
        yield _result(losses, i + 1, n_chunks, n_active / n_counted if n_counted else None)


def _result(losses: list[float], chunk: int, n_chunks: int, active_share: float | None) -> PerplexityResult:
    nll = np.asarray(losses, np.float64)
    ppl = math.exp(nll.mean()) if nll.mean() < 700 else math.inf
    error = ppl * float(nll.std()) / math.sqrt(len(losses) - 1) if len(losses) > 1 else 0.0
    return PerplexityResult(ppl, error, chunk, n_chunks, len(losses), active_share)
