"""What the engine asks of a backend: one batch of tokens in, logits out.

A backend is built once from a file, its configuration and its graph, and owns the paged KV cache.
Batches mix prefill and decode freely; the result for a token never depends on its neighbours.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, Self

import numpy as np

from hotset import _core
from hotset.errors import InvalidRequestError
from hotset.offload.cache_stats import CacheStats

PAGE_SIZE = 64  # tokens per page of the KV cache
SAVED_TOKENS = 17  # of a sequence in a step, the last ones, behind which a recurrent state can be saved
LOGIT_GROUP = 64  # logits of a row, side by side, of which a backend may find the largest
N_CANDIDATES = 128  # logits of a row, the largest, that a backend hands out where these are enough

AdapterScales = tuple[tuple[str, float], ...]
"""Which adapters (LoRA) a sequence has, by digest (formats/lora.py), and how much of each; in that order."""
NO_ADAPTERS: AdapterScales = ()


@dataclass(frozen=True)
class Batch:
    """The tokens of one step. Tokens of one sequence are adjacent and in rising position.

    tokens, positions, sequences: int32 [n_tokens]; sequences[t] is a row of page_tables.
    page_tables: int32 [n_sequences, max_pages]; entry i holds the page of positions
    [i * PAGE_SIZE, (i + 1) * PAGE_SIZE), or -1.
    outputs: int32 [n_outputs], rising indices of the tokens whose logits are wanted.
    taps: names of graph values to hand out.
    thresholded: bool [n_tokens], whose small values are zero where the graph has thresholds
    (operations.Threshold);
    None: of no token.
    adapter_scales: of each sequence, a row of page_tables each; None: those of the backend by default.
    wants_candidates: of each output the N_CANDIDATES largest logits are enough, equal ones by rising token; a
    backend may hand out all the same.

    Where the graph has operations with a state (operations.Recurrent; else both are ignored), positions of a
    sequence follow one another. states: int32 [n_sequences], the slot with the state of each sequence before
    its first token of the batch, -1 where that is the first of all. saves: int32 [n_tokens], the slot that
    takes the state after a token, the last of a page or one of the last SAVED_TOKENS of the sequence in the
    batch; -1: none. A step that reads a slot does not write it, and so can be run again.
    """

    tokens: np.ndarray
    positions: np.ndarray
    sequences: np.ndarray
    page_tables: np.ndarray
    outputs: np.ndarray
    taps: tuple[str, ...] = ()
    thresholded: np.ndarray | None = None
    states: np.ndarray | None = None
    saves: np.ndarray | None = None
    adapter_scales: Sequence[AdapterScales] | None = None
    wants_candidates: bool = False

    def with_states_of_rows(self, steps: int | np.ndarray, slots: np.ndarray | None = None) -> Batch:
        """The same for callers that keep no states: each row of the page tables has two slots in turn.

        steps: how many each row has had a token in, int [n_sequences], or all. slots: int32 [n_sequences, 2];
        None: 2 r and 2 r + 1 for row r.
        """
        n = len(self.page_tables)
        turn = np.broadcast_to(np.asarray(steps) % 2, n)
        if slots is None:
            slots = np.arange(2 * n, dtype=np.int32).reshape(n, 2)
        states = slots[np.arange(n), 1 - turn]
        last = np.flatnonzero(np.append(self.sequences[1:] != self.sequences[:-1], True))
        first = np.append(0, last[:-1] + 1)
        states[self.sequences[first][self.positions[first] == 0]] = -1
        saves = np.full(len(self.tokens), -1, np.int32)
        saves[last] = slots[self.sequences[last], turn[self.sequences[last]]]
        return replace(self, states=states, saves=saves)


def check_states(batch: Batch, n_states: int) -> tuple[np.ndarray, np.ndarray]:
    """`states` and `saves` of a batch for a graph with a state, of which the cache has n_states slots.

    Raises InvalidRequestError for a batch that breaks the contract of Batch.
    """
    states, saves = batch.states, batch.saves
    if states is None or saves is None:
        raise InvalidRequestError("a model with recurrent layers needs state slots for the batch")
    if len(states) != len(batch.page_tables) or len(saves) != len(batch.tokens):
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
    last = np.flatnonzero(ends)[np.cumsum(begins) - 1]  # of the sequence of each token
    ends = (last - np.arange(len(last)) < SAVED_TOKENS) | ((batch.positions + 1) % PAGE_SIZE == 0)
    if not ends[saves >= 0].all():
        raise InvalidRequestError(
            "a state can be saved only at the end of a KV block or among a sequence's last tokens"
        )
    if len(np.unique(written)) != len(written) or np.isin(written, states[owners]).any():
        raise InvalidRequestError("a step must write a state only once, and none that it reads")
    return states, saves


def cache_slots(batch: Batch, *, max_batch: int, n_pages: int, n_vocab: int | None) -> np.ndarray:
    """Where the cache holds each token of a batch, int64 [n_tokens]: page * PAGE_SIZE + place in the page.

    n_vocab: None where no token is looked up. Raises InvalidRequestError for a batch that breaks the contract
    of Batch. It is native code, since it runs between two steps.
    """
    thresholded = batch.thresholded
    if thresholded is not None and (thresholded.dtype != np.bool_ or thresholded.shape != batch.tokens.shape):
        raise InvalidRequestError(
            "thresholded must be a boolean array with an element for each token of the batch"
        )
    try:
        return _core.cache_slots(
            batch.tokens, batch.positions, batch.sequences, batch.page_tables, batch.outputs, max_batch,
            n_pages, n_vocab,
        )  # fmt: skip
    except ValueError as error:
        raise InvalidRequestError(str(error)) from None


# What operations of a layer count (csrc/plan.h), in this order: fields of StepStats.
COUNTS = ("selected", "active", "gate_rows", "up_rows", "down_rows", "left_out")


@dataclass(frozen=True)
class StepStats:
    """What the FFNs of one step did; arrays are [n_layer].

    n_tokens: of the step; all counts are sums over them, except rows.
    selected: neurons that a predictor named (all of them without one). active: neurons whose value is not 0.
    gate_rows, up_rows, down_rows: rows of the matrices that were read; the tokens of a step share them.
    predictor, ffn, attention: seconds. ffn covers its norm and its matrices without the predictor. other:
    seconds of the rest of the step. active_on_cpu: of the active neurons those that the CPU computed; None
    where no device computes any. left_out: bytes of input-major matrices that were not read, as their inputs
    are zero; None where there are no thresholds.
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
        """Of what was counted, int64 [n_layer, len(COUNTS)], and timed, float64 [n_layer, len(PARTS)]: of the
        parts all but the last. has_thresholds: whether the model has activation thresholds."""
        selected, active, gate_rows, up_rows, down_rows, left_out = counts.T
        predictor, ffn, attention, _ = seconds.T
        return cls(
            n_tokens, selected, active, gate_rows, up_rows, down_rows, predictor, ffn, attention, other,
            active_on_cpu, left_out if has_thresholds else None,
        )  # fmt: skip


