"""Drafters for tests: their drafts are partly right, by a die that is theirs alone."""

from __future__ import annotations

import random
from collections.abc import Callable
from collections.abc import Sequence as Many

from hotset.engine.sequence import Sequence
from hotset.engine.speculation import Draft


class Guesser:
    """Drafts what `answer` says of a sequence (all tokens that will follow its prompt, or some), each token
    with probability `right`; else another one. Its drafts may be longer or shorter than is wanted at most."""

    name = "guesser"
    seconds_per_token = 0.0

    def __init__(
        self, answer: Callable[[Sequence], Many[int]], n_vocab: int, right: float, seed: int = 0
    ) -> None:
        self._answer, self._n_vocab, self._right = answer, n_vocab, right
        self._random = random.Random(seed)
        self.n_drafted = 0
        self.forgotten: set[Sequence] = set()

    def draft(self, wanted: Many[tuple[Sequence, int]]) -> list[Draft]:
        return [self._draft(sequence, self._random.randint(0, n)) for sequence, n in wanted]

    def _draft(self, sequence: Sequence, n: int) -> Draft:
        done = len(sequence.tokens) - sequence.n_prompt
        tokens = list(self._answer(sequence)[done : done + n])
        for i in range(len(tokens)):
            if self._random.random() > self._right:
                tokens[i] = (tokens[i] + self._random.randrange(1, self._n_vocab)) % self._n_vocab
        self.n_drafted += len(tokens)
        return Draft(tokens, [1] * len(tokens))

    def forget(self, sequence: Sequence) -> None:
        self.forgotten.add(sequence)

    def reset(self) -> None:
        pass

    def close(self) -> None:
        pass
