"""Ollama's API schema: /api/chat, /api/generate, /api/embed, and the routes about models.

A body becomes an AnswerRequest, and the deltas of an answer become lines of JSON. A server of one model loads
it at the start and keeps it: `keep_alive` has no effect there.
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
from fastapi import APIRouter, Request, Response
from pydantic import BeforeValidator, Field

from hotset.api import Model
from hotset.engine.embedding import TextVectors
from hotset.engine.sequence import Owner
from hotset.formats.gguf import GGUFFile, open_gguf
from hotset.loader.modelfile import Modelfile
from hotset.server import shapes
from hotset.server.answers import (
    Answer,
    AnswerRequest,
    Delta,
    Finished,
    FinishedAnswer,
    ReasoningDelta,
    TextDelta,
    ToolCallArguments,
    ToolCallStart,
    arguments_object,
)
from hotset.server.body import BodyRoute
from hotset.server.catalogue import FileFacts
from hotset.server.errors import RequestError
from hotset.server.fields import NO_DEFAULTS, AnswerFields
from hotset.server.logprobs import spelled
from hotset.server.manage import may_manage
from hotset.server.model_settings import until_unloaded
from hotset.server.openai.embeddings import MAX_TEXTS
from hotset.server.openai.schema import Logprobs, logprobs_of
from hotset.server.replies import JsonReply, dumped
from hotset.server.rows import MANY, Body, ByType, Flag, Number, Row, Text, UnknownPart, having, integer
from hotset.server.service import ListedModel, Service
from hotset.server.shapes import JSON_LINES, documented, errors
from hotset.server.streams import (
    AnswerStream,
    ask,
    client_of,
    embedded,
    file_of,
    host_of,
    listed,
    name_of,
    off_loop,
    serving,
    while_connected,
    whole,
)
from hotset.server.tool_fields import MAX_TOOLS, AnyToolChoice, Function, chosen
from hotset.server.turns import ROLES, Turn, tool_call
from hotset.storage import created
from hotset.storage.created import Created
from hotset.storage.projectors import projector_of
from hotset.text.image_parts import from_base64
from hotset.text.image_text import GivenImage, joined, text_of_image
from hotset.text.infill import Gap, InfillTokens
from hotset.text.parts import ToolCall
from hotset.text.tokenizer import Tokenizer
from hotset.units import human_count

router = APIRouter(route_class=BodyRoute, responses=errors(shapes.OllamaErrorReply))

OLLAMA_VERSION = "0.13.5"
"""The version of Ollama with this API. Clients read it: Codex refuses servers older than 0.13.4."""

_MOST_FILES = 64  # whose facts /api/show keeps
_MOST_SHOWN = 64  # entries of a list of the file's metadata
_NEVER = "9999-12-31T23:59:59Z"

# ---- requests ----


def _images(given: Any) -> Any:
    """Return images in base64 as texts with one image each. Raises ValueError."""
    if not isinstance(given, list):
        return given  # pydantic's check
    return [text_of_image(GivenImage(from_base64(one))) for one in given]


Images = Annotated[list[Any] | None, BeforeValidator(_images)]


def _form(given: str | dict[str, Any]) -> dict[str, Any]:
    if isinstance(given, dict):
        return {"json_schema": given}
    return {"json_object": True} if given == "json" else {}


_LOGPROBS = (
    Row("logprobs", "Logprobs of the tokens, or how many of the likeliest.", Logprobs, use="route"),
    Row("top_logprobs", "Logprobs of this number of likeliest tokens.", integer(0, 20), use="route"),
)
_KEEP_ALIVE = Row("keep_alive", "How long the model stays loaded.", Number | str, use="route")


@having(
    *_LOGPROBS,
    _KEEP_ALIVE,
    Row("format", "The word json, or the JSON schema that the answer follows.",
        Literal["", "json"] | dict[str, Any], sets=MANY, read=_form),
    Row("truncate", "False refuses a conversation that is too long; otherwise its oldest turns are left out.",
        Flag, use="request", sets="truncates"),
    Row("shift", "an answer ends with the context", use="ignored"),
)  # fmt: skip
class AnswerBody(AnswerFields):
    """The fields of a request for an answer, as Ollama has them."""

    @property
    def streams(self) -> bool:
        return self.given("stream") is not False


class OllamaCalledFunction(Body):
    name: str
    arguments: dict[str, Any] | str = Field(default={})
    index: Any = None


class OllamaCall(Body):
    function: OllamaCalledFunction
    id: Text | None = None
    type: Any = None


class OllamaMessage(Body):
    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | None = None
    thinking: str | None = None
    tool_calls: list[OllamaCall] | None = None
    tool_name: str | None = None
    tool_call_id: Text | None = None
    images: Images = None


class OllamaTool(Body):
    type: Literal["function"] = "function"
    function: Function


class OllamaChatBody(AnswerBody):
    """The body of a chat, as Ollama has it."""

    messages: list[OllamaMessage] | None = None
    tools: Annotated[
        list[Annotated[OllamaTool | UnknownPart, ByType("function")]] | None, Field(max_length=MAX_TOOLS)
    ] = None
    tool_choice: AnyToolChoice | None = None


@having(
    Row("raw", "Continue the prompt without a chat template.", Flag, use="route"),
    Row("template", "a request cannot replace the model's template", use="ignored"),
    Row("context", "the conversation of an earlier answer is found in the messages", use="ignored"),
)
class OllamaGenerateBody(AnswerBody):
    """The body of a prompt, as Ollama has it."""

    prompt: str | None = None
    system: str | None = None
    suffix: str | None = None
    images: Images = None


@having(_KEEP_ALIVE, Row("options", "they concern the draw of tokens, and the load", use="free"))
class EmbedBody(Body):
    model: Text | None = None


class OllamaEmbedBody(EmbedBody):
    """Texts to embed. prompt: the name of the older route."""

    input: str | Annotated[list[str], Field(max_length=MAX_TEXTS)] | None = None
    prompt: str | Annotated[list[str], Field(max_length=MAX_TEXTS)] | None = None
    truncate: Flag | None = None
    dimensions: integer(0) | None = None  # type: ignore[valid-type]

    @property
    def texts(self) -> list[str]:
        given = self.input if self.input is not None else self.prompt
        return [text for text in ([given] if isinstance(given, str) else given or ()) if text]


class OllamaShowBody(Body):
    model: str | None = None
    name: str | None = None  # as older clients have it
    verbose: Flag | None = None


# ---- from a body to a request ----


def _arguments(function: OllamaCalledFunction) -> str:
    given = function.arguments
    return given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)


def chat_request(body: OllamaChatBody, defaults: Mapping[str, Any] = NO_DEFAULTS) -> AnswerRequest:
    """Return the request that a body describes. Raises InvalidRequestError."""
    tools = [tool.function.turn() for tool in body.tools or () if isinstance(tool, OllamaTool)]
    use = chosen(body.tool_choice, tools)
    return _request(
        body, defaults, messages=conversation(body.messages or ()), tools=use.tools, tool_choice=use.value
    )


def _request(body: AnswerBody, defaults: Mapping[str, Any], **subject: Any) -> AnswerRequest:
    return AnswerRequest(
        template=body.template_variables,
        thinking=body.thinking_settings,
        params=body.sampling(defaults, logprobs_of(body.given("logprobs"), body.given("top_logprobs"))),
        stream=body.streams,
        **{"truncates": True, **body.all_settings("request")},
        **subject,
    )


def generate_request(body: OllamaGenerateBody, defaults: Mapping[str, Any] = NO_DEFAULTS) -> AnswerRequest:
    """Return the request that a body describes. Raises InvalidRequestError."""
    request = partial(_request, body, defaults)
    prompt = body.prompt or ""
    if body.images and (body.suffix or body.given("raw")):
        raise RequestError("images need the model's chat template: leave out suffix and raw", param="images")
    if body.suffix:
        if body.system:
            raise RequestError("a gap is filled in without a system message", param="system")
        return request(gap=Gap(prefix=prompt, suffix=body.suffix))
    if body.given("raw"):
        if body.system:
            raise RequestError("a raw prompt cannot have a system message", param="system")
        return request(prompts=[prompt])  # with the special tokens of a template that the client rendered
    system = [{"role": "system", "content": body.system}] if body.system else []
    return request(
        messages=[*system, {"role": "user", "content": joined("", [*(body.images or ()), prompt])}]
    )


def conversation(messages: Sequence[OllamaMessage]) -> list[Turn]:
    """Return the turns of a conversation.

    A call without an id gets one. A result gets the id and the name of its call: of the first call without a
    result that has the result's name, if it has one. A result without a call keeps its own.
    """
    turns: list[Turn] = []
    waiting: list[tuple[str, str]] = []  # ids and names of calls without a result
    for i, message in enumerate(messages):
        content = joined("", [*(message.images or ()), message.content or ""])
        turn: Turn = {"role": ROLES[message.role], "content": content}
        if message.thinking:
            turn["reasoning_content"] = message.thinking
        if message.tool_calls:
            calls = [(call.id or f"call_{i}_{j}", call.function) for j, call in enumerate(message.tool_calls)]
            waiting = [(call_id, function.name) for call_id, function in calls]
            turn["tool_calls"] = [
                tool_call(call_id, function.name, _arguments(function)) for call_id, function in calls
            ]
        if turn["role"] == "tool":
            fits = [
                call
                for call in waiting
                if message.tool_call_id in (None, call[0]) and message.tool_name in (None, call[1])
            ]
            own = message.tool_call_id, message.tool_name
            turn["tool_call_id"], turn["name"] = fits[0] if fits else own
            if fits:
                waiting.remove(fits[0])
        turns.append(turn)
    return turns


# ---- from deltas to lines ----


class LineWriter:
    """A writer of the objects in which a client gets an answer: one per delta, or one for the whole answer.

    chat: whether a text is the content of a message, or a field of its own.
    """

    def __init__(self, model: str, tokenizer: Tokenizer, n_top: int | None, *, chat: bool) -> None:
        self._model, self._tokenizer, self._n_top, self._chat = model, tokenizer, n_top, chat
        self._began = time.perf_counter_ns()
        self._call: ToolCall | None = None  # sent when it is complete
        self._n_calls = 0
        self._finished: Finished | None = None

    async def lines(self, answer: Answer) -> AsyncIterator[bytes]:
        """Yield the stream of an answer, a line at a time."""
        async for delta in answer:
            for one in self.push(delta):
                yield dumped(one) + b"\n"
        yield dumped(self._line() | self.end(answer)) + b"\n"

    def whole(self, answer: Answer, choice: FinishedAnswer) -> dict[str, Any]:
        """Return the object of a finished answer."""
        calls = []
        for delta in choice.deltas():
            calls += [
                call
                for one in self.push(delta)
                if "message" in one
                for call in one["message"].get("tool_calls", ())
            ]
        logprobs = self._logprobs(TextDelta(0, choice.text, choice.tokens, choice.logprobs))
        return self._line(choice.text, choice.reasoning, calls) | logprobs | self.end(answer)

    def push(self, delta: Delta) -> list[dict[str, Any]]:
        match delta:
            case TextDelta(text=text) if text:
                return [self._line(text) | self._logprobs(delta)]
            case ReasoningDelta(text=text) if text:
                return [self._line(thinking=text)]
            case ToolCallStart():
                events = self._called()
                self._call = ToolCall(delta.id, delta.name)
                return events
            case ToolCallArguments():
                assert self._call is not None
                self._call.arguments += delta.text
            case Finished():
                self._finished = delta
                return self._called()
        return []

    def end(self, answer: Answer) -> dict[str, Any]:
        """Return the fields of the last object, other than its text."""
        assert self._finished is not None
        usage = answer.usage
        prompt, generated = _durations(answer)
        return shapes.OllamaReply.written(
            done_reason="length" if self._finished.reason == "length" else "stop",
            total_duration=time.perf_counter_ns() - self._began,
            load_duration=0,
            prompt_eval_count=usage.prompt_tokens,
            prompt_eval_duration=prompt,
            eval_count=usage.completion_tokens,
            eval_duration=generated,
        )

    def _called(self) -> list[dict[str, Any]]:
        if self._call is None:
            return []
        call, self._call = self._call, None
        function = shapes.OllamaReplyFunction.written(
            index=self._n_calls, name=call.name, arguments=arguments_object(call.arguments)
        )
        self._n_calls += 1
        return [self._line(calls=[shapes.OllamaReplyCall.written(id=call.id, function=function)])]

    def _line(self, text: str = "", thinking: str = "", calls: Sequence[Any] = ()) -> dict[str, Any]:
        more: dict[str, Any] = {"thinking": thinking} if thinking else {}
        if calls:
            more["tool_calls"] = list(calls)
        shape, said = _shape(text, chat=self._chat, **more)
        return shape.written(model=self._model, created_at=_time(time.time()), done=False, **said)

    def _logprobs(self, delta: TextDelta) -> dict[str, Any]:
        if self._n_top is None:
            return {}
        return {"logprobs": [spelled(self._tokenizer, one, self._n_top) for one in delta.logprobs]}


def _shape(text: str, *, chat: bool, **more: Any) -> tuple[type[shapes.OllamaReply], dict[str, Any]]:
    """Return the type of a reply, and its fields with the text: a message, or only the text."""
    if chat:
        return shapes.OllamaChatReply, {"message": shapes.OllamaReplyMessage.written(content=text, **more)}
    return shapes.OllamaGenerateReply, {"response": text, **more}


def _durations(answer: Answer) -> tuple[int, int]:
    """Return the nanoseconds until the first token, and from there to the last."""
    completion = answer.generations[0].completion
    assert completion is not None
    timings = completion.timings
    computed, generated = timings.prompt_tokens - timings.reused_tokens, timings.predicted_tokens - 1
    rates = (computed, timings.prompt_per_second), (generated, timings.predicted_per_second)
    prompt, rest = (int(n / rate * 1e9) if rate else 0 for n, rate in rates)
    return prompt, rest


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")


# ---- the routes ----


@router.post("/api/chat", responses=documented(shapes.OllamaChatReply, JSON_LINES))
async def chat(body: OllamaChatBody, http: Request) -> Response:
    if not body.messages:
        return await _loaded(http, body, chat=True)
    service = await _named(http, body)
    request = await off_loop(http, chat_request, body, service.sampling)
    return await _answered(http, body, request, service, chat=True)


@router.post("/api/generate", responses=documented(shapes.OllamaGenerateReply, JSON_LINES))
async def generate(body: OllamaGenerateBody, http: Request) -> Response:
    if not body.prompt and not body.suffix:
        return await _loaded(http, body, chat=False)
    service = await _named(http, body)
    request = await off_loop(http, generate_request, body, service.sampling)
    return await _answered(http, body, request, service, chat=False)


async def _named(http: Request, body: AnswerBody | EmbedBody) -> Service:
    """Return the service of the model that a body names, and apply the body's `keep_alive` to the model."""
    asks = isinstance(body, AnswerBody)
    service = await serving(http, body.model, takes_adapter=asks)
    host_of(http).keep(service, getattr(body, "keep_alive", None))
    return service


