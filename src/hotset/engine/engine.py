"""The step loop: which tokens run next, in which pages, and what becomes of their logits.

`Engine.step()` is the whole loop. A sequence is a list of tokens of which the first `n_computed` are in the
KV cache; whatever is missing is computed next. That one rule covers a new prompt, a chunk of a long one,
decoding (one token is missing) and a sequence that lost its pages and starts again. Since the logits of a
token never depend on its neighbours and each sequence draws from its own generator, none of this changes the
text.

The engine knows token ids only. It is driven by one thread at a time, in general by that of driver.py;
`interrupt` may come from any. What becomes of a sequence is told to its queue of events, if it has one.
"""

from __future__ import annotations

import math
import os
import threading
import time
import traceback
from collections.abc import Callable, Collection
from collections.abc import Sequence as Tokens
from dataclasses import replace
from typing import Literal, NamedTuple, Protocol, assert_never

import numpy as np

from hotset.backends.base import PAGE_SIZE, Backend, Batch, StepResult, StepStats
from hotset.engine.counters import Counters
from hotset.engine.kv_cache import NONE_CUT, ROOT, PagePool, dense_in_page
from hotset.engine.pacing import PROMPT_SECONDS, Chunk, PromptShare, divide, weigher
from hotset.engine.queue import WaitingQueue
from hotset.engine.sampler import Constraint, Sampler, SamplingParams, TokenLogprobs
from hotset.engine.states import StatePool
from hotset.errors import (
    CacheLostError,
    ContextLengthError,
    InvalidRequestError,
    OutOfMemoryError,
    StepCancelledError,
)
from hotset.parameters import real_number

CutTokens = Literal["none", "answers", "all"]
FinishReason = Literal["stop", "length", "cancelled", "timeout", "error"]

_MAX_LOGITS_BYTES = 64 << 20  # logits that one step hands to `score`


class Event(NamedTuple):
    """A generated token, or the end of a sequence, or both.

    token: None for an end without one. logprobs: of the token, if asked for. time: when it came,
    time.perf_counter() seconds. finish_reason: set in the last event. error: what ended it, for "error".
    """

    token: int | None
    logprobs: TokenLogprobs | None
    time: float
    finish_reason: FinishReason | None
    error: Exception | None


class EventSink(Protocol):
    """Where the events of a sequence go: a queue, or whatever passes them on."""

    def put(self, event: Event) -> None:
        """Takes an event, at once: the thread that computes calls it."""


class Sequence:
    """One request on its way through the engine; made by `Engine.prepare`, `score` and `prepare_tap`.

    tokens: prompt and generated token ids. n_prompt: how many of them are the prompt.
    n_reused: prompt tokens found in the cache. logprobs: one entry per generated token, if asked for.
    finish_reason: None while it runs; "stop" (a stop token, which is the last of `tokens`), "length"
    (max_tokens or the end of the context), "cancelled", "timeout" (its time was over, whether it ran or
    waited), or "error" (then `error` holds the exception).
    n_dense: tokens before it are computed as they are, those from it on without their small values.
    client: who asked, for a fair order; any key. deadline: time.perf_counter() seconds when it ends.
    started, first_token, last_token: time.perf_counter() seconds; 0.0 until it happened.
    step_stats: of the step that gave each generated token, with what other sequences had in it; empty unless
    the engine collects them.
    events: where the engine puts an Event for each generated token and for the end; None: nowhere.
    all_told: set when the last of them is there.
    process: the id of the process that the sequence belongs to.
    """

    __slots__ = (
        "all_told",
        "chain",
        "client",
        "deadline",
        "error",
        "events",
        "finish_reason",
        "first_output",
        "first_token",
        "last_token",
        "logprobs",
        "n_computed",
        "n_dense",
        "n_prompt",
        "n_registered",
        "n_reused",
        "n_tokens_max",
        "n_told",
        "on_logits",
        "on_tap",
        "pages",
        "preempted",
        "process",
        "reuse_prefix",
        "sampler",
        "slot",
        "started",
        "states",
        "step_stats",
        "stop_ids",
        "tap",
        "tokens",
    )

    def __init__(self, tokens: list[int], sampler: Sampler | None, n_tokens_max: int) -> None:
        self.tokens = tokens
        self.n_prompt = len(tokens)
        self.n_dense = NONE_CUT
        self.sampler = sampler
        self.n_tokens_max = n_tokens_max
        self.stop_ids: frozenset[int] = frozenset()
        self.on_logits: Callable[[int, np.ndarray], None] | None = None
        self.first_output = 0  # the next position of the prompt that on_logits waits for
        self.tap: str | None = None  # the value of the graph that on_tap waits for
        self.on_tap: Callable[[int, np.ndarray], None] | None = None
        self.reuse_prefix = True
        self.logprobs: list[TokenLogprobs] = []
        self.finish_reason: FinishReason | None = None
        self.error: Exception | None = None
        self.n_reused = 0
        self.n_computed = 0
        self.pages: list[int] = []
        self.n_registered = 0  # pages that other sequences can find, from the first on
        self.chain = ROOT  # serial number of the last of them
        # Slots of recurrent states by the number of tokens before: from that of n_computed it goes on, the
        # others are those that the step in flight writes, or (of one that was cancelled) wrote in part.
        self.states: dict[int, int] = {}
        self.slot = -1  # row of the page table while it runs
        self.started = 0.0
        self.first_token = 0.0
        self.last_token = 0.0
        self.step_stats: list[StepStats] = []
        self.events: EventSink | None = None
        self.all_told = threading.Event()
        self.n_told = len(tokens)  # tokens before this have had their events
        self.process = os.getpid()
        self.client: str | None = None
        self.deadline = math.inf
        self.preempted = False  # it lost its pages once

    def tell(self) -> None:
        """Puts what is new into the queue of events."""
        if self.events is None:
            return
        n = len(self.tokens)
        for i in range(self.n_told, n):
            logprobs = self.logprobs[i - self.n_prompt] if self.logprobs else None
            last = i == n - 1
            self.events.put(
                Event(self.tokens[i], logprobs, self.last_token, self.finish_reason if last else None, None)
            )
        if self.finish_reason is not None and (n == self.n_told or self.error is not None):
            self.events.put(Event(None, None, time.perf_counter(), self.finish_reason, self.error))
        self.n_told = n
        if self.finish_reason is not None:
            self.all_told.set()

    @property
    def generated(self) -> list[int]:
        """The generated token ids so far (a copy)."""
        return self.tokens[self.n_prompt :]

    @property
    def prompt_per_second(self) -> float:
        """Prompt tokens computed (not reused) per second until the first generated token."""
        seconds = self.first_token - self.started
        return (self.n_prompt - self.n_reused) / seconds if seconds > 0 else 0.0

    @property
    def predicted_per_second(self) -> float:
        """Generated tokens per second after the first; 0.0 before there is a second."""
        seconds = self.last_token - self.first_token
        return (len(self.tokens) - self.n_prompt - 1) / seconds if seconds > 0 else 0.0


