"""Drafts by n-gram lookup: what followed the latest tokens where they occurred before.

They are looked for in the sequence, prompt and answer, and in a text. Summaries, edited code and answers over
a given text repeat long pieces of it. Looking them up takes microseconds, so that a draft costs nothing but
its verification.
"""

from __future__ import annotations

from collections.abc import Sequence as Many

import numpy as np

from hotset.engine.sequence import Sequence
from hotset.engine.speculation import Draft
from hotset.errors import InvalidRequestError

_SHORTEST = 2  # tokens of a match
_LONGEST = 16  # of them that are compared
_MOST_CANDIDATES = 24  # of a sequence's places, the latest first
_CLASSES = 8  # of how sure a draft is: by the length of the match, and of what was drafted since
_TEXT_GRAM = 3  # tokens by which places of a text are found
_TEXT_CANDIDATES = 4096
MAX_TEXT_TOKENS = 1 << 22
"""Of a text that is looked up: each takes 16 bytes of memory."""


class _Places:
    """Where pairs of tokens end in a growing list of tokens: the latest place by pair, and before each place
    the one with the same pair before it. Memory: an entry of a dictionary and of a list for each token."""

    __slots__ = ("_before", "_latest", "n_seen")

    def __init__(self) -> None:
        self._latest: dict[tuple[int, int], int] = {}
        self._before: list[int] = []
        self.n_seen = 0

    def take_in(self, tokens: list[int]) -> None:
        """Notes the places of all but the last pair, which is what is looked for."""
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
        """The place behind the longest earlier match of the end of `tokens`, the latest of them, and how many
        tokens match; 0 where none does."""
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
    """A text whose n-grams are looked up by every sequence: sorted once, and only read from then on.

    tokens: int [n], at most MAX_TEXT_TOKENS. n_vocab: of the model. Raises InvalidRequestError for a text
    that is too long, or too short to find anything.
    """

    def __init__(self, tokens: Many[int] | np.ndarray, n_vocab: int) -> None:
        self._tokens = np.asarray(tokens, np.int64)
        if not _TEXT_GRAM < len(self._tokens) <= MAX_TEXT_TOKENS:
            raise InvalidRequestError(
                f"the text to look up has {len(self._tokens)} tokens, and {_TEXT_GRAM + 1} to "
                f"{MAX_TEXT_TOKENS} are taken; give a longer text, or a part of this one"
            )
        self._n_vocab = n_vocab
        grams = np.zeros(len(self._tokens) - _TEXT_GRAM, np.int64)  # nothing follows the last
        for i in range(_TEXT_GRAM):
            grams = grams * n_vocab + self._tokens[i : len(grams) + i]
        self._order = np.argsort(grams, kind="stable").astype(np.int32)
        self._grams = grams[self._order]
        self._tokens = self._tokens.astype(np.int32)

    def longest(self, tokens: list[int]) -> tuple[int, int]:
        """As _Places.longest, of a place in the text."""
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
        """At most n tokens from a place on."""
        found: list[int] = self._tokens[place : place + n].tolist()
        return found


class LookupDrafter:
    """Drafts what followed the longest match of a sequence's end: in itself, or, where it is longer there, in
    a text. A class is the number of tokens that match, with those drafted before."""

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
        while len(found) < n:  # what repeats itself goes on
            found.append(found[-period])
        return _classed(found, length)


def _classed(tokens: list[int], length: int) -> Draft:
    return Draft(tokens, [min(length + i, _CLASSES) for i in range(len(tokens))])
