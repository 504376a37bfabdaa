"""POST /v1/chat/completions."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request, Response
from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, WithJsonSchema

from hotset.engine.sampler import TokenLogprobs
from hotset.parameters import shown
from hotset.server import shapes
from hotset.server.activity import ActivityWatch
from hotset.server.answers import (
    Answer,
    AnswerRequest,
    Choice,
    Finished,
    ReasoningDelta,
    TextDelta,
    ToolCallArguments,
    ToolCallStart,
)
from hotset.server.body import BodyRoute
from hotset.server.errors import RequestError, UnreadableError
from hotset.server.logprobs import spelled
from hotset.server.modalities import check_part
from hotset.server.openai.schema import (
    MAX_TOOLS,
    NO_DEFAULTS,
    Body,
    SamplingFields,
    StreamOptions,
    ToolName,
    Verbosity,
    usage_dict,
    verbosity,
)
from hotset.server.replies import DONE, TextEvents, event
from hotset.server.service import Service
from hotset.server.shapes import EVENT_STREAM, documented
from hotset.server.streams import off_loop, serving, streamed, whole
from hotset.text.messages import Opening
from hotset.text.parts import ToolCall

router = APIRouter(route_class=BodyRoute)


class TextFormat(Body):
    type: Literal["text"]


class JsonObjectFormat(Body):
    type: Literal["json_object"]


class NamedSchema(Body):
    """strict: answers follow the schema whatever it says."""

    model_config = ConfigDict(populate_by_name=True)

    name: str
    description: str | None = None
    json_schema: Annotated[dict[str, Any], Field(alias="schema")]
    strict: bool | None = None


class JsonSchemaFormat(Body):
    type: Literal["json_schema"]
    json_schema: NamedSchema


ResponseFormat = Annotated[TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")]


class Function(Body):
    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Body):
    type: Literal["function"]
    function: Function


class FunctionName(Body):
    name: str


class NamedTool(Body):
    type: Literal["function"]
    function: FunctionName


class ChatStreamOptions(StreamOptions):
    """include_activity: chunks tell what happened inside for each token (server/activity.py)."""

    include_activity: bool = False


ROLES = ("system", "developer", "user", "assistant", "tool")


def _checked(message: dict[str, Any]) -> dict[str, Any]:
    """A message whose role is one of the schema's, with parts that can be read.

    "developer" is OpenAI's newer name for "system", which is the one that chat templates know.
    """
    role = message.get("role")
    if role not in ROLES:
        raise ValueError(f"the role must be one of {', '.join(ROLES)}, not {shown(role)}")
    content = message.get("content")
    for part in content if isinstance(content, list) else ():
        check_part(part)
    return {**message, "role": "system"} if role == "developer" else message


# What a message is for the document. The parser says more exactly what is wrong with one
# (generation.py, text/messages.py), and a template may want more of it than is here.
_TEXT_PART = {
    "type": "object",
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
    "required": ["type", "text"],
}
_CALL = {
    "type": "object",
    "properties": {
        "id": {"type": "string"},
        "type": {"const": "function"},
        "function": {
            "type": "object",
            "properties": {"name": {"type": "string"}, "arguments": {"type": ["string", "object"]}},
            "required": ["name"],
        },
    },
    "required": ["function"],
}
_MESSAGE = {
    "type": "object",
    "properties": {
        "role": {"enum": list(ROLES)},
        "content": {
            "anyOf": [{"type": "string"}, {"type": "array", "items": _TEXT_PART}, {"type": "null"}],
            "description": "May be left out beside tool_calls.",
        },
        "reasoning_content": {"type": ["string", "null"]},
        "name": {"type": ["string", "null"]},
        "tool_calls": {"anyOf": [{"type": "array", "items": _CALL}, {"type": "null"}]},
        "tool_call_id": {"type": ["string", "null"]},
    },
    "required": ["role"],
    "additionalProperties": True,
}


Message = Annotated[dict[str, Any], AfterValidator(_checked), WithJsonSchema(_MESSAGE)]


def _modality(given: Any) -> Any:
    if given in ("audio", "image"):
        raise UnreadableError(f"{given} cannot be written")
    return given


class ChatBody(SamplingFields):
    """OpenAI's body, less what this server does not have."""

    stream_options: ChatStreamOptions | None = None

    messages: Annotated[list[Message], Field(min_length=1)]
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    max_completion_tokens: int | None = None
    modalities: list[Annotated[Literal["text"], BeforeValidator(_modality)]] | None = None
    response_format: ResponseFormat | None = None
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    verbosity: Verbosity | None = None
    prediction: dict[str, Any] | None = None  # what the answer may be like, for a provider's speed

    @property
    def includes_activity(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_activity

    def request(self, defaults: Mapping[str, Any] = NO_DEFAULTS) -> AnswerRequest:
        """Raises what is wrong with it."""
        if self.top_logprobs and not self.logprobs:
            raise RequestError("top_logprobs needs logprobs: true", param="top_logprobs")
        logprobs = (self.top_logprobs or 0) if self.logprobs else None
        form, choice = self.response_format, self.tool_choice
        forms: dict[str, Any] = {}
        if isinstance(form, JsonObjectFormat):
            forms["json_object"] = True
        elif isinstance(form, JsonSchemaFormat):
            forms["json_schema"] = form.json_schema.json_schema
        return AnswerRequest(
            messages=self.messages,
            opening=Opening(self.add_generation_prompt, self.continue_final_message),
            tools=[tool.model_dump(exclude_none=True) for tool in self.tools or ()],
            tool_choice={"name": choice.function.name} if isinstance(choice, NamedTool) else choice or "auto",
            parallel_tool_calls=self.parallel_tool_calls is not False,
            template=self._effort() | verbosity(self.verbosity) | (self.chat_template_kwargs or {}),
            n=self.n or 1,
            params=self.sampling(defaults, logprobs=logprobs, max_tokens=self.max_completion_tokens, **forms),
            stream=bool(self.stream),
            reuse_prefix=self.cache_prompt is not False,
            id_slot=self.slot,
            adapters=self.adapters,
        )

    def _effort(self) -> dict[str, Any]:
        """What a template reads of how much is to be thought."""
        if self.reasoning_effort is None:
            return {}
        if self.reasoning_effort == "none":
            return {"enable_thinking": False}
        return {"enable_thinking": True, "reasoning_effort": self.reasoning_effort}

    def check_effort(self, template: str) -> None:
        """Raises RequestError where a model with this template takes no reasoning effort."""
        switch, levels = "enable_thinking" in template, "reasoning_effort" in template
        effort = self.reasoning_effort
        if effort is None or switch or (levels and effort != "none") or not (levels or effort != "none"):
            return
        raise RequestError(
            f"reasoning_effort {effort!r} is not supported: this model's chat template does not know it; "
            "leave it out",
            param="reasoning_effort",
            code="unsupported_parameter",
        )


@router.post("/v1/chat/completions", responses=documented(shapes.ChatReply, EVENT_STREAM))
async def chat_completions(body: ChatBody, http: Request) -> Response:
    service = await serving(http, body.model, takes_adapter=True)
    body.check_effort(service.model.chat_template.source)
    request, reply = await off_loop(http, body.request, service.sampling), _Reply(service, body)
    if request.stream:
        return await streamed(http, request, reply.events)
    return await whole(http, request, reply.body)


class _Reply:
    """One answer in OpenAI's JSON."""

    def __init__(self, service: Service, body: ChatBody) -> None:
        self.id = f"chatcmpl-{uuid.uuid4().hex}"
        self._service, self._body = service, body
        self._tokenizer = service.model.tokenizer

    def body(self, answer: Answer, choices: Sequence[Choice]) -> dict[str, Any]:
        written = [self._choice(choice) for choice in choices]
        return shapes.ChatReply.written(**self._head(answer), choices=written, usage=usage_dict(answer.usage))

    async def events(self, answer: Answer) -> AsyncIterator[bytes]:
        head = self._head(answer, object="chat.completion.chunk")
        more: dict[str, Any] = {"usage": None} if self._body.includes_usage else {}

        def written(
            index: int, delta: dict[str, Any], reason: str | None = None, logprobs: Any = None
        ) -> dict[str, Any]:
            choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
            return head | {"choices": [choice]} | more

        def chunk(*args: Any) -> bytes:
            return event(written(*args))

        texts = [TextEvents(written(i, {"content": TextEvents.HOLE})) for i in range(len(answer.generations))]
        for i in range(len(answer.generations)):
            yield chunk(i, {"role": "assistant", "content": ""})
        watch = None
        if self._body.includes_activity:
            watch = ActivityWatch(self._service.activity, answer.generations)
        async for delta in answer:
            if watch is not None:
                more["hotset"] = {"activity": await self._service.in_thread(watch.new, delta.index)}
            match delta:
                case TextDelta() if watch is None and not self._body.logprobs:
                    yield texts[delta.index](delta.text)
                case TextDelta():
                    logprobs = self._logprobs(delta.logprobs)
                    yield chunk(delta.index, {"content": delta.text}, None, logprobs)
                case ReasoningDelta():
                    yield chunk(delta.index, {"reasoning_content": delta.text})
                case ToolCallStart():
                    call = {"index": delta.call} | _call(ToolCall(delta.id, delta.name))
                    yield chunk(delta.index, {"tool_calls": [call]})
                case ToolCallArguments():
                    call = {"index": delta.call, "function": {"arguments": delta.text}}
                    yield chunk(delta.index, {"tool_calls": [call]})
                case Finished():
                    yield chunk(delta.index, {}, delta.reason)
        if self._body.includes_usage:
            yield event(head | {"choices": [], "usage": usage_dict(answer.usage)})
        yield DONE

    def _head(self, answer: Answer, **kind: str) -> dict[str, Any]:
        return {"id": self.id, **kind, "created": answer.created, "model": self._service.name}

    def _choice(self, choice: Choice) -> dict[str, Any]:
        message = shapes.ChatReplyMessage.written(content=choice.text)
        if choice.reasoning:
            message["reasoning_content"] = choice.reasoning
        if choice.tool_calls:
            message["content"] = choice.text or None
            message["tool_calls"] = [_call(call) for call in choice.tool_calls]
        return shapes.ChatChoice.written(
            index=choice.index,
            message=message,
            logprobs=self._logprobs(choice.logprobs),
            finish_reason=choice.reason,
        )

    def _logprobs(self, logprobs: list[TokenLogprobs]) -> dict[str, Any] | None:
        if not self._body.logprobs:
            return None
        n_top = self._body.top_logprobs or 0
        return shapes.ChatLogprobs.written(content=[spelled(self._tokenizer, one, n_top) for one in logprobs])


def _call(call: ToolCall) -> dict[str, Any]:
    function = shapes.CalledFunction.written(name=call.name, arguments=call.arguments)
    return shapes.ChatToolCall.written(id=call.id, function=function)
