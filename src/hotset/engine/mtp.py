"""Drafts by a model's own layer for multi-token prediction (MTP, `nextn`).

Such a layer reads a token's embedding and the model's hidden state before that token, and predicts the token
behind it; with its own hidden state it goes on. Its keys and values are in pages of the model's numbers, so
they are there wherever the model's are: shared with a prefix, lost with a sequence that is preempted. What
the layer holds of a token depends on nothing but the tokens up to it. The hidden state behind a page, which
the first token after it needs, is kept with the page.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as Many
from dataclasses import dataclass

import numpy as np

from hotset.backends.base import PAGE_SIZE, Batch, CacheMemory
from hotset.backends.stage import CacheStage
from hotset.engine.draft_model import OfModel, draw
from hotset.engine.sampler import Sampler
from hotset.engine.sequence import Sequence
from hotset.engine.speculation import Draft
from hotset.errors import StepCancelledError
from hotset.model.decoder import NEXTN_INPUT

Rows = np.ndarray  # float32 [n, n_embd]


@dataclass(slots=True)
class _Followed:
    """A sequence. pages: its list of them, as it was. n_entries: tokens that the layer has read; of the first
    one it reads nothing. hidden: the model's hidden states at the positions from `first` on, which later
    tokens need."""

    pages: list[int]
    n_entries: int
    first: int
    hidden: Rows

    def before(self, first: int, end: int) -> Rows:
        """The hidden states before the tokens [first, end)."""
        return self.hidden[first - 1 - self.first : end - 1 - self.first]

    def add(self, start: int, hidden: Rows) -> None:
        """Takes in those of a step that began with the token `start`; later ones were of rejected tokens."""
        first = max(min(self.n_entries - 1, start), self.first)
        kept = self.hidden[first - self.first : start - self.first]
        self.hidden, self.first = np.concatenate([kept, hidden]), first


@dataclass(slots=True)
class _Reading:
    """What the layer reads in a call: tokens of a sequence from `start` on, each with the state before it."""

    own: _Followed
    tokens: list[int]
    start: int
    hidden: Rows


@dataclass(slots=True)
class _Drafting:
    """A sequence of this call, what the layer reads of it next, and what was drafted, n tokens at most."""

    reading: _Reading
    n: int
    draft: Draft
    sampler: Sampler


class MtpDrafter(OfModel):
    """Drafts with a layer for multi-token prediction, and follows all sequences of its model's steps.

    layer: its stage, with as many pages as the model's cache; for this alone. reads: the value of the model's
    graph with the last hidden states of all tokens, and normed: what makes NEXTN_INPUT of its rows.
    close: frees the layer.
    """

    name = "mtp"

    def __init__(
        self, layer: CacheStage, reads: str, normed: Callable[[Rows], Rows], close: Callable[[], None]
    ) -> None:
        super().__init__(close)
        self._layer, self.reads, self._normed = layer, reads, normed
        assert layer.entering is not None
        self._ends = np.zeros((layer.n_pages, layer.entering.width), np.float32)  # hidden state behind a page
        self._followed: dict[Sequence, _Followed] = {}

    def reset(self) -> None:
        """Forgets every sequence."""
        self._followed.clear()

    def forget(self, sequence: Sequence) -> None:
        """A sequence that came to its end."""
        self._followed.pop(sequence, None)

    # ---- the model's steps

    def note_step(self, chunks: Many[tuple[Sequence, int]], rows: Rows) -> None:
        """As StepReader. The layer reads prompts, and what completes a page, at once; other tokens when it
        drafts."""
        rows, at, due = self._normed(rows), 0, []
        for sequence, n in chunks:
            hidden, at = rows[at : at + n], at + n
            if sequence.tap:
                continue  # nothing is generated after it, and its pages are not shared
            start, own = sequence.n_computed, self._follow(sequence)
            own.add(start, hidden)
            end = start + n
            for page_end in range((start // PAGE_SIZE + 1) * PAGE_SIZE, end + 1, PAGE_SIZE):
                self._ends[sequence.pages[page_end // PAGE_SIZE - 1]] = hidden[page_end - 1 - start]
            if n > 1 + len(sequence.draft) or end // PAGE_SIZE > start // PAGE_SIZE:
                due.append((own, sequence, end))
        self._catch_up(due)

    def _follow(self, sequence: Sequence) -> _Followed:
        """What is known of a sequence; after it was admitted, or took over pages, what these hold."""
        own, start, pages = self._followed.get(sequence), sequence.n_computed, sequence.pages
        if own is not None and own.pages is pages:
            return own
        assert start % PAGE_SIZE == 0, "a sequence begins, and goes on elsewhere, with whole pages"
        hidden = self._ends[pages[start // PAGE_SIZE - 1]][None] if start else self._ends[:0]
        own = self._followed[sequence] = _Followed(pages, max(start, 1), max(start - 1, 0), hidden.copy())
        return own

    def _catch_up(self, due: list[tuple[_Followed, Sequence, int]]) -> None:
        """Has the layer read the tokens of some sequences up to an end, drafted ones too."""
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
        """Runs the layer. draws: whether logits after the last token of each are wanted, and the layer's
        hidden states there."""
        n_pages = max(len(each.own.pages) for each in readings)
        table = np.full((len(readings), n_pages), -1, np.int32)
        for row, each in zip(table, readings, strict=True):
            row[: len(each.own.pages)] = each.own.pages
        sizes = [len(each.tokens) for each in readings]
        ends = np.cumsum(sizes)
        batch = Batch(
            np.concatenate([each.tokens for each in readings]).astype(np.int32),
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
        """As Drafter. No draft takes a page: those of a sequence have room for it, or it is shorter."""
        drafts = [Draft([], []) for _ in wanted]
        active: list[_Drafting] = []
        left = self._layer.max_batch
        for (sequence, n), draft in zip(wanted, drafts, strict=True):
            own, length = self._follow(sequence), len(sequence.tokens)
            n = min(n, len(sequence.pages) * PAGE_SIZE - length + 1)
            start = min(own.n_entries, length - 1)  # the last one's logits are wanted
            if n < 1 or start <= own.first or left < length - start:
                continue
            left -= length - start
            assert sequence.sampler is not None
            reading = _Reading(own, sequence.tokens[start:], start, own.before(start, length))
            active.append(_Drafting(reading, n, draft, sequence.sampler.clone()))
        try:
            while active:
                active = self._go_on(active)
        except StepCancelledError:
            pass  # what was drafted until then
        return drafts

    def _go_on(self, active: list[_Drafting]) -> list[_Drafting]:
        """Drafts a token of each, and returns those that want another."""
        begun = time.perf_counter()
        logits, hidden = self._read([each.reading for each in active], draws=True)
        if all(len(each.reading.tokens) == 1 for each in active):
            self._note_step(time.perf_counter() - begun)
        left = []
        for each, row, state in zip(active, logits, hidden, strict=True):
            reading = each.reading
            end = reading.start + len(reading.tokens)
            if not each.draft.tokens:
                reading.own.n_entries = end  # later tokens may turn out to be others
            if draw(each.draft, each.sampler, row) and len(each.draft.tokens) < each.n:
                each.reading = _Reading(reading.own, each.draft.tokens[-1:], end, state[None])
                left.append(each)
        return left

    # ---- pages on the disk

    @property
    def page_nbytes(self) -> int:
        """Of what is kept of a page."""
        return self._layer.page_nbytes + int(self._ends[0].nbytes)

    def read_page(self, page: int) -> bytes:
        """As CacheMemory."""
        return self._layer.read_page(page) + bytes(self._ends[page].tobytes())

    def write_page(self, page: int, data: bytes) -> None:
        """As CacheMemory."""
        n = self._layer.page_nbytes
        self._layer.write_page(page, data[:n])
        self._ends[page] = np.frombuffer(data[n:], np.float32)


class CacheWithMtp:
    """CacheMemory of a model with the layer that drafts for it: a page of both is one."""

    def __init__(self, model: CacheMemory, drafter: MtpDrafter) -> None:
        self._model, self._drafter = model, drafter
        self._n_bytes = model.page_nbytes
        self.page_nbytes = model.page_nbytes + drafter.page_nbytes
        self.state_nbytes = model.state_nbytes
        self.read_state, self.write_state = model.read_state, model.write_state

    def read_page(self, page: int) -> bytes:
        """As CacheMemory."""
        return self._model.read_page(page) + self._drafter.read_page(page)

    def write_page(self, page: int, data: bytes) -> None:
        """As CacheMemory."""
        self._model.write_page(page, data[: self._n_bytes])
        self._drafter.write_page(page, data[self._n_bytes :])
