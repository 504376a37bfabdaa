"""Replies as JSON and as server-sent events."""

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
"""Values of a reply that are written at once; this takes half a millisecond of the interpreter's lock."""

_VALUE_CHARS = 256  # of a text that takes as long to write as a number
_MANY_CHARS = MANY_VALUES * _VALUE_CHARS
SENT_BYTES = 1 << 18  # per part of a reply

# One encoder for all values: json.dumps makes a new one for each.
_encode = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode


def dumped(value: Any) -> bytes:
    """Return the JSON of a value for clients. A lone surrogate, which UTF-8 cannot encode, becomes "?"."""
    return _encode(value).encode("utf-8", "replace")


def dumped_exactly(value: Any) -> bytes:
    """Return JSON from which the same value can be read. A lone surrogate becomes a JSON escape."""
    return _encode(value).encode("utf-8", "backslashreplace")


def event(value: Mapping[str, Any], name: str | None = None) -> bytes:
    """Return a server-sent event with JSON."""
    head = f"event: {name}\n".encode() if name else b""
    return b"%sdata: %s\n\n" % (head, dumped(value))


class TextEvents:
    """A maker of events that differ only in one text or number, as most events of a stream do.

    value, name: as in `event`, with `TextEvents.HOLE` in place of the text or number.
    """

    HOLE = uuid.uuid4().hex  # a text that no other text contains

    def __init__(self, value: Mapping[str, Any], name: str | None = None) -> None:
        self._head, self._tail = event(value, name).split(dumped(self.HOLE))

    def __call__(self, value: str | int) -> bytes:
        return b"%s%s%s" % (self._head, dumped(value), self._tail)


async def event_beside(value: Mapping[str, Any], name: str) -> bytes:
    """Return an event as `event` does; a thread writes a long one."""
    if n_values(value) <= MANY_VALUES:
        return event(value, name)
    pieces = await asyncio.to_thread(lambda: b"".join(_pieces(value)))
    return b"event: %s\ndata: %s\n\n" % (name.encode(), pieces)


class JsonReply(Response):
    """A whole answer as JSON. Lists in it, at any level, may be iterators."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return b"".join(_pieces(content))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send a long reply in parts, as fast as the client reads. Sent at once, it would be copied whole."""
        if len(self.body) <= SENT_BYTES:
            await super().__call__(scope, receive, send)
            return
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        for start in range(0, len(self.body), SENT_BYTES):
            part, more = self.body[start : start + SENT_BYTES], start + SENT_BYTES < len(self.body)
            await send({"type": "http.response.body", "body": part, "more_body": more})
            await asyncio.sleep(0)


def n_values(value: Any) -> int:
    """Estimate the number of numbers and short texts in a value; an iterator counts as many.

    The elements of a list count as equal.
    """
    if isinstance(value, str):
        return 1 + len(value) // _VALUE_CHARS
    if isinstance(value, dict):
        return 1 + sum(map(n_values, value.values()))
    if isinstance(value, list):
        return 1 + (len(value) * n_values(value[0]) if value else 0)
    return 1 if value is None or isinstance(value, int | float) else MANY_VALUES + 1


def _pieces(value: Any) -> Iterator[bytes]:
    """Yield the result of `dumped` in pieces, with a limited number of values each."""
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
    """Yield lists of elements that have few values together, or of one element that has many."""
    part: list[Any] = []
    n_there = 0
    for one in entries:
        n = n_values(one)
        if part and n_there + n > MANY_VALUES:
            yield part
            part, n_there = [], 0
        part.append(one)
        n_there += n
        if n == 1:  # a number: the other entries are numbers, too
            part += islice(entries, MANY_VALUES - len(part))
            yield part
            part, n_there = [], 0
    if part:
        yield part