@dataclass(frozen=True)
class StepResult:
    """logits: float32 [n_outputs, n_vocab], valid until the next step; taps: name → [n_rows, width].

    largest: float32 [n_outputs, n_vocab / LOGIT_GROUP], the largest logit of each group of a row, NaN where
    one is not finite, valid as long; None: it was not found. A row of logits lies in no cache of the core
    that draws from it; with this it looks at a few groups alone.

    candidates: int32 [n_outputs, N_CANDIDATES], rising in each row: the tokens with the largest logits, where
    the batch wanted no others; logits then are theirs, [n_outputs, N_CANDIDATES]. None: logits are of all.
    """

    logits: np.ndarray
    taps: Mapping[str, np.ndarray] = field(default_factory=dict)
    largest: np.ndarray | None = None
    candidates: np.ndarray | None = None


class CacheMemory(Protocol):
    """A cache whose contents can be copied out and in. A page, and a state, is so many bytes, whose order and
    type are the backend's own.

    Reading is for any thread: what a page or slot holds that is written meanwhile is for the caller to throw
    away. Writing is for the thread that steps.
    """

    page_nbytes: int
    state_nbytes: int

    def read_page(self, page: int) -> bytes:
        """Keys and values of a page in all layers."""
        ...

    def write_page(self, page: int, data: bytes) -> None:
        """Puts back what `read_page` gave."""
        ...

    def read_state(self, slot: int) -> bytes:
        """The recurrent states of a slot in all layers."""
        ...

    def write_state(self, slot: int, data: bytes) -> None:
        """Puts back what `read_state` gave."""
        ...


class Backend(Protocol):
    """Executes a graph. `max_batch` tokens per step at most; `n_pages` pages in the cache, and n_states slots
    for the recurrent state of a sequence: 0 where there is none.
    """

    name: str
    max_batch: int
    n_pages: int
    n_states: int
    n_vocab: int

    @property
    def n_threads(self) -> int | None:
        """Of the CPU's thread pool; None where it has none."""
        ...

    @property
    def runtime(self) -> _core.Runtime | None:
        """The CPU's thread pool, which also draws tokens between two steps; None if there is no pool."""
        ...

    @property
    def notes(self) -> Sequence[str]:
        """How it computes, a line each for a person."""
        ...

    def step(self, batch: Batch) -> StepResult:
        """Runs one step: stores keys and values, returns logits (and taps).

        Raises StepCancelledError where `cancel` came in between, and what a signal handler raised (Ctrl-C)
        without waiting for the end of the step. Then the cache holds anything at the positions of the batch
        and in the states that it saves, and what it held elsewhere.
        """
        ...

    def cancel(self) -> None:
        """Ends the step in flight, from any thread or a signal handler; without one nothing happens."""
        ...

    def stats(self) -> StepStats | None:
        """Counts and times of the latest step; None where the backend keeps none."""
        ...

    @property
    def workspace_bytes(self) -> int:
        """Bytes of this machine's memory for the values of a step; 0 if the backend does not count them."""
        ...

    def expert_counts(self) -> CacheStats:
        """Return what became of the experts that its devices needed, since it was made."""
        ...

    def device_bytes(self) -> list[dict[str, int]]:
        """Bytes that it holds on each device, by kind, in the order of a placement; none on the CPU alone."""
        ...

    def close(self) -> None:
        """Frees threads and memory; safe to call twice."""
        ...


class WithoutDevices:
    """The answers of a backend that has no device."""

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
