"""Sequences, the engine's requests, and their events.

A sequence is a list of tokens of which the first `n_computed` are in the KV cache. The missing ones are
computed next. This rule covers a new prompt, a chunk of a long one, decoding (one token is missing) and a
preempted sequence that starts again.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

import numpy as np

from hotset.backends.base import BLOCK_SIZE, NO_ADAPTERS, AdapterScales, StepStats
from hotset.engine.blocks import BlockReading
from hotset.engine.images import SequenceImages
from hotset.engine.kv_cache import NONE_THRESHOLDED, ROOT
from hotset.engine.sampler import Sampler, TokenLogprobs
from hotset.parameters import real_number

FinishReason = Literal["stop", "length", "cancelled", "timeout", "error"]


class Event(NamedTuple):
    """A generated token, or the end of a sequence, or both.

    token: None for an end without a token. logprobs: of the token, if requested. time: of the event,
    time.perf_counter() seconds. finish_reason: set in the last event. error: the cause of an "error" end.
    """

    token: int | None
    logprobs: TokenLogprobs | None
    time: float
    finish_reason: FinishReason | None
    error: Exception | None


class EventSink(Protocol):
    """A receiver of a sequence's events, such as a queue."""

    def put(self, event: Event) -> None:
        """Accept an event without blocking: the engine's thread calls it."""


@dataclass(frozen=True)
class Owner:
    """The client of a sequence, and its deadline.

    client: any key; waiting clients take turns. deadline: time.perf_counter() seconds, after which the
    sequence ends with "timeout", whether it runs or waits.
    """

    client: str | None = None
    deadline: float = math.inf

    @classmethod
    def of(cls, client: str | None, seconds: float | None) -> Owner:
        """Return an owner whose deadline is in `seconds`; None: never. Raises InvalidRequestError if < 0."""
        if seconds is None:
            return cls(client)
        return cls(client, time.perf_counter() + real_number("seconds", seconds, 0))