async def _answered(
    http: Request, body: AnswerBody, request: AnswerRequest, service: Service, *, chat: bool
) -> Response:
    name = body.model or service.name
    writer = LineWriter(name, service.model.tokenizer, request.params.logprobs, chat=chat)
    if request.stream:
        return AnswerStream(http, await ask(http, request), writer.lines, lines=True)
    return await whole(http, request, lambda answer, choices: writer.whole(answer, choices[0]))


async def _loaded(http: Request, body: AnswerBody, *, chat: bool) -> Response:
    """Answer a request without a prompt, by which clients load a model, or unload it (`keep_alive` 0).

    For clients that may not manage models, `keep_alive` 0 does not interrupt other clients: the model is
    unloaded once it is idle, as after any request with this keep_alive.
    """
    keep_alive = body.given("keep_alive")
    is_over = keep_alive is not None and until_unloaded(keep_alive) == 0
    reason = "load"
    name = body.model or ""
    if name and is_over and may_manage(http) and await _unloaded(http, name):
        reason = "unload"
    else:
        service = await _named(http, body)
        name = name or service.name
    shape, said = _shape("", chat=chat)
    head = {"model": name, "created_at": _time(time.time())}
    return JsonReply(shape.written(**head, **said, done=True, done_reason=reason))


async def _unloaded(http: Request, name: str) -> bool:
    """Return whether the model was unloaded; False if this server keeps it."""
    return await while_connected(http, host_of(http).unload(await name_of(http, name), spares_pinned=True))


