"""The server of `hotset mcp`. The MCP SDK handles the protocol; this module adds the tools and the limits."""

from __future__ import annotations

import asyncio
import io
import json
import sys
import threading
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager, suppress
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, BinaryIO, cast

import anyio
import mcp_types as types
from jsonschema import Draft202012Validator
from jsonschema.exceptions import best_match
from mcp import MCPError
from mcp.server import Server, ServerRequestContext
from mcp.server.stdio import stdio_server
from mcp.shared.message import ServerMessageMetadata, SessionMessage

from hotset.async_model import AsyncModel
from hotset.cli import options
from hotset.errors import HotsetError, InvalidRequestError
from hotset.parameters import shown
from hotset.sampling_parameters import PARAMETERS
from hotset.storage import created, find_created, on_this_machine

if TYPE_CHECKING:
    from pathlib import Path

    from hotset.settings import LoadSettings

MAX_LINE = 16 << 20  # bytes of a message
MAX_OPEN = 64  # unanswered requests
MAX_TEXTS = 2048  # texts of one embed call
_PROGRESS = 16  # tokens between two reports of progress
_ERROR_CHARS = 300  # of a message about an argument, which quotes the argument

_MODEL = {
    "type": "string",
    "description": "A name that list_models gives; default: the first that was named.",
}


def _number(name: str, description: str) -> dict[str, Any]:
    """Return the JSON schema of a sampling parameter that is a number."""
    one = PARAMETERS[name]
    kind = "integer" if one.kind is int else "number"
    return {"type": kind, "minimum": one.least, "description": description}


TOOLS = [
    types.Tool(
        name="chat",
        description="An answer of a language model that runs on this machine.",
        input_schema={
            "type": "object",
            "properties": {
                "prompt": {"type": "string", "description": "The message to answer."},
                "system": {"type": "string", "description": "The system message."},
                "model": _MODEL,
                "max_tokens": _number("max_tokens", "Default: 1024."),
                "temperature": _number("temperature", "0: the likeliest tokens."),
                "seed": _number("seed", "The same seed gives the same answer."),
                "json_schema": {"type": "object", "description": "The answer is JSON of this schema."},
            },
            "required": ["prompt"],
            "additionalProperties": False,
        },
    ),
    types.Tool(
        name="embed",
        description="A vector of length 1 for each text; the dot product of two is their similarity.",
        input_schema={
            "type": "object",
            "properties": {
                "texts": {
                    "type": "array",
                    "items": {"type": "string", "minLength": 1},
                    "minItems": 1,
                    "maxItems": MAX_TEXTS,
                },
                "model": _MODEL,
            },
            "required": ["texts"],
            "additionalProperties": False,
        },
    ),
    types.Tool(
        name="list_models",
        description="The models that are on this machine.",
        input_schema={"type": "object", "properties": {}, "additionalProperties": False},
    ),
]


class LocalModels:
    """The models of this machine. Only the one of the latest call is loaded."""

    def __init__(self, name: str, path: Path, settings: LoadSettings) -> None:
        self._default, self._path, self._settings = name, path, settings
        self._loaded: tuple[str | Path, AsyncModel] | None = None  # with the name or path it was loaded by
        self._turn = asyncio.Lock()

    async def close(self) -> None:
        """Free the loaded model."""
        if self._loaded is not None:
            await self._loaded[1].close()
            self._loaded = None

    def list(self) -> list[dict[str, Any]]:
        """Return the name and size of each model, and whether it is the default one."""
        made = find_created(self._default)
        here = on_this_machine()
        found = [
            {"name": one.name, "size": one.size, "is_default": made is None and one.path == self._path}
            for one in here
        ]
        sizes = {one.name: one.size for one in here}
        found += [
            {"name": name, "size": sizes.get(one.base), "is_default": made is not None and made[0] == name}
            for name, one in created.read().items()
        ]
        if not any(one["is_default"] for one in found):
            found.insert(0, {"name": self._default, "size": self._path.stat().st_size, "is_default": True})
        return found

    @asynccontextmanager
    async def use(self, name: str | None) -> AsyncIterator[AsyncModel]:
        """Yield a model, after loading it if another one is loaded. Calls use models one after the other.

        Raises InvalidRequestError for a name that `list` does not return: clients cannot name files.
        """
        async with self._turn:
            wanted = self._wanted(name)
            if self._loaded is None or self._loaded[0] != wanted:
                await self.close()
                self._loaded = wanted, await AsyncModel.load(wanted, self._settings)
            yield self._loaded[1]

    def _wanted(self, name: str | None) -> str | Path:
        if name is None or name.lower() == self._default.lower():
            return options.loaded_by(self._default, self._path)
        paths: dict[str, str | Path] = {one.lower(): one for one in created.read()}
        paths |= {one.name.lower(): one.path for one in on_this_machine()}
        if name.lower() not in paths:
            raise InvalidRequestError(f"there is no model {shown(name)}; list_models gives the names")
        return paths[name.lower()]


