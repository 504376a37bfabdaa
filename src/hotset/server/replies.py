"""JSON and events as they leave."""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"

MANY_VALUES = 512
"""Of a part of a reply that is written at once, in half a millisecond of the interpreter's lock."""

_VALUE_CHARS = 256  # of a text that takes as long as a number
_MANY_CHARS = MANY_VALUES * _VALUE_CHARS
_SENT_BYTES = 1 << 18  # at a time

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
    """Events that differ in one text or number, as nearly all events of a stream of tokens do.

    value, name: as of `event`, with `TextEvents.HOLE` in place of the text or number.
    """

    HOLE = uuid.uuid4().hex  # no text that anyone else could have written

    def __init__(self, value: Mapping[str, Any], name: str | None = None) -> None:
        self._head, self._tail = event(value, name).split(dumped(self.HOLE))

    def __call__(self, value: str | int) -> bytes:
        return b"%s%s%s" % (self._head, dumped(value), self._tail)


async def event_beside(value: Mapping[str, Any], name: str) -> bytes:
    """As `event`, of what may be long: that is written in a thread."""
    if n_values(value) <= MANY_VALUES:
        return event(value, name)
    pieces = await asyncio.to_thread(lambda: b"".join(_pieces(value)))
    return b"event: %s\ndata: %s\n\n" % (name.encode(), pieces)


class JsonReply(Response):
    """A whole answer as JSON. Its lists, those of its fields too, may be iterators."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return b"".join(_pieces(content))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends a long one in parts, no quicker than a client reads: the connection would copy all of it."""
        if len(self.body) <= _SENT_BYTES:
            await super().__call__(scope, receive, send)
            return
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        for start in range(0, len(self.body), _SENT_BYTES):
            part, more = self.body[start : start + _SENT_BYTES], start + _SENT_BYTES < len(self.body)
            await send({"type": "http.response.body", "body": part, "more_body": more})
            await asyncio.sleep(0)


def n_values(value: Any) -> int:
    """About how many numbers and short texts it has: many, where it is an iterator.

    The elements of a list are taken to be alike.
    """
    if isinstance(value, str):
        return 1 + len(value) // _VALUE_CHARS
    if isinstance(value, dict):
        return 1 + sum(map(n_values, value.values()))
    if isinstance(value, list):
        return 1 + (len(value) * n_values(value[0]) if value else 0)
    return 1 if value is None or isinstance(value, int | float) else MANY_VALUES + 1


def _pieces(value: Any) -> Iterator[bytes]:
    """`dumped`, some values at a time."""
    if isinstance(value, dict) and n_values(value) > MANY_VALUES:
        for i, (key, one) in enumerate(value.items()):
            yield b"%s%s:" % (b"," if i else b"{", dumped(key))
            yield from _pieces(one)
        yield b"}"
    elif isinstance(value, list | Iterator):
        yield b"["
        for i, part in enumerate(_parts(iter(value))):
            yield b"," if i else b""
            yield from _pieces(part[0]) if len(part) == 1 else (dumped(part)[1:-1],)
        yield b"]"
    elif isinstance(value, str) and len(value) > _MANY_CHARS:
        yield b'"'
        for start in range(0, len(value), _MANY_CHARS):
            yield dumped(value[start : start + _MANY_CHARS])[1:-1]
        yield b'"'
    else:
        yield dumped(value)


def _parts(entries: Iterator[Any]) -> Iterator[list[Any]]:
    """Lists of elements that have few values together, or of one that has many."""
    part: list[Any] = []
    n_there = 0
    for one in entries:
        n = n_values(one)
        if part and n_there + n > MANY_VALUES:
            yield part
            part, n_there = [], 0
        part.append(one)
        n_there += n
        if n == 1:  # a number: so are the others
            part += islice(entries, MANY_VALUES - len(part))
            yield part
            part, n_there = [], 0
    if part:
        yield part
