"""Drafts by a model's own layer for multi-token prediction (MTP, `nextn`).

The layer reads a token's embedding and the model's hidden state before that token, and predicts the next
token. It continues from its own hidden state. Its keys and values use the model's block numbers, so they
share the fate of the model's blocks: shared with a prefix, lost at a preemption. The layer's entries of a
token depend only on the tokens up to it. The hidden state after a block, which the first token after the
block needs, is stored with the block.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as Many
from dataclasses import dataclass

import numpy as np

from hotset.backends.base import BLOCK_SIZE, Batch, CacheMemory
from hotset.backends.stage import CacheStage
from hotset.engine.draft_model import OfModel, draw
from hotset.engine.sampler import Sampler
from hotset.engine.sequence import Sequence
from hotset.engine.speculation import Draft
from hotset.errors import StepCancelledError
from hotset.model.decoder import NEXTN_INPUT

Rows = np.ndarray  # float32 [n, n_embd]


@dataclass(slots=True)
class _MtpState:
    """A followed sequence.

    blocks: the identity of its block list, which changes when it takes over blocks. n_entries: tokens that
    the layer has computed; it skips the first token. hidden: the model's hidden states from position `first`
    on, which later tokens need.
    """

    blocks: list[int]
    n_entries: int
    first: int
    hidden: Rows

    def before(self, first: int, end: int) -> Rows:
        """Return the hidden states before the tokens [first, end)."""
        return self.hidden[first - 1 - self.first : end - 1 - self.first]

    def add(self, start: int, hidden: Rows) -> None:
        """Add the states of a step that began at token `start`; drop older states of rejected tokens."""
        first = max(min(self.n_entries - 1, start), self.first)
        kept = self.hidden[first - self.first : start - self.first]
        self.hidden, self.first = np.concatenate([kept, hidden]), first


@dataclass(slots=True)
class _Reading:
    """Work of the layer in one call: tokens of a sequence from `start` on, and the states before them."""

    own: _MtpState
    tokens: list[int]
    start: int
    hidden: Rows


@dataclass(slots=True)
class _MtpDraft:
    """A sequence of one call: the layer's next work, and a draft of at most n tokens."""

    reading: _Reading
    n: int
    draft: Draft
    sampler: Sampler