class Tools:
    """The tools of the server."""

    def __init__(self, models: LocalModels) -> None:
        self._models = models

    async def offered(self, *_: Any) -> types.ListToolsResult:
        return types.ListToolsResult(tools=TOOLS)

    async def call(
        self, context: ServerRequestContext[Any, Any], params: types.CallToolRequestParams
    ) -> types.CallToolResult:
        """Return the result of a tool, or a message with is_error: an agent reads it and tries again."""
        tool = next((tool for tool in TOOLS if tool.name == params.name), None)
        if tool is None:
            raise MCPError(types.INVALID_PARAMS, f"there is no tool {shown(params.name)}")
        arguments = params.arguments or {}
        try:
            _check_arguments(tool, arguments)
            found = await getattr(self, f"_{tool.name}")(context, **arguments)
        except HotsetError as error:
            return types.CallToolResult(content=[types.TextContent(text=str(error))], is_error=True)
        written = found["text"] if tool.name == "chat" else json.dumps(found)
        return types.CallToolResult(content=[types.TextContent(text=written)], structured_content=found)

    async def _chat(
        self,
        context: ServerRequestContext[Any, Any],
        *,
        prompt: str,
        system: str | None = None,
        model: str | None = None,
        **params: Any,
    ) -> dict[str, Any]:
        messages = [{"role": "user", "content": prompt}]
        if system is not None:
            messages.insert(0, {"role": "system", "content": system})
        pieces, n_tokens, last = [], 0, None
        async with self._models.use(model) as loaded:
            params = {"max_tokens": 1024, **loaded.model.decided.sampling, **params}
            async with aclosing(loaded.stream_chat(messages, **params)) as stream:
                async for last in stream:
                    pieces.append(last.text)
                    before, n_tokens = n_tokens, n_tokens + len(last.tokens)
                    if n_tokens // _PROGRESS > before // _PROGRESS:
                        most = params["max_tokens"]
                        await context.session.report_progress(n_tokens, None if most == -1 else most)
        return {
            "text": "".join(pieces),
            "tokens": n_tokens,
            "finish_reason": last.finish_reason if last is not None else None,
        }

    async def _embed(self, _: object, *, texts: list[str], model: str | None = None) -> dict[str, Any]:
        async with self._models.use(model) as loaded:
            vectors = await loaded.embed(texts)
        return {"vectors": [[round(float(value), 7) for value in vector] for vector in vectors]}

    async def _list_models(self, _: object) -> dict[str, Any]:
        return {"models": await asyncio.to_thread(self._models.list)}


def _check_arguments(tool: types.Tool, arguments: dict[str, Any]) -> None:
    """Raise InvalidRequestError for arguments that the tool's schema does not allow.

    Numbers of the table of parameters have their own check, with the same message in all interfaces.
    """
    for name in tool.input_schema["properties"].keys() & arguments.keys() & PARAMETERS.keys():
        if PARAMETERS[name].kind is not None:
            PARAMETERS[name].checked(arguments[name])
    error = best_match(Draft202012Validator(tool.input_schema).iter_errors(arguments))
    if error is not None:
        where = ".".join(map(str, error.absolute_path)) or tool.name
        raise InvalidRequestError(f"{where}: {error.message[:_ERROR_CHARS]}")


def server_of(models: LocalModels) -> Server[Any]:
    """Return the SDK's server, with the tools."""
    tools = Tools(models)
    return Server("hotset", version=version("hotset"), on_list_tools=tools.offered, on_call_tool=tools.call)


