"""Anthropic's API schema: /v1/messages and /v1/messages/count_tokens.

Only a translation: a body becomes an AnswerRequest, and the deltas of an answer become content blocks and
their events. A field that is not declared is refused by its name.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import AsyncIterator, Mapping
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request, Response
from pydantic import BeforeValidator, Field, model_validator

from hotset.errors import InvalidRequestError
from hotset.parameters import shown
from hotset.server import shapes
from hotset.server.answers import (
    Answer,
    AnswerRequest,
    Choice,
    Delta,
    Finished,
    ReasoningDelta,
    TextDelta,
    ToolCallArguments,
    ToolCallStart,
    Usage,
    arguments_object,
)
from hotset.server.body import BodyRoute
from hotset.server.modalities import check_part
from hotset.server.openai.schema import (
    MAX_TOOLS,
    NO_DEFAULTS,
    Body,
    Share,
    Temperature,
    ToolName,
    sampled,
)
from hotset.server.replies import event
from hotset.server.shapes import EVENT_STREAM, documented, errors
from hotset.server.streams import in_turn, off_loop, serving, streamed, whole
from hotset.server.turns import Turn, add, tool_call

router = APIRouter(route_class=BodyRoute, responses=errors(shapes.AnthropicErrorReply))

Event = dict[str, Any]

PING = event({"type": "ping"}, "ping")
_BILLING = re.compile(r"\A(?:x-anthropic-billing-header:[^\n]*(?:\n|\Z))+")

# ---- what a client sends ----


class CacheControl(Body):
    """Accepted and not needed: what a prompt shares with an earlier one is found again by itself."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None


class TextBlock(Body):
    type: Literal["text"]
    text: str
    cache_control: CacheControl | None = None
    citations: Annotated[list[Any], Field(max_length=0)] | None = None  # as an answer has them: none


class ThinkingBlock(Body):
    type: Literal["thinking"]
    thinking: str
    signature: str = ""


class DirectCaller(Body):
    """The model itself, not a program that it wrote."""

    type: Literal["direct"]


class ToolUseBlock(Body):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]
    cache_control: CacheControl | None = None
    caller: DirectCaller | None = None  # as an answer has them
    toolset_name: None = None


class ToolResultBlock(Body):
    type: Literal["tool_result"]
    tool_use_id: str
    content: str | list[Annotated[TextBlock, BeforeValidator(check_part)]] = ""
    is_error: bool = False
    cache_control: CacheControl | None = None


Block = Annotated[
    Annotated[TextBlock | ThinkingBlock | ToolUseBlock | ToolResultBlock, Field(discriminator="type")],
    BeforeValidator(check_part),
]


class AnthropicMessage(Body):
    role: Literal["user", "assistant", "system"]
    content: str | list[Block]


class AnthropicTool(Body):
    type: Literal["custom"] | None = None
    name: ToolName
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None
    cache_control: CacheControl | None = None
    # Without effect: arguments always come as they are written, and every tool is in the prompt.
    eager_input_streaming: bool | None = None
    defer_loading: Literal[False] | None = None
    allowed_callers: list[Literal["direct"]] | None = None


class AnthropicToolChoice(Body):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool = False

    @model_validator(mode="after")
    def _names_a_tool(self) -> AnthropicToolChoice:
        if (self.type == "tool") != (self.name is not None):
            raise ValueError('name says which tool, and belongs to the type "tool" alone')
        return self


class Thinking(Body):
    """Whether to think; the model decides how long, whatever the budget. display: "omitted" leaves it out of
    the answer, and anything else gives it whole."""

    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: Annotated[int, Field(ge=1)] | None = None
    display: Literal["summarized", "omitted"] | None = None

    @model_validator(mode="after")
    def _has_a_budget(self) -> Thinking:
        if (self.type == "enabled") != (self.budget_tokens is not None):
            raise ValueError('budget_tokens belongs to the type "enabled", which needs it')
        return self


