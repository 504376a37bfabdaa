"""A server on a real socket, in a thread of the test's process."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import uvicorn
from waiting import WATCHDOG, until

import hotset
from hotset.server.app import create_app
from hotset.server.service import Host, Service
from hotset.server.settings import ServerSettings


@contextmanager
def listening(host: Host, is_ready: Callable[[], bool] = lambda: True) -> Iterator[str]:
    """Yield the address of a server with one model or several: http://127.0.0.1 and a free port."""
    config = uvicorn.Config(create_app(host), port=0, log_config=None, lifespan="on", server_header=False)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, name="live-server")
    thread.start()
    try:
        until(lambda: server.started and is_ready())
        (socket,) = server.servers[0].sockets
        yield f"http://127.0.0.1:{socket.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(WATCHDOG)
        assert not thread.is_alive()


@contextmanager
def live_server(path: Path, *, name: str = "tiny", **settings: Any) -> Iterator[str]:
    """Yield the address of a server with a model: http://127.0.0.1 and a free port.

    settings: ServerSettings.
    """

    def load() -> hotset.Model:
        return hotset.load(path, device="cpu", n_threads=1, max_sequences=4)

    service = Service(load, ServerSettings(port=0, **settings), name=name)
    with listening(service, lambda: service.is_ready) as url:
        yield url