@router.post("/api/embed", responses={200: {"model": shapes.OllamaEmbedReply}})
async def embed(body: OllamaEmbedBody, http: Request) -> Response:
    """Return vectors of length 1 for texts. A text beyond the context is cut, unless truncate is false."""
    service = await _named(http, body)
    texts, began = body.texts, time.perf_counter_ns()
    cuts, dimensions = body.truncate is not False, body.dimensions or None

    def written(vectors: list[list[float]], n_tokens: int) -> dict[str, Any]:
        return shapes.OllamaEmbedReply.written(
            model=body.model or service.name,
            embeddings=vectors,
            total_duration=time.perf_counter_ns() - began,
            prompt_eval_count=n_tokens,
        )

    if not texts:
        return JsonReply(written([], 0))
    make = partial(_embedded, texts=texts, cuts=cuts, dimensions=dimensions)
    return await embedded(
        http, len(texts), make, lambda found: written(found.vectors().tolist(), found.n_tokens)
    )


@router.post("/api/embeddings", responses={200: {"model": shapes.OllamaEmbeddingsReply}})
async def embeddings(body: OllamaEmbedBody, http: Request) -> Response:
    """Return the vector of one text, as /api/embed does for several."""
    await _named(http, body)

    def written(vector: list[float]) -> dict[str, Any]:
        return shapes.OllamaEmbeddingsReply.written(embedding=vector)

    if not body.texts:
        return JsonReply(written([]))
    make = partial(_embedded, texts=body.texts[:1], cuts=True, dimensions=None)
    return await embedded(http, 1, make, lambda found: written(found.vectors()[0].tolist()))


