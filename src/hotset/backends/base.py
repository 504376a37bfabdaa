"""What the engine asks of a backend: one batch of tokens in, logits out.

A backend is built once from a file, its configuration and its graph, and owns the paged KV cache.
Batches mix prefill and decode freely; the result for a token never depends on its neighbours.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import numpy as np

from hotset.errors import InvalidRequestError

if TYPE_CHECKING:
    from hotset.formats.gguf import TensorInfo

PAGE_SIZE = 64  # tokens per page of the KV cache


@dataclass(frozen=True)
class Batch:
    """The tokens of one step. Tokens of one sequence are adjacent and in rising position.

    tokens, positions, sequences: int32 [n_tokens]; sequences[t] is a row of page_tables.
    page_tables: int32 [n_sequences, max_pages]; entry i holds the page of positions
    [i * PAGE_SIZE, (i + 1) * PAGE_SIZE), or -1.
    outputs: int32 [n_outputs], rising indices of the tokens whose logits are wanted.
    taps: names of graph values to hand out.
    cut: bool [n_tokens], whose small values are zero where the graph cuts (graph.Cutoff); None: nobody's.
    """

    tokens: np.ndarray
    positions: np.ndarray
    sequences: np.ndarray
    page_tables: np.ndarray
    outputs: np.ndarray
    taps: tuple[str, ...] = ()
    cut: np.ndarray | None = None


def cache_slots(batch: Batch, *, max_batch: int, n_pages: int, n_vocab: int) -> np.ndarray:
    """Where the cache holds each token of a batch, int64 [n_tokens]: page * PAGE_SIZE + place in the page.

    Raises InvalidRequestError for a batch that breaks the contract of Batch.
    """
    n = len(batch.tokens)
    if not 1 <= n <= max_batch:
        raise InvalidRequestError(f"a step takes 1 to {max_batch} tokens, not {n}")
    if n != len(batch.positions) or n != len(batch.sequences):
        raise InvalidRequestError("tokens, positions and sequences of a batch differ in length")
    if batch.cut is not None and (batch.cut.dtype != np.bool_ or batch.cut.shape != (n,)):
        raise InvalidRequestError("which tokens of a batch are cut must be a truth for each of them")
    if batch.tokens.min() < 0 or batch.tokens.max() >= n_vocab:
        raise InvalidRequestError(f"a token id lies outside the vocabulary of {n_vocab}")
    if len(batch.outputs) and not 0 <= batch.outputs.min() <= batch.outputs.max() < n:
        raise InvalidRequestError("an output index lies outside the batch")
    if not 0 <= batch.sequences.min() <= batch.sequences.max() < len(batch.page_tables):
        raise InvalidRequestError("a sequence of the batch has no page table")
    positions = batch.positions.astype(np.int64)
    tables, last = batch.page_tables[batch.sequences], positions // PAGE_SIZE
    missing = (tables < 0) | (tables >= n_pages)
    needed = np.arange(tables.shape[1]) <= last[:, None]
    bad = (positions < 0) | (last >= tables.shape[1]) | (missing & needed).any(axis=1)
    if bad.any():
        token = int(bad.argmax())
        raise InvalidRequestError(
            f"position {positions[token]} of sequence {batch.sequences[token]} has no page in the cache"
        )
    return np.asarray(tables[np.arange(n), last].astype(np.int64) * PAGE_SIZE + positions % PAGE_SIZE)


class WeightSource(Protocol):
    """Where a backend finds its weights: a GGUFFile, or one under sidecars (formats/overlay.py)."""

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Name → type and shape."""
        ...

    def data(self, name: str) -> np.ndarray:
        """The tensor's bytes, uint8 [nbytes], where they lie."""
        ...

    def check(self) -> None:
        """Raises FormatError where what was read may be anything: a file was cut meanwhile."""
        ...


@dataclass(frozen=True)
class StepStats:
    """What the FFNs of one step did; arrays are [n_layer].

    n_tokens: of the step; all counts are sums over them, except rows.
    selected: neurons that a predictor named (all of them without one). active: neurons whose value is not 0.
    gate_rows, up_rows, down_rows: rows of the matrices that were read; the tokens of a step share them.
    predictor, ffn, attention: seconds. ffn covers its norm and its matrices without the predictor. other:
    seconds of the rest of the step. active_on_cpu: of the active neurons those that the CPU computed; None
    where no device computes any.
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


@dataclass(frozen=True)
class StepResult:
    """logits: float32 [n_outputs, n_vocab], valid until the next step; taps: name → [n_rows, width]."""

    logits: np.ndarray
    taps: Mapping[str, np.ndarray] = field(default_factory=dict)


class Backend(Protocol):
    """Executes a graph. `max_batch` tokens per step at most; `n_pages` pages in the cache."""

    name: str
    max_batch: int
    n_pages: int
    n_vocab: int

    @property
    def n_threads(self) -> int | None:
        """Of the CPU's team; None where it has none."""
        ...

    @property
    def notes(self) -> Sequence[str]:
        """How it computes, a line each for a person."""
        ...

    def step(self, batch: Batch) -> StepResult:
        """Runs one step: stores keys and values, returns logits (and taps).

        Raises StepCancelledError where `cancel` came in between, and what a signal handler raised (Ctrl-C)
        without waiting for the end of the step. Then the cache holds anything at the positions of the batch,
        and what it held elsewhere.
        """
        ...

    def cancel(self) -> None:
        """Ends the step in flight, from any thread or a signal handler; without one nothing happens."""
        ...

    def stats(self) -> StepStats | None:
        """Counts and times of the latest step; None where the backend keeps none."""
        ...

    def device_bytes(self) -> list[dict[str, int]]:
        """Bytes that it holds on each device, by kind, in the order of a placement; none on the CPU alone."""
        ...

    def close(self) -> None:
        """Frees threads and memory; safe to call twice."""
        ...
