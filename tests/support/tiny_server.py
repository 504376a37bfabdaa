"""A server without a socket, for a tiny random model whose tokens are bytes."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from byte_models import write_model, write_reranker
from waiting import WATCHDOG, until

import hotset
from hotset.backends.base import Batch, StepResult
from hotset.server.app import create_app
from hotset.server.keys import NamedKey, digest
from hotset.server.listen import Server, bound_socket
from hotset.server.service import Host, Service
from hotset.server.settings import ServerSettings

MESSAGES = [{"role": "user", "content": "hello"}]

ClientAndService = AbstractAsyncContextManager[tuple[httpx.AsyncClient, Service]]

__all__ = [
    "MESSAGES", "Serving", "client_of", "events_of", "held_steps", "key_of", "text_of", "write_model",
    "write_reranker",
]  # fmt: skip


def service_of(path: Path, load: dict[str, Any] | None = None, **settings: Any) -> Service:
    """Return the service of a model. load: LoadSettings; settings: ServerSettings."""
    how = {"device": "cpu", "n_threads": 1, "max_sequences": 4} | (load or {})
    return Service(lambda: hotset.load(path, **how), ServerSettings(**settings), name="tiny")


@asynccontextmanager
async def client_of(
    path: Path, *, load: dict[str, Any] | None = None, **settings: Any
) -> AsyncIterator[tuple[httpx.AsyncClient, Service]]:
    """Yield a client of a server that has loaded the model. load: LoadSettings; settings: ServerSettings."""
    service = service_of(path, load, **settings)
    async with client_to(service) as client:
        yield client, service


@dataclass
class HeldSteps:
    """Steps of a model that wait for `gate`. begun: whether a step has."""

    begun: threading.Event
    gate: threading.Event


@contextmanager
def held_steps(model: hotset.Model) -> Iterator[HeldSteps]:
    """Hold the model's steps from now on. They run once the gate is set or the block ends."""
    held, step = HeldSteps(threading.Event(), threading.Event()), model.backend.step

    def waiting(batch: Batch) -> StepResult:
        held.begun.set()
        assert held.gate.wait(WATCHDOG)
        return step(batch)

    model.backend.step = waiting  # type: ignore[method-assign]
    try:
        yield held
    finally:
        held.gate.set()
        model.backend.step = step  # type: ignore[method-assign]


def key_of(name: str, **more: Any) -> NamedKey:
    """Return a key that equals its name. more: fields of NamedKey."""
    return NamedKey(name=name, sha256=digest(name).hex(), **more)


def with_template(folder: Path, template: str, *, n_ctx: int = 2048, **settings: Any) -> ClientAndService:
    """Return the results of `client_of` for a model with this chat template."""
    keys = {"tokenizer.chat_template": template, "llama.context_length": 2048}
    return client_of(write_model(folder / "tiny.gguf", **keys), load={"n_ctx": n_ctx}, **settings)


@asynccontextmanager
async def client_to(host: Host) -> AsyncIterator[httpx.AsyncClient]:
    """Yield a client of a server that has loaded its model, or its first models."""
    app = create_app(host)
    async with app.router.lifespan_context(app):
        await host.loaded()
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(
            transport=transport, base_url="http://localhost", timeout=WATCHDOG
        ) as client:
            yield client


class Serving:
    """A server on a local port, in a thread. load: LoadSettings; settings: ServerSettings.

    given: a model, or a host of models with settings of its own.
    """

    def __init__(self, given: Path | Host, *, load: dict[str, Any] | None = None, **settings: Any) -> None:
        if isinstance(given, Path):
            given = service_of(given, load, port=0, **settings)
        self.service: Any = given
        self._bound = bound_socket("127.0.0.1", 0)
        self.port = self._bound.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.server = Server(given, self._bound, lambda where: None, create_app(given))
        self._thread = threading.Thread(target=self._run)

    def set_send_buffer(self, n_bytes: int) -> None:
        """Limit the system's buffer of each new connection: further data stays in the process."""
        self._bound.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, n_bytes)

    def _run(self) -> None:
        asyncio.run(self.server.serve(sockets=[self._bound]))

    def __enter__(self) -> Serving:
        self.client = httpx.Client(base_url=self.url, timeout=WATCHDOG, trust_env=False, verify=False)
        self._thread.start()
        until(lambda: self.server.started and getattr(self.service, "is_ready", True), "no model is loaded")
        return self

    def __exit__(self, *_: object) -> None:
        self.client.close()
        self.server.handle_exit(signal.SIGTERM, None)
        self._thread.join(WATCHDOG)
        assert not self._thread.is_alive()
        self._bound.close()

    @property
    def model(self) -> hotset.Model:
        model: hotset.Model = self.service.model
        return model

    def wait_until_idle(self) -> None:
        """Wait until nothing runs or waits, and every KV block is free."""
        engine = self.model.engine

        def is_idle() -> bool:
            busy = self.service.n_open or engine.scheduler.running or engine.scheduler.waiting
            return not busy and engine.scheduler.pool.n_available == engine.scheduler.pool.n_blocks

        until(is_idle, "the server does not come to rest")


async def metrics_of(client: httpx.AsyncClient) -> dict[str, float]:
    """Return the counters of /metrics, by name."""
    lines = (await client.get("/metrics")).text.splitlines()
    return {line.split()[0]: float(line.split()[1]) for line in lines if not line.startswith("#")}


async def metrics_after_an_answer(client: httpx.AsyncClient) -> dict[str, float]:
    """Return the counters of /metrics after an answer of five tokens."""
    answer = await client.post("/v1/completions", json={"prompt": "hello", "max_tokens": 5, "seed": 1})
    assert answer.status_code == 200, answer.text
    return await metrics_of(client)


def events_of(text: str) -> tuple[list[dict[str, Any]], bool]:
    """Return the JSON of a stream's events, and whether it ended with [DONE]."""
    data = [line.removeprefix("data: ") for line in text.split("\n") if line.startswith("data: ")]
    done = bool(data) and data[-1] == "[DONE]"
    return [json.loads(one) for one in data if one != "[DONE]"], done


def text_of(events: list[dict[str, Any]], index: int = 0) -> str:
    """Return the text of one choice of a chat stream."""
    choices = [choice for event in events for choice in event["choices"] if choice["index"] == index]
    return "".join(choice["delta"].get("content") or "" for choice in choices)
