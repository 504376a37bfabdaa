"""A server for the chat page with scripted answers, delays and failures.

It serves the page itself as the real server does (server/site.py), on a socket, in a thread of its own.
"""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections import deque
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse

from hotset.errors import ContextLengthError
from hotset.server import site
from hotset.text.fitting import fitted

N_FF = 200


@dataclass
class Refusal:
    """A reply with an error status."""

    status: int
    message: str
    headers: dict[str, str] = field(default_factory=dict)

    def response(self) -> Response:
        return JSONResponse({"error": {"message": self.message}}, self.status, self.headers)


class Hold:
    """A part of an answer: wait until the test continues it."""

    def __init__(self) -> None:
        self.reached, self.go_on = threading.Event(), threading.Event()


class Drop:
    """A part of an answer: the connection breaks."""


class FakeServer:
    """A server with scripted replies.

    replies: for the next requests, in order, each a Refusal or the parts of an answer: text (a token), a
    token with its activity (a dict with "text"), Hold, Drop, or {"error": ...}. requests, headers: of the
    received requests. n_left: clients that left before the end. key: the only valid API key; None: no key is
    needed. health: status of /health and of all other routes.

    models: for a server with several models, each with its `status`; None: it has one, `model`. replies_of:
    replies per model, instead of `replies`. managed: names of models that were loaded and unloaded.

    mcp_servers: the reply of /mcp/servers, or a Refusal. tool_results: results of calls, in order, each a
    reply, a Refusal, or a Hold before the next one. tool_calls: names and arguments of the calls that were
    made.
    """

    def __init__(self) -> None:
        self.replies: deque[Any] = deque()
        self.requests: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.n_left = 0
        self.key: str | None = None
        self.health = 200
        self.model = "tiny"
        self.n_ctx: int | None = None  # of `model`
        self.props: dict[str, Any] = {"hotset": facts()}
        self.url = ""
        self.models: list[dict[str, Any]] | None = None
        self.replies_of: dict[str, deque[Any]] = {}
        self.managed: list[tuple[str, str]] = []
        self.asked_n_ctx: list[int | None] = []  # contexts of loads
        self.catalogue: list[dict[str, Any]] = []
        self.pulls: deque[Any] = deque()  # lines of downloads, possibly with a Hold in between
        self.asked_props: list[str | None] = []  # their models
        self.mcp_servers: list[dict[str, Any]] | Refusal = []
        self.tool_results: deque[Any] = deque()
        self.tool_calls: list[tuple[str, dict[str, Any]]] = []
        self.events: list[dict[str, Any]] = []
        self.app = FastAPI()
        self.app.include_router(site.router)
        self.app.get("/health")(self._health)
        self.app.get("/v1/models")(self._models)
        self.app.get("/props")(self._props)
        self.app.post("/tokenize")(self._tokenize)
        self.app.post("/models/load")(self._load)
        self.app.post("/models/unload")(self._unload)
        self.app.get("/models/catalogue")(self._catalogue)
        self.app.post("/api/pull")(self._pull)
        self.app.get("/models/events")(self._states)
        self.app.get("/mcp/servers")(self._mcp)
        self.app.post("/mcp/restart")(self._restart)
        self.app.post("/mcp/call")(self._call)
        self.app.post("/v1/chat/completions")(self._chat)

    def set_state(self, name: str, **status: Any) -> None:
        """Change the state of a model, and notify listening pages."""
        assert self.models is not None
        next(one for one in self.models if one["id"] == name)["status"] = status
        self.events.append({"model": name, **status})

    def _refused(self, http: Request) -> Response | None:
        if self.health != 200:
            return Refusal(self.health, "the model is being loaded", {"Retry-After": "1"}).response()
        if self.key is not None and http.headers.get("authorization") != f"Bearer {self.key}":
            given = "authorization" in http.headers
            return Refusal(401, "this API key is not known" if given else "an API key is needed").response()
        return None

    async def _health(self) -> Response:
        return JSONResponse({}, self.health)

    async def _models(self, http: Request) -> Response:
        return self._refused(http) or JSONResponse(
            {"data": self.models or [{"id": self.model, "max_model_len": self.n_ctx}]}
        )

    async def _props(self, http: Request) -> Response:
        self.asked_props.append(http.query_params.get("model"))
        return self._refused(http) or JSONResponse(self.props)

    async def _tokenize(self, http: Request) -> Response:
        """Count words as tokens."""
        body = await http.json()
        return self._refused(http) or JSONResponse({"count": len(body["content"].split())})

    async def _load(self, http: Request) -> Response:
        body = await http.json()
        self.managed.append(("load", body["model"]))
        self.asked_n_ctx.append(body.get("n_ctx"))
        return self._refused(http) or JSONResponse({"success": True})

    async def _unload(self, http: Request) -> Response:
        self.managed.append(("unload", (await http.json())["model"]))
        return self._refused(http) or JSONResponse({"success": True})

    async def _catalogue(self, http: Request) -> Response:
        found = [one for one in self.catalogue if http.query_params["q"] in one["id"]]
        return JSONResponse({"data": found})

    async def _pull(self, http: Request) -> Response:
        assert (await http.json())["stream"]
        lines = self.pulls.popleft()

        async def parts() -> AsyncIterator[bytes]:
            for line in lines:
                if isinstance(line, Hold):
                    line.reached.set()
                    while not line.go_on.is_set():
                        await asyncio.sleep(0.005)
                else:
                    yield json.dumps(line).encode() + b"\n"

        return StreamingResponse(parts(), media_type="application/x-ndjson")

    async def _states(self, http: Request) -> Response:
        async def states() -> AsyncIterator[bytes]:
            n = len(self.events)
            for one in self.models or []:
                yield _data({"model": one["id"], **one["status"]})
            while True:
                for event in self.events[n:]:
                    yield _data(event)
                n = len(self.events)
                await asyncio.sleep(0.005)

        return self._refused(http) or StreamingResponse(states(), media_type="text/event-stream")

    async def _mcp(self, http: Request) -> Response:
        if isinstance(self.mcp_servers, Refusal):
            return self.mcp_servers.response()
        return self._refused(http) or JSONResponse({"servers": self.mcp_servers})

    async def _restart(self, http: Request) -> Response:
        assert isinstance(self.mcp_servers, list)
        name = (await http.json())["server"]
        next(one for one in self.mcp_servers if one["name"] == name).update(state="ready", problem="")
        return await self._mcp(http)

    async def _call(self, http: Request) -> Response:
        if refused := self._refused(http):
            return refused
        body = await http.json()
        self.tool_calls.append((body["name"], body["arguments"]))
        assert isinstance(self.mcp_servers, list)
        tools = {one["name"]: one for server in self.mcp_servers for one in server["tools"]}
        assert body["digest"] == tools[body["name"]]["digest"], "of what the reader was shown"
        reply = self.tool_results.popleft()
        if isinstance(reply, Hold):
            reply.reached.set()
            while not reply.go_on.is_set():
                if await http.is_disconnected():
                    self.n_left += 1
                    return Response()
                await asyncio.sleep(0.005)
            reply = self.tool_results.popleft()
        return reply.response() if isinstance(reply, Refusal) else JSONResponse(reply)

    async def _chat(self, http: Request) -> Response:
        if refused := self._refused(http):
            return refused
        self.requests.append(await http.json())
        self.headers.append(dict(http.headers))
        try:
            n_dropped = self._dropped(self.requests[-1])
        except ContextLengthError as error:
            return Refusal(400, str(error)).response()
        name = self.requests[-1].get("model", "")
        reply = self.replies_of.get(name, self.replies).popleft()
        if isinstance(reply, Refusal):
            return reply.response()
        headers = {"x-hotset-dropped-turns": str(n_dropped)} if n_dropped else {}
        return StreamingResponse(self._stream(http, reply), headers=headers, media_type="text/event-stream")

    def _dropped(self, body: dict[str, Any]) -> int:
        """Return the number of turns that do not fit. A token is a word here."""
        if self.n_ctx is None or body.get("truncation") != "auto":
            return 0

        def encode(messages: Sequence[Mapping[str, Any]]) -> list[int]:
            words = " ".join(message["content"] for message in messages).split()
            if len(words) >= (n_ctx := self.n_ctx or 0):
                raise ContextLengthError("too long", n_tokens=len(words), n_ctx=n_ctx)
            return [0] * len(words)

        return fitted(body["messages"], encode, self.n_ctx).n_dropped

    async def _stream(self, http: Request, parts: list[Any]) -> AsyncIterator[bytes]:
        yield b": keep-alive\n\n" + _event({"role": "assistant", "content": ""})
        n = 0
        try:
            for part in parts:
                if isinstance(part, Drop):
                    raise ConnectionError
                if isinstance(part, Hold):
                    part.reached.set()
                    while not part.go_on.is_set():
                        await asyncio.sleep(0.005)
                elif isinstance(part, dict) and "error" in part:
                    yield _data(part)
                    return
                elif isinstance(part, dict):
                    n += 1
                    yield _event({"content": part["text"]}, hotset={"activity": [part]})
                elif isinstance(part, tuple):
                    yield _event({part[0]: part[1]})
                else:
                    n += 1
                    yield _event({"content": part})
        except asyncio.CancelledError:
            self.n_left += 1
            raise
        yield _event({}, reason="stop")
        usage = {"prompt_tokens": 7, "completion_tokens": n, "prompt_tokens_details": {"cached_tokens": 0}}
        yield _data({"choices": [], "usage": usage})
        yield b"data: [DONE]\n\n"


