"""POST /v1/chat/completions."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from functools import cached_property
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request, Response
from pydantic import AfterValidator, BeforeValidator, Field, WithJsonSchema

from hotset.engine.sampler import TokenLogprobs
from hotset.server import shapes
from hotset.server.activity import ActivityWatch
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
)
from hotset.server.body import BodyRoute
from hotset.server.client_tools import TextFormat, custom_tool
from hotset.server.errors import UnreadableError
from hotset.server.fields import NO_DEFAULTS, TRUNCATION
from hotset.server.logprobs import spelled
from hotset.server.openai.client_calls import CustomCalls, CustomInput, custom_input
from hotset.server.openai.schema import Logprobs, SamplingFields, logprobs_of, usage_dict
from hotset.server.replies import DONE, TextEvents, event
from hotset.server.rows import Body, ByType, Flag, Row, having, integer
from hotset.server.service import Service
from hotset.server.shapes import EVENT_STREAM, documented
from hotset.server.streams import off_loop, serving, streamed, whole
from hotset.server.tool_fields import (
    MAX_TOOLS,
    AnyToolChoice,
    Function,
    OtherTool,
    ToolChoice,
    ToolName,
    chosen,
)
from hotset.server.turns import ROLES, turn_of
from hotset.text.image_text import DETAILS
from hotset.text.messages import Opening
from hotset.text.parts import ToolCall

router = APIRouter(route_class=BodyRoute)


class FunctionName(Body):
    name: str


class Tool(Body):
    type: Literal["function"] = "function"
    function: Function

    def turn(self) -> dict[str, Any]:
        """Return the tool as chat templates have it."""
        return self.function.turn()


class TextToolDetails(Body):
    """A tool that takes any text. format: a grammar of the text."""

    name: ToolName
    description: str | None = None
    format: TextFormat | None = None


class TextTool(Body):
    type: Literal["custom"]
    custom: TextToolDetails

    def turn(self) -> dict[str, Any]:
        """Return the tool as chat templates have it."""
        return custom_tool(self.custom.name, self.custom.description, self.custom.format).turn()


AnyTool = Annotated[Tool | TextTool | OtherTool, ByType("function")]


# The OpenAPI document's schema of a message. The parser (text/messages.py) is more exact about errors, and a
# chat template may need more fields.
_TEXT_PART = {
    "type": "object",
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
    "required": ["type", "text"],
}
_IMAGE_PART = {
    "type": "object",
    "properties": {
        "type": {"const": "image_url"},
        "image_url": {
            "type": "object",
            "properties": {"url": {"type": "string"}, "detail": {"enum": list(DETAILS)}},
            "required": ["url"],
        },
    },
    "required": ["type", "image_url"],
}
_PARTS = {"type": "array", "items": {"anyOf": [_TEXT_PART, _IMAGE_PART]}}
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
            "anyOf": [{"type": "string"}, _PARTS, {"type": "null"}],
            "description": "May be left out with tool_calls.",
        },
        "reasoning_content": {"type": ["string", "null"]},
        "name": {"type": ["string", "null"]},
        "tool_calls": {"anyOf": [{"type": "array", "items": _CALL}, {"type": "null"}]},
        "tool_call_id": {"type": ["string", "null"]},
    },
    "required": ["role"],
    "additionalProperties": True,
}


Message = Annotated[dict[str, Any], AfterValidator(turn_of), WithJsonSchema(_MESSAGE)]


def _modality(given: Any) -> Any:
    if given in ("audio", "image"):
        raise UnreadableError(f"{given} cannot be written")
    return given


@having(
    Row("logprobs", "Logprobs of the tokens, or how many of the likeliest.", Logprobs, use="route"),
    Row("top_logprobs", "Logprobs of this number of likeliest tokens.", integer(0, 20), use="route"),
    Row("parallel_tool_calls", "False ends the answer with its first call.", Flag, use="request"),
    Row("best_of", "hotset returns each answer that it makes", use="ignored", neutral=(1,)),
    TRUNCATION,
)
class ChatBody(SamplingFields):
    """The body of a chat, as OpenAI has it. functions, function_call: the older form of tools."""

    messages: Annotated[list[Message], Field(min_length=1)]
    modalities: list[Annotated[str, BeforeValidator(_modality)]] | None = None
    tools: Annotated[list[AnyTool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: AnyToolChoice | None = None
    functions: Annotated[list[Function], Field(max_length=MAX_TOOLS)] | None = None
    function_call: str | FunctionName | None = None
    add_generation_prompt: Flag | None = None
    continue_final_message: Flag | None = None

    @cached_property
    def n_top(self) -> int | None:
        """Return the number of logprobs next to each token, or None."""
        return logprobs_of(self.given("logprobs"), self.given("top_logprobs"))

    def request(self, defaults: Mapping[str, Any] = NO_DEFAULTS) -> AnswerRequest:
        """Return the request. Raises InvalidRequestError."""
        tools = [one.turn() for one in self.tools or () if isinstance(one, Tool | TextTool)]
        choice: AnyToolChoice | None = self.tool_choice
        if not tools and self.functions:
            tools = [one.turn() for one in self.functions]
            choice = self.function_call if isinstance(self.function_call, str) else None
            if isinstance(self.function_call, FunctionName):
                choice = ToolChoice(type="function", name=self.function_call.name)
        use = chosen(choice, tools)
        settings = self.all_settings("request")
        if self.is_legacy:
            settings["parallel_tool_calls"] = False
        return AnswerRequest(
            messages=self.messages,
            opening=Opening(self.add_generation_prompt, self.continue_final_message),
            tools=use.tools,
            tool_choice=use.value,
            template=self.template_variables,
            thinking=self.thinking_settings,
            params=self.sampling(defaults, self.n_top),
            stream=bool(self.given("stream")),
            **settings,
        )

    @property
    def custom_names(self) -> frozenset[str]:
        """Return the names of the tools that take any text."""
        return frozenset(one.custom.name for one in self.tools or () if isinstance(one, TextTool))

    @property
    def is_legacy(self) -> bool:
        """Return whether the client uses functions instead of tools."""
        return not self.tools and bool(self.functions)


@router.post("/v1/chat/completions", responses=documented(shapes.ChatReply, EVENT_STREAM))
async def chat_completions(body: ChatBody, http: Request) -> Response:
    service = await serving(http, body.model, takes_adapter=True)
    request, reply = await off_loop(http, body.request, service.sampling), _ChatReply(service, body)
    if request.stream:
        return await streamed(http, request, reply.events)
    return await whole(http, request, reply.body)


class _ChatReply:
    """One answer in OpenAI's JSON."""

    def __init__(self, service: Service, body: ChatBody) -> None:
        self.id = f"chatcmpl-{uuid.uuid4().hex}"
        self._service, self._body = service, body
        self._tokenizer, self._custom = service.model.tokenizer, body.custom_names

    def body(self, answer: Answer, choices: Sequence[FinishedAnswer]) -> dict[str, Any]:
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
        calls = CustomCalls(self._custom)
        async for delta in answer:
            if watch is not None:
                more["hotset"] = {"activity": await self._service.in_thread(watch.new, delta.index)}
            for one in calls.push(delta):
                if isinstance(one, TextDelta) and watch is None and self._body.n_top is None:
                    yield texts[one.index](one.text)
                    continue
                reason = self._reason(one.reason) if isinstance(one, Finished) else None
                logprobs = self._logprobs(one.logprobs) if one.logprobs else None
                yield chunk(one.index, self._piece(one), reason, logprobs)
        if self._body.includes_usage:
            yield event(head | {"choices": [], "usage": usage_dict(answer.usage)})
        yield DONE

    def _piece(self, one: Delta) -> dict[str, Any]:
        """Return a piece of the message."""
        match one:
            case TextDelta():
                return {"content": one.text}
            case ReasoningDelta():
                return {"reasoning_content": one.text}
            case CustomInput():
                return self._called([{"index": one.call, "custom": {"input": one.text}}])
            case ToolCallStart():
                return self._called([{"index": one.call} | self._call(ToolCall(one.id, one.name))])
            case ToolCallArguments():
                return self._called([{"index": one.call, "function": {"arguments": one.text}}])
        return {}

    def _call(self, call: ToolCall) -> dict[str, Any]:
        if call.name in self._custom:
            custom = shapes.CustomCall.written(name=call.name, input=custom_input(call.arguments))
            return shapes.ChatCustomCall.written(id=call.id, custom=custom)
        function = shapes.CalledFunction.written(name=call.name, arguments=call.arguments)
        return shapes.ChatToolCall.written(id=call.id, function=function)

    def _head(self, answer: Answer, **kind: str) -> dict[str, Any]:
        return {"id": self.id, **kind, "created": answer.created, "model": self._service.name}

    def _choice(self, choice: FinishedAnswer) -> dict[str, Any]:
        message = shapes.ChatReplyMessage.written(content=choice.text)
        if choice.reasoning:
            message["reasoning_content"] = choice.reasoning
        if choice.tool_calls:
            message["content"] = choice.text or None
            message |= self._called([self._call(call) for call in choice.tool_calls])
        return shapes.ChatChoice.written(
            index=choice.index,
            message=message,
            logprobs=self._logprobs(choice.all_logprobs),
            finish_reason=self._reason(choice.reason),
        )

    def _called(self, calls: list[dict[str, Any]]) -> dict[str, Any]:
        """Return calls, or pieces of them, in the form that the client uses."""
        return {"function_call": calls[0]["function"]} if self._body.is_legacy else {"tool_calls": calls}

    def _reason(self, reason: str) -> str:
        return "function_call" if reason == "tool_calls" and self._body.is_legacy else reason

    def _logprobs(self, logprobs: list[TokenLogprobs]) -> dict[str, Any] | None:
        n_top = self._body.n_top
        if n_top is None:
            return None
        return shapes.ChatLogprobs.written(content=[spelled(self._tokenizer, one, n_top) for one in logprobs])
