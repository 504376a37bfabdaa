"""JSON and events as they leave."""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping
from typing import Any

from starlette.responses import Response

DONE = b"data: [DONE]\n\n"

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
    """A whole answer as JSON."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return dumped(content)
