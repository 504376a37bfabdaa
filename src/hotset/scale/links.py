"""Connections between the stages of a model that is cut over machines.

Ray begins the stages and notices when they die; but a call of it takes a millisecond, which each token would
pay at each boundary. So stages stand in a line of their own: whoever asks sends pieces of a step to the
first, each sends on what it made of them, and the last one sends rows back.

    asker ── enters ─> stage ── enters ─> stage ── leaves ─> asker

Messages are pickled, as Ray's are; nothing is unpickled that did not come from one who has the line's key.
"""

from __future__ import annotations

import os
import secrets
import socket
import threading
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, Listener
from typing import Any

from hotset.backends.base import Batch

Address = tuple[str, int]

ENTERS, LEAVES = b"enters", b"leaves"  # which end of a stage a connection is
LOST = (EOFError, OSError)  # what a connection raises whose other side is gone
_GONE_SECONDS = 10  # after which a machine that is silent is gone


def new_key() -> bytes:
    """What those in a line prove to each other that they have."""
    return secrets.token_bytes(32)


def joined(address: Address, key: bytes, end: bytes) -> Connection:
    """A connection to one end of the stage that listens there. Raises OSError, and AuthenticationError where
    somebody else does."""
    found = Client(address, authkey=key)
    _tune(found)
    found.send_bytes(end)
    return found


class Inlet:
    """Where a stage waits for its neighbours, who have the key. host: an address of this machine."""

    def __init__(self, host: str, key: bytes) -> None:
        self._listener = Listener((host, 0), backlog=4, authkey=key)
        self.address: Address = self._listener.address
        self._closed = False

    def accept(self) -> tuple[bytes, Connection]:
        """The next of them, with the end that it is at. Raises OSError once this is closed."""
        while not self._closed:
            with suppress(AuthenticationError, *LOST):  # a stranger
                found = self._listener.accept()
                _tune(found)
                return found.recv_bytes(16), found
        raise OSError("the stage waits for nobody any more")

    def close(self) -> None:
        """Safe to call twice; who waits in `accept` is released."""
        if not self._closed:
            self._closed = True
            with suppress(OSError), socket.create_connection(self.address):
                pass  # to close a socket wakes nobody who waits for it
            self._listener.close()


class Line:
    """The two ends of a line, for whoever asks. first, last: where its stages listen."""

    def __init__(self, first: Address, last: Address, key: bytes) -> None:
        self._enters = joined(first, key, ENTERS)
        self._leaves = joined(last, key, LEAVES)
        self._sender: threading.Thread | None = None

    def step(self, step: int, pieces: Sequence[Batch]) -> list[Any]:
        """Sends the pieces of a step through the stages; what the last one passes on of each, in order.

        Raises one of LOST where a stage is gone. Then, or when it is interrupted, the line is over.
        """
        try:
            if len(pieces) == 1:
                self._enters.send((step, pieces[0], None))
                return [self._leaves.recv()]
            # From another thread: a stage that cannot be rid of what it made takes no more, so rows must be
            # taken while pieces are still being sent.
            self._sender = threading.Thread(target=self._send, args=(step, pieces), daemon=True)
            self._sender.start()
            rows = [self._leaves.recv() for _ in pieces]
            self._sender.join()
            return rows
        except BaseException:
            self.close()
            raise

    def _send(self, step: int, pieces: Sequence[Batch]) -> None:
        with suppress(*LOST):  # then no rows come either
            for piece in pieces:
                self._enters.send((step, piece, None))

    def close(self) -> None:
        """Safe to call twice; the stages leave the line."""
        for connection in (self._enters, self._leaves):
            if not connection.closed:
                with suppress(OSError), _socket_of(connection) as tcp:
                    tcp.shutdown(
                        socket.SHUT_RDWR
                    )  # who sends just now is released, before its handle is gone
        if self._sender is not None:
            self._sender.join()
        self._enters.close()
        self._leaves.close()


def _socket_of(connection: Connection) -> socket.socket:
    """Another handle of what it sends through."""
    return socket.socket(fileno=os.dup(connection.fileno()))


def _tune(connection: Connection) -> None:
    """Small messages leave at once, and a machine that lost its power is noticed."""
    with _socket_of(connection) as tcp:
        tcp.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        tcp.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in (
            ("TCP_KEEPIDLE", _GONE_SECONDS // 2),
            ("TCP_KEEPINTVL", 1),
            ("TCP_KEEPCNT", _GONE_SECONDS // 2),
            ("TCP_USER_TIMEOUT", 1000 * _GONE_SECONDS),  # where something was sent that nobody confirms
        ):
            if hasattr(socket, name):
                tcp.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
