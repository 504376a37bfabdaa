"""Connections between stages: members of a line find one another, and strangers are not heard."""

from __future__ import annotations

import ctypes
import os
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from threading import Thread
from typing import Any

import numpy as np
import psutil
import pytest
import zmq
from waiting import WATCHDOG, until, within

from hotset.scale import links
from hotset.scale.links import LOST, Channel, Keys, LinkError, new_keys
from hotset.scale.messages import Message

HOST = "127.0.0.1"
NEAR, FAR, STRANGER = new_keys(), new_keys(), new_keys()
MOST = 40 << 20


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drop a silent stranger after a second, and count a silent machine as gone after two."""
    monkeypatch.setitem(links._OPTIONS, zmq.HANDSHAKE_IVL, 1000)
    for option in (zmq.TCP_KEEPALIVE_IDLE, zmq.TCP_KEEPALIVE_CNT):
        monkeypatch.setitem(links._OPTIONS, option, 1)


@contextmanager
def listening() -> Iterator[tuple[Channel, str]]:
    with Channel(FAR, NEAR[0], MOST) as far:
        yield far, far.listen(HOST)


@contextmanager
def pair() -> Iterator[tuple[Channel, Channel, str]]:
    """Two neighbours, the one that connected first, and the address of the other."""
    with listening() as (far, address), Channel(NEAR, FAR[0], MOST) as near:
        near.connect(address)
        far.wait(WATCHDOG)
        yield near, far, address


def check_both_ways(near: Channel, far: Channel, n: int = 2) -> None:
    rows = np.arange(3 * n, dtype=np.float32).reshape(n, 3)
    for one, other in ((near, far), (far, near)):
        for step in (7, 8):
            one.send(Message(step, None, rows))
        for step in (7, 8):
            found = other.receive()
            assert found.step == step
            np.testing.assert_array_equal(found.passed, rows)


@pytest.mark.parametrize("n", [0, 2, 1_000_000])
def test_neighbours_hear_each_other(n: int) -> None:
    """The largest message is several chunks."""
    with pair() as (near, far, _):
        check_both_ways(near, far, n)


def test_rows_travel_encrypted() -> None:
    rows = np.frombuffer(b"a secret of the model" * 4, np.float32).reshape(1, -1)
    seen = bytearray()
    with listening() as (far, address), relay(address, seen) as through, Channel(NEAR, FAR[0], MOST) as near:
        near.connect(through)
        far.wait(WATCHDOG)
        near.send(Message(1, None, rows))
        np.testing.assert_array_equal(far.receive().passed, rows)
    assert len(seen) > rows.nbytes
    assert b"secret" not in seen


def test_an_altered_message_is_not_delivered() -> None:
    rows = np.zeros((100, 1000), np.float32)
    seen = bytearray()
    with (
        listening() as (far, address),
        relay(address, seen, alter_after=1000) as through,
        Channel(NEAR, FAR[0], MOST) as near,
    ):
        near.connect(through)
        far.wait(WATCHDOG)
        near.send(Message(1, None, rows))
        with pytest.raises(LOST):
            far.receive()


@contextmanager
def relay(address: str, seen: bytearray, alter_after: int | None = None) -> Iterator[str]:
    """Yield the address of a relay between two neighbours, which reads and may change a byte."""
    port = int(address.rpartition(":")[2])
    with socket.create_server((HOST, 0)) as server, socket.create_connection((HOST, port)) as far:

        def pump(source: socket.socket, sink: socket.socket, reads: bool) -> None:
            with suppress(OSError):
                while data := bytearray(source.recv(1 << 16)):
                    if reads:
                        seen.extend(data)
                        if alter_after is not None and len(seen) > alter_after:
                            data[-1] ^= 1
                    sink.sendall(data)

        def serve() -> None:
            with suppress(OSError), server.accept()[0] as near:
                back = Thread(target=pump, args=(far, near, False), daemon=True)
                back.start()
                pump(near, far, True)

        thread = Thread(target=serve, daemon=True)
        thread.start()
        yield f"tcp://{HOST}:{server.getsockname()[1]}"


# --- strangers


def raw(keys: Keys | None, server: bytes = FAR[0], sends: bytes = b"x") -> Callable[[str], zmq.Socket]:
    """Return a ZeroMQ client that sends at once, with these keys or in the clear."""

    def connected(address: str) -> zmq.Socket:
        tcp = zmq.Context.instance().socket(zmq.PAIR)
        tcp.linger = 0
        if keys is not None:
            tcp.curve_publickey, tcp.curve_secretkey = keys
            tcp.curve_serverkey = server
        tcp.connect(address)
        tcp.send(sends)
        return tcp

    return connected


def says(data: bytes) -> Callable[[str], socket.socket]:
    """Return a TCP client that sends this."""

    def connected(address: str) -> socket.socket:
        tcp = socket.create_connection((HOST, int(address.rpartition(":")[2])))
        with suppress(ConnectionError):
            tcp.sendall(data)
        return tcp

    return connected


GREETING = b"\xff\0\0\0\0\0\0\0\1\x7f\3\1CURVE".ljust(32, b"\0") + b"\0" * 32
READY = b"\4\x19\5READY\x0bSocket-Type\0\0\0\4PAIR"
STRANGERS = {
    "no key": raw(None),
    "another key": raw(STRANGER),
    "another key of the stage": raw(NEAR, server=STRANGER[0]),
    "the stage's own public key with another secret": raw((NEAR[0], STRANGER[1])),
    "nothing": says(b""),
    "HTTP": says(b"GET / HTTP/1.1\r\n\r\n" * 9),
    "garbage": says(b"\x80\4junk" * 10_000),
    "half a greeting": says(GREETING[:40]),
    "a greeting": says(GREETING),
    "a command of a gigabyte": says(GREETING + b"\6" + (1 << 30).to_bytes(8, "big") + b"x" * 1000),
    "a wrong hello": says(GREETING + b"\4\xc8\5HELLO" + b"x" * 194),
    "no security": says(GREETING.replace(b"CURVE", b"NULL\0") + READY + b"\0\1x"),
}  # fmt: skip


@pytest.mark.parametrize("stranger", STRANGERS.values(), ids=STRANGERS)
@pytest.mark.parametrize("is_first", [True, False])
def test_a_stranger_is_not_heard(stranger: Callable[[str], object], is_first: bool) -> None:
    """Neither before the neighbour has connected nor later."""
    with ExitStack() as undone, listening() as (far, address), Channel(NEAR, FAR[0], MOST) as near:
        if is_first:
            undone.enter_context(stranger(address))  # type: ignore[arg-type]
            with pytest.raises(LinkError, match="a neighbour of this stage did not connect in time"):
                far.wait(0.3)
        near.connect(address)
        far.wait(WATCHDOG)
        if not is_first:
            undone.enter_context(stranger(address))  # type: ignore[arg-type]
            time.sleep(0.3)
            with pytest.raises(zmq.Again):
                far._socket.recv(zmq.NOBLOCK)
        check_both_ways(near, far)


def test_a_silent_stranger_is_dropped() -> None:
    with listening() as (_, address), says(b"")(address) as stranger:
        stranger.settimeout(WATCHDOG)
        while stranger.recv(100):  # its greeting
            pass


@pytest.mark.parametrize("data", [b"", b"\x80\4junk" * 100, GREETING], ids=["silent", "garbage", "greeting"])
def test_a_thousand_strangers_keep_nobody_from_the_line(data: bytes) -> None:
    with ExitStack() as undone, pair() as (near, far, address):
        for _ in range(1000):
            undone.enter_context(says(data)(address))
        check_both_ways(near, far)
        with listening() as (other, address), Channel(NEAR, FAR[0], MOST) as late:
            for _ in range(200):
                undone.enter_context(says(data)(address))
            late.connect(address)
            other.wait(WATCHDOG)
            check_both_ways(late, other)


def test_without_an_authenticator_nobody_is_admitted() -> None:
    with listening() as (far, address), Channel(NEAR, FAR[0], MOST) as near:
        authenticator: Any = far._authenticator
        authenticator.stop()
        with pytest.raises(LinkError, match="did not answer as a member of this line"):
            near.connect(address)


# --- members that misbehave


@contextmanager
def member() -> Iterator[tuple[Channel, zmq.Socket]]:
    """Yield a channel, and a neighbour with the right keys that can send anything."""
    with listening() as (far, address), raw(NEAR)(address) as tcp:
        far.wait(WATCHDOG)
        with pytest.raises(LinkError, match="a message of a neighbour is invalid"):
            far.receive()
        yield far, tcp


def test_an_oversized_message_ends_the_connection() -> None:
    with member() as (far, tcp):
        tcp.send(b" " * (3 << 20))
        with pytest.raises(EOFError, match="a neighbour in the line of stages is gone"):
            within(WATCHDOG, far.receive)


def test_no_array_is_allocated_before_its_size_is_within_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    head = b'{"step": 1, "taps": [], "failed": null, "arrays": [["rows", "<f4", [%d, 1000000]]]}'
    with member() as (far, tcp), monkeypatch.context() as patched:
        patched.setattr(np, "empty", lambda *_: pytest.fail("this memory must not be allocated"))
        tcp.send(head % (1 << 30))
        with pytest.raises(LinkError) as found:
            far.receive()
        assert str(found.value) == f"a message has {4000000 << 30} bytes; at most {MOST} are expected"


def test_arrays_that_are_longer_than_the_head_says_are_refused() -> None:
    with member() as (far, tcp):
        tcp.send(b'{"step": 1, "taps": [], "failed": null, "arrays": [["rows", "<f4", [1, 2]]]}')
        tcp.send(b"x" * 9)
        with pytest.raises(LinkError, match="a message of a neighbour is invalid"):
            far.receive()


# --- neighbours that are gone


_NEIGHBOUR = """
import sys, numpy as np
from hotset.scale.links import Channel
from hotset.scale.messages import Message
with Channel((sys.argv[2].encode(), sys.argv[3].encode()), sys.argv[4].encode(), 0) as near:
    near.connect(sys.argv[1])
    near.send(Message(1, None, np.zeros((1, 3), np.float32)))
    sys.stdin.read()
