"""What the model thought of each token of a prompt: the scores that evaluation harnesses ask for."""

from __future__ import annotations

import numpy as np

from hotset.engine.engine import Engine
from hotset.engine.sampler import TokenLogprobs, row_logprobs, token_logprobs
from hotset.engine.sequence import Owner, Sequence


class PromptLogprobs:
    """Scores of one prompt, which come with the steps of `sequence`.

    tokens: the checked prompt. n_top: how many of the most likely tokens are wanted beside each.
    found: one entry per token; None for the first, which nothing comes before.
    owner: for whom it is computed. sequence: to be submitted; None where there is nothing to compute.
    """

    def __init__(self, engine: Engine, tokens: list[int], n_top: int, owner: Owner) -> None:
        self.found: list[TokenLogprobs | None] = [None]
        self._tokens, self._n_top, self._runtime = tokens, n_top, engine.backend.runtime
        self.sequence: Sequence | None = None
        if len(tokens) > 1:  # the last one's row would be of what comes after the prompt
            self.sequence = engine.prepare_score(tokens[:-1], self._keep, owner=owner)

    def _keep(self, position: int, rows: np.ndarray) -> None:
        """Takes rows of logits [n, n_vocab] of positions from `position` on; the engine's thread calls it."""
        found = row_logprobs(rows, self._n_top, self._runtime)
        for token, row, logprobs in zip(self._tokens[position + 1 :], rows, found, strict=False):
            self.found.append(token_logprobs(row, token, logprobs))
