"""Requests to every endpoint of the server, and the replies without the parts that change between runs.

ids            hex digits, or letters and digits after "call_": numbered in order of appearance, so that
               equal ids get equal numbers
times          in fields of TIMES, as seconds, nanoseconds or ISO 8601: "<time>"
versions       hotset's version: "<version>"
streams        a list of events. The number of tokens in an event depends on when it was sent, so
               consecutive events that differ only in their text (and its logprobs) are joined.
               An event's number, counted from 0, is "<next>"; the token counts in Anthropic's first
               event are "<so far>"
pages          the name of the file with the same bytes
metrics        names and labels; "<number>" for the numbers
memory         bytes of a loaded model: "<bytes>"
timings        in llama-server's replies: "<time>"
"""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
import math
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from tiny_server import MESSAGES, client_of, client_to, write_model, write_reranker
from tool_models import CALL, THINKS, WEATHER, written

from hotset.server import modalities
from hotset.server.catalogue import Catalogue
from hotset.server.models import Models
from hotset.settings import LoadSettings

TIMES = {"created", "created_at", "completed_at", "total_duration", "load_duration"}
TIMES |= {"prompt_eval_duration", "eval_duration"}
_TEXTS = {
    "content", "text", "delta", "response", "reasoning_content", "thinking", "partial_json", "arguments",
}  # fmt: skip
_LISTS = {"content", "logprobs", "tokens", "token_logprobs", "top_logprobs", "text_offset"}
_ID = re.compile(r"(?<![0-9a-f])[0-9a-f]{24,64}(?![0-9a-f])")
_ISO = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?Z")
_WHEN = 1_700_000_000  # modification time of the model's file

GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 12}
OPTIONS: dict[str, Any] = {"temperature": 0, "num_predict": 12}
NAMED = {"model": "tiny"}
STREAM = {"stream": True}
FUNCTION = WEATHER["function"]
CALLS = f"look it up\n</think>\n\nLet me see.\n{CALL}"
"""What a model with tools writes: reasoning, text and a call."""
SCHEMA = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
NAMED_SCHEMA = {"name": "answer", "schema": SCHEMA}


@dataclass(frozen=True)
class Case:
    """A request. path: None: the route's.

    writes: the text that the model writes instead of its own. ranks: the model is a reranker. load, settings:
    of the server.
    """

    body: Any = None
    path: str | None = None
    writes: str | None = None
    ranks: bool = False
    headers: dict[str, str] = field(default_factory=dict)
    load: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)


def _both(body: dict[str, Any], **how: Any) -> list[Case]:
    """Return the request as a whole and as a stream."""
    return [Case(body | {"stream": False}, **how), Case(body | STREAM, **how)]


_CHAT = {"messages": MESSAGES} | GREEDY
_TOOLS = {"messages": MESSAGES, "tools": [WEATHER], "temperature": 0, "max_tokens": 200}
_RESPONSE = {"input": "hello", "temperature": 0, "max_output_tokens": 12}
_RESPONSE_TOOLS = _RESPONSE | {"max_output_tokens": 200, "tools": [{"type": "function", **FUNCTION}]}
_COUNTED = {**NAMED, "messages": MESSAGES}
_MESSAGE = _COUNTED | GREEDY
_MESSAGE_TOOLS = _MESSAGE | {
    "max_tokens": 200,
    "tools": [{"name": FUNCTION["name"], "input_schema": FUNCTION["parameters"]}],
}
_OLLAMA = {**NAMED, "messages": MESSAGES, "options": OPTIONS}
_OLLAMA_TOOLS = _OLLAMA | {"tools": [WEATHER], "options": OPTIONS | {"num_predict": 200}}
_RERANK = {"query": "which?", "documents": ["hello", {"text": "ok"}, "hi"]}
_GENERATE = {**NAMED, "prompt": "hello", "options": OPTIONS}


_SLOTS: dict[str, Any] = {"settings": {"slot_save_path": "no-such-folder"}}


def _wrong(body: dict[str, Any]) -> list[Case]:
    """Return variants of a good body: another model, an unknown field, an empty object, and no object."""
    return [Case(body | {"model": "other"}), Case(body | {"unknown": 1}), Case({}), Case([])]


