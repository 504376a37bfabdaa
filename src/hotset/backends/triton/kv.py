"""The inputs and outputs of a step at fixed addresses: the KV cache, batch numbers, logits and counts.

A captured graph replays with the addresses of its capture. So a step's inputs are always written to the same
tensors, and a step, captured or not, reads nothing else. Its outputs for the host are in fixed tensors too.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor

from hotset.backends.base import BLOCK_SIZE, LOGIT_GROUP, Batch
from hotset.backends.triton.arena import Arena
from hotset.backends.triton.capture import MAX_CAPTURED
from hotset.backends.triton.kernels import Kernels
from hotset.backends.triton.plugin import check_cache
from hotset.load_parameters import KVType
from hotset.model.operations import Attention

OUTPUTS = MAX_CAPTURED  # most rows of logits that are copied to the host without a wait
KV_DTYPES = {"f16": torch.float16, "f32": torch.float32}


class BlockCache:
    """Keys and values of some layers: per layer [n_blocks, n_head_kv, BLOCK_SIZE, head_dim or head_dim_v].

    Raises UnsupportedModelError for a type other than f16 and f32, which the attention kernels cannot read.
    """

    def __init__(
        self, layers: Iterable[Attention], n_blocks: int, kv_type: KVType, device: torch.device
    ) -> None:
        check_cache(kv_type)
        self.layers: dict[int, tuple[Tensor, Tensor]] = {}
        layers = list(layers)
        itemsize = KV_DTYPES[kv_type].itemsize
        widths = sum(op.n_head_kv * (op.head_dim + op.head_dim_v) for op in layers)
        arena = Arena(device, n_blocks * BLOCK_SIZE * widths * itemsize)
        for op in layers:
            k, v = (
                arena.empty((n_blocks, op.n_head_kv, BLOCK_SIZE, dim), KV_DTYPES[kv_type]).zero_()
                for dim in (op.head_dim, op.head_dim_v)
            )
            self.layers[op.layer] = k, v

    @property
    def nbytes(self) -> int:
        return sum(k.nbytes + v.nbytes for k, v in self.layers.values())


class Copies:
    """Asynchronous copies to and from a device. The host must not touch their memory until `wait` returns."""

    def __init__(self, device: torch.device) -> None:
        # Other devices have no pinned memory, and an asynchronous copy of it is not safe (MPS).
        self._device, self._at_once = device, device.type != "cuda"
        self._event = None if self._at_once else torch.cuda.Event()

    def copy(self, to: Tensor, source: Tensor) -> None:
        to.copy_(source, non_blocking=not self._at_once)

    def end(self) -> None:
        """Make `wait` wait for the copies up to now."""
        if self._event is not None:
            self._event.record(torch.cuda.current_stream(self._device))

    def wait(self) -> None:
        """Wait for the copies and for all work that was on the stream before them."""
        if self._event is not None:
            self._event.synchronize()


class StepInputs:
    """The numbers of a batch on the device, and the vectors that enter the stage.

    positions, sequences, outputs: int32 [max_batch]. thresholded: int32 [max_batch], not 0 if small values of
    the token count as zero. block_tables: int32 [max_batch, n_blocks], a row per sequence of the step.
    vectors: float32 [max_batch, width], by the id of the graph's value. copies: for tests.
    """

    def __init__(
        self,
        max_batch: int,
        n_blocks: int,
        vectors: dict[int, int],
        device: torch.device,
        copies: Copies | None = None,
    ) -> None:
        self._copies = copies or Copies(device)
        pinned = device.type == "cuda"
        # Numbers and vectors are adjacent, so that one copy transfers all inputs of a few tokens.
        n_words = 4 * max_batch + max_batch * sum(vectors.values())
        self._words = torch.zeros(n_words, dtype=torch.int32, pin_memory=pinned)
        self._on_device = self._words.to(device, copy=True)
        self._numbers = self._words[: 4 * max_batch].view(4, max_batch).numpy()
        numbers = self._on_device[: 4 * max_batch].view(4, max_batch)
        self.positions, self.sequences, self.outputs, self.thresholded = numbers.unbind(0)
        self.vectors: dict[int, Tensor] = {}
        self._vectors: dict[int, np.ndarray] = {}
        self._begins: dict[int, int] = {}  # first word of the vectors of a value
        at = 4 * max_batch
        for id, width in vectors.items():
            here, there = (
                words[at : at + max_batch * width].view(torch.float32).view(max_batch, width)
                for words in (self._words, self._on_device)
            )
            self._vectors[id], self.vectors[id], self._begins[id] = here.numpy(), there, at
            at += max_batch * width
        self._tables = torch.full((max_batch, n_blocks), -1, dtype=torch.int32, pin_memory=pinned)
        self.block_tables = self._tables.to(device, copy=True)
        self._n_known = 0  # first rows of the tables that are equal here and on the device

    @property
    def nbytes(self) -> int:
        """Return the bytes on the device."""
        return self._on_device.nbytes + self.block_tables.nbytes

    def fill(self, batch: Batch, vectors: dict[int, np.ndarray | Tensor]) -> None:
        """Copy a checked batch (base.cache_slots) and the vectors that enter, [n_tokens, width] each.

        Wait for earlier copies first: a step without outputs returns before the device has done its copies.
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
        # The tables have only the step's sequences: the caller may have more sequences than the step tokens.
        if n == 1:
            rows = batch.sequences
            numbers[1, 0] = 0
        else:
            first, lengths = batch.runs()
            rows = batch.sequences[first]
            numbers[1, :n] = np.repeat(np.arange(len(rows)), lengths)
        self._fill_tables(batch, rows)
        end = 4 * numbers.shape[1]  # end of the words that one copy transfers
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
        """Copy the block tables of some sequences if they changed, as they do once in BLOCK_SIZE tokens."""
        width = min(int(batch.positions.max()) // BLOCK_SIZE + 1, self._tables.shape[1])
        tables, n = batch.block_tables[rows, :width], len(rows)
        here, known = self._tables.numpy()[:n, :width], self._n_known
        if n <= known and (here == tables).all():
            return
        self._n_known = 0  # until the copy is queued, in case of an error
        here[:] = tables
        self._copies.copy(self.block_tables[:n], self._tables[:n])
        self._n_known = max(n, known)


class StepOutputs:
    """The outputs of a step in host memory, to which a device copies asynchronously.

    counts: int64 [n_layer, N_COUNTS]. logits: float32 [OUTPUTS, n_vocab], for steps with up to OUTPUTS rows.
    largest: float32 [OUTPUTS, n_vocab / LOGIT_GROUP], as StepResult.largest, or None. A graph may capture the
    calls of `take`.
    """

    def __init__(self, counts: Tensor, n_vocab: int) -> None:
        """Allocate the host memory. counts: the device's counts. n_vocab: 0 for a stage without logits."""
        self._copies = Copies(counts.device)
        pinned = counts.device.type == "cuda"
        self.counts = torch.zeros_like(counts, device="cpu", pin_memory=pinned)
        self.logits = torch.zeros((OUTPUTS if n_vocab else 0, n_vocab), pin_memory=pinned)
        n_groups = 0 if n_vocab % LOGIT_GROUP else n_vocab // LOGIT_GROUP
        self.largest = torch.zeros((len(self.logits), n_groups), pin_memory=pinned) if n_groups else None

    def take(self, counts: Tensor, logits: Tensor | None, kernels: Kernels) -> None:
        """Copy counts and logits [n <= OUTPUTS, n_vocab] from the device."""
        self._copies.copy(self.counts, counts)
        if logits is None:
            return
        n = len(logits)
        self._copies.copy(self.logits[:n], logits)
        if self.largest is not None:
            self._copies.copy(self.largest[:n], kernels.largest(logits))

    def end(self) -> None:
        """Make `wait` wait for the outputs taken up to now."""
        self._copies.end()

    def wait(self) -> None:
        """Wait until the outputs are in host memory."""
        self._copies.wait()
