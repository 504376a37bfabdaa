"""JSON and events as they leave."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

from starlette.responses import Response

DONE = b"data: [DONE]\n\n"

_LEVELS = 5  # of a reply that are written part by part: choices, their logprobs, the list of these
_ENTRIES = 16  # of a list at a time

# One for all: json.dumps makes another for each value.
_encode = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode


def dumped(value: Any) -> bytes:
    """JSON as clients get it; a lone surrogate, which UTF-8 does not have, becomes a question mark."""
    return _encode(value).encode("utf-8", "replace")


def dumped_exactly(value: Any) -> bytes:
    """JSON from which a value comes back as it was: a lone surrogate is written as JSON's escape of it."""
    return _encode(value).encode("utf-8", "backslashreplace")


def event(value: Mapping[str, Any], name: str | None = None) -> bytes:
    """A server-sent event with JSON."""
    head = f"event: {name}\n".encode() if name else b""
    return b"%sdata: %s\n\n" % (head, dumped(value))


class TextEvents:
    """Events that differ in one text: those of a stream of tokens, all but a few.

    event: what `event` gets, with `TextEvents.HOLE` where the text is.
    """

    HOLE = uuid.uuid4().hex  # no text that anyone else could have written

    def __init__(self, value: Mapping[str, Any]) -> None:
        self._head, self._tail = event(value).split(dumped(self.HOLE))

    def __call__(self, text: str) -> bytes:
        return b"%s%s%s" % (self._head, dumped(text), self._tail)


class JsonReply(Response):
    """A whole answer as JSON. Its lists, those of its fields too, may be iterators."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return b"".join(_pieces(content, _LEVELS))


def _pieces(value: Any, n_levels: int) -> Iterator[bytes]:
    """`dumped`, some entries of long lists at a time: the encoder holds the interpreter's lock."""
    if n_levels and isinstance(value, dict):
        for i, (key, one) in enumerate(value.items()):
            yield b"%s%s:" % (b"," if i else b"{", dumped(key))
            yield from _pieces(one, n_levels - 1)
        yield b"}" if value else b"{}"
    elif isinstance(value, Iterator) or (n_levels and isinstance(value, list)):
        yield b"["
        entries, begun = iter(value), False
        while part := list(islice(entries, _ENTRIES)):
            yield b"," if begun else b""
            begun = True
            if n_levels > 1 and len(part) < _ENTRIES and isinstance(part[0], dict):  # a short list
                for i, one in enumerate(part):
                    yield b"," if i else b""
                    yield from _pieces(one, n_levels - 1)
            else:
                yield dumped(part)[1:-1]
        yield b"]"
    else:
        yield dumped(value)
