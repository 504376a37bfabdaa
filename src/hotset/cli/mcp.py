"""`hotset mcp`: the models of this machine as tools of the Model Context Protocol, over standard input.

Messages are JSON-RPC 2.0, one a line, as the protocol's stdio transport has it. Requests are answered one
after the other; a second thread reads, so that a request can be cancelled while it is worked on.
"""

from __future__ import annotations

import gc
import json
import queue
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from hotset.cli import options
from hotset.cli.progress import ProgressBar
from hotset.errors import HotsetError, InvalidRequestError
from hotset.parameters import shown, text, whole_number
from hotset.storage import catalogue, created, find_created, on_this_machine, resolve

if TYPE_CHECKING:
    from pathlib import Path

    from hotset.api import Model
    from hotset.settings import LoadSettings

PROTOCOLS = ("2025-11-25", "2025-06-18", "2025-03-26", "2024-11-05")
MAX_LINE = 16 << 20  # bytes of a message
MAX_TEXTS = 2048  # that are embedded at once
_PROGRESS = 16  # tokens between two notes of progress
_PARSE, _INVALID, _UNKNOWN, _ARGUMENTS = -32700, -32600, -32601, -32602

_MODEL = {
    "type": "string",
    "description": "A name that list_models gives; default: the first that was named.",
}
TOOLS: list[dict[str, Any]] = [
    {
        "name": "chat",
        "description": "An answer of a language model that runs on this machine.",
        "inputSchema": {
            "type": "object",
            "properties": {
                "prompt": {"type": "string", "description": "The message to answer."},
                "system": {"type": "string", "description": "The system message."},
                "model": _MODEL,
                "max_tokens": {"type": "integer", "minimum": 1, "description": "Default: 1024."},
                "temperature": {"type": "number", "minimum": 0, "description": "0: the likeliest tokens."},
                "seed": {"type": "integer", "description": "The same seed gives the same answer."},
                "json_schema": {"type": "object", "description": "The answer is JSON of this schema."},
            },
            "required": ["prompt"],
            "additionalProperties": False,
        },
    },
    {
        "name": "embed",
        "description": "A vector of length 1 for each text; the dot product of two is their similarity.",
        "inputSchema": {
            "type": "object",
            "properties": {
                "texts": {"type": "array", "items": {"type": "string"}, "minItems": 1, "maxItems": MAX_TEXTS},
                "model": _MODEL,
            },
            "required": ["texts"],
            "additionalProperties": False,
        },
    },
    {
        "name": "list_models",
        "description": "The models that are on this machine.",
        "inputSchema": {"type": "object", "properties": {}, "additionalProperties": False},
    },
]


def mcp(
    model: options.OptionalModel = None,
    ctx_size: options.ContextSize = None,
    *,
    loading: options.ModelOptions,
) -> None:
    """Serve chat, embed and list_models to an MCP client over standard input and output."""
    gc.freeze()
    settings = loading.settings(n_ctx=ctx_size, max_sequences=1)
    name = model or catalogue.DEFAULT
    with ProgressBar() as bar:
        path = resolve(name, progress=bar)
    with Models(name, path, settings) as models:
        Server(models).run()


class Models:
    """The model that is loaded, one at a time: when it is first needed, and until another one is."""

    def __init__(self, name: str, path: Path, settings: LoadSettings) -> None:
        self._default, self._path, self._settings = name, path, settings
        self._loaded: tuple[str | Path, Model] | None = None  # by what it is loaded by

    def __enter__(self) -> Models:
        return self

    def __exit__(self, *_: object) -> None:
        self._close()

    def _close(self) -> None:
        if self._loaded is not None:
            self._loaded[1].close()
            self._loaded = None

    def list(self) -> list[dict[str, Any]]:
        """Each model, and whether it is the one that is used where none is named."""
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

    def get(self, name: str | None) -> Model:
        """Raises InvalidRequestError for a name that is not listed: a client names no file."""
        wanted = options.loaded_by(self._default, self._path)
        if name is not None and name.lower() != self._default.lower():
            paths: dict[str, str | Path] = {one.lower(): one for one in created.read()}
            paths |= {one.name.lower(): one.path for one in on_this_machine()}
            if name.lower() not in paths:
                raise InvalidRequestError(f"there is no model {shown(name)}; list_models gives the names")
            wanted = paths[name.lower()]
        if self._loaded is None or self._loaded[0] != wanted:
            from hotset.api import load

            self._close()
            self._loaded = wanted, load(wanted, self._settings)
        return self._loaded[1]


class _CancelledError(Exception):
    """The client does not wait for the answer any more."""


