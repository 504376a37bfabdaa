"""Limits on the values of a JSON body, checked without parsing it.

Python's JSON parser holds the interpreter's lock until it ends. Its time depends on the number of values, not
of bytes: 4 MB of "[]," take a second, 4 MB of text almost no time.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from hotset.escaping import clause
from hotset.server.errors import RequestError
from hotset.server.preparation import LONG_BYTES

MAX_ITEMS = 1 << 16
"""Texts (names of fields are texts, too), lists and objects of a body; a message has five or so."""
MAX_LISTS = 1 << 13
"""Lists and objects: checking a block of an Anthropic message takes 5 us, under the interpreter's lock."""
MAX_VALUES = 5 << 16
"""Values, counted by commas. Most are token ids, of which OpenAI accepts 300,000 to embed. Parsing this many
takes 40 ms."""
MAX_FRACTIONS = 1 << 14
"""Numbers with a point or an exponent: parsing one takes twenty times as long as an integer."""
MAX_DIGITS = 256
"""Digits of a number; the parsing time grows with their square."""

_QUOTE, _BACKSLASH = ord('"'), ord("\\")
CHUNK = 1 << 18  # bytes


def loads(body: bytes) -> Any:
    """Return the value of a JSON text. Raises RequestError if the text is not JSON.

    It decodes UTF-8 first, which `check_json` assumes: given bytes, Python's parser would guess the encoding.
    """
    try:
        return json.loads(body.decode("utf-8-sig"))
    except json.JSONDecodeError as error:
        reason = error.msg  # without the position, which FastAPI and other servers leave out, too
    except (ValueError, RecursionError) as error:
        reason = str(error)
    raise RequestError(f"the body is not valid JSON: {clause(reason)}", code="invalid_json")


def check_json(body: bytes, max_nesting: int) -> None:
    """Raise RequestError if the body is nested deeper than `max_nesting`, or exceeds a limit above.

    Text that is not JSON may pass. The parser rejects it at the first wrong character.
    """
    n_open = body.count(b"[") + body.count(b"{")
    if (
        len(body) <= LONG_BYTES
        and n_open <= min(max_nesting, MAX_LISTS)
        and n_open + -(-body.count(b'"') // 2) <= MAX_ITEMS
        and body.count(b",") < MAX_VALUES
    ):
        return
    scan = _JsonCounter(max_nesting)
    for start in range(0, len(body), CHUNK):
        scan.push(np.frombuffer(body, np.uint8, min(CHUNK, len(body) - start), start))


class _JsonCounter:
    """A counter of brackets, values and numbers outside of strings. It takes the body in parts."""

    def __init__(self, max_nesting: int) -> None:
        self._max_nesting = max_nesting
        self._in_string = False
        self._escaped = False  # whether a backslash escapes the next byte
        self._depth = self._n_items = self._n_lists = self._n_values = self._n_fractions = 0

    def push(self, part: np.ndarray) -> None:
        """Count a part of the body. part: uint8 [bytes]. Raises RequestError if a limit is exceeded."""
        inside = self._inside(part)

        def outside(*signs: str) -> np.ndarray:
            found: np.ndarray = part == ord(signs[0])
            for sign in signs[1:]:
                found |= part == ord(sign)
            found &= ~inside
            return found

        opens, closes = outside("[", "{"), outside("]", "}")
        depths = self._depth + np.cumsum(opens.view(np.int8) - closes.view(np.int8), dtype=np.int32)
        if depths.max() > self._max_nesting:
            raise RequestError(
                f"the body is nested deeper than {self._max_nesting} levels", code="invalid_json"
            )
        self._depth = int(depths[-1])
        self._n_lists += int(opens.sum())
        self._n_items += int(opens.sum())
        self._n_values += int(outside(",").sum())
        digits = (part >= ord("0")) & (part <= ord("9")) & ~inside
        self._n_fractions += int(outside(".").sum() + (outside("e", "E")[1:] & digits[:-1]).sum())
        others = np.flatnonzero(~digits)
        if self._n_lists > MAX_LISTS:
            raise _too_many(f"{MAX_LISTS} lists and objects")
        if self._n_items > MAX_ITEMS:
            raise _too_many(f"{MAX_ITEMS} texts, lists and objects")
        if self._n_values >= MAX_VALUES:
            raise _too_many(f"{MAX_VALUES} values")
        if self._n_fractions > MAX_FRACTIONS:
            raise _too_many(f"{MAX_FRACTIONS} numbers with a point or an exponent")
        if np.diff(others, prepend=-1, append=len(part)).max() - 1 > MAX_DIGITS:
            raise _too_many(f"{MAX_DIGITS} digits in a number")

    def _inside(self, part: np.ndarray) -> np.ndarray:
        """Return which bytes are in a string, bool [bytes]. The closing quote is not in it."""
        quotes = np.flatnonzero(part == _QUOTE)
        others = np.flatnonzero(part != _BACKSLASH)
        # A quote is escaped if an odd number of backslashes precedes it. If the part before this one ends
        # with a backslash that escapes the first byte here, it counts as one more.
        before = np.searchsorted(others, quotes) - 1
        last = np.where(before >= 0, others[before], -1 - self._escaped) if len(others) else quotes
        ends = quotes[(quotes - last) % 2 == 1]
        n_last = len(part) - (int(others[-1]) + 1 if len(others) else -self._escaped)
        self._escaped = n_last % 2 == 1
        flips = np.zeros(len(part), np.uint8)
        flips[ends] = 1
        inside = np.bitwise_xor.accumulate(flips) ^ self._in_string
        self._n_items += int(flips[inside == 1].sum())  # count each string at its opening quote
        self._in_string = bool(inside[-1])
        return inside.astype(bool)


def _too_many(what: str) -> RequestError:
    return RequestError(
        f"the body has more than {what}, the most that this server takes", 413, code="body_too_large"
    )