class Sequence:
    """A request in the engine; made by `Engine.prepare`, `prepare_score` and `prepare_tap`.

    tokens: prompt and generated token ids. n_prompt: how many of them are the prompt. images: of the prompt,
    whose tokens have negative ids (engine/images.py); None: no images.
    n_reused: prompt tokens found in the cache. logprobs: one entry per generated token, if requested.
    finish_reason: None while it runs; "stop" (a stop token, which is the last of `tokens`), "length"
    (max_tokens or the end of the context), "cancelled", "timeout" (its deadline passed, running or waiting),
    or "error" (then `error` holds the exception).
    first_thresholded_token: index of the first token that is computed with small values set to zero.
    adapter_scales: its adapters (LoRA) and their scales.
    draft: tokens that may follow, to be verified in the next step; n_drafted, n_accepted: counts of verified
    and right drafted tokens. n_steps: steps in which it got tokens.
    client, deadline: from its Owner.
    started, first_token, last_token: time.perf_counter() seconds; 0.0 until it happened.
    reading: blocks of its prompt that are read from disk, until it is admitted. id_slot: the key of its
    tokens in Engine.slots once it has finished; None: `slot`.
    step_stats: statistics of the step of each generated token, which include the other sequences of the step;
    empty unless the engine collects them.
    events: receives an Event for each generated token and for the end; None: no events.
    all_notified: set after the last event.
    process: id of the process that the sequence belongs to.
    """

    __slots__ = (
        "adapter_scales",
        "all_notified",
        "blocks",
        "chain",
        "client",
        "deadline",
        "draft",
        "error",
        "events",
        "finish_reason",
        "first_output",
        "first_thresholded_token",
        "first_token",
        "has_default_adapters",
        "id_slot",
        "images",
        "last_token",
        "logprobs",
        "n_accepted",
        "n_computed",
        "n_drafted",
        "n_notified",
        "n_prompt",
        "n_registered",
        "n_reused",
        "n_steps",
        "n_tokens_max",
        "on_logits",
        "on_tap",
        "preempted",
        "process",
        "reading",
        "reuse_prefix",
        "sampler",
        "slot",
        "started",
        "states",
        "step_stats",
        "stop_ids",
        "tap",
        "tokens",
        "waits_for_mask",
    )

    def __init__(self, tokens: list[int], n_tokens_max: int, owner: Owner) -> None:
        self.tokens = tokens
        self.n_prompt = len(tokens)
        self.images: SequenceImages | None = None
        self.first_thresholded_token = NONE_THRESHOLDED
        self.adapter_scales, self.has_default_adapters = NO_ADAPTERS, True
        self.sampler: Sampler | None = None
        self.n_tokens_max = n_tokens_max
        self.stop_ids: frozenset[int] = frozenset()
        self.on_logits: Callable[[int, np.ndarray], None] | None = None
        self.first_output = 0  # the next prompt position to report to on_logits
        self.tap: str | None = None  # the value of the graph to report to on_tap
        self.on_tap: Callable[[int, np.ndarray], None] | None = None
        self.reuse_prefix = True
        self.waits_for_mask = False  # its constraint still computes the mask of the next token
        self.logprobs: list[TokenLogprobs] = []
        self.finish_reason: FinishReason | None = None
        self.error: Exception | None = None
        self.draft: list[int] = []
        self.n_drafted = self.n_accepted = self.n_steps = 0
        self.n_reused = 0
        self.n_computed = 0
        self.blocks: list[int] = []
        self.n_registered = 0  # how many of its first blocks other sequences can find
        self.chain = ROOT  # serial number of the last of these
        # Slots of recurrent states by the number of tokens before them. The sequence continues from the one
        # at n_computed; the step in flight, or a cancelled one, writes the others.
        self.states: dict[int, int] = {}
        self.reading: BlockReading | None = None
        self.id_slot: int | None = None
        self.slot = -1  # row of the block table while it runs
        self.started = 0.0
        self.first_token = 0.0
        self.last_token = 0.0
        self.step_stats: list[StepStats] = []
        self.events: EventSink | None = None
        self.all_notified = threading.Event()
        self.n_notified = len(tokens)  # tokens whose events were sent
        self.process = os.getpid()
        self.client, self.deadline = owner.client, owner.deadline
        self.preempted = False  # whether it has ever been preempted

    def choose(self, scales: AdapterScales) -> None:
        """Choose adapters; otherwise the sequence gets the default ones when it is queued."""
        self.adapter_scales, self.has_default_adapters = scales, False

    def notify(self) -> None:
        """Send events for new tokens and for the end."""
        if self.events is None:
            return
        n = len(self.tokens)
        for i in range(self.n_notified, n):
            logprobs = self.logprobs[i - self.n_prompt] if self.logprobs else None
            last = i == n - 1 and self.error is None
            self.events.put(
                Event(self.tokens[i], logprobs, self.last_token, self.finish_reason if last else None, None)
            )
        if self.finish_reason is not None and (n == self.n_notified or self.error is not None):
            self.events.put(Event(None, None, time.perf_counter(), self.finish_reason, self.error))
        self.n_notified = n
        if self.finish_reason is not None:
            self.all_notified.set()

    @property
    def generated(self) -> list[int]:
        """Return the generated token ids so far (a copy)."""
        return self.tokens[self.n_prompt :]

    @property
    def prompt_per_second(self) -> float:
        """Return the prompt tokens computed (not reused) per second until the first generated token."""
        seconds = self.first_token - self.started
        return (self.n_prompt - self.n_reused) / seconds if seconds > 0 else 0.0

    @property
    def predicted_per_second(self) -> float:
        """Return the generated tokens per second after the first; 0.0 before the second."""
        seconds = self.last_token - self.first_token
        return (len(self.tokens) - self.n_prompt - 1) / seconds if seconds > 0 else 0.0

    @property
    def tokens_per_step(self) -> float:
        """Return the generated tokens per step after the first; 1.0 before there are any."""
        return (len(self.tokens) - self.n_prompt - 1) / (self.n_steps - 1) if self.n_steps > 1 else 1.0

    # ---- input of the next step

    @property
    def n_missing(self) -> int:
        """Return how many tokens are not computed yet."""
        return len(self.tokens) - self.n_computed

    def coming(self, n: int) -> list[int]:
        """Return the next n tokens to compute: its own, then its draft."""
        end = self.n_computed + n
        tokens = self.tokens[self.n_computed : end]
        return tokens if len(tokens) == n else tokens + self.draft[: n - len(tokens)]

    @property
    def n_reusable_blocks(self) -> int:
        """Return how many blocks it may share.

        It must compute at least one token, and all tokens whose logits are needed.
        """
        reusable = len(self.tokens) - 1
        if self.on_logits:
            reusable = min(reusable, self.first_output)
        return reusable // BLOCK_SIZE if self.reuse_prefix else 0

    def n_rows(self, n: int) -> int:
        """Return for how many tokens, at the end of its next n, logits are needed."""
        end = self.n_computed + n
        n_rows = max(end - len(self.tokens) + 1, 0) if self.sampler is not None else 0
        if self.on_logits and end <= self.n_prompt:
            n_rows = max(n_rows, end - max(self.first_output, self.n_computed))
        return n_rows
