"""Limits of one HTTP connection: on the data that a client sends before a route sees it, and leaves unread.

uvicorn's protocol limits bodies, but not heads. Header lines, trailers and pipelined requests would fill
memory until a client stops, before any key is checked.
"""

from __future__ import annotations

import asyncio
import contextlib
import select
import socket
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from hotset.server.errors import Problem, body_of
from hotset.server.replies import dumped

MAX_HEAD_BYTES = 64 << 10  # of a request line and all headers, trailers among them
MAX_HEADERS = 100
MAX_URL_BYTES = 8 << 10
MAX_PIPELINED = 16  # requests of one connection that wait for the answer to an earlier one
MAX_UNREAD_BYTES = 256 << 20  # of replies that clients have not read, of all connections together
_BYTES_PER_BODY_BYTE = 8  # most bytes per byte of a body: each chunk adds a line with its length

BACKLOG = 256  # connections that are accepted together
_DESCRIPTORS_KEPT = 512  # for BACKLOG, the model's files and all other files of the process
_MOST_CONNECTIONS = 4096
_MOST_HANDSHAKES = 256


class Handshakes:
    """Accepted connections that still exchange keys (TLS). uvicorn counts a connection only afterwards.

    The oldest is shut down if there are more than `most`, and each after `seconds`.
    """

    def __init__(self, most: int, seconds: float) -> None:
        self._most, self._seconds = most, seconds
        self._begun: dict[int, tuple[socket.socket, float]] = {}  # by descriptor, the oldest first

    def begin(self, connection: socket.socket) -> None:
        self._begun.pop(connection.fileno(), None)  # the descriptor of a closed connection
        self._begun[connection.fileno()] = connection, time.monotonic()
        if len(self._begun) > self._most:
            self._shut(next(iter(self._begun)))

    def end(self, descriptor: int) -> None:
        self._begun.pop(descriptor, None)

    def check(self) -> None:
        """Shut down handshakes that take too long. The server calls it every second."""
        now = time.monotonic()
        for descriptor, (connection, since) in list(self._begun.items()):
            if connection.fileno() < 0:
                del self._begun[descriptor]
            elif now - since > self._seconds:
                self._shut(descriptor)

    def _shut(self, descriptor: int) -> None:
        connection, _ = self._begun.pop(descriptor)
        with contextlib.suppress(OSError):  # it is closed already
            connection.shutdown(socket.SHUT_RDWR)  # the event loop closes it


class ListeningSocket(socket.socket):
    """A listening socket that reports accepted connections to `handshakes`."""

    handshakes: Handshakes | None = None

    def accept(self) -> tuple[socket.socket, Any]:
        connection, address = super().accept()
        if self.handshakes is not None:
            self.handshakes.begin(connection)
        return connection, address


@dataclass(frozen=True)
class ConnectionLimits:
    """Limits of connections.

    head_seconds: for a request's head, or a handshake, to arrive. connections: open at once. handshakes: of a
    server with TLS.
    """

    head_seconds: float
    connections: int
    handshakes: Handshakes | None = None


