"""An adapter for each API schema of the server, for one common suite (test_server_schemas.py).

An adapter writes requests from the fields of `hotset.SamplingParams` and from messages and tools in OpenAI's
form. It reads replies and streams into `Found` and validates them with the models of the OpenAPI document
and, if there is an official client, with its types.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import httpx
from anthropic import types as anthropic_types
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import BaseModel, TypeAdapter
from tiny_server import MESSAGES

import hotset
from hotset.server import shapes
from hotset.server.anthropic import MessagesBody
from hotset.server.fields import SAMPLING
from hotset.server.ollama import OllamaChatBody, OllamaGenerateBody
from hotset.server.openai.chat import ChatBody
from hotset.server.openai.completions import CompletionBody
from hotset.server.openai.responses import ResponsesBody

Json = dict[str, Any]
_MESSAGE_EVENT: TypeAdapter[Any] = TypeAdapter(anthropic_types.RawMessageStreamEvent)
_RESPONSE_EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)


@dataclass
class Found:
    """An answer. calls: names and arguments, which are text if they are not JSON.

    reason: "stop", "length" or "calls". logprobs: of each token. cached: cached tokens of the prompt. cached,
    reasoning_tokens: None if the schema does not report them.
    """

    text: str = ""
    reasoning: str = ""
    calls: list[tuple[str, Any]] = field(default_factory=list)
    reason: str = ""
    logprobs: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    tokens: int = 0
    cached: int | None = None
    reasoning_tokens: int | None = None


class ApiSchema:
    """An API schema.

    subject: the field with the prompt. sampling: names of the fields of SamplingParams. is_chat: whether it
    takes messages. has_tools, chooses_tools, has_logprobs, counts_cached: which fields exist. keep_alive: the
    line that a waiting stream repeats, or "".
    """

    name: str
    url: str
    body_type: type[BaseModel]
    reply: type[shapes.Shape]
    error_reply: type[shapes.Shape]
    subject = "messages"
    sampling: ClassVar[dict[str, str]]
    has_tools = chooses_tools = counts_cached = has_logprobs = is_chat = True
    usage_wanted: ClassVar[Json] = {}
    stream_type = "text/event-stream"
    keep_alive = ": keep-alive"

    def __repr__(self) -> str:
        return self.name

    def expected(self, model: hotset.Model, **params: Any) -> hotset.Completion:
        """Return the model's own answer to MESSAGES for the same request."""
        completion = model.chat(MESSAGES, **params).completion
        assert completion is not None
        return completion

    def body(
        self,
        messages: Sequence[Json] = MESSAGES,
        *,
        stream: bool = False,
        tools: Sequence[Json] = (),
        choice: str | None = None,
        single: bool = False,
        form: Json | None = None,
        **params: Any,
    ) -> Json:
        """Return a request.

        choice: "any", or the name of a tool that must be called. single: at most one call. form: a JSON
        schema.
        """
        body = {"model": "tiny", self.subject: self.messages(messages), "stream": stream}
        body |= self.sampled({self.sampling[name]: value for name, value in params.items()})
        if tools:
            body["tools"] = [self.tool(one) for one in tools]
        if choice is not None or single:
            body |= self.choice(choice or "auto", single)
        return body if form is None else body | self.form(form)

    def messages(self, messages: Sequence[Json]) -> Any:
        return list(messages)

    def sampled(self, params: Json) -> Json:
        return params

    def tool(self, tool: Json) -> Json:
        return tool

    def choice(self, choice: str, single: bool) -> Json:
        """Return the fields for a tool choice, which may also be "auto"."""
        raise NotImplementedError

    def form(self, schema: Json) -> Json:
        raise NotImplementedError

    def called(self, raw: Json, result: str) -> list[Json]:
        """Return the next request's messages: the answer of a whole reply with one call, and the result."""
        raise NotImplementedError

    async def whole(self, client: httpx.AsyncClient, body: Json) -> tuple[Found, Json]:
        """Return the answer, and the reply from which it was read."""
        reply = await client.post(self.url, json=body | {"stream": False})
        assert reply.status_code == 200, reply.text
        raw = reply.json()
        self.reply.model_validate(raw)
        return self.read(raw), raw

    async def streamed(self, client: httpx.AsyncClient, body: Json) -> Found:
        reply = await client.post(self.url, json=body | {"stream": True} | self.usage_wanted)
        assert reply.status_code == 200, reply.text
        assert reply.headers["content-type"].startswith(self.stream_type)
        return self.read_stream(reply.text)

    def read(self, raw: Json) -> Found:
        raise NotImplementedError

    def read_stream(self, text: str) -> Found:
        raise NotImplementedError

    def failure(self, text: str) -> str:
        """Return the error message that ends a stream."""
        return self.message(events_of(text)[-1])

    def error(self, reply: httpx.Response) -> str:
        """Return the message of a refusal."""
        return self.message(reply.json())

    def message(self, raw: Json) -> str:
        error: Any = self.error_reply.model_validate(raw).error  # type: ignore[attr-defined]
        return str(getattr(error, "message", error))


