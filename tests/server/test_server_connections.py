"""Limits of connections: of data that no route has handled yet, and of unread replies."""

import asyncio
import gc
import logging
import re
import signal
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from fastapi import FastAPI
from tiny_server import Serving, held_steps
from uvicorn.server import ServerState
from waiting import WATCHDOG, until

from hotset.errors import InvalidRequestError
from hotset.server import listen, logs, protocol, streams
from hotset.server.settings import ServerSettings

pytest.importorskip("hotset._core", reason="the native module is not built")

GET = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"


def connected(server: Serving) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), timeout=WATCHDOG)


def everything(connection: socket.socket) -> bytes:
    """Return what arrives until the server closes or resets the connection."""
    parts = []
    try:
        while part := connection.recv(1 << 16):
            parts.append(part)
    except ConnectionError:
        pass
    return b"".join(parts)


def flooded(server: Serving, head: bytes, piece: bytes, n_bytes: int = 32 << 20) -> tuple[int, bytes]:
    """Send pieces without end. Return the number of sent bytes, and the reply."""
    with connected(server) as connection:
        n = 0
        try:
            connection.sendall(head)
            while n < n_bytes:
                connection.sendall(piece)
                n += len(piece)
        except (ConnectionError, TimeoutError):
            pass
        return n, everything(connection)


def status(reply: bytes) -> int | None:
    found = re.match(rb"HTTP/1.1 (\d+)", reply)
    return int(found[1]) if found else None


FLOODS = {
    "header lines": (b"GET / HTTP/1.1\r\nHost: localhost\r\n", b"a: b\r\n" * 1000),
    "one header": (b"GET / HTTP/1.1\r\nHost: localhost\r\na: ", b"b" * 8192),
    "a URL": (b"GET /", b"a" * 8192),
    "trailers": (
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n",
        b"a: b\r\n" * 1000,
    ),
    "one trailer": (
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n0\r\na: ",
        b"b" * 8192,
    ),
    "a chunk's extension": (
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n1;a=",
        b"b" * 8192,
    ),
    "requests": (b"", GET * 1000),
    "empty chunks": (
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"0001;a\r\nb\r\n" * 1000,
    ),
    "an unread body": (
        b"GET /health HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"2000\r\n" + b"b" * 8192 + b"\r\n",
    ),
}