def most_connections() -> int:
    """Return how many connections the file descriptors suffice for. Raises the process's soft limit."""
    if sys.platform == "win32":
        return _MOST_CONNECTIONS
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MOST_CONNECTIONS + _DESCRIPTORS_KEPT
    if soft != resource.RLIM_INFINITY and soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    usable = wanted if soft == resource.RLIM_INFINITY else soft
    return max(16, min(_MOST_CONNECTIONS, max(usable - _DESCRIPTORS_KEPT, usable // 4)))


def handshakes_of(head_seconds: float, connections: int) -> Handshakes:
    return Handshakes(min(_MOST_HANDSHAKES, connections // 4), head_seconds)


class _ParserEndedError(Exception):
    """An exception that ends the parser inside a callback."""


class LimitedProtocol(HttpToolsProtocol):
    """uvicorn's protocol of one connection, which refuses requests that exceed `limits`.

    The server calls `check` every second. waiting: connections whose request has not arrived completely,
    those idle for longest first. If there are too many connections, the first of these is closed.
    """

    def __init__(self, limits: ConnectionLimits, waiting: dict[LimitedProtocol, None], **how: Any) -> None:
        super().__init__(**how)
        self._limits, self._waiting = limits, waiting
        self._refusal: Problem | None = None
        self._n_fed = self._n_body = self._n_head = 0  # bytes of this message
        self._arriving: Literal["", "head", "body"] = ""  # the part of the latest message
        self._head_since: float | None = None
        self._unread, self._unread_since = 0, 0.0  # bytes of replies that the client has not taken
        self._running: RequestResponseCycle | None = None  # `cycle` is the last one, which may be queued

    # ---- the connection ----

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if self._limits.handshakes is not None:
            self._limits.handshakes.end(transport.get_extra_info("socket").fileno())
        # uvicorn asks the socket, which no longer knows the address once the client has reset the
        # connection. The transport has the address that `accept` returned.
        peer = transport.get_extra_info("peername")
        if self.client is None and isinstance(peer, tuple):
            self.client = str(peer[0]), int(peer[1])
        self._head_since = self.loop.time()
        self._waiting[self] = None
        if len(self.connections) > self._limits.connections:
            oldest = next(iter(self._waiting))
            if oldest is self:
                self._refuse(Problem(503, "the server has as many connections as it takes; try again"))
            else:
                del self._waiting[oldest]
                self.connections.discard(oldest)  # now, not when the loop handles the abort
                oldest.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._waiting.pop(self, None)
        super().connection_lost(exc)
        if self._running is not None and not self._running.response_complete:
            self._running.disconnected = True
            self._running.message_event.set()

    def check(self, now: float, write_seconds: float) -> None:
        """End the connection if the client has left, or takes too long to send a head or read a reply."""
        if self.flow.read_paused and _is_left(self.transport):
            self.transport.abort()
            return
        since = self._head_since
        if since is not None and self in self._waiting and now - since > self._limits.head_seconds:
            self._head_since = None
            if not self._arriving:
                self.transport.close()
            else:
                seconds = f"{self._limits.head_seconds:g}"
                self._refuse(Problem(408, f"the request's head did not arrive within {seconds} s"))
        unread = self.n_unread
        if unread == 0 or unread < self._unread or not self._unread:
            self._unread_since = now
        elif now - self._unread_since > write_seconds:
            self.transport.abort()
        self._unread = unread

    @property
    def n_unread(self) -> int:
        """Return the bytes of replies that the client has not read yet."""
        cycle, n = self._running, self.transport.get_write_buffer_size()
        if cycle is not None and cycle.response_started and not cycle.response_complete:
            n += cycle.expected_content_length
        return n

    def shutdown(self) -> None:
        """End the connection when the server ends, without waiting for the rest of a body."""
        if self._arriving == "body":
            self._refuse(Problem(503, "the server is shutting down; ask another one"))
        else:
            super().shutdown()

    # ---- what arrives ----

    def data_received(self, data: bytes) -> None:
        if self._refusal is not None:  # drop further data; replies that were begun are completed
            return
        if not self._arriving and self._head_since is None:
            self._head_since = self.loop.time()
        self._n_fed += len(data)
        super().data_received(data)
        beside = self._n_fed - _BYTES_PER_BODY_BYTE * self._n_body
        if self._arriving and beside > MAX_HEAD_BYTES and self._refusal is None:
            self._refuse(self._too_large())

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._arriving = "head"
        self._n_fed = self._n_body = self._n_head = 0

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        self._count(len(url))
        if len(self.url) > MAX_URL_BYTES:
            self._stop(Problem(414, f"the URL is longer than {MAX_URL_BYTES} bytes"))

    def on_header(self, name: bytes, value: bytes) -> None:
        super().on_header(name, value)
        self._count(len(name) + len(value) + 4)
        if len(self.headers) > MAX_HEADERS:
            self._stop(Problem(431, f"the request has more than {MAX_HEADERS} headers"))

    def on_headers_complete(self) -> None:
        self._head_since = None
        if self in self._waiting:
            del self._waiting[self]
            self._waiting[self] = None
        if len(self.pipeline) >= MAX_PIPELINED:
            text = f"more than {MAX_PIPELINED} requests wait on this connection; read the replies first"
            self._stop(Problem(429, text))
        codings = [value.strip().lower() for name, value in self.headers if name == b"transfer-encoding"]
        if codings not in ([], [b"chunked"]):
            self._stop(Problem(400, "chunked is the only transfer coding that this server knows"))
        lengths = [value for name, value in self.headers if name == b"content-length"]
        if self.parser.should_upgrade() and (codings or lengths not in ([], [b"0"])):  # it drops the body
            text = "a request that asks to upgrade the connection cannot have a body; leave the Upgrade out"
            self._stop(Problem(400, text))
        super().on_headers_complete()
        if not self.pipeline:
            self._running = self.cycle
        self._arriving = "body"

    def on_body(self, body: bytes) -> None:
        self._n_body += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._arriving = ""
        self._waiting.pop(self, None)
        super().on_message_complete()

    def on_response_complete(self) -> None:
        if self.cycle.response_complete and self.cycle.more_body:  # do not read the rest of the body
            self.transport.close()
        following = self.pipeline[-1][0] if self.pipeline else self._running
        super().on_response_complete()
        self._running = following
        if self.cycle.response_complete and not self.transport.is_closing():
            self._waiting[self] = None
            self._head_since = self.loop.time() if self._arriving == "head" else None

    # ---- refusals ----

    def _count(self, n_bytes: int) -> None:
        self._n_head += n_bytes
        if self._n_head > MAX_HEAD_BYTES:
            self._stop(self._too_large())

    def _too_large(self) -> Problem:
        return Problem(431, f"the request's head is larger than {MAX_HEAD_BYTES} bytes")

    def _stop(self, problem: Problem) -> None:
        """Refuse the message in the middle of parsing it."""
        self._refusal = problem
        raise _ParserEndedError

    def send_400_response(self, _: str) -> None:
        """Refuse the request. uvicorn calls it after a parser error, also one raised by `_stop`."""
        self._refuse(self._refusal or Problem(400, "this is no valid HTTP/1.1 request"))

    def _unsupported_upgrade_warning(self) -> None:
        """Do nothing: clients may ask for an upgrade."""

    def _refuse(self, problem: Problem) -> None:
        self._refusal = problem
        is_answered = self._arriving != "body" or bool(self.pipeline) or self.cycle.response_started
        if self.cycle is not None and not self.cycle.response_complete and is_answered:
            self.cycle.keep_alive = False  # replies to earlier requests are completed, then it closes
            return
        body = dumped(body_of(problem, "/"))
        headers = ("content-type: application/json", "connection: close", f"content-length: {len(body)}")
        head = "".join(f"{header}\r\n" for header in headers).encode()
        self.transport.write(STATUS_LINE[problem.status] + head + b"\r\n" + body)
        self.transport.close()


def _is_left(transport: asyncio.Transport) -> bool:
    """Return whether the client has closed the connection. An event loop that pauses reading does not notice.

    False if the system cannot tell.
    """
    if not hasattr(select, "poll"):  # Windows
        return False
    poll = select.poll()
    poll.register(transport.get_extra_info("socket").fileno(), getattr(select, "POLLRDHUP", 0))
    return bool(poll.poll(0))


def check_connections(connections: Iterable[LimitedProtocol], now: float, write_seconds: float) -> None:
    """End slow connections. If too much is unread in all, end those with the most first."""
    left = sorted(connections, key=lambda one: one.n_unread, reverse=True)
    excess = sum(one.n_unread for one in left) - MAX_UNREAD_BYTES
    for one in left:
        if excess > 0:
            excess -= one.n_unread
            one.transport.abort()
        else:
            one.check(now, write_seconds)
