"""Answers during generation: text, timings and statistics from the engine's events.

This module converts between text and token ids; the engine knows only ids.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from html import escape
from itertools import takewhile
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from hotset.backends.base import StepStats
from hotset.engine.driver import EngineThread
from hotset.engine.sampler import SamplingParams, TokenLogprobs
from hotset.engine.sequence import Event, FinishReason
from hotset.engine.sequence import Sequence as EngineSequence
from hotset.engine.stop import StopMatcher
from hotset.errors import InvalidRequestError, did_you_mean
from hotset.escaping import clause
from hotset.outputs import Reading
from hotset.parameters import data_frame, shown
from hotset.sampling_parameters import OTHER_NAMES, Sampling
from hotset.text.image_parts import given_image
from hotset.text.image_text import joined, text_of_image
from hotset.text.messages import checked_calls
from hotset.text.parts import CallStart, Gathered, Part, ReasoningChunk, Text, ToolCall

if TYPE_CHECKING:
    from hotset.sparsity.stats import StatsSummary
    from hotset.text.tokenizer import Tokenizer

Summary = Callable[[Sequence[StepStats]], "StatsSummary | None"]


class Timings(NamedTuple):
    """The speed of an answer. Reused prompt tokens were found in the cache and cost no time."""

    prompt_tokens: int
    reused_tokens: int
    predicted_tokens: int
    prompt_per_second: float  # computed prompt tokens per second, until the first generated token
    predicted_per_second: float  # generated tokens after the first
    tokens_per_step: float = 1.0  # of the generated tokens after the first; > 1 with speculative decoding
    drafted_tokens: int = 0  # drafted tokens that were verified
    accepted_tokens: int = 0  # drafted tokens that were right


@dataclass(frozen=True)
class _Counted:
    """Steps [start, end) of an answer, summed only on request, so that they cost nothing during decoding."""

    summary: Summary
    steps: list[StepStats]
    start: int
    end: int

    def chunk(self) -> StatsSummary | None:
        return self.summary(self.steps[self.start : self.end])

    def answer(self) -> StatsSummary | None:
        return self.summary(self.steps[1 : self.end] or self.steps[: self.end])


@dataclass(slots=True)  # (a frozen one takes five times as long to create, and every token needs one)
class Chunk:
    """A piece of an answer during generation.

    text: may be empty, because half a character, or the possible beginning of a stop string or call, is held
    back. tokens: the ids generated since the last chunk. logprobs: one per token, if requested.
    finish_reason: set in the last chunk, see Completion. parts: in a `chat`, the piece as text, reasoning and
    function calls, in order. tool_calls: in a `chat`, the calls that are complete with this chunk.
    """

    text: str
    tokens: list[int]
    logprobs: list[TokenLogprobs]
    finish_reason: FinishReason | None
    timings: Timings
    parts: list[Part] = field(default_factory=list)
    tool_calls: list[ToolCall] = field(default_factory=list)
    _counted: _Counted | None = field(default=None, repr=False, compare=False)

    @property
    def reasoning(self) -> str:
        """The reasoning in this piece of a `chat`."""
        return "".join(part.text for part in self.parts if isinstance(part, ReasoningChunk))

    @property
    def stats(self) -> StatsSummary | None:
        """Statistics of this token's step, mean per token (the first step includes the prompt).

        None if no neuron can be skipped. They are computed on request, in a few milliseconds.
        """
        return self._counted.chunk() if self._counted else None

    @property
    def answer_stats(self) -> StatsSummary | None:
        """Return the same as Completion.stats, for the answer so far."""
        return self._counted.answer() if self._counted else None


@dataclass(frozen=True, slots=True, repr=False)
class Completion:
    """A finished answer. Notebooks show its text and speed.

    tokens: all generated ids, including the end-of-sequence token if there was one (without text).
    prompt_tokens: the number of tokens in the prompt. seed: draws the same answer again. finish_reason:
    "stop" (the model ended it, or a stop string occurred), "length" (max_tokens or the end of the context),
    "cancelled" (the model was closed), "timeout" (its time limit was reached).
    """

    text: str
    tokens: list[int]
    logprobs: list[TokenLogprobs]
    prompt_tokens: int
    finish_reason: FinishReason
    seed: int
    timings: Timings
    _counted: _Counted | None = field(default=None, repr=False, compare=False)

    @property
    def stats(self) -> StatsSummary | None:
        """Statistics of a generated token, mean over those after the first.

        None if no neuron can be skipped. They are computed on request: 0.1 ms per token.
        """
        return self._counted.answer() if self._counted else None

    def __repr__(self) -> str:
        return f"Completion({shown(self.text)}, {self._summary()}, seed={self.seed})"

    def _repr_html_(self) -> str:
        text = f"<pre style='white-space: pre-wrap'>{escape(self.text)}</pre>"
        return f"{text}<small>{escape(self._summary())}</small>"

    def _summary(self) -> str:
        speed = f"{self.timings.predicted_per_second:.1f} tokens/s"
        return f"{len(self.tokens)} tokens, finish_reason={self.finish_reason!r}, {speed}"

    def to_pandas(self) -> Any:
        """Return a DataFrame with a row per token.

        The columns are its id and, if requested, its `text`, its `logprob` and `top`, a dictionary of the
        most likely tokens. Raises HotsetError without pandas.
        """
        columns: dict[str, list[Any]] = {"token": self.tokens}
        if self.logprobs:
            columns["text"] = [one.text for one in self.logprobs]
            columns["logprob"] = [one.logprob for one in self.logprobs]
            columns["top"] = [dict(one.top) for one in self.logprobs]
        return data_frame(columns)


@dataclass(frozen=True, slots=True, repr=False)
class ChatMessage:
    """An answer in a conversation; append it to the messages to continue. Notebooks show it.

    content: the text for the reader. tool_calls: the functions that the model calls; their results are
    messages with the role "tool". reasoning: the thoughts before the content. completion: the whole output.
    """

    content: str
    completion: Completion
    role: str = "assistant"
    tool_calls: tuple[ToolCall, ...] = ()
    reasoning: str = ""

    def as_dict(self) -> dict[str, Any]:
        """Return the message in OpenAI's form."""
        message: dict[str, Any] = {"role": self.role, "content": self.content}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.tool_calls:
            message["tool_calls"] = [call.as_dict() for call in self.tool_calls]
        return message

    def __repr__(self) -> str:
        return f"ChatMessage({self.role!r}, {shown(self.content)})"

    def _repr_html_(self) -> str:
        return self.completion._repr_html_()