class _RefusedError(Exception):
    """A request that is not one of the protocol's."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


class Server:
    """The conversation with one client."""

    def __init__(self, models: Models) -> None:
        self._models = models
        self._messages: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._cancelled: set[Any] = set()
        self._tools: dict[str, Callable[..., dict[str, Any]]] = {
            "chat": self._chat,
            "embed": self._embed,
            "list_models": self._list,
        }

    def run(self) -> None:
        """Until the client closes the input."""
        threading.Thread(target=self._read, daemon=True).start()
        while (message := self._messages.get()) is not None:
            self._handle(message)

    # ---- messages ----

    def _read(self) -> None:
        """In a thread. Cancellations are noted at once, all else is put in line."""
        for message in _lines():
            if isinstance(message, dict) and message.get("method") == "notifications/cancelled":
                params = message.get("params")
                request = params.get("requestId") if isinstance(params, dict) else None
                if isinstance(request, str | int) and len(self._cancelled) < 1024:
                    self._cancelled.add(request)
            else:
                self._messages.put(message)
        self._messages.put(None)

    def _handle(self, message: Any) -> None:
        id = message.get("id") if isinstance(message, dict) else None
        try:
            if isinstance(message, _RefusedError):
                raise message
            if not isinstance(message, dict) or message.get("jsonrpc") != "2.0":
                raise _RefusedError(_INVALID, "a message is an object of JSON-RPC 2.0")
            if "method" not in message or "id" not in message:
                return  # an answer, of which none is waited for, or a notification
            if isinstance(id, bool) or not isinstance(id, str | int):
                id = None
                raise _RefusedError(_INVALID, "the id of a request is a text or a whole number")
            params = message.get("params", {})
            if not isinstance(message["method"], str) or not isinstance(params, dict):
                raise _RefusedError(_INVALID, "method is a text, and params an object")
            _send(id=id, result=self._result(id, message["method"], params))
        except _CancelledError:
            pass
        except _RefusedError as error:
            _send(id=id, error={"code": error.code, "message": str(error)})
        finally:
            self._cancelled.discard(id)

    def _result(self, id: str | int, method: str, params: dict[str, Any]) -> dict[str, Any]:
        match method:
            case "initialize":
                asked = params.get("protocolVersion")
                return {
                    "protocolVersion": asked if asked in PROTOCOLS else PROTOCOLS[0],
                    "capabilities": {"tools": {"listChanged": False}},
                    "serverInfo": {"name": "hotset", "version": version("hotset")},
                }
            case "ping":
                return {}
            case "tools/list":
                return {"tools": TOOLS}
            case "tools/call":
                return self._called(id, params)
        raise _RefusedError(_UNKNOWN, f"there is no method {shown(method)}")

    def _called(self, id: str | int, params: dict[str, Any]) -> dict[str, Any]:
        """What a tool returns, or the message of what is wrong: an agent reads it and tries again."""
        name, arguments, meta = params.get("name"), params.get("arguments", {}), params.get("_meta")
        tool = next((tool for tool in TOOLS if tool["name"] == name), None)
        if tool is None:
            raise _RefusedError(_ARGUMENTS, f"there is no tool {shown(name)}")
        token = meta.get("progressToken") if isinstance(meta, dict) else None
        try:
            _check_arguments(tool, arguments)
            more = {"id": id, "token": token} if name == "chat" else {}
            found = self._tools[tool["name"]](**arguments, **more)
        except HotsetError as error:
            return {"content": [{"type": "text", "text": str(error)}], "isError": True}
        written = found["text"] if name == "chat" else json.dumps(found)
        content = [{"type": "text", "text": written}]
        return {"content": content, "structuredContent": found, "isError": False}

    # ---- tools ----

    def _chat(
        self, *, id: Any, token: Any, prompt: Any, system: Any = None, model: Any = None, **params: Any
    ) -> dict[str, Any]:
        messages = [{"role": "user", "content": text("prompt", prompt)}]
        if system is not None:
            messages.insert(0, {"role": "system", "content": text("system", system)})
        pieces, n_tokens, last = [], 0, None
        loaded = self._models.get(model)
        params = {"max_tokens": 1024, **loaded.decided.sampling, **params}
        with closing(loaded.chat(messages, stream=True, **params)) as stream:  # type: ignore[type-var]
            for last in stream:
                if id in self._cancelled:
                    raise _CancelledError
                pieces.append(last.text)
                before, n_tokens = n_tokens, n_tokens + len(last.tokens)
                if token is not None and n_tokens // _PROGRESS > before // _PROGRESS:
                    self._note(token, n_tokens, params["max_tokens"])
        return {
            "text": "".join(pieces),
            "tokens": n_tokens,
            "finish_reason": last.finish_reason if last is not None else None,
        }

    def _note(self, token: Any, n: int, total: int) -> None:
        note = {"progressToken": token, "progress": n, "total": total}
        _send(method="notifications/progress", params=note)

    def _embed(self, *, texts: Any, model: Any = None) -> dict[str, Any]:
        if not isinstance(texts, list) or not all(isinstance(one, str) and one for one in texts):
            raise InvalidRequestError("texts must be a list of texts, none of them empty")
        whole_number("the number of texts", len(texts), 1, MAX_TEXTS)
        vectors = self._models.get(model).embed(texts)
        return {"vectors": [[round(float(value), 7) for value in vector] for vector in vectors]}

    def _list(self) -> dict[str, Any]:
        return {"models": self._models.list()}


def _check_arguments(tool: dict[str, Any], arguments: Any) -> None:
    schema = tool["inputSchema"]
    known, needed = schema["properties"], schema.get("required", [])
    if not isinstance(arguments, dict):
        raise InvalidRequestError("arguments must be an object")
    for name in arguments:
        if name not in known:
            raise InvalidRequestError(
                f"{tool['name']} has no argument {shown(name)}; it has {', '.join(known) or 'none'}"
            )
    for name in needed:
        if name not in arguments:
            raise InvalidRequestError(f"{tool['name']} needs the argument {name}")
    if "model" in arguments:
        text("model", arguments["model"])


def _lines() -> Iterator[Any]:
    """The messages of the client, with a _RefusedError in place of one that is none."""
    source = sys.stdin.buffer
    while line := source.readline(MAX_LINE + 1):
        if len(line) > MAX_LINE:
            while line and not line.endswith(b"\n"):
                line = source.readline(MAX_LINE)
            yield _RefusedError(_PARSE, f"a message has {MAX_LINE} bytes at most")
        elif line.strip():
            try:
                yield json.loads(line)
            except (ValueError, RecursionError):
                yield _RefusedError(_PARSE, "a message is one line of JSON in UTF-8")


def _send(**fields: Any) -> None:
    print(json.dumps({"jsonrpc": "2.0", **fields}), flush=True)
