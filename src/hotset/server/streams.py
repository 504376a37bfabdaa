"""Answers on their way to a client: whole or as a stream, and ended when the client is gone.

The client may leave at any moment: while its text is tokenized, while it waits in the queue, during a long
prefill, or between two tokens. Every answer passes through here.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Mapping
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from sse_starlette import EventSourceResponse
from sse_starlette.sse import AppStatus
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from hotset.api import Model
from hotset.engine.embedding import TextVectors
from hotset.engine.sequence import Owner
from hotset.errors import HotsetError, InvalidRequestError
from hotset.escaping import clause
from hotset.server.answers import Answer, AnswerRequest, FinishedAnswer
from hotset.server.errors import RequestError, body_of, problem_of
from hotset.server.ignored import ignored_of
from hotset.server.key_limits import Holder
from hotset.server.preparation import LONG_BYTES
from hotset.server.replies import KEEP_ALIVE, MANY_VALUES, JsonReply, dumped, event
from hotset.server.service import Host, ListedModel, Service
from hotset.server.vectors import Vectors

log = logging.getLogger("hotset.server")

API_KEY = "hotset.api_key"  # in the scope of a request: the name of its key
N_BYTES = "hotset.body_bytes"  # the length of its body
HELD = "hotset.held"  # the slots of models that are kept loaded for it (models.py)
SERVICE = "hotset.service"  # of the model that it names
HOLDER = "hotset.key_holder"  # the holder of its key, with the limits
ADAPTER = "hotset.adapter"  # the adapter of MODEL:ADAPTER
METHOD = "hotset.method"  # its own method, if it is handled as another one
ANSWERS = "hotset.answers"  # a list of the answers computed for it, if they are counted
_DROPPED = "hotset.dropped"  # turns of its conversation that had no room

LONG_CONTEXT = "[1m]"
"""The suffix that Claude Code appends to a model's name to request a context of a million tokens."""

_LONG_PIECE = 4096  # bytes

_P = ParamSpec("_P")
_T = TypeVar("_T")
_A = TypeVar("_A", Answer, Vectors)

# By default the library ends every stream as soon as the process receives a signal. The service lets them
# finish.
AppStatus.disable_automatic_graceful_drain()


def host_of(http: Request) -> Host:
    """Return the host of the application."""
    host: Host = http.app.state.host
    return host


def service_of(http: Request) -> Service:
    """Return the service that answers a request. Call `serving` first, which finds it."""
    service: Service = http.scope[SERVICE]
    return service


async def serving(
    http: Request, name: str | None, *, required: bool = True, takes_adapter: bool = False
) -> Service:
    """Return the service of the model that a request names, once it is loaded.

    required: whether a request to a server of several models must name one. takes_adapter: whether
    MODEL:ADAPTER is accepted, too (`of_client` applies the adapter).
    Raises RequestError for a name that is missing or not served, and the error of a failed load.
    """
    host, held = host_of(http), http.scope.setdefault(HELD, [])
    name, adapter = name and name.removesuffix(LONG_CONTEXT), None
    if takes_adapter and name and ":" in name:
        name, adapter = await _without_adapter(http, name)
    if (holder := limited_holder(http)) is not None:  # check this before a model is loaded or held
        name = await _name_for(http, holder, name, required)
    service = host.at_once(name, held, required=required)
    if service is None:
        service = await while_connected(http, host.when_loaded(name, held))
    if adapter is not None:
        try:
            http.scope[ADAPTER] = service.model.adapters.find(adapter).name
        except InvalidRequestError as error:
            raise RequestError(
                f"the model {clause(name)!r}: {error}", 404, param="model", code="model_not_found"
            ) from None
    http.scope[SERVICE] = service
    return service


async def _name_for(http: Request, holder: Holder, name: str | None, required: bool) -> str:
    """Return the model for a request whose key is limited to some models. Raises RequestError."""
    if name:
        return (await file_of(http, name))[1]
    served = [] if required else [one for one in sorted(holder.models) if await _found(http, one) is not None]
    if len(served) != 1:
        raise RequestError(
            f"model is missing; the key {holder.name!r} may use {holder.shown}",
            param="model",
            code="missing_required_parameter",
        )
    return served[0]


async def name_of(http: Request, name: str) -> str:
    """Return the model that answers requests with this name; it need not be loaded. Raises RequestError."""
    model = (await _without_adapter(http, name))[0] if ":" in name else name
    if isinstance(host := host_of(http), Service) and limited_holder(http) is None:
        return host.name
    return (await file_of(http, model))[1]