"""


def test_a_neighbour_that_dies_in_mid_step_is_noticed() -> None:
    with listening() as (far, address):
        given = [address, *(key.decode() for key in (*NEAR, FAR[0]))]
        with subprocess.Popen([sys.executable, "-c", _NEIGHBOUR, *given], stdin=subprocess.PIPE) as process:
            far.wait(WATCHDOG)
            assert far.receive().step == 1
            process.kill()
            check_is_gone(far)


def check_is_gone(far: Channel) -> None:
    with pytest.raises(EOFError, match="a neighbour in the line of stages is gone"):
        within(WATCHDOG, far.receive)
    with pytest.raises(EOFError, match="a neighbour in the line of stages is gone"):
        far.send(Message(2, None, None))


@pytest.mark.skipif(sys.platform != "linux", reason="drops packets by a filter of Linux")
@pytest.mark.parametrize("in_flight", [False, True])
def test_a_silent_machine_is_noticed(in_flight: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drop all packets to the neighbour, as if its machine had lost its power."""
    monkeypatch.setitem(links._OPTIONS, zmq.TCP_MAXRT, 2000)
    with pair() as (near, far, address):
        check_both_ways(near, far)
        port = int(address.rpartition(":")[2])
        (fd,) = [
            one.fd for one in psutil.Process().net_connections("tcp4") if one.raddr and one.raddr.port == port
        ]
        drop_all = ctypes.create_string_buffer(struct.pack("HBBI", 6, 0, 0, 0))
        with socket.socket(fileno=os.dup(fd)) as tcp:
            program = struct.pack("HL", 1, ctypes.addressof(drop_all))
            tcp.setsockopt(socket.SOL_SOCKET, 26, program)  # SO_ATTACH_FILTER
        if in_flight:
            far.send(Message(1, None, np.zeros((1, 3), np.float32)))
        check_is_gone(far)


