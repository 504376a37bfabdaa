"""Connections between the stages of a model that is split over machines: ZeroMQ with CURVE.

Ray starts the stages and notices when they die. But each token would pay for a call of Ray at each boundary.
So the driver and the stages form a ring. The driver sends pieces of a step to the first stage, each stage
sends its result to the next, and the last one sends rows back.

    driver ─> stage ─> stage ─> driver

Each member has a pair of keys and knows the public keys of both neighbours, which Ray distributes. ZeroMQ
authenticates both sides of a connection before it delivers a byte, and encrypts all messages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any, Self

import numpy as np
import zmq
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils.monitor import recv_monitor_message

from hotset.backends.base import Batch
from hotset.scale.messages import Header, Message, Passed

Keys = tuple[bytes, bytes]  # public, secret

START_SECONDS = 120.0  # that a member waits for its neighbours
ANSWER_SECONDS = 15.0  # for the stage that a member connects to
_STRANGER_SECONDS = 5.0  # for a new connection to prove its key; less than ANSWER_SECONDS
_GONE_SECONDS = 10  # after which a silent machine counts as gone
_CHUNK = 1 << 20  # most bytes of a ZeroMQ message: one chunk is encrypted while another one is sent
_DOMAIN = "hotset"
_OPTIONS = {
    zmq.LINGER: 0,
    zmq.SNDHWM: 0,  # no limit: a line has one step at a time
    zmq.RCVHWM: 0,
    zmq.MAXMSGSIZE: _CHUNK + 1024,  # with what CURVE adds
    zmq.IMMEDIATE: 1,  # writable means that the neighbour is there and has proved its key
    zmq.RECONNECT_IVL: -1,  # a connection that broke ends the line
    zmq.HANDSHAKE_IVL: int(1000 * _STRANGER_SECONDS),
    # The kernel notices a silent machine. Heartbeats of ZeroMQ would miss processes that get no CPU time.
    zmq.TCP_KEEPALIVE: 1,
    zmq.TCP_KEEPALIVE_IDLE: _GONE_SECONDS // 2,
    zmq.TCP_KEEPALIVE_INTVL: 1,
    zmq.TCP_KEEPALIVE_CNT: _GONE_SECONDS // 2,
    zmq.TCP_MAXRT: 1000 * _GONE_SECONDS,  # for sent data without an acknowledgement
}


class LinkError(ConnectionError):
    """Raised if a neighbour does not have its key, did not answer in time, or sent an invalid message."""


LOST = (EOFError, LinkError)  # errors of a connection that is over; EOFError: the neighbour is gone


def new_keys() -> Keys:
    """Return a new pair of keys for a member of a line."""
    return zmq.curve_keypair()


class _Only:
    """The neighbour's public key, for ZeroMQ's authenticator."""

    def __init__(self, key: bytes) -> None:
        self._key = key

    def callback(self, _domain: str, key: bytes) -> bool:
        return key == self._key


class Channel:
    """A connection to one neighbour: call `connect`, or `listen` and `wait`.

    keys: own; neighbour: its public key; most: bytes of the arrays of a received message. Only one thread at
    a time may use a channel.
    """

    def __init__(self, keys: Keys, neighbour: bytes, most: int) -> None:
        self._neighbour, self._most = neighbour, most
        self._context = zmq.Context()
        self._authenticator: ThreadAuthenticator | None = None
        self._socket = self._context.socket(zmq.PAIR)
        self._socket.curve_publickey, self._socket.curve_secretkey = keys
        for option, value in _OPTIONS.items():
            self._socket.set(option, value)
        self._changes = zmq.Poller()  # of the socket's events
        self._changes.register(self._socket.get(zmq.FD), zmq.POLLIN)

    def listen(self, host: str) -> str:
        """Return the address where the neighbour can connect. host: an address of this machine."""
        self._authenticator = ThreadAuthenticator(self._context)
        self._authenticator.start()
        self._authenticator.configure_curve_callback(_DOMAIN, _Only(self._neighbour))
        self._socket.curve_server = True
        self._socket.zap_domain = _DOMAIN.encode()
        self._socket.set(zmq.ZAP_ENFORCE_DOMAIN, 1)  # refuses everyone if the authenticator fails
        self._socket.bind(f"tcp://{host}:*")
        return bytes(self._socket.get(zmq.LAST_ENDPOINT)).rstrip(b"\0").decode()

    def wait(self, seconds: float) -> None:
        """Wait until the neighbour has connected. Raises LinkError after `seconds`."""
        if not self._socket.poll(int(1000 * seconds), zmq.POLLOUT):
            raise LinkError("a neighbour of this stage did not connect in time")

    def connect(self, address: str) -> None:
        """Connect to a neighbour that listens. Raises LinkError."""
        self._socket.curve_serverkey = self._neighbour
        monitor = self._socket.get_monitor_socket(
            zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED
        )
        self._socket.connect(address)
        answered = monitor.poll(int(1000 * ANSWER_SECONDS))
        event = recv_monitor_message(monitor)["event"] if answered else None
        self._socket.disable_monitor()
        if event == zmq.EVENT_CLOSED:
            raise LinkError(f"the neighbour at {address} cannot be reached")
        if event != zmq.EVENT_HANDSHAKE_SUCCEEDED:
            raise LinkError(f"the neighbour at {address} did not answer as a member of this line")

    def send(self, message: Message) -> None:
        """Send a message, without waiting. The arrays must not change afterwards. Raises EOFError."""
        head, arrays = message.encode()
        flat = [np.ascontiguousarray(array).reshape(-1).view(np.uint8) for array in arrays]
        if sum(map(len, flat)) <= _CHUNK:
            flat = [np.concatenate(flat)] if flat else []
        chunks = [array[at : at + _CHUNK].data for array in flat for at in range(0, len(array), _CHUNK)]
        self._events()
        try:
            self._socket.send(head, zmq.NOBLOCK | (zmq.SNDMORE if chunks else 0))
            for chunk in chunks:
                self._socket.send(chunk, zmq.NOBLOCK, copy=False)
        except zmq.Again:
            raise EOFError("a neighbour in the line of stages is gone") from None

    def receive(self) -> Message:
        """Return the next message. Raises EOFError, and LinkError for an invalid message; close then."""
        try:
            head = Header.decode(self._received(self._socket.recv))
            if head.n_bytes > self._most:
                raise LinkError(f"a message has {head.n_bytes} bytes; at most {self._most} are expected")
            body, n = np.empty(head.n_bytes, np.uint8), 0
            while n < len(body):
                n += self._received(self._socket.recv_into, body[n:].data)
            if n > len(body):
                raise ValueError
            return head.message(body)
        except (KeyError, TypeError, ValueError):
            raise LinkError("a message of a neighbour is invalid") from None

    def _received(self, receive: Callable[..., Any], *args: Any) -> Any:
        """Wait for a ZeroMQ message, and return the result of `receive`."""
        while True:
            if not self._events() & zmq.POLLIN:
                self._changes.poll()
                continue
            with suppress(zmq.Again):  # libzmq calls a socket readable before it checks the first message
                return receive(*args, flags=zmq.NOBLOCK)

    def _events(self) -> int:
        """Return the socket's events: it is writable as long as the neighbour is there. Raises EOFError."""
        events = 0 if self._socket.closed else int(self._socket.get(zmq.EVENTS))
        if not events:
            raise EOFError("a neighbour in the line of stages is gone")
        return events

    def close(self) -> None:
        """Close the connection; safe to call twice."""
        if self._authenticator is not None:
            self._authenticator.stop()
        self._context.destroy()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Line:
    """The two ends of a line, for the driver. enters, leaves: channels to the first and from the last stage.

    host: an address of this machine. Call `connect` after the last stage has connected to `address`.
    """

    def __init__(self, enters: Channel, leaves: Channel, host: str) -> None:
        self._enters, self._leaves = enters, leaves
        self.address = leaves.listen(host)

    def connect(self, first: str) -> None:
        """Connect to the first stage, and wait for the last. Raises LinkError."""
        self._enters.connect(first)
        self._leaves.wait(ANSWER_SECONDS)

    def step(self, step: int, pieces: Sequence[Batch]) -> list[Passed]:
        """Send the pieces of a step through the stages. Return the last stage's results, in order.

        Raises one of LOST if a stage is gone or a message invalid. After an error the line is closed.
        """
        try:
            for piece in pieces:
                self._enters.send(Message(step, piece, None))
            return [self._receive(step, piece) for piece in pieces]
        except BaseException:
            self.close()
            raise

    def _receive(self, step: int, piece: Batch) -> Passed:
        """Receive the result of a piece."""
        found, n = self._leaves.receive(), len(piece.outputs)
        passed = found.passed
        n_rows = len(passed) if isinstance(passed, np.ndarray) else n
        if passed is None or (found.step, n_rows) != (step, n):
            raise LinkError(f"{n_rows} rows of step {found.step} arrived, where {n} of step {step} are due")
        return passed

    def close(self) -> None:
        """Close both ends, which ends the line; safe to call twice."""
        self._enters.close()
        self._leaves.close()
