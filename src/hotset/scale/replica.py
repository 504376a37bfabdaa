"""One replica of a server: the server itself, in a process of Ray Serve, which the front alone may ask.

Answers go from the replica to the front as HTTP, byte for byte what the client gets: through Ray each token
would cost several times as much. What Ray Serve has is who computes what: for as long as a request runs, the
front holds a place (`hold`), which is where it goes, how loaded a replica is, and how the front hears of its
end.
"""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import ray
from ray import serve

import hotset
from hotset.api import Model
from hotset.errors import HotsetError
from hotset.scale.guard import FromFront
from hotset.server.app import create_app
from hotset.server.listen import SWITCH_SECONDS, Server, bound_socket
from hotset.server.service import Service
from hotset.server.settings import ServerSettings
from hotset.settings import LoadSettings

_START_SECONDS = 60.0  # for the socket


class Replica:
    """The class of a Serve deployment.

    model: a name or path of this machine. names: what it is called. settings: of the server, as its user gave
    them. secret: by which the front is known.
    """

    def __init__(
        self, model: str, loading: LoadSettings, settings: ServerSettings, names: tuple[str, ...], secret: str
    ) -> None:
        def load() -> Model:
            return hotset.load(model, loading)

        own = replace(
            settings,
            host=ray.util.get_node_ip_address(),
            port=0,
            api_keys=(),  # which the front has asked for
            socket=None,
            tls_cert=None,
            tls_key=None,
            allow_no_api_key=True,
            cors_origins=(),
            allowed_hosts=("*",),
        )
        self._service = Service(load, own, name=names[0], aliases=names[1:])
        self._where = ""
        self._listens = threading.Event()
        self._error: BaseException | None = None
        bound = bound_socket(own.host, 0)
        app = FromFront(create_app(self._service), secret)
        self._server = Server(self._service, bound, self._report, app)
        self._thread = threading.Thread(target=self._serve, args=(bound,), name="hotset-replica", daemon=True)
        self._thread.start()
        self._loaded()

    def _report(self, where: str) -> None:
        self._where = where
        self._listens.set()

    def _serve(self, bound: Any) -> None:
        sys.setswitchinterval(SWITCH_SECONDS)
        try:
            asyncio.run(self._server.serve(sockets=[bound]))
        except BaseException as error:
            self._error = error
        finally:
            self._listens.set()

    def _loaded(self) -> None:
        """Waits for the model: a replica that has none is not asked."""
        self._listens.wait(_START_SECONDS)
        while not self._service.is_ready:
            if self._service.error is not None:
                # By its message alone: what others raise may not arrive whole.
                raise HotsetError(f"a replica could not load the model: {self._service.error}")
            self.check_health()
            self._thread.join(0.05)

    def check_health(self) -> None:
        """Raises where this replica is to be replaced; Ray Serve asks every second."""
        if self._error is not None or not self._thread.is_alive():
            raise HotsetError(f"the server of this replica has ended ({self._error})")

    async def hold(self, keys: list[str]) -> AsyncIterator[str]:  # noqa: ARG002
        """Where this replica listens, and then nothing, until the caller goes. keys: for the router."""
        yield self._where
        await asyncio.Event().wait()

    def about(self) -> tuple[str, str]:
        """The name of this replica, and where it listens."""
        return serve.get_replica_context().replica_id.unique_id, self._where

    def __del__(self) -> None:
        self._server.should_exit = True
        self._thread.join(10)
