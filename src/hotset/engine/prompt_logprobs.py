"""The model's log-probability of each prompt token, which evaluation harnesses request."""

from __future__ import annotations

import numpy as np

from hotset.engine.engine import Engine
from hotset.engine.sampler import TokenLogprobs, row_logprobs, token_logprobs
from hotset.engine.sequence import Owner, Sequence


class PromptLogprobs:
    """Log-probabilities of one prompt, filled in by the steps of `sequence`.

    tokens: the checked prompt. n_top: how many of the most likely tokens to return for each position. found:
    one entry per token; None for the first. sequence: to be submitted; None if there is nothing to compute.
    """

    def __init__(self, engine: Engine, tokens: list[int], n_top: int, owner: Owner) -> None:
        self.found: list[TokenLogprobs | None] = [None]
        self._tokens, self._n_top, self._runtime = tokens, n_top, engine.backend.runtime
        self.sequence: Sequence | None = None
        if len(tokens) > 1:  # without the last token, whose logits would predict the answer
            self.sequence = engine.prepare_score(tokens[:-1], self._keep, owner=owner)

    def _keep(self, position: int, rows: np.ndarray) -> None:
        """Add rows of logits [n, n_vocab] of the positions from `position` on, in the engine's thread."""
        found = row_logprobs(rows, self._n_top, self._runtime)
        for token, row, logprobs in zip(self._tokens[position + 1 :], rows, found, strict=False):
            self.found.append(token_logprobs(row, token, logprobs))