def _embedded(
    model: Model, owner: Owner, *, texts: list[str], cuts: bool, dimensions: int | None
) -> TextVectors:
    """Return the vectors of texts. cuts: shorten a long text, but keep a final special token."""
    tokenizer, n_ctx = model.tokenizer, model.engine.n_ctx
    ids = [tokenizer.encode_prompt(text, False, most=None if cuts else n_ctx) for text in texts]
    if cuts:
        ends = [one[-1:] if tokenizer.is_special(one[-1]) else [] for one in ids]
        ids = [
            one if len(one) <= n_ctx else one[: n_ctx - len(end)] + end
            for one, end in zip(ids, ends, strict=True)
        ]
    return model.embedder.vectors(ids, dimensions=dimensions, owner=owner)


@router.get("/api/version")
async def api_version() -> dict[str, str]:
    return {"version": OLLAMA_VERSION}


@router.get("/api/tags")
async def tags(http: Request) -> dict[str, Any]:
    return {"models": [_listed(one) for one in await listed(http)]}


@router.get("/api/ps")
async def ps(http: Request) -> dict[str, Any]:
    """Return the loaded models. `size_vram` is always 0: /plan has the devices."""
    loaded = [one for one in await listed(http) if one.is_loaded]
    return {"models": [_listed(one) | _running(one) for one in loaded]}