async def both(client: httpx.AsyncClient, schema: ApiSchema, body: Json) -> Found:
    """Return the answer, and assert that a stream gives the same, except the number of cached tokens."""
    whole, _ = await schema.whole(client, body)
    streamed = await schema.streamed(client, body)
    streamed.cached = whole.cached
    assert streamed == whole
    return whole


def events_of(text: str) -> list[Json]:
    """Return the JSON of server-sent events; a named event gets its name as type."""
    events = []
    for block in text.strip().split("\n\n"):
        fields = dict(line.split(": ", 1) for line in block.splitlines() if not line.startswith(":"))
        if fields and fields["data"] != "[DONE]":
            events.append(json.loads(fields["data"]))
            assert fields.get("event", events[-1].get("type")) == events[-1].get("type")
    return events


_CHOICES = {"any": "required", "auto": "auto"}
_SAMPLING = {row.setting: row.name for row in SAMPLING if row.name == row.setting}
_OF_OPENAI = _SAMPLING | {"max_tokens": "max_tokens", "logprobs": "logprobs"}


class _OpenAI(ApiSchema):
    error_reply = shapes.OpenAIErrorReply
    sampling = _OF_OPENAI
    usage_wanted: ClassVar = {"stream_options": {"include_usage": True}}
    usage_names = ("prompt_tokens", "completion_tokens")

    def usage(self, usage: Json) -> Json:
        before, after = self.usage_names
        assert usage["total_tokens"] == usage[before] + usage[after]
        return {
            "prompt_tokens": usage[before],
            "tokens": usage[after],
            "cached": usage[f"{before}_details"]["cached_tokens"],
            "reasoning_tokens": usage[f"{after}_details"]["reasoning_tokens"],
        }

    def chunks(self, text: str) -> tuple[list[Json], Json]:
        """Return the choices of a stream, and its usage."""
        assert text.endswith("data: [DONE]\n\n")
        *chunks, last = events_of(text)
        assert len({chunk["id"] for chunk in chunks} | {last["id"]}) == 1
        assert last["choices"] == []
        assert all(chunk["usage"] is None for chunk in chunks)
        return [choice for chunk in chunks for choice in chunk["choices"]], self.usage(last["usage"])


