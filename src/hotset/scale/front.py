"""The server in front of the replicas: it checks clients, chooses a replica and relays the replica's answer.

If a replica dies before it has sent anything, the request is tried again on another one. Otherwise it ends
with an error in the client's API schema.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any, Protocol

import aiohttp
from fastapi import FastAPI
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.responses import PlainTextResponse, Response
from starlette.types import Receive, Scope, Send

from hotset.errors import HotsetError
from hotset.scale.guard import CLIENT, SECRET
from hotset.scale.metrics import with_replicas
from hotset.scale.routing import prefix_keys
from hotset.server.errors import NotReadyError, RequestError, body_of, problem_of, response_of
from hotset.server.metrics import Metrics, RequestCounter
from hotset.server.replies import JsonReply, dumped, event
from hotset.server.security import secure
from hotset.server.settings import ServerSettings
from hotset.server.streams import API_KEY

log = logging.getLogger("hotset.server")

_TRY_SECONDS = 60.0  # time to find a replica that answers
_AGAIN_SECONDS = 0.2  # between two tries
_ASK_SECONDS = 3.0  # time limit of a replica's /metrics
_NOT_SENT = ("host", "connection", "content-length", "transfer-encoding", "origin", SECRET, CLIENT)
_OF_ONE_REPLICA = ("/lora-adapters", "/v1/load_lora_adapter", "/v1/unload_lora_adapter")
_NOT_RETURNED = ("connection", "transfer-encoding", "keep-alive", "date", "server")


class LostError(Exception):
    """Raised if the replica is gone, or cannot be reached."""


class ReplicaLookup(Protocol):
    """The interface of the front to its replicas (replicas.py)."""

    def hold(self, keys: list[str]) -> Any:
        """Return an asynchronous iterator for the best replica for this prefix.

        It yields the replica's address, then nothing until the replica is gone, when it raises. `cancel`
        releases the replica."""

    async def all(self) -> list[tuple[str, str]]:
        """Return the name and address of each replica that is alive."""


class Front:
    """The application of the front. ready: set once there are replicas.

    `listen.Server` uses it like a Service.
    """

    def __init__(self, places: ReplicaLookup, settings: ServerSettings, secret: str) -> None:
        self.settings = settings
        self.error: Exception | None = None
        self.stopping = False
        self.ready = asyncio.Event()
        self._places, self._secret = places, secret
        self._open: set[_Forward] = set()
        self._session: aiohttp.ClientSession
        self.metrics = Metrics(lambda: iter(()))

    async def loaded(self) -> None:
        """Wait until there are replicas. Raises the error that prevented their start."""
        while not self.ready.is_set() and self.error is None:
            with suppress(TimeoutError):
                await asyncio.wait_for(self.ready.wait(), 0.2)
        if self.error is not None:
            raise self.error

    def end_answers(self) -> None:
        """End all running requests; each client gets the error that the server was shut down."""
        for one in list(self._open):
            one.end(NotReadyError("the server was shut down before the answer was complete"))

    def app(self) -> FastAPI:
        """Return the application with its security middleware."""

        @asynccontextmanager
        async def lifespan(_: FastAPI) -> AsyncIterator[None]:
            timeout = aiohttp.ClientTimeout(total=None, sock_connect=5)
            connector = aiohttp.TCPConnector(limit=0)
            async with aiohttp.ClientSession(
                timeout=timeout, connector=connector, auto_decompress=False
            ) as self._session:
                yield
            self.stopping = True

        app = FastAPI(lifespan=lifespan, openapi_url=None, docs_url=None, redoc_url=None)
        app.mount("/", self._answer)
        secure(app, self.settings)
        app.add_middleware(RequestCounter, metrics=self.metrics)
        return app

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        path = scope["path"]
        try:
            if path in ("/health", "/v1/health"):
                reply: Response = await self._health()
            elif path == "/metrics":
                reply = await self._metrics()
            elif path in _OF_ONE_REPLICA:
                raise RequestError(
                    "adapters (LoRA) of replicas are those that they begin with; start them with `lora`",
                    501,
                    code="not_supported",
                )
            else:
                await self._forwarded(scope, receive, send)
                return
        except HotsetError as error:
            reply = response_of(problem_of(error), path)
        await reply(scope, receive, send)

    async def _health(self) -> Response:
        self._check()
        if not await self._places.all():
            raise NotReadyError("no replica answers; try again in a moment", retry_after=2)
        return JsonReply({"status": "ok"}, headers={"server": "hotset"})

    async def _metrics(self) -> Response:
        found = {"front": generate_latest(self.metrics.registry).decode()}

        async def ask(name: str, where: str) -> None:
            with suppress(aiohttp.ClientError, TimeoutError):
                headers = {SECRET: self._secret}
                timeout = aiohttp.ClientTimeout(total=_ASK_SECONDS)
                async with self._session.get(f"{where}/metrics", headers=headers, timeout=timeout) as reply:
                    found[name] = await reply.text()

        if self.ready.is_set():
            await asyncio.gather(*(ask(name, where) for name, where in await self._places.all()))
        return PlainTextResponse(with_replicas(found), media_type=CONTENT_TYPE_LATEST)

    def _check(self) -> None:
        if self.stopping:
            raise NotReadyError("the server is shutting down; ask another one")
        if not self.ready.is_set():
            raise NotReadyError("the model is being loaded; try again in a moment", retry_after=2)

    async def _forwarded(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Relay a replica's answer to the client; try other replicas until one answers."""
        body = b""
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            body += message.get("body", b"")
            if not message.get("more_body", False):
                break
        keys = await asyncio.to_thread(prefix_keys, body) if scope["method"] == "POST" else []
        until = time.monotonic() + _TRY_SECONDS
        while True:
            self._check()
            one = _Forward(self._session, self._secret, scope, body, receive, send)
            self._open.add(one)
            try:
                await one.run(self._places.hold(keys))
                return
            except LostError as error:
                if time.monotonic() > until:
                    log.error("no replica answers: %s", error)
                    raise NotReadyError("no replica answers; try again in a moment", retry_after=5) from None
            finally:
                self._open.discard(one)
            await asyncio.sleep(_AGAIN_SECONDS)


