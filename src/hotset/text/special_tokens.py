"""Special tokens spelled in a text: found in one pass, in linear time."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

_PREFIX = 4  # characters by which the beginning of a special token is found
WINDOW = 1 << 15  # characters searched in one call: the regex engine holds the interpreter's lock


class SpecialTokens:
    """A splitter of texts at special tokens: the leftmost first, and the longest of those that begin there.

    ids: the text of each token (not empty) → its id. One regular expression of all texts would try thousands
    of them at every "<" of a text. The expression here finds their first characters, and a lookup decides.
    """

    def __init__(self, ids: Mapping[str, int]) -> None:
        self.ids = ids
        lengths: dict[str, set[int]] = {}  # by the first characters
        for text in ids:
            lengths.setdefault(text[:_PREFIX], set()).add(len(text))
        self._lengths = {prefix: sorted(found, reverse=True) for prefix, found in lengths.items()}
        prefixes = sorted(lengths, key=len, reverse=True)
        self._begin = re.compile("|".join(map(re.escape, prefixes))) if prefixes else None

    def split(self, text: str) -> Iterator[tuple[str, int | None]]:
        """Yield the parts of `text` in order: special tokens with their ids, other parts with None.

        No part is empty.
        """
        done = 0
        for start, end in self._found(text):
            if start > done:
                yield text[done:start], None
            done = end
            yield text[start:end], self.ids[text[start:end]]
        if done < len(text):
            yield text[done:], None

    def _found(self, text: str) -> Iterator[tuple[int, int]]:
        at = 0
        while self._begin is not None and at < len(text):
            stop = at + WINDOW
            match = self._begin.search(text, at, stop + _PREFIX - 1)
            if match is None or match.start() >= stop:
                at = stop
                continue
            start = match.start()
            n = self._length_at(text, start)
            if n:
                yield start, start + n
            at = start + (n or 1)

    def _length_at(self, text: str, start: int) -> int:
        """Return the length of the longest special token that begins at `start`; 0 if none begins there."""
        for n_prefix in range(_PREFIX, 0, -1):
            for n in self._lengths.get(text[start : start + n_prefix], ()):
                if text[start : start + n] in self.ids:
                    return n
        return 0