class Chat(_OpenAI):
    name, url = "chat", "/v1/chat/completions"
    body_type, reply = ChatBody, shapes.ChatReply

    def sampled(self, params: Json) -> Json:
        n = params.pop("logprobs", None)
        return params if n is None else params | {"logprobs": True, "top_logprobs": n}

    def choice(self, choice: str, single: bool) -> Json:
        named = {"type": "function", "function": {"name": choice}}
        return {"tool_choice": _CHOICES.get(choice, named), "parallel_tool_calls": not single}

    def form(self, schema: Json) -> Json:
        named = {"name": "answer", "schema": schema}
        return {"response_format": {"type": "json_schema", "json_schema": named}}

    def called(self, raw: Json, result: str) -> list[Json]:
        message = raw["choices"][0]["message"]
        call_id = message["tool_calls"][0]["id"]
        return [message, {"role": "tool", "tool_call_id": call_id, "content": result}]

    def read(self, raw: Json) -> Found:
        ChatCompletion.model_validate(raw, strict=True)
        (choice,), message = raw["choices"], raw["choices"][0]["message"]
        calls = [call["function"] for call in message.get("tool_calls", ())]
        assert len({call["id"] for call in message.get("tool_calls", ())}) == len(calls)
        return Found(
            message["content"] or "", message.get("reasoning_content", ""),
            [(call["name"], _arguments(call["arguments"])) for call in calls],
            _REASONS[choice["finish_reason"]], _logprobs((choice["logprobs"] or {}).get("content")),
            **self.usage(raw["usage"]),
        )  # fmt: skip

    def read_stream(self, text: str) -> Found:
        for event in events_of(text):
            ChatCompletionChunk.model_validate(event, strict=True)
        choices, usage = self.chunks(text)
        assert choices[0]["delta"] == {"role": "assistant", "content": ""}
        found, calls = Found(**usage), {}
        for choice in choices:
            delta = choice["delta"]
            found.text += delta.get("content") or ""
            found.reasoning += delta.get("reasoning_content", "")
            found.logprobs += _logprobs((choice["logprobs"] or {}).get("content"))
            for call in delta.get("tool_calls", ()):
                assert (call["index"] in calls) == ("type" not in call) == ("id" not in call)
                name, arguments = calls.get(call["index"], ("", ""))
                function = call["function"]
                calls[call["index"]] = function.get("name", name), arguments + function["arguments"]
        found.calls = [(name, _arguments(arguments)) for name, arguments in calls.values()]
        found.reason = _REASONS[choices[-1]["finish_reason"]]
        return found


class Completions(_OpenAI):
    name, url, subject = "completions", "/v1/completions", "prompt"
    body_type, reply = CompletionBody, shapes.CompletionReply
    has_tools = chooses_tools = is_chat = False

    def expected(self, model: hotset.Model, **params: Any) -> hotset.Completion:
        return model.generate(MESSAGES[-1]["content"], **params)

    def messages(self, messages: Sequence[Json]) -> Any:
        return messages[-1]["content"]

    def form(self, schema: Json) -> Json:
        return {"json_schema": schema}

    def read(self, raw: Json) -> Found:
        Completion.model_validate(raw, strict=True)
        return self._found(raw["choices"], self.usage(raw["usage"]))

    def read_stream(self, text: str) -> Found:
        for chunk in events_of(text):  # they have the type of a whole answer, but no reason yet
            for choice in chunk["choices"]:
                choice["finish_reason"] = choice["finish_reason"] or "stop"
            Completion.model_validate(chunk, strict=True)
        return self._found(*self.chunks(text))

    def _found(self, choices: list[Json], usage: Json) -> Found:
        found = Found("".join(choice["text"] for choice in choices), **usage)
        found.logprobs = [
            one for choice in choices for one in (choice["logprobs"] or {}).get("token_logprobs", ())
        ]
        found.reason = _REASONS[choices[-1]["finish_reason"]]
        return found


