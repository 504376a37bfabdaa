"""Anthropic's API schema: /v1/messages and /v1/messages/count_tokens.

A body becomes an AnswerRequest, and the deltas of an answer become content blocks and their events.
"""

from __future__ import annotations

import json
import math
import re
import threading
import uuid
from collections.abc import AsyncIterator, Mapping
from functools import cached_property
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request, Response
from pydantic import BeforeValidator, Field

from hotset.errors import InvalidRequestError
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
    Usage,
    arguments_object,
)
from hotset.server.body import BodyRoute
from hotset.server.client_tools import anthropic_tool
from hotset.server.fields import NO_DEFAULTS, AnswerFields, CacheControl, Level
from hotset.server.modalities import check_part, note_of
from hotset.server.remote_images import with_fetched
from hotset.server.replies import event
from hotset.server.rows import (
    MANY,
    Body,
    ByType,
    Flag,
    Row,
    Text,
    UnknownPart,
    having,
    settings_of,
)
from hotset.server.shapes import EVENT_STREAM, documented, errors
from hotset.server.streams import off_loop, serving, streamed, until_left, whole
from hotset.server.tool_fields import (
    MAX_TOOLS,
    AnyToolChoice,
    Chosen,
    Function,
    OtherTool,
    ToolChoice,
    chosen,
)
from hotset.server.turns import ROLES, Turn, add, client_image, tool_call
from hotset.text.image_text import joined

router = APIRouter(route_class=BodyRoute, responses=errors(shapes.AnthropicErrorReply))

Event = dict[str, Any]

PING = event({"type": "ping"}, "ping")
_BILLING = re.compile(r"\A(?:x-anthropic-billing-header:[^\n]*(?:\n|\Z))+")

# ---- requests ----


class _ContentBlock(Body):
    cache_control: CacheControl | None = None


class TextBlock(_ContentBlock):
    type: Literal["text"]
    text: str
    citations: list[Any] | None = None  # as an answer has them


class ThinkingBlock(_ContentBlock):
    type: Literal["thinking"]
    thinking: str
    signature: str = ""


class RedactedThinkingBlock(_ContentBlock):
    """Thinking that only its provider can read."""

    type: Literal["redacted_thinking"]
    data: Any = None


class ToolUseBlock(_ContentBlock):
    type: Literal["tool_use"]
    id: Text
    name: str
    input: dict[str, Any] | str = Field(default={})
    caller: Any = None  # as an answer has them
    toolset_name: Any = None


class Source(Body):
    """The content of a document: its text, or blocks with text."""

    type: Literal["text", "content"]
    media_type: str | None = None
    data: str | None = None
    content: str | list[TextBlock] | None = None


class DocumentBlock(_ContentBlock):
    type: Literal["document"]
    source: Source
    title: str | None = None
    context: str | None = None
    citations: Any = None


class SearchResultBlock(_ContentBlock):
    type: Literal["search_result"]
    source: str
    title: str | None = None
    content: list[TextBlock] | None = None
    citations: Any = None


class ImageBlock(_ContentBlock):
    """An image. source: its data in base64, or its address."""

    type: Literal["image"]
    source: dict[str, Any]

    @cached_property
    def text(self) -> str:
        """Return the image as a text with one image. Raises InvalidRequestError."""
        found = client_image({"type": self.type, "source": self.source})
        assert found is not None
        return found


def _noted(part: Any) -> Any:
    """Replace a part of a tool's result that no model here reads by a text block with a note."""
    note = note_of(part)
    return {"type": "text", "text": note} if note else part


ResultBlock = Annotated[
    TextBlock | ImageBlock | DocumentBlock | SearchResultBlock | UnknownPart, ByType("text")
]


class ToolResultBlock(_ContentBlock):
    type: Literal["tool_result"]
    tool_use_id: Text
    content: str | list[Annotated[ResultBlock, BeforeValidator(_noted)]] = ""
    is_error: Flag = False


Block = Annotated[
    TextBlock
    | ThinkingBlock
    | RedactedThinkingBlock
    | ToolUseBlock
    | ToolResultBlock
    | ImageBlock
    | DocumentBlock
    | SearchResultBlock
    | UnknownPart,
    ByType("text"),
    BeforeValidator(check_part),
]


class AnthropicMessage(Body):
    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[Block] = ""


class AnthropicTool(Function):
    """A function that the model may call. input_schema: of its arguments."""

    type: Literal["custom", "function"] = "custom"
    input_schema: dict[str, Any] | None = None
    cache_control: CacheControl | None = None

    def turn(self) -> dict[str, Any]:
        found = super().turn()
        found["function"]["parameters"] = self.input_schema or self.parameters or {"type": "object"}
        return found


