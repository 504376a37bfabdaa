"""What a step reads on a device and never moves: the paged cache, and the numbers of the batch.

A captured graph replays with the addresses that it was captured with, so a step's tokens are always written
to the same tensors, and a step, captured or not, reads nothing else.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor

from hotset.backends.base import PAGE_SIZE, Batch
from hotset.backends.gpu.arena import Arena
from hotset.model.cost import KVType, check_gpu_cache
from hotset.model.operations import Attention

KV_DTYPES = {"f16": torch.float16, "f32": torch.float32}


class PagedCache:
    """Keys and values of some layers: per layer [n_pages, n_head_kv, PAGE_SIZE, head_dim or head_dim_v].

    Raises UnsupportedModelError for other types: the attention kernels read halves and floats.
    """

    def __init__(
        self, layers: Iterable[Attention], n_pages: int, kv_type: KVType, device: torch.device
    ) -> None:
        check_gpu_cache(kv_type)
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
        self._numbers = torch.zeros((4, max_batch), dtype=torch.int32, pin_memory=pinned)
        self._tables = torch.full((max_batch, n_pages), -1, dtype=torch.int32, pin_memory=pinned)
        self._vectors = {
            id: torch.zeros((max_batch, width), pin_memory=pinned) for id, width in vectors.items()
        }
        self._on_device = self._numbers.to(device, copy=True)
        self.positions, self.sequences, self.outputs, self.thresholded = self._on_device.unbind(0)
        self.page_tables = self._tables.to(device, copy=True)
        self.vectors = {id: rows.to(device, copy=True) for id, rows in self._vectors.items()}

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        return sum(t.nbytes for t in (self._on_device, self.page_tables, *self.vectors.values()))

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
        # Rows of the tables are those of the step: the caller may have more sequences than a step has tokens.
        rows, own = np.unique(batch.sequences, return_inverse=True)
        width = min(int(batch.positions.max()) // PAGE_SIZE + 1, self._tables.shape[1])
        numbers = self._numbers.numpy()
        numbers[0, :n], numbers[1, :n] = batch.positions, own.reshape(-1)
        numbers[2, : len(batch.outputs)] = batch.outputs
        numbers[3, :n] = 0 if batch.thresholded is None else batch.thresholded
        numbers[2, len(batch.outputs) :] = 0  # a captured step computes the logits of as many rows as tokens
        self._tables.numpy()[: len(rows), :width] = batch.page_tables[rows, :width]
        self._copies.copy(self._on_device, self._numbers)
        self._copies.copy(self.page_tables[: len(rows)], self._tables[: len(rows)])
        for id, values in vectors.items():
            if isinstance(values, np.ndarray):
                self._vectors[id].numpy()[:n] = values
                values = self._vectors[id][:n]
            self._copies.copy(self.vectors[id][:n], values)