class ChatOptions(Sampling, total=False):
    """The keywords of `chat`, for editors and type checkers."""

    tools: Sequence[Mapping[str, Any]] | None
    tool_choice: str | Mapping[str, Any]
    parallel_tool_calls: bool
    variables: Mapping[str, Any] | None


Prompt = str | Sequence[int] | np.ndarray
Messages = Sequence[Mapping[str, Any] | ChatMessage]


class Generation:
    """A sequence in the engine, and its text so far.

    thread: computes it. summary: computes statistics from steps. reading: how its text is parsed, with a
    parser only for this answer. Use it as a context manager: leaving it cancels what still runs. token_times:
    the time at which each taken token was generated, time.perf_counter() seconds.
    """

    def __init__(
        self,
        thread: EngineThread,
        sequence: EngineSequence,
        params: SamplingParams,
        tokenizer: Tokenizer,
        summary: Summary,
        reading: Reading = Reading(),  # noqa: B008
    ) -> None:
        self.sequence = sequence
        self.completion: Completion | None = None
        self.thread = thread
        self._summary = summary
        self._tokenizer, self._reading = tokenizer, reading
        if sequence.sampler is not None:
            sequence.sampler.forcing = reading.thinking
        self._decoder = tokenizer.stream(skip_special=True, shown=reading.marks)
        self._matcher = StopMatcher(params.stop)
        self._text = ""
        self._gathered = Gathered()  # by the parser
        self._n_complete = 0  # calls of them
        self._tokens: list[int] = []
        self._logprobs: list[TokenLogprobs] = []
        self.token_times: list[float] = []

    @property
    def stop(self) -> str | None:
        """The stop string that ended the answer, or None."""
        return self._matcher.matched

    @property
    def n_calls(self) -> int:
        """The number of function calls so far."""
        return len(self._gathered.calls)

    @property
    def message(self) -> ChatMessage:
        """The finished answer as a message of a conversation."""
        assert self.completion is not None
        if self._reading.parser is None:
            return ChatMessage(self.completion.text, self.completion)
        found = self._gathered
        return ChatMessage(
            found.text, self.completion, tool_calls=tuple(found.calls), reasoning=found.reasoning
        )

    def cancel_soon(self) -> None:
        """Cancel what still runs, without waiting."""
        self.thread.cancel_soon([self.sequence])

    def __enter__(self) -> Generation:
        self.thread.submit(self.sequence)
        return self

    def __exit__(self, *_: object) -> None:
        self.thread.cancel([self.sequence])

    def chunks(self) -> Iterator[Chunk]:
        """Yield the answer in pieces; set `completion` with the last one. Raises a step's error."""
        while self.completion is None:
            chunk = self.take(self.thread.next_event(self.sequence))
            if self.completion is not None:  # by a stop string: free its blocks before the next request
                self.thread.cancel([self.sequence])
            yield chunk

    def finish(self) -> Completion:
        """Return the whole answer."""
        if not self._matcher.stops:  # with stop strings, every token must be checked
            self.thread.wait_for_end(self.sequence)
        for _ in self.chunks():
            pass
        assert self.completion is not None
        return self.completion

    def take(self, event: Event) -> Chunk:
        """Add an event to the answer and return its chunk; the last one sets `completion`.

        A stop string, or a second call if only one is allowed, ends the answer while the sequence still runs:
        then the caller cancels it. Raises the error of a failed step.
        """
        if event.error is not None:
            raise event.error
        n_before = len(self._tokens)
        finish_reason = event.finish_reason
        text = ""
        if event.token is not None:
            self._tokens.append(event.token)
            self.token_times.append(event.time)
            if event.logprobs is not None:
                self._logprobs.append(self._spelled(event.logprobs))
            if event.token not in self.sequence.stop_ids:
                text = self._matcher.push(self._decoder.push(event.token))
        if finish_reason is not None and not self._matcher.stopped:
            text += self._matcher.push(self._decoder.flush())
            text += self._matcher.flush()
        if self._matcher.stopped:
            finish_reason = "stop"
        self._text += text
        parts: list[Part] = [Text(text)] if text else []
        parser = self._reading.parser
        if parser is not None:
            parts = parser.push(text) + (parser.finish() if finish_reason is not None else [])
            if parser.n_calls > 1 and not self._reading.parallel:
                parts = list(takewhile(lambda part: not isinstance(part, CallStart) or not part.call, parts))
                finish_reason = "stop"
            text = "".join(part.text for part in parts if isinstance(part, Text))
            for part in parts:
                self._gathered.add(part)
        calls = self._completed(ends=finish_reason is not None)
        steps, n_after = self.sequence.step_stats, len(self._tokens)
        counted = _Counted(self._summary, steps, n_before, n_after) if steps else None
        timings = self._timings()
        if finish_reason is not None:
            assert self.sequence.sampler is not None
            self.completion = Completion(
                text=self._text,
                tokens=self._tokens,
                logprobs=self._logprobs,
                prompt_tokens=self.sequence.n_prompt,
                finish_reason=finish_reason,
                seed=self.sequence.sampler.seed,
                timings=timings,
                _counted=counted,
            )
        logprobs = self._logprobs[n_before:]
        tokens = self._tokens[n_before:]
        return Chunk(text, tokens, logprobs, finish_reason, timings, parts, calls, counted)

    def _completed(self, *, ends: bool) -> list[ToolCall]:
        """Return the calls that have become complete, each once."""
        begin = self._n_complete
        self._n_complete = max(begin, self.n_calls - (0 if ends else 1))
        return self._gathered.calls[begin : self._n_complete]

    def _spelled(self, one: TokenLogprobs) -> TokenLogprobs:
        tops = tuple(self._tokenizer.token_text(token) for token, _ in one.top)
        return one._replace(text=self._tokenizer.token_text(one.token), top_texts=tops)

    def _timings(self) -> Timings:
        """Return the timings up to the latest taken token, though the engine may be further."""
        sequence, n, times = self.sequence, len(self._tokens), self.token_times
        first, last = (times[0], times[-1]) if times else (0.0, 0.0)
        before, after = first - sequence.started, last - first
        return Timings(
            sequence.n_prompt,
            sequence.n_reused,
            n,
            (sequence.n_prompt - sequence.n_reused) / before if before > 0 else 0.0,
            (n - 1) / after if after > 0 else 0.0,
            sequence.tokens_per_step,
            sequence.n_drafted,
            sequence.n_accepted,
        )


