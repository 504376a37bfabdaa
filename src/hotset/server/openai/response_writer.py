"""A writer of the response of /v1/responses: its items, and the events that a client gets."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator, Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

from hotset.errors import HotsetError
from hotset.server import shapes
from hotset.server.answers import (
    Answer,
    Delta,
    Finished,
    FinishedAnswer,
    ReasoningDelta,
    TextDelta,
    ToolCallArguments,
    ToolCallStart,
    Usage,
)
from hotset.server.client_tools import CUSTOM, FORMS, CallForm
from hotset.server.errors import problem_of
from hotset.server.logprobs import spelled
from hotset.server.openai.client_calls import OPEN, ClientCall, Step
from hotset.server.replies import KEEP_ALIVE, TextEvents, event_beside
from hotset.server.shapes import Shape
from hotset.text.tokenizer import Tokenizer

Event = dict[str, Any]


@dataclass(frozen=True)
class ToolNames:
    """The forms of calls, by the names of the functions that the model calls.

    spaces: namespace and name of functions in namespaces. forms: of calls of tools with a type of their own.
    """

    spaces: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    forms: Mapping[str, CallForm] = field(default_factory=dict)


NO_NAMES = ToolNames()

_ITEMS: dict[str, tuple[type[Shape], str]] = {  # by type: the shape, and the prefix of ids
    "message": (shapes.OutputMessage, "msg"),
    "reasoning": (shapes.OutputReasoning, "rs"),
    "function_call": (shapes.OutputCall, "fc"),
    "custom_tool_call": (shapes.OutputCustomCall, "ctc"),
    "local_shell_call": (shapes.OutputLocalShellCall, "lsh"),
    "shell_call": (shapes.OutputShellCall, "sh"),
    "apply_patch_call": (shapes.OutputPatchCall, "apc"),
}


class ResponseWriter:
    """A writer of the response and of its events.

    head: fields that do not depend on the answer. n_top: alternatives to each token; None for no logprobs.
    """

    def __init__(
        self,
        head: Mapping[str, Any],
        tokenizer: Tokenizer,
        n_top: int | None,
        names: ToolNames = NO_NAMES,
    ) -> None:
        self._tokenizer, self._n_top, self._names = tokenizer, n_top, names
        self._call: ClientCall | None = None  # of a tool with a type of its own, while it is written
        self._n_events = self._n_sent = 0  # events made, and events sent
        self._in_progress: TextEvents | None = None
        self._items: list[dict[str, Any]] = []
        self.response = shapes.ResponseReply.written(
            id=f"resp_{uuid.uuid4().hex}",
            created_at=0,
            completed_at=None,
            status="in_progress",
            incomplete_details=None,
            output=self._items,
            usage=None,
            **head,
        )

    async def events(self, answer: Answer) -> AsyncIterator[bytes]:
        """Yield the stream of an answer, an event at a time."""
        async for one in self._events(answer):
            yield await event_beside(one, one["type"])
            self._n_sent += 1

    async def _events(self, answer: Answer) -> AsyncIterator[Event]:
        for one in self.start(answer.created):
            yield one
        try:
            async for delta in answer:
                for one in self.push(delta):
                    yield one
        except HotsetError as error:
            yield self.failed(problem_of(error).message)
            return
        for one in self.end(answer.usage):
            yield one

    def sign_of_life(self) -> bytes:
        """Return an event for a client that waits, such as Codex, whose timer ignores comments.

        While numbered events are waiting to be sent, it is a comment.
        """
        if not self._n_events or self._n_sent < self._n_events:
            return KEEP_ALIVE
        if self._in_progress is None:
            kind = "response.in_progress"
            head = {"type": kind, "sequence_number": TextEvents.HOLE, "response": self._now()}
            self._in_progress = TextEvents(head, kind)
        self._n_events += 1
        self._n_sent += 1
        return self._in_progress(self._n_events - 1)

    def whole(self, answer: Answer, choice: FinishedAnswer) -> dict[str, Any]:
        """Return the response of a finished answer."""
        self.start(answer.created)
        for delta in choice.deltas():
            self.push(delta)
        self.end(answer.usage)
        return self.response

    def start(self, created: int) -> list[Event]:
        """Return the first events. created: seconds since 1970."""
        self.response["created_at"] = created
        return [
            self._event("response.created", response=self._now()),
            self._event("response.in_progress", response=self._now()),
        ]

    def _now(self) -> dict[str, Any]:
        """Return the response before its first item."""
        return self.response | {"output": []}

    def push(self, delta: Delta) -> list[Event]:
        if self._call is not None:
            if isinstance(delta, ToolCallArguments):
                return self._of_call(self._call, self._call.push(delta.text))
            return [*self._end_call(self._call), *self.push(delta)]
        match delta:
            case TextDelta(text=text) if text:
                events = self._open("message", shapes.OutputText.written(text="", logprobs=[]))
                logprobs = self._logprobs(delta)
                part = self._items[-1]["content"][0]
                part["text"] += text
                part["logprobs"] += logprobs
                return [*events, self._of_part("response.output_text.delta", delta=text, logprobs=logprobs)]
            case ReasoningDelta(text=text) if text:
                events = self._open("reasoning", shapes.ReasoningPart.written(text=""))
                self._items[-1]["content"][0]["text"] += text
                return [*events, self._of_part("response.reasoning_text.delta", delta=text)]
            case ToolCallStart() if (form := self._names.forms.get(delta.name)) is not None:
                self._call = ClientCall(form, delta.id, delta.name)
                return []
            case ToolCallStart():
                named: dict[str, Any] = {"name": delta.name}
                if (found := self._names.spaces.get(delta.name)) is not None:
                    named = {"namespace": found[0], "name": found[1]}
                return self._open("function_call", call_id=delta.id, **named, arguments="")
            case ToolCallArguments(text=text) if text:
                self._items[-1]["arguments"] += text
                return [self._of_item("response.function_call_arguments.delta", delta=text)]
            case Finished(reason="length"):
                events = self._close("incomplete")
                self.response |= {"status": "incomplete", "incomplete_details": shapes.Incomplete.written()}
                return events
            case Finished():
                self.response["status"] = "completed"
                return self._close("completed")
        return []

    def _of_call(self, call: ClientCall, steps: Iterable[Step]) -> list[Event]:
        events: list[Event] = []
        for kind, fields in steps:
            if kind == OPEN:
                item = "function_call" if call.value is None else call.form.item
                events += self._open(item, call_id=call.id, **fields)
            elif call.form is FORMS["shell"] and call.value is not None:
                events.append(self._event(kind, output_index=len(self._items) - 1, **fields))
            else:
                events.append(self._of_item(kind, **fields))
        return events

    def _end_call(self, call: ClientCall) -> list[Event]:
        events = self._of_call(call, call.end())
        if call.value is None:
            self._items[-1]["arguments"] = call.arguments
        else:
            self._items[-1][call.form.field] = call.value
        self._call = None
        return events

    def end(self, usage: Usage) -> list[Event]:
        self.response["usage"] = shapes.ResponseUsage.written(
            input_tokens=usage.prompt_tokens,
            input_tokens_details=shapes.InputDetails.written(cached_tokens=usage.cached_tokens),
            output_tokens=usage.completion_tokens,
            output_tokens_details=shapes.AnswerDetails.written(reasoning_tokens=usage.reasoning_tokens),
            total_tokens=usage.total_tokens,
        )
        self.response["completed_at"] = int(time.time())
        return [self._event(f"response.{self.response['status']}", response=self.response)]

    def failed(self, message: str) -> Event:
        error = {"code": "server_error", "message": message}
        self.response |= {"status": "failed", "error": error}
        return self._event("response.failed", response=self.response)

    def _open(self, kind: str, part: dict[str, Any] | None = None, **fields: Any) -> list[Event]:
        """Begin an item, unless the new part continues the last item. part: its content, still empty."""
        if part is not None and self._items and self._items[-1]["type"] == kind:
            return []
        events = self._close("completed")
        shape, prefix = _ITEMS[kind]
        content: dict[str, Any] = {} if part is None else {"content": []}
        item = shape.written(id=f"{prefix}_{uuid.uuid4().hex}", status="in_progress", **fields, **content)
        self._items.append(item)
        events.append(
            self._event("response.output_item.added", output_index=len(self._items) - 1, item=deepcopy(item))
        )
        if part is not None:
            item["content"] = [part]
            events.append(self._of_part("response.content_part.added", part=deepcopy(part)))
        return events

    def _close(self, status: str) -> list[Event]:
        """End the last item, if there is one."""
        if not self._items:
            return []
        item = self._items[-1]
        item["status"] = status
        events = []
        if item["type"] == "function_call":
            done = {"name": item["name"], "arguments": item["arguments"]}
            events.append(self._of_item("response.function_call_arguments.done", **done))
        elif item["type"] == CUSTOM.item:
            events.append(self._of_item("response.custom_tool_call_input.done", input=item["input"]))
        elif "content" in item:
            part = item["content"][0]
            done = {key: value for key, value in part.items() if key in ("text", "logprobs")}
            name = (
                "response.output_text.done" if item["type"] == "message" else "response.reasoning_text.done"
            )
            events += [self._of_part(name, **done), self._of_part("response.content_part.done", part=part)]
        events.append(self._event("response.output_item.done", output_index=len(self._items) - 1, item=item))
        return events

    def _event(self, kind: str, **fields: Any) -> Event:
        self._n_events += 1
        return {"type": kind, "sequence_number": self._n_events - 1, **fields}

    def _of_item(self, kind: str, **fields: Any) -> Event:
        return self._event(kind, item_id=self._items[-1]["id"], output_index=len(self._items) - 1, **fields)

    def _of_part(self, kind: str, **fields: Any) -> Event:
        return self._of_item(kind, content_index=0, **fields)

    def _logprobs(self, delta: TextDelta) -> list[dict[str, Any]]:
        if self._n_top is None:
            return []
        return [spelled(self._tokenizer, one, self._n_top) for one in delta.logprobs]