class Responses(_OpenAI):
    name, url, subject = "responses", "/v1/responses", "input"
    body_type, reply = ResponsesBody, shapes.ResponseReply
    sampling: ClassVar = {
        "temperature": "temperature", "top_p": "top_p", "max_tokens": "max_output_tokens",
        "logprobs": "top_logprobs",
    }  # fmt: skip
    usage_wanted: ClassVar = {}
    usage_names = ("input_tokens", "output_tokens")
    keep_alive = "event: response.in_progress"

    def tool(self, tool: Json) -> Json:
        return {"type": "function", "strict": None, **tool["function"]}

    def choice(self, choice: str, single: bool) -> Json:
        named = {"type": "function", "name": choice}
        return {"tool_choice": _CHOICES.get(choice, named), "parallel_tool_calls": not single}

    def form(self, schema: Json) -> Json:
        return {"text": {"format": {"type": "json_schema", "name": "answer", "schema": schema}}}

    def called(self, raw: Json, result: str) -> list[Json]:
        call_id = raw["output"][-1]["call_id"]
        return [*raw["output"], {"type": "function_call_output", "call_id": call_id, "output": result}]

    def read(self, raw: Json) -> Found:
        found = Found(**self.usage(raw["usage"]))
        for item in raw["output"]:
            match item["type"]:
                case "function_call":
                    found.calls.append((item["name"], json.loads(item["arguments"])))
                case "reasoning":
                    found.reasoning += item["content"][0]["text"]
                case "message":
                    found.text += item["content"][0]["text"]
                    found.logprobs += _logprobs(item["content"][0]["logprobs"])
        assert Response.model_validate(raw, strict=True).output_text == found.text
        found.reason = "length" if raw["status"] == "incomplete" else "calls" if found.calls else "stop"
        return found

    def read_stream(self, text: str) -> Found:
        events = events_of(text)
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        deltas: dict[str, list[Json]] = {}
        for event in events:
            _RESPONSE_EVENT.validate_python(event, strict=True)
            if "delta" in event:
                deltas.setdefault(event["type"], []).append(event)
        found = self.read(events[-1]["response"])
        joined = {kind: "".join(event["delta"] for event in some) for kind, some in deltas.items()}
        assert joined.get("response.output_text.delta", "") == found.text
        assert joined.get("response.reasoning_text.delta", "") == found.reasoning
        logprobs = [
            one for event in deltas.get("response.output_text.delta", ()) for one in event["logprobs"]
        ]
        assert _logprobs(logprobs) == found.logprobs
        done = [event for event in events if event["type"] == "response.function_call_arguments.done"]
        assert [(one["name"], json.loads(one["arguments"])) for one in done] == found.calls
        pieces = dict.fromkeys((one["item_id"] for one in done), "")
        for event in deltas.get("response.function_call_arguments.delta", ()):
            pieces[event["item_id"]] += event["delta"]
        assert [one["arguments"] for one in done] == list(pieces.values())
        return found

    def failure(self, text: str) -> str:
        last = events_of(text)[-1]
        assert last["type"] == "response.failed"
        assert last["response"]["status"] == "failed"
        return str(last["response"]["error"]["message"])


class Messages(ApiSchema):
    name, url = "messages", "/v1/messages"
    body_type, reply, error_reply = MessagesBody, shapes.MessageReply, shapes.AnthropicErrorReply
    has_logprobs = False
    keep_alive = "event: ping"
    sampling: ClassVar = {
        "temperature": "temperature", "top_p": "top_p", "top_k": "top_k", "stop": "stop_sequences",
        "max_tokens": "max_tokens",
    }  # fmt: skip

    def sampled(self, params: Json) -> Json:
        return {"max_tokens": 200} | params

    def tool(self, tool: Json) -> Json:
        function = dict(tool["function"])
        return {"input_schema": function.pop("parameters"), **function}

    def choice(self, choice: str, single: bool) -> Json:
        chosen = {"type": choice} if choice in _CHOICES else {"type": "tool", "name": choice}
        return {"tool_choice": chosen | {"disable_parallel_tool_use": single}}

    def form(self, schema: Json) -> Json:
        return {"output_config": {"format": {"type": "json_schema", "schema": schema}}}

    def called(self, raw: Json, result: str) -> list[Json]:
        block = {"type": "tool_result", "tool_use_id": raw["content"][-1]["id"], "content": result}
        return [{"role": "assistant", "content": raw["content"]}, {"role": "user", "content": [block]}]

    def read(self, raw: Json) -> Found:
        anthropic_types.Message.model_validate(raw, strict=True)
        found = Found()
        for block in raw["content"]:
            match block["type"]:
                case "tool_use":
                    found.calls.append((block["name"], block["input"]))
                case "thinking":
                    found.reasoning += block["thinking"]
                case "text":
                    found.text += block["text"]
        return self._end(found, raw, raw["usage"])

    def read_stream(self, text: str) -> Found:
        events = [event for event in events_of(text) if event["type"] != "ping"]
        for event in events:
            _MESSAGE_EVENT.validate_python(event, strict=True)
        assert (events[0]["type"], events[-1]["type"]) == ("message_start", "message_stop")
        blocks: list[list[str]] = []  # type, name, content
        for event in events:
            if event["type"] == "content_block_start":
                blocks.append([event["content_block"]["type"], event["content_block"].get("name", ""), ""])
            elif event["type"] == "content_block_delta":
                assert event["index"] == len(blocks) - 1
                (blocks[-1][2],) = [
                    blocks[-1][2] + delta for key, delta in event["delta"].items() if key != "type"
                ]
        found = Found(
            "".join(said for kind, _, said in blocks if kind == "text"),
            "".join(said for kind, _, said in blocks if kind == "thinking"),
            [(name, json.loads(said or "{}")) for kind, name, said in blocks if kind == "tool_use"],
        )
        return self._end(found, events[-2]["delta"], events[-2]["usage"])

    def _end(self, found: Found, stop: Json, usage: Json) -> Found:
        found.reason = _REASONS[stop["stop_reason"]]
        assert (stop["stop_sequence"] is not None) == (stop["stop_reason"] == "stop_sequence")
        found.cached = usage["cache_read_input_tokens"]
        found.prompt_tokens = usage["input_tokens"] + usage["cache_read_input_tokens"]
        found.tokens = usage["output_tokens"]
        found.reasoning_tokens = usage["output_tokens_details"]["thinking_tokens"]
        return found


