"""What others wrote, made fit to be looked at: nothing in it controls a terminal or breaks a line.

Names, metadata, what a server says and messages that quote them are lines of a table or a message: `escaped`
writes out everything that is not a character to look at, and `clause` makes a part of a message of it. An
answer is a text: `escaped_text` lets its lines and its scripts stand.
"""

from __future__ import annotations

import re

# Control characters, lone surrogates, separators of lines, embedding and overriding of the direction.
_CONTROLS = "\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff"
# What else has no shape. The joiners (U+200C, U+200D) are of scripts and emoji, and stay.
_INVISIBLE = (
    "\xad\u061c\u180e\u200b\u200e\u200f\u2060-\u2065\u206a-\u206f\ufeff\ufff9-\ufffb\U000e0000-\U000e0fff"
)
_OF_A_LINE = re.compile(f"[{_CONTROLS}{_INVISIBLE}]")
_OF_A_TEXT = re.compile(f"(?![\n\t])[{_CONTROLS}]")
_OF_JSON = re.compile("[\x7f-\x9f\u2028\u2029\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")

LONGEST_LINE = 4000  # characters of a message
LONGEST_CELL = 1000  # of a cell of a table
_LONGEST_CLAUSE = 200  # of what a message quotes of a server
_LONGEST_WORD = 100  # of a line that is too long
_LONG_WORD = re.compile(rf"\S{{{_LONGEST_WORD + 50},}}")


def escaped(text: str, limit: int = LONGEST_LINE) -> str:
    """One line of text that shows what stands in `text`: \\n, \\x1b, \\u202e for what has no shape.

    Of longer ones than `limit`, long words lose their middle, and then the whole does: a message ends with
    what to do.
    """
    if len(text) > limit:
        text = _LONG_WORD.sub(lambda match: _shortened(match[0], _LONGEST_WORD), text)
    if len(text) > limit:
        text = _shortened(text, limit)
    return text if text.isascii() and text.isprintable() else _OF_A_LINE.sub(_written_out, text)


def clause(said: object, limit: int = _LONGEST_CLAUSE) -> str:
    """Return another program's words as part of a message: one line, without a full stop, at most `limit`
    characters."""
    return escaped(" ".join(str(said).split()), limit).rstrip(".")


def escaped_text(text: str) -> str:
    """The same lines, tabs and scripts with what a terminal might obey written out; \\r is left out."""
    return _OF_A_TEXT.sub(_written_out, text.replace("\r", ""))


def escaped_json(text: str) -> str:
    """The same JSON with what a terminal might obey written as \\uXXXX. json.dumps leaves them."""
    return _OF_JSON.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


def _shortened(text: str, limit: int) -> str:
    head, tail = limit - limit // 3, limit // 3
    return f"{text[:head]} ... [{len(text) - head - tail} characters] ... {text[-tail:]}"


def _written_out(match: re.Match[str]) -> str:
    return match[0].encode("unicode_escape").decode("ascii")
