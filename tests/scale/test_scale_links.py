"""Connections between stages: strangers delay no neighbour, and a start that cannot complete ends."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from typing import Any

import numpy as np
import pytest
from waiting import WATCHDOG, until, within

from hotset.scale import links
from hotset.scale.frames import Bounds, Channel, FrameKind, LinkError, Message, encode
from hotset.scale.links import ENTERS, LEAVES, LOST, MOST_PENDING, Inlet, joined, new_key

ROWS = Bounds(FrameKind.ROWS, n_tokens=4, n_sequences=1, n_pages=1, n_columns=3)
HOST = "127.0.0.1"


@pytest.fixture
def key() -> bytes:
    return new_key()


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    yield
    for thread in threading.enumerate():
        if thread.name.startswith("hotset-inlet"):
            thread.join(WATCHDOG)
            assert not thread.is_alive()


def check_both_ways(near: Channel, far: Channel) -> None:
    row = np.arange(6, dtype=np.float32).reshape(2, 3)
    for one, other in ((near, far), (far, near)):
        one.send(encode(Message(7, None, row), ROWS))
        np.testing.assert_array_equal(other.receive(ROWS).passed, row)


def ended(tcp: socket.socket) -> bool:
    """Waits until the other side has closed the connection, and says nothing before."""
    tcp.settimeout(WATCHDOG)
    try:
        return tcp.recv(1) == b""
    except ConnectionError:
        return True


# --- neighbours


def test_neighbours_are_at_the_end_that_they_name(key: bytes) -> None:
    with closing(Inlet(HOST, key)) as inlet:
        for end in (LEAVES, ENTERS):
            with joined(inlet.address, key, end) as near:
                found, far = inlet.accept(WATCHDOG)
                with far:
                    assert found == end
                    check_both_ways(near, far)


def test_each_connection_and_direction_has_keys_of_its_own(
    key: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    used = []
    monkeypatch.setattr(links, "Channel", lambda tcp, sends, receives: used.append((sends, receives)) or tcp)
    with closing(Inlet(HOST, key)) as inlet:
        for _ in range(2):
            with joined(inlet.address, key, ENTERS), inlet.accept(WATCHDOG)[1]:
                pass
    # Of either connection its two sides, in any order, have the same two keys.
    assert len(used) == 4
    assert len({one for pair in used for one in pair}) == 4
    assert {pair[::-1] for pair in used} == set(used)


# --- strangers


def test_silent_connections_do_not_delay_the_neighbour(key: bytes) -> None:
    """They are never dropped for what they do not say: only for one that connects later."""
    with ExitStack() as undone:
        inlet = undone.enter_context(closing(Inlet(HOST, key, seconds=1e6)))
        silent = [undone.enter_context(socket.create_connection(inlet.address)) for _ in range(50)]
        near = undone.enter_context(joined(inlet.address, key, ENTERS))
        _, far = inlet.accept(WATCHDOG)
        undone.enter_context(far)
        check_both_ways(near, far)
        # The oldest were dropped; as many are pending as may, one of them having made room.
        for tcp in silent[: 51 - MOST_PENDING]:
            assert ended(tcp)
        for tcp in silent[51 - MOST_PENDING :]:
            tcp.setblocking(False)
            with pytest.raises(BlockingIOError):
                tcp.recv(1)
        inlet.close()
        for tcp in silent:
            assert ended(tcp)


def test_a_stranger_who_is_slow_is_dropped_in_time(key: bytes) -> None:
    with closing(Inlet(HOST, key, seconds=0.2)) as inlet, socket.create_connection(inlet.address) as slow:
        slow.settimeout(0.01)

        def is_dropped() -> bool:
            try:
                slow.sendall(links.MAGIC[:1])
                return slow.recv(1) == b""
            except TimeoutError:
                return False
            except ConnectionError:
                return True

        slow.sendall(b"HST")
        until(is_dropped, "one byte after the other keeps a connection")


@pytest.mark.parametrize(
    "said", [b"GET / HTTP/1.1\r\n\r\n" * 9, b"\0\0\0\4junk" * 9, b"HSTG\1\0\3" + b"n" * 32]
)
def test_a_stranger_who_says_something_else_is_dropped(key: bytes, said: bytes) -> None:
    with closing(Inlet(HOST, key, seconds=1e6)) as inlet:
        with socket.create_connection(inlet.address) as stranger:
            stranger.sendall(said)
            assert ended(stranger)
        with joined(inlet.address, key, ENTERS), inlet.accept(WATCHDOG)[1]:
            pass


def test_a_neighbour_needs_the_key(key: bytes) -> None:
    with closing(Inlet(HOST, key, seconds=1e6)) as inlet:
        with pytest.raises(LinkError, match=rf"the stage at {HOST}:\d+ does not have the key of this line"):
            joined(inlet.address, new_key(), ENTERS)
        with socket.create_connection(inlet.address) as stranger:  # who does not mind that
            hello = links.HELLO.pack(links.MAGIC, links.VERSION, ENTERS, b"n" * 32)
            stranger.sendall(hello)
            number = links.ANSWER.unpack(stranger.recv(links.ANSWER.size, socket.MSG_WAITALL))[2]
            stranger.sendall(links.proof_of(new_key(), b"neighbour", hello, number))
            assert ended(stranger)
        with pytest.raises(LinkError, match="did not connect in time"):
            inlet.accept(0)


def test_the_proof_of_one_connection_is_none_of_another(key: bytes) -> None:
    said: list[bytes] = []

    class Recorded(socket.socket):
        def sendall(self, data: Any, *more: Any) -> None:
            said.append(bytes(data))
            super().sendall(data, *more)

    with closing(Inlet(HOST, key, seconds=1e6)) as inlet:
        with Recorded() as tcp:
            tcp.connect(inlet.address)
            with (
                links.greet(tcp, key, ENTERS, links.time.monotonic() + WATCHDOG, "it"),
                inlet.accept(WATCHDOG)[1],
            ):
                pass
        hello, proof = said
        with socket.create_connection(inlet.address) as stranger:
            stranger.sendall(hello + proof)
            assert len(stranger.recv(links.ANSWER.size, socket.MSG_WAITALL)) == links.ANSWER.size
            assert ended(stranger)
        with pytest.raises(LinkError, match="did not connect in time"):
            inlet.accept(0)


def test_a_neighbour_that_was_dropped_for_others_tries_again(
    key: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    admit, n = Inlet._admit, 0

    def dropped_first(inlet: Inlet, tcp: socket.socket) -> None:
        nonlocal n
        n += 1
        if n < 3:
            raise EOFError
        admit(inlet, tcp)

    monkeypatch.setattr(Inlet, "_admit", dropped_first)
    with closing(Inlet(HOST, key)) as inlet, joined(inlet.address, key, ENTERS), inlet.accept(WATCHDOG)[1]:
        assert n == 3


# --- what is no stage


@contextmanager
def listening(answer: Callable[[socket.socket], object]) -> Iterator[links.Address]:
    """The address of something else, which does this with each connection, one after the other."""
    with socket.create_server((HOST, 0)) as server:

        def serve() -> None:
            with suppress(OSError):
                while True:
                    tcp, _ = server.accept()
                    with tcp, suppress(OSError):
                        answer(tcp)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        try:
            yield server.getsockname()
        finally:
            server.shutdown(socket.SHUT_RDWR)
            thread.join(WATCHDOG)


def answered(version: int, magic: bytes = links.MAGIC) -> Callable[[socket.socket], object]:
    return lambda tcp: tcp.sendall(links.ANSWER.pack(magic, version, b"n" * 32, b"p" * 32))


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (ended, "did not answer within 0.2 s"),
        (lambda tcp: None, "did not answer within 0.2 s"),
        (answered(1, b"HTTP"), "is none: something else listens there"),
        (answered(9),
         "has version 9 of the frames between stages, and this machine 1; install the same version"),
        (answered(links.VERSION), "does not have the key of this line"),
    ],
)  # fmt: skip
def test_a_connection_that_cannot_be_made_ends_with_a_message(
    answer: Callable[[socket.socket], object], said: str, key: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(links, "HANDSHAKE_SECONDS", 0.2)
    with listening(answer) as address, pytest.raises(LinkError) as found:
        within(WATCHDOG, lambda: joined(address, key, ENTERS))
    assert str(found.value).startswith(f"the stage at {HOST}:{address[1]} {said}")


def test_where_nothing_listens_a_connection_ends_with_a_message(key: bytes) -> None:
    with closing(Inlet(HOST, key)) as inlet:
        address = inlet.address
    with pytest.raises(LinkError, match="cannot be reached"):
        joined(address, key, ENTERS)


def test_a_stage_does_not_wait_for_ever(key: bytes) -> None:
    with closing(Inlet(HOST, key)) as inlet:
        with pytest.raises(LinkError, match="a neighbour of this stage did not connect in time"):
            inlet.accept(0)
        inlet.close()
        for _ in range(2):
            with pytest.raises(LOST, match="the stage waits for no neighbour any more"):
                inlet.accept(WATCHDOG)