CASES: dict[tuple[str, str], list[Case]] = {
    ("GET", "/openapi.json"): [Case()],
    ("GET", "/"): [Case()],
    ("GET", "/page/{name:path}"): [
        Case(path="/page/main.js"), Case(path="/page/vendor/marked.esm.js"), Case(path="/page/none"),
    ],
    ("GET", "/health"): [Case()],
    ("GET", "/v1/health"): [Case()],
    ("GET", "/v1/models"): [Case()],
    ("GET", "/v1/models/{name:path}"): [Case(path="/v1/models/tiny"), Case(path="/v1/models/other")],
    ("POST", "/v1/chat/completions"): [
        *_both(_CHAT),
        Case(_CHAT | STREAM | {"stream_options": {"include_usage": True}}),
        *_both(_CHAT | {"logprobs": True, "top_logprobs": 2, "max_tokens": 3}),
        Case(_CHAT | {"n": 2, "stop": "e", "seed": 1}),
        Case(_CHAT | {"response_format": {"type": "json_schema", "json_schema": NAMED_SCHEMA}}),
        *_both(_TOOLS, writes=CALLS),
        Case(_CHAT | {"messages": [*MESSAGES, {"role": "assistant", "content": "he"}]}),
        Case(_CHAT | {"temperature": -1}),
        Case(_CHAT | {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}),
        Case(_CHAT | {"messages": []}),
        *_wrong(_CHAT),
    ],
    ("POST", "/v1/completions"): [
        *_both({"prompt": "hello"} | GREEDY),
        *_both({"prompt": "hello", "logprobs": 2, "echo": True, "temperature": 0, "max_tokens": 3}),
        Case({"prompt": ["a", "hi"], "n": 2} | GREEDY),
        Case({"prompt": [[97], [104, 105]]} | GREEDY),
        Case({"prompt": ["a", [104, 105]]}),
        Case({"prompt": "hello", "echo": True, "logprobs": 1, "temperature": 0, "max_tokens": 0}),
        Case({"prompt": "hello", "suffix": "b"}),
        Case({"prompt": "h" * 3000}),
        *_wrong({"prompt": "hello"} | GREEDY),
    ],
    ("POST", "/completion"): [
        *_both({"prompt": "hello", "n_predict": 3, "temperature": 0}),
        Case({"prompt": ["hello", [104, 105]], "n_predict": 3, "temperature": 0, "n_probs": 1}),
        Case({"prompt": "hello", "n_predict": 0, "temperature": 0}),
        Case({"prompt": [{"prompt_string": "a", "multimodal_data": ["aGk="]}]}),
        *_wrong({"prompt": "hello", "n_predict": 3, "temperature": 0}),
    ],
    ("POST", "/completions"): [Case({"prompt": "hello", "n_predict": 3, "temperature": 0})],
    ("POST", "/apply-template"): [Case({"messages": MESSAGES}), Case({"messages": []}), Case([])],
    ("POST", "/infill"): [
        Case({"input_prefix": "a", "input_suffix": "b"}),
        *_wrong({"input_prefix": "a", "input_suffix": "b"}),
    ],
    ("POST", "/v1/embeddings"): [
        Case({"input": ["hello", "ok"]}), Case({"input": [104, 105], "encoding_format": "base64"}),
        Case({"input": ""}), Case({"input": "a", "dimensions": 3}), Case({"input": "a", "dimensions": 33}),
        *_wrong({"input": "a"}), Case({"input": "a"}, ranks=True),
    ],
    ("POST", "/v1/rerank"): [
        Case(_RERANK, ranks=True), Case(_RERANK | {"top_n": 1, "return_documents": True}, ranks=True),
        Case(_RERANK | {"documents": []}, ranks=True), Case(_RERANK), *_wrong(_RERANK),
    ],
    ("POST", "/v1/reranking"): [Case(_RERANK, ranks=True)],
    ("POST", "/rerank"): [Case(_RERANK, ranks=True)],
    ("POST", "/reranking"): [Case(_RERANK, ranks=True)],
    ("POST", "/v2/rerank"): [
        Case(_RERANK, ranks=True), Case(_RERANK | {"top_n": 1, "max_tokens_per_doc": 1}, ranks=True),
        Case(_RERANK), *_wrong(_RERANK),
    ],
    **{("POST", route): [Case({"model": "none"}), Case({}), Case([])] for route in modalities.ROUTES},
    ("POST", "/v1/responses"): [
        *_both(_RESPONSE),
        *_both(_RESPONSE | {"top_logprobs": 1, "max_output_tokens": 3}),
        *_both(_RESPONSE_TOOLS, writes=CALLS),
        Case(_RESPONSE | {"input": [], "instructions": "be brief"}),
        Case(_RESPONSE | {"input": [{"role": "user", "content": [{"type": "input_image"}]}]}),
        *_wrong(_RESPONSE),
    ],
    ("POST", "/v1/responses/input_tokens"): [
        Case(_RESPONSE), Case(_RESPONSE_TOOLS), Case(_RESPONSE | {"instructions": "be brief"}),
        Case(_RESPONSE | {"input": "h" * 3000}), *_wrong(_RESPONSE),
    ],
    ("POST", "/tokenize"): [
        Case({"content": "hello <s>"}), Case({"content": "hé", "with_pieces": True, "add_special": True}),
        Case({"prompt": "hello", "return_token_strs": True}), Case({"messages": MESSAGES}),
        *_wrong({"content": "a"}),
    ],
    ("POST", "/detokenize"): [Case({"tokens": [256, 104, 105]}), *_wrong({"tokens": [-1]})],
    ("POST", "/slots/{id_slot}"): [
        Case({}, "/slots/0?action=erase", **_SLOTS),
        Case({"filename": "../a"}, "/slots/0?action=save", **_SLOTS),
        Case({"filename": "none"}, "/slots/0?action=restore", **_SLOTS),
        Case({}, "/slots/0?action=other", **_SLOTS),
        Case({}, "/slots/9?action=erase", **_SLOTS), Case({"unknown": 1}, "/slots/0?action=erase", **_SLOTS),
        Case({"filename": "a"}, "/slots/0?action=save"), Case({}, "/slots/x?action=erase"),
        Case({"model": "other"}, "/slots/0?action=erase", **_SLOTS),
    ],
    ("GET", "/lora-adapters"): [Case(), Case(path="/lora-adapters?model=other")],
    ("POST", "/lora-adapters"): [
        Case([]), Case([{"id": 0, "scale": 1}]), Case([{"scale": 1}]), Case({"id": 0, "scale": 1}),
    ],
    ("POST", "/v1/load_lora_adapter"): [
        Case({"lora_name": "style", "lora_path": "/none/style.gguf"}), Case({"lora_name": "style"}),
        Case({"lora_path": "/none", "lora_name": "a b"}), *_wrong({"lora_path": "/none"}),
    ],
    ("POST", "/v1/unload_lora_adapter"): [
        Case({"lora_name": "style"}), Case({"lora_int_id": 0}), Case({}), *_wrong({"lora_name": "style"}),
    ],
    ("GET", "/mcp/servers"): [Case(), Case(headers={"origin": "https://evil.example"})],
    ("POST", "/mcp/restart"): [Case({"server": "files"}), *_wrong({"server": "files"})],
    ("POST", "/mcp/call"): [
        Case({"name": "files__read", "arguments": {"path": "a"}}), Case({"name": "a b"}),
        Case({"name": "a", "arguments": []}), *_wrong({"name": "a"}),
    ],
    ("GET", "/tokenizer_info"): [Case()],
    ("GET", "/props"): [Case()],
    ("GET", "/plan"): [Case(), Case(load={"device": "simulated", "vram_budget": 0.25})],
    ("GET", "/metrics"): [Case()],
    ("POST", "/v1/messages"): [
        *_both(_MESSAGE),
        Case(_MESSAGE | {"system": "be brief", "stop_sequences": ["e"]}),
        *_both(_MESSAGE_TOOLS, writes=CALLS),
        Case(_MESSAGE | {"max_tokens": 0}),
        Case(_MESSAGE | {"messages": [{"role": "user", "content": [{"type": "image"}]}]}),
        *_wrong(_MESSAGE),
    ],
    ("POST", "/v1/messages/count_tokens"): [Case(_COUNTED), *_wrong(_COUNTED)],
    ("POST", "/api/chat"): [
        *_both(_OLLAMA), *_both(_OLLAMA_TOOLS, writes=CALLS),
        Case(_OLLAMA | {"messages": [MESSAGES[0] | {"images": ["aGk="]}]}),
        Case(_OLLAMA | {"stream": False, "format": SCHEMA, "logprobs": True}), Case(NAMED), *_wrong(_OLLAMA),
    ],
    ("POST", "/api/generate"): [
        *_both(_GENERATE), Case(_GENERATE | {"raw": True, "stream": False, "system": "be brief"}),
        Case(NAMED), *_wrong(_GENERATE),
    ],
    ("POST", "/api/embed"): [
        Case(NAMED | {"input": ["hello", "ok"]}), Case(NAMED | {"input": "h" * 3000, "dimensions": 3}),
        Case(NAMED | {"input": "h" * 3000, "truncate": False}), Case(NAMED), *_wrong(NAMED | {"input": "a"}),
    ],
    ("POST", "/api/embeddings"): [
        Case(NAMED | {"prompt": "hello"}), Case(NAMED), *_wrong(NAMED | {"prompt": "a"}),
    ],
    ("GET", "/api/version"): [Case()],
    ("GET", "/api/tags"): [Case()],
    ("GET", "/api/ps"): [Case()],
    ("POST", "/api/show"): [Case(NAMED), Case({"name": "tiny:latest", "verbose": True}), *_wrong(NAMED)],
}  # fmt: skip