class _Forward:
    """One attempt to relay a request to a replica."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        secret: str,
        scope: Scope,
        body: bytes,
        receive: Receive,
        send: Send,
    ) -> None:
        self._session, self._scope, self._body = session, scope, body
        self._receive, self._send = receive, send
        self._secret = secret
        self._began = False  # whether a part of the answer was sent
        self._kind = ""
        self._ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def end(self, error: Exception) -> None:
        """End the request with an error."""
        if not self._ended.done():
            self._ended.set_exception(error)

    async def run(self, place: Any) -> None:
        """Relay the request. Raises LostError if nothing was sent yet, so that it may be tried again."""
        tasks = [
            asyncio.ensure_future(one)
            for one in (self._relayed(place), self._gone(), asyncio.wait_for(self._ended, None))
        ]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if tasks[0] in done:
                await tasks[0]
            elif tasks[2] in done:
                await tasks[2]
        except LostError as error:
            if not self._began:
                raise
            log.error("a replica was lost in the midst of an answer: %s", error)
            await self._failed(NotReadyError("the replica that answered was lost; ask again"))
        except HotsetError as error:
            if not self._began:
                raise
            await self._failed(error)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            place.cancel()

    async def _relayed(self, place: Any) -> None:
        try:
            where = await asyncio.wait_for(anext(place), _TRY_SECONDS)
        except Exception as error:  # Ray raises many kinds
            raise LostError(f"there is no replica ({type(error).__name__})") from None
        lost = asyncio.ensure_future(self._watched(place))
        reading = asyncio.ensure_future(self._read(where))
        try:
            await asyncio.wait([lost, reading], return_when=asyncio.FIRST_COMPLETED)
            if not reading.done():
                await asyncio.wait([reading], timeout=_AGAIN_SECONDS)  # its last bytes may be on their way
            if not reading.done():
                raise LostError("it ended")
            await reading
        finally:
            for task in (lost, reading):
                task.cancel()
            await asyncio.gather(lost, reading, return_exceptions=True)

    async def _watched(self, place: Any) -> None:
        """Return when the replica is gone."""
        with suppress(Exception):
            await anext(place)

    async def _read(self, where: str) -> None:
        scope = self._scope
        headers = [(k.decode("latin-1"), v.decode("latin-1")) for k, v in scope["headers"]]
        headers = [(k, v) for k, v in headers if k.lower() not in _NOT_SENT]
        client = scope.get(API_KEY) or (scope["client"][0] if scope.get("client") else "")
        headers += [(SECRET, self._secret), (CLIENT, client)]
        query = scope["query_string"].decode("latin-1")
        url = where + scope["raw_path"].decode("latin-1").partition("?")[0] + (f"?{query}" if query else "")
        try:
            async with self._session.request(
                scope["method"],
                url,
                headers=headers,
                data=self._body or None,
                allow_redirects=False,
                skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding", "Content-Type"),
            ) as reply:
                async for piece in reply.content.iter_any():
                    await self._begin(reply)
                    await self._send({"type": "http.response.body", "body": piece, "more_body": True})
                await self._begin(reply)
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise LostError(f"{type(error).__name__}: {error}") from None
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _begin(self, reply: aiohttp.ClientResponse) -> None:
        if self._began:
            return
        self._began = True
        self._kind = reply.content_type
        headers = [(k.lower(), v) for k, v in reply.raw_headers if k.decode().lower() not in _NOT_RETURNED]
        await self._send({"type": "http.response.start", "status": reply.status, "headers": headers})

    async def _gone(self) -> None:
        """Return when the client is gone."""
        while (await self._receive())["type"] != "http.disconnect":
            pass

    async def _failed(self, error: HotsetError) -> None:
        """Send an error as the last event of a stream. For other answers raise it; only a head was sent."""
        body = body_of(problem_of(error), self._scope["path"])
        if self._kind == "text/event-stream":
            last = event(body, "error" if body.get("type") == "error" else None)
        elif self._kind == "application/x-ndjson":
            last = dumped(body) + b"\n"
        else:
            raise error
        await self._send({"type": "http.response.body", "body": last, "more_body": True})
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})