async def serve(models: LocalModels) -> None:
    """Serve one client over standard input and output, until it closes the input."""
    try:
        async with stdio_server(stdin=cast("Any", _lines())) as (read, write):
            await _Conversation(read, write).run(server_of(models))
    except* BrokenPipeError:
        pass  # the client has disconnected
    finally:
        await models.close()


class _Conversation:
    """The messages between the client and the SDK. At most MAX_OPEN requests are unanswered.

    The SDK starts a task for each request, and cancels all tasks at the end of the input. Here the end waits
    for the answers, as in `hotset mcp < requests`. Messages that the SDK would ignore get an error.
    """

    def __init__(self, read: Any, write: Any) -> None:
        self._read, self._write = read, write
        self._n_open = 0
        self._settled = asyncio.Event()

    async def run(self, server: Server[Any]) -> None:
        """Serve until the client closes the input and each request has its answer."""
        received, receive = anyio.create_memory_object_stream[SessionMessage | Exception](0)
        send, sent = anyio.create_memory_object_stream[SessionMessage](0)
        async with anyio.create_task_group() as group:
            group.start_soon(self._receive, received)
            group.start_soon(self._send, sent)
            await server.run(receive, send, server.create_initialization_options())

    async def _receive(self, received: Any) -> None:
        async with received:
            async for item in self._read:
                if (refusal := self._refusal(item)) is not None:
                    await self._write.send(SessionMessage(refusal))
                elif isinstance(item.message, types.JSONRPCRequest):
                    self._n_open += 1
                    metadata = ServerMessageMetadata(on_request_unanswered=self._settle)
                    await received.send(SessionMessage(item.message, metadata))
                else:
                    await received.send(item)
            while self._n_open:
                self._settled.clear()
                await self._settled.wait()

    async def _send(self, sent: Any) -> None:
        async with self._write:
            async for item in sent:
                await self._write.send(item)
                if isinstance(item.message, types.JSONRPCResponse | types.JSONRPCError):
                    await self._settle()

    async def _settle(self) -> None:
        """Note that a request has its answer, or was cancelled and gets none."""
        self._n_open -= 1
        self._settled.set()

    def _refusal(self, item: SessionMessage | Exception) -> types.JSONRPCError | None:
        id: types.RequestId | None = None
        if isinstance(item, Exception):
            code, why = (
                types.PARSE_ERROR,
                f"a message is one line of JSON-RPC 2.0, of at most {MAX_LINE} bytes",
            )
        elif isinstance(item.message, types.JSONRPCRequest) and self._n_open >= MAX_OPEN:
            id, code = item.message.id, types.INTERNAL_ERROR
            why = f"{MAX_OPEN} requests wait for an answer; send the next one after it"
        else:
            return None
        return types.JSONRPCError(jsonrpc="2.0", id=id, error=types.ErrorData(code=code, message=why))


def _own_reader() -> BinaryIO:
    """Open standard input once more; return its own buffer if it is not a file."""
    try:
        return open(sys.stdin.fileno(), "rb", closefd=False)
    except io.UnsupportedOperation:
        return sys.stdin.buffer


async def _lines() -> AsyncGenerator[str, None]:
    """Yield the lines of standard input that are not blank, each cut after MAX_LINE bytes.

    A daemon thread reads them through its own reader. Nothing can interrupt a read, and neither Ctrl-C nor
    the end of the interpreter must wait for it.
    """
    loop, lines = asyncio.get_running_loop(), asyncio.Queue[str | None](1)

    def put(line: str | None) -> None:
        asyncio.run_coroutine_threadsafe(lines.put(line), loop).result()

    def read(source: BinaryIO) -> None:
        while rest := (line := source.readline(MAX_LINE)):
            while rest and not rest.endswith(b"\n"):
                rest = source.readline(MAX_LINE)
            if line.strip():
                put(line.decode("utf-8", "replace"))

    def run() -> None:
        with suppress(RuntimeError, asyncio.CancelledError):  # the loop has ended
            try:
                with suppress(OSError):  # an unreadable input counts as ended
                    read(_own_reader())
            finally:
                put(None)

    threading.Thread(target=run, daemon=True).start()
    while (line := await lines.get()) is not None:
        yield line
