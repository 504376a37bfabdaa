"""The interface between engine and backend: one batch of tokens in, logits out.

A backend is built once from a file, its configuration and its graph, and owns the KV cache.
Batches mix prefill and decode freely; the result for a token never depends on its neighbours.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, Self

import numpy as np

from hotset import _core
from hotset.errors import InvalidRequestError
from hotset.load_parameters import MOST_DRAFTED
from hotset.model.cost import KV_BLOCK_SIZE
from hotset.model.operations import Rope
from hotset.offload.cache_stats import CacheStats

BLOCK_SIZE = KV_BLOCK_SIZE  # tokens per KV block
SAVED_TOKENS = MOST_DRAFTED + 1  # the state can be saved after each of a sequence's last 17 tokens in a step
LOGIT_GROUP = 64  # adjacent logits of a row, of which a backend may find the largest
N_CANDIDATES = 128  # the largest logits of a row, which a backend may return instead of all

MAX_AXES = 4  # most columns of Batch.rotary

AdapterScales = tuple[tuple[str, float], ...]
"""The adapters (LoRA) of a sequence: pairs of a digest (formats/lora.py) and a scale."""
NO_ADAPTERS: AdapterScales = ()


@dataclass(frozen=True)
class ImageRows:
    """The tokens of a batch that belong to images, and their rows, which replace token embeddings.

    places: int32 [n], rising indices of tokens. rows: float32 [n, n_embd * parts], first as the model's
    embedding operation (operations.Embed, `image_parts`) would return them, then the parts that
    operations.AddImage adds.
    """

    places: np.ndarray
    rows: np.ndarray


@dataclass(frozen=True)
class Batch:
    """The tokens of one step. Tokens of one sequence are adjacent and in rising position.

    tokens, positions, sequences: int32 [n_tokens]; sequences[t] is a row of block_tables.
    block_tables: int32 [n_sequences, max_blocks]; entry i holds the KV block of positions
    [i * BLOCK_SIZE, (i + 1) * BLOCK_SIZE), or -1.
    outputs: int32 [n_outputs], rising indices of the tokens whose logits are computed.
    taps: names of graph values to return.
    thresholded: bool [n_tokens], the tokens whose small values count as zero (operations.Threshold); None:
    no tokens.
    adapter_scales: one item per row of block_tables; None: the backend's default for all.
    rotary: int32 [n_tokens, at most MAX_AXES], the positions for rotations with axes (operations.Rope); None:
    `positions`.
    groups: int32 [n_tokens, 2], the positions [first, last) of each token's group, such as a window or an
    image, for Attention.groups. The whole group is in the batch or before it. None: no groups.
    wants_candidates: the N_CANDIDATES largest logits of each output are enough, equal ones by rising token. A
    backend may still return all logits.
    image_rows: rows that replace embeddings; the ids of their tokens are 0. None: no images.

    states, saves: only for graphs with recurrent operations (operations.Recurrent), otherwise ignored. The
    positions of a sequence must then be consecutive. states: int32 [n_sequences], the slot with the state of
    each sequence before its first token in the batch; -1 if the sequence begins. saves: int32 [n_tokens], the
    slot for the state after a token; -1: do not save. The token must be the last of a KV block or among the
    last SAVED_TOKENS of its sequence in the batch. A step does not write a slot that it reads, so it can run
    again.
    """

    tokens: np.ndarray
    positions: np.ndarray
    sequences: np.ndarray
    block_tables: np.ndarray
    outputs: np.ndarray
    taps: tuple[str, ...] = ()
    thresholded: np.ndarray | None = None
    states: np.ndarray | None = None
    saves: np.ndarray | None = None
    adapter_scales: Sequence[AdapterScales] | None = None
    wants_candidates: bool = False
    image_rows: ImageRows | None = None
    rotary: np.ndarray | None = None
    groups: np.ndarray | None = None

    def runs(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the first token and the number of tokens of each sequence, in order: int64 [n] each."""
        first = np.flatnonzero(np.append(True, self.sequences[1:] != self.sequences[:-1]))
        return first, np.diff(first, append=len(self.sequences))

    def rotary_positions(self, rope: Rope) -> np.ndarray:
        """Return the positions that turn each token: int32 [n_tokens], or [n_tokens, n_rot / 2] with axes."""
        if rope.axes is None or self.rotary is None:
            return self.positions
        return self.rotary[:, list(rope.axes)]

    def with_states_of_rows(self, steps: int | np.ndarray, slots: np.ndarray | None = None) -> Batch:
        """Return the batch with states for callers that keep none: each row uses two slots in turn.

        steps: the earlier steps that had tokens of a row, int [n_sequences], or one number for all rows.
        slots: int32 [n_sequences, 2]; None: 2 r and 2 r + 1 for row r.
        """
        n = len(self.block_tables)
        turn = np.broadcast_to(np.asarray(steps) % 2, n)
        if slots is None:
            slots = np.arange(2 * n, dtype=np.int32).reshape(n, 2)
        states = slots[np.arange(n), 1 - turn]
        first, lengths = self.runs()
        last = first + lengths - 1
        states[self.sequences[first][self.positions[first] == 0]] = -1
        saves = np.full(len(self.tokens), -1, np.int32)
        saves[last] = slots[self.sequences[last], turn[self.sequences[last]]]
        return replace(self, states=states, saves=saves)


