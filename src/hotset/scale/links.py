"""Connections between the stages of a model that is split over machines.

Ray starts the stages and notices when they die. But a call through Ray takes a millisecond, which each token
would pay at each boundary. So the stages form a line. The driver sends pieces of a step to the first stage,
each stage sends its result to the next, and the last one sends rows back.

    driver ── enters ─> stage ── enters ─> stage ── leaves ─> driver

Both sides of a connection prove that they have the line's key before anything else is read (`greet` and
`_answer`: a challenge and a response each way, HMAC-SHA-256). Frames follow (frames.py). Their tags have
separate keys for each connection and direction, which are derived from the key and the random numbers of both
sides.
"""

from __future__ import annotations

import hmac
import queue
import secrets
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress

import numpy as np

from hotset.backends.base import Batch
from hotset.escaping import clause
from hotset.scale.frames import (
    MAGIC,
    TAG_BYTES,
    VERSION,
    Bounds,
    Channel,
    Frame,
    LinkError,
    Message,
    Passed,
    encode,
)

Address = tuple[str, int]

ENTERS, LEAVES = 1, 2  # the end of a stage that a connection belongs to
LOST = (EOFError, OSError)  # errors of a connection whose other side is gone; LinkError is one of them
HANDSHAKE_SECONDS = 10.0  # for both sides of a connection to prove that they have the key
START_SECONDS = 120.0  # that a stage waits for its neighbours
MOST_PENDING = 32  # connections to a stage without a proof yet; another one replaces the oldest
_RETRY_SECONDS = 0.05  # before a dropped connection tries again
_GONE_SECONDS = 10  # after which a silent machine counts as gone

# The messages of a handshake: the connecting side's hello, the stage's answer, and a proof of each side.
HELLO = struct.Struct("<4sHB32s")  # magic, version, end, random number
ANSWER = struct.Struct("<4sH32s32s")  # magic, version, random number, proof


def new_key() -> bytes:
    """Return a new key, which all members of a line must prove to have."""
    return secrets.token_bytes(32)


def proof_of(key: bytes, purpose: bytes, hello: bytes, number: bytes) -> bytes:
    """Return a proof of the key. purpose: which proof, or key of the connection. number: the stage's."""
    return hmac.digest(key, b"hotset stage: " + purpose + hello + number, "sha256")


def _read(tcp: socket.socket, n: int, until: float) -> bytes:
    """Read n bytes. Raises EOFError, OSError, and TimeoutError at `until`, however slowly bytes arrive."""
    found = b""
    while len(found) < n:
        if (left := until - time.monotonic()) <= 0:
            raise TimeoutError
        tcp.settimeout(left)
        if not (more := tcp.recv(n - len(found))):
            raise EOFError
        found += more
    return found


def joined(address: Address, key: bytes, end: int) -> Channel:
    """Connect to one end of the stage that listens at `address`. Raises LinkError if nothing listens there,
    or it does not answer within HANDSHAKE_SECONDS, has another key, or another version."""
    where = f"the stage at {address[0]}:{address[1]}"
    until = time.monotonic() + HANDSHAKE_SECONDS
    while (left := until - time.monotonic()) > 0:
        try:
            tcp = socket.create_connection(address, timeout=left)
        except TimeoutError:
            break
        except OSError as error:
            raise LinkError(f"{where} cannot be reached ({clause(error)})") from None
        try:
            return greet(tcp, key, end, until, where)
        except BaseException as error:
            tcp.close()
            if isinstance(error, LinkError) or not isinstance(error, LOST):
                raise
        time.sleep(_RETRY_SECONDS)  # the stage dropped it in favour of other connections
    raise LinkError(f"{where} did not answer within {HANDSHAKE_SECONDS:g} s")


