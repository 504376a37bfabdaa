"""The step loop: schedule, run, collect.

`Engine.step()` is the whole loop: the scheduler chooses tokens (scheduler.py), the batch is built (batch.py),
the backend computes it, and logits become tokens and events. The logits of a token never depend on the rest
of the batch, and each sequence has its own random generator. So no schedule changes the text.

The engine handles token ids only. One thread at a time runs it, usually the thread of driver.py; `interrupt`
may be called from any thread.
"""

from __future__ import annotations

import math
import time
import traceback
from collections.abc import Callable, Collection, Generator, Iterable
from collections.abc import Sequence as Tokens
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, assert_never

import numpy as np

from hotset.backends.adapters import ADAPTER_GONE, AdapterSet, taking_adapters
from hotset.backends.base import BLOCK_SIZE, NO_ADAPTERS, AdapterScales, Backend, StepResult, StepStats
from hotset.engine.batch import BatchBuilder
from hotset.engine.blocks import Prefix
from hotset.engine.counters import Counters
from hotset.engine.images import ImagePrompt, ImageTokens, SequenceImages
from hotset.engine.kv_cache import NONE_THRESHOLDED
from hotset.engine.pacing import PROMPT_SECONDS
from hotset.engine.sampler import (
    Constraint,
    RowLogprobs,
    Sampler,
    SamplingParams,
    draw_tokens,
    row_logprobs,
    token_logprobs,
)
from hotset.engine.scheduler import Chunks, Scheduler, StepLimits, prefix_of
from hotset.engine.sequence import FinishReason, Owner, Sequence
from hotset.engine.speculation import Speculator
from hotset.errors import (
    CacheLostError,
    ContextLengthError,
    InvalidRequestError,
    OutOfMemoryError,
    StepCancelledError,
)

if TYPE_CHECKING:
    from hotset.engine.prompt_cache import PromptCache

ThresholdedTokens = Literal["none", "answers", "all"]

# How long a step waits for the masks of constraints: in total; if there is only one sequence; if all
# sequences wait for masks.
MASK_SECONDS, _ALONE_SECONDS, _ALL_SECONDS = 0.1, 1.0, 0.01

_BLOCK_SECONDS = 0.01  # how long a step without other work waits for blocks from disk


class _Flight(NamedTuple):
    """A step in flight: its start and estimated duration in seconds, and its prefill cost (pacing.py)."""

    begun: float
    seconds: float
    units: float


Draws = Generator[Any, tuple[int, RowLogprobs | None], None]


@dataclass
class _Answer:
    """A sequence that draws tokens in a step.

    start: its n_computed before the step. draws: from `Engine._append_tokens`. drawn: the latest drawn token
    and its logprobs, to be sent to `draws`; None before the first.
    """

    sequence: Sequence
    start: int
    draws: Draws
    drawn: Any = None


@dataclass(frozen=True, kw_only=True)
class ModelTraits:
    """The facts of a model that the engine needs.

    thresholded: the tokens whose small values are zero if the graph has thresholds (operations.Threshold):
    the tokens of answers, or of prompts too, in every step. flops: operations of a token, by the number of
    tokens before it; None: the same for all. is_encoder: texts are computed for their values
    (`Engine.prepare_tap`), each in one step, and nothing is generated.
    """

    thresholded: ThresholdedTokens = "none"
    flops: Callable[[float], float] | None = None
    is_encoder: bool = False


NO_TRAITS = ModelTraits()


