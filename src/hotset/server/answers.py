"""Requests and answers as every API schema sees them: AnswerRequest, and the deltas of an Answer.

An API schema translates its JSON into an AnswerRequest, and deltas (or the finished choices) into its own
JSON. `Service.ask` turns an AnswerRequest into an Answer:

    answer = await service.ask(request)        # raises if it cannot be answered: nothing was sent yet
    async for delta in answer: ...             # a stream: raises an error that occurs in its middle
    choices = await answer.whole()             # or the whole answer at once
    answer.usage; answer.close()               # `streams.py` closes it, even if the client has gone
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, assert_never

from hotset.engine.prompt_logprobs import PromptLogprobs
from hotset.engine.sampler import SamplingParams, TokenLogprobs
from hotset.engine.sequence import Event
from hotset.engine.sequence import Sequence as EngineSequence
from hotset.errors import HotsetError, InvalidRequestError
from hotset.generation import Generation
from hotset.server.errors import NotReadyError, RequestError, problem_of
from hotset.server.json_limits import check_json
from hotset.server.preparation import LONG_BYTES
from hotset.text.image_text import images_of
from hotset.text.infill import Gap
from hotset.text.messages import BY_LAST_ROLE, Opening
from hotset.text.output import OutputForm
from hotset.text.parts import CallArguments, CallStart, Part, ReasoningChunk, Text, ToolCall

log = logging.getLogger("hotset.server")

MOST_LOGPROBS = 64
"""Tokens with their logprobs that come as one delta."""

Reason = Literal["stop", "length", "tool_calls", "cancelled"]

MAX_ARGUMENT_NESTING = 56
"""Levels of arguments that are an object: in a request, whose limit is 64, eight more may be around them."""


@dataclass(frozen=True, kw_only=True)
class Thinking:
    """Settings of a model's thinking before it answers, and whether the reply has it.

    enabled: None leaves it to the chat template. effort: a level from "minimal" to "max", or "none". budget:
    tokens; 0: no thinking, -1: no limit. closing: the text that ends thinking when the budget is used up.
    shown: whether the reply has the thinking. fields: of the request, by the settings that they make.
    """

    enabled: bool | None = None
    effort: str | None = None
    budget: int | None = None
    closing: str | None = None
    shown: bool = True
    fields: Mapping[str, str] = field(default_factory=dict)

    def unused(self, form: OutputForm, *, is_chat: bool) -> Iterator[tuple[str, str]]:
        """Yield the fields without effect on a model that writes in this form, with the reasons.

        is_chat: whether the chat template makes the prompt. A model that does not think follows a field that
        turns thinking off.
        """
        if self.enabled is False or self.budget == 0:
            return
        asks = {
            "effort": self.effort is not None,
            "budget": self.budget is not None,
            "enabled": self.enabled is not None and self.effort is None,
        }
        for setting in (setting for setting, is_asked in asks.items() if is_asked):
            if is_chat and (form.can_think or (setting == "effort" and form.knows_effort)):
                continue
            if form.can_think and setting == "budget":
                continue
            reason = "this model does not think" if is_chat else "the prompt comes without a chat template"
            yield self.fields.get(setting, setting), reason

    def limited(self, params: SamplingParams) -> SamplingParams:
        """Return parameters with this budget. An effort removes the default budget of the server."""
        is_default = self.budget is None and self.effort is None and self.enabled is not False
        closing = params.reasoning_budget_message if self.closing is None else self.closing
        budget = params.reasoning_budget if is_default else self.budget
        return replace(params, reasoning_budget=budget, reasoning_budget_message=closing)

    @property
    def variables(self) -> dict[str, Any]:
        """Return the variables that give these settings to a chat template."""
        if self.enabled is False or self.budget == 0:
            return {"enable_thinking": False}
        found = {} if self.effort is None else {"reasoning_effort": self.effort}
        return found | ({"enable_thinking": True} if self.enabled or self.budget is not None else {})


@dataclass(frozen=True, kw_only=True)
class AnswerRequest:
    """A request for answers: either to a conversation, or continuations of unchanged prompts.

    messages: as OpenAI's clients write them. opening: how their answer begins. tools: their JSON schemas, in
    OpenAI's shape; tool_choice: "none", "auto", "required", or the name of a function in {"name": ...};
    parallel_tool_calls: False ends an answer with its first call. template: further variables of the chat
    template, which override the variables of `thinking`. thinking: how much the model thinks.
    truncates: leaves out the oldest turns of a conversation that is too long.
    prompts: texts or token ids. parse_special: special tokens spelled in these are parsed.
    gap: the text before and after a gap to fill in; it replaces prompts.
    n: answers to each. params: how tokens are chosen; the i-th of n answers has the seed + i.
    prompt_logprobs: the number of likeliest tokens returned for each token of the prompt; None: no logprobs.
    generates: False returns only the prompt's logprobs.
    stream: whether deltas arrive one by one; False delivers them all at the end.
    reuse_prefix: False computes a prompt again that is in the cache.
    id_slot: the slot that keeps the tokens when the answer is over (saved_slots.py); None: any.
    adapters: (LoRA) by number or name, and how much of each; None: the model's default adapters.
    client: the sender; waiting requests have their turn client by client. n_bytes: of the request's body.
    """

    messages: Sequence[Mapping[str, Any]] | None = None
    opening: Opening = BY_LAST_ROLE
    prompts: Sequence[str | Sequence[int]] = ()
    parse_special: bool = True
    gap: Gap | None = None
    tools: Sequence[Mapping[str, Any]] = ()
    tool_choice: str | Mapping[str, str] = "auto"
    parallel_tool_calls: bool = True
    template: Mapping[str, Any] = field(default_factory=dict)
    thinking: Thinking = Thinking()
    truncates: bool = False
    n: int = 1
    params: SamplingParams = field(default_factory=SamplingParams)
    prompt_logprobs: int | None = None
    generates: bool = True
    stream: bool = False
    reuse_prefix: bool = True
    id_slot: int | None = None
    adapters: Mapping[int | str, float] | None = None
    client: str | None = None
    n_bytes: int = 0

    def __post_init__(self) -> None:
        if self.messages is not None and not self.messages:
            raise InvalidRequestError("the conversation has no part that hotset can read")

    @property
    def is_long(self) -> bool:
        """Return whether preparing its prompt may take more than a moment."""
        constrained = self.params.form is not None or self.tool_choice not in ("auto", "none")
        strict = any(tool.get("function", {}).get("strict") for tool in self.tools)
        has_images = any(images_of(message.get("content")) for message in self.messages or ())
        return self.n_bytes > LONG_BYTES or constrained or strict or has_images

    @property
    def n_answers(self) -> int:
        return self.n * (len(self.prompts) if self.messages is None and self.gap is None else 1)


# -- deltas; index: which of the answers; logprobs: of its tokens, if the request wants them -----------------


@dataclass(slots=True)
class TextDelta:
    """More text, and its tokens."""

    index: int
    text: str
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)


@dataclass(slots=True)
class ReasoningDelta:
    """More of the model's reasoning before it answers."""

    index: int
    text: str
    logprobs: list[TokenLogprobs] = field(default_factory=list)