def greet(tcp: socket.socket, key: bytes, end: int, until: float, where: str) -> Channel:
    """Perform the handshake of the connecting side. where: for messages."""
    _tune(tcp)
    hello = HELLO.pack(MAGIC, VERSION, end, secrets.token_bytes(32))
    tcp.sendall(hello)
    magic, version, number, proof = ANSWER.unpack(_read(tcp, ANSWER.size, until))
    if magic != MAGIC:
        raise LinkError(f"{where} is none: something else listens there")
    if version != VERSION:
        raise LinkError(
            f"{where} has version {version} of the frames between stages, and this machine {VERSION}; "
            "install the same version of hotset on each machine"
        )
    if not hmac.compare_digest(proof, proof_of(key, b"stage", hello, number)):
        raise LinkError(f"{where} does not have the key of this line")
    tcp.sendall(proof_of(key, b"neighbour", hello, number))
    if not hmac.compare_digest(_read(tcp, TAG_BYTES, until), proof_of(key, b"accepted", hello, number)):
        raise LinkError(f"{where} does not have the key of this line")
    tcp.settimeout(None)
    return Channel(
        tcp,
        sends=proof_of(key, b"frames to the stage", hello, number),
        receives=proof_of(key, b"frames from the stage", hello, number),
    )


class Inlet:
    """The socket on which a stage accepts neighbours that have the key. host: an address of this machine.

    One thread accepts connections, and each has its own thread until it has proved that it has the key. So a
    silent connection delays no other. seconds: the limit for the proof.
    """

    def __init__(self, host: str, key: bytes, seconds: float = HANDSHAKE_SECONDS) -> None:
        self._key, self._seconds = key, seconds
        self._listener = socket.create_server((host, 0), backlog=4 * MOST_PENDING)
        self.address: Address = self._listener.getsockname()[:2]
        self._lock = threading.Lock()
        self._pending: deque[socket.socket] = deque()  # the oldest first
        self._accepted: queue.SimpleQueue[tuple[int, Channel] | None] = queue.SimpleQueue()
        self._closed = threading.Event()
        threading.Thread(target=self._listen, name="hotset-inlet", daemon=True).start()

    def accept(self, seconds: float) -> tuple[int, Channel]:
        """Return the next neighbour's end and channel. Raises LinkError after `seconds`, and EOFError once
        this is closed."""
        try:
            found = self._accepted.get(timeout=max(seconds, 0.0))
        except queue.Empty:
            raise LinkError("a neighbour of this stage did not connect in time") from None
        if found is None:
            self._accepted.put(None)  # for other callers that wait
            raise EOFError("the stage waits for no neighbour any more")
        return found

    def close(self) -> None:
        """Stop accepting; safe to call twice. Releases callers of `accept`; accepted channels stay open."""
        with self._lock:
            if self._closed.is_set():
                return
            self._closed.set()
            for tcp in self._pending:
                _end(tcp)
        self._accepted.put(None)
        with suppress(OSError), socket.create_connection(self.address, _GONE_SECONDS):
            pass  # closing a socket does not wake the thread that accepts on it

    def _listen(self) -> None:
        with self._listener:
            while not self._closed.is_set():
                try:
                    tcp, _ = self._listener.accept()
                except OSError:  # for example, too many open files
                    self._closed.wait(_RETRY_SECONDS)
                    continue
                with self._lock:
                    self._pending.append(tcp)
                    if self._closed.is_set():
                        _end(tcp)
                    elif len(self._pending) > MOST_PENDING:
                        _end(self._pending.popleft())
                threading.Thread(
                    target=self._answer, args=(tcp,), name="hotset-inlet-answer", daemon=True
                ).start()

    def _answer(self, tcp: socket.socket) -> None:
        """Perform the handshake of the stage's side (see `greet`), and close the connection on an error."""
        with suppress(*LOST):
            try:
                self._admit(tcp)
            except BaseException:
                with self._lock, suppress(ValueError):  # before the descriptor's number may be reused
                    self._pending.remove(tcp)
                tcp.close()
                raise

    def _admit(self, tcp: socket.socket) -> None:
        """Queue a neighbour that proves to have the key. Raises one of LOST for any other."""
        until = time.monotonic() + self._seconds
        hello = _read(tcp, HELLO.size, until)
        magic, version, end, _ = HELLO.unpack(hello)
        if magic != MAGIC or end not in (ENTERS, LEAVES):
            raise EOFError
        number = secrets.token_bytes(32)
        tcp.sendall(ANSWER.pack(MAGIC, VERSION, number, proof_of(self._key, b"stage", hello, number)))
        if version != VERSION:
            raise EOFError
        found = _read(tcp, TAG_BYTES, until)
        if not hmac.compare_digest(found, proof_of(self._key, b"neighbour", hello, number)):
            raise EOFError
        _tune(tcp)
        tcp.settimeout(None)
        channel = Channel(
            tcp,
            sends=proof_of(self._key, b"frames from the stage", hello, number),
            receives=proof_of(self._key, b"frames to the stage", hello, number),
        )
        with self._lock:
            if tcp not in self._pending or self._closed.is_set():  # it was dropped
                raise EOFError
            self._pending.remove(tcp)
            tcp.sendall(proof_of(self._key, b"accepted", hello, number))
            self._accepted.put((end, channel))