async def _without_adapter(http: Request, name: str) -> tuple[str, str | None]:
    """Return the model of a name and its adapter; the name and None if no model with adapters has this name.

    Raises NotReadyError while a model is loaded.
    """
    model, _, adapter = name.rpartition(":")
    if await _found(http, name) is None and (found := await _found(http, model)) is not None:
        service = found[0]
        if service is None or service.model.adapters.loaded:
            return model, adapter
    return name, None


async def _found(http: Request, name: str) -> tuple[Service | None, str, Path] | None:
    """Return the result of `file_of`; None for a name that is not served."""
    try:
        return await file_of(http, name)
    except RequestError as error:
        if error.status != 404:  # it is loading
            raise
        return None


async def file_of(http: Request, name: str) -> tuple[Service | None, str, Path]:
    """Return `Host.file_of` for a model that the request's key may use. Raises RequestError otherwise."""
    name, holder = name.removesuffix(LONG_CONTEXT), limited_holder(http)
    try:
        found = await host_of(http).file_of(name)
    except RequestError as error:
        if holder is None or error.status != 404:
            raise
    else:
        if holder is None or holder.may_ask(found[1]):
            return found
    raise holder.not_served(name)


async def listed(http: Request) -> list[ListedModel]:
    """Return `Host.listed` without the models that the request's key may not use."""
    found, holder = await host_of(http).listed(), http.scope.get(HOLDER)
    return [one for one in found if holder is None or holder.may_ask(one.name)]


def limited_holder(http: Request) -> Holder | None:
    """Return the holder of a request's key, if the key is for some models only."""
    holder: Holder | None = http.scope.get(HOLDER)
    return holder if holder is not None and holder.models else None


class ClientGoneError(Exception):
    """The error that ends work for a client that has gone."""


async def while_connected(http: Request, work: Coroutine[Any, Any, _T]) -> _T:
    """Return the result of `work`. If the client leaves, cancel it and raise ClientGoneError."""
    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(_gone(http))
    try:
        await asyncio.wait([task, watch], return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGoneError
        return task.result()
    finally:
        for one in (task, watch):
            one.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)


async def _gone(http: Request) -> None:
    """Return when the client has gone. The body must have been read."""
    while (await http.receive())["type"] != "http.disconnect":
        pass


def client_of(http: Request) -> str | None:
    """Return the client of a request: its key, or otherwise its address."""
    return http.scope.get(API_KEY) or (http.client.host if http.client else None)


def of_client(http: Request, request: AnswerRequest) -> AnswerRequest:
    """Return a request with its client and size.

    The adapter of its model's name is applied, unless the request chooses adapters itself. Thinking fields
    without effect are reported.
    """
    ignored, form = ignored_of(http), service_of(http).model.output_form
    for name, reason in request.thinking.unused(form, is_chat=request.messages is not None):
        ignored.add(name, reason)
    if request.adapters is None and (adapter := http.scope.get(ADAPTER)) is not None:
        request = replace(request, adapters={adapter: 1.0})
    return replace(request, client=client_of(http), n_bytes=http.scope.get(N_BYTES, 0))


async def in_turn(http: Request, work: Callable[_P, _T], *args: _P.args, **more: _P.kwargs) -> _T:
    """Return the result of `work`, run in a thread in the client's turn, while the client is connected."""
    threads = service_of(http).preparation.text(long=_is_long(http))
    return await while_connected(http, threads.run(client_of(http), work, *args, **more))


async def until_left(http: Request, work: Callable[[threading.Event], _T]) -> _T:
    """Return the result of `work`, as `in_turn`. It gets an event that is set once the client has left."""
    left = threading.Event()
    try:
        return await in_turn(http, work, left)
    finally:
        left.set()


async def off_loop(http: Request, work: Callable[_P, _T], *args: _P.args, **more: _P.kwargs) -> _T:
    """Return the result of `work`; it runs as in `in_turn` if the request is long, otherwise at once."""
    return await in_turn(http, work, *args, **more) if _is_long(http) else work(*args, **more)


def _is_long(http: Request) -> bool:
    return bool(http.scope.get(N_BYTES, 0) > LONG_BYTES)


async def ask(http: Request, request: AnswerRequest) -> Answer:
    """Return `Service.ask` of a request, while the client is connected."""
    return _noted(http, await while_connected(http, service_of(http).ask(of_client(http, request))))


def dropped_header(http: Request) -> Mapping[str, str]:
    """Return the header that says how many turns of the conversation had no room, if any."""
    n_dropped = http.scope.get(_DROPPED)
    return {} if n_dropped is None else {"x-hotset-dropped-turns": str(n_dropped)}