@dataclass(slots=True)
class ToolCallStart:
    """The model calls a function. call: counts the calls of an answer from 0."""

    index: int
    call: int
    id: str
    name: str
    logprobs: list[TokenLogprobs] = field(default_factory=list)


@dataclass(slots=True)
class ToolCallArguments:
    """More of the arguments of a call, JSON as the model wrote it."""

    index: int
    call: int
    text: str
    logprobs: list[TokenLogprobs] = field(default_factory=list)


@dataclass(slots=True)
class Finished:
    """The end of an answer.

    stop: the stop string that ended it, if one did. logprobs: of the marks after the last call.
    """

    index: int
    reason: Reason
    stop: str | None = None
    logprobs: list[TokenLogprobs] = field(default_factory=list)


Delta = TextDelta | ReasoningDelta | ToolCallStart | ToolCallArguments | Finished


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of all answers to a request. cached_tokens: prompt tokens that were found in the cache."""

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    reasoning_tokens: int = 0

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens


@dataclass(slots=True)
class FinishedAnswer:
    """One finished answer. tokens, logprobs: of the text. all_logprobs: of reasoning and calls, too."""

    index: int
    text: str = ""
    reasoning: str = ""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    all_logprobs: list[TokenLogprobs] = field(default_factory=list)
    tool_calls: list[ToolCall] = field(default_factory=list)
    reason: Reason = "stop"
    stop: str | None = None

    def add(self, delta: Delta) -> None:
        self.all_logprobs += delta.logprobs
        match delta:
            case TextDelta():
                self.text += delta.text
                self.tokens += delta.tokens
                self.logprobs += delta.logprobs
            case ReasoningDelta():
                self.reasoning += delta.text
            case ToolCallStart():
                self.tool_calls.append(ToolCall(delta.id, delta.name))
            case ToolCallArguments():
                self.tool_calls[delta.call].arguments += delta.text
            case Finished():
                self.reason, self.stop = delta.reason, delta.stop

    def deltas(self) -> Iterator[Delta]:
        """Yield the deltas of this answer, reasoning first and calls last."""
        if self.reasoning:
            yield ReasoningDelta(self.index, self.reasoning)
        if self.text:
            yield TextDelta(self.index, self.text, self.tokens, self.logprobs)
        for i, call in enumerate(self.tool_calls):
            yield ToolCallStart(self.index, i, call.id, call.name)
            yield ToolCallArguments(self.index, i, call.arguments)
        yield Finished(self.index, self.reason, self.stop)


def arguments_object(text: str) -> dict[str, Any]:
    """Return the arguments of a call as an object, for an API schema that does not have them as text.

    Text that is not a JSON object becomes {"INVALID_JSON": text}, so that a client can show it to the model
    again. The same holds for numbers that JSON does not have, such as NaN and 1e999, and for arguments that
    are nested too deep for a request.
    """
    try:
        check_json(text.encode("utf-8", "replace"), MAX_ARGUMENT_NESTING)
        value = json.loads(text or "{}")
        json.dumps(value, allow_nan=False)
    except (ValueError, RequestError):
        value = None
    return value if isinstance(value, dict) else {"INVALID_JSON": text}


@dataclass(frozen=True)
class PreparedPrompt:
    """A prompt with its generations.

    n_dropped: turns of the conversation that had no room. scores: of the prompt's own tokens, if they are
    requested.
    """

    tokens: list[int]
    generations: list[Generation]
    n_dropped: int = 0
    scores: PromptLogprobs | None = None

    @property
    def sequences(self) -> list[EngineSequence]:
        """Return the sequences of its generations, and the one that scores the prompt."""
        scored = self.scores.sequence if self.scores is not None else None
        return [*(one.sequence for one in self.generations), *(() if scored is None else (scored,))]


Delivery = Literal["each", "end"]  # of events: one by one, or all with the last
Submit = Callable[[EngineSequence, Callable[[Event], None], Delivery], None]


class Answer:
    """The answer to a request; made by `Service.ask`, and used only in its event loop.

    prompts: in the order of the request. generations: one per answer; the answers to one prompt are adjacent.
    created: seconds since 1970.
    submit: gives a sequence to the engine: `submit(sequence, take, delivery)` calls `take` with its events in
    this loop; with the delivery "end", all events arrive with the last. closed: called once when this closes.
    asked: when the request came, time.perf_counter() seconds.
    """

    def __init__(
        self,
        request: AnswerRequest,
        prompts: Sequence[PreparedPrompt],
        submit: Submit,
        closed: Callable[[Answer], None],
        asked: float,
    ) -> None:
        self.request = request
        self.asked = asked
        self.prompts = prompts
        self.created = int(time.time())
        self.generations = [generation for prompt in prompts for generation in prompt.generations]
        self._parts = [_AnswerInProgress(i, generation) for i, generation in enumerate(self.generations)]
        self._n_open = len(self._parts)
        self._ready: list[Delta] = []
        self._waiter: asyncio.Future[None] | None = None
        self._error: Exception | None = None
        self._submit = submit
        self._closed: Callable[[Answer], None] | None = closed

    # ---- for the API schemas ----

    async def __aiter__(self) -> AsyncIterator[Delta]:
        """Yield the deltas in order. A slow consumer gets them merged into larger pieces."""
        while True:
            ready, self._ready = self._ready, []
            for delta in ready:
                yield delta
            if self._ready:
                continue
            if self._error is not None:
                raise self._error
            if not self._n_open:
                return
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None

    async def whole(self) -> list[FinishedAnswer]:
        """Return the finished answers, in order."""
        choices = [FinishedAnswer(i) for i in range(len(self._parts))]
        async for delta in self:
            choices[delta.index].add(delta)
        return choices

    def prompt_of(self, index: int) -> PreparedPrompt:
        """Return the prompt of one of the answers."""
        return self.prompts[index // self.request.n]

    @property
    def usage(self) -> Usage:
        """Return the tokens of all prompts and answers so far."""
        read = [prompt.scores or prompt.generations[0] for prompt in self.prompts]
        return Usage(
            sum(len(prompt.tokens) for prompt in self.prompts),
            sum(one.sequence.n_reused for one in read if one.sequence is not None),
            sum(part.n_tokens for part in self._parts),
            sum(part.n_reasoning for part in self._parts),
        )

    @property
    def n_dropped(self) -> int:
        """Return the number of turns of the conversation that had no room."""
        return sum(prompt.n_dropped for prompt in self.prompts)

    @property
    def total_tokens(self) -> int:
        """Return the number of tokens of prompts and answers so far."""
        return self.usage.total_tokens

    @property
    def n_values(self) -> int:
        """Estimate the number of numbers and texts in a reply with the whole answer."""
        usage, n_top, n_top_prompt = self.usage, self.request.params.logprobs, self.request.prompt_logprobs
        n = usage.completion_tokens * (0.1 if n_top is None else n_top + 1)
        n += 0 if n_top_prompt is None else usage.prompt_tokens * self.request.n * (n_top_prompt + 1)
        return round(n)

    @property
    def n_open(self) -> int:
        """Return the number of answers until it is closed."""
        return len(self.generations)

    @property
    def reasons(self) -> list[str]:
        """Return why each answer ended, or will end if this is closed now; "error" after a failure."""
        otherwise = "error" if self._error is not None else "cancelled"
        return [part.reason or otherwise for part in self._parts]

    def close(self) -> None:
        """End the generations that still run. A second call does nothing."""
        self._end()
        if self._closed is not None:
            self._closed(self)
            self._closed = None

    # ---- for the service ----

    def begin(self) -> None:
        """Submit the prompts to the engine. Raises an error if the engine accepts no more."""
        for i, prompt in enumerate(self.prompts):
            if prompt.scores is not None and prompt.scores.sequence is not None:
                self._submit(prompt.scores.sequence, partial(self._take_scores, i), "end")
            else:
                self._generate(i)

    def fail(self, error: Exception) -> None:
        """End all answers with an error. A client gets only the kind of an unexpected error.

        After `close` this does nothing: a sequence that `close` cancelled is not an error.
        """
        if self._closed is not None and self._n_open and self._error is None:
            if not isinstance(error, HotsetError):
                log.error("an answer failed", exc_info=error)
                error = RequestError(problem_of(error).message, 500, code="server_error")
            self._error = error
            self._end()
            self._wake()

    def _generate(self, prompt: int) -> None:
        """Begin the answers to a prompt, after its scores: their KV blocks are then found in the cache."""
        if self._closed is None:  # the client disconnected during prefill
            return
        request = self.request
        # `Generation.take` finds a stop string only if its events arrive one by one.
        delivery: Delivery = "each" if request.stream or request.params.stop else "end"
        for part in self._parts[prompt * request.n : (prompt + 1) * request.n]:
            if request.generates:
                self._submit(part.generation.sequence, partial(self._take, part), delivery)
            else:
                part.reason = "length"
                self._n_open -= 1
                self._ready.append(Finished(part.index, "length"))
        self._wake()

    def _take_scores(self, prompt: int, event: Event) -> None:
        if event.finish_reason is None or self._error is not None:
            return
        try:
            raise_end(event)
            self._generate(prompt)
        except Exception as error:
            self.fail(error)

    def _take(self, part: _AnswerInProgress, event: Event) -> None:
        if part.reason or self._error is not None:  # ignore events after a stop string or a failure
            return
        try:
            for delta in part.deltas(event):
                self._add(delta)
        except Exception as error:
            self.fail(error)
            return
        if part.reason:
            self._n_open -= 1
            part.generation.cancel_soon()  # a stop string ends it before the engine would
        if self.request.stream or not self._n_open:
            self._wake()

    def _add(self, delta: Delta) -> None:
        """Append a delta, or make it a part of the answer's last one if that waits and has the same kind."""
        if isinstance(delta, ReasoningDelta) and not self.request.thinking.shown:
            return
        last = next((one for one in reversed(self._ready) if one.index == delta.index), None)
        match delta, last:
            case (TextDelta(), TextDelta()) if len(last.logprobs) < MOST_LOGPROBS:
                last.text += delta.text
                last.tokens += delta.tokens
                last.logprobs += delta.logprobs
            case (ReasoningDelta(), ReasoningDelta()) if len(last.logprobs) < MOST_LOGPROBS:
                last.text += delta.text
                last.logprobs += delta.logprobs
            case (ToolCallArguments(), ToolCallArguments()) if (
                last.call == delta.call and len(last.logprobs) < MOST_LOGPROBS
            ):
                last.text += delta.text
                last.logprobs += delta.logprobs
            case _:
                self._ready.append(delta)

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _end(self) -> None:
        for prompt in self.prompts:
            if prompt.scores is not None and prompt.scores.sequence is not None:
                prompt.generations[0].thread.cancel_soon([prompt.scores.sequence])
        for generation in self.generations:
            generation.cancel_soon()