class OutputFormat(Body):
    type: Literal["json_schema"]
    schema_: Annotated[dict[str, Any], Field(alias="schema")]


class OutputConfig(Body):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class Metadata(Body):
    user_id: str | None = None


class ContextManagement(Body):
    """What to take out of a conversation as it grows. Nothing is: one that does not fit is refused."""

    edits: list[dict[str, Any]] | None = None


class PromptBody(Body):
    """What a prompt is made of: all that count_tokens needs."""

    model: str
    messages: Annotated[list[AnthropicMessage], Field(min_length=1)]
    system: str | list[TextBlock] | None = None
    tools: Annotated[list[AnthropicTool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: AnthropicToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    cache_control: CacheControl | None = None
    context_management: ContextManagement | None = None
    mcp_servers: Annotated[list[Any], Field(max_length=0)] | None = None


class MessagesBody(PromptBody):
    """Anthropic's body, less what this server does not have."""

    max_tokens: Annotated[int, Field(ge=1)]
    stop_sequences: list[Annotated[str, Field(min_length=1)]] | None = None
    stream: bool | None = None
    temperature: Temperature | None = None
    top_p: Share | None = None
    top_k: Annotated[int, Field(ge=0)] | None = None
    # For a provider's statistics, prices and places: no answer depends on it.
    metadata: Metadata | None = None
    service_tier: Literal["auto", "standard_only"] | None = None
    inference_geo: str | None = None
    speed: Literal["standard", "fast"] | None = None
    user_profile_id: str | None = None
    workspace_id: str | None = None


# ---- from a body to a request ----


def conversation(system: str | list[TextBlock] | None, messages: list[AnthropicMessage]) -> list[Turn]:
    """The turns of a conversation. Blocks of text are lines of one text, and turns of one role that follow
    each other are one turn. What a tool returned is a turn of its own, under the name that its call had."""
    turns: list[Turn] = []
    if system and (text := _without_billing(system)):
        turns.append({"role": "system", "content": text})
    names: dict[str, str] = {}  # of the functions, by the ids of their calls
    for i, message in enumerate(messages):
        if isinstance(message.content, str) or not message.content:
            add(turns, {"role": message.role, "content": message.content or ""})
            continue
        for block in message.content:
            try:
                turn = _turn(message.role, block, names)
            except InvalidRequestError as error:
                raise InvalidRequestError(f"message {i}: {error}") from None
            if turn["role"] == "tool":
                turns.append(turn)
            else:
                add(turns, turn)
    return turns


def _turn(role: str, block: Block, names: dict[str, str]) -> Turn:
    """What one block of a message says."""
    match block:
        case TextBlock():
            return {"role": role, "content": block.text}
        case ToolResultBlock() if role == "user":
            if block.tool_use_id not in names:
                raise InvalidRequestError(
                    f"there is no tool_use with the id {shown(block.tool_use_id)} before its tool_result"
                )
            text = _joined(block.content)
            return {
                "role": "tool",
                "tool_call_id": block.tool_use_id,
                "name": names[block.tool_use_id],
                "content": f"Error: {text}" if block.is_error else text,  # templates cannot say it otherwise
            }
        case ThinkingBlock() if role == "assistant":
            return {"role": role, "reasoning_content": block.thinking}
        case ToolUseBlock() if role == "assistant":
            names[block.id] = block.name
            arguments = json.dumps(block.input, ensure_ascii=False)
            return {"role": role, "tool_calls": [tool_call(block.id, block.name, arguments)]}
    raise InvalidRequestError(f"a block of type {block.type} cannot stand in a message of the {role}")


def _without_billing(system: str | list[TextBlock]) -> str:
    """Return the text of a system prompt without Claude Code's billing lines.

    They differ in each request, so that no prompt would begin like an earlier one in the prefix cache.
    """
    texts = [system] if isinstance(system, str) else [block.text for block in system]
    kept = (_BILLING.sub("", text) for text in texts)
    return "\n".join(text for text, before in zip(kept, texts, strict=True) if text or not before)


def _joined(content: str | list[TextBlock]) -> str:
    return content if isinstance(content, str) else "\n".join(block.text for block in content)


def answer_request(body: MessagesBody, defaults: Mapping[str, Any] = NO_DEFAULTS) -> AnswerRequest:
    """Raises InvalidRequestError for what is wrong with it."""
    given: dict[str, Any] = {
        "temperature": body.temperature,
        "top_p": body.top_p,
        "top_k": body.top_k,
        "stop": body.stop_sequences,
        "max_tokens": body.max_tokens,
        "json_schema": body.output_config and body.output_config.format and body.output_config.format.schema_,
    }
    return AnswerRequest(
        messages=conversation(body.system, body.messages),
        tools=_tools(body),
        tool_choice=_tool_choice(body.tool_choice),
        parallel_tool_calls=body.tool_choice is None or not body.tool_choice.disable_parallel_tool_use,
        template=_template(body),
        params=sampled(given, defaults),
        stream=bool(body.stream),
    )


def _tools(body: PromptBody) -> list[dict[str, Any]]:
    tools = []
    for tool in body.tools or ():
        more = {"description": tool.description, "strict": tool.strict}
        given = {key: value for key, value in more.items() if value is not None}
        function = {"name": tool.name, **given, "parameters": tool.input_schema}
        tools.append({"type": "function", "function": function})
    return tools


def _tool_choice(choice: AnthropicToolChoice | None) -> str | Mapping[str, str]:
    if choice is None:
        return "auto"
    if choice.name is not None:
        return {"name": choice.name}
    return {"auto": "auto", "any": "required", "none": "none"}[choice.type]


def _template(body: PromptBody) -> dict[str, Any]:
    variables: dict[str, Any] = {}
    if body.output_config is not None and body.output_config.effort is not None:
        variables["reasoning_effort"] = body.output_config.effort
    if body.thinking is not None:
        variables["enable_thinking"] = body.thinking.type != "disabled"
    return variables


# ---- from deltas to a message ----


class MessageWriter:
    """The message of an answer as it grows, and the events that a client gets.

    omits_thinking: leaves out what the model thinks. manages_context: the request asked for edits of the
    conversation, and the message says that there were none.
    """

    def __init__(
        self, model: str, max_tokens: int, *, omits_thinking: bool = False, manages_context: bool = False
    ) -> None:
        self._max_tokens = max_tokens
        self._omits_thinking = omits_thinking
        self._edits = {"context_management": shapes.AppliedEdits.written()} if manages_context else {}
        self._arguments = ""  # of the call that is being written
        self._finished: Finished | None = None
        self._blocks: list[dict[str, Any]] = []
        self.message = shapes.MessageReply.written(
            id=f"msg_{uuid.uuid4().hex}",
            model=model,
            content=self._blocks,
            stop_reason=None,
            stop_sequence=None,
        )

    async def events(self, answer: Answer) -> AsyncIterator[bytes]:
        """The stream of an answer."""
        for one in self.start(answer.usage):
            yield event(one, one["type"])
        async for delta in answer:
            for one in self.push(delta):
                yield event(one, one["type"])
        for one in self.end(answer.usage):
            yield event(one, one["type"])

    def whole(self, choice: Choice, usage: Usage) -> dict[str, Any]:
        """The message of a finished answer."""
        for delta in choice.deltas():
            self.push(delta)
        self.end(usage)
        return self.message

    def start(self, usage: Usage) -> list[Event]:
        """usage: as far as it is known yet."""
        head = self.message | {"content": [], "usage": _usage(usage)}
        return [{"type": "message_start", "message": head}, {"type": "ping"}]

    def push(self, delta: Delta) -> list[Event]:
        match delta:
            case TextDelta(text=text) if text:
                events = self._open(shapes.TextReplyBlock.written(text=""))
                self._blocks[-1]["text"] += text
                return [*events, self._event({"type": "text_delta", "text": text})]
            case ReasoningDelta(text=text) if text and not self._omits_thinking:
                events = self._open(shapes.ThinkingReplyBlock.written(thinking=""))
                self._blocks[-1]["thinking"] += text
                return [*events, self._event({"type": "thinking_delta", "thinking": text})]
            case ToolCallStart():
                return self._open(shapes.ToolUseReplyBlock.written(id=delta.id, name=delta.name, input={}))
            case ToolCallArguments(text=text) if text:
                self._arguments += text
                return [self._event({"type": "input_json_delta", "partial_json": text})]
            case Finished():
                self._finished = delta
        return []

    def end(self, usage: Usage) -> list[Event]:
        """usage: of the whole answer."""
        events = self._close()
        stop, counts = self._stop(usage), _usage(usage)
        self.message |= {**stop, "usage": counts, **self._edits}
        change = {
            "type": "message_delta",
            "delta": {**stop, "container": None},
            "usage": counts,
            **self._edits,
        }
        return [*events, change, {"type": "message_stop"}]

    def _event(self, delta: dict[str, Any]) -> Event:
        return {"type": "content_block_delta", "index": len(self._blocks) - 1, "delta": delta}

    def _open(self, block: dict[str, Any]) -> list[Event]:
        """Begins this block, unless the last one goes on: text and thinking do."""
        if self._blocks and self._blocks[-1]["type"] == block["type"] != "tool_use":
            return []
        events = self._close()
        self._blocks.append(block)
        start = {"type": "content_block_start", "index": len(self._blocks) - 1, "content_block": dict(block)}
        return [*events, start]

    def _close(self) -> list[Event]:
        if not self._blocks:
            return []
        if self._blocks[-1]["type"] == "tool_use":
            self._blocks[-1]["input"] = arguments_object(self._arguments)
            self._arguments = ""
        return [{"type": "content_block_stop", "index": len(self._blocks) - 1}]

    def _stop(self, usage: Usage) -> dict[str, str | None]:
        """Why the answer ended."""
        finished = self._finished
        assert finished is not None
        reason = {"stop": "end_turn", "tool_calls": "tool_use", "length": "max_tokens"}[finished.reason]
        if finished.stop is not None:
            reason = "stop_sequence"
        elif finished.reason == "length" and usage.completion_tokens < self._max_tokens:
            reason = "model_context_window_exceeded"
        return {"stop_reason": reason, "stop_sequence": finished.stop, "stop_details": None}


def _usage(usage: Usage) -> dict[str, Any]:
    """`input_tokens` are those that were not in the cache."""
    return shapes.MessageUsage.written(
        input_tokens=usage.prompt_tokens - usage.cached_tokens,
        cache_read_input_tokens=usage.cached_tokens,
        output_tokens=usage.completion_tokens,
        output_tokens_details=shapes.ThinkingDetails.written(thinking_tokens=usage.reasoning_tokens),
    )


# ---- the routes ----


@router.post("/v1/messages", responses=documented(shapes.MessageReply, EVENT_STREAM))
async def messages(body: MessagesBody, http: Request) -> Response:
    service = await serving(http, body.model, takes_adapter=True)
    request = await off_loop(http, answer_request, body, service.sampling)
    writer = MessageWriter(
        service.name,
        body.max_tokens,
        omits_thinking=body.thinking is not None and body.thinking.display == "omitted",
        manages_context=body.context_management is not None,
    )
    if request.stream:
        return await streamed(http, request, writer.events, lambda: PING)
    return await whole(http, request, lambda answer, choices: writer.whole(choices[0], answer.usage))


@router.post("/v1/messages/count_tokens")
async def count_tokens(body: PromptBody, http: Request) -> shapes.TokenCount:
    service = await serving(http, body.model, takes_adapter=True)
    model = service.model

    def counted() -> int:
        turns, tools = conversation(body.system, body.messages), _tools(body)
        return len(model.encode_chat(turns, tools or None, variables=_template(body)))

    return shapes.TokenCount(input_tokens=await in_turn(http, counted))
