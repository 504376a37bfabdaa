"""Where a server listens: HTTPS, and a Unix socket."""

from __future__ import annotations

import asyncio
import shutil
import signal
import socket
import ssl
import stat
import subprocess
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
from tiny_server import MESSAGES
from waiting import WATCHDOG

import hotset
from hotset.server.app import create_app
from hotset.server.listen import Server, bound_socket, check_certificate, listening, unix_socket
from hotset.server.protocol import Handshakes, ListeningSocket
from hotset.server.service import Service
from hotset.server.settings import ServerSettings

needs_unix = pytest.mark.skipif(not hasattr(socket, "AF_UNIX"), reason="the system has no Unix sockets")
needs_openssl = pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not here")
CHAT = {"model": "tiny", "messages": MESSAGES, "temperature": 0, "max_tokens": 4, "stream": True}


async def answered(path: Path, settings: ServerSettings, client_of: object) -> list[str]:
    """Return a server's messages and the last line of a stream.

    client_of: gives a client of the bound socket.
    """
    service = Service(lambda: hotset.load(path, device="cpu", n_threads=1), settings, name="tiny")
    reported: list[str] = []
    with listening(settings) as bound:
        server = Server(service, bound, reported.append, create_app(service))
        task = asyncio.create_task(server.serve(sockets=[bound]))
        async with client_of(bound) as client:  # type: ignore[operator]
            async with asyncio.timeout(WATCHDOG):
                while (await client.get("/health")).status_code != 200:
                    await asyncio.sleep(0.05)
            reply = await client.post("/v1/chat/completions", json=CHAT)
            assert reply.status_code == 200, reply.text
        server.handle_exit(signal.SIGTERM, None)
        await task
    return [*reported, reply.text.strip().split("\n")[-1]]


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("tls")
    cert, key = folder / "cert.pem", folder / "key.pem"
    subprocess.run(
        [
            "openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes",
            "-keyout", key, "-out", cert, "-days", "2", "-subj", "/CN=localhost", "-addext",
            "subjectAltName=DNS:localhost,IP:127.0.0.1",
        ],
        check=True, capture_output=True,
    )  # fmt: skip
    return cert, key


@needs_openssl
def test_https(path: Path, certificate: tuple[Path, Path]) -> None:
    cert, key = certificate
    settings = ServerSettings(port=0, tls_cert=str(cert), tls_key=str(key))
    trusted = ssl.create_default_context(cafile=str(cert))
    ports: list[int] = []
    pending: dict[int, Any] = {1: None}

    def client_of(bound: ListeningSocket) -> httpx.AsyncClient:
        nonlocal pending
        assert bound.handshakes is not None
        pending = bound.handshakes._begun
        ports.append(bound.getsockname()[1])
        url = f"https://127.0.0.1:{ports[0]}"
        return httpx.AsyncClient(base_url=url, verify=trusted, trust_env=False, timeout=WATCHDOG)

    reported, last = asyncio.run(answered(path, settings, client_of))
    assert reported == f"https://127.0.0.1:{ports[0]}"
    assert not pending, "its handshake is over"
    assert last == "data: [DONE]"


def test_the_number_of_tls_handshakes_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    with bound_socket("127.0.0.1", 0) as bound, ExitStack() as stack:
        handshakes = bound.handshakes = Handshakes(2, 10)

        def client() -> tuple[socket.socket, socket.socket]:
            made = socket.create_connection(bound.getsockname(), timeout=WATCHDOG)
            return stack.enter_context(made), stack.enter_context(bound.accept()[0])

        first, done = client(), client()
        handshakes.end(done[1].fileno())
        second, third = client(), client()
        assert first[0].recv(1) == b"", "the oldest of three is shut down"
        gone = client()
        gone[1].close()
        assert second[0].recv(1) == b""
        handshakes.check()
        client()
        third[0].setblocking(False)
        with pytest.raises(BlockingIOError):  # a closed connection does not count
            third[0].recv(1)
        third[0].settimeout(WATCHDOG)
        later = time.monotonic() + 11
        monkeypatch.setattr(time, "monotonic", lambda: later)
        handshakes.check()
        assert third[0].recv(1) == b"", "it took too long"
        done[1].sendall(b"x")
        assert done[0].recv(1) == b"x"


@needs_unix
def test_a_unix_socket(path: Path, tmp_path: Path) -> None:
    where = tmp_path / "s"

    def client_of(_: socket.socket) -> httpx.AsyncClient:
        assert stat.S_IMODE(where.stat().st_mode) == 0o600, "other users may not ask"
        transport = httpx.AsyncHTTPTransport(uds=str(where))
        return httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=WATCHDOG)

    settings = ServerSettings(socket=str(where), host="0.0.0.0")  # on a Unix socket no key is needed
    reported, last = asyncio.run(answered(path, settings, client_of))
    assert reported == f"http+unix://{where}"
    assert last == "data: [DONE]"
    assert not where.exists(), "it is removed"


@needs_unix
def test_a_server_that_ends_does_not_remove_another_servers_socket(tmp_path: Path) -> None:
    where = tmp_path / "s"
    with listening(ServerSettings(socket=str(where))):
        where.unlink()
        newer = unix_socket(where)
    with newer:
        assert where.is_socket()


@needs_unix
def test_a_socket_that_is_in_use_is_refused(tmp_path: Path) -> None:
    where = tmp_path / "s"
    with unix_socket(where), pytest.raises(hotset.InvalidRequestError, match="cannot listen on the socket"):
        unix_socket(where)
    assert where.is_socket(), "as a server leaves it that was killed"
    with unix_socket(where):
        pass
    where.unlink()
    where.write_text("a file")
    with pytest.raises(hotset.InvalidRequestError, match="cannot listen"):
        unix_socket(where)
    assert where.read_text() == "a file"
    with pytest.raises(hotset.InvalidRequestError, match="cannot listen"):
        unix_socket(tmp_path / ("x" * 200))


@needs_openssl
def test_a_wrong_certificate_is_refused(certificate: tuple[Path, Path], tmp_path: Path) -> None:
    cert, key = certificate
    check_certificate(str(cert), str(key))
    locked = tmp_path / "locked.pem"
    subprocess.run(
        ["openssl", "ec", "-in", key, "-out", locked, "-aes128", "-passout", "pass:word"],
        check=True, capture_output=True,
    )  # fmt: skip
    (tmp_path / "text").write_text("no certificate")
    for bad in ((cert, cert), (key, key), (tmp_path / "text", key), (cert, locked), (tmp_path / "none", key)):
        with pytest.raises(hotset.InvalidRequestError, match="not a certificate and its key"):
            check_certificate(*map(str, bad))
    with pytest.raises(hotset.InvalidRequestError, match="both"):
        ServerSettings(tls_cert=str(cert))
