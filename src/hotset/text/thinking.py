"""A token budget for reasoning: when it is used up, the tokens that end the reasoning are forced.

A ThinkingBudget follows one answer, token by token, as an engine's Forcing. It finds the marks in the bytes
of the tokens, as ReasoningParser finds them in the text, because a vocabulary may spell a mark in several
tokens. If a character or a closing mark is incomplete when the budget ends, it gets some more tokens.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from hotset.text.tokenizer import Tokenizer

_SPACE = b" \t\r\n"
_LONGEST_CHARACTER = 4  # bytes


@dataclass(frozen=True)
class ThinkingMarks:
    """The marks of reasoning as bytes, and how its end is forced.

    opens, closes: texts that begin and end reasoning. closings: the tokens that are forced the first time,
    the second time and so on; the last one is repeated. reopens: an answer may think several times (harmony);
    otherwise only its beginning counts. spelled: the text of a token as the parser of the answer sees it.
    """

    opens: bytes
    closes: tuple[bytes, ...]
    closings: tuple[tuple[int, ...], ...]
    reopens: bool
    spelled: Callable[[int], bytes]


class ThinkingBudget:
    """The tokens of reasoning that one answer has left.

    budget: tokens between the marks; the closing message and the closing mark are not counted. is_open:
    whether the answer begins inside reasoning.
    """

    def __init__(self, marks: ThinkingMarks, budget: int, *, is_open: bool) -> None:
        self._marks = marks
        self._left = budget
        self._state: Literal["before", "inside", "over"] = "inside" if is_open else "before"
        self._tail = b""  # the latest bytes, which may hold the beginning of a mark
        self._n_forced = 0  # tokens of the closing so far
        self._n_closings = 0

    def clone(self) -> ThinkingBudget:
        """Return an independent copy, for drafts."""
        return copy.copy(self)  # shallow: all attributes that change are immutable values

    def next_token(self) -> int | None:
        """Return the token that must come next, or None if the model chooses it."""
        if self._state != "inside" or self._left > 0:
            return None
        may_wait = not self._n_forced and -self._left < max(_LONGEST_CHARACTER, *map(len, self._marks.closes))
        if may_wait and (_is_incomplete(self._tail) or self._has_begun_to_close):
            return None
        return self._closing[self._n_forced]

    def accept(self, token: int) -> None:
        """Take in the next token of the answer.

        A token other than the forced one, because a grammar forbids that one, ends the budget.
        """
        if self._state == "over":
            return
        forced = self.next_token()
        if forced is not None:
            self._accept_forced(token == forced)
            return
        self._tail += self._marks.spelled(token)
        if self._state == "inside":
            self._left -= 1
            self._look_for_end()
        else:
            self._look_for_beginning()

    @property
    def _has_begun_to_close(self) -> bool:
        """Return whether the answer ends with two bytes or more of a closing mark."""
        return any(
            self._tail.endswith(close[:n]) for close in self._marks.closes for n in range(2, len(close))
        )

    @property
    def _closing(self) -> tuple[int, ...]:
        closings = self._marks.closings
        return closings[min(self._n_closings, len(closings) - 1)]

    def _accept_forced(self, is_taken: bool) -> None:
        self._n_forced += 1
        if not is_taken:
            self._state = "over"
        elif self._n_forced == len(self._closing):
            self._n_forced, self._tail = 0, b""
            self._n_closings += 1
            self._state = "before" if self._marks.reopens else "over"

    def _look_for_beginning(self) -> None:
        opens = self._marks.opens
        if self._marks.reopens:
            at = self._tail.find(opens)
            is_possible = True
        else:
            self._tail = self._tail.lstrip(_SPACE)
            at = 0 if self._tail.startswith(opens) else -1
            is_possible = opens.startswith(self._tail)
        if at >= 0:
            self._state, self._tail = "inside", self._tail[at + len(opens) :]
            self._look_for_end()
        elif not is_possible:
            self._state = "over"
        else:
            self._tail = self._tail[-len(opens) :]

    def _look_for_end(self) -> None:
        closes = self._marks.closes
        if any(close in self._tail for close in closes):
            self._state, self._tail = ("before" if self._marks.reopens else "over"), b""
        else:
            self._tail = self._tail[-max(_LONGEST_CHARACTER, *map(len, closes)) :]


def tokens_of(tokenizer: Tokenizer, marks: str) -> tuple[int, ...]:
    """Return the tokens of a text in which special tokens may be spelled."""
    ids: list[int] = []
    for part, special in tokenizer.special_parts(marks):
        ids += tokenizer.encode_inside(part) if special is None else [special]
    return tuple(ids)


def _is_incomplete(data: bytes) -> bool:
    """Return whether the bytes end in the middle of a UTF-8 character."""
    for n, byte in enumerate(reversed(data[-_LONGEST_CHARACTER:]), 1):
        if byte < 0x80:
            return False
        if byte >= 0xC0:
            return n < (2 if byte < 0xE0 else 3 if byte < 0xF0 else 4)
    return False
