"""Builds the batch of a step from the tokens that the scheduler chose."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from hotset.backends.base import NO_ADAPTERS, AdapterScales, Batch, ImageRows
from hotset.engine.images import N_AXES
from hotset.engine.scheduler import Chunks


class BatchBuilder:
    """A builder of batches. A Batch is a view of its arrays and valid until the next `build`.

    max_batch: tokens. max_sequences: rows of the block table. has_thresholds: whether the graph has
    activation thresholds. has_states: whether the graph has recurrent layers. taps: values that every step
    returns.
    """

    def __init__(
        self,
        max_batch: int,
        max_sequences: int,
        *,
        has_thresholds: bool,
        has_states: bool,
        taps: tuple[str, ...] = (),
    ) -> None:
        self._taps = frozenset(taps)
        self._has_thresholds, self._has_states = has_thresholds, has_states
        self.has_adapters = False  # whether sequences may have adapters
        self._max_sequences = max_sequences
        self._tokens = np.zeros(max_batch, np.int32)
        self._positions = np.zeros(max_batch, np.int32)
        self._sequences = np.zeros(max_batch, np.int32)
        self._outputs = np.zeros(max_batch, np.int32)
        self._thresholded = np.zeros(max_batch, np.bool_)
        self._states = np.full(max_sequences, -1, np.int32)
        self._saves = np.full(max_batch, -1, np.int32)

    def build(self, chunks: Chunks, block_tables: np.ndarray) -> Batch:
        """Return the batch of `chunks`. block_tables: int32 [max_sequences, max_blocks], a row per slot."""
        tokens, positions, sequences, outputs = self._tokens, self._positions, self._sequences, self._outputs
        n_tokens = n_outputs = 0
        wants_candidates = True
        has_images = False
        scales: list[AdapterScales] = [NO_ADAPTERS] * (self._max_sequences if self.has_adapters else 0)
        for sequence, n in chunks:
            start = sequence.n_computed
            has_images |= sequence.images is not None
            if n == 1:
                tokens[n_tokens] = sequence.tokens[start]
                positions[n_tokens] = start
                sequences[n_tokens] = sequence.slot
            else:
                tokens[n_tokens : n_tokens + n] = sequence.coming(n)
                positions[n_tokens : n_tokens + n] = np.arange(start, start + n)
                sequences[n_tokens : n_tokens + n] = sequence.slot
            if self._has_thresholds:
                self._thresholded[n_tokens : n_tokens + n] = (
                    np.arange(start, start + n) >= sequence.first_thresholded_token
                )
            if self._has_states:
                self._states[sequence.slot] = sequence.states[start] if start else -1
                self._saves[n_tokens : n_tokens + n] = -1
                for end, slot in sequence.states.items():
                    if end > start:
                        self._saves[n_tokens + end - start - 1] = slot
            if self.has_adapters:
                scales[sequence.slot] = sequence.adapter_scales
            n_rows = sequence.n_rows(n)
            if n_rows and wants_candidates:
                sampler = None if sequence.on_logits else sequence.sampler
                wants_candidates = sampler is not None and sampler.takes_candidates(n_rows)
            if n_rows == 1:
                outputs[n_outputs] = n_tokens + n - 1
            else:
                outputs[n_outputs : n_outputs + n_rows] = np.arange(n_tokens + n - n_rows, n_tokens + n)
            n_outputs += n_rows
            n_tokens += n
        batch = Batch(
            tokens[:n_tokens],
            positions[:n_tokens],
            sequences[:n_tokens],
            block_tables,
            outputs[:n_outputs],
            tuple(sorted(self._taps.union(sequence.tap for sequence, _ in chunks if sequence.tap))),
            self._thresholded[:n_tokens] if self._has_thresholds else None,
            self._states if self._has_states else None,
            self._saves[:n_tokens] if self._has_states else None,
            scales if self.has_adapters else None,
            wants_candidates,
        )
        return _with_images(batch, chunks) if has_images else batch


def _with_images(batch: Batch, chunks: Chunks) -> Batch:
    """Return the batch with the rows, rotary positions and groups of its sequences' images."""
    rows: list[ImageRows] = []
    rotary = groups = None
    place = 0
    for sequence, n in chunks:
        images, start, at = sequence.images, sequence.n_computed, slice(place, place + n)
        if images is not None:
            rows += images.rows(start, n, place)
            if images.has_rotary:
                if rotary is None:
                    rotary = np.repeat(batch.positions[:, None], N_AXES, axis=1)
                rotary[at] = images.rotary(start, n)
            if images.has_groups(start):
                if groups is None:
                    groups = np.stack([batch.positions, batch.positions + 1], axis=1)
                groups[at] = images.groups(start, n)
        place += n
    np.maximum(batch.tokens, 0, out=batch.tokens)  # the ids of image tokens are negative
    image_rows = None
    if rows:
        places = np.concatenate([each.places for each in rows])
        image_rows = ImageRows(places, np.concatenate([each.rows for each in rows]))
    return replace(batch, image_rows=image_rows, rotary=rotary, groups=groups)
