"""One replica of a server: the server itself, in a process of Ray Serve, which accepts only the front.

Answers go from the replica to the front as HTTP, byte for byte as the client gets them. In Ray each token
would cost several times as much. Ray Serve manages only the assignment of requests. While a request runs, the
front holds a place (`hold`). The place tells Ray how loaded a replica is, and the front where the replica
listens and when it is gone.
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

_START_SECONDS = 60.0  # for the socket to listen


class Replica:
    """The class of a Serve deployment.

    model: a name or path on this machine. names: of the model, in requests. settings: of the server, from its
    user. secret: identifies the front.
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
            api_keys=(),  # the front checks them
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
        """Wait for the model: a replica without one gets no requests."""
        self._listens.wait(_START_SECONDS)
        while not self._service.is_ready:
            if self._service.error is not None:
                # Only its message: errors of other libraries may not survive pickling.
                raise HotsetError(f"a replica could not load the model: {self._service.error}")
            self.check_health()
            self._thread.join(0.05)

    def check_health(self) -> None:
        """Raise HotsetError if this replica must be replaced; Ray Serve calls this every second."""
        if self._error is not None or not self._thread.is_alive():
            raise HotsetError(f"the server of this replica has ended ({self._error})")

    async def hold(self, keys: list[str]) -> AsyncIterator[str]:  # noqa: ARG002
        """Yield the address of this replica, then nothing, until the caller leaves. keys: for the router."""
        yield self._where
        await asyncio.Event().wait()

    def about(self) -> tuple[str, str]:
        """Return the name of this replica, and its address."""
        return serve.get_replica_context().replica_id.unique_id, self._where

    def __del__(self) -> None:
        self._server.should_exit = True
        self._thread.join(10)