def _data(value: dict[str, Any]) -> bytes:
    return f"data: {json.dumps(value)}\n\n".encode()


def _event(delta: dict[str, Any], reason: str | None = None, **more: Any) -> bytes:
    return _data({"choices": [{"index": 0, "delta": delta, "finish_reason": reason}]} | more)


def facts(n_layers: int = 3, mode: str = "exact", has_zeros: bool = True) -> dict[str, Any]:
    """Return the facts of a model as /props reports them."""
    reason = "its activation is ReLU" if has_zeros else "its activation is SiLU, which has no zeros"
    sparsity = {"mode": mode, "predictor": None, "reason": reason}
    return {"n_ff": [N_FF] * n_layers, "has_zeros": has_zeros, "sparsity": sparsity}


def token(i: int, text: str, shares: list[float], **more: Any) -> dict[str, Any]:
    """Return the activity of the i-th token: shares of each layer; 20 tokens per second."""
    mean = sum(shares) / len(shares)
    layers = {"active_share": shares, "bytes": [round(1e6 * share) for share in shares]}
    if "cpu_share" in more:
        layers["cpu_share"] = more.pop("cpu_share")
    return {
        "token": i, "text": text, "seconds": 0.1 + i / 20, "bytes_kv": 1000, "bytes_touched": 1_999_000,
        "bytes_total": 3_999_000, "step_tokens": 1, "active_share": round(mean, 4), "layers": layers,
    } | more  # fmt: skip


def mcp_server(name: str, *tools: str, state: str = "ready", problem: str = "") -> dict[str, Any]:
    """Return an MCP server as /mcp/servers lists it."""
    parameters = {"type": "object", "properties": {"path": {"type": "string"}}}
    return {
        "name": name, "state": state, "problem": problem,
        "tools": [
            {
                "name": f"{name}__{one}", "tool": one, "description": f"To {one}.", "parameters": parameters,
                "digest": f"{name}/{one}",
            }
            for one in tools
        ],
    }  # fmt: skip


def tool_call(
    name: str, arguments: str, index: int = 0, call_id: str = ""
) -> tuple[str, list[dict[str, Any]]]:
    """Return a part of an answer: one whole call."""
    function = {"name": name, "arguments": arguments}
    return "tool_calls", [
        {"index": index, "id": call_id or f"c{index}", "type": "function", "function": function}
    ]


@contextmanager
def served(app: Any) -> Iterator[str]:
    """Serve an application on a local socket, in a thread; yield its address."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        bound.listen()  # clients that connect before the thread runs wait instead of being refused
        config = uvicorn.Config(app, log_level="critical", timeout_graceful_shutdown=1)
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]}, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{bound.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join(20)