def raise_end(event: Event) -> None:
    """Raise the error that ended a sequence. After another event, return."""
    if event.error is not None:
        raise event.error
    if event.finish_reason == "cancelled":
        raise NotReadyError("the server was shut down before the answer was complete")
    if event.finish_reason == "timeout":
        raise RequestError(
            "the answer took longer than this server gives to one; ask for fewer tokens", 503, code="timeout"
        )


class _AnswerInProgress:
    """An answer in progress: turns the chunks of its generation into deltas."""

    def __init__(self, index: int, generation: Generation) -> None:
        self.index = index
        self.generation = generation
        self.reason: Reason | None = None
        self.n_tokens = 0
        self.n_reasoning = 0
        self._tokens: list[int] = []  # not in a delta yet, such as half a character or half a stop string
        self._logprobs: list[TokenLogprobs] = []

    def deltas(self, event: Event) -> list[Delta]:
        raise_end(event)
        chunk = self.generation.take(event)
        self.n_tokens += len(chunk.tokens)
        stop_ids = self.generation.sequence.stop_ids
        self._tokens += [token for token in chunk.tokens if token not in stop_ids]  # these have no text
        self._logprobs += [one for one in chunk.logprobs if one.token not in stop_ids]
        found = [self._delta(part) for part in chunk.parts]
        if chunk.finish_reason is not None:
            if chunk.finish_reason == "length":
                self.reason = "length"
            else:
                self.reason = "tool_calls" if self.generation.n_calls else "stop"
            marks = self._logprobs if self.generation.n_calls else []
            found.append(Finished(self.index, self.reason, self.generation.stop, marks))
        return found

    def _delta(self, part: Part) -> Delta:
        tokens, logprobs = self._tokens, self._logprobs
        self._tokens, self._logprobs = [], []
        match part:
            case Text():
                return TextDelta(self.index, part.text, tokens, logprobs)
            case ReasoningChunk():
                self.n_reasoning += len(tokens)
                return ReasoningDelta(self.index, part.text, logprobs)
            case CallStart():
                return ToolCallStart(self.index, part.call, part.id, part.name, logprobs)
            case CallArguments():
                return ToolCallArguments(self.index, part.call, part.text, logprobs)
        assert_never(part)
