"""Which tokens run in the next step, and which pages of the KV cache they have.

Decoding sequences come first, then prompts in chunks (chunked prefill) within a budget. A waiting sequence is
admitted when there is a slot and enough pages for what it must compute; when pages run out, the newest
sequence is preempted: it loses its pages and starts again later. Pages with the same prefix are shared.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np

from hotset.backends.base import PAGE_SIZE, Backend, CacheMemory
from hotset.engine.blocks import BlockReading, Blocks, Prefix
from hotset.engine.counters import Counters
from hotset.engine.kv_cache import PagePool, n_unthresholded_in_page, root_of
from hotset.engine.pacing import PrefillChunk, PromptShare, divide, weigher
from hotset.engine.queue import WaitingQueue
from hotset.engine.sequence import Sequence
from hotset.engine.speculation import Speculator
from hotset.engine.states import StatePool
from hotset.errors import OutOfMemoryError
from hotset.settings import MOST_DRAFTED

if TYPE_CHECKING:
    from hotset.engine.prompt_cache import PromptCache

_KEPT_STATES = 4  # of prefixes, the newest ones, which no draft takes the slots of
_MAX_LOGITS_BYTES = 64 << 20  # logits that one step hands to `on_logits`

Chunks = list[tuple[Sequence, int]]  # sequences of a step, and how many tokens of each


class Scheduler:
    """Sequences that run and wait, and the pages, slots and recurrent states that they have.

    max_sequences, max_pages: rows and columns of the page table. max_batch: tokens of a step. prompt_seconds,
    flops: as in Engine. counted: where reused tokens and preemptions are counted. whole_texts: a text is in
    one step, as a token sees those after it.
    """

    def __init__(
        self,
        backend: Backend,
        max_sequences: int,
        max_pages: int,
        max_batch: int,
        prompt_seconds: float,
        flops: Callable[[float], float] | None,
        counted: Counters,
        *,
        whole_texts: bool = False,
    ) -> None:
        self._backend, self._max_batch, self._counted = backend, max_batch, counted
        self.speculator: Speculator | None = None  # the engine's
        self.prompt_cache: PromptCache | None = None  # likewise
        self._max_outputs = max(1, _MAX_LOGITS_BYTES // (4 * backend.n_vocab))
        self.max_sequences, self._whole_texts = max_sequences, whole_texts
        self.page_tables = np.full((max_sequences, max_pages), -1, np.int32)  # by slot
        # Nothing waits for the end of a step where one sequence runs at a time.
        self.prompt_share = PromptShare(math.inf if max_sequences == 1 else prompt_seconds)
        self.weight = weigher(flops)
        self.reset()

    def reset(self) -> None:
        """Forgets every sequence and every prefix, as they are."""
        self.empty_cache()
        self._lent_states: list[int] = []
        self.waiting: WaitingQueue[Sequence] = WaitingQueue()
        self.running: list[Sequence] = []  # oldest first: the last one is preempted when pages run out
        self.free_slots = list(range(self.max_sequences - 1, -1, -1))
        self.page_tables[:] = -1

    def empty_cache(self) -> None:
        """Numbers pages and states anew: nothing is known of their contents."""
        n_states = self._backend.n_states
        self.states = StatePool(n_states) if n_states else None
        self.pool = PagePool(self._backend.n_pages, self.states)

    @property
    def unfinished(self) -> list[Sequence]:
        """Those that run, then those that wait."""
        return [*self.running, *self.waiting]

    @property
    def n_unfinished(self) -> int:
        """Sequences that run or wait; from another thread it may be wrong by one that changes its place."""
        return len(self.running) + len(self.waiting)

    def schedule(self) -> Chunks:
        """Sequences of the next batch and how many tokens of each: decoding first, then prompts in chunks.

        Prompts take no more than their share, so that answers go on and short prompts come through.
        """
        if self.waiting:
            self._admit()
        budget = self._max_batch
        chunks: Chunks = []
        prompts: list[Sequence] = []
        coming: set[tuple[int, int, tuple[int, ...]]] = set()  # pages that this step fills
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
        share = self.prompt_share.beside if chunks else self.prompt_share.alone
        of_row = self.prompt_share.of_row(len(chunks))
        missing = [PrefillChunk(each.n_missing, self._weight_of(each, of_row)) for each in prompts]
        given = self._whole(missing, budget) if self._whole_texts else divide(missing, share, budget)
        for sequence, n in zip(prompts, given, strict=True):
            if sequence.on_logits:  # whole rows of logits leave the step: bound their memory
                n = min(n, max(sequence.first_output - sequence.n_computed, 0) + self._max_outputs)
            if n:
                chunks.append((sequence, n))
        if self.speculator is not None:
            chunks = self._with_drafts(chunks, self.speculator)
        for sequence, n in chunks:
            if sequence.slot >= 0 and len(sequence.pages) * PAGE_SIZE < sequence.n_computed + n:
                self._grow(sequence, n)
        chunks = [chunk for chunk in chunks if chunk[0].slot >= 0]
        if self.states is not None:
            self._reserve_states(self.states, chunks)
        return chunks

    def _with_drafts(self, chunks: Chunks, speculator: Speculator) -> Chunks:
        """The same, with tokens that may follow those of answers: as many as there is room for, and for which
        no sequence loses its pages."""
        for sequence, _ in chunks:
            sequence.draft = []  # of a step that was cancelled
        n_tokens = sum(n for _, n in chunks)
        wanted = []
        left = min(self._max_batch - n_tokens, self._max_outputs - sum(each.n_rows(n) for each, n in chunks))
        may_grow = self.pool.n_available >= len(self.running)  # a page each: no draft is longer
        for sequence, n in chunks:
            if sequence.sampler is None or n != 1 or sequence.n_missing != 1:
                continue
            most = min(left, MOST_DRAFTED, sequence.n_tokens_max - len(sequence.tokens) - 1)
            if not may_grow:
                most = min(most, len(sequence.pages) * PAGE_SIZE - sequence.n_computed - 1)
            wanted.append((sequence, max(most, 0)))
            left -= max(min(most, speculator.n_most), 0)
        if wanted:
            speculator.draft(wanted, n_tokens)
        return [(sequence, n + len(sequence.draft)) for sequence, n in chunks]

    def _whole(self, missing: list[PrefillChunk], budget: int) -> list[int]:
        """Of each text all of its tokens, the oldest first, while the step has room, or none."""
        given = []
        for n in (chunk.n for chunk in missing):
            budget -= n
            given.append(n if budget >= 0 else 0)
        return given

    def _weight_of(self, sequence: Sequence, of_row: float) -> float:
        """Units that the next token of a prompt takes. of_row: what its logits take, if they are wanted."""
        is_scored = sequence.on_logits is not None and sequence.n_computed >= sequence.first_output
        return self.weight(sequence.n_computed) + (of_row if is_scored else 0.0)

    def _reserve_states(self, states: StatePool, chunks: Chunks) -> None:
        """Slots for what the step leaves: the state after each chunk, and those behind its pages, from which
        other sequences may go on: that behind the last page, and others while slots are empty.
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
                continue  # its pages are not shared
            last = (sequence.n_computed + n - 1) // PAGE_SIZE * PAGE_SIZE
            for end in range(last, sequence.n_computed, -PAGE_SIZE):
                slot = states.allocate(evict=end == last)
                if slot is None:
                    break
                sequence.states[end] = slot

    def _reserve_drafted_states(self, states: StatePool, chunks: Chunks) -> None:
        """Slots for the state behind each drafted token: wherever the draft turns wrong, the sequence goes on
        from there. A draft without slots is cut."""
        for i, (sequence, n) in enumerate(chunks):
            drafted = len(sequence.draft)
            for j in range(drafted):
                slot = states.allocate(evict=states.n_idle > _KEPT_STATES)
                if slot is None:
                    del sequence.draft[j:]
                    break
                sequence.states[sequence.n_computed + n - drafted + j + 1] = slot
            chunks[i] = (sequence, n - drafted + len(sequence.draft))

    def trim_pages(self, sequence: Sequence) -> None:
        """Gives back pages that only rejected tokens needed."""
        n_pages = -(-len(sequence.tokens) // PAGE_SIZE)
        if len(sequence.pages) > n_pages:
            self.pool.release(sequence.pages[n_pages:])
            del sequence.pages[n_pages:]
            self.page_tables[sequence.slot, n_pages:] = -1

    def drop_states(self, sequence: Sequence) -> None:
        """Gives back all but the state that the sequence goes on from: those of the longest prefixes last."""
        if self.states is None:
            return
        for n in sorted(n for n in sequence.states if n != sequence.n_computed):
            self.states.release(sequence.states.pop(n))

    def _admit(self) -> None:
        """Lets waiting sequences run, in order, while there is a slot and room for what they must compute."""
        while self.waiting and self.free_slots:
            sequence = self.waiting.first()
            if self.prompt_cache is not None and self._awaits_blocks(sequence, self.prompt_cache):
                return
            pages, chain = self.pool.match(
                sequence.tokens,
                sequence.n_reusable_pages,
                first_thresholded_token=sequence.first_thresholded_token,
                parent=root_of(sequence.adapter_scales),
            )
            n_missing = -(-len(sequence.tokens) // PAGE_SIZE) - len(pages)
            n_owed = sum(-(-len(other.tokens) // PAGE_SIZE) - len(other.pages) for other in self.running)
            # One spare page for each running sequence, lest the next of their pages throw this one out again.
            if self.running and n_missing + n_owed + len(self.running) > self.pool.n_available:
                self.pool.release(pages)
                return
            self.waiting.pop()
            self.running.append(sequence)
            if sequence.reading is not None and self.prompt_cache is not None:
                n = len(pages)
                found, prefix = sequence.reading.found, prefix_of(sequence, len(sequence.tokens))
                chain = self.restore(self.prompt_cache.memory, found, prefix, pages, chain)
                self._counted.restored_tokens += (len(pages) - n) * PAGE_SIZE
                sequence.reading = None
            sequence.slot = self.free_slots.pop()
            sequence.pages = pages
            sequence.chain = chain
            sequence.n_registered = len(pages)
            sequence.n_computed = len(pages) * PAGE_SIZE
            self.page_tables[sequence.slot, : len(pages)] = pages
            if self.states is not None and pages:
                sequence.states[sequence.n_computed] = self.states.take(chain)
            if not sequence.started:
                sequence.started = time.perf_counter()
                sequence.n_reused = sequence.n_computed
                self._counted.reused_tokens += sequence.n_computed

    # ---- blocks on the disk (prompt_cache.py)

    def _awaits_blocks(self, first: Sequence, prompt_cache: PromptCache) -> bool:
        """Whether blocks of the sequence whose turn it is are still read. Those of the next ones are sought,
        too, as many as there is room for."""
        n_pages = 0
        for sequence in islice(self.waiting, len(self.free_slots)):
            if sequence.reading is None:
                sequence.reading = self._sought(sequence, prompt_cache)
            n_pages += sequence.reading.n_pages
            if n_pages > self.pool.n_available:
                break
        return first.reading is not None and not first.reading.is_done

    def _sought(self, sequence: Sequence, prompt_cache: PromptCache) -> BlockReading:
        prefix, n_pages = prefix_of(sequence, len(sequence.tokens)), sequence.n_reusable_pages
        root = root_of(prefix.adapter_scales)
        n_known = self.pool.n_known(prefix.tokens, n_pages, prefix.first_thresholded_token, root)
        return prompt_cache.read(prefix, n_known, n_pages)

    def wait_for_blocks(self, seconds: float) -> None:
        """Until the blocks of the sequence whose turn it is are read, or so long."""
        if self.waiting and (reading := self.waiting.first().reading) is not None:
            reading.wait(seconds)

    def restore(
        self, memory: CacheMemory, found: Blocks, prefix: Prefix, pages: list[int], serial: int
    ) -> int:
        """Puts blocks of a prefix into the cache, behind `pages` that it has of it, to which theirs are
        added; `serial` is that of the last one. Returns the new last one's.

        Without room for all of them, those that have room, or none where the model has states.
        """
        blocks = found.pages[max(len(pages) - found.first, 0) :] if found.first <= len(pages) else ()
        slot = None
        if self.states is not None and blocks:
            fits = found.state is not None and len(blocks) <= self.pool.n_available
            slot = self.states.allocate() if fits else None
            if slot is None or found.state is None:
                return serial
            memory.write_state(slot, found.state)
        for data in blocks:
            page = self.pool.allocate()
            if page is None:
                break
            memory.write_page(page, data)
            serial = self.pool.register(page, serial, *prefix.page(len(pages)))
            pages.append(page)
        if self.states is not None and slot is not None:
            self.states.keep(slot, serial)
            self.states.release(slot)
        return serial

    def restore_prefix(self, memory: CacheMemory, found: Blocks, prefix: Prefix) -> int:
        """Puts blocks into the cache, for later sequences; returns how many pages of the prefix it has."""
        pages, serial = self.pool.match(
            prefix.tokens, prefix.n_pages, first_thresholded_token=prefix.first_thresholded_token,
            parent=root_of(prefix.adapter_scales),
        )  # fmt: skip
        self.restore(memory, found, prefix, pages, serial)
        self.pool.release(pages)
        return len(pages)

    def _share_prefix(self, sequence: Sequence) -> None:
        """Takes over what another sequence has computed meanwhile of the same tokens: pages, not work."""
        n = sequence.n_registered
        if sequence.n_computed != n * PAGE_SIZE:
            return
        pages, chain = self.pool.match(
            sequence.tokens, sequence.n_reusable_pages,
            first_thresholded_token=sequence.first_thresholded_token,
            first=n, parent=sequence.chain,
        )  # fmt: skip
        if not pages:
            return
        self.pool.release(sequence.pages[n:])  # of a step that was cancelled
        sequence.pages = sequence.pages[:n] + pages  # a new list: drafters see that these are others
        sequence.chain = chain
        sequence.n_registered = n + len(pages)
        if self.states is not None:
            sequence.states[sequence.n_registered * PAGE_SIZE] = self.states.take(chain)
        sequence.n_computed = sequence.n_registered * PAGE_SIZE
        self.drop_states(sequence)
        self.page_tables[sequence.slot, n : n + len(pages)] = pages
        if not sequence.preempted:
            sequence.n_reused += len(pages) * PAGE_SIZE
            self._counted.reused_tokens += len(pages) * PAGE_SIZE

    def _waits_for_prefix(self, sequence: Sequence, coming: set[tuple[int, int, tuple[int, ...]]]) -> bool:
        """Whether a sequence before it computes the page that it needs next: then it waits for that one.

        So several answers of one prompt compute it once. What it waits for is in the next steps, whatever
        becomes of the other: one that leaves is not before it any more.
        """
        if sequence.tap:
            return False  # its pages are not shared
        n = sequence.n_registered
        page = tuple(sequence.tokens[n * PAGE_SIZE : (n + 1) * PAGE_SIZE])
        if len(page) < PAGE_SIZE:
            return False
        key = (sequence.chain, n_unthresholded_in_page(sequence.first_thresholded_token, n), page)
        if key in coming and n < sequence.n_reusable_pages and sequence.n_computed == n * PAGE_SIZE:
            return True
        coming.add(key)
        return False

    def _grow(self, sequence: Sequence, n: int) -> None:
        """Gives a sequence the pages for `n` more tokens; the newest sequences lose theirs if need be."""
        n_pages = -(-(sequence.n_computed + n) // PAGE_SIZE)
        while len(sequence.pages) < n_pages:
            page = self.pool.allocate()
            if page is not None:
                self.page_tables[sequence.slot, len(sequence.pages)] = page
                sequence.pages.append(page)
                continue
            newest = self.running[-1]
            self.preempt(newest)
            if newest is sequence:
                return

    def register_pages(self, sequence: Sequence) -> None:
        for i in range(sequence.n_registered, sequence.n_computed // PAGE_SIZE):
            tokens = sequence.tokens[i * PAGE_SIZE : (i + 1) * PAGE_SIZE]
            n_unthresholded = n_unthresholded_in_page(sequence.first_thresholded_token, i)
            sequence.chain = self.pool.register(sequence.pages[i], sequence.chain, tokens, n_unthresholded)
            sequence.n_registered = i + 1
            if self.states is not None and sequence.n_registered * PAGE_SIZE in sequence.states:
                self.states.keep(sequence.states[sequence.n_registered * PAGE_SIZE], sequence.chain)

    def remove(self, sequence: Sequence) -> None:
        """Takes a running sequence out of the batch and frees its pages; its tokens remain."""
        self.running.remove(sequence)
        self.pool.release(sequence.pages)
        self.page_tables[sequence.slot] = -1
        self.free_slots.append(sequence.slot)
        sequence.slot = -1
        sequence.pages = []
        sequence.draft = []
        if self.states is not None:
            for slot in sequence.states.values():
                self.states.release(slot)
        sequence.states = {}

    def preempt(self, sequence: Sequence) -> None:
        """Puts a running sequence back to the front of the queue; it keeps its tokens and loses its pages."""
        self.remove(sequence)
        self.waiting.push_front(sequence)
        sequence.preempted = True
        self._counted.preemptions += 1

    def preempt_all(self) -> None:
        """The cache was lost: every running sequence starts again, and no page holds anything."""
        for sequence in reversed(self.running.copy()):
            self.preempt(sequence)
        self.empty_cache()

    # ---- pages and states for a caller that steps the backend itself

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

        Raises OutOfMemoryError where another caller has them already.
        """
        if self.states is None:
            return None
        if self._lent_states:
            raise OutOfMemoryError("another text has the slots for recurrent states; wait for its end")
        for sequence in self.running:
            self.drop_states(sequence)
        slots = [slot for slot in (self.states.allocate(), self.states.allocate()) if slot is not None]
        self._lent_states = slots
        return np.array([slots], np.int32)

    def give_states(self) -> None:
        """Takes back what `take_states` gave."""
        while self._lent_states and self.states is not None:
            self.states.release(self._lent_states.pop())


def prefix_of(sequence: Sequence, n_tokens: int) -> Prefix:
    """The first tokens of a sequence, as its pages are found."""
    tokens = sequence.tokens[:n_tokens]
    n_prompt = min(sequence.n_prompt, n_tokens)
    return Prefix(tokens, sequence.first_thresholded_token, n_prompt, sequence.adapter_scales)
