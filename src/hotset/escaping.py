"""Escaping of texts from others, so that they cannot control a terminal or break a line.

`escaped` is for one line of a table or a message, such as a name, metadata or a server's error: it writes out
every character that is not visible. `clause` makes a part of a message from another program's. `escaped_text`
is for an answer: it keeps lines and scripts.
"""

from __future__ import annotations

import re

# Control characters, lone surrogates, line separators, and embeddings and overrides of the text direction.
_CONTROLS = "\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff"
# Other invisible characters. The joiners (U+200C, U+200D) are kept, because scripts and emoji need them.
_INVISIBLE = (
    "\xad\u061c\u180e\u200b\u200e\u200f\u2060-\u2065\u206a-\u206f\ufeff\ufff9-\ufffb\U000e0000-\U000e0fff"
)
_OF_A_LINE = re.compile(f"[{_CONTROLS}{_INVISIBLE}]")
_OF_A_TEXT = re.compile(f"(?![\n\t])[{_CONTROLS}]")
_OF_JSON = re.compile("[\x7f-\x9f\u2028\u2029\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")

LONGEST_LINE = 4000  # characters of a message
LONGEST_CELL = 1000  # characters of a table cell
_LONGEST_CLAUSE = 200  # characters of a quoted server message
_LONGEST_WORD = 100  # characters of a word in a line that is too long
_LONG_WORD = re.compile(rf"\S{{{_LONGEST_WORD + 50},}}")


def escaped(text: str, limit: int = LONGEST_LINE) -> str:
    """Return a text as one line, with \\n, \\x1b or \\u202e for characters that are not visible.

    If it is longer than `limit`, long words lose their middle first, and then the whole text does, because
    the end of a message says what to do.
    """
    if len(text) > limit:
        text = _LONG_WORD.sub(lambda match: _shortened(match[0], _LONGEST_WORD), text)
    if len(text) > limit:
        text = _shortened(text, limit)
    return text if text.isascii() and text.isprintable() else _OF_A_LINE.sub(_written_out, text)


def clause(said: object, limit: int = _LONGEST_CLAUSE) -> str:
    """Return another program's message as part of a message: one line of at most `limit` characters.

    Full stops at the end are removed.
    """
    return escaped(" ".join(str(said).split()), limit).rstrip(".")


def escaped_text(text: str) -> str:
    """Return a text with terminal control characters written out, except \\n and \\t; \\r is removed."""
    return _OF_A_TEXT.sub(_written_out, text.replace("\r", ""))


def escaped_json(text: str) -> str:
    """Return JSON with terminal control characters as \\uXXXX, since json.dumps does not escape them."""
    return _OF_JSON.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def _shortened(text: str, limit: int) -> str:
    head, tail = limit - limit // 3, limit // 3
    return f"{text[:head]} ... [{len(text) - head - tail} characters] ... {text[-tail:]}"


def _written_out(match: re.Match[str]) -> str:
    return match[0].encode("unicode_escape").decode("ascii")
