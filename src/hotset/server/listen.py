"""Run the application on a socket until a signal ends it."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import socket
import ssl
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

import uvicorn
from starlette.types import ASGIApp

from hotset.errors import InvalidRequestError
from hotset.server.app import create_app
from hotset.server.logs import bound_logs, log_loop_errors
from hotset.server.protocol import (
    BACKLOG,
    ConnectionLimits,
    LimitedProtocol,
    ListeningSocket,
    check_connections,
    handshakes_of,
    most_connections,
)
from hotset.server.service import Host
from hotset.server.settings import ServerSettings

log = logging.getLogger("hotset.server")

SWITCH_SECONDS = 0.0005  # Python's default is 5 ms: longer than a step, and the engine would wait for it
CHECK_SECONDS = 1  # between two checks for connections that take too long
LAST_SECONDS = 5  # for the last events of ended answers to reach their clients


def listen(service: Host, report: Callable[[str], None]) -> None:
    """Serve until SIGTERM or Ctrl-C. Running answers may then finish within the grace time.

    A second signal ends them at once. report: called with the address once the server listens.
    Raises the error that prevents listening or loading the model.
    """
    sys.setswitchinterval(SWITCH_SECONDS)
    bound_logs()
    with listening(service.settings) as bound:
        asyncio.run(Server(service, bound, report, create_app(service)).serve(sockets=[bound]))
    if service.error is not None:
        raise service.error


@contextmanager
def listening(settings: ServerSettings) -> Iterator[ListeningSocket]:
    """Yield the listening socket. Raises InvalidRequestError, also for a certificate that cannot be used."""
    if settings.tls_cert is not None and settings.tls_key is not None:
        check_certificate(settings.tls_cert, settings.tls_key)
    if settings.socket is None:
        with bound_socket(settings.host, settings.port) as bound:
            yield bound
        return
    path = Path(settings.socket)
    with unix_socket(path) as bound:
        made = path.lstat()
        try:
            yield bound
        finally:
            with suppress(OSError):
                if os.path.samestat(path.lstat(), made):  # otherwise another server has replaced it
                    path.unlink()


def check_certificate(cert: str, key: str) -> None:
    """Raise InvalidRequestError if the two files are not a certificate and its key."""
    try:
        # Without `password`, OpenSSL would ask for a passphrase on the terminal, which a server lacks.
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(cert, key, password=lambda: "")
    except OSError as error:  # ssl.SSLError is one
        why = error.reason if isinstance(error, ssl.SSLError) else error.strerror
        raise InvalidRequestError(
            f"{cert} and {key} are not a certificate and its key ({why or error}); both must be in PEM "
            "format, the key without a passphrase"
        ) from None


def unix_socket(path: Path) -> ListeningSocket:
    """Return a listening Unix socket that only this user can use.

    It replaces the socket of a dead server. Raises InvalidRequestError.
    """
    if not hasattr(socket, "AF_UNIX"):
        raise InvalidRequestError("this system has no Unix sockets; use --host and --port")
    bound = ListeningSocket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if _is_dead(path):
            path.unlink()
        mask = os.umask(0o177)
        try:
            bound.bind(str(path))
        finally:
            os.umask(mask)
        bound.listen(BACKLOG)
    except OSError as error:
        bound.close()
        raise InvalidRequestError(
            f"the server cannot listen on the socket {path} ({error.strerror or error}); name another one"
        ) from None
    return bound


def _is_dead(path: Path) -> bool:
    """Return whether a socket exists at the path, but no process listens on it."""
    if not path.is_socket():
        return False
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as other:
        try:
            other.connect(str(path))
        except ConnectionRefusedError:
            return True
    return False


def bound_socket(host: str, port: int) -> ListeningSocket:
    """Return a listening socket. Raises InvalidRequestError if the address cannot be used."""
    host = host.strip("[]")
    try:
        family, kind, proto, _, address = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        bound = ListeningSocket(family, kind, proto)
        try:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bound.bind(address)
            bound.listen(BACKLOG)
        except BaseException:
            bound.close()
            raise
    except OSError as error:
        raise InvalidRequestError(
            f"the server cannot listen on {host}, port {port} ({error.strerror or error}); give it another "
            "--port or --host"
        ) from None
    return bound


class Served(Protocol):
    """A host behind an application: a Service, or a front end of several."""

    settings: ServerSettings
    stopping: bool

    async def loaded(self) -> None:
        """Wait until it can answer. Raises the error that prevents it."""

    def end_answers(self) -> None:
        """End running answers; each client gets an error that says that the server ends."""


class Server(uvicorn.Server):
    """A uvicorn server that limits connections, and lets the service end its answers after a signal."""

    def __init__(
        self, service: Served, bound: ListeningSocket, report: Callable[[str], None], app: ASGIApp
    ) -> None:
        settings = service.settings
        n, self._handshakes = most_connections(), None
        if settings.tls_cert is not None:
            self._handshakes = bound.handshakes = handshakes_of(settings.max_head_seconds, n)
        limits = ConnectionLimits(settings.max_head_seconds, n, self._handshakes)
        trusted = list(settings.trusted_proxies)
        protocol: Any = partial(LimitedProtocol, limits, {})
        super().__init__(
            uvicorn.Config(
                app,
                http=protocol,
                ws="none",
                backlog=BACKLOG,
                proxy_headers=bool(trusted),
                forwarded_allow_ips=trusted,
                log_config=None,
                access_log=False,
                server_header=False,
                date_header=True,
                ssl_certfile=settings.tls_cert,
                ssl_keyfile=settings.tls_key,
                lifespan="on",
                timeout_graceful_shutdown=int(settings.grace_seconds) + LAST_SECONDS,
            )
        )
        self._service, self._bound, self._report = service, bound, report
        self._tasks: list[asyncio.Task[None]] = []
        self._loop: asyncio.AbstractEventLoop | None = None

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        try:
            with _hangup_as(self.handle_exit):
                await super().serve(sockets)
        finally:
            gc.unfreeze()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._loop = asyncio.get_running_loop()
        self._loop.set_exception_handler(log_loop_errors)
        self._tasks = [asyncio.create_task(work()) for work in (self._until_loaded, self._check_connections)]
        self._report(self._url())

    def _url(self) -> str:
        settings = self._service.settings
        scheme = "http" if settings.tls_cert is None else "https"
        if settings.socket is not None:
            return f"{scheme}+unix://{settings.socket}"
        host, port = self._bound.getsockname()[:2]
        return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"

    async def _until_loaded(self) -> None:
        try:
            await self._service.loaded()
        except Exception:  # `listen` raises it when everything is closed
            self.should_exit = True
        else:
            # Exempt the model's many objects from garbage collection. Scanning them takes 150 ms, in which
            # no request runs, and new objects of requests would cause scan after scan.
            gc.freeze()

    async def _check_connections(self) -> None:
        """Close slow connections until the loop ends, also while the server shuts down."""
        seconds = self._service.settings.max_write_seconds
        while True:
            await asyncio.sleep(CHECK_SECONDS)
            now = asyncio.get_running_loop().time()
            connections = [one for one in self.server_state.connections if isinstance(one, LimitedProtocol)]
            if self._handshakes is not None:
                self._handshakes.check()
            check_connections(connections, now, min(seconds, LAST_SECONDS) if self.should_exit else seconds)

    def handle_exit(self, _: int, __: FrameType | None) -> None:
        """Let answers finish within the grace time at the first signal, and end them at the second."""
        loop, service = self._loop, self._service
        if loop is None:
            self.should_exit = self.force_exit = True
        elif self.should_exit:
            loop.call_soon_threadsafe(service.end_answers)
        else:
            self.should_exit = True
            loop.call_soon_threadsafe(self._begin_to_end)

    def _begin_to_end(self) -> None:
        self._service.stopping = True
        asyncio.get_running_loop().call_later(self._service.settings.grace_seconds, self._service.end_answers)


@contextmanager
def _hangup_as(handle: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Handle SIGHUP, which a closed terminal sends, like SIGTERM. nohup's choice to ignore it is kept."""
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or not hasattr(signal, "SIGHUP") or signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        yield
        return
    before = signal.signal(signal.SIGHUP, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGHUP, before)