def _running(model: ListedModel) -> dict[str, Any]:
    expires = _NEVER if model.expires is None else _time(model.expires)
    return {"expires_at": expires, "size_vram": 0, "context_length": model.n_ctx}


@router.post("/api/show", response_model=dict[str, Any])
async def show(body: OllamaShowBody, http: Request) -> Response:
    """Return facts of a model's file. The model is not loaded for it."""
    given = body.model or body.name
    if not given:
        raise RequestError("model is missing", param="model")
    service, name, path = await file_of(http, await name_of(http, given))

    def written() -> Response:
        made = created.find(name)
        if service is not None:
            model = service.model
            sees, source = model.images is not None, model.chat_template.source
            return JsonReply(_shown(name, model.gguf, source, body, made, sees=sees))
        gguf = open_gguf(path)
        try:
            own = str(gguf.metadata.get("tokenizer.chat_template", ""))
            sees = projector_of(path) is not None
            return JsonReply(_shown(name, gguf, (made and made.template) or own, body, made, sees=sees))
        finally:
            gguf.close()

    threads = host_of(http).preparation.text(long=True)
    return await while_connected(http, threads.run(client_of(http), written))


def _shown(
    name: str, gguf: GGUFFile, template: str, body: OllamaShowBody, made: Created | None, *, sees: bool
) -> dict[str, Any]:
    shown = _shown_file(gguf)
    given = Modelfile.parse(made.modelfile).parameters if made is not None else {}
    marks = {"tools": ("tools",), "thinking": ("enable_thinking", "<think>", "reasoning_effort")}
    found = [name for name, forms in marks.items() if any(form in template for form in forms)]
    found += ["vision"] if sees else []
    return {
        "modelfile": f"FROM {name}\n" if made is None else made.modelfile,
        "parameters": "\n".join(f"{name} {value}" for name, values in given.items() for value in values),
        "template": template,
        "license": str(gguf.metadata.get("general.license", "")),
        "modified_at": _time(shown.facts.modified / 1e9),
        "details": _details(shown.facts),
        "model_info": _info(gguf, verbose=True) if body.verbose else shown.info,
        "capabilities": shown.capabilities + ([] if shown.capabilities == ["embedding"] else found),
    }