_KEYS = {"settings": {"api_keys": ("secret",)}}
REFUSALS = [
    *[Case(path=path) for path in ("/none", "/v1/messages/none", "/api/none", "/v1/completions")],
    Case({}, "/health"),
    *[Case(path=path, **_KEYS) for path in ("/v1/models", "/v1/messages", "/api/tags", "/health", "/")],
    Case(path="/v1/models", headers={"x-api-key": "other"}, **_KEYS),
    Case(path="/v1/models", headers={"authorization": "Bearer secret"}, **_KEYS),
    Case(path="/health", headers={"host": "elsewhere.example"}),
    Case(path="/health", headers={"origin": "https://elsewhere.example"}),
    Case(_CHAT, "/v1/chat/completions", settings={"max_body_bytes": 10}),
    Case("[" * 100, "/v1/messages"),
]
"""Requests that are refused before they reach a route, in each API schema."""
_OTHER = {"model": "other"}
SEVERAL: list[tuple[str, Case]] = [
    ("GET", Case(path="/health")),
    ("GET", Case(path="/v1/models")),
    ("GET", Case(path="/api/ps")),
    ("GET", Case(path="/props")),
    ("POST", Case(_OTHER | {"prompt": "hello"} | GREEDY, "/v1/completions")),
    ("POST", Case({"model": "none", "prompt": "hello"}, "/v1/completions")),
    ("POST", Case({"prompt": "hello", "model": ""}, "/v1/completions")),
    ("GET", Case(path="/models")),
    ("GET", Case(path="/v1/models/other")),
    ("GET", Case(path="/api/ps")),
    ("GET", Case(path="/metrics")),
    ("POST", Case(_OTHER | {"keep_alive": 0}, "/api/generate")),
    ("POST", Case(NAMED, "/models/unload")),
    ("POST", Case({"model": "none"}, "/models/load")),
    ("POST", Case({}, "/models/load")),
    ("POST", Case(NAMED | {"n_ctx": 0}, "/models/load")),
    ("GET", Case(path="/models/catalogue?q=smollm2+135m")),
    ("POST", Case({"source": "tiny", "destination": "mine:small"}, "/api/copy")),
    ("POST", Case({"source": "tiny", "destination": "../up"}, "/api/copy")),
    ("POST", Case({"model": "mine:small"}, "/api/show")),
    (
        "POST",
        Case(
            {"model": "made", "from": "tiny", "system": "Be brief.", "parameters": {"top_k": 3}},
            "/api/create",
        ),
    ),
    ("POST", Case({"model": "made"}, "/api/show")),
    ("POST", Case({"model": "made", "from": "tiny", "template": "{{ .Prompt }}"}, "/api/create")),
    ("DELETE", Case({"model": "made"}, "/api/delete")),
    ("DELETE", Case({"model": "mine:small"}, "/api/delete")),
    ("DELETE", Case({"model": "mine:small"}, "/api/delete")),
    ("DELETE", Case(NAMED, "/api/delete")),
    ("POST", Case({"model": "no such model", "stream": False}, "/api/pull")),
    ("POST", Case({"model": "no such model"}, "/api/pull")),
    ("POST", Case(NAMED, "/models/load", headers={"origin": "https://elsewhere.example"})),
]
"""Requests to a server of several models, in order.

/models/events does not end and has its own test (tests/server/test_server_models.py).
"""