class _Flight(NamedTuple):
    """A step that the backend runs: when it began, how long it will take, both in seconds; what it does of
    prompts, in units (engine/pacing.py)."""

    begun: float
    seconds: float
    units: float


class Engine:
    """Runs sequences on a backend, several at once.

    n_ctx: tokens that one sequence may have, prompt and answer together.
    max_sequences: how many run at once (fewer, where the backend has too few slots for their states); the
    others wait for their turn. max_batch: tokens of a step, where it is to take fewer than the backend could.
    prompt_seconds: how much longer than without them the prompts in a step may make it, where that is not
    less than a step of answers takes; inf: as long as they like, as where one sequence runs at once
    (engine/pacing.py). flops: of a token, by the number of tokens before it; None: the same for all.
    cut: whose small values are zero where the graph cuts them (graph.Cutoff): those of generated tokens, or
    of prompts too. It is a fact of a token, whatever step it is in and however often it is computed.
    collect_stats: asks the backend for the statistics of every step; step_stats then holds the latest.
    Raises OutOfMemoryError when the cache of the backend cannot hold one whole context.
    """

    def __init__(
        self,
        backend: Backend,
        n_ctx: int,
        max_sequences: int = 16,
        *,
        max_batch: int | None = None,
        collect_stats: bool = False,
        prompt_seconds: float = PROMPT_SECONDS,
        cut: CutTokens = "none",
        flops: Callable[[float], float] | None = None,
    ) -> None:
        if n_ctx < 1:
            raise InvalidRequestError(f"n_ctx must be at least 1, not {n_ctx}")
        max_pages = -(-n_ctx // PAGE_SIZE)
        if backend.n_pages < max_pages:
            raise OutOfMemoryError(
                f"a context of {n_ctx} tokens needs {max_pages} pages of the KV cache, "
                f"which has {backend.n_pages}; lower n_ctx to {backend.n_pages * PAGE_SIZE}"
            )
        self.backend = backend
        self.n_ctx = n_ctx
        self.collect_stats = collect_stats
        if backend.n_states:  # each needs one to go on from and one to write, and so does `take_states`
            if backend.n_states < 4:
                raise OutOfMemoryError(
                    f"a cache of {backend.n_states} recurrent states is too small; 4 will do"
                )
            max_sequences = min(max_sequences, backend.n_states // 2 - 1)
        self.max_sequences = max_sequences
        self.cut = cut
        self.step_stats: StepStats | None = None
        self._max_batch = min(max_batch or backend.max_batch, backend.max_batch)
        self._max_outputs = max(1, _MAX_LOGITS_BYTES // (4 * backend.n_vocab))
        self._tokens = np.zeros(self._max_batch, np.int32)
        self._positions = np.zeros(self._max_batch, np.int32)
        self._sequences = np.zeros(self._max_batch, np.int32)
        self._outputs = np.zeros(self._max_batch, np.int32)
        self._cut = np.zeros(self._max_batch, np.bool_)
        self._states = np.full(max_sequences, -1, np.int32)
        self._saves = np.full(self._max_batch, -1, np.int32)
        self._page_tables = np.full((max_sequences, max_pages), -1, np.int32)
        # Beside the only sequence nobody waits for the end of a step.
        self._prompt_share = PromptShare(math.inf if self.max_sequences == 1 else prompt_seconds)
        self._weight = weigher(flops)
        self.latest_error: Exception | None = None  # that ended a sequence
        self._counted = Counters()
        self.reset()

    def reset(self) -> None:
        """Forgets every sequence and every prefix, as they are: a forked process has none of them."""
        self._empty_cache()
        self._lent_states: list[int] = []
        self.waiting: WaitingQueue[Sequence] = WaitingQueue()
        self.running: list[Sequence] = []  # oldest first: the last one is preempted when pages run out
        self._interrupted: set[Sequence | None] = set()  # of other threads; None: all sequences
        self._in_flight: frozenset[Sequence] = frozenset()  # of the step that the backend runs
        self._flight: _Flight | None = None  # the same step, if it may be ended for a new sequence
        self._gave_way = False  # a step was ended so
        self._next_deadline = math.inf  # of those that run or wait, or earlier
        self._seconds_each = 0.0  # that sequences run, those that came to their end lately
        self._slots = list(range(self.max_sequences - 1, -1, -1))
        self._page_tables[:] = -1

    # ---- requests ----

    def prepare(
        self,
        prompt: Tokens[int],
        params: SamplingParams | None = None,
        *,
        stop_ids: Collection[int] = (),
        reuse_prefix: bool = True,
        constraint: Constraint | None = None,
        client: str | None = None,
        seconds: float | None = None,
    ) -> Sequence:
        """A checked sequence that generates after `prompt` once it is given to `enqueue`.

        stop_ids: tokens that end the answer. reuse_prefix: False computes the whole prompt again.
        constraint: what the answer must follow; it ends with "stop" where nothing can follow.
        client: those who wait have their turn client by client. seconds: from now on, after which the answer
        ends with "timeout", whether it has begun or not; None: any number of them.
        Raises ContextLengthError when the prompt and one token do not fit, InvalidRequestError for a token id
        outside the vocabulary.
        """
        params = params or SamplingParams()
        tokens = self.checked(prompt)
        if len(tokens) >= self.n_ctx:
            raise ContextLengthError(
                f"the prompt has {len(tokens)} tokens and leaves no room for an answer in the context of "
                f"{self.n_ctx}; shorten it or load the model with a larger n_ctx"
            )
        forbidden = stop_ids if params.ignore_eos else ()
        sampler = Sampler(params, self.backend.n_vocab, tokens, forbidden, constraint)
        n_tokens_max = self.n_ctx
        if params.max_tokens is not None:
            n_tokens_max = min(n_tokens_max, len(tokens) + params.max_tokens)
        sequence = Sequence(tokens, sampler, n_tokens_max)
        sequence.n_dense = self.n_dense(sequence)
        sequence.stop_ids = frozenset(stop_ids)
        sequence.reuse_prefix = reuse_prefix
        sequence.client = client
        if seconds is not None:
            sequence.deadline = time.perf_counter() + real_number("seconds", seconds, 0)
        return sequence

    def enqueue(self, sequence: Sequence) -> None:
        """Queues a new sequence; call `step` until its `finish_reason` is set."""
        if sequence.finish_reason is None:  # it may have been cancelled before it came here
            self.waiting.append(sequence)
            self._next_deadline = min(self._next_deadline, sequence.deadline)

    def submit(
        self,
        prompt: Tokens[int],
        params: SamplingParams | None = None,
        *,
        stop_ids: Collection[int] = (),
        reuse_prefix: bool = True,
        client: str | None = None,
        seconds: float | None = None,
    ) -> Sequence:
        """`prepare` and `enqueue` in one."""
        sequence = self.prepare(
            prompt, params, stop_ids=stop_ids, reuse_prefix=reuse_prefix, client=client, seconds=seconds
        )
        self.enqueue(sequence)
        return sequence

    def score(
        self,
        tokens: Tokens[int],
        on_logits: Callable[[int, np.ndarray], None],
        *,
        first: int = 0,
        reuse_prefix: bool = True,
        as_answer: bool = False,
    ) -> Sequence:
        """`prepare_score` and `enqueue` in one."""
        sequence = self.prepare_score(
            tokens, on_logits, first=first, reuse_prefix=reuse_prefix, as_answer=as_answer
        )
        self.enqueue(sequence)
        return sequence

    def prepare_score(
        self,
        tokens: Tokens[int],
        on_logits: Callable[[int, np.ndarray], None],
        *,
        first: int = 0,
        reuse_prefix: bool = True,
        as_answer: bool = False,
    ) -> Sequence:
        """A checked sequence of tokens whose logits are wanted and after which nothing is generated.

        on_logits(position, rows) is called in order with float32 rows [n, n_vocab] of positions position,
        position + 1, ..., beginning at `first`; the rows are valid during the call. The sequence finishes
        with "length". as_answer: all tokens are computed as generated ones would be, not as a prompt.
        Raises ContextLengthError when the tokens do not fit.
        """
        checked = self._fitting(tokens)
        if not 0 <= first < len(checked):
            raise InvalidRequestError(
                f"the first scored position must be in [0, {len(checked)}), not {first}"
            )
        sequence = Sequence(checked, None, len(checked))
        sequence.on_logits = on_logits
        sequence.first_output = first
        sequence.reuse_prefix = reuse_prefix
        sequence.n_dense = self.n_dense(sequence, as_answer=as_answer)
        return sequence

    def prepare_tap(
        self, tokens: Tokens[int], name: str, on_tap: Callable[[int, np.ndarray], None]
    ) -> Sequence:
        """A sequence of which a value inside is wanted, and after which nothing is generated.

        name: of a value of the graph with a row for each token. on_tap(position, rows) is called in order, in
        the thread that computes, with float32 rows [n, width] of positions position, position + 1, ...
        All tokens are computed, and no page of them is left to others. The sequence finishes with "length".
        Raises ContextLengthError when the tokens do not fit.
        """
        checked = self._fitting(tokens)
        sequence = Sequence(checked, None, len(checked))
        sequence.tap, sequence.on_tap = name, on_tap
        sequence.n_dense = self.n_dense(sequence)
        sequence.reuse_prefix = False
        return sequence

    def n_dense(self, sequence: Sequence, *, as_answer: bool = False) -> int:
        """How many of a sequence's tokens are computed with their small values (see Sequence)."""
        match self.cut:
            case "none":
                return NONE_CUT
            case "answers":
                return 0 if as_answer else sequence.n_prompt
            case "all":
                return 0
            case _:
                assert_never(self.cut)

    def _fitting(self, tokens: Tokens[int]) -> list[int]:
        checked = self.checked(tokens)
        if len(checked) > self.n_ctx:
            raise ContextLengthError(
                f"{len(checked)} tokens do not fit in the context of {self.n_ctx}; "
                "load the model with a larger n_ctx"
            )
        return checked

    def cancel(self, sequence: Sequence) -> None:
        """Ends a queued sequence between two steps and frees its pages; a finished one stays as it is."""
        if sequence.finish_reason is None:
            self._finish(sequence, "cancelled")

    def interrupt(self, sequence: Sequence | None, *, spare_others: bool = False) -> None:
        """Cancels a sequence (None: all) from any thread, and ends the step in flight if it is in there.

        spare_others: only if nobody else is left in it, whose work would be undone. The sequence is over when
        whoever drives the engine comes to its next step, or calls `end_interrupted`. A step that was just
        about to begin is not ended: until the sequence's finish_reason is set, call again.
        """
        self._interrupted.add(sequence)
        in_flight = self._in_flight
        if spare_others and not in_flight <= self._interrupted:
            return
        if in_flight if sequence is None else sequence in in_flight:
            self.cancel_step()

    def make_way(self, sequence: Sequence) -> None:
        """Ends the step in flight, from any thread, for a new sequence that would have to wait for it long.

        That is where it reads prompts, more than the new one has to read and none to its end, and is less
        than half done: what is lost is never more than what would have been waited. The next step computes it
        again, with the new one in it, and is not ended so.
        """
        flight = self._flight
        if flight is None or self.waiting or not self._slots:
            return
        elapsed = time.perf_counter() - flight.begun
        if len(sequence.tokens) < flight.units and elapsed < flight.seconds / 2:
            self._flight, self._gave_way = None, True
            self.cancel_step()

    def cancel_step(self) -> None:
        """Ends the step in flight, whoever's it is, from any thread, where the backend can."""
        self.backend.cancel()

    def end_interrupted(self) -> None:
        """Cancels what `interrupt` asked for; for the thread that drives the engine."""
        while self._interrupted:
            sequence = self._interrupted.pop()
            for each in [*self.running, *self.waiting] if sequence is None else [sequence]:
                self.cancel(each)

    def end_overdue(self) -> None:
        """Ends those whose time is over."""
        now = time.perf_counter()
        if now < self._next_deadline:
            return
        left = math.inf
        for sequence in [*self.running, *self.waiting]:
            if sequence.deadline <= now:
                self._finish(sequence, "timeout")
            else:
                left = min(left, sequence.deadline)
        self._next_deadline = left

    def fail(self, error: Exception) -> None:
        """Ends every sequence with an error."""
        for sequence in [*self.running, *self.waiting]:
            self._fail(sequence, error)

    def take_pages(self, n_tokens: int) -> list[int]:
        """Pages of the cache for a caller that steps the backend itself; give them back to `pool.release`.

        Raises OutOfMemoryError where the running sequences leave too few.
        """
        n_pages = -(-n_tokens // PAGE_SIZE)
        if n_pages > self.pool.n_available:
            raise OutOfMemoryError(
                f"{n_tokens} tokens need {n_pages} pages of the KV cache, of which "
                f"{self.pool.n_available} are free; wait for what runs, or load with a larger n_seqs"
            )
        return [page for page in (self.pool.allocate() for _ in range(n_pages)) if page is not None]

    def take_states(self) -> np.ndarray | None:
        """Two slots for recurrent states, int32 [1, 2], for a caller that steps the backend itself; give them
        to `give_states`. None where the model has no states.

        Raises OutOfMemoryError where somebody has them already.
        """
        if self.states is None:
            return None
        if self._lent_states:
            raise OutOfMemoryError("another text has the slots for recurrent states; wait for its end")
        for sequence in self.running:
            self._drop_states(sequence)
        slots = [slot for slot in (self.states.allocate(), self.states.allocate()) if slot is not None]
        self._lent_states = slots
        return np.array([slots], np.int32)

    def give_states(self) -> None:
        """Takes back what `take_states` gave."""
        while self._lent_states and self.states is not None:
            self.states.release(self._lent_states.pop())

    @property
    def n_unfinished(self) -> int:
        """Sequences that run or wait; from another thread it may be wrong by one that changes its place."""
        return len(self.running) + len(self.waiting)

    def seconds_to_wait(self) -> float:
        """About how long it is until one of those that run comes to its end; from any thread."""
        running = list(self.running)
        oldest = max((time.perf_counter() - each.started for each in running), default=0.0)
        return (self._seconds_each or oldest) / max(len(running), 1)

    def counters(self) -> Counters:
        """The counters as they are, from any thread: of a step that is being collected perhaps a part."""
        pool = self.pool
        return replace(
            self._counted,
            running=len(self.running),
            waiting=len(self.waiting),
            pages=pool.n_pages,
            pages_used=pool.n_pages - pool.n_available,
            pages_cached=pool.n_idle,
        )

    @property
    def has_work(self) -> bool:
        """Whether `step` has anything to do."""
        return bool(self.running or self.waiting)

    # ---- the loop ----

    def step(self) -> list[Sequence]:
        """Runs one batch; returns the sequences that got a token, got logits, or ended.

        When the backend fails, the sequences of the batch end with "error" and its exception is raised; the
        others, and the engine, go on. After an interruption (Ctrl-C) every sequence can go on. A step that
        was cancelled returns nothing; what was in it is computed by the next, but for interrupted sequences.
        """
        self.end_interrupted()
        self.end_overdue()
        chunks = self._schedule()
        if not chunks:
            return []
        batch = self._assemble(chunks)
        self._in_flight = frozenset(sequence for sequence, _ in chunks)
        begun = time.perf_counter()
        n_answers = sum(n == 1 for _, n in chunks)
        units = sum(n * self._weight(sequence.n_computed) for sequence, n in chunks if n > 1)
        n_rows = sum(_n_rows(sequence, n) for sequence, n in chunks if sequence.on_logits)
        if not self._gave_way and not any(1 < n == _missing(sequence) for sequence, n in chunks):
            load = units + n_rows * self._prompt_share.of_row(n_answers)
            self._flight = _Flight(begun, self._prompt_share.seconds_of(load, n_answers), load)
        # Last of all: it wakes another thread, for which this one would have to wait while it runs Python.
        for sequence, n in chunks:
            if sequence.sampler and n == _missing(sequence):
                sequence.sampler.look_ahead()
        try:
            result = self.backend.step(batch)
        except StepCancelledError:
            self.step_stats = None
            self._counted.cancelled_steps += 1
            self.end_interrupted()
            return []
        except CacheLostError:
            self._forget_cache()
            return []
        except Exception as error:
            for sequence, _ in chunks:
                self._fail(sequence, error)
            raise
        finally:
            self._in_flight, self._flight = frozenset(), None
        self._gave_way = False
        now = time.perf_counter()
        self._counted.steps += 1
        self._counted.step_seconds += now - begun
        if self.collect_stats:
            self.step_stats = self.backend.stats()
        changed = self._collect(chunks, result, now)
        # Whoever reads rows of logits does so in here, and everyone else waits for it.
        seconds = (time.perf_counter() if n_rows else now) - begun
        self._prompt_share.note(units, n_answers, seconds, n_rows)
        return changed

    def _forget_cache(self) -> None:
        """Begins anew with every sequence that runs: it keeps its tokens, and pages hold nothing any more."""
        self.step_stats = None
        for sequence in reversed(self.running.copy()):
            self._leave(sequence)
            self.waiting.push_front(sequence)
            sequence.preempted = True
            self._counted.preemptions += 1
        self._empty_cache()

    def _empty_cache(self) -> None:
        """Numbers pages and states anew: nothing is known of what is in them."""
        self.states = StatePool(self.backend.n_states) if self.backend.n_states else None
        self.pool = PagePool(self.backend.n_pages, self.states)

    def _schedule(self) -> list[tuple[Sequence, int]]:
        """Sequences of the next batch and how many tokens of each: decoding first, then prompts in chunks.

        Prompts take no more than their share, so that answers go on and short prompts come through.
        """
        if self.waiting:
            self._admit()
        budget = self._max_batch
        chunks: list[tuple[Sequence, int]] = []
        prompts: list[Sequence] = []
        coming: set[tuple[int, int, tuple[int, ...]]] = set()  # pages that somebody is about to fill
        for sequence in self.running:
            if _missing(sequence) > 1:
                self._adopt(sequence)
                if not self._follows(sequence, coming):
                    prompts.append(sequence)
            elif budget:
                chunks.append((sequence, 1))
                budget -= 1
        share = self._prompt_share.beside if chunks else self._prompt_share.alone
        of_row = self._prompt_share.of_row(len(chunks))
        missing = [Chunk(_missing(each), self._weight_of(each, of_row)) for each in prompts]
        for sequence, n in zip(prompts, divide(missing, share, budget), strict=True):
            if sequence.on_logits:  # whole rows of logits leave the step: bound their memory
                n = min(n, max(sequence.first_output - sequence.n_computed, 0) + self._max_outputs)
            if n:
                chunks.append((sequence, n))
        for sequence, n in chunks:
            if sequence.slot >= 0 and len(sequence.pages) * PAGE_SIZE < sequence.n_computed + n:
                self._grow(sequence, n)
        chunks = [chunk for chunk in chunks if chunk[0].slot >= 0]
        if self.states is not None:
            self._reserve_states(self.states, chunks)
        return chunks

    def _weight_of(self, sequence: Sequence, of_row: float) -> float:
        """Units that the next token of a prompt takes. of_row: what its logits take, if they are wanted."""
        is_scored = sequence.on_logits is not None and sequence.n_computed >= sequence.first_output
        return self._weight(sequence.n_computed) + (of_row if is_scored else 0.0)

    def _reserve_states(self, states: StatePool, chunks: list[tuple[Sequence, int]]) -> None:
        """Slots for what the step leaves: the state after each chunk, and those behind its pages, from which
        other sequences may go on: that behind the last page, and others while slots are empty.
        """
        for sequence in self.running:
            self._drop_states(sequence)
        for sequence, n in chunks:
            slot = states.allocate()
            assert slot is not None, "more sequences run than there are slots for their states"
            sequence.states[sequence.n_computed + n] = slot
        for sequence, n in chunks:
            if sequence.tap:
                continue  # its pages are nobody else's
            last = (sequence.n_computed + n - 1) // PAGE_SIZE * PAGE_SIZE
            for end in range(last, sequence.n_computed, -PAGE_SIZE):
                slot = states.allocate(evict=end == last)
                if slot is None:
                    break
                sequence.states[end] = slot

    def _drop_states(self, sequence: Sequence) -> None:
        """Gives back all but the state that the sequence goes on from: those of the longest prefixes last."""
        if self.states is None:
            return
        for n in sorted(n for n in sequence.states if n != sequence.n_computed):
            self.states.release(sequence.states.pop(n))

    def _admit(self) -> None:
        """Lets waiting sequences run, in order, while there is a slot and room for what they must compute."""
        while self.waiting and self._slots:
            sequence = self.waiting.first()
            pages, chain = self.pool.match(
                sequence.tokens, _reusable_pages(sequence), n_dense=sequence.n_dense
            )
            n_missing = -(-len(sequence.tokens) // PAGE_SIZE) - len(pages)
            n_owed = sum(-(-len(other.tokens) // PAGE_SIZE) - len(other.pages) for other in self.running)
            # One spare page for each running sequence, lest the next of their pages throw this one out again.
            if self.running and n_missing + n_owed + len(self.running) > self.pool.n_available:
                self.pool.release(pages)
                return
            self.waiting.pop()
            self.running.append(sequence)
            sequence.slot = self._slots.pop()
            sequence.pages = pages
            sequence.chain = chain
            sequence.n_registered = len(pages)
            sequence.n_computed = len(pages) * PAGE_SIZE
            self._page_tables[sequence.slot, : len(pages)] = pages
            if self.states is not None and pages:
                sequence.states[sequence.n_computed] = self.states.take(chain)
            if not sequence.started:
                sequence.started = time.perf_counter()
                sequence.n_reused = sequence.n_computed
                self._counted.reused_tokens += sequence.n_computed

    def _adopt(self, sequence: Sequence) -> None:
        """Takes over what another sequence has computed meanwhile of the same tokens: pages, not work."""
        n = sequence.n_registered
        if sequence.n_computed != n * PAGE_SIZE:
            return
        pages, chain = self.pool.match(
            sequence.tokens, _reusable_pages(sequence), n_dense=sequence.n_dense,
            first=n, parent=sequence.chain,
        )  # fmt: skip
        if not pages:
            return
        self.pool.release(sequence.pages[n:])  # of a step that was cancelled
        sequence.pages[n:] = pages
        sequence.chain = chain
        sequence.n_registered = n + len(pages)
        if self.states is not None:
            sequence.states[sequence.n_registered * PAGE_SIZE] = self.states.take(chain)
        sequence.n_computed = sequence.n_registered * PAGE_SIZE
        self._drop_states(sequence)
        self._page_tables[sequence.slot, n : n + len(pages)] = pages
        if not sequence.preempted:
            sequence.n_reused += len(pages) * PAGE_SIZE
            self._counted.reused_tokens += len(pages) * PAGE_SIZE

    def _follows(self, sequence: Sequence, coming: set[tuple[int, int, tuple[int, ...]]]) -> bool:
        """Whether somebody before it computes the page that it needs next: then it waits for that one.

        So several answers of one prompt compute it once. What it waits for is in the next steps, whatever
        becomes of the other: one that leaves is not before it any more.
        """
        if sequence.tap:
            return False  # its pages are nobody else's
        n = sequence.n_registered
        page = tuple(sequence.tokens[n * PAGE_SIZE : (n + 1) * PAGE_SIZE])
        if len(page) < PAGE_SIZE:
            return False
        key = (sequence.chain, dense_in_page(sequence.n_dense, n), page)
        if key in coming and n < _reusable_pages(sequence) and sequence.n_computed == n * PAGE_SIZE:
            return True
        coming.add(key)
        return False

    def _grow(self, sequence: Sequence, n: int) -> None:
        """Gives a sequence the pages for `n` more tokens; the newest sequences lose theirs if need be."""
        n_pages = -(-(sequence.n_computed + n) // PAGE_SIZE)
        while len(sequence.pages) < n_pages:
            page = self.pool.allocate()
            if page is not None:
                self._page_tables[sequence.slot, len(sequence.pages)] = page
                sequence.pages.append(page)
                continue
            newest = self.running[-1]
            self._leave(newest)
            self.waiting.push_front(newest)
            newest.preempted = True
            self._counted.preemptions += 1
            if newest is sequence:
                return

    def _assemble(self, chunks: list[tuple[Sequence, int]]) -> Batch:
        """The batch, as views of buffers that live as long as the engine."""
        tokens, positions, sequences, outputs = self._tokens, self._positions, self._sequences, self._outputs
        n_tokens = n_outputs = 0
        for sequence, n in chunks:
            start = sequence.n_computed
            if n == 1:
                tokens[n_tokens] = sequence.tokens[start]
                positions[n_tokens] = start
                sequences[n_tokens] = sequence.slot
            else:
                tokens[n_tokens : n_tokens + n] = sequence.tokens[start : start + n]
                positions[n_tokens : n_tokens + n] = np.arange(start, start + n)
                sequences[n_tokens : n_tokens + n] = sequence.slot
            if self.cut != "none":
                self._cut[n_tokens : n_tokens + n] = np.arange(start, start + n) >= sequence.n_dense
            if self.states is not None:
                self._states[sequence.slot] = sequence.states[start] if start else -1
                self._saves[n_tokens : n_tokens + n] = -1
                for end, slot in sequence.states.items():
                    if end > start:
                        self._saves[n_tokens + end - start - 1] = slot
            n_rows = _n_rows(sequence, n)
            if n_rows == 1:
                outputs[n_outputs] = n_tokens + n - 1
            else:
                outputs[n_outputs : n_outputs + n_rows] = np.arange(n_tokens + n - n_rows, n_tokens + n)
            n_outputs += n_rows
            n_tokens += n
        return Batch(
            tokens[:n_tokens],
            positions[:n_tokens],
            sequences[:n_tokens],
            self._page_tables,
            outputs[:n_outputs],
            tuple(sorted({sequence.tap for sequence, _ in chunks if sequence.tap})),
            None if self.cut == "none" else self._cut[:n_tokens],
            self._states if self.states is not None else None,
            self._saves[:n_tokens] if self.states is not None else None,
        )

    def _collect(self, chunks: list[tuple[Sequence, int]], result: StepResult, now: float) -> list[Sequence]:
        """Samples, hands out rows, makes full pages findable, ends what is finished, and tells of it."""
        changed = []
        row = token = 0
        for sequence, n in chunks:
            start, end = sequence.n_computed, sequence.n_computed + n
            n_rows = _n_rows(sequence, n)
            rows, first = result.logits[row : row + n_rows], token
            row, token = row + n_rows, token + n
            is_last = end == len(sequence.tokens)
            try:
                # An interruption in here leaves n_computed behind: the chunk runs again, to the same bits.
                if sequence.on_logits and sequence.first_output < min(end, sequence.n_prompt):
                    sequence.on_logits(end - n_rows, rows)
                    sequence.first_output = end  # not again, should the sequence lose its pages
                if sequence.on_tap and sequence.tap and end > sequence.first_output:
                    new = max(sequence.first_output - start, 0)
                    sequence.on_tap(start + new, result.taps[sequence.tap][first + new : token])
                    sequence.first_output = end
                if sequence.sampler and is_last:
                    largest = None if result.largest is None else result.largest[row - 1]
                    self._append_token(sequence, rows[-1], largest, now)
            except Exception as error:
                self._fail(sequence, error)
                changed.append(sequence)
                continue
            sequence.n_computed = end
            self._counted.prompt_tokens += max(min(end, sequence.n_prompt) - start, 0)
            if end // PAGE_SIZE > sequence.n_registered and not sequence.tap:
                self._register_pages(sequence)
            self._drop_states(sequence)
            if is_last:
                constraint = sequence.sampler.constraint if sequence.sampler else None
                complete = constraint is not None and constraint.finished
                if complete or (sequence.sampler and sequence.tokens[-1] in sequence.stop_ids):
                    self._finish(sequence, "stop")
                elif len(sequence.tokens) >= sequence.n_tokens_max:
                    self._finish(sequence, "length")
            if n_rows or is_last:
                changed.append(sequence)
        # Last of all: who is told may wake another thread, for which this one would have to wait.
        for sequence in changed:
            if sequence.finish_reason is None:
                sequence.tell()
        return changed

    def _append_token(
        self, sequence: Sequence, logits: np.ndarray, largest: np.ndarray | None, now: float
    ) -> None:
        sampler = sequence.sampler
        assert sampler is not None
        token = sampler.sample(logits, largest)
        if sampler.params.logprobs is not None:
            sequence.logprobs.append(sampler.logprobs(logits, token))
        sampler.accept(token)
        sequence.tokens.append(token)
        self._counted.generated_tokens += 1
        sequence.last_token = now
        if self.step_stats is not None:
            sequence.step_stats.append(self.step_stats)
        if not sequence.first_token:
            sequence.first_token = now

    def _register_pages(self, sequence: Sequence) -> None:
        for i in range(sequence.n_registered, sequence.n_computed // PAGE_SIZE):
            tokens = sequence.tokens[i * PAGE_SIZE : (i + 1) * PAGE_SIZE]
            n_dense = dense_in_page(sequence.n_dense, i)
            sequence.chain = self.pool.register(sequence.pages[i], sequence.chain, tokens, n_dense)
            sequence.n_registered = i + 1
            if self.states is not None and sequence.n_registered * PAGE_SIZE in sequence.states:
                self.states.keep(sequence.states[sequence.n_registered * PAGE_SIZE], sequence.chain)

    # ---- ends ----

    def _leave(self, sequence: Sequence) -> None:
        """Takes a running sequence out of the batch and frees its pages; its tokens remain."""
        self.running.remove(sequence)
        self.pool.release(sequence.pages)
        self._page_tables[sequence.slot] = -1
        self._slots.append(sequence.slot)
        sequence.slot = -1
        sequence.pages = []
        if self.states is not None:
            for slot in sequence.states.values():
                self.states.release(slot)
        sequence.states = {}

    def _finish(self, sequence: Sequence, reason: FinishReason) -> None:
        sequence.finish_reason = reason
        self._count_end(reason)
        if sequence.slot >= 0:
            if reason in ("stop", "length"):
                seconds = time.perf_counter() - sequence.started
                self._seconds_each += (seconds - self._seconds_each) / (8 if self._seconds_each else 1)
            self._leave(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)
        sequence.tell()

    def _count_end(self, reason: FinishReason) -> None:
        match reason:
            case "stop" | "length":
                self._counted.finished += 1
            case "cancelled":
                self._counted.cancelled += 1
            case "timeout":
                self._counted.timed_out += 1
            case "error":
                self._counted.failed += 1
            case _:
                assert_never(reason)

    def _fail(self, sequence: Sequence, error: Exception) -> None:
        # What its traceback's frames hold, a plan and the weights behind it, would live until the collector
        # comes, since they lead back to the sequence: at a process's end too late for the native core.
        traceback.clear_frames(error.__traceback__)
        self.latest_error = sequence.error = error
        self._finish(sequence, "error")

    def checked(self, tokens: Tokens[int]) -> list[int]:
        """Token ids as a list of int; InvalidRequestError where one is not in the vocabulary."""
        try:
            checked = np.asarray(tokens)
        except ValueError:  # lists of different lengths
            checked = np.empty((0, 0))
        if checked.ndim != 1 or not checked.size or checked.dtype.kind not in "iu":
            raise InvalidRequestError("a prompt must be one or more token ids, whole numbers in a flat list")
        outside = checked[(checked < 0) | (checked >= self.backend.n_vocab)]
        if outside.size:
            raise InvalidRequestError(
                f"token {outside[0]} is not in the vocabulary of {self.backend.n_vocab} tokens"
            )
        result: list[int] = checked.tolist()
        return result


def _missing(sequence: Sequence) -> int:
    """Tokens that are not in the cache yet."""
    return len(sequence.tokens) - sequence.n_computed


def _reusable_pages(sequence: Sequence) -> int:
    """Pages that it may take from others: one token must be computed, and all whose logits are wanted."""
    reusable = len(sequence.tokens) - 1
    if sequence.on_logits:
        reusable = min(reusable, sequence.first_output)
    return reusable // PAGE_SIZE if sequence.reuse_prefix else 0


def _n_rows(sequence: Sequence, n: int) -> int:
    """Of how many tokens at the end of its next n the logits are wanted."""
    end = sequence.n_computed + n
    n_rows = int(sequence.sampler is not None and end == len(sequence.tokens))
    if sequence.on_logits and end <= sequence.n_prompt:
        n_rows = max(n_rows, end - max(sequence.first_output, sequence.n_computed))
    return n_rows
