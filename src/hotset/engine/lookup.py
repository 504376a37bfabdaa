"""Drafts by n-gram lookup: the tokens that followed the latest tokens where they occurred before.

Earlier occurrences are sought in the sequence itself, prompt and answer, and optionally in a text. Summaries,
edited code and answers about a given text repeat long parts of it. A lookup takes microseconds, so a draft
costs only its verification.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from itertools import takewhile

import numpy as np

from hotset.engine.sequence import Sequence
from hotset.engine.speculation import Draft
from hotset.errors import InvalidRequestError

_SHORTEST = 2  # tokens that must match
_LONGEST = 16  # tokens that are compared at most
_MOST_CANDIDATES = 24  # places in a sequence that are compared at most, the latest first
_CLASSES = 8  # classes of confidence: the length of the match plus the tokens drafted since, at most this
_TEXT_GRAM = 3  # tokens that index the places of a text
_TEXT_CANDIDATES = 4096  # places in a text that are compared at most
MAX_TEXT_TOKENS = 1 << 22
"""The longest text to look up; each token takes 16 bytes of memory."""


class _Places:
    """An index of a growing list of tokens by pairs of neighbouring tokens.

    It stores the latest place of each pair, and for each place the previous one of the same pair. Memory: an
    entry of a dictionary and one of a list per token.
    """

    __slots__ = ("_before", "_latest", "n_seen")

    def __init__(self) -> None:
        self._latest: dict[tuple[int, int], int] = {}
        self._before: list[int] = []
        self.n_seen = 0

    def take_in(self, tokens: list[int]) -> None:
        """Add the places of all new pairs except the last pair, which is the one to search for."""
        latest, before = self._latest, self._before
        for i in range(self.n_seen, len(tokens) - 1):
            if i:
                pair = (tokens[i - 1], tokens[i])
                before.append(latest.get(pair, -1))
                latest[pair] = i
            else:
                before.append(-1)
        self.n_seen = max(self.n_seen, len(tokens) - 1)

    def longest(self, tokens: list[int]) -> tuple[int, int]:
        """Return the place after the longest earlier match of the end of `tokens`, and the match's length.

        Among equally long matches the latest one wins. Without a match both are 0.
        """
        n = len(tokens)
        if n < _SHORTEST:
            return 0, 0
        place = self._latest.get((tokens[-2], tokens[-1]), -1)
        best, best_length = 0, 0
        for _ in range(_MOST_CANDIDATES):
            if place < 0:
                break
            length = _SHORTEST
            most = min(_LONGEST, place + 1)
            while length < most and tokens[place - length] == tokens[n - 1 - length]:
                length += 1
            if length > best_length:
                best, best_length = place + 1, length
                if length == _LONGEST:
                    break
            place = self._before[place]
        return best, best_length


class LookupText:
    """A text whose n-grams all sequences look up. Its index is sorted once and never changes.

    tokens: int [n], at most MAX_TEXT_TOKENS. n_vocab: of the model. Raises InvalidRequestError if the text is
    too long or too short.
    """

    def __init__(self, tokens: Many[int] | np.ndarray, n_vocab: int) -> None:
        self._tokens = np.asarray(tokens, np.int64)
        if not _TEXT_GRAM < len(self._tokens) <= MAX_TEXT_TOKENS:
            raise InvalidRequestError(
                f"the text to look up has {len(self._tokens)} tokens, but must have {_TEXT_GRAM + 1} to "
                f"{MAX_TEXT_TOKENS}; give a longer text, or a part of this one"
            )
        self._n_vocab = n_vocab
        grams = np.zeros(len(self._tokens) - _TEXT_GRAM, np.int64)  # without the last: no token follows it
        for i in range(_TEXT_GRAM):
            grams = grams * n_vocab + self._tokens[i : len(grams) + i]
        self._order = np.argsort(grams, kind="stable").astype(np.int32)
        self._grams = grams[self._order]
        self._tokens = self._tokens.astype(np.int32)

    def longest(self, tokens: list[int]) -> tuple[int, int]:
        """Return the result of _Places.longest for a place in the text."""
        if len(tokens) < _TEXT_GRAM:
            return 0, 0
        gram = 0
        for token in tokens[-_TEXT_GRAM:]:
            gram = gram * self._n_vocab + token
        low, high = np.searchsorted(self._grams, [gram, gram + 1])
        if low == high:
            return 0, 0
        starts = self._order[max(low, high - _TEXT_CANDIDATES) : high]
        length = _TEXT_GRAM
        for token in tokens[-_TEXT_GRAM - 1 : -_LONGEST - 1 : -1]:
            before = starts - (length - _TEXT_GRAM + 1)
            longer = starts[(before >= 0) & (self._tokens[before] == token)]
            if not len(longer):
                break
            starts, length = longer, length + 1
        return int(starts[-1]) + _TEXT_GRAM, length

    def after(self, place: int, n: int) -> list[int]:
        """Return at most n tokens from `place` on."""
        found: list[int] = self._tokens[place : place + n].tolist()
        return found


class LookupDrafter:
    """A drafter that proposes the tokens after the longest match of a sequence's end.

    It searches the sequence, and the text, which wins if its match is longer. A draft token's class is the
    length of the match plus the number of tokens drafted before it.
    """

    name = "ngram"
    seconds_per_token = 0.0

    def __init__(self, text: LookupText | None = None) -> None:
        self._text = text
        self._places: dict[Sequence, _Places] = {}

    def draft(self, wanted: Many[tuple[Sequence, int]]) -> list[Draft]:
        return [self._draft(sequence, n) for sequence, n in wanted]

    def forget(self, sequence: Sequence) -> None:
        self._places.pop(sequence, None)

    def reset(self) -> None:
        self._places.clear()

    def close(self) -> None:
        self.reset()

    def _draft(self, sequence: Sequence, n: int) -> Draft:
        tokens = sequence.tokens
        places = self._places.get(sequence)
        if places is None:
            places = self._places[sequence] = _Places()
        places.take_in(tokens)
        place, length = places.longest(tokens)
        if self._text is not None:
            text_place, text_length = self._text.longest(tokens)
            if text_length > length:
                return _classed(self._text.after(text_place, n), text_length)
        if not length:
            return Draft([], [])
        found = tokens[place : place + n]
        period = len(tokens) - place
        while len(found) < n:  # the match overlaps the end: continue the repetition
            found.append(found[-period])
        if sequence.images is not None:  # an image is not drafted
            found = list(takewhile(lambda token: token >= 0, found))
        return _classed(found, length)


def _classed(tokens: list[int], length: int) -> Draft:
    return Draft(tokens, [min(length + i, _CLASSES) for i in range(len(tokens))])