class MtpDrafter(OfModel):
    """A drafter that uses a multi-token prediction layer. It follows all sequences in the model's steps.

    layer: a stage with as many blocks as the model's cache, used only here. reads: the value of the model's
    graph with the last hidden states of all tokens; `normed` turns its rows into NEXTN_INPUT. close: frees
    the layer.
    """

    name = "mtp"

    def __init__(
        self, layer: CacheStage, reads: str, normed: Callable[[Rows], Rows], close: Callable[[], None]
    ) -> None:
        super().__init__(close)
        self._layer, self.reads, self._normed = layer, reads, normed
        assert layer.entering is not None
        self._ends = np.zeros((layer.n_blocks, layer.entering.width), np.float32)  # states after each block
        self._followed: dict[Sequence, _MtpState] = {}

    def reset(self) -> None:
        """Forget every sequence."""
        self._followed.clear()

    def forget(self, sequence: Sequence) -> None:
        """Forget a finished sequence."""
        self._followed.pop(sequence, None)

    # ---- the model's steps

    def note_step(self, chunks: Many[tuple[Sequence, int]], rows: Rows) -> None:
        """Record a step, as described in StepReader.

        The layer computes prompts, and tokens that complete a block, at once; other tokens when it drafts.
        """
        rows, at, due = self._normed(rows), 0, []
        for sequence, n in chunks:
            hidden, at = rows[at : at + n], at + n
            if sequence.tap:
                continue  # it generates nothing, and its blocks are not shared
            start, own = sequence.n_computed, self._follow(sequence)
            own.add(start, hidden)
            end = start + n
            for block_end in range((start // BLOCK_SIZE + 1) * BLOCK_SIZE, end + 1, BLOCK_SIZE):
                self._ends[sequence.blocks[block_end // BLOCK_SIZE - 1]] = hidden[block_end - 1 - start]
            if n > 1 + len(sequence.draft) or end // BLOCK_SIZE > start // BLOCK_SIZE:
                due.append((own, sequence, end))
        self._catch_up(due)

    def _follow(self, sequence: Sequence) -> _MtpState:
        """Return a sequence's record. After admission or a takeover of blocks, start it from the blocks."""
        own, start, blocks = self._followed.get(sequence), sequence.n_computed, sequence.blocks
        if own is not None and own.blocks is blocks:
            return own
        assert start % BLOCK_SIZE == 0, "a sequence starts and resumes at the start of a block"
        hidden = self._ends[blocks[start // BLOCK_SIZE - 1]][None] if start else self._ends[:0]
        own = self._followed[sequence] = _MtpState(blocks, max(start, 1), max(start - 1, 0), hidden.copy())
        return own

    def _catch_up(self, due: list[tuple[_MtpState, Sequence, int]]) -> None:
        """Compute the layer for the tokens of some sequences up to an end, including drafted tokens."""
        readings: list[_Reading] = []
        left = self._layer.max_batch
        for own, sequence, end in due:
            tokens, at = sequence.tokens[own.n_entries : end], own.n_entries
            tokens += sequence.draft[: end - at - len(tokens)]
            while tokens:
                if not left:
                    self._read(readings)
                    readings, left = [], self._layer.max_batch
                piece, tokens = tokens[:left], tokens[left:]
                readings.append(_Reading(own, piece, at, own.before(at, at + len(piece))))
                at, left = at + len(piece), left - len(piece)
        if readings:
            self._read(readings)
        for own, sequence, end in due:
            own.n_entries = max(end - len(sequence.draft), own.n_entries)

    def _read(self, readings: Many[_Reading], *, draws: bool = False) -> tuple[np.ndarray, Rows]:
        """Run the layer; if `draws`, return the logits and hidden states after each last token."""
        n_blocks = max(len(each.own.blocks) for each in readings)
        table = np.full((len(readings), n_blocks), -1, np.int32)
        for row, each in zip(table, readings, strict=True):
            row[: len(each.own.blocks)] = each.own.blocks
        sizes = [len(each.tokens) for each in readings]
        ends = np.cumsum(sizes)
        batch = Batch(
            np.maximum(np.concatenate([each.tokens for each in readings]), 0).astype(np.int32),
            np.concatenate(
                [np.arange(each.start, each.start + len(each.tokens)) for each in readings]
            ).astype(np.int32),
            np.repeat(np.arange(len(readings), dtype=np.int32), sizes),
            table,
            (ends - 1 if draws else ends[:0]).astype(np.int32),
            (NEXTN_INPUT,) if draws else (),
        )
        logits = self._layer.run(batch, np.concatenate([each.hidden for each in readings]))
        return np.asarray(logits), self._layer.tapped[NEXTN_INPUT] if draws else self._ends[:0]

    # ---- drafts

    def draft(self, wanted: Many[tuple[Sequence, int]]) -> list[Draft]:
        """Draft tokens, as described in Drafter. A draft ends where the sequence's last block ends."""
        drafts = [Draft([], []) for _ in wanted]
        active: list[_MtpDraft] = []
        left = self._layer.max_batch
        for (sequence, n), draft in zip(wanted, drafts, strict=True):
            own, length = self._follow(sequence), len(sequence.tokens)
            n = min(n, len(sequence.blocks) * BLOCK_SIZE - length + 1)
            start = min(own.n_entries, length - 1)  # recompute the last token: its logits are needed
            if n < 1 or start <= own.first or left < length - start:
                continue
            left -= length - start
            assert sequence.sampler is not None
            reading = _Reading(own, sequence.tokens[start:], start, own.before(start, length))
            active.append(_MtpDraft(reading, n, draft, sequence.sampler.clone()))
        try:
            while active:
                active = self._go_on(active)
        except StepCancelledError:
            pass  # keep the tokens drafted so far
        return drafts

    def _go_on(self, active: list[_MtpDraft]) -> list[_MtpDraft]:
        """Draft one token of each, and return the entries that need more."""
        begun = time.perf_counter()
        logits, hidden = self._read([each.reading for each in active], draws=True)
        if all(len(each.reading.tokens) == 1 for each in active):
            self._note_step(time.perf_counter() - begun)
        left = []
        for each, row, state in zip(active, logits, hidden, strict=True):
            reading = each.reading
            end = reading.start + len(reading.tokens)
            if not each.draft.tokens:
                reading.own.n_entries = end  # entries of draft tokens may be overwritten
            if draw(each.draft, each.sampler, row) and len(each.draft.tokens) < each.n:
                each.reading = _Reading(reading.own, each.draft.tokens[-1:], end, state[None])
                left.append(each)
        return left

    # ---- blocks on disk

    @property
    def block_nbytes(self) -> int:
        """Return the bytes stored per block."""
        return self._layer.block_nbytes + int(self._ends[0].nbytes)

    def read_block(self, block: int) -> bytes:
        """Return a copy of a block, as described in CacheMemory."""
        return self._layer.read_block(block) + bytes(self._ends[block].tobytes())

    def write_block(self, block: int, data: bytes) -> None:
        """Overwrite a block, as described in CacheMemory."""
        n = self._layer.block_nbytes
        self._layer.write_block(block, data[:n])
        self._ends[block] = np.frombuffer(data[n:], np.float32)


class CacheWithMtp:
    """The CacheMemory of a model with its MTP layer: a block holds the data of both."""

    def __init__(self, model: CacheMemory, drafter: MtpDrafter) -> None:
        self._model, self._drafter = model, drafter
        self._n_bytes = model.block_nbytes
        self.block_nbytes = model.block_nbytes + drafter.block_nbytes
        self.state_nbytes = model.state_nbytes
        self.read_state, self.write_state = model.read_state, model.write_state

    def read_block(self, block: int) -> bytes:
        """Return a copy of a block, as described in CacheMemory."""
        return self._model.read_block(block) + self._drafter.read_block(block)

    def write_block(self, block: int, data: bytes) -> None:
        """Overwrite a block, as described in CacheMemory."""
        self._model.write_block(block, data[: self._n_bytes])
        self._drafter.write_block(block, data[self._n_bytes :])