class DatedTool(OtherTool):
    """A tool with a type that has a date, such as bash_20250124."""

    def turn(self) -> dict[str, Any] | None:
        tool = anthropic_tool(self.type, self.name)
        return None if tool is None else tool.turn()


AnyTool = Annotated[AnthropicTool | DatedTool, ByType("custom")]


class OutputFormat(Body):
    type: Literal["json_schema"]
    schema_: Annotated[dict[str, Any], Field(alias="schema")]


def _schema(form: OutputFormat) -> dict[str, Any]:
    return form.schema_


@having(
    Row("effort", "How much to think.", Level, use="thinking"),
    Row("format", "The form of the answer.", OutputFormat, sets="json_schema", read=_schema),
)
class OutputConfig(Body):
    """How an answer is written."""


class ContextManagement(Body):
    """Edits of a conversation as it grows. hotset makes none: it refuses a conversation that does not fit."""

    edits: list[Any] | None = None


@having(
    *(Row("output_config", "Effort of thinking, and form of the answer.", OutputConfig, use=use, sets=MANY,
          read=settings_of(use)) for use in ("thinking", "sampling")),
    Row("container", "hotset runs no code", use="ignored"),
    Row("mcp_servers", "hotset calls no servers of tools for a request", use="ignored"),
    Row("fallbacks", "this server answers, or says why not", use="ignored"),
)  # fmt: skip
class PromptBody(AnswerFields):
    """The fields that a prompt is made of: all that count_tokens needs."""

    messages: Annotated[list[AnthropicMessage], Field(min_length=1)]
    system: str | list[Annotated[TextBlock | UnknownPart, ByType("text")]] | None = None
    tools: Annotated[list[AnyTool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: AnyToolChoice | None = None
    context_management: ContextManagement | None = None


@having(
    Row("output_format", "The form of the answer: the older name.", OutputFormat, sets="json_schema",
        read=_schema),
    Row("parallel_tool_calls", "False ends the answer with its first call.", Flag, use="request"),
)  # fmt: skip
class MessagesBody(PromptBody):
    """The body of a message, as Anthropic has it."""


# ---- from a body to a request ----


def conversation(system: str | list[Any] | None, messages: list[AnthropicMessage]) -> list[Turn]:
    """Return the turns of a conversation.

    Blocks of text become lines of one text, and adjacent turns of one role become one turn. A tool's
    result is a turn of its own, under the name of the function that was called.
    """
    turns: list[Turn] = []
    if system and (text := _without_billing(system)):
        turns.append({"role": "system", "content": text})
    names: dict[str, str] = {}  # of the functions, by the ids of their calls
    for i, message in enumerate(messages):
        role = ROLES[message.role]
        if isinstance(message.content, str) or not message.content:
            add(turns, {"role": role, "content": message.content or ""})
            continue
        for block in message.content:
            try:
                turn = _turn(role, block, names)
            except InvalidRequestError as error:
                raise InvalidRequestError(f"message {i}: {error}") from None
            if turn is not None and turn["role"] == "tool":
                turns.append(turn)
            elif turn is not None:
                add(turns, turn)
    return turns


def _turn(role: str, block: Block, names: dict[str, str]) -> Turn | None:
    """Return the part of a turn that a block makes; None for a block that hotset cannot read."""
    match block:
        case TextBlock() | ImageBlock() | DocumentBlock() | SearchResultBlock():
            return {"role": role, "content": _text(block)}
        case ToolResultBlock() if role == "user":
            text = _joined(block.content)
            if block.is_error:  # templates cannot say it otherwise
                text = joined(" ", ["Error:", text])
            name = names.get(block.tool_use_id)
            return {
                "role": "tool",
                "tool_call_id": block.tool_use_id,
                **({} if name is None else {"name": name}),
                "content": text,
            }
        case ThinkingBlock() if role == "assistant":
            return {"role": role, "reasoning_content": block.thinking}
        case ToolUseBlock() if role == "assistant":
            names[block.id] = block.name
            given = block.input
            arguments = given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)
            return {"role": role, "tool_calls": [tool_call(block.id, block.name, arguments)]}
        case RedactedThinkingBlock() | UnknownPart():
            return None
    raise InvalidRequestError(f"a block of type {block.type} cannot be in a message of the {role}")


def _without_billing(system: str | list[Any]) -> str:
    """Return the text of a system prompt without Claude Code's billing lines.

    They differ in each request, so that no prompt would begin like an earlier one in the prefix cache.
    """
    texts = [system] if isinstance(system, str) else [_text(block) for block in system]
    kept = (_BILLING.sub("", text) for text in texts)
    return "\n".join(text for text, before in zip(kept, texts, strict=True) if text or not before)


def _joined(content: str | list[Any]) -> str:
    return content if isinstance(content, str) else joined("\n", filter(None, map(_text, content)))


def _text(block: Any) -> str:
    """Return the text of a block, with the title and the source of a document or a search result."""
    match block:
        case TextBlock() | ImageBlock():
            return block.text
        case DocumentBlock():
            source = block.source
            text = source.data if source.type == "text" else _joined(source.content or "")
            return "\n".join(filter(None, (block.title, block.context, text)))
        case SearchResultBlock():
            return "\n".join(filter(None, (block.title, block.source, _joined(block.content or ""))))
    return ""


def answer_request(body: MessagesBody, defaults: Mapping[str, Any] = NO_DEFAULTS) -> AnswerRequest:
    """Return the request that a body describes. Raises InvalidRequestError."""
    use, settings = _chosen(body), body.all_settings("request")
    if isinstance(body.tool_choice, ToolChoice) and body.tool_choice.disable_parallel_tool_use:
        settings["parallel_tool_calls"] = False
    return AnswerRequest(
        messages=conversation(body.system, body.messages),
        tools=use.tools,
        tool_choice=use.value,
        template=body.template_variables,
        thinking=body.thinking_settings,
        params=body.sampling(defaults),
        stream=bool(body.given("stream")),
        **settings,
    )


def _chosen(body: PromptBody) -> Chosen:
    turns = (tool.turn() for tool in body.tools or ())
    return chosen(body.tool_choice, [turn for turn in turns if turn is not None])


# ---- from deltas to a message ----


class MessageWriter:
    """A writer of the message of an answer, and of the events that a client gets.

    max_tokens: the limit of the answer; None: the context. manages_context: the request has edits of the
    conversation, and the message reports that none were applied.
    """

    def __init__(self, model: str, max_tokens: int | None, *, manages_context: bool = False) -> None:
        self._max_tokens = max_tokens
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
        """Yield the stream of an answer, an event at a time."""
        for one in self.start(answer.usage):
            yield event(one, one["type"])
        async for delta in answer:
            for one in self.push(delta):
                yield event(one, one["type"])
        for one in self.end(answer.usage):
            yield event(one, one["type"])

    def whole(self, choice: FinishedAnswer, usage: Usage) -> dict[str, Any]:
        """Return the message of a finished answer."""
        for delta in choice.deltas():
            self.push(delta)
        self.end(usage)
        return self.message

    def start(self, usage: Usage) -> list[Event]:
        """Return the first events. usage: the counts known so far."""
        head = self.message | {"content": [], "usage": _usage(usage)}
        return [{"type": "message_start", "message": head}, {"type": "ping"}]

    def push(self, delta: Delta) -> list[Event]:
        match delta:
            case TextDelta(text=text) if text:
                events = self._open(shapes.TextReplyBlock.written(text=""))
                self._blocks[-1]["text"] += text
                return [*events, self._event({"type": "text_delta", "text": text})]
            case ReasoningDelta(text=text) if text:
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
        """Return the last events, and complete the message. usage: of the whole answer."""
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
        """Begin this block, unless it continues the last one, as text and thinking do."""
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
        """Return the fields that say why the answer ended."""
        finished = self._finished
        assert finished is not None
        reason = {"stop": "end_turn", "tool_calls": "tool_use", "length": "max_tokens"}[finished.reason]
        if finished.stop is not None:
            reason = "stop_sequence"
        elif finished.reason == "length" and usage.completion_tokens < (self._max_tokens or math.inf):
            reason = "model_context_window_exceeded"
        return {"stop_reason": reason, "stop_sequence": finished.stop, "stop_details": None}


def _usage(usage: Usage) -> dict[str, Any]:
    """Return the counts as Anthropic has them: `input_tokens` excludes tokens found in the cache."""
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
    max_tokens = service.most_tokens(request.params.max_tokens)
    writer = MessageWriter(service.name, max_tokens, manages_context=body.context_management is not None)
    if request.stream:
        return await streamed(http, request, writer.events, lambda: PING)
    return await whole(http, request, lambda answer, choices: writer.whole(choices[0], answer.usage))


@router.post("/v1/messages/count_tokens")
async def count_tokens(body: PromptBody, http: Request) -> shapes.TokenCount:
    service = await serving(http, body.model, takes_adapter=True)
    model = service.model

    def counted(left: threading.Event) -> int:
        turns, tools = conversation(body.system, body.messages), _chosen(body).tools
        variables = {**body.thinking_settings.variables, **body.template_variables}
        variables = model.output_form.effort(variables, None).variables
        if model.images is not None:
            turns = [dict(turn) for turn in with_fetched(turns, service.settings, left)]
        return len(model.encode_chat(turns, tools or None, variables=variables, stop=left))

    return shapes.TokenCount(input_tokens=await until_left(http, counted))