class Line:
    """The two ends of a line, for the driver. first, last: addresses of its first and last stage; entering,
    leaving: bounds of messages to the first stage and from the last. Raises LinkError."""

    def __init__(
        self, first: Address, last: Address, key: bytes, *, entering: Bounds, leaving: Bounds
    ) -> None:
        self._entering, self._leaving = entering, leaving
        self._enters = joined(first, key, ENTERS)
        try:
            self._leaves = joined(last, key, LEAVES)
        except BaseException:
            self._enters.close()
            raise
        self._sender: threading.Thread | None = None

    def step(self, step: int, pieces: Sequence[Batch]) -> list[Passed]:
        """Send the pieces of a step through the stages. Return the last stage's results, in order.

        Raises InvalidRequestError for a batch that is out of bounds, and one of LOST if a stage is gone or
        a frame damaged. After one of LOST, or an interruption, the line is closed.
        """
        frames = [encode(Message(step, piece, None), self._entering) for piece in pieces]
        try:
            if len(frames) == 1:
                self._enters.send(frames[0])
            else:
                # From another thread: a stage that cannot deliver its results accepts no more pieces, so rows
                # must be received while pieces are still being sent.
                self._sender = threading.Thread(target=self._send, args=(frames,), daemon=True)
                self._sender.start()
            rows = [self._receive(step, piece) for piece in pieces]
            if self._sender is not None:
                self._sender.join()
            return rows
        except BaseException:
            self.close()
            raise

    def _receive(self, step: int, piece: Batch) -> Passed:
        """Receive the result of a piece."""
        found = self._leaves.receive(self._leaving)
        passed, n = found.passed, len(piece.outputs)
        n_rows = len(passed) if isinstance(passed, np.ndarray) else n
        if (found.step, n_rows) != (step, n):
            raise LinkError(f"{n_rows} rows of step {found.step} arrived, where {n} of step {step} are due")
        assert passed is not None, "a frame of rows has rows or an error"
        return passed

    def _send(self, frames: Sequence[Frame]) -> None:
        with suppress(*LOST):  # `_receive` fails too then
            for frame in frames:
                self._enters.send(frame)

    def close(self) -> None:
        """Close both ends, which ends the line; safe to call twice."""
        for channel in (self._enters, self._leaves):
            channel.shutdown()  # releases a thread that sends, before its socket is closed
        if self._sender is not None:
            self._sender.join()
        self._enters.close()
        self._leaves.close()


def _end(tcp: socket.socket) -> None:
    """Release the thread that reads from the connection; that thread closes it."""
    with suppress(OSError):
        tcp.shutdown(socket.SHUT_RDWR)


def _tune(tcp: socket.socket) -> None:
    """Send small messages at once, and detect a machine that lost its power."""
    tcp.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    tcp.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_KEEPIDLE", _GONE_SECONDS // 2),
        ("TCP_KEEPINTVL", 1),
        ("TCP_KEEPCNT", _GONE_SECONDS // 2),
        ("TCP_USER_TIMEOUT", 1000 * _GONE_SECONDS),  # for sent data without an acknowledgement
    ):
        if hasattr(socket, name):
            tcp.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