class Engine:
    """An engine that runs several sequences at once on a backend.

    n_ctx: the longest sequence in tokens, prompt and answer together. max_sequences: how many run at once, or
    fewer if the backend lacks slots for recurrent states. max_batch: tokens per step, at most the backend's.
    prompt_seconds: by how much prompts may lengthen a step, but at least by the time of a decode step; inf:
    no limit, as for a single sequence (engine/pacing.py). traits: facts of the model. speculator: drafts
    tokens (engine/speculation.py); None: one token per sequence and step. prompt_cache: stores and finds
    blocks on disk; None: off. The attribute collect_stats makes each step keep the backend's statistics in
    step_stats.

    Raises OutOfMemoryError if the backend's cache cannot hold one whole context.
    """

    def __init__(
        self,
        backend: Backend,
        n_ctx: int,
        max_sequences: int = 16,
        *,
        max_batch: int | None = None,
        prompt_seconds: float = PROMPT_SECONDS,
        traits: ModelTraits = NO_TRAITS,
        speculator: Speculator | None = None,
        prompt_cache: PromptCache | None = None,
    ) -> None:
        if n_ctx < 1:
            raise InvalidRequestError(f"n_ctx must be at least 1, not {n_ctx}")
        max_blocks = -(-n_ctx // BLOCK_SIZE)
        if backend.n_blocks < max_blocks:
            raise OutOfMemoryError(
                f"a context of {n_ctx} tokens needs {max_blocks} blocks of the KV cache, "
                f"which has {backend.n_blocks}; lower n_ctx to {backend.n_blocks * BLOCK_SIZE}"
            )
        self.backend = backend
        is_encoder, thresholded = traits.is_encoder, traits.thresholded
        self.is_encoder, self.speculator = is_encoder, speculator
        self.max_batch = max_batch = min(max_batch or backend.max_batch, backend.max_batch)
        self.n_ctx = min(n_ctx, max_batch) if is_encoder else n_ctx
        self.collect_stats = False
        if backend.n_states:  # each sequence reads one and writes another, and `take_states` needs two
            if backend.n_states < 4:
                raise OutOfMemoryError(
                    f"a cache of {backend.n_states} recurrent states is too small; at least 4 are needed"
                )
            max_sequences = min(max_sequences, backend.n_states // 2 - 1)
        self.max_sequences = max_sequences
        self.thresholded = thresholded
        self.step_stats: StepStats | None = None
        self.latest_error: Exception | None = None  # that ended a sequence
        self._counted = Counters()
        limits = StepLimits(max_sequences, max_blocks, max_batch, prompt_seconds, whole_texts=is_encoder)
        self.scheduler = Scheduler(
            backend, limits, self._counted, flops=traits.flops, speculator=speculator,
            prompt_cache=prompt_cache,
        )  # fmt: skip
        self.slots: dict[int, Prefix] | None = None  # see `keep_slots`
        self.default_adapters = NO_ADAPTERS  # of sequences that choose none
        reader = None if speculator is None else speculator.reader
        self._batches = BatchBuilder(
            max_batch, max_sequences, has_thresholds=thresholded != "none", has_states=bool(backend.n_states),
            taps=() if reader is None else (reader.reads,),
        )  # fmt: skip
        self._forget_requests()

    def reset(self) -> None:
        """Drop every sequence and cached prefix without ending them: a forked process has none of them."""
        self.scheduler.reset()
        if self.speculator is not None:
            self.speculator.reset()
        self._forget_requests()

    def close(self) -> None:
        """Write pending blocks to disk and free the drafter; safe to call twice."""
        if self.scheduler.prompt_cache is not None:
            self.scheduler.prompt_cache.close()
        if self.speculator is not None:
            self.speculator.close()

    def set_adapters(self, adapters: AdapterSet) -> None:
        """Set the adapters that sequences may use from now on; call it between two steps.

        Adapters of unfinished sequences must be among them. Raises UnsupportedModelError if the backend does
        not support adapters.
        """
        taking_adapters(self.backend).adapters = adapters
        self.default_adapters = adapters.default
        self._batches.has_adapters = bool(adapters.adapters)

    def keep_slots(self) -> dict[int, Prefix]:
        """Return the latest answer's tokens by `Sequence.id_slot`, in full blocks; recorded from now on.

        engine/saved_prefix.py stores them.
        """
        if self.slots is None:
            self.slots = {}
        return self.slots

    def _forget_requests(self) -> None:
        self._interrupted: set[Sequence | None] = set()  # to be cancelled; None: all sequences
        self._in_flight: frozenset[Sequence] = frozenset()  # sequences of the step that the backend runs
        self._flight: _Flight | None = None  # the same step, if a new sequence may cancel it
        self._was_preempted = False  # a new sequence cancelled the latest step
        self._next_deadline = math.inf  # the earliest deadline, or an earlier time
        self._seconds_each = 0.0  # average run time of recently finished sequences

    # ---- requests ----

    def prepare(
        self,
        prompt: Tokens[int] | np.ndarray | ImagePrompt,
        params: SamplingParams | None = None,
        *,
        stop_ids: Collection[int] = (),
        reuse_prefix: bool = True,
        constraint: Constraint | None = None,
        breakers: Iterable[Tokens[int]] = (),
        owner: Owner | None = None,
        adapters: AdapterScales | None = None,
    ) -> Sequence:
        """Return a checked sequence that generates after `prompt` once it is passed to `enqueue`.

        stop_ids: tokens that end the answer. reuse_prefix: False computes the whole prompt again. constraint:
        the form of the answer, which ends with "stop" when nothing may follow. breakers: see `Sampler`.
        owner: the client. adapters: None: the default ones. Raises ContextLengthError if the prompt and one
        token do not fit, and InvalidRequestError if a token id is outside the vocabulary.
        """
        self.require_logits()
        params = params or SamplingParams()
        images: Tokens[ImageTokens] = ()
        if isinstance(prompt, ImagePrompt):
            prompt, images = prompt
        tokens = self.checked(prompt)
        self.require_room(len(tokens))
        forbidden = stop_ids if params.ignore_eos else ()
        placed = SequenceImages(tokens, images, self.max_batch) if images else None
        words = [token for token in tokens if token >= 0] if images else tokens
        sampler = Sampler(params, self.backend.n_vocab, words, forbidden, constraint, breakers)
        n_tokens_max = self.n_ctx
        if params.max_tokens is not None:
            n_tokens_max = min(n_tokens_max, len(tokens) + params.max_tokens)
        sequence = self._new(tokens, owner, reuse_prefix, n_tokens_max=n_tokens_max)
        sequence.images = placed
        if adapters is not None:
            sequence.choose(adapters)
        sequence.sampler = sampler
        sequence.stop_ids = frozenset(stop_ids) | frozenset(params.stop_token_ids)
        return sequence

    def prepare_score(
        self,
        tokens: Tokens[int] | np.ndarray,
        on_logits: Callable[[int, np.ndarray], None],
        *,
        first: int = 0,
        reuse_prefix: bool = True,
        as_answer: bool = False,
        owner: Owner | None = None,
    ) -> Sequence:
        """Return a checked sequence that computes the logits of `tokens` and generates nothing.

        on_logits(position, rows): called in order with float32 rows [n, n_vocab] of the positions position,
        position + 1, ..., beginning at `first`; the rows are valid during the call. as_answer: compute all
        tokens like generated ones, not like a prompt. The sequence finishes with "length". Raises
        ContextLengthError if the tokens do not fit.
        """
        self.require_logits()
        checked = self.fitting(tokens)
        if not 0 <= first < len(checked):
            raise InvalidRequestError(
                f"the first scored position must be in [0, {len(checked)}), not {first}"
            )
        sequence = self._new(checked, owner, reuse_prefix, as_answer=as_answer)
        sequence.on_logits, sequence.first_output = on_logits, first
        return sequence

    def prepare_tap(
        self,
        tokens: Tokens[int] | np.ndarray,
        name: str,
        on_tap: Callable[[int, np.ndarray], None],
        *,
        owner: Owner | None = None,
    ) -> Sequence:
        """Return a sequence that computes a tap of `tokens` and generates nothing.

        name: a value of the graph with a row for each token. on_tap(position, rows): called in order, in the
        engine's thread, with float32 rows [n, width] of the positions position, position + 1, ... The
        sequence neither reuses cached blocks nor leaves any. It finishes with "length". Raises
        ContextLengthError if the tokens do not fit.
        """
        sequence = self._new(self.fitting(tokens), owner, reuse_prefix=False)
        sequence.tap, sequence.on_tap = name, on_tap
        return sequence

    def _new(
        self,
        tokens: list[int],
        owner: Owner | None,
        reuse_prefix: bool,
        *,
        n_tokens_max: int | None = None,
        as_answer: bool = False,
    ) -> Sequence:
        """Return a sequence of checked tokens. n_tokens_max: prompt and answer together."""
        sequence = Sequence(tokens, n_tokens_max or len(tokens), owner or Owner())
        sequence.reuse_prefix = reuse_prefix
        match self.thresholded:
            case "none":
                sequence.first_thresholded_token = NONE_THRESHOLDED
            case "answers":
                sequence.first_thresholded_token = 0 if as_answer else len(tokens)
            case "all":
                sequence.first_thresholded_token = 0
            case _:
                assert_never(self.thresholded)
        return sequence

    def enqueue(self, sequence: Sequence) -> Sequence:
        """Queue a new sequence and return it; call `step` until its `finish_reason` is set."""
        if sequence.finish_reason is None:  # it may already be cancelled
            if sequence.has_default_adapters:  # they may have changed since it was prepared
                sequence.adapter_scales = self.default_adapters
            scales = sequence.adapter_scales
            if scales and not taking_adapters(self.backend).adapters.has(scales):
                self._fail(sequence, InvalidRequestError(ADAPTER_GONE))
                return sequence
            self.scheduler.waiting.append(sequence)
            self._next_deadline = min(self._next_deadline, sequence.deadline)
        return sequence

    def require_room(self, n_tokens: int) -> None:
        """Raise ContextLengthError if a prompt of n_tokens and one token of an answer do not fit."""
        if n_tokens >= self.n_ctx:
            raise ContextLengthError(
                f"the prompt has {n_tokens} tokens and leaves no room for an answer in the context of "
                f"{self.n_ctx}; shorten it or load the model with a larger n_ctx",
                n_tokens=n_tokens,
                n_ctx=self.n_ctx,
            )

    def require_logits(self) -> None:
        """Raise InvalidRequestError if the model is an encoder, which computes no logits."""
        if self.is_encoder:
            raise InvalidRequestError(
                "this is an embedding model, which neither generates nor scores text; use hotset embed or "
                "/v1/embeddings"
            )

    def fitting(self, tokens: Tokens[int] | np.ndarray) -> list[int]:
        """Return checked tokens. Raises ContextLengthError if they do not fit; see also `checked`."""
        checked = self.checked(tokens)
        if len(checked) > self.n_ctx:
            raise ContextLengthError(
                f"{len(checked)} tokens do not fit in the context of {self.n_ctx}; "
                "load the model with a larger n_ctx",
                n_tokens=len(checked),
                n_ctx=self.n_ctx,
            )
        return checked

    def cancel(self, sequence: Sequence) -> None:
        """End a queued sequence between two steps and free its blocks; do nothing if it has finished."""
        if sequence.finish_reason is None:
            self._finish(sequence, "cancelled")

    def interrupt(self, sequence: Sequence | None, *, spare_others: bool = False) -> None:
        """Cancel a sequence (None: all) from any thread, and cancel the step in flight if it computes it.

        spare_others: cancel the step only if it computes no other sequence. The sequence ends when the
        engine's thread begins its next step or calls `end_interrupted`. A step that is just about to begin is
        not cancelled: call again until finish_reason is set.
        """
        self._interrupted.add(sequence)
        in_flight = self._in_flight
        if spare_others and not in_flight <= self._interrupted:
            return
        if in_flight if sequence is None else sequence in in_flight:
            self.cancel_step()

    def preempt_step(self, sequence: Sequence) -> None:
        """Cancel the step in flight, from any thread, if a new sequence would wait for it for long.

        This applies to a step that prefills more tokens than the new sequence has, completes no prompt, and
        is less than half done. So the lost work never exceeds the wait that it saves. The next step computes
        it again together with the new sequence, and is not cancelled this way.
        """
        flight = self._flight
        if flight is None or self.scheduler.waiting or not self.scheduler.free_slots:
            return
        elapsed = time.perf_counter() - flight.begun
        if len(sequence.tokens) < flight.units and elapsed < flight.seconds / 2:
            self._flight, self._was_preempted = None, True
            self.cancel_step()

    def cancel_step(self) -> None:
        """Cancel the step in flight, from any thread, if the backend can."""
        self.backend.cancel()

    def end_interrupted(self) -> None:
        """Cancel the sequences passed to `interrupt`; for the thread that runs the engine."""
        while self._interrupted:
            sequence = self._interrupted.pop()
            for each in self.scheduler.unfinished if sequence is None else [sequence]:
                self.cancel(each)

    def end_overdue(self) -> None:
        """End the sequences whose deadline has passed."""
        now = time.perf_counter()
        if now < self._next_deadline:
            return
        left = math.inf
        for sequence in self.scheduler.unfinished:
            if sequence.deadline <= now:
                self._finish(sequence, "timeout")
            else:
                left = min(left, sequence.deadline)
        self._next_deadline = left

    def fail(self, error: Exception) -> None:
        """End every sequence with an error."""
        for sequence in self.scheduler.unfinished:
            self._fail(sequence, error)

    def seconds_to_wait(self) -> float:
        """Estimate the seconds until the next running sequence finishes; from any thread."""
        running = list(self.scheduler.running)
        oldest = max((time.perf_counter() - each.started for each in running), default=0.0)
        return (self._seconds_each or oldest) / max(len(running), 1)

    def counters(self) -> Counters:
        """Return a copy of the counters, from any thread; a step may be counted only in part."""
        pool = self.scheduler.pool
        return replace(
            self._counted,
            running=len(self.scheduler.running),
            waiting=len(self.scheduler.waiting),
            blocks=pool.n_blocks,
            blocks_used=pool.n_blocks - pool.n_available,
            blocks_cached=pool.n_idle,
        )

    @property
    def has_work(self) -> bool:
        """Return whether there is any unfinished sequence."""
        return bool(self.scheduler.running or self.scheduler.waiting)

    # ---- the loop ----

    def step(self) -> list[Sequence]:
        """Run one batch; return the sequences that got a token or logits, or that ended.

        If the backend fails, the sequences of the batch end with "error" and the exception is raised; other
        sequences continue. After an interruption (Ctrl-C) every sequence can continue. A cancelled step
        returns nothing; the next step computes its work again, except for interrupted sequences.
        """
        self.end_interrupted()
        self.end_overdue()
        self._take_masks()
        chunks = self.scheduler.schedule()
        if not chunks:
            self.scheduler.wait_for_blocks(_BLOCK_SECONDS)
            return []
        batch = self._batches.build(chunks, self.scheduler.block_tables)
        self._in_flight = frozenset(sequence for sequence, _ in chunks)
        begun = time.perf_counter()
        n_answers, units = self._load_of(chunks)
        n_rows = sum(sequence.n_rows(n) for sequence, n in chunks if sequence.on_logits)
        if not self._was_preempted and not any(1 < n == sequence.n_missing for sequence, n in chunks):
            load = units + n_rows * self.scheduler.prefill_budget.of_row(n_answers)
            self._flight = _Flight(begun, self.scheduler.prefill_budget.seconds_of(load, n_answers), load)
        # Last, because it wakes another thread, which would delay this one while it runs Python.
        for sequence, n in chunks:
            if sequence.sampler and n >= sequence.n_missing:
                sequence.sampler.look_ahead()
        try:
            result = self.backend.step(batch)
            now = time.perf_counter()
            if self.speculator is not None and (reader := self.speculator.reader) is not None:
                reader.note_step(chunks, result.taps[reader.reads])
        except StepCancelledError:
            self.step_stats = None
            self._counted.cancelled_steps += 1
            self.end_interrupted()
            return []
        except CacheLostError:
            self.step_stats = None
            self.scheduler.preempt_all()
            return []
        except Exception as error:
            for sequence, _ in chunks:
                self._fail(sequence, error)
            raise
        finally:
            self._in_flight, self._flight = frozenset(), None
        self._was_preempted = False
        self._counted.steps += 1
        self._counted.step_seconds += now - begun
        if self.speculator is not None and n_answers == len(chunks):
            self.speculator.step_times.note(len(batch.tokens), now - begun)
        if self.collect_stats:
            self.step_stats = self.backend.stats()
        changed = self._collect(chunks, result, now)
        # Consumers read rows of logits in `_collect`, and all other sequences wait for them.
        seconds = (time.perf_counter() if n_rows else now) - begun
        self.scheduler.prefill_budget.note(units, n_answers, seconds, n_rows)
        return changed

    def _load_of(self, chunks: Chunks) -> tuple[int, float]:
        """Return how many sequences a step decodes, and its prefill cost (engine/pacing.py)."""
        n_answers, units = 0, 0.0
        for sequence, n in chunks:
            if n - len(sequence.draft) == 1:
                n_answers += 1
            else:
                units += n * self.scheduler.weight(sequence.n_computed)
        return n_answers, units

    def _collect(self, chunks: Chunks, result: StepResult, now: float) -> list[Sequence]:
        """Hand out rows, draw tokens, register full blocks, end finished sequences, and report them."""
        changed: set[Sequence] = set()
        answers: list[_Answer] = []
        row = token = 0
        until = time.perf_counter() + MASK_SECONDS
        for sequence, n in chunks:
            start, end = sequence.n_computed, sequence.n_computed + n - len(sequence.draft)
            n_rows = sequence.n_rows(n)
            rows, first = range(row, row + n_rows), token
            row, token = row + n_rows, token + n
            is_last = end == len(sequence.tokens)
            if is_last and self._lacks_mask(sequence, until):
                sequence.waits_for_mask = True
                continue  # n_computed is unchanged: the chunk runs again, with the same bits
            if n_rows or is_last:
                changed.add(sequence)
            # An interruption here leaves n_computed unchanged: the chunk runs again, with the same bits.
            try:
                self._hand_out(sequence, result, rows, range(first, token), end)
            except Exception as error:
                self._fail(sequence, error)
                changed.add(sequence)
                continue
            if sequence.sampler and is_last:
                drawn = self._append_tokens(sequence, result, rows[-len(sequence.draft) - 1 :], now, until)
                answers.append(_Answer(sequence, start, drawn))
            else:
                self._advance(sequence, start, end)
                if is_last:
                    self._end(sequence)
        self._draw(answers)
        # Last, because a report may wake another thread, which would delay this one.
        reported = [sequence for sequence, _ in chunks if sequence in changed]
        for sequence in reported:
            if sequence.finish_reason is None:
                sequence.notify()
        return reported

    @staticmethod
    def _hand_out(sequence: Sequence, result: StepResult, rows: range, tokens: range, end: int) -> None:
        """Pass a sequence its rows of logits and taps. tokens: range in the batch; end: of the chunk."""
        start = sequence.n_computed
        if sequence.on_logits and sequence.first_output < min(end, sequence.n_prompt):
            sequence.on_logits(end - len(rows), result.logits[rows.start : rows.stop])
            sequence.first_output = end  # do not report them again after a preemption
        if sequence.on_tap and sequence.tap and end > sequence.first_output:
            new = max(sequence.first_output - start, 0)
            sequence.on_tap(start + new, result.taps[sequence.tap][tokens.start + new : tokens.stop])
            sequence.first_output = end

    def _draw(self, answers: list[_Answer]) -> None:
        """Draw the next tokens of all answers together, until every answer is complete."""
        while answers:
            going, jobs = [], []
            for answer in answers:
                sequence = answer.sequence
                try:
                    jobs.append(answer.draws.send(answer.drawn))
                    going.append(answer)
                except StopIteration:
                    self._advance(sequence, answer.start, len(sequence.tokens) - 1)
                    self._end(sequence)
                except Exception as error:
                    self._fail(sequence, error)
            drawn = draw_tokens(jobs, self.backend.runtime) if jobs else []
            for answer, token in zip(going, drawn, strict=True):
                answer.drawn = token
            answers = going

    def _advance(self, sequence: Sequence, start: int, end: int) -> None:
        """Record that the tokens of a sequence from `start` to `end` are computed."""
        sequence.n_computed = end
        self._counted.prompt_tokens += max(min(end, sequence.n_prompt) - start, 0)
        if end // BLOCK_SIZE > sequence.n_registered and not sequence.tap:
            self.scheduler.register_blocks(sequence)
        self.scheduler.drop_states(sequence)

    def _end(self, sequence: Sequence) -> None:
        """Finish a sequence if its latest token ends it."""
        if (reason := _end_of(sequence)) is not None:
            self._finish(sequence, reason)

    def _lacks_mask(self, sequence: Sequence, until: float) -> bool:
        """Return whether a sequence must wait because its constraint still computes the next mask.

        A slow constraint is waited for only if nothing else runs.
        """
        constraint = sequence.sampler.constraint if sequence.sampler else None
        if constraint is None:
            return False
        seconds = 0.0 if constraint.is_slow else max(until - time.perf_counter(), 0.0)
        return constraint.is_busy(_ALONE_SECONDS if self.scheduler.n_unfinished == 1 else seconds)

    def _take_masks(self) -> None:
        """Resume sequences whose mask is ready; if all wait, wait briefly for the first one."""
        running = self.scheduler.running
        all_wait = bool(running) and all(sequence.waits_for_mask for sequence in running)
        for sequence in running:
            constraint = sequence.sampler.constraint if sequence.sampler else None
            if sequence.waits_for_mask and constraint is not None:
                sequence.waits_for_mask = constraint.is_busy(_ALL_SECONDS if all_wait else 0.0)
                all_wait = False

    def _append_tokens(
        self, sequence: Sequence, result: StepResult, rows: range, now: float, until: float
    ) -> Draws:
        """Append the token that follows the first row, and one per further row while the draft is right.

        Yields jobs of `draw_tokens`, and is sent their tokens; forced tokens need no draw.
        """
        draft, sequence.draft = sequence.draft, []
        if len(sequence.tokens) > sequence.n_prompt and _end_of(sequence) is not None:
            return  # it was interrupted after its last token
        sequence.n_steps += 1
        self._counted.answer_steps += 1
        n_verified = n_right = 0
        sampler = sequence.sampler
        assert sampler is not None
        for i, row in enumerate(rows):
            if i and self._lacks_next_mask(sequence, until):
                break
            found = (None if rows is None else rows[row] for rows in (result.largest, result.candidates))
            logprobs = None
            if (token := sampler.forced()) is None:
                token, logprobs = yield sampler.job(result.logits[row], *found)
                token = sampler.take(token)
            self._append_token(sequence, result.logits[row], token, logprobs, now)
            if i == len(draft):
                break
            n_verified += 1
            n_right += sequence.tokens[-1] == draft[i]
            if n_right < n_verified or _end_of(sequence) is not None:
                break
        if draft and self.speculator is not None:
            sequence.n_drafted += len(draft)
            sequence.n_accepted += n_right
            self._counted.drafted_tokens += len(draft)
            self._counted.accepted_tokens += n_right
            self.speculator.note_verified(sequence, n_verified, n_right)
            self.scheduler.trim_blocks(sequence)

    def _lacks_next_mask(self, sequence: Sequence, until: float) -> bool:
        """Return the result of `_lacks_mask` for a further token of the same step."""
        if sequence.sampler:
            sequence.sampler.look_ahead()
        return self._lacks_mask(sequence, until)

    def _append_token(
        self, sequence: Sequence, logits: np.ndarray, token: int, logprobs: RowLogprobs | None, now: float
    ) -> None:
        """Append a drawn or forced token. logprobs: of its logits, if a draw found them."""
        sampler = sequence.sampler
        assert sampler is not None
        if (n_top := sampler.params.logprobs) is not None:
            if logprobs is None:
                [logprobs] = row_logprobs(logits[None], n_top)
            sequence.logprobs.append(token_logprobs(logits, token, logprobs))
        sampler.accept(token)
        sequence.tokens.append(token)
        self._counted.generated_tokens += 1
        sequence.last_token = now
        if self.step_stats is not None:
            sequence.step_stats.append(self.step_stats)
        if not sequence.first_token:
            sequence.first_token = now

    # ---- ends ----

    def _finish(self, sequence: Sequence, reason: FinishReason) -> None:
        sequence.finish_reason = reason
        self._count_end(reason)
        if self.speculator is not None:
            self.speculator.forget(sequence)
        if sequence.slot >= 0:
            if reason in ("stop", "length"):
                seconds = time.perf_counter() - sequence.started
                self._seconds_each += (seconds - self._seconds_each) / (8 if self._seconds_each else 1)
            self._store(sequence)
            self.scheduler.remove(sequence)
        elif sequence in self.scheduler.waiting:
            self.scheduler.waiting.remove(sequence)
        sequence.notify()

    def _store(self, sequence: Sequence) -> None:
        """Write the blocks of a finished answer to disk and keep its tokens, if these are enabled."""
        prompt_cache = self.scheduler.prompt_cache
        wanted = prompt_cache is not None or self.slots is not None
        if not wanted or sequence.sampler is None or not sequence.n_registered:
            return
        prefix = prefix_of(sequence, sequence.n_registered * BLOCK_SIZE)
        if prompt_cache is not None and sequence.reuse_prefix:
            prompt_cache.write(prefix, self.scheduler.pool)
        if self.slots is not None:
            self.slots[sequence.slot if sequence.id_slot is None else sequence.id_slot] = prefix

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
        # The traceback's frames refer to this sequence. That cycle would keep the plan and its weights alive
        # until a garbage collection; at the end of the process that is too late for the native core.
        traceback.clear_frames(error.__traceback__)
        self.latest_error = sequence.error = error
        self._finish(sequence, "error")

    def checked(self, tokens: Tokens[int] | np.ndarray) -> list[int]:
        """Return token ids as a list of int. Raises InvalidRequestError if one is not in the vocabulary."""
        try:
            checked = np.asarray(tokens)
        except ValueError:  # lists of different lengths
            checked = np.empty((0, 0))
        if checked.shape == (0,):
            raise InvalidRequestError("the prompt is empty; give a text, or one or more token ids")
        if checked.ndim != 1 or not checked.size or checked.dtype.kind not in "iu":
            raise InvalidRequestError("a prompt must be one or more token ids, whole numbers in a flat list")
        outside = checked[(checked < 0) | (checked >= self.backend.n_vocab)]
        if outside.size:
            raise InvalidRequestError(
                f"token {outside[0]} is not in the vocabulary of {self.backend.n_vocab} tokens"
            )
        result: list[int] = checked.tolist()
        return result


def _end_of(sequence: Sequence) -> FinishReason | None:
    """Return why the latest token ends the answer; None if it does not."""
    sampler = sequence.sampler
    if sampler is not None:
        constraint = sampler.constraint
        if (constraint is not None and constraint.finished) or sequence.tokens[-1] in sequence.stop_ids:
            return "stop"
    return "length" if len(sequence.tokens) >= sequence.n_tokens_max else None