def check_states(batch: Batch, n_states: int) -> tuple[np.ndarray, np.ndarray]:
    """Return `states` and `saves` of a batch for a recurrent graph. n_states: state slots of the cache.

    Raises InvalidRequestError if the batch breaks the contract of Batch.
    """
    states, saves = batch.states, batch.saves
    if states is None or saves is None:
        raise InvalidRequestError("a model with recurrent layers needs state slots for the batch")
    if len(states) != len(batch.block_tables) or len(saves) != len(batch.tokens):
        raise InvalidRequestError("a batch has a state for each sequence, and perhaps one to save a token")
    written = saves[saves >= 0]
    used = np.concatenate([states, saves])
    if used.min() < -1 or used.max() >= n_states:
        raise InvalidRequestError(f"a state slot of the batch is outside the cache's {n_states} slots")
    begins = np.append(True, batch.sequences[1:] != batch.sequences[:-1])
    owners, first = batch.sequences[begins], batch.positions[begins]
    if len(np.unique(owners)) != len(owners) or (np.diff(batch.positions)[~begins[1:]] != 1).any():
        raise InvalidRequestError("tokens of a sequence with a state must be consecutive")
    if ((states[owners] < 0) != (first == 0)).any():
        raise InvalidRequestError("a sequence needs a state exactly if it does not begin")
    ends = np.append(begins[1:], True)
    last = np.flatnonzero(ends)[np.cumsum(begins) - 1]  # the last token of each token's sequence
    ends = (last - np.arange(len(last)) < SAVED_TOKENS) | ((batch.positions + 1) % BLOCK_SIZE == 0)
    if not ends[saves >= 0].all():
        raise InvalidRequestError(
            "a state can be saved only at the end of a KV block or among a sequence's last tokens"
        )
    if len(np.unique(written)) != len(written) or np.isin(written, states[owners]).any():
        raise InvalidRequestError("a step must write a state only once, and none that it reads")
    return states, saves


def cache_slots(batch: Batch, *, max_batch: int, n_blocks: int, n_vocab: int | None) -> np.ndarray:
    """Return the cache slot of each token, int64 [n_tokens]: block * BLOCK_SIZE + place in the block.

    n_vocab: None to skip the check of token ids. Raises InvalidRequestError if the batch breaks the contract
    of Batch. Native code computes the slots, since this runs between two steps.
    """
    thresholded = batch.thresholded
    if thresholded is not None and (thresholded.dtype != np.bool_ or thresholded.shape != batch.tokens.shape):
        raise InvalidRequestError(
            "thresholded must be a boolean array with an element for each token of the batch"
        )
    try:
        return _core.cache_slots(
            batch.tokens, batch.positions, batch.sequences, batch.block_tables, batch.outputs, max_batch,
            n_blocks, n_vocab,
        )  # fmt: skip
    except ValueError as error:
        raise InvalidRequestError(str(error)) from None


# The counts of a layer's operations (csrc/plan.h), in this order: fields of StepStats.
COUNTS = ("selected", "active", "gate_rows", "up_rows", "down_rows", "left_out")


@dataclass(frozen=True)
class StepStats:
    """The FFN counts and the times of one step; arrays are [n_layer].

    n_tokens: tokens of the step; all counts are sums over them, except rows.
    selected: neurons that a predictor named; all neurons without a predictor. active: neurons whose value is
    not 0. gate_rows, up_rows, down_rows: rows of the matrices that were read, once for all tokens of a step.
    predictor, ffn, attention: seconds. ffn covers its norm and its matrices without the predictor. other:
    seconds of the rest of the step. active_on_cpu: active neurons that the CPU computed; None if no device
    computes any. left_out: bytes of input-major matrices that were not read because their inputs are zero;
    None without thresholds.
    """

    n_tokens: int
    selected: np.ndarray
    active: np.ndarray
    gate_rows: np.ndarray
    up_rows: np.ndarray
    down_rows: np.ndarray
    predictor: np.ndarray
    ffn: np.ndarray
    attention: np.ndarray
    other: float
    active_on_cpu: np.ndarray | None = None
    left_out: np.ndarray | None = None

    @classmethod
    def of(
        cls,
        n_tokens: int,
        counts: np.ndarray,
        seconds: np.ndarray,
        other: float,
        *,
        has_thresholds: bool,
        active_on_cpu: np.ndarray | None = None,
    ) -> Self:
        """Build the statistics from counts and times.

        counts: int64 [n_layer, len(COUNTS)]. seconds: float64 [n_layer, len(PARTS)]; the last part is not
        used. has_thresholds: the model has activation thresholds.
        """
        selected, active, gate_rows, up_rows, down_rows, left_out = counts.T
        predictor, ffn, attention, _ = seconds.T
        return cls(
            n_tokens, selected, active, gate_rows, up_rows, down_rows, predictor, ffn, attention, other,
            active_on_cpu, left_out if has_thresholds else None,
        )  # fmt: skip


