"""DRY: which tokens would go on with a sequence that is there already, and how long that one is.

The definition is llama.cpp's. Its cost is one pass of NumPy over the window for each token.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

import numpy as np


class Repetitions:
    """The tokens of one sequence, and where its end occurred before.

    last_n: how many tokens are looked at; -1: all. breakers: sequences of tokens that no repetition goes
    beyond.
    """

    def __init__(self, tokens: Sequence[int], last_n: int, breakers: Iterable[Sequence[int]] = ()) -> None:
        self._last_n = last_n
        self._breakers: dict[int, list[tuple[int, ...]]] = defaultdict(list)  # by their last token
        for breaker in breakers:
            self._breakers[breaker[-1]].append(tuple(breaker))
        # First and last position of the breaker that begins last, of these the longest.
        self._broken = (-1, -1)
        self._n = len(tokens)
        self._tokens = np.zeros(max(2 * self._n, 64), np.int64)
        self._tokens[: self._n] = tokens
        # By position: how many tokens up to it equal those up to the end.
        self._lengths = np.zeros(len(self._tokens), np.int64)
        self._lengths[: self._n] = _lengths(tokens)
        for position in range(self._n):
            self._look_for_breaker(position)

    def push(self, token: int) -> None:
        n = self._n
        if n == len(self._tokens):
            self._tokens = np.concatenate([self._tokens, np.zeros_like(self._tokens)])
            self._lengths = np.concatenate([self._lengths, np.zeros_like(self._lengths)])
        first = self._first(n)
        is_same = self._tokens[first:n] == token
        longer = np.concatenate(
            [[0 if first == 0 else self._lengths[first - 1]], self._lengths[first : n - 1]]
        )
        self._lengths[first:n] = (longer[: n - first] + 1) * is_same
        self._lengths[n] = n + 1
        self._tokens[n] = token
        self._n += 1
        self._look_for_breaker(n)

    def _first(self, n: int) -> int:
        """The first position of the window of a sequence of n tokens."""
        return 0 if self._last_n < 0 else max(n - self._last_n, 0)

    def _look_for_breaker(self, last: int) -> None:
        for breaker in self._breakers.get(int(self._tokens[last]), ()):
            first = last + 1 - len(breaker)
            if first >= 0 and tuple(self._tokens[first : last + 1].tolist()) == breaker:
                self._broken = max(self._broken, (first, last))

    def continued(self, at_least: int) -> tuple[np.ndarray, np.ndarray]:
        """Tokens that would go on with a repetition of so many tokens, and the length of the longest."""
        n, first = self._n, self._first(self._n)
        nothing = np.zeros(0, np.int64), np.zeros(0, np.int64)
        broken_first, broken_last = self._broken
        limit = n - 1 - broken_last if broken_first >= first else n - first
        if n - first <= at_least or limit < at_least:
            return nothing
        inside = np.arange(1, n - first)  # no repetition begins before the window
        lengths = np.minimum(np.minimum(self._lengths[first : n - 1], inside), limit)
        found = np.flatnonzero(lengths >= at_least)
        ids, which = np.unique(self._tokens[first + 1 + found], return_inverse=True)
        longest = np.zeros(len(ids), np.int64)
        np.maximum.at(longest, which, lengths[found])
        return ids, longest


def _lengths(tokens: Sequence[int]) -> list[int]:
    """By position: how many tokens up to it equal those up to the end (the Z algorithm, from the end)."""
    backwards = tokens[::-1]
    n = len(backwards)
    found = [n] * n
    left = right = 0  # of the match that reaches furthest
    for i in range(1, n):
        length = min(right - i, found[i - left]) if i < right else 0
        while i + length < n and backwards[length] == backwards[i + length]:
            length += 1
        found[i] = length
        if i + length > right:
            left, right = i, i + length
    return found[::-1]