class _ShownFile(NamedTuple):
    """The parts of a reply of /api/show that depend only on the file.

    capabilities: without those that the template adds.
    """

    facts: FileFacts
    info: dict[str, Any]
    capabilities: list[str]


_shown_files: dict[tuple[Path, int, int], _ShownFile] = {}  # by path, size and time


def _shown_file(gguf: GGUFFile) -> _ShownFile:
    """Compute the facts of a file once: its vocabulary may have 150,000 tokens."""
    stat = gguf.path.stat()
    key = (gguf.path, stat.st_size, stat.st_mtime_ns)
    if (known := _shown_files.get(key)) is None:
        while len(_shown_files) >= _MOST_FILES:
            _shown_files.pop(next(iter(_shown_files)), None)
        known = _ShownFile(FileFacts.of(gguf), _info(gguf, verbose=False), _capabilities(gguf))
        _shown_files[key] = known
    return known


def _listed(model: ListedModel) -> dict[str, Any]:
    """Return the entry of a model in a list. digest: of name, size and time; the file is not read."""
    facts = model.facts
    mark = f"{model.name} {facts.size} {facts.modified}"
    return {
        "name": model.name,
        "model": model.name,
        "modified_at": _time(facts.modified / 1e9),
        "size": facts.n_bytes,
        "digest": hashlib.sha256(mark.encode("utf-8", "replace")).hexdigest(),
        "details": _details(facts),
    }


def _details(facts: FileFacts) -> dict[str, Any]:
    return {
        "parent_model": "",
        "format": "gguf",
        "family": facts.architecture,
        "families": [facts.architecture],
        "parameter_size": human_count(facts.n_parameters).replace(" ", ""),
        "quantization_level": facts.quantization,
    }


def _capabilities(gguf: GGUFFile) -> list[str]:
    """Return the uses of the model, such as "completion" and "embedding"."""
    if f"{gguf.architecture}.pooling_type" in gguf.metadata:
        return ["embedding"]
    tokens = gguf.metadata.get("tokenizer.ggml.tokens")
    texts: Sequence[str] = tokens if isinstance(tokens, Sequence) else ()
    vocabulary = {text: id for id, text in enumerate(texts)}
    inserts = ["insert"] if InfillTokens.of(vocabulary, len(texts), gguf.metadata) else []
    return ["completion", *inserts]


def _info(gguf: GGUFFile, verbose: bool) -> dict[str, Any]:
    """Return the metadata of a file as JSON values; null for a long list, unless verbose."""
    return {
        key: None if isinstance(value, list | np.ndarray) and len(value) > _MOST_SHOWN and not verbose
        else _plain(value)
        for key, value in gguf.metadata.items()
    }  # fmt: skip


def _plain(value: Any) -> Any:
    """Return a value of the metadata as a JSON value; null for a number that is not finite."""
    if isinstance(value, np.ndarray):
        return value.tolist() if np.isfinite(value).all() else [_plain(one) for one in value.tolist()]
    if isinstance(value, list):
        return [_plain(one) if isinstance(one, np.ndarray | list) else one for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