def test_messages_of_a_neighbour_that_left_arrive_before_its_end() -> None:
    with pair() as (near, far, _):
        rows = np.zeros((4, 3), np.float32)
        near.send(Message(1, None, rows))
        assert until(lambda: far._socket.get(zmq.EVENTS) & zmq.POLLIN)
        near.close()
        assert far.receive().step == 1
        for _ in range(2):
            with pytest.raises(EOFError):
                within(WATCHDOG, far.receive)


def test_a_closed_channel_is_over() -> None:
    with pair() as (near, _, _):
        for _ in range(2):
            near.close()
            with pytest.raises(EOFError):
                near.send(Message(1, None, None))
            with pytest.raises(EOFError):
                near.receive()


# --- connections to others


@pytest.mark.parametrize(
    ("keys", "neighbour"), [(STRANGER, FAR), (NEAR, STRANGER)], ids=["own key", "the other's key"]
)
def test_a_connection_needs_both_keys(keys: Keys, neighbour: Keys) -> None:
    with listening() as (_, address), Channel(keys, neighbour[0], MOST) as near:
        with pytest.raises(LinkError) as found:
            near.connect(address)
        assert str(found.value) == f"the neighbour at {address} did not answer as a member of this line"


@pytest.mark.parametrize("data", [b"", b"HTTP/1.1 400 Bad Request\r\n\r\n", None])
def test_a_server_that_is_no_stage_is_refused(data: bytes | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "ANSWER_SECONDS", 0.5)
    with socket.create_server((HOST, 0)) as server, ExitStack() as undone:

        def serve() -> None:
            tcp, _ = server.accept()
            if data is not None:
                undone.enter_context(tcp).sendall(data)
            else:
                tcp.close()

        Thread(target=serve, daemon=True).start()
        near = undone.enter_context(Channel(NEAR, FAR[0], MOST))
        with pytest.raises(LinkError, match="did not answer as a member of this line"):
            within(WATCHDOG, lambda: near.connect(f"tcp://{HOST}:{server.getsockname()[1]}"))


def test_a_neighbour_that_does_not_listen_cannot_be_reached() -> None:
    with listening() as (_, address):
        pass
    with Channel(NEAR, FAR[0], MOST) as near, pytest.raises(LinkError, match=r"tcp://.* cannot be reached"):
        near.connect(address)
