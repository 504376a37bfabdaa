"""What a step reads and leaves, and never moves: the paged cache, the numbers of a batch, logits and counts.

A captured graph replays with the addresses that it was captured with, so a step's tokens are always written
to the same tensors, and a step, captured or not, reads nothing else. Likewise, what it leaves to the host.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor

from hotset.backends.base import LOGIT_GROUP, PAGE_SIZE, Batch
from hotset.backends.triton.arena import Arena
from hotset.backends.triton.capture import MAX_CAPTURED
from hotset.backends.triton.kernels import Kernels
from hotset.backends.triton.plugin import check_cache
from hotset.model.cost import KVType
from hotset.model.operations import Attention

OUTPUTS = MAX_CAPTURED  # rows of logits that come to the host without being waited for one by one
KV_DTYPES = {"f16": torch.float16, "f32": torch.float32}


class PagedCache:
    """Keys and values of some layers: per layer [n_pages, n_head_kv, PAGE_SIZE, head_dim or head_dim_v].

    Raises UnsupportedModelError for other types: the attention kernels read halves and floats.
    """

    def __init__(
        self, layers: Iterable[Attention], n_pages: int, kv_type: KVType, device: torch.device
    ) -> None:
        check_cache(kv_type)
        self.layers: dict[int, tuple[Tensor, Tensor]] = {}
        layers = list(layers)
        itemsize = KV_DTYPES[kv_type].itemsize
        widths = sum(op.n_head_kv * (op.head_dim + op.head_dim_v) for op in layers)
        arena = Arena(device, n_pages * PAGE_SIZE * widths * itemsize)
        for op in layers:
            k, v = (
                arena.empty((n_pages, op.n_head_kv, PAGE_SIZE, dim), KV_DTYPES[kv_type]).zero_()
                for dim in (op.head_dim, op.head_dim_v)
            )
            self.layers[op.layer] = k, v

    @property
    def nbytes(self) -> int:
        return sum(k.nbytes + v.nbytes for k, v in self.layers.values())


class Copies:
    """Copies to and from a device that the host does not wait for: it keeps off their memory until `wait`."""

    def __init__(self, device: torch.device) -> None:
        # Elsewhere memory is not pinned, and a copy of it without a wait is no promise (MPS).
        self._device, self._at_once = device, device.type != "cuda"
        self._event = None if self._at_once else torch.cuda.Event()

    def copy(self, to: Tensor, source: Tensor) -> None:
        to.copy_(source, non_blocking=not self._at_once)

    def end(self) -> None:
        """What `wait` waits for is what was copied until now."""
        if self._event is not None:
            self._event.record(torch.cuda.current_stream(self._device))

    def wait(self) -> None:
        """Until the copies are done, and with them all that was on the stream before."""
        if self._event is not None:
            self._event.synchronize()


class StepInputs:
    """The numbers of a batch on the device, and the vectors that enter the stage.

    positions, sequences, outputs: int32 [max_batch]; thresholded: the same, other than 0 where small values
    are zero;
    page_tables: int32 [max_batch, n_pages], a row per sequence of the step. vectors: float32
    [max_batch, width], by the id of the graph's value. copies: of tests.
    """

    def __init__(
        self,
        max_batch: int,
        n_pages: int,
        vectors: dict[int, int],
        device: torch.device,
        copies: Copies | None = None,
    ) -> None:
        self._copies = copies or Copies(device)
        pinned = device.type == "cuda"
        # Numbers and vectors lie one behind the other, so that one copy brings those of a few tokens.
        n_words = 4 * max_batch + max_batch * sum(vectors.values())
        self._words = torch.zeros(n_words, dtype=torch.int32, pin_memory=pinned)
        self._on_device = self._words.to(device, copy=True)
        self._numbers = self._words[: 4 * max_batch].view(4, max_batch).numpy()
        numbers = self._on_device[: 4 * max_batch].view(4, max_batch)
        self.positions, self.sequences, self.outputs, self.thresholded = numbers.unbind(0)
        self.vectors: dict[int, Tensor] = {}
        self._vectors: dict[int, np.ndarray] = {}
        self._begins: dict[int, int] = {}  # of the vectors in the words
        at = 4 * max_batch
        for id, width in vectors.items():
            here, there = (
                words[at : at + max_batch * width].view(torch.float32).view(max_batch, width)
                for words in (self._words, self._on_device)
            )
            self._vectors[id], self.vectors[id], self._begins[id] = here.numpy(), there, at
            at += max_batch * width
        self._tables = torch.full((max_batch, n_pages), -1, dtype=torch.int32, pin_memory=pinned)
        self.page_tables = self._tables.to(device, copy=True)
        self._n_known = 0  # rows of the tables that the device has as they are here

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        return self._on_device.nbytes + self.page_tables.nbytes

    def fill(self, batch: Batch, vectors: dict[int, np.ndarray | Tensor]) -> None:
        """Takes over a batch that was checked (base.cache_slots), and what enters, [n_tokens, width] each.

        A step without outputs ends before the device has begun: its copies may still be under way.
        """
        self._copies.wait()
        try:
            self._fill(batch, vectors)
        finally:
            self._copies.end()

    def _fill(self, batch: Batch, vectors: dict[int, np.ndarray | Tensor]) -> None:
        n = len(batch.tokens)
        numbers, n_outputs = self._numbers, len(batch.outputs)
        numbers[0, :n] = batch.positions
        numbers[2, :n_outputs] = batch.outputs
        numbers[2, n_outputs:] = 0  # a captured step computes the logits of as many rows as tokens
        numbers[3, :n] = 0 if batch.thresholded is None else batch.thresholded
        # Rows of the tables are those of the step: the caller may have more sequences than a step has tokens.
        if n == 1:
            rows = batch.sequences
            numbers[1, 0] = 0
        else:
            begins = np.flatnonzero(np.diff(batch.sequences, prepend=-1))
            rows = batch.sequences[begins]
            numbers[1, :n] = np.repeat(np.arange(len(rows)), np.diff(begins, append=n))
        self._fill_tables(batch, rows)
        end = 4 * numbers.shape[1]  # of the words that are copied together
        for id, values in vectors.items():
            if isinstance(values, np.ndarray):
                self._vectors[id][:n] = values
                begin, stop = self._begins[id], self._begins[id] + values.size
                if begin == end:
                    end = stop
                else:
                    self._copies.copy(self._on_device[begin:stop], self._words[begin:stop])
            else:
                self._copies.copy(self.vectors[id][:n], values)
        self._copies.copy(self._on_device[:end], self._words[:end])

    def _fill_tables(self, batch: Batch, rows: np.ndarray) -> None:
        """The page tables of some sequences, which change once in PAGE_SIZE tokens: they are copied then."""
        width = min(int(batch.positions.max()) // PAGE_SIZE + 1, self._tables.shape[1])
        tables, n = batch.page_tables[rows, :width], len(rows)
        here, known = self._tables.numpy()[:n, :width], self._n_known
        if n <= known and (here == tables).all():
            return
        self._n_known = 0  # until the copy is on its way
        here[:] = tables
        self._copies.copy(self.page_tables[:n], self._tables[:n])
        self._n_known = max(n, known)


class StepOutputs:
    """What a step leaves to the host, in memory to which a device copies without being waited for.

    counts: int64 [n_layer, N_COUNTS]; logits: float32 [OUTPUTS, n_vocab], of the first rows of a step of few;
    largest: float32 [OUTPUTS, n_vocab / LOGIT_GROUP], as StepResult.largest; None where there is none. The
    calls of `take` may be part of a graph.
    """

    def __init__(self, counts: Tensor, n_vocab: int) -> None:
        """counts: of the device. n_vocab: 0 for a stage without logits."""
        self._copies = Copies(counts.device)
        pinned = counts.device.type == "cuda"
        self.counts = torch.zeros_like(counts, device="cpu", pin_memory=pinned)
        self.logits = torch.zeros((OUTPUTS if n_vocab else 0, n_vocab), pin_memory=pinned)
        n_groups = 0 if n_vocab % LOGIT_GROUP else n_vocab // LOGIT_GROUP
        self.largest = torch.zeros((len(self.logits), n_groups), pin_memory=pinned) if n_groups else None

    def take(self, counts: Tensor, logits: Tensor | None, kernels: Kernels) -> None:
        """Counts, and logits [n <= OUTPUTS, n_vocab], of the device."""
        self._copies.copy(self.counts, counts)
        if logits is None:
            return
        n = len(logits)
        self._copies.copy(self.logits[:n], logits)
        if self.largest is not None:
            self._copies.copy(self.largest[:n], kernels.largest(logits))

    def end(self) -> None:
        """What `wait` waits for is what was taken until now."""
        self._copies.end()

    def wait(self) -> None:
        """Until it is here."""
        self._copies.wait()
