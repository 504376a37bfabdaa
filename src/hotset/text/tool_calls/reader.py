"""A reader of text that arrives in pieces, on which all forms of tool calls are built.

A form is read by generators that yield when they need more text, so they are written as if the whole
answer were there. No decision depends on where the text is split: a reader waits while the text may
still become one thing or another, but never for more than a mark, or MAX_HEAD characters. Other text goes
to a sink as it arrives. So the time is linear in the length of any text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator
from functools import cache
from typing import TypeVar

from hotset.text.parts import held_back

T = TypeVar("T")
Steps = Generator[None, None, T]
Sink = Callable[[str], object]

SPACE = " \t\r\n"
MAX_NAME = 128
"""The longest name of a function, as in the API schemas."""
MAX_HEAD = 512
"""The maximum number of characters before the mark that ends the head of a call or a parameter."""

_NAME = re.compile(rf"[A-Za-z0-9_.\-]{{1,{MAX_NAME + 1}}}")


@cache
def _any_of(marks: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, marks)))


class Reader:
    """The text of an answer as it arrives. is_final: nothing more arrives.

    Among the marks of one call, none may be a prefix of another.
    """

    def __init__(self) -> None:
        self.is_final = False
        self._buffer = ""
        self._at = 0  # characters of the buffer that have been taken
        self.n_taken = 0
        self._held: list[str] | None = None  # the text taken since `hold`

    def add(self, text: str) -> None:
        self._buffer, self._at = self._buffer[self._at :] + text, 0

    @property
    def n_left(self) -> int:
        """Return how many characters have arrived and have not been taken."""
        return len(self._buffer) - self._at

    def hold(self) -> None:
        """Keep the text taken from now on, until `drop`."""
        self._held = []

    def drop(self) -> str:
        """End `hold`, and return the text taken since."""
        held, self._held = self._held or [], None
        return "".join(held)

    def take(self, n: int) -> str:
        taken = self._buffer[self._at : self._at + n]
        self._at += len(taken)
        self.n_taken += len(taken)
        if self._held is not None and taken:
            self._held.append(taken)
        return taken

    def until(self, marks: tuple[str, ...], sink: Sink) -> Steps[str]:
        """Pass text to the sink up to a mark, which is not taken. Return the mark, or "" at the end."""
        pattern = _any_of(marks)
        while True:
            found = pattern.search(self._buffer, self._at)
            n_kept = 0 if self.is_final else held_back(self._buffer[self._at :], marks)
            # A mark that may still arrive has priority if it begins earlier, or there and is longer.
            rest = self._buffer[len(self._buffer) - n_kept :]
            if found and not (found.start() >= len(self._buffer) - n_kept and rest not in marks):
                sink(self.take(found.start() - self._at))
                return found[0]
            sink(self.take(self.n_left - n_kept))
            if self.is_final:
                return ""
            yield

    def peek(self, *marks: str) -> Steps[str]:
        """Return the mark with which the text continues; "" if it continues otherwise."""
        longest = max(map(len, marks), default=0)
        while True:
            for mark in marks:
                if self._buffer.startswith(mark, self._at):
                    return mark
            rest = self._buffer[self._at : self._at + longest]
            if self.is_final or not any(mark.startswith(rest) for mark in marks):
                return ""
            yield

    def at(self, *marks: str) -> Steps[str]:
        """Take the mark with which the text continues, if any, and return it."""
        mark = yield from self.peek(*marks)
        self.take(len(mark))
        return mark

    def closed(self, mark: str) -> Steps[bool]:
        """Take the mark that ends something, even if the end of the text has truncated it.

        A single character at the end may just as well be text, and is left. Return whether a mark was taken.
        """
        if (yield from self.at(mark)):
            return True
        is_truncated = self.is_final and self.n_left > 1 and mark.startswith(self._buffer[self._at :])
        if is_truncated:
            self.take(self.n_left)
        return is_truncated

    def space(self, more: str = "") -> Steps[None]:
        """Take white space, and the characters in `more`."""
        letters = SPACE + more
        while True:
            at = self._at
            while at < len(self._buffer) and self._buffer[at] in letters:
                at += 1
            self.take(at - self._at)
            if self.n_left or self.is_final:
                return
            yield

    def name(self) -> Steps[str]:
        """Take a name of a function or a parameter; "" without a name, or if it exceeds MAX_NAME."""
        while True:
            found = _NAME.match(self._buffer, self._at)
            n = len(found[0]) if found else 0
            if n < self.n_left or n > MAX_NAME or self.is_final:
                return self.take(n) if n <= MAX_NAME else ""
            yield

    def is_at_name(self) -> Steps[bool]:
        while not self.n_left and not self.is_final:
            yield
        return bool(_NAME.match(self._buffer, self._at))

    def head(self, mark: str) -> Steps[str | None]:
        """Take the text up to a mark and the mark. Return None if none comes within MAX_HEAD characters."""
        while True:
            most = self._at + MAX_HEAD + len(mark)
            end = self._buffer.find(mark, self._at, most)
            if end >= 0:
                text = self.take(end - self._at)
                self.take(len(mark))
                return text
            if self.is_final or len(self._buffer) >= most:
                return None
            yield

    def quoted(self, quote: str, sink: Sink) -> Steps[bool]:
        """Pass on the rest of a string and its closing quote. Return False if the text ends first.

        A backslash escapes in strings whose quotes are one character.
        """
        marks = (quote, "\\") if len(quote) == 1 else (quote,)
        while True:
            mark = yield from self.until(marks, sink)
            sink(self.take(len(mark)))
            if mark in (quote, ""):
                return bool(mark)
            while not self.n_left:
                if self.is_final:
                    return False
                yield
            sink(self.take(1))

    def value(
        self, sink: Sink, stops: tuple[str, ...], quotes: tuple[str, ...] = ('"',)
    ) -> Steps[str | None]:
        """Pass on a value of brackets, strings and words, unchecked and unchanged.

        Return "" if its own bracket has ended it, otherwise the mark that has stopped it, which is not taken:
        a bracket that it has not opened, a stop of one character outside all brackets, or a longer stop
        outside all strings. Return None if the text ends first.
        """
        depth = 0
        marks = (*quotes, *"{}[]()", *stops)
        while True:
            mark = yield from self.until(marks, sink)
            if not mark:
                return None
            if (mark in "}])" and not depth) or (mark in stops and (not depth or len(mark) > 1)):
                return mark
            sink(self.take(len(mark)))
            if mark in quotes:
                if not (yield from self.quoted(mark, sink)):
                    return None
            elif mark in "{[(":
                depth += 1
            elif mark in "}])":
                depth -= 1
                if not depth:
                    return ""
