"""Answers and messages on a terminal: an answer cannot control the terminal, and lines break between words.

Output to a pipe or a file is unchanged. escaping.py escapes texts in messages and tables.
"""

from __future__ import annotations

import os
import re
import sys
from types import TracebackType
from typing import Self, TextIO

from hotset.escaping import escaped_text

_TAB = 8
_FENCE = re.compile(r"(```+)[^`]*|(~~~+).*")
_JOINER = "\u200d"


class AnswerWriter:
    """A writer of an answer to the standard output, piece by piece.

    On a terminal it escapes control characters, and breaks lines between words: a word waits until it is
    complete. The terminal itself breaks lines of code, fenced or indented, and words longer than a line, such
    as addresses, so that they can be copied. The width is read again for every piece.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stdout
        self._wraps = self._stream.isatty()
        self._column = 0  # of the cursor
        self._spaces = ""  # of this line, not yet written
        self._word = ""  # not yet written
        self._width_of_word = 0
        self._goes_on = False  # whether the waiting text continues a word whose beginning is written
        self._begun = False  # whether this line of the text has a word
        self._code = ""  # the opening fence, "line" for indented code, or "": no code
        self._line = ""  # the beginning of a line of code

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.finish()

    def write(self, text: str) -> None:
        """Write the next piece."""
        self._put(self._wrapped(text) if self._wraps else text)

    def finish(self) -> None:
        """Write the waiting word."""
        self._put(self._place(self._columns()))

    def wrapped(self, text: str, column: int) -> str:
        """Return a whole text as `write` and `finish` would write it, with the cursor at `column`."""
        if not self._wraps:
            return text
        self._column = column
        return self._wrapped(text) + self._place(self._columns())

    def _put(self, text: str) -> None:
        if text:
            self._stream.write(text)
            self._stream.flush()

    def _columns(self) -> int:
        """Return the columns of the terminal, 0 if they are unknown."""
        if not self._wraps:
            return 0
        try:
            return os.get_terminal_size(self._stream.fileno()).columns
        except (OSError, ValueError):
            return 0

    def _wrapped(self, text: str) -> str:
        columns = self._columns()
        if columns and self._column > columns:  # the terminal became narrower, and broke the line
            self._column = (self._column - 1) % columns + 1
        text = escaped_text(text)
        return "".join(self._next(character, columns) for character in text)

    def _next(self, character: str, columns: int) -> str:
        """Add a character, and return the text to write now."""
        if self._code:
            return self._next_of_code(character)
        if character == "\n":
            out = self._place(columns)
            self._column, self._spaces, self._begun, self._goes_on = 0, "", False, False
            return out + "\n"
        if character in " \t":
            out = self._place(columns)
            self._goes_on = False
            if self._code:
                return out + character
            at = self._column + len(self._spaces)
            self._spaces += " " * (_TAB - at % _TAB) if character == "\t" else " "
            return out
        if not self._begun and not self._word and len(self._spaces) >= 4 and character not in "-*+0123456789":
            self._code = "line"
            out, self._spaces = self._spaces, ""
            return out + character
        width = _cells(character)
        out = ""
        if self._word and width and self._word[-1] != _JOINER and (width > 1 or _cells(self._word[-1]) > 1):
            out = self._place(columns)  # for characters that are words by themselves
            self._goes_on = False
        elif (
            self._width_of_word + width > columns
        ):  # longer than a line, or the width is unknown: do not wait
            out = self._place(columns)
            self._goes_on = True
        if self._code:
            return out + self._next_of_code(character)
        self._word += character
        self._width_of_word += width
        return out

    def _next_of_code(self, character: str) -> str:
        if character != "\n":
            if len(self._line) < 80:
                self._line += character
        elif self._code == "line" or self._is_end(self._line.strip()):
            self._code = self._line = ""
            self._column, self._begun = 0, False
        else:
            self._line = ""
        return character

    def _is_end(self, line: str) -> bool:
        """Return whether a line is a closing fence, at least as long as the opening one."""
        return line.startswith(self._code) and not line.strip(self._code[0])

    def _place(self, columns: int) -> str:
        """Return the waiting word, on this line or on the next one."""
        if not self._word:
            return ""
        word, width, spaces = self._word, self._width_of_word, self._spaces
        self._word, self._width_of_word, self._spaces = "", 0, ""
        if not self._begun and (fence := _FENCE.fullmatch(word)):
            self._code = fence[1] or fence[2]
            self._line = "-"  # the rest of this line closes nothing
        self._begun = True
        if columns and self._column and self._column + len(spaces) + width > columns:
            if self._goes_on:  # the terminal breaks the word
                self._column = (self._column + width - 1) % columns + 1
                return word
            self._column = width
            return "\n" + word
        self._column += len(spaces) + width
        return spaces + word


def wrapped(text: str, stream: TextIO, column: int = 0) -> str:
    """Return a message for `stream` with the cursor at `column`; on a terminal lines break between words."""
    return AnswerWriter(stream).wrapped(text, column)


def _cells(character: str) -> int:
    """Return how many columns a character takes: 0, 1 or 2."""
    if character.isascii():
        return 1
    from rich.cells import cell_len

    return cell_len(character)
