"""The training data of a student: windows of tokens from a weighted mixture of texts.

Every text is one row of tokens, split into adjacent windows. Window number w of a run depends only on the
seed: its text is drawn by the weights, and the windows of a text come in a new random order in each round,
split at a new offset. So a resumed run continues with the same windows, and several processes share windows
by number.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hotset.errors import InvalidRequestError

N_HELD_OUT = 8  # windows for evaluation
_BLOCK = 4096  # windows whose texts are drawn at once


@dataclass(frozen=True)
class WeightedText:
    """A text: its token ids, int32 [n], and how often it is used, relative to the others."""

    name: str
    tokens: np.ndarray
    weight: float = 1.0


class Mixture:
    """Windows of `n_ctx` tokens. Raises InvalidRequestError if a text is too short."""

    def __init__(self, sources: Sequence[WeightedText], n_ctx: int, seed: int = 0) -> None:
        if not sources:
            raise InvalidRequestError("no text to train on was given; use `text` or `generate`")
        for source in sources:
            if len(source.tokens) < 2 * n_ctx:
                raise InvalidRequestError(
                    f"the text {source.name} has {len(source.tokens)} tokens, but windows of {n_ctx} need at "
                    f"least {2 * n_ctx}; give a longer text or a smaller n_ctx"
                )
        self.sources = sources
        self.n_ctx = n_ctx
        self.seed = seed
        weights = np.array([source.weight for source in sources], np.float64)
        self._weights = weights / weights.sum()
        self._drawn: list[tuple[int, int]] = []  # per window: its text, and how many earlier windows it gave
        self._counts = [0] * len(sources)

    def window(self, number: int) -> np.ndarray:
        """Return the tokens of window `number`, int32 [n_ctx]."""
        while number >= len(self._drawn):
            rng = np.random.default_rng([self.seed, len(self._drawn)])
            for i in rng.choice(len(self.sources), _BLOCK, p=self._weights):
                self._drawn.append((int(i), self._counts[i]))
                self._counts[i] += 1
        i, count = self._drawn[number]
        tokens, n_ctx = self.sources[i].tokens, self.n_ctx
        per_round = len(tokens) // n_ctx - 1  # for any offset
        turn, place = divmod(count, per_round)
        rng = np.random.default_rng([self.seed, i, turn])
        offset = int(rng.integers(0, n_ctx))
        first = offset + n_ctx * int(rng.permutation(per_round)[place])
        return tokens[first : first + n_ctx]


def parse_text(text: str) -> tuple[Path, float]:
    """Parse a --text option: FILE or FILE:WEIGHT."""
    name, colon, number = text.rpartition(":")
    if not colon or Path(text).is_file():
        return Path(text), 1.0
    try:
        weight = float(number)
    except ValueError:
        return Path(text), 1.0
    if not 0 < weight < float("inf"):
        raise InvalidRequestError(f"the weight of `text` {text} must be a positive number")
    return Path(name), weight


def joined(documents: Sequence[Sequence[int]]) -> np.ndarray:
    """Return documents one after another, int32."""
    if not documents:
        return np.empty(0, np.int32)
    return np.concatenate([np.asarray(document, np.int32) for document in documents])


def parse_amount(text: str, option: str) -> tuple[int, float]:
    """Parse an option such as --generate: N or N:WEIGHT."""
    number, _, weight = text.partition(":")
    try:
        amount, share = int(number), float(weight or 1)
    except ValueError:
        amount, share = 0, 0.0
    if amount < 1 or not 0 < share < float("inf"):
        raise InvalidRequestError(
            f"{option} takes a number of tokens, optionally followed by a colon and a weight, not {text!r}"
        )
    return amount, share


def split_held_out(
    tokens: Sequence[int], n_ctx: int, *, whole: bool = False
) -> tuple[list[int], list[list[int]]]:
    """Return the text to train on, and up to N_HELD_OUT windows from its end to evaluate on.

    whole: hold out as much as N_HELD_OUT allows, and train on nothing. Raises InvalidRequestError if the text
    is too short.
    """
    n = min(N_HELD_OUT, len(tokens) // n_ctx if whole else max(1, len(tokens) // n_ctx // 10))
    if n < 1 or len(tokens) < n * n_ctx:
        raise InvalidRequestError(
            f"a text of {len(tokens)} tokens is too short for windows of {n_ctx}; give a longer one"
        )
    first = len(tokens) - n * n_ctx
    return list(tokens[:first]), [list(tokens[i : i + n_ctx]) for i in range(first, len(tokens), n_ctx)]