def _noted(http: Request, answer: _A) -> _A:
    """Return an answer, after adding it to the request's answers and noting its turns that had no room."""
    if isinstance(answer, Answer) and answer.n_dropped:
        http.scope[_DROPPED] = answer.n_dropped
    if (answers := http.scope.get(ANSWERS)) is not None:
        answers.append(answer)
    return answer


async def written(http: Request, n_values: int, work: Callable[[], Response]) -> Response:
    """Return the reply that `work` makes; a thread makes a reply of many values in the client's turn."""
    if n_values <= MANY_VALUES:
        return work()
    threads = service_of(http).preparation.text(long=True)
    return await while_connected(http, threads.run(client_of(http), work))


async def whole(
    http: Request,
    request: AnswerRequest,
    body: Callable[[Answer, list[FinishedAnswer]], Mapping[str, Any] | list[dict[str, Any]]],
) -> Response:
    """Return the finished answers as JSON. body: makes the reply from them."""
    service = service_of(http)

    async def answered() -> tuple[Answer, list[FinishedAnswer]]:
        answer = _noted(http, await service.ask(of_client(http, request)))
        try:
            return answer, await answer.whole()
        finally:
            answer.close()

    answer, choices = await while_connected(http, answered())
    return await written(http, answer.n_values, lambda: JsonReply(body(answer, choices)))


async def embedded(
    http: Request,
    n_texts: int,
    make: Callable[[Model, Owner], TextVectors],
    body: Callable[[TextVectors], Mapping[str, Any]],
    n_bytes: int = 0,
) -> Response:
    """Return the vectors, or scores, of texts as JSON.

    make: as in Service.ask_vectors. body: makes the reply once they are computed. n_bytes: of the texts, if
    they are longer than the request.
    """
    service, long = service_of(http), _is_long(http) or n_bytes > LONG_BYTES

    async def computed() -> TextVectors:
        vectors = _noted(http, await service.ask_vectors(make, n_texts, client_of(http), long=long))
        try:
            return await vectors.whole()
        finally:
            vectors.close()

    found = await while_connected(http, computed())
    return await written(http, found.width * len(found), lambda: JsonReply(body(found)))


async def streamed(
    http: Request,
    request: AnswerRequest,
    pieces: Callable[[Answer], AsyncIterator[bytes]],
    sign_of_life: Callable[[], bytes] = lambda: KEEP_ALIVE,
) -> AnswerStream:
    """Return a stream of the server-sent events that `pieces` makes of an answer, as bytes (see `event`).

    sign_of_life: makes the bytes to send while no piece is ready; by default a comment. Clients that
    measure the time between events need an event.
    Raises an error that occurs before the stream begins. A later error is its last event, in the shape of
    the API schema.
    """
    return AnswerStream(http, await ask(http, request), pieces, sign_of_life)


class AnswerStream(EventSourceResponse):
    """A response that closes its answer, however it ends.

    sign_of_life: as in `streamed`. lines: the stream has a line of JSON for each delta in place of events,
    and no signs of life.
    """

    def __init__(
        self,
        http: Request,
        answer: Answer,
        pieces: Callable[[Answer], AsyncIterator[bytes]],
        sign_of_life: Callable[[], bytes] = lambda: KEEP_ALIVE,
        *,
        lines: bool = False,
    ) -> None:
        self._answer = answer
        self._path = http.url.path
        self._lines = lines
        self._pieces = self._guarded(pieces(answer))
        super().__init__(
            self._pieces,
            sep="\n",
            ping=0 if lines else service_of(http).settings.keep_alive_seconds,
            ping_message_factory=sign_of_life,  # type: ignore[arg-type]  # bytes are sent unchanged
            media_type="application/x-ndjson" if lines else "text/event-stream",
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._answer.close()

    async def _stream_response(self, send: Send) -> None:
        """Send the stream without the library's timer for each piece: LimitedProtocol.check times replies."""
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async with aclosing(self._pieces):
            async for piece in self._pieces:
                await send({"type": "http.response.body", "body": piece, "more_body": True})
                if len(piece) > _LONG_PIECE:  # let other clients run if this one reads without a pause
                    await asyncio.sleep(0)
        async with self._send_lock:
            self.active = False
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _guarded(self, pieces: AsyncIterator[bytes]) -> AsyncGenerator[bytes, None]:
        try:
            async for piece in pieces:
                yield piece
        except Exception as error:
            if not isinstance(error, HotsetError):
                log.error("a stream failed", exc_info=error)
            body = body_of(problem_of(error), self._path)
            if self._lines:
                yield dumped(body) + b"\n"
            else:
                yield event(body, "error" if body.get("type") == "error" else None)