def sampling_params(params: Mapping[str, Any], defaults: Mapping[str, Any]) -> SamplingParams:
    """Return SamplingParams from names and values. defaults: the model's, for missing parameters."""
    known = [field.name for field in fields(SamplingParams)]
    for name in params:
        if name not in known:
            near = did_you_mean(name.lower(), {one: one for one in known} | OTHER_NAMES, least=0.75)
            raise InvalidRequestError(
                f"unknown parameter {clause(shown(name))}; "
                + (near or f"the parameters are {', '.join(known)}"),
                param=name,
            )
    return SamplingParams(**{**defaults, **params})


def checked_messages(messages: Sequence[Mapping[str, Any] | ChatMessage]) -> list[dict[str, Any]]:
    """Return OpenAI's messages as plain dictionaries whose content is a string.

    A content with images becomes an ImageText. Function calls, which may replace a content, are checked too.
    Raises InvalidRequestError.
    """
    if isinstance(messages, str | Mapping) or not messages:
        raise InvalidRequestError('messages must be a list such as [{"role": "user", "content": "Hello"}]')
    checked: list[dict[str, Any]] = []
    for i, message in enumerate(messages):
        if isinstance(message, ChatMessage):
            message = message.as_dict()
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise InvalidRequestError(f"message {i} must be a dictionary with a role and a content")
        message = checked_calls(message, i)
        content = message.get("content")
        if isinstance(content, list):
            content = joined("", [_text_part(part, i) for part in content])
        if not isinstance(content, str):
            raise InvalidRequestError(f"the content of message {i} must be text, not {shown(content)}")
        given = {name: value for name, value in message.items() if value is not None}  # null means absent
        checked.append({**given, "content": content})
    return checked


def template_variables(variables: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return additional variables of a chat template. Raises InvalidRequestError for the template's own."""
    own = ("self", "messages", "tools", "add_generation_prompt", "bos_token", "eos_token")
    for name in variables:
        if name in own or not name.isidentifier():
            raise InvalidRequestError(f"{clause(shown(name))} cannot be a variable of a chat template")
    return variables


def _text_part(part: Any, i: int) -> str:
    """Return a part of a content as text; an image becomes an ImageText."""
    if isinstance(part, Mapping):
        if part.get("type") == "text" and isinstance(part.get("text"), str):
            return str(part["text"])
        try:
            if (image := given_image(part)) is not None:
                return text_of_image(image)
        except InvalidRequestError as error:
            raise InvalidRequestError(f"message {i}: {error}") from None
    raise InvalidRequestError(f"message {i} has a part that is neither a text nor an image")