class OllamaChat(ApiSchema):
    name, url = "ollama-chat", "/api/chat"
    body_type, error_reply = OllamaChatBody, shapes.OllamaErrorReply
    reply: type[shapes.Shape] = shapes.OllamaChatReply
    chooses_tools = counts_cached = False
    stream_type, keep_alive = "application/x-ndjson", ""
    sampling: ClassVar = {
        "temperature": "temperature", "top_p": "top_p", "top_k": "top_k", "min_p": "min_p",
        "repetition_penalty": "repeat_penalty", "penalty_last_n": "repeat_last_n",
        "frequency_penalty": "frequency_penalty", "presence_penalty": "presence_penalty", "seed": "seed",
        "stop": "stop", "max_tokens": "num_predict", "logprobs": "logprobs", "typical_p": "typical_p",
        "mirostat": "mirostat", "mirostat_tau": "mirostat_tau", "mirostat_eta": "mirostat_eta",
    }  # fmt: skip

    def sampled(self, params: Json) -> Json:
        n = params.pop("logprobs", None)
        options = {"options": params}
        return options if n is None else options | {"logprobs": True, "top_logprobs": n}

    def form(self, schema: Json) -> Json:
        return {"format": schema}

    def called(self, raw: Json, result: str) -> list[Json]:
        name = raw["message"]["tool_calls"][0]["function"]["name"]
        return [raw["message"], {"role": "tool", "tool_name": name, "content": result}]

    def read(self, raw: Json) -> Found:
        return self._found([raw])

    def read_stream(self, text: str) -> Found:
        return self._found([json.loads(line) for line in text.splitlines()])

    def _found(self, lines: list[Json]) -> Found:
        assert [line["done"] for line in lines] == [False] * (len(lines) - 1) + [True]
        found, last, indices = Found(), lines[-1], []
        for line in lines:
            message = line["message"] if self.is_chat else line | {"content": line["response"]}
            found.text += message["content"]
            found.reasoning += message.get("thinking", "")
            functions = [call["function"] for call in message.get("tool_calls", ())]
            found.calls += [(one["name"], one["arguments"]) for one in functions]
            found.logprobs += _logprobs(line.get("logprobs"))
            indices += [one["index"] for one in functions]
        assert indices == list(range(len(indices)))
        found.reason = "calls" if found.calls else _REASONS[last["done_reason"]]
        found.prompt_tokens, found.tokens = last["prompt_eval_count"], last["eval_count"]
        assert last["prompt_eval_duration"] + last["eval_duration"] <= last["total_duration"]
        return found

    def failure(self, text: str) -> str:
        return self.message(json.loads(text.splitlines()[-1]))


class OllamaGenerate(OllamaChat):
    """Ollama's generate schema, whose prompt is a user's message."""

    name, url, subject = "ollama-generate", "/api/generate", "prompt"
    body_type, reply = OllamaGenerateBody, shapes.OllamaGenerateReply
    has_tools = is_chat = False

    def messages(self, messages: Sequence[Json]) -> Any:
        return messages[-1]["content"]


_REASONS = {
    "stop": "stop", "end_turn": "stop", "stop_sequence": "stop", "length": "length", "max_tokens": "length",
    "model_context_window_exceeded": "length", "tool_calls": "calls", "tool_use": "calls",
}  # fmt: skip


def _arguments(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _logprobs(entries: list[Json] | None) -> list[float]:
    return [entry["logprob"] for entry in entries or ()]


SCHEMAS: tuple[ApiSchema, ...] = (
    Chat(), Completions(), Responses(), Messages(), OllamaChat(), OllamaGenerate(),
)  # fmt: skip
