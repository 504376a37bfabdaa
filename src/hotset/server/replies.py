"""JSON and events as they leave."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from starlette.responses import Response

DONE = b"data: [DONE]\n\n"


def dumped(value: Any) -> bytes:
    """JSON as clients get it; a lone surrogate, which UTF-8 does not have, becomes a question mark."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.encode("utf-8", "replace")


def event(value: Mapping[str, Any], name: str | None = None) -> bytes:
    """A server-sent event with JSON."""
    head = f"event: {name}\n".encode() if name else b""
    return b"%sdata: %s\n\n" % (head, dumped(value))


class JsonReply(Response):
    """A whole answer as JSON."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return dumped(content)