@pytest.mark.parametrize("kind", FLOODS)
def test_endless_requests_are_not_stored(path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The parser and a connection's lists hold little more than the limit, however much is sent."""
    kept: list[int] = []
    received = protocol.LimitedProtocol.data_received

    def watched(self: protocol.LimitedProtocol, data: bytes) -> None:
        received(self, data)
        kept.append(sum(len(a) + len(b) for a, b in self.headers or ()) + len(getattr(self, "url", b"")))
        assert len(self.pipeline) <= protocol.MAX_PIPELINED

    monkeypatch.setattr(protocol.LimitedProtocol, "data_received", watched)
    with Serving(path, max_body_seconds=1) as server:
        flooded(server, *FLOODS[kind])
        assert max(kept) < 2 * protocol.MAX_HEAD_BYTES + (256 << 10)
        until(lambda: not server.server.server_state.connections)
        assert server.client.get("/health").status_code == 200


@pytest.mark.parametrize(
    ("request_", "expected"),
    [
        (b"GET / HTTP/1.1\r\nHost: localhost\r\n" + b"a: %s\r\n" % (b"b" * 70_000), 431),
        (b"GET / HTTP/1.1\r\nHost: localhost\r\n" + b"a: b\r\n" * 101, 431),
        (b"GET /%s HTTP/1.1\r\nHost: localhost\r\n" % (b"a" * 9000), 414),
        (b"GET / HTTP/1.1\r\nHost localhost\r\n", 400),
        (b"GET /health HTTP/1.1\r\nHost: localhost\r\n" + b"a: b\r\n" * 98, 200),
        (b"GET /health?a=%s HTTP/1.1\r\nHost: localhost\r\n" % (b"a" * 8000), 200),
    ],
)
def test_heads_have_limits(path: Path, request_: bytes, expected: int) -> None:
    with Serving(path) as server, connected(server) as connection:
        connection.sendall(request_ + b"Connection: close\r\n\r\n")
        reply = everything(connection)
        assert status(reply) == expected
        if expected != 200:
            assert b"content-type: application/json" in reply
            assert b'"type":"invalid_request_error"' in reply


CHUNKED = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n"


@pytest.mark.parametrize(
    ("request_", "expected"),
    [
        (CHUNKED + b"\r\n0x2d\r\n", 400),
        (CHUNKED + b"\r\nfffffffffffffffff\r\n", 400),
        (CHUNKED + b"\r\n0\r\n" + b"a: b\r\n" * 101, 431),
        (CHUNKED + b"\r\n1;a=" + b"b" * 300_000, 431),
        (CHUNKED.replace(b"chunked", b"identity") + b"\r\n", 400),
        (CHUNKED.replace(b"chunked", b"xchunked") + b"\r\n", 400),
        (CHUNKED + b"Transfer-Encoding: chunked\r\n\r\n", 400),
        (CHUNKED + b"Connection: Upgrade\r\nUpgrade: h2c\r\n\r\n", 400),
    ],
)
def test_an_invalid_body_is_refused_immediately(path: Path, request_: bytes, expected: int) -> None:
    with Serving(path, max_body_seconds=1e6) as server, connected(server) as connection:
        connection.sendall(request_)
        assert status(everything(connection)) == expected


def test_a_request_without_a_body_may_ask_to_upgrade_the_connection(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with Serving(path) as server, connected(server) as connection:
        connection.sendall(GET.replace(b"\r\n\r\n", b"\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n\r\n"))
        until(lambda: server.server.server_state.total_requests == 1)
        connection.sendall(GET.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"))
        assert re.findall(rb"HTTP/1.1 (\d+)", everything(connection)) == [b"200", b"200"]
    assert "websocket" not in caplog.text.lower()


def test_pipelined_requests_are_answered_in_order(path: Path) -> None:
    with Serving(path) as server, connected(server) as connection:
        last = GET.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n").replace(b"/health", b"/nothing")
        connection.sendall(GET * 5 + last)
        found = re.findall(rb"HTTP/1.1 (\d+)", everything(connection))
        assert found == [b"200"] * 5 + [b"404"]


def test_too_many_pipelined_requests_close_the_connection(path: Path) -> None:
    with Serving(path) as server, connected(server) as connection:
        connection.sendall(GET * 1000)
        found = re.findall(rb"HTTP/1.1 (\d+)", everything(connection))
        assert found == [b"200"] * (protocol.MAX_PIPELINED + 1)


@pytest.mark.parametrize("stream", [b"false", b"true"])
@pytest.mark.parametrize("at_once", [True, False])
def test_a_disconnected_client_is_noticed_despite_its_pipelined_requests(
    path: Path, stream: bytes, at_once: bool
) -> None:
    """The last request waits. With at_once false it is sent later, and is not read before."""
    body = b'{"model": "tiny", "prompt": "a", "max_tokens": 9, "temperature": 0, "stream": %s}' % stream
    post = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(body)
    with Serving(path) as server, held_steps(server.model):  # the disconnection ends the answer, not a step
        with connected(server) as connection:
            connection.sendall(post + body + (GET if at_once else b""))
            until(lambda: server.service.n_open == 1)
            connection.sendall(GET)
        until(lambda: server.service.n_open == 0)


def test_an_incomplete_head_times_out(path: Path) -> None:
    with Serving(path, max_head_seconds=0.1) as server:
        with connected(server) as silent:
            assert everything(silent) == b""
        with connected(server) as half:
            half.sendall(GET[:20])
            assert status(everything(half)) == 408
        with connected(server) as second:
            second.sendall(GET + GET[:20])
            found = re.findall(rb"HTTP/1.1 (\d+)", everything(second))
            assert found == [b"200", b"408"]


def test_idle_connections_are_closed_for_new_ones_and_health_answers(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listen, "most_connections", lambda: 8)
    with Serving(path) as server:
        idle = [connected(server) for _ in range(40)]
        for connection in idle:
            connection.sendall(GET[:20])
        for _ in range(20):
            assert server.client.get("/health", headers={"Connection": "close"}).status_code == 200
        assert len(server.server.server_state.connections) <= 8
        assert everything(idle[0]) == b""  # the oldest was closed
        for connection in idle:
            connection.close()


HALF_POST = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{"


def test_connections_with_slow_bodies_are_closed_for_new_ones(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listen, "most_connections", lambda: 8)
    with Serving(path, max_body_seconds=1e6) as server:
        slow = [connected(server) for _ in range(20)]
        for connection in slow:
            connection.sendall(HALF_POST)
        for _ in range(20):
            assert server.client.get("/health", headers={"Connection": "close"}).status_code == 200
        assert everything(slow[0]) == b""
        for connection in slow:
            connection.close()


def test_shutdown_does_not_wait_for_bodies(path: Path) -> None:
    with Serving(path, max_body_seconds=1e6, grace_seconds=1e6) as server, connected(server) as connection:
        connection.sendall(HALF_POST)
        until(lambda: server.server.server_state.tasks)
        server.server.handle_exit(signal.SIGTERM, None)
        assert status(everything(connection)) == 503


def test_shutdown_does_not_wait_for_readers(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listen, "LAST_SECONDS", 0)
    with Serving(path, max_write_seconds=1e6, grace_seconds=1e6) as server, socket.socket() as connection:
        unread(server, connection)
        server.server.handle_exit(signal.SIGTERM, None)


def test_connections_that_wait_for_answers_are_not_closed_for_new_ones(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listen, "most_connections", lambda: 2)
    with Serving(path) as server, held_steps(server.model) as held:
        body = b'{"model": "tiny", "prompt": "a", "max_tokens": 2, "temperature": 0}'
        head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
        post = head + b"Content-Length: %d\r\n\r\n%s" % (len(body), body)
        asked = [connected(server) for _ in range(2)]
        for connection in asked:
            connection.sendall(post)
        until(lambda: server.service.n_open == 2)
        with connected(server) as more:
            more.sendall(GET)
            assert status(everything(more)) == 503
        held.gate.set()
        assert [status(everything(connection)) for connection in asked] == [200, 200]
        for connection in asked:
            connection.close()


def unread(server: Serving, connection: socket.socket) -> None:
    """Request a reply that does not fit into the system's buffers, and do not read it."""
    server.set_send_buffer(4096)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.connect(("127.0.0.1", server.port))
    connection.sendall(GET.replace(b"/health", b"/openapi.json"))
    until(lambda: any(one.n_unread for one in server.server.server_state.connections))  # type: ignore[union-attr]


def test_a_connection_whose_reply_is_not_read_is_closed(path: Path) -> None:
    with Serving(path, max_write_seconds=0.1) as server, socket.socket() as connection:
        unread(server, connection)
        until(lambda: not server.server.server_state.connections)
        assert server.client.get("/health").status_code == 200


def test_unread_replies_of_all_connections_have_a_limit(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The connection with the most is closed first."""
    monkeypatch.setattr(listen, "CHECK_SECONDS", 1e6)
    with (
        Serving(path, max_write_seconds=1e6) as server,
        socket.socket() as connection,
        connected(server) as small,
    ):
        small.sendall(GET)
        unread(server, connection)
        connections: set[Any] = server.server.server_state.connections
        monkeypatch.setattr(protocol, "MAX_UNREAD_BYTES", sum(one.n_unread for one in connections))
        protocol.check_connections(connections, 0.0, 1e6)
        assert not any(one.transport.is_closing() for one in connections)
        monkeypatch.setattr(protocol, "MAX_UNREAD_BYTES", protocol.MAX_UNREAD_BYTES - 1)
        done = threading.Event()

        def check() -> None:
            protocol.check_connections(connections, 0.0, 1e6)
            done.set()

        loop: Any = server.server._loop
        loop.call_soon_threadsafe(check)
        assert done.wait(WATCHDOG)
        until(lambda: len(connections) == 1)
        small.sendall(GET)
        assert small.recv(1 << 10)


def test_the_unsent_rest_of_a_long_reply_counts_as_unread(path: Path) -> None:
    content = b'{"content": "%s"}' % (b"a" * 300_000)
    post = b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(content)
    with Serving(path) as server, socket.socket() as connection:
        server.set_send_buffer(4096)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(("127.0.0.1", server.port))
        connection.sendall(post + content)
        connections: set[Any] = server.server.server_state.connections
        until(lambda: any(one.n_unread > 600_000 for one in connections))
        until(lambda: all(one.transport.get_write_buffer_size() < 300_000 for one in connections))
    assert not connections


@pytest.mark.parametrize(("trusted", "expected"), [((), "127.0.0.1"), (("127.0.0.1",), "1.2.3.4")])
def test_only_a_trusted_proxy_names_the_client(
    path: Path, trusted: tuple[str, ...], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    clients: list[str | None] = []
    of_client: Callable[..., Any] = streams.of_client

    def noted(http: Any, request: Any) -> Any:
        found = of_client(http, request)
        clients.append(found.client)
        return found

    monkeypatch.setattr(streams, "of_client", noted)
    with Serving(path, trusted_proxies=trusted) as server:
        body = {"prompt": "a", "max_tokens": 1, "temperature": 0}
        reply = server.client.post("/v1/completions", json=body, headers={"X-Forwarded-For": "1.2.3.4"})
        assert reply.status_code == 200
    assert clients == [expected]


def test_a_connection_that_was_reset_keeps_its_address() -> None:
    """Use the address from before: the socket has none now, and a client without one counts as local."""

    class Reset:
        def getpeername(self) -> Any:
            raise OSError("not connected")

        def getsockname(self) -> Any:
            return "127.0.0.1", 8080

    class Transport(asyncio.Transport):
        def get_extra_info(self, name: str, default: Any = None) -> Any:
            return {"socket": Reset(), "peername": ("10.0.0.5", 7)}.get(name, default)

    async def client() -> Any:
        config = uvicorn.Config(FastAPI(), log_config=None)
        how = {"config": config, "server_state": ServerState(), "app_state": {}}
        made = protocol.LimitedProtocol(protocol.ConnectionLimits(1, 16), {}, **how)
        made.connection_made(Transport())
        return made.client

    assert asyncio.run(client()) == ("10.0.0.5", 7)


def test_a_trusted_proxy_must_be_an_address() -> None:
    with pytest.raises(InvalidRequestError, match="an address or a network"):
        ServerSettings(trusted_proxies=("proxy.example",))


def test_the_garbage_collector_skips_a_loaded_models_objects(path: Path) -> None:
    with Serving(path):
        until(gc.get_freeze_count)
    assert not gc.get_freeze_count()


# ---- the log ----


def test_the_log_has_a_bounded_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(logs.time, "monotonic", lambda: now[0])
    limit = logs.RateLimit()

    def passed(n: int) -> list[str]:
        records = [logging.LogRecord("a", logging.INFO, "", 0, "line %d", (i,), None) for i in range(n)]
        return [record.getMessage() for record in records if limit.filter(record)]

    assert len(passed(1000)) == logs.N_LINES
    now[0] += logs.SECONDS
    assert passed(1) == ["line 0 (980 earlier lines were left out)"]
    now[0] += logs.SECONDS
    assert passed(2) == ["line 0", "line 1"]


def test_an_error_of_the_system_is_logged_in_one_line(caplog: pytest.LogCaptureFixture) -> None:
    logs.log_loop_errors(None, {"message": "no descriptor", "exception": OSError(24, "Too many open files")})  # type: ignore[arg-type]
    assert [record.exc_info for record in caplog.records] == [None]
    assert "Too many open files" in caplog.text
