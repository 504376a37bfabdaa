"""Limits on the data and the time of an MCP server, which is an untrusted program."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from hotset.errors import HotsetError
from hotset.server.errors import RequestError
from hotset.server.json_limits import check_json
from hotset.server.key_limits import Bucket


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits of one server.

    start_seconds: to connect and to list its tools (npx may fetch the server first). call_seconds: of a call.
    write_seconds: until it has read a message. stop_seconds: between the end of its input and SIGTERM, and
    between SIGTERM and SIGKILL.

    message_bytes, message_nesting: of one message. minute_bytes: of all messages in a minute.
    tools: most tools; listing_bytes: of their descriptions and schemas; schema_bytes, schema_nesting: of one
    schema. description_chars: of a tool. result_chars: of a result. calls: at once.
    """

    start_seconds: float = 60.0
    call_seconds: float = 300.0
    write_seconds: float = 30.0
    stop_seconds: float = 2.0
    message_bytes: int = 4 << 20
    message_nesting: int = 64
    minute_bytes: int = 32 << 20
    tools: int = 256
    listing_bytes: int = 1 << 20
    schema_bytes: int = 64 << 10
    schema_nesting: int = 32
    description_chars: int = 4096
    result_chars: int = 50_000
    calls: int = 8


class McpServerError(HotsetError):
    """A fault of an MCP server; the message follows its name."""


def check_message(data: bytes, limits: Limits) -> None:
    """Raise McpServerError for a message that would take long to parse, while no other thread of Python runs.

    The caller limits its bytes.
    """
    try:
        check_json(data, limits.message_nesting)
    except RequestError:
        raise McpServerError(
            "sent a message with too many values, or nested too deeply, and was ended"
        ) from None


def meter_of(limits: Limits) -> Callable[[int], None]:
    """Return a counter of one connection's bytes. It raises McpServerError if the rate is too high."""
    bucket = Bucket(limits.minute_bytes)

    def count(n: int) -> None:
        bucket.take(n)
        if bucket.wait(0) > 0:
            raise McpServerError(f"sent more than {limits.minute_bytes} bytes in a minute and was ended")

    return count
