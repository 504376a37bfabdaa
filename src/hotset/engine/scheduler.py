"""The scheduler: which tokens run in the next step, and which blocks of the KV cache sequences have.

Decoding sequences come first, then prompts in chunks within a budget (chunked prefill). A waiting sequence is
admitted if there is a slot and enough blocks for the tokens that it must compute. When blocks run out, the
newest sequence is preempted: it loses its blocks and starts again later. Blocks with the same prefix are
shared.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np

from hotset.backends.base import BLOCK_SIZE, Backend, CacheMemory
from hotset.engine.blocks import BlockReading, Blocks, Prefix
from hotset.engine.counters import Counters
from hotset.engine.kv_cache import BlockPool, n_unthresholded_in_block, root_of
from hotset.engine.pacing import PROMPT_SECONDS, PrefillBudget, PrefillChunk, divide, weigher
from hotset.engine.queue import WaitingQueue
from hotset.engine.sequence import Sequence
from hotset.engine.speculation import Speculator
from hotset.engine.states import StatePool
from hotset.errors import OutOfMemoryError
from hotset.load_parameters import MOST_DRAFTED

if TYPE_CHECKING:
    from hotset.engine.prompt_cache import PromptCache

_KEPT_STATES = 4  # the newest states of prefixes, which drafts do not evict
MAX_LOGITS_BYTES = 64 << 20  # of logits that one step passes to `on_logits`

Chunks = list[tuple[Sequence, int]]  # sequences of a step, and how many tokens of each


@dataclass(frozen=True)
class StepLimits:
    """The limits of steps.

    max_sequences, max_blocks: rows and columns of the block table. max_batch: tokens of a step.
    prompt_seconds: as in Engine. whole_texts: compute each text in one step, because its tokens attend to
    later ones.
    """

    max_sequences: int
    max_blocks: int
    max_batch: int
    prompt_seconds: float = PROMPT_SECONDS
    whole_texts: bool = False


class Scheduler:
    """The running and waiting sequences, and their blocks, slots and recurrent states.

    counted: counters to update. flops: as in ModelTraits.
    """

    def __init__(
        self,
        backend: Backend,
        limits: StepLimits,
        counted: Counters,
        *,
        flops: Callable[[float], float] | None = None,
        speculator: Speculator | None = None,
        prompt_cache: PromptCache | None = None,
    ) -> None:
        self._backend, self._limits, self._counted = backend, limits, counted
        self.speculator, self.prompt_cache = speculator, prompt_cache
        self._max_outputs = max(1, MAX_LOGITS_BYTES // (4 * backend.n_vocab))
        self.block_tables = np.full((limits.max_sequences, limits.max_blocks), -1, np.int32)  # by slot
        # With one sequence at a time, nothing waits for the end of a step.
        is_single = limits.max_sequences == 1
        self.prefill_budget = PrefillBudget(math.inf if is_single else limits.prompt_seconds)
        self.weight = weigher(flops)
        self.reset()

    def reset(self) -> None:
        """Forget every sequence and every prefix without releasing them."""
        self.empty_cache()
        self._lent_states: list[int] = []
        self.waiting: WaitingQueue[Sequence] = WaitingQueue()
        self.running: list[Sequence] = []  # oldest first; the last one is preempted when blocks run out
        self.free_slots = list(range(self._limits.max_sequences - 1, -1, -1))
        self.block_tables[:] = -1

    def empty_cache(self) -> None:
        """Make new, empty pools of blocks and states."""
        n_states = self._backend.n_states
        self.states = StatePool(n_states) if n_states else None
        self.pool = BlockPool(self._backend.n_blocks, self.states)

    @property
    def unfinished(self) -> list[Sequence]:
        """Return the running sequences, then the waiting ones."""
        return [*self.running, *self.waiting]

    @property
    def n_unfinished(self) -> int:
        """Return the number of running and waiting sequences; from another thread it may be off by one."""
        return len(self.running) + len(self.waiting)

    def schedule(self) -> Chunks:
        """Return the sequences of the next batch and how many tokens of each: decoding first, then prompts.

        Prompts get no more than the prefill token budget, so that decoding and short prompts are not delayed.
        """
        if self.waiting:
            self._admit()
        budget = self._limits.max_batch
        chunks: Chunks = []
        prompts: list[Sequence] = []
        coming: set[tuple[int, int, tuple[int, ...]]] = set()  # blocks that this step fills
        for sequence in self.running:
            if sequence.waits_for_mask:
                continue
            if sequence.n_missing > 1:
                self._share_prefix(sequence)
                if not self._waits_for_prefix(sequence, coming):
                    prompts.append(sequence)
            elif budget:
                chunks.append((sequence, 1))
                budget -= 1
        budget = _with_room_for_image(chunks, prompts, budget)
        share = self.prefill_budget.mixed if chunks else self.prefill_budget.pure
        of_row = self.prefill_budget.of_row(len(chunks))
        missing = [PrefillChunk(each.n_missing, self._weight_of(each, of_row)) for each in prompts]
        given = self._whole(missing, budget) if self._limits.whole_texts else divide(missing, share, budget)
        given = _uncut(prompts, given, budget)
        for sequence, n in zip(prompts, given, strict=True):
            if sequence.on_logits:  # the step returns whole rows of logits: bound their memory
                n = min(n, max(sequence.first_output - sequence.n_computed, 0) + self._max_outputs)
            if n:
                chunks.append((sequence, n))
        if self.speculator is not None:
            chunks = self._with_drafts(chunks, self.speculator)
        for sequence, n in chunks:
            if sequence.slot >= 0 and len(sequence.blocks) * BLOCK_SIZE < sequence.n_computed + n:
                self._grow(sequence, n)
        chunks = [chunk for chunk in chunks if chunk[0].slot >= 0]
        if self.states is not None:
            self._reserve_states(self.states, chunks)
        return chunks

    def _with_drafts(self, chunks: Chunks, speculator: Speculator) -> Chunks:
        """Return the chunks with drafts added to decoding sequences.

        Drafts take the room left in the batch, and no sequence loses blocks for them.
        """
        for sequence, _ in chunks:
            sequence.draft = []  # drop the draft of a cancelled step
        n_tokens = sum(n for _, n in chunks)
        wanted = []
        left = min(
            self._limits.max_batch - n_tokens, self._max_outputs - sum(each.n_rows(n) for each, n in chunks)
        )
        may_grow = self.pool.n_available >= len(self.running)  # a draft needs at most one more block
        for sequence, n in chunks:
            if sequence.sampler is None or n != 1 or sequence.n_missing != 1:
                continue
            most = min(left, MOST_DRAFTED, sequence.n_tokens_max - len(sequence.tokens) - 1)
            if not may_grow:
                most = min(most, len(sequence.blocks) * BLOCK_SIZE - sequence.n_computed - 1)
            wanted.append((sequence, max(most, 0)))
            left -= max(min(most, speculator.n_most), 0)
        if wanted:
            speculator.draft(wanted, n_tokens)
        return [(sequence, n + len(sequence.draft)) for sequence, n in chunks]

    def _whole(self, missing: list[PrefillChunk], budget: int) -> list[int]:
        """Admit whole texts, oldest first, until the step is full; return the tokens of each, or 0."""
        given = []
        for n in (chunk.n for chunk in missing):
            budget -= n
            given.append(n if budget >= 0 else 0)
        return given

    def _weight_of(self, sequence: Sequence, of_row: float) -> float:
        """Return the units of a prompt's next token. of_row: units of its logits, if they are read."""
        is_scored = sequence.on_logits is not None and sequence.n_computed >= sequence.first_output
        return self.weight(sequence.n_computed) + (of_row if is_scored else 0.0)

    def _reserve_states(self, states: StatePool, chunks: Chunks) -> None:
        """Reserve slots for the recurrent states that the step saves.

        These are the state after each chunk, and states at block ends, from which other sequences may
        continue: the last block of each chunk, and earlier ones while slots are empty.
        """
        for sequence in self.running:
            self.drop_states(sequence)
        for sequence, n in chunks:
            slot = states.allocate()
            assert slot is not None, "more sequences run than there are slots for their states"
            sequence.states[sequence.n_computed + n - len(sequence.draft)] = slot
        self._reserve_drafted_states(states, chunks)
        for sequence, n in chunks:
            if sequence.tap or sequence.draft:
                continue  # its blocks are not shared
            last = (sequence.n_computed + n - 1) // BLOCK_SIZE * BLOCK_SIZE
            for end in range(last, sequence.n_computed, -BLOCK_SIZE):
                slot = states.allocate(evict=end == last)
                if slot is None:
                    break
                sequence.states[end] = slot

    def _reserve_drafted_states(self, states: StatePool, chunks: Chunks) -> None:
        """Reserve a slot for the state after each drafted token, so that any prefix of a draft can be kept.

        A draft without enough slots is shortened.
        """
        for i, (sequence, n) in enumerate(chunks):
            drafted = len(sequence.draft)
            for j in range(drafted):
                slot = states.allocate(evict=states.n_idle > _KEPT_STATES)
                if slot is None:
                    del sequence.draft[j:]
                    break
                sequence.states[sequence.n_computed + n - drafted + j + 1] = slot
            chunks[i] = (sequence, n - drafted + len(sequence.draft))

    def trim_blocks(self, sequence: Sequence) -> None:
        """Release blocks that only rejected tokens needed."""
        n_blocks = -(-len(sequence.tokens) // BLOCK_SIZE)
        if len(sequence.blocks) > n_blocks:
            self.pool.release(sequence.blocks[n_blocks:])
            del sequence.blocks[n_blocks:]
            self.block_tables[sequence.slot, n_blocks:] = -1

    def drop_states(self, sequence: Sequence) -> None:
        """Release all states except the current one; the states of the longest prefixes last."""
        if self.states is None:
            return
        for n in sorted(n for n in sequence.states if n != sequence.n_computed):
            self.states.release(sequence.states.pop(n))

    def _admit(self) -> None:
        """Admit waiting sequences, in order, while there is a slot and room for their tokens."""
        while self.waiting and self.free_slots:
            sequence = self.waiting.first()
            if self.prompt_cache is not None and self._awaits_blocks(sequence, self.prompt_cache):
                return
            blocks, chain = self.pool.match(
                sequence.tokens,
                sequence.n_reusable_blocks,
                first_thresholded_token=sequence.first_thresholded_token,
                parent=root_of(sequence.adapter_scales),
            )
            n_missing = -(-len(sequence.tokens) // BLOCK_SIZE) - len(blocks)
            n_owed = sum(-(-len(other.tokens) // BLOCK_SIZE) - len(other.blocks) for other in self.running)
            # A spare block per running sequence: otherwise their next blocks would preempt this one again.
            if self.running and n_missing + n_owed + len(self.running) > self.pool.n_available:
                self.pool.release(blocks)
                return
            self.waiting.pop()
            self.running.append(sequence)
            if sequence.reading is not None and self.prompt_cache is not None:
                n = len(blocks)
                found, prefix = sequence.reading.found, prefix_of(sequence, len(sequence.tokens))
                chain = self.restore(self.prompt_cache.memory, found, prefix, blocks, chain)
                self._counted.restored_tokens += (len(blocks) - n) * BLOCK_SIZE
                sequence.reading = None
            sequence.slot = self.free_slots.pop()
            sequence.blocks = blocks
            sequence.chain = chain
            sequence.n_registered = len(blocks)
            sequence.n_computed = len(blocks) * BLOCK_SIZE
            self.block_tables[sequence.slot, : len(blocks)] = blocks
            if self.states is not None and blocks:
                sequence.states[sequence.n_computed] = self.states.take(chain)
            if not sequence.started:
                sequence.started = time.perf_counter()
                sequence.n_reused = sequence.n_computed
                self._counted.reused_tokens += sequence.n_computed

    # ---- blocks on disk (prompt_cache.py)

    def _awaits_blocks(self, first: Sequence, prompt_cache: PromptCache) -> bool:
        """Return whether the next sequence's blocks are still being read.

        Also starts reading blocks of the sequences after it, as many as there is room for.
        """
        n_blocks = 0
        for sequence in islice(self.waiting, len(self.free_slots)):
            if sequence.reading is None:
                sequence.reading = self._sought(sequence, prompt_cache)
            n_blocks += sequence.reading.n_blocks
            if n_blocks > self.pool.n_available:
                break
        return first.reading is not None and not first.reading.is_done

    def _sought(self, sequence: Sequence, prompt_cache: PromptCache) -> BlockReading:
        prefix, n_blocks = prefix_of(sequence, len(sequence.tokens)), sequence.n_reusable_blocks
        root = root_of(prefix.adapter_scales)
        n_known = self.pool.n_known(prefix.tokens, n_blocks, prefix.first_thresholded_token, root)
        return prompt_cache.read(prefix, n_known, n_blocks)

    def wait_for_blocks(self, seconds: float) -> None:
        """Wait at most `seconds` until the blocks of the next sequence are read."""
        if self.waiting and (reading := self.waiting.first().reading) is not None:
            reading.wait(seconds)

    def restore(
        self, memory: CacheMemory, found: Blocks, prefix: Prefix, blocks: list[int], serial: int
    ) -> int:
        """Write blocks of a prefix into the cache and append them to `blocks`, its blocks so far.

        serial: serial number of the last block in `blocks`. Returns the serial number of the new last one. If
        room is short, only the first blocks are restored, or none if the model has recurrent states.
        """
        missing = found.blocks[max(len(blocks) - found.first, 0) :] if found.first <= len(blocks) else ()
        slot = None
        if self.states is not None and missing:
            fits = found.state is not None and len(missing) <= self.pool.n_available
            slot = self.states.allocate() if fits else None
            if slot is None or found.state is None:
                return serial
            memory.write_state(slot, found.state)
        for data in missing:
            block = self.pool.allocate()
            if block is None:
                break
            memory.write_block(block, data)
            serial = self.pool.register(block, serial, *prefix.block(len(blocks)))
            blocks.append(block)
        if self.states is not None and slot is not None:
            self.states.keep(slot, serial)
            self.states.release(slot)
        return serial

    def restore_prefix(self, memory: CacheMemory, found: Blocks, prefix: Prefix) -> int:
        """Write blocks into the cache for later sequences; return how many blocks of the prefix it holds."""
        blocks, serial = self.pool.match(
            prefix.tokens, prefix.n_blocks, first_thresholded_token=prefix.first_thresholded_token,
            parent=root_of(prefix.adapter_scales),
        )  # fmt: skip
        self.restore(memory, found, prefix, blocks, serial)
        self.pool.release(blocks)
        return len(blocks)

    def _share_prefix(self, sequence: Sequence) -> None:
        """Take over blocks of the same tokens that another sequence has computed since."""
        n = sequence.n_registered
        if sequence.n_computed != n * BLOCK_SIZE:
            return
        blocks, chain = self.pool.match(
            sequence.tokens, sequence.n_reusable_blocks,
            first_thresholded_token=sequence.first_thresholded_token,
            first=n, parent=sequence.chain,
        )  # fmt: skip
        if not blocks:
            return
        self.pool.release(sequence.blocks[n:])  # allocated for a cancelled step
        sequence.blocks = sequence.blocks[:n] + blocks  # a new list tells drafters that the blocks changed
        sequence.chain = chain
        sequence.n_registered = n + len(blocks)
        if self.states is not None:
            sequence.states[sequence.n_registered * BLOCK_SIZE] = self.states.take(chain)
        sequence.n_computed = sequence.n_registered * BLOCK_SIZE
        self.drop_states(sequence)
        self.block_tables[sequence.slot, n : n + len(blocks)] = blocks
        if not sequence.preempted:
            sequence.n_reused += len(blocks) * BLOCK_SIZE
            self._counted.reused_tokens += len(blocks) * BLOCK_SIZE

    def _waits_for_prefix(self, sequence: Sequence, coming: set[tuple[int, int, tuple[int, ...]]]) -> bool:
        """Return whether an earlier sequence of this step computes the next block; then this one waits.

        So several answers to one prompt compute it once. If the earlier sequence ends, this one does not wait
        for it in the next step.
        """
        if sequence.tap:
            return False  # its blocks are not shared
        n = sequence.n_registered
        block = tuple(sequence.tokens[n * BLOCK_SIZE : (n + 1) * BLOCK_SIZE])
        if len(block) < BLOCK_SIZE:
            return False
        key = (sequence.chain, n_unthresholded_in_block(sequence.first_thresholded_token, n), block)
        if key in coming and n < sequence.n_reusable_blocks and sequence.n_computed == n * BLOCK_SIZE:
            return True
        coming.add(key)
        return False

    def _grow(self, sequence: Sequence, n: int) -> None:
        """Give a sequence the blocks for `n` more tokens, preempting the newest sequences if necessary."""
        n_blocks = -(-(sequence.n_computed + n) // BLOCK_SIZE)
        while len(sequence.blocks) < n_blocks:
            block = self.pool.allocate()
            if block is not None:
                self.block_tables[sequence.slot, len(sequence.blocks)] = block
                sequence.blocks.append(block)
                continue
            newest = self.running[-1]
            self.preempt(newest)
            if newest is sequence:
                return

    def register_blocks(self, sequence: Sequence) -> None:
        for i in range(sequence.n_registered, sequence.n_computed // BLOCK_SIZE):
            tokens = sequence.tokens[i * BLOCK_SIZE : (i + 1) * BLOCK_SIZE]
            n_unthresholded = n_unthresholded_in_block(sequence.first_thresholded_token, i)
            sequence.chain = self.pool.register(sequence.blocks[i], sequence.chain, tokens, n_unthresholded)
            sequence.n_registered = i + 1
            if self.states is not None and sequence.n_registered * BLOCK_SIZE in sequence.states:
                self.states.keep(sequence.states[sequence.n_registered * BLOCK_SIZE], sequence.chain)

    def remove(self, sequence: Sequence) -> None:
        """Remove a running sequence from the batch and release its blocks; it keeps its tokens."""
        self.running.remove(sequence)
        self.pool.release(sequence.blocks)
        self.block_tables[sequence.slot] = -1
        self.free_slots.append(sequence.slot)
        sequence.slot = -1
        sequence.blocks = []
        sequence.draft = []
        if self.states is not None:
            for slot in sequence.states.values():
                self.states.release(slot)
        sequence.states = {}

    def preempt(self, sequence: Sequence) -> None:
        """Put a running sequence back to the front of the queue; it keeps its tokens and loses its blocks."""
        self.remove(sequence)
        self.waiting.push_front(sequence)
        sequence.preempted = True
        self._counted.preemptions += 1

    def preempt_all(self) -> None:
        """Preempt every running sequence and empty the cache, whose contents were lost."""
        for sequence in reversed(self.running.copy()):
            self.preempt(sequence)
        self.empty_cache()

    # ---- blocks and states for a caller that steps the backend itself

    def take_blocks(self, n_tokens: int) -> list[int]:
        """Return blocks for a caller that steps the backend itself; release them with `pool.release`.

        Raises OutOfMemoryError if the running sequences leave too few.
        """
        n_blocks = -(-n_tokens // BLOCK_SIZE)
        if n_blocks > self.pool.n_available:
            raise OutOfMemoryError(
                f"{n_tokens} tokens need {n_blocks} blocks of the KV cache, but only "
                f"{self.pool.n_available} are free; wait for running requests, or load with a larger n_seqs"
            )
        return [block for block in (self.pool.allocate() for _ in range(n_blocks)) if block is not None]

    def take_states(self) -> np.ndarray | None:
        """Return two slots for recurrent states, int32 [1, 2], for a caller that steps the backend itself.

        Release them with `give_states`. Returns None if the model has no recurrent states. Raises
        OutOfMemoryError if another caller has them.
        """
        if self.states is None:
            return None
        if self._lent_states:
            raise OutOfMemoryError("another text uses the slots for recurrent states; wait until it finishes")
        for sequence in self.running:
            self.drop_states(sequence)
        slots = [slot for slot in (self.states.allocate(), self.states.allocate()) if slot is not None]
        self._lent_states = slots
        return np.array([slots], np.int32)

    def give_states(self) -> None:
        """Release the slots of `take_states`."""
        while self._lent_states and self.states is not None:
            self.states.release(self._lent_states.pop())


def _with_room_for_image(chunks: Chunks, prompts: list[Sequence], budget: int) -> int:
    """Let decoding sequences wait for a step if the oldest prompt's image does not fit next to them.

    chunks: of decoding sequences. budget: tokens that they leave. Returns the tokens that they leave then.
    """
    images = prompts[0].images if prompts else None
    least = 0 if images is None else images.least(prompts[0].n_computed)
    while chunks and budget < least:
        chunks.pop()
        budget += 1
    return budget


def _uncut(prompts: list[Sequence], given: list[int], room: int) -> list[int]:
    """Return how many tokens of each prompt a step computes, so that no group of an image is cut.

    given: the tokens of each without groups. room: tokens of all prompts; the oldest come first.
    """
    if all(sequence.images is None for sequence in prompts):
        return given
    found = []
    for sequence, n in zip(prompts, given, strict=True):
        n = min(n, room)
        if sequence.images is not None:
            n = sequence.images.chunk(sequence.n_computed, n, room)
        found.append(n)
        room -= n
    return found


def prefix_of(sequence: Sequence, n_tokens: int) -> Prefix:
    """Return the first tokens of a sequence as a prefix to search for."""
    tokens = sequence.tokens[:n_tokens]
    n_prompt = min(sequence.n_prompt, n_tokens)
    images = () if sequence.images is None else sequence.images.digests
    return Prefix(tokens, sequence.first_thresholded_token, n_prompt, sequence.adapter_scales, images)