@dataclass(frozen=True)
class StepResult:
    """The results of one step.

    logits: float32 [n_outputs, n_vocab], valid until the next step. taps: name → [n_rows, width].

    largest: float32 [n_outputs, n_vocab / LOGIT_GROUP], the largest logit of each group of a row, NaN if one
    is not finite, valid until the next step; None if it was not computed. With it, sampling reads only a few
    groups of a row, which is not in the core's cache.

    candidates: int32 [n_outputs, N_CANDIDATES], rising in each row: the tokens with the largest logits, if
    the batch needs no others. `logits` then has only theirs, [n_outputs, N_CANDIDATES]. None: it has all.
    """

    logits: np.ndarray
    taps: Mapping[str, np.ndarray] = field(default_factory=dict)
    largest: np.ndarray | None = None
    candidates: np.ndarray | None = None


class CacheMemory(Protocol):
    """A cache whose contents can be copied out and in.

    A KV block has block_nbytes bytes and a state state_nbytes; only the backend knows their layout. Any
    thread may read; the caller must discard a KV block or slot that was written meanwhile. Only the thread
    that runs the steps may write.
    """

    block_nbytes: int
    state_nbytes: int

    def read_block(self, block: int) -> bytes:
        """Return the keys and values of a KV block in all layers."""
        ...

    def write_block(self, block: int, data: bytes) -> None:
        """Restore the data of `read_block` to a KV block."""
        ...

    def read_state(self, slot: int) -> bytes:
        """Return the recurrent states of a slot in all layers."""
        ...

    def write_state(self, slot: int, data: bytes) -> None:
        """Restore the data of `read_state` to a slot."""
        ...


class Backend(Protocol):
    """An executor of a graph.

    max_batch: the most tokens of a step. n_blocks: KV blocks of the cache. n_states: slots for recurrent
    states; 0 without recurrent layers.
    """

    name: str
    max_batch: int
    n_blocks: int
    n_states: int
    n_vocab: int

    @property
    def n_threads(self) -> int | None:
        """Return the threads of the CPU's thread pool; None without a pool."""
        ...

    @property
    def runtime(self) -> _core.Runtime | None:
        """Return the CPU's thread pool, which also samples tokens between two steps; None without a pool."""
        ...

    @property
    def notes(self) -> Sequence[str]:
        """Return lines about the devices in use, for display."""
        ...

    def step(self, batch: Batch) -> StepResult:
        """Run one step: store keys and values, and return logits (and taps).

        Raises StepCancelledError after `cancel`, and passes on an exception of a signal handler (Ctrl-C)
        before the step ends. After an error, cache entries and states written by this batch are undefined;
        all others are unchanged.
        """
        ...

    def cancel(self) -> None:
        """End the step in flight, if there is one, from any thread or a signal handler."""
        ...

    def stats(self) -> StepStats | None:
        """Return counts and times of the latest step; None if the backend does not keep them."""
        ...

    @property
    def workspace_bytes(self) -> int:
        """Return the bytes of host memory for the values of a step; 0 if the backend does not count them."""
        ...

    def expert_counts(self) -> CacheStats:
        """Return the cache statistics of the experts that the devices needed, since the backend was built."""
        ...

    def device_bytes(self) -> list[dict[str, int]]:
        """Return the bytes on each device, by kind, in the order of a placement; empty without devices."""
        ...

    def close(self) -> None:
        """Free threads and memory. Safe to call twice."""
        ...


class WithoutDevices:
    """The results of device queries for a backend without devices."""

    @property
    def workspace_bytes(self) -> int:
        """Return 0, as Backend.workspace_bytes."""
        return 0

    def expert_counts(self) -> CacheStats:
        """Return nothing, as Backend.expert_counts."""
        return CacheStats()

    def device_bytes(self) -> list[dict[str, int]]:
        """Return nothing, as Backend.device_bytes."""
        return []
