"""A reader of text that arrives in pieces, on which all forms of tool calls are built.

A form is read by generators that yield when they need more text, so that they can be written as if the whole
answer were there. No decision depends on where the text is split: a reader waits while what has arrived may
still become one thing or another, but never for more than a mark, or MAX_HEAD characters. The rest is passed
on to a sink as it arrives. So the time is linear in the text, whatever it is.
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
"""How many characters may come before the mark that ends the head of a call or a parameter."""

_NAME = re.compile(rf"[A-Za-z0-9_.\-]{{1,{MAX_NAME + 1}}}")


@cache
def _any_of(marks: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, marks)))


class Reader:
    """The text of an answer as it arrives. is_final: nothing more arrives.

    Of the marks that one call looks for, none may begin another.
    """

    def __init__(self) -> None:
        self.is_final = False
        self._buffer = ""
        self._at = 0  # up to where the buffer has been taken
        self.n_taken = 0
        self._held: list[str] | None = None  # what has been taken since `hold`

    def add(self, text: str) -> None:
        self._buffer, self._at = self._buffer[self._at :] + text, 0

    @property
    def n_left(self) -> int:
        """How many characters have arrived and have not been taken."""
        return len(self._buffer) - self._at

    def hold(self) -> None:
        """From here on, what is taken is kept, until `drop`."""
        self._held = []

    def drop(self) -> str:
        """Ends `hold`, and returns what was taken since."""
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
        """Passes text to the sink up to a mark, which is left; returns the mark, or "" at the end."""
        pattern = _any_of(marks)
        while True:
            found = pattern.search(self._buffer, self._at)
            n_kept = 0 if self.is_final else held_back(self._buffer[self._at :], marks)
            # What may yet become a mark that begins before it, or there and is longer, comes first.
            rest = self._buffer[len(self._buffer) - n_kept :]
            if found and not (found.start() >= len(self._buffer) - n_kept and rest not in marks):
                sink(self.take(found.start() - self._at))
                return found[0]
            sink(self.take(self.n_left - n_kept))
            if self.is_final:
                return ""
            yield

    def peek(self, *marks: str) -> Steps[str]:
        """The mark with which the text goes on; "" where it is none of these."""
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
        """As `peek`, and takes the mark."""
        mark = yield from self.peek(*marks)
        self.take(len(mark))
        return mark

    def closed(self, mark: str) -> Steps[bool]:
        """Takes the mark that ends something, also one that the end of the text has truncated.

        A single character that is left may as well be text.
        """
        if (yield from self.at(mark)):
            return True
        is_truncated = self.is_final and self.n_left > 1 and mark.startswith(self._buffer[self._at :])
        if is_truncated:
            self.take(self.n_left)
        return is_truncated

    def space(self, more: str = "") -> Steps[None]:
        """Takes white space, and the further characters."""
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
        """A name of a function or a parameter; "" where there is none, or it is too long: it is left then."""
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
        """The text up to a mark, which is taken; None where none comes within MAX_HEAD characters."""
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
        """The rest of a string, with the quote that ends it; False where the text ends first.

        A backslash escapes in strings between quotes of one character.
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
        """A value of brackets, strings and words, unchecked, as it is written.

        Returns "" where its own bracket has ended it, and what has stopped it otherwise, which is left: a
        bracket that it has not opened, a stop of one character outside of all brackets, or a longer stop
        outside of all strings. None: the text ends first.
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
