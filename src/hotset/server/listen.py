"""Runs the application on a socket until a signal ends it."""

from __future__ import annotations

import asyncio
import logging
import socket
import sys
from collections.abc import Callable
from types import FrameType
from typing import Protocol

import uvicorn
from starlette.types import ASGIApp

from hotset.errors import InvalidRequestError
from hotset.server.app import create_app
from hotset.server.service import Service
from hotset.server.settings import ServerSettings

log = logging.getLogger("hotset.server")

_BACKLOG = 1024
SWITCH_SECONDS = 0.0005  # Python's own are 5 ms: longer than a step, for which the engine would wait
_LAST_SECONDS = 5  # for the last events of answers that are ended to reach their clients


def listen(service: Service, told: Callable[[str], None]) -> None:
    """Serves until SIGTERM or Ctrl-C, and a moment longer: answers that run may end, within a time.

    A second signal ends them at once. told: hears where the server listens, once it does.
    Raises what keeps it from listening, or the model from being loaded.
    """
    sys.setswitchinterval(SWITCH_SECONDS)
    with bound_socket(service.settings.host, service.settings.port) as bound:
        asyncio.run(Server(service, bound, told, create_app(service)).serve(sockets=[bound]))
    if service.error is not None:
        raise service.error


def bound_socket(host: str, port: int) -> socket.socket:
    """A listening socket. Raises InvalidRequestError where it cannot be had."""
    host = host.strip("[]")
    try:
        family, kind, proto, _, address = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        bound = socket.socket(family, kind, proto)
        try:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bound.bind(address)
            bound.listen(_BACKLOG)
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
    """What answers behind an application: a Service, or whoever stands before several."""

    settings: ServerSettings
    stopping: bool

    async def loaded(self) -> None:
        """Waits until it can answer. Raises what keeps it from that."""

    def end_answers(self) -> None:
        """Ends what runs; each is told that the server ends."""


class Server(uvicorn.Server):
    """uvicorn's, which asks the service to end what it answers when a signal comes."""

    def __init__(
        self, service: Served, bound: socket.socket, told: Callable[[str], None], app: ASGIApp
    ) -> None:
        settings = service.settings
        super().__init__(
            uvicorn.Config(
                app,
                http="httptools",
                log_config=None,
                access_log=False,
                server_header=False,
                date_header=True,
                lifespan="on",
                timeout_graceful_shutdown=int(settings.grace_seconds) + _LAST_SECONDS,
            )
        )
        self._service, self._bound, self._told = service, bound, told
        self._watch: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._loop = asyncio.get_running_loop()
        self._watch = asyncio.create_task(self._until_loaded())
        host, port = self._bound.getsockname()[:2]
        self._told(f"http://{f'[{host}]' if ':' in host else host}:{port}")

    async def _until_loaded(self) -> None:
        try:
            await self._service.loaded()
        except Exception:  # which `listen` raises when all is closed
            self.should_exit = True

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The first signal lets answers run on for a time, the second ends them."""
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