def name_of(method: str, route: str) -> str:
    """Return the name of a route's file."""
    words = re.findall(r"\w+", re.sub(r"\{.*\}", "", route))
    return "-".join([method.lower(), *words]) if words else f"{method.lower()}-root"


def routes_of(routes: Any) -> Iterator[tuple[str, str]]:
    """Yield method and path of each route, without HEAD, which behaves as GET."""
    for route in routes:
        if hasattr(route, "methods"):
            yield from ((method, route.path) for method in route.methods if method != "HEAD")
        else:  # a FastAPI router
            yield from routes_of(route.original_router.routes)


def replies(cases: list[Case], route: tuple[str, str], folder: Path) -> list[dict[str, Any]]:
    """Return requests and their replies.

    route: method and path; an empty method means GET, or POST with a body.
    """
    return asyncio.run(_replies(cases, route, folder))


async def _replies(cases: list[Case], route: tuple[str, str], folder: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    by_server = itertools.groupby(cases, lambda case: (case.writes, case.ranks, case.load, case.settings))
    for (writes, ranks, load, settings), group in by_server:
        load, settings = {"n_ctx": 2048} | load, {"keep_alive_seconds": 3600.0} | settings
        path = _model(folder, writes is not None, ranks)
        async with client_of(path, load=load, **settings) as (client, service):
            if writes is not None:
                written(service.model, writes)
            for case in group:
                method = route[0] or ("GET" if case.body is None else "POST")
                found.append(await _reply(client, case, method, case.path or route[1]))
    return _without_what_changes(found)


def several(folder: Path) -> list[dict[str, Any]]:
    """Return the replies to SEVERAL."""
    return asyncio.run(_several(folder))


async def _several(folder: Path) -> list[dict[str, Any]]:
    home = os.environ.get("HOTSET_HOME")
    os.environ["HOTSET_HOME"] = str(folder / "home")
    try:
        tiny = _model(folder, thinks=False, ranks=False)
        other = write_model(folder / "other.gguf", n_layer=1)
        os.utime(other, (_WHEN, _WHEN))
        catalogue = Catalogue({"tiny": tiny, "other": other})
        catalogue.scan()
        load = LoadSettings(device="cpu", n_threads=1, max_sequences=4, n_ctx=256)
        models = Models(catalogue, load=load, budget=1 << 30, keep_alive=math.inf)
        async with client_to(models) as client:
            found = [await _reply(client, case, method, str(case.path)) for method, case in SEVERAL]
    finally:
        if home is None:
            del os.environ["HOTSET_HOME"]
        else:
            os.environ["HOTSET_HOME"] = home
    return _without_what_changes(found)


def _model(folder: Path, thinks: bool, ranks: bool) -> Path:
    keys = {"llama.context_length": 2048, "general.name": "Tiny", "general.license": "mit"}
    keys |= {"tokenizer.chat_template": THINKS} if thinks else {}
    path = (write_reranker if ranks else write_model)(folder / "tiny.gguf", **keys)
    os.utime(path, (_WHEN, _WHEN))
    return path


async def _reply(client: httpx.AsyncClient, case: Case, method: str, path: str) -> dict[str, Any]:
    body = case.body
    if isinstance(body, dict) and path.startswith("/v1/"):
        body = {"model": "tiny"} | body
    content = body if body is None or isinstance(body, str) else json.dumps(body)
    reply = await client.request(method, path, content=content, headers=case.headers)
    asked = {"method": method, "path": path, "body": body, "headers": case.headers}
    asked |= {"writes": case.writes, "load": case.load, "settings": case.settings, "ranks": case.ranks}
    kind = reply.headers.get("content-type")
    return {
        "request": {key: value for key, value in asked.items() if value not in (None, {}, False)},
        "status": reply.status_code, "type": kind, "reply": _body(str(kind).partition(";")[0], reply),
    }  # fmt: skip


def _body(kind: str, reply: httpx.Response) -> Any:
    match kind:
        case "application/json":
            return _with_numbers(reply.json())
        case "text/event-stream":
            return _joined([_event(block) for block in reply.text.strip().split("\n\n")])
        case "application/x-ndjson":
            return _joined([json.loads(line) for line in reply.text.splitlines()])
        case "text/plain" if reply.url.path == "/metrics":
            return [re.sub(r"^([^#].*) \S+$", r"\1 <number>", line) for line in reply.text.splitlines()]
        case "None":
            return reply.text
        case _ if reply.status_code == 200:
            name = reply.url.path.removeprefix("/page/").removeprefix("/") or "index.html"
            assert reply.content == (files("hotset.server") / "page" / name).read_bytes()
            left_out = ("etag", "content-length", "content-type")
            headers = {key: value for key, value in sorted(reply.headers.items()) if key not in left_out}
            return {"file": name, "headers": headers}
    return reply.text


def _with_numbers(body: Any) -> Any:
    """Replace base64 embeddings by their numbers, whose last bits may differ."""
    for one in body.get("data", ()) if isinstance(body, dict) else ():
        if isinstance(one.get("embedding"), str):
            numbers = np.frombuffer(base64.b64decode(one["embedding"], validate=True), "<f4")
            one["embedding"] = {"base64 of": numbers.tolist()}
    return body


def _event(block: str) -> dict[str, Any]:
    """Return an event of a stream of server-sent events."""
    fields = dict(line.split(": ", 1) for line in block.splitlines())
    data = fields.pop("data")
    return fields | {"data": data if data == "[DONE]" else json.loads(data)}


def _joined(events: list[Any]) -> list[Any]:
    """Return the events as a golden file stores them."""
    found: list[Any] = []
    for i, event in enumerate(events):
        data = event.get("data")
        if isinstance(data, dict) and data.get("sequence_number") == i:
            data["sequence_number"] = "<next>"
        if isinstance(data, dict) and data.get("type") == "message_start":
            data["message"]["usage"] = "<so far>"
        pieces: list[Any] = []
        try:
            joined = _join(found[-1], event, "", pieces) if found else None
        except _DifferentError:
            pieces.clear()
        if pieces:
            found[-1] = joined
        else:
            found.append(event)
    return found


class _DifferentError(Exception):
    """Two events differ in more than their text."""


def _join(one: Any, other: Any, key: str, pieces: list[Any]) -> Any:
    """Join two events. pieces: receives each text and list that was joined."""
    if isinstance(one, dict) and isinstance(other, dict) and one.keys() == other.keys():
        return {name: _join(one[name], other[name], name, pieces) for name in one}
    if isinstance(one, list) and isinstance(other, list) and len(one) == len(other) and key not in _LISTS:
        return [_join(a, b, "", pieces) for a, b in zip(one, other, strict=True)]
    is_text = key in _TEXTS and isinstance(one, str) and isinstance(other, str)
    if is_text or (key in _LISTS and isinstance(one, list) and isinstance(other, list)):
        if one and other:
            pieces.append(other)
        return one + other
    if one != other and key not in TIMES:
        raise _DifferentError
    return one


def _without_what_changes(value: Any) -> Any:
    ids: dict[str, str] = {}

    def text(one: str) -> str:
        one = _ID.sub(lambda found: ids.setdefault(found[0], f"<{len(ids) + 1}>"), one)
        return one.replace(version("hotset"), "<version>")

    def walk(one: Any, key: str = "") -> Any:
        if key in TIMES and (isinstance(one, int) or (isinstance(one, str) and _ISO.fullmatch(one))):
            return "<time>"
        if key == "timings":
            return "<time>"
        if key == "memory" and isinstance(one, int):
            return "<bytes>"
        if isinstance(one, dict):
            return {name: walk(of, name) for name, of in one.items()}
        if isinstance(one, list):
            return [walk(of) for of in one]
        return text(one) if isinstance(one, str) else one

    return walk(value)
